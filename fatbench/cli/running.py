"""`fatbench run`: train and attack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fatbench.cli.common import plan_of
from fatbench.cli.options import (
    DataDir,
    Db,
    Device,
    DryRun,
    Executor,
    FailFast,
    Jobs,
    Microbatch,
    Name,
    PathOption,
    PerGpu,
    Precision,
    Preset,
    RerunChanged,
    Retry,
    Seeds,
    Smoke,
    TimeLimit,
    VectoriseOption,
    Wait,
    Where,
)  # fmt: skip
from fatbench.errors import NothingMatched, SpecError

if TYPE_CHECKING:
    from fatbench.runner.jobs import Job


def run_suite(
    name: Name,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    jobs: Jobs = None,
    device: Device = None,
    per_gpu: PerGpu = None,
    executor: Executor = "local",
    precision: Precision = None,
    path: PathOption = "loop",
    microbatch: Microbatch = None,
    vectorise: VectoriseOption = 1,
    retry_failed: Retry = False,
    rerun_changed: RerunChanged = False,
    fail_fast: FailFast = False,
    time_limit: TimeLimit = None,
    wait: Wait = True,
    dry_run: DryRun = False,
    db: Db = None,
    data: DataDir = None,
) -> None:
    """Run a suite: train and attack every cell that is not done yet."""
    from fatbench.runner import processes

    with processes.started_early(executor == "local" and vectorise == 1 and not dry_run):
        from fatbench.cli.watch import Watch
        from fatbench.runner import start

        plan = plan_of(name, preset, smoke, seeds, where)
        with Watch(f"suite {plan.suite}, preset {plan.preset}") as watch:
            start.run(
                start.jobs_of(plan), watch, jobs_at_once=jobs, device=device, per_gpu=per_gpu, executor=executor,
                precision=precision, path=path, microbatch=microbatch, vectorise=vectorise, retry_failed=retry_failed,
                rerun_changed=rerun_changed, fail_fast=fail_fast, time_limit=time_limit, wait=wait,
                dry_run=dry_run, db=db, data=data,
            )  # fmt: skip


def run_cell(
    id: Annotated[str, typer.Argument(help="Cell id, or its first letters.", show_default=False)],
    device: Device = None,
    precision: Precision = None,
    path: PathOption = "loop",
    microbatch: Microbatch = None,
    retry_failed: Retry = False,
    rerun_changed: RerunChanged = False,
    time_limit: TimeLimit = None,
    wait: Wait = True,
    dry_run: DryRun = False,
    db: Db = None,
    data: DataDir = None,
) -> None:
    """Run one cell of any suite."""
    from fatbench.runner import processes

    with processes.started_early(not dry_run):
        from fatbench.cli.watch import Watch
        from fatbench.runner import start

        job = _find_job(id)
        with Watch(f"cell {job.cell} of suite {job.suite}, preset {job.preset}") as watch:
            start.run(
                [job], watch, jobs_at_once=1, device=device, precision=precision, path=path, microbatch=microbatch,
                retry_failed=retry_failed, rerun_changed=rerun_changed, time_limit=time_limit, wait=wait,
                dry_run=dry_run, db=db, data=data,
            )  # fmt: skip


def _find_job(id: str) -> Job:
    """The job of a cell given by the first letters of its id, in whatever suite and preset it is."""
    from fatbench.runner import start
    from fatbench.suite import files

    if len(id) < 4:
        raise SpecError(
            f"'{id}': give at least the first 4 letters of a cell's id (fatbench plan suite NAME lists them)"
        )
    found: dict[str, Job] = {}
    for name in files.available():
        chosen = files.load(name)
        for preset in chosen.presets():
            for job in start.jobs_of(chosen.plan(preset)):
                if job.cell.startswith(id):
                    found.setdefault(job.cell, job)
    if not found:
        raise NothingMatched(f"no suite has a cell '{id}'")
    if len(found) > 1:
        raise SpecError(f"'{id}' could be any of {', '.join(sorted(found))}")
    return next(iter(found.values()))
