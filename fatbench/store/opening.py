"""The database for whoever only looks: asking about nothing is no error, and creates nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fatbench import settings

if TYPE_CHECKING:
    from fatbench.store.stages import Store


@contextlib.contextmanager
def opened(db: str | None) -> Iterator[Store | None]:
    """The database if it exists, else None. DatabaseError: the file is not ours, or of another version."""
    from fatbench.store.database import NoDatabase
    from fatbench.store.stages import Store

    try:
        store = Store.open(settings.database(db))
    except NoDatabase:
        yield None
        return
    with store:
        yield store
