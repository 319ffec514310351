"""The value of one field of a table: a mean over seeds, a difference from a baseline, or a share between two points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fatbench.report.contrasts import at_floor, of_values, share
from fatbench.report.numbers import provenance
from fatbench.report.numbers.doubts import Doubt, with_seeds
from fatbench.report.numbers.measurements import Measurement, Numbers, Source, mean_and_std
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
    measured: list[tuple[int, Cell, Measurement]] = []  # (seed, cell, its number), only finite numbers
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
        will_never_be = all(
            numbers.find(cell, source) is None and _never_measured(cell, source, numbers) for cell in cells
        )
        return Value(
            never=will_never_be, wanted=0 if will_never_be else len(cells), doubts=doubts, codes=codes, cells=ids
        )
    values = tuple(number.value for _, _, number in measured)
    mean, std = mean_and_std(values)
    # only an evaluation over all clients has an outcome for each image, which significance tests need
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
        at_floor=at_floor(number for _, _, number in measured),
    )


def _add_facts(cell: Cell, source: Source, number: Measurement, numbers: Numbers, facts: provenance.TableFacts) -> None:
    """Record in `facts` the stages that a number of one seed was read from."""
    dataset = cell.spec["data"]["name"]
    origins = [(stage, numbers.origins(cell.id, stage)) for stage in number.stages]
    if source.stage not in OVER:
        facts.add(cell.id, dataset, source.metric if source.stage != "train" else "", number.n, origins)
        return
    for stage, stage_origins in origins:  # each evaluation under its own name
        facts.add(cell.id, dataset, parsed(stage).metric, number.n, [(stage, stage_origins)])


def _never_measured(cell: Cell, source: Source, numbers: Numbers) -> bool:
    """Whether a missing number will stay missing: its checkpoint is not evaluated, or training does not log it."""
    if source.stage == "train":
        return (source.round or 0) > int(cell.spec["algorithm"]["rounds"]) or cell.id in numbers.trained
    checkpoints_read = ("last", "best-test") if source.stage == "gap" else (numbers.select,)
    return not set(checkpoints_read) <= {*numbers.checkpoints}


def value_minus_baseline(
    cells: Sequence[Cell],
    source: Source,
    numbers: Numbers,
    facts: provenance.TableFacts,
    baseline_cells: Mapping[PointKey, Cell],
    minus: Condition,
) -> Value:
    """The difference between a point and its baseline, seed by seed; not planned where the point is the baseline."""
    pairs = [
        (cell, baseline_cell)
        for cell in cells
        if (baseline_cell := baseline_cells.get(point_key(cell, minus))) not in (None, cell)
    ]
    pairs = [
        (cell, baseline_cell)
        for cell, baseline_cell in pairs
        if baseline_cell and not confounders.confounders([baseline_cell, cell])
    ]
    # a cell that differs from the baseline in more than its labels is not compared with it
    minuend = value_of([cell for cell, _ in pairs], source, numbers, facts)
    subtrahend = value_of(
        [baseline_cell for _, baseline_cell in pairs if baseline_cell is not None], source, numbers, facts
    )
    minuend_by_seed, subtrahend_by_seed = (
        dict(zip(value.seeds, value.values, strict=True)) for value in (minuend, subtrahend)
    )
    seeds = tuple(seed for seed in minuend_by_seed if seed in subtrahend_by_seed)
    if not seeds:
        will_never_be = minuend.never or subtrahend.never
        return Value(
            planned=minuend.planned,
            never=will_never_be,
            wanted=minuend.wanted,
            doubts=minuend.doubts,
            codes=minuend.codes,
            cells=minuend.cells,
        )
    values = tuple(minuend_by_seed[seed] - subtrahend_by_seed[seed] for seed in seeds)
    mean, std = mean_and_std(values)
    # of accuracies, seeds that agree to the image are no interval of no width
    images = minuend.n[0] if source.fraction and len(minuend.n) == 1 else 0
    difference = of_values(("row", "baseline"), source.metric, minuend_by_seed, subtrahend_by_seed, n=images)
    return Value(
        mean=mean, std=std, seeds=seeds, wanted=minuend.wanted, n=minuend.n, values=values, doubts=minuend.doubts,
        codes=minuend.codes, cells=minuend.cells, interval=difference.interval,
    )  # fmt: skip


Ends = list[tuple[Condition, dict[PointKey, Cell]]]  # the two labels of a share, each with the cells that have it


def share_ends(plan: Plan, way: Condition) -> Ends:
    """The two points between which a share places a number, each with its cells; none without `share`."""
    ends: list[Condition] = [{axis: [label]} for axis, labels in way.items() for label in labels]
    return [(end, baselines(plan, end)) for end in ends]


def share_between(
    cells: Sequence[Cell], source: Source, numbers: Numbers, facts: provenance.TableFacts, ends: Ends
) -> Value:
    """The share of the way between two points at which a point lies, by means over the seeds that all three have."""
    value = value_of(cells, source, numbers, facts)
    point, start, end = (
        dict(zip(v.seeds, v.values, strict=True))
        for v in (value, *(_value_at(cells, end, source, numbers, facts) for end in ends))
    )
    found = share(source.metric, point, start, end)
    return replace(
        value, mean=found.difference, std=None, seeds=found.seeds, values=(), behind=(), interval=found.interval
    )


def _value_at(
    cells: Sequence[Cell], end: tuple[Condition, dict[PointKey, Cell]], source: Source, numbers: Numbers,
    facts: provenance.TableFacts,
) -> Value:  # fmt: skip
    """The value of the cells at one end of the share that have the same other labels."""
    labels, cells_by_point = end
    end_cells = [end_cell for cell in cells if (end_cell := cells_by_point.get(point_key(cell, labels))) is not None]
    return value_of(end_cells, source, numbers, facts)
