"""Tables as HTML, and the frame of every page: it fetches nothing, and is light or dark as the reader's system.

The templates stand beside this module; names and numbers reach them through Jinja's autoescape alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.report.tables import number_format, significance
from fatbench.report.tables.sheet import Sheet, varying, with_numbers

if TYPE_CHECKING:
    import jinja2

DOCUMENTATION = "https://fatbench.readthedocs.io"
Links = Mapping[tuple[str, ...], str]  # the cells behind a number -> the address of what is said of them


@functools.cache
def environment() -> jinja2.Environment:
    """The environment of the templates, which escapes all that is put into them."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    templates = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    templates.filters["prose"] = prose
    templates.globals.update(words=words, marks=significance.marks)
    return templates


WORDS = {  # metrics that their headings do not explain
    "psnr": "peak signal-to-noise ratio in dB of a reconstruction; higher is closer to the original",
    "ssim": "structural similarity; 1 is the same image",
    "lpips": "distance in the features of AlexNet; 0 is the same image",
    "ssim32": "structural similarity after both images were shrunk to 32x32 pixels",
    "correlation32": "correlation of the pixels after both images were shrunk to 32x32",
    "identification": "share of clients of whose images any is the best match of a reconstruction",
    "identified_first": "share of clients whose first image is the best match of a reconstruction",
    "identification_chance": "the share that random guesses would reach",
    "candidates_used": "images among which the best match is searched",
    "label_recovery": "share of labels that the attacker reads from the update",
    "psnr_ci": "half the 95 % interval over images",
    "identification_ci": "half the 95 % interval over images",
    "grey_psnr": "of a flat grey image, which uses no gradient",
    "another_psnr": "of another image of the data set, which uses no gradient",
}


def words(grid: Sheet) -> list[tuple[str, str]]:
    """(heading, meaning) of the columns whose metrics need an explanation."""
    return [(column.heading, WORDS[column.metric]) for column in grid.columns if column.metric in WORDS]


def prose(words: str) -> str:
    """Escape words of a suite file or a docstring, and mark text between backticks as code."""
    import markupsafe

    code = markupsafe.Markup("<code>%s</code>")
    pieces = words.split("`")
    if len(pieces) % 2 == 0:  # a backtick without its partner
        return words
    return markupsafe.Markup("").join(code % piece if i % 2 else piece for i, piece in enumerate(pieces))


def file(name: str) -> str:
    """The text of a file among the templates."""
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def render(grids: Sequence[Sheet]) -> str:
    """A page of tables alone, without a script, for grids without a database."""
    suites = ", ".join(dict.fromkeys(grid.suite for grid in grids))
    views = [table(grid, {}, f"table-{i}") for i, grid in enumerate(grids)]
    return framed("suite.html", title=f"fatbench: {suites}", heading=f"fatbench: {suites}", tables=views)


def framed(template: str, **content: Any) -> str:
    """Fill a page's template with its content and all that every page has; its policy lets a browser fetch nothing."""
    import markupsafe

    defaults = {
        "lead": "", "facts": [], "boards": [], "figures": [], "points": [], "places": [], "home": "", "script": "",
        "label": "", "foot": "", "every": 0, "documentation": DOCUMENTATION, "links": {}, "others": [],
        "policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'",
    }  # fmt: skip
    style = markupsafe.Markup(file("style.css"))
    return environment().get_template(template).render({**defaults, "style": style, **content})


# Of a table inside somebody else's page, a notebook's: nothing beyond the table is touched.
INSIDE = """\
<style>
.fatbench table { font-variant-numeric: tabular-nums; } .fatbench .best { font-weight: 700; }
.fatbench .pub { display: block; font-size: .85em; opacity: .7; }
.fatbench .warn, .fatbench .mixed { font-weight: 600; } .fatbench dl { font-size: .85em; }
.fatbench dt { float: left; clear: left; font-style: italic; margin-right: .6em; } .fatbench dd { margin-left: 7em; }
.fatbench .hidden { display: none; }
</style>
"""


def fragment(grids: Sequence[Sheet]) -> str:
    """The tables, for a page that has others: a notebook."""
    section = environment().get_template("table.html").make_module().section  # type: ignore[attr-defined]
    body = "".join(section(table(grid, {}, ""), 2) for grid in grids)
    return f'<div class="fatbench">{INSIDE}{body}</div>'


def table(grid: Sheet, links: Links, id: str, latex: str = "") -> dict[str, Any]:
    """The fields of a table for its template. latex: its LaTeX source, for readers to copy."""
    grid, empty_rows = with_numbers(grid, links)
    if not any(entry.mean is not None or entry.published is not None or entry.cells in links for entry in grid.all()):
        grid = grid.only([], range(len(grid.columns)))
    grid, constant_labels = varying(grid)
    rows = []
    axes = [[row.key.get(axis, "") for axis in grid.axes] for row in grid.rows]
    for row, full_labels, labels, block in zip(
        grid.rows, axes, number_format.row_labels(grid), number_format.blocks(grid), strict=True
    ):
        stubs = [
            {"label": label, "again": "" if label else full_label}
            for label, full_label in zip(labels, full_labels, strict=True)
        ]  # a label that repeats the row above is left out for the eye alone
        rows.append({"labels": stubs, "block": block, "groups": row.values})
    groups = [group.label for group in grid.groups]
    groups = groups if any(groups) else []
    return {"grid": grid, "rows": rows, "groups": groups, "id": id, "latex": latex, "empty": empty_rows,
            "alike": constant_labels, "links": links}  # fmt: skip
