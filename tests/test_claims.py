"""What the pages of results/ say is what the committed rows say: intervals, p-values and marks, computed anew.

The tests are those that results/README.md names; McNemar's and Holm's are the program's own. Rows are read as the JSON
lines hold them.
"""

from __future__ import annotations

import base64
import csv
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable
from decimal import ROUND_HALF_UP, ROUND_UP, Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from scipy import stats

from fatbench.report.numbers import statistics
from fatbench.report.numbers.statistics import holm

RESULTS = Path(__file__).parent.parent / "results"
SUITES = RESULTS.parent / "suites"


def cells(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / file).read_text(encoding="utf-8").splitlines()[1:]]


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


def percents(found: Iterable[dict[str, Any]], metric: str, round: int) -> list[float]:
    """The accuracy of each cell after a round, in per cent."""
    return [100 * float(outcomes(cell, metric, round).mean()) for cell in found]


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
    """1, two digits, three from 0.045 to 0.055, the first digit that is not zero from 0.001 on, or < 0.001."""
    if value > 0.995:
        return "1"
    if 0.045 <= value < 0.055:  # two would not say on which side of 0.05 it is
        return show(value, 3)
    if value >= 0.0095:
        return show(value, 2)
    return show(value, 3) if value >= 0.001 else "< 0.001"


def after_holm(tests: dict[Any, tuple[str, float]]) -> dict[Any, tuple[str, float]]:
    """The same, each p after Holm's correction over all of them."""
    corrected = holm([value for _, value in tests.values()])
    return {which: (shown, q) for (which, (shown, _)), q in zip(tests.items(), corrected, strict=True)}


def test_holm_and_paired_on_small_numbers():
    """Three p-values by hand: 0.01 * 3, 0.02 * 2, and 0.03 * 1 lifted to the one before."""
    assert holm([0.02, 0.03, 0.01]) == pytest.approx([0.04, 0.04, 0.03])
    assert paired(np.array([0.01, 0.03])) == ("2.0 (0.0 to 4.0)", pytest.approx(0.295, abs=0.001))
    assert mcnemar(np.array([1, 1, 0, 1]), np.array([0, 0, 0, 1])) == 0.5
    values = {0.996: "1", 0.052: "0.052", 0.0475: "0.048", 0.02: "0.02", 0.004: "0.004", 0.0001: "< 0.001"}
    assert {value: p(value) for value in values} == values
    both = statistics.over_seeds([0.01, 0.03], 1000)  # 2 points, half(0.90) = 6.3138 * 0.01 * (1 + 0.0005 / 0.01414)
    assert both is not None and at_most(both) == "8.6"


FROM_TRAINED = {"samples": "FedAvg", "proximal": "FedProx", "fedgate": "FedGATE", "scaffold": "SCAFFOLD"}
AGGREGATORS = (*FROM_TRAINED.values(), "FedWAvg(1)", "FedWAvg(10)")


def from_trained(head: str = "vis") -> dict[tuple[str, str, int], dict[str, Any]]:
    """(aggregator, training, seed) -> cell; the head "vis" is new, "cls" has learned with the rest."""
    found = {}
    for cell in cells("fat-transformers-trained-jpeg75-cpu.jsonl"):
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


def over_both(a: list[np.ndarray], b: list[np.ndarray], n: int | None = None) -> tuple[str, float]:
    """("mean (low to high)" in points, p) of a difference over seeds and n images; of several models their mean."""
    both = crossed(a, b, n)
    return f"{show(100 * both.mean)} ({interval(both)})", both.p


def crossed(a: list[np.ndarray], b: list[np.ndarray], n: int | None = None) -> statistics.SeedsAndImages:
    """A difference over seeds and n images."""
    both = statistics.seeds_and_images(packed(a), packed(b), n)
    assert both is not None
    return both


def at_most(both: statistics.SeedsAndImages) -> str:
    """The bound in points that the true |difference| is below with 95 % confidence, rounded up."""
    return str(Decimal(repr(round(100 * both.at_most, 6))).quantize(Decimal("0.1"), ROUND_UP))


def over_chance(cell: dict[str, Any], metric: str, round: int, chance: float | None = None) -> float:
    """One-sided binomial p of right images against their most frequent class, by default as the rows hold it."""
    (stage,) = [s for s in cell["stages"] if s["stage"].startswith(f"{metric}-") and s["stage"].endswith(f"@{round}")]
    if chance is None:
        (chance,) = [n[3] for n in stage["numbers"] if n[2] == "chance"]
    right = outcomes(cell, metric, round)
    return statistics.binomial_tail(int(right.sum()), len(right), chance)


def interval(both: statistics.SeedsAndImages) -> str:
    """Its two ends, in points."""
    return f"{show(100 * both.low)} to {show(100 * both.high)}"


COMPARED = [m for m in AGGREGATORS if m not in ("FedAvg", "SCAFFOLD")]  # with FedGATE, SCAFFOLD counts once


def test_transformers_from_trained_weights():
    text = " ".join(page("fat-transformers.md").split())
    found = from_trained()
    right = {m: [outcomes(found[m, "NT", s], "natural", 20) for s in (6, 7, 8)] for m in AGGREGATORS}
    for method in AGGREGATORS:
        shown = over_both(right[method], right["FedAvg"])[0] if method in COMPARED else ""
        row = f"| {method} | {', '.join(show(100 * one.mean()) for one in right[method])} | {shown} |".replace(
            "|  |", "| |"
        )
        assert row in text, row
    spans = [np.ptp([one.mean() for one in each]) for each in right.values()]
    assert f"by up to {show(100 * max(spans), 0)} points" in text
    (chance,) = {value for cell in found.values() for at, value in chances(cell).items() if at.startswith("natural-")}
    assert chance == 0.1
    assert all(stats.binomtest(int(one.sum()), len(one), chance, alternative="greater").pvalue < 0.001
               for each in right.values() for one in each)  # fmt: skip


def chances(cell: dict[str, Any]) -> dict[str, float]:
    """Stage -> the fraction of the most frequent class among its images."""
    return {s["stage"]: n[3] for s in cell["stages"] for n in s.get("numbers", []) if n[2] == "chance"}


AT_IMAGES = {"natural": 10_000, "pgd7": 2000, "autoattack": 500}


def adversarial_lines(head: str, corrected: bool) -> tuple[list[str], dict[tuple[str, str], tuple[str, float]]]:
    """The tables of AT; each minus FedAvg, clean and under AutoAttack, if corrected with p after Holm over eight."""
    found, methods = from_trained(head), AGGREGATORS
    right = {(m, a): [outcomes(found[m, "AT", s], a, 20) for s in (6, 7, 8)] for m in methods for a in AT_IMAGES}
    assert all({len(one) for one in each} == {AT_IMAGES[attack]} for (_, attack), each in right.items())
    compared = ("natural", "autoattack")
    tests = after_holm({(m, a): over_both(right[m, a], right["FedAvg", a]) for m in COMPARED for a in compared})
    lines = []
    for m in methods:
        each = [", ".join(show(100 * one.mean()) for one in right[m, attack]) for attack in AT_IMAGES]
        lines.append(f"| {m} | {' | '.join(each)} |")
    for m in COMPARED:
        both = [tests[m, attack] for attack in compared]
        lines.append(f"| {m} | {' | '.join(f'{shown} | {p(q)}' if corrected else shown for shown, q in both)} |")
    return lines, tests


def under_autoattack(head: str) -> dict[str, list[float]]:
    """Aggregator -> per cent under AutoAttack at each seed."""
    found = from_trained(head)
    return {m: percents([found[m, "AT", s] for s in (6, 7, 8)], "autoattack", 20) for m in AGGREGATORS}


def test_transformers_trained_adversarially_from_trained_weights():
    text = page("fat-transformers.md")
    lines, tests = adversarial_lines("vis", corrected=True)
    for line in lines:
        assert line in text, line
    assert len(tests) == 8
    low, high = tests["FedWAvg(1)", "autoattack"][0].rstrip(")").split(" (")[1].split(" to ")
    text = " ".join(text.split())
    assert f"at most {high} points above FedAvg and at most {low[1:]} below it (95 %)" in text
    assert f"after Holm no p is below {p(min(q for _, q in tests.values()))}" in text
    shown, q = tests["FedGATE", "autoattack"]
    assert (shown, p(q)) == ("-6.1 (-11.0 to -1.1)", "0.27")
    under = under_autoattack("vis")
    for m in ("FedGATE", "SCAFFOLD"):
        assert all(x < y for x, y in zip(under[m], under["FedAvg"], strict=True))
    assert min(under, key=lambda m: under[m][0]) == max(under, key=lambda m: under[m][1]) == "FedWAvg(10)"


def test_transformers_trained_adversarially_with_a_trained_head():
    text = page("fat-transformers.md")
    lines, tests = adversarial_lines("cls", corrected=False)
    for line in lines:
        assert line in text, line
    found = from_trained("cls")
    clean = {key: float(outcomes(cell, "natural", 20).mean()) for key, cell in found.items()}
    assert all(clean["FedWAvg(1)", "AT", seed] < clean["FedAvg", "AT", seed] for seed in (6, 7, 8))
    assert len(clean) == 18 and min(clean.values()) > 0.2
    mean, interval = tests["FedWAvg(1)", "autoattack"][0].rstrip(")").split(" (")
    assert f"With a head that has learned it is {mean} points ({interval})" in " ".join(text.split())
    under = under_autoattack("cls")
    for m in ("FedGATE", "SCAFFOLD"):
        assert [x < y for x, y in zip(under[m], under["FedAvg"], strict=True)] == [True, False, True]


def test_fedgate_and_scaffold_are_one_algorithm_here_and_two_columns_there():
    text = " ".join(page("fat-transformers.md").split())
    found, differ, of = from_trained(), {"NT": 0, "AT": 0}, {"NT": 0, "AT": 0}
    for training, attacks in (("NT", ["natural"]), ("AT", list(AT_IMAGES))):
        for a, s in itertools.product(attacks, (6, 7, 8)):
            one, other = (outcomes(found[m, training, s], a, 20) for m in ("FedGATE", "SCAFFOLD"))
            differ[training] += int((one != other).sum())
            of[training] += len(one)
    assert f"Of {of['AT']:,} stored outcomes under AT, {differ['AT']} differ" in text
    assert f"of {of['NT']:,} clean ones under NT, {differ['NT']}" in text
    with (SUITES / "published" / "fat-transformers-t3.csv").open() as file:
        table = {(row["head"], row["aggregator"]): row for row in csv.DictReader(file) if row["model"] == "ViT-S/16"}
    apart = [
        abs(float(table[head, "FedGATE"][column]) - float(table[head, "SCAFFOLD"][column]))
        for head in ("CLS", "VIS", "CLS+VIS")
        for column in ("nt_acc", "at_acc", "at_robust_acc")
    ]
    assert f"differ by up to {show(max(apart))} points for ViT-S/16" in text
    lost = [
        float(table["VIS", "FedAvg"]["at_robust_acc"]) - float(table["VIS", m]["at_robust_acc"])
        for m in ("FedGATE", "SCAFFOLD")
    ]
    assert f"ViT-S/16 with VIS loses {show(lost[0])} and {show(lost[1])} points" in text
    assert all(float(table[head, m]["at_robust_acc"]) < float(table[head, "FedAvg"]["at_robust_acc"])
               for head in ("CLS", "VIS", "CLS+VIS") for m in ("FedGATE", "SCAFFOLD"))  # fmt: skip
    right = {m: [outcomes(found[m, "AT", s], "pgd7", 20) for s in (6, 7, 8)] for m in ("FedGATE", "FedAvg")}
    shown, value = over_both(right["FedGATE"], right["FedAvg"])
    mean, low, high = (show(-v) for v in map(float, re.findall(r"-?[\d.]+", shown)))
    assert f"under PGD-7 by {mean} points ({high} to {low} over seeds and images; p {p(value)}, not corrected)" in text


def test_one_client_under_fedwavg():
    """The weight of the heaviest client under FedWAvg(10): over all rounds, in the last, and in round 4 of AT."""
    text = " ".join(page("fat-transformers.md").split())
    for head, training, shown in (("vis", "NT", "new, NT"), ("vis", "AT", "new, AT"), ("cls", "AT", "trained, AT")):
        three = [from_trained(head)["FedWAvg(10)", training, seed] for seed in (6, 7, 8)]
        heaviest = []
        for cell in three:
            weights = numbers(cell, "weight")
            heaviest.append([max(v for (at, _), v in weights.items() if at == r) for r in range(1, 21)])
        columns = [[show(v) for v in percents(three, "natural", 20)], [show(max(w), 2) for w in heaviest]]
        columns.append([show(w[-1], 2) for w in heaviest])
        row = f"| {shown} | {' | '.join(', '.join(column) for column in columns)} |"
        assert row in text, row
        if (head, training) == ("vis", "AT"):
            assert {show(w[3], 2) for w in heaviest} == {"1.00"}
            assert f"At seed 6 {columns[0][0]} % of 10,000 images are right, where guessing has 10 %" in text
            right = int(outcomes(three[0], "natural", 20).sum())
            assert stats.binomtest(right, 10_000, 0.1, alternative="greater").pvalue < 0.001
    at_q_1 = [
        weight
        for (aggregator, _, _), cell in from_trained().items()
        if aggregator != "FedWAvg(10)"
        for weight in numbers(cell, "fedwavg_weight").values()
    ]
    assert len(at_q_1) == 5 * 2 * 3 * 20 * 5
    assert f"every client between {show(min(at_q_1), 2)} and {show(max(at_q_1), 2)} in every round" in text


@functools.cache
def adfl() -> dict[tuple[str, bool, int], dict[str, Any]]:
    """(label table, is it AdFL, seed) -> cell."""
    return {
        (
            cell["spec"]["partition"]["table"],
            setting(cell["spec"]["algorithm"], "aggregator")["name"] == "adfl",
            cell["spec"]["seed"],
        ): cell
        for cell in cells("adfl-mnist-jpeg-cpu.jsonl")
    }


ADFL_SEEDS = range(10)


def adfl_differences(of: Callable[[dict[str, Any]], Any]) -> dict[str, np.ndarray]:
    """Label table -> AdFL - FedAvg of a percentage, a row for each seed."""
    found = adfl()
    return {
        table: 100 * np.array([of(found[table, True, s]) - of(found[table, False, s]) for s in ADFL_SEEDS])
        for table in ("middle", "low", "high")
    }


@functools.cache
def adfl_tests() -> dict[str, tuple[statistics.SeedsAndImages, float]]:
    """Label table or "mean" of the three -> AdFL - FedAvg over seeds and images, p after Holm over the four."""

    def right(table: str, is_adfl: bool) -> list[tuple[int, int]]:
        return packed([outcomes(adfl()[table, is_adfl, s], "natural", 30) for s in ADFL_SEEDS])

    tables = ("middle", "low", "high")
    tested = {table: statistics.contrast([(1, right(table, True)), (-1, right(table, False))]) for table in tables}
    tested["mean"] = statistics.contrast([(sign / 3, right(table, sign > 0)) for table in tables for sign in (1, -1)])
    known = {name: test for name, test in tested.items() if test is not None}
    assert len(known) == 4
    corrected = holm([test.p for test in known.values()])
    return {name: (test, value) for (name, test), value in zip(known.items(), corrected, strict=True)}


def adfl_lines() -> list[str]:
    """The rows of the page: both means, their difference over seeds and images, p after Holm over the four."""
    found, lines = adfl(), []
    for name, (test, value) in adfl_tests().items():
        shown = []
        for aggregator in (False, True):
            tables = ("middle", "low", "high") if name == "mean" else (name,)
            values = [
                100 * np.mean([outcomes(found[table, aggregator, s], "natural", 30).mean() for table in tables])
                for s in ADFL_SEEDS
            ]
            shown.append(f"{show(np.mean(values))} ±{show(np.std(values, ddof=1))}")
        points = f"{show(100 * test.mean, 2)} ({show(100 * test.low, 2)} to {show(100 * test.high, 2)})"
        lines.append(f"| {name} | {' | '.join(shown)} | {points} | {p(value)} |")
    return lines


def test_adfl_differences():
    text = page("adfl.md")
    for line in adfl_lines():
        assert line in text
    text = " ".join(text.split())
    differences = adfl_differences(lambda cell: outcomes(cell, "natural", 30).mean())
    test, value = adfl_tests()["mean"]
    assert f"AdFL is {show(-100 * test.mean, 2)} points below plain averaging" in text
    assert f"95 % interval {show(-100 * test.high, 2)} to {show(-100 * test.low, 2)} over seeds and images" in text
    assert f"p {p(value)} after Holm" in text
    assert f"ends {show(-100 * max(one.high for one, _ in adfl_tests().values()), 1)} points below zero" in text
    last = adfl_differences(lambda cell: np.mean([numbers(cell, "natural")[r, -1] for r in (20, 25, 30)]))
    for pairs, words in ((differences, "in {} of thirty pairs"), (last, "again {} of thirty pairs")):
        assert words.format(int(sum((each < 0).sum() for each in pairs.values()))) in text


def test_what_adfl_does_to_classes():
    text = " ".join(page("adfl.md").split())
    by_class = adfl_differences(lambda cell: np.array([numbers(cell, "natural_class")[30, k] for k in range(10)]))
    held, means, ps = [], [], []
    for table, differences in by_class.items():
        clients = [[*numbers(adfl()[table, True, s], "label_clients").items()] for s in ADFL_SEEDS]
        held += list(
            np.mean([[value for (_, k), value in sorted(each, key=lambda one: one[0][1])] for each in clients], 0)
        )
        means += list(differences.mean(0))
        ps += [float(stats.ttest_1samp(differences[:, k], 0).pvalue) for k in range(10)]
        assert (differences.mean(0) <= differences.std(0, ddof=1)).all()  # no class gains more than the spread
    order = stats.spearmanr(held, means)
    assert f"Spearman {show(order.statistic, 2)} over 30 pairs" in text.replace("\n", " ").replace("  ", " ")
    assert order.pvalue < 1e-10 and "Its p is below 1e-10" in " ".join(text.split())
    worst = ps.index(min(ps))
    told = f"class {worst % 10} in the table {list(by_class)[worst // 10]}, {show(means[worst])} points, p {p(min(ps))}"
    assert f"{told} over seeds" in text
    aggregators = [cell for (_, is_adfl, _), cell in adfl().items() if is_adfl]
    hit = np.mean([value for cell in aggregators for value in numbers(cell, "adfl_hit").values()])
    assert f"classifies {show(100 * hit, 0)} % of the images" in text
    weights = [value for cell in aggregators for value in numbers(cell, "weight").values()]
    assert f"between {show(min(weights), 2)} and {show(max(weights), 2)}" in text


def begun() -> dict[tuple[str, str, int], dict[str, Any]]:
    """(start, method, seed) -> the cell that began with these weights."""
    methods = {"fedavg": "FedAvg", "fedaux": "FedAUX"}
    found = {}
    for cell in cells("fedaux-imagenet-jpeg75-cpu.jsonl"):
        spec = cell["spec"]
        start = "ImageNet" if spec["model"]["weights"] else "random"
        found[start, methods[spec["algorithm"]["name"]], spec["seed"]] = cell
    return found


BETWEEN_STARTS = {  # what the page compares
    "FedAUX - FedAvg, from ImageNet": (("ImageNet", "FedAUX"), ("ImageNet", "FedAvg")),
    "FedAUX - FedAvg, from random": (("random", "FedAUX"), ("random", "FedAvg")),
    "ImageNet - random, FedAvg": (("ImageNet", "FedAvg"), ("random", "FedAvg")),
    "ImageNet - random, FedAUX": (("ImageNet", "FedAUX"), ("random", "FedAUX")),
}


def started_lines() -> tuple[list[str], dict[str, tuple[str, float]]]:
    """The rows of the page's tables; {comparison: (its interval over seeds and images, p after Holm)}."""
    found, lines = begun(), []
    for row in dict.fromkeys((start, method) for start, method, _ in found):
        of = {
            metric: percents((found[*row, seed] for seed in range(3)), metric, 16)
            for metric in ("natural", "fgsm", "pgd20", "cw", "autoattack")
        }
        each = of.pop("natural")
        under = " | ".join(show(float(np.mean(values))) for values in of.values())
        lines.append(f"| {' | '.join(row)} | {', '.join(map(show, each))} | {under} |")

    def right(row: tuple[str, str]) -> list[np.ndarray]:
        return [outcomes(found[*row, seed], "natural", 16) for seed in range(3)]

    tests = after_holm({name: over_both(right(a), right(b)) for name, (a, b) in BETWEEN_STARTS.items()})
    bounds = {name: at_most(crossed(right(a), right(b))) for name, (a, b) in BETWEEN_STARTS.items()}
    lines += [f"| {name} | {shown} | {bounds[name]} | {p(q)} |" for name, (shown, q) in tests.items()]
    return lines, tests


def test_fedaux_from_imagenet():
    text = page("fedaux.md")
    lines, tests = started_lines()
    for line in lines:
        assert line in text, line
    shown, q = tests["FedAUX - FedAvg, from ImageNet"]
    mean, low, high = re.findall(r"-?\d+\.\d", shown)
    text = " ".join(text.split())
    low, mean, high = (value.removeprefix("-") for value in (high, mean, low))
    assert (
        f"FedAUX is {mean} points below FedAvg: 95 % interval {low} to {high} over seeds and images (three seeds"
        in text
    )
    assert f"p is {p(q)} after Holm's correction over four comparisons" in text and len(tests) == 4
    of = [tests[f"ImageNet - random, {method}"][0].replace(" (", " points (", method == "FedAvg")
          for method in ("FedAvg", "FedAUX")]  # fmt: skip
    assert f"give FedAvg {of[0]} and FedAUX {of[1]}." in text
    assert max(over_chance(cell, "natural", 16) for cell in begun().values()) < 0.001
    assert "All twelve networks are above chance in natural accuracy (p < 0.001" in text
    right = {key: outcomes(cell, "natural", 16).mean() for key, cell in begun().items()}
    assert all(right["ImageNet", "FedAUX", seed] < right["ImageNet", "FedAvg", seed] for seed in range(3))


RIVALS = ("FedAUX (ViT)", "FedAvg (ViT)", "FedGKT (CNN)", "FedAUX (CNN)", "FedAvg (CNN)")


def distilled(file: str, objective: str = "standard") -> dict[tuple[str, float, int], dict[str, Any]]:
    """(method, p of the partition, seed) -> the cell that was trained with this objective."""
    names = {"whole_vit": "ViT", "whole_resnet": "CNN", "edge_vit": "ViT", "edge_resnet": "CNN"}
    algorithms = {"fedvkd": "FedVKD", "fedaux": "FedAUX", "fedavg": "FedAvg", "fedgkt": "FedGKT"}
    found = {}
    for cell in cells(file):
        spec = cell["spec"]
        if setting(spec["algorithm"], "objective")["name"] == objective:
            method = f"{algorithms[spec['algorithm']['name']]} ({names[spec['model']['name']]})"
            found[method, spec["partition"]["p"], spec["seed"]] = cell
    return found


def against_fedvkd(metric: str, n: int) -> dict[str, tuple[str, float]]:
    """Each rival minus FedVKD over three seeds and n images: ("mean (low to high)" in points, p after Holm)."""
    found = distilled("fedvkd-cifar10-jpeg75-p02-cpu.jsonl")

    def of(method: str) -> list[np.ndarray]:
        return [outcomes(found[method, 0.2, seed], metric, 10) for seed in range(3)]

    return after_holm({rival: over_both(of(rival), of("FedVKD (ViT)"), n) for rival in RIVALS})


def distilled_lines() -> list[str]:
    """The rows of the page's two tables of three seeds."""
    found = distilled("fedvkd-cifar10-jpeg75-p02-cpu.jsonl")
    tests, lines, robust = against_fedvkd("natural", 10_000), [], []
    for method in ("FedVKD (ViT)", *RIVALS):
        of = {
            metric: percents((found[method, 0.2, seed] for seed in range(3)), metric, 10)
            for metric in ("natural", "fgsm", "pgd20", "cw", "autoattack")
        }
        shown, value = tests.get(method, ("", None))
        end = f" {shown} | {p(value)} |" if value is not None else " | |"
        lines.append(f"| {method} | {', '.join(show(one) for one in of.pop('natural'))} |{end}")
        robust.append(f"| {method} | {' | '.join(show(float(np.mean(each))) for each in of.values())} |")
    return [*lines, *robust]


def test_fedvkd_at_three_seeds():
    text = page("fedvkd.md")
    for line in distilled_lines():
        assert line in text, line
    text = " ".join(text.split())
    shown, value = against_fedvkd("natural", 10_000)["FedGKT (CNN)"]
    low, high = shown.rstrip(")").split(" (")[1].split(" to ")
    assert f"FedGKT is {low} to {high} points above FedVKD (95 %, 10,000 images; p {p(value)} after Holm)" in text
    assert min(q for _, q in against_fedvkd("natural", 10_000).values()) == value > 0.05
    fgsm = against_fedvkd("fgsm", 500)
    (a, of_a), (b, of_b) = (fgsm[f"{method} (ViT)"][0].split(" (", 1) for method in ("FedAUX", "FedAvg"))
    assert f"{a} points below FedAUX (ViT) under FGSM ({of_a} and {b} below FedAvg (ViT) ({of_b}." in text


WHOLE = tuple(rival for rival in RIVALS if rival != "FedGKT (CNN)")  # rivals that train whole networks


def adversarially_distilled_lines() -> tuple[list[str], dict[tuple[str, str], tuple[str, float]]]:
    """The tables of adversarial training; whole networks minus edge and server under PGD-20, Holm over eight."""
    found, images = distilled("fedvkd-cifar10-jpeg75-p02-cpu.jsonl", "at"), {"natural": 10_000, "pgd20": 500}
    assert set(found) == {(method, 0.2, seed) for method in ("FedVKD (ViT)", *RIVALS) for seed in range(3)}
    lines = []
    for method in ("FedVKD (ViT)", *RIVALS):
        three = [found[method, 0.2, seed] for seed in range(3)]
        each = [", ".join(show(one) for one in percents(three, attack, 10)) for attack in images]
        means = [show(float(np.mean(percents(three, attack, 10)))) for attack in ("fgsm", "cw", "autoattack")]
        lines.append(f"| {method} | {' | '.join([*each, *means])} |")

    def under(method: str) -> list[np.ndarray]:
        return [outcomes(found[method, 0.2, seed], "pgd20", 10) for seed in range(3)]

    pairs = [(rival, pair) for pair in ("FedVKD (ViT)", "FedGKT (CNN)") for rival in WHOLE]
    tests = after_holm({(rival, pair): over_both(under(rival), under(pair), 500) for rival, pair in pairs})
    lines += [f"| {rival} - {pair} | {shown} | {show(q, 3)} |" for (rival, pair), (shown, q) in tests.items()]
    return lines, tests


MOST_FREQUENT = 61 / 500  # the largest class among the first 500 test images of CIFAR-10, from their labels


def test_fedvkd_trained_adversarially():
    text = page("fedvkd.md")
    lines, tests = adversarially_distilled_lines()
    for line in lines:
        assert line in text, line
    text = " ".join(text.split())
    means = [float(shown.split(" (")[0]) for shown, _ in tests.values()]
    assert f"are {min(means)} to {max(means)} points above them under PGD-20" in text
    lowest = min(float(shown.split(" (")[1].split(" to ")[0]) for shown, _ in tests.values())
    assert f"The intervals exclude differences below {lowest} points" in text
    assert [which for which, (_, q) in tests.items() if q >= 0.05] == [
        (f"{method} (CNN)", "FedVKD (ViT)") for method in ("FedAUX", "FedAvg")
    ]
    trained = {
        objective: distilled("fedvkd-cifar10-jpeg75-p02-cpu.jsonl", objective) for objective in ("at", "standard")
    }
    above = {
        (method, seed): stats.binomtest(
            int(outcomes(trained["at"][method, 0.2, seed], "pgd20", 10).sum()),
            500,
            MOST_FREQUENT,
            alternative="greater",
        ).pvalue
        for method in WHOLE
        for seed in range(3)
    }
    at_chance = {which: show(value, 3) for which, value in above.items() if value > 0.001}
    assert at_chance == {("FedAUX (CNN)", 2): "0.026", ("FedAvg (CNN)", 2): "0.047"}
    assert "At seed 2 the two CNNs are not (p 0.026 and 0.047, twelve checks)" in text
    changes = []
    for method in ("FedVKD (ViT)", "FedGKT (CNN)"):
        of = [[outcomes(found[method, 0.2, seed], "natural", 10) for seed in range(3)] for found in trained.values()]
        changes.append(over_both(*of, 10_000)[0])
    assert f"changes by {changes[0].replace(' (', ' points (')} and {changes[1]}." in text


def test_april_shares_and_costs():
    text = page("april.md")
    for hits, n in ((100, 100), (97, 100), (96, 100), (93, 100), (5, 100), (1, 100), (0, 100), (5, 12), (0, 12),
                    (24, 24), (22, 24), (21, 24), (20, 24), (10, 24), (9, 24), (7, 24), (1, 24), (0, 24)):  # fmt: skip
        low, high = stats.binomtest(hits, n).proportion_ci(method="wilson")
        interval = f"{show(100 * low, 0)} to {show(100 * high, 0)} %"
        shown = f"| {hits} of {n} | {interval} |", f"| {hits} of {n} ({show(100 * hits / n, 0)} %) | {interval} |"
        assert any(row in text for row in shown), shown
    names = {"gaussian": "Gaussian 0.01", "fixed_position": "fixed position", "pruning": "pruning 0.8",
             "locked_binary": "locked, R = 0.8"}  # fmt: skip
    right = {}
    for cell in cells("april-jpeg75-cpu.jsonl"):
        algorithm = cell["spec"]["algorithm"]
        if algorithm["name"] == "fedsgd" and setting(algorithm, "lr") == 0.001:
            defence = setting(algorithm, "defence")
            shown = names.get(defence["name"]) or (
                f"R = {defence['mask_probability']}" if "mask_probability" in defence else "none"
            )
            right[shown] = outcomes(cell, "natural", 10)
    none = right.pop("none")
    assert len(right) == 7
    ps = {shown: mcnemar(outcome, none) for shown, outcome in right.items()}
    for (shown, outcome), corrected in zip(right.items(), holm(list(ps.values())), strict=True):
        assert f"| {shown} | {paired(outcome - none)[0]} | {p(ps[shown])} | {p(corrected)} |" in text


def test_april_attack_names_every_masked_image():
    """24 of 24 at each rate, by `masked` from one update, as the first sentence of the page says."""
    named = {}
    for cell in cells("april-jpeg75-cpu.jsonl"):
        algorithm = cell["spec"]["algorithm"]
        if algorithm["name"] != "gradient_inversion" or setting(algorithm, "inversion")["name"] != "masked":
            continue
        defence = setting(algorithm, "defence")
        if defence["name"] == "random_binary" and algorithm["observed_rounds"] == 1:
            named[defence["mask_probability"]] = list(numbers(cell, "identification_client").values())
    assert named == {rate: [1.0] * 24 for rate in (0.2, 0.5, 0.8)}


ATTACKERS = {"APRIL": ("april", 1), "`patch_ls`": ("patch_ls", 1), "`patch_ls`, upsampling": ("upsample", 1),
             "`masked`": ("masked", 1), "`masked`, 5 rounds": ("masked", 5)}  # fmt: skip


def trained_and_random(file: str) -> dict[tuple[str, int, float, bool], dict[str, np.ndarray]]:
    """(inversion or its solver, rounds watched, R, trained) -> PSNR and whether it was named, of each of 100 images."""
    found = {}
    for cell in cells(file):
        algorithm = cell["spec"]["algorithm"]
        inversion = setting(algorithm, "inversion")
        upsampling = inversion["name"] == "patch_ls" and inversion["solver"] == "upsample"
        key = (
            "upsample" if upsampling else inversion["name"],
            algorithm["observed_rounds"],
            setting(algorithm, "defence").get("mask_probability", 0.0),
            bool(cell["spec"]["model"]["weights"]),
        )
        found[key] = {m: np.array(list(numbers(cell, f"{m}_client").values())) for m in ("psnr", "identification")}
        assert len(found[key]["psnr"]) == 100
    return found


def trained_lines(found: dict[tuple[str, int, float, bool], dict[str, np.ndarray]]) -> list[str]:
    """The rows of the page: dB and images named of each network, their difference; p after Holm over all of them."""
    lines, ps, named = [], [], []
    for attacker, (name, watched) in ATTACKERS.items():
        for rate in (0.0, 0.2, 0.5, 0.8):
            if (name, watched, rate, True) not in found:
                continue
            a, b = found[name, watched, rate, True], found[name, watched, rate, False]
            d = a["psnr"] - b["psnr"]
            half = 1.96 * d.std(ddof=1) / len(d) ** 0.5
            ps.append(float(stats.ttest_1samp(d, 0).pvalue))
            named.append(mcnemar(a["identification"], b["identification"]))
            both = [f"{show(x['psnr'].mean())} dB, {int(x['identification'].sum())}" for x in (a, b)]
            shown = f"{show(d.mean())} ({show(d.mean() - half)} to {show(d.mean() + half)})"
            lines.append(f"| {attacker} | {f'R = {rate}' if rate else 'none'} | {' | '.join(both)} | {shown} |")
    corrected = holm(ps + named)
    return [f"{line} {p(corrected[i])} | {p(corrected[len(ps) + i])} |" for i, line in enumerate(lines)]


@pytest.mark.parametrize(
    ("file", "rows"), [("april-trained-jpeg75-cpu.jsonl", 14), ("april-trained-vit-s-jpeg75-cpu.jsonl", 18)]
)
def test_inversions_of_trained_weights(file: str, rows: int):
    text = page("april.md")
    lines = trained_lines(trained_and_random(file))
    assert len(lines) == rows
    for line in lines:
        assert line in text


def test_the_vit_s_has_learned():
    found = {}
    for cell in cells("vit-s-half-jpeg75-cpu.jsonl"):
        right = outcomes(cell, "natural", cell["spec"]["algorithm"]["rounds"])
        found[cell["spec"]["size"]] = (len(right), float(right.mean()))
    assert found == {96: (10_000, 0.398), 224: (10_000, 0.4455)}
    text = " ".join(page("april.md").split())
    assert "It is right on 39.8 % and then 44.55 % of 10,000 test images." in text
    assert "right on 44.55 % of the test images" in text


def test_names_from_trained_weights():
    text = page("april.md")
    small, large = (trained_and_random(f"april-trained-{name}jpeg75-cpu.jsonl") for name in ("", "vit-s-"))
    for found, inversion, watched, rate, trained, shown in (
        (small, "masked", 1, 0.8, True, "33 of 100"),
        (small, "patch_ls", 1, 0.8, True, "78 of 100"),
        (small, "masked", 5, 0.8, True, "100 of 100"),
        (small, "patch_ls", 1, 0.8, False, "3 of 100"),
        (large, "april", 1, 0.2, True, "99 of 100"),
        (large, "april", 1, 0.5, True, "100 of 100"),
        (large, "april", 1, 0.8, True, "94 of 100"),
        (large, "april", 1, 0.2, False, "5 of 100"),
        (large, "april", 1, 0.5, False, "1 of 100"),
        (large, "april", 1, 0.8, False, "1 of 100"),
    ):
        hits = int(found[inversion, watched, rate, trained]["identification"].sum())
        low, high = stats.binomtest(hits, 100).proportion_ci(method="wilson")
        assert shown == f"{hits} of 100"
        assert f"| {shown} | {show(100 * low, 0)} to {show(100 * high, 0)} %" in text


def test_speed_precisions():
    both: dict[str, dict[tuple[str, int], dict[str, Any]]] = {"fp32": {}, "bf16": {}}
    for precision, file in (("bf16", "sfat-bf16-cpu.jsonl"), ("fp32", "sfat-fp32-cpu.jsonl")):
        for cell in cells(file):
            both[precision][setting(cell["spec"]["algorithm"], "aggregator")["name"], cell["spec"]["seed"]] = cell
    runs = [(aggregator, seed) for aggregator in ("samples", "sfat") for seed in (6, 7)]
    text = page("speed.md")
    means, ps = "| mean of fp32 - bf16 |", "| p |"
    for metric in ("natural", "fgsm", "pgd20", "cw"):
        differences = [
            100 * (outcomes(both["fp32"][run], metric, 20).mean() - outcomes(both["bf16"][run], metric, 20).mean())
            for run in runs
        ]
        test = stats.ttest_1samp(differences, 0)
        low, high = test.confidence_interval()
        means += f" {show(np.mean(differences))} ({show(low)} to {show(high)}) |"
        ps += f" {show(test.pvalue, 2)} |"
    assert means in text
    assert ps in text


SFATS = {  # row of the pages -> aggregator
    "FAT": "samples", "SFAT": "sfat", "SFAT (released)": "sfat_released", "FAT shrunk": "fedavg_shrink",
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
    file, last = {"sfat.md": ("sfat-jpeg75-cpu.jsonl", 20), "sfat-fashion.md": ("sfat-fashion-cpu.jsonl", 10)}[name]
    rows = {aggregator: row for row, aggregator in SFATS.items()}
    found = {
        (rows[setting(cell["spec"]["algorithm"], "aggregator")["name"]], cell["spec"]["seed"]): cell
        for cell in cells(file)
        if cell["spec"]["partition"]["name"] == partition
    }
    return Audit(found, last)


def accuracy_lines(found: Audit) -> list[str]:
    """The lines of a page's table: mean ± sample deviation over the seeds that a row has."""
    lines = []
    for row in [row for row in SFATS if found.seeds(row)]:
        shown = []
        for attack in ATTACKS:
            values = [100 * float(one.mean()) for one in found.outcomes(row, attack)]
            shown.append(f"{show(np.mean(values))} ±{show(np.std(values, ddof=1))}")
        lines.append(f"| {row} | {len(found.seeds(row))} | {' | '.join(shown)} |")
    return lines


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


@functools.cache
def primary_of_fashion() -> dict[str, float]:
    """Attack -> p of SFAT - FAT with skewed clients, after Holm over the five attacks."""
    found = differences_to_fat("sfat-fashion.md", "shah")
    return dict(zip(ATTACKS, holm([found["SFAT", attack].both.p for attack in ATTACKS]), strict=True))


def difference_lines(name: str, partition: str) -> list[str]:
    """The lines of a page's tables; p is uncorrected but for SFAT on Fashion-MNIST with skewed clients.

    The exploratory tables leave out FGSM and CW.
    """
    lines = []
    for (row, attack), found in differences_to_fat(name, partition).items():
        primary = (name, partition, row) == ("sfat-fashion.md", "shah", "SFAT")
        if not primary and attack in ("FGSM", "CW"):
            continue
        value = primary_of_fashion()[attack] if primary else found.both.p
        points = f"{show(100 * found.both.mean)} ({interval(found.both)})"
        each = ", ".join(show(one) for one in found.each)
        last = f"{at_most(found.both)} | {p(value)}" if primary else p(value)
        lines.append(f"| {row} - FAT | {attack} | {each} | {points} | {last} |")
    return lines


@functools.cache
def slack_and_shrink() -> dict[tuple[str, str], tuple[statistics.SeedsAndImages, float]]:
    """(contrast, attack) -> its test and p after Holm: the family that suites/sfat-audit.yaml declares."""
    declared = yaml.safe_load((SUITES / "sfat-audit.yaml").read_text(encoding="utf-8"))["tests"]
    attacks = {metric: attack for attack, metric in ATTACKS.items()}
    found, tested = audit("sfat.md", "shah"), {}
    for name, weights in declared["contrasts"].items():
        for attack in (attacks[metric] for metric in declared["metrics"]):
            rows = zip(weights, ("FAT", "FAT shrunk", "SFAT", "SFAT (released)"), strict=True)
            weighted = [(float(Fraction(str(weight))), packed(found.outcomes(row, attack))) for weight, row in rows]
            test = statistics.contrast(weighted)
            assert test is not None
            tested[name, attack] = test
    corrected = holm([test.p for test in tested.values()])
    return {which: (test, value) for (which, test), value in zip(tested.items(), corrected, strict=True)}


AUDITS = [("sfat.md", "shah"), ("sfat-fashion.md", "shah"), ("sfat-fashion.md", "iid")]


@pytest.mark.parametrize("name, partition", AUDITS)
def test_sfat_tables(name: str, partition: str) -> None:
    text, found = page(name), audit(name, partition)
    for line in [*accuracy_lines(found), *difference_lines(name, partition)]:
        assert line in text
    for cell in found.cells.values():  # on the same images
        strongest, weaker = outcomes(cell, "autoattack", found.last), outcomes(cell, "pgd20", found.last)
        assert strongest.mean() <= weaker[: len(strongest)].mean()
        chance = None if name == "sfat.md" else 0.1  # older rows hold none; the 10,000 images have 1,000 of each class
        assert over_chance(cell, "natural", found.last, chance) < 0.001
    assert "networks is above chance in natural accuracy (p < 0.001" in " ".join(text.split())


def test_what_five_seeds_of_fashion_decide() -> None:
    """Nothing is significant; the bounds under PGD-20 and the range over seeds are as the page says."""
    text = " ".join(page("sfat-fashion.md").split())
    skewed, alike = (differences_to_fat("sfat-fashion.md", partition) for partition in ("shah", "iid"))
    assert len(skewed) == 20 and {len(one.each) for one in skewed.values()} == {5}
    assert f"p is at least {p(min(primary_of_fashion().values()))} after Holm's correction" in text
    assert min(one.both.p for found in (skewed, alike) for one in found.values()) >= 0.05
    assert "None is below 0.05, nor is one under FGSM or CW." in text
    both = {row: skewed[row, "PGD-20"].both for row in list(SFATS)[1:]}
    assert f"the interval ends at {show(100 * both['SFAT'].high)} points" in text
    bounds = ", ".join(f"{row} {at_most(one)}" for row, one in both.items() if row != "SFAT")
    assert f"Under PGD-20 the bounds are: {bounds} points" in text
    widest = max(ATTACKS, key=lambda attack: skewed["SFAT", attack].both.at_most)
    assert f"by at most {at_most(skewed['SFAT', widest].both)} points under {widest}" in text
    shrunk = [one for row in ("FAT shrunk", "SFAT (released)") for one in skewed[row, "CW"].each]
    assert f"Under CW it ranges from {show(-min(shrunk))} points below FAT to {show(max(shrunk))} above" in text


def test_what_five_seeds_of_cifar_decide() -> None:
    """Nothing after Holm; uncorrected, the shrink costs natural accuracy at every seed."""
    text, found = " ".join(page("sfat.md").split()), audit("sfat.md", "shah")
    family, differences = slack_and_shrink(), differences_to_fat("sfat.md", "shah")
    assert len(family) == 9 and min(value for _, value in family.values()) >= 0.05
    for (name, attack), (test, value) in family.items():
        points = f"{show(100 * test.mean)} ({interval(test)})"
        assert f"| {name} | {attack} | {points} | {at_most(test)} | {p(value)} |" in text
    slack, _ = family["slack", "PGD-20"]
    assert f"under PGD-20 by at most {at_most(slack)} points (95 %)" in text
    assert f"It adds {show(100 * slack.mean)} points, 95 % interval {interval(slack)} over seeds and images" in text
    assert f"here the interval ends at {show(100 * slack.high)}" in text
    shrink, corrected = family["shrink", "natural"]
    assert f"by {show(-100 * shrink.mean)} points, {interval_below(shrink)}; p is {p(corrected)} after Holm" in text
    for row in ("SFAT (released)", "FAT shrunk"):
        one = differences[row, "natural"]
        assert len(one.each) == 5 and max(one.each) < 0
    strong, weak = (  # on the same images
        crossed(*([one[:500] for one in side] for side in found.against_fat("FAT shrunk", attack)))
        for attack in ("AutoAttack", "PGD-20")
    )
    assert f"FAT shrunk is {show(-100 * strong.mean)} point below FAT, {interval(strong)}." in text
    assert f"On the same images that is {show(-100 * weak.mean)} under PGD-20, {interval(weak)}." in text
    bound = at_most(differences["SFAT", "AutoAttack"].both)
    assert f"SFAT and FAT may differ by {bound} points under AutoAttack" in text


def interval_below(both: statistics.SeedsAndImages) -> str:
    """Its two ends, in points below."""
    return f"{show(-100 * both.high)} to {show(-100 * both.low)}"


def test_the_same_cells_trained_twice_are_the_same_to_the_last_bit() -> None:
    """Two commits: every number that training logged, but for how long it took."""

    def logged(file: str) -> dict[str, set[tuple[Any, ...]]]:
        trained = {cell["cell"]: s for cell in cells(file) for s in cell["stages"] if s["stage"] == "train"}
        return {id: {tuple(n[:5]) for n in s["numbers"] if n[2] != "seconds"} for id, s in trained.items()}

    earlier, now = logged("sfat-bf16-cpu.jsonl"), logged("sfat-jpeg75-cpu.jsonl")
    assert len(earlier) == 8 and all(numbers <= now[id] for id, numbers in earlier.items())  # today's log has more
    assert f"All {sum(map(len, earlier.values())):,} numbers" in page("sfat.md")


def test_the_table_of_the_front_page() -> None:
    differences = differences_to_fat("sfat-fashion.md", "shah")
    text = (RESULTS.parent / "README.md").read_text(encoding="utf-8")
    for line in accuracy_lines(audit("sfat-fashion.md", "shah")):
        _, row, _, natural, _, pgd20, _, strongest, _ = (part.strip() for part in line.split("|"))
        both = None if row == "FAT" else differences[row, "PGD-20"].both
        last = f"| {show(100 * both.mean)} ({interval(both)}) |" if both else "|"
        assert f"| {row} | {natural} | {pgd20} | {strongest} {last}" in text


def test_the_first_sentences_on_sfat():
    both = differences_to_fat("sfat-fashion.md", "iid")["SFAT", "PGD-20"].both
    said = f"With IID clients it is {show(100 * both.mean)} points, {interval(both)} (three seeds: no claim)"
    assert said in " ".join(page("sfat-fashion.md").split())
    both = differences_to_fat("sfat-fashion.md", "shah")["SFAT", "PGD-20"].both
    for text in (page("sfat-fashion.md"), (RESULTS.parent / "README.md").read_text(encoding="utf-8")):
        assert f"differ by at most {at_most(both)} points under PGD-20 (95 %)" in " ".join(text.split())
        quoted = f"{show(100 * both.mean)} points, 95 % interval {interval(both)} over seeds and images"
        assert quoted in " ".join(text.split())


def test_quoted_sentences_stand_on_their_pages():
    quoted = re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\) \| (.*?) \| `", page("README.md"), re.MULTILINE)
    assert {name for name, _ in quoted} == {each.name for each in RESULTS.glob("*.md")} - {"README.md"}
    for name, sentence in quoted:
        assert sentence in " ".join(page(name).replace("**", "").split()), name
