"""Several runs of the same cell: which of them a table shows, or the mean of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING

from fatbench.report.numbers.measurements import Measurement, Numbers, Source
from fatbench.report.numbers.provenance import Origin
from fatbench.report.tables.grid import Grid
from fatbench.store import replicates

if TYPE_CHECKING:
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Cell, Plan

LAST = "~"  # after every date
WHICH = ("first", "latest", "pool")
SHOWN = {
    "first": "the run that ended first is shown",
    "latest": "the run that ended last is shown",
    "pool": "each number is the mean of all runs of a cell; the spread is over seeds",
}


def plans(plan: Plan, store: Store, which: str) -> list[Plan]:
    """The plan with its cells' ids those of the runs to show; for "pool" a plan for each number of run.

    Only runs whose training is done count, unless there is none. The first plan has every cell. First is the run that
    ended first, wherever it stands in the database: files of results are read in any order.
    """
    known = replicates.of(store.database, [cell.id for cell in plan.unique()])
    ended = replicates.trained(store.database, [id for ids in known.values() for id in ids])
    done = {cell: [id for id in ids if id in ended] or ids[:1] for cell, ids in known.items()}
    latest = which == "latest"
    when = {id: ended.get(id) or ("" if latest else LAST) for ids in done.values() for id in ids}
    done = {cell: sorted(ids, key=when.__getitem__, reverse=latest) for cell, ids in done.items()}
    count = max(map(len, done.values()), default=1) if which == "pool" else 1
    return [
        replace(
            plan,
            cells=[
                replace(cell, id=done.get(cell.id, [cell.id])[k])
                for cell in plan.cells
                if k < len(done.get(cell.id, [cell.id]))
            ],
        )
        for k in range(count)
    ]


def note(grids: Iterable[Grid], store: Store, which: str, pooled: Numbers | None) -> None:
    """Say under each table which runs it shows, where some of its cells were run more than once."""
    grids = list(grids)
    cells = {id.partition(replicates.SIGN)[0] for grid in grids for _, id in grid.points}
    known = replicates.of(store.database, cells)
    for grid in grids:
        mine = {id.partition(replicates.SIGN)[0] for _, id in grid.points}
        several = [known[cell] for cell in mine if cell in known]
        if not several:
            continue
        said = f"{len(several)} of {len(mine)} cells were run more than once: {SHOWN[which]}"
        if isinstance(pooled, Pooled):
            far = [(c, max(pooled.apart[c.source.text])) for c in grid.columns if pooled.apart.get(c.source.text)]
            shown = (f"{c.heading} {100 * x if c.unit == 'percent' else x:.{c.digits}f}" for c, x in far)
            said += f"; largest difference between runs of one cell: {', '.join(shown)}" if far else ""
        else:
            said += " (--replicates first, latest or pool)"
        grid.notes.append(("replicates", said))


class Pooled(Numbers):
    """The numbers of several runs of each cell: their means. There are no outcomes of a mean."""

    def __init__(self, parts: Sequence[tuple[Plan, Numbers]]) -> None:
        self.parts = parts
        self.outcomes = None
        self.select = parts[0][1].select
        self.failed = frozenset[str]().union(*(numbers.failed for _, numbers in parts))
        self.trained = frozenset[str]().union(*(numbers.trained for _, numbers in parts))
        self.checkpoints = parts[0][1].checkpoints
        self.apart: dict[str, list[float]] = {}  # source -> how far apart the runs of a cell lie
        self._runs: dict[str, list[tuple[Numbers, Cell]]] = {}
        for plan, numbers in parts:
            for cell in plan.unique():
                first = self._runs.setdefault(self._shown(cell), [])
                first.append((numbers, cell))

    def _shown(self, cell: Cell) -> str:
        return cell.id.partition(replicates.SIGN)[0]

    def find(self, cell: Cell, source: Source) -> Measurement | None:
        found = [one for numbers, mine in self._runs[self._shown(cell)] if (one := numbers.find(mine, source))]
        if not found:
            return None
        values = [one.value for one in found]
        if len(values) > 1:
            self.apart.setdefault(source.text, []).append(max(values) - min(values))
        doubts = tuple(dict.fromkeys(chain(*(one.doubts for one in found))))
        return Measurement(fmean(values), found[0].n, found[0].stages, doubts)

    def below_chance(self, cell: Cell) -> tuple[float, int, float] | None:
        runs = self._runs[self._shown(cell)]
        return next((found for numbers, mine in runs if (found := numbers.below_chance(mine))), None)

    def origins(self, cell: str, stage: str) -> Iterable[Origin]:
        mine = self._runs[cell.partition(replicates.SIGN)[0]]
        return dict.fromkeys(chain(*(numbers.origins(one.id, stage) for numbers, one in mine)))
