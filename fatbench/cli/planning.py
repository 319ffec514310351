"""`fatbench plan`: the cells of a run and what they cost; without a suite, what fits into a time."""

from __future__ import annotations

import sys
from typing import Annotated

from fatbench import settings
from fatbench.cli import completing
from fatbench.cli import options as opt
from fatbench.cli.options import Argument, Option
from fatbench.cli.shared import known_format, plan_of, print_json, working
from fatbench.errors import NothingMatched, SpecError
from fatbench.store.opening import opened

HERE = "here"  # of --on: this machine, measured first
OTHER_TIMES = "--on h100 estimates a GPU, fatbench plan NAME --on here measures this machine"


def plan(
    target: Annotated[
        list[str] | None,
        Argument(
            metavar="[suite] [NAME|CELL]", show_default=False,
            help=f"Suite, its YAML file, or {opt.CELL}; none: every suite with its time.",
            autocompletion=completing.suites, callback=opt.one_name,
        ),
    ] = None,
    preset: opt.Preset = None,
    where: opt.Where = None,
    seeds: opt.Seeds = None,
    override: opt.Override = None,
    attack: opt.Attacks = None,
    on: Annotated[
        str | None,
        Option("--on", metavar="GPU", help="Estimate the time on this GPU, such as h200; here: measure this machine."),
    ] = None,
    jobs: opt.Jobs = None,
    budget: Annotated[
        str | None, Option("--budget", metavar="TIME", help="Without NAME: what can be run in this time, such as 8h.")
    ] = None,
    precision: opt.Precision = None,
    format: opt.Format = "text",
) -> None:  # fmt: skip
    """List the cells of a run and their cost: gradient steps, image passes, bytes, disk, time.

    Without NAME, list what this machine can finish, the longest first.

    Example: fatbench plan --budget 8h --on h100
    """
    known_format(format, ("text", "json"))
    training, attacks_in = opt.precisions(precision)
    if on in (None, HERE) and precision is not None:
        raise SpecError("--precision needs --on GPU; without it, times are those measured here")
    if not target:
        if where or seeds or override or attack or on == HERE or jobs or format == "json":
            usual = "fatbench plan NAME; without one: --budget, --on, --preset"
            raise SpecError(f"these options are about one suite: {usual}")
        _what_fits(budget, on, preset)
        return
    if budget is not None:
        raise SpecError("--budget says which suites fit: leave out the suite's name")
    from fatbench.cli import show
    from fatbench.runner import progress, versions
    from fatbench.runner.gpu_estimates import speeds
    from fatbench.runner.offers import time_left
    from fatbench.suite import cost as planning
    from fatbench.suite import weights

    suite, suite_plan = plan_of(target[0], preset, where, seeds, attack, override)
    gpu, unseen, cells = None if on == HERE else on, None, suite_plan.to_run()
    if gpu is not None:
        bits, attacks = settings.precision(training), settings.attack_precision(attacks_in)
        unseen = speeds(cells, gpu, bits, attacks, settings.setting("run.path") or settings.AUTO)
    works = {cell.id: planning.cell_work(cell, suite_plan) for cell in cells}
    with opened(None, create=True) as store:
        time, schedule = time_left(suite_plan, store, on == HERE, jobs, unseen)
        changed = {row.cell.id: row.changed for row in progress.cells_of(suite_plan, store) if row.changed}
    if format == "json":
        rows = []
        for cell in cells:
            work = works[cell.id]
            work_counts = None if work is None else {**vars(work), "image_passes": work.image_passes}
            rows.append({"id": cell.id, "key": cell.key, "spec": cell.spec, "work": work_counts})
        wanted = map(weights.parse_weights, weights.weights_of(cell.spec for cell in cells))
        files = [weights.status(file, settings.data_folder()) for file in wanted if file]
        reasons = {cell: versions.as_dicts(stages) for cell, stages in changed.items()}
        print_json({"suite": suite_plan.suite, "preset": suite_plan.preset, "cells": rows, "weights": files,
                    "time": vars(time), **({"changed": reasons} if reasons else {}), **({"on": gpu} if gpu else {}),
                    **({"schedule": vars(schedule) if schedule else None} if jobs else {})})  # fmt: skip
        return
    show.plan(suite_plan, works, planning.total(works.values()), time, gpu)
    if suite_plan.untuned:
        trials = len(suite.trials().plan(suite_plan.preset).to_run())
        print(f"before them {trials} trials, for no row is tuned yet: {suite_plan.untuned}")
    if changed:
        print("\n".join(versions.lines(changed)))
    if jobs is not None:
        show.schedule(schedule, gpu)


def _what_fits(budget: str | None, on: str | None, preset: str | None) -> None:
    """Print what fits, the longest first, and the commands to run it. NothingMatched: nothing does."""
    from fatbench.cli.show import new_console, print_rows
    from fatbench.cli.watch import duration
    from fatbench.runner import offers as offering
    from fatbench.runner.executors.local import slots
    from fatbench.runner.gpu_estimates import known_gpu
    from fatbench.runner.slots import gpu_name

    seconds_allowed = None if budget is None else settings.seconds_of(budget)
    if budget is not None and seconds_allowed is None:
        raise SpecError(f"expected a time such as 8h, 90m or 2d, got '{budget}'", option="budget")
    if on is None and (gpu := gpu_name(slots(None, None)[0])):
        on = known_gpu(gpu)
    with working("estimating every suite") as say:
        all_offers = list(offering.offers(on, preset, say, OTHER_TIMES))
    where = f"one {on.upper()}, an estimate" if on else "one worker of this machine"
    timed = [offer for offer in all_offers if offer.seconds is not None]
    left = [one for one in timed if one.done < one.cells]
    fit = [one for one in left if seconds_allowed is None or (one.seconds or 0) <= seconds_allowed]
    if fit:
        rows = [
            [one.suite, one.preset, str(one.cells - one.done), duration(one.seconds or 0), ", ".join(one.data)]
            for one in sorted(fit, key=lambda one: -(one.seconds or 0))
        ]
        print_rows(new_console(), ("suite", "preset", "cells", "time", "data"), rows, ("cells", "time"))
        commands = "fatbench plan NAME --preset PRESET has the cells, fatbench run NAME --preset PRESET runs"
        print(f"time on {where}; {commands}")
    if unknown := len(all_offers) - len(timed):
        presets = f"{unknown} preset{'s' * (unknown != 1)}"
        hint = f"; {OTHER_TIMES}" * (on is None)
        print(f"fatbench: {presets}: nothing comparable has run here{hint}", file=sys.stderr)
    if not fit:
        shortest = min((offer.seconds for offer in timed if offer.seconds), default=None)
        remark = "" if shortest is None else f"; the shortest takes {duration(shortest)}"
        raise NothingMatched(f"no preset is known to fit{f' --budget {budget}' if budget else ''} on {where}{remark}")
