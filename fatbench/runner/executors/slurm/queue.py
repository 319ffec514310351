"""Submit, cancel and query jobs by SLURM's commands. Nothing here knows about cells."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fatbench.errors import MachineError

WAIT = 120.0  # seconds for a command; sbatch tries for ever if the queue is full
ARRAY = 1001  # MaxArraySize if scontrol does not tell: SLURM's default
# final states of a job; those in UNFINISHED are not the job's own fault
UNFINISHED = ("CANCELLED", "PREEMPTED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "REVOKED", "GONE")
OVER = (*UNFINISHED, "COMPLETED", "FAILED", "OUT_OF_MEMORY")
HINTS = {
    "OUT_OF_MEMORY": "give more `mem`",
    "TIMEOUT": "it did not stop in time: give a longer `warning` or `time`",
    "DEADLINE": "its `deadline` has passed",
}
FULL = re.compile(r"(?i)submitjobs?\w*limit|temporarily unable to accept")

# squeue's reason for a pending job -> what it means and what to do; None if the user need not be told
REASONS: dict[str, str | None] = {
    "None": None,
    "JobArrayTaskLimit": None,
    "BeginTime": "it was queued again and starts in a moment",
    "Resources": "other jobs have the nodes",
    "Priority": "other jobs are before it",
    "PartitionTimeLimit": "`time` is more than the partition allows: scontrol show partition (MaxTime)",
    "PartitionNodeLimit": "the partition gives a job fewer nodes: scontrol show partition",
    "PartitionDown": "the partition is down: name another one, or wait (sinfo)",
    "PartitionInactive": "the partition is not active: name another one, or wait (sinfo)",
    "PartitionConfig": "the partition does not allow what is asked for: scontrol show partition",
    "QOSMaxWallDurationPerJobLimit": "`time` is more than the QOS allows: sacctmgr show qos format=name,maxwall",
    "AssocMaxWallDurationPerJobLimit": "`time` is more than the account allows: sacctmgr show assoc",
    "JobHeldUser": "it is held: scontrol release JOB",
    "JobHeldAdmin": "an administrator holds it: ask, or cancel it",
    "BadConstraints": "no node has what is asked for (constraint, gres, mem, cpus): sinfo -o '%N %c %m %f %G'",
    "ReqNodeNotAvail": "the nodes it may run on are down or reserved: sinfo -R",
    "Dependency": "it waits for the jobs of `dependency`",
    "DependencyNeverSatisfied": "a job of `dependency` failed: change it and cancel this one",
    "InvalidQOS": "the account may not use this QOS: sacctmgr show assoc",
    "InvalidAccount": "there is no such account for you: sacctmgr show assoc",
    "Licenses": "the licenses are in use: scontrol show licenses",
    "Reservation": "its reservation has not begun: scontrol show reservation",
}


def advice(reason: str) -> str | None:
    """What a reason of squeue means and what to do about it; None if the user need not be told."""
    first_reason = reason.strip("()").partition(",")[0].strip()
    if first_reason in REASONS:
        return REASONS[first_reason]
    if "launch failed" in first_reason or "JobHoldMaxRequeue" in first_reason:
        return "it could not be started and is held: scontrol release JOB, once its node is mended"
    if "held" in first_reason:
        return REASONS["JobHeldUser"]
    if first_reason.startswith(("QOS", "Assoc", "Max")):
        return "a limit of the account or QOS: other jobs have to end first, or sacctmgr show assoc, qos"
    return "scontrol show job says more"


@dataclass(frozen=True)
class Queued:
    """A job's state according to SLURM."""

    state: str  # PENDING, RUNNING, ... or one of OVER
    reason: str = "None"
    restarts: int = 0


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without the variables of a surrounding job and presets of sbatch; SLURM_CONF is kept."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
    if "SLURM_CONF" in os.environ:
        variables["SLURM_CONF"] = os.environ["SLURM_CONF"]
    return variables | extra


class SubmissionRefused(MachineError):
    """sbatch refuses a job; the message is its reason."""

    @property
    def full(self) -> bool:
        """Whether the queue is full, so that fewer jobs might be accepted."""
        return FULL.search(str(self)) is not None


def submit(script: Path, jobs: int, logs: Path, environment: dict[str, str]) -> list[str]:
    """Submit an array of jobs and return their ids, ["77_0", "77_1", ...]. SubmissionRefused: sbatch says no."""
    array = [f"--array=0-{jobs - 1}", f"--output={logs}/%A_%a.log", f"--error={logs}/%A_%a.log"]
    number = _sbatch(["--parsable", *array, str(script)], environment).strip().partition(";")[0]
    return [f"{number}_{task}" for task in range(jobs)]


def try_out(script: Path, environment: dict[str, str]) -> str:
    """Ask sbatch whether a job would run, without submitting it. SubmissionRefused: it would not."""
    return _one_line(_sbatch(["--test-only", str(script)], environment))


def _sbatch(arguments: Sequence[str], environment: dict[str, str]) -> str:
    try:
        process = subprocess.run(
            ["sbatch", *arguments], capture_output=True, text=True, timeout=WAIT, env=environment,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        error_output = getattr(error, "stderr", None) or b""  # bytes, in spite of text=True
        text = error_output.decode(errors="replace") if isinstance(error_output, bytes) else error_output
        raise SubmissionRefused(f"sbatch: {_one_line(text) or error}") from None
    if process.returncode:
        raise SubmissionRefused(f"sbatch: {_one_line(process.stderr) or f'it ended with {process.returncode}'}")
    return process.stdout + process.stderr


def _one_line(stderr: str) -> str:
    """Join sbatch's messages on stderr into one line."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in stderr.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


def states(jobs: Iterable[str]) -> dict[str, Queued]:
    """Query the state of our jobs with one call: GONE if SLURM has forgotten the job; {} if it does not answer.

    This uses squeue, because not every site has sacct.
    """
    command = ["squeue", "--noheader", "--array", "--states=all", "--me", "--format=%i|%T|%r"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True, env=clean_environment()
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    states_by_job = {}
    for line in answer.splitlines():
        job, state, reason = (*line.split("|", 2), "", "")[:3]
        states_by_job[job] = Queued(state, reason)
    # an array that was cancelled while pending is one line without task numbers
    return {job: states_by_job.get(job) or states_by_job.get(job.partition("_")[0], Queued("GONE")) for job in jobs}


def cancel(jobs: Iterable[str], pending_only: bool = False) -> None:
    """Cancel these jobs' arrays with one call."""
    if arrays := arrays_of(jobs):
        _quietly(["scancel", *(["--state=PENDING"] if pending_only else []), *arrays])


def exclude(jobs: Iterable[str], nodes: Iterable[str]) -> None:
    """Keep pending jobs away from these nodes."""
    for array in arrays_of(jobs):
        _quietly(["scontrol", "update", f"JobId={array}", f"ExcNodeList={','.join(nodes)}"])


def arrays_of(jobs: Iterable[str]) -> list[str]:
    """The arrays that jobs belong to, each once."""
    return list(dict.fromkeys(job.partition("_")[0] for job in jobs))


def largest_array() -> int:
    """How many jobs an array may have: MaxArraySize."""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", _quietly(["scontrol", "show", "config"]), re.MULTILINE)
    return max(1, int(match[1]) if match else ARRAY)  # 0 means that arrays are not allowed: sbatch will say so


def _quietly(command: Sequence[str]) -> str:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, env=clean_environment())
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout
