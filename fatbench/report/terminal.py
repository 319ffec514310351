"""Tables in colour for a terminal: best bold, second underlined, the paper's number dim, the difference coloured.

A table that is too wide puts the paper's number under ours, and is then cut into blocks of columns that fit.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fatbench.report import text
from fatbench.report.grid import Column, Grid, Value

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

Place = tuple[int, int]  # indices into grid.groups and grid.columns


def render(grids: Sequence[Grid]) -> str:
    """Text with ANSI colours where stdout is a terminal or FORCE_COLOR asks for them; as wide as the terminal."""
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=sys.stdout.isatty() or None, highlight=False)
    for position, grid in enumerate(grids):
        if position:
            console.print()
        _print(console, grid)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _print(console: Console, grid: Grid) -> None:
    from rich.text import Text

    console.print(Text.assemble((grid.id, "bold cyan"), "  ", (grid.name, "bold")))
    if grid.label:
        console.print(Text(grid.label, "bold black on yellow"))
    beside, parts = _layout(console, grid)
    for part in parts:
        console.print(_table(grid, part, beside))
    width = max(len(what) for what, _ in grid.notes)
    from rich.table import Table

    notes = Table.grid(padding=(0, 2))
    notes.add_column(min_width=min(width, 10), style="dim italic", justify="right")
    notes.add_column(overflow="fold", style="dim")
    for what, note in grid.notes:
        style = "yellow" if what == "MIXED" else ""
        notes.add_row(Text(what, style), Text(note, style))
    for mark, note in grid.footnotes:
        notes.add_row(Text(mark, "red"), Text(note))
    console.print(notes)


def _layout(console: Console, grid: Grid) -> tuple[bool, list[list[Place]]]:
    """(paper beside ours, the columns of each block): the first arrangement that fits the terminal."""
    places = [(g, c) for g in range(len(grid.groups)) for c in range(len(grid.columns))]

    def fits(part: list[Place], beside: bool) -> bool:
        return console.measure(_table(grid, part, beside)).maximum <= console.width

    for beside in (True, False):
        if fits(places, beside):
            return beside, [places]
    parts: list[list[Place]] = []
    for g in range(len(grid.groups)):
        group = [place for place in places if place[0] == g]
        for count in range(1, len(group) + 1):
            size = -(-len(group) // count)
            cut = [group[i : i + size] for i in range(0, len(group), size)]
            if size == 1 or all(fits(part, False) for part in cut):
                break
        parts += cut
    return False, parts


def _table(grid: Grid, places: Sequence[Place], beside: bool) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style="bold")
    for axis in grid.axes:
        table.add_column(Text(axis), no_wrap=True, style="bold" if axis == grid.axes[0] and len(grid.axes) > 1 else "")
    before = None
    for g, c in places:
        column = grid.columns[c]
        head = Text(column.heading)
        if grid.groups[g].label:
            # The group's label stands over its first column, and again where a block of columns begins.
            head = Text.assemble((grid.groups[g].label if g != before else " ", "cyan"), "\n", head)
        before = g
        table.add_column(head, justify="right", no_wrap=True)
    block = text.blocks(grid)
    for index, (row, labels) in enumerate(zip(grid.rows, text.row_labels(grid), strict=True)):
        cells = [_cell(row.values[g][c], grid.columns[c], beside) for g, c in places]
        end = index + 1 < len(grid.rows) and block[index + 1]
        table.add_row(*(Text(label) for label in labels), *cells, end_section=end)
    return table


def _cell(value: Value, column: Column, beside: bool) -> Text:
    from rich.text import Text

    cell = Text()
    if not value.planned:
        return cell
    if value.mean is None:
        cell.append(text.MISSING, "dim")
    else:
        cell.append(text.number(value.mean, column), {"best": "bold", "second": "underline"}.get(value.rank, ""))
        if spread := text.spread(value, column):
            cell.append(f" {spread}", "dim")
        if value.partial:
            cell.append(f" {text.share(value)}", "yellow")
    if value.marks:
        cell.append("".join(value.marks), "red")
    if value.published is not None:
        cell.append("  " if beside else "\n")
        cell.append(text.published(value, column), "dim")
        cell.append(value.published_mark, "dim italic")
        if difference := text.difference(value, column):
            better = (value.difference or 0) * (-1 if column.best == "min" else 1)
            neutral = column.best == "none" or float(difference) == 0
            cell.append(f" {difference}", "dim" if neutral else "green" if better > 0 else "red")
    return cell
