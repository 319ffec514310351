"""`fatbench run`: train and attack."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from fatbench.cli.common import plan_of
from fatbench.cli.options import RUN, Attacks, Name, Override, Preset, Quiet, Seeds, Smoke, Verbose, Where
from fatbench.errors import NothingMatched, SpecError
from fatbench.runner.run_options import RunOptions, with_keywords
from fatbench.suite import weights

if TYPE_CHECKING:
    from fatbench.runner.jobs import Job
    from fatbench.store.stages import Store


def _run_suite(
    name: Name,
    *,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    override: Override = None,
    attacks: Attacks = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    options: RunOptions,
) -> None:
    """Run a suite: train and attack every cell that is not done yet.

    Example: fatbench run sfat-cifar10 --preset quick -k 'method in [FAT, SFAT]'
    """
    lines = _lines(quiet, verbose)
    from fatbench.runner import processes

    with processes.started_early(options.executor == "local" and not options.dry_run):
        from fatbench.cli.watch import Watch
        from fatbench.report.numbers import sql_tables
        from fatbench.runner import labels, start
        from fatbench.runner.live_log import add_writer
        from fatbench.suite import files

        whole_name = files.name_with_settings(name, override)
        plan = plan_of(whole_name, preset, smoke, seeds, where, attacks)

        def mark(store: Store) -> None:
            labels.mark_current(files.load(whole_name), plan.preset, store)

        cells = [cell.id for cell in plan.to_run()]
        judged = nullcontext() if options.dry_run else sql_tables.judged(options.db, cells, mark)
        watching = Watch(f"suite {plan.suite}, preset {plan.preset}", lines)
        with watching as watch, add_writer(watch, options) as observer, judged:
            start.run(start.jobs_of(plan), observer, options)


def _run_cell(
    id: Annotated[str, typer.Argument(help="Cell id, or its first letters.", show_default=False)],
    *,
    quiet: Quiet = False,
    verbose: Verbose = False,
    options: RunOptions,
) -> None:
    """Run one cell of any suite.

    Example: fatbench run cell 0301a225a8b3
    """
    lines = _lines(quiet, verbose)
    from fatbench.runner import processes

    with processes.started_early(not options.dry_run):
        from fatbench.cli.watch import Watch
        from fatbench.report.numbers import sql_tables
        from fatbench.runner import start

        *origins, job = _find_jobs(id)
        judged = sql_tables.judged(options.db, () if options.dry_run else [job.cell])
        with Watch(f"cell {job.cell} of suite {job.suite}, preset {job.preset}", lines) as watch, judged:
            start.run([*origins, job], watch, replace(options, jobs=1))


def _lines(quiet: bool, verbose: bool) -> str:
    """What is a line of progress. SpecError: both were asked for."""
    if quiet and verbose:
        raise SpecError("--quiet and --verbose contradict each other")
    return "none" if quiet else "event" if verbose else "cell"


OF_MANY = ("jobs", "per_gpu", "executor", "fail_fast")  # say how several cells are run
run_suite = with_keywords(_run_suite, types=RUN)
run_cell = with_keywords(_run_cell, excluded=OF_MANY, types=RUN)


def _find_jobs(id: str) -> list[Job]:
    """The job of a cell given by the first letters of its id, in whatever suite and preset it is, as the last.

    Before it the training of the cells with whose models it begins.
    """
    from fatbench.runner import start
    from fatbench.suite import files

    if len(id) < 4:
        raise SpecError(f"'{id}': give at least the first 4 letters of a cell's id (fatbench plan NAME lists them)")
    jobs_by_cell: dict[str, list[Job]] = {}
    for name in files.available():
        chosen_suite = files.load(name)
        for preset in chosen_suite.presets():
            jobs = {job.cell: job for job in start.jobs_of(chosen_suite.plan(preset))}
            for job in jobs.values():
                if job.cell.startswith(id):
                    jobs_by_cell.setdefault(job.cell, [*_origins(job, jobs), job])
    if not jobs_by_cell:
        raise NothingMatched(f"no suite has a cell '{id}'")
    if len(jobs_by_cell) > 1:
        raise SpecError(f"'{id}' could be any of {', '.join(sorted(jobs_by_cell))}")
    return next(iter(jobs_by_cell.values()))


def _origins(job: Job, jobs: Mapping[str, Job]) -> list[Job]:
    """The training of the cells with whose models a job begins, the first one first."""
    origin = weights.trained_by(job.spec)
    return [] if origin is None else [*_origins(jobs[origin], jobs), replace(jobs[origin], evaluations=[])]
