"""Worker processes on this machine: one a lane, each takes the next cell when it is free.

A worker that dies (killed, out of memory, a crash in a library) takes only its cell with it: the cell is marked
failed, a new worker takes the next one.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fatbench.worker import Event, Job, Machine, Outcome


def run(
    jobs: Sequence[Job],
    machine: Machine,
    lanes: Sequence[str],
    watch: Callable[[int, Event], None],
    stop: Callable[[], int],
    *,
    fail_fast: bool = False,
) -> dict[str, Outcome]:
    """Work through `jobs` on one process per lane; outcome per cell.

    stop() is 0 to go on, 1 to end after the round at hand (it is checkpointed), 2 to end at once.
    """
    context = multiprocessing.get_context("spawn")
    events: Any = context.Queue()
    stopping = context.Event()
    waiting = list(jobs)
    outcomes: dict[str, Outcome] = {}
    workers: dict[int, tuple[Any, Any, Job | None]] = {}

    def start(lane: int) -> tuple[Any, Any, Job | None]:
        inbox = context.SimpleQueue()
        lane_machine = replace(machine, device=lanes[lane])
        process = context.Process(target=_serve, args=(lane, lane_machine, inbox, events, stopping), daemon=True)
        process.start()
        return process, inbox, None

    try:
        while waiting or any(job for _, _, job in workers.values()):
            wish = stop()
            if wish:
                stopping.set()
                waiting.clear()
            if wish >= 2:
                break
            for lane in range(len(lanes)):
                process, inbox, job = workers.get(lane) or (None, None, None)
                if job is None and waiting:
                    if process is None or not process.is_alive():
                        process, inbox, _ = start(lane)
                    job = waiting.pop(0)
                    inbox.put(job)
                    workers[lane] = (process, inbox, job)
                elif job is not None and not process.is_alive() and events.empty():
                    outcomes[job.cell] = _bury(job, process.exitcode, machine, watch, lane)
                    watch(lane, Event(job.cell, "cell", "failed"))
                    workers.pop(lane)
                    if fail_fast:
                        stopping.set()
                        waiting.clear()
            try:
                lane, item = events.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(item, Event):
                watch(lane, item)
                continue
            process, inbox, job = workers[lane]
            if job is not None:
                outcomes[job.cell] = item
                watch(lane, Event(job.cell, "cell", item))
                workers[lane] = (process, inbox, None)
                if item == "failed" and fail_fast:
                    stopping.set()
                    waiting.clear()
    finally:
        for process, inbox, job in workers.values():
            if process.is_alive() and job is None:
                inbox.put(None)
        end = time.monotonic() + 5
        for process, _, job in workers.values():
            process.join(0 if job is not None else max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            if job is not None:
                _release(job, machine)
    for job in jobs:
        outcomes.setdefault(job.cell, "interrupted")
    return outcomes


def _bury(job: Job, code: int | None, machine: Machine, watch: Callable[[int, Event], None], lane: int) -> Outcome:
    """Mark what a dead worker was doing as failed."""
    from fatbench.store import Store

    name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    text = f"the worker process ended with {name}{hint}"
    with Store.open(machine.db) as store:
        for (_, stage), row in store.stages([job.cell]).items():
            if row.status == "running" and row.run is not None:
                store.fail(row.run, text)
                watch(lane, Event(job.cell, stage, "failed", message=text))
    return "failed"


def _release(job: Job, machine: Machine) -> None:
    """Give back what a killed worker had claimed; it goes on from the last checkpoint."""
    from fatbench.store import Store

    with Store.open(machine.db) as store:
        for row in store.stages([job.cell]).values():
            if row.status == "running" and row.run is not None:
                store.release(row.run)


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, so that a killed run leaves no worker behind."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _serve(lane: int, machine: Machine, inbox: Any, events: Any, stopping: Any) -> None:
    """A worker's life: take a job, do it, say how it went, until there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; a worker ends after its round
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent()
    parent = os.getppid()
    from fatbench.store import Store
    from fatbench.worker import work

    def notify(event: Event) -> None:
        events.put((lane, event))

    def stop() -> bool:
        return stopping.is_set() or os.getppid() != parent

    with Store.open(machine.db) as store:
        while (job := inbox.get()) is not None:
            events.put((lane, work(job, machine, store, notify, stop)))
            if os.getppid() != parent:
                return
