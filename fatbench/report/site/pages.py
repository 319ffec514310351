"""Pages that open from disk: one file for a report, a folder for a whole database.

    page(parts, store)              one file with its scripts in it
    site(parts, store, folder)      index.html, a file for each suite, and the script that they share

Everything a page needs stands in it; its policy lets the browser fetch nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench import whole_file
from fatbench.report.figures import charts, panel_kinds, series
from fatbench.report.formats import html, latex
from fatbench.report.numbers.compare import signed
from fatbench.report.site import drilldown
from fatbench.report.site import leaderboards as leaderboards
from fatbench.report.site.drilldown import GridPoint
from fatbench.report.site.leaderboards import Board
from fatbench.report.tables import number_format
from fatbench.report.tables.grid import Column, Grid, Row, Value
from fatbench.store.replicates import SIGN
from fatbench.store.selection import WORDS, Checkpoint
from fatbench.suite.cells import Plan
from fatbench.suite.files import Suite
from fatbench.suite.papers import LINKS, paper_of
from fatbench.suite.tables import KEPT, SERIES
from fatbench.version import __version__

if TYPE_CHECKING:
    from fatbench.store.stages import Store

SCRIPT = "fatbench.js"
GENERATOR = '<meta name="generator" content="fatbench">'  # in every page that this program has written
LABELLED = 12  # dots that have their names beside them
IMAGES = 2_500_000  # characters of images on a page
Counts = Mapping[str, int]  # "measured", "failed", ... -> cells


@dataclass
class Part:
    """One preset of a suite, with its tables."""

    suite: Suite
    plan: Plan
    grids: list[Grid]
    counts: Counts = field(default_factory=dict)
    measured: frozenset[str] = frozenset()  # ids of the cells that have run

    @property
    def file(self) -> str:
        """Its page: no two parts have the same, and none is called as the index is."""
        preset = "" if self.plan.preset == "paper" else f"-{self.plan.preset}"
        name = re.sub(r"[^A-Za-z0-9.-]", lambda c: f"_{ord(c[0]):x}_", f"{self.plan.suite}{preset}")
        return "index_.html" if name == "index" else f"{name}.html"


@dataclass
class Content:
    """What a page of some parts holds."""

    parts: list[Part]
    boards: list[Board]
    plots: list[tuple[series.Plot, list[str]]]  # with its images; a chart has none
    points: dict[tuple[str, ...], GridPoint]


def content(
    parts: Sequence[Part],
    store: Store,
    *,
    select: Checkpoint = "last",
    files: Path | None = None,
    images: Path | None = None,
) -> Content:
    """Read all that a page shows. files: where the cells' folders are; images: a folder of what was drawn before."""
    from fatbench.report import build_figures

    pairs = [(part.suite, part.plan) for part in parts]
    grids = [grid for part in parts for grid in part.grids]
    found = leaderboards.boards(pairs, grids, store, select)
    plots = [plot for suite, plan in pairs for plot in build_figures(suite, plan, store, select=select)]
    places = drilldown.points_of(grids, (board.grid for board in found))
    drilldown.fill(list(places.values()), store, files, drilldown.images_in(images) if images else {})
    places = {cells: point for cells, point in places.items() if point.seeds}
    drawn = {file.stem: file for file in sorted(images.rglob("*.png"))} if images else {}
    shown = [(plot, _drawn(plot, files, drawn) if plot.figure.kind in KEPT else []) for plot in plots]
    shown = [(plot, made) for plot, made in shown if made or not plot.empty]
    keep_within(places.values(), IMAGES - sum(len(uri) for _, made in shown for uri in made))
    return Content(list(parts), found, shown, places)


def _drawn(plot: series.Plot, files: Path | None, drawn: Mapping[str, Path]) -> list[str]:
    """The images of a figure of what rounds kept, as data URIs: drawn of the cells' folders, or before."""
    from fatbench.report import drawable
    from fatbench.report.figures import plots as drawing

    if files is not None and drawable([plot], files):
        with tempfile.TemporaryDirectory(prefix="fatbench-") as folder:
            return [drilldown.uri(file) for file in drawing.draw([plot], Path(folder), "png", files)]
    return [drilldown.uri(drawn[name]) for name in drawing.names(plot) if name in drawn]


def keep_within(places: Iterable[GridPoint], left: int) -> None:
    """Leave out images that would make the page larger than what is left, and say so."""
    for point in places:
        kept = []
        for caption, uri in point.images:
            left -= len(uri)
            if left > 0:
                kept.append((caption, uri))
        if len(kept) < len(point.images):
            point.commands.append(
                f"fatbench show {point.cells[0]} --artifacts   # images that were too large to include here"
            )
        point.images = kept


# --- one file, a folder ------------------------------------------------------------------------------------------


def page(what: Content, commit: str = "") -> str:
    """One file that holds its script; commit: of the code that writes it."""
    script = _script()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {charts.hashed(script)}"
    return _suite_page(what, f"<script>{script}</script>", policy, commit, 0)


def site(
    parts: Sequence[Part],
    read: Callable[[Sequence[Part]], Content],
    folder: Path,
    problems: Sequence[str],
    commit: str = "",
    every: int = 0,
) -> list[Path]:
    """Write the folder: the files, the index first. Pages of ours that are none of them are removed.

    read: `content` of some parts; commit: of the code that writes; every: seconds after which a browser reads a page
    again, or 0. SpecError: it cannot be written.
    """
    tag = f'<script src="{SCRIPT}"></script>'
    # a page on disk is of no origin: only the scheme can be named
    policy = "default-src 'none'; img-src data: 'self' file:; style-src 'unsafe-inline'; script-src 'self' file:"
    written: dict[str, str] = {}
    image_files: dict[str, bytes] = {}
    links: dict[tuple[str, ...], str] = {}
    several: list[Content] = []
    for part in parts:
        one = read([part])
        several.append(one)
        links |= {cells: f"{part.file}#{point.anchor}" for cells, point in one.points.items()}
        others = [(other.file, _name(other)) for other in parts if other is not part]
        written[part.file] = _in_files(_suite_page(one, tag, policy, commit, every, "index.html", others), image_files)
    found = read(parts).boards if len(parts) > 1 else several[0].boards
    views = [_board(board, links) for board in found]
    papers: dict[str, list[dict[str, Any]]] = {}
    for part in sorted(parts, key=lambda part: leaderboards.paper_order(part.plan.suite)):
        row = {
            "file": part.file, "name": part.plan.suite, "title": part.suite.title, "preset": part.plan.preset,
            "cells": len(part.plan.unique()), "measured": part.counts.get("measured", 0),
            "failed": part.counts.get("failed", 0),
        }  # fmt: skip
        papers.setdefault(paper_of(part.plan.suite), []).append(row)
    planned = {cell.id.partition(SIGN)[0] for part in parts for cell in part.plan.cells}
    measured = frozenset[str]().union(*(part.measured for part in parts))
    days = [run["started"][:10] for one in several for point in one.points.values() for run in point.runs]
    last = f", the last on {max(days)}" if days else ""
    index = html.framed(
        "index.html",
        title="fatbench: results",
        heading="Results",
        lead="fatbench trains, attacks and compares methods of federated adversarial training, and keeps what produced"
        f" every number. {len(parts)} suite{'s' * (len(parts) != 1)}: {len(measured)} of {len(planned)} cells have run"
        f"{last}."
        " A cell is one experiment: data, split, model, method and seed.",
        label=_shared_label(board.grid for board in found),
        foot=_foot(commit),
        every=every,
        overview=[_overview(board) for board in found],
        papers=papers,
        links=LINKS,
        problems=list(problems),
        boards=views,
        places=[*([("Leaderboards", "#leaderboards")] if views else []), ("Suites", "#suites")],
        script=_safe(tag),
        policy=policy,
        data=_data(found, [], [], links),
    )
    files = {SCRIPT: _script(), **written, "index.html": index}  # what the index links to is there before it
    for name, image in image_files.items():
        whole_file.write(folder / name, image, f"-o {folder}", make_folder=True)
    for name, body in files.items():
        whole_file.write(folder / name, body, f"-o {folder}", make_folder=True)
    for file in sorted(folder.glob("*.html")):  # of a suite whose cells were deleted: nothing links to it any more
        if file.name not in files and GENERATOR in file.read_text(encoding="utf-8", errors="replace"):
            file.unlink()
    return [folder / "index.html", *(folder / name for name in written), folder / SCRIPT]


def _overview(board: Board) -> dict[str, Any]:
    """A board in a line: its question, what its numbers come to, the best, and the difference that answers it."""
    row = board.rows[0]
    value, column = row.values[0][board.sorted_by], board.grid.columns[board.sorted_by]
    best = ", ".join(label for axis in board.axes if (label := row.key.get(axis, "")))
    one = board.answer
    test = one.comparison.test if one is not None else None
    return {
        "id": board.id, "question": board.title, "sentence": board.sentence.replace(" -", " \u2212"),
        "paper": paper_of(board.suites[0]).partition(" (")[0], "best": best,
        "number": "" if value.mean is None else f"{number_format.entry(value, column).number} {column.heading}",
        "difference": signed(one.comparison.difference).replace("-", "\u2212") if one is not None else "",
        "who": "" if one is None else f"{one.label} \u2212 {one.baseline}",
        "interval": "" if test is None else f"{signed(test.low)} to {signed(test.high)}".replace("-", "\u2212"),
        "seeds": len(value.seeds) if one is None else len(one.comparison.seeds),
    }  # fmt: skip


def _name(part: Part) -> str:
    return part.plan.suite + (f", {part.plan.preset}" if part.plan.preset != "paper" else "")


def _in_files(page: str, image_files: dict[str, bytes]) -> str:
    """The page with its images as files beside it, which are added to `image_files`."""

    def named(found: re.Match[str]) -> str:
        image = base64.b64decode(found[1])
        name = f"images/{hashlib.sha256(image).hexdigest()[:16]}.png"
        image_files[name] = image
        return f'src="{name}"'

    return re.sub(r'src="data:image/png;base64,([A-Za-z0-9+/=]+)"', named, page)


def _shared_label(grids: Iterable[Grid]) -> str:
    """The warning that all tables of a page have: it is shown once."""
    labels = {grid.label for grid in grids}
    return labels.pop() if len(labels) == 1 else ""


def _foot(commit: str) -> str:
    return f"fatbench {__version__}{f', commit {commit}' * bool(commit)}, MIT licence"


def _suite_page(
    what: Content,
    script: str,
    policy: str,
    commit: str,
    every: int,
    home: str = "",
    others: Sequence[tuple[str, str]] = (),
) -> str:
    links = {cells: f"#{point.anchor}" for cells, point in what.points.items()}
    one = what.parts[0] if len(what.parts) == 1 else None
    names = [part.plan.suite for part in what.parts]
    tables = [
        html.table(grid, links, f"table-{i}-{_slug(grid.id)}", latex.render([grid]))
        for i, grid in enumerate(grid for part in what.parts for grid in part.grids)
    ]
    plots = [_figure(plot, f"figure-{i}-{plot.figure.id}", made) for i, (plot, made) in enumerate(what.plots)]
    facts = []
    for part in what.parts:
        note = f" {part.plan.note}." if part.plan.note else ""
        facts.append(
            f"{part.plan.suite}, preset {part.plan.preset}: {len(part.plan.unique())} cells.{note}".replace("..", ".")
        )
    places = [("Leaderboards", "#leaderboards")] if what.boards else []
    places += [("Tables", "#tables")] if what.boards or plots else []
    places += [("Figures", "#figures")] if plots else []
    return html.framed(
        "suite.html",
        title=f"fatbench: {', '.join(names)}",
        heading=one.suite.title if one else f"fatbench: {', '.join(names)}",
        lead=one.suite.description if one else "",
        facts=facts,
        label=_shared_label([grid for part in what.parts for grid in part.grids]),
        others=others,
        links=LINKS.get(paper_of(names[0]), {}) if one else {},
        foot=_foot(commit),
        every=every,
        boards=[_board(board, links) for board in what.boards],
        tables=tables,
        figures=plots,
        points=list(what.points.values()),
        places=places,
        home=home,
        script=_safe(script),
        policy=policy,
        data=_data(what.boards, plots, what.points.values(), links),
    )


def _script() -> str:
    # the library's own names stay inside it
    return f"(function () {{\n{charts.vega()}\n}})();\n{html.file('page.js')}"


def _safe(markup: str) -> Any:
    """A script element that we wrote."""
    import markupsafe

    return markupsafe.Markup(markup)


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name)


def _data(
    boards: Iterable[Board],
    plots: Iterable[Mapping[str, Any]],
    places: Iterable[GridPoint],
    links: html.Links,
) -> dict[str, Any]:
    """What the script reads: the charts' specifications and rows, the curves of each point."""
    drawn = {board.id: chart for board in boards if (chart := _against(board, links))}
    drawn |= {f"{board.id}-forest": chart for board in boards if (chart := _forest(board, links))}
    return {
        "colours": charts.COLOURS,
        "spec": charts.lines("round", ""),
        "charts": {**drawn, **{plot["id"]: plot["chart"] for plot in plots if plot["chart"]}},
        "points": {point.anchor: point.series for point in places if point.series},
    }


# --- leaderboards ------------------------------------------------------------------------------------------------


def _board(board: Board, links: html.Links) -> dict[str, Any]:
    grid = board.grid
    rows = [
        {
            "labels": [row.key.get(axis, "") for axis in board.axes],
            "numbers": [
                html.cell(value, column, links) for value, column in zip(row.values[0], grid.columns, strict=True)
            ],
            "difference": _difference(board, row),
        }
        for row in board.rows
    ]
    columns = [
        {
            "heading": column.heading,
            "best": "min" if column.best == "min" else "max",
            "sorted": ("ascending" if column.best == "min" else "descending") if position == board.sorted_by else "",
        }
        for position, column in enumerate(grid.columns)
    ]
    pair = _pair(board)
    published = f" Published: {grid.published_at}." * bool(grid.published_at)
    title = "" if pair is None else f"{grid.columns[pair[1]].heading} against {grid.columns[pair[0]].heading}"
    if title:
        title += ": a dot for each row, ± standard deviation" + "; a ring for what is published" * (
            grid.has_published and not grid.label
        )
    return {
        "id": board.id, "title": board.title, "about": f"{board.about} Numbers: {WORDS[grid.select]}." + published,
        "label": grid.label, "region": f"{board.title} ({', '.join(board.suites)}, {board.preset})",
        "axes": board.axes, "choices": board.choices, "columns": columns, "rows": rows, "grid": grid,
        "published": grid.has_published, "chart": _against(board, {}) is not None, "chart_title": title,
        "latex": latex.render([replace(grid, rows=board.rows)]),
        "sentence": board.sentence.replace(" -", " \u2212"), "against": _heading(board),
        "forest": _forest(board, {}) is not None,
    }  # fmt: skip


def _heading(board: Board) -> str:
    """Of the column of differences; empty: there is none."""
    if not board.differences:
        return ""
    baselines = ", ".join(dict.fromkeys(one.baseline for one in board.differences))
    return f"{board.grid.columns[board.sorted_by].heading}: points from {baselines} (95 %, not corrected)"


def _difference(board: Board, row: Row) -> dict[str, Any] | None:
    """A row's difference from its baseline with its interval, in points."""
    one = leaderboards.difference(board, row)
    if one is None or (test := one.comparison.test) is None:
        return None
    said = f"({signed(test.low)} to {signed(test.high)})".replace("-", "\u2212")
    return {"raw": one.comparison.difference, "number": signed(one.comparison.difference).replace("-", "\u2212"),
            "interval": said}  # fmt: skip


def _forest(board: Board, links: html.Links) -> dict[str, Any] | None:
    """The differences of the rows from their baselines, in points: a dot and an interval a row."""
    rows = []
    for row in board.rows:
        value = row.values[0][board.sorted_by]
        one = leaderboards.difference(board, row)
        if one is not None and one.comparison.test is not None:
            name = ", ".join(label for axis in board.axes if (label := row.key.get(axis, "")))
            low, high = 100 * one.comparison.test.low, 100 * one.comparison.test.high
            rows.append([name, 0, 100 * one.comparison.difference, low, high, links.get(value.cells, "")])
    if not rows:
        return None
    spec = charts.forest(_heading(board).partition(": ")[2], len(rows))
    return {"spec": spec, "fields": (*charts.FIELDS, "href"), "panels": [rows], "names": []}


def _pair(board: Board) -> tuple[int, int] | None:
    """The columns of clean accuracy and of accuracy under the strongest attack, if there are both."""
    names = [column.metric for column in board.grid.columns]
    if "natural" not in names or names[board.sorted_by] == "natural":
        return None
    if board.grid.columns[board.sorted_by].unit != "percent":
        return None
    return names.index("natural"), board.sorted_by


def _against(board: Board, links: html.Links) -> dict[str, Any] | None:
    """Robust against clean accuracy, in per cent: a point a row, a ring what is published."""
    if (pair := _pair(board)) is None:
        return None
    x, y = (board.grid.columns[position] for position in pair)
    fields = ("name", "kind", "x", "mean", "low", "high", "left", "right", "href", "corner")
    rows: list[list[Any]] = []
    for row in board.rows:
        a, b = (row.values[0][position] for position in pair)
        name = ", ".join(label for axis in board.axes if (label := row.key.get(axis, "")))
        if a.mean is not None and b.mean is not None:
            href = links.get(b.cells, "")
            rows.append([name, "measured", 100 * a.mean, 100 * b.mean, *_whisker(b, y), *_whisker(a, x), href])
        if a.published is not None and b.published is not None and not board.grid.label:  # else not comparable
            across, up = 100 * a.published, 100 * b.published
            rows.append([name, "published", across, up, up, up, across, across, ""])
    if not rows:
        return None
    corners, named = [0] * len(rows), set[int]()
    if len(rows) <= LABELLED:  # the search for free corners is quadratic, and more names than these are unreadable
        shown = [(min(row[low] for row in rows), max(row[high] for row in rows)) for low, high in ((6, 7), (4, 5))]
        corners = charts.corners([(row[0], row[2], row[3]) for row in rows], *shown)
        named = {corner for row, corner in zip(rows, corners, strict=True) if row[1] == "measured"}
    rows = [[*row, corner] for row, corner in zip(rows, corners, strict=True)]
    spec = charts.against(f"{x.heading} (%)", f"{y.heading} (%)", {str(row[1]) for row in rows}, named)
    return {"spec": spec, "fields": fields, "panels": [rows], "names": []}


def _whisker(value: Value, column: Column) -> tuple[float, float]:
    assert value.mean is not None
    scale, spread = (100.0 if column.unit == "percent" else 1.0), value.std or 0.0
    return scale * (value.mean - spread), scale * (value.mean + spread)


# --- figures -----------------------------------------------------------------------------------------------------


def _figure(plot: series.Plot, id: str, images: list[str]) -> dict[str, Any]:
    """A figure of the suite: its images, or a chart for each panel."""
    panels = [panel for panel in plot.panels if any(line.points for line in panel.lines)]
    chart = None
    if panels and plot.figure.kind not in KEPT:
        chart = (_heat if plot.figure.kind in ("raster", "matrix") else _chart)(plot, panels)
    return {
        "id": id, "figure": plot.figure.id, "title": plot.figure.title, "label": plot.label,
        "panels": [{"title": ", ".join(label for label in panel.key.values() if label)} for panel in panels],
        "images": images, "notes": [note for note in plot.notes if note[0] != "suite"], "chart": chart,
    }  # fmt: skip


def _heat(plot: series.Plot, panels: Sequence[series.Panel]) -> dict[str, Any]:
    """A rectangle a number. Of a raster rounds along and an index down, with its sum; of a matrix headings along."""
    rows: list[list[list[Any]]] = []
    raster = plot.figure.kind == "raster"
    for panel in panels:
        lines = [line for line in panel.lines if line.points]
        if raster:
            lines = sorted(lines, key=lambda line: line.index or 0)
            seed = min(seed for line in lines for point in line.points for seed in point.seeds)
            rows.append([[f"{line.place}: {math.fsum(point.mean for point in line.points):.3g} in all", point.round,
                          *[drilldown.rounded(point.values[point.seeds.index(seed)])] * 3]
                         for line in lines for point in line.points if seed in point.seeds])  # fmt: skip
        else:
            rows.append([[panel_kinds.row_name(line), line.heading,
                          *[drilldown.rounded((100 if line.source.fraction else 1) * line.points[-1].mean)] * 3]
                         for line in lines])  # fmt: skip
    first, every = panels[0].lines[0], [row for panel in rows for row in panel]
    numbers = [row[2] for row in every]
    size = max(len({row[0] for row in panel}) for panel in rows), len({row[1] for row in every})
    if raster:
        spec = charts.heat("round", first.source.indexed, size, max(*numbers, 1e-12))
    else:
        least, most = (0.0, 100.0) if first.source.fraction else (min(numbers), max(numbers))
        spec = charts.heat("", "", size, most, least)
    return {"spec": spec, "fields": charts.FIELDS, "panels": rows, "names": []}


def _chart(plot: series.Plot, panels: Sequence[series.Panel]) -> dict[str, Any]:
    """Lines or bars, a panel each, and one legend."""
    figure = plot.figure
    shown = [line for panel in plot.panels for line in panel.lines if line.points]
    styles = {line_name(plot, line): (0, 0) for line in shown}
    parts = {line_name(plot, line): _parts(plot, line) for line in shown}
    # where two parts vary, the first is the colour and the second the dashes
    varying = [i for i in range(3) if len({part[i] for part in parts.values()}) > 1]
    for name, part in parts.items():
        seen = [list(dict.fromkeys(other[i] for other in parts.values())).index(part[i]) for i in varying[:2]]
        two = len(varying) == 2 and len({other[varying[1]] for other in parts.values()}) <= len(charts.DASHES)
        position = list(parts).index(name)
        dashes = position % len(charts.DASHES)  # a line has its own dashes too: grey print has no colours
        styles[name] = (seen[0], seen[1]) if two else (position, dashes)
    headings = list(dict.fromkeys(line.heading for line in shown))
    apart = SERIES in figure.panels  # panels of several units
    unit = " (%)" if shown[0].source.fraction else ""
    y = "" if apart else f"{headings[0]}{unit}" if len(headings) == 1 else figure.ylabel or unit.strip(" ()")
    rows = [
        [row for line in panel.lines if line.points for row in _rows(line, line_name(plot, line), figure.kind)]
        for panel in panels
    ]
    every = [value for panel in rows for row in panel for value in row[2:] if value is not None]
    low, high = min(every), max(every)
    alike = not apart and len(rows) > 1 and low < high
    if figure.kind == "lines":
        over_radius = any(point.radius for line in shown for point in line.points)
        x = "radius of the attack" if over_radius else figure.xlabel
        log = figure.scale == "log"
        spec = charts.lines(x, y, styles, log, not over_radius, (low, high) if alike and not log else None)
    else:
        indexed = next((line.source.indexed for line in shown if line.index is not None), "")
        mark = "published" if figure.published else "formula"
        spec = charts.bars(indexed, y, styles, (min(0, low), high) if alike else None, mark)
    names = [[name, charts.colour_of(hue), dashes] for name, (hue, dashes) in styles.items()]
    fields = charts.FIELDS if figure.kind == "lines" else charts.BARS
    return {"spec": spec, "fields": fields, "panels": rows, "names": names}


def _parts(plot: series.Plot, line: series.Line) -> tuple[str, str, str]:
    """What tells a line from others: labels, heading, index; of a bar less what stands under it."""
    lines = plot.figure.kind == "lines"
    index = f"{line.source.indexed} {line.place}" if line.place else ""
    labels = ", ".join(line.key.values()) if lines or index else ""
    return labels, "" if SERIES in plot.figure.panels else line.heading, index if lines else ""


def line_name(plot: series.Plot, line: series.Line) -> str:
    """The name of a line in the legend: what varies."""
    every = [_parts(plot, one) for panel in plot.panels for one in panel.lines if one.points]
    part = _parts(plot, line)
    said = [part[i] for i in range(3) if len({other[i] for other in every}) > 1]
    return ", ".join(one for one in said if one) or line.heading


def _rows(line: series.Line, name: str, kind: str) -> list[list[Any]]:
    """(name, x, mean, low, high) of a line's points; of a bar its last, and the least and most of what is published."""
    scale = 100.0 if line.source.fraction else 1.0
    rows = []
    for point in drilldown.thinned(line.points) if kind == "lines" else line.points[-1:]:
        spread = point.std or 0.0
        x: Any = point.round
        if kind == "bars":
            x = ", ".join(line.key.values()) if line.index is None else line.place
        numbers = (drilldown.rounded(scale * v) for v in (point.mean, point.mean - spread, point.mean + spread))
        published = [scale * v for v in line.published] if line.published else [None, None]
        rows.append([name, x, *numbers, *(published if kind == "bars" else ())])
    return rows
