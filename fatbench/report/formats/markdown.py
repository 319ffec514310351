"""GitHub's Markdown: one pipe table a grid, published numbers in further columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from tabulate import tabulate

from fatbench.report.tables import number_format
from fatbench.report.tables.notes import share_notes
from fatbench.report.tables.sheet import Entry, Sheet


def render(grids: Sequence[Sheet]) -> str:
    """A heading, a table and a list of notes for each grid, then the notes that tables of a suite share."""
    sections: list[str] = []
    for _, suite_grids in itertools.groupby(grids, key=lambda grid: (grid.suite, grid.preset)):
        shortened_grids, shared_notes = share_notes(list(suite_grids))
        sections += map(_section, shortened_grids)
        if shared_notes:
            sections.append("\n".join(["### Notes of several tables", "", *map(_note, shared_notes)]) + "\n")
    return "\n".join(sections)


def escape(words: str) -> str:
    """Escape text so that Markdown shows it unchanged."""
    # a parenthesis makes a link only behind a bracket
    return re.sub(r"([\\`*_|<>#~]|(?<=\])\()", r"\\\1", words.replace("&", "&amp;")).replace("\n", " ")


def _section(grid: Sheet) -> str:
    heads = [escape(axis) for axis in grid.axes]
    rows = [[escape(label) for label in row.labels(grid.axes)] for row in grid.rows]
    for g, group in enumerate(grid.groups):
        for c, column in enumerate(grid.columns):
            heading = f"{group.label}: {column.label}" if group.label else column.label
            entries = number_format.column_of(grid, g, c)
            heads.append(escape(heading))
            columns = [[_own_number(entry) for entry in entries]]  # ours, then the published ones if any
            if any(entry.paper for entry in entries):
                heads.append(escape(f"{heading}, {grid.by}"))
                columns.append([_published(entry) for entry in entries])
            rows = [[*row, *cells] for row, *cells in zip(rows, *columns, strict=True)]
    align = ["left"] * len(grid.axes) + ["right"] * (len(heads) - len(grid.axes))
    table = tabulate(rows, heads, tablefmt="pipe", colalign=align, disable_numparse=True)
    lines = [f"### {escape(f'{grid.id}: {grid.title}')}", "", table, ""]
    lines += map(_note, grid.notes)
    lines += [f"- {symbol} {escape(note)}" for symbol, note in grid.footnotes]
    return "\n".join(lines) + "\n"


def _note(named_note: tuple[str, str]) -> str:
    note_name, note = named_note
    return f"- *{escape(note_name)}*: {escape(note)}"


def _own_number(entry: Entry) -> str:
    if not entry.planned:
        return ""
    number = f"**{entry.number}**" if entry.rank == "best" else entry.number
    number_text = " ".join(filter(None, [number, entry.spread, f"[{entry.partial}]" * bool(entry.partial)]))
    return number_text + "".join(entry.marks)


def _published(entry: Entry) -> str:
    """The paper's number and, in brackets, ours minus it."""
    if not entry.paper:
        return ""
    mark_html = f"<sup>{entry.published_mark}</sup>" if entry.published_mark else ""
    return f"{entry.paper}{mark_html}" + f" ({entry.delta})" * bool(entry.delta)
