"""Numbers as text, the same in every format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from pandas import DataFrame

from fatbench.report.numbers.long import columns
from fatbench.report.tables.sheet import Column, Entry, Sheet, as_tuples

MISSING = "--"  # not measured yet
NEVER = "n/a"  # and will not be
DIGITS = ".15g"  # of CSV
COMPUTED = ("=", "@", "+", "-")  # first letters of text that a spreadsheet computes


def rounded(value: float, digits: int) -> str:
    """Round half up, as people do: 72.65 to "72.7", also where the float is 72.64999999999999; zero has no minus."""
    if not abs(value) < 1e15:  # not finite, or without decimals
        return f"{value:.{digits}f}"
    # six more digits hide the error of the binary float before the tie is broken
    text = f"{Decimal(repr(round(value, digits + 6))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):f}"
    return text.removeprefix("-") if not float(text) else text


VERDICTS = {1.0: "leaks", -1.0: "holds", 0.0: "open"}  # as `gradient_inversion` stores them; a mean over seeds is none


def number(value: float, column: Column) -> str:
    """A mean or a spread: "57.01" for 0.5701 in per cent, "11.56" for a distance, "50,272,000" for a count."""
    if column.source.metric == "verdict" and value in VERDICTS:
        return VERDICTS[value]
    text = rounded(100 * value if column.unit == "percent" else value, column.digits)
    return f"{Decimal(text):,}" if 10_000 <= abs(float(text)) < float("inf") else text


def signed(value: float, column: Column) -> str:
    """A difference with its sign: "+0.04", "-1.20"."""
    text = number(value, column)
    return text if text.startswith("-") else f"+{text}"


TEXTS = (
    "number",  # "57.01"; "--" where nothing is measured
    "spread",  # "±0.31", of a difference its interval "(+0.10 to +0.52)"; empty for one seed
    "lacking",  # "[2/3]" where seeds are missing
    "partial",  # the same in words: "2 of 3 seeds"
    "paper_number",  # empty where the paper has none
    "paper_spread",  # "±0.30"
    "paper",  # both
    "difference",  # measured - published, both unrounded; None where one is missing or they are not comparable
    "delta",  # the same as text, "+0.04"
    "direction",  # "better" or "worse" than the paper; empty where the heading has no best or both print the same
)


def with_texts(entries: DataFrame, headed: Sequence[Column]) -> DataFrame:
    """The entries with TEXTS, the same in every format; a format adds marks, styles and separators."""
    texts = [_texts(entry, headed[entry.column]) for entry in as_tuples(entries)]
    return entries.assign(**columns(TEXTS, texts))


def _texts(entry: Entry, column: Column) -> tuple[Any, ...]:
    mean, paper, most = entry.mean, entry.published, entry.published_most
    known = mean is not None and paper is not None and most is None and entry.comparable
    difference = mean - paper if known else None
    delta = "" if difference is None else signed(difference, column)
    format_value = signed if column.minus else number
    better = ((difference or 0.0) > 0) != (column.best == "min")  # a smaller number is better in a "min" column
    measured = (NEVER if entry.never else MISSING) if mean is None else format_value(mean, column)
    is_partial = mean is not None and len(entry.seeds) < entry.wanted
    paper_number = "" if paper is None else format_value(paper, column)
    paper_number += f" to {format_value(most, column)}" if paper_number and most is not None else ""
    paper_spread, spread = _spread(entry.published_std, column), _spread(entry.std, column)
    if column.minus or column.share or column.worst:
        spread = f"({' to '.join(format_value(end, column) for end in entry.interval)})" if entry.interval else ""
    return (
        measured,
        spread,
        f"[{len(entry.seeds)}/{entry.wanted}]" if is_partial else "",
        f"{len(entry.seeds)} of {entry.wanted} seeds" if is_partial else "",
        paper_number,
        paper_spread,
        f"{paper_number} {paper_spread}".rstrip(),
        difference,
        delta,
        "" if column.best == "none" or not delta.strip("+-0.") else "better" if better else "worse",
    )


def _spread(std: float | None, column: Column) -> str:
    return "" if std is None else f"±{number(std, column)}"


def decimals(means: Iterable[float | None], spreads: Iterable[float | None]) -> int:
    """Decimals of a column of plain numbers: none for counts, else enough for about four significant digits."""
    numbers = [x for x in means if x is not None]
    largest = max(map(abs, numbers), default=0.0)
    if largest and all(x == round(x) for x in (*numbers, *(x for x in spreads if x is not None))):
        return 0
    for bound, digits in ((1000, 0), (10, 2), (1, 3), (0.1, 4)):
        if largest >= bound:
            return digits
    return 6 if largest else 2


def column_of(grid: Sheet, group: int, column: int) -> list[Entry]:
    """The entries of one column of one group, from the first row to the last."""
    return [row.values[group][column] for row in grid.rows]


def row_labels(grid: Sheet) -> list[list[str]]:
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


def blocks(grid: Sheet) -> list[bool]:
    """Whether each row begins a new block: its first label differs from the row above (only with several axes)."""
    first_labels = [row.key.get(grid.axes[0], "") if grid.axes else "" for row in grid.rows]
    return [len(grid.axes) > 1 and i > 0 and first_labels[i] != first_labels[i - 1] for i in range(len(first_labels))]


# --- data frames and their CSV ---------------------------------------------------------------------------------------


def tidy(
    lines: Iterable[tuple[Mapping[str, str], Mapping[str, Any]]],
    leading_columns: Sequence[str],
    trailing_columns: Sequence[str],
) -> DataFrame:
    """A data frame of lines (label of each axis, other fields), its axes between the leading and the trailing columns.

    An axis that a line lacks is None there; an axis with the name of another column is called "axis:NAME".
    """
    lines = list(lines)
    fixed = {*leading_columns, *trailing_columns}
    names = {axis: f"axis:{axis}" if axis in fixed else axis for key, _ in lines for axis in key}
    rows = [{**{names[axis]: label for axis, label in key.items()}, **fields} for key, fields in lines]
    return DataFrame(rows, columns=[*leading_columns, *names.values(), *trailing_columns])


def csv_text(data: DataFrame) -> str:
    """A data frame as CSV, numbers with 15 significant digits (0.1 + 0.2 prints as 0.3), empty where missing.

    Text that a spreadsheet would compute begins with an apostrophe.
    """
    data = data.map(uncomputed)
    text: str = data.to_csv(index=False, lineterminator="\n", float_format=f"%{DIGITS}")
    return text


def uncomputed(cell: Any) -> Any:
    """A cell of a CSV, with an apostrophe before text that a spreadsheet would compute; numbers stay as they are."""
    if not isinstance(cell, str) or cell[:1] not in COMPUTED or cell == "-":
        return cell
    return cell if cell[0] in "+-" and _is_number(cell) else f"'{cell}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def csv_number(value: float) -> str:
    """A number with 15 significant digits: "0.3256"; a whole number has no point."""
    return f"{value:{DIGITS}}"
