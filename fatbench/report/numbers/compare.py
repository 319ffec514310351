"""Compare two sides by the same evaluations of paired cells, and test whether they differ significantly.

    pairs = rows(plan, "aggregator=sfat", "aggregator=samples")      two rows of a suite
    compare(pairs, a_store, b_store, "last")             one Comparison for each row and evaluation

A cell of one side is paired with the cell of the other side that has the same seed and the same other labels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fatbench.errors import NothingMatched, SpecError, did_you_mean
from fatbench.report.numbers import statistics
from fatbench.report.numbers.doubts import NOT_ABOVE, Doubt, with_seeds
from fatbench.report.numbers.measurements import Measurement
from fatbench.report.numbers.provenance import attacked_in
from fatbench.report.numbers.query import evaluations
from fatbench.report.numbers.shown_runs import chosen_runs
from fatbench.report.numbers.statistics import Paired, PairedOutcomes, SeedsAndImages
from fatbench.store import inputs
from fatbench.store.replicates import SIGN
from fatbench.store.selection import WORDS, Checkpoint
from fatbench.suite import confounders, filters
from fatbench.suite.seeds import seeds_text
from fatbench.suite.standard_attacks import attack_name, did_you_mean_metric

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fatbench.store.stages import Store
    from fatbench.suite.cells import Cell, Plan

LEVEL = 0.05  # a difference is called one where its p is below this
FLOOR = "no side is above the most frequent class, so nothing is said of how far apart they are"
OTHER_IMAGES = "these two trained networks on other such images"


@dataclass(frozen=True)
class Pair:
    """Two cells to compare, by their ids in the database of each side."""

    row: str  # the labels that both share: "CIFAR-10, Non-IID"
    seed: int
    a: str
    b: str
    unlike: tuple[str, ...] = ()  # what both differ in besides their labels: their difference is not of these


@dataclass(frozen=True)
class Comparison:
    """One evaluation of one row under both sides."""

    row: str
    metric: str
    n: int  # test images
    seeds: tuple[int, ...]
    a: tuple[float, ...]  # accuracies in [0, 1], one a seed
    b: tuple[float, ...]
    images: tuple[PairedOutcomes, ...]  # of the networks, one a seed; empty: no outcomes are stored on both sides
    over_seeds: Paired | None  # None below two seeds
    precisions: tuple[str, ...]  # of the attack, one a seed
    test: SeedsAndImages | None  # of the methods; None: one seed, or one image
    with_images: bool  # whether `test` is over images as well; False: no outcomes are stored, it is about these images
    doubts: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # of A and of B, in words with the seeds
    floor: bool = False  # whether neither side is above a constant classifier, at any seed
    unlike: tuple[str, ...] = ()  # see `Pair`; such a comparison has no test
    reasons: tuple[inputs.Reason, ...] = ()  # in what the two sides differ beyond what is compared
    grouped: bool = False  # whether images go together in groups, which are then what is drawn at random

    @property
    def other_images(self) -> bool:
        """Whether the sides were measured on other images or labels: then nothing is paired or tested."""
        return any(reason.code == "data" for reason in self.reasons)

    @property
    def difference(self) -> float:
        return sum(x - y for x, y in zip(self.a, self.b, strict=True)) / len(self.seeds)

    @property
    def p(self) -> float | None:
        """p of `test`, not corrected; None where nothing can be tested."""
        return None if self.test is None else self.test.p

    @property
    def over(self) -> str:
        """The random effects of `test`, in words: "seeds and images"."""
        return drawn_at_random(self.test, self.with_images, self.grouped)


def drawn_at_random(test: SeedsAndImages | None, with_images: bool, grouped: bool) -> str:
    """The random effects of a test, in words: "seeds and images"."""
    if not with_images:
        return "seeds, these images"
    return f"seeds and {test.images} groups of images" if grouped and test is not None else "seeds and images"


# --- which cells -------------------------------------------------------------------------------------------------


def rows(plan: Plan, a: str, b: str) -> list[Pair]:
    """Pair a plan's cells: `a` and `b` are filters ("aggregator=sfat") or labels of an axis ("SFAT").

    SpecError: a side is neither, a cell is on both sides, or several cells of a seed could be the partner.
    NothingMatched: no cell has a partner.
    """
    side_a, side_b = _side(plan, a), _side(plan, b)
    if shared := {cell.id for cell in side_a} & {cell.id for cell in side_b}:
        raise SpecError(f"'{a}' and '{b}' share {len(shared)} cells, such as {min(shared)}: they must be apart")
    axes = list(dict.fromkeys(axis for cell in plan.cells for axis in cell.key))
    labels = [[{cell.key.get(axis) for cell in side} for axis in axes] for side in (side_a, side_b)]
    common_axes = [axis for axis, labels_a, labels_b in zip(axes, *labels, strict=True) if labels_a & labels_b]

    def by_place(side: Sequence[Cell], side_text: str) -> dict[tuple[str, int], str]:
        cell_by_place: dict[tuple[str, int], str] = {}
        for cell in side:
            row_and_seed = ", ".join(cell.key[axis] for axis in common_axes if axis in cell.key), int(cell.spec["seed"])
            if cell_by_place.setdefault(row_and_seed, cell.id) != cell.id:
                other_axes = [axis for axis in axes if axis not in common_axes]
                raise SpecError(
                    f"'{side_text}' holds several cells of seed {row_and_seed[1]}: name one of {', '.join(other_axes)}"
                )
        return cell_by_place

    cells_a, cells_b = by_place(side_a, a), by_place(side_b, b)
    cell_of = {cell.id: cell for cell in (*side_a, *side_b)}
    pairs = [
        Pair(
            *row_and_seed,
            cells_a[row_and_seed],
            cells_b[row_and_seed],
            confounders.differences(cell_of[cells_b[row_and_seed]], cell_of[cells_a[row_and_seed]]),
        )
        for row_and_seed in cells_a
        if row_and_seed in cells_b
    ]
    if not pairs:
        raise NothingMatched(f"no cell of '{a}' has a partner of the same seed and labels among those of '{b}'")
    row_labels = [pair.row.split(", ") for pair in pairs]
    shared_labels = set.intersection(*map(set, row_labels))  # a label that all pairs share distinguishes none
    return [
        replace(p, row=", ".join(x for x in row if x not in shared_labels))
        for p, row in zip(pairs, row_labels, strict=True)
    ]


def _side(plan: Plan, side_text: str) -> list[Cell]:
    """The cells that a filter or a label names, each once."""
    if any(sign in side_text for sign in "=<>"):
        return filters.select(plan, side_text).unique()
    labels = {label for cell in plan.cells for label in cell.key.values()}
    cells = [cell for cell in plan.unique() if side_text in cell.key.values()]
    if not cells:
        raise SpecError(
            f"suite '{plan.suite}', preset {plan.preset}, has no label '{side_text}'{did_you_mean(side_text, labels)}"
            " (or give a filter such as aggregator=sfat)"
        )
    return cells


def common(a: Store, b: Store, plan: Plan | None = None) -> list[Pair]:
    """Pairs of the cells that two databases share, of a plan or all; rows are named by the settings that vary."""
    shared_cells = {id for id in a.cells().keys() & b.cells().keys() if SIGN not in id}
    if plan is not None:
        evaluations_by_cell = {
            c.id: [flat_spec.id for flat_spec in c.evaluations] for c in plan.unique() if c.id in shared_cells
        }
        runs_a, runs_b = chosen_runs(a, evaluations_by_cell), chosen_runs(b, evaluations_by_cell)
        row_by_cell = {
            c.id: (", ".join(c.key.values()), int(c.spec["seed"])) for c in plan.unique() if c.id in shared_cells
        }
        return [Pair(row, seed, runs_a.get(id, id), runs_b.get(id, id)) for id, (row, seed) in row_by_cell.items()]
    runs_a, runs_b = (chosen_runs(store, dict.fromkeys(shared_cells, ())) for store in (a, b))
    specs = a.cells(sorted(shared_cells))
    flat = {id: dict(_flat(spec)) for id, spec in specs.items()}
    keys = dict.fromkeys(key for flat_spec in flat.values() for key in flat_spec if key != "seed")
    varied = [key for key in keys if len({flat_spec.get(key) for flat_spec in flat.values()}) > 1]
    varied = [
        key for key in varied if not any(key.startswith(f"{other_key}.") for other_key in varied)
    ]  # not a call's settings
    pairs = []
    for id, flat_spec in flat.items():
        row = ", ".join(f"{key}={flat_spec[key]}" for key in varied if key in flat_spec)
        pairs.append(Pair(row, int(specs[id].get("seed") or 0), runs_a.get(id, id), runs_b.get(id, id)))
    return sorted(pairs, key=lambda pair: (pair.row, pair.seed))


def _flat(node: Any, path: str = "") -> Iterable[tuple[str, str]]:
    """The settings of a spec: dotted path -> value as JSON; a call's name stands at the call's own path."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _flat(value, path if key == "name" else f"{path}.{key}".lstrip("."))
    else:
        yield path, node if isinstance(node, str) else json.dumps(node)


# --- what was measured -------------------------------------------------------------------------------------------


def measured_numbers(
    store: Store,
    cells: Collection[str],
    select: Checkpoint,
    labels_of: Callable[[Mapping[str, Any]], ArrayLike] | None = None,
) -> dict[str, dict[str, Measurement]]:
    """Cell -> its evaluations at a checkpoint: "pgd20-0a1b2c3d", which stands for attack, n and batch.

    labels_of: spec of a cell -> the group of each of its test images. DatabaseError: an accuracy is not the mean of its
    outcomes.
    """
    specs = store.cells(sorted(cells))
    numbers = evaluations(specs, store, select)
    numbers_by_cell = {cell: numbers.evaluated(cell) for cell in cells}
    if labels_of is not None:
        for cell, numbers_of_cell in numbers_by_cell.items():
            for number in numbers_of_cell.values():
                number.groups = grouped(labels_of(specs[cell]), number.n) if number.n else None
    return numbers_by_cell


def grouped(labels: ArrayLike, n: int) -> statistics.Groups:
    """The groups of the first n images as numbers from 0. SpecError: fewer labels than images, or a single group."""
    import numpy as np

    array = np.asarray(labels)
    if array.ndim != 1 or len(array) < n:
        raise SpecError(f"groups: expected a label for each of {n} test images, (images,), got {array.shape}")
    groups: statistics.Groups = np.unique(array[:n], return_inverse=True)[1].astype(np.int64)
    if not groups.any():
        raise SpecError(f"groups: all {n} test images are of one group, so that nothing can be said of others")
    return groups


def label(evaluation: str) -> str:
    """The label of an evaluation: "pgd20" of "pgd20-0a1b2c3d"."""
    return evaluation.rpartition("-")[0]


def compare(
    pairs: Sequence[Pair],
    of_a: Callable[[str], Mapping[str, Measurement]],
    of_b: Callable[[str], Mapping[str, Measurement]],
    metrics: Sequence[str] = (),
) -> list[Comparison]:
    """Compare two sides: one comparison for each row and evaluation that both have.

    of_a, of_b: a cell's evaluations, see `measured_numbers`. metrics: only these labels. NothingMatched: nothing was
    measured on both sides. SpecError: a label that neither side has.
    """
    numbers_by_pair = [(pair, of_a(pair.a), of_b(pair.b)) for pair in pairs]
    labels = {label(evaluation) for _, *sides in numbers_by_pair for side in sides for evaluation in side}
    for metric in metrics:
        if metric not in labels:
            raise SpecError(f"--metric: nothing is measured as '{metric}'{did_you_mean_metric(metric, labels)}")
    runs_by_row: dict[tuple[str, str], list[tuple[int, Measurement, Measurement]]] = {}
    reasons_by_row: dict[tuple[str, str], dict[inputs.Reason, None]] = {}
    for pair, a, b in numbers_by_pair:
        for evaluation in a:
            if evaluation in b and (not metrics or label(evaluation) in metrics):
                if a[evaluation].precision != b[evaluation].precision:  # another attack in effect
                    continue
                runs_by_row.setdefault((pair.row, evaluation), []).append((pair.seed, a[evaluation], b[evaluation]))
                differences = inputs.differ_in_comparison(a[evaluation].inputs, b[evaluation].inputs, pair.a == pair.b)
                first_data = runs_by_row[pair.row, evaluation][0][1].inputs.get(
                    "data", {}
                )  # images are one set for all seeds
                differences += inputs.differ({"data": first_data}, {"data": a[evaluation].inputs.get("data", {})})
                reasons_by_row.setdefault((pair.row, evaluation), {}).update(dict.fromkeys(differences))
    if not runs_by_row:
        raise NothingMatched(
            "the two sides have no evaluation in common (the same attack in the same precision on as many test images)"
        )
    names = {evaluation for _, evaluation in runs_by_row}
    differences_by_row = {pair.row: pair.unlike for pair in pairs if pair.unlike}
    return [
        _comparison(
            row,
            evaluation if _ambiguous(evaluation, names) else label(evaluation),
            runs,
            tuple(reasons_by_row[row, evaluation]),
            differences_by_row.get(row, ()),
        )
        for (row, evaluation), runs in runs_by_row.items()
    ]


def _ambiguous(evaluation: str, names: Iterable[str]) -> bool:
    return any(name != evaluation and label(name) == label(evaluation) for name in names)


def _comparison(
    row: str,
    metric: str,
    runs: Sequence[tuple[int, Measurement, Measurement]],
    reasons: tuple[inputs.Reason, ...] = (),
    unlike: tuple[str, ...] = (),
) -> Comparison:
    runs = sorted(runs, key=lambda run: run[0])
    seeds = tuple(seed for seed, _, _ in runs)
    a, b = tuple(number_a.value for _, number_a, _ in runs), tuple(number_b.value for _, _, number_b in runs)
    n, groups = runs[0][1].n, runs[0][1].groups
    outcomes_a = [number_a.outcomes for _, number_a, _ in runs if number_a.outcomes is not None]
    outcomes_b = [number_b.outcomes for _, _, number_b in runs if number_b.outcomes is not None]
    counts = {count for _, count in (*outcomes_a, *outcomes_b)}
    has_all_outcomes = len(outcomes_a) == len(outcomes_b) == len(runs) and not any(
        count % n for count in counts
    )  # of every model deployed
    differences = [x - y for x, y in zip(a, b, strict=True)]
    compared = Comparison(
        row=row,
        metric=metric,
        n=n,
        seeds=seeds,
        a=a,
        b=b,
        images=tuple(statistics.images(x, y, groups) for x, y in zip(outcomes_a, outcomes_b, strict=True))
        if has_all_outcomes and counts == {n}
        else (),
        precisions=tuple(number_a.precision for _, number_a, _ in runs),
        over_seeds=statistics.paired(dict(zip(seeds, a, strict=True)), dict(zip(seeds, b, strict=True))),
        test=statistics.seeds_and_images(outcomes_a, outcomes_b, n, groups)
        if has_all_outcomes
        else statistics.over_seeds(differences, n),
        with_images=has_all_outcomes,
        floor=at_floor([number_a for _, *both_numbers in runs for number_a in both_numbers]),
        doubts=(
            _doubts([(seed, number_a) for seed, number_a, _ in runs]),
            _doubts([(seed, number_b) for seed, _, number_b in runs]),
        ),
        reasons=reasons,
        grouped=groups is not None,
        unlike=unlike,
    )
    if compared.other_images or unlike:  # a test would speak of something else than the labels
        return replace(compared, images=(), over_seeds=None, test=None, with_images=False)
    return compared


def at_floor(numbers: Iterable[Measurement]) -> bool:
    """Whether none of these accuracies is above that of a constant classifier."""
    return all(any(doubt.code in NOT_ABOVE for doubt in number.doubts) for number in numbers)


def _doubts(runs: Sequence[tuple[int, Measurement]]) -> tuple[str, ...]:
    """The doubts about the numbers of one side, in the words of tables."""
    doubted: dict[Doubt, list[int]] = {}
    for seed, number in runs:
        for doubt in number.doubts:
            doubted.setdefault(doubt, []).append(seed)
    return with_seeds(doubted, [seed for seed, _ in runs], len(runs))


# --- what is printed ---------------------------------------------------------------------------------------------


def as_json(comparisons: Sequence[Comparison], margin: float | None = None) -> list[dict[str, Any]]:
    """Each comparison as plain data: fractions in [0, 1], unrounded. margin: of equivalence, in points."""
    return [
        {
            "row": comparison.row,
            "metric": comparison.metric,
            "n": comparison.n,
            "seeds": list(comparison.seeds),
            "a": list(comparison.a),
            "b": list(comparison.b),
            "precisions": list(comparison.precisions),
            "not_compared": list(comparison.unlike),
            "difference": None if comparison.unlike else comparison.difference,
            "images": [
                {
                    "seed": seed,
                    "both": i.both,
                    "only_a": i.only_a,
                    "only_b": i.only_b,
                    "agreement": i.agreement,
                    "odds_ratio": i.odds_ratio,
                    "mcnemar_p": i.p,
                }
                for seed, i in zip(comparison.seeds, comparison.images, strict=False)
            ],
            "over_seeds": None
            if comparison.over_seeds is None
            else {
                "mean": comparison.over_seeds.mean,
                "std": comparison.over_seeds.std,
                "interval": list(comparison.over_seeds.interval),
                "t_p": comparison.over_seeds.t_p,
                "wilcoxon_p": comparison.over_seeds.wilcoxon_p,
                "cohens_d": comparison.over_seeds.d,
            },
            "test": None
            if comparison.test is None
            else {"over": comparison.over, **test_as_dict(comparison.test, margin, floor=comparison.floor)},
            "p": comparison.p,
            "doubts": dict(zip("ab", map(list, comparison.doubts), strict=True)),
            **({"inputs": [reason._asdict() for reason in comparison.reasons]} if comparison.reasons else {}),
        }
        for comparison in comparisons
    ]


def test_as_dict(test: SeedsAndImages, margin: float | None, family: int = 1, floor: bool = False) -> dict[str, Any]:
    """The numbers of a test; `equivalent` is null unless the suite declared a margin, and at the floor."""
    return {
        "mean": test.mean,
        "interval": [test.low, test.high],
        "p": test.p,
        "at_most": test.at_most,
        "detectable": test.detectable(),
        "detectable_corrected": test.detectable(LEVEL / family),
        "seed_variance": test.seed_variance,
        "image_variance": test.image_variance,
        "equivalent": None if margin is None or floor else test.at_most <= margin / 100,
    }


def as_text(comparisons: Sequence[Comparison], a: str, b: str, select: str, margin: float | None = None) -> str:
    """Comparisons as text, a block for each that ends in its conclusion; a summary of several comes first."""
    lines = [summary(comparisons)] if len(comparisons) > 1 else []
    lines += [f"A = {a}", f"B = {b}", f"checkpoint: {WORDS[select]}; differences are A - B, in points"]
    lines.append(exploratory(len(comparisons)))
    seeds = {len(comparison.seeds) for comparison in comparisons}
    lines += too_few(min(seeds)) if len(seeds) == 1 else []
    for comparison in comparisons:
        head, *block_lines = _block(comparison, margin)
        seed_warning = too_few(len(comparison.seeds)) if len(seeds) > 1 else []
        lines += ["", head, *(f"  {line}" for line in seed_warning), *block_lines]
    return "\n".join(lines) + "\n"


def summary(comparisons: Sequence[Comparison]) -> str:
    """In how many comparisons the accuracies differ, and in how many of those tested significantly."""
    differing = sum(comparison.a != comparison.b for comparison in comparisons)
    p_values = [comparison.p for comparison in comparisons if comparison.p is not None]
    significant = sum(p < LEVEL for p in p_values)
    of_tested = f"significantly (p < {LEVEL:g}) in {significant} of {len(p_values)} tested"
    differences = f"accuracies differ in {differing}, {of_tested if p_values else 'none is tested'}"
    return f"{len(comparisons)} comparisons: {differences}"


def exploratory(count: int) -> str:
    """The heading of comparisons that no suite declared as a family."""
    return f"exploratory, not corrected for {count} comparison{'s' * (count > 1)}"


def too_few(seeds: int) -> list[str]:
    """A line saying that a claim needs more seeds; no line where there are enough."""
    minimum = statistics.SEEDS_FOR_A_CLAIM
    return [f"{seeds} seed{'s' * (seeds != 1)}: a claim about methods needs at least {minimum}"] * (seeds < minimum)


def _block(comparison: Comparison, margin: float | None) -> Iterable[str]:
    seeds = f"seed{'s' * (len(comparison.seeds) > 1)} {seeds_text(comparison.seeds)}"
    seeds += attacked_in(comparison.seeds, comparison.precisions)
    yield f"{comparison.row + ': ' if comparison.row else ''}{comparison.metric} ({comparison.n} images, {seeds})"
    means = [100 * sum(side) / len(side) for side in (comparison.a, comparison.b)]
    difference = "" if comparison.unlike else f": difference {signed(comparison.difference)}"
    yield f"  A {means[0]:.2f}, B {means[1]:.2f}{difference}"
    doubts_a, doubts_b = comparison.doubts
    for doubt in dict.fromkeys((*doubts_a, *doubts_b)):
        sides = [side for side, doubts in (("A", doubts_a), ("B", doubts_b)) if doubt in doubts]
        yield f"  {' and '.join(sides)}: {doubt}"
    if (seed_test := comparison.over_seeds) is not None:
        d = "" if seed_test.d is None else f", Cohen's d {seed_test.d:.2f}"
        yield f"  over seeds, these images: paired t {_p(seed_test.t_p)}, Wilcoxon {_p(seed_test.wilcoxon_p)}{d}"
    for reason in comparison.reasons:
        yield f"  A and B differ in what answered them: {reason.beside}"
    if comparison.unlike:
        yield from (f"  => not compared: {sentence}" for sentence in comparison.unlike)
    elif comparison.test is None:
        untested_reason = (
            "other images or labels"
            if comparison.other_images
            else "one seed"
            if len(comparison.seeds) == 1
            else "one image"
        )
        yield f"  => not tested: {untested_reason}"
    else:
        yield from (
            f"  {line}" for line in conclusion(comparison.test, comparison.over, margin, floor=comparison.floor)
        )
    if comparison.images:
        yield f"  {OTHER_IMAGES}, which says nothing about the methods:"
    for seed, i in zip(comparison.seeds, comparison.images, strict=False):
        odds = "" if i.odds_ratio is None else f", matched odds ratio {i.odds_ratio:.2f}"
        counts_text = f"only A right {i.only_a}, only B right {i.only_b}{odds}"
        test = "McNemar" if not comparison.grouped else "McNemar over groups (Obuchowski)"
        yield f"    seed {seed}: agreement {100 * i.agreement:.1f} %, {counts_text}; {test} {_p(i.p)}"


def conclusion(test: SeedsAndImages, random_effects: str, margin: float | None, floor: bool = False) -> Iterable[str]:
    """The conclusion of a test in lines: interval and p, the size not excluded, the difference that it can detect.

    margin: of equivalence in points, if the suite declared one. floor: no side is above a constant classifier.
    """
    yield f"over {random_effects}: 95 % interval {signed(test.low)} to {signed(test.high)}, {_p(test.p)}"
    significant_text = f"significantly different (p < {LEVEL:g})"
    insignificant_text = f"not significantly different (p >= {LEVEL:g})"
    size = FLOOR if floor else f"they differ by at most {100 * test.at_most:.2f} points (95 %)"
    yield f"=> {significant_text if test.p < LEVEL else insignificant_text}; {size}"
    if margin is not None and test.at_most <= margin / 100 and not floor:
        yield f"=> equivalent within ±{margin:g} points, the margin that the suite declares"
    yield f"a true difference of {points_up(test.detectable())} points would be found with a power of about 0.8"


def sentence(
    labels: tuple[str, str] | str, metric: str, difference: float, seeds: int, test: SeedsAndImages | None, p: float,
    floor: bool,
) -> str:  # fmt: skip
    """The conclusion in a sentence: "SFAT and FAT differ by at most 1.0 points under PGD-20 (95 %, 5 seeds)".

    labels: (label, that it is compared with), or the name of another contrast. p: of the test, after its correction.
    """
    attack = attack_name(metric)
    attack_text = "without an attack" if attack == "natural" else f"under {attack}"
    count = f"{seeds} seed{'s' * (seeds != 1)}"
    size, side = f"{abs(100 * difference):.1f}", "above" if difference > 0 else "below"
    label, other_label = (labels, "0") if isinstance(labels, str) else labels
    statement = f"{label} is {size} points {side} {other_label} {attack_text}"
    if test is None:
        return f"{statement} ({count}: not tested)"
    if floor:
        return f"{label} and {other_label} are no better than the most frequent class {attack_text} ({count})"
    interval = f"95 % interval {signed(test.low)} to {signed(test.high)}, {count}"
    if seeds < statistics.SEEDS_FOR_A_CLAIM:
        equal = f"{label} and {other_label} differ by 0.0 points {attack_text}"
        return f"{equal if size == '0.0' else statement} ({interval}, too few for a claim)"
    if p < LEVEL:
        return f"{statement} ({interval})"
    at_most = f"{100 * test.at_most:.1f} points"
    if isinstance(labels, str):
        return f"{label} changes accuracy {attack_text} by at most {at_most} (95 %, {count})"
    return f"{label} and {other_label} differ by at most {at_most} {attack_text} (95 %, {count})"


def signed(fraction: float) -> str:
    """A fraction as points with its sign, "+0.00" for none."""
    text = f"{100 * fraction:+.2f}"
    return text.replace("-", "+") if float(text) == 0 else text


def points_up(fraction: float, digits: int = 1) -> str:
    """A fraction as points, rounded up so that the printed size is truly found or excluded."""
    scale: int = 10**digits
    return f"{math.ceil(round(100 * scale * fraction, 9)) / scale:.{digits}f}"


def _p(value: float | None) -> str:
    return "p undefined" if value is None else "p < 1e-6" if value < 1e-6 else f"p = {value:.2g}"


def p_text(value: float) -> str:
    """A p value with two digits that matter."""
    return "< 1e-6" if value < 1e-6 else f"{value:.2g}"
