"""What stands in one place of a table: a value over seeds, its difference from another, its place between two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fatbench.report.numbers import provenance
from fatbench.report.numbers.doubts import Doubt, with_seeds
from fatbench.report.numbers.measurements import Measurement, Numbers, Source, mean_and_std
from fatbench.report.numbers.statistics import over_seeds, paired, share
from fatbench.report.tables.grid import Value
from fatbench.report.tables.grid_points import PointKey, baselines, point_key
from fatbench.store.stage_names import parsed
from fatbench.suite import confounders
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.model import Condition
from fatbench.suite.tables import OVER


def value_of(cells: Sequence[Cell], source: Source, numbers: Numbers, facts: provenance.TableFacts) -> Value:
    """Mean and spread over the seeds of one point."""
    if not cells:
        return Value(planned=False)
    measured: list[tuple[int, Cell, Measurement]] = []  # a seed each
    seeds_by_doubt: dict[Doubt, list[int]] = {}
    for cell in cells:
        number = numbers.find(cell, source)
        if number is None:
            continue
        seed = int(cell.spec["seed"])
        for doubt in number.doubts:
            seeds_by_doubt.setdefault(doubt, []).append(seed)
        if math.isfinite(number.value):
            measured.append((seed, cell, number))
            _add_facts(cell, source, number, numbers, facts)
    seeds = tuple(seed for seed, _, _ in measured)
    doubts = with_seeds(seeds_by_doubt, seeds, len(cells))
    codes = frozenset(doubt.code for doubt in seeds_by_doubt)
    ids = tuple(cell.id for cell in cells)
    if not measured:
        never = all(numbers.find(cell, source) is None and _never(cell, source, numbers) for cell in cells)
        return Value(never=never, wanted=0 if never else len(cells), doubts=doubts, codes=codes, cells=ids)
    values = tuple(number.value for _, _, number in measured)
    mean, std = mean_and_std(values)
    has_outcomes = source.stage == "evaluation" and source.client == -1
    return Value(
        mean=mean,
        std=std,
        seeds=seeds,
        wanted=len(cells),
        n=tuple(sorted({number.n for _, _, number in measured})),
        values=values,
        behind=tuple((cell.id, number.stages[-1]) for _, cell, number in measured) if has_outcomes else (),
        cells=ids,
        doubts=doubts,
        codes=codes,
    )


def _add_facts(
    cell: Cell, source: Source, number: Measurement, numbers: Numbers, facts: provenance.TableFacts
) -> None:  # fmt: skip
    """Note what a number of one seed was read from."""
    dataset = cell.spec["data"]["name"]
    origins = [(stage, numbers.origins(cell.id, stage)) for stage in number.stages]
    if source.stage not in OVER:
        facts.add(cell.id, dataset, source.metric if source.stage != "train" else "", number.n, origins)
        return
    for stage, stage_origins in origins:  # each evaluation under its own name
        facts.add(cell.id, dataset, parsed(stage).metric, number.n, [(stage, stage_origins)])


def _never(cell: Cell, source: Source, numbers: Numbers) -> bool:
    """Whether a number that is not there will not come: the checkpoint is not evaluated, or training lacks it."""
    if source.stage == "train":
        return (source.round or 0) > int(cell.spec["algorithm"]["rounds"]) or cell.id in numbers.trained
    wanted = ("last", "best-test") if source.stage == "gap" else (numbers.select,)
    return not set(wanted) <= {*numbers.checkpoints}


def difference(
    cells: Sequence[Cell],
    source: Source,
    numbers: Numbers,
    facts: provenance.TableFacts,
    others: Mapping[PointKey, Cell],
    minus: Condition,
) -> Value:
    """How much a point has more than another, seed by seed; nothing is planned where it is that other one."""
    pairs = [(cell, other) for cell in cells if (other := others.get(point_key(cell, minus))) not in (None, cell)]
    pairs = [(cell, other) for cell, other in pairs if other and not confounders.confounders([other, cell])]
    ours = value_of([cell for cell, _ in pairs], source, numbers, facts)
    theirs = value_of([other for _, other in pairs if other is not None], source, numbers, facts)
    mine, less = (dict(zip(value.seeds, value.values, strict=True)) for value in (ours, theirs))
    seeds = tuple(seed for seed in mine if seed in less)
    if not seeds:
        never = ours.never or theirs.never
        return Value(
            planned=ours.planned,
            never=never,
            wanted=ours.wanted,
            doubts=ours.doubts,
            codes=ours.codes,
            cells=ours.cells,
        )
    values = tuple(mine[seed] - less[seed] for seed in seeds)
    mean, std = mean_and_std(values)
    test = paired(mine, less)
    interval = None if test is None else test.interval
    if source.fraction and len(ours.n) == 1 and ours.n[0] and (accuracies := over_seeds(values, ours.n[0])):
        interval = accuracies.low, accuracies.high  # seeds that agree to the image are no interval of no width
    return Value(
        mean=mean, std=std, seeds=seeds, wanted=ours.wanted, n=ours.n, values=values, doubts=ours.doubts,
        codes=ours.codes, cells=ours.cells, interval=interval,
    )  # fmt: skip


Ends = list[tuple[Condition, dict[PointKey, Cell]]]  # the two labels of a share, each with the cells that have it


def ends_of(plan: Plan, way: Condition) -> Ends:
    """Where the cells are between which a share places a number; none without `share`."""
    ends: list[Condition] = [{axis: [label]} for axis, labels in way.items() for label in labels]
    return [(end, baselines(plan, end)) for end in ends]


def placed(cells: Sequence[Cell], source: Source, numbers: Numbers, facts: provenance.TableFacts, ends: Ends) -> Value:
    """How far a point is on the way from one to another, of the means over the seeds that all three have."""
    ours = value_of(cells, source, numbers, facts)
    at, start, end = (
        dict(zip(value.seeds, value.values, strict=True))
        for value in (ours, *(_value_at(cells, end, source, numbers, facts) for end in ends))
    )
    seeds = tuple(seed for seed in at if seed in start and seed in end)
    found = share([at[seed] - start[seed] for seed in seeds], [end[seed] - start[seed] for seed in seeds])
    mean, interval = found or (None, None)
    return replace(ours, mean=mean, std=None, seeds=seeds if found else (), values=(), behind=(), interval=interval)


def _value_at(
    cells: Sequence[Cell], end: tuple[Condition, dict[PointKey, Cell]], source: Source, numbers: Numbers,
    facts: provenance.TableFacts,
) -> Value:  # fmt: skip
    """The value of the same points with another label."""
    labels, others = end
    found = [other for cell in cells if (other := others.get(point_key(cell, labels))) is not None]
    return value_of(found, source, numbers, facts)
