"""Mappings that remember where in a file each key stands, so that an error can say it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


class LocatedMap(dict):
    """A mapping read from YAML that remembers where each key stands: `where[key]` is "file:line"."""

    where: dict[str, str]

    def __init__(self, items: Mapping[str, Any] = {}, where: dict[str, str] | None = None, at: str = ""):
        super().__init__(items)
        self.where = dict(where or {})
        self.at = at

    def place(self, key: str) -> str:
        """ "file:line: key", or the key alone where the place is unknown."""
        place = self.where.get(key) or self.at
        return f"{place}: {key}" if place else key


def merge(under: Any, over: Any) -> Any:
    """`under` overridden by `over`, key by key; one that names another function, or a suite, replaces the whole."""
    if not (isinstance(under, LocatedMap) and isinstance(over, LocatedMap)):
        return copy.copy(over)
    if "suite" in over or ("name" in over and over["name"] != under.get("name")):
        return copy.copy(over)
    merged = LocatedMap(under, under.where, under.at)
    for key, value in over.items():
        merged[key] = merge(under[key], value) if key in under else value
        if key in over.where:
            merged.where[key] = over.where[key]
    return merged
