"""Stored results as frames, tables and figures; functions that the commands share for reading."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pandas
from sqlalchemy import select

from fatbench import packed, report, settings
from fatbench.api.asking import (
    Plugins,
    Seeds,
    Where,
    cells_and_run,
    filter_text,
    known_choice,
    names,
    plugged,
    seed_list,
)
from fatbench.api.shown_tables import DifferenceTable, Table
from fatbench.errors import MachineError, NothingMatched, SpecError, did_you_mean
from fatbench.report import build_tables, left_out
from fatbench.report import differences as report_differences
from fatbench.report.figures import plots
from fatbench.report.figures.series import Plot
from fatbench.report.numbers import shown_runs
from fatbench.report.numbers.long import frame
from fatbench.report.numbers.points import combined
from fatbench.report.numbers.statistics import bits_array
from fatbench.report.numbers.stored import outcomes as outcomes_of
from fatbench.report.numbers.stored import own_images_of
from fatbench.report.pairs import label, measured_numbers
from fatbench.report.site.pages import Part
from fatbench.report.tables import external_suite as reporting_evaluated
from fatbench.report.tables.entries import IMAGES
from fatbench.report.tables.notes import LEVELS
from fatbench.report.tables.sheet import sorted_by
from fatbench.store.opening import Db, listed_databases, opened, shown_databases
from fatbench.store.schema import CELLS, SUITE_CELLS
from fatbench.store.selection import Checkpoint
from fatbench.store.stage_names import parsed
from fatbench.store.stages import Store
from fatbench.suite import external_models, files
from fatbench.suite.cells import Plan
from fatbench.suite.files import Suite
from fatbench.suite.folders import own_files
from fatbench.suite.model import CHECKPOINTS
from fatbench.suite.standard_attacks import did_you_mean_metric
from fatbench.suite.types import seeds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn


STAGES = ("evaluation", "train")
LISTED = 12  # the most suites that a message names


def results(
    suite: str | Path | Suite | None = None,
    *,
    preset: str | None = None,
    seeds: Seeds = None,
    where: Where = None,
    stage: str | None = "evaluation",
    clients: bool = False,
    plugins: Plugins = (),
    db: Db = None,
) -> pandas.DataFrame:
    """Every number of the evaluations, one row each, with its provenance; for one suite with the labels of its axes.

    Columns: cell, the axes, seed, stage ("train", or an evaluation), metric, round, client (-1: all), value, unit, n,
    and suite, preset, commit, dirty, device, precision, created and run of its measurement, attack (all its settings),
    eps and norm of its radius, outcomes (for how many images they are stored), replicate, and doubts (such as a
    diverged training; in the words of the tables, separated by "; "). Accuracies are fractions, not per cent; which
    metrics are accuracies is said in docs/results.md. An axis with the name of another column is called "axis:NAME".
    An experiment that stands at several points of the grid has a row for each.

    preset: default the one with most cells in the database. seeds: default those of the preset. stage: "evaluation";
    "train": the numbers of its rounds; None: both. clients: also the numbers of single clients and classes, beside
    those over all. db: a database, a file of `export_results`, or several of them,
    which are read together; default results/fatbench.db below the working directory. If nothing is returned, the reason
    is printed.
    SpecError: no such suite. DatabaseError: an accuracy is not the mean of its outcomes.

    >>> import fatbench
    >>> numbers = fatbench.results("sfat-cifar10", preset="smoke")
    >>> accuracies = numbers.pivot_table(index="method", columns="metric", values="value")
    """
    if stage is not None:
        known_choice("stage", stage, STAGES)
    with plugged(plugins, db), opened(db) as store:
        chosen_plan = None
        if suite is None:
            numbers = frame(store, None, clients)
            listed, filter_wanted = seed_list(seeds), filter_text(where)
            if filter_wanted is not None:
                raise SpecError("where: labels are those of a suite: name it, or choose rows of the frame")
            numbers = numbers if listed is None else numbers[numbers["seed"].isin(listed)]
        else:
            chosen_suite, chosen_plan = plan_read(suite, preset, seeds, where, store)
            numbers = frame(store, chosen_plan, clients)
            if chosen_suite.name == external_models.SUITE:
                numbers = _only_table_rows(numbers, chosen_plan)
        all_numbers = numbers
        if stage is not None and len(numbers):
            numbers = numbers[(numbers["stage"] == "train") == (stage == "train")]
        if not len(numbers):
            print(f"fatbench: {why_empty(chosen_plan, store, db, len(all_numbers) > 0)}", file=sys.stderr)
    return numbers.reset_index(drop=True)


def _only_table_rows(numbers: pandas.DataFrame, plan: Plan) -> pandas.DataFrame:
    """The numbers of evaluated models that their table shows: each row has one radius and number of images."""
    axes = list(plan.cells[0].key) if plan.cells else []
    shown_keys = {(*cell.key.values(), evaluation.id) for cell in plan.cells for evaluation in cell.evaluations}
    evaluations = numbers["stage"].map(lambda name: parsed(name).evaluation)
    row_keys = zip(*(numbers[axis] for axis in axes), evaluations, strict=True)
    return numbers[[row_key in shown_keys for row_key in row_keys]]


def why_empty(plan: Plan | None, store: Store | None, db: Db, of_training: bool = False) -> str:
    """The reason why there are no numbers, and what to do, in the words of the command line."""
    database_name = shown_databases(db)
    if store is None:
        return f"{database_name} does not exist: nothing has been run here, or the database is another"
    if not store.has_cells():
        return f"{database_name} has no results yet: fatbench run NAME"
    if of_training:
        return "there are numbers of training alone: stage=None, or stage='train'"
    if plan is None:
        return f"{database_name} has no numbers to show here; it has {trained_suites(store)}"
    if plan.suite == external_models.SUITE:
        return f"{database_name} holds no such numbers"
    asked_seeds = {int(cell.spec["seed"]) for cell in plan.cells}
    if other_seeds := _stored_seeds(plan.suite, plan.preset, store) - asked_seeds:
        stored = f"seed{'s' * (len(other_seeds) > 1)} {seeds_text(other_seeds)}"
        verb = "are" if len(other_seeds) > 1 else "is"
        return f"{stored} {verb} stored of preset '{plan.preset}', not {seeds_text(asked_seeds)}"
    trained = _trained(store)
    asked = f"'{plan.suite}', preset '{plan.preset}'" + (f", {plan.where}" if plan.where else "")
    if (plan.suite, plan.preset) in trained:
        return f"{database_name} has none of these numbers of {asked} (fatbench status {plan.suite}: what is left)"
    return f"{database_name} has no numbers of {asked}; it has {trained_suites(store)}"


def existing_store(store: Store | None, db: Db) -> Store:
    """The store that was opened; NothingMatched: there is no database."""
    if store is None:
        raise NothingMatched(why_empty(None, None, db))
    return store


def _trained(store: Store) -> list[tuple[str, str]]:
    """The suites and presets with a trained cell."""
    from fatbench.runner import progress

    return [name for name, states in progress.by_suite(store).items() if states["done"]]


def trained_suites(store: Store) -> str:
    """The suites with a trained cell in words: "tiny (paper, smoke), fat-baselines (cpu)"."""
    presets: dict[str, list[str]] = {}
    for suite, preset in _trained(store):
        presets.setdefault(suite, []).append(preset)
    listed = [f"{suite} ({', '.join(suite_presets)})" for suite, suite_presets in presets.items()]
    more = f" and {len(listed) - LISTED} more (fatbench status)" if len(listed) > LISTED else ""
    return f"{', '.join(listed[:LISTED])}{more}" if listed else "no trained cell of a suite"


def _stored_seeds(suite: str, preset: str, store: Store) -> set[int]:
    """The seeds of a suite's preset for which the database has cells."""
    query = select(CELLS.c.seed).join(SUITE_CELLS, SUITE_CELLS.c.cell == CELLS.c.id).distinct()
    query = query.where(SUITE_CELLS.c.suite == suite, SUITE_CELLS.c.preset == preset)
    with store.database.reading() as connection:
        return {int(seed) for seed in connection.scalars(query) if seed is not None}


def _all_seeds(suite: Suite, preset: str, store: Store) -> list[int] | None:
    """The seeds of a suite's preset with those that are stored besides; None: there are no others."""
    stored = _stored_seeds(suite.name, preset, store)
    own = suite.contents.presets[preset].seeds or suite.contents.seeds
    return sorted({*own, *stored}) if stored - {*own} else None


def table(
    suite: str | Path | Suite | Sequence[str | Suite] = (),
    id: str | Sequence[str] | None = None,
    *,
    rows: str | Sequence[str] = (),
    columns: str | Sequence[str] = (),
    preset: str | None = None,
    select: Checkpoint = "last",
    published: bool = True,
    where: Where = None,
    seeds: Seeds = None,
    with_evaluated: bool = False,
    notes: str | None = None,
    digits: int = 2,
    images: str = "all",
    sort: str | None = None,
    differences: str | None = None,
    plugins: Plugins = (),
    db: Db = None,
) -> Table:
    """The tables of one or several suites, or those called `id`: measured beside published numbers.

    suite: default every suite with results; "evaluate" is the table of all evaluated models. rows, columns: one table
    of all these suites, as `fatbench report --by --metric` makes it. preset: default the one with most cells in the
    database. select: the checkpoint, "last", "best-val" or "best-test". published: whether the papers' numbers are
    shown. where, seeds, db: as of `results`. with_evaluated: also rows of models that `evaluate(..., like=NAME)`
    attacked. notes: "none", "short" or "full"; default: short in LaTeX, else full. digits: after the point of
    percentages. images: "common" takes every attack on the images that all attacks of a table have. sort: rows with the
    best of this heading or metric first. differences: one table of all methods, each with its difference from the
    suite's baseline under this metric.
    SpecError: no such suite, preset, table, axis or choice; NothingMatched: no suite is named, and none has results.

    >>> import fatbench
    >>> print(fatbench.table("sfat-cifar10", "T3", preset="smoke").markdown().splitlines()[0])
    ### T3: SFAT Table 3, CIFAR-10, Non-IID: accuracy (%) [SMOKE PRESET - not comparable with published numbers]
    """
    known_choice("select", select, CHECKPOINTS)
    if notes is not None:
        known_choice("notes", notes, LEVELS)
    known_choice("images", images, IMAGES)
    cells, run = cells_and_run(where)
    with plugged(plugins, db), opened(db) as store:
        asked = [suite] if isinstance(suite, str | Path | Suite) else list(suite) or with_results(store)
        plans = [plan_read(one, preset, seeds, cells, store, run) for one in asked]
        for one, plan in plans:
            report.check(one, plan)
        if differences is not None:
            if id or rows:
                raise SpecError(" is a table by itself: choose no other table and no axes", option="differences")
            stored = existing_store(store, db)
            tables = [
                report_differences.of_plan(
                    one, plan, stored, differences, select=select, digits=digits, images=images,
                    shown_metrics=names(columns),
                )
                for one, plan in plans
            ]  # fmt: skip
            for (_, plan), compared in zip(plans, tables, strict=True):
                if not compared.grid.rows:
                    _say(why_empty(plan, store, db))
            return DifferenceTable([*map(report_differences.sheet, tables)], notes, tables=tuple(tables))
        if plans and (rows or columns):
            plans = [combined(plans, names(rows), names(columns))]
        if id:
            plans = with_table(plans, names(id))
        options: dict[str, Any] = {"select": select, "published": published, "digits": digits, "images": images}
        parts = [_part(one, plan, store, with_evaluated, options) for one, plan in plans]
        if sort is not None:
            in_order = iter(sorted_by([grid for part in parts for grid in part.grids], sort))
            parts = [replace(part, grids=[next(in_order) for _ in part.grids]) for part in parts]
        all_grids = [grid for part in parts for grid in part.grids]
        if store is None or (not asked and not all_grids):
            reason = why_empty(None, store, db)
            if not asked:
                raise NothingMatched(reason)
            _say(reason)
        for part in parts if store is not None else ():
            if part.grids and all(value.mean is None for grid in part.grids for value in grid.all()):
                _say(why_empty(part.plan, store, db))
    return Table(all_grids, notes, tuple(parts), chosen=bool(id), db=db)


def _say(message: str) -> None:
    print(f"fatbench: {message}", file=sys.stderr)


def _part(suite: Suite, plan: Plan, store: Store | None, with_evaluated: bool, options: Mapping[str, Any]) -> Part:
    """The tables of a suite, with the options of `build_tables`; says on stderr what is missing."""
    for line in left_out(suite, plan):
        _say(line)
    evaluated = reporting_evaluated.external_cells(plan, store) if with_evaluated else []
    if with_evaluated and not evaluated:
        command = f"fatbench evaluate FILE --model ... --like {plan.suite} --preset {plan.preset}"
        _say(f"no model has been evaluated with the attacks of '{plan.suite}': {command}")
    return Part(suite, plan, build_tables(suite, plan, store, evaluated=evaluated, **options))


def with_results(store: Store | None) -> list[str]:
    """Suites that have results, by name or by their file in the working directory; says which are nowhere."""
    from fatbench.runner import progress

    order, own = [*files.available(), external_models.SUITE], own_files()
    found: list[tuple[int, str]] = []
    for name in sorted({name for name, _ in progress.by_suite(store)} if store is not None else ()):
        base = files.split_settings(name)[0]
        if base in order:
            found.append((order.index(base), name))
        elif base in own:
            found.append((len(order), own[base] + name.removeprefix(base)))
        else:
            _say(f"suite '{name}' has results, but its file was not found: fatbench report FILE")
    return [name for _, name in sorted(found, key=lambda item: item[0])]


def outcomes(
    suite: str | Path | Suite,
    attack: str,
    *,
    preset: str | None = None,
    seeds: Seeds = None,
    where: Where = None,
    select: Checkpoint = "last",
    plugins: Plugins = (),
    db: Db = None,
) -> pandas.DataFrame:
    """Whether each test image is classified right under an attack: a row for each cell, a column for each image, bool.

    The index has the seed and the labels in which cells differ; also "deployed", where a cell deploys several models.
    Clients' own images come one client after the other, and must be the same in all cells.
    The other arguments as of `table`.
    SpecError: there is no evaluation named `attack`; NothingMatched: no outcomes are stored.
    """
    known_choice("select", select, CHECKPOINTS)
    with plugged(plugins, db), opened(db) as store:
        _, plan = plan_read(suite, preset, seeds, where, store)
        store = existing_store(store, db)
        numbers_by_cell = measured_numbers(store, {cell.id for cell in plan.cells}, select)
        own = own_images_of(numbers_by_cell, store)
        read_outcomes = outcomes_of(numbers_by_cell, store)
        for cell_of_clients, stage in own:  # before the database is closed
            read_outcomes(cell_of_clients, stage)
    labels = {label(evaluation) for one_cell in numbers_by_cell.values() for evaluation in one_cell}
    if labels and attack not in labels:
        raise SpecError(f"attack: nothing is measured as '{attack}'{did_you_mean_metric(attack, labels)}")
    varied = [axis for axis in plan.cells[0].key if len({cell.key.get(axis) for cell in plan.cells}) > 1]
    rows: dict[tuple[Any, ...], Any] = {}
    images_of_clients: set[str] = set()
    for cell in plan.cells:
        for evaluation, number in numbers_by_cell[cell.id].items():
            if label(evaluation) == attack and number.outcomes is not None:
                if of_clients := own.get((cell.id, number.stage)):
                    images_of_clients.add(of_clients.images)
                    bits = bits_array(read_outcomes(cell.id, number.stage)).reshape(1, -1)
                else:
                    bits = bits_array(number.outcomes).reshape(-1, number.n)
                for model, image in enumerate(bits):
                    rows.setdefault((*(cell.key.get(axis, "") for axis in varied), cell.spec["seed"], model), image)
    if not rows:
        raise NothingMatched(f"no outcomes of '{attack}' are stored of '{plan.suite}', preset '{plan.preset}'")
    if len(images_of_clients) > 1:
        said = "is on clients' own images, which differ between these cells: name one seed"
        raise SpecError(f"attack: '{attack}' {said}")
    images = max(len(row) for row in rows.values())
    if any(len(row) != images for row in rows.values()):
        raise SpecError("the cells were evaluated on other numbers of images: choose some with where")
    index = pandas.MultiIndex.from_tuples(rows, names=[*varied, "seed", "deployed"])
    frame = pandas.DataFrame(numpy.stack(list(rows.values())), index=index)
    return frame if frame.index.get_level_values("deployed").max() else frame.droplevel("deployed")


def plot(
    suite: str | Path | Suite,
    id: str | None = None,
    *,
    x: str | None = None,
    y: str | Sequence[str] = (),
    by: str | Sequence[str] = (),
    preset: str | None = None,
    select: Checkpoint = "last",
    where: Where = None,
    seeds: Seeds = None,
    page: int | None = None,
    plugins: Plugins = (),
    db: Db = None,
) -> Figure:
    """A figure of a suite by its id, or your own over x: a matplotlib Figure, which a notebook shows.

    x, y, by: as of `fatbench plot`: plot(NAME, x="round", y="natural", by="method"). page: of a figure with several
    pages, from 1. The other arguments as of `table`.
    SpecError: no such figure, or several, whose ids or pages it names; NothingMatched: nothing of it is measured yet.
    """
    known_choice("select", select, CHECKPOINTS)
    with plugged(plugins, db), opened(db) as store:
        chosen_suite, plan = plan_read(suite, preset, seeds, where, store)
        store = existing_store(store, db)
        plots_drawn = plots_of(chosen_suite, plan, store, id, x, names(y), names(by), select)
    if len(plots_drawn) > 1:
        ids = ", ".join(plot.figure.id for plot in plots_drawn)
        raise SpecError(
            f"'{chosen_suite.name}' has {len(plots_drawn)} figures, say which: plot(..., "
            f"'{plots_drawn[0].figure.id}') ({ids})"
        )
    files_here = settings.files_folder(settings.database(next(iter(listed_databases(db)), None)))
    pages = plots.pages_of(report.drawable(plots_drawn, files_here), files_here)
    if not pages:
        with opened(db) as store:
            reason = why_empty(plan, store, db)
        raise NothingMatched(f"no figure of '{chosen_suite.name}' can be drawn: {reason}")
    if page is None and len(pages) > 1:
        raise SpecError(f"the figure has {len(pages)} pages: say which, page=1, or choose some panels with where")
    if page is not None and not 1 <= page <= len(pages):
        raise SpecError(f"page: the figure has {len(pages)}, got {page!r}")
    return pages[(page or 1) - 1]


def plots_of(
    suite: Suite, plan: Plan, store: Store | None, id: str | None, x: str | None, y: Sequence[str],
    by: Sequence[str], select: Checkpoint,
) -> list[Plot]:  # fmt: skip
    """The figures of a suite, the one with an id, or one of your own over x; says which labels nothing is drawn of."""
    from fatbench.report.figures import adhoc_figures, series

    if x is not None or y or by:
        figure = adhoc_figures.figure(suite, plan, store, x, y, by)
        assert store is not None  # else nothing is measured
        return series.drawn_from(suite, plan, store, [figure], select)
    if not suite.figures:
        raise NothingMatched(f"suite '{suite.name}' has no figures: give x, such as round, and a metric for your own")
    plots = report.build_figures(suite, plan, store, id, select=select)
    for unknown_label in report.unknown(plots, plan, store):
        _say(unknown_label)
    return plots


# --- networks, and files of results -------------------------------------------------------------------------------


def list_models(
    *, results: str | Path | Sequence[str | Path] = (), places: str | Sequence[str] = ()
) -> pandas.DataFrame:
    """The networks of stored results: names for `load_model`, accuracies, and the file if it is here.

    results: files that `export_results` wrote; default those in results/. places: folders that may hold the files.
    """
    from fatbench.runner import zoo

    rows = zoo.rows(_result_files(results), names(places))
    frame = pandas.DataFrame([{"name": row["name"], **row["numbers"], "file": row["file"]} for row in rows])
    return frame.set_index("name") if rows else frame


def load_model(
    name: str,
    *,
    results: str | Path | Sequence[str | Path] = (),
    places: str | Path | Sequence[str | Path] = (),
    plugins: Plugins = (),
) -> nn.Module:
    """Load a network of stored results by its name in `list_models`, in eval mode: images in [0, 1] to logits.

    results: files that `export_results` wrote; default those in results/ below the working directory, which a clone of
    the repository has. places: folders, or addresses that have ADDRESS/SHA256.safetensors. The file must have the
    SHA-256 that is stored with its numbers. SpecError: no such network; MachineError: its file was not found, or has
    another SHA-256.

    >>> import torch, fatbench
    >>> network = fatbench.load_model("fat-byzantine/AT/none/multi-Krum/3")  # in a clone of the repository
    >>> network(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    from fatbench.runner import zoo

    with plugged(plugins):
        sources = _result_files(results)
        if not sources:
            raise SpecError(f"no results/*.jsonl in {Path.cwd()}, which name the networks: results=FILES")
        network = zoo.choose(name, zoo.names(zoo.entries(sources)))
        file = zoo.find(network, [places] if isinstance(places, str | Path) else places)
        if file is None:
            raise MachineError(
                f"the file of {name} is not here: {network.sha256}.safetensors (places=[folder or address]);"
                f" 'fatbench run {network.cell}{network.how}' trains it again, and"
                " 'fatbench export' writes a file for results= that knows the new one"
            )
        return zoo.module(file, network.sha256, network.trained_with)


def _result_files(results: str | Path | Sequence[str | Path]) -> list[Path]:
    listed = [results] if isinstance(results, str | Path) else results
    return [Path(file) for file in listed] or packed.results_in(Path("results"))


# --- shared with the commands -------------------------------------------------------------------------------------


def with_table(plans: Sequence[tuple[Suite, Plan]], ids: Sequence[str]) -> list[tuple[Suite, Plan]]:
    """The suites with only the tables of these ids. SpecError: no suite has such a table."""
    table_ids = [table.id for suite, _ in plans for table in suite.tables]
    for id in ids:
        if id not in table_ids:
            raise SpecError(f"no table is named '{id}'{did_you_mean(id, table_ids)}", option="table")
    return [(suite.with_tables(ids), plan) for suite, plan in plans if any(t.id in ids for t in suite.tables)]


def plan_read(
    name: str | Path | Suite, preset: str | None, seeds: Seeds, where: Where, store: Store | None, run: str = ""
) -> tuple[Suite, Plan]:
    """A suite and its plan as `planned_suite`, with the ids of the runs that every view reads; run: as of `to_read`."""
    cells, chosen_run = cells_and_run(where)
    suite, plan = planned_suite(name, preset, seed_list(seeds), cells, store)
    return suite, plan if store is None else to_read(suite, plan, store, run or chosen_run)


def to_read(suite: Suite, plan: Plan, store: Store, runs: str = "") -> Plan:
    """The plan with the ids of the runs that every view reads, see `shown_runs`; runs: such as "precision=fp32".

    SpecError: `runs` names no property of a run.
    """
    # the whole plan, too: a filter must not change which run of a cell is read; checking it would import torch
    planned = functools.partial(suite.plan, plan.preset, refuse=False)
    whole_plan = None if suite.name == external_models.SUITE else planned
    return shown_runs.shown_plan(plan, store, runs, whole_plan)


def planned_suite(
    name: str | Path | Suite, preset: str | None, seeds: Sequence[int] | None, where: Where, store: Store | None
) -> tuple[Suite, Plan]:
    """A suite and its plan in the given preset, else in that with most cells in the database, else in "paper"."""
    from fatbench.runner import progress

    where = filter_text(where)
    if name == external_models.SUITE and name not in files.available():
        return reporting_evaluated.suite_and_plan(store, where)
    chosen_suite = name if isinstance(name, Suite) else files.load(str(name))
    if preset is None and store is not None:
        preset = progress.preset_run(chosen_suite, store)
    preset = chosen_suite.preset(preset or "paper")
    if seeds is None and store is not None and preset in chosen_suite.presets():
        seeds = _all_seeds(chosen_suite, preset, store)
    plan = chosen_suite.plan(preset, seeds, where, refuse=False)
    return chosen_suite, plan if store is None else progress.with_stored_attacks(chosen_suite, plan, store)
