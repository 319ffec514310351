"""Taking out of the database and its folder what is not wanted any more, and copying it."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from sqlalchemy import delete, select, update

from fatbench.errors import MachineError, SpecError
from fatbench.store import leases, numbers, replicates
from fatbench.store.database import lock
from fatbench.store.schema import CELLS, DOUBTS, OUTCOME_CHUNKS, POINTS, REPLICATES, ROUND_METRICS, RUNS, STAGES
from fatbench.store.stages import Store

YOUNG = 600.0  # seconds; a file that is younger may belong to a process that has not told the database yet
FOLDER = re.compile(r"[0-9a-f]{12}(~[0-9]+)?")  # of a cell


def delete_cell(store: Store, cell: str) -> dict[str, int]:
    """Take a cell out of the database with all that hangs on it, and of a first run its replicates.

    How much there was: {"cells", "runs", "stages", "numbers", "outcomes"}. SpecError, and nothing changed: a process is
    at work on it.
    """
    with store.database.writing() as connection:
        lock(connection)
        cell_ids = replicates.ids_here(connection, cell) or [cell]
        locked = select(CELLS.c.id).where(CELLS.c.id.in_(cell_ids)).with_for_update()  # as `claim` does
        connection.execute(locked).all()
        running = (
            select(STAGES, RUNS.c.host, RUNS.c.pid, RUNS.c.process, RUNS.c.extra)
            .join(RUNS, RUNS.c.id == STAGES.c.run)
            .where(STAGES.c.cell.in_(cell_ids), STAGES.c.status == "running")
        )
        for row in connection.execute(running).all():
            if leases.held(row, leases.clock(connection, store.database.path)):
                raise SpecError(f"cell {row.cell}: a process is working on {row.stage}; stop it first")
        counts = {"numbers": numbers.remove(connection, ROUND_METRICS.c.cell.in_(cell_ids))}
        connection.execute(delete(DOUBTS).where(DOUBTS.c.cell.in_(cell_ids)))
        for table in (OUTCOME_CHUNKS, STAGES, RUNS):
            counts[table.name] = connection.execute(delete(table).where(table.c.cell.in_(cell_ids))).rowcount
        connection.execute(delete(POINTS).where(POINTS.c.cell.in_(cell_ids)))
        connection.execute(update(POINTS).where(POINTS.c.shown.in_(cell_ids)).values(shown=POINTS.c.cell))
        connection.execute(delete(REPLICATES).where(REPLICATES.c.id.in_(cell_ids)))
        counts["cells"] = connection.execute(delete(CELLS).where(CELLS.c.id.in_(cell_ids))).rowcount
    counts["outcomes"] = counts.pop(OUTCOME_CHUNKS.name)
    return {name: counts[name] for name in ("cells", "runs", "stages", "numbers", "outcomes")}


def unneeded(store: Store, files: Path) -> Iterator[tuple[Path, int]]:
    """Files and folders below `files` that no cell needs, with their bytes: those of cells that are not known, and
    checkpoints that the database does not name.

    Left alone are cells that a process holds, what is YOUNG, and whatever does not look like ours.
    """
    current_time = time.time()
    if not files.is_dir():
        return
    for folder in sorted(folder for folder in files.iterdir() if folder.is_dir() and FOLDER.fullmatch(folder.name)):
        cell_files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        if not store.known([folder.name]):
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


def remove(path: Path) -> None:
    """Remove a file or a folder; what is gone is gone. MachineError: it may not be removed."""
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
    """Copy a SQLite database, as it is at this instant, to a new file; its size in bytes. Others go on writing.

    SpecError: the file exists, or the database is a server's. MachineError: it cannot be written.
    """
    path = store.database.path
    if path is None:
        raise SpecError(f"{store.database.shown}: copy a server's database with its own tools, such as pg_dump")
    if file.exists():
        raise SpecError(f"{file} exists: give a new file")
    partial_file = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with (
            closing(sqlite3.connect(path.absolute().as_uri() + "?mode=ro", uri=True, timeout=60)) as source,
            closing(sqlite3.connect(partial_file)) as copy,
        ):
            source.backup(copy)  # in one step: what is written meanwhile is not in it, and does not begin it again
            copy.execute("PRAGMA journal_mode = delete")
        with partial_file.open("rb+") as handle:
            os.fsync(handle.fileno())
        os.link(partial_file, file)  # unlike a new name, it never replaces what somebody put there meanwhile
    except FileExistsError:
        raise SpecError(f"{file} exists: give a new file") from None
    except (OSError, sqlite3.Error) as error:
        raise MachineError(f"cannot write {file}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        partial_file.unlink(missing_ok=True)
    return file.stat().st_size
