"""How a table is laid out on the pages of a paper: how wide words are, which columns and rows go into one piece.

Nothing is scaled: type is \\small, else \\footnotesize, and never smaller than \\scriptsize. What does not fit a line
gets its spreads below the numbers, then the first axis in separate lines, and is then broken into blocks of columns.
What does not fit a page goes on in a further float.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fatbench.errors import SpecError, did_you_mean
from fatbench.report.tables import number_format
from fatbench.report.tables.grid import Grid, Row
from fatbench.report.tables.number_format import Entry

WIDTHS = {"column": 234.0, "text": 430.0}  # pt. A column of a two-column page; the text of an A4 or letter page
WIDE = 300.0  # pt above which a float spans both columns of a two-column page
PAGE = 600.0  # height of a float, pt
SIZES = {"small": 9.0, "footnotesize": 8.0}  # of the numbers, pt, as \documentclass{article} has them
SMALL = 7.0  # \scriptsize: spreads, the paper's number under ours, notes
LINE = 1.22  # from line to line, over the size
GAP = 6.0  # between two columns of a tabular: twice \tabcolsep
STUB = 0.42  # at most this fraction of a line is for the labels of the rows

SPREADS = ("beside", "below", "none")  # where the spread over seeds stands

GroupColumn = tuple[int, int]  # one heading of one group: indices into grid.groups and grid.columns
Tabular = tuple[Sequence[GroupColumn], range]  # its columns, its rows


@dataclass(frozen=True)
class TableStyle:
    """Where the parts of a number stand."""

    paper: str  # the paper's numbers "beside" ours or "under" them; "bare": there are none
    spread: str  # over seeds: one of SPREADS
    block: bool = False  # whether the labels of the first axis stand in separate lines, above their rows


@dataclass(frozen=True)
class Layout:
    """How a grid is laid out."""

    style: TableStyle
    size: str  # of SIZES
    stubs: list[float]  # how wide the labels of each axis are, pt
    tabulars: list[Tabular]


def points_of(size: str) -> float:
    """How high type of a size is."""
    return SIZES.get(size, SMALL)


def width_of(said: str) -> float:
    """What --width says, in pt. SpecError: not a width."""
    if said in WIDTHS:
        return WIDTHS[said]
    try:
        points = float(said)
    except ValueError:
        points = 0.0
    if not 100 <= points <= 1000:
        raise SpecError(f"--width: expected column, text or points from 100 to 1000, got '{said}'"
                        f"{did_you_mean(said, WIDTHS)}")  # fmt: skip
    return points


def span(words: str, size: float, bold: bool = False) -> float:
    """How wide words are, in pt, as Computer Modern sets them; rather too much than too little."""
    smaller = 1 + 0.046 * max(
        0.0, 10.0 - size
    )  # small letters are cut wider: a digit of cmr7 has 0.57 em, of cmr10 0.5
    return size * smaller * (1.15 if bold else 1.0) * sum(_EM.get(letter, 0.53) for letter in words)


_EM = (
    dict.fromkeys("iljt.,:;'|()[]! If/-", 0.4) | dict.fromkeys("0123456789", 0.51) | dict.fromkeys("m%@wM", 0.84)
    | dict.fromkeys("ABCDEFGHJKLNOPQRSTUVXYZ±+−<>=≥≤≈Δ", 0.78) | dict.fromkeys("W", 1.03)
)  # fmt: skip


def arrange(grid: Grid, width: float, published: str | None = None, spread: str | None = None) -> Layout:
    """The first arrangement that fits a line of `width`, in pieces no higher than a page.

    published: "column" or "below"; None: beside ours where that fits, else below. spread: one of SPREADS; None: beside
    our number where that fits, else below it.
    """
    places = [(g, c) for g in range(len(grid.groups)) for c in range(len(grid.columns))]
    beside = {"column": ("beside",), "below": ("under",), None: ("beside", "under")}[published]
    papers = beside if grid.has_published else ("bare",)
    spreads = [spread] if spread else ["beside", "below"] if any(v.std is not None for v in grid.all()) else ["beside"]
    tried = [(TableStyle(paper, where), size) for where in spreads for size in SIZES for paper in papers]
    if len(grid.axes) > 1:
        narrow = TableStyle(papers[-1], spreads[-1], block=True)
        tried += [(narrow, size) for size in (*SIZES, "scriptsize")]
    for style, size in tried:
        room = STUB * width  # else all that the numbers leave
        if style.block:
            room = min(room, width - width_of_tabular(grid, style, size, [0.0] * len(axes(grid, style)), places))
        stubs = _stubs(grid, style, size, room)
        if width_of_tabular(grid, style, size, stubs, places) <= width:
            return Layout(style, size, stubs, _slices(grid, style, size, stubs, [places]))
    size = min(SIZES, key=points_of)
    layouts = []
    blocks = (False, True) if len(grid.axes) > 1 else (False,)
    for style in (TableStyle(papers[-1], where, block) for where in spreads for block in blocks):
        stubs = _stubs(grid, style, size, STUB * width)
        parts = _parts(grid, style, size, stubs, places, width)
        layouts.append(Layout(style, size, stubs, _slices(grid, style, size, stubs, parts)))
    return min(layouts, key=lambda layout: len(layout.tabulars))


def row_seeds(row: Row) -> str:
    """ "[3/5]" where all numbers of a row lack the same number of seeds: it then stands at the label, once."""
    found = {(len(value.seeds), value.wanted) for group in row.values for value in group if value.mean is not None}
    seeds, wanted = next(iter(found)) if len(found) == 1 else (0, 0)
    return f"[{seeds}/{wanted}]" if seeds < wanted else ""


def axes(grid: Grid, style: TableStyle) -> list[str]:
    """The axes whose labels stand beside the numbers."""
    return grid.axes[1:] if style.block else grid.axes


def labels(grid: Grid, row: Row, style: TableStyle) -> list[str]:
    """A row's labels, the last with the seeds that all its numbers are of, where some are missing."""
    said = [row.key.get(axis, "") for axis in axes(grid, style)]
    return [*said[:-1], f"{said[-1]} {row_seeds(row)}".strip()] if said else said


def entry(grid: Grid, row: Row, place: GroupColumn) -> Entry:
    """What a table says of one value; the seeds that the row's label says are left out."""
    found = number_format.entry(row.values[place[0]][place[1]], grid.columns[place[1]])
    return replace(found, seeds="") if row_seeds(row) else found


def _stubs(grid: Grid, style: TableStyle, size: str, room: float) -> list[float]:
    """How wide the row labels of each axis are set, in pt, of `room` for all: longer ones go on in a second line."""
    said = [[axis, *(labels(grid, row, style)[i] for row in grid.rows)] for i, axis in enumerate(axes(grid, style))]
    body = points_of(size)
    natural = [max(span(label, body) for label in here) for here in said]
    least = [  # the lines after the first are indented by an em
        max(span(word, body) + body * (i > 0) for label in here for i, word in enumerate(label.split() or [""]))
        for here in said
    ]
    left, caps = room, list(natural)
    for done, axis in enumerate(sorted(range(len(natural)), key=natural.__getitem__)):
        caps[axis] = min(natural[axis], max(least[axis], left / (len(natural) - done)))
        left -= caps[axis]
    return caps


def width_of_tabular(
    grid: Grid, style: TableStyle, size: str, stubs: Sequence[float], places: Sequence[GroupColumn]
) -> float:
    """About how wide a tabular is, in pt."""
    return sum(stubs) + GAP * len(stubs) - GAP + sum(_width(grid, style, size, place) for place in places)


def _width(grid: Grid, style: TableStyle, size: str, place: GroupColumn) -> float:
    """A heading's columns, with the gaps before them."""
    body = points_of(size)
    ours = spread = paper = paper_spread = delta = below = 0.0
    for entry in _planned(grid, place):
        ours = max(ours, span(entry.number, body, entry.value.rank == "best"))
        spread = max(spread, _spread(entry, style))
        below = max(below, span(entry.spread, SMALL) if style.spread == "below" else 0.0)
        if not entry.published:
            continue
        mark = marks(filter(None, [entry.value.published_mark]))
        theirs = entry.published_spread if style.spread != "none" else ""
        paper = max(paper, span(entry.published, body))
        paper_spread = max(paper_spread, 2 + span(theirs if style.spread == "beside" else "", SMALL) + mark)
        delta = max(delta, span(entry.difference, body))
        if style.paper == "under":
            both = span(entry.published + theirs, SMALL) + mark
            below = max(below, both + (4 + span(entry.difference, SMALL) if entry.difference else 0))
    heading = max(span(line, body) for line in heading_lines(grid, place, size, style))
    if style.paper == "beside" and paper:
        own = max(ours + spread, below, span("ours", body)) + max(paper + paper_spread, span(grid.by, body))
        difference = max(delta, span("Δ", body)) + GAP if grid.has_differences else 0.0
        return max(own + difference + 2 * GAP, heading + GAP)
    return max(ours + spread, below, heading) + GAP


def _planned(grid: Grid, place: GroupColumn) -> list[Entry]:
    found = [entry(grid, row, place) for row in grid.rows]
    return [one for one in found if one.value.planned]


def _spread(entry: Entry, style: TableStyle) -> float:
    """What stands behind our number in small type, in pt."""
    return 2 + span(entry.spread * (style.spread == "beside") + entry.seeds, SMALL) + marks(entry.value.marks)


def marks(said: Iterable[str]) -> float:
    """Superscripts, in pt."""
    return sum(span(mark, 6.0) for mark in said)


def heading_lines(grid: Grid, place: GroupColumn, size: str, style: TableStyle) -> list[str]:
    """A heading in one line, or in two where it is wider than the numbers below it and has a space to break at."""
    column, body = grid.columns[place[1]], points_of(size)
    heading = column.label
    room = max((span(entry.number, body) + _spread(entry, style) for entry in _planned(grid, place)), default=0.0)
    words = heading.split()
    if len(words) < 2 or span(heading, body) <= room:
        return [heading]
    if column.images:
        return [f"{column.heading},", column.images]
    cuts = [[" ".join(words[:i]), " ".join(words[i:])] for i in range(1, len(words))]
    return min(cuts, key=lambda cut: max(span(line, body) for line in cut))


def _parts(
    grid: Grid, style: TableStyle, size: str, stubs: Sequence[float], places: list[GroupColumn], width: float
) -> list[list[GroupColumn]]:
    """The columns in blocks that are not too wide: groups together where they fit, else each cut evenly."""

    def fits(part: Sequence[GroupColumn]) -> bool:
        return width_of_tabular(grid, style, size, stubs, part) <= width

    parts: list[list[GroupColumn]] = []
    for g in range(len(grid.groups)):
        group = [place for place in places if place[0] == g]
        if parts and fits(parts[-1] + group):
            parts[-1] += group
            continue
        for count in range(1, len(group) + 1):
            ends = [round(i * len(group) / count) for i in range(count + 1)]
            cut = [group[a:b] for a, b in itertools.pairwise(ends)]
            if count == len(group) or all(fits(part) for part in cut):
                break
        parts += cut
    return parts


def _slices(
    grid: Grid, style: TableStyle, size: str, stubs: Sequence[float], parts: Sequence[Sequence[GroupColumn]]
) -> list[Tabular]:
    """Each block of columns with as many rows as a page has room for."""
    rows = range(len(grid.rows))
    most = PAGE - 100  # a caption over it
    cuts, used = [0], 0.0
    for row in rows:
        high = height(grid, style, size, stubs, range(row, row + 1)) - _head(grid, style, size)
        if used + high > most - _head(grid, style, size):
            cuts.append(row)
            used = 0.0
        used += high
    ends = [*cuts[1:], len(rows)]
    return [(part, rows[a:b]) for part in parts for a, b in zip(cuts, ends, strict=True)]


def _head(grid: Grid, style: TableStyle, size: str) -> float:
    lines = 2 + any(group.label for group in grid.groups) + (style.paper == "beside")
    return points_of(size) * LINE * lines + 15


def height(grid: Grid, style: TableStyle, size: str, stubs: Sequence[float], rows: range) -> float:
    """About how high a tabular of these rows is, in pt."""
    line = points_of(size) * LINE
    high = _head(grid, style, size)
    for row in rows:
        said = zip(labels(grid, grid.rows[row], style), stubs, strict=False)
        lines = max((-(-span(label, points_of(size)) // max(cap, 1.0)) for label, cap in said), default=1.0)
        values = [value for group in grid.rows[row].values for value in group]
        small = (style.paper == "under" and any(value.published is not None for value in values)) + (
            style.spread == "below" and any(value.std is not None for value in values)
        )
        begins = style.block and (row == rows[0] or number_format.blocks(grid)[row])
        high += line * (max(lines, 1.0) + begins) + small * (SMALL * LINE + 5) + 3 * number_format.blocks(grid)[row]
    return high


def lines_of(words: str, width: float, size: float = SMALL) -> int:
    """How many lines of `width` a paragraph takes."""
    return int(1.06 * span(words, size) // width) + 1


def packed(pieces: Sequence[tuple[float, str, str]], first: float) -> list[list[tuple[str, str]]]:
    """Pieces (height, kind, LaTeX) over floats no higher than a page; `first` is what the caption takes of each."""
    floats: list[list[tuple[str, str]]] = []
    left = 0.0
    for high, kind, words in pieces:
        if not floats or high > left:
            floats.append([])
            left = PAGE - first
        floats[-1].append((kind, words))
        left -= high + (6 if kind == "tabular" else 0)
    return floats
