"""What the pages of results/ say is what the committed rows say: intervals, p-values and marks, computed anew.

One claim of each kind; the others are made by the same calls of the templates that test_results.py renders. Tests are
those that results/README.md names; McNemar's and Holm's are the program's own. Rows are read as JSON lines hold them.
"""

from __future__ import annotations

import base64
import functools
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import result_files
from scipy import stats

from fatbench.report.numbers import statistics
from fatbench.report.numbers.statistics import holm

pytestmark = pytest.mark.nightly  # what pages say; their numbers are in test_entries.py
RESULTS = Path(__file__).parent.parent / "results"


def cells(file: str) -> list[dict[str, Any]]:
    return result_files.cells(RESULTS / file)


def page(name: str) -> str:
    return (RESULTS / name).read_text(encoding="utf-8")


def setting(spec: Any, name: str) -> Any:
    """The value of the first setting with this last name, wherever it stands."""
    if isinstance(spec, dict):
        if name in spec:
            return spec[name]
        for value in spec.values():
            if (found := setting(value, name)) is not None:
                return found
    return None


def outcomes(cell: dict[str, Any], metric: str, round: int) -> np.ndarray:
    """One 0 or 1 an image after a round: was it classified right."""
    (stage,) = [s for s in cell["stages"] if s["stage"].startswith(f"{metric}-") and s["stage"].endswith(f"@{round}")]
    chunks = [np.unpackbits(np.frombuffer(base64.b64decode(b), np.uint8))[:n] for _, n, b in stage["outcomes"]]
    return np.concatenate(chunks).astype(float)


def numbers(cell: dict[str, Any], metric: str) -> dict[tuple[int, int], float]:
    """{(round, client): value} of a number logged during training."""
    (stage,) = [s for s in cell["stages"] if s["stage"] == "train"]
    return {(n[0], n[1]): n[3] for n in stage["numbers"] if n[2] == metric}


def show(value: float, digits: int = 1) -> str:
    """Rounded half up, as a table in the pages writes it."""
    text = str(Decimal(repr(round(float(value), 6))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))
    return text.removeprefix("-") if not float(text) else text


def paired(differences: np.ndarray, digits: int = 1) -> tuple[str, float]:
    """("mean (low to high)" in points, p of the t test) over images; the interval is the normal one."""
    points = 100 * differences
    mean, half = points.mean(), 1.96 * points.std(ddof=1) / len(points) ** 0.5
    text = f"{show(mean, digits)} ({show(mean - half, digits)} to {show(mean + half, digits)})"
    return text, float(stats.ttest_1samp(points, 0).pvalue)


def mcnemar(a: np.ndarray, b: np.ndarray) -> float:
    return statistics.mcnemar(int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum()))


def p(value: float) -> str:
    """Two digits that matter, three beside 0.05; 1 from 0.995 on, < 1e-6 at the other end."""
    if value > 0.995:
        return "1"
    text = f"{value:#.2g}" if value >= 1e-6 else "< 1e-6"
    return f"{value:.3g}" if text == "0.050" else text  # two would not say on which side of 0.05 it is


def test_holm_and_paired_on_small_numbers():
    """Three p-values by hand: 0.01 * 3, 0.02 * 2, and 0.03 * 1 lifted to the one before."""
    assert holm([0.02, 0.03, 0.01]) == pytest.approx([0.04, 0.04, 0.03])
    assert paired(np.array([0.01, 0.03])) == ("2.0 (0.0 to 4.0)", pytest.approx(0.295, abs=0.001))
    assert mcnemar(np.array([1, 1, 0, 1]), np.array([0, 0, 0, 1])) == 0.5
    values = {0.996: "1", 0.052: "0.052", 0.0496: "0.0496", 0.02: "0.020", 0.0047: "0.0047", 1e-7: "< 1e-6"}
    assert {value: p(value) for value in values} == values
    both = statistics.over_seeds([0.01, 0.03], 1000)  # 2 points, half(0.95) = 12.706 * 0.01 * (1 + 0.0005 / 0.01414)
    assert both is not None and at_most(both) == "15.2"


def packed(outcomes: list[np.ndarray]) -> list[tuple[int, int]]:
    """ImageOutcomes of each seed as `statistics` takes them."""
    return [(int("".join(map(str, one.astype(int))), 2), len(one)) for one in outcomes]


def crossed(a: list[np.ndarray], b: list[np.ndarray], n: int | None = None) -> statistics.SeedsAndImages:
    """A difference over seeds and n images."""
    both = statistics.seeds_and_images(packed(a), packed(b), n)
    assert both is not None
    return both


def at_most(both: statistics.SeedsAndImages, digits: int = 1) -> str:
    """The larger end of the 95 % interval, in points, rounded up, as it is printed."""
    return f"{np.ceil(round(100 * 10**digits * max(-both.low, both.high), 9)) / 10**digits:.{digits}f}"


def interval(both: statistics.SeedsAndImages) -> str:
    """Its two ends, in points."""
    return f"{show(100 * both.low)} to {show(100 * both.high)}"


def adfl_pairs(of: list[dict[str, Any]], table: str, round: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """One 0 or 1 an image after a round, of AdFL and of FedAvg, for each seed that both have."""
    found: dict[str, dict[int, np.ndarray]] = {"adfl": {}, "uniform": {}}
    for cell in of:
        if cell["spec"]["partition"]["table"] == table:
            aggregator = setting(cell["spec"]["algorithm"], "aggregator")["name"]
            found[aggregator][cell["spec"]["seed"]] = outcomes(cell, "natural", round)
    seeds = sorted(found["adfl"].keys() & found["uniform"].keys())
    return [found["adfl"][seed] for seed in seeds], [found["uniform"][seed] for seed in seeds]


def test_adfl_against_plain_averaging():
    """Pairs of the same seed; over the three tables an image counts with its mean over three networks."""
    text, index = (" ".join(page(name).replace("**", "").split()) for name in ("adfl.md", "README.md"))
    short, settled = (cells(f"adfl-mnist-jpeg-{preset}.jsonl.xz") for preset in ("cpu", "settled"))

    def points(pairs: tuple[list[np.ndarray], list[np.ndarray]], seeds: int) -> tuple[str, statistics.SeedsAndImages]:
        assert len(pairs[0]) == len(pairs[1]) == seeds
        both = crossed(*pairs, 10_000)
        return f"{show(100 * both.mean, 2)} ({show(100 * both.low, 2)} to {show(100 * both.high, 2)})", both

    by_table = {table: adfl_pairs(short, table, 30) for table in ("middle", "low", "high")}
    for table, pairs in by_table.items():
        assert f"| {table} | {points(pairs, 10)[0]} |" in text
    adfl, fedavg = ([np.concatenate(each) for each in zip(*sides, strict=True)]
                    for sides in zip(*by_table.values(), strict=True))  # fmt: skip
    assert f"| mean over table | {points((adfl, fedavg), 10)[0]} |" in text
    said, both = points(adfl_pairs(settled, "middle", 150), 8)
    assert f"| {said} | {at_most(both, 2)} | {p(both.p)} |" in text
    below, near, far = (show(-100 * value, 2) for value in (both.mean, both.high, both.low))
    sentence = f"after 150 rounds AdFL is {below} points below FedAvg: 95 % interval {near} to {far} over"
    assert sentence in text and sentence in index
    assert both.high < 0.015  # what the paper gains with this table
    weights: dict[tuple[int, int], list[float]] = {}  # (seed, round) -> of the five clients
    for cell in settled:
        if setting(cell["spec"]["algorithm"], "aggregator")["name"] == "adfl":
            for (round, _), weight in numbers(cell, "weight").items():
                weights.setdefault((cell["spec"]["seed"], round), []).append(weight)
    apart = [max(five) - min(five) for (_, round), five in weights.items() if round > 100]
    assert len(apart) == 8 * 50 and {len(five) for five in weights.values()} == {5}
    assert f"five weights differ by {show(float(np.mean(apart)), 3)} on average" in text


def test_april_attack_names_every_masked_image():
    """24 of 24 at each rate, by `masked` from one update, as the first sentence of the page says."""
    named = {}
    for cell in cells("april-jpeg75-cpu.jsonl.xz"):
        algorithm = cell["spec"]["algorithm"]
        if algorithm["name"] != "gradient_inversion" or setting(algorithm, "inversion")["name"] != "masked":
            continue
        defence = setting(algorithm, "defence")
        if defence["name"] == "random_binary" and algorithm["observed_rounds"] == 1:
            named[defence["mask_probability"]] = list(numbers(cell, "identification_client").values())
    assert named == {rate: [1.0] * 24 for rate in (0.2, 0.5, 0.8)}


A_BATCH = ("april_opt", "matching", "simulated", "imprint")  # reconstructions of an upload; of the others one
OF_ORACLE = {"patch_ls": 21, "april": 7}


def test_identification_stands_beside_chance() -> None:
    """Each cell that attacks: how many candidates it has, from its settings, and what random guesses would reach. Of a
    client with one image, its first image is any image; of several, old rows do not tell.
    """
    attacking = 0
    for file in sorted(RESULTS.glob("*.jsonl.xz")):
        for cell in result_files.cells(file):
            spec = cell["spec"]
            algorithm, found = spec["algorithm"], numbers(cell, "identification")
            leaked = numbers(cell, "leak_identification")
            if leaked:
                assert set(numbers(cell, "leak_candidates_used").values()) == {1000.0}
                assert {*numbers(cell, "leak_identification_chance").values()} == {1 / 1000}
            if not found:
                continue
            attacking += 1
            assert spec["partition"] == {"name": "iid", "clients": 1}  # which has the images in their order
            batch, inversion = algorithm["batch"], algorithm["inversion"]
            images = algorithm["rounds"] * algorithm["target_clients"] * (algorithm.get("aggregate") or 1) * batch
            candidates = max(images, algorithm["candidates"])
            guesses = batch if inversion["name"] in A_BATCH else OF_ORACLE.get(inversion.get("of"), 1)
            assert numbers(cell, "candidates_used") == dict.fromkeys(found, candidates)
            for name, right in (("identification", batch), ("identified_first", 1)):
                chance = 1 - (1 - right / candidates) ** guesses
                assert numbers(cell, f"{name}_chance") == pytest.approx(dict.fromkeys(found, chance))
            for end in ("", "_ci", "_low", "_high", "_client"):
                first = numbers(cell, f"identified_first{end}")
                assert first == (numbers(cell, f"identification{end}") if batch == 1 else {})
    assert attacking > 200


def test_the_vit_s_has_learned():
    found = {}
    for cell in cells("vit-s-half-jpeg75-cpu.jsonl.xz"):
        right = outcomes(cell, "natural", cell["spec"]["algorithm"]["rounds"])
        found[cell["spec"]["size"]] = (len(right), float(right.mean()))
    assert found == {96: (10_000, 0.398), 224: (10_000, 0.4455)}
    assert "It is right on 44.55 % of 10,000 test images." in " ".join(page("april.md").split())


SFATS = {  # row of the pages -> aggregator
    "FAT": "samples", "SFAT": "sfat", "SFAT (released weights)": "sfat_released", "FAT shrunk": "fedavg_shrink",
    "Re-SFAT": "resfat_up_large",
}  # fmt: skip
ATTACKS = {"natural": "natural", "FGSM": "fgsm", "PGD-20": "pgd20", "CW": "cw", "AutoAttack": "autoattack"}


class Audit(NamedTuple):
    """A table of aggregators on the pages of SFAT: (row, seed) -> cell, and the round after which they are judged."""

    cells: dict[tuple[str, int], dict[str, Any]]
    last: int

    def seeds(self, row: str) -> list[int]:
        return sorted(seed for name, seed in self.cells if name == row)

    def outcomes(self, row: str, attack: str, seeds: list[int] | None = None) -> list[np.ndarray]:
        """Of each seed, one 0 or 1 an image."""
        chosen = self.seeds(row) if seeds is None else seeds
        return [outcomes(self.cells[row, seed], ATTACKS[attack], self.last) for seed in chosen]

    def against_fat(self, row: str, attack: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """ImageOutcomes of a row and of FAT at the seeds that both have."""
        seeds = [seed for seed in self.seeds(row) if ("FAT", seed) in self.cells]
        return self.outcomes(row, attack, seeds), self.outcomes("FAT", attack, seeds)


@functools.cache
def audit(name: str, partition: str) -> Audit:
    """The cells behind a table of the page results/NAME."""
    file, last = {"sfat.md": ("sfat-jpeg75-cpu.jsonl.xz", 20), "sfat-fashion.md": ("sfat-fashion-cpu.jsonl.xz", 10)}[
        name
    ]
    rows = {aggregator: row for row, aggregator in SFATS.items()}
    found = {
        (rows[setting(cell["spec"]["algorithm"], "aggregator")["name"]], cell["spec"]["seed"]): cell
        for cell in cells(file)
        if cell["spec"]["partition"]["name"] == partition
    }
    return Audit(found, last)


class Difference(NamedTuple):
    """A row minus FAT under an attack: points of each seed, and over seeds and images, p uncorrected."""

    each: list[float]
    both: statistics.SeedsAndImages


@functools.cache
def differences_to_fat(name: str, partition: str) -> dict[tuple[str, str], Difference]:
    """(row, attack) -> the difference, of the table of a page."""
    found, compared = audit(name, partition), {}
    for row in [row for row in SFATS if row != "FAT" and found.seeds(row)]:
        for attack in ATTACKS:
            ours, fat = found.against_fat(row, attack)
            each = [100 * float(a.mean() - b.mean()) for a, b in zip(ours, fat, strict=True)]
            compared[row, attack] = Difference(each, crossed(ours, fat))
    return compared


def test_the_same_cells_trained_twice_are_the_same_to_the_last_bit() -> None:
    """Two commits: every number that training logged, but for how long it took."""

    def logged(file: str) -> dict[str, set[tuple[Any, ...]]]:
        trained = {cell["cell"]: s for cell in cells(file) for s in cell["stages"] if s["stage"] == "train"}
        return {id: {tuple(n[:5]) for n in s["numbers"] if n[2] != "seconds"} for id, s in trained.items()}

    earlier, now = logged("sfat-bf16-cpu.jsonl.xz"), logged("sfat-jpeg75-cpu.jsonl.xz")
    assert len(earlier) == 8 and all(numbers <= now[id] for id, numbers in earlier.items())  # today's log has more
    assert f"all {sum(map(len, earlier.values())):,} numbers" in page("sfat.md")


def bounded(file: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Method -> seed -> cell, named as in the suite fat-bounds."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for cell in cells(file):
        model, algorithm = cell["spec"]["model"]["name"], cell["spec"]["algorithm"]
        objectives = {"calfat": "CalFAT", "mixfat": "MixFAT", "standard": "standard training",
                      "trades": "FedTRADES"}  # fmt: skip
        objective = objectives.get(algorithm["local"]["objective"]["name"], "FAT")
        federated = "SFAT" if algorithm.get("aggregator", {}).get("name") == "sfat" else objective
        name = {"centralized": "pooled", "local_only": "local only"}.get(algorithm["name"], federated)
        found.setdefault(name if model == "small_cnn" else model, {})[cell["spec"]["seed"]] = cell
    return found


def test_pilots_of_the_task() -> None:
    text = " ".join(page("bounds.md").split())

    def accuracy(file: str, method: str, attack: str, round: int) -> str:
        return show(100 * outcomes(bounded(f"fat-bounds-{file}.jsonl.xz")[method][0], attack, round).mean())

    pooled, linear = (accuracy("fmnist8", method, "autoattack", 12) for method in ("pooled", "linear"))
    fat = accuracy("fmnist8", "FAT", "autoattack", 12)
    assert f"pooled has {pooled} % under AutoAttack, FAT {fat} %, linear {linear} %." in text
    assert float(pooled) - float(linear) < 15
    long, large = accuracy("fmnist25-long", "linear", "exact", 40), accuracy("fmnist25-large", "linear", "exact", 12)
    assert f"exact {long} % (40 rounds), {large} % (20,000 images)" in text


AGGREGATORS = {"uniform": "mean", "trimmed_mean": "trimmed mean", "multi_krum": "multi-Krum", "bulyan": "Bulyan"}
ADVERSARIES = {"label_flip": "label flip", "sign_flip": "sign flip", "alie": "ALIE", "min_max": "Min-Max",
               "badnets": "backdoor"}  # fmt: skip
SHOWN = {"natural": "natural", "pgd20": "PGD-20"}


def malicious(file: str, objective: str = "at") -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(adversary, aggregator) -> its cells by seed, named as in the suite fat-byzantine."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in sorted(cells(file), key=lambda cell: cell["spec"]["seed"]):
        if cell["spec"]["algorithm"]["local"]["objective"]["name"] != objective:
            continue
        attack = (cell["spec"]["malicious"] or {"attack": {"name": "none"}})["attack"]
        ipm = f"IPM {attack['epsilon']:g}" if attack["name"] == "ipm" else attack["name"]
        aggregator = AGGREGATORS[cell["spec"]["algorithm"]["aggregator"]["name"]]
        found.setdefault((ADVERSARIES.get(ipm, ipm), aggregator), []).append(cell)
    return found


def right(file: str, objective: str = "at") -> dict[tuple[str, str, str], list[np.ndarray]]:
    """(adversary, aggregator, attack) -> outcomes by seed: five seeds of 1,000 images."""
    found = {(*key, attack): [outcomes(cell, attack, 7) for cell in of]
             for key, of in malicious(file, objective).items() for attack in SHOWN}  # fmt: skip
    assert {(len(of), len(each)) for of in found.values() for each in of} == {(5, 1000)}
    return found


def difference(both: statistics.SeedsAndImages) -> str:
    """The cells of a line: points with their interval, and the bound on their size."""
    return f"{show(100 * both.mean)} ({interval(both)}) | {at_most(both)}"


def kept_of(file: str) -> list[bool]:
    """Whether multi-Krum keeps clients 0 and 1, which send IPM 0.5, in each of seven rounds and five seeds."""
    weights = [value for cell in malicious(file)["IPM 0.5", "multi-Krum"]
               for (_, client), value in numbers(cell, "weight").items() if client in (0, 1)]  # fmt: skip
    assert len(weights) == 2 * 7 * 5
    return [weight > 0 for weight in weights]


def test_the_sentences_on_malicious_clients() -> None:
    skewed, even = right("fat-byzantine-skew.jsonl.xz"), right("fat-byzantine-cpu.jsonl.xz")
    text = " ".join(page("byzantine.md").replace("**", "").split())

    def taken(
        of: dict[tuple[str, str, str], list[np.ndarray]], adversary: str, aggregator: str, than: str = "none"
    ) -> Any:
        """What an adversary costs an aggregator under PGD-20."""
        return crossed(of[than, aggregator, "pgd20"], of[adversary, aggregator, "pgd20"])

    krum = taken(skewed, "IPM 0.5", "multi-Krum")
    assert f"from multi-Krum ({interval(krum)}, 95 %)." in text
    first = f"that send IPM 0.5 take {show(100 * krum.mean)} points under PGD-20 from"
    assert first in text
    few = taken(even, "IPM 0.5", "multi-Krum")
    assert f"With IID clients multi-Krum changes by at most {at_most(few)} points (95 %)." in text
    beyond = taken(skewed, "IPM 0.5", "multi-Krum", than="IPM 100")
    assert (
        f"which multi-Krum never keeps, it is {show(100 * beyond.mean)} points above IPM 0.5 ({interval(beyond)};"
        in text
    )
    kept = [
        round(100 * np.mean(kept_of(file))) for file in ("fat-byzantine-skew.jsonl.xz", "fat-byzantine-cpu.jsonl.xz")
    ]
    assert f"senders in {kept[0]} % of rounds under Dirichlet 0.5, in {kept[1]} % with IID clients." in text
    bulyan = crossed(skewed["none", "mean", "natural"], skewed["none", "Bulyan", "natural"])
    assert f"Bulyan is {show(100 * bulyan.mean)} points below the mean in natural accuracy" in text
    assert f"(95 % interval {interval(bulyan)})" in text
    bulyan = crossed(even["none", "mean", "natural"], even["none", "Bulyan", "natural"])
    assert f"With IID clients they differ by at most {at_most(bulyan)} (95 %)." in text
    assert f"IPM 100 takes {show(100 * taken(even, 'IPM 100', 'mean').mean)} points under PGD-20 from the mean" in text
    parts = [(1, "IPM 0.5", "multi-Krum"), (-1, "none", "multi-Krum"), (-1, "IPM 0.5", "mean"), (1, "none", "mean")]
    both = statistics.contrast([(w, packed(skewed[adversary, rule, "pgd20"])) for w, adversary, rule in parts])
    assert both is not None and both.p > 0.05
    assert f"than the mean does: {show(100 * both.mean)} points ({interval(both)}; p" in text
    plain = taken(skewed, "IPM 0.5", "mean")
    assert f"From the mean they take {show(100 * plain.mean)} ({interval(plain)})" in text
    tiny = taken(even, "IPM 0.1", "multi-Krum")
    assert f"from multi-Krum: {show(100 * tiny.mean)} points ({interval(tiny)}; p" in text


def test_the_first_sentences_on_sfat():
    both = differences_to_fat("sfat-fashion.md", "shah")["SFAT", "PGD-20"].both
    text = " ".join(page("sfat-fashion.md").split())
    assert f"differ by at most {at_most(both)} points under PGD-20 (95 %)" in text
    assert f"{show(100 * both.mean)} points, 95 % interval {interval(both)} over seeds and images" in text


def test_quoted_sentences_stand_on_their_pages():
    quoted = re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\) \| (.*?) \|$", page("README.md"), re.MULTILINE)
    assert {name for name, _ in quoted} == {each.name for each in RESULTS.glob("*.md")} - {
        "README.md",
        "byzantine-tables.md",
    }
    for name, sentence in quoted:
        assert sentence in " ".join(page(name).replace("**", "").split()), name
