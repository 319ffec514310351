"""Tidy data: a data frame with a line for each number, and the same as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

DIGITS = ".15g"
COMPUTED = ("=", "@", "+", "-")  # first letters


def frame(
    lines: Iterable[tuple[Mapping[str, str], Mapping[str, Any]]], first: Sequence[str], last: Sequence[str]
) -> pandas.DataFrame:
    """Lines of (label of each axis, the rest) with the axes between the first and the last of the other columns.

    An axis that a line lacks is None there; one with the name of another column is called "axis:NAME".
    """
    import pandas

    lines = list(lines)
    fixed = {*first, *last}
    names = {axis: f"axis:{axis}" if axis in fixed else axis for key, _ in lines for axis in key}
    rows = [{**{names[axis]: label for axis, label in key.items()}, **rest} for key, rest in lines]
    return pandas.DataFrame(rows, columns=[*first, *names.values(), *last])


def csv(data: pandas.DataFrame) -> str:
    """Numbers with 15 significant digits, so that 0.1 + 0.2 prints as 0.3; empty if missing.

    Text that a spreadsheet would compute begins with an apostrophe.
    """
    data = data.map(uncomputed)
    text: str = data.to_csv(index=False, lineterminator="\n", float_format=f"%{DIGITS}")
    return text


def uncomputed(cell: Any) -> Any:
    """The cell of a CSV, with an apostrophe before text that a spreadsheet would compute; numbers are as they are."""
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
    """ "0.3256"; a whole number without a point."""
    return f"{value:{DIGITS}}"
