"""One table as it is printed: its entries, a frame with a row for each printed number, and what is said of it all.

Entries hold fractions in [0, 1] and plain numbers, unrounded, and beside them the texts that every format prints;
`fatbench.report.tables.entries` makes them.
"""

from __future__ import annotations

import functools
import itertools
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pandas import DataFrame

from fatbench.errors import SpecError, did_you_mean
from fatbench.report.contrasts import Difference
from fatbench.report.numbers import table_facts
from fatbench.report.numbers.sources import Source, in_words
from fatbench.store.rows import grouped
from fatbench.store.selection import PUBLISHED
from fatbench.suite.cells import Plan
from fatbench.suite.files import split_settings
from fatbench.suite.model import Condition, Key

LABEL = "axis:"  # before the name of an axis: an axis may be called as a column of the entries is


@dataclass(frozen=True)
class Column:
    """A column: its heading, the source of its numbers and how they are printed."""

    heading: str
    source: Source
    metric: str  # its name in JSON and CSV
    best: str  # "max", "min" or "none"
    unit: str  # "percent": fractions printed times 100; "plain": as they are
    digits: int  # after the point
    where: Condition = field(default_factory=dict)  # the points its numbers are of, where the heading says so
    minus: Condition = field(default_factory=dict)  # the labels whose numbers are taken off, where it says so
    share: Condition = field(default_factory=dict)  # the two labels between which a number lies, where it says so
    worst: Condition = field(default_factory=dict)  # the labels over which it is the least, where it says so
    images: str = ""  # "n = 500" where other columns have more images

    @property
    def label(self) -> str:
        """The heading as it is printed."""
        return f"{self.heading}, {self.images}" if self.images else self.heading


Entry = Any  # one row of the entries, see ENTRY


def as_tuples(frame: DataFrame) -> list[Entry]:
    """The rows of a frame, their columns as attributes."""
    return [*map(_row_class(tuple(frame.columns))._make, zip(*(frame[name].tolist() for name in frame), strict=True))]


@functools.cache  # a class of a frame's columns takes longer to make than a hundred rows of it
def _row_class(names: tuple[str, ...]) -> Any:
    return namedtuple("Entry", names, rename=True)  # the names are those of a suite's axes


# The entries: where they stand (row, group, column: positions from 0; the labels of rows and groups; own: a plug-in's
# function makes the row, and not every row) and
ENTRY: dict[str, Any] = {
    "planned": False,  # False: the suite has no such cell, nothing is missing
    "never": False,  # this checkpoint is not evaluated, or training does not log it: it will not be measured
    "mean": None,  # None where nothing has been measured
    "std": None,  # over seeds, ddof 1; None below two seeds
    "seeds": (),  # those measured
    "wanted": 0,  # how many the plan asks for
    "n": (),  # examples behind each measurement; more than one number = mixed
    "values": (),  # one a seed
    "chance": None,  # what random guesses would reach, where training logs it
    "interval": None,  # of a difference or share: 95 % confidence interval over seeds
    "behind": (),  # (cell, stage) of the outcomes, one a seed; none of training
    "outcomes": (),  # (bits, how many) of each of these
    "cells": (),  # all that the number stands for, one a seed, measured or not
    "doubts": (),  # in words, with the seeds that they are about
    "codes": frozenset(),  # of these doubts, see `doubts.WORDS`
    "at_floor": False,  # measured, and of no seed above a constant classifier
    "labels": {},  # of the axes in the heading's condition
    "published": None,
    "published_most": None,  # where the paper gives a range
    "published_std": None,
    "published_flag": "",
    "published_select": "",  # the checkpoint behind it; empty where the heading says all, as that of a round
    "formula": False,  # what is "published" is a formula's, and no paper prints it
    "comparable": True,  # with what is published: its settings and its checkpoint are the paper's
    "rank": "",  # in its group, where that was tested: "best", "second", "shared", "worse"; see `significance`
    "marked": (),  # the doubts that have a footnote mark
    "marks": (),  # footnote marks: one for each of `marked`, then that of `significance`
    "published_mark": "",
}


class Row(NamedTuple):
    """A row of a table: its labels and its entries."""

    position: int
    key: Key
    values: list[list[Entry]]  # [group][column]
    own: bool  # a plug-in's function makes it, and not every row of the table

    def labels(self, axes: Iterable[str]) -> list[str]:
        """The label of each axis, the last one marked if a plug-in makes the row: "my_rule (own)"."""
        row_labels = [self.key.get(axis, "") for axis in axes]
        last_labelled = max((i for i, label in enumerate(row_labels) if label), default=None)
        return [f"{label} (own)" if self.own and i == last_labelled else label for i, label in enumerate(row_labels)]


class Group(NamedTuple):
    """A group of columns: one combination of labels of the `across` axes."""

    key: Key

    @property
    def label(self) -> str:
        """The labels, joined; one without a letter gets the name of its axis: "steps 5"."""
        label_texts = (label if any(map(str.isalpha, label)) else f"{axis} {label}" for axis, label in self.key.items())
        return ", ".join(label_texts)


@dataclass(frozen=True, eq=False)
class Sheet:
    """One table, ready to print."""

    suite: str
    preset: str
    id: str
    name: str  # the title in the suite file
    label: str  # "SMOKE PRESET - not comparable with published numbers"; empty for the preset `paper`
    axes: list[str]  # that label the rows
    across: list[str]  # that label the groups of columns
    columns: list[Column]
    entries: DataFrame  # see ENTRY
    select: str
    checkpoint: str  # which round's model the numbers are of, in words
    seeds: list[int]
    facts: table_facts.Facts
    notes: list[tuple[str, str]] = field(default_factory=list)  # (what, text), shown under the table
    footnotes: list[tuple[str, str]] = field(default_factory=list)  # (mark, text)
    points: list[tuple[str, str]] = field(default_factory=list)  # (labels, cell), one a point and seed
    paired: list[tuple[Column, Difference]] = field(default_factory=list)  # the tests that the table asks for
    attacks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # metric -> its attacks, all settings
    perturbation: str = ""  # of the tasks: "Linf 25/255"
    split: bool = False  # numbers under one heading that are not compared with each other

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: the class of a frame's rows is in no module where pickle could find it."""
        return {name: vars(self)[name] for name in self.__dataclass_fields__}

    @property
    def title(self) -> str:
        return f"{self.name} [{self.label}]" if self.label else self.name

    @functools.cached_property
    def _all(self) -> list[Entry]:
        return as_tuples(self.entries)

    def all(self) -> list[Entry]:
        """The entries, by rows, groups and columns."""
        return self._all

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The groups of columns; one without labels where the table has no `across`."""
        return [Group(key) for key in self._keys("group", self.across).values()] or [Group({})]

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The entries as formats walk over them."""
        keys, width = self._keys("row", self.axes), len(self.columns)
        rows = []
        for (position, key), (_, entries) in zip(
            keys.items(), itertools.groupby(self._all, key=lambda entry: entry.row), strict=True
        ):
            values = [*entries]
            groups = [values[i : i + width] for i in range(0, len(values), width)]
            rows.append(Row(position, key, groups, bool(values[0].own)))
        return rows

    def _keys(self, place: str, axes: Sequence[str]) -> dict[int, Key]:
        """Position of a row or group -> its labels."""
        firsts = self.entries.drop_duplicates(place)
        labels = zip(*(firsts[LABEL + axis] for axis in axes), strict=True) if axes else itertools.repeat(())
        return {at: dict(zip(axes, key, strict=True)) for at, key in zip(firsts[place].tolist(), labels, strict=False)}

    @property
    def has_published(self) -> bool:
        return any(entry.published is not None for entry in self.all())

    @property
    def by(self) -> str:
        """The origin of the numbers beside ours: "paper" or "formula"."""
        return "formula" if any(entry.formula for entry in self.all()) else "paper"

    @property
    def published_at(self) -> str:
        """The round of the published numbers, in words; empty where their headings say it."""
        checkpoints = dict.fromkeys(entry.published_select for entry in self.all() if entry.published is not None)
        return " and ".join(PUBLISHED[checkpoint] for checkpoint in checkpoints if checkpoint)

    @property
    def has_differences(self) -> bool:
        return any(entry.difference is not None for entry in self.all())

    @property
    def words(self) -> dict[str, str]:
        """Metric -> its heading, as notes write it."""
        plain = (one for one in self.columns if not (one.minus or one.share or one.worst))
        return in_words((one.heading, one.source) for one in plain)

    def only(self, rows: Sequence[Row], columns: Sequence[int]) -> Sheet:
        """The table with these rows and the columns at these positions, in this order."""
        row_at = {row.position: i for i, row in enumerate(rows)}
        column_at = {position: i for i, position in enumerate(columns)}
        entries = self.entries[self.entries["row"].isin(row_at) & self.entries["column"].isin(column_at)]
        entries = entries.assign(row=entries["row"].map(row_at), column=entries["column"].map(column_at))
        entries = entries.sort_values(["row", "group", "column"], kind="stable", ignore_index=True)
        return replace(self, entries=entries, columns=[self.columns[c] for c in columns])

    def having(self, has_value: Callable[[Entry], bool]) -> tuple[list[Row], list[int]]:
        """(the rows with such an entry, the positions of the columns with one)."""
        found = [entry for entry in self.all() if has_value(entry)]
        rows, columns = {entry.row for entry in found}, {entry.column for entry in found}
        return [row for row in self.rows if row.position in rows], sorted(columns)


def names_of(axes: Sequence[str], keys: Sequence[Key], left: Sequence[Key]) -> list[str]:
    """The labels of some of the rows with these keys, on the axes in which the rows differ: "MNIST, FAT".

    Rows that several leading labels have alike are named once: "MNIST and SVHN: FAT; SFAT".
    """
    vary = [axis for axis in axes if len({key.get(axis, "") for key in keys}) > 1] or axes
    labels_of = [[key.get(axis, "") for axis in vary] for key in left]
    # "MNIST" -> "FAT", "SFAT"; then ("FAT", "SFAT") -> "MNIST", "SVHN"
    last_labels = grouped((", ".join(filter(None, leading)), last) for *leading, last in labels_of)
    leading_by_last = grouped((tuple(labels), text) for text, labels in last_labels.items())
    names: list[str] = []
    for shared_labels, texts in leading_by_last.items():
        if len(texts) > 1 and len(shared_labels) > 1:
            names.append(f"{' and '.join(texts)}: {'; '.join(shared_labels)}")
        else:
            names += [", ".join(filter(None, (text, last))) for text in texts for last in shared_labels]
    return names


def any_number(entry: Entry) -> bool:
    """Whether an entry is measured or published."""
    return entry.mean is not None or entry.published is not None


def with_numbers(grid: Sheet, linked_cells: Collection[tuple[str, ...]] = ()) -> tuple[Sheet, list[str]]:
    """(the grid without the rows and columns that have no number, their names); the whole grid where nothing has one.

    linked_cells: cells that a link leads to, whose rows stay.
    """
    rows, _ = grid.having(lambda entry: any_number(entry) or entry.cells in linked_cells)
    _, positions = grid.having(any_number)
    if not rows or not positions:
        return grid, []
    empty_headings = [column.label for c, column in enumerate(grid.columns) if c not in positions]
    kept = {row.position for row in rows}
    empty_rows = [row.key for row in grid.rows if row.position not in kept]
    names = names_of(grid.axes, [row.key for row in grid.rows], empty_rows)
    return grid.only(rows, positions), [*names, *empty_headings]


def varying(grid: Sheet) -> tuple[Sheet, list[str]]:
    """(the grid without the axes on which all rows have the same label, those labels)."""
    labels_of = {axis: {row.key.get(axis, "") for row in grid.rows} for axis in grid.axes}
    constant_labels = {axis: min(labels) for axis, labels in labels_of.items() if len(labels) == 1}
    axes = [axis for axis in grid.axes if axis not in constant_labels] or grid.axes[-1:]
    labels = [label for axis, label in constant_labels.items() if label and axis not in axes]
    entries = grid.entries
    if labels and grid.axes[-1] not in axes and entries["own"].all():  # the mark goes with its label
        labels[-1] += " (own)"
        entries = entries.assign(own=False)
    return replace(grid, axes=axes, entries=entries), labels


def sorted_by(grids: Sequence[Sheet], column_name: str) -> list[Sheet]:
    """Sort the rows of each table by a column, the best first.

    column_name: a heading or a metric. Rows stay within the block of their first axes' labels. A table without the
    column is left as it is. SpecError: no table has it.
    """
    wanted = column_name.lower()
    names = [[(column.heading.lower(), column.metric.lower()) for column in grid.columns] for grid in grids]
    known = dict.fromkeys(name for of_grid in names for of_column in of_grid for name in of_column)
    if grids and wanted not in known:
        raise SpecError(f"no table has a column '{column_name}'{did_you_mean(wanted, known)}", option="sort")
    sorted_grids = []
    for grid, of_grid in zip(grids, names, strict=True):
        position = next((c for c, of_column in enumerate(of_grid) if wanted in of_column), None)
        sorted_grids.append(grid if position is None else _sorted(grid, position))
    return sorted_grids


def _sorted(grid: Sheet, position: int) -> Sheet:
    sign = 1 if grid.columns[position].best == "min" else -1  # a column without a best is sorted from the largest
    blocks = list(dict.fromkeys(tuple(row.key.get(axis, "") for axis in grid.axes[:-1]) for row in grid.rows))

    def order(row: Row) -> tuple[int, float]:
        means = [group[position].mean for group in row.values if group[position].mean is not None]
        block = blocks.index(tuple(row.key.get(axis, "") for axis in grid.axes[:-1]))
        return block, sign * (means[0] or 0.0) if means else float("inf")  # unmeasured rows go last

    return grid.only(sorted(grid.rows, key=order), range(len(grid.columns)))


def label(plan: Plan) -> str:
    """The warning that numbers are not comparable with a paper's (a reduced preset, or --set); empty without one."""
    reasons = [] if plan.preset == "paper" else [f"{plan.preset.upper()} PRESET"]
    if settings := split_settings(plan.suite)[1]:
        reasons.append(f"WITH {', '.join(settings)}")
    return f"{', '.join(reasons)} - not comparable with published numbers" if reasons else ""
