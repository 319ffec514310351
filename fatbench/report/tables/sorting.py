"""The rows of tables in the order of a column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fatbench.errors import SpecError, did_you_mean
from fatbench.report.tables.grid import Column, Grid, Row


def sorted_by(grids: Sequence[Grid], asked: str) -> dict[int, Grid]:
    """id of each grid -> the grid with the best rows of a heading or metric first, within the labels of its first axes.

    A grid without the column is left as it is. SpecError: none has it.
    """

    def names(column: Column) -> tuple[str, ...]:
        return column.heading.lower(), column.metric.lower()

    known = dict.fromkeys(name for grid in grids for column in grid.columns for name in names(column))
    if grids and asked.lower() not in known:
        raise SpecError(f"--sort: no table has a column '{asked}'{did_you_mean(asked.lower(), known)}")
    found = {}
    for grid in grids:
        place = next((c for c, column in enumerate(grid.columns) if asked.lower() in names(column)), None)
        found[id(grid)] = grid if place is None else replace(grid, rows=_sorted(grid, place))
    return found


def _sorted(grid: Grid, place: int) -> list[Row]:
    sign = 1 if grid.columns[place].best == "min" else -1
    blocks = list(dict.fromkeys(tuple(row.key.get(axis, "") for axis in grid.axes[:-1]) for row in grid.rows))

    def order(row: Row) -> tuple[int, float]:
        means = [group[place].mean for group in row.values if group[place].mean is not None]
        block = blocks.index(tuple(row.key.get(axis, "") for axis in grid.axes[:-1]))
        return block, sign * (means[0] or 0.0) if means else float("inf")

    return sorted(grid.rows, key=order)
