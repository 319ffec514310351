"""How numbers are printed, the same in every format."""

from __future__ import annotations

from fatbench.report.tables.grid import Column, Grid, Value

MISSING = "--"


def number(value: float, column: Column) -> str:
    """A mean or a spread: "57.01" for 0.5701 in per cent, "11.56" for a distance."""
    scaled = 100 * value if column.unit == "percent" else value
    return f"{scaled:.{column.digits}f}".replace("-0." + "0" * column.digits, "0." + "0" * column.digits)


def signed(value: float, column: Column) -> str:
    """A difference with its sign: "+0.04", "-1.20"."""
    scaled = 100 * value if column.unit == "percent" else value
    text = f"{scaled:+.{column.digits}f}"
    return text.replace("-", "+") if float(text) == 0 else text


def spread(value: Value, column: Column) -> str:
    """ "±0.31", or nothing for one seed."""
    return "" if value.std is None else f"±{number(value.std, column)}"


def fraction(value: Value) -> str:
    """ "[2/3]" where seeds are missing, or nothing."""
    return f"[{len(value.seeds)}/{value.wanted}]" if value.partial else ""


def published(value: Value, column: Column) -> str:
    """The paper's number with its spread, or nothing."""
    if value.published is None:
        return ""
    spread = "" if value.published_std is None else f" ±{number(value.published_std, column)}"
    return f"{number(value.published, column)}{spread}"


def difference(value: Value, column: Column) -> str:
    """Ours minus the paper's, or nothing."""
    return "" if value.difference is None else signed(value.difference, column)


def row_labels(grid: Grid) -> list[list[str]]:
    """Each row's labels, a label that repeats the row above left out, so that blocks of rows are seen."""
    shown: list[list[str]] = []
    before: list[str] = []
    for row in grid.rows:
        labels = [row.key.get(axis, "") for axis in grid.axes]
        same = 0
        while same < len(labels) - 1 and before[same : same + 1] == [labels[same]]:
            same += 1
        shown.append([""] * same + labels[same:])
        before = labels
    return shown


def blocks(grid: Grid) -> list[bool]:
    """Whether a row begins a new block: its first label differs from the row above (only with several axes)."""
    first = [row.key.get(grid.axes[0], "") if grid.axes else "" for row in grid.rows]
    return [len(grid.axes) > 1 and i > 0 and first[i] != first[i - 1] for i in range(len(first))]
