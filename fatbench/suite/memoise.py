"""Results for pieces of a suite, kept in memory: cells that differ in one setting share all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_KEPT: dict[tuple[Any, ...], Any] = {}
_MOST = 100_000


def memoised(what: str, kind: str, node: Any, find: Callable[[], Any]) -> Any:
    """What `find` gives for a node that is written so; errors are found anew, for they name places."""
    key = (what, kind, repr(node))
    return _KEPT[key] if key in _KEPT else _kept(key, find())


def memoised_part(what: str, kind: str, part: Any, find: Callable[[], Any], *given: Any) -> Any:
    """`memoised` for a part that cells share and never change: the same object is known again without being read.

    given: what else the answer depends on, hashable.
    """
    key = (what, kind, id(part), *given)
    if (known := _KEPT.get(key)) is not None:
        return known[1]
    found = memoised(what, kind, (part, *given), find)
    return _kept(key, (part, found))[1]  # the part is kept, so that nothing else can have its id


def clear() -> None:
    """Find everything out again: what a suite may call has changed."""
    _KEPT.clear()


def _kept(key: tuple[Any, ...], found: Any) -> Any:
    if len(_KEPT) >= _MOST:
        _KEPT.clear()
    _KEPT[key] = found
    return found
