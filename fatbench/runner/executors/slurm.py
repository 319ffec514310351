"""Cells as SLURM jobs, through submitit: one array of jobs, one core or GPU each.

The table [slurm] of fatbench.toml says what a job asks for. Its keys are submitit's (`timeout_min`, `gpus_per_node`,
`cpus_per_task`, `mem_gb`, ...) or sbatch's (`partition`, `account`, `qos`, `constraint`, `gres`, ...):

    [slurm]
    partition = "gpu"
    time = 240  # minutes; a cell that needs longer goes on in a new job
    gpus = 1
    cpus = 4

Every node must see the working directory, the data, the files folder and the database under the same paths. A job and
the run that submitted it talk through small files in the files folder: what the job does is appended to
`CELL.jsonl`, and a file named `stop` tells every job to end after the round at hand.

A cell whose job dies (it was killed, had no memory left, or is no longer known) is submitted once more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fatbench import settings
from fatbench.errors import MachineError, SpecError
from fatbench.runner.executors import Worker, attempt, device_and_jobs, local, record_loss, release, this_worker
from fatbench.runner.jobs import CellStatus, Event, Job, Machine
from fatbench.store.database import Database

SHORT = {"time": "timeout_min", "gpus": "gpus_per_node", "cpus": "cpus_per_task"}
SHARED = {*SHORT.values(), "mem_gb", "nodes", "tasks_per_node", "name", "stderr_to_stdout"}
AT_ONCE = 256  # jobs of an array that run side by side without --jobs
ARRAY = 1000  # jobs in an array; SLURM's usual limit is 1,001
TIMEOUTS = 50  # times that a cell goes on in a new job after its time ran out
PAUSE = 2.0  # seconds between two looks at the jobs
PATIENCE = 30.0  # seconds that a network file system may take to show a job's last word
# ends of a job that do not mean that its cell failed
UNFINISHED = ("CANCELLED", "PREEMPTED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "REVOKED")
OVER = (*UNFINISHED, "COMPLETED", "FAILED", "OUT_OF_MEMORY", "GONE")


def slots(device: str | None, jobs: int | None, per_gpu: int, url: str) -> list[str]:
    """As many as may run side by side; the device is a GPU where the jobs ask for one.

    SpecError: no submitit, a setting it does not know, a device that is not SLURM's to choose. MachineError: no sbatch.
    """
    submitit = _package()
    table = settings.table("slurm")
    here = table.get("cluster", "slurm") == "local"
    wanted, jobs = device_and_jobs(device, jobs)
    if ":" in wanted:
        raise SpecError(f"--device {wanted}: SLURM chooses the GPUs; give cuda")
    if per_gpu > 1:
        raise SpecError(f"--per-gpu {per_gpu}: a SLURM job has its GPU to itself")
    if not here and shutil.which("sbatch") is None:
        raise MachineError(
            "no sbatch here: --executor slurm runs on a SLURM login node"
            ' (cluster = "local" under [slurm] in fatbench.toml tries it out without SLURM)'
        )
    gpu = wanted == "cuda" or (wanted == "auto" and any("gpu" in f"{key} {table[key]}" for key in table))
    with tempfile.TemporaryDirectory() as folder:
        _executor(submitit, Path(folder), table, ["cuda:0" if gpu else "cpu"])
    database = Database(url)
    if not here and database.path is not None:
        print(
            f"fatbench: {database.shown}: a SQLite file must be on a file system that all nodes share and that keeps"
            " locks (many NFS servers do not); PostgreSQL is safe: --db postgresql://user:password@host/name",
            file=sys.stderr,
        )
    return ["cuda:0" if gpu else "cpu"] * (jobs or (len(local.slots("cpu", None)) if here else AT_ONCE))


def run(
    jobs: Sequence[Job],
    machine: Machine,
    slots: Sequence[str],
    watch: Callable[[int, Event], None],
    stop: Callable[[], int],
    *,
    fail_fast: bool = False,
) -> dict[str, CellStatus]:
    """Submit `jobs` and follow them; status of each cell.

    All are submitted at once, so that they keep their place in the queue and go on when this process is killed.
    """
    submitit = _package()
    table = settings.table("slurm")
    here = table.get("cluster", "slurm") == "local"
    folder = Path(machine.files).absolute() / "slurm" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True, mode=0o700)  # the submitted jobs hold the database's password
    executor = _executor(submitit, folder, table, slots)
    grace = float(table.get("signal_delay_s", SIGNAL_DELAY)) * 2 / 3  # type: ignore[arg-type]
    machine = replace(machine, device=slots[0])
    waiting = list(jobs)
    sent: list[_Sent] = []
    ended: list[_Sent] = []
    statuses: dict[str, CellStatus] = {}
    again: set[str] = set()  # cells that were submitted once more
    halted = False

    def submit(batch: Sequence[Job]) -> None:
        for first in range(0, len(batch), ARRAY):
            part = batch[first : first + ARRAY]
            try:
                with executor.batch():
                    submissions = [executor.submit(SlurmTask(job, machine, folder, grace)) for job in part]
            except submitit.core.utils.FailedJobError as error:
                said = str(error).strip().splitlines() or ["it failed"]
                raise MachineError(f"sbatch: {said[-1].removeprefix('sbatch: ')}") from None
            for job, submission in zip(part, submissions, strict=True):
                sent.append(_Sent(job, submission, folder / f"{job.cell}.jsonl"))

    def over(one: _Sent, status: CellStatus) -> None:
        sent.remove(one)
        ended.append(one)
        statuses[one.job.cell] = status
        watch(one.slot, Event(one.job.cell, "cell", status))
        if status == "blocked" or (status == "failed" and fail_fast):
            halt()

    def halt() -> None:
        nonlocal halted
        if not halted:
            halted = True
            waiting.clear()
            (folder / "stop").touch()
            for one in [one for one in sent if one.worker is None]:  # in the queue; one that starts now sees `stop`
                one.submission.cancel(check=False)
                over(one, "interrupted")

    try:
        while waiting or sent:
            request = stop()
            if request:
                halt()
            if request >= 2:
                break
            room = len(slots) - len(sent) if here else len(waiting)
            if waiting and room > 0:
                batch, waiting[:] = waiting[:room], waiting[room:]
                submit(batch)
            states = _states([one.submission for one in sent], here)
            for one in list(sent):
                if one not in sent:
                    continue
                for event in one.news(sent):
                    watch(one.slot, event)
                state = states.get(one.submission.job_id, "")
                if one.status is None and one.lost(state, PATIENCE / 6 if here else PATIENCE):
                    text = f"SLURM job {one.submission.job_id} ended: {state}; its log is {one.submission.paths.stderr}"
                    if halted or state in UNFINISHED:
                        release(one.job, machine, one.worker)
                        one.status = "interrupted"
                    elif one.worker is not None and one.job.cell not in again:
                        again.add(one.job.cell)
                        release(one.job, machine, one.worker)
                        message = f"{text}: it starts again"
                        watch(one.slot, Event(one.job.cell, "train", "interrupted", message=message))
                        sent.remove(one)
                        ended.append(one)
                        submit([one.job])
                        sent[-1].read = one.read  # it appends to the same file
                    else:
                        one.status = record_loss(one.job, machine, one.worker, text, watch, one.slot)
                if one.status is not None:
                    over(one, one.status)
            if sent:
                time.sleep(PAUSE / 10 if here else PAUSE)
    finally:
        if sent:
            (folder / "stop").touch()
        for one in sent:
            one.submission.cancel(check=False)
        end = time.monotonic() + 15  # after its last word a job still leaves its result with submitit
        submissions = [one.submission for one in (*sent, *ended)]
        while time.monotonic() < end and not set(_states(submissions, here).values()) <= {*OVER}:
            time.sleep(PAUSE / 10 if here else PAUSE)
        for one in sent:
            release(one.job, machine, one.worker)
    for job in jobs:
        statuses.setdefault(job.cell, "interrupted")
    if set(statuses.values()) <= {"done", "elsewhere"}:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()
    return statuses


SIGNAL_DELAY = 90  # seconds before the end of a job's time at which SLURM says so


def _executor(submitit: Any, folder: Path, table: dict[str, object], slots: Sequence[str]) -> Any:
    """submitit's executor with the table's parameters. SpecError: it does not take them."""
    values = {SHORT.get(key, key): value for key, value in table.items() if key != "cluster"}
    values = {"name": "fatbench", "timeout_min": 240, "cpus_per_task": 1, "array_parallelism": len(slots), **values}
    values.setdefault("signal_delay_s", SIGNAL_DELAY)
    if slots[0] != "cpu" and not any("gpu" in f"{key} {value}" for key, value in values.items()):
        values["gpus_per_node"] = 1
    try:
        executor = submitit.AutoExecutor(folder, cluster=table.get("cluster", "slurm"), slurm_max_num_timeout=TIMEOUTS)
        executor.update_parameters(**{key if key in SHARED else f"slurm_{key}": values[key] for key in values})
    except (NameError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise SpecError(f"fatbench.toml: [slurm]: {str(error).splitlines()[0]}") from None
    return executor


@dataclass(eq=False)
class _Sent:
    """A submitted cell as this process knows it."""

    job: Job
    submission: Any
    file: Path
    read: int = 0
    slot: int = -1  # none until it runs
    worker: Worker | None = None
    status: CellStatus | None = None
    missed: float | None = None

    def news(self, others: Sequence[_Sent]) -> Iterator[Event]:
        """What the job has appended to its file since the last time."""
        try:
            with self.file.open("rb") as file:
                file.seek(self.read)
                lines = file.read().splitlines(keepends=True)
        except OSError:
            return
        whole = [line for line in lines if line.endswith(b"\n")]
        self.read += sum(map(len, whole))
        for kind, value in _told(whole):
            if kind == "worker":
                self.worker = Worker(*value)
                self.missed = None
                if self.slot < 0:
                    taken = {other.slot for other in others}
                    self.slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
            elif kind == "event":
                yield Event(**value)
            else:
                self.status = value

    def lost(self, state: str, patience: float) -> bool:
        """Whether the job is over and there has been no last word for so many seconds."""
        if state not in OVER:
            self.missed = None
            return False
        self.missed = self.missed or time.monotonic()
        return time.monotonic() - self.missed > patience


def _told(lines: Sequence[bytes]) -> Iterator[tuple[str, Any]]:
    """(kind, value) of a job's lines; a line that the job was killed over is left out."""
    for line in lines:
        with contextlib.suppress(ValueError):
            kind, value = json.loads(line)
            yield kind, value


def _states(submissions: Sequence[Any], here: bool) -> dict[str, str]:
    """job id -> SLURM's word for its state, "GONE" where it knows the job no more; {} where it does not answer.

    From squeue, because sacct, which submitit asks, is not kept everywhere.
    """
    if here:
        return {one.job_id: "FAILED" if one.done() else "RUNNING" for one in submissions}
    command = ["squeue", "--noheader", "--array", "--states=all", "--me", "--format=%i %T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    known = dict(line.split() for line in answer.splitlines())
    return {one.job_id: known.get(one.job_id, "GONE") for one in submissions}


class SlurmTask:
    """The job: submitit calls it, and calls `checkpoint` when the job's time runs out or its node is wanted."""

    def __init__(self, job: Job, machine: Machine, folder: Path, grace: float):
        self.job, self.machine, self.folder, self.grace = job, machine, folder, grace
        self.file = folder / f"{job.cell}.jsonl"
        self.leaving = False
        self.status: CellStatus | None = None
        self.thread: threading.Thread | None = None

    def __call__(self) -> None:
        """Work on the cell in a thread, so that signals, which reach the main thread, can wait for the round's end."""
        self._leave_to_me()
        self._tell("worker", this_worker())
        signal.signal(signal.SIGTERM, self._hear)
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()
        self._wait(math.inf)
        end = time.monotonic() + 300
        while self.status == "interrupted" and not self._stopped() and time.monotonic() < end:
            time.sleep(1)  # SIGTERM: the node is wanted, and SLURM starts only jobs again that it had to end itself
        if self.status == "interrupted":
            self._tell("over", self.status)

    def checkpoint(self) -> Any:
        """What the next job is to do, once the round at hand is committed; None if nothing is left."""
        import submitit

        self.leaving = True
        self._wait(self.grace)
        if self._stopped() or self.status not in (None, "interrupted"):
            return None
        return submitit.helpers.DelayedSubmission(SlurmTask(self.job, self.machine, self.folder, self.grace))

    def _work(self) -> None:
        def notify(event: Event) -> None:
            self._tell("event", asdict(event))

        def stop() -> bool:
            return self.leaving or self._stopped()

        status: CellStatus = "interrupted" if stop() else attempt(self.job, self.machine, notify, stop)
        if status != "interrupted":
            self._tell("over", status)  # here, because a signal's handler may end the main thread
        self.status = status

    def _hear(self, *_: object) -> None:
        self.leaving = True

    def _stopped(self) -> bool:
        return (self.folder / "stop").exists()

    def _wait(self, seconds: float) -> None:
        """Sleeping, not joining: a signal's handler may interrupt it anywhere and wait itself."""
        end = time.monotonic() + seconds
        while self.thread is not None and self.thread.is_alive() and time.monotonic() < end:
            time.sleep(0.05)

    def _leave_to_me(self) -> None:
        """Take over from the job that this one continues: SLURM has ended it, wherever it was."""
        if self.file.exists():
            for kind, value in _told(self.file.read_bytes().splitlines()):
                if kind == "worker":
                    release(self.job, self.machine, Worker(*value))

    def _tell(self, kind: str, value: object) -> None:
        with self.file.open("a", encoding="utf-8") as file:  # closed each time: NFS then shows it to others
            file.write(json.dumps([kind, value]) + "\n")


def _package() -> Any:
    try:
        import submitit
    except ModuleNotFoundError:
        raise SpecError("--executor slurm needs submitit: pip install 'fatbench[slurm]'") from None
    logging.getLogger("submitit").setLevel(logging.ERROR)  # it logs to stdout
    return submitit
