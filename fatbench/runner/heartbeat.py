"""The heartbeat of a cell's work: what renews its lease, and what ends it before its time.

Every forward pass of the cell's network is a beat. While there are beats, a thread renews the lease of the run in hand.
A process that is stopped, hangs or waits for ever has no beats, and loses its stage; when it goes on after all, the
next beat tells it so.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

from fatbench.errors import FatbenchError
from fatbench.store.leases import LEASE
from fatbench.store.stages import LeaseLost, Store

OFTEN = 60.0  # seconds between two renewals, at most


class TimeLimit(FatbenchError):
    """The cell has had the time that it may have."""

    exit_code = 1


class Heartbeat:
    """A cell's beats. Called at every beat: raises what ends the work."""

    def __init__(self, limit: float | None = None):
        """limit: seconds that the cell may take from now on."""
        self.beats = 0
        self.limit = limit
        self.end = math.inf if limit is None else time.monotonic() + limit
        self.lost: LeaseLost | None = None

    def __call__(self, *_: object) -> None:
        self.beats += 1
        if self.lost is not None:
            raise self.lost
        if time.monotonic() > self.end:
            raise TimeLimit(
                f"{self.limit:g} s are over; the rounds done are kept, and --retry-failed continues from them"
            )

    def watch(self, network: Any) -> None:
        """Let every forward pass of a network be a beat, also of one that is called part by part."""

        def beat(*_: object) -> None:  # a function: copies of the network share it
            self()

        for module in (network, *network.children()):
            module.register_forward_pre_hook(beat)


@contextlib.contextmanager
def renewing(db: str, run: int, heartbeat: Heartbeat, lease: float = LEASE) -> Iterator[None]:
    """Renew the lease of a run while there are beats; the next beat ends the work when another process has it."""
    finished_event = threading.Event()
    heartbeat.lost = None

    def renew() -> None:
        last_beats = heartbeat.beats
        while not finished_event.wait(min(OFTEN, lease / 4)):
            if heartbeat.beats == last_beats:
                continue
            last_beats = heartbeat.beats
            try:
                with Store.open(db) as store:
                    store.heartbeat(run)
            except LeaseLost as error:
                if not finished_event.is_set():
                    heartbeat.lost = error
                return
            except Exception:  # `commit` finds out what is wrong
                continue

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished_event.set()
        thread.join()
