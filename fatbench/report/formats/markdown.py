"""GitHub's Markdown: one pipe table a grid, published numbers in brackets behind the measured ones."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fatbench.report.tables import number_format
from fatbench.report.tables.grid import Column, Grid, Value


def render(grids: Sequence[Grid]) -> str:
    """A heading, a table and a list of notes for each grid."""
    return "\n".join(_grid(grid) for grid in grids)


def escape(words: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_|<>#~])", r"\\\1", words.replace("&", "&amp;")).replace("\n", " ")


def _grid(grid: Grid) -> str:
    heads = [escape(axis) for axis in grid.axes]
    for group in grid.groups:
        heads += [escape(f"{group.label}: {c.heading}" if group.label else c.heading) for c in grid.columns]
    rows = []
    for row in grid.rows:
        cells = [escape(row.key.get(axis, "")) for axis in grid.axes]
        for group_values in row.values:
            cells += [_cell(value, column) for value, column in zip(group_values, grid.columns, strict=True)]
        rows.append(cells)
    table = _table(heads, rows, len(grid.axes))
    lines = [f"### {escape(f'{grid.id}: {grid.title}')}", "", table, ""]
    if grid.label:
        lines[1:1] = ["", f"**{escape(grid.label)}**"]
    lines += [f"- *{escape(what)}*: {escape(note)}" for what, note in grid.notes]
    lines += [f"- {mark} {escape(note)}" for mark, note in grid.footnotes]
    return "\n".join(lines) + "\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A pipe table that is aligned as text too: the first `left` columns to the left, the others to the right."""
    widths = [max(len(head) + 2, *(len(row[i]) for row in rows), 0) for i, head in enumerate(heads)]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            f"{cell:{'<' if i < left else '>'}{width}}"
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(aligned)} |"

    rule = [f":{'-' * (width + 1)}" if i < left else f"{'-' * (width + 1)}:" for i, width in enumerate(widths)]
    return "\n".join([line(heads), f"|{'|'.join(rule)}|", *map(line, rows)])


def _cell(value: Value, column: Column) -> str:
    if not value.planned:
        return ""
    if value.mean is None:
        measured = number_format.MISSING
    else:
        measured = number_format.number(value.mean, column)
        measured = {"best": f"**{measured}**", "second": f"<u>{measured}</u>"}.get(value.rank, measured)
        measured = " ".join(filter(None, [measured, number_format.spread(value, column)]))
        if value.partial:
            measured += f" [{value.partial}]"
    measured += "".join(value.marks)
    if value.published is None:
        return measured
    published = f"pub. {number_format.published(value, column)}"
    if value.published_mark:
        published += f"<sup>{value.published_mark}</sup>"
    return f"{measured} ({', '.join(filter(None, [published, number_format.difference(value, column)]))})"
