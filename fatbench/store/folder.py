"""The folder of a database's checkpoints and logs: it carries the database's identity, and serves no other database.

Two databases in one folder would sweep each other's checkpoints, and `clean` on one remove the models of the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import select

from fatbench import whole_file
from fatbench.errors import SpecError, Unavailable
from fatbench.settings import shown_url
from fatbench.store.database import NoDatabase
from fatbench.store.schema import IDENTITY
from fatbench.store.stages import Store

MARK = ".fatbench-database"  # holds the identity, and for people the address


@contextmanager
def opened(url: str, folder: Path) -> Iterator[Store]:
    """The database at `url` with its folder, both made where they are missing. Errors as for `Store.open` and `claim`;
    a database that would not get its folder is not made.
    """
    try:
        Store.open(url).close()
    except NoDatabase:
        if (owner := _owner(folder)) is not None:
            raise _foreign(folder, owner, shown_url(url)) from None
        _make(folder)
    with Store.open(url, create=True) as store:
        claim(store, folder)
        yield store


def claim(store: Store, folder: Path) -> None:
    """Make a folder this database's. SpecError: it is another's; Unavailable: it cannot be written."""
    if belongs(store, folder):
        return
    _make(folder)
    try:
        with whole_file.replacing(folder / MARK, new=True) as handle:
            handle.write(f"{_identity(store)} {store.database.shown}\n".encode())
    except FileExistsError:  # another process was quicker
        belongs(store, folder)
    except OSError as error:
        raise Unavailable(f"cannot write {folder / MARK}: {error.strerror}") from None


def belongs(store: Store, folder: Path) -> bool:
    """Whether a folder is this database's; False: it has no owner yet. SpecError: it is another's."""
    owner = _owner(folder)
    if owner is not None and owner[0] != _identity(store):
        raise _foreign(folder, owner, store.database.shown)
    return owner is not None


def _owner(folder: Path) -> tuple[str, str] | None:
    """(identity, address) of the database that a folder belongs to; None: it has no owner yet."""
    try:
        identity, _, address = (folder / MARK).read_text(encoding="utf-8", errors="replace").strip().partition(" ")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SpecError(f"{folder / MARK}: {error.strerror}") from None
    return identity, address


def _foreign(folder: Path, owner: tuple[str, str], shown_database: str) -> SpecError:
    if owner[1] == shown_database:  # the file was deleted and made again
        return SpecError(
            f"{folder} holds the checkpoints of an earlier {shown_database}: remove the folder to begin anew; "
            "if this database "
            f"has the earlier one's numbers, remove {folder / MARK} alone"
        )
    return SpecError(
        f"{folder} holds the checkpoints of another database ({owner[1]}), not of {shown_database}: give this "
        "one a folder by "
        f"FATBENCH_FILES; if it is the same database, moved, remove {folder / MARK}"
    )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"cannot make {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise Unavailable(f"cannot write {folder}: Permission denied")


def _identity(store: Store) -> str:
    with store.database.reading() as connection:
        return str(connection.scalar(select(IDENTITY.c.id)))
