"""How numbers are stored: one row for what a round and metric share, and one row for each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from fatbench.store.schema import NUMBERS, ROUND_METRICS, VALUES

SHARED = ("cell", "stage", "round", "metric", "run", "created")


def append(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write numbers, as rows with the columns of NUMBERS. The caller knows that none exists yet."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in SHARED), []).append(row)
    if not groups:
        return
    heads = [dict(zip(SHARED, group, strict=True)) for group in groups]
    # Returned with all columns: for ids in the order of the rows, SQLAlchemy would insert them one by one on SQLite.
    columns = [ROUND_METRICS.c[name] for name in SHARED]
    inserted_rows = connection.execute(insert(ROUND_METRICS).returning(ROUND_METRICS.c.id, *columns), heads)
    ids = {tuple(group): id for id, *group in inserted_rows}
    connection.execute(
        insert(VALUES),
        [
            {"round_metric": ids[group], "client": row["client"], "value": float(row["value"]) + 0.0, "n": row["n"]}
            for group, group_rows in groups.items()
            for row in group_rows
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
