"""The job: `python -m fatbench.runner.executors.slurm.worker FOLDER` takes cells until none is free or its time is up.

It runs the local executor, with the job's cores or GPUs as slots. The database tells which cells are free, so that
several jobs and any other run share them by leases.

It ends with REQUEUE_CODE if its time is nearly up, or SLURM wants its node back, and cells are left.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from fatbench.errors import FatbenchError
from fatbench.runner import progress
from fatbench.runner.executors import local, release
from fatbench.runner.executors.slurm.plan import (
    DATABASE,
    IN_VAIN,
    Ear,
    Plan,
    Voice,
    is_over,
    read_plan,
    starts,
    this_start,
)
from fatbench.runner.executors.slurm.table import REQUEUE_CODE
from fatbench.runner.jobs import Event, Job
from fatbench.runner.processes import heard_signals
from fatbench.runner.worker import open_store
from fatbench.suite import signatures

LOOK = 2.0  # seconds between two looks at the run's folder
UNFIT = 30.0  # seconds that a job stays on a node without a working GPU, so that the next one starts elsewhere
GPU = "import torch; print(float(torch.ones(8, device='cuda').sum()))"


class Work:
    """A job's work, with the folder of its run."""

    def __init__(self, folder: Path, plan: Plan, db: str):
        self.folder, self.plan = folder, plan
        self.machine = replace(plan.machine, db=db)
        self.job, self.restarts = this_start()
        self.voice = Voice(folder / f"{self.job}.{self.restarts}.jsonl")
        self.signalled = 0.0  # when a signal told the job to end
        self.unfit = ""  # what is wrong with the node, if anything
        self.looked, self.stopped = 0.0, False
        self.given: dict[str, Event] = {}  # cell -> an event that is sent once the job really holds the cell

    def __call__(self) -> int:
        """Work until no cell is free or the time is up; returns the exit code."""
        for signal_number in heard_signals():
            signal.signal(signal_number, self._hear)
        self.voice.tell("start", os.environ.get("SLURMD_NODENAME") or socket.gethostname(), os.getpid())
        self._take_over()
        if self.plan.device != "cpu" and (fault := gpu_fault()):
            self.voice.tell("unfit", fault)
            time.sleep(UNFIT)
            return 1
        slots = self._slots()
        while not self.stop():
            free_jobs = self._free(self._rotated_jobs())
            if not free_jobs:
                break
            statuses = local.run(free_jobs, self.machine, slots, self._watch, self.stop)
            for job in free_jobs:
                if statuses[job.cell] == "waiting":
                    self.voice.tell("over", job.cell, "waiting")
            if "done" not in statuses.values():
                break  # the rest waits for cells that other processes hold
        if self.unfit:
            self.voice.tell("unfit", self.unfit)
            return 1
        requeue = bool(self.signalled) and not self._is_stopped() and bool(self._free(self.plan.jobs))
        vain = requeue and self._in_vain()
        self.voice.tell("bye", "vain" if vain else "leaves" if requeue else "over")
        return 1 if vain else REQUEUE_CODE if requeue else 0

    def stop(self) -> int:
        """For the local executor: 1 to end after the current round, 2 to end at once."""
        if not (self.signalled or self.unfit or self._is_stopped()):
            return 0
        return 2 if self.signalled and time.monotonic() - self.signalled > self.plan.patience else 1

    def _slots(self) -> list[str]:
        if self.plan.device == "cpu":
            return ["cpu"] * int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        return local.slots("cuda", None, self.plan.per_gpu)

    def _rotated_jobs(self) -> list[Job]:
        """The cells in a rotated order, so that each job of the array begins at another one."""
        task, tasks = (int(os.environ.get(f"SLURM_ARRAY_TASK_{name}", "0")) for name in ("ID", "COUNT"))
        offset = task * len(self.plan.jobs) // max(tasks, 1) % len(self.plan.jobs)
        return [*self.plan.jobs[offset:], *self.plan.jobs[:offset]]

    def _free(self, jobs: Sequence[Job]) -> list[Job]:
        """Those of the jobs that are still to do and that no process holds."""
        wanted_states = {"todo"}
        wanted_states |= {"failed"} if self.machine.recovery.retry_failed else set()
        wanted_states |= {progress.CHANGED} if self.machine.recovery.rerun_changed else set()
        failed_cells = {file.name for file in (self.folder / "failed").glob("*")}
        with open_store(self.machine.db) as store:
            states = progress.states_of(jobs, store)
        return [job for job in jobs if states[job.cell] in wanted_states and job.cell not in failed_cells]

    def _watch(self, slot: int, event: Event) -> None:
        """Report the local executor's events, except for cells that other jobs hold."""
        if event.stage == "cell" and event.kind not in ("elsewhere", "waiting", "interrupted"):
            if event.kind == "failed":
                (self.folder / "failed" / event.cell).touch()
                if self.plan.device != "cpu" and not self.unfit:
                    self.unfit = gpu_fault()  # a broken GPU would fail the next cell too
            self.voice.tell("over", event.cell, event.kind)
        elif event.stage == "cell":
            self.voice.tell("left", event.cell)
        elif event.kind == "given":
            self.given[event.cell] = event  # not sent yet: another job may claim the cell first
        elif event.kind != "elsewhere":
            for held_event in (self.given.pop(event.cell, None), event):
                if held_event is not None:
                    self.voice.tell("event", slot, asdict(held_event))

    def _take_over(self) -> None:
        """Release the stages that an earlier start of this job held, which SLURM has ended."""
        for file in starts(self.folder, self.job):
            if file != self.voice.file:
                cells = {line[2]["cell"] for line in Ear(file).news() if line[0] == "event"}
                for job in self.plan.jobs:
                    if job.cell in cells:
                        release(job, self.machine, self.job)

    def _in_vain(self) -> bool:
        """Whether the last starts of this job finished no round, because its time is too short for one."""
        files = starts(self.folder, self.job)[-IN_VAIN:]
        events = [line[2] for file in files for line in Ear(file).news() if line[0] == "event"]
        return len(files) == IN_VAIN and not any(event["kind"] in ("progress", "done") for event in events)

    def _hear(self, *_: object) -> None:
        self.signalled = self.signalled or time.monotonic()

    def _is_stopped(self) -> bool:
        """Whether the run is over, or SLURM has started this job again elsewhere while this process still runs."""
        if not self.stopped and time.monotonic() - self.looked > LOOK:
            self.looked = time.monotonic()
            started_elsewhere = starts(self.folder, self.job)[-1:] not in ([], [self.voice.file])
            self.stopped = started_elsewhere or is_over(self.folder)
        return self.stopped


def gpu_fault() -> str:
    """What is wrong with this node's GPUs, in a line; empty if they work. Tested in a subprocess, which may crash."""
    try:
        process = subprocess.run([sys.executable, "-c", GPU], capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return "its GPU does not answer"
    if process.returncode == 0:
        return ""
    return (process.stderr.strip().splitlines() or ["its GPU does not work"])[-1].partition(". ")[0]


def main(folder: Path) -> int:
    """Do the job's work and return its exit code."""
    plan, db = read_plan(folder), os.environ.get(DATABASE)
    if plan is None or not db:
        reason = "has no plan that this version can read" if plan is None else f"cannot be worked on without {DATABASE}"
        print(
            f"fatbench: {folder} {reason}: the run is over, or the job's environment was not passed on", file=sys.stderr
        )
        return 2
    signatures.add_described(plan.machine.plugins)
    return Work(folder, plan, db)()


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except FatbenchError as error:
        sys.exit(f"fatbench: {error}")
