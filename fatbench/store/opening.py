"""The database for whoever only looks: asking about nothing is no error, and creates nothing."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fatbench import hub, settings, whole_file
from fatbench.errors import NothingMatched, SpecError

if TYPE_CHECKING:
    from fatbench.store.stages import Store

Db = str | Path | Sequence[str | Path] | None  # databases, and files of `fatbench export`


@contextlib.contextmanager
def opened(db: Db, *, create: bool = False) -> Iterator[Store | None]:
    """The database if it exists, else None; `create`: also where it was named (db) and does not exist.

    Files of `fatbench export`, and several databases or files, are read together, as one database that is not kept.
    DatabaseError: the file is not ours, or of another version. NoDatabase: it was named, does not exist, not `create`.
    """
    from fatbench.store.database import NoDatabase
    from fatbench.store.stages import Store

    database_names = listed_databases(db)
    if len(database_names) > 1 or (database_names and not create and exported(database_names[0])):
        with _together(database_names) as store:
            yield store
        return
    database_name = database_names[0] if database_names else None
    try:
        store = Store.open(settings.database(database_name))
    except NoDatabase:
        if database_name is not None and not create:
            raise
        yield None
        return
    with store:
        yield store


def listed_databases(db: Db) -> list[str]:
    """The databases and files that are named; none: that of the settings."""
    return (
        [] if db is None else [str(db)] if isinstance(db, str | Path) else [str(database_name) for database_name in db]
    )


def exported(database_name: str) -> bool:
    """Whether a place is a file of JSON lines (a pipe, one of the hub), and no database."""
    from fatbench.store import jsonl

    if "://" in database_name and hub.address(Path(database_name)) is None:
        return False
    return os.path.isfile(whole_file.regular(Path(database_name))) and jsonl.is_export(database_name)


_READ: dict[tuple[tuple[str, int, int], ...], tempfile.TemporaryDirectory[str]] = {}  # files, as they were -> database


@contextlib.contextmanager
def _together(database_names: Sequence[str]) -> Iterator[Store]:
    """A database of what all these hold; that of files alone is made once in a process."""
    from fatbench.store.stages import Store

    files = [whole_file.regular(Path(database_name)) for database_name in database_names if exported(database_name)]
    key = tuple((str(file.resolve()), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    if len(files) == len(database_names) and key in _READ:
        with Store.open(f"{_READ[key].name}/results.db") as store:
            yield store
        return
    folder = tempfile.TemporaryDirectory(prefix="fatbench-")
    try:
        with Store.open(f"{folder.name}/results.db", create=True) as store:
            for database_name in database_names:
                _take_in(store, database_name, Path(folder.name) / "other.jsonl")
            yield store
    except BaseException:
        folder.cleanup()
        raise
    if len(files) == len(database_names):
        _READ[key] = folder
    else:
        folder.cleanup()


def _take_in(store: Store, database_name: str, copy: Path) -> None:
    """What a database or a file holds, into this database; copy: where a database's lines may stand meanwhile."""
    from fatbench.store import jsonl
    from fatbench.store.stages import Store

    if exported(database_name):
        jsonl.import_(store, database_name)
        return
    with Store.open(database_name) as other_store:
        jsonl.export(other_store, copy)
    jsonl.import_(store, copy)


def may_be_cell(text: str) -> bool:
    """Whether a cell's id, or that of a replicate, may begin so."""
    return re.fullmatch("[0-9a-f]+(~[0-9]*)?", text) is not None


def cell_id(store: Store | None, begin: str, suites: Collection[str]) -> str:
    """The id of the cell (or, written with "~", the replicate) whose id begins so. NothingMatched: none has.

    suites: names that a person may have meant. SpecError: several cells have.
    """
    ids = [] if store is None else store.begins(begin)
    ids = [begin] if begin in ids else ids
    if not ids:
        lists = f"fatbench status {begin if begin in suites else 'NAME'} lists the cells"
        raise NothingMatched(f"no cell '{begin}' in the database ({lists})")
    if len(ids) > 1:
        raise SpecError(f"'{begin}' could be any of {', '.join(sorted(ids)[:8])}")
    return ids[0]
