"""Which process runs a stage, and whether it still lives: what decides if another may take the stage over."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

STALE = 15 * 60.0  # seconds without a sign of life after which a run on another machine is taken for dead


def epoch(stored: str | None) -> float | None:
    """A stored time as seconds since the epoch."""
    return None if stored is None else datetime.fromisoformat(stored).timestamp()


@cache
def this_machine() -> str:
    """This machine, its boot and our pid namespace: within these a pid and a start time mean one process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    try:
        machine = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine = ""
    return f"{machine} {boot} {namespace}"


def start_of(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None where it is gone (a zombie is), "" where unknown."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else rest[18]
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:  # somebody else's process
        pass
    return ""


def alive(host: str | None, pid: int | None, process: str | None, heartbeat: str | None, stale: float) -> bool:
    """Whether the run of this process may still be going on.

    Certain where the pid can be looked up here. Across machines, and across containers that share a host name, only
    the heartbeat speaks.
    """
    if host == socket.gethostname() and pid is not None:
        machine, _, born = (process or "").rpartition(" ")
        here = this_machine()
        if machine == here:
            found = start_of(pid)
            return found is not None and (not found or found == born)
        if machine and here:
            (id, boot, namespace), (our_id, our_boot, our_namespace) = machine.split(" "), here.split(" ")
            initial = "pid:[4026531836]"  # not a container
            if id and id == our_id and boot != our_boot and namespace == our_namespace == initial:
                return False  # the machine was started again since
    age = datetime.now(UTC).timestamp() - (epoch(heartbeat) or 0.0)
    return age < stale
