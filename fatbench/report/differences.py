"""A table of methods and their differences from the baseline: points, interval, size not excluded, p after Holm.

    print(render(of_plan(suite, plan, store, "autoattack"), "markdown"))

Differences are over seeds and images (`statistics.seeds_and_images`); the correction is over all of the table.
"""

from __future__ import annotations

import csv
import html
import io
import json
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tabulate import tabulate

from fatbench.errors import SpecError
from fatbench.report.formats import latex_text, markdown, terminal
from fatbench.report.numbers import statistics
from fatbench.report.numbers.baseline import Difference, differences
from fatbench.report.numbers.compare import measured_numbers
from fatbench.report.tables.combined import combine
from fatbench.report.tables.grid import Grid, Row, Value
from fatbench.report.tables.number_format import MISSING, rounded
from fatbench.suite.standard_attacks import did_you_mean_metric

if TYPE_CHECKING:
    from fatbench.store.selection import Checkpoint
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Plan
    from fatbench.suite.files import Suite

STYLES = {"markdown": "github", "terminal": "simple", "latex": "latex_booktabs", "html": "html"}
FORMATS = (*STYLES, "csv", "json")
ESCAPES: dict[str, Callable[[str], str]] = {
    "markdown": markdown.escape,
    "latex": latex_text.escape,
    "html": html.escape,
}


@dataclass(frozen=True)
class Line:
    """A row: its labels, its accuracies, and its difference from the baseline."""

    key: dict[str, str]
    labels: dict[str, str]  # the same, an own row marked: "my_rule (own)"
    values: list[Value]
    difference: Difference | None = None  # None: the baseline itself, or not to be compared
    corrected: float = 1.0  # p after Holm's correction


@dataclass(frozen=True)
class Differences:
    """A table of differences from the baseline. metric: the heading of the compared metric."""

    grid: Grid
    metric: str
    baseline: str
    digits: int
    lines: list[Line]
    footnotes: dict[str, str] = field(default_factory=dict)  # doubt in words -> mark
    not_measured: Sequence[str] = ()  # methods without a number

    @property
    def axes(self) -> list[str]:
        """The axes in which rows differ."""
        axes = self.grid.axes
        return [axis for axis in axes if len({line.key.get(axis) for line in self.lines}) > 1] or axes[-1:]

    @property
    def tested(self) -> int:
        """The number of comparisons over which p is corrected: with one seed there is no test."""
        return sum(_p(line.difference) is not None for line in self.lines)


def of_plan(
    suite: Suite, plan: Plan, store: Store, metric: str, *, select: Checkpoint = "last", digits: int = 1,
    images: str = "all", shown_metrics: Sequence[str] = (),
) -> Differences:  # fmt: skip
    """Compare the methods of a plan with its suite's baseline; the cells' ids are those of the runs to read.

    shown_metrics: the metrics that have a column; none: all that the baseline has. SpecError: the suite names no
    baseline, or evaluates no such metric.
    """
    from fatbench.report import build_tables

    if plan.baseline is None:
        raise SpecError(f"--differences: suite '{suite.name}' names no baseline (key 'baseline: LABEL')")
    metrics = plan.metrics()
    if metric not in metrics:
        hint = did_you_mean_metric(metric, metrics)
        raise SpecError(f"--differences: suite '{suite.name}' evaluates no '{metric}'{hint}")
    headings: dict[str, str] = {}  # those of the suite's first table that has the metric
    for heading, source in (item for table in suite.tables for item in table.values.items()):
        headings.setdefault(source, heading)
    combined, cells = combine([(suite, plan)], [], [*(shown_metrics or metrics)])
    options = {"select": select, "published": False, "digits": digits, "images": images}
    (grid,) = build_tables(combined, cells, store, **options)  # type: ignore[arg-type]
    numbers_of = measured_numbers(store, [cell.id for cell in plan.cells], select).__getitem__
    difference_by_cells = {entry.cells: entry for entry in differences(plan, numbers_of, [metric])}
    axis, label = plan.baseline
    rows, columns = grid.having(lambda value: value.mean is not None)
    not_measured = grid.names_without(rows)
    if not shown_metrics:  # what a single method has would be a column of dashes
        baseline_rows = [row for row in rows if row.key.get(axis) == label]
        columns = [c for c in columns if any(row.values[0][c].mean is not None for row in baseline_rows)] or columns
    grid = grid.only(rows, columns)
    compared = [_difference(row, difference_by_cells) for row in grid.rows]
    corrected = iter(statistics.holm([p for p in map(_p, compared) if p is not None]))
    lines = [
        Line(
            dict(row.key),
            dict(zip(grid.axes, row.labels(grid.axes), strict=True)),
            row.values[0],
            entry,
            1.0 if _p(entry) is None else next(corrected),
        )
        for row, entry in zip(grid.rows, compared, strict=True)
    ]
    marks = {text: "†‡§¶"[i % 4] * (1 + i // 4) for i, text in enumerate(dict.fromkeys(_doubts(lines)))}
    grid = replace(
        grid,
        id="differences",
        name=f"{suite.title}: differences from {label}",
        columns=[replace(entry, heading=headings.get(entry.metric, entry.metric)) for entry in grid.columns],
    )
    return Differences(grid, headings.get(metric, metric), label, digits, lines, marks, not_measured)


def _p(difference: Difference | None) -> float | None:
    """p before the correction; None: not tested."""
    return None if difference is None else difference.comparison.p


def _difference(row: Row, difference_by_cells: dict[frozenset[str], Difference]) -> Difference | None:
    cells = {cell for value in row.values[0] for cell in value.cells}
    return next((difference for label_cells, difference in difference_by_cells.items() if label_cells <= cells), None)


def _doubts(lines: Iterable[Line]) -> Iterable[str]:
    return (doubt for line in lines for value in line.values for doubt in value.doubts)


def render(table: Differences, format: str) -> str:
    """The table in one of FORMATS; csv and json have unrounded numbers. SpecError: another format."""
    if format in ("csv", "json"):
        return _as_data(table, format)
    columns = list(range(len(table.grid.columns)))
    text = _as_text(table, columns, format)
    notes = [f"{symbol} {words}" for words, symbol in table.footnotes.items()]
    if table.not_measured:
        notes.append(f"not measured: {'; '.join(table.not_measured)}")
    if format in ESCAPES:
        notes = [ESCAPES[format](note) for note in notes]
    if format == "terminal":
        terminal_width = shutil.get_terminal_size().columns
        metric_columns = [c for c in columns if table.grid.columns[c].heading == table.metric]
        optional_columns = [c for c in columns if c not in metric_columns]
        while optional_columns and max(map(len, text.splitlines())) > terminal_width:
            optional_columns.pop()  # the last ones go first; that of the compared metric stays
            text = _as_text(table, sorted([*optional_columns, *metric_columns]), format)
        if left_out_headings := [
            table.grid.columns[c].label for c in columns if c not in (*optional_columns, *metric_columns)
        ]:
            notes.append(f"left out, as this terminal is too narrow: {', '.join(left_out_headings)}")
        notes = [line for note in notes for line in textwrap.wrap(note, terminal_width)]
    note_text = ("\n\n" if format == "latex" else "\n").join(notes)  # in LaTeX a paragraph each
    return "\n".join([*_title(table.grid, format), text, *(["", note_text] if notes else [])]) + "\n"


def _title(grid: Grid, format: str) -> list[str]:
    """The lines above the table: what it is, and the warning of a reduced preset, as above other tables."""
    if format == "terminal":
        return terminal.title(grid).splitlines()
    if format == "markdown":
        return [f"### {markdown.escape(f'{grid.id}: {grid.title}')}", ""]
    if format == "latex":
        return [latex_text.caption_title(grid.name, grid.label), ""]
    return [f"<p>{html.escape(grid.title)}</p>"]


def _as_text(table: Differences, columns: Sequence[int], format: str) -> str:
    """The table as text with these columns of the grid; on a terminal the headings take two lines."""
    heads = [
        f"{table.metric}: points above {table.baseline} (95 % interval)", "differs by at most",
        f"p after Holm over {table.tested}",
    ]  # fmt: skip
    if format == "terminal":
        heads = [
            f"points above {table.baseline}\n(95 % interval)",
            "differs by\nat most",
            f"p, Holm\nover {table.tested}",
        ]
    heads = [*table.axes, *(table.grid.columns[c].label for c in columns), *heads]
    rows = [
        [
            *(line.labels.get(axis, "") for axis in table.axes),
            *(_accuracy(line.values[c], table, short=format == "terminal") for c in columns),
            *_compared(line, table.digits),
        ]
        for line in table.lines
    ]
    return tabulate(rows, heads, tablefmt=STYLES[format], disable_numparse=True)


def _accuracy(value: Value, table: Differences, *, short: bool) -> str:
    if value.mean is None:
        return MISSING
    spread = "" if value.std is None else f" ±{rounded(100 * value.std, table.digits)}"
    partial = f" [{len(value.seeds)}/{value.wanted}]" if short else f" [{value.partial}]"
    marks = "".join(table.footnotes[words] for words in value.doubts)
    return f"{rounded(100 * value.mean, table.digits)}{spread}{partial if value.partial else ''}{marks}"


def _compared(line: Line, digits: int) -> Sequence[str]:
    """(points with interval, size not excluded, p) of a line; empty texts where nothing is compared."""
    if line.difference is None:
        return "", "", ""
    comparison = line.difference.comparison
    mean = rounded(100 * comparison.difference, digits)
    if comparison.test is None:
        return mean, MISSING, MISSING
    low, high, at_most = (
        rounded(100 * end, digits) for end in (comparison.test.low, comparison.test.high, comparison.test.at_most)
    )
    p = "< 0.001" if line.corrected < 0.001 else f"{line.corrected:.2g}"
    return f"{mean} ({low} to {high})", MISSING if comparison.floor else at_most, p


def records(table: Differences) -> list[dict[str, object]]:
    """The rows as data, one for each method: fractions, unrounded."""
    rows = []
    for line in table.lines:
        row: dict[str, object] = dict(line.key)
        for column, value in zip(table.grid.columns, line.values, strict=True):
            seeds = len(value.seeds)
            row |= {column.metric: value.mean, f"{column.metric}_std": value.std, f"{column.metric}_seeds": seeds}
        comparison = None if line.difference is None else line.difference.comparison
        test = None if comparison is None else comparison.test
        row |= {
            "difference": None if comparison is None else comparison.difference,
            "low": None if test is None else test.low,
            "high": None if test is None else test.high,
            "at_most": None if test is None or comparison is None or comparison.floor else test.at_most,
            "p": None if test is None else line.corrected,
            "doubts": "; ".join(dict.fromkeys(_doubts([line]))),
        }
        rows.append(row)
    return rows


def _as_data(table: Differences, format: str) -> str:
    rows = records(table)
    if format == "json":
        grid = table.grid
        facts = {"title": grid.title, "suite": grid.suite, "preset": grid.preset, "metric": table.metric}
        return json.dumps({**facts, "baseline": table.baseline, "rows": rows}, indent=2) + "\n"
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
