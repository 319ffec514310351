"""Tables in colour for a terminal: significantly best numbers bold, the paper's dim, differences coloured.

A table that is too wide puts the paper's number under ours, and is then cut into blocks of columns that fit.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fatbench.report.tables import number_format
from fatbench.report.tables.sheet import Entry, Sheet, varying, with_numbers

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

GroupColumn = tuple[int, int]  # indices into grid.groups and grid.columns


def render(grids: Sequence[Sheet]) -> str:
    """Text with ANSI colours where stdout is a terminal or FORCE_COLOR asks for them; as wide as the terminal."""
    console = _console()
    for position, grid in enumerate(grids):
        if position:
            console.print()
        _print(console, grid)
    return _text(console)


def _console() -> Console:
    from rich.console import Console

    return Console(file=io.StringIO(), force_terminal=sys.stdout.isatty() or None, highlight=False, markup=False)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip(' ')}\n" for line in console.file.getvalue().splitlines())


def _print_title(console: Console, grid: Sheet) -> None:
    from rich.text import Text

    console.print(Text.assemble((grid.id, "bold cyan"), "  ", (grid.name, "bold")))
    if grid.label:
        console.print(Text(grid.label, "bold black on yellow"))


def _print(console: Console, grid: Sheet) -> None:
    from rich.text import Text

    _print_title(console, grid)
    grid, left_out = with_numbers(grid)
    grid, constant_labels = varying(grid)
    if constant_labels:
        console.print(Text(", ".join(constant_labels)))
    is_beside, blocks = _layout(grid, console.width)
    for block in blocks:
        console.print(block.table(console.width))
    if left_out:
        console.print(Text(f"not measured: {'; '.join(left_out)}", "dim"))
    if grid.has_published:
        below_text, compared = "" if is_beside else ", under ours", " and the difference" * grid.has_differences
        published_at = f" ({grid.published_at})" * bool(grid.published_at)
        below_text += "," * bool(below_text and compared)
        explanation = f"dim: the {grid.by}'s number{published_at}{below_text}{compared}"
        console.print(Text(explanation, "dim"))
    for note_name, note in grid.notes:
        doubtful = note_name in ("MIXED", "doubt")
        name = Text(f"{note_name}: ", "bold yellow" if doubtful else "italic dim cyan")
        console.print(Text.assemble(name, (note, "yellow" if doubtful else "dim")))
    for symbol, note in grid.footnotes:
        console.print(Text.assemble((symbol, "red"), f" {note}"))


@dataclass(frozen=True)
class TableBlock:
    """A part of a grid's columns, the row labels before them."""

    grid: Sheet
    labels: list[list[Text]]  # [axis][row]
    places: Sequence[GroupColumn]
    cells: dict[GroupColumn, list[Text]]  # [place][row]
    widest: dict[GroupColumn | int, int]  # letters in the widest line of each of these columns, an axis by its position

    def heads(self) -> list[Text]:
        from rich.text import Text

        heads, last_group = [Text(axis) for axis in self.grid.axes], None
        for g, c in self.places:
            head = Text(self.grid.columns[c].label)
            if label := self.grid.groups[g].label:  # over the first column of the group in this block
                head = Text.assemble((label if g != last_group else " ", "cyan"), "\n", head)
            last_group = g
            heads.append(head)
        return heads

    def columns(self) -> list[list[Text]]:
        return [*self.labels, *(self.cells[group_column] for group_column in self.places)]

    def widths(self) -> list[int]:
        """Letters of each column, with its head."""
        cell_widths = (self.widest[column_key] for column_key in (*range(len(self.labels)), *self.places))
        return [max(_widest([head]), widest_cell) for head, widest_cell in zip(self.heads(), cell_widths, strict=True)]

    def width(self) -> int:
        """Letters from edge to edge: two between columns, one at each side."""
        widths = self.widths()
        return sum(widths) + 2 * (len(widths) - 1) + 2

    def table(self, terminal_width: int) -> Table:
        """The table of rich for a terminal of this width in letters."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style="bold")
        fits = self.width() <= terminal_width  # else rich is to measure and cut
        for position, (head, width) in enumerate(zip(self.heads(), self.widths(), strict=True)):
            several = position == 0 and len(self.grid.axes) > 1
            head.justify = "left" if position < len(self.grid.axes) else "right"
            table.add_column(head, no_wrap=True, style="bold" if several else "", width=width if fits else None)
        begins = [*number_format.blocks(self.grid)[1:], False]
        for row, end in zip(zip(*self.columns(), strict=True), begins, strict=True):
            table.add_row(*row, end_section=end)
        return table


def _layout(grid: Sheet, width: int) -> tuple[bool, list[TableBlock]]:
    """(whether the paper's numbers stand beside ours, the blocks of columns); one block where that fits."""
    from rich.text import Text

    group_columns = [(g, c) for g in range(len(grid.groups)) for c in range(len(grid.columns))]
    rows = number_format.row_labels(grid)
    labels = [[Text(row[axis]) for row in rows] for axis in range(len(grid.axes))]
    block = None
    for is_beside in (True, False) if grid.has_published else (True,):
        columns = {(g, c): (number_format.column_of(grid, g, c), grid.columns[c].label) for g, c in group_columns}
        cells = {place: _cells(*column, is_beside) for place, column in columns.items()}
        widest: dict[GroupColumn | int, int] = {axis: _widest(column) for axis, column in enumerate(labels)}
        widest |= {group_column: _widest(column) for group_column, column in cells.items()}
        block = TableBlock(grid, labels, group_columns, cells, widest)
        if block.width() <= width:
            return is_beside, [block]
    assert block is not None
    blocks: list[TableBlock] = []
    for g in range(len(grid.groups)):
        group = [group_column for group_column in group_columns if group_column[0] == g]
        for count in range(1, len(group) + 1):
            size = -(-len(group) // count)
            group_blocks = [replace(block, places=group[i : i + size]) for i in range(0, len(group), size)]
            # as few blocks of equal size as fit the terminal
            if size == 1 or all(cut_block.width() <= width for cut_block in group_blocks):
                break
        blocks += group_blocks
    return is_beside, blocks


def _widest(column: Iterable[Text]) -> int:
    """Letters in the widest line, as a terminal counts them."""
    from rich.cells import cell_len

    return max((cell_len(line) for text in column for line in text.plain.split("\n")), default=0)


def _cells(entries: Sequence[Entry], heading: str, is_beside: bool) -> list[Text]:
    """The cells of a column, each part padded to its widest, so that decimal points are aligned."""
    from rich.text import Text

    parts_by_row = [_entry_parts(entry) for entry in entries]
    widths = [max(len("".join(words for words, _ in row[i])) for row in parts_by_row) for i in range(5)]
    cells = []
    for row in parts_by_row:
        lines = [Text(), Text()]
        for i, styled_words in enumerate(row):
            words = "".join(word for word, _ in styled_words)
            space = " " * (widths[i] - len(words))
            is_right_aligned = i in (0, 2, 4)  # numbers end, what follows them begins, at the same place
            gap = " " * (i == 4 and widths[4] > 0)
            pieces = [*styled_words, (space, "")] if not is_right_aligned else [(gap + space, ""), *styled_words]
            lines[i >= 2].append_text(Text.assemble(*pieces))
        measured_line, paper = lines
        measured_width, paper_width = sum(widths[:2]), sum(widths[2:]) + (widths[4] > 0)
        width = max(
            len(heading),
            measured_width + 2 + paper_width if is_beside and paper_width else max(measured_width, paper_width),
        )
        if is_beside:
            measured_line.pad_left(width - measured_width - (2 + paper_width if paper_width else 0))
        else:
            for line in lines:
                line.pad_left(width - len(line))
        if not paper.plain.strip() and not (is_beside and any(widths[2:])):
            cells.append(measured_line)
        else:
            cells.append(Text.assemble(measured_line, "  " if is_beside else "\n", paper))
    return cells


Part = list[tuple[str, str]]  # words with their styles


def _entry_parts(entry: Entry) -> tuple[Part, Part, Part, Part, Part]:
    """(our number; its spread, seeds and marks; the paper's number; its mark; the difference), each in styled words."""
    if not entry.planned:
        return [], [], [], [], []
    rank = "bold" if entry.rank == "best" else ""
    measured_number = [(entry.number, "dim" if entry.mean is None else rank)]
    small = ((entry.spread, "dim"), (entry.lacking, "yellow"))
    beside = [(f" {words}", style) for words, style in small if words] + [(symbol, "red") for symbol in entry.marks]
    if not entry.paper:
        return measured_number, beside, [], [], []
    colour = {"better": "green", "worse": "red", "": "dim"}[entry.direction]
    paper = [(entry.paper, "dim")], [(entry.published_mark, "dim italic")], [(entry.delta, colour)]
    return measured_number, beside, *paper
