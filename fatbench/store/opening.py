"""Opens databases for reading: a missing one is no error, and nothing is created."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fatbench import hub, settings, whole_file
from fatbench.errors import NothingMatched, SpecError, article

if TYPE_CHECKING:
    from fatbench.store.stages import Store

Db = str | Path | Sequence[str | Path] | None  # databases, or files of `fatbench export`


@contextlib.contextmanager
def opened(db: Db, *, create: bool = False) -> Iterator[Store | None]:
    """The database if it exists, else None; with `create`, None also if a named database (db) does not exist.

    Files of `fatbench export`, and several databases or files, are merged into one temporary database. Raises
    DatabaseError if a file is not fatbench's or of another version, and NoDatabase if a named database does not exist.
    """
    from fatbench.store.database import NoDatabase
    from fatbench.store.stages import Store

    database_names = listed_databases(db)
    if len(database_names) > 1 or (database_names and not create and is_export(database_names[0])):
        with _merged_database(database_names) as store:
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
    """The named databases and files, here or by the option --db; empty for that of the settings."""
    db = settings.given("db") if db is None else db
    return [] if db is None else [str(db)] if isinstance(db, str | Path) else [*map(str, db)]


def shown_databases(db: Db) -> str:
    """The names of what `db` opens, without passwords, for messages."""
    return ", ".join(map(settings.shown_url, listed_databases(db) or [settings.database(None)]))


def is_export(database_name: str) -> bool:
    """Whether a name is that of a file of JSON lines (or a pipe, or a file of the hub) rather than a database."""
    from fatbench.store import jsonl

    if "://" in database_name and hub.address(Path(database_name)) is None:
        return False
    return os.path.isfile(whole_file.regular(Path(database_name))) and jsonl.is_export(database_name)


# {(path, time, size) of files: their merged database}
_READ: dict[tuple[tuple[str, int, int], ...], tempfile.TemporaryDirectory[str]] = {}


@contextlib.contextmanager
def _merged_database(database_names: Sequence[str]) -> Iterator[Store]:
    """A database with the contents of all of these; that of files alone is built once in a process."""
    from fatbench.store import jsonl
    from fatbench.store.stages import Store

    files = [whole_file.regular(Path(database_name)) for database_name in database_names if is_export(database_name)]
    key = tuple((str(file.resolve()), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    if len(files) == len(database_names) and key in _READ:
        with Store.open(f"{_READ[key].name}/results.db") as store:
            yield store
        return
    folder = tempfile.TemporaryDirectory(prefix="fatbench-")
    try:
        with Store.open(f"{folder.name}/results.db", create=True) as store:
            for database_name in database_names:
                file: str | Path = database_name
                if not is_export(database_name):
                    file = Path(folder.name) / "other.jsonl"
                    with Store.open(database_name) as other_store:
                        jsonl.export(other_store, file)
                jsonl.import_(store, file)
            yield store
    except BaseException:
        folder.cleanup()
        raise
    if len(files) == len(database_names):
        _READ[key] = folder
    else:
        folder.cleanup()


def may_be_cell(text: str) -> bool:
    """Whether a cell's id, or that of a replicate, may begin so."""
    return re.fullmatch("[0-9a-f]+(~[0-9]*)?", text) is not None


def cell_id(store: Store | None, begin: str, suites: Collection[str], db: Db) -> str:
    """The only id of a cell (or, with a "~", of a replicate) that begins with `begin`.

    suites: names that the user may have meant; db: what was opened. Raises NothingMatched if there is none, SpecError
    if there are several.
    """
    ids = [] if store is None else store.ids_beginning_with(begin)
    ids = [begin] if begin in ids else ids
    if not ids:
        place, suite = shown_databases(db), next(iter(difflib.get_close_matches(begin, suites, 1)), "NAME")
        hint = f" (fatbench status {suite} lists the cells; --db names another database)"
        if store is None:
            raise NothingMatched(f"no cell '{begin}': {place} does not exist; run a suite first{hint}")
        if labelled := _labelled(store, begin):
            raise NothingMatched(f"no cell '{begin}' in {place}: {labelled}")
        raise NothingMatched(f"no cell '{begin}' in {place}{hint}")
    if len(ids) > 1:
        raise SpecError(f"'{begin}' could be any of {', '.join(sorted(ids)[:8])}")
    return ids[0]


def _labelled(store: Store, label: str) -> str:
    """The cells with a label, and how to see them; empty: there are none.

    "this is a method (cells 01234567, 89abcdef of tiny): fatbench report tiny -k method=FAT"
    """
    from fatbench.store import grid_points

    with store.database.reading() as connection:
        labelled_cells = grid_points.labelled(connection, label)
    if not labelled_cells:
        return ""
    (suite, axis), cells = max(labelled_cells.items(), key=lambda item: len(item[1]))
    value = label if re.fullmatch(r"[\w.-]+", label) else f"'{label}'"
    more = f" and {len(cells) - 3} more" if len(cells) > 3 else ""
    condition = f"{axis}={value}" if value == label else f'"{axis}={value}"'
    listed = f"cell{'s' * (len(cells) > 1)} {', '.join(cells[:3])}{more} of {suite}"
    return f"this is {article(axis)} ({listed}): fatbench report {suite} -k {condition}"
