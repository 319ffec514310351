"""Which cells are compared, and what was measured of them.

    pairs(plan, "aggregator=sfat", "aggregator=samples")      two rows of a suite
    common(a_store, b_store)                                  the cells that two databases share
    measured_numbers(store, cells, "last")                    cell -> evaluation -> its number

A cell of one side is paired with the cell of the other side that has the same seed and the same other labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fatbench.errors import NothingMatched, SpecError, did_you_mean
from fatbench.report.numbers import statistics
from fatbench.report.numbers.shown_runs import chosen_runs
from fatbench.report.numbers.stored import OVERALL, Measurement, evaluations, numbers_of
from fatbench.store.replicates import SIGN
from fatbench.store.schema import NUMBERS
from fatbench.store.selection import Checkpoint
from fatbench.suite import confounders, filters
from fatbench.suite.cells import Cell, Plan

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fatbench.store.stages import Store

Place = tuple[tuple[str, str], ...]  # (axis, label) of the other axes


class Pair(NamedTuple):
    """Two cells to compare, by their ids in the database of each side."""

    labels: Place  # that both share
    seed: int
    a: str
    b: str
    unlike: tuple[str, ...] = ()  # see `Difference`


def pairs(plan: Plan, a: str, b: str) -> list[Pair]:
    """Pair a plan's cells: `a` and `b` are filters ("aggregator=sfat") or labels of an axis ("SFAT").

    SpecError: a side is neither, a cell is on both sides, or several cells of a seed could be the partner.
    NothingMatched: no cell has a partner.
    """
    sides = [_side(plan, a), _side(plan, b)]
    if shared := {cell.id for cell in sides[0]} & {cell.id for cell in sides[1]}:
        raise SpecError(f"'{a}' and '{b}' share {len(shared)} cells, such as {min(shared)}: they must be apart")
    axes = list(dict.fromkeys(axis for cell in plan.cells for axis in cell.key))
    labels_a, labels_b = ({axis: {cell.key.get(axis) for cell in side} for axis in axes} for side in sides)
    common_axes = [axis for axis in axes if labels_a[axis] & labels_b[axis]]
    by_place: list[dict[tuple[Place, int], Cell]] = [{}, {}]
    for text, side, cells in zip((a, b), sides, by_place, strict=True):
        for cell in side:
            labels = tuple((axis, cell.key[axis]) for axis in common_axes if axis in cell.key)
            seed = int(cell.spec["seed"])
            if cells.setdefault((labels, seed), cell) is not cell:
                others = ", ".join(axis for axis in axes if axis not in common_axes)
                raise SpecError(f"'{text}' holds several cells of seed {seed}: name one of {others}")
    found = [
        Pair(*place, cell.id, other.id, confounders.differences(other, cell))
        for place, cell in by_place[0].items()
        if (other := by_place[1].get(place)) is not None
    ]
    if not found:
        raise NothingMatched(f"no cell of '{a}' has a partner of the same seed and labels among those of '{b}'")
    shared_labels = set.intersection(*(set(pair.labels) for pair in found))  # what all pairs share distinguishes none
    return [pair._replace(labels=tuple(one for one in pair.labels if one not in shared_labels)) for pair in found]


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
    asked: Mapping[str, Collection[str]] = dict.fromkeys(shared_cells, ())
    labels: dict[str, tuple[Place, int]]
    if plan is not None:
        cells = {cell.id: cell for cell in plan.unique() if cell.id in shared_cells}
        asked = {id: [evaluation.id for evaluation in cell.evaluations] for id, cell in cells.items()}
        labels = {id: (tuple(cell.key.items()), int(cell.spec["seed"])) for id, cell in cells.items()}
    else:
        specs = a.cells(sorted(shared_cells))
        settings = {id: dict(_flat(spec)) for id, spec in specs.items()}
        paths = dict.fromkeys(path for one in settings.values() for path in one if path != "seed")
        varied = [path for path in paths if len({one.get(path) for one in settings.values()}) > 1]
        # a call's name tells more than its settings
        varied = [path for path in varied if not any(path.startswith(f"{other}.") for other in varied)]
        labels = {
            id: (
                tuple((path, f"{path}={one[path]}") for path in varied if path in one),
                int(specs[id].get("seed") or 0),
            )
            for id, one in settings.items()
        }
    runs_a, runs_b = chosen_runs(a, asked), chosen_runs(b, asked)
    found = [Pair(*of_cell, runs_a.get(id, id), runs_b.get(id, id)) for id, of_cell in labels.items()]
    return found if plan is not None else sorted(found, key=lambda pair: (pair.labels, pair.seed))


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


def answers_of_clients(store: Store, cells: Iterable[str], metric: str) -> dict[str, dict[int, float]]:
    """Cell -> client -> what training has logged of it; only of cells whose last round is logged."""
    specs = store.cells(sorted(cells))
    condition = (NUMBERS.c.stage == "train") & (NUMBERS.c.metric == f"{metric}_client") & ~OVERALL
    answers: dict[str, dict[int, float]] = {}
    rounds: dict[str, int] = {}
    for number in numbers_of(specs, store, condition):
        answers.setdefault(number.cell, {})[number.client] = number.value
        rounds[number.cell] = max(rounds.get(number.cell, 0), number.round)
    return {cell: of for cell, of in answers.items() if rounds[cell] == specs[cell]["algorithm"]["rounds"]}


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
