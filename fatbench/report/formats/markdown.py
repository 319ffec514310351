"""GitHub's Markdown: one pipe table a grid, published numbers in brackets behind the measured ones."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tabulate import tabulate

from fatbench.report.tables import number_format
from fatbench.report.tables.grid import Grid
from fatbench.report.tables.number_format import Entry


def render(grids: Sequence[Grid]) -> str:
    """A heading, a table and a list of notes for each grid."""
    return "\n".join(_grid(grid) for grid in grids)


def escape(words: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_|<>#~]|(?<=\])\()", r"\\\1", words.replace("&", "&amp;")).replace("\n", " ")


def _grid(grid: Grid) -> str:
    heads = [escape(axis) for axis in grid.axes]
    for group in grid.groups:
        heads += [escape(f"{group.label}: {c.label}" if group.label else c.label) for c in grid.columns]
    rows = []
    for row in grid.rows:
        labels = [escape(row.key.get(axis, "")) for axis in grid.axes]
        values = (pair for group in row.values for pair in zip(group, grid.columns, strict=True))
        rows.append([*labels, *(_entry(number_format.entry(value, column)) for value, column in values)])
    align = ["left"] * len(grid.axes) + ["right"] * (len(heads) - len(grid.axes))
    table = tabulate(rows, heads, tablefmt="pipe", colalign=align, disable_numparse=True)
    lines = [f"### {escape(f'{grid.id}: {grid.title}')}", "", table, ""]
    lines += [f"- *{escape(what)}*: {escape(note)}" for what, note in grid.notes]
    lines += [f"- {mark} {escape(note)}" for mark, note in grid.footnotes]
    return "\n".join(lines) + "\n"


def _entry(entry: Entry) -> str:
    value = entry.value
    if not value.planned:
        return ""
    number = f"**{entry.number}**" if value.rank == "best" else entry.number
    measured = " ".join(filter(None, [number, entry.spread, f"[{value.partial}]" * bool(value.partial)]))
    measured += "".join(value.marks)
    if not entry.published:
        return measured
    mark = f"<sup>{value.published_mark}</sup>" if value.published_mark else ""
    word = "formula" if value.formula else "pub."
    return f"{measured} ({', '.join(filter(None, [f'{word} {entry.paper}{mark}', entry.difference]))})"
