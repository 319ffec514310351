"""Fill the tables behind the view `results`: the doubts about numbers, and the run of each cell that is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from sqlalchemy import select as sql

from fatbench import settings
from fatbench.errors import FatbenchError
from fatbench.report.numbers.shown_runs import chosen_runs
from fatbench.report.numbers.stored import doubts_of
from fatbench.store import replicates
from fatbench.store.rows import fetch
from fatbench.store.schema import ASKED, DOUBTS, POINTS
from fatbench.store.stages import Store


@contextmanager
def judged(db: str | None, cells: Iterable[str], mark: Callable[[Store], object] | None = None) -> Iterator[None]:
    """Judge cells after the work in the block, however it ended; a missing database is skipped.

    mark: called then, too, such as what says which points are current.
    """
    try:
        yield
    finally:
        with suppress(FatbenchError), Store.open(settings.database(db)) as store:
            judge(store, sorted(store.known_cells(cells)))
            if mark is not None:
                mark(store)


def judge(store: Store, cells: Iterable[str]) -> None:
    """Store the doubts of some cells and their replicates, and which of their runs each suite shows."""
    cells = list(cells)
    replicate_ids = replicates.by_cell(store.database, cells)
    ids = [id for cell in cells for id in replicate_ids.get(cell, [cell])]
    store.store_doubts(_rows(store, ids), _runs_read(store, replicate_ids))


Row = tuple[str, str, str, float | None]  # of the table `doubts`: stage, code, against, value


def _rows(store: Store, ids: Sequence[str]) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {id: [] for id in ids}
    for (id, stage), reasons in doubts_of(ids, store).items():
        values = {(stage, one.code, one.against): None if math.isnan(one.value) else one.value for one in reasons}
        rows[id] += [(*key, value) for key, value in values.items()]
    return rows


def outdated(store: Store) -> dict[tuple[str, str], tuple[list[str], list[str]]]:
    """(cell, stage) -> (codes of its stored doubts, codes of its recomputed doubts), where the two differ.

    What has changed follows from files and plug-ins, which may not be at hand, and not from the numbers.
    """
    ids = sorted(store.cells())
    columns = (DOUBTS.c.cell, DOUBTS.c.stage, DOUBTS.c.code, DOUBTS.c.against, DOUBTS.c.value)
    stored_rows: dict[tuple[str, str], set[Row]] = {}  # (cell, stage) -> its doubts
    with store.database.reading() as connection:
        for cell, *row in fetch(connection, sql(*columns).where(DOUBTS.c.code != "changed"), DOUBTS.c.cell, ids):
            stored_rows.setdefault((cell, row[0]), set()).add(tuple(row))
    computed: dict[tuple[str, str], set[Row]] = {}
    for cell, rows in _rows(store, ids).items():
        for row in (row for row in rows if row[1] != "changed"):
            computed.setdefault((cell, row[0]), set()).add(row)
    return {
        key: (sorted(row[1] for row in stored_rows.get(key, ())), sorted(row[1] for row in computed.get(key, ())))
        for key in sorted(stored_rows.keys() | computed.keys())
        if stored_rows.get(key) != computed.get(key)
    }


def _runs_read(store: Store, cells: Iterable[str]) -> dict[tuple[str, str, str], str]:
    """(suite, preset, cell) -> the run that is read, of cells with several."""
    replicated_cells = set(cells)
    if not replicated_cells:
        return {}
    suites: dict[tuple[str, str], dict[str, set[str]]] = {}  # (suite, preset) -> cell -> evaluations
    query = sql(POINTS.c.suite, POINTS.c.preset, POINTS.c.cell, ASKED.c.evaluation)
    joined = query.select_from(POINTS.outerjoin(ASKED, ASKED.c.kind == POINTS.c.kind))
    with store.database.reading() as connection:
        for suite, preset, cell, evaluation in fetch(connection, joined, POINTS.c.cell, None):
            suites.setdefault((suite, preset), {}).setdefault(cell, set()).add(evaluation or "")
    run_by_point: dict[tuple[str, str, str], str] = {}
    for (suite, preset), evaluations_by_cell in suites.items():
        if cells_of_suite := replicated_cells & evaluations_by_cell.keys():
            ids = chosen_runs(store, evaluations_by_cell)
            run_by_point |= {(suite, preset, cell): ids.get(cell, cell) for cell in cells_of_suite}
    return run_by_point
