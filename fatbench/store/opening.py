"""The database for whoever only looks: asking about nothing is no error, and creates nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fatbench import settings

if TYPE_CHECKING:
    from fatbench.store.stages import Store


@contextlib.contextmanager
def opened(db: str | None, *, new: bool = False) -> Iterator[Store | None]:
    """The database if it exists, else None; `new`: also where it was named (db) and does not exist.

    DatabaseError: the file is not ours, or of another version. NoDatabase: it was named, does not exist, not `new`.
    """
    from fatbench.store.database import NoDatabase
    from fatbench.store.stages import Store

    try:
        store = Store.open(settings.database(db))
    except NoDatabase:
        if db is not None and not new:
            raise
        yield None
        return
    with store:
        yield store
