"""What the pages of results/ say is what the committed rows say: intervals, p-values and marks, computed anew.

One claim of each kind; the others are made by the same calls of the templates that test_results.py renders. Tests are
those that results/README.md names; McNemar's and Holm's are the program's own. Rows are read as JSON lines hold them.
"""

from __future__ import annotations

import base64
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

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


FROM_TRAINED = {"samples": "FedAvg", "proximal": "FedProx", "fedgate": "FedGATE", "scaffold": "SCAFFOLD"}


def from_trained(head: str = "vis") -> dict[tuple[str, str, int], dict[str, Any]]:
    """(aggregator, training, seed) -> cell; the head "vis" is new, "cls" has learned with the rest."""
    found = {}
    for cell in cells("fat-transformers-trained-jpeg75-cpu.jsonl.xz"):
        algorithm = cell["spec"]["algorithm"]
        aggregator = setting(algorithm, "aggregator") or {"name": "samples"}
        name = "proximal" if setting(algorithm, "proximal") else algorithm["name"]
        method = FROM_TRAINED.get(name) or FROM_TRAINED.get(aggregator["name"]) or f"FedWAvg({aggregator['q']:g})"
        training = "NT" if setting(algorithm, "objective")["name"] == "standard" else "AT"
        if setting(cell["spec"]["model"], "head") == head:
            found[method, training, cell["spec"]["seed"]] = cell
    return found


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


def test_april_costs():
    text = page("april.md")
    names = {"gaussian": "Gaussian 0.01", "fixed_position": "fixed position", "pruning": "pruning 0.8",
             "locked_binary": "locked, R = 0.8"}  # fmt: skip
    right = {}
    for cell in cells("april-jpeg75-cpu.jsonl.xz"):
        algorithm = cell["spec"]["algorithm"]
        if algorithm["name"] == "fedsgd" and setting(algorithm, "lr") == 0.001:
            defence = setting(algorithm, "defence")
            mask = f"R = {defence['mask_probability']}" if "mask_probability" in defence else "none"
            shown = names.get(defence["name"]) or mask
            right[shown] = outcomes(cell, "natural", 10)
    none = right.pop("none")
    assert len(right) == 7
    ps = {shown: mcnemar(outcome, none) for shown, outcome in right.items()}
    for (shown, outcome), corrected in zip(right.items(), holm(list(ps.values())), strict=True):
        assert f"| {shown} | {show(100 * outcome.mean())} | {paired(outcome - none)[0]} | {p(corrected)} |" in text


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


def test_what_federation_costs() -> None:
    """Against pooled training, a linear network's exact worst case, and clients alone with seven of thirty seeds."""
    found, text = bounded("fat-bounds-fmnist25.jsonl.xz"), " ".join(page("bounds.md").replace("**", "").split())
    right: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for name, by_seed in found.items():
        for seed, cell in sorted(by_seed.items()):
            for stage in cell["stages"]:
                if stage["status"] == "done" and (attack := stage["stage"].partition("-")[0]) != "train":
                    right.setdefault((name, attack), {})[seed] = outcomes(cell, attack, 12)
    methods = ("pooled", "SFAT", "CalFAT", "MixFAT", "FedTRADES")
    assert all(f"| {name} | {len(right[name, 'natural'])} |" in text for name in found)

    def against(name: str, other: str, attack: str) -> statistics.SeedsAndImages:
        ours, theirs = right[name, attack], right[other, attack]
        seeds = sorted(ours.keys() & theirs.keys())
        assert seeds == [*range(10, 17 if other == "local only" else 40)]
        n = len(ours[seeds[0]])  # local only has each image for five networks
        return crossed([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds], n)

    declared = {(name, attack): against(name, "FAT", attack)
                for name in methods
                for attack in ("natural", "autoattack")}  # fmt: skip
    corrections = dict(zip(declared, holm([both.p for both in declared.values()]), strict=True))
    for ((name, attack), both), corrected in zip(declared.items(), corrections.values(), strict=True):
        heading = {"natural": "natural", "autoattack": "AutoAttack"}[attack]
        assert f"| {name} - FAT | {heading} | {difference(both)} | {p(corrected)} |" in text
    alone = against("FAT", "local only", "autoattack")
    strong = declared["pooled", "autoattack"]
    sfat, calfat, mixfat, trades = (declared[name, "autoattack"] for name in methods[1:])
    below = f"FAT is {show(100 * strong.mean)} points below pooled training under AutoAttack"
    assert f"{below} (95 % interval {interval(strong)}; 30 seeds, 500 images)." in text
    by_seed = [
        {name: {round: value for (round, client), value in numbers(found[name][seed], "monitor").items() if client < 0}
         for name in ("pooled", "FAT")}
        for seed in range(10, 40)
    ]  # fmt: skip
    early, later, last = (
        show(100 * np.mean([monitored["pooled"][round] - monitored["FAT"][round] for monitored in by_seed]))
        for round in (4, 8, 12)
    )
    assert f"the gap was {early}, {later} and {last} points after 4, 8 and 12 rounds." in text
    above = f"{show(100 * alone.mean)} points above clients that train alone under AutoAttack ({interval(alone)})"
    alone_mean, fat_mean, pooled_mean = (
        np.mean([right[name, "autoattack"][seed].mean() for seed in range(10, 17)])
        for name in ("local only", "FAT", "pooled")
    )
    share = (fat_mean - alone_mean) / (pooled_mean - alone_mean)
    low, high = fieller(*(
        np.array([right[name, "autoattack"][seed].mean() - right["local only", "autoattack"][seed].mean()
                  for seed in range(10, 17)])
        for name in ("FAT", "pooled")
    ))  # fmt: skip
    covered = f"{show(100 * share, 0)} % ({show(100 * low, 0)} to {show(100 * high, 0)}) of the way from"
    assert f"On the 7 seeds of local only, FAT is {above}." in text
    assert f"There it covers {covered.removesuffix(' from')} to pooled training;" in text
    front = " ".join(page("../README.md").split())
    assert f"federation costs adversarial training (FAT) {show(100 * strong.mean)} points under AutoAttack" in front
    assert f"under AutoAttack ({interval(strong)}, 30 seeds)." in front
    assert all(both.low > -0.02 and both.high < 0.02 for both in (sfat, mixfat))  # "within the declared margin of 2"
    assert min(corrections[name, "autoattack"] for name in ("CalFAT", "FedTRADES")) > 0.05  # "not shown to differ"
    within, other = ([f"{show(100 * both.mean)} ({interval(both)})" for both in pair]
                     for pair in ((sfat, mixfat), (calfat, trades)))  # fmt: skip
    assert f"within the declared margin of 2 points of FAT, each by itself: {within[0]} and {within[1]}." in text
    wide, narrow = ([both.mean + sign * both.half(1 - 0.05 / 5) for sign in (-1, 1)] for both in (sfat, mixfat))
    assert max(map(abs, narrow)) < 0.02 < max(map(abs, wide))
    ends = [f"({show(100 * low)} to {show(100 * high)})" for low, high in (narrow, wide)]
    assert f"Corrected for five comparisons MixFAT still is {ends[0]}, SFAT is not {ends[1]}." in text
    assert "SFAT, CalFAT, MixFAT and FedTRADES are not shown to differ from FAT" in front
    images = {attack: {len(each) for (_, on), of in right.items() if on == attack for each in of.values()}
              for attack in ("autoattack", "pgd20")}  # fmt: skip
    of_clients = {5 * n for n in (500, 2000)}  # local only has each image for five networks
    assert images["autoattack"] - of_clients == {500} and images["pgd20"] - of_clients == {2000}
    looks = "This is the third look at these comparisons" in text and "radius was chosen by a pilot" in text
    assert looks and "We chose a hard task by a pilot run" in front
    first, second = (p(corrections[name, "autoattack"]) for name in ("CalFAT", "FedTRADES"))
    assert f"not shown to differ from FAT: {other[0]} and {other[1]}, p {first} and {second} after Holm." in text
    each = [100 * float(right["SFAT", "pgd20"][s].mean() - right["FAT", "pgd20"][s].mean()) for s in range(10, 40)]
    sd = float(np.std(each, ddof=1))
    said = re.search(r"a standard deviation of (\S+) points over seeds under PGD-20 \((\S+) to (\S+), 95 %, boot", text)
    assert said is not None and said[1] == show(sd)
    drawn = stats.bootstrap((each,), lambda x, axis: np.std(x, axis=axis, ddof=1), method="percentile", rng=1)
    low, high = drawn.confidence_interval
    assert [float(said[2]), float(said[3])] == pytest.approx([low, high], abs=0.11)
    needed = re.search(r"with power 0.8 from (\d+) seeds on \((\d+) to (\d+)\)", text)
    exact, fewest, most_seeds = map(int, needed.groups())
    assert t_power(2 / sd, exact - 1) < 0.8 <= t_power(2 / sd, exact)
    for drawn_, seeds in ((low, fewest), (high, most_seeds)):
        assert t_power(2 / drawn_, seeds - 2) < 0.8 <= t_power(2 / drawn_, seeds + 2)


def fieller(parts: np.ndarray, wholes: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of mean(parts) / mean(wholes), paired: the ratios r at which mean(parts - r wholes) is not
    significantly other than 0.
    """
    (a, ab), (_, b) = np.cov(parts, wholes) / len(parts)
    most = stats.t.ppf(0.975, len(parts) - 1) ** 2
    x, y = parts.mean(), wholes.mean()
    low, high = sorted(np.roots([y**2 - most * b, -2 * (x * y - most * ab), x**2 - most * a]))
    return float(low), float(high)


def test_most_of_the_variance_of_fat_is_the_split_s() -> None:
    """The parts of the variance from the F statistic of a one-way analysis: ten splits, three trainings of each."""
    text = " ".join(page("bounds.md").split())
    for attack, heading in (("natural", "natural"), ("pgd20", "PGD-20")):
        splits: dict[int, list[float]] = {}
        for cell in cells("fat-variance-fmnist25.jsonl.xz"):
            accuracy = 100 * outcomes(cell, attack, 12).mean()
            splits.setdefault(cell["spec"]["partition"]["split_seed"], []).append(accuracy)
        assert {len(accuracies) for accuracies in splits.values()} == {3} and len(splits) == 10
        f = stats.f_oneway(*splits.values()).statistic
        ratios = f, f / stats.f.ppf(0.975, 9, 20), f / stats.f.ppf(0.025, 9, 20)
        part, low, high = (show(100 * (ratio - 1) / (ratio + 2), 0) for ratio in ratios)
        within = float(np.mean([np.var(accuracies, ddof=1) for accuracies in splits.values()]))
        between = within * (f - 1) / 3
        deviations = f"{show(between**0.5)} | {show(within**0.5)} |"
        assert f"| {heading} | {part} % ({low} to {high}) | {deviations}" in text


def t_power(effect: float, n: int) -> float:
    """Of a two-sided t test at 5 % of n differences whose mean is so many standard deviations."""
    most, shift = stats.t.ppf(0.975, n - 1), effect * n**0.5
    return float(stats.nct.sf(most, n - 1, shift) + stats.nct.cdf(-most, n - 1, shift))


def test_pilots_of_the_task() -> None:
    text = " ".join(page("bounds.md").split())

    def accuracy(file: str, method: str, attack: str, round: int) -> str:
        return show(100 * outcomes(bounded(f"fat-bounds-{file}.jsonl.xz")[method][0], attack, round).mean())

    pooled, linear = (accuracy("fmnist8", method, "autoattack", 12) for method in ("pooled", "linear"))
    fat = accuracy("fmnist8", "FAT", "autoattack", 12)
    assert f"at 8/255 it was {pooled} against {fat} % (one seed)." in text
    assert f"at 8/255 linear has {linear} % under AutoAttack." in text
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
    """Of each kind of sentence one; the page's others come from the same calls of its template."""
    skewed, even = right("fat-byzantine-skew.jsonl.xz"), right("fat-byzantine-cpu.jsonl.xz")
    text = " ".join(page("byzantine.md").replace("**", "").split())
    krum = crossed(skewed["none", "multi-Krum"], skewed["IPM 0.5", "multi-Krum"])
    assert f"from multi-Krum ({interval(krum)}, 95 %)." in text
    assert f"that send IPM 0.5 take {show(100 * krum.mean)} points under PGD-20 from" in text
    few = crossed(even["none", "multi-Krum"], even["IPM 0.5", "multi-Krum"])
    assert f"With IID clients multi-Krum changes by at most {at_most(few)} points (95 %)." in text
    beyond = crossed(skewed["IPM 100", "multi-Krum"], skewed["IPM 0.5", "multi-Krum"])
    above = f"it is {show(100 * beyond.mean)} points above IPM 0.5 ({interval(beyond)};"
    assert f"which multi-Krum never keeps, {above}" in text
    files = ("fat-byzantine-skew.jsonl.xz", "fat-byzantine-cpu.jsonl.xz")
    kept = [round(100 * np.mean(kept_of(file))) for file in files]
    assert f"senders in {kept[0]} % of rounds under Dirichlet 0.5, in {kept[1]} % with IID clients." in text
    parts = [(1, "IPM 0.5", "multi-Krum"), (-1, "none", "multi-Krum"), (-1, "IPM 0.5", "mean"), (1, "none", "mean")]
    both = statistics.contrast([(w, packed(skewed[adversary, rule])) for w, adversary, rule in parts])
    assert both is not None and both.p > 0.05
    assert f"than the mean does: {show(100 * both.mean)} points ({interval(both)}; p" in text


def test_the_first_sentences_on_sfat():
    found: dict[str, dict[int, np.ndarray]] = {}
    for cell in cells("sfat-fashion-cpu.jsonl.xz"):
        if cell["spec"]["partition"]["name"] == "shah":
            aggregator = setting(cell["spec"]["algorithm"], "aggregator")["name"]
            found.setdefault(aggregator, {})[cell["spec"]["seed"]] = outcomes(cell, "pgd20", 10)
    seeds = sorted(found["sfat"].keys() & found["samples"].keys())
    both = crossed(*([found[name][seed] for seed in seeds] for name in ("sfat", "samples")))
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


def test_what_the_page_on_transformers_says_of_weights():
    """FedWAvg(10) under AT: one of five clients has all the weight in round 4 with a new head alone."""
    heaviest = {}
    for head in ("vis", "cls"):
        three = [numbers(from_trained(head)["FedWAvg(10)", "AT", seed], "weight") for seed in (6, 7, 8)]
        heaviest[head] = [max(v for (at, _), v in weights.items() if at == 4) for weights in three]
    assert min(heaviest["vis"]) > 0.995 and max(heaviest["cls"]) < 0.5
    at_q_1 = [
        weight
        for (aggregator, _, _), cell in from_trained().items()
        if aggregator != "FedWAvg(10)"
        for weight in numbers(cell, "fedwavg_weight").values()
    ]
    assert len(at_q_1) == 5 * 2 * 3 * 20 * 5 and min(at_q_1) > 0.165 and max(at_q_1) < 0.235
