"""How numbers are printed, the same in every format."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

from fatbench.report.tables.grid import Column, Grid, Value

MISSING = "--"  # not measured yet
NEVER = "n/a"  # and will not be


def rounded(value: float, digits: int) -> str:
    """Half up, as a person rounds: 72.65 to "72.7", also where the float is 72.64999999999999. No minus at a zero."""
    if not abs(value) < 1e15:  # not finite, or without decimals
        return f"{value:.{digits}f}"
    text = f"{Decimal(repr(round(value, digits + 6))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):f}"
    return text.removeprefix("-") if not float(text) else text


def number(value: float, column: Column) -> str:
    """A mean or a spread: "57.01" for 0.5701 in per cent, "11.56" for a distance, "50,272,000" for a count."""
    text = rounded(100 * value if column.unit == "percent" else value, column.digits)
    return f"{Decimal(text):,}" if 10_000 <= abs(float(text)) < float("inf") else text


def signed(value: float, column: Column) -> str:
    """A difference with its sign: "+0.04", "-1.20"."""
    text = number(value, column)
    return text if text.startswith("-") else f"+{text}"


@dataclass(frozen=True)
class Entry:
    """A value as plain text, the same in every format: a format adds its marks, its styles and what stands between."""

    value: Value
    number: str  # "57.01"; "--" where nothing is measured
    spread: str  # "±0.31", of a difference its interval "(+0.10 to +0.52)"; empty for one seed
    seeds: str  # "[2/3]" where seeds are missing
    published: str  # the paper's number; empty where it has none
    published_spread: str  # "±0.30"
    difference: str  # "+0.04"; empty where the two are not comparable
    direction: str  # "better" or "worse" than the paper; empty where the heading has no best or both print the same

    @property
    def paper(self) -> str:
        """The paper's number with its spread, or nothing."""
        return f"{self.published} {self.published_spread}".rstrip()


def entry(value: Value, column: Column) -> Entry:
    """What a table says of one value."""
    mean, paper, most, difference = value.mean, value.published, value.published_most, value.difference
    ours = signed if column.minus else number
    apart = "" if difference is None else signed(difference, column)
    better = ((difference or 0.0) > 0) != (column.best == "min")
    return Entry(
        value,
        number=(NEVER if value.never else MISSING) if mean is None else ours(mean, column),
        spread=_interval(value.interval, column) if column.minus or column.share else _spread(value.std, column),
        seeds=f"[{len(value.seeds)}/{value.wanted}]" if value.partial else "",
        published=""
        if paper is None
        else ours(paper, column) + (f" to {ours(most, column)}" if most is not None else ""),
        published_spread=_spread(value.published_std, column),
        difference=apart,
        direction="" if column.best == "none" or not apart.strip("+-0.") else "better" if better else "worse",
    )


def _spread(std: float | None, column: Column) -> str:
    return "" if std is None else f"±{number(std, column)}"


def _interval(interval: tuple[float, float] | None, column: Column) -> str:
    ours = signed if column.minus else number
    return "" if interval is None else f"({ours(interval[0], column)} to {ours(interval[1], column)})"


def entries(grid: Grid, group: int, column: int) -> list[Entry]:
    """What stands under one heading of one group, a row each."""
    return [entry(row.values[group][column], grid.columns[column]) for row in grid.rows]


def row_labels(grid: Grid) -> list[list[str]]:
    """Each row's labels, a label that repeats the row above left out, so that blocks of rows are seen."""
    shown: list[list[str]] = []
    before: list[str] = []
    for row in grid.rows:
        labels = row.labels(grid.axes)
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
