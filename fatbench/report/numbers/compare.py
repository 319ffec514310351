"""Two sides against each other: the same evaluations of paired cells, and whether their differences are real.

    pairs = rows(plan, "aggregator=sfat", "aggregator=samples")      two rows of a suite
    compare(pairs, a_store, b_store, "last")             one Comparison for each row and evaluation

A cell of one side is paired with the cell of the other side that has the same seed and the same other labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fatbench.errors import DatabaseError, NothingMatched, SpecError, did_you_mean
from fatbench.report.numbers import statistics
from fatbench.report.numbers.flags import joined
from fatbench.report.numbers.statistics import Difference, ImageOutcomes, Images, Paired
from fatbench.store.consistency import disagreement
from fatbench.store.replicates import SIGN
from fatbench.store.selection import WORDS, Checkpoint
from fatbench.suite import filters

if TYPE_CHECKING:
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Cell, Plan

LEVEL = 0.05  # a difference is called one where its corrected p is below this


@dataclass(frozen=True)
class Pair:
    """Two cells to compare, by their ids in the database of each side."""

    row: str  # the labels that both share: "CIFAR-10, Non-IID"
    seed: int
    a: str
    b: str


@dataclass(frozen=True)
class Measured:
    """One evaluation of one cell."""

    value: float  # accuracy in [0, 1]
    n: int
    outcomes: ImageOutcomes | None  # of every image, by each model that is deployed; None: not stored


@dataclass(frozen=True)
class Comparison:
    """One evaluation of one row under both sides."""

    row: str
    metric: str
    n: int  # test images
    seeds: tuple[int, ...]
    a: tuple[float, ...]  # accuracies in [0, 1], one a seed
    b: tuple[float, ...]
    images: tuple[Images, ...]  # one a seed; empty: not one outcome an image is stored on both sides
    over_seeds: Paired | None  # None below two seeds
    over_both: Difference | None  # None below two seeds, or where no difference varies
    over_images: Difference | None  # of one seed alone, where several models judge an image
    bootstrap: tuple[float, float] | None  # 95 % interval over seeds and images
    holm: float | None = None  # `p` after Holm's correction over all comparisons

    @property
    def difference(self) -> float:
        return sum(x - y for x, y in zip(self.a, self.b, strict=True)) / len(self.seeds)

    @property
    def test(self) -> str:
        """Which test `p` is of: the one that covers most of what was drawn at random."""
        if self.over_both is not None:
            return "seeds and images"
        if len(self.images) == 1:
            return "McNemar"
        if self.over_images is not None:
            return "images"
        return "paired t" if self.over_seeds is not None and self.over_seeds.t_p is not None else ""

    @property
    def p(self) -> float | None:
        """Of `test`; None where nothing can be tested."""
        if self.over_both is not None:
            return self.over_both.p
        if len(self.images) == 1:
            return self.images[0].p
        if self.over_images is not None:
            return self.over_images.p
        return None if self.over_seeds is None else self.over_seeds.t_p


# --- which cells -------------------------------------------------------------------------------------------------


def rows(plan: Plan, a: str, b: str) -> list[Pair]:
    """Pairs of a plan's cells: `a` and `b` are filters ("aggregator=sfat") or labels of an axis ("SFAT").

    SpecError: neither; a cell on both sides; several cells of a seed that could be the partner. NothingMatched: no cell
    has a partner.
    """
    ours, theirs = _side(plan, a), _side(plan, b)
    if shared := {cell.id for cell in ours} & {cell.id for cell in theirs}:
        raise SpecError(f"'{a}' and '{b}' share {len(shared)} cells, such as {min(shared)}: they must be apart")
    axes = list(dict.fromkeys(axis for cell in plan.cells for axis in cell.key))
    labels = [[{cell.key.get(axis) for cell in side} for axis in axes] for side in (ours, theirs)]
    rest = [axis for axis, one, other in zip(axes, *labels, strict=True) if one & other]

    def by_place(side: Sequence[Cell], said: str) -> dict[tuple[str, int], str]:
        found: dict[tuple[str, int], str] = {}
        for cell in side:
            place = ", ".join(cell.key[axis] for axis in rest if axis in cell.key), int(cell.spec["seed"])
            if found.setdefault(place, cell.id) != cell.id:
                apart = [axis for axis in axes if axis not in rest]
                raise SpecError(f"'{said}' holds several cells of seed {place[1]}: name one of {', '.join(apart)}")
        return found

    mine, others = by_place(ours, a), by_place(theirs, b)
    found = [Pair(*place, mine[place], others[place]) for place in mine if place in others]
    if not found:
        raise NothingMatched(f"no cell of '{a}' has a partner of the same seed and labels among those of '{b}'")
    parts = [pair.row.split(", ") for pair in found]
    same = set.intersection(*map(set, parts))  # a label that all pairs share says nothing
    return [replace(p, row=", ".join(x for x in row if x not in same)) for p, row in zip(found, parts, strict=True)]


def _side(plan: Plan, said: str) -> list[Cell]:
    """The cells that a filter or a label names, each once."""
    if any(sign in said for sign in "=<>"):
        return filters.select(plan, said).unique()
    labels = {label for cell in plan.cells for label in cell.key.values()}
    cells = [cell for cell in plan.unique() if said in cell.key.values()]
    if not cells:
        raise SpecError(
            f"suite '{plan.suite}', preset {plan.preset}, has no label '{said}'{did_you_mean(said, labels)}"
            " (or give a filter such as aggregator=sfat)"
        )
    return cells


def common(a: Store, b: Store, plan: Plan | None = None) -> list[Pair]:
    """The cells that two databases share, of a plan or all; the settings in which these differ name the rows."""
    both = {id for id in a.cells().keys() & b.cells().keys() if SIGN not in id}
    if plan is not None:
        named = {c.id: (", ".join(c.key.values()), int(c.spec["seed"])) for c in plan.unique() if c.id in both}
        return [Pair(row, seed, id, id) for id, (row, seed) in named.items()]
    specs = a.cells(sorted(both))
    flat = {id: dict(_flat(spec)) for id, spec in specs.items()}
    keys = dict.fromkeys(key for one in flat.values() for key in one if key != "seed")
    varied = [key for key in keys if len({one.get(key) for one in flat.values()}) > 1]
    varied = [
        key for key in varied if not any(key.startswith(f"{other}.") for other in varied)
    ]  # not a call's settings
    pairs = []
    for id, one in flat.items():
        row = ", ".join(f"{key}={one[key]}" for key in varied if key in one)
        pairs.append(Pair(row, int(specs[id].get("seed") or 0), id, id))
    return sorted(pairs, key=lambda pair: (pair.row, pair.seed))


def _flat(node: Any, path: str = "") -> Iterable[tuple[str, str]]:
    """The settings of a spec: dotted path -> value as JSON; a call's name stands at the call's own path."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _flat(value, path if key == "name" else f"{path}.{key}".lstrip("."))
    else:
        yield path, node if isinstance(node, str) else json.dumps(node)


# --- what was measured -------------------------------------------------------------------------------------------


def measured(store: Store, cell: str, select: Checkpoint) -> dict[str, Measured]:
    """The finished evaluations of a cell at a checkpoint: "pgd20-0a1b2c3d", which stands for attack, n and batch.

    DatabaseError: an accuracy is not the mean of its outcomes.
    """
    stages = {name: row for (_, name), row in store.stages([cell]).items()}
    if "train" not in stages:
        return {}
    if select == "last":
        round = int(store.cells([cell])[cell]["algorithm"]["rounds"])
    elif select in stages["train"].record:
        round = int(stages["train"].record[select]["round"])
    else:
        return {}
    wanted = [name for name, row in stages.items() if name.endswith(f"@{round}") and row.status == "done"]
    found = {}
    for number in store.measurements([cell], stages=wanted):
        evaluation = number["stage"].rpartition("@")[0]
        if number["client"] >= 0 or number["metric"] != label(evaluation):
            continue
        bits, total = joined(store.outcomes(cell, number["stage"]))
        n, value = int(number["n"]), float(number["value"])
        if said := disagreement(number["metric"], value, n, bits.bit_count(), total):
            raise DatabaseError(f"{store.database.shown}: cell {cell} {number['stage']}: {said} (fatbench db check)")
        outcomes = (bits, total) if n and total and total % n == 0 else None
        found[evaluation] = Measured(value, n, outcomes)
    return found


def label(evaluation: str) -> str:
    """ "pgd20" of "pgd20-0a1b2c3d"."""
    return evaluation.rpartition("-")[0]


def compare(
    pairs: Sequence[Pair],
    of_a: Callable[[str], Mapping[str, Measured]],
    of_b: Callable[[str], Mapping[str, Measured]],
    metrics: Sequence[str] = (),
    samples: int = 10_000,
) -> list[Comparison]:
    """One comparison for each row and evaluation that both sides have, corrected by Holm over all of them.

    of_a, of_b: a cell's evaluations, see `measured`. metrics: only these labels. NothingMatched: nothing was measured
    on both sides. SpecError: a label that neither side has.
    """
    both = [(pair, of_a(pair.a), of_b(pair.b)) for pair in pairs]
    known = {label(evaluation) for _, *sides in both for side in sides for evaluation in side}
    for metric in metrics:
        if metric not in known:
            raise SpecError(f"--metric: nothing is measured as '{metric}'{did_you_mean(metric, known)}")
    found: dict[tuple[str, str], list[tuple[int, Measured, Measured]]] = {}
    for pair, a, b in both:
        for evaluation in a:
            if evaluation in b and (not metrics or label(evaluation) in metrics):
                found.setdefault((pair.row, evaluation), []).append((pair.seed, a[evaluation], b[evaluation]))
    if not found:
        raise NothingMatched("the two sides have no evaluation in common (the same attack on as many test images)")
    names = {evaluation for _, evaluation in found}
    done = [
        _comparison(row, evaluation if _ambiguous(evaluation, names) else label(evaluation), runs, samples)
        for (row, evaluation), runs in found.items()
    ]
    ps = [one.p for one in done if one.p is not None]
    corrected = iter(statistics.holm(ps))
    return [one if one.p is None else replace(one, holm=next(corrected)) for one in done]


def _ambiguous(evaluation: str, names: Iterable[str]) -> bool:
    return any(name != evaluation and label(name) == label(evaluation) for name in names)


def _comparison(row: str, metric: str, runs: Sequence[tuple[int, Measured, Measured]], samples: int) -> Comparison:
    runs = sorted(runs, key=lambda run: run[0])
    seeds = tuple(seed for seed, _, _ in runs)
    a, b = tuple(one.value for _, one, _ in runs), tuple(other.value for _, _, other in runs)
    n = runs[0][1].n
    ours = [one.outcomes for _, one, _ in runs if one.outcomes is not None]
    theirs = [other.outcomes for _, _, other in runs if other.outcomes is not None]
    counts = {count for _, count in (*ours, *theirs)}
    whole = len(ours) == len(theirs) == len(runs) and not any(count % n for count in counts)  # of every model deployed
    return Comparison(
        row=row,
        metric=metric,
        n=n,
        seeds=seeds,
        a=a,
        b=b,
        images=tuple(map(statistics.images, ours, theirs)) if whole and counts == {n} else (),
        over_seeds=statistics.paired(dict(zip(seeds, a, strict=True)), dict(zip(seeds, b, strict=True))),
        over_both=statistics.crossed(ours, theirs, n) if whole else None,
        over_images=statistics.over_images(ours[0], theirs[0], n)
        if whole and len(runs) == 1 and counts != {n}
        else None,
        bootstrap=statistics.bootstrap(ours, theirs, n, samples=samples) if whole else None,
    )


# --- what is printed ---------------------------------------------------------------------------------------------


def as_json(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Each comparison as plain data: fractions in [0, 1], unrounded."""
    return [
        {
            "row": one.row, "metric": one.metric, "n": one.n, "seeds": list(one.seeds), "a": list(one.a),
            "b": list(one.b), "difference": one.difference,
            "images": [
                {"seed": seed, "both": i.both, "only_a": i.only_a, "only_b": i.only_b, "agreement": i.agreement,
                 "odds_ratio": i.odds_ratio, "mcnemar_p": i.p}
                for seed, i in zip(one.seeds, one.images, strict=False)
            ],
            "over_seeds": None if one.over_seeds is None else {
                "mean": one.over_seeds.mean, "std": one.over_seeds.std, "interval": list(one.over_seeds.interval),
                "t_p": one.over_seeds.t_p, "wilcoxon_p": one.over_seeds.wilcoxon_p, "cohens_d": one.over_seeds.d,
            },
            "over_seeds_and_images": _as_json(one.over_both), "over_images": _as_json(one.over_images),
            "bootstrap": None if one.bootstrap is None else list(one.bootstrap),
            "test": one.test or None, "p": one.p, "p_holm": one.holm,
        }
        for one in comparisons
    ]  # fmt: skip


def _as_json(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"mean": found.mean, "standard_error": found.error, "df": found.df, "interval": [found.low, found.high],
            "p": found.p}  # fmt: skip


def as_text(comparisons: Sequence[Comparison], a: str, b: str, select: str) -> str:
    """A block for each comparison, ending in what it comes to."""
    lines = [f"A = {a}", f"B = {b}", f"checkpoint: {WORDS[select]}; differences are A - B, in points"]
    count = sum(one.p is not None for one in comparisons)
    for one in comparisons:
        lines += ["", *_block(one, count)]
    return "\n".join(lines) + "\n"


def _block(one: Comparison, count: int) -> Iterable[str]:
    seeds = f"seed{'s' * (len(one.seeds) > 1)} {', '.join(map(str, one.seeds))}"
    yield f"{one.row + ': ' if one.row else ''}{one.metric} ({one.n} images, {seeds})"
    means = [100 * sum(side) / len(side) for side in (one.a, one.b)]
    yield f"  A {means[0]:.2f}, B {means[1]:.2f}: difference {100 * one.difference:+.2f}"
    if one.over_both is not None:
        yield f"  over seeds and images: 95 % interval {_points(one.over_both.low, one.over_both.high)}"
    if one.over_images is not None:
        yield f"  over images: 95 % interval {_points(one.over_images.low, one.over_images.high)}"
    if one.bootstrap is not None:
        over = "seeds and images" if len(one.seeds) > 1 else "images"
        yield f"  bootstrap over {over}: 95 % interval {_points(*one.bootstrap)}"
    for seed, i in zip(one.seeds, one.images, strict=False):
        odds = "" if i.odds_ratio is None else f", matched odds ratio {i.odds_ratio:.2f}"
        right = f"only A right {i.only_a}, only B right {i.only_b}{odds}"
        yield f"  images, seed {seed}: agreement {100 * i.agreement:.1f} %, {right}; McNemar {_p(i.p)}"
    if not one.images:
        several = "several models judge an image, which counts with their mean"
        yield f"  images: {several if one.bootstrap else 'the outcomes of both sides are not stored one an image'}"
    if (test := one.over_seeds) is not None:
        d = "" if test.d is None else f", Cohen's d {test.d:.2f}"
        yield f"  seeds: paired t {_p(test.t_p)}, Wilcoxon {_p(test.wilcoxon_p)}{d}"
    if one.p is None or one.holm is None:
        lacking = len(one.seeds) == 1 and one.bootstrap is None
        yield f"  => nothing can be tested: {'one seed, and no outcomes' if lacking else 'no difference varies'}"
        return
    said = "A and B differ" if one.holm < LEVEL else "A and B cannot be told apart"
    after = f", after Holm over {count} comparisons {_p(one.holm)}" if count > 1 else ""
    yield f"  => {one.test}: {_p(one.p)}{after}: {said}"


def _points(low: float, high: float) -> str:
    return f"{100 * low:+.2f} to {100 * high:+.2f}"


def _p(value: float | None) -> str:
    return "undefined" if value is None else "p < 0.0001" if value < 0.0001 else f"p = {value:.2g}"
