"""Worker processes on this machine, each of which takes the next cell when it is free.

A slot is a place for one cell at a time, with a process of its own.

If a worker makes no progress for two leases (it was stopped, or hangs), it is killed and its cell starts once more. So
does the cell of a worker that was killed by SIGKILL, as systems do when they run out of memory.

If a worker dies otherwise (a library crashes), or for the second time, only its cell is lost: the cell is marked as
failed, and a new worker takes the next one. Workers share nothing, not even a queue, whose lock could be held by a
worker that dies: each has its own pipe.

A plug-in may change anything in torch. A process that has run one takes only cells whose training uses it; other cells
get a new process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from fatbench.errors import MachineError, Unavailable
from fatbench.runner import processes
from fatbench.runner.executors import (
    Worker,
    attempt,
    device_and_jobs,
    is_working,
    record_loss,
    release,
    say,
    this_worker,
)
from fatbench.runner.jobs import CellStatus, Event, Job, Machine
from fatbench.suite import plugins


def slots(device: str | None, jobs: int | None, per_gpu: int | Mapping[int, int] = 1, url: str = "") -> list[str]:
    """The device of each slot: one for each core, or `per_gpu` for each GPU (for all, or by the GPU's number).

    MachineError: there is no such GPU. SpecError: the device or the number of jobs is not valid.
    """
    device_name, jobs = device_and_jobs(device, jobs)
    gpus_here = gpu_count() if device_name != "cpu" else 0
    if device_name == "cpu" or (device_name == "auto" and gpus_here == 0):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return ["cpu"] * (jobs or cores)
    numbers = device_name.partition(":")[2]
    gpus = [int(gpu_number) for gpu_number in numbers.split(",")] if numbers else list(range(gpus_here)) or [0]
    if absent_gpus := [gpu for gpu in gpus if gpu >= gpus_here]:
        raise MachineError(
            f"there is no GPU {absent_gpus[0]} here ({gpus_here} found; fatbench doctor)",
            option=f"device {device_name}",
        )
    fit = {gpu: per_gpu if isinstance(per_gpu, int) else per_gpu.get(gpu, 1) for gpu in gpus}
    return [f"cuda:{gpu}" for turn in range(max(fit.values())) for gpu in gpus if turn < fit[gpu]][:jobs]


def gpu_count() -> int:
    """How many GPUs torch can use here, by asking the driver: importing torch would take seconds."""
    spec = importlib.util.find_spec("torch")
    built = [Path(folder) / "lib" for folder in (spec and spec.submodule_search_locations) or ()]
    if any((folder / "libtorch_hip.so").exists() for folder in built):
        import torch

        return torch.cuda.device_count()
    if not any((folder / "libtorch_cuda.so").exists() for folder in built):
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        driver_answers = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        return count.value if driver_answers else 0
    except (OSError, AttributeError):  # no driver, or one of another make
        return 0


@dataclass
class _Slot:
    """A worker process, our end of its pipe, and the cell that it is working on."""

    process: Any
    pipe: Any
    has_run: set[Path] = field(default_factory=set)  # the plug-ins that its process has run
    job: Job | None = None
    began: float = 0.0  # when it was given the job
    idle: int = 0  # consecutive checks in which it made no progress
    reason: str = ""  # why we killed it; empty if we did not

    def tell(self, item: Any) -> None:
        """Send a job, or None to end after the current round; ignored if the process is gone."""
        with contextlib.suppress(OSError):
            self.pipe.send(item)

    @property
    def worker(self) -> Worker:
        return Worker(this_worker().host, self.process.pid)


def run(
    jobs: Sequence[Job],
    machine: Machine,
    slots: Sequence[str],
    watch: Callable[[int, Event], None],
    stop: Callable[[], int],
    *,
    fail_fast: bool = False,
    note: Callable[[str], None] = say,
    still: Callable[[Sequence[Job]], list[Job]] | None = None,
    more_slots: Callable[[Sequence[Job]], Sequence[str]] | None = None,
) -> dict[str, CellStatus]:
    """Work through `jobs` with a process for each slot, and return each cell's status.

    still: called with the waiting jobs before one is taken; returns those that no other process has done meanwhile.
    more_slots: called with the waiting jobs after each cell's first round; returns the slots, these and new ones.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(jobs)
    statuses: dict[str, CellStatus] = {}
    workers: dict[int, _Slot] = {}
    started: set[str] = set()  # cells that have finished a round
    restarted: set[str] = set()  # cells that were started once more
    check_interval = _check_interval(machine)
    next_check = time.monotonic() + check_interval
    halted = False

    def next_for(slot: int) -> Job:
        """The cell that a free slot takes; starts a new process if none may run in the slot's present one."""
        if slot in workers and workers[slot].process.is_alive():
            has_run = workers[slot].has_run
            if (job := next((job for job in waiting if has_run <= plugins.files(job.spec)), None)) is not None:
                return job
        if slot in workers:
            _end_process(workers.pop(slot), 5.0)
        workers[slot] = start(replace(machine, device=slots[slot]))
        return waiting[0]

    def start(machine: Machine) -> _Slot:
        if (early_process := processes.take_early()) is not None:
            worker = _Slot(*early_process)
            worker.tell((_serve, machine))
            return worker
        parent_end, child_end = context.Pipe()
        worker = _Slot(processes.start_process(_serve, machine, child_end), parent_end)
        child_end.close()
        return worker

    def record_end(slot: int, job: Job, status: CellStatus) -> None:
        statuses[job.cell] = status
        watch(slot, Event(job.cell, "cell", status))
        if status == "blocked" or (status == "failed" and fail_fast):
            halt()

    def halt() -> None:
        nonlocal halted
        if not halted:
            halted = True
            waiting.clear()
            for worker in workers.values():
                worker.tell(None)

    try:
        while waiting or any(worker.job for worker in workers.values()):
            request = stop()
            if request:
                halt()
            if request >= 2:
                break
            for slot in range(len(slots)):
                if not waiting or (slot in workers and workers[slot].job is not None):
                    continue
                if still is not None:
                    waiting[:] = still(waiting)
                    if not waiting:
                        break
                next_job = next_for(slot)
                waiting.remove(next_job)
                workers[slot].job, workers[slot].began, workers[slot].idle = next_job, time.monotonic(), 0
                workers[slot].has_run |= plugins.files(next_job.spec, next_job.evaluations)
                workers[slot].tell(next_job)
                watch(slot, Event(next_job.cell, "slot", "given"))
            busy = {slot: worker for slot, worker in workers.items() if worker.job is not None}
            ready = wait([worker.pipe for worker in busy.values()], timeout=0.1)
            if time.monotonic() > next_check:
                next_check = time.monotonic() + check_interval
                _kill_stuck(busy.values(), machine)
            for slot, worker in busy.items():
                job = worker.job
                assert job is not None
                try:
                    # a subprocess of a dead worker can keep the worker's end of the pipe open
                    if worker.pipe not in ready and (worker.process.is_alive() or worker.pipe.poll()):
                        continue
                    item = worker.pipe.recv() if worker.pipe in ready else None
                except (EOFError, OSError):
                    item = None
                if isinstance(item, Event):
                    watch(slot, item)
                    if (
                        more_slots is not None
                        and (item.stage, item.kind) == ("train", "progress")
                        and item.cell not in started
                    ):
                        started.add(item.cell)
                        slots = more_slots(waiting)
                    continue
                if item is None:
                    del workers[slot]
                    text = _describe_end(worker.process)
                    killed = worker.reason
                    is_lost = killed == IDLE or (not killed and worker.process.exitcode == -signal.SIGKILL)
                    if is_lost and job.cell not in restarted and not halted:
                        restarted.add(job.cell)
                        release(job, machine, worker.worker)
                        waiting.append(job)
                        text = f"{killed or text}: it starts again"
                        watch(slot, Event(job.cell, "train", "interrupted", message=text))
                        continue
                    item = record_loss(job, machine, worker.worker, killed or text, watch, slot)
                worker.job = None
                record_end(slot, job, item)
    finally:
        for worker in workers.values():
            if worker.job is None:
                worker.tell(None)
        end = time.monotonic() + 5
        working = {worker.process.pid for worker in workers.values() if worker.job}
        for worker in workers.values():
            _end_process(worker, 0 if worker.process.pid in working else max(0.0, end - time.monotonic()))
            if worker.job is not None:
                release(worker.job, machine, worker.worker)
    for job in jobs:
        statuses.setdefault(job.cell, "interrupted")
    return statuses


def _end_process(worker: _Slot, patience: float) -> None:
    """End a process: let an idle one end by itself within so many seconds, else kill it."""
    if worker.job is None:
        worker.tell(None)
    worker.process.join(patience)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
    worker.pipe.close()


IDLE = "the worker process made no progress"
IDLE_SECONDS = 20.0  # at least so long may a worker be idle; a lease, if that is longer
GRACE = 60.0  # seconds for a worker to end a cell by itself after its time limit


def _check_interval(machine: Machine) -> float:
    """Seconds between two checks of the workers' progress."""
    return min(max(machine.recovery.lease / 4, 5.0), 60.0)


def _kill_stuck(workers: Iterable[_Slot], machine: Machine) -> None:
    """Kill workers whose cell is over its time limit, and those that held no stage or made no progress for a lease."""
    limit = machine.recovery.time_limit
    for worker in workers:
        assert worker.job is not None
        try:
            worker.idle = 0 if is_working(worker.job, machine, worker.worker) else worker.idle + 1
        except Unavailable:  # without the database no worker can make progress
            worker.idle = 0
        if limit is not None and time.monotonic() - worker.began > limit + GRACE:
            worker.reason = f"TimeLimit: the time limit of {limit:g} s is over, and the worker process did not stop"
        elif worker.idle * _check_interval(machine) > max(machine.recovery.lease, IDLE_SECONDS):
            worker.reason = IDLE
        if worker.reason:
            worker.process.kill()


def _describe_end(process: Any) -> str:
    """Describe in words how a worker process ended."""
    process.join(5)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
        return "the worker process closed its pipe without an answer"
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the worker process ended with {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"


def _serve(machine: Machine, pipe: Any) -> None:
    """The main loop of a worker process: do each job and send its status, until the parent sends None or dies."""
    is_stopped = False

    def notify(event: Event) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, which is no failure of the stage
            pipe.send(event)

    def next_job() -> Job | None:
        try:
            job: Job | None = pipe.recv()
            return job
        except (EOFError, OSError):
            return None

    def stop() -> bool:
        nonlocal is_stopped
        is_stopped = is_stopped or (pipe.poll() and next_job() is None)
        return is_stopped

    while not is_stopped and (job := next_job()) is not None:
        status = attempt(job, machine, notify, stop)
        gc.freeze()  # objects that outlive a cell, such as modules, are exempt from later collections
        try:
            pipe.send(status)
        except OSError:
            break
    gc.unfreeze()  # else triton, which timm imports, lists every function that is left on stderr at exit
