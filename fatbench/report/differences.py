"""A table of methods and their differences from the baseline: points, interval, size not excluded, p after Holm.

    print(render(of_plan(suite, plan, store, "autoattack"), "markdown"))

Differences are over seeds and images (`statistics.seeds_and_images`); p is corrected as in `contrasts.from_baseline`.
"""

from __future__ import annotations

import html
import json
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pandas import DataFrame
from tabulate import tabulate

from fatbench.errors import SpecError
from fatbench.report.contrasts import Difference, declared_by, from_baseline
from fatbench.report.formats import latex_text, markdown, terminal
from fatbench.report.numbers.stored import read
from fatbench.report.sentences import p_text, points_up
from fatbench.report.tables.combined import combine
from fatbench.report.tables.entries import sheets
from fatbench.report.tables.number_format import MISSING, csv_text, rounded
from fatbench.report.tables.sheet import Entry, Sheet
from fatbench.suite.standard_attacks import did_you_mean_metric

if TYPE_CHECKING:
    from fatbench.store.selection import Checkpoint
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Plan
    from fatbench.suite.files import Suite

STYLES = {"markdown": "github", "terminal": "simple", "latex": "latex_booktabs", "html": "html"}
ESCAPES: dict[str, Callable[[str], str]] = {
    "markdown": markdown.escape,
    "latex": latex_text.escape,
    "html": html.escape,
}


@dataclass(frozen=True)
class Differences:
    """The accuracies of methods, and beside each row its difference; None: the baseline, or what is not compared."""

    grid: Sheet
    differences: Sequence[Difference | None]
    metric: str  # the heading of the compared metric
    baseline: str
    digits: int
    not_measured: Sequence[str]  # methods without a number

    @property
    def doubts(self) -> dict[str, str]:
        """Doubt in words -> its mark."""
        texts = dict.fromkeys(doubt for value in self.grid.all() for doubt in value.doubts)
        return {text: "†‡§¶"[i % 4] * (1 + i // 4) for i, text in enumerate(texts)}


def of_plan(
    suite: Suite, plan: Plan, store: Store, metric: str, *, select: Checkpoint = "last", digits: int = 1,
    images: str = "all", shown_metrics: Sequence[str] = (),
) -> Differences:  # fmt: skip
    """Compare the methods of a plan with its suite's baseline; the cells' ids are those of the runs to read.

    shown_metrics: the metrics that have a column; none: all that the baseline has. SpecError: the suite names no
    baseline, or evaluates no such metric.
    """
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
    numbers = read(combined.tables[0].values.values(), cells, store, select)
    (grid,) = sheets(combined, cells, numbers, published=False, digits=digits, images=images)
    axis, label = plan.baseline
    rows, columns = grid.having(lambda value: value.mean is not None)
    not_measured = grid.names_without(rows)
    if not shown_metrics:  # what a single method has would be a column of dashes
        baseline_rows = [row for row in rows if row.key.get(axis) == label]
        columns = [c for c in columns if any(row.values[0][c].mean is not None for row in baseline_rows)] or columns
    grid = replace(
        grid.only(rows, columns),
        id="differences",
        name=f"{suite.title}: differences from {label}",
        columns=[replace(grid.columns[c], heading=headings.get(grid.columns[c].metric, grid.columns[c].metric))
                 for c in columns],
    )  # fmt: skip
    differences = from_baseline(plan, numbers.evaluated, [metric], declared_by(suite.tests, plan, numbers.evaluated))
    of_rows = []
    for row in grid.rows:
        ids = {cell for value in row.values[0] for cell in value.cells}
        of_rows.append(next((one for one in differences if one.cells <= ids), None))
    return Differences(grid, of_rows, headings.get(metric, metric), label, digits, not_measured)


def render(table: Differences, format: str) -> str:
    """The table in one of `report.FORMATS`; csv and json have unrounded numbers."""
    if format in ("csv", "json"):
        return _as_data(table, format)
    grid, columns = table.grid, list(range(len(table.grid.columns)))
    text = _as_text(table, columns, format)
    notes = [f"{symbol} {words}" for words, symbol in table.doubts.items()]
    if table.not_measured:
        notes.append(f"not measured: {'; '.join(table.not_measured)}")
    notes = [ESCAPES[format](note) for note in notes] if format in ESCAPES else notes
    if format == "terminal":
        width = shutil.get_terminal_size().columns
        optional = [c for c in columns if grid.columns[c].heading != table.metric]
        left_out: list[str] = []
        while optional and max(map(len, text.splitlines())) > width:  # the last ones go first
            left_out.insert(0, grid.columns[optional[-1]].label)
            columns.remove(optional.pop())
            text = _as_text(table, columns, format)
        if left_out:
            notes.append(f"left out, as this terminal is too narrow: {', '.join(left_out)}")
        notes = [line for note in notes for line in textwrap.wrap(note, width)]
    note_text = ("\n\n" if format == "latex" else "\n").join(notes)  # in LaTeX a paragraph each
    title = {
        "terminal": lambda: terminal.title(grid).splitlines(),
        "markdown": lambda: [f"### {markdown.escape(f'{grid.id}: {grid.title}')}", ""],
        "latex": lambda: [latex_text.caption_title(grid.name, grid.label), ""],
        "html": lambda: [f"<p>{html.escape(grid.title)}</p>"],
    }[format]()
    whole_text = "\n".join([*title, text, *(["", note_text] if notes else [])]) + "\n"
    return latex_text.printable(whole_text)[0] if format == "latex" else whole_text


def _as_text(table: Differences, columns: Sequence[int], format: str) -> str:
    """The table as text with these columns of the grid; on a terminal the headings take two lines."""
    grid, narrow = table.grid, format == "terminal"
    axes = [axis for axis in grid.axes if len({row.key.get(axis) for row in grid.rows}) > 1] or grid.axes[-1:]
    sizes = {one.size for one in table.differences if one is not None and one.test is not None}
    over = f"over {' and '.join(map(str, sorted(sizes)))}" if sizes else ""
    points, at_most = f"points above {table.baseline}{chr(10) if narrow else ' '}(95 % interval)", "differs by at most"
    heads = [f"{table.metric}: {points}", at_most, f"p after Holm {over}".rstrip()]
    if narrow:
        heads = [points, "differs by\nat most", f"p, Holm\n{over}" if len(sizes) == 1 else "p after\nHolm"]
    rows = []
    for row, one in zip(grid.rows, table.differences, strict=True):
        labels = dict(zip(grid.axes, row.labels(grid.axes), strict=True))
        accuracies = [_accuracy(row.values[0][c], table, short=narrow) for c in columns]
        rows.append([*(labels.get(axis, "") for axis in axes), *accuracies, *_compared(one, table.digits)])
    heads = [*axes, *(grid.columns[c].label for c in columns), *heads]
    return tabulate(rows, heads, tablefmt=STYLES[format], disable_numparse=True)


def _accuracy(value: Entry, table: Differences, *, short: bool) -> str:
    if value.mean is None:
        return MISSING
    spread = "" if value.std is None else f" ±{rounded(100 * value.std, table.digits)}"
    partial = f" [{len(value.seeds)}/{value.wanted}]" if short else f" [{value.partial}]"
    marks = "".join(table.doubts[words] for words in value.doubts)
    return f"{rounded(100 * value.mean, table.digits)}{spread}{partial if value.partial else ''}{marks}"


def _compared(one: Difference | None, digits: int) -> Sequence[str]:
    """(points with interval, size not excluded, p) of a row; empty texts where nothing is compared."""
    if one is None or one.difference is None:
        return "", "", ""
    mean = rounded(100 * one.difference, digits)
    if one.test is None:
        return mean, MISSING, MISSING
    low, high = (rounded(100 * end, digits) for end in (one.test.low, one.test.high))
    at_most = MISSING if one.at_most is None else points_up(one.at_most, digits)
    return f"{mean} ({low} to {high})", at_most, p_text(one.p_corrected or 0.0)


def records(table: Differences) -> list[dict[str, Any]]:
    """The rows as data, one for each method: fractions, unrounded."""
    rows = []
    for row, one in zip(table.grid.rows, table.differences, strict=True):
        record: dict[str, Any] = dict(row.key)
        for column, value in zip(table.grid.columns, row.values[0], strict=True):
            record |= {column.metric: value.mean, f"{column.metric}_std": value.std}
            record[f"{column.metric}_seeds"] = len(value.seeds)
        doubts = dict.fromkeys(doubt for value in row.values[0] for doubt in value.doubts)
        names = {"difference": "difference", "low": "low", "high": "high", "at_most": "at_most", "p": "p_holm"}
        rows.append(
            record | {name: getattr(one, key, None) for name, key in names.items()} | {"doubts": "; ".join(doubts)}
        )
    return rows


def _as_data(table: Differences, format: str) -> str:
    rows, grid = records(table), table.grid
    if format == "csv":
        return csv_text(DataFrame(rows))
    facts = {"title": grid.title, "suite": grid.suite, "preset": grid.preset, "metric": table.metric}
    return json.dumps({**facts, "baseline": table.baseline, "rows": rows}, indent=2) + "\n"
