"""How numbers are stored: one row for what a round and metric share, and one row for each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, func, select

from fatbench.store.schema import NUMBERS, ROUND_METRICS, VALUES

SHARED = ("cell", "stage", "round", "metric", "run", "created")


def append(
    connection: Connection, groups: Mapping[tuple[str, str, int, str, int, str], Sequence[tuple[int, float, int]]]
) -> None:
    """Write numbers, {values of SHARED: [(client, value, n)]}. The caller knows that none exists yet."""
    if not groups:
        return
    if connection.dialect.name == "sqlite":  # has one writer
        last = connection.execute(select(func.max(ROUND_METRICS.c.id))).scalar() or 0
        ids: Sequence[int] = range(last + 1, last + 1 + len(groups))
    else:
        sequence = func.nextval(func.pg_get_serial_sequence(ROUND_METRICS.name, "id"))
        ids = connection.scalars(select(sequence).select_from(func.generate_series(1, len(groups)))).all()
    heads = [(id, *group) for id, group in zip(ids, groups, strict=True)]
    _insert(connection, ROUND_METRICS.name, ("id", *SHARED), heads)
    values = zip(ids, groups.values(), strict=True)
    # + 0.0: SQLite has no -0.0, so no database has
    rows = [(id, client, float(value) + 0.0, n) for id, entries in values for client, value, n in entries]
    _insert(connection, VALUES.name, ("round_metric", "client", "value", "n"), rows)


def _insert(connection: Connection, table: str, columns: Sequence[str], rows: list[tuple[Any, ...]]) -> None:
    """Add rows by the driver: there may be millions, and nothing in them that SQLAlchemy converts."""
    place = "?" if connection.dialect.paramstyle == "qmark" else "%s"
    places = ", ".join([place] * len(columns))
    connection.exec_driver_sql(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})", rows)


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
