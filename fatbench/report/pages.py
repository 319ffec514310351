"""Pages that open from disk: one file for a report, a folder for a whole database.

    page(parts, store)              one file with its scripts in it
    site(parts, store, folder)      index.html, a file for each suite, and the script that they share

Everything a page needs stands in it; its policy lets the browser fetch nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.errors import SpecError
from fatbench.report import boards as leaderboards
from fatbench.report import charts, html, latex, points, series
from fatbench.report.boards import Board
from fatbench.report.grid import Column, Grid, Value
from fatbench.report.points import Point
from fatbench.store.selection import WORDS, Checkpoint
from fatbench.suite.cells import Plan
from fatbench.suite.files import Suite
from fatbench.suite.tables import SERIES

if TYPE_CHECKING:
    from fatbench.store.stages import Store

SCRIPT = "fatbench.js"
PICTURES = 2_500_000  # characters of pictures on a page
Counts = Mapping[str, int]  # "done", "failed", ... -> cells


@dataclass
class Part:
    """One preset of a suite, with its tables."""

    suite: Suite
    plan: Plan
    grids: list[Grid]
    counts: Counts = field(default_factory=dict)

    @property
    def file(self) -> str:
        preset = "" if self.plan.preset == "paper" else f"-{self.plan.preset}"
        return f"{_slug(self.plan.suite)}{_slug(preset)}.html"


@dataclass
class Content:
    """What a page of some parts holds."""

    parts: list[Part]
    boards: list[Board]
    plots: list[series.Plot]
    points: dict[tuple[str, ...], Point]


def content(
    parts: Sequence[Part],
    store: Store,
    *,
    select: Checkpoint = "last",
    which: str = "first",
    files: Path | None = None,
    pictures: Mapping[str, list[tuple[str, str]]] | None = None,
) -> Content:
    """Read all that a page shows. files: where the cells' folders are; pictures: of cells, beside those in there."""
    from fatbench.report import figures

    pairs = [(part.suite, part.plan) for part in parts]
    grids = [grid for part in parts for grid in part.grids]
    found = leaderboards.boards(pairs, grids, store, select, which)
    plots = [plot for suite, plan in pairs for plot in figures(suite, plan, store, select=select)]
    places = points.of(grids, (board.grid for board in found))
    points.fill(list(places.values()), store, files, pictures or {})
    places = {cells: point for cells, point in places.items() if point.seeds}
    _within(places.values())
    drawn = [plot for plot in plots if not plot.empty and plot.figure.kind in ("lines", "bars")]
    return Content(list(parts), found, drawn, places)


def _within(places: Iterable[Point]) -> None:
    """Leave out pictures that would make the page larger than PICTURES, and say so."""
    left = PICTURES
    for point in places:
        kept = []
        for caption, uri in point.pictures:
            left -= len(uri)
            if left > 0:
                kept.append((caption, uri))
        if len(kept) < len(point.pictures):
            point.commands.append(f"fatbench show {point.cells[0]} --artifacts   # pictures that had no room here")
        point.pictures = kept


# --- one file, a folder ------------------------------------------------------------------------------------------


def page(what: Content) -> str:
    """One file that holds its script."""
    script = _script()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {charts.hashed(script)}"
    return _suite_page(what, f"<script>{script}</script>", policy)


def site(
    parts: Sequence[Part], read: Callable[[Sequence[Part]], Content], folder: Path, problems: Sequence[str]
) -> list[Path]:
    """Write the folder: the files, the index first. read: `content` of some parts. SpecError: it cannot be written."""
    tag = f'<script src="{SCRIPT}"></script>'
    # a page on disk is of no origin: only the scheme can be named
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'self' file:"
    written: dict[str, str] = {}
    links: dict[tuple[str, ...], str] = {}
    several: list[Content] = []
    for part in parts:
        one = read([part])
        several.append(one)
        links |= {cells: f"{part.file}#{point.anchor}" for cells, point in one.points.items()}
        written[part.file] = _suite_page(one, tag, policy, home="index.html")
    found = read(parts).boards if len(parts) > 1 else several[0].boards
    views = [_board(board, links) for board in found]
    suites = [
        {
            "file": part.file, "name": part.plan.suite, "title": part.suite.title, "preset": part.plan.preset,
            "cells": len(part.plan.unique()), "done": part.counts.get("done", 0),
            "failed": part.counts.get("failed", 0),
        }
        for part in parts
    ]  # fmt: skip
    cells = sum(len(part.plan.unique()) for part in parts)
    index = html.framed(
        "index.html",
        title="fatbench: results",
        heading="Results",
        lead=f"{len(parts)} suite{'s' * (len(parts) != 1)} with {cells} cells. A cell is one experiment: data, split,"
        " model, method and seed. Every number opens what is behind it.",
        suites=suites,
        problems=list(problems),
        boards=views,
        places=[("Suites", "#suites"), *([("Leaderboards", "#leaderboards")] if views else [])],
        script=_safe(tag),
        policy=policy,
        data=_data(found, [], [], links),
    )
    files = {"index.html": index, **written, SCRIPT: _script()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, body in files.items():
            (folder / name).write_text(body, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"-o {folder}: {error.strerror}") from None
    return [folder / name for name in files]


def _suite_page(what: Content, script: str, policy: str, home: str = "") -> str:
    links = {cells: f"#{point.anchor}" for cells, point in what.points.items()}
    one = what.parts[0] if len(what.parts) == 1 else None
    names = [part.plan.suite for part in what.parts]
    tables = [
        html.table(grid, links, f"table-{i}-{_slug(grid.id)}", latex.render([grid]))
        for i, grid in enumerate(grid for part in what.parts for grid in part.grids)
    ]
    plots = [_plot(plot, f"figure-{i}-{plot.figure.id}") for i, plot in enumerate(what.plots)]
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
    places: Iterable[Point],
    links: html.Links,
) -> dict[str, Any]:
    """What the script reads: the charts' specifications and rows, the curves of each place."""
    drawn = {board.id: chart for board in boards if (chart := _against(board, links))}
    return {
        "colours": charts.COLOURS,
        "spec": charts.lines("round", ""),
        "charts": {**drawn, **{plot["id"]: plot["chart"] for plot in plots}},
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
        }
        for row in board.rows
    ]
    columns = [
        {
            "heading": column.heading,
            "best": "min" if column.best == "min" else "max",
            "sorted": ("ascending" if column.best == "min" else "descending") if place == board.sorted_by else "",
        }
        for place, column in enumerate(grid.columns)
    ]
    pair = _pair(board)
    title = "" if pair is None else f"{grid.columns[pair[1]].heading} against {grid.columns[pair[0]].heading}"
    if title:
        title += ": a dot for each row, ± standard deviation" + "; a ring for what is published" * grid.has_published
    return {
        "id": board.id, "title": board.title, "about": f"{board.about} Numbers: {WORDS[grid.select]}.",
        "label": grid.label,
        "axes": board.axes, "choices": board.choices, "columns": columns, "rows": rows, "grid": grid,
        "published": grid.has_published, "chart": _against(board, {}) is not None, "chart_title": title,
    }  # fmt: skip


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
    x, y = (board.grid.columns[place] for place in pair)
    fields = ("name", "kind", "x", "mean", "low", "high", "left", "right", "href")
    rows = []
    for row in board.rows:
        a, b = (row.values[0][place] for place in pair)
        name = ", ".join(label for axis in board.axes if (label := row.key.get(axis, "")))
        if a.mean is not None and b.mean is not None:
            href = links.get(b.cells, "")
            rows.append([name, "measured", 100 * a.mean, 100 * b.mean, *_whisker(b, y), *_whisker(a, x), href])
        if a.published is not None and b.published is not None:
            across, up = 100 * a.published, 100 * b.published
            rows.append([name, "published", across, up, up, up, across, across, ""])
    if not rows:
        return None
    spec = charts.against(f"{x.heading} (%)", f"{y.heading} (%)", {str(row[1]) for row in rows})
    return {"spec": spec, "fields": fields, "panels": [rows], "names": []}


def _whisker(value: Value, column: Column) -> tuple[float, float]:
    assert value.mean is not None
    scale, spread = (100.0 if column.unit == "percent" else 1.0), value.std or 0.0
    return scale * (value.mean - spread), scale * (value.mean + spread)


# --- figures -----------------------------------------------------------------------------------------------------


def _plot(plot: series.Plot, id: str) -> dict[str, Any]:
    """A figure of the suite: a chart for each panel, one legend."""
    figure = plot.figure
    shown = [line for panel in plot.panels for line in panel.lines if line.points]
    looks = {line_name(plot, line): (0, 0) for line in shown}
    parts = {line_name(plot, line): _parts(plot, line) for line in shown}
    # where two parts vary, the first is the colour and the second the dashes
    varying = [i for i in range(3) if len({part[i] for part in parts.values()}) > 1]
    for name, part in parts.items():
        seen = [list(dict.fromkeys(other[i] for other in parts.values())).index(part[i]) for i in varying[:2]]
        two = len(varying) == 2 and len({other[varying[1]] for other in parts.values()}) <= len(charts.DASHES)
        looks[name] = (seen[0], seen[1]) if two else (list(parts).index(name), 0)
    headings = list(dict.fromkeys(line.heading for line in shown))
    apart = SERIES in figure.panels  # panels of several units
    unit = " (%)" if shown[0].source.fraction else ""
    y = "" if apart else f"{headings[0]}{unit}" if len(headings) == 1 else unit.strip(" ()")
    panels = [panel for panel in plot.panels if any(line.points for line in panel.lines)]
    rows = [
        [row for line in panel.lines if line.points for row in _rows(line, line_name(plot, line), figure.kind)]
        for panel in panels
    ]
    low, high = min(row[3] for panel in rows for row in panel), max(row[4] for panel in rows for row in panel)
    alike = not apart and len(rows) > 1 and low < high
    if figure.kind == "lines":
        over_radius = any(point.radius for line in shown for point in line.points)
        x = "radius of the attack" if over_radius else "round"
        log = figure.scale == "log"
        spec = charts.lines(x, y, looks, log, not over_radius, (low, high) if alike and not log else None)
    else:
        indexed = next((series.index_of(line.source) for line in shown if line.index is not None), "")
        spec = charts.bars(indexed, y, looks, (min(0, min(r[2] for p in rows for r in p)), high) if alike else None)
    names = [[name, charts.colour_of(hue), dashes] for name, (hue, dashes) in looks.items()]
    return {
        "id": id, "figure": figure.id, "title": figure.title, "label": plot.label,
        "panels": [{"title": ", ".join(label for label in panel.key.values() if label)} for panel in panels],
        "notes": [note for note in plot.notes if note[0] != "suite"],
        "chart": {"spec": spec, "fields": charts.FIELDS, "panels": rows, "names": names},
    }  # fmt: skip


def _parts(plot: series.Plot, line: series.Line) -> tuple[str, str, str]:
    """What tells a line from others: labels, heading, index; of a bar less what stands under it."""
    lines = plot.figure.kind == "lines"
    index = "" if line.index is None else f"{series.index_of(line.source)} {line.index}"
    labels = ", ".join(line.key.values()) if lines or index else ""
    return labels, "" if SERIES in plot.figure.panels else line.heading, index if lines else ""


def line_name(plot: series.Plot, line: series.Line) -> str:
    """The name of a line in the legend: what varies."""
    every = [_parts(plot, one) for panel in plot.panels for one in panel.lines if one.points]
    part = _parts(plot, line)
    said = [part[i] for i in range(3) if len({other[i] for other in every}) > 1]
    return ", ".join(one for one in said if one) or line.heading


def _rows(line: series.Line, name: str, kind: str) -> list[list[Any]]:
    """(name, x, mean, low, high) of a line's points; of a bar its last."""
    scale = 100.0 if line.source.fraction else 1.0
    rows = []
    for point in points.thinned(line.points) if kind == "lines" else line.points[-1:]:
        spread = point.std or 0.0
        x: Any = point.round
        if kind == "bars":
            x = ", ".join(line.key.values()) if line.index is None else str(line.index)
        numbers = (points.rounded(scale * v) for v in (point.mean, point.mean - spread, point.mean + spread))
        rows.append([name, x, *numbers])
    return rows
