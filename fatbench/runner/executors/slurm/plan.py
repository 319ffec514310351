"""The folder of a run: what its jobs are to do, and what each of them says.

    files/slurm/20260102-030405-abcd/
        plan.pickle     the cells, and how to work on them; the database's address is in no file, it may hold a password
        job.sh          the batch script; attacks.sh: that of the attacks' own jobs
        jobs            a line for each submitted job, with how often it was submitted
        77_0.0.jsonl    what job 77_0 says; 77_0.1.jsonl after SLURM has started it again
        77_0.log        its output
        stop            every job is to end after the round at hand
        failed/CELL     cells that failed in this run: no other job takes them

Only who started the run reads it. Jobs append, whoever follows them reads: a file system that is slow to show a line
delays it and loses nothing.
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

IN_VAIN = 3  # starts of a job in which no round is finished, after which it wants no more
DATABASE = "FATBENCH_SLURM_DB"  # the variable that brings a job the database's address


@dataclass(frozen=True)
class Plan:
    """What the jobs of a run do."""

    jobs: Sequence[Job]
    machine: Machine  # less the address of the database
    device: str  # "cpu" or "cuda"
    per_gpu: int = 1
    patience: float = (
        60.0  # seconds for the round at hand, once a job is told to go; then its last checkpoint has to do
    )


def make(files: str, plan: Plan) -> Path:
    """The folder of a new run. The parent is the group's where the files folder is."""
    parent = Path(files).absolute() / "slurm"
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))  # only its owner reads it
    (folder / "failed").mkdir()
    (folder / "plan.pickle").write_bytes(pickle.dumps(replace(plan, machine=replace(plan.machine, db=""))))
    return folder


def read_plan(folder: Path) -> Plan | None:
    """The plan of a run; None: it is not ours to read, is over, or is of another version."""
    try:
        plan = pickle.loads((folder / "plan.pickle").read_bytes())
    except Exception:  # whatever a pickle of another version raises
        return None
    return plan if isinstance(plan, Plan) else None


def note_jobs(folder: Path, jobs: Iterable[str], tries: int) -> None:
    """Write down jobs that were submitted."""
    with (folder / "jobs").open("a", encoding="utf-8") as file:
        file.writelines(f"{job} {tries}\n" for job in jobs)


def noted_jobs(folder: Path) -> dict[str, int]:
    """job -> how often it was submitted before, in the order of their submission."""
    try:
        lines = (folder / "jobs").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {job: int(tries) for job, tries in (line.split() for line in lines)}


def finish(folder: Path) -> None:
    """Leave of a run that is over only its logs and the ids of its jobs; without logs, nothing."""
    logs = [*folder.glob("*.log")]
    kept_files = {*logs, folder / "jobs"} if logs else set()
    for file in [*folder.glob("failed/*"), *folder.glob("*")]:
        if file not in kept_files and not file.is_dir():
            file.unlink(missing_ok=True)
    for left_folder in (folder / "failed", folder, folder.parent):
        with contextlib.suppress(OSError):
            left_folder.rmdir()


def is_over(folder: Path) -> bool:
    """Whether a run has ended, or is to end; so is another user's, whose folder is closed to us."""
    return os.path.exists(folder / "stop") or not os.path.exists(folder / "plan.pickle")


def starts(folder: Path, job: str) -> list[Path]:
    """The files of a job, one for each time that SLURM has started it, in that order."""
    return sorted(folder.glob(f"{job}.*.jsonl"), key=restarts_of)


def restarts_of(file: Path) -> int:
    """How often SLURM had started the job before it wrote this file."""
    return int(file.name.split(".")[1])


class Voice:
    """What one start of a job says: a line each, of which the reader loses none that is whole."""

    def __init__(self, file: Path):
        self.file = file

    def tell(self, kind: str, *values: object) -> None:
        """Append a line. A disk that is full, or a folder that is gone, is no reason to give up a cell."""
        with contextlib.suppress(OSError), self.file.open("a", encoding="utf-8") as file:  # closed: NFS then shows it
            file.write(json.dumps([kind, *values]) + "\n")


class Ear:
    """Reads what one start of a job says, from where it stopped the last time."""

    def __init__(self, file: Path):
        self.file, self.read = file, 0

    def news(self) -> Iterator[list[Any]]:
        """The new lines; one that is not whole yet is left for the next time."""
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
    """Whether two plans work in the same way, as far as their numbers depend on it."""

    def comparable(some_plan: Plan) -> Mapping[str, Any]:
        return asdict(replace(some_plan.machine, db="")) | {"device": some_plan.device, "per_gpu": some_plan.per_gpu}

    return comparable(plan) == comparable(other_plan)


def this_start() -> tuple[str, int]:
    """(job, how often SLURM has started it before) of the job that this process is in."""
    return slurm_job(), int(os.environ.get("SLURM_RESTART_COUNT") or 0)
