"""Leases: a run holds its stage for a limited time after its last progress.

Heartbeats and their expiry are measured by one clock, the database's: the server's, or for a SQLite file that of its
file system. So a machine whose own clock is wrong takes no stage from another.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, text

from fatbench.store.liveness import is_gone

LEASE = 15 * 60.0  # seconds, unless the run's provenance states another


def clock(connection: Connection, file: Path | None) -> float:
    """The database's time in seconds since the epoch. file: the SQLite file; None for PostgreSQL."""
    if file is None:
        return float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
    try:
        with tempfile.TemporaryFile(dir=file.parent) as touched_file:  # a file server stamps it with its own time
            return os.fstat(touched_file.fileno()).st_mtime
    except OSError:  # without write access or space, this process only shows the result
        return time.time()


def stamp(seconds: float) -> str:
    """A time as it is stored: UTC, ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def epoch(stored_time: str | None) -> float | None:
    """A stored time as seconds since the epoch."""
    return None if stored_time is None else datetime.fromisoformat(stored_time).timestamp()


def lease_end(row: Any) -> float:
    """The time at which the lease of a running stage ends; `row` has its heartbeat and its run's `extra`."""
    lease = json.loads(row.extra).get("lease", LEASE) if row.extra else LEASE
    return (epoch(row.heartbeat) or 0.0) + float(lease)


def is_held(row: Any, current_time: float) -> bool:
    """Whether a run still holds its running stage: its process is not known to be gone, and its lease is valid.

    `row` also has host, pid and process of the run.
    """
    return not is_gone(row.host, row.pid, row.process) and current_time < lease_end(row)
