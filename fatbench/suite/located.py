"""Mappings that remember the line of each key, so that errors can name it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


class LocatedMap(dict):
    """A mapping read from YAML; `where[key]` and `at` are the places of a key and of the mapping, "file:line"."""

    where: dict[str, str]

    def __init__(self, items: Mapping[str, Any] = {}, where: dict[str, str] | None = None, at: str = ""):
        super().__init__(items)
        self.where = dict(where or {})
        self.at = at

    def place(self, key: str) -> str:
        """The text "file:line: key", or the key alone if its place is unknown."""
        location = self.where.get(key) or self.at
        return f"{location}: {key}" if location else key


def merge(base: Any, override: Any) -> Any:
    """`base` overridden key by key; an override that names another function, or a suite, replaces the whole."""
    if not (isinstance(base, LocatedMap) and isinstance(override, LocatedMap)):
        return copy.copy(override)
    if "suite" in override or ("name" in override and override["name"] != base.get("name")):
        return copy.copy(override)
    merged = LocatedMap(base, base.where, base.at)
    for key, value in override.items():
        merged[key] = merge(base[key], value) if key in base else value
        if key in override.where:
            merged.where[key] = override.where[key]
    return merged
