"""The database for whoever only looks: asking about nothing is no error, and creates nothing."""

from __future__ import annotations

import contextlib
import os
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
def opened(db: Db, *, new: bool = False) -> Iterator[Store | None]:
    """The database if it exists, else None; `new`: also where it was named (db) and does not exist.

    Files of `fatbench export`, and several databases or files, are read together, as one database that is not kept.
    DatabaseError: the file is not ours, or of another version. NoDatabase: it was named, does not exist, not `new`.
    """
    from fatbench.store.database import NoDatabase
    from fatbench.store.stages import Store

    places = named(db)
    if len(places) > 1 or (places and not new and exported(places[0])):
        with _together(places) as store:
            yield store
        return
    place = places[0] if places else None
    try:
        store = Store.open(settings.database(place))
    except NoDatabase:
        if place is not None and not new:
            raise
        yield None
        return
    with store:
        yield store


def named(db: Db) -> list[str]:
    """The databases and files that are named; none: that of the settings."""
    return [] if db is None else [str(db)] if isinstance(db, str | Path) else [str(one) for one in db]


def exported(place: str) -> bool:
    """Whether a place is a file of JSON lines (a pipe, one of the hub), and no database."""
    from fatbench.store import jsonl

    if "://" in place and hub.address(Path(place)) is None:
        return False
    return os.path.isfile(whole_file.regular(Path(place))) and jsonl.is_export(place)


_READ: dict[tuple[tuple[str, int, int], ...], tempfile.TemporaryDirectory[str]] = {}  # files, as they were -> database


@contextlib.contextmanager
def _together(places: Sequence[str]) -> Iterator[Store]:
    """A database of what all these hold; that of files alone is made once in a process."""
    from fatbench.store.stages import Store

    files = [whole_file.regular(Path(place)) for place in places if exported(place)]
    key = tuple((str(file.resolve()), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    if len(files) == len(places) and key in _READ:
        with Store.open(f"{_READ[key].name}/results.db") as store:
            yield store
        return
    folder = tempfile.TemporaryDirectory(prefix="fatbench-")
    try:
        with Store.open(f"{folder.name}/results.db", create=True) as store:
            for place in places:
                _take_in(store, place, Path(folder.name) / "other.jsonl")
            yield store
    except BaseException:
        folder.cleanup()
        raise
    if len(files) == len(places):
        _READ[key] = folder
    else:
        folder.cleanup()


def _take_in(store: Store, place: str, copy: Path) -> None:
    """What a database or a file holds, into this database; copy: where a database's lines may stand meanwhile."""
    from fatbench.store import jsonl
    from fatbench.store.stages import Store

    if exported(place):
        jsonl.import_(store, place)
        return
    with Store.open(place) as other:
        jsonl.export(other, copy)
    jsonl.import_(store, copy)


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
