"""How numbers are stored: one row for what a round and metric share, and one row for each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from fatbench.store.schema import NUMBERS, ROUND_METRICS, VALUES

SHARED = ("cell", "stage", "round", "metric", "run", "created")


def append(
    connection: Connection, groups: Mapping[tuple[str, str, int, str, int, str], Sequence[tuple[int, float, int]]]
) -> None:
    """Write numbers, {values of SHARED: [(client, value, n)]}. The caller knows that none exists yet."""
    if not groups:
        return
    heads = [dict(zip(SHARED, group, strict=True)) for group in groups]
    # Returned with all columns: for ids in the order of the rows, SQLAlchemy would insert them one by one on SQLite.
    columns = [ROUND_METRICS.c[name] for name in SHARED]
    inserted_rows = connection.execute(insert(ROUND_METRICS).returning(ROUND_METRICS.c.id, *columns), heads)
    ids = {tuple(group): id for id, *group in inserted_rows}
    place = "?" if connection.dialect.paramstyle == "qmark" else "%s"
    connection.exec_driver_sql(  # there may be millions, and nothing in them that SQLAlchemy converts
        f"INSERT INTO numbers (round_metric, client, value, n) VALUES ({', '.join([place] * 4)})",
        [
            (ids[group], client, float(value) + 0.0, n)
            for group, entries in groups.items()
            for client, value, n in entries
        ],  # + 0.0: SQLite has no -0.0, so no database has
    )


def known_keys(connection: Connection, cell: str, stage: str, rounds: set[int]) -> set[tuple[str, int, int]]:
    """(metric, round, client) of a stage's numbers in some rounds."""
    query = select(NUMBERS.c.metric, NUMBERS.c.round, NUMBERS.c.client)
    rows = connection.execute(
        query.where(NUMBERS.c.cell == cell, NUMBERS.c.stage == stage, NUMBERS.c.round.in_(sorted(rounds)))
    )
    return {(metric, round, client) for metric, round, client in rows}


def remove(connection: Connection, *conditions: Any) -> int:
    """Delete the numbers of these round metrics and return how many there were."""
    removed_ids = select(ROUND_METRICS.c.id).where(*conditions)
    count = connection.execute(delete(VALUES).where(VALUES.c.round_metric.in_(removed_ids))).rowcount
    connection.execute(delete(ROUND_METRICS).where(*conditions))
    return count
