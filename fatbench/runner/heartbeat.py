"""The heartbeat of a cell's work renews its lease, and stops the work when the lease or the time is lost.

Every forward pass of the cell's network is a beat. As long as there are beats, a thread renews the run's lease. A
process that is stopped or hangs has no beats and loses its stage; if it continues after all, its next beat raises
`LeaseLost`.
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
    """The cell has used up its time limit."""

    exit_code = 1


class Heartbeat:
    """Counts a cell's beats. It is called at every beat, and raises an error to end the work."""

    def __init__(self, limit: float | None = None):
        """limit: seconds that the cell may take from now on; None for no limit."""
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
                f"the time limit of {self.limit:g} s is over; its rounds are kept, and --rerun failed continues there"
            )

    def watch(self, network: Any) -> None:
        """Make every forward pass of a network a beat, and of each child, for code that calls them one by one."""

        def beat(*_: object) -> None:  # a function, which copies of the network share; deepcopy would copy `self`
            self()

        for module in (network, *network.children()):
            module.register_forward_pre_hook(beat)


@contextlib.contextmanager
def renewing(db: str, run: int, heartbeat: Heartbeat, lease: float = LEASE) -> Iterator[None]:
    """Renew a run's lease while there are beats; once another process holds it, the next beat ends the work."""
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
            except Exception:  # try again later; `commit` reports what is wrong
                continue

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished_event.set()
        thread.join()
