"""`fatbench status`, `report` and `plot`: how far a suite is, its tables, its figures."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from fatbench.cli import completing
from fatbench.cli.common import FIGURES, cell_in, known_format, plan_in, print_json, write_text
from fatbench.cli.options import Db, Format, Preset, Seeds, Select, Smoke, Where
from fatbench.errors import NothingMatched, SpecError, did_you_mean
from fatbench.store.opening import opened

if TYPE_CHECKING:
    from fatbench.store.selection import Checkpoint

PUBLISHED = ("none", "below", "column")
PLOT_FORMATS = ("pdf", "svg", "png", "csv")


def status(
    name: Annotated[
        str | None,
        typer.Argument(help="A suite's name or file; none: all in the database.", autocompletion=completing.suites),
    ] = None,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again until nothing is left to do, with time left.")
    ] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 5.0,
    db: Db = None,
    format: Format = "text",
) -> None:
    """Progress: how many cells are done, failed, running, left."""
    from fatbench.cli import show
    from fatbench.runner import progress

    known_format(format, ("text", "json"))
    if watch:
        if name is None or format == "json":
            raise SpecError("--watch: give the suite to look at" if name is None else "--watch prints text, not json")
        from fatbench.cli import watch as watching

        watching.look(lambda store: plan_in(name, preset, smoke, seeds, where, store)[1], db, every)
        return
    with opened(db) as store:
        if name is None:
            counts = {} if store is None else progress.by_suite(store)
            if format == "json":
                print_json({"suites": [{"suite": s, "preset": p, "cells": c} for (s, p), c in counts.items()]})
            else:
                show.all_status(counts)
            return
        _, plan = plan_in(name, preset, smoke, seeds, where, store)
        rows = progress.of(plan, store)
        if format == "json":
            cells = [{"id": row.cell.id, "key": row.cell.key, "status": row.status} for row in rows]
            print_json({"suite": plan.suite, "preset": plan.preset, "cells": progress.count(rows), "list": cells})
        else:
            show.status(plan, rows)


def checkpoint(select: str) -> Checkpoint:
    """What --select names. SpecError: no such checkpoint."""
    from fatbench.suite import model

    if select not in model.CHECKPOINTS:
        raise SpecError(f"--select: no checkpoint is named '{select}'{did_you_mean(select, model.CHECKPOINTS)}")
    return cast("Checkpoint", select)


def known_replicates(which: str) -> str:
    """What --replicates names. SpecError: nothing does."""
    from fatbench.report.tables.replicate_selection import WHICH

    if which not in WHICH:
        raise SpecError(f"--replicates: expected first, latest or pool, got '{which}'{did_you_mean(which, WHICH)}")
    return which


def _listed(text: str | None) -> list[str]:
    """ "suite, method" as names."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _own(names: Collection[str]) -> list[str]:
    """The files in the working directory of suites that are not found by name; says which are nowhere."""
    files: dict[str, str] = {}
    for file in sorted(Path().glob("*.y*ml")):
        if found := re.search(
            r"^name: *['\"]?([^'\"\s#]+)", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
        ):
            files.setdefault(found[1], str(file))
    for name in sorted(names):
        if name not in files:
            print(
                f"fatbench: suite '{name}' has results, and its file is not here: fatbench report FILE", file=sys.stderr
            )
    return [files[name] for name in sorted(names) if name in files]


def _how(format: str, notes: str, published: str | None, width: str | None) -> dict[str, str]:
    """What the format's renderer is told. SpecError: no such choice, or one that this format does not have."""
    from fatbench.api import known_choice
    from fatbench.report.formats.latex_layout import width_of
    from fatbench.report.tables.notes import LEVELS

    known_choice("notes", notes, LEVELS)
    if published not in (None, *PUBLISHED):
        raise SpecError(
            f"--published: expected {', '.join(PUBLISHED)}, got '{published}'{did_you_mean(str(published), PUBLISHED)}"
        )
    how = {}
    if published in ("below", "column"):
        if format not in ("latex", "terminal"):
            raise SpecError(f"--published {published}: only latex and terminal place the paper's numbers, not {format}")
        how["published"] = str(published)
    if width is not None:
        if format != "latex":
            raise SpecError(f"--width {width}: only latex has a width, not {format}")
        width_of(width)
        how["width"] = width
    return how


def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names or files of suites; none: every suite with results.", autocompletion=completing.suites
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option("--rows", metavar="AXES", help="One table of all these suites: its rows, 'suite,method'."),
    ] = None,
    columns: Annotated[
        str | None, typer.Option("--columns", metavar="LIST", help="Its columns: axes and metrics, 'natural,pgd20'.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="markdown, latex, csv, json, html or terminal.",
            autocompletion=completing.one_of("markdown", "latex", "csv", "json", "html", "terminal"),
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file.")] = None,
    select: Select = "last",
    table: Annotated[
        list[str] | None, typer.Option("--table", metavar="ID", help="Only this table; may be given again.")
    ] = None,
    notes: Annotated[
        str,
        typer.Option(
            "--notes",
            help="Under a table: none, short or full.",
            autocompletion=completing.one_of("none", "short", "full"),
        ),
    ] = "full",
    digits: Annotated[int, typer.Option("--digits", min=0, max=6, help="After the point of percentages.")] = 2,
    published: Annotated[
        str | None,
        typer.Option(
            "--published",
            help="The paper's numbers: none, below ours, or a column; default: what fits.",
            autocompletion=completing.one_of(*PUBLISHED),
        ),
    ] = None,
    no_published: Annotated[bool, typer.Option("--no-published", help="Short for --published none.")] = False,
    width: Annotated[
        str | None,
        typer.Option(
            "--width",
            help="Of LaTeX: column or text of a two-column page, or points.",
            autocompletion=completing.one_of("column", "text"),
        ),
    ] = None,
    with_evaluated: Annotated[
        bool, typer.Option("--with-evaluated", help="Also rows of evaluated models: fatbench evaluate --like NAME.")
    ] = False,
    replicates: Annotated[
        str,
        typer.Option(
            "--replicates",
            help="Of a cell run more than once: first, latest, or pool (their mean).",
            autocompletion=completing.one_of("first", "latest", "pool"),
        ),
    ] = "first",
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    db: Db = None,
) -> None:
    """Tables: measured beside published, mean and spread over seeds."""
    from fatbench import api, settings
    from fatbench import report as reporting
    from fatbench.report.tables.combined import combine
    from fatbench.runner import progress
    from fatbench.suite import files
    from fatbench.suite.external_models import SUITE

    format = known_format(
        format or ("terminal" if sys.stdout.isatty() and output is None else "markdown"), reporting.FORMATS
    )
    at = checkpoint(select)
    which = known_replicates(replicates)
    how = _how(format, notes, "none" if no_published else published, width)
    with_published = not no_published and published != "none"
    with opened(db) as store:
        run = set() if names or store is None else {one for one, _ in progress.by_suite(store)}
        parts = [
            plan_in(one, preset, smoke, seeds, where, store)
            for one in names
            or [*(one for one in (*files.available(), SUITE) if one in run), *_own(run - {*files.available(), SUITE})]
        ]
        if parts and (rows is not None or columns is not None):
            parts = [combine(parts, _listed(rows), _listed(columns))]
        if table:
            parts = api.with_table(parts, table)
        shown = api.grids_of(
            parts, store, select=at, published=with_published, with_evaluated=with_evaluated, replicates=which,
            notes=notes, digits=digits,
        )  # fmt: skip
        grids = [grid for _, _, mine in shown for grid in mine]
        if not grids and not names:
            raise NothingMatched("the database holds no results yet: fatbench run suite NAME")
        if format == "html" and store is not None:
            from fatbench.report.site import pages

            found = [pages.Part(*one) for one in shown]
            kept = settings.files_folder(settings.database(db))
            text = pages.page(pages.content(found, store, select=at, which=which, files=kept))
        else:
            text = reporting.render(grids, format, **how)
    if output is None:
        sys.stdout.write(text)
        return
    write_text(output, text, output)


def plot(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names or files of suites; several: one image.", show_default=False, autocompletion=completing.suites
        ),
    ] = None,
    figure: Annotated[str | None, typer.Option("--figure", metavar="ID", help="Only this figure of the suite.")] = None,
    x: Annotated[
        str | None, typer.Option("--x", metavar="NAME", help="Without a figure: round, eps, client, or an axis (bars).")
    ] = None,
    y: Annotated[str | None, typer.Option("--y", metavar="LIST", help="Its numbers: 'natural,pgd20'.")] = None,
    by: Annotated[str | None, typer.Option("--by", metavar="AXES", help="What tells its lines or bars apart.")] = None,
    cell: Annotated[str | None, typer.Option("--cell", metavar="ID", help="The learning curves of one cell.")] = None,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="pdf, svg or png; csv: the numbers drawn.",
            autocompletion=completing.one_of("pdf", "svg", "png", "csv"),
        ),
    ] = "pdf",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder; default: results/figures, of csv stdout.")
    ] = None,
    select: Select = "last",
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    db: Db = None,
) -> None:
    """Figures of suites, or --x round --y pgd20 --by method of any; prints the files it wrote."""
    from fatbench import report as reporting
    from fatbench import settings
    from fatbench.report.figures import series

    known_format(format, PLOT_FORMATS)
    at = checkpoint(select)
    own = x is not None or y is not None or by is not None
    if figure is not None and own:
        raise SpecError("--figure names a figure of the suite; --x, --y and --by make one: give either")
    if bool(names) == (cell is not None):
        raise SpecError(
            "give a suite's name, or --cell ID" if not names else "--cell is of one cell: leave the suite out"
        )
    if cell is not None and (x or by or figure or preset or smoke or where or seeds):
        raise SpecError(
            "--cell draws the rounds of one cell: of the other options, --y, --format, -o and --db go with it"
        )
    plots = []
    with opened(db) as store:
        if cell is not None:
            from fatbench.report.figures import adhoc_figures

            id = cell_in(store, cell)
            assert store is not None
            plots = adhoc_figures.curves(store, id, _listed(y), at)
        for name in names or ():
            chosen, plan = plan_in(name, preset, smoke, seeds, where, store)
            if own:
                from fatbench.report.figures import adhoc_figures

                drawn = adhoc_figures.figure(chosen, plan, store, x, _listed(y), _listed(by))
                assert store is not None  # else nothing is measured
                plots += adhoc_figures.series_of(chosen, plan, store, [drawn], at)
                continue
            if not chosen.figures:
                raise NothingMatched(f"suite '{chosen.name}' has no figures: --x round --y natural draws one")
            here = reporting.build_figures(chosen, plan, store, figure, select=at)
            for missing in reporting.unknown(here, plan, store):
                print(f"fatbench: {missing}", file=sys.stderr)
            plots += here
    called = "-".join(dict.fromkeys(plot.suite for plot in plots)) or "no"
    plots = series.merged(plots)
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
    some = reporting.drawable(plots, files)
    if not some:
        about = f"the figures of '{called}' show ({plots[0].preset})" if plots else f"'{called}' shows"
        raise NothingMatched(f"nothing is measured of what {about}")
    for path in reporting.draw(some, output or FIGURES, format, files):
        print(path)
