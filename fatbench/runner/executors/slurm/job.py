"""The job: `python -m fatbench.runner.executors.slurm.job POOL` keeps workers on its node until no cell is free.

It has a worker for each of the job's cores, or for each part of its GPUs. It ends with REQUEUE_CODE if its time is
nearly up, or SLURM wants its node back, and cells are left.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from fatbench import settings
from fatbench.errors import FatbenchError
from fatbench.runner.executors import Supervisor, local
from fatbench.runner.executors.slurm.driver import DATABASE, PAUSE, free_cells
from fatbench.runner.executors.slurm.table import REQUEUE_CODE
from fatbench.runner.jobs import Work
from fatbench.runner.processes import heard_signals
from fatbench.runner.provenance import slurm_job
from fatbench.runner.worker import open_store
from fatbench.store.pools import Pool
from fatbench.store.stages import Store
from fatbench.suite import signatures

BAD_NODE = 30.0  # seconds that a job stays on a node without a working GPU, so that the next one starts elsewhere
NO_PROGRESS = 3  # starts in a row without a finished round, after which a job is not queued again
GPU = "import torch; print(float(torch.ones(8, device='cuda').sum()))"


class SlurmWork:
    """What one start of a job does."""

    def __init__(self, store: Store, pool: Pool, work: Work):
        self.store, self.pool, self.work = store, pool, work
        self.job, self.start = slurm_job(), f"{slurm_job()}/{os.environ.get('SLURM_RESTART_COUNT') or 0}/"
        self.signalled = 0.0  # when a signal told the job to end
        self.fault = ""  # what is wrong with the node, if anything
        self.failed = 0

    def __call__(self) -> int:
        """Work until no cell is free or the time is up; returns the exit code."""
        for signal_number in heard_signals():
            signal.signal(signal_number, self._hear)
        earlier = self.pool.entries().get(self.job)
        again = f"SLURM has started job {self.job} again: it goes on from its checkpoint"
        free_cells(self.pool, self.work, self.job, again)
        self.pool.enter(self.job, os.environ.get("SLURMD_NODENAME") or socket.gethostname())
        before = self._rounds()
        on_gpu = self.work.machine.device != "cpu"
        if on_gpu and (fault := gpu_fault()):
            self.pool.left(self.job, f"bad_node: {fault}")
            time.sleep(BAD_NODE)
            return 1
        slots = (
            local.slots("cuda", None, self.work.per_gpu) if on_gpu
            else ["cpu"] * int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        )  # fmt: skip
        supervisor = Supervisor(self.pool, self.work, slots, local.LocalProcess, self.start, PAUSE)
        supervisor(self.stop, self._look)
        if self.fault:
            self.pool.left(self.job, f"bad_node: {self.fault}")
            return 1
        free, _, stops = self.pool.counts()
        requeue = bool(self.signalled and free and not stops)
        idle_starts = (earlier.no_progress + 1 if earlier else 1) if requeue and self._rounds() == before else 0
        if idle_starts >= NO_PROGRESS:
            self.pool.left(self.job, f"no_progress: {NO_PROGRESS}")
            return 1
        self.pool.left(self.job, "" if requeue else "exit", idle_starts)
        return REQUEUE_CODE if requeue else 0

    def stop(self) -> int:
        """1 to end after the current round, 2 to end at once."""
        if self.signalled:
            return 2 if time.monotonic() - self.signalled > self.work.patience else 1
        entry = self.pool.entries().get(self.job)
        # SLURM may have started this job again elsewhere while this process still runs
        return 1 if self.fault or (entry is not None and entry.host and entry.pid != os.getpid()) else 0

    def _look(self) -> None:
        """A broken GPU would fail the next cell too."""
        failed = self.pool.failed(self.start)
        if failed > self.failed and self.work.machine.device != "cpu":
            self.fault = self.fault or gpu_fault()
        self.failed = failed

    def _rounds(self) -> dict[tuple[str, str], tuple[bool, int]]:
        rows = self.store.stages([job.cell for job in self.work.jobs])
        return {key: (row.status == "done", row.round) for key, row in rows.items() if row.round}

    def _hear(self, *_: object) -> None:
        self.signalled = self.signalled or time.monotonic()


def gpu_fault() -> str:
    """What is wrong with this node's GPUs, in a line; empty if they work. Tested in a subprocess, which may crash."""
    try:
        process = subprocess.run([sys.executable, "-c", GPU], capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return "its GPU does not answer"
    if process.returncode == 0:
        return ""
    return (process.stderr.strip().splitlines() or ["its GPU does not work"])[-1].partition(". ")[0]


def main(pool_id: str) -> int:
    """Do the job's work and return its exit code."""
    if DATABASE not in os.environ:
        print(f"fatbench: cannot work without {DATABASE}: the job's environment was not passed on", file=sys.stderr)
        return 2
    db = settings.database()
    with open_store(db) as store:
        pool = Pool(store.database, pool_id)
        if (text := pool.work()) is None:
            print("fatbench: the run is over", file=sys.stderr)
            return 0
        work = Work.parsed(text, db)
        signatures.add_described(work.machine.plugins)
        return SlurmWork(store, pool, work)()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except FatbenchError as error:
        sys.exit(f"fatbench: {error}")
