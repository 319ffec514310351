"""Tables and figures: a query, then a grid or curves, then a format. Nothing here imports torch.

    numbers       reads numbers from the database: statistics, doubts, provenance, published values
    pairs         which cells are compared, and what was measured of them
    contrasts     A minus B, or a weighted sum, with interval and p: a row each
    sentences     what is said of a difference
    agreement     whether a repeated cell agrees with an exported one
    tables        a table before it is printed: which cell stands where, marks, notes
    formats       Markdown, LaTeX, HTML, CSV, JSON, terminal
    figures       curves, bars, matrices and images, drawn with matplotlib
    site          web pages: leaderboards, tables, the runs of every number
    audit         checks of published tables, from the printed numbers alone
    differences   each method's difference from the baseline
    references    the papers that a suite cites

Nothing here trains, attacks or writes to the database.

grids = build_tables(suite, plan, store, select="best-test")
print(render(grids, "latex"))
files = plots.draw(build_figures(suite, plan, store), Path("results/figures"), "pdf")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.errors import NothingMatched, SpecError, did_you_mean
from fatbench.store.selection import Checkpoint

if TYPE_CHECKING:
    from fatbench.report.figures.series import Plot
    from fatbench.report.tables.sheet import Sheet
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Cell, Plan
    from fatbench.suite.declared_contrasts import Tests
    from fatbench.suite.files import Suite

__all__ = [
    "FORMATS",
    "build_figures",
    "build_tables",
    "check",
    "check_headings",
    "draw_forest",
    "draw_table",
    "drawable",
    "left_out",
    "render",
    "unknown",
    "unlike",
]

FORMATS = ("markdown", "latex", "csv", "json", "html", "terminal")


def render(grids: Sequence[Sheet], format: str, notes: str | None = None, **options: Any) -> str:
    """Render grids in one of FORMATS; the text ends in a line break. options: see `latex.render`.

    notes: one of `notes.LEVELS`; None: short on a terminal and in LaTeX, else full. SpecError: an unknown format.
    """
    from fatbench.report.formats import html, latex, markdown, records, terminal
    from fatbench.report.tables.notes import IN_CAPTION, shortened

    renderers: dict[str, Callable[..., str]] = {
        "markdown": markdown.render, "latex": latex.render, "csv": records.render_csv, "json": records.render_json,
        "html": html.render, "terminal": terminal.render,
    }  # fmt: skip
    if format not in renderers:
        raise SpecError(f"no format is named '{format}'{did_you_mean(format, FORMATS)}")
    level = notes or ("short" if format in ("terminal", "latex") else "full")
    captioned = IN_CAPTION if format == "latex" else ()
    return renderers[format]([shortened(grid, level, captioned) for grid in grids], **options)


def build_tables(
    suite: Suite,
    plan: Plan,
    store: Store | None,
    *,
    select: Checkpoint = "last",
    published: bool = True,
    evaluated: Sequence[Cell] = (),
    digits: int = 2,
    images: str = "all",
) -> list[Sheet]:
    """Build the tables of a suite with the database's numbers of the plan's cells; without a database none is filled.

    evaluated: models that were not trained here (`evaluated.beside`), as further rows of each table. digits:
    after the point of percentages; images: "all" of each attack, or those in "common".
    """
    from fatbench.report import contrasts, sentences
    from fatbench.report.numbers import shown_runs
    from fatbench.report.numbers.points import with_added
    from fatbench.report.numbers.stored import read, stored
    from fatbench.report.tables.entries import sheets

    suite = with_added(suite, plan)
    if store is None:
        nothing = stored([], select, checkpoints=plan.checkpoints)
        return sheets(suite.tables, plan, nothing, published=published, digits=digits)
    evaluated = shown_runs.shown_plan(replace(plan, cells=list(evaluated), resolved=False), store).cells
    plan = shown_runs.shown_plan(plan, store)
    # the numbers of external models are read together with those of the plan
    plan_with_evaluated = replace(plan, cells=[*plan.cells, *evaluated])
    sources = [text for table in suite.tables for text in table.values.values()]
    numbers = read(sources, plan_with_evaluated, store, select)
    grids = sheets(suite.tables, plan, numbers, published=published, evaluated=evaluated, digits=digits, images=images)
    for grid in grids:
        if replicate_note := shown_runs.note(store, [id for _, id in grid.points]):
            grid.notes.append(("replicates", replicate_note))
    headline = contrasts.headline(suite.tests, plan, numbers.evaluated) if grids and not plan.where else None
    if headline is not None:
        grids[0].notes.append(("finding", f"{sentences.finding(headline)}; fatbench compare {suite.name}"))
    return grids


def check(suite: Suite, plan: Plan) -> None:
    """Refuse a table or figure that no numbers could fill, and published numbers that are none (SpecError).

    No numbers could fill a field that holds several points of the grid, for example. `check` asks this of every preset,
    `run`, `plan` and `report` of theirs.
    """
    from fatbench.report.numbers import points
    from fatbench.report.numbers.published import Lookup

    for display in (*suite.tables, *suite.figures):
        if display.reference is not None:
            Lookup(display.reference)  # its errors have the paper's file and line
    try:
        for table in suite.tables:
            points.points_of_table(plan, table)
        for figure in suite.figures:
            points.check_figure(plan, figure)
    except SpecError as error:
        raise SpecError(f"{suite.file}: {error} ({plan.preset})") from None


def check_headings(suite: Suite, plans: Sequence[Plan]) -> None:
    """Refuse a heading that no cell of any preset can fill, and a declared metric that none has (SpecError)."""
    from fatbench.report import contrasts
    from fatbench.report.numbers import points
    from fatbench.report.numbers.sources import Source
    from fatbench.suite.facts import fractions

    metrics = dict.fromkeys(metric for plan in plans for metric in plan.metrics())
    taken_out = {label for label, attack in suite.contents.evaluate.attacks.items() if attack is None}
    metrics |= dict.fromkeys(taken_out)  # of what the suite extends; its tables and tests do without
    for family, metric in ((tests, metric) for tests in suite.tests for metric in tests.metric_names()):
        if metric not in metrics:
            keys, _ = suite.node("tests", family.family or "")
            location = suite.places((*keys, "metrics" if metric in (family.metrics or ()) else "contrasts"))
            raise SpecError(f"{location}: no preset evaluates '{metric}'{did_you_mean(metric, metrics)}")
    for tests in suite.tests:
        sides = [contrasts.sides_of(tests, plan) for plan in plans]
        location = suite.places(suite.node("tests", tests.family or "")[0])
        if tests.clients is not None and tests.clients not in fractions():
            hint = did_you_mean(tests.clients, fractions())
            raise SpecError(f"{location}: no fraction is called '{tests.clients}'{hint}")
        for name in tests.points:
            if not any(all(of_plan[name]) for of_plan in sides):
                raise SpecError(f"{location}: no preset has both sides of '{name}'")
    for table in suite.tables:
        shown = [plan for plan in plans if points.points_of_table(plan, table)]
        unfilled = [(plan.preset, points.unfilled(plan, table)) for plan in shown]
        for heading in table.values:
            preset_reasons = [f"{preset}: {reasons[heading]}" for preset, reasons in unfilled if heading in reasons]
            if not taken_out.isdisjoint(Source.parse(table.values[heading]).metric.split("+")):
                continue
            if unfilled and len(preset_reasons) == len(unfilled):
                problem = f"no cell can fill this heading of table {table.id}"
                location = suite.places((*suite.node("tables", table.id)[0], "values", heading))
                raise SpecError(f"{location}: {problem} ({'; '.join(preset_reasons)})")


def unlike(suite: Suite, plans: Sequence[Plan]) -> list[tuple[str, str]]:
    """(presets, sentence) of each confounder: settings besides the labels in which compared rows differ."""
    from fatbench.report.numbers import points
    from fatbench.suite import confounders

    presets: dict[str, list[str]] = {}  # sentence -> presets
    for plan in plans:
        confounding = [
            *(
                confounder
                for table in suite.tables
                for confounder in points.find_confounders(
                    plan, points.spread(table, plan), points.points_of_table(plan, table)
                )
            ),
            *confounders.against(plan.cells, plan.baseline),
        ]
        for sentence in confounders.sentences(confounding):
            presets.setdefault(sentence, []).append(plan.preset)
    return [(", ".join(names), sentence) for sentence, names in presets.items()]


def left_out(suite: Suite, plan: Plan) -> list[str]:
    """One line for each table that is not shown because no cell of this preset can fill any of its headings."""
    from fatbench.report.numbers import points

    lines = []
    for table in suite.tables:
        reasons_by_heading = points.unfilled(plan, table)
        if reasons_by_heading and all(heading in reasons_by_heading for heading in points.spread(table, plan).values):
            reasons = "; ".join(dict.fromkeys(reasons_by_heading.values()))
            lines.append(f"suite {suite.name}, table {table.id} is left out of preset {plan.preset}: {reasons}")
    return lines


def build_figures(
    suite: Suite, plan: Plan, store: Store | None, figure_id: str | None = None, *, select: Checkpoint = "last"
) -> list[Plot]:
    """Build the figures of a suite, or the one with an id, from the database. SpecError: an unknown id."""
    from fatbench.report.figures import series
    from fatbench.report.numbers import shown_runs
    from fatbench.report.numbers.stored import stored

    ids = [figure.id for figure in suite.figures]
    if figure_id is not None and figure_id not in ids:
        known = [*ids, "forest", *(table.id for table in suite.tables)]  # a table is drawn as a heat map
        raise SpecError(f"suite '{suite.name}' has no figure '{figure_id}'{did_you_mean(figure_id, known)}")
    figures = [figure for figure in suite.figures if figure_id in (None, figure.id)]
    if store is None:
        return series.build(suite, plan, stored([], select, checkpoints=plan.checkpoints), figures)
    return series.drawn_from(suite, shown_runs.shown_plan(plan, store), store, figures, select)


def drawable(plots: Sequence[Plot], files: Path) -> list[Plot]:
    """The plots with a measured number or an artifact on this machine. files: where the cells' folders are."""
    return [
        plot
        for plot in plots
        if not plot.empty
        or any(
            line.source.stage == "artifact" and (files / cell / "artifacts").is_dir()
            for line in plot.lines
            for cell in line.cells
        )
    ]


def unknown(plots: Sequence[Plot], plan: Plan, store: Store | None) -> list[str]:
    """One line for each number of a figure that training never logged, although it has logged others."""
    from fatbench.report.numbers.stored import logged_clients

    missing_series = {
        (plot.figure.id, heading, text.removeprefix("train:").split("[")[0])
        for plot in plots
        for heading, text in plot.figure.series.items()
        if text.startswith("train:") and not any(line.points for line in plot.lines if line.heading == heading)
    }
    logged_metrics = [name for name, _ in logged_clients(plan, store)] if missing_series and store is not None else []
    return [
        f"figure {id}: {heading}: nothing is logged as '{metric}'{did_you_mean(metric, logged_metrics)}"
        for id, heading, metric in sorted(missing_series)
        if logged_metrics and metric not in logged_metrics
    ]


def draw_forest(
    plan: Plan, store: Store, folder: Path, format: str, *, select: Checkpoint, width: float | None,
    serif: bool = False, families: Sequence[Tests] = (),
) -> Path:  # fmt: skip
    """Write the forest plot of a suite: its methods against the baseline. NothingMatched: no cells can be compared."""
    from fatbench.report import contrasts
    from fatbench.report.figures import forest, plots
    from fatbench.report.numbers import shown_runs, table_facts
    from fatbench.report.numbers.stored import read
    from fatbench.report.tables.sheet import label

    if plan.baseline is None:
        raise NothingMatched(f"'{plan.suite}' names no baseline to compare with: write 'baseline: LABEL' in its file")
    plan = shown_runs.shown_plan(plan, store)
    numbers = read(plan.metrics(), plan, store, select)
    declared = contrasts.declared_by(families, plan, numbers.evaluated)
    differences = contrasts.from_baseline(plan, numbers.evaluated, declared=declared)
    if not differences:
        raise NothingMatched(f"'{plan.suite}', preset {plan.preset}, has no two methods with the same evaluation")
    stages = [(cell, number.stage) for cell in plan.cells for number in numbers.evaluated(cell.id).values()]
    facts = table_facts.Facts(row for cell, stage in stages for row in numbers.behind(cell, stage, "", 0))
    origin = [f"suite: {plan.suite}, preset {plan.preset}"]
    for name in ("commit", "device", "precision"):
        origin.append(f"{name}: {', '.join(sorted(facts.values(name)))}")
    caption, file = forest.caption(differences, label(plan)), folder / f"{plan.suite}-{forest.ID}{plan.ending}.{format}"
    with plots.settings(**plots.SERIF if serif else {}):
        figure = forest.figure_of(differences, plan.metrics(), label(plan), width)
        said = f"{'; '.join(origin)}; {caption}"
        return plots.save(figure, file, forest.title(differences), said, None if width is None else f"{caption}\n")


def draw_table(
    suite: Suite, plan: Plan, store: Store, id: str, folder: Path, format: str, *, select: Checkpoint,
    width: float | None, serif: bool = False,
) -> Path:  # fmt: skip
    """Write the table of an id as a heat map. NothingMatched: nothing of it is measured."""
    from fatbench.report.figures import heat_map, plots

    sheets = build_tables(suite.with_tables([id]), plan, store, select=select, published=False)
    if not sheets or not any(entry.mean is not None for entry in sheets[0].all()):
        raise NothingMatched(f"nothing of table {id} of '{plan.suite}', preset {plan.preset}, is measured yet")
    (sheet,) = sheets
    notes = "; ".join(f"{name}: {text}" for name, text in sheet.notes)
    with plots.settings(**plots.SERIF if serif else {}):
        figure = heat_map.figure_of(sheet, width)
        file = folder / f"{plan.suite}-{id}{plan.ending}.{format}"
        return plots.save(figure, file, sheet.title, notes, None if width is None else f"{sheet.title}\n")
