"""The rows of tables in the order of a column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fatbench.errors import SpecError, did_you_mean
from fatbench.report.tables.grid import Column, Grid, Row


def sorted_by(grids: Sequence[Grid], column_name: str) -> dict[int, Grid]:
    """Sort the rows of each grid by a column, the best first; id of each grid -> the sorted grid.

    column_name: a heading or a metric. Rows stay within the block of their first axes' labels. A grid without the
    column is left as it is. SpecError: no grid has it.
    """

    def names(column: Column) -> tuple[str, ...]:
        return column.heading.lower(), column.metric.lower()

    column_names = dict.fromkeys(name for grid in grids for column in grid.columns for name in names(column))
    if grids and column_name.lower() not in column_names:
        raise SpecError(
            f"--sort: no table has a column '{column_name}'{did_you_mean(column_name.lower(), column_names)}"
        )
    sorted_grids = {}
    for grid in grids:
        position = next((c for c, column in enumerate(grid.columns) if column_name.lower() in names(column)), None)
        sorted_grids[id(grid)] = grid if position is None else replace(grid, rows=_sorted_rows(grid, position))
    return sorted_grids


def _sorted_rows(grid: Grid, position: int) -> list[Row]:
    sign = 1 if grid.columns[position].best == "min" else -1  # a column without a best is sorted from the largest
    blocks = list(dict.fromkeys(tuple(row.key.get(axis, "") for axis in grid.axes[:-1]) for row in grid.rows))

    def order(row: Row) -> tuple[int, float]:
        means = [group[position].mean for group in row.values if group[position].mean is not None]
        block = blocks.index(tuple(row.key.get(axis, "") for axis in grid.axes[:-1]))
        return block, sign * (means[0] or 0.0) if means else float("inf")  # unmeasured rows go last

    return sorted(grid.rows, key=order)
