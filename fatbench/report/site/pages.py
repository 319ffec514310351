"""Pages that open from disk: one file for a report, a folder for a whole database.

    page(parts, store)              one file with its scripts in it
    site(parts, store, folder)      index.html, a file for each suite, and the script that they share

Everything a page needs stands in it; its policy lets the browser fetch nothing else. The templates hold the HTML.
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

import markupsafe

from fatbench import whole_file
from fatbench.errors import SpecError
from fatbench.report import build_figures, drawable
from fatbench.report.figures import inline, plots
from fatbench.report.figures.series import Plot
from fatbench.report.formats import html, latex
from fatbench.report.numbers.statistics import SEEDS_FOR_A_CLAIM
from fatbench.report.sentences import signed, way_back
from fatbench.report.site import drilldown
from fatbench.report.site import leaderboards as leaderboards
from fatbench.report.site.drilldown import Point
from fatbench.report.site.leaderboards import Board
from fatbench.report.tables.number_format import rounded
from fatbench.report.tables.sheet import Row, Sheet
from fatbench.store.replicates import SIGN
from fatbench.store.rows import grouped
from fatbench.store.selection import PUBLISHED, WORDS, Checkpoint
from fatbench.suite.cells import Plan
from fatbench.suite.files import Suite
from fatbench.suite.folders import LINKS, paper_of
from fatbench.suite.standard_attacks import TITLES, attack_name
from fatbench.suite.tables import KEPT
from fatbench.version import __version__

if TYPE_CHECKING:
    from fatbench.store.stages import Store

SCRIPT = "fatbench.js"
SCRIPT_SIGN = "fatbench-theme"  # in every version of that script
GENERATOR = '<meta name="generator" content="fatbench">'  # in every page that this program has written
IMAGES = 2_500_000  # characters of images on a page
GROUPS = ("differences found", "no difference shown", "too few seeds, or no better than chance", "gradient inversion",
          "not compared")  # fmt: skip
REACH = 0.2  # each way, of the plot of the overview: 20 points


@dataclass
class Part:
    """One preset of a suite, with its tables."""

    suite: Suite
    plan: Plan
    grids: list[Sheet]
    counts: Mapping[str, int] = field(default_factory=dict)  # "measured", "failed", ... -> cells
    measured: frozenset[str] = frozenset()  # ids of the cells that have run

    @property
    def file(self) -> str:
        """The name of its page; no two parts share one, and none is named as the index."""
        name = re.sub(r"[^A-Za-z0-9._-]", lambda c: f"~{ord(c[0]):x}~", f"{self.plan.suite}{self.plan.ending}")
        return "~index.html" if name == "index" else f"{name}.html"

    @property
    def name(self) -> str:
        """The suite, and its preset where that is not `paper`."""
        return self.plan.suite + f", {self.plan.preset}" * (self.plan.preset != "paper")


def page(
    parts: Sequence[Part], store: Store, *, select: Checkpoint = "last", files: Path | None = None, commit: str = ""
) -> str:
    """One file that holds its script. files: where the cells' folders are; commit: of the code that writes it."""
    script = html.file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    frame = {"script": markupsafe.Markup(f"<script>{script}</script>"), "policy": policy, "foot": _foot(commit)}
    return _suite_page(parts, store, select, files, None, frame)[0]


def site(
    parts: Sequence[Part], store: Store, folder: Path, *, select: Checkpoint = "last", files: Path | None = None,
    images: Path | None = None, problems: Sequence[str] = (), commit: str = "", refresh_seconds: int = 0,
    say: Callable[[str], None] = lambda what: None,
) -> tuple[list[Path], list[str]]:  # fmt: skip
    """Write all files of the site, and remove stale pages of an earlier one.

    Returns the files, the index first, and the names of the removed pages.

    files: where the cells' folders are; images: a folder of images drawn earlier; commit: of the code that writes;
    refresh_seconds: seconds after which a browser reads a page again, or 0; say: is told what is written. SpecError:
    it cannot be written, or would replace a file that is not of this program.
    """
    refuse_foreign(folder, ["index.html", SCRIPT, *(part.file for part in parts)])
    # a page on disk is of no origin: only the scheme can be named
    policy = "default-src 'none'; img-src data: 'self' file:; style-src 'unsafe-inline'; script-src 'self' file:"
    tag = markupsafe.Markup(f'<script src="{SCRIPT}"></script>')
    frame = {"script": tag, "policy": policy, "foot": _foot(commit), "every": refresh_seconds}
    written: dict[str, str | bytes] = {SCRIPT: html.file("page.js")}
    behind: dict[tuple[str, ...], str] = {}  # cells of a point -> page#anchor
    days: list[str] = []
    boards: list[Board] = []
    for part in parts:
        say(f"page of {part.plan.suite}, of {len(parts)} suites")
        others = [(other.file, other.name) for other in parts if other is not part]
        of_part = {**frame, "home": "index.html", "others": others}
        text, points, boards = _suite_page([part], store, select, files, images, of_part)
        for point in points:
            behind[point["cells"]] = f"{part.file}#{point['anchor']}"
            days += [run["started"][:10] for run, _, _ in point["runs"]]
        for image in dict.fromkeys(re.findall(r'src="data:image/png;base64,([A-Za-z0-9+/=]+)"', text)):
            content = base64.b64decode(image)
            name = f"images/{hashlib.sha256(content).hexdigest()[:16]}.png"
            text = text.replace(f'src="data:image/png;base64,{image}"', f'src="{name}"')
            written[name] = content
        written[part.file] = text
    say("index")
    boards = boards_of(parts, store, select) if len(parts) > 1 else boards
    overview = [_overview(board) for board in boards]
    in_order = sorted(parts, key=lambda part: leaderboards.paper_order(part.plan.suite))
    papers = grouped((paper_of(part.plan.suite), part) for part in in_order)
    planned_cells = {cell.id.partition(SIGN)[0] for part in parts for cell in part.plan.cells}
    measured = frozenset[str]().union(*(part.measured for part in parts))
    written["index.html"] = html.framed(  # last: what it links to is there before it
        "index.html",
        title="fatbench: results",
        heading="Results",
        lead="fatbench trains, attacks and compares methods of federated adversarial training, and keeps what produced"
        f" every number. {len(parts)} suite{'s' * (len(parts) != 1)}: {len(measured)} of {len(planned_cells)} cells"
        f" have run{f', the last on {max(days)}' if days else ''}. A cell is one experiment: data, split, model, method"
        " and seed.",
        label=_shared_label(board.grid for board in boards),
        overview={group: [one for one in overview if one["group"] == group] for group in GROUPS},
        reach=round(100 * REACH),
        papers=papers,
        links=LINKS,
        problems=problems,
        boards=boards,
        places=[*([("Leaderboards", "#leaderboards")] if boards else []), ("Suites", "#suites")],
        behind=behind,
        **{**SAID, **frame},
    )
    for name, body in written.items():
        whole_file.write(folder / name, body, f"-o {folder}", make_folder=True)
    removed = []
    for file in sorted(folder.glob("*.html")):  # of a suite whose cells were deleted: nothing links to it any more
        if file.name not in written and GENERATOR in file.read_text(encoding="utf-8", errors="replace"):
            file.unlink()
            removed.append(file.name)
    return [folder / "index.html", *(folder / part.file for part in parts), folder / SCRIPT], removed


def refuse_foreign(folder: Path, names: Iterable[str]) -> None:
    """SpecError: a file of these names in the folder, which a site would replace, is not of this program."""
    for name in names:
        file, sign = folder / name, SCRIPT_SIGN if name == SCRIPT else GENERATOR
        if file.is_file() and sign not in file.read_text(encoding="utf-8", errors="replace"):
            said = f"{file} was not written by fatbench site and is kept: name another folder"
            raise SpecError(said, option=f"o {folder}")


def boards_of(parts: Sequence[Part], store: Store, select: Checkpoint) -> list[Board]:
    """The leaderboards of some parts together."""
    grids = [grid for part in parts for grid in part.grids]
    return leaderboards.boards([(part.suite, part.plan) for part in parts], grids, store, select)


def _shared_label(grids: Iterable[Sheet]) -> str:
    """The label that all tables of a page share and the page shows once; empty where they differ."""
    labels = {grid.label for grid in grids}
    return labels.pop() if len(labels) == 1 else ""


def _foot(commit: str) -> str:
    return f"fatbench {__version__}{f', commit {commit}' * bool(commit)}, MIT licence"


# --- a page of suites --------------------------------------------------------------------------------------------


def _suite_page(
    parts: Sequence[Part], store: Store, select: Checkpoint, files: Path | None, images: Path | None,
    frame: Mapping[str, Any],
) -> tuple[str, list[Point], list[Board]]:  # fmt: skip
    """(a page, the points that it tells of, its leaderboards)."""
    grids = [grid for part in parts for grid in part.grids]
    boards = boards_of(parts, store, select)
    plots = [plot for part in parts for plot in build_figures(part.suite, part.plan, store, select=select)]
    drawn_earlier = {file.stem: file for file in sorted(images.rglob("*.png"))} if images else {}
    kept = [_kept_images(plot, files, drawn_earlier) if plot.figure.kind in KEPT else [] for plot in plots]
    drawn = [(plot, uris) for plot, uris in zip(plots, kept, strict=True) if uris or not plot.empty]
    points = [*drilldown.points_of(grids, (board.grid for board in boards)).values()]
    points = drilldown.filled(points, store, files, drilldown.images_in(images) if images else {})
    keep_within(points, IMAGES - sum(len(uri) for _, uris in drawn for uri in uris))
    behind = {point["cells"]: f"#{point['anchor']}" for point in points}
    names = ", ".join(part.plan.suite for part in parts)
    suite, single = parts[0].suite, len(parts) == 1
    facts = [
        f"{plan.suite}, preset {plan.preset}: {len(plan.unique())} cells.{f' {plan.note}.' if plan.note else ''}"
        for plan in (part.plan for part in parts)
    ]
    places = [("Leaderboards", "#leaderboards")] * bool(boards) + [("Tables", "#tables")] * bool(boards or drawn)
    text = html.framed(
        "suite.html",
        title=f"fatbench: {names}",
        heading=suite.title if single else f"fatbench: {names}",
        lead=suite.description if single else "",
        facts=[text.replace("..", ".") for text in facts],
        label=_shared_label(grids),
        links=LINKS.get(paper_of(suite.name), {}) if single else {},
        boards=boards,
        tables=[
            html.table(grid, behind, f"table-{i}-" + re.sub(r"[^\w.-]", "-", grid.id), latex.render([grid]))
            for i, grid in enumerate(grids)
        ],
        figures=[
            (f"figure-{i}-{plot.figure.id}", plot, uris, _inline(plot, f"figure-{i}-{plot.figure.id}"))
            for i, (plot, uris) in enumerate(drawn)
        ],
        points=points,
        places=places + [("Figures", "#figures")] * bool(drawn),
        behind=behind,
        **{**SAID, **frame},
    )
    return text, points, boards


def _inline(plot: Plot, id: str) -> tuple[inline.Legend, list[tuple[str, Any]]]:
    """(legend, panels as SVG) of a figure; neither of stored tensors, which are images."""
    if plot.empty or plot.figure.kind in KEPT:
        return [], []
    legend, panels = inline.draw(plot, id)
    return legend, [(title, markupsafe.Markup(svg)) for title, svg in panels]


def _kept_images(plot: Plot, files: Path | None, drawn_earlier: Mapping[str, Path]) -> list[str]:
    """The images of a figure of stored tensors, as data URIs: drawn from the cells' folders, or earlier ones."""
    if files is not None and drawable([plot], files):
        with tempfile.TemporaryDirectory(prefix="fatbench-") as folder:
            return [drilldown.uri(file.read_bytes()) for file in plots.draw([plot], Path(folder), "png", files)]
    return [drilldown.uri(drawn_earlier[name].read_bytes()) for name in plots.names(plot) if name in drawn_earlier]


def keep_within(points: Iterable[Point], room: int) -> None:
    """Drop images that exceed `room` characters in all, and say of their points that they are left out."""
    for point in points:
        kept = []
        for caption, uri in point["images"]:
            room -= len(uri)
            kept += [(caption, uri)] * (room > 0)
        point.update(images=kept, left_out=len(kept) < len(point["images"]))


# --- leaderboards ------------------------------------------------------------------------------------------------


def _overview(board: Board) -> dict[str, Any]:
    """The fields of a board in the overview: its question, what is found, and the comparison that answers it.

    Best is the better side of a declared comparison of the rows asked about that finds a difference, at enough seeds
    for a claim; else nothing is.
    """
    answer, test = board.answer, board.answer and board.answer.test
    leak = "attacker" in board.grid.axes
    best, number, group = "", "", GROUPS[3 if leak else 4 if answer is None else 2]
    if answer is not None and len(answer.seeds) >= SEEDS_FOR_A_CLAIM and not answer.floor:
        group = GROUPS[0 if answer.significant else 1]
        if answer.significant and board.declared and answer.values and {*answer.sides} <= board.asked:
            side = 0 if (answer.difference or 0) > 0 else 1
            attacked = answer.metric if answer.metric == "natural" else f"under {attack_name(answer.metric)}"
            best, number = answer.sides[side], f"{rounded(100 * fmean(answer.values[side]), 2)} % {attacked}"
    column = board.grid.columns[board.sorted_by]
    measured = [row for row in board.grid.rows if row.values[0][board.sorted_by].mean is not None]
    under = f"under {attack_name(column.metric)}" if column.metric in TITLES else column.heading
    under += ", best for the attacker first" * leak
    return {
        "id": board.id, "question": board.title, "sentence": minus(board.sentence), "group": group,
        "best": best, "number": number, "difference": minus(signed(test.mean)) if test else "",
        "who": " \u2212 ".join(answer.sides) + f", {attack_name(answer.metric)}" if answer else "",
        "interval": minus(f"{signed(test.low)} to {signed(test.high)}") if test else "",
        "places": _places(test, -REACH, REACH) if test else [],
        "seeds": len(answer.seeds) if answer else "",
        "under": under,
        "order": [" / ".join(filter(None, (row.key.get(axis) for axis in board.axes))) for row in measured],
    }  # fmt: skip


def _places(test: Any, low: float, high: float) -> list[float]:
    """Positions of 0, both ends of an interval and its middle between low and high: in [0, 100], beyond it the edge."""
    ends = (min(max(end, low), high) for end in (0, test.low, test.high, test.mean))
    return [round(100 * (end - low) / (high - low or 1), 1) for end in ends]


def minus(text: str) -> str:
    """A text with minus signs for the hyphens of its negative numbers."""
    return re.sub(r"(?<![^\s(])-", "\u2212", text)


def _heading(board: Board) -> str:
    """The heading of the column of differences; empty without differences."""
    if not board.differences:
        return ""
    baselines = ", ".join(dict.fromkeys(difference.sides[1] for difference in board.differences))
    return f"{board.grid.columns[board.sorted_by].heading}: points from {baselines} (95 %, not corrected)"


def _difference(board: Board, row: Row) -> dict[str, Any] | None:
    """The difference of a row from its baseline in points, and positions in [0, 100] of 0, its interval and itself."""
    cells = {*row.values[0][board.sorted_by].cells}
    difference = next((one for one in board.differences if cells & one.cells), None)
    if difference is None or (test := difference.test) is None:
        return None
    ends = [end for other in board.differences if other.test for end in (other.test.low, other.test.high)]
    return {
        "raw": difference.difference,
        "number": minus(signed(test.mean)),
        "interval": minus(f"({signed(test.low)} to {signed(test.high)})"),
        "places": _places(test, min(0, *ends), max(0, *ends)),  # one scale for all rows, with 0 in it
    }


# what the templates call
SAID = {
    "against": _heading, "attack_text": drilldown.attack_text, "difference": _difference,
    "latex": lambda board: latex.render([board.grid]),
    "minus": minus, "published_at": PUBLISHED, "stage_text": drilldown.stage_text,
    "way_back": way_back, "words_of": WORDS,
}  # fmt: skip
