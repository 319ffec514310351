"""Executors hand cells to workers: processes on this machine, Ray tasks, SLURM jobs.

    local   worker processes on this machine
    ray     Ray tasks
    slurm   SLURM jobs

An executor is a module with two functions. `slots(device, jobs, per_gpu, url)` says which devices work side by side,
and refuses what cannot be done before anything is written. `run(jobs, machine, slots, watch, stop, fail_fast=False,
note=say)` works through the cells and returns how each ended. `watch` takes the workers' events. `stop` returns what
the user asked for: 0 to go on, 1 to end after the current round, 2 to end at once. `note` tells the user what concerns
no single cell. What executors share is in this file.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fatbench import settings
from fatbench.errors import FatbenchError, SpecError, Unavailable
from fatbench.runner.jobs import CellStatus, Event, Job, Machine
from fatbench.runner.worker import work
from fatbench.store.database import patiently
from fatbench.store.stages import Store


class Worker(NamedTuple):
    """The process that is working on a cell."""

    host: str
    pid: int


def this_worker() -> Worker:
    """This process, as a `Worker`."""
    return Worker(socket.gethostname(), os.getpid())


def device_and_jobs(device: str | None, jobs: int | None) -> tuple[str, int | None]:
    """(device, cells side by side) from the flags, else from the settings. SpecError: one of them is not valid."""
    device_name = settings.setting("run.device", device) or "auto"
    if device_name not in ("auto", "cpu", "cuda"):
        kind, _, numbers = device_name.partition(":")
        if kind != "cuda" or not all(gpu_number.isdecimal() for gpu_number in numbers.split(",")):
            raise SpecError(f"expected auto, cpu, cuda or cuda:0,1, got '{device_name}'", option="device")
    if jobs is None and (number := settings.setting("run.jobs")):
        if not number.isdecimal() or int(number) < 1:
            raise SpecError(f"jobs: expected a number of cells in parallel, got '{number}'")
        jobs = int(number)
    if jobs is not None and jobs > MOST_JOBS:
        raise SpecError(f"jobs: expected at most {MOST_JOBS} cells in parallel, got {jobs}")
    return device_name, jobs


MOST_JOBS = 1000  # each is a process that imports torch


def say(text: str) -> None:
    """Print a line for the user on stderr, beside what the run's observer shows."""
    print(f"fatbench: {text}", file=sys.stderr, flush=True)


OPENING = 600.0  # seconds that a worker waits for the database before it gives up: its node may not reach the server


def open_store(db: str) -> Store:
    """Open the database for a worker, whose work neither another writer nor a restarted server may end."""
    store = patiently(lambda: Store.open(db), OPENING)
    store.database.patience = math.inf
    return store


def attempt(job: Job, machine: Machine, notify: Callable[[Event], None], stop: Callable[[], bool]) -> CellStatus:
    """Take a worker's turn at a cell, with its own database connection.

    `work` stores the failure of a stage. Other errors (no database, no place for the log) cannot be stored: they become
    an event, and the worker goes on to the next cell.
    """
    try:
        with open_store(machine.db) as store:
            return work(job, machine, store, notify, stop)
    except Unavailable as error:
        notify(Event(job.cell, "train", "blocked", message=str(error)))
        return "blocked"
    except Exception as error:
        is_expected = isinstance(error, FatbenchError)
        notify(Event(job.cell, "train", "failed", message=str(error) if is_expected else traceback.format_exc()))
        return "failed"


def record_loss(
    job: Job, machine: Machine, worker: Worker | str | None, text: str, watch: Callable[[int, Event], None], slot: int
) -> CellStatus:
    """Mark the stages that a dead worker held as failed; those of other processes stay as they are."""
    with open_store(machine.db) as store:
        held_runs = _held_stages(store, job, worker)
        for run in held_runs.values():
            store.fail(run, text)
    for stage in held_runs or ["train"]:
        watch(slot, Event(job.cell, stage, "failed", message=text))
    return "failed"


def release(job: Job, machine: Machine, worker: Worker | str | None) -> None:
    """Release the stages that a dead worker, or any process of a SLURM job, held; they resume from their checkpoints.

    If the database cannot be written, other processes still notice that the worker's process is gone.
    """
    with contextlib.suppress(Unavailable), Store.open(machine.db) as store:
        for run in _held_stages(store, job, worker).values():
            store.release(run)


def is_working(job: Job, machine: Machine, worker: Worker) -> bool:
    """Whether a worker holds a stage of its cell and makes progress."""
    with Store.open(machine.db) as store:
        held_runs = _held_stages(store, job, worker)
        rows = store.stages([job.cell])
        return any(rows[job.cell, stage].alive for stage in held_runs)


def _held_stages(store: Store, job: Job, worker: Worker | str | None) -> dict[str, int]:
    """stage -> run, of the stages of a cell that a worker holds. worker: None for nobody; a string is a SLURM job."""
    rows = store.stages([job.cell]).values()  # read before the runs, so that no row lacks its run
    runs = {run["id"]: run for run in store.runs([job.cell])}

    def is_of_worker(run: Mapping[str, Any]) -> bool:
        return worker == (run.get("slurm_job") if isinstance(worker, str) else (run["host"], run["pid"]))

    return {
        row.stage: row.run
        for row in rows
        if row.status == "running" and row.run is not None and row.run in runs and is_of_worker(runs[row.run])
    }
