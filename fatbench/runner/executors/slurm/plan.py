"""The folder of a run: the plan for its SLURM jobs, and what each of them reports.

    files/slurm/20260102-030405-abcd/
        plan.pickle     the cells and the options of the run; without the database's address, which may hold a password
        job.sh          the batch script; attacks.sh: that of the attacks' own jobs
        jobs            a line for each submitted job, with how often it was submitted before
        77_0.0.jsonl    the reports of job 77_0; 77_0.1.jsonl after SLURM has started it again
        77_0.log        its output
        stop            tells every job to end after its current round
        failed/CELL     cells that failed in this run, which no other job takes

Only the user who started the run can read it. Jobs only append and the driver only reads, so that a slow file system
delays lines but loses none.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fatbench.runner.jobs import Job, Machine
from fatbench.runner.provenance import slurm_job

IN_VAIN = 3  # starts without a finished round, after which a job is not queued again
DATABASE = "FATBENCH_SLURM_DB"  # the environment variable with the database's address for the jobs


@dataclass(frozen=True)
class Plan:
    """The work of a run's SLURM jobs."""

    jobs: Sequence[Job]
    machine: Machine  # without the address of the database
    device: str  # "cpu" or "cuda"
    per_gpu: int = 1
    patience: float = (
        60.0  # seconds for the current round once a job must end; then it falls back to its last checkpoint
    )


def make(files: str, plan: Plan) -> Path:
    """Make the folder of a new run; its parent has the permissions of the files folder, itself only its owner's."""
    parent = Path(files).absolute() / "slurm"
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))  # only its owner reads it
    (folder / "failed").mkdir()
    (folder / "plan.pickle").write_bytes(pickle.dumps(replace(plan, machine=replace(plan.machine, db=""))))
    return folder


def read_plan(folder: Path) -> Plan | None:
    """The plan of a run; None if it is another user's, is over, or was written by another version."""
    try:
        plan = pickle.loads((folder / "plan.pickle").read_bytes())
    except Exception:  # unpickling another version's plan may raise anything
        return None
    return plan if isinstance(plan, Plan) else None


def note_jobs(folder: Path, jobs: Iterable[str], tries: int) -> None:
    """Record submitted jobs. tries: how often they were submitted before."""
    with (folder / "jobs").open("a", encoding="utf-8") as file:
        file.writelines(f"{job} {tries}\n" for job in jobs)


def noted_jobs(folder: Path) -> dict[str, int]:
    """job -> how often it was submitted before; in the order of submission."""
    try:
        lines = (folder / "jobs").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {job: int(tries) for job, tries in (line.split() for line in lines)}


def finish(folder: Path) -> None:
    """Clean up the folder of a run that is over: keep its logs and the ids of its jobs, or nothing without logs."""
    logs = [*folder.glob("*.log")]
    kept_files = {*logs, folder / "jobs"} if logs else set()
    for file in [*folder.glob("failed/*"), *folder.glob("*")]:
        if file not in kept_files and not file.is_dir():
            file.unlink(missing_ok=True)
    for left_folder in (folder / "failed", folder, folder.parent):
        with contextlib.suppress(OSError):
            left_folder.rmdir()


def is_over(folder: Path) -> bool:
    """Whether a run has ended or is ending; also True for another user's run, whose folder is closed to us."""
    return os.path.exists(folder / "stop") or not os.path.exists(folder / "plan.pickle")


def starts(folder: Path, job: str) -> list[Path]:
    """The files with a job's reports, one for each time that SLURM has started it, in that order."""
    return sorted(folder.glob(f"{job}.*.jsonl"), key=restarts_of)


def restarts_of(file: Path) -> int:
    """How often SLURM had started the job before the start that wrote this file."""
    return int(file.name.split(".")[1])


class Voice:
    """Writes the reports of one start of a job, a line each; an incomplete last line is never read."""

    def __init__(self, file: Path):
        self.file = file

    def tell(self, kind: str, *values: object) -> None:
        """Append a line; a full disk or a folder that is gone does not end the cell's work."""
        with (
            contextlib.suppress(OSError),
            self.file.open("a", encoding="utf-8") as file,
        ):  # closing the file makes NFS show the line
            file.write(json.dumps([kind, *values]) + "\n")


class Ear:
    """Reads the reports of one start of a job, continuing where it stopped."""

    def __init__(self, file: Path):
        self.file, self.read = file, 0

    def news(self) -> Iterator[list[Any]]:
        """Yield the new lines; an incomplete one is left for the next call."""
        try:
            with self.file.open("rb") as file:
                file.seek(self.read)
                lines = file.read().splitlines(keepends=True)
        except OSError:
            return
        for line in lines:
            if not line.endswith(b"\n"):
                return
            self.read += len(line)
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def same_work(plan: Plan, other_plan: Plan) -> bool:
    """Whether two plans give the same numbers: their machine's options and devices agree."""

    def comparable(some_plan: Plan) -> Mapping[str, Any]:
        return asdict(replace(some_plan.machine, db="")) | {"device": some_plan.device, "per_gpu": some_plan.per_gpu}

    return comparable(plan) == comparable(other_plan)


def this_start() -> tuple[str, int]:
    """(job, how often SLURM has started it before) of this process's SLURM job."""
    return slurm_job(), int(os.environ.get("SLURM_RESTART_COUNT") or 0)
