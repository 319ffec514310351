"""`fatbench run`: train and attack."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from typing import Annotated

from fatbench import settings
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
        Option("--rerun", metavar="WHICH", help="Run cells again: failed, or changed (their data or plug-in did)."),
    ] = None,
    tune: Annotated[
        bool, Option("--tune", help="Let each row try the suite's values first, and write what it chooses.")
    ] = False,
    dry_run: opt.DryRun = False,
) -> None:
    """Train and attack every cell that is not done yet; the same command again resumes.

    Example: fatbench run sfat-cifar10 --preset quick -k 'method in [FAT, SFAT]'
    """
    again = name_list(rerun)
    if unknown := next((word for word in again if word not in RERUN), None):
        hint = did_you_mean(unknown, RERUN)
        raise SpecError(f"expected failed, changed or both, got '{unknown}'{hint}", option="rerun")
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
        from fatbench.runner.choosing import write_choices
        from fatbench.runner.live_log import add_writer
        from fatbench.store.stages import Store
        from fatbench.suite import files, tuning

        name = tuning.name_of_trials(target[0]) if tune else target[0]
        suite, plan = plan_of(name, preset, where, seeds, attack, override)
        if tune:
            tuning.demand_validation(plan.cells, suite.file)
        cells = [cell.id for cell in plan.to_run()]
        mark = partial(cell_labels.mark_current, suite, plan.preset)
        judged = nullcontext() if dry_run else sql_tables.judged(None, cells, mark)
        one = "" if is_suite(target[0]) else f"cell {plan.cells[0].id} of "
        watching = Watch(f"{one}suite {plan.suite}, preset {plan.preset}", quietness())
        try:
            with watching as watch, add_writer(watch, options) as observer, judged:
                start.run(start.jobs_of(plan), observer, options)
        except SystemExit as end:
            if not (tune and end.code == 1):  # 1: a cell has failed; a trial that diverged is an answer
                raise
        if tune and not dry_run:
            tuned = files.load(files.name_with_settings(target[0], override))
            with Store.open(settings.database(None)) as store:
                file = write_choices(tuned, plan.preset, store)
            compares = tuning.command(tuned.name, tuned.file, plan.preset)
            print(f"fatbench: wrote {file}; {compares} compares", file=sys.stderr)
