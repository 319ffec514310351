"""`fatbench status`, `report` and `plot`: how far a suite is, its tables, its figures."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from fatbench.cli import completing
from fatbench.cli.common import (
    FIGURES,
    SHORT,
    cell_in,
    known_format,
    name_list,
    named_filter,
    named_preset,
    plan_in,
    print_json,
    write_text,
)
from fatbench.cli.options import Db, Format, Preset, Runs, Seeds, Select, Smoke, Where, output_folder
from fatbench.errors import FatbenchError, NothingMatched, SpecError, did_you_mean
from fatbench.store.opening import opened

if TYPE_CHECKING:
    from fatbench.store.selection import Checkpoint

PUBLISHED = ("none", "below", "column")

PLOT_FORMATS = ("pdf", "svg", "png", "csv")


def _format_of(output: Path | None) -> str:
    """The format of a table for which none is named: by the ending of its file, "latex" of table.tex."""
    from fatbench import report as reporting

    if output is None:
        return "terminal" if sys.stdout.isatty() else "markdown"
    ending = output.suffix.lower().removeprefix(".")
    ending_format = SHORT.get(ending, ending)
    return ending_format if ending_format in reporting.FORMATS else "markdown"


def status(
    name: Annotated[
        str | None,
        typer.Argument(help="Suite name or file; default: all in the database.", autocompletion=completing.suites),
    ] = None,
    *,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh until all cells are done; shows the time left.")
    ] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between refreshes.")] = 5.0,
    db: Db = None,
    format: Format = "text",
) -> None:
    """Show progress: cells done, failed, running and left.

    Example: fatbench status fat-baselines --watch
    """
    from fatbench.cli import show
    from fatbench.report.numbers import cell_rows, doubts
    from fatbench.runner import labels, progress, versions, waiting

    known_format(format, ("text", "json"))
    if watch:
        if name is None or format == "json":
            raise SpecError("--watch: name the suite to watch" if name is None else "--watch prints text, not json")
        from fatbench.cli import watch as watching

        watching.watch_plan(name, lambda store: plan_in(name, preset, smoke, seeds, where, store)[1], db, every)
        return
    if name is None and (preset or smoke or where or seeds):
        raise SpecError("--preset, --smoke, -k and --seeds choose cells of a suite: fatbench status NAME")
    with opened(db) as store:
        if name is None:
            counts = {} if store is None else progress.by_suite(store)
            if format == "json":
                print_json({"suites": [{"suite": s, "preset": p, "cells": c} for (s, p), c in counts.items()]})
            else:
                show.all_status(counts)
            return
        suite, plan = plan_in(name, preset, smoke, seeds, where, store)
        if store is not None:
            with suppress(FatbenchError):  # one who may only read the database
                labels.mark_current(suite, plan.preset, store)
        rows = progress.cells_of(plan, store)
        ids = [row.cell.id for row in rows]
        count_by_doubt = {} if store is None else doubts.cells_of(cell_rows.doubts_of(ids, store))
        if format == "json":
            cells = [{"id": row.cell.id, "key": row.cell.key, "status": row.status} for row in rows]
            changed = {row.cell.id: versions.as_dicts(row.changed) for row in rows if row.changed}
            summary = {"suite": plan.suite, "preset": plan.preset, "cells": progress.count(rows), "list": cells}
            print_json(
                {
                    **summary,
                    **({"changed": changed} if changed else {}),
                    **({"doubts": count_by_doubt} if count_by_doubt else {}),
                }
            )
        else:
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


def checkpoint(select: str) -> Checkpoint:
    """What --select names. SpecError: no such checkpoint."""
    from fatbench.suite import model

    if select not in model.CHECKPOINTS:
        raise SpecError(f"--select: no checkpoint is named '{select}'{did_you_mean(select, model.CHECKPOINTS)}")
    return cast("Checkpoint", select)


def _render_options(
    format: str,
    notes: str | None,
    published: str | None,
    width: str | None,
    spread: str | None,
    numbers: str | None,
) -> dict[str, str]:
    """What the format's renderer is told. SpecError: no such choice, or one that this format does not have."""
    from fatbench.api import known_choice
    from fatbench.report.formats.latex import NUMBERS, SPREADS, width_of
    from fatbench.report.tables.notes import LEVELS

    options = {}
    if notes is not None:
        known_choice("notes", notes, LEVELS)
        options["notes"] = notes
    if published not in (None, *PUBLISHED):
        raise SpecError(
            f"--published: expected {', '.join(PUBLISHED)}, got '{published}'{did_you_mean(str(published), PUBLISHED)}"
        )
    if published in ("below", "column"):
        if format not in ("latex", "terminal"):
            raise SpecError(f"--published {published}: only latex and terminal place the paper's numbers, not {format}")
        options["published"] = str(published)
    if spread is not None:
        known_choice("spread", spread, SPREADS)
        if format != "latex":
            raise SpecError(f"--spread {spread}: only latex places the spread over seeds, not {format}")
        options["spread"] = spread
    if numbers is not None:
        known_choice("numbers", numbers, NUMBERS)
        if format != "latex":
            raise SpecError(f"--numbers {numbers}: only latex sets numbers with siunitx, not {format}")
        options["numbers"] = numbers
    if width is not None:
        if format != "latex":
            raise SpecError(f"--width {width}: only latex has a width, not {format}")
        width_of(width)
        options["width"] = width
    return options


def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Suite names or files; default: every suite with results.", autocompletion=completing.suites
        ),
    ] = None,
    *,
    rows: Annotated[
        str | None,
        typer.Option("--rows", metavar="AXES", help="Combine the suites in one table with these rows: 'suite,method'."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option("--columns", metavar="LIST", help="Columns of that table: axes and metrics, 'natural,pgd20'."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="markdown, latex, csv, json, html or terminal; default: that of -o's ending, else markdown.",
            autocompletion=completing.one_of("markdown", "latex", "csv", "json", "html", "terminal"),
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file.")] = None,
    select: Select = "last",
    table: Annotated[
        list[str] | None, typer.Option("--table", metavar="ID", help="Show this table only; may be repeated.")
    ] = None,
    notes: Annotated[
        str | None,
        typer.Option(
            "--notes",
            help="Notes under a table: none, short (three lines) or full; default: short on a terminal and in LaTeX.",
            autocompletion=completing.one_of("none", "short", "full"),
        ),
    ] = None,
    digits: Annotated[int, typer.Option("--digits", min=0, max=6, help="Decimal places of percentages.")] = 2,
    published: Annotated[
        str | None,
        typer.Option(
            "--published",
            help="Published numbers: none, below ours, or in a column; default: what fits.",
            autocompletion=completing.one_of(*PUBLISHED),
        ),
    ] = None,
    images: Annotated[
        str,
        typer.Option(
            "--images",
            help="Test images of each number: all of its attack, or those that all attacks have in common.",
            autocompletion=completing.one_of("all", "common"),
        ),
    ] = "all",
    no_published: Annotated[bool, typer.Option("--no-published", help="Short for --published none.")] = False,
    width: Annotated[
        str | None,
        typer.Option(
            "--width",
            help="Width of LaTeX tables: article, llncs, neurips, ieee, acm, beamer, column, text, or points.",
            autocompletion=completing.one_of("article", "llncs", "neurips", "ieee", "acm", "beamer", "column", "text"),
        ),
    ] = None,
    spread: Annotated[
        str | None,
        typer.Option(
            "--spread",
            help="Spread over seeds in LaTeX: beside the number, below it, or none; default: what fits.",
            autocompletion=completing.one_of("beside", "below", "none"),
        ),
    ] = None,
    numbers: Annotated[
        str | None,
        typer.Option(
            "--numbers",
            help="Numbers in LaTeX: text, or siunitx for its S columns.",
            autocompletion=completing.one_of("text", "siunitx"),
        ),
    ] = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="COLUMN", help="Rows with the best of this heading or metric first.")
    ] = None,
    bom: Annotated[bool, typer.Option("--bom", help="Begin CSV with a byte-order mark, for spreadsheets.")] = False,
    differences: Annotated[
        str | None,
        typer.Option(
            "--differences",
            metavar="METRIC",
            help="One table of all methods, with the difference of each from the suite's baseline under this metric.",
        ),
    ] = None,
    with_evaluated: Annotated[
        bool, typer.Option("--with-evaluated", help="Add rows for models from `fatbench evaluate --like NAME`.")
    ] = False,
    runs: Runs = "",
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    db: Db = None,
) -> None:
    """Print tables: mean and spread over seeds, beside the published numbers.

    Example: fatbench report fat-baselines --preset cpu -k 'method in [FAT, SFAT]' --format latex
    """
    from fatbench import api
    from fatbench import report as reporting
    from fatbench.api.tables import DATA_FORMATS

    format = known_format(format or _format_of(output), reporting.FORMATS)
    if bom and format != "csv":
        raise SpecError(f"--bom: only csv has a byte-order mark, not {format}")
    style = _render_options(format, notes, "none" if no_published else published, width, spread, numbers)
    made = api.table(
        names or (), table, rows=name_list(rows), columns=name_list(columns), preset=named_preset(preset, smoke),
        select=checkpoint(select), published=not no_published and published != "none", where=named_filter(where),
        seeds=seeds, with_evaluated=with_evaluated, runs=runs, notes=style.pop("notes", None), digits=digits,
        images=images, sort=sort, differences=differences, db=db,
    )  # fmt: skip
    unmeasured = made.unmeasured if format not in DATA_FORMATS else []
    shown_suites = {grid.suite for grid in made.grids if grid not in unmeasured}
    for grid in unmeasured:
        if grid.suite not in shown_suites:  # the suite as a whole is said to have no numbers
            continue
        reason = f"nothing of it is measured yet (--table {grid.id} shows it)"
        print(f"fatbench: suite {grid.suite}, table {grid.id} is left out: {reason}", file=sys.stderr)
    text = made.page() if format == "html" else "\ufeff" * bom + made.text(format, **style)
    if output is None:
        sys.stdout.write(text)
        return
    write_text(output, text, output)


def plot(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Suite names or files; several are drawn in one figure.",
            show_default=False,
            autocompletion=completing.suites,
        ),
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option("--figure", metavar="ID", help="Draw this figure only; forest: all methods against the baseline."),
    ] = None,
    *,
    x: Annotated[
        str | None,
        typer.Option("--x", metavar="NAME", help="Draw your own figure over round, eps, client, or an axis (bars)."),
    ] = None,
    y: Annotated[str | None, typer.Option("--y", metavar="LIST", help="Metrics to draw: 'natural,pgd20'.")] = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="AXES", help="Axes that get a line or bar per label.")
    ] = None,
    cell: Annotated[
        str | None, typer.Option("--cell", metavar="ID", help="Draw the learning curves of this cell.")
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="pdf, svg, png, or csv for the numbers.",
            autocompletion=completing.one_of("pdf", "svg", "png", "csv"),
        ),
    ] = "pdf",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", callback=output_folder, help="Folder; default: results/figures (csv: stdout)."),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="For a paper: no notes; a text file beside it has the caption.")
    ] = False,
    width: Annotated[
        str | None,
        typer.Option(
            "--width",
            help="Width with --plain: column, text, or inches; default: text.",
            autocompletion=completing.one_of("column", "text"),
        ),
    ] = None,
    serif: Annotated[bool, typer.Option("--serif", help="Letters as in most papers (Times).")] = False,
    select: Select = "last",
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    db: Db = None,
) -> None:
    """Draw the figures of suites, or your own with --x round --y pgd20 --by method; prints the files written.

    Example: fatbench plot fat-baselines --figure forest
    """
    from fatbench import api, settings
    from fatbench import report as reporting
    from fatbench.report.figures import series

    known_format(format, PLOT_FORMATS)
    chosen_checkpoint, inches = checkpoint(select), _inches(plain, width)
    is_own = x is not None or y is not None or by is not None
    if figure is not None and is_own:
        raise SpecError("--figure cannot be combined with --x, --y and --by")
    if bool(names) == (cell is not None):
        raise SpecError("name a suite, or give --cell ID" if not names else "--cell cannot be combined with a suite")
    if cell is not None and (x or by or figure or preset or smoke or where or seeds):
        raise SpecError("--cell can only be combined with --y, --format, -o and --db")
    plots = []
    if figure == "forest":
        if format == "csv":
            raise SpecError("--figure forest: the numbers are those of fatbench compare --format json")
        with opened(db) as store:
            for name in names or ():
                chosen_suite, plan = plan_in(name, preset, smoke, seeds, where, store)
                if store is None or not store.known_cells(planned.id for planned in plan.cells):
                    raise NothingMatched(f"no figure of '{plan.suite}' can be drawn: {api.why_empty(plan, store, db)}")
                target_folder = output or FIGURES
                print(
                    reporting.draw_forest(
                        plan,
                        store,
                        target_folder,
                        format,
                        select=chosen_checkpoint,
                        width=inches,
                        serif=serif,
                        families=chosen_suite.tests,
                    )
                )
        return
    with opened(db) as store:
        if cell is not None:
            from fatbench.report.figures import adhoc_figures

            id = cell_in(store, cell, db)
            assert store is not None
            plots = adhoc_figures.curves(store, id, name_list(y), chosen_checkpoint)
        for name in names or ():
            chosen_suite, plan = plan_in(name, preset, smoke, seeds, where, store)
            if is_own:
                from fatbench.report.figures import adhoc_figures

                own_figure = adhoc_figures.figure(chosen_suite, plan, store, x, name_list(y), name_list(by))
                assert store is not None  # else nothing is measured
                plots += adhoc_figures.series_of(chosen_suite, plan, store, [own_figure], chosen_checkpoint)
                continue
            if not chosen_suite.figures:
                raise NothingMatched(f"suite '{chosen_suite.name}' has no figures: --x round --y natural draws one")
            suite_plots = reporting.build_figures(chosen_suite, plan, store, figure, select=chosen_checkpoint)
            for unknown_label in reporting.unknown(suite_plots, plan, store):
                print(f"fatbench: {unknown_label}", file=sys.stderr)
            plots += suite_plots
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
    files = settings.files_folder(settings.database(db))
    drawable = reporting.drawable(plots, files)
    if not drawable:
        with opened(db) as store:
            reason = "nothing of it is measured yet" if cell is not None else api.why_empty(plan, store, db)
        raise NothingMatched(f"no figure of '{called}' can be drawn: {reason}")
    for path in reporting.draw(drawable, output or FIGURES, format, files, inches, serif):
        print(path)


def _inches(plain: bool, width: str | None) -> float | None:
    """The width of a figure for a paper; None: it is not for a paper. SpecError: no such width."""
    from fatbench.report.figures.plots import COLUMN, TEXT

    if not plain:
        if width is not None:
            raise SpecError("--width needs --plain")
        return None
    try:
        inches = {"column": COLUMN, "text": TEXT, None: TEXT}.get(width) or float(str(width))
    except ValueError:
        inches = 0.0
    if not 1 <= inches <= 40:
        raise SpecError(f"--width: expected column, text, or 1 to 40 inches, got '{width}'")
    return inches
