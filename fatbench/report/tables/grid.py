"""The data of a table before it is printed: headings, rows, and the number in each field.

A grid holds fractions in [0, 1] and plain numbers, unrounded; formats print them. `layout` fills it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fatbench.report.contrasts import Difference
from fatbench.report.numbers import provenance
from fatbench.report.numbers.measurements import Source, in_words
from fatbench.store.selection import PUBLISHED
from fatbench.suite.cells import Plan
from fatbench.suite.files import split_settings
from fatbench.suite.model import Condition, Key


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
    images: str = ""  # "n = 500" where other columns have more images

    @property
    def label(self) -> str:
        """The heading as it is printed."""
        return f"{self.heading}, {self.images}" if self.images else self.heading


@dataclass
class Value:
    """The value at one row and heading of a group; `mean` is None where nothing has been measured."""

    planned: bool = True  # False: the suite has no such cell, nothing is missing
    never: bool = False  # this checkpoint is not evaluated, or training does not log it: it will not be measured
    mean: float | None = None
    std: float | None = None  # over seeds, ddof 1; None below two seeds
    seeds: tuple[int, ...] = ()  # those measured
    wanted: int = 0  # how many the plan asks for
    n: tuple[int, ...] = ()  # examples behind each measurement; more than one number = mixed
    values: tuple[float, ...] = ()  # one a seed
    interval: tuple[float, float] | None = None  # of a difference or share: 95 % confidence interval over seeds
    behind: tuple[tuple[str, str], ...] = ()  # (cell, stage) whose outcomes they are, one a seed; none of training
    cells: tuple[str, ...] = ()  # all that the number stands for, one a seed, measured or not
    published: float | None = None
    published_most: float | None = None  # where the paper gives a range
    published_std: float | None = None
    published_select: str = ""  # the checkpoint behind it; empty where the heading says all, as that of a round
    formula: bool = False  # what is "published" is a formula's, and no paper prints it
    comparable: bool = True  # with what is published: its settings and its checkpoint are the paper's
    rank: str = ""  # in its group, where that was tested: "best", "second", "shared", "worse"; see `significance`
    doubts: tuple[str, ...] = ()  # in words, with the seeds that they are about
    codes: frozenset[str] = frozenset()  # of these doubts, see `doubts.WORDS`
    at_floor: bool = False  # measured, and of no seed above a constant classifier
    marked: tuple[str, ...] = ()  # the doubts that have a footnote mark
    marks: tuple[str, ...] = ()  # footnote marks: one for each of `marked`, then that of `significance`
    published_flag: str = ""
    published_mark: str = ""
    labels: Key = field(default_factory=dict)  # of the axes in the heading's condition

    @property
    def difference(self) -> float | None:
        """measured - published, both unrounded; None where one is missing or they are not comparable."""
        if self.mean is None or self.published is None or self.published_most is not None or not self.comparable:
            return None
        return self.mean - self.published

    @property
    def partial(self) -> str:
        """ "2 of 3 seeds" where seeds are missing, else empty."""
        lacks_seeds = self.mean is not None and len(self.seeds) < self.wanted
        return f"{len(self.seeds)} of {self.wanted} seeds" if lacks_seeds else ""


@dataclass(frozen=True)
class Group:
    """A group of columns: one combination of labels of the `across` axes."""

    key: Key

    @property
    def label(self) -> str:
        """The labels, joined; one without a letter gets the name of its axis: "steps 5"."""
        label_texts = (label if any(map(str.isalpha, label)) else f"{axis} {label}" for axis, label in self.key.items())
        return ", ".join(label_texts)


@dataclass(frozen=True)
class Row:
    """A row of a table: its labels and its values."""

    key: Key
    values: list[list[Value]]  # [group][column]
    own: bool = False  # a plug-in's function makes it, and not every row of the table

    def labels(self, axes: Iterable[str]) -> list[str]:
        """The label of each axis, the last one marked if a plug-in makes the row: "my_rule (own)"."""
        row_labels = [self.key.get(axis, "") for axis in axes]
        last_labelled = max((i for i, label in enumerate(row_labels) if label), default=None)
        return [f"{label} (own)" if self.own and i == last_labelled else label for i, label in enumerate(row_labels)]


@dataclass(frozen=True)
class Grid:
    """One table, ready to print."""

    suite: str
    preset: str
    id: str
    name: str  # the title in the suite file
    label: str  # "SMOKE PRESET - not comparable with published numbers"; empty for the preset `paper`
    axes: list[str]  # that label the rows
    groups: list[Group]
    columns: list[Column]
    rows: list[Row]
    select: str
    checkpoint: str  # which round's model the numbers are of, in words
    seeds: list[int]
    facts: provenance.TableFacts
    notes: list[tuple[str, str]] = field(default_factory=list)  # (what, text), shown under the table
    footnotes: list[tuple[str, str]] = field(default_factory=list)  # (mark, text)
    points: list[tuple[str, str]] = field(default_factory=list)  # (labels, cell), one a point and seed
    paired: list[tuple[Column, Difference]] = field(default_factory=list)  # the tests that the table asks for
    attacks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # metric -> its attacks, all settings
    perturbation: str = ""  # of the tasks: "Linf 25/255"
    split: bool = False  # numbers under one heading that are not compared with each other

    @property
    def title(self) -> str:
        return f"{self.name} [{self.label}]" if self.label else self.name

    @property
    def has_published(self) -> bool:
        return any(value.published is not None for value in self.all())

    @property
    def by(self) -> str:
        """The origin of the numbers beside ours: "paper" or "formula"."""
        return "formula" if any(value.formula for value in self.all()) else "paper"

    @property
    def published_at(self) -> str:
        """The round of the published numbers, in words; empty where their headings say it."""
        checkpoints = dict.fromkeys(value.published_select for value in self.all() if value.published is not None)
        return " and ".join(PUBLISHED[checkpoint] for checkpoint in checkpoints if checkpoint)

    @property
    def has_differences(self) -> bool:
        return any(value.difference is not None for value in self.all())

    @property
    def words(self) -> dict[str, str]:
        """Metric -> its heading, as notes write it."""
        return in_words(
            (column.heading, column.source) for column in self.columns if not (column.minus or column.share)
        )

    def all(self) -> Iterable[Value]:
        return (value for row in self.rows for group in row.values for value in group)

    def only(self, rows: Sequence[Row], columns: Sequence[int]) -> Grid:
        """The grid with these rows and the columns at these positions, in this order."""
        kept_rows = [replace(row, values=[[group[c] for c in columns] for group in row.values]) for row in rows]
        return replace(self, rows=kept_rows, columns=[self.columns[c] for c in columns])

    def having(self, has_value: Callable[[Value], bool]) -> tuple[list[Row], list[int]]:
        """(the rows with such a value, the positions of the columns with one)."""
        rows = [row for row in self.rows if any(has_value(value) for group in row.values for value in group)]
        positions = range(len(self.columns))
        return rows, [c for c in positions if any(has_value(group[c]) for row in rows for group in row.values)]

    def names_without(self, rows: Sequence[Row]) -> list[str]:
        """The labels of the grid's other rows, on the axes in which its rows differ: "MNIST, FAT".

        Rows that several leading labels lack alike are named once: "MNIST and SVHN: FAT; SFAT".
        """
        vary = [axis for axis in self.axes if len({row.key.get(axis, "") for row in self.rows}) > 1] or self.axes
        kept_rows = {id(row) for row in rows}  # by identity: two rows may have equal labels
        last_labels: dict[str, list[str]] = {}  # "MNIST" -> "FAT", "SFAT"
        for row in self.rows:
            if id(row) not in kept_rows:
                *leading, last_label = (row.key.get(axis, "") for axis in vary)
                last_labels.setdefault(", ".join(filter(None, leading)), []).append(last_label)
        leading_by_last: dict[tuple[str, ...], list[str]] = {}  # ("FAT", "SFAT") -> "MNIST", "SVHN"
        for leading_text, last_row_labels in last_labels.items():
            leading_by_last.setdefault(tuple(last_row_labels), []).append(leading_text)
        names: list[str] = []
        for shared_labels, leading_texts in leading_by_last.items():
            if len(leading_texts) > 1 and len(shared_labels) > 1:
                names.append(f"{' and '.join(leading_texts)}: {'; '.join(shared_labels)}")
            else:
                names += [
                    ", ".join(filter(None, (text, last_label)))
                    for text in leading_texts
                    for last_label in shared_labels
                ]
        return names


def any_number(value: Value) -> bool:
    """Whether a value is measured or published."""
    return value.mean is not None or value.published is not None


def with_numbers(grid: Grid, linked_cells: Collection[tuple[str, ...]] = ()) -> tuple[Grid, list[str]]:
    """(the grid without the rows and columns that have no number, their names); the whole grid where nothing has one.

    linked_cells: cells that a link leads to, whose rows stay.
    """
    rows, _ = grid.having(lambda value: any_number(value) or value.cells in linked_cells)
    _, positions = grid.having(any_number)
    if not rows or not positions:
        return grid, []
    empty_headings = [column.label for c, column in enumerate(grid.columns) if c not in positions]
    return grid.only(rows, positions), [*grid.names_without(rows), *empty_headings]


def varying(grid: Grid) -> tuple[Grid, list[str]]:
    """(the grid without the axes on which all rows have the same label, those labels)."""
    constant_labels = {axis: grid.rows[0].key.get(axis, "") for axis in grid.axes} if grid.rows else {}
    constant_labels = {
        axis: label
        for axis, label in constant_labels.items()
        if {row.key.get(axis, "") for row in grid.rows} == {label}
    }
    axes = [axis for axis in grid.axes if axis not in constant_labels] or grid.axes[-1:]
    labels = [label for axis, label in constant_labels.items() if label and axis not in axes]
    rows = grid.rows
    if labels and grid.axes[-1] not in axes and all(row.own for row in rows):  # the mark goes with its label
        labels[-1] += " (own)"
        rows = [replace(row, own=False) for row in rows]
    return replace(grid, axes=axes, rows=rows), labels


def label(plan: Plan) -> str:
    """The warning that numbers are not comparable with a paper's (a reduced preset, or --set); empty without one."""
    reasons = [] if plan.preset == "paper" else [f"{plan.preset.upper()} PRESET"]
    if settings := split_settings(plan.suite)[1]:
        reasons.append(f"WITH {', '.join(settings)}")
    return f"{', '.join(reasons)} - not comparable with published numbers" if reasons else ""
