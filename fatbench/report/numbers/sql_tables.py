"""What the view `results` says of numbers beside their values: why to doubt them, and which run of a cell is shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import select as sql

from fatbench import settings
from fatbench.errors import FatbenchError
from fatbench.report.numbers.cell_rows import doubts_of
from fatbench.report.numbers.shown_runs import chosen
from fatbench.store import replicates
from fatbench.store.rows import fetch
from fatbench.store.schema import ASKED, POINTS
from fatbench.store.stages import Store


@contextmanager
def judged(db: str | None, cells: Iterable[str]) -> Iterator[None]:
    """Judge cells once the work within is over, however it ended; a database that is not there has nothing to judge."""
    try:
        yield
    finally:
        with suppress(FatbenchError), Store.open(settings.database(db)) as store:
            judge(store, sorted(store.known(cells)))


def judge(store: Store, cells: Iterable[str]) -> None:
    """Store the doubts of some cells and their replicates, and which of their runs each suite shows."""
    cells = list(cells)
    several = replicates.of(store.database, cells)
    ids = [id for cell in cells for id in several.get(cell, [cell])]
    found: dict[str, list[tuple[str, str, str, float | None]]] = {id: [] for id in ids}
    for (id, stage), why in doubts_of(ids, store).items():
        rows = {(stage, one.code, one.against): None if math.isnan(one.value) else one.value for one in why}
        found[id] = [*found[id], *((*key, value) for key, value in rows.items())]
    store.judge(found, _shown(store, several))


def _shown(store: Store, cells: Iterable[str]) -> dict[tuple[str, str, str], str]:
    """(suite, preset, cell) -> the run that is read, of cells with several."""
    wanted = set(cells)
    if not wanted:
        return {}
    suites: dict[tuple[str, str], dict[str, set[str]]] = {}
    query = sql(POINTS.c.suite, POINTS.c.preset, POINTS.c.cell, ASKED.c.evaluation)
    joined = query.select_from(POINTS.outerjoin(ASKED, ASKED.c.kind == POINTS.c.kind))
    with store.database.reading() as connection:
        for suite, preset, cell, evaluation in fetch(connection, joined, POINTS.c.cell, None):
            suites.setdefault((suite, preset), {}).setdefault(cell, set()).add(evaluation or "")
    found: dict[tuple[str, str, str], str] = {}
    for (suite, preset), asked in suites.items():
        if here := wanted & asked.keys():
            ids = chosen(store, asked)
            found |= {(suite, preset, cell): ids.get(cell, cell) for cell in here}
    return found
