"""Run cells on SLURM, with arrays of jobs that take cells until none is free or their time is up.

    [slurm]            # in fatbench.toml; table.py has the keys
    partition = "gpu"
    time = "4:00:00"   # a cell that needs longer continues in the job's next start
    gpus = 1

    table    the settings of [slurm], and the batch script
    queue    calls SLURM's commands
    driver   submits the jobs and follows them
    job      the job itself, which keeps workers on its node

There is not one job for each cell, for these reasons. A job that waited for hours works for all of its time. Python and
torch start only once. Any number of cells can share the few jobs that a site allows. And if a job is lost, any other
job continues its cell from the last checkpoint. The price is that a cell has no fixed job; `fatbench show` names it.

Every node must see the working directory, the data, the files folder and the database under the same paths.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fatbench import settings
from fatbench.errors import MachineError, SpecError
from fatbench.runner.executors import device_and_jobs, say
from fatbench.runner.executors.slurm import queue, table
from fatbench.runner.executors.slurm.driver import Driver
from fatbench.runner.jobs import Event, Job, Note, Statuses, Stop, Watch, Work
from fatbench.store.database import Database

DEFAULT_JOBS = 256  # in the queue, without --jobs
SHORT = 5  # minutes: a shorter job spends most of its time on starting and stopping


def slots(device: str | None, jobs: int | None, per_gpu: int, url: str) -> list[str]:
    """The device of each slot, one for each cell that may run at a time; slots that share a job have the same name.

    SpecError: [slurm] is not valid, or a numbered GPU is asked for. MachineError: there is no sbatch.
    """
    slurm_table = table.checked(settings.table("slurm"))
    table.of_attacks(slurm_table)
    device_name, usual = device_and_jobs(device, jobs)
    if ":" in device_name:
        raise SpecError("SLURM chooses the GPUs; give cuda", option=f"device {device_name}")
    if shutil.which("sbatch") is None:
        raise MachineError("no sbatch here: --executor slurm runs where jobs are submitted, or in a SLURM job")
    database = Database(url)
    if database.path is not None:
        say(
            f"{database.shown}: a SQLite file must be on a file system that all nodes share and that keeps"
            " locks (many NFS servers do not); PostgreSQL is safe: --db postgresql://user:password@host/name"
        )
    if (minutes := table.minutes(slurm_table.get("time", table.MINUTES))) < SHORT:
        say(
            f"[slurm] time = {slurm_table['time']}: a job of {minutes:g} min mostly starts and stops; give "
            f"{SHORT} or more"
        )
    if device_name == "auto" and not table.wants_gpu(slurm_table) and "gpu" in str(slurm_table.get("partition")):
        say(
            f"[slurm] partition = {slurm_table['partition']!r} alone asks for no GPU, so this runs on CPUs; "
            "give gpus = 1"
        )
    # [slurm] comes before the setting for all executors
    most_jobs = int(str(jobs or slurm_table.get("jobs") or usual or DEFAULT_JOBS))
    if device_name == "cuda" or (device_name == "auto" and table.wants_gpu(slurm_table)):
        return [f"cuda:{job}" for job in range(most_jobs) for _ in range(per_gpu)]
    return ["cpu"] * most_jobs


def run(work: Work, slots: Sequence[str], watch: Watch, stop: Stop, *, note: Note = say) -> Statuses:
    """Submit SLURM jobs, follow them, and return each cell's status. MachineError: sbatch refuses."""
    slurm_table = table.checked(settings.table("slurm"))
    device = "cpu" if slots[0] == "cpu" else "cuda"
    per_gpu = max(Counter(slots).values()) if device == "cuda" else 1
    most_jobs = len({*slots}) if device == "cuda" else len(slots)

    def statuses_of(jobs: Sequence[Job], chosen: dict[str, object], device: str, watch: Watch) -> Statuses:
        patience = table.warning(chosen) * 2 / 3
        of_jobs = replace(
            work, jobs=jobs, machine=replace(work.machine, device=device), per_gpu=per_gpu, patience=patience
        )
        return Driver(of_jobs, chosen, most_jobs, watch, stop, note)()

    attacks = table.of_attacks(slurm_table)
    if attacks is None:
        return statuses_of(work.jobs, slurm_table, device, watch)

    def training(slot: int, event: Event) -> None:
        if (event.stage, event.kind) != ("cell", "done"):
            watch(slot, event)

    statuses = statuses_of([replace(job, evaluations=[]) for job in work.jobs], slurm_table, device, training)
    trained = [job for job in work.jobs if statuses[job.cell] == "done"]
    if stop() or not trained or "blocked" in statuses.values():
        return {cell: "interrupted" if status == "done" else status for cell, status in statuses.items()}
    attacks_device = "cuda" if table.wants_gpu(attacks) else "cpu"
    return statuses | statuses_of(trained, attacks, attacks_device, watch)


def try_out(device: str | None) -> str:
    """Ask sbatch about a job as [slurm] describes it, without submitting it, and return the answer.

    If sbatch cannot be asked, the answer says so. MachineError: the job would not run.
    """
    slurm_table = table.checked(settings.table("slurm"))
    device_name = device_and_jobs(device, None)[0]
    gpu = device_name == "cuda" or (device_name == "auto" and table.wants_gpu(slurm_table))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.sh"
        file.write_text(table.script(slurm_table, "cuda" if gpu else "cpu", ""))
        try:
            return queue.try_out(file, queue.clean_environment())
        except queue.SubmissionRefused as error:
            if "allocation failure" in str(error):
                raise
            return f"it is not known whether SLURM accepts it: {error}"
