"""Whether the process that runs a stage is certainly gone."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path


@cache
def this_machine() -> str:
    """This machine, its boot and the pid namespace, within which a pid and a start time identify a process."""
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


def process_start(pid: int) -> str | None:
    """A process's start in clock ticks since boot; None if it is gone or a zombie, "" if unknown."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:  # another user's process
        pass
    return ""


def is_gone(host: str | None, pid: int | None, process: str | None) -> bool:
    """Whether the process of a run is certainly gone.

    Only a process whose pid can be looked up here can be known to be gone. Across machines, and across containers that
    share a host name, only the lease decides.
    """
    if host != socket.gethostname() or pid is None:
        return False
    machine, _, start_then = (process or "").rpartition(" ")
    machine_here = this_machine()
    if machine == machine_here:
        start_now = process_start(pid)
        return start_now is None or bool(start_now and start_now != start_then)
    if machine and machine_here:
        (id, boot, namespace), (our_id, our_boot, our_namespace) = machine.split(" "), machine_here.split(" ")
        initial = "pid:[4026531836]"  # not a container
        # the same machine has been rebooted since
        return bool(id) and id == our_id and boot != our_boot and namespace == our_namespace == initial
    return False
