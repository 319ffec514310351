"""The documents as a site: `make docs`. Sphinx reads this; warnings are errors there."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

project = "fatbench"
author = "The fatbench authors"
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "fatbench"
html_show_sphinx = False
exclude_patterns = ["requirements.txt"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
# links that lead out of docs/ are for the reader of the repository; here they become downloads or stay text
suppress_warnings = ["myst.xref_missing"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # they stand in the signature's place in the docstring, with shapes and units


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", lambda app, what, name, thing, options, lines: plain(lines))
    app.connect("source-read", complete)


def complete(app, name: str, source: list[str]) -> None:
    """A page that the index does not name stands at its end; the functions of every table, in the reference."""
    if name == "reference":
        source[0] = re.sub(r"<!-- Sphinx puts .*-->", tables(), source[0])
    if name == "index":
        pages = sorted(page.stem for page in Path(__file__).parent.glob("*.md"))
        left = [page for page in pages if page != "index" and f"\n{page}\n" not in source[0]]
        if left:
            source[0] += "\n".join(["", "```{toctree}", ":caption: Further", ":maxdepth: 1", "", *left, "```", ""])


def tables() -> str:
    """The docstrings of every function that a suite can name, under those of their modules."""
    from fatbench.suite.entry import entry_of
    from fatbench.suite.signatures import TABLES

    found, seen = [], set()
    for module, table in TABLES.values():
        members: dict[str, list[str]] = {}
        for function in (
            entry_of(value).function for value in getattr(importlib.import_module(module), table).values()
        ):
            members.setdefault(function.__module__, []).append(function.__name__)
        lines = [f".. autofunction:: {m}.{n}" for m, names in members.items() if m in seen for n in names]
        lines += [f".. automodule:: {m}\n   :members: {', '.join(n)}" for m, n in members.items() if m not in seen]
        found += [f"### {table.capitalize()}", "", "```{eval-rst}", *lines, "```", ""]
        seen |= set(members)
    return "\n".join(found)


def plain(lines: list[str]) -> None:
    """Our docstrings are plain text: markup is escaped; tables stay tables, indented blocks stay as they are."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        rows = [line for line in block.splitlines() if line.strip()]
        if rows and all(row.lstrip().startswith("|") for row in rows):
            found += _table(rows)
        elif rows and all(row.startswith(" ") for row in rows):
            found += ["::", "", *("    " + row for row in rows), ""]
        else:
            found += [_escaped(row.strip()) for row in rows] + [""]
    lines[:] = found


def _table(rows: list[str]) -> list[str]:
    """A Markdown table as a table of reStructuredText; its second row only separates the heading."""
    cells = [[cell.strip() for cell in row.strip().strip("|").split(" | ")] for row in rows]
    found = [".. list-table::", "   :header-rows: 1", ""]
    for row in cells[:1] + cells[2:]:
        whole = [*row, *[""] * (len(cells[0]) - len(row))]
        found += [f"   {'* -' if i == 0 else '  -'} {_escaped(cell)}".rstrip() for i, cell in enumerate(whole)]
    return [*found, ""]


def _escaped(row: str) -> str:
    parts = row.split("`")
    if len(parts) % 2 == 0:
        return re.sub(r"([*|_`\\])", r"\\\1", row)
    said = (re.sub(r"([*|_\\])", r"\\\1", part) if i % 2 == 0 else f"``{part}``" for i, part in enumerate(parts))
    return re.sub(r"^([-+]|\d+[.)]|\W{1,2})(?= )", r"\\\1", "".join(said))
