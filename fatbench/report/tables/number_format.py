"""Numbers as text, the same in every format."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

from fatbench.report.tables.grid import Column, Grid, Value

MISSING = "--"  # not measured yet
NEVER = "n/a"  # and will not be


def rounded(value: float, digits: int) -> str:
    """Round half up, as people do: 72.65 to "72.7", also where the float is 72.64999999999999; zero has no minus."""
    if not abs(value) < 1e15:  # not finite, or without decimals
        return f"{value:.{digits}f}"
    # six more digits hide the error of the binary float before the tie is broken
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
    """A value as plain text, the same in every format; a format adds marks, styles and separators."""

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
    """Format one value of a column: its number, spread and seeds, and the published number beside it."""
    mean, paper, most, difference = value.mean, value.published, value.published_most, value.difference
    format_value = signed if column.minus else number
    difference_text = "" if difference is None else signed(difference, column)
    better = ((difference or 0.0) > 0) != (column.best == "min")  # a smaller number is better in a "min" column
    return Entry(
        value,
        number=(NEVER if value.never else MISSING) if mean is None else format_value(mean, column),
        spread=_interval(value.interval, column) if column.minus or column.share else _spread(value.std, column),
        seeds=f"[{len(value.seeds)}/{value.wanted}]" if value.partial else "",
        published=""
        if paper is None
        else format_value(paper, column) + (f" to {format_value(most, column)}" if most is not None else ""),
        published_spread=_spread(value.published_std, column),
        difference=difference_text,
        direction="" if column.best == "none" or not difference_text.strip("+-0.") else "better" if better else "worse",
    )


def _spread(std: float | None, column: Column) -> str:
    return "" if std is None else f"±{number(std, column)}"


def _interval(interval: tuple[float, float] | None, column: Column) -> str:
    format_end = signed if column.minus else number
    return "" if interval is None else f"({format_end(interval[0], column)} to {format_end(interval[1], column)})"


def entries(grid: Grid, group: int, column: int) -> list[Entry]:
    """The entries of one column of one group, from the first row to the last."""
    return [entry(row.values[group][column], grid.columns[column]) for row in grid.rows]


def row_labels(grid: Grid) -> list[list[str]]:
    """The labels of each row, empty where they repeat the row above, so that blocks of rows are seen."""
    printed_labels: list[list[str]] = []
    labels_above: list[str] = []
    for row in grid.rows:
        labels = row.labels(grid.axes)
        repeated = 0
        # the last label stands in every row, else a row would have no name
        while repeated < len(labels) - 1 and labels_above[repeated : repeated + 1] == [labels[repeated]]:
            repeated += 1
        printed_labels.append([""] * repeated + labels[repeated:])
        labels_above = labels
    return printed_labels


def blocks(grid: Grid) -> list[bool]:
    """Whether each row begins a new block: its first label differs from the row above (only with several axes)."""
    first_labels = [row.key.get(grid.axes[0], "") if grid.axes else "" for row in grid.rows]
    return [len(grid.axes) > 1 and i > 0 and first_labels[i] != first_labels[i - 1] for i in range(len(first_labels))]
