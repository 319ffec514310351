"""The command line. Each command parses, calls one function and prints; what it prints to stdout is the result.

Heavy imports stand inside the commands: `--help`, `suite list`, `plan`, `status` and `report` never import torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fatbench import __version__
from fatbench.errors import FatbenchError, MachineError, NothingMatched, SpecError, did_you_mean

if TYPE_CHECKING:
    from fatbench.run.worker import Job
    from fatbench.store.selection import Checkpoint
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Plan
    from fatbench.suite.files import Suite

SCHEMA_VERSION = 1
ORDER = [
    "suite",
    "plan",
    "run",
    "status",
    "report",
    "plot",
    "show",
    "logs",
    "evaluate",
    "export",
    "import",
    "data",
    "db",
    "doctor",
]


class Suggesting(typer.core.TyperGroup):
    """A command group whose "no such command" names the nearest one, and whose help follows a user's day."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise SpecError(f"no command is named '{args[0]}'{did_you_mean(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


def _group(help: str) -> typer.Typer:
    return typer.Typer(
        cls=Suggesting,
        help=help,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = _group("Federated adversarial training, benchmarked: suites, a database, tables beside the published ones.")
suite_app = _group("Suites: what there is, what one says, whether a file is valid.")
plan_app = _group("What a run would do and cost; runs nothing.")
run_app = _group("Run what is not done yet; the same command again resumes.")
data_app = _group("Data sets: where they are, whether they are complete, how to get them.")
db_app = _group("The database's schema.")
app.add_typer(suite_app, name="suite")
app.add_typer(plan_app, name="plan")
app.add_typer(run_app, name="run")
app.add_typer(data_app, name="data")
app.add_typer(db_app, name="db")

Name = Annotated[str, typer.Argument(help="A suite's name, or the path of a YAML file.", show_default=False)]
Preset = Annotated[str | None, typer.Option("--preset", help="paper, quick, smoke, or another preset of the suite.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="Short for --preset smoke.")]
Where = Annotated[str | None, typer.Option("-k", metavar="FILTER", help="Only these cells: 'model=nin and rule=sfat'.")]
Seeds = Annotated[str | None, typer.Option("--seeds", help="Instead of the suite's seeds: 0-4, or 6,7.")]
Db = Annotated[str | None, typer.Option("--db", metavar="URL", help="Database: a path or an SQLAlchemy URL.")]
DataDir = Annotated[Path | None, typer.Option("--data", help="Folder of the data sets.")]
Plugin = Annotated[list[Path] | None, typer.Option("--plugin", help="A Python file whose tables extend ours.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"fatbench {__version__}")
        raise typer.Exit


def _json(value: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **value}, indent=2))


def _plan(name: str, preset: str | None, smoke: bool, seeds: str | None, where: str | None) -> Plan:
    from fatbench.suite import files

    return _planned(files.load(name), preset, smoke, seeds, where)


def _planned(chosen: Suite, preset: str | None, smoke: bool, seeds: str | None, where: str | None) -> Plan:
    from fatbench.suite import model

    if smoke and preset not in (None, "smoke"):
        raise SpecError(f"--smoke and --preset {preset} contradict each other")
    numbers = model.parse_seeds(seeds) if seeds else None
    return chosen.plan("smoke" if smoke else preset or "paper", numbers, where)


def _format(value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise SpecError(f"--format: no format is named '{value}'{did_you_mean(value, known)}")
    return value


Format = Annotated[str, typer.Option("--format", help="text or json.")]


# --- suites and plans --------------------------------------------------------------------------------------------


@suite_app.command("list")
def suite_list(format: Format = "text") -> None:
    """What there is: every suite with its presets and numbers of cells."""
    from fatbench.suite import files

    _format(format, ("text", "json"))
    rows, invalid = [], 0
    for name in files.available():
        try:
            found = files.load(name)
            sizes = {preset: len(found.plan(preset).unique()) for preset in found.presets()}
        except SpecError as error:
            invalid += 1
            print(f"fatbench: {error}", file=sys.stderr)
            continue
        rows.append({"name": name, "title": found.title, "presets": sizes})
    if format == "json":
        _json({"suites": rows})
    else:
        from fatbench.cli import show

        show.suites(rows)
    if invalid:
        raise typer.Exit(SpecError.exit_code)


@suite_app.command("show")
def suite_show(name: Name) -> None:
    """One suite in words: what it is for, its axes, presets, attacks and tables."""
    from fatbench.cli import show
    from fatbench.suite import files

    show.suite(files.load(name))


@suite_app.command("check")
def suite_check(files: Annotated[list[str], typer.Argument(help="Suite files or names.", show_default=False)]) -> None:
    """Validate suite files, every preset, without running anything."""
    from fatbench.suite.files import load

    mistakes = 0
    for file in files:
        try:
            found = load(file)
            sizes = {}
            for preset in found.presets():
                plan = found.plan(preset)
                sizes[preset] = len(plan.unique())
                _check_report(found, plan)
        except FatbenchError as error:
            mistakes += 1
            print(f"fatbench: {error}", file=sys.stderr)
        else:
            print(f"{file}: ok ({', '.join(f'{preset} {n} cells' for preset, n in sizes.items())})")
    if mistakes:
        raise typer.Exit(2)


def _check_report(chosen: Suite, plan: Plan) -> None:
    """Whether the tables and figures can be filled. SpecError names the file."""
    from fatbench import report as reporting

    try:
        reporting.check(chosen, plan)
    except SpecError as error:
        raise SpecError(f"{chosen.file}: {error} ({plan.preset})") from None


@plan_app.command("suite")
def plan_suite(
    name: Name,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    db: Db = None,
    plugin: Plugin = None,
    format: Format = "text",
) -> None:
    """The cells of a run with their work: gradient steps, image passes, bytes, disk, and time where measured."""
    from fatbench.cli import show
    from fatbench.suite import cost as planning

    _format(format, ("text", "json"))
    _add_plugins(plugin)
    plan = _plan(name, preset, smoke, seeds, where)
    works = {cell.id: planning.cell_work(cell, plan) for cell in plan.unique()}
    if format == "json":
        cells = []
        for cell in plan.unique():
            work = works[cell.id]
            counted = None if work is None else {**vars(work), "image_passes": work.image_passes}
            cells.append({"id": cell.id, "key": cell.key, "spec": cell.spec, "work": counted})
        _json({"suite": plan.suite, "preset": plan.preset, "cells": cells})
        return
    with _existing(db) as store:
        rates = store.rates(planning.kind) if store else {}
    show.plan(plan, works, planning.total(works.values()), planning.seconds(plan.unique(), works, rates))


def _add_plugins(files: list[Path] | None) -> None:
    from fatbench.suite import signatures

    for file in files or []:
        signatures.add_plugin(file.resolve())


@contextlib.contextmanager
def _existing(db: str | None) -> Iterator[Store | None]:
    """The database if there is one, else None: asking about nothing is no error."""
    from fatbench import settings
    from fatbench.store.stages import NoDatabase, Store

    url = settings.database(db)
    try:
        store = Store.open(url)
    except NoDatabase:
        yield None
        return
    with store:
        yield store


# --- running -----------------------------------------------------------------------------------------------------

Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Cells side by side; default: cores, or GPUs.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, or cuda:0,1.")]
PerGpu = Annotated[int, typer.Option("--per-gpu", min=1, help="Cells side by side on each GPU.")]
Executor = Annotated[str, typer.Option("--executor", help="local, ray or slurm.")]
Precision = Annotated[str | None, typer.Option("--precision", help="fp32, or bf16 (weights stay fp32).")]
PathOption = Annotated[
    str,
    typer.Option(
        "--path", help="Local training: loop, reference (one tensor after the other), fast (clients as one program)."
    ),
]
Microbatch = Annotated[
    int | None,
    typer.Option("--microbatch", min=1, help="At most so many images in the network at once: less memory."),
]
TogetherOption = Annotated[
    int,
    typer.Option("--together", min=1, help="Cells that each worker trains as one program, on --path fast."),
]
Retry = Annotated[bool, typer.Option("--retry-failed", help="Run failed stages again.")]
FailFast = Annotated[bool, typer.Option("--fail-fast", help="Stop at the first failure.")]
DryRun = Annotated[bool, typer.Option("-n", "--dry-run", help="Say what would run, run nothing.")]


@run_app.command("suite")
def run_suite(
    name: Name,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    jobs: Jobs = None,
    device: Device = None,
    per_gpu: PerGpu = 1,
    executor: Executor = "local",
    precision: Precision = None,
    path: PathOption = "loop",
    microbatch: Microbatch = None,
    together: TogetherOption = 1,
    retry_failed: Retry = False,
    fail_fast: FailFast = False,
    dry_run: DryRun = False,
    plugin: Plugin = None,
    db: Db = None,
    data: DataDir = None,
) -> None:
    """Run a suite: train and attack every cell that is not done."""
    from fatbench.run import start as run

    _add_plugins(plugin)
    plan = _plan(name, preset, smoke, seeds, where)
    run.run(
        run.jobs_of(plan), what=f"suite {plan.suite}, preset {plan.preset}", jobs_at_once=jobs, device=device,
        per_gpu=per_gpu, executor=executor, precision=precision, path=path, microbatch=microbatch,
        together=together, retry_failed=retry_failed, fail_fast=fail_fast, dry_run=dry_run, db=db, data=data,
    )  # fmt: skip


@run_app.command("cell")
def run_cell(
    id: Annotated[str, typer.Argument(help="A cell's id, or its first letters.", show_default=False)],
    device: Device = None,
    precision: Precision = None,
    path: PathOption = "loop",
    microbatch: Microbatch = None,
    retry_failed: Retry = False,
    dry_run: DryRun = False,
    plugin: Plugin = None,
    db: Db = None,
    data: DataDir = None,
) -> None:
    """Run one cell of any suite."""
    from fatbench.run import start as run

    _add_plugins(plugin)
    job = _find_job(id)
    run.run(
        [job], what=f"cell {job.cell} of suite {job.suite}, preset {job.preset}", jobs_at_once=1, device=device,
        precision=precision, path=path, microbatch=microbatch, retry_failed=retry_failed, dry_run=dry_run, db=db,
        data=data,
    )  # fmt: skip


def _find_job(id: str) -> Job:
    """The job of a cell given by the first letters of its id, in whatever suite and preset it is."""
    from fatbench.run import start as run
    from fatbench.suite import files

    if len(id) < 4:
        raise SpecError(
            f"'{id}': give at least the first 4 letters of a cell's id (fatbench plan suite NAME lists them)"
        )
    found: dict[str, Job] = {}
    for name in files.available():
        chosen = files.load(name)
        for preset in chosen.presets():
            for job in run.jobs_of(chosen.plan(preset)):
                if job.cell.startswith(id):
                    found.setdefault(job.cell, job)
    if not found:
        raise NothingMatched(f"no suite has a cell '{id}'")
    if len(found) > 1:
        raise SpecError(f"'{id}' could be any of {', '.join(sorted(found))}")
    return next(iter(found.values()))


# --- looking -----------------------------------------------------------------------------------------------------


@app.command("status")
def status(
    name: Annotated[str | None, typer.Argument(help="A suite's name or file; none: all in the database.")] = None,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    db: Db = None,
    format: Format = "text",
) -> None:
    """Progress: how many cells are done, failed, running, left."""
    from fatbench.cli import show
    from fatbench.run import progress

    _format(format, ("text", "json"))
    with _existing(db) as store:
        if name is None:
            counts = {} if store is None else progress.by_suite(store)
            if format == "json":
                _json({"suites": [{"suite": s, "preset": p, "cells": c} for (s, p), c in counts.items()]})
            else:
                show.all_status(counts)
            return
        _, plan = _plan_in(name, preset, smoke, seeds, where, store)
        rows = progress.of(plan, store)
        if format == "json":
            cells = [{"id": row.cell.id, "key": row.cell.key, "status": row.status} for row in rows]
            _json({"suite": plan.suite, "preset": plan.preset, "cells": progress.count(rows), "list": cells})
        else:
            show.status(plan, rows)


def _plan_in(
    name: str, preset: str | None, smoke: bool, seeds: str | None, where: str | None, store: Store | None
) -> tuple[Suite, Plan]:
    """A suite and the plan to look at: the preset asked for, else the first that has been run, else paper."""
    from fatbench.run import progress
    from fatbench.suite import files

    chosen = files.load(name)
    if preset is None and not smoke and store is not None:
        preset = progress.preset_run(chosen, store)
    return chosen, _planned(chosen, preset, smoke, seeds, where)


Cell = Annotated[str, typer.Argument(help="A cell's id, or its first letters.", show_default=False)]


@app.command("show")
def show_cell(
    cell: Cell,
    artifacts: Annotated[bool, typer.Option("--artifacts", help="What a round kept beside its numbers.")] = False,
    round: Annotated[int | None, typer.Option("--round", min=1, help="Of this round; default: the last kept.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for pictures; default: results/figures.")
    ] = None,
    db: Db = None,
    format: Format = "text",
) -> None:
    """Every number of a cell with what produced it; or, as pictures, what a round kept beside them."""
    from fatbench.cli import show

    _format(format, ("text", "json"))
    if not artifacts and (round is not None or output is not None):
        raise SpecError("--round and -o go with --artifacts")
    if artifacts:
        _show_artifacts(cell, round, output or FIGURES, db, format)
        return
    with _existing(db) as store:
        id = _cell_in(store, cell)
        assert store is not None
        spec = store.cells()[id]
        numbers = store.measurements([id])
        runs = store.runs([id])
        stages = store.stages([id])
    if format == "json":
        _json({"cell": id, "spec": spec, "numbers": numbers, "runs": runs})
    else:
        show.cell(id, spec, stages, numbers, runs)


def _show_artifacts(cell: str, round: int | None, folder: Path, db: str | None, format: str) -> None:
    from fatbench import settings

    with _existing(db) as store:
        id = _cell_in(store, cell)
    from fatbench.report import artifacts

    files = settings.files_folder(settings.database(db)) / id
    kept = artifacts.rounds(files)
    if not kept:
        raise NothingMatched(f"cell {id} kept nothing beside its numbers, or it is not here: {files / 'artifacts'}")
    if round is not None and round not in kept:
        raise SpecError(f"--round: cell {id} kept nothing of round {round}{did_you_mean(str(round), map(str, kept))}")
    round = round or max(kept)
    tensors = artifacts.load(kept[round])
    written = []
    for picture in artifacts.pictures(tensors):
        file = folder / f"{id}-round-{round:06d}-{picture.name}.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(picture.png())
        except OSError as error:
            raise SpecError(f"-o {folder}: {error.strerror}") from None
        written.append(str(file))
    words = artifacts.lines(tensors)
    if format == "json":
        _json({"cell": id, "round": round, "rounds": list(kept), "files": written, "values": words})
    else:
        print("\n".join([*written, *words]))


@app.command("logs")
def logs(cell: Cell, db: Db = None) -> None:
    """A cell's log, and the traceback of what failed."""
    from fatbench import settings

    with _existing(db) as store:
        id = _cell_in(store, cell)
        assert store is not None
        errors = {stage: row.error for (_, stage), row in store.stages([id]).items() if row.error}
    file = settings.files_folder(settings.database(db)) / id / "log.txt"
    if file.exists():
        print(file.read_text(encoding="utf-8"), end="")
    else:
        print(f"no log at {file}", file=sys.stderr)
    for stage, error in errors.items():
        print(f"--- {stage} failed\n{error.rstrip()}")


def _cell_in(store: Store | None, cell: str) -> str:
    found = [] if store is None else [id for id in store.cells() if id.startswith(cell)]
    if not found:
        raise NothingMatched(f"no cell '{cell}' in the database (fatbench status NAME lists what there is)")
    if len(found) > 1:
        raise SpecError(f"'{cell}' could be any of {', '.join(sorted(found)[:8])}")
    return found[0]


Select = Annotated[str, typer.Option("--select", help="Checkpoint: last, best-val or best-test.")]


@app.command("report")
def report(
    name: Annotated[str | None, typer.Argument(help="A suite's name or file; none: every suite with results.")] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="markdown, latex, csv, json, html or terminal.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file.")] = None,
    select: Select = "last",
    published: Annotated[bool, typer.Option("--published/--no-published", help="Show the paper's numbers.")] = True,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    db: Db = None,
) -> None:
    """Tables: measured beside published, mean and spread over seeds."""
    from fatbench import report as reporting
    from fatbench import settings
    from fatbench.run import progress
    from fatbench.suite import files, model

    format = _format(
        format or ("terminal" if sys.stdout.isatty() and output is None else "markdown"), reporting.FORMATS
    )
    if select not in model.CHECKPOINTS:
        raise SpecError(f"--select: no checkpoint is named '{select}'{did_you_mean(select, model.CHECKPOINTS)}")
    grids = []
    with _existing(db) as store:
        run = set() if name or store is None else {one for one, _ in progress.by_suite(store)}
        for one in [name] if name else [one for one in files.available() if one in run]:
            chosen, plan = _plan_in(one, preset, smoke, seeds, where, store)
            grids += reporting.tables(chosen, plan, store, select=cast("Checkpoint", select), published=published)
    if not grids and name is None:
        raise NothingMatched("the database holds no results yet: fatbench run suite NAME")
    if format == "html":
        reporting.illustrate(grids, settings.files_folder(settings.database(db)))
    text = reporting.render(grids, format)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"-o {output}: {error.strerror}") from None


FIGURES = Path("results/figures")
PLOT_FORMATS = ("pdf", "svg", "png", "csv")


@app.command("plot")
def plot(
    name: Name,
    figure: Annotated[str | None, typer.Option("--figure", metavar="ID", help="Only this figure.")] = None,
    format: Annotated[str, typer.Option("--format", help="pdf, svg or png; csv: the numbers drawn.")] = "pdf",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder; default: results/figures, of csv stdout.")
    ] = None,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    db: Db = None,
) -> None:
    """Figures: curves over the rounds, mean and spread over seeds; prints the files it wrote."""
    from fatbench import report as reporting
    from fatbench import settings

    _format(format, PLOT_FORMATS)
    with _existing(db) as store:
        chosen, plan = _plan_in(name, preset, smoke, seeds, where, store)
        if not chosen.figures:
            raise NothingMatched(f"suite '{chosen.name}' has no figures")
        plots = reporting.figures(chosen, plan, store, figure)
        for missing in reporting.unknown(plots, plan, store):
            print(f"fatbench: {missing}", file=sys.stderr)
    if format == "csv":
        from fatbench.report import series

        text = series.render_csv(plots)
        if output is None:
            sys.stdout.write(text)
            return
        file = output / f"{plan.suite}-figures.csv"
        try:
            output.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise SpecError(f"-o {output}: {error.strerror}") from None
        print(file)
        return
    files = settings.files_folder(settings.database(db))
    some = reporting.drawable(plots, files)
    if not some:
        raise NothingMatched(f"nothing is measured of what the figures of '{chosen.name}' show ({plan.preset})")
    for path in reporting.draw(some, output or FIGURES, format, files):
        print(path)


@app.command("evaluate")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A model file written by a run.", show_default=False)],
    attack: Annotated[
        list[str] | None, typer.Option("--attack", help="natural, or {name: pgd, eps: 8/255, ...}.")
    ] = None,
    n: Annotated[int | None, typer.Option("-n", min=1, help="First n test images.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1)] = 500,
    device: Device = None,
    precision: Precision = None,
    plugin: Plugin = None,
    data: DataDir = None,
    format: Format = "text",
) -> None:
    """Attack a saved model outside any suite."""
    _format(format, ("text", "json"))
    _add_plugins(plugin)
    from fatbench.run import evaluate as evaluating

    results = evaluating.checkpoint(checkpoint, attack or ["natural"], n, batch, device, precision, data)
    if format == "json":
        _json({"checkpoint": str(checkpoint), "results": results})
    else:
        from fatbench.cli import show

        show.evaluation(results)


# --- results between machines, data, database ---------------------------------------------------------------------


@app.command("export")
def export(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File; stdout if none.")] = None,
    name: Annotated[str | None, typer.Option("--suite", help="Only the cells of this suite.")] = None,
    preset: Preset = None,
    smoke: Smoke = False,
    db: Db = None,
) -> None:
    """Results as JSON lines."""
    from fatbench.store import lines

    with _existing(db) as store:
        if store is None:
            raise NothingMatched("the database holds no results yet: fatbench run suite NAME")
        cells = [cell.id for cell in _plan(name, preset, smoke, None, None).cells] if name else None
        if output is None:
            lines.export(store, sys.stdout, cells)
        else:
            lines.export(store, output, cells)


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(help="Files written by export.", show_default=False)], db: Db = None
) -> None:
    """Take in results of another machine; importing twice changes nothing."""
    from fatbench import settings
    from fatbench.store import lines
    from fatbench.store.stages import Store
    from fatbench.suite import cells

    with Store.open(settings.database(db), create=True) as store:
        for file in files:
            summary = lines.import_(store, file, identify=cells.identity)
            print(f"{file}: {', '.join(f'{count} {what}' for what, count in summary.items())}")


@data_app.command("list")
def data_list(data: DataDir = None, format: Format = "text") -> None:
    """Data sets: which are here, complete, as published or a variant."""
    from fatbench import data as datasets
    from fatbench import settings
    from fatbench.cli import show

    _format(format, ("text", "json"))
    root = settings.data_folder(str(data) if data else None)
    rows = datasets.status(root)
    if format == "json":
        _json({"root": str(root), "datasets": rows})
    else:
        show.datasets(root, rows)


@data_app.command("prepare")
def data_prepare(
    names: Annotated[list[str], typer.Argument(help="Data sets.", show_default=False)], data: DataDir = None
) -> None:
    """Fetch what is not here and check it."""
    from fatbench import data as datasets
    from fatbench import settings

    root = settings.data_folder(str(data) if data else None)
    for name in names:
        row = datasets.prepare(name, root, lambda line: print(line, file=sys.stderr))
        print(f"{name}: {row['state']} in {row['where']}")


@data_app.command("verify")
def data_verify(
    names: Annotated[list[str], typer.Argument(help="Data sets.", show_default=False)], data: DataDir = None
) -> None:
    """Compare every file with the published checksums."""
    from fatbench import data as datasets
    from fatbench import settings

    root = settings.data_folder(str(data) if data else None)
    bad = 0
    for name in names:
        row = datasets.verify(name, root)
        bad += row["state"] not in ("complete", "variant")
        print(f"{name}: {row['state']}{': ' + row['message'] if row['message'] else ''}")
    if bad:
        raise typer.Exit(MachineError.exit_code)


@db_app.command("upgrade")
def db_upgrade(db: Db = None) -> None:
    """Bring the database to this version's schema."""
    from fatbench import settings
    from fatbench.store import stages as store

    print(store.upgrade(settings.database(db)))


@db_app.command("check")
def db_check(db: Db = None) -> None:
    """Whether the database is whole and of this version."""
    from fatbench import settings
    from fatbench.store import stages as store

    print(store.check(settings.database(db)))


@app.command("doctor")
def doctor(db: Db = None, data: DataDir = None) -> None:
    """One page about this machine for a bug report."""
    from fatbench.cli import show

    show.doctor(db, data)


# --- the door ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Entry point: run the command line, turn our errors into one message and the documented exit code."""
    logging.getLogger("fatbench").addHandler(logging.NullHandler())
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        app(prog_name="fatbench")
    except FatbenchError as error:
        print(f"fatbench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except MemoryError:
        print("fatbench: out of memory", file=sys.stderr)
        sys.exit(MachineError.exit_code)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
