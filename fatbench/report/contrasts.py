"""Differences: A minus B, or a weighted sum, each a row with its interval, p and what is doubted of it.

    numbers_of = measured_numbers(store, [cell.id for cell in plan.cells], "last").__getitem__
    compare(pairs(plan, "SFAT", "FAT"), numbers_of, numbers_of)      two sides, a row for each evaluation
    from_baseline(plan, numbers_of, ["pgd20"])                       every label against the suite's baseline
    family(suite.tests[0], plan, numbers_of)                         what a suite declares, corrected as a whole

All are weighted sums of sides, paired by seed and image; `sentences` says them in words, `frame` has them as columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fatbench.errors import NothingMatched, SpecError
from fatbench.report.numbers import shares, statistics
from fatbench.report.numbers.doubts import NOT_ABOVE, with_seeds
from fatbench.report.numbers.statistics import Paired, PairedOutcomes, SeedsAndImages
from fatbench.report.numbers.stored import Measurement
from fatbench.report.numbers.worst_case import WorstCase, worst_case_difference
from fatbench.report.pairs import Pair, Place, label
from fatbench.store import inputs
from fatbench.store.rows import grouped
from fatbench.suite import confounders
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.declared_contrasts import Contrast, Tests
from fatbench.suite.model import Key
from fatbench.suite.standard_attacks import did_you_mean_metric

if TYPE_CHECKING:
    from pandas import DataFrame

LEVEL = 0.05  # a difference is called one where its p is below this
PAIRED, SHARE, TWO_DATABASES, WORST = "paired", "share", "two databases", "worst case"  # estimators
# units that are drawn at random; all but the first beside seeds
SEED, IMAGE, GROUP, CLIENT = "seed", "image", "group", "client"
ASKED = "clients"  # a yes or no of each, of these networks
SAME_CLIENTS = ("batch", "target_clients", "aggregate", "rounds", "candidates")  # settings that choose who is attacked

Side = tuple[str, str]  # label, metric; "": the metric under test
NumbersOf = Callable[[str], Mapping[str, Measurement]]  # a cell's evaluations, see `measured_numbers`


@dataclass(frozen=True)
class Difference:
    """A row: a weighted sum of the accuracies of some sides under one metric, as a fraction, unrounded.

    It is a mean over `seeds`, those that every side has. Without a test, `why` says why there is none.
    """

    name: str  # "SFAT - FAT", or what the suite calls the contrast
    metric: str
    weights: Mapping[Side, float]
    labels: Key = field(default_factory=dict)  # of the other axes
    cells: frozenset[str] = frozenset()  # ids; of a difference from the baseline those of the label alone
    seeds: tuple[int, ...] = ()
    numbers: tuple[tuple[Measurement, ...], ...] = ()  # of each side, one a seed
    by_seed: tuple[float, ...] = ()  # the weighted sum of each seed
    estimated: tuple[float, tuple[float, float] | None] | None = None  # (value, 95 % interval) of a SHARE
    estimator: str = PAIRED
    unit: str = ""  # what is drawn at random: SEED, or IMAGE, GROUP or CLIENT beside seeds; empty: nothing is tested
    test: SeedsAndImages | WorstCase | shares.Shares | None = None
    worst: tuple[str, ...] = ()  # of a WORST case the label under which each side has its least mean
    why: str = ""  # it is not tested: "one seed"
    unlike: tuple[str, ...] = ()  # what the sides differ in besides their labels: their difference is not of these
    reasons: tuple[inputs.Reason, ...] = ()  # in what else answered the sides they differ
    family: str = ""  # the tests that p is corrected with; empty: exploratory
    size: int = 1  # of the family
    p_holm: float | None = None  # after Holm's correction over the family; untested rows of a suite's family have 1
    margin: float | None = None  # of equivalence in points, where the suite declares one

    @property
    def of_two(self) -> bool:
        """Whether it is a plain difference, A - B."""
        return sorted(self.weights.values()) == [-1, 1]

    @property
    def sides(self) -> tuple[str, ...]:
        """The labels of A and B; of another contrast its name alone."""
        if not self.of_two:
            return (self.name,)
        return tuple(label for (label, _), _ in sorted(self.weights.items(), key=lambda item: -item[1]))

    @property
    def row(self) -> str:
        """The labels of the other axes, joined: "CIFAR-10, Non-IID"."""
        return ", ".join(filter(None, self.labels.values()))

    @property
    def n(self) -> int:
        """Test images; 0 where nothing is compared."""
        return self.numbers[0][0].n if self.seeds and self.numbers else 0

    @property
    def both(self) -> tuple[tuple[Measurement, ...], ...]:
        """The numbers of A and of B, one a seed; empty where it is no plain difference at one place."""
        if not self.of_two or len(self.numbers) != 2:
            return ()
        return self.numbers if next(iter(self.weights.values())) > 0 else self.numbers[::-1]

    @property
    def values(self) -> tuple[tuple[float, ...], ...]:
        """The accuracies of A and of B, one a seed; empty as `both`."""
        return tuple(tuple(number.value for number in side) for side in self.both)

    @property
    def difference(self) -> float | None:
        """Its mean over seeds; None: the sides are unlike, or nothing is compared."""
        if self.test is not None and (self.estimator == WORST or self.unit == ASKED):
            return self.test.mean
        if self.estimated is not None:
            return self.estimated[0]
        return None if self.unlike or not self.by_seed else sum(self.by_seed) / len(self.by_seed)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval: of the test; of numbers that are no accuracies Student's, of a share Fieller's."""
        if self.test is not None:
            return self.test.low, self.test.high
        if self.estimated is not None:
            return self.estimated[1]
        return self.over_seeds.interval if self.unit == SEED and self.over_seeds is not None else None

    @property
    def low(self) -> float | None:
        """Lower end of the 95 % interval."""
        return self.interval and self.interval[0]

    @property
    def high(self) -> float | None:
        """Upper end of the 95 % interval."""
        return self.interval and self.interval[1]

    @property
    def at_most(self) -> float | None:
        """The size that the data do not exclude; None where no side is above the most frequent class."""
        return None if self.test is None or self.floor else self.test.at_most

    @property
    def p(self) -> float | None:
        """p of the test, not corrected."""
        return None if self.test is None else self.test.p

    @property
    def p_corrected(self) -> float | None:
        """p after Holm's correction over its family; without a family p itself."""
        return self.p if self.p_holm is None else self.p_holm

    @property
    def significant(self) -> bool:
        """Whether it was tested and p, corrected over its family, is below 0.05."""
        return self.test is not None and (self.p_corrected or 0.0) < LEVEL

    @property
    def detectable(self) -> float | None:
        """The smallest true difference found with a power of about 0.8 at 0.05 over the size of the family."""
        return None if self.test is None else self.test.detectable(LEVEL / self.size)

    @property
    def detectable_alone(self) -> float | None:
        """As `detectable`, not corrected."""
        return None if self.test is None else self.test.detectable(LEVEL)

    @property
    def equivalent(self) -> bool | None:
        """Whether the size is within the suite's margin; None: it declares none, or nothing can be said of it."""
        return None if self.margin is None or self.at_most is None else self.at_most <= self.margin / 100

    @cached_property
    def floor(self) -> bool:
        """Whether no side is above a constant classifier, at any seed."""
        return bool(self.numbers) and at_floor(number for side in self.numbers for number in side)

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those of the attacks, one a seed."""
        return tuple(number.precision for number in self.numbers[0]) if self.numbers else ()

    @property
    def doubts(self) -> tuple[tuple[str, ...], ...]:
        """The doubts about each side, those of A first, in words with their seeds."""
        seeds, sides = self.seeds, self.both or self.numbers
        of_sides = (zip(seeds, (number.doubts for number in side), strict=True) for side in sides)
        return tuple(with_seeds(of_side, seeds, len(seeds)) for of_side in of_sides)

    @property
    def over(self) -> str:
        """What is drawn at random, in words: "seeds and images"."""
        if self.unit == GROUP and isinstance(self.test, SeedsAndImages):
            return f"seeds and {self.test.images} groups of images"
        words = {SEED: "seeds, these images", IMAGE: "seeds and images", CLIENT: "seeds and clients", ASKED: ASKED}
        return words.get(self.unit, "")

    @property
    def other_images(self) -> bool:
        """Whether the sides were measured on other images or labels: then nothing is paired or tested."""
        return any(reason.code == "data" for reason in self.reasons)

    @property
    def _paired(self) -> tuple[tuple[Measurement, ...], ...]:
        return () if self.unlike or self.other_images else self.both

    @property
    def over_seeds(self) -> Paired | None:
        """The classical tests over seeds alone, about these images; None below two seeds."""
        values = [{seed: number.value for seed, number in zip(self.seeds, side, strict=True)} for side in self._paired]
        return statistics.paired(*values) if values else None

    @cached_property
    def images(self) -> tuple[PairedOutcomes, ...]:
        """Of two networks, one pair a seed, on other such images; empty in a family, and without outcomes."""
        sides = self._paired if not self.family else ()
        outcomes = [[number.outcomes for number in side if number.outcomes is not None] for side in sides]
        if not outcomes or self.unit == CLIENT or any(len(side) < len(self.seeds) for side in outcomes):
            return ()
        if {count for side in outcomes for _, count in side} != {self.n}:
            return ()
        groups = self.numbers[0][0].groups
        return tuple(statistics.images(a, b, groups) for a, b in zip(*outcomes, strict=True))


def at_floor(numbers: Iterable[Measurement]) -> bool:
    """Whether none of these accuracies is above that of a constant classifier."""
    return all(any(doubt.code in NOT_ABOVE for doubt in number.doubts) for number in numbers)


def tested(
    difference: Difference, sides: Sequence[Mapping[int, Measurement]], weights: Sequence[float] = (1.0, -1.0)
) -> Difference:
    """The difference of these numbers by seed, over the seeds that all sides have, with its test or why it has none."""
    seeds = tuple(sorted(set.intersection(*map(set, sides))))
    numbers = tuple(tuple(side[seed] for seed in seeds) for side in sides)
    by_seed = tuple(
        sum(weight * number.value for weight, number in zip(weights, of_seed, strict=True))
        for of_seed in zip(*numbers, strict=True)
    )
    difference = replace(difference, seeds=seeds, numbers=numbers, by_seed=by_seed)
    if difference.why:
        return difference
    if len(seeds) < 2:
        return replace(difference, why="one seed")
    n, groups = numbers[0][0].n, numbers[0][0].groups
    if not n:  # no accuracies
        return replace(difference, unit=SEED)
    outcomes = [[number.outcomes for number in side if number.outcomes is not None] for side in numbers]
    over_clients = [isinstance(number, statistics.OfClients) for side in outcomes for number in side]
    if all(over_clients) and len(over_clients) == len(seeds) * len(numbers):
        test, unit = statistics.contrast([*zip(weights, outcomes, strict=True)]), CLIENT
    elif any(len(side) < len(seeds) or any(count % n for _, count in side) for side in outcomes):
        test, unit = statistics.over_seeds(by_seed, n, max(map(abs, weights))), SEED
    else:
        test = statistics.contrast([*zip(weights, outcomes, strict=True)], n, groups)
        unit = IMAGE if groups is None else GROUP
    return replace(difference, test=test, unit=unit, why="" if test else "one image")


def corrected(differences: Sequence[Difference], family: str, untested: float | None = None) -> list[Difference]:
    """The differences as one family with p after Holm's correction. untested: p of those without a test, which then
    count in it; None: they are no part of it.
    """
    ps = [untested if difference.test is None else difference.test.p for difference in differences]
    after = iter(statistics.holm([p for p in ps if p is not None]))
    size = sum(p is not None for p in ps)
    return [
        replace(difference, family=family, size=max(size, 1), p_holm=None if p is None else next(after))
        for difference, p in zip(differences, ps, strict=True)
    ]


# --- two sides ---------------------------------------------------------------------------------------------------


def compare(
    cells: Sequence[Pair], of_a: NumbersOf, of_b: NumbersOf, metrics: Sequence[str] = (), *,
    sides: tuple[str, str] = ("A", "B"), estimator: str = PAIRED,
) -> list[Difference]:  # fmt: skip
    """A - B, exploratory: a row for each combination of labels and each evaluation that both sides have.

    metrics: only these labels. NothingMatched: nothing was measured on both sides. SpecError: a label that neither side
    has.
    """
    sides = sides if sides[0] != sides[1] else ("A", "B")
    measured = [(pair, of_a(pair.a), of_b(pair.b)) for pair in cells]
    labels = {label(evaluation) for _, *both in measured for side in both for evaluation in side}
    for metric in metrics:
        if metric not in labels:
            raise SpecError(f"nothing is measured as '{metric}'{did_you_mean_metric(metric, labels)}", option="metric")
    rows: dict[tuple[Place, str], tuple[dict[int, Measurement], ...]] = {}
    reasons: dict[Any, dict[inputs.Reason, None]] = {}
    for pair, *numbers in measured:
        for evaluation in numbers[0]:
            if evaluation not in numbers[1] or (metrics and label(evaluation) not in metrics):
                continue
            a, b = (side[evaluation] for side in numbers)
            if a.precision != b.precision:  # another attack in effect
                continue
            row = pair.labels, evaluation
            for by_seed, number in zip(rows.setdefault(row, ({}, {})), (a, b), strict=True):
                by_seed[pair.seed] = number
            first = next(iter(rows[row][0].values())).inputs.get("data", {})  # images are one set for all seeds
            found = a.inputs.differ_in_comparison(b.inputs, pair.a == pair.b)
            found += inputs.Inputs(data=first).differ(inputs.Inputs(data=a.inputs.get("data", {})))
            reasons.setdefault(row, {}).update(dict.fromkeys(found))
    if not rows:
        raise NothingMatched(
            "the two sides have no evaluation in common (the same attack in the same precision on as many test images)"
        )
    names = {evaluation for _, evaluation in rows}
    shared = {name for name in names if any(label(name) == label(other) and name != other for other in names)}
    unlike = {pair.labels: pair.unlike for pair in cells if pair.unlike}
    differences = []
    for (place, evaluation), both in rows.items():
        difference = Difference(
            " - ".join(sides), evaluation if evaluation in shared else label(evaluation),
            {(side, ""): weight for side, weight in zip(sides, (1.0, -1.0), strict=True)},
            dict(place), estimator=estimator, unlike=unlike.get(place, ()), reasons=tuple(reasons[place, evaluation]),
        )  # fmt: skip
        if difference.unlike:  # a test would speak of something else than the labels
            difference = replace(difference, why=f"not compared: {'; '.join(difference.unlike)}")
        elif difference.other_images:
            difference = replace(difference, why="other images or labels")
        differences.append(tested(difference, both))
    return differences


def of_values(
    sides: tuple[str, str], metric: str, a: Mapping[int, float], b: Mapping[int, float], *, labels: Key | None = None,
    n: int = 0,
) -> Difference:  # fmt: skip
    """A - B of numbers by seed: accuracies on n images, about these images; without n numbers of any kind."""
    weights = {(side, ""): weight for side, weight in zip(sides, (1.0, -1.0), strict=True)}
    numbers = [{seed: Measurement(value, n) for seed, value in side.items()} for side in (a, b)]
    return tested(Difference(" - ".join(sides), metric, weights, labels or {}), numbers)


def share(metric: str, point: Mapping[int, float], start: Mapping[int, float], end: Mapping[int, float]) -> Difference:
    """The share of the way from `start` to `end` at which `point` lies, of means over the seeds that all have."""
    seeds = tuple(seed for seed in point if seed in start and seed in end)
    parts, wholes = [point[seed] - start[seed] for seed in seeds], [end[seed] - start[seed] for seed in seeds]
    estimated = statistics.share(parts, wholes)
    weights = {("point", ""): 1.0, ("start", ""): -1.0}
    counted = seeds if estimated else ()
    return Difference("share", metric, weights, seeds=counted, estimator=SHARE, unit=SEED, estimated=estimated)


def from_baseline(
    plan: Plan, numbers_of: NumbersOf, metrics: Sequence[str] = (), declared: Sequence[Difference] = ()
) -> list[Difference]:
    """All labels of the baseline's axis against it, at each combination of other labels that has it.

    declared: what the suite declares, see `declared_by`. Such a difference keeps p of its family; the tested others of
    a metric are corrected together. Labels are those in which the differences are not alike. Empty where the suite
    names no baseline.
    """
    if plan.baseline is None:
        return []
    axis, baseline = plan.baseline
    by_place: dict[Place, dict[str, dict[int, str]]] = {}  # -> label -> seed -> cell
    for cell in plan.cells:
        place = tuple((name, label) for name, label in cell.key.items() if name != axis)
        cells = by_place.setdefault(place, {}).setdefault(cell.key.get(axis, ""), {})
        cells[int(cell.spec["seed"])] = cell.id
    unlike = confounders.uncompared_cells(confounders.against(plan.cells, plan.baseline))
    found: list[Difference] = []
    for place, by_label in by_place.items():
        of_baseline = by_label.get(baseline, {})
        for name, cells in by_label.items():
            if name == baseline or not unlike.isdisjoint(cells.values()):
                continue
            paired = [Pair(place, seed, cells[seed], of_baseline[seed]) for seed in cells if seed in of_baseline]
            try:
                compared = compare(paired, numbers_of, numbers_of, sides=(name, baseline)) if paired else []
            except NothingMatched:  # the two have no evaluation in common
                continue
            found += [replace(one, cells=frozenset(cells.values())) for one in compared]
    found = _with_families([one for one in found if not metrics or one.metric in metrics], declared, baseline)
    shared = set.intersection(*(set(one.labels.items()) for one in found)) if found else set()
    return [replace(one, labels=dict(item for item in one.labels.items() if item not in shared)) for one in found]


def _with_families(found: Sequence[Difference], declared: Sequence[Difference], baseline: str) -> list[Difference]:
    """Differences from the baseline with p of the declared comparison, or after Holm over the others of the metric."""
    kept: dict[int, Difference] = {}
    others: dict[str, list[int]] = {}
    for i, one in enumerate(found):
        same = (
            other
            for other in declared
            if other.both and (other.sides, other.metric) == (one.sides, one.metric) and one.cells <= other.cells
        )
        if (other := next(same, None)) is not None and other.test is not None:
            kept[i] = replace(one, family=other.family, size=other.size, p_holm=other.p_holm, margin=other.margin)
        else:
            others.setdefault(one.metric, []).append(i)
    for indices in others.values():
        after = corrected([found[i] for i in indices], f"differences from {baseline}")
        kept |= dict(zip(indices, after, strict=True))
    return [kept[i] for i in range(len(found))]


def frame(differences: Iterable[Difference]) -> DataFrame:
    """The differences as a frame: what `sentences` prints of each, as fractions, unrounded."""
    import pandas

    return pandas.DataFrame(
        [
            {
                "row": one.row, "contrast": one.name, "metric": one.metric, "n": one.n, "seeds": list(one.seeds),
                **{side: sum(v) / len(v) for side, v in zip("ab", one.values, strict=False)},
                "difference": one.difference, "low": one.low, "high": one.high, "at_most": one.at_most, "p": one.p,
                "p_holm": one.p_holm, "family": one.family, "size": one.size, "detectable": one.detectable,
                "margin": one.margin, "equivalent": one.equivalent, "floor": one.floor, "not_tested": one.why,
                "doubts": "; ".join(dict.fromkeys(doubt for side in one.doubts for doubt in side)),
                "unit": one.unit, "estimator": one.estimator, "over": one.over, "precisions": list(one.precisions),
                "t_p": (over_seeds := one.over_seeds) and over_seeds.t_p,
                "wilcoxon_p": over_seeds and over_seeds.wilcoxon_p, "cohens_d": over_seeds and over_seeds.d,
                "agreement": [of_seed.agreement for of_seed in one.images],
                "mcnemar_p": [of_seed.p for of_seed in one.images],
            }
            for one in differences
        ]
    )  # fmt: skip


# --- the family that a suite declares ----------------------------------------------------------------------------

PlacedSide = tuple[tuple[Place, str], str]  # (place, label), metric


def family(tests: Tests, plan: Plan, numbers_of: NumbersOf) -> list[Difference]:
    """The contrasts that a suite declares, under each metric at each combination of the other axes' labels.

    What cannot be tested counts in the family with p = 1, so that leaving a cell out never makes another significant.
    """
    metrics = tests.metrics or plan.metrics()
    chosen = [cell for cell in plan.cells if all(cell.key.get(axis) in labels for axis, labels in tests.where.items())]
    axes = dict.fromkeys(axis for cell in plan.cells for axis in cell.key)
    varying = [axis for axis in axes if len({cell.key.get(axis) for cell in chosen}) > 1]
    declared: list[Difference] = []
    for name, contrast in tests.contrasts.items():
        cells: dict[tuple[Place, str], dict[int, Cell]] = {}
        for cell in chosen:
            place = tuple((axis, cell.key[axis]) for axis in varying if axis in cell.key and axis != contrast.axis)
            cells.setdefault((place, cell.key.get(contrast.axis, "")), {})[int(cell.spec["seed"])] = cell
        named_metrics = list(dict.fromkeys(metric for _, metric in contrast.weights if metric))
        for labels, places in _places(tests, dict.fromkeys(place for place, _ in cells)):
            if tests.worst_over:
                of_place = (tests, labels, [*places], cells, numbers_of)
                declared += [_worst(name, contrast, metric, *of_place) for metric in metrics]
                continue
            for metric in [""] if named_metrics else metrics:
                weights: dict[PlacedSide, float] = {
                    ((place, label), own_metric or metric): weight * place_weight
                    for (label, own_metric), weight in contrast.weights.items()
                    for place, place_weight in places.items()
                }
                ids = frozenset(cell.id for side, _ in weights for cell in cells.get(side, {}).values())
                difference = Difference(name, metric or ", ".join(named_metrics), contrast.weights, labels, ids)
                declared.append(_declared(difference, weights, cells, numbers_of))
    return [replace(one, margin=tests.margin) for one in corrected(declared, str(tests.family), untested=1.0)]


def _places(tests: Tests, places: Iterable[Place]) -> Iterable[tuple[Key, dict[Place, float]]]:
    """(labels to print, weight of each combination of labels): each alone, the mean over an axis, between two of its
    labels, or those of a worst case.
    """
    if not tests.between and not tests.worst_over:
        yield from ((dict(place), {place: 1.0}) for place in places)
    chosen = {**tests.between, **tests.worst_over} or dict.fromkeys(filter(None, [tests.mean_over]))
    for axis, labels in chosen.items():
        of_axis = [one for one in places if axis in dict(one) and (labels is None or dict(one)[axis] in labels)]
        # without the label of the axis -> with it
        by_rest = grouped((tuple(one for one in place if one[0] != axis), place) for place in of_axis)
        for rest, members in by_rest.items():
            weights = dict.fromkeys(members, 1 / len(members))
            text = f"worst of {len(labels)}" if labels else f"mean over {axis}"
            if tests.between and labels:
                weights = {place: 1.0 if dict(place)[axis] == labels[0] else -1.0 for place in members}
                text = " - ".join(labels)
            if not tests.between or len(members) == 2:
                yield {**dict(rest), axis: text}, weights


def _declared(
    difference: Difference,
    weights: Mapping[PlacedSide, float],
    cells: Mapping[tuple[Place, str], Mapping[int, Cell]],
    numbers_of: NumbersOf,
) -> Difference:
    """The comparison with its test, or with the reason why it cannot be tested."""
    numbers: list[dict[int, Measurement]] = []
    attacks = set()
    for side, metric in weights:
        if side not in cells:
            return replace(difference, why=f"{side[1]} is not in this preset")
        names = {one.id for cell in cells[side].values() for one in cell.evaluations if one.label == metric}
        if len(names) != 1:
            why = f"{metric} is {'not one attack' if names else 'not evaluated in this preset'}"
            return replace(difference, why=why)
        (name,) = names
        attacks.add(name)
        found = {seed: numbers_of(cell.id).get(name) for seed, cell in cells[side].items()}
        numbers.append({seed: number for seed, number in found.items() if number is not None})
    sides = {side: next(iter(cells[side].values())) for side, _ in weights}
    if unlike := confounders.sentences(confounders.confounders([*sides.values()][::-1])):
        return replace(difference, why=f"not compared: {'; '.join(unlike)}")
    seeds = tuple(sorted(set.intersection(*map(set, numbers))))
    used = [[side[seed] for seed in seeds] for side in numbers]
    sizes = [{number.n for number in of_seed} for of_seed in zip(*used, strict=True)]
    if not all(isinstance(number.outcomes, statistics.OfClients) for side in used for number in side):
        sizes = [set().union(*sizes)]  # else each seed has other clients
    data = {json.dumps(number.inputs["data"]) for side in used for number in side if number.inputs.get("data")}
    why = ""
    if len(seeds) < 2:
        why = "fewer than two seeds are measured of every cell"
    elif any(len(of_seed) > 1 for of_seed in sizes) or len(attacks) > len({metric for _, metric in weights}):
        why = "the cells were not evaluated by the same attack on the same images"
    elif any(len({number.precision for number in of_seed}) > 1 for of_seed in zip(*used, strict=True)):
        why = "the cells of a seed were attacked in different precisions"
    elif len(data) > 1:
        why = "the cells were measured on other images or labels"
    if why:
        return replace(difference, seeds=seeds, why=why)
    return tested(difference, numbers, [*weights.values()])


def _worst(
    name: str, contrast: Contrast, metric: str, tests: Tests, labels: Key, places: Sequence[Place],
    cells: Mapping[tuple[Place, str], Mapping[int, Cell]], numbers_of: NumbersOf,
) -> Difference:  # fmt: skip
    """A - B of the worst cases over some labels, see `worst_case`; it is tested where all of them are measured."""
    [(axis, wanted)], count = tests.worst_over.items(), len(places)
    sides = [label for (label, _), _ in sorted(contrast.weights.items(), key=lambda item: -item[1])]
    weights = {((place, side), metric): sign / count
               for side, sign in zip(sides, (1.0, -1.0), strict=True) for place in places}  # fmt: skip
    ids = frozenset(cell.id for side, _ in weights for cell in cells.get(side, {}).values())
    one = Difference(name, metric, contrast.weights, labels, ids, estimator=WORST)
    if count < len(wanted):
        return replace(one, why=f"{count} of {len(wanted)} labels are in this preset")
    one = _declared(one, weights, cells, numbers_of)
    if one.test is None or one.unit in (SEED, CLIENT):
        return replace(one, test=None, why=one.why or "no per-image outcomes")
    outcomes = [[number.outcomes for number in side] for side in one.numbers]
    test = worst_case_difference(outcomes[:count], outcomes[count:], one.n, one.numbers[0][0].groups)  # type: ignore[arg-type]
    assert test is not None  # it was tested label by label
    return replace(one, test=test, worst=tuple(dict(places[least])[axis] for least in test.least))


Answers = Mapping[str, Mapping[int, float]]  # cell -> client -> 1 for yes, see `pairs.answers_of_clients`


def sides_of(tests: Tests, plan: Plan) -> dict[str, list[dict[int, Cell]]]:
    """Comparison -> of each side seed -> cell. SpecError: labels that name several cells of a seed."""
    sides: dict[str, list[dict[int, Cell]]] = {}
    for name, points in tests.points.items():
        for wanted in [{**tests.where, **point} for point in points if not isinstance(point, float)]:
            found = [cell for cell in plan.cells if all(cell.key.get(axis) in of for axis, of in wanted.items())]
            cells = {int(cell.spec["seed"]): cell for cell in found}
            if len(cells) < len(found):
                raise SpecError(f"tests, {name}: {wanted} are several cells of a seed: give more labels")
            sides.setdefault(name, []).append(cells)
    return sides


def family_of_clients(tests: Tests, plan: Plan, answers: Answers) -> list[Difference]:
    """The points that a suite declares, compared by a yes or no of each client; untestable ones count with p = 1."""
    declared = []
    for name, sides in sides_of(tests, plan).items():
        ids = frozenset(cell.id for cells in sides for cell in cells.values())
        seeds = tuple(sorted(set.intersection(*map(set, sides))))
        one = Difference(name, str(tests.clients), {}, cells=ids, seeds=seeds)
        cells = [[side[seed] for seed in seeds] for side in sides]
        declared.append(_of_clients(one, cells, tests.points[name][1], answers))
    return [replace(one, margin=tests.margin) for one in corrected(declared, str(tests.family), untested=1.0)]


def _of_clients(one: Difference, sides: Sequence[Sequence[Cell]], line: Any, answers: Answers) -> Difference:
    """The comparison with its test over the clients of all seeds, or with the reason why it has none."""
    if not one.seeds:
        return replace(one, why="a side is not in this preset")
    if not all(cell.id in answers for side in sides for cell in side):
        return replace(one, why="not all clients are measured yet")
    if unlike := confounders.sentences(confounders.confounders([side[0] for side in sides][::-1])):
        return replace(one, why=f"not compared: {'; '.join(unlike)}")
    attacked = [[(_attacked(cell.spec), [*answers[cell.id]]) for cell in side] for side in sides]
    if attacked[0] != attacked[-1]:
        return replace(one, why="the sides have other clients")
    table = [[value for cell in side for value in answers[cell.id].values()] for side in sides]
    if not {0, 1}.issuperset(value for side in table for value in side):
        return replace(one, why=f"{one.metric} is no yes or no")
    if isinstance(line, float):
        return replace(one, test=shares.against(table[0].count(1), len(table[0]), line), unit=ASKED)
    both, only_a, only_b = (sum(pair == of for pair in zip(*table, strict=True)) for of in ((1, 1), (1, 0), (0, 1)))
    return replace(one, test=shares.paired(both, only_a, only_b, len(table[0])), unit=ASKED)


def _attacked(spec: Mapping[str, Any]) -> list[Any]:
    """What decides on which clients and images, and among which candidates, an attack is judged."""
    of_data = [spec.get(key) for key in ("data", "partition", "train", "train_from", "size")]
    return of_data + [spec["algorithm"].get(key) for key in SAME_CLIENTS]


def declared_by(families: Iterable[Tests], plan: Plan, numbers_of: NumbersOf) -> list[Difference]:
    """The comparisons of all families."""
    return [one for tests in families if tests.contrasts for one in family(tests, plan, numbers_of)]


def headline(families: Iterable[Tests], plan: Plan, numbers_of: NumbersOf) -> Difference | None:
    """The comparison that a suite is quoted with; None without one, or before it is measured."""
    found = (quoted(tests, family(tests, plan, numbers_of)) for tests in families if tests.headline is not None)
    return next(filter(None, found), None)


def quoted(tests: Tests, declared: Iterable[Difference]) -> Difference | None:
    """The comparison of a family that its suite is quoted with."""
    name, metric, row = tests.headline or ("", "", "")
    found = (one for one in declared if (one.name, one.metric) == (name, metric) and row in ("", one.row) and one.test)
    return next(found, None)


def of_cells(declared: Sequence[Difference], cell_ids: Collection[str] | None) -> Sequence[Difference]:
    """The comparisons that use one of these cells; None: all."""
    return declared if cell_ids is None else [one for one in declared if not one.cells.isdisjoint(cell_ids)]
