"""Checks a whole database: its file, its schema, its references, and every stage's numbers and outcomes."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sqlalchemy import Connection, and_, func, inspect, select
from sqlalchemy.exc import SAWarning, SQLAlchemyError

from fatbench.errors import DatabaseError, FatbenchError
from fatbench.settings import shown_url
from fatbench.store import cell_records, leases, replicates
from fatbench.store.database import Database
from fatbench.store.document import ExchangeError
from fatbench.store.problems import Contradiction, Identify, problems
from fatbench.store.rows import batches, cell_row, counted_text
from fatbench.store.schema import (
    ASKED,
    CELLS,
    IDENTITY,
    METADATA,
    OUTCOME_CHUNKS,
    OUTCOMES_VIEW,
    OUTCOMES_VIEW_SQL,
    POINTS,
    REPLICATES,
    RESULTS_VIEW,
    RESULTS_VIEW_SQL,
    RUNS,
    SCHEMA,
    STAGES,
    SUITE_CELLS,
    SUITE_CELLS_SQL,
    VIEW,
    VIEW_SQL,
)

UNREADABLE = (
    SQLAlchemyError, SAWarning, sqlite3.Error, ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
    ExchangeError,
)  # fmt: skip


class Damaged(DatabaseError):
    """The database holds what fatbench did not write (exit code 4)."""


def check(
    url: str,
    identify: Identify | None = None,
    files: Path | None = None,
    contents: bool = True,
    contradiction: Contradiction | None = None,
) -> str:
    """What an intact database of this version holds, in a sentence.

    identify: computes the identity of a spec, which must be its cell's id. files: the folder with the models and
    artifacts of its cells, which are read if they are there. contents: whether numbers and outcomes are read, which
    takes a second for a thousand cells. contradiction: describes how a stage's name contradicts its settings, or
    returns None. Raises Damaged with what is wrong, and the errors of opening the database.
    """
    return intact(url, counts(url, identify, files, contents, contradiction))


def intact(url: str, rows: Mapping[str, int]) -> str:
    """What an intact database holds, by `counts`, in a sentence."""
    return f"{shown_url(url)} is intact (schema {SCHEMA}): {counted_text(rows)}"


def counts(
    url: str,
    identify: Identify | None = None,
    files: Path | None = None,
    contents: bool = True,
    contradiction: Contradiction | None = None,
) -> dict[str, int]:
    """{table: its number of rows} of an intact database of this version. Raises as `check` does."""
    shown_database = shown_url(url)
    try:
        with warnings.catch_warnings(), Database.open(url) as database, database.reading() as connection:
            warnings.simplefilter("error", SAWarning)  # raised for a table whose definition has changed
            found = [*_problems(connection)]
            found += _content_problems(connection, identify, contradiction) if contents else ()
            found += [] if files is None else _file_problems(connection, files)
            row_counts = {
                table.name: connection.scalar(select(func.count()).select_from(table)) or 0
                for table in METADATA.sorted_tables
                if table is not IDENTITY
            }
    except UNREADABLE as error:  # whatever cannot be read is damaged
        raise Damaged(f"{shown_database} is damaged: {_reason(error)}") from error
    if found:
        remainder = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise Damaged(f"{shown_database} is damaged: {'; '.join(found[:5])}{remainder}")
    return row_counts


WHOLE = (CELLS, REPLICATES, STAGES, RUNS, POINTS, ASKED)  # the tables that say which cells and stages exist


def check_keys(connection: Connection, shown_database: str) -> None:
    """Raise Damaged if the tables that say which cells and stages exist contradict their keys, or replicates' names.

    The contents of a stage are covered by its digest. A server checks its tables itself.
    """
    if connection.dialect.name == "sqlite":
        for table in WHOLE:
            for (line,) in connection.exec_driver_sql(f"PRAGMA integrity_check({table.name})"):
                if line != "ok":
                    raise Damaged(f"{shown_database} is damaged: {line} (fatbench check)")
            for row in connection.exec_driver_sql(f"PRAGMA foreign_key_check({table.name})"):
                raise Damaged(f"{shown_database} is damaged: {row[0]} refers to missing {row[2]} (fatbench check)")
    for problem in _misnamed(connection):
        raise Damaged(f"{shown_database} is damaged: {problem}")


def _misnamed(connection: Connection) -> Iterator[str]:
    """Replicates whose id does not fit their cell and number, and cells that are only named as replicates."""
    copies = {row.id: row for row in connection.execute(select(REPLICATES))}
    for row in copies.values():
        if row.id != replicates.name(row.cell, row.number):
            yield f"replicate {row.id} is recorded as number {row.number} of {row.cell}"
    ids = set(connection.scalars(select(CELLS.c.id)))
    for id in sorted(ids - copies.keys()):
        if replicates.SIGN in id and id.partition(replicates.SIGN)[0] in ids:
            yield f"cell {id} is named as a replicate, but is not one"


def _reason(error: Exception) -> str:
    text = str(getattr(error, "orig", None) or error)
    return f"it cannot be read ({' '.join(text.split())[:200]})"


def _problems(connection: Connection) -> Iterator[str]:
    """What cannot be in a database that only fatbench has written."""
    if connection.dialect.name == "sqlite":
        for (line,) in connection.exec_driver_sql("PRAGMA integrity_check(20)"):
            if line != "ok":
                yield line
        for table in WHOLE:
            for row in connection.exec_driver_sql(f"PRAGMA foreign_key_check({table.name})"):
                if row[2] not in METADATA.tables:  # the table's definition is damaged
                    yield f"{row[0]} refers to missing {row[2]}"
        views = {VIEW.name: VIEW_SQL, SUITE_CELLS.name: SUITE_CELLS_SQL, OUTCOMES_VIEW: OUTCOMES_VIEW_SQL["sqlite"]}
        for name, sql in (views | {RESULTS_VIEW: RESULTS_VIEW_SQL["sqlite"]}).items():
            stored = connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).scalar()
            if stored != sql:
                yield f"the view {name} has been changed"
    yield from _schema_problems(connection)
    yield from _orphans(connection)


def _schema_problems(connection: Connection) -> Iterator[str]:
    """Tables whose columns or indexes have changed; other programs' tables are ignored."""
    database = inspect(connection)
    for table in METADATA.sorted_tables:
        if not database.has_table(table.name):
            yield f"the schema has been changed: the table {table.name} is missing"
            continue
        columns = {(column["name"], column["nullable"]) for column in database.get_columns(table.name)}
        expected_columns = {(column.name, bool(column.nullable)) for column in table.columns}
        for name, _ in sorted(columns ^ expected_columns):
            yield f"the schema has been changed: column {name} of {table.name}"
        indexes = {
            index["name"] for index in database.get_indexes(table.name) if not index.get("duplicates_constraint")
        }
        for name in sorted(str(name) for name in indexes ^ {index.name for index in table.indexes}):
            yield f"the schema has been changed: index {name} of {table.name}"


def _orphans(connection: Connection) -> Iterator[str]:
    """Rows that refer to missing rows, and outcomes that do not follow one another."""
    for child in METADATA.sorted_tables:
        for constraint in child.foreign_key_constraints:
            parent = constraint.referred_table
            pairs = [(key.parent, key.column) for key in constraint.elements]
            orphan = (
                select(*child.primary_key)
                .select_from(
                    child.outerjoin(parent, and_(*(child_key == parent_key for child_key, parent_key in pairs)))
                )
                .where(pairs[0][1].is_(None), *(child_key.is_not(None) for child_key, _ in pairs))
                .limit(5)
            )
            for row in connection.execute(orphan):
                yield f"{child.name} {tuple(row)} refers to missing {parent.name}"
    key = (OUTCOME_CHUNKS.c.cell, OUTCOME_CHUNKS.c.stage, OUTCOME_CHUNKS.c.start)
    chunks = select(*key, OUTCOME_CHUNKS.c.n, func.length(OUTCOME_CHUNKS.c.bits)).order_by(*key)
    stage_key, position = None, 0
    for cell, stage, start, n, length in connection.execute(chunks):
        position = position if stage_key == (cell, stage) else 0
        if start != position or length != (n + 7) // 8:
            yield f"outcomes of {cell} {stage}: the chunk at {start} does not follow {position}"
        stage_key, position = (cell, stage), start + n


def _content_problems(
    connection: Connection, identify: Identify | None, contradiction: Contradiction | None
) -> Iterator[str]:
    """Cells that do not fit their id, stages that have changed since they finished, and contradictory numbers."""
    yield from _misnamed(connection)
    for cell_batch in batches(connection.scalars(select(CELLS.c.id)), 100):
        try:
            for cell in cell_records.read(connection, cell_batch):
                id, known = replicates.name(cell.cell, cell.replicate), identify
                if identify is not None:
                    try:
                        identify(cell.spec)
                    except FatbenchError:  # the cell is of a plug-in that is not loaded
                        known = None
                for stage, problem in problems(cell, known, contradiction):
                    yield f"cell {id}{' ' * bool(stage)}{stage}: {problem}"
            yield from _unexported_problems(connection, cell_batch)
        except UNREADABLE as error:
            yield f"cells {cell_batch[0]} to {cell_batch[-1]}: {_reason(error)}"


def _file_problems(connection: Connection, folder: Path) -> Iterator[str]:
    """Models and artifacts that differ from what a finished training wrote; missing files are ignored."""
    finished_trainings = select(STAGES.c.cell, STAGES.c.record).where(
        STAGES.c.stage == "train", STAGES.c.status == "done"
    )
    for cell, record in connection.execute(finished_trainings):
        for name, digest in json.loads(record).get("sha256", {}).items():
            file = folder / cell / name
            if file.is_file():
                with file.open("rb") as handle:
                    if hashlib.file_digest(handle, "sha256").hexdigest() != digest:
                        yield f"cell {cell}: {name} is not the file that was written"


def _unexported_problems(connection: Connection, cells: Sequence[str]) -> Iterator[str]:
    """Problems in what exports leave out: the seed by which tables select, and heartbeats."""
    for row in connection.execute(select(CELLS).where(CELLS.c.id.in_(cells))):
        if row.seed != (seed := cell_row(row.id, json.loads(row.spec), row.created)["seed"]):
            yield f"cell {row.id}: its seed is recorded as {row.seed}, but is {seed}"
    for row in connection.execute(select(STAGES).where(STAGES.c.cell.in_(cells))):
        try:
            leases.epoch(row.heartbeat)
        except ValueError:
            yield f"cell {row.cell} {row.stage}: its heartbeat is not a time"
