"""Tidy data: a data frame with one row for each number, and its CSV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

DIGITS = ".15g"
COMPUTED = ("=", "@", "+", "-")  # first letters of text that a spreadsheet computes


def frame(
    lines: Iterable[tuple[Mapping[str, str], Mapping[str, Any]]],
    leading_columns: Sequence[str],
    trailing_columns: Sequence[str],
) -> pandas.DataFrame:
    """A data frame of lines (label of each axis, other fields), its axes between the leading and the trailing columns.

    An axis that a line lacks is None there; an axis with the name of another column is called "axis:NAME".
    """
    import pandas  # takes long to import

    lines = list(lines)
    fixed = {*leading_columns, *trailing_columns}
    names = {axis: f"axis:{axis}" if axis in fixed else axis for key, _ in lines for axis in key}
    rows = [{**{names[axis]: label for axis, label in key.items()}, **fields} for key, fields in lines]
    return pandas.DataFrame(rows, columns=[*leading_columns, *names.values(), *trailing_columns])


def csv(data: pandas.DataFrame) -> str:
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


def number(value: float) -> str:
    """A number with 15 significant digits: "0.3256"; a whole number has no point."""
    return f"{value:{DIGITS}}"
