"""Pages that open from disk: one file for a report, a folder for a whole database.

    page(parts, store)              one file with its scripts in it
    site(parts, store, folder)      index.html, a file for each suite, and the script that they share

Everything a page needs stands in it; its policy lets the browser fetch nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fatbench import whole_file
from fatbench.errors import SpecError
from fatbench.report.contrasts import Difference
from fatbench.report.figures import inline, series
from fatbench.report.formats import html, latex
from fatbench.report.sentences import signed
from fatbench.report.site import drilldown
from fatbench.report.site import leaderboards as leaderboards
from fatbench.report.site.drilldown import GridPoint
from fatbench.report.site.leaderboards import Board
from fatbench.report.tables.number_format import rounded
from fatbench.report.tables.sheet import Row, Sheet
from fatbench.store.replicates import SIGN
from fatbench.store.selection import WORDS, Checkpoint
from fatbench.suite.cells import Plan
from fatbench.suite.files import Suite
from fatbench.suite.folders import LINKS, paper_of
from fatbench.suite.standard_attacks import attack_name
from fatbench.suite.tables import KEPT
from fatbench.version import __version__

if TYPE_CHECKING:
    from fatbench.store.stages import Store

SCRIPT = "fatbench.js"
SCRIPT_SIGN = "fatbench-theme"  # in every version of that script
GENERATOR = '<meta name="generator" content="fatbench">'  # in every page that this program has written
IMAGES = 2_500_000  # characters of images on a page
Counts = Mapping[str, int]  # "measured", "failed", ... -> cells


@dataclass
class Part:
    """One preset of a suite, with its tables."""

    suite: Suite
    plan: Plan
    grids: list[Sheet]
    counts: Counts = field(default_factory=dict)
    measured: frozenset[str] = frozenset()  # ids of the cells that have run

    @property
    def file(self) -> str:
        """The name of its page; no two parts share one, and none is named as the index."""
        preset = "" if self.plan.preset == "paper" else f"-{self.plan.preset}"
        name = re.sub(r"[^A-Za-z0-9._-]", lambda c: f"~{ord(c[0]):x}~", f"{self.plan.suite}{preset}")
        return "~index.html" if name == "index" else f"{name}.html"


@dataclass
class Content:
    """The content of a page of one or more parts."""

    parts: list[Part]
    boards: list[Board]
    plots: list[tuple[series.Plot, list[str]]]  # with its images; a chart has none
    points: dict[tuple[str, ...], GridPoint]


def content(
    site_parts: Sequence[Part],
    store: Store,
    *,
    select: Checkpoint = "last",
    files: Path | None = None,
    images: Path | None = None,
) -> Content:
    """Read all that a page shows. files: where the cells' folders are; images: a folder of images drawn earlier."""
    from fatbench.report import build_figures

    grids = [grid for site_part in site_parts for grid in site_part.grids]
    boards = boards_of(site_parts, store, select)
    plots = [
        plot
        for site_part in site_parts
        for plot in build_figures(site_part.suite, site_part.plan, store, select=select)
    ]
    point_by_cells = drilldown.points_of(grids, (board.grid for board in boards))
    drilldown.fill(list(point_by_cells.values()), store, files, drilldown.images_in(images) if images else {})
    point_by_cells = {cells: point for cells, point in point_by_cells.items() if point.seeds}
    image_files = {file.stem: file for file in sorted(images.rglob("*.png"))} if images else {}
    plots_with_images = [
        (plot, _artifact_uris(plot, files, image_files) if plot.figure.kind in KEPT else []) for plot in plots
    ]
    plots_with_images = [(plot, uris) for plot, uris in plots_with_images if uris or not plot.empty]
    keep_within(point_by_cells.values(), IMAGES - sum(len(uri) for _, uris in plots_with_images for uri in uris))
    return Content(list(site_parts), boards, plots_with_images, point_by_cells)


def boards_of(site_parts: Sequence[Part], store: Store, select: Checkpoint) -> list[Board]:
    """The leaderboards of some parts together."""
    grids = [grid for site_part in site_parts for grid in site_part.grids]
    return leaderboards.boards([(site_part.suite, site_part.plan) for site_part in site_parts], grids, store, select)


def _artifact_uris(plot: series.Plot, files: Path | None, image_files: Mapping[str, Path]) -> list[str]:
    """The images of a figure of stored tensors, as data URIs: drawn from the cells' folders, or earlier ones."""
    from fatbench.report import drawable
    from fatbench.report.figures import plots as drawing

    if files is not None and drawable([plot], files):
        with tempfile.TemporaryDirectory(prefix="fatbench-") as folder:
            return [drilldown.uri(file) for file in drawing.draw([plot], Path(folder), "png", files)]
    return [drilldown.uri(image_files[name]) for name in drawing.names(plot) if name in image_files]


def keep_within(points: Iterable[GridPoint], room: int) -> None:
    """Drop images that exceed `room` characters in all, and name the command that shows them."""
    for point in points:
        kept_images = []
        for caption, uri in point.images:
            room -= len(uri)
            if room > 0:
                kept_images.append((caption, uri))
        if len(kept_images) < len(point.images):
            point.commands.append(
                f"fatbench show {point.cells[0]} --artifacts   # images that were too large to include here"
            )
        point.images = kept_images


def refuse_foreign(folder: Path, names: Iterable[str]) -> None:
    """SpecError: a file of these names in the folder, which a site would replace, is not of this program."""
    for name in names:
        file, sign = folder / name, SCRIPT_SIGN if name == SCRIPT else GENERATOR
        if file.is_file() and sign not in file.read_text(encoding="utf-8", errors="replace"):
            raise SpecError(
                f"{file} was not written by fatbench site and is kept: name another folder", option=f"o {folder}"
            )


# --- one file, a folder ------------------------------------------------------------------------------------------


def page(page_content: Content, commit: str = "") -> str:
    """One file that holds its script; commit: of the code that writes it."""
    script = _script()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {_script_hash(script)}"
    return _suite_page(page_content, f"<script>{script}</script>", policy, commit, 0)


def site(
    site_parts: Sequence[Part],
    read_content: Callable[[Part], Content],
    boards: Callable[[], list[Board]],
    folder: Path,
    problems: Sequence[str],
    commit: str = "",
    refresh_seconds: int = 0,
) -> tuple[list[Path], list[str]]:
    """Write all files of the site, and remove stale pages of an earlier one.

    Returns the files, the index first, and the names of the removed pages.

    read_content: `content` of a part; boards: those of all parts together; commit: of the code that writes;
    refresh_seconds: seconds after which a browser reads a page again, or 0. SpecError: it cannot be written, or
    would replace a file that is not of this program.
    """
    refuse_foreign(folder, ["index.html", SCRIPT, *(site_part.file for site_part in site_parts)])
    tag = f'<script src="{SCRIPT}"></script>'
    # a page on disk is of no origin: only the scheme can be named
    policy = "default-src 'none'; img-src data: 'self' file:; style-src 'unsafe-inline'; script-src 'self' file:"
    written_pages: dict[str, str] = {}
    image_files: dict[str, bytes] = {}  # name -> PNG
    links: dict[tuple[str, ...], str] = {}  # cells of a point -> page#anchor
    contents: list[Content] = []
    for site_part in site_parts:
        page_content = read_content(site_part)
        contents.append(page_content)
        links |= {cells: f"{site_part.file}#{point.anchor}" for cells, point in page_content.points.items()}
        other_pages = [(other_part.file, _name(other_part)) for other_part in site_parts if other_part is not site_part]
        written_pages[site_part.file] = _move_images(
            _suite_page(page_content, tag, policy, commit, refresh_seconds, "index.html", other_pages), image_files
        )
    all_boards = boards() if len(site_parts) > 1 else contents[0].boards
    views = [_board(board, links) for board in all_boards]
    papers: dict[str, list[dict[str, Any]]] = {}  # paper -> a row for each of its pages
    for site_part in sorted(site_parts, key=lambda part: leaderboards.paper_order(part.plan.suite)):
        row = {
            "file": site_part.file,
            "name": site_part.plan.suite,
            "title": site_part.suite.title,
            "preset": site_part.plan.preset,
            "cells": len(site_part.plan.unique()),
            "measured": site_part.counts.get("measured", 0),
            "failed": site_part.counts.get("failed", 0),
        }
        papers.setdefault(paper_of(site_part.plan.suite), []).append(row)
    planned_cells = {cell.id.partition(SIGN)[0] for site_part in site_parts for cell in site_part.plan.cells}
    measured = frozenset[str]().union(*(site_part.measured for site_part in site_parts))
    days = [
        run["started"][:10] for page_content in contents for point in page_content.points.values() for run in point.runs
    ]
    last_day = f", the last on {max(days)}" if days else ""
    index = html.framed(
        "index.html",
        title="fatbench: results",
        heading="Results",
        lead="fatbench trains, attacks and compares methods of federated adversarial training, and keeps what produced"
        f" every number. {len(site_parts)} suite{'s' * (len(site_parts) != 1)}: {len(measured)} of "
        f"{len(planned_cells)} cells have run"
        f"{last_day}."
        " A cell is one experiment: data, split, model, method and seed.",
        label=_shared_label(board.grid for board in all_boards),
        foot=_foot(commit),
        every=refresh_seconds,
        overview=[_overview(board) for board in all_boards],
        papers=papers,
        links=LINKS,
        problems=list(problems),
        boards=views,
        places=[*([("Leaderboards", "#leaderboards")] if views else []), ("Suites", "#suites")],
        script=_markup(tag),
        policy=policy,
    )
    files = {SCRIPT: _script(), **written_pages, "index.html": index}  # what the index links to is there before it
    for name, image in image_files.items():
        whole_file.write(folder / name, image, f"-o {folder}", make_folder=True)
    for name, body in files.items():
        whole_file.write(folder / name, body, f"-o {folder}", make_folder=True)
    removed = []
    for file in sorted(folder.glob("*.html")):  # of a suite whose cells were deleted: nothing links to it any more
        if file.name not in files and GENERATOR in file.read_text(encoding="utf-8", errors="replace"):
            file.unlink()
            removed.append(file.name)
    return [folder / "index.html", *(folder / name for name in written_pages), folder / SCRIPT], removed


def _overview(board: Board) -> dict[str, Any]:
    """The fields of a board in the overview: its question, what is found, and the comparison that answers it.

    Best is the better side of a declared comparison that finds a difference; else nothing is.
    """
    answer, test = board.answer, board.answer and board.answer.test
    best, number = "", ""
    if answer and board.declared and answer.values and answer.significant and not answer.floor:
        side = 0 if (answer.difference or 0) > 0 else 1
        accuracy = fmean(answer.values[side])
        best, number = answer.sides[side], f"{rounded(100 * accuracy, 2)} % {_under(answer.metric)}"
    return {
        "id": board.id, "question": board.title, "sentence": board.sentence.replace(" -", " \u2212"),
        "best": best, "number": number,
        "difference": signed(test.mean).replace("-", "\u2212") if test else "",
        "who": f"{_minus(answer)}, {attack_name(answer.metric)}" if answer else "",
        "interval": f"{signed(test.low)} to {signed(test.high)}".replace("-", "\u2212") if test else "",
        "seeds": len(answer.seeds) if answer else "",
    }  # fmt: skip


def _minus(answer: Difference) -> str:
    return " \u2212 ".join(answer.sides)


def _under(metric: str) -> str:
    return metric if metric == "natural" else f"under {attack_name(metric)}"


def _name(site_part: Part) -> str:
    return site_part.plan.suite + (f", {site_part.plan.preset}" if site_part.plan.preset != "paper" else "")


def _move_images(page: str, image_files: dict[str, bytes]) -> str:
    """Move the images of a page into files beside it, which are added to `image_files`."""

    def file_source(match: re.Match[str]) -> str:
        image = base64.b64decode(match[1])
        name = f"images/{hashlib.sha256(image).hexdigest()[:16]}.png"
        image_files[name] = image
        return f'src="{name}"'

    return re.sub(r'src="data:image/png;base64,([A-Za-z0-9+/=]+)"', file_source, page)


def _shared_label(grids: Iterable[Sheet]) -> str:
    """The label that all tables of a page share and the page shows once; empty where they differ."""
    labels = {grid.label for grid in grids}
    return labels.pop() if len(labels) == 1 else ""


def _foot(commit: str) -> str:
    return f"fatbench {__version__}{f', commit {commit}' * bool(commit)}, MIT licence"


def _suite_page(
    page_content: Content,
    script: str,
    policy: str,
    commit: str,
    refresh_seconds: int,
    home: str = "",
    other_pages: Sequence[tuple[str, str]] = (),
) -> str:
    links = {cells: f"#{point.anchor}" for cells, point in page_content.points.items()}
    single_part = page_content.parts[0] if len(page_content.parts) == 1 else None
    names = [site_part.plan.suite for site_part in page_content.parts]
    tables = [
        html.table(grid, links, f"table-{i}-{_slug(grid.id)}", latex.render([grid]))
        for i, grid in enumerate(grid for site_part in page_content.parts for grid in site_part.grids)
    ]
    plots = [_figure(plot, f"figure-{i}-{plot.figure.id}", uris) for i, (plot, uris) in enumerate(page_content.plots)]
    facts = []
    for site_part in page_content.parts:
        plan = site_part.plan
        note = f" {plan.note}." if plan.note else ""
        facts.append(f"{plan.suite}, preset {plan.preset}: {len(plan.unique())} cells.{note}".replace("..", "."))
    navigation = [("Leaderboards", "#leaderboards")] if page_content.boards else []
    navigation += [("Tables", "#tables")] if page_content.boards or plots else []
    navigation += [("Figures", "#figures")] if plots else []
    return html.framed(
        "suite.html",
        title=f"fatbench: {', '.join(names)}",
        heading=single_part.suite.title if single_part else f"fatbench: {', '.join(names)}",
        lead=single_part.suite.description if single_part else "",
        facts=facts,
        label=_shared_label([grid for site_part in page_content.parts for grid in site_part.grids]),
        others=other_pages,
        links=LINKS.get(paper_of(names[0]), {}) if single_part else {},
        foot=_foot(commit),
        every=refresh_seconds,
        boards=[_board(board, links) for board in page_content.boards],
        tables=tables,
        figures=plots,
        points=list(page_content.points.values()),
        places=navigation,
        home=home,
        script=_markup(script),
        policy=policy,
    )


def _script_hash(script: str) -> str:
    """The name of an inline script in a Content-Security-Policy: its SHA-256."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _script() -> str:
    return html.file("page.js")


def _markup(markup: str) -> Any:
    """Mark a script element of ours as safe, so that the template does not escape it."""
    import markupsafe

    return markupsafe.Markup(markup)


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name)


# --- leaderboards ------------------------------------------------------------------------------------------------


def _board(board: Board, links: html.Links) -> dict[str, Any]:
    grid = board.grid
    rows = [
        {
            "labels": [row.key.get(axis, "") for axis in board.axes],
            "numbers": [html.cell(entry, links) for entry in row.values[0]],
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
    published = f" Published: {grid.published_at}." * bool(grid.published_at)
    return {
        "id": board.id, "title": board.title, "about": f"{board.about} Numbers: {WORDS[grid.select]}." + published,
        "label": grid.label, "region": f"{board.title} ({', '.join(board.suites)}, {board.preset})",
        "axes": board.axes, "choices": board.choices, "columns": columns, "rows": rows, "grid": grid,
        "published": grid.has_published,
        "latex": latex.render([grid.only(board.rows, range(len(grid.columns)))]),
        "sentence": board.sentence.replace(" -", " \u2212"), "against": _heading(board),
    }  # fmt: skip


def _heading(board: Board) -> str:
    """The heading of the column of differences; empty without differences."""
    if not board.differences:
        return ""
    baselines = ", ".join(dict.fromkeys(difference.sides[1] for difference in board.differences))
    return f"{board.grid.columns[board.sorted_by].heading}: points from {baselines} (95 %, not corrected)"


def _difference(board: Board, row: Row) -> dict[str, Any] | None:
    """The difference of a row from its baseline in points, and positions in [0, 100] of 0, its interval and itself."""
    difference = leaderboards.difference(board, row)
    if difference is None or (test := difference.test) is None:
        return None
    ends = [end for other in board.differences if other.test for end in (other.test.low, other.test.high)]
    low, high = min(0, *ends), max(0, *ends)  # one scale for all rows, with 0 in it
    return {
        "raw": difference.difference,
        "number": signed(test.mean).replace("-", "\u2212"),
        "interval": f"({signed(test.low)} to {signed(test.high)})".replace("-", "\u2212"),
        "places": [
            round(100 * (position - low) / (high - low or 1), 1) for position in (0, test.low, test.high, test.mean)
        ],
    }


# --- figures -----------------------------------------------------------------------------------------------------


def _figure(plot: series.Plot, id: str, images: list[str]) -> dict[str, Any]:
    """The fields of a figure for its template: its images, or an SVG for each panel."""
    drawing = None
    if not plot.empty and plot.figure.kind not in KEPT:
        drawing = inline.draw(plot, id)
    return {
        "id": id, "figure": plot.figure.id, "title": plot.figure.title, "label": plot.label,
        "legend": drawing.legend if drawing else [],
        "panels": [(title, _markup(svg)) for title, svg in drawing.panels] if drawing else [],
        "images": images, "notes": [note for note in plot.notes if note[0] != "suite"],
    }  # fmt: skip
