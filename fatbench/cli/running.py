"""`fatbench run`: train and attack."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from fatbench.cli.common import plan_of
from fatbench.cli.options import RUN, Name, Preset, Seeds, Smoke, Where
from fatbench.errors import NothingMatched, SpecError
from fatbench.runner.options import RunOptions, with_keywords

if TYPE_CHECKING:
    from fatbench.runner.jobs import Job


def _run_suite(
    name: Name,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    *,
    options: RunOptions,
) -> None:
    """Run a suite: train and attack every cell that is not done yet."""
    from fatbench.runner import processes

    with processes.started_early(options.executor == "local" and options.vectorise == 1 and not options.dry_run):
        from fatbench.cli.watch import Watch
        from fatbench.runner import start

        plan = plan_of(name, preset, smoke, seeds, where)
        with Watch(f"suite {plan.suite}, preset {plan.preset}") as watch:
            start.run(start.jobs_of(plan), watch, options)


def _run_cell(
    id: Annotated[str, typer.Argument(help="Cell id, or its first letters.", show_default=False)],
    *,
    options: RunOptions,
) -> None:
    """Run one cell of any suite."""
    from fatbench.runner import processes

    with processes.started_early(not options.dry_run):
        from fatbench.cli.watch import Watch
        from fatbench.runner import start

        job = _find_job(id)
        with Watch(f"cell {job.cell} of suite {job.suite}, preset {job.preset}") as watch:
            start.run([job], watch, replace(options, jobs=1))


OF_MANY = ("jobs", "per_gpu", "executor", "vectorise", "fail_fast")  # say how several cells are run
run_suite = with_keywords(_run_suite, types=RUN)
run_cell = with_keywords(_run_cell, without=OF_MANY, types=RUN)


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
