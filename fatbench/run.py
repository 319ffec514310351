"""`fatbench run`: from a plan to finished cells. Everything that can be wrong is found before the first worker starts."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fatbench import progress, registry, settings
from fatbench.errors import MachineError, NothingMatched, SpecError, did_you_mean
from fatbench.splits import split
from fatbench.store import Store
from fatbench.suite import Plan, digest
from fatbench.watch import Watch
from fatbench.worker import Job, Machine

EXECUTORS = ("local", "ray", "slurm")


def jobs_of(plan: Plan) -> list[Job]:
    """A plan's cells as jobs, each once."""
    return [
        Job(cell.id, cell.spec, list(cell.evaluations), plan.checkpoints, plan.suite, plan.preset)
        for cell in plan.unique()
    ]


def lanes_of(device: str | None, jobs: int | None, per_gpu: int) -> list[str]:
    """The devices that work side by side. MachineError: no such GPU; SpecError: not a device."""
    wanted = settings.setting("device", device) or "auto"
    if jobs is None and (number := settings.setting("jobs")):
        if not number.isdigit() or int(number) < 1:
            raise SpecError(f"jobs: expected a number of cells side by side, got '{number}'")
        jobs = int(number)
    if wanted == "cpu":
        return ["cpu"] * (jobs or _cores())
    if wanted == "auto" or wanted.startswith("cuda"):
        import torch

        have = torch.cuda.device_count()
        if wanted == "auto" and have == 0:
            return ["cpu"] * (jobs or _cores())
        if wanted in ("auto", "cuda"):
            gpus = list(range(have)) or [0]
        else:
            try:
                gpus = [int(part) for part in wanted.removeprefix("cuda:").split(",")]
            except ValueError:
                raise SpecError(f"--device: expected auto, cpu, cuda or cuda:0,1, got '{wanted}'") from None
        if missing := [gpu for gpu in gpus if gpu >= have]:
            raise MachineError(f"--device {wanted}: there is no GPU {missing[0]} here ({have} found; fatbench doctor)")
        lanes = [f"cuda:{gpu}" for _ in range(per_gpu) for gpu in gpus]
        return lanes[:jobs] if jobs else lanes
    raise SpecError(f"--device: expected auto, cpu, cuda or cuda:0,1, got '{wanted}'")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(
    jobs: Sequence[Job],
    *,
    what: str,
    jobs_at_once: int | None = None,
    device: str | None = None,
    per_gpu: int = 1,
    executor: str = "local",
    precision: str | None = None,
    retry_failed: bool = False,
    fail_fast: bool = False,
    dry_run: bool = False,
    db: str | None = None,
    data: Path | None = None,
) -> None:
    """Run jobs; returns when all is done, else raises SystemExit with the documented code."""
    if executor not in EXECUTORS:
        raise SpecError(f"--executor: no executor is named '{executor}'{did_you_mean(executor, EXECUTORS)}")
    precision = settings.setting("precision", precision) or "fp32"
    if precision not in ("fp32", "bf16"):
        raise SpecError(f"--precision: expected fp32 or bf16, got '{precision}'")
    url = settings.database(db)
    root = settings.data_folder(str(data) if data else None)
    if dry_run:
        _say_what_would_run(jobs, url, what)
        return
    lanes = lanes_of(device, jobs_at_once, per_gpu)
    check_data(jobs, root)
    machine = Machine(
        db=url,
        files=str(settings.files_folder(url)),
        data=str(root),
        precision=precision,  # type: ignore[arg-type]
        retry_failed=retry_failed,
        checkpoint_seconds=settings.checkpoint_seconds(),
        plugins=tuple(str(file) for file in registry.plugins()),
    )
    with Store.open(url, create=True) as store:
        before = progress.of_jobs(jobs, store)
    left = [job for job in jobs if before[job.cell] != "done" and (retry_failed or before[job.cell] != "failed")]
    failed = [job.cell for job in jobs if before[job.cell] == "failed" and job not in left]
    wish = _Wish()
    with Watch(what, jobs, before, lanes if executor == "local" else [executor]) as watch:
        if left:
            with wish:
                outcomes = _executor(executor)(left, machine, lanes[: len(left)], watch.see, wish.ask, fail_fast=fail_fast)
        else:
            outcomes = {}
        failed += [cell for cell, outcome in outcomes.items() if outcome == "failed"]
        interrupted = [cell for cell, outcome in outcomes.items() if outcome == "interrupted"]
        elsewhere = [cell for cell, outcome in outcomes.items() if outcome == "elsewhere"]
        watch.summary(len(jobs), failed, interrupted, elsewhere)
    if wish.code:
        raise SystemExit(wish.code)
    if failed or interrupted:
        raise SystemExit(1)


def _executor(name: str) -> Any:
    import importlib

    return importlib.import_module(f"fatbench.executors.{name}").run


def check_data(jobs: Sequence[Job], root: Path) -> None:
    """Read every data set of the run once and deal it to the clients, before any worker starts.

    MachineError: missing, damaged or not as named; SpecError: it cannot be split as the cell says.
    """
    keys = ("data", "partition", "seed", "train", "validation", "client_holdout")
    splits = {digest([job.spec[key] for key in keys]): job for job in jobs}
    datasets: dict[str, Any] = {}
    for job in splits.values():
        name = digest(job.spec["data"])
        if name not in datasets:
            datasets = {name: registry.build("Data", job.spec["data"])(root)}  # one in memory at a time
        spec = {key: registry.kinds.number(job.spec[key]) for key in keys[2:]}
        try:
            split(datasets[name], partition=registry.build("Partition", job.spec["partition"]), **spec)
        except ValueError as error:
            raise SpecError(f"cell {job.cell}: partition: {str(error).removeprefix('partition: ')}") from None


def _say_what_would_run(jobs: Sequence[Job], url: str, what: str) -> None:
    from fatbench.store import NoDatabase

    try:
        with Store.open(url) as store:
            states = progress.of_jobs(jobs, store)
    except NoDatabase:
        states = {job.cell: "todo" for job in jobs}
    left = [job for job in jobs if states[job.cell] != "done"]
    if not jobs:
        raise NothingMatched("nothing to run")
    print(f"{what}: {len(jobs)} cells, {len(left)} to run")
    for job in left:
        print(f"{job.cell}  {states[job.cell]}")


class _Wish:
    """What the user asked for by signals: 1 after the first, 2 after the second; `code` is the exit status."""

    def __init__(self) -> None:
        self.times = 0
        self.code = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Wish:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _: object) -> None:
        self.times += 1
        self.code = 128 + number
        if self.times == 1:
            print(
                "\nfatbench: finishing and checkpointing the current round; again to stop at once"
                " (the same command goes on from the last checkpoint)",
                file=sys.stderr,
            )

    def ask(self) -> int:
        return self.times
