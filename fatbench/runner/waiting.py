"""Wait for cells that other processes hold, and handle the signals that ask for an end."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from fatbench.errors import Unavailable
from fatbench.runner import progress
from fatbench.runner.jobs import Job
from fatbench.runner.processes import heard_signals
from fatbench.store.stages import Store

PAUSE = 1.0  # seconds between two looks at the database, and at least ten times as long as a look takes
REMIND = 600.0  # seconds after which the user is told again what the run waits for


def until_free(jobs: Sequence[Job], store: Store, say: Callable[[str], None], stop: Callable[[], int]) -> list[Job]:
    """Wait until cells that other processes hold become free, and return those; [] once none is left to do.

    A cell becomes free when its process dies, releases it or loses its lease.
    """
    last_told = -REMIND
    while jobs and not stop():
        began = time.monotonic()
        states = progress.states_of(jobs, store)
        free_jobs = [job for job in jobs if states[job.cell] == "todo"]
        jobs = [job for job in jobs if states[job.cell] in ("todo", "running")]
        if free_jobs or not jobs:
            # the caller tries all of them: those that are still held come back as "elsewhere"
            return jobs if free_jobs else []
        if began - last_told > REMIND:
            last_told = began
            for line in holders(jobs, store):
                say(f"waiting: {line}")
        time.sleep(max(PAUSE, 10 * (time.monotonic() - began)))
    return []


def holders(jobs: Sequence[Job], store: Store, maximum: int = 10) -> list[str]:
    """Lines that say which process holds each of these jobs' cells."""
    return holders_of([job.cell for job in jobs], store, maximum)


def holders_of(cells: Sequence[str], store: Store, maximum: int = 10) -> list[str]:
    """Lines that say which process holds each of these cells."""
    rows = [row for row in store.stages(cells).values() if row.alive] if cells else []
    runs = {run["id"]: run for run in store.runs(cells)} if rows else {}  # after the rows, so that none lacks its run
    lines = []
    for row in rows[:maximum]:
        run = runs[row.run]
        age = "" if row.age is None else f", last progress {row.age:.0f} s ago"
        slurm = f", SLURM job {run['slurm_job']}" if run.get("slurm_job") else ""
        lines.append(f"{row.cell} {row.stage} is held by process {run['pid']} on {run['host']}{slurm}{age}")
    return [*lines, f"and {len(rows) - maximum} more"] if len(rows) > maximum else lines


class StopRequest:
    """How often the user has asked the run to stop by a signal (`times`), and its exit status (`code`).

    Ctrl-C sends SIGINT; clusters send SIGTERM or SIGUSR1 before they end a job, a terminal that is closed SIGHUP.
    Python delivers signals to the main thread alone, so a run in another thread does not see them.
    """

    def __init__(self) -> None:
        self.times = 0
        self.code = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in heard_signals():
            self._before[number] = signal.signal(number, self._hear)
        # SIGPIPE ends other commands with their reader (`| head`), but a worker that died must not end a run
        self._before[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.code and isinstance(error, Unavailable):  # the user stopped waiting for the database
            raise SystemExit(self.code) from error

    def _hear(self, number: int, _: object) -> None:
        if number == signal.SIGHUP and self.times:  # from the shell and from the system: not the word of a person
            return
        self.times += 1
        self.code = 128 + number
        if self.times == 1:
            print(
                "\nfatbench: finishing and checkpointing the current round; press Ctrl-C again to stop at once"
                " (the same command continues from the last checkpoint)",
                file=sys.stderr,
            )

    def ask(self) -> int:
        """0: continue; 1: stop after the current round; 2: stop at once."""
        return self.times
