"""Tables: a query, a grid, a format. Nothing here imports torch.

grids = tables(suite, plan, store, select="best-test")
print(render(grids, "latex"))
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fatbench.errors import SpecError, did_you_mean
from fatbench.report.grid import Grid, build
from fatbench.selection import Checkpoint

if TYPE_CHECKING:
    from fatbench.store import Store
    from fatbench.suite import Plan, Suite

__all__ = ["FORMATS", "Grid", "build", "render", "tables"]

_RENDERERS = {
    "markdown": ("markdown", "render"),
    "latex": ("latex", "render"),
    "csv": ("records", "render_csv"),
    "json": ("records", "render_json"),
    "html": ("html", "render"),
    "terminal": ("terminal", "render"),
}
FORMATS = tuple(_RENDERERS)


def render(grids: Sequence[Grid], format: str) -> str:
    """The grids in one of FORMATS, ending in a line break. SpecError: no such format."""
    if format not in _RENDERERS:
        raise SpecError(f"no format is named '{format}'{did_you_mean(format, FORMATS)}")
    module, function = _RENDERERS[format]
    text: str = getattr(importlib.import_module(f"fatbench.report.{module}"), function)(grids)
    return text


def tables(
    suite: Suite,
    plan: Plan,
    store: Store | None,
    *,
    select: Checkpoint = "last",
    published: bool = True,
) -> list[Grid]:
    """The tables of a suite, filled with what the database has of the plan's cells; no database: all is missing."""
    if store is None:
        return build(suite, plan, [], select, published)
    from fatbench.report import query

    found = query.gather(suite, plan, store, select)
    return build(
        suite, plan, found.rows, select, published, rounds=found.rounds, runs=found.runs, outcomes=found.outcomes
    )
