"""The database for whoever only looks: asking about nothing is no error, and costs nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fatbench import settings

if TYPE_CHECKING:
    from fatbench.store.stages import Store


@contextlib.contextmanager
def opened(db: str | None) -> Iterator[Store | None]:
    """The database if it exists, else None. DatabaseError: the file is not ours, or of another version."""
    url = settings.database(db)
    if "://" not in url and _missing(Path(url)):
        yield None  # without SQLAlchemy, which takes a quarter of a second to import
        return
    from fatbench.store.database import NoDatabase
    from fatbench.store.stages import Store

    try:
        store = Store.open(url)
    except NoDatabase:
        yield None
        return
    with store:
        yield store


def _missing(file: Path) -> bool:
    try:
        return bool(str(file).strip()) and not file.expanduser().exists()
    except (OSError, RuntimeError):  # whoever opens it says what is wrong
        return False
