"""Replicates: further runs of the same cell, which never replace the first.

A replicate is a row of `cells`, whose id is the cell's with a number, "0a1b2c3d4e5f~1", and a row of `replicates`. Its
runs, stages, numbers and outcomes belong to that id like any cell's. `fatbench run` works on the cell itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, select

from fatbench.store.database import Database, patient
from fatbench.store.rows import fetch
from fatbench.store.schema import CELLS, REPLICATES

SIGN = "~"


def name(cell: str, number: int) -> str:
    """The id of a cell's replicate; for number 0, the cell's own."""
    return f"{cell}{SIGN}{number}" if number else cell


def ids_here(connection: Connection, cell: str) -> list[str]:
    """The ids of a cell and its replicates in the database, by number; empty if the cell is unknown."""
    cell_ids = list(connection.scalars(select(CELLS.c.id).where(CELLS.c.id == cell)))
    replicate_query = select(REPLICATES.c.id).where(REPLICATES.c.cell == cell).order_by(REPLICATES.c.number)
    return cell_ids + list(connection.scalars(replicate_query))


@patient
def by_cell(database: Database, cells: Iterable[str] | None = None) -> dict[str, list[str]]:
    """{cell: [its id, those of its replicates by number]} of the cells that have replicates."""
    ids_by_cell: dict[str, list[tuple[int, str]]] = {}
    with database.reading() as connection:
        for row in fetch(connection, select(REPLICATES), REPLICATES.c.cell, cells):
            ids_by_cell.setdefault(row.cell, [(0, row.cell)]).append((row.number, row.id))
    return {cell: [id for _, id in sorted(rows)] for cell, rows in ids_by_cell.items()}
