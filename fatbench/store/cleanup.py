"""Deletes cells, finds files that no cell needs, and copies databases."""

from __future__ import annotations

import re
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from sqlalchemy import Connection, delete, select, update

from fatbench import whole_file
from fatbench.errors import MachineError, SpecError, Unavailable
from fatbench.store import cell_records, leases, replicates, rights
from fatbench.store.database import IMMUTABLE, lock, mode
from fatbench.store.schema import CELLS, OUTCOME_CHUNKS, POINTS, REPLICATES, RUNS, STAGES
from fatbench.store.stages import Store

YOUNG = 600.0  # seconds; a younger file may belong to a process that has not committed yet
FOLDER = re.compile(r"[0-9a-f]{12}(~[0-9]+)?")  # the name of a cell's folder


def delete_cell(store: Store, cell: str) -> dict[str, int]:
    """Delete a cell with all that belongs to it, and with its replicates.

    Returns {"cells", "runs", "stages", "numbers", "outcomes"}: how many were deleted. Raises SpecError, without any
    change, if a process is working on it.
    """
    with store.database.writing() as connection:
        return _delete(store, connection, cell)


class _Undone(Exception):
    """A transaction has shown what it was begun for."""


def would_delete(store: Store, cells: Iterable[str]) -> dict[str, int]:
    """How much `delete_cell` would delete of these cells, found by doing it and taking it back. Raises the same."""
    counts: Counter[str] = Counter()
    with suppress(_Undone), store.database.writing() as connection:
        for cell in cells:
            counts.update(_delete(store, connection, cell))
        raise _Undone
    return counts


def _delete(store: Store, connection: Connection, cell: str) -> dict[str, int]:
    lock(connection)
    cell_ids = replicates.ids_here(connection, cell) or [cell]
    locked = select(CELLS.c.id).where(CELLS.c.id.in_(cell_ids)).with_for_update()  # the lock that `claim` takes
    connection.execute(locked).all()
    running = (
        select(STAGES, RUNS.c.host, RUNS.c.pid, RUNS.c.process, RUNS.c.extra)
        .join(RUNS, RUNS.c.id == STAGES.c.run)
        .where(STAGES.c.cell.in_(cell_ids), STAGES.c.status == "running")
    )
    for row in connection.execute(running).all():
        if leases.is_held(row, leases.clock(connection, store.database.path)):
            raise SpecError(f"cell {row.cell}: a process is working on {row.stage}; stop it first")
    counts = cell_records.clear(connection, cell_ids)
    connection.execute(delete(POINTS).where(POINTS.c.cell.in_(cell_ids)))
    connection.execute(update(POINTS).where(POINTS.c.shown.in_(cell_ids)).values(shown=POINTS.c.cell))
    connection.execute(delete(REPLICATES).where(REPLICATES.c.id.in_(cell_ids)))
    counts["cells"] = connection.execute(delete(CELLS).where(CELLS.c.id.in_(cell_ids))).rowcount
    counts["outcomes"] = counts.pop(OUTCOME_CHUNKS.name)
    return {name: counts[name] for name in ("cells", "runs", "stages", "numbers", "outcomes")}


def unneeded_files(store: Store, files: Path) -> Iterator[tuple[Path, int]]:
    """Files and folders below `files` that no cell needs, with their bytes.

    These are the folders of unknown cells, and checkpoints that the database does not name. Cells that a process holds,
    files that are YOUNG, and names that fatbench does not give are left out.
    """
    current_time = time.time()
    if not files.is_dir():
        return
    try:
        folders = sorted(folder for folder in files.iterdir() if folder.is_dir() and FOLDER.fullmatch(folder.name))
    except OSError as error:
        raise MachineError(f"cannot read {files}: {error.strerror}") from None
    for folder in folders:
        cell_files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        if not store.known_cells([folder.name]):
            if all(_age(file, current_time) > YOUNG for file in [folder, *cell_files]):
                yield folder, sum(file.stat().st_size for file in cell_files)
            continue
        rows = store.stages([folder.name])
        train = rows.get((folder.name, "train"))
        if any(row.alive for row in rows.values()) or train is None or "sha256" not in train.record:
            continue
        needed_names = {*train.record["sha256"], train.checkpoint}
        for file in cell_files:
            name = file.relative_to(folder).as_posix()
            if ".safetensors" in file.name and name not in needed_names and _age(file, current_time) > YOUNG:
                yield file, file.stat().st_size


def _age(file: Path, current_time: float) -> float:
    try:
        return current_time - file.stat().st_mtime
    except OSError:  # gone in the meantime
        return 0.0


def folders_of(cell: str, files: Path) -> list[Path]:
    """The folders of a cell and of its replicates below `files`. MachineError: this user may not remove one of them."""
    folders = [path for path in (files / cell, *sorted(files.glob(f"{cell}~*"))) if path.is_dir()]
    for folder in folders:
        if reason := rights.refusal_to_remove(folder):
            raise MachineError(f"{reason}: nothing was deleted")
    return folders


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists. Raises MachineError if it cannot be removed."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise MachineError(f"cannot remove {path}: {error.strerror or error}") from None


def backup(store: Store, file: Path) -> int:
    """Copy a snapshot of a SQLite database to a new file; its size in bytes. Other processes may go on writing.

    Raises SpecError if the file exists or the database is a server's, and MachineError if it cannot be written.
    """
    path = store.database.path
    if path is None:
        raise SpecError(f"{store.database.shown}: copy a server's database with its tools, such as pg_dump")
    if file.exists():
        raise SpecError(f"{file} exists: name a new file")
    try:
        # unlike rename, what makes a new file never replaces one that has appeared meanwhile
        with (
            whole_file.replacing(file, new=True) as handle,
            closing(store.database.connect()) as source,
            closing(sqlite3.connect(handle.name)) as copy,
        ):
            unlocked, before = mode(path) == IMMUTABLE, path.stat().st_mtime_ns
            source.backup(copy)  # in one step, so that concurrent writes neither enter it nor restart it
            if unlocked and path.stat().st_mtime_ns != before:
                raise Unavailable(f"{store.database.shown} was written while it was copied: run the command again")
            copy.execute("PRAGMA journal_mode = delete")
    except FileExistsError:
        raise SpecError(f"{file} exists: name a new file") from None
    except (OSError, sqlite3.Error) as error:
        raise MachineError(f"cannot write {file}: {getattr(error, 'strerror', None) or error}") from None
    return file.stat().st_size
