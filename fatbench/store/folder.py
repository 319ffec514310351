"""The folder of a database's checkpoints and logs: it carries the database's identity, and serves no other database.

Two databases in one folder would sweep each other's checkpoints, and `clean` on one remove the models of the other.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select

from fatbench import whole_file
from fatbench.errors import SpecError, Unavailable
from fatbench.store.schema import IDENTITY
from fatbench.store.stages import Store

MARK = ".fatbench-database"  # holds the identity, and for people the address


def claim(store: Store, folder: Path) -> None:
    """Make a folder this database's. SpecError: it is another's; Unavailable: it cannot be written."""
    if not belongs(store, folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with whole_file.replacing(folder / MARK) as handle:
                handle.write(f"{_identity(store)} {store.database.shown}\n".encode())
        except OSError as error:
            raise Unavailable(f"cannot write {folder / MARK}: {error.strerror}") from None


def belongs(store: Store, folder: Path) -> bool:
    """Whether a folder is this database's; False: it has no owner yet. SpecError: it is another's."""
    try:
        owner, _, address = (folder / MARK).read_text(encoding="utf-8", errors="replace").strip().partition(" ")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise SpecError(f"{folder / MARK}: {error.strerror}") from None
    if owner != _identity(store):
        raise SpecError(
            f"{folder} holds the checkpoints of another database ({address}), not of {store.database.shown}: give this "
            f"one a folder by FATBENCH_FILES; if it is the same database made anew, remove {folder / MARK}"
        )
    return True


def _identity(store: Store) -> str:
    with store.database.reading() as connection:
        return str(connection.scalar(select(IDENTITY.c.id)))
