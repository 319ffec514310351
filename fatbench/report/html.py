"""One self-contained HTML page: no script, nothing fetched, light or dark as the reader's system is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from fatbench.report import text, ties
from fatbench.report.grid import Column, Grid, Value

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { --ink: #1d1f23; --paper: #fff; --soft: #686e79; --line: #d9dce1; --band: #f4f5f7;
  --up: #1a7f45; --down: #b3362b;
  --warn-ink: #6b3d00; --warn: #fff1d6; --warn-line: #e7b765; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --paper: #16181c; --soft: #9aa1ad; --line: #363b44; --band: #1e2127;
    --up: #5fcf8f; --down: #f28b80;
    --warn-ink: #ffd89a; --warn: #3a2a10; --warn-line: #80602a; }
}
body { margin: 2rem auto; padding: 0 1.5rem; max-width: 80rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1.5rem; }
h2 { font-size: 1.1rem; margin: 0 0 .6rem; }
h2 .id { color: var(--soft); font-weight: 500; margin-right: .5em; }
section { margin: 0 0 3rem; }
.warn { display: inline-block; margin: 0 0 .8rem; padding: .25rem .7rem; border: 1px solid var(--warn-line);
  border-radius: 4px; background: var(--warn); color: var(--warn-ink); font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; border-top: 2px solid var(--ink); border-bottom: 2px solid var(--ink);
  font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; text-align: right; vertical-align: top; white-space: nowrap; }
th { font-weight: 500; }
thead th { vertical-align: bottom; }
thead tr:last-child th { border-bottom: 1px solid var(--ink); }
thead th.group { text-align: center; border-bottom: 1px solid var(--line); }
th.axis, th.stub { text-align: left; }
th.first, td.first { border-left: 1px solid var(--line); }
tr.block > * { border-top: 1px solid var(--line); }
tbody tr:hover > * { background: var(--band); }
.best { font-weight: 700; }
.second { text-decoration: underline; text-underline-offset: .2em; }
.std, .share, .pub, .none { color: var(--soft); }
.std, .share, .pub { font-size: .85em; }
.pub { display: block; }
.up { color: var(--up); } .down { color: var(--down); }
sup { line-height: 0; font-size: .75em; color: var(--down); }
.pub sup { color: inherit; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .8rem 0 0; font-size: .85rem;
  color: var(--soft); }
dt { font-style: italic; }
dd { margin: 0; max-width: 70rem; }
figure { margin: 1rem 0 0; } figure img { max-width: 100%; background: #fff; }
figcaption { font-size: .85rem; color: var(--soft); }
.mixed { color: var(--warn-ink); font-weight: 600; }
@media (max-width: 40rem) { body { padding: 0 .7rem; } dl { grid-template-columns: 1fr; } dt { margin-top: .3rem; } }
@media print { body { max-width: none; margin: 0; } section { break-inside: avoid; } }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for t in tables %}
<section>
<h2><span class="id">{{ t.grid.id }}</span>{{ t.grid.name }}</h2>
{% if t.grid.label %}<p class="warn">{{ t.grid.label }}</p>{% endif %}
<div class="scroll">
<table>
<thead>
{% if t.groups %}<tr>{% for axis in t.grid.axes %}<th></th>{% endfor %}
{% for group in t.groups -%}
<th class="group first" colspan="{{ t.grid.columns|length }}">{{ group }}</th>
{% endfor %}</tr>
{% endif %}<tr>{% for axis in t.grid.axes %}<th class="axis" scope="col">{{ axis }}</th>{% endfor %}
{% for group in t.grid.groups %}{% for column in t.grid.columns -%}
<th scope="col"{% if loop.first and t.groups %} class="first"{% endif %}>{{ column.heading }}</th>
{% endfor %}{% endfor %}</tr>
</thead>
<tbody>
{% for row in t.rows %}<tr{% if row.block %} class="block"{% endif %}>
{% for stub in row.labels %}<th class="stub" scope="row">{{ stub }}</th>{% endfor %}
{% for group in row.groups %}{% for v in group -%}
<td{% if loop.first and t.groups %} class="first"{% endif %}>
{%- if v.planned -%}
{%- if v.number %}<span class="{{ v.rank }}">{{ v.number }}</span>{% else %}<span class="none">--</span>{% endif -%}
{%- if v.spread %} <span class="std">{{ v.spread }}</span>{% endif -%}
{%- if v.partial %} <span class="share">{{ v.partial }}</span>{% endif -%}
{%- for mark, flag in v.flags %}<sup title="{{ flag }}">{{ mark }}</sup>{% endfor -%}
{%- if v.published %}<span class="pub">paper {{ v.published }}
{%- if v.published_mark %}<sup title="{{ v.published_flag }}">{{ v.published_mark }}</sup>{% endif -%}
{%- if v.difference %} <span class="{{ v.direction }}">{{ v.difference }}</span>{% endif %}</span>{% endif -%}
{%- endif -%}
</td>
{% endfor %}{% endfor %}</tr>
{% endfor %}</tbody>
</table>
</div>
<dl>
{% for what, note in t.grid.notes %}<dt{% if what == "MIXED" %} class="mixed"{% endif %}>{{ what }}</dt><dd
{%- if what == "MIXED" %} class="mixed"{% endif %}>{{ note }}</dd>
{% endfor %}
{% for mark, note in t.grid.footnotes %}<dt>{{ mark }}</dt><dd>{{ note }}</dd>
{% endfor %}</dl>
{% for caption, uri in t.grid.pictures %}<figure><img src="{{ uri }}" alt="{{ caption }}">
<figcaption>{{ caption }}</figcaption></figure>
{% endfor %}
</section>
{% endfor %}
</body>
</html>
"""


def render(grids: Sequence[Grid]) -> str:
    """The page with all grids."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    suites = ", ".join(dict.fromkeys(grid.suite for grid in grids))
    return environment.from_string(PAGE).render(title=f"fatbench: {suites}", tables=[_grid(grid) for grid in grids])


# Of a table inside somebody else's page, a notebook's: nothing beyond the table is touched.
INSIDE = """\
<style>
.fatbench table { font-variant-numeric: tabular-nums; } .fatbench .best { font-weight: 700; }
.fatbench .second { text-decoration: underline; } .fatbench .pub { display: block; font-size: .85em; opacity: .7; }
.fatbench .warn, .fatbench .mixed { font-weight: 600; } .fatbench dl { font-size: .85em; }
.fatbench dt { float: left; clear: left; font-style: italic; margin-right: .6em; } .fatbench dd { margin-left: 7em; }
</style>
"""


def fragment(grids: Sequence[Grid]) -> str:
    """The sections of the page, for a page that has others: a notebook."""
    page = render(grids)
    body = page[page.index("</h1>") + len("</h1>") : page.index("</body>")]
    return f'<div class="fatbench">{INSIDE}{body}</div>'


def _grid(grid: Grid) -> dict[str, Any]:
    rows = []
    for row, labels, block in zip(grid.rows, text.row_labels(grid), text.blocks(grid), strict=True):
        cells = [[_cell(v, c) for v, c in zip(values, grid.columns, strict=True)] for values in row.values]
        rows.append({"labels": labels, "block": block, "groups": cells})
    groups = [group.label for group in grid.groups]
    return {"grid": grid, "rows": rows, "groups": groups if any(groups) else []}


def _cell(value: Value, column: Column) -> dict[str, Any]:
    better = (value.difference or 0.0) * (-1 if column.best == "min" else 1)
    difference = text.difference(value, column)
    neutral = column.best == "none" or not difference or float(difference) == 0
    return {
        "planned": value.planned,
        "number": "" if value.mean is None else text.number(value.mean, column),
        "rank": value.rank,
        "spread": text.spread(value, column),
        "partial": value.partial,
        # the mark of a tie is no flag: what it means stands under the table
        "flags": list(itertools.zip_longest(value.marks, value.flags, fillvalue=ties.TITLE)),
        "published": text.published(value, column),
        "published_mark": value.published_mark,
        "published_flag": value.published_flag,
        "difference": difference.replace("-", "\u2212"),
        "direction": "" if neutral else "up" if better > 0 else "down",
    }
