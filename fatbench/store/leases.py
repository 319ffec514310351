"""Leases: a run holds its stage for so long after its last sign of progress, and no longer.

The signs and the judgement about them are on one clock, the database's: the server's, or for a SQLite file that of the
file system it is on. So a machine whose own clock is wrong takes nothing from anybody.
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

from fatbench.store.liveness import gone

LEASE = 15 * 60.0  # seconds; a run that wants another lease says so in its provenance


def clock(connection: Connection, file: Path | None) -> float:
    """The database's time in seconds since the epoch. file: of a SQLite database; None: it is PostgreSQL."""
    if file is None:
        return float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
    try:
        with tempfile.TemporaryFile(dir=file.parent) as touched_file:  # a file server writes its own time on it
            return os.fstat(touched_file.fileno()).st_mtime
    except OSError:  # whoever may only read, or has no space, judges nothing that is written
        return time.time()


def stamp(seconds: float) -> str:
    """A time as it is stored: UTC, ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def epoch(stored_time: str | None) -> float | None:
    """A stored time as seconds since the epoch."""
    return None if stored_time is None else datetime.fromisoformat(stored_time).timestamp()


def ends(row: Any) -> float:
    """When the lease of a running stage ends; `row` has its heartbeat, and its run's `extra`."""
    lease = json.loads(row.extra).get("lease", LEASE) if row.extra else LEASE
    return (epoch(row.heartbeat) or 0.0) + float(lease)


def held(row: Any, current_time: float) -> bool:
    """Whether a running stage is still its run's: its process is not known to be gone, and its lease has not ended.

    `row` also has host, pid and process of the run.
    """
    return not gone(row.host, row.pid, row.process) and current_time < ends(row)
