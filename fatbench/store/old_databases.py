"""Takes over databases of older schemas: a copy gets today's tables, and the old file stays as it is.

From 0005 on the tables of cells, runs, stages, numbers and outcomes are the same.

| schema | of | what a copy gets |
|---|---|---|
| 0005 | 25 November 2026 | the tables of points, doubts and data that was seen, all empty; views |
| 0006 | 26 November | the tables of points and doubts, both empty; views |
| 0007 | 26 November | a column of points: all are current until the suites are compared; views |
| 0008 | 29 November | views; in each of them, the suites and presets have their names of today |
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, create_engine, delete, select, update
from sqlalchemy.pool import NullPool

from fatbench import whole_file
from fatbench.errors import DatabaseError, FatbenchError, MachineError, SpecError
from fatbench.store import cell_records
from fatbench.store.cleanup import FOLDER
from fatbench.store.document import digest
from fatbench.store.old_files import current_names
from fatbench.store.schema import METADATA, POINTS, RUNS, SCHEMA, TAKEN_OVER, VIEWS

SCHEMAS = (*TAKEN_OVER, SCHEMA)


def is_database(file: Path) -> bool:
    """Whether a file is a SQLite database."""
    try:
        with whole_file.regular(file).open("rb") as handle:
            return handle.read(16) == b"SQLite format 3\0"
    except OSError:
        return False


def take_over(file: Path, target: Path, keep_identity: bool = False) -> None:
    """Write a database of today's schema with all that `file` holds; other processes may go on with `file`.

    keep_identity: the new one uses the same folder of checkpoints. DatabaseError: its schema is not among SCHEMAS.
    SpecError: the target exists. MachineError: it cannot be written.
    """
    try:
        with (
            whole_file.replacing(target, new=True) as handle,
            closing(sqlite3.connect(f"file:{quote(str(file.resolve()))}?mode=ro", uri=True)) as source,
        ):
            number = _schema(source, file)
            with closing(sqlite3.connect(handle.name)) as copy:
                source.backup(copy)
                copy.execute("PRAGMA journal_mode = delete")
            engine = create_engine(f"sqlite:///{handle.name}", poolclass=NullPool)
            with engine.begin() as connection:
                _upgrade(connection, number)
                if not keep_identity:
                    connection.exec_driver_sql("UPDATE identity SET id = ?", (uuid.uuid4().hex,))
            engine.dispose()
    except FileExistsError:
        raise SpecError(f"{target} exists: name a new database") from None
    except (OSError, sqlite3.Error) as error:
        raise MachineError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from None


def _schema(source: sqlite3.Connection, file: Path) -> str:
    try:
        row = source.execute("SELECT version_num FROM fatbench_version").fetchone()
    except sqlite3.DatabaseError:
        raise DatabaseError(f"{file} is not a fatbench database that can be taken over") from None
    if row is None or row[0] not in SCHEMAS:
        raise DatabaseError(f"{file} has schema {row and row[0]}; {', '.join(SCHEMAS)} can be taken over")
    return str(row[0])


def _upgrade(connection: Connection, number: str) -> None:
    """Give a database of an older schema the tables and views of today's."""
    if number == SCHEMA:
        return
    views = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'view'").scalars().all()
    for view in views:
        connection.exec_driver_sql(f"DROP VIEW {view}")
    if number == "0007":
        connection.exec_driver_sql("ALTER TABLE points ADD COLUMN current BOOLEAN NOT NULL DEFAULT 1")
    METADATA.create_all(connection)
    for sql in VIEWS["sqlite"]:
        connection.execution_options(no_parameters=True).exec_driver_sql(sql)
    _rename(connection)
    connection.exec_driver_sql("UPDATE fatbench_version SET version_num = ?", (SCHEMA,))


def _rename(connection: Connection) -> None:
    """Give suites and presets their names of today, and seal with them the stages that were intact."""
    intact = set[tuple[str, str]]()
    for table in (RUNS, POINTS):
        for suite, preset in connection.execute(select(table.c.suite, table.c.preset).distinct()).all():
            current = current_names(suite, preset)
            if current["suite"] == suite:
                continue
            former = (table.c.suite == suite) & table.c.preset.is_not_distinct_from(preset)
            if table is RUNS:
                for id in connection.scalars(select(RUNS.c.cell).where(former).distinct()).all():
                    intact |= {(id, stage) for stage in _intact_stages(connection, id)}
            # a point that has its name of today already is there twice
            connection.execute(update(table).prefix_with("OR IGNORE").where(former).values(**current))
            connection.execute(delete(table).where(former))
    for id, stage in intact:
        cell_records.seal(connection, id, stage)


def _intact_stages(connection: Connection, id: str) -> list[str]:
    """The finished stages of a cell that are as they were written; none of a cell that cannot be read."""
    try:
        (cell,) = cell_records.read(connection, [id])
    except (FatbenchError, ArithmeticError, LookupError, TypeError, ValueError):
        return []
    return [one.stage for one in cell.stages if one.status == "done" and one.digest == digest(cell, one)]


def link_files(folder: Path, target: Path) -> int:
    """Link the models and checkpoints of a database's folder into another, or copy them; how many there were."""
    count = 0
    for file in _files(folder):
        new = target / file.relative_to(folder)
        if new.exists():
            continue
        try:
            new.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, new)
            except OSError:  # another file system, or one without links
                shutil.copy2(file, new)
        except OSError as error:
            raise MachineError(f"cannot write {new}: {error.strerror}") from None
        count += 1
    return count


def _files(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        for cell in sorted(folder.iterdir()):
            if cell.is_dir() and FOLDER.fullmatch(cell.name):
                yield from (file for file in sorted(cell.rglob("*")) if file.is_file())
