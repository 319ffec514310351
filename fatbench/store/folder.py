"""The folder of a database's checkpoints and logs, marked with the database's identity.

Two databases in one folder would sweep each other's checkpoints, and `clean` on one would remove the other's models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import select

from fatbench import whole_file
from fatbench.errors import SpecError, Unavailable
from fatbench.settings import shown_url
from fatbench.store.database import NoDatabase
from fatbench.store.rows import counted_text
from fatbench.store.schema import IDENTITY
from fatbench.store.stages import Store

MARK = ".fatbench-database"  # a file with the identity and, for people, the address


@contextmanager
def opened(url: str, folder: Path, note: Callable[[str], None] = lambda text: None) -> Iterator[Store]:
    """The database at `url` with its folder, both created if they are missing.

    note: is told when the folder is new to a database that has models elsewhere. Raises as `Store.open` and `claim` do;
    the database is not created if it cannot get its folder.
    """
    try:
        Store.open(url).close()
    except NoDatabase:
        if (owner := _owner(folder)) is not None:
            raise _wrong_owner(folder, owner, shown_url(url)) from None
        _make_folder(folder)
    with Store.open(url, create=True) as store:
        if not belongs(store, folder):
            claim(store, folder)
            if cells := [cell for cell in trained(store) if not (folder / cell).is_dir()]:
                note(
                    f"{folder} is new and has no models of the {counted_text({'trained cells': len(cells)})} of"
                    f" {store.database.shown}: if another user or machine has them, name one folder for all in"
                    " FATBENCH_FILES"
                )
        yield store


def trained(store: Store, cells: Sequence[str] | None = None) -> list[str]:
    """Those of the cells (None: of all) that have a model, here or where they were imported from."""
    return [cell for (cell, stage), row in store.stages(cells).items() if stage == "train" and "sha256" in row.record]


def claim(store: Store, folder: Path) -> None:
    """Mark a folder as this database's. Raises SpecError if it is another's, Unavailable if it cannot be written."""
    if belongs(store, folder):
        return
    _make_folder(folder)
    try:
        with whole_file.replacing(folder / MARK, new=True) as handle:
            handle.write(f"{_identity(store)} {store.database.shown}\n".encode())
    except FileExistsError:  # another process was faster: check that it is ours
        belongs(store, folder)
    except OSError as error:
        raise Unavailable(f"cannot write {folder / MARK}: {error.strerror}") from None


def belongs(store: Store, folder: Path) -> bool:
    """Whether a folder is this database's; False if it has no owner. Raises SpecError if it is another's."""
    owner = _owner(folder)
    if owner is not None and owner[0] != _identity(store):
        raise _wrong_owner(folder, owner, store.database.shown)
    return owner is not None


def _owner(folder: Path) -> tuple[str, str] | None:
    """(identity, address) of the database that a folder belongs to; None if it has no owner."""
    try:
        identity, _, address = (folder / MARK).read_text(encoding="utf-8", errors="replace").strip().partition(" ")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SpecError(f"{folder / MARK}: {error.strerror}") from None
    return identity, address


def _wrong_owner(folder: Path, owner: tuple[str, str], shown_database: str) -> SpecError:
    if owner[1] == shown_database:  # the database file was deleted and created again
        return SpecError(
            f"{folder} holds the checkpoints of an earlier {shown_database}: remove the folder to start afresh; if "
            f"this database has the earlier one's numbers, remove only {folder / MARK}"
        )
    return SpecError(
        f"{folder} holds the checkpoints of another database ({owner[1]}), not of {shown_database}: name another "
        f"folder in FATBENCH_FILES; if it is the same database, moved, remove {folder / MARK}"
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"cannot make {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise Unavailable(f"cannot write {folder}: Permission denied")


def _identity(store: Store) -> str:
    with store.database.reading() as connection:
        return str(connection.scalar(select(IDENTITY.c.id)))
