"""`fatbench status`, `report` and `plot`: how far a suite is, its tables, its figures."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated, Any

from fatbench import settings
from fatbench.cli import completing
from fatbench.cli import options as opt
from fatbench.cli.options import Argument, Option, formats
from fatbench.cli.shared import (
    FIGURES,
    cell_in,
    format_of,
    is_suite,
    known_format,
    name_list,
    print_json,
    print_or_write,
    write_text,
)  # fmt: skip
from fatbench.errors import FatbenchError, NothingMatched, SpecError
from fatbench.store.opening import opened

TABLES = ("markdown", "latex", "csv", "json", "html", "terminal")
DRAWN = ("pdf", "svg", "png", "csv")
EVERY = 5.0  # seconds between two looks of --watch


def status(
    name: Annotated[
        str | None,
        Argument(
            metavar="[NAME]", help="Suite or its YAML file; none: all in the database.", show_default=False,
            autocompletion=completing.suites,
        ),
    ] = None,
    preset: opt.Preset = None,
    where: opt.Where = None,
    watch: opt.Watched = False,
    format: opt.Format = "text",
) -> None:  # fmt: skip
    """Count cells: done, failed, running and left.

    Example: fatbench status fat-baselines --watch
    """
    from fatbench import api
    from fatbench.cli import show
    from fatbench.report.numbers import doubts, sql_tables, stored
    from fatbench.runner import cell_labels, progress, versions, waiting

    known_format(format, ("text", "json"))
    if watch:
        if name is None or format == "json":
            raise SpecError("--watch: name the suite to watch" if name is None else "--watch prints text, not json")
        from fatbench.cli import watch as watching

        watching.watch_plan(name, lambda store: api.planned_suite(name, preset, None, where, store)[1], EVERY)
        return
    if name is None and (preset or where):
        raise SpecError("--preset and -k need a suite: fatbench status NAME")
    with opened(None) as store:
        if name is None:
            counts = {} if store is None else progress.by_suite(store)
            if format == "json":
                print_json({"suites": [{"suite": s, "preset": p, "cells": c} for (s, p), c in counts.items()]})
            else:
                show.all_status(counts)
            return
        suite, plan = api.planned_suite(name, preset, None, where, store)
        if store is not None:
            with suppress(FatbenchError):  # one who may only read the database
                cell_labels.mark_current(suite, plan.preset, store)
        rows = progress.cells_of(plan, store)
        ids = [row.cell.id for row in rows]
        if store is not None and (changed_ids := [row.cell.id for row in rows if row.changed]):
            with suppress(FatbenchError):  # so that SQL has these doubts, too
                sql_tables.judge(store, changed_ids)
        count_by_doubt = {} if store is None else doubts.cells_of(stored.doubts_of(ids, store))
        if format == "json":
            cells = [{"id": row.cell.id, "key": row.cell.key, "status": row.status} for row in rows]
            changed = {row.cell.id: versions.as_dicts(row.changed) for row in rows if row.changed}
            summary = {"suite": plan.suite, "preset": plan.preset, "cells": progress.count(rows), "list": cells}
            optional = {"changed": changed, "doubts": count_by_doubt}
            print_json({**summary, **{key: value for key, value in optional.items() if value}})
            return
        show.status(plan, rows)
        presets_run = {} if store is None else progress.by_suite(store)
        for (suite_name, preset_run), states in presets_run.items():
            if suite_name == plan.suite and preset_run != plan.preset:
                print(f"preset {preset_run}: {states['done']} trained (--preset {preset_run})")
        for words, cell_count in count_by_doubt.items():
            print(f"doubtful: {words} ({cell_count} cell{'s' * (cell_count != 1)})")
        running = [row.cell.id for row in rows if row.status == "running"]
        for line in waiting.holders_of(running, store) if store is not None else ():
            print(line)


def report(
    names: opt.Names = None,
    preset: opt.Preset = None,
    where: opt.Where = None,
    select: opt.Select = "last",
    table: opt.TableId = None,
    by: opt.By = None,
    metric: opt.Metric = None,
    sort: Annotated[
        str | None, Option("--sort", metavar="METRIC", help="Sort rows by this heading or metric, the best first.")
    ] = None,
    differences: Annotated[
        bool,
        Option(
            "--differences", help="All methods, each with its difference from the baseline under the last --metric."
        ),
    ] = False,
    common: Annotated[
        bool, Option("--common", help="Compute every number on the images that all attacks share.")
    ] = False,
    width: opt.PageWidth = None,
    format: Annotated[str | None, formats(*TABLES)] = None,
    output: opt.Output = None,
) -> None:
    """Print tables: mean and spread over seeds, beside the published numbers.

    With --by or --metric, all suites are one table with these rows and columns.

    Example: fatbench report fat-baselines --preset cpu -k 'method in [FAT, SFAT]' --format latex
    """
    from fatbench import api
    from fatbench.api.shown_tables import DATA_FORMATS
    from fatbench.report.formats.latex import LOST
    from fatbench.report.tables.entries import IMAGES
    from fatbench.report.tables.notes import LEVELS

    usual = "terminal" if output is None and sys.stdout.isatty() else "markdown"
    format = known_format(format or format_of(output, TABLES, usual), TABLES)
    metrics, style = name_list(metric), {} if width is None else {"width": width}
    if style and format != "latex":
        raise SpecError(f"only latex has a width, not {format}", option=f"width {width}")
    if differences and not metrics:
        raise SpecError("--differences needs a metric: --differences --metric pgd20")
    columns = metrics if len(metrics) > differences else []
    made = api.table(
        names or (), table or None, rows=name_list(by), columns=columns, preset=preset, select=select,
        published=settings.choice("report.published", ("none",)) is None, where=where,
        with_evaluated=settings.switch("report.evaluated"), notes=settings.choice("report.notes", LEVELS),
        digits=settings.number("report.digits", 2, 0, 6),
        images=IMAGES[common], sort=sort, differences=metrics[-1] if differences else None,
    )  # fmt: skip
    unmeasured = made.unmeasured if format not in DATA_FORMATS else []
    shown_suites = {grid.suite for grid in made.grids if grid not in unmeasured}
    for grid in unmeasured:
        if grid.suite in shown_suites:  # else the suite as a whole is said to have no numbers
            reason = f"nothing of it is measured yet (--table {grid.id} shows it)"
            print(f"fatbench: suite {grid.suite}, table {grid.id} is left out: {reason}", file=sys.stderr)
    bom = format == "csv" and settings.switch("report.bom")
    text = made.page() if format == "html" else "\ufeff" * bom + made.text(format, **style)
    if (lost := text.split("\n", 2)[1:2]) and lost[0].startswith(LOST):
        print(f"fatbench: {lost[0].removeprefix('% ')}", file=sys.stderr)
    print_or_write(text, output)


def plot(
    targets: opt.Things = None,
    preset: opt.Preset = None,
    where: opt.Where = None,
    figure: Annotated[
        str | None,
        Option(
            "--figure",
            metavar="ID",
            help="A figure's id; forest: methods against the baseline; a table's id: its heat map.",
        ),
    ] = None,
    x: Annotated[
        str | None, Option("--x", metavar="NAME", help="Your own figure over round, eps, client, or an axis (bars).")
    ] = None,
    metric: opt.Metric = None,
    by: opt.By = None,
    select: opt.Select = "last",
    width: opt.PageWidth = None,
    format: Annotated[str | None, formats(*DRAWN)] = None,
    output: opt.OutputFolder = None,
) -> None:
    """Draw the figures of suites, the curves of a cell, or your own; print where they are.

    --width makes a figure for a paper: without notes, with its caption in a text file. --format csv has the
    numbers. Files go to results/figures if -o names no folder.

    Example: fatbench plot fat-baselines --x round --metric pgd20 --by method
    """
    from fatbench import api
    from fatbench import report as reporting
    from fatbench.report.figures import plots as drawing
    from fatbench.report.figures import series

    format = known_format(format or settings.setting("plot.format") or "pdf", DRAWN)
    inches, serif = _inches(width), settings.switch("plot.serif")
    metrics, is_own = name_list(metric), x is not None or metric is not None or by is not None
    names = [target for target in targets or () if is_suite(target)]
    cells = [target for target in targets or () if target not in names]
    if not targets or (names and cells):
        raise SpecError("name a suite or a cell" if not targets else "name suites or cells, not both")
    if figure is not None and is_own and not cells:
        raise SpecError("--figure cannot be combined with --x, --metric and --by")
    if cells and (x or by or figure or preset or where):
        raise SpecError("a cell's curves take --metric, --select, --format and -o alone")
    plots, alone = [], False
    with opened(None) as store:
        for cell in cells:
            from fatbench.report.figures import adhoc_figures

            id = cell_in(store, cell)
            assert store is not None
            plots += adhoc_figures.curves(store, id, metrics, select)
        for name in names:
            chosen_suite, plan = api.plan_read(name, preset, None, where, store)
            is_table = figure in {table.id for table in chosen_suite.tables} - {one.id for one in chosen_suite.figures}
            if figure == "forest" or is_table:
                if format == "csv":
                    command = f"report --table {figure} --format csv" if is_table else "compare --format json"
                    raise SpecError(f"--figure {figure}: the numbers are those of fatbench {command}")
                if store is None or not store.known_cells(planned.id for planned in plan.cells):
                    reason = api.why_empty(plan, store, None)
                    raise NothingMatched(f"no figure of '{plan.suite}' can be drawn: {reason}")
                drawn: Any = {"select": select, "width": inches, "serif": serif}
                folder, alone = output or FIGURES, True
                if is_table:
                    print(reporting.draw_table(chosen_suite, plan, store, str(figure), folder, format, **drawn))
                else:
                    print(reporting.draw_forest(plan, store, folder, format, families=chosen_suite.tests, **drawn))
                continue
            plots += api.plots_of(chosen_suite, plan, store, figure, x, metrics, name_list(by), select)
    if alone:
        return
    called = "-".join(dict.fromkeys(plot.suite for plot in plots)) or "no"
    plots = series.merge_plots(plots)
    if format == "csv":
        text = series.render_csv(plots)
        if output is None:
            sys.stdout.write(text)
            return
        file = output / f"{called}-figures.csv"
        write_text(file, text, output)
        print(file)
        return
    files = settings.files_folder(settings.database())
    drawable = reporting.drawable(plots, files)
    if not drawable:
        with opened(None) as store:
            reason = "nothing of it is measured yet" if cells else api.why_empty(plan, store, None)
        raise NothingMatched(f"no figure of '{called}' can be drawn: {reason}")
    for path in drawing.draw(drawable, output or FIGURES, format, files, inches, serif):
        print(path)


def _inches(width: str | None) -> float | None:
    """The width of a figure for a paper; None: it is not for a paper. SpecError: no such width."""
    from fatbench.report.figures.plots import COLUMN, TEXT
    from fatbench.report.formats.latex import width_of

    if width is None:
        return None
    page = width_of(width)
    narrow = width in ("column", "ieee", "acm")
    return page.points / 72.27 if page.points else COLUMN if narrow else TEXT
