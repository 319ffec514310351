"""Rows as they are written and read: values in the form in which the tables hold them, and many keys at a time."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection

from fatbench.store.liveness import start_of, this_machine
from fatbench.store.schema import RUNS


def dumps(value: Any) -> str:
    """Canonical JSON: sorted keys, no spaces. ValueError: NaN or infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def now() -> str:
    """The time as it is stored: UTC, ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def counted(counts: Mapping[str, int]) -> str:
    """{"cells": 1, "outcome_chunks": 2} as "1 cell, 2 outcome chunks"."""
    names = ((n, name.replace("_", " ")) for name, n in counts.items())
    return ", ".join(f"{n} {name.removesuffix('s') if n == 1 else name}" for n, name in names)


def printable(message: str) -> str:
    """Text that any database takes and any terminal shows: no control character, no half of a surrogate pair."""
    whole = message.encode("utf-8", "backslashreplace").decode()
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", whole)


def batches(values: Iterable[str], size: int = 500) -> Iterator[list[str]]:
    """Distinct values in order, so many at a time: databases limit the parameters of a statement."""
    ordered = sorted(set(values))
    for first in range(0, len(ordered), size):
        yield ordered[first : first + size]


def fetch(connection: Connection, query: Any, key: Any, values: Iterable[str] | None) -> Iterator[Any]:
    """The rows of `query` whose `key` is among `values` (None: all rows); any number of values."""
    for found in [query] if values is None else (query.where(key.in_(part)) for part in batches(values)):
        for rows in connection.execute(found).partitions(1000):
            yield from rows


def cell_row(cell: str, spec: Mapping[str, Any], created: str) -> dict[str, Any]:
    """A row of `cells`."""
    seed = spec.get("seed")
    fits = isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 2**63
    return {"id": cell, "spec": dumps(spec), "seed": seed if fits else None, "created": created}


LARGEST = 1e100  # of a measured number: sums and squares of many are finite, and no float32 is beyond it

PROVENANCE = ("preset", "host", "pid", "device", "precision", "commit", "dirty", "versions", "log")


def run_values(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What a row of `runs` says of where and how: columns of the same names, and the rest as JSON."""
    known, rest = split_provenance(provenance)
    host, pid = known.setdefault("host", socket.gethostname()), known.setdefault("pid", os.getpid())
    if host == socket.gethostname() and (machine := this_machine()):
        known["process"] = f"{machine} {start_of(pid) or ''}"
    return {**known, "extra": dumps(rest)}


def split_provenance(provenance: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is said of a run: (values of columns, the rest)."""
    known = {key: value for key, value in provenance.items() if key in PROVENANCE}
    if known.get("versions") is not None:
        known["versions"] = dumps(known["versions"])
    rest = {key: value for key, value in provenance.items() if key not in PROVENANCE}
    if taken := sorted(rest.keys() & RUNS.c.keys()):
        raise ValueError(f"provenance: '{taken[0]}' is reserved for the database")
    return known, rest
