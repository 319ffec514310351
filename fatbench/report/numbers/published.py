"""Published numbers, of a paper or a formula: rows of a CSV, found by the labels of a grid point."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from fatbench.errors import SpecError
from fatbench.suite.tables import Published, Reference


class Entry(NamedTuple):
    """A published number."""

    value: float | None = None
    most: float | None = None  # where the paper gives a range; the value is its least
    std: float | None = None
    flag: str = ""
    place: tuple[int, str] = (0, "")  # line and column of its file


class Lookup:
    """A table of published numbers.

    SpecError: the file cannot be read, or lacks a column that the suite names.
    """

    def __init__(self, published: Reference) -> None:
        self.published = published
        folder = published.file.parent.name
        self.name = f"{folder}/{published.file.name}" if folder else published.file.name
        self.problems: list[str] = []
        self.formula = not isinstance(published, Published)
        self.select = published.select if isinstance(published, Published) else ""  # the checkpoint that the paper took
        self.scale = published.times * (0.01 if published.unit == "percent" else 1.0)
        try:
            with published.file.open(encoding="utf-8", newline="") as stream:
                reader = csv.DictReader(stream)
                numbered = ((reader.line_num, row) for row in reader)
                rows = {line: {k: v or "" for k, v in row.items() if k is not None} for line, row in numbered}
                self.columns = list(reader.fieldnames or [])
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise SpecError(f"{published.file}: {getattr(error, 'strerror', None) or error}") from None
        for column in (*published.match, *published.rows.values()):
            if column not in self.columns:
                raise self._no_column(column)
        self.rows = [(line, row) for line, row in rows.items() if _matches(row, published.match)]
        self._demand_numbers()

    def _no_column(self, column: str) -> SpecError:
        known = ", ".join(self.columns)
        return SpecError(f"{self.published.file}: there is no column '{column}' (the columns: {known})")

    def _demand_numbers(self) -> None:
        """Refuse a shown cell that is neither a number nor empty, and two rows with the same labels (SpecError)."""
        published = self.published
        shown_columns = [*published.values.values(), *published.std.values(), *published.to.values()]
        # "{axis}" in a column's name stands for any label
        patterns = [".*".join(map(re.escape, re.split(r"\{[^{}]+\}", column))) for column in shown_columns]
        columns = [name for name in self.columns if any(re.fullmatch(pattern, name) for pattern in patterns)]
        line_by_labels: dict[tuple[str, ...], int] = {}  # the first line with these labels
        for line, row in self.rows:
            for column in columns:
                if row[column].strip() and _number(row[column], 1.0) is None:
                    got = f"expected a number or nothing, got '{row[column][:40]}'"
                    raise SpecError(f"{published.file}:{line}: {column}: {got}")
            labels = tuple(row[column].strip() for column in published.rows.values())
            first_line = line_by_labels.setdefault(labels, line)
            if labels and first_line != line and any(row[column].strip() for column in columns):
                raise SpecError(f"{published.file}:{line}: the labels of line {first_line} again: {', '.join(labels)}")

    def find(self, point: Mapping[str, str], heading: str) -> Entry:
        """The number of a grid point and a heading; nothing where the paper has no such number."""
        published = self.published
        if heading not in published.values:
            return Entry()
        labels = published.labels
        found = self._row({c: labels.get(point.get(a, ""), point.get(a, "")) for a, c in published.rows.items()})
        if found is None:
            return Entry()
        line, row = found

        def number(columns: Mapping[str, str]) -> float | None:
            found = row.get(self._column(columns[heading], point), "") if heading in columns else ""
            return _number(found, self.scale)

        value = number(published.values)
        if value is None:
            return Entry()
        most = number(published.to)
        column = self._column(published.values[heading], point)
        flag = self._flag(row.get("flag", ""), column)
        return Entry(value, None if most == value else most, number(published.std), flag, (line, column))

    def _row(self, labels: Mapping[str, str]) -> tuple[int, Mapping[str, str]] | None:
        matching_rows = [(line, row) for line, row in self.rows if _matches(row, labels)]
        if len(matching_rows) > 1:
            condition_text = ", ".join(f"{column}={value}" for column, value in labels.items())
            rows = f"{len(matching_rows)} rows of {self.name}"
            problem = f"{rows} have {condition_text or 'no condition on them'}: none is shown"
            if problem not in self.problems:
                self.problems.append(problem)
            return None
        return matching_rows[0] if matching_rows else None

    def _column(self, name: str, point: Mapping[str, str]) -> str:
        """The CSV column, each "{axis}" replaced by the point's label in the paper's words."""

        def label(match: re.Match[str]) -> str:
            our_label = point.get(match[1], "")
            return self.published.labels.get(our_label, our_label)

        column = re.sub(r"\{([^{}]+)\}", label, name)
        if column not in self.columns and "{" not in name:
            raise self._no_column(column)
        return column

    def _flag(self, text: str, column: str) -> str:
        """A flag that names columns is about those alone; otherwise it is about the whole row."""
        named_columns = [c for c in self.columns if re.search(rf"(?<!\w){re.escape(c)}(?!\w)", text)]
        # the underline of the transformers' tables is at the robust accuracy
        if text.startswith("u2") and not named_columns:
            named_columns = [c for c in self.columns if "robust" in c]
        if not text or (named_columns and column not in named_columns):
            return ""
        text = re.sub(r"^u2 ?", "second best in its row of the paper; ", text).removesuffix("; ")
        return text.replace("glitch:(", "printed as (")


def _matches(row: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether the columns of a row have these texts, or the same numbers: 1.0 is 1."""
    return all(
        row[column].strip() == text.strip()
        or (_number(text, 1.0) is not None and _number(row[column], 1.0) == _number(text, 1.0))
        for column, text in labels.items()
    )


def _number(text: str, scale: float) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return value * scale if scale != 1.0 else value
