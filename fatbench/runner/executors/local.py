"""Worker processes on this machine, each of which takes the next cell when it is free.

A slot is a place for one worker. If a worker makes no progress for two leases (it was stopped, or hangs), it is killed
and its cell starts once more. So does the cell of a worker that was killed by SIGKILL, as systems do when they run out
of memory. If a worker dies otherwise (a library crashes), or for the second time, only its cell is lost: the cell is
marked as failed, and a new worker takes the next one.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fatbench.errors import MachineError, Unavailable
from fatbench.runner import processes
from fatbench.runner.executors import End, device_and_jobs, say, supervised
from fatbench.runner.jobs import Job, Note, Statuses, Stop, Watch, Work
from fatbench.runner.worker import take_cells
from fatbench.store.pools import Pool


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


class LocalProcess:
    """A worker process on this machine."""

    def __init__(self, db: str, pool: Pool, name: str, device: str):
        self.process = processes.start_or_take_early(take_cells, db, pool.id, name, device)

    def end(self) -> End | None:
        """How it ended; None while it lives."""
        if (code := self.process.exitcode) is None:
            return None
        if code == Unavailable.exit_code:
            return End("", blocked=True)
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        memory = " (out of memory?)" if name == "SIGKILL" else ""
        return End(f"the worker process ended with {name}{memory}" if code else "", code == -signal.SIGKILL)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join()


def run(
    work: Work,
    slots: Sequence[str],
    watch: Watch,
    stop: Stop,
    *,
    note: Note = say,
    more_slots: Callable[[Sequence[Job]], Sequence[str]] | None = None,
) -> Statuses:
    """Work with a process for each slot, and return each cell's status; more_slots: see `supervised`."""
    return supervised(work, slots, LocalProcess, watch, stop, more_slots)
