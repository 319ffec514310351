"""Tables in colour for a terminal: what is significantly best bold, the paper's number dim, the difference coloured.

A table that is too wide puts the paper's number under ours, and is then cut into blocks of columns that fit.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fatbench.report.tables import number_format
from fatbench.report.tables.grid import Grid, measured, varying
from fatbench.report.tables.number_format import Entry

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

GroupColumn = tuple[int, int]  # indices into grid.groups and grid.columns


def render(grids: Sequence[Grid], published: str | None = None) -> str:
    """Text with ANSI colours where stdout is a terminal or FORCE_COLOR asks for them; as wide as the terminal.

    published: the paper's numbers in a separate "column" or "below" ours; None: beside ours where that fits.
    """
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=sys.stdout.isatty() or None, highlight=False, markup=False)
    for position, grid in enumerate(grids):
        if position:
            console.print()
        _print(console, grid, published)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip(' ')}\n" for line in console.file.getvalue().splitlines())


def _print(console: Console, grid: Grid, published: str | None) -> None:
    from rich.text import Text

    console.print(Text.assemble((grid.id, "bold cyan"), "  ", (grid.name, "bold")))
    if grid.label:
        console.print(Text(grid.label, "bold black on yellow"))
    grid, left_out = measured(grid)
    grid, alike = varying(grid)
    if alike:
        console.print(Text(", ".join(alike)))
    beside, blocks = _layout(grid, console.width, published)
    for block in blocks:
        console.print(block.table(console.width))
    if left_out:
        console.print(Text(f"not measured: {'; '.join(left_out)}", "dim"))
    if grid.has_published:
        under, compared = "" if beside else ", under ours", " and the difference" * grid.has_differences
        at = f" ({grid.published_at})" * bool(grid.published_at)
        said = f"dim: the {grid.by}'s number{at}{under}{',' * bool(under and compared)}{compared}"
        console.print(Text(said, "dim"))
    for what, note in grid.notes:
        doubtful = what in ("MIXED", "doubt")
        name = Text(f"{what}: ", "bold yellow" if doubtful else "italic dim cyan")
        console.print(Text.assemble(name, (note, "yellow" if doubtful else "dim")))
    for mark, note in grid.footnotes:
        console.print(Text.assemble((mark, "red"), f" {note}"))


@dataclass(frozen=True)
class TableBlock:
    """A part of a grid's columns, the row labels before them."""

    grid: Grid
    labels: list[list[Text]]  # [axis][row]
    places: Sequence[GroupColumn]
    cells: dict[GroupColumn, list[Text]]  # [place][row]
    widest: dict[GroupColumn | int, int]  # letters in the widest line of each of these columns, an axis by its position

    def heads(self) -> list[Text]:
        from rich.text import Text

        heads, before = [Text(axis) for axis in self.grid.axes], None
        for g, c in self.places:
            head = Text(self.grid.columns[c].label)
            if label := self.grid.groups[g].label:  # over the first column of the group in this block
                head = Text.assemble((label if g != before else " ", "cyan"), "\n", head)
            before = g
            heads.append(head)
        return heads

    def columns(self) -> list[list[Text]]:
        return [*self.labels, *(self.cells[place] for place in self.places)]

    def widths(self) -> list[int]:
        """Letters of each column, with its head."""
        below = (self.widest[one] for one in (*range(len(self.labels)), *self.places))
        return [max(_widest([head]), most) for head, most in zip(self.heads(), below, strict=True)]

    def width(self) -> int:
        """Letters from edge to edge: two between columns, one at each side."""
        widths = self.widths()
        return sum(widths) + 2 * (len(widths) - 1) + 2

    def table(self, most: int) -> Table:
        """For a terminal of so many letters."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style="bold")
        fits = self.width() <= most  # else rich is to measure and cut
        for position, (head, width) in enumerate(zip(self.heads(), self.widths(), strict=True)):
            several = position == 0 and len(self.grid.axes) > 1
            head.justify = "left" if position < len(self.grid.axes) else "right"
            table.add_column(head, no_wrap=True, style="bold" if several else "", width=width if fits else None)
        begins = [*number_format.blocks(self.grid)[1:], False]
        for row, end in zip(zip(*self.columns(), strict=True), begins, strict=True):
            table.add_row(*row, end_section=end)
        return table


def _layout(grid: Grid, width: int, published: str | None = None) -> tuple[bool, list[TableBlock]]:
    """(paper beside ours, blocks): all in one with the paper's numbers beside ours, or under them, or in blocks."""
    from rich.text import Text

    places = [(g, c) for g in range(len(grid.groups)) for c in range(len(grid.columns))]
    rows = number_format.row_labels(grid)
    labels = [[Text(row[axis]) for row in rows] for axis in range(len(grid.axes))]
    either = (True, False) if grid.has_published else (True,)
    block = None
    for beside in {"column": (True,), "below": (False,), None: either}[published]:
        cells = {(g, c): _cells(number_format.entries(grid, g, c), grid.columns[c].label, beside) for g, c in places}
        widest: dict[GroupColumn | int, int] = {axis: _widest(column) for axis, column in enumerate(labels)}
        widest |= {place: _widest(column) for place, column in cells.items()}
        block = TableBlock(grid, labels, places, cells, widest)
        if block.width() <= width:
            return beside, [block]
    assert block is not None
    blocks: list[TableBlock] = []
    for g in range(len(grid.groups)):
        group = [place for place in places if place[0] == g]
        for count in range(1, len(group) + 1):
            size = -(-len(group) // count)
            cut = [replace(block, places=group[i : i + size]) for i in range(0, len(group), size)]
            if size == 1 or all(part.width() <= width for part in cut):
                break
        blocks += cut
    return beside, blocks


def _widest(column: Iterable[Text]) -> int:
    """Letters in the widest line, as a terminal counts them."""
    from rich.cells import cell_len

    return max((cell_len(line) for text in column for line in text.plain.split("\n")), default=0)


def _cells(entries: Sequence[Entry], heading: str, beside: bool) -> list[Text]:
    """A column's cells, each part as wide as its widest, so that points stand under points."""
    from rich.text import Text

    parts = [_parts(entry) for entry in entries]
    widths = [max(len("".join(words for words, _ in row[i])) for row in parts) for i in range(5)]
    cells = []
    for row in parts:
        lines = [Text(), Text()]
        for i, part in enumerate(row):
            words = "".join(word for word, _ in part)
            space = " " * (widths[i] - len(words))
            left = i in (0, 2, 4)  # numbers end, what follows them begins, at the same place
            gap = " " * (i == 4 and widths[4] > 0)
            pieces = [*part, (space, "")] if not left else [(gap + space, ""), *part]
            lines[i >= 2].append_text(Text.assemble(*pieces))
        ours, paper = lines
        upper, lower = sum(widths[:2]), sum(widths[2:]) + (widths[4] > 0)
        width = max(len(heading), upper + 2 + lower if beside and lower else max(upper, lower))
        if beside:
            ours.pad_left(width - upper - (2 + lower if lower else 0))
        else:
            for line in lines:
                line.pad_left(width - len(line))
        if not paper.plain.strip() and not (beside and any(widths[2:])):
            cells.append(ours)
        else:
            cells.append(Text.assemble(ours, "  " if beside else "\n", paper))
    return cells


Part = list[tuple[str, str]]  # words with their styles


def _parts(entry: Entry) -> tuple[Part, Part, Part, Part, Part]:
    """Our number; its spread, seeds and marks; the paper's number; its mark; the difference."""
    value = entry.value
    if not value.planned:
        return [], [], [], [], []
    rank = "bold" if value.rank == "best" else ""
    ours = [(entry.number, "dim" if value.mean is None else rank)]
    small = ((entry.spread, "dim"), (entry.seeds, "yellow"))
    tail = [(f" {words}", style) for words, style in small if words] + [(mark, "red") for mark in value.marks]
    if not entry.published:
        return ours, tail, [], [], []
    colour = {"better": "green", "worse": "red", "": "dim"}[entry.direction]
    return ours, tail, [(entry.paper, "dim")], [(value.published_mark, "dim italic")], [(entry.difference, colour)]
