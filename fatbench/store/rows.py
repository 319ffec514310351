"""The form of values in the tables, and queries by many keys."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import Connection

from fatbench.errors import escapes, printable
from fatbench.store.liveness import process_start, this_machine
from fatbench.store.schema import RUNS

# Canonical JSON: sorted keys, no spaces. Raises ValueError for NaN and infinities.
dumps = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Key -> its values, in the order in which they come."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def current_time() -> str:
    """The current time as it is stored: UTC, ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def counted_text(counts: Mapping[str, int]) -> str:
    """{"cells": 1, "outcome_chunks": 2} as "1 cell, 2 outcome chunks"."""
    names = ((n, name.replace("_", " ")) for name, n in counts.items())
    return ", ".join(f"{n} {name.removesuffix('s') if n == 1 else name}" for n, name in names)


_PAIR = r"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # of surrogates: one character beyond U+FFFF
_IN_JSON = re.compile(rf"\\(?:{_PAIR}|u(?P<code>[0-9a-fA-F]{{4}})|(?P<letter>.))", re.DOTALL)


@functools.lru_cache(1024)  # the rows of a cell share their names
def stored_text(stored_bytes: bytes) -> str:
    """Text of a database, made `printable` because others may have written it; in JSON, only the strings.

    Raises sqlite3.OperationalError if the file is damaged.
    """
    try:
        text = stored_bytes.decode()
    except UnicodeDecodeError:
        raise sqlite3.OperationalError("Could not decode to UTF-8") from None
    if not text.lstrip().startswith(("{", "[", '"')):
        return printable(text)
    return escapes(_IN_JSON.sub(_escaped, text), "\\\\")


def _escaped(escape: re.Match[str]) -> str:
    """An escape of JSON, itself escaped if it stands for a character that `printable` replaces."""
    code, letter = escape["code"], escape["letter"]
    character = chr(int(code, 16)) if code else {"b": "\b", "f": "\f", "r": "\r"}.get(letter, "")
    return escape[0] if printable(character) == character else "\\" + escape[0]


def batches(values: Iterable[str], size: int = 500) -> Iterator[list[str]]:
    """Distinct values in order, `size` at a time, because databases limit the parameters of a statement."""
    ordered = sorted(set(values))
    for offset in range(0, len(ordered), size):
        yield ordered[offset : offset + size]


def fetch(connection: Connection, query: Any, key: Any, values: Iterable[str] | None) -> Iterator[Any]:
    """The rows of `query` whose `key` is among any number of `values`; None: all rows."""
    for batch_query in (
        [query] if values is None else (query.where(key.in_(value_batch)) for value_batch in batches(values))
    ):
        for rows in connection.execute(batch_query).partitions(1000):
            yield from rows


def cell_row(cell: str, spec: Mapping[str, Any], created: str) -> dict[str, Any]:
    """A row of `cells`."""
    seed = spec.get("seed")
    is_integer = isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 2**63
    return {"id": cell, "spec": dumps(spec), "seed": seed if is_integer else None, "created": created}


LARGEST = 1e100  # of a measured number: beyond any float32, and sums and squares stay finite

PROVENANCE = ("preset", "host", "pid", "device", "precision", "commit", "dirty", "versions", "log")


def run_values(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of `runs` that provenance fills, and the rest of it as JSON."""
    columns, other_values = split_provenance(provenance)
    host, pid = columns.setdefault("host", socket.gethostname()), columns.setdefault("pid", os.getpid())
    if host == socket.gethostname() and (machine := this_machine()):
        columns["process"] = f"{machine} {process_start(pid) or ''}"
    return {**columns, "extra": dumps(other_values)}


def split_provenance(provenance: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(values of columns, the rest) of a run's provenance."""
    columns = {key: value for key, value in provenance.items() if key in PROVENANCE}
    if columns.get("versions") is not None:
        columns["versions"] = dumps(columns["versions"])
    other_values = {key: value for key, value in provenance.items() if key not in PROVENANCE}
    if reserved_names := sorted(other_values.keys() & RUNS.c.keys()):
        raise ValueError(f"provenance: '{reserved_names[0]}' is reserved for the database")
    return columns, other_values
