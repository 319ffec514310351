"""How a table is laid out on the pages of a paper: how wide words are, which columns and rows go into one piece.

Nothing is scaled: type is \\small, else \\footnotesize, and never smaller than \\scriptsize. What does not fit a line
is broken into blocks of columns; what does not fit a page goes on in a further float.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fatbench.errors import SpecError, did_you_mean
from fatbench.report.tables import number_format
from fatbench.report.tables.grid import Grid
from fatbench.report.tables.number_format import Entry

WIDTHS = {"column": 234.0, "text": 430.0}  # pt. A column of a two-column page; the text of an A4 or letter page
WIDE = 300.0  # pt above which a float spans both columns of a two-column page
PAGE = 600.0  # height of a float, pt
SIZES = {"small": 9.0, "footnotesize": 8.0}  # of the numbers, pt, as \documentclass{article} has them
SMALL = 7.0  # \scriptsize: spreads, the paper's number under ours, notes
LINE = 1.22  # from line to line, over the size
GAP = 6.0  # between two columns of a tabular: twice \tabcolsep
STUB = 0.42  # at most this fraction of a line is for the labels of the rows

Place = tuple[int, int]  # one heading of one group: indices into grid.groups and grid.columns
Tabular = tuple[Sequence[Place], range]  # its columns, its rows


@dataclass(frozen=True)
class Layout:
    """How a grid is laid out."""

    style: str  # the paper's numbers "beside" ours or "under" them; "bare" where there are none
    size: str  # of SIZES
    stubs: list[float]  # how wide the labels of each axis are, pt
    tabulars: list[Tabular]


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


def arrange(grid: Grid, width: float, published: str | None = None) -> Layout:
    """The first arrangement that fits a line of `width`, in pieces no higher than a page.

    published: "column" or "below"; None: beside ours where that fits, else below.
    """
    places = [(g, c) for g in range(len(grid.groups)) for c in range(len(grid.columns))]
    beside = {"column": ("beside",), "below": ("under",), None: ("beside", "under")}[published]
    styles = beside if grid.has_published else ("bare",)
    for size in SIZES:
        stubs = _stubs(grid, size, width)
        for style in styles:
            if width_of_tabular(grid, style, size, stubs, places) <= width:
                return Layout(style, size, stubs, _slices(grid, style, size, stubs, [places]))
    style, size = styles[-1], min(SIZES, key=lambda size: SIZES[size])
    stubs = _stubs(grid, size, width)
    parts = _parts(grid, style, size, stubs, places, width)
    return Layout(style, size, stubs, _slices(grid, style, size, stubs, parts))


def _stubs(grid: Grid, size: str, width: float) -> list[float]:
    """How wide the row labels of each axis are set, in pt: longer ones go on in a second line."""
    labels = [[axis, *(row.key.get(axis, "") for row in grid.rows)] for axis in grid.axes]
    natural = [max(span(label, SIZES[size]) for label in here) for here in labels]
    least = [max(span(word, SIZES[size]) for label in here for word in label.split() or [""]) for here in labels]
    left, caps = STUB * width, list(natural)
    for done, axis in enumerate(sorted(range(len(natural)), key=natural.__getitem__)):
        caps[axis] = max(least[axis], min(natural[axis], left / (len(natural) - done)))
        left -= caps[axis]
    return caps


def width_of_tabular(grid: Grid, style: str, size: str, stubs: Sequence[float], places: Sequence[Place]) -> float:
    """About how wide a tabular is, in pt."""
    return sum(stubs) + GAP * len(stubs) - GAP + sum(_width(grid, style, size, place) for place in places)


def _width(grid: Grid, style: str, size: str, place: Place) -> float:
    """A heading's columns, with the gaps before them."""
    body = SIZES[size]
    ours = spread = paper = paper_spread = delta = below = 0.0
    for entry in _planned(grid, place):
        ours = max(ours, span(entry.number, body, entry.value.rank == "best"))
        spread = max(spread, _spread(entry))
        if not entry.published:
            continue
        mark = marks(filter(None, [entry.value.published_mark]))
        paper = max(paper, span(entry.published, body))
        paper_spread = max(paper_spread, 2 + span(entry.published_spread, SMALL) + mark)
        delta = max(delta, span(entry.difference, body))
        both = span(entry.published + entry.published_spread, SMALL) + mark
        below = max(below, both + (4 + span(entry.difference, SMALL) if entry.difference else 0))
    heading = max(span(line, body) for line in heading_lines(grid, place, size))
    if style == "beside" and paper:
        own = max(ours + spread, span("ours", body)) + max(paper + paper_spread, span("paper", body))
        return max(own + max(delta, span("Δ", body)) + 3 * GAP, heading + GAP)
    return max(ours + spread, below if style == "under" else 0.0, heading) + GAP


def _planned(grid: Grid, place: Place) -> list[Entry]:
    return [entry for entry in number_format.entries(grid, *place) if entry.value.planned]


def _spread(entry: Entry) -> float:
    """What stands behind our number in small type, in pt."""
    return 2 + span(entry.spread + entry.seeds, SMALL) + marks(entry.value.marks)


def marks(said: Iterable[str]) -> float:
    """Superscripts, in pt."""
    return sum(span(mark, 6.0) for mark in said)


def heading_lines(grid: Grid, place: Place, size: str) -> list[str]:
    """A heading in one line, or in two where it is wider than the numbers below it and has a space to break at."""
    heading, body = grid.columns[place[1]].heading, SIZES[size]
    room = max((span(entry.number, body) + _spread(entry) for entry in _planned(grid, place)), default=0.0)
    words = heading.split()
    if len(words) < 2 or span(heading, body) <= room:
        return [heading]
    cuts = [[" ".join(words[:i]), " ".join(words[i:])] for i in range(1, len(words))]
    return min(cuts, key=lambda cut: max(span(line, body) for line in cut))


def _parts(
    grid: Grid, style: str, size: str, stubs: Sequence[float], places: list[Place], width: float
) -> list[list[Place]]:
    """The columns in blocks that are not too wide: groups together where they fit, else each cut evenly."""

    def fits(part: Sequence[Place]) -> bool:
        return width_of_tabular(grid, style, size, stubs, part) <= width

    parts: list[list[Place]] = []
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
    grid: Grid, style: str, size: str, stubs: Sequence[float], parts: Sequence[Sequence[Place]]
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


def _head(grid: Grid, style: str, size: str) -> float:
    lines = 2 + any(group.label for group in grid.groups) + (style == "beside")
    return SIZES[size] * LINE * lines + 15


def height(grid: Grid, style: str, size: str, stubs: Sequence[float], rows: range) -> float:
    """About how high a tabular of these rows is, in pt."""
    line = SIZES[size] * LINE
    high = _head(grid, style, size)
    for row in rows:
        labels = [(row_label, cap) for row_label, cap in zip(grid.rows[row].key.values(), stubs, strict=False)]
        lines = max((-(-span(label, SIZES[size]) // max(cap, 1.0)) for label, cap in labels), default=1.0)
        under = style == "under" and any(v.published is not None for group in grid.rows[row].values for v in group)
        high += line * max(lines, 1.0) + (SMALL * LINE + 5 if under else 0.0) + 3 * number_format.blocks(grid)[row]
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
