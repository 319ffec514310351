"""`fatbench run`: train and attack."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Annotated

from fatbench.cli import options as opt
from fatbench.cli.completing import one_of
from fatbench.cli.helping import quietness
from fatbench.cli.options import Option
from fatbench.cli.shared import is_suite, name_list, plan_of
from fatbench.errors import SpecError, did_you_mean
from fatbench.runner.run_options import run_options

RERUN = {"failed": "retry_failed", "changed": "rerun_changed"}  # what --rerun names -> the option of a run


def run(
    target: opt.Target,
    preset: opt.Preset = None,
    where: opt.Where = None,
    seeds: opt.Seeds = None,
    override: opt.Override = None,
    attack: opt.Attacks = None,
    device: opt.Device = None,
    jobs: opt.Jobs = None,
    executor: Annotated[
        str | None,
        Option(
            "--executor", metavar="NAME", help="local, slurm or ray.", autocompletion=one_of("local", "slurm", "ray")
        ),
    ] = None,
    precision: opt.Precision = None,
    rerun: Annotated[
        str | None,
        Option("--rerun", metavar="WHICH", help="Run again: failed, changed; a cell changes with its data or plug-in."),
    ] = None,
    dry_run: opt.DryRun = False,
) -> None:
    """Train and attack every cell that is not done yet; the same command again resumes.

    Example: fatbench run sfat-cifar10 --preset quick -k 'method in [FAT, SFAT]'
    """
    again = name_list(rerun)
    if unknown := next((word for word in again if word not in RERUN), None):
        raise SpecError(
            f"expected failed, changed or both, got '{unknown}'{did_you_mean(unknown, RERUN)}", option="rerun"
        )
    training, attacks = opt.precisions(precision)
    options = run_options(
        jobs=jobs, device=device, executor=executor, precision=training, attack_precision=attacks, dry_run=dry_run,
        **{RERUN[word]: True for word in again},
    )  # fmt: skip
    from fatbench.runner import processes

    with processes.started_early(options.executor == "local" and not dry_run):
        from fatbench.cli.watch import Watch
        from fatbench.report.numbers import sql_tables
        from fatbench.runner import cell_labels, start
        from fatbench.runner.live_log import add_writer

        suite, plan = plan_of(target[0], preset, where, seeds, attack, override)
        cells = [cell.id for cell in plan.to_run()]
        mark = partial(cell_labels.mark_current, suite, plan.preset)
        judged = nullcontext() if dry_run else sql_tables.judged(None, cells, mark)
        one = "" if is_suite(target[0]) else f"cell {plan.cells[0].id} of "
        watching = Watch(f"{one}suite {plan.suite}, preset {plan.preset}", quietness())
        with watching as watch, add_writer(watch, options) as observer, judged:
            start.run(start.jobs_of(plan), observer, options)
