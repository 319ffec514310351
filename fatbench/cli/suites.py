"""`fatbench suite` and `fatbench plan`: which suites exist, whether a file is valid, what a run would cost."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fatbench.cli import completing
from fatbench.cli.common import known_format, plan_of, print_json
from fatbench.cli.options import (
    AttackPrecision,
    Attacks,
    DataDir,
    Db,
    Device,
    Format,
    Name,
    Override,
    PathOption,
    Precision,
    Preset,
    Seeds,
    Smoke,
    Where,
)
from fatbench.errors import FatbenchError, SpecError
from fatbench.settings import AUTO
from fatbench.store.opening import opened

if TYPE_CHECKING:
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Plan
    from fatbench.suite.duration import Estimate, Speeds
    from fatbench.suite.files import Suite
    from fatbench.suite.schedule import Schedule


CALIBRATION = 20  # seconds


def suite_list(
    every: Annotated[bool, typer.Option("--all", help="Include suites on JPEG-compressed images.")] = False,
    format: Format = "text",
) -> None:
    """List the suites of each paper with their numbers of cells.

    Example: fatbench suite list
    """
    from fatbench.runner.versions import explain
    from fatbench.suite import sizes

    known_format(format, ("text", "json"))
    all_rows = list(sizes.listing())
    rows = [row for row in all_rows if "error" not in row]
    for row in all_rows:
        if "error" in row:
            print(f"fatbench: {explain(row['error'])}", file=sys.stderr)
    if format == "json":
        print_json({"suites": rows})
    else:
        from fatbench.cli import show
        from fatbench.suite.papers import is_jpeg

        shown_rows = [row for row in rows if every or not is_jpeg(row["name"])]
        show.suites(shown_rows, len(rows) - len(shown_rows))
    if len(rows) < len(all_rows):
        raise typer.Exit(SpecError.exit_code)


def suite_show(name: Name, format: Format = "text") -> None:
    """Describe a suite: its purpose, axes, presets, attacks and tables.

    Example: fatbench suite show sfat-cifar10
    """
    from fatbench.cli import show
    from fatbench.suite import files

    known_format(format, ("text", "json"))
    if format == "json":
        print_json(_described(files.load(name)))
    else:
        show.suite(files.load(name))


def _described(suite: Suite) -> dict[str, Any]:
    """What `suite show` says, by name."""
    presets = {}
    for preset in suite.presets():
        plan = suite.plan(preset, refuse=False)
        presets[preset] = {
            "cells": len(plan.to_run()),
            "seeds": sorted({cell.spec["seed"] for cell in plan.cells}),
            "note": plan.note,
            "checkpoints": list(plan.checkpoints),
            "attacks": list(plan.metrics()),
            "excluded": [{"key": dict(key), "reason": reason} for key, reason in plan.excluded],
        }
    return {
        "name": suite.name, "title": suite.title, "description": suite.description, "file": str(suite.file),
        "axes": suite.axes(), "presets": presets,
        "tables": [{"id": table.id, "title": table.title} for table in suite.tables],
        "figures": [{"id": figure.id, "title": figure.title} for figure in suite.figures],
    }  # fmt: skip


def suite_check(
    files: Annotated[list[str], typer.Argument(help="Suite names or files.", show_default=False)],
    *,
    contract: Annotated[
        bool,
        typer.Option(
            "--contract", help="Treat FILES as plug-ins and test the properties that every function must have."
        ),
    ] = False,
    learn: Annotated[
        bool, typer.Option("--learn", help="Train the first cell of a preset until it is above chance; stores nothing.")
    ] = False,
    preset: Preset = None,
    where: Where = None,
    seeds: Seeds = None,
    device: Device = None,
    data: DataDir = None,
    format: Format = "text",
) -> None:
    """Validate suite files, every preset, without running anything.

    With --contract, call each function of plug-in files; with --learn, see whether a cell learns.

    --learn takes one suite, and the first cell that --preset and -k leave.

    Example: fatbench suite check my_rule.yaml
    """
    from fatbench import report as reporting
    from fatbench.runner.versions import explain
    from fatbench.suite.files import load

    known_format(format, ("text", "json"))
    if format == "json" and (contract or learn):
        raise SpecError("--format json: not with --contract or --learn")
    if contract:
        _contract(files)
        return
    if learn:
        if len(files) > 1:
            raise SpecError(f"--learn takes one suite, got {len(files)}")
        plan = plan_of(files[0], preset, False, seeds, where)
        from fatbench import settings
        from fatbench.runner.executors.local import slots

        _learn(plan, settings.data_folder(str(data) if data else None), slots(device, 1)[0])
        return
    if misplaced := [option for option, value in (("--preset", preset), ("-k", where), ("--seeds", seeds),
                                              ("--device", device), ("--data", data)) if value]:  # fmt: skip
        raise SpecError(f"{', '.join(misplaced)}: only with --learn")

    mistakes = 0
    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            loaded_suite = load(file)
            sizes, plans = {}, []
            for preset in loaded_suite.presets():
                plans.append(plan := loaded_suite.plan(preset))
                sizes[preset] = len(plan.to_run())
                _check_report(loaded_suite, plan)
            reporting.check_headings(loaded_suite, plans)
        except FatbenchError as error:
            mistakes += 1
            rows.append({"file": file, "ok": False, "error": explain(error)})
            if format == "text":
                print(f"fatbench: {explain(error)}", file=sys.stderr)
        else:
            rows.append({"file": file, "ok": True, "presets": sizes})
            if format == "text":
                print(f"{file}: ok ({', '.join(f'{preset} {n} cells' for preset, n in sizes.items())})")
            for presets, sentence in reporting.unlike(loaded_suite, plans):
                print(f"{file}: not compared in {presets}: {sentence}")
    if format == "json":
        print_json({"suites": rows})
    if mistakes:
        raise typer.Exit(2)


def suite_schema() -> None:
    """Print the JSON Schema of suite files, by which editors complete and check them.

    Example: fatbench suite schema
    """
    from fatbench.suite import file_schema

    print(file_schema.text(), end="")


def _contract(files: list[str]) -> None:
    """Print a line for every function of plug-in files, and what does not hold for it. Exit 1: something does not."""
    from fatbench.suite import plugins

    paths = [Path(file).expanduser().resolve() for file in files]
    if suites := [path.name for path in paths if path.suffix in (".yaml", ".yml")]:
        raise SpecError(f"--contract takes plug-ins, Python files, and {suites[0]} is a suite")
    for path in paths:
        plugins.add(path, "")
    from fatbench import testing

    failures = 0
    for path in paths:
        for kind, name, held_properties, broken in testing.check(path):
            failures += bool(broken)
            verdict = (
                f"{len(broken)} of {len(held_properties) + len(broken)} properties do not hold" if broken else "ok"
            )
            if not held_properties and not broken:
                verdict = "has no property to test; a run reads it"
            print(f"{path.name}: {kind} {name}: {verdict}")
            properties_by_problem: dict[str, list[str]] = {}  # what is wrong -> the properties that it breaks
            for line in broken:
                property, _, words = line.partition(": ")
                properties_by_problem.setdefault(words, []).append(property)
            print(
                *(f"  {', '.join(properties)}: {words}\n" for words, properties in properties_by_problem.items()),
                sep="",
                end="",
            )
    if failures:
        raise typer.Exit(1)


def _learn(plan: Plan, data: Path, device: str) -> None:
    """Train a plan's first cell round by round and say when it left chance. Exit 1: it did not."""
    from fatbench.report.numbers.doubts import leaves_chance
    from fatbench.report.numbers.statistics import binomial_tail
    from fatbench.runner.learning_check import check_learning

    cell = plan.cells[0]
    cell_label = ", ".join([*cell.key.values(), f"seed {cell.spec['seed']}"])
    print(f"{plan.suite}, preset {plan.preset}, cell {cell.id}: {cell_label}")
    check = None
    for check in check_learning(plan, data, device):
        loss = "" if math.isnan(check.loss) else f"loss {check.loss:.4f}, "
        accuracy_text = f"natural {100 * check.accuracy:.2f} % of {check.n}"
        print(
            f"round {check.round} of {check.rounds}, step {check.steps}: {loss}{accuracy_text}",
            file=sys.stderr,
            flush=True,
        )
        chance = binomial_tail(round(check.accuracy * check.n), check.n, check.chance)
        if learned := leaves_chance(chance, check.rounds):
            break
    assert check is not None  # an algorithm has a round
    reached = f"{check.steps} steps of a client (round {check.round} of {check.rounds})"
    result = f"natural accuracy {100 * check.accuracy:.2f} % of {check.n} images, chance {100 * check.chance:.4g} %"
    p = "p < 1e-6" if chance < 1e-6 else f"p = {chance:.2g}"
    if learned:
        print(f"above chance after {reached}: {result}, {p}")
        return
    print(f"still at chance after {reached}: {result}, {p}")
    raise typer.Exit(1)


def _check_report(checked_suite: Suite, plan: Plan) -> None:
    """Whether the tables and figures can be filled. SpecError names the file."""
    from fatbench import report as reporting

    try:
        reporting.check(checked_suite, plan)
    except SpecError as error:
        raise SpecError(f"{checked_suite.file}: {error} ({plan.preset})") from None


def _time(
    plan: Plan, store: Store | None, calibrate: bool, gpus: int | None, unseen: Speeds | None
) -> tuple[Estimate, Schedule | None]:
    """How long what is left of the plan takes on one worker of this machine, or of one unseen; and on so many."""
    from fatbench.suite import duration, schedule

    timed: list[duration.TimedStage] = []
    work_left = duration.whole_plan(plan)
    if store is not None:  # else nothing imports SQLAlchemy
        from fatbench.runner import progress
        from fatbench.store import timing

        timed += timing.timed_runs(store)
        work_left = progress.cells_left(plan, store)
    if calibrate:
        from fatbench import settings
        from fatbench.runner import calibrate as calibrating

        print(f"fatbench: measuring for about {CALIBRATION} s", file=sys.stderr)
        data = settings.data_folder()
        known_speeds = duration.speeds(timed)
        calibration = calibrating.measure_speeds(plan, known_speeds, data, CALIBRATION)
        if not calibration and duration.estimate(plan.to_run(), known_speeds, work_left).unknown:
            print(
                "fatbench: no cell got far enough to be measured; times are known once a cell has run here",
                file=sys.stderr,
            )
        timed += calibration
    speeds_used = unseen or duration.speeds(timed)
    time = duration.estimate(plan.to_run(), speeds_used, work_left)
    if gpus is None:
        return time, None
    from fatbench import settings

    cells = duration.lengths(plan.to_run(), speeds_used, work_left)
    return time, schedule.schedule(cells, gpus, settings.checkpoint_seconds()) if cells else None


def plan_suite(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Suite name, or path of a YAML file; without: every suite with its time.",
            show_default=False,
            autocompletion=completing.suites,
        ),
    ] = None,
    *,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="TIME", help="Without a suite: what can be run in this time, such as 8h."),
    ] = None,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    override: Override = None,
    attacks: Attacks = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure the speed of cells that were never run here, for about 20 s.")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="Time on this many workers, each as fast as this machine.")
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="GPU", help="Estimate the time on this GPU, such as h200.")
    ] = None,
    precision: Precision = None,
    attack_precision: AttackPrecision = None,
    path: PathOption = AUTO,
    db: Db = None,
    format: Format = "text",
) -> None:
    """List the cells of a run and their cost: gradient steps, image passes, bytes, disk, time.

    Without a suite, list what this machine can finish, the longest first.

    Example: fatbench plan --budget 8h --on h100
    """
    from fatbench import settings
    from fatbench.cli import budget as budgets
    from fatbench.cli import show
    from fatbench.runner import progress, versions
    from fatbench.suite import cost as planning
    from fatbench.suite import weights
    from fatbench.suite.files import name_with_settings

    known_format(format, ("text", "json"))
    if on is None and (precision is not None or attack_precision is not None or path != AUTO):
        raise SpecError(
            "--precision, --attack-precision and --path need --on; without it, times are those measured here"
        )
    if name is None:
        if where or seeds or override or attacks or calibrate or gpus or format == "json":
            raise SpecError(
                "these options are about one suite: fatbench plan NAME; without one: --budget, --on, --preset"
            )
        budgets.show(budget, on, "smoke" if smoke else preset, db)
        return
    if budget is not None:
        raise SpecError("--budget says which suites fit: leave out the suite's name")
    plan = plan_of(name_with_settings(name, override), preset, smoke, seeds, where, attacks)
    unseen = None
    if on is not None:
        if calibrate:
            raise SpecError("--on cannot be combined with --calibrate, which measures this machine")
        from fatbench.runner.gpu_estimates import speeds

        bits, attacks_in = settings.precision(precision), settings.attack_precision(attack_precision)
        unseen = speeds(plan.to_run(), on, bits, attacks_in, path)
    works = {cell.id: planning.cell_work(cell, plan) for cell in plan.to_run()}
    with opened(db, create=True) as store:
        time, gpu_schedule = _time(plan, store, calibrate, gpus, unseen)
        changed = {row.cell.id: row.changed for row in progress.cells_of(plan, store) if row.changed}
    if format == "json":
        cells = []
        for cell in plan.to_run():
            work = works[cell.id]
            work_counts = None if work is None else {**vars(work), "image_passes": work.image_passes}
            cells.append({"id": cell.id, "key": cell.key, "spec": cell.spec, "work": work_counts})
        root = settings.data_folder()
        needed_weights = [
            weights_file
            for text in weights.weights_of(cell.spec for cell in plan.to_run())
            if (weights_file := weights.parse_weights(text))
        ]
        files = [weights.status(weights_file, root) for weights_file in needed_weights]
        reasons = {cell: versions.as_dicts(stages) for cell, stages in changed.items()}
        print_json({"suite": plan.suite, "preset": plan.preset, "cells": cells, "weights": files, "time": vars(time),
                    **({"changed": reasons} if reasons else {}),
                    **({"on": on} if on else {}),
                    **({"schedule": vars(gpu_schedule) if gpu_schedule else None} if gpus else {})})  # fmt: skip
        return
    show.plan(plan, works, planning.total(works.values()), time, on)
    if changed:
        print("\n".join(versions.lines(changed)))
    if gpus is not None:
        show.schedule(gpu_schedule, on)
