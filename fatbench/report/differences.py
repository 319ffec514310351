"""A table of methods and their differences from the baseline: points, interval, size not excluded, p after Holm.

    print(report.render([sheet(of_plan(suite, plan, store, "autoattack"))], "markdown"))

Differences are over seeds and images (`statistics.seeds_and_images`); p is corrected as in `contrasts.from_baseline`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas
from pandas import DataFrame

from fatbench.errors import SpecError
from fatbench.report.contrasts import Difference, declared_by, from_baseline
from fatbench.report.numbers.long import long
from fatbench.report.numbers.points import Points, combined, spread
from fatbench.report.numbers.stored import read
from fatbench.report.sentences import p_text, points_up
from fatbench.report.tables.entries import sheets
from fatbench.report.tables.number_format import MISSING, TEXTS, csv_text, rounded
from fatbench.report.tables.sheet import ENTRY, Sheet, names_of, varying
from fatbench.store.selection import Checkpoint
from fatbench.suite.cells import Plan
from fatbench.suite.files import Suite
from fatbench.suite.standard_attacks import did_you_mean_metric

if TYPE_CHECKING:
    from fatbench.store.stages import Store


@dataclass(frozen=True)
class Differences:
    """The accuracies of methods, and beside each row its difference; None: the baseline, or what is not compared."""

    grid: Sheet
    differences: Sequence[Difference | None]
    metric: str  # that is compared
    heading: str  # of it
    baseline: tuple[str, str]  # axis, label
    digits: int


def of_plan(
    suite: Suite, plan: Plan, store: Store, metric: str, *, select: Checkpoint = "last", digits: int = 1,
    images: str = "all", shown_metrics: Sequence[str] = (),
) -> Differences:  # fmt: skip
    """Compare the methods of a plan with its suite's baseline; the cells' ids are those of the runs to read.

    shown_metrics: the metrics that have a column; none: all that the baseline has. SpecError: the suite names no
    baseline, or evaluates no such metric.
    """
    if plan.baseline is None:
        raise SpecError(f"suite '{suite.name}' names no baseline (key 'baseline: LABEL')", option="differences")
    metrics = plan.metrics()
    if metric not in metrics:
        hint = did_you_mean_metric(metric, metrics)
        raise SpecError(f"suite '{suite.name}' evaluates no '{metric}'{hint}", option="differences")
    headings: dict[str, str] = {}  # those of the suite's first table that has the metric
    for heading, source in (item for table in suite.tables for item in table.values.items()):
        headings.setdefault(source, heading)
    numbers = read([], plan, store, select)
    axis, label = plan.baseline
    measured = numbers.at(select)[["cell", "label"]]
    by_baseline = measured["cell"].isin([cell.id for cell in plan.cells if cell.key.get(axis) == label])
    # what a single method has would be a column of dashes
    shown = [*shown_metrics] or [one for one in metrics if one in {*measured.loc[by_baseline, "label"]}] or metrics
    suite_of_one, one_plan = combined([(suite, plan)], [], shown)
    table = suite_of_one.tables[0].model_copy(update={"ties": False})  # p is that of the differences alone
    points, _ = Points.of(one_plan, spread(table, one_plan))
    assert points is not None  # the metric is one of the plan's
    values = long(one_plan, points, numbers)[0][["row", "value"]].astype({"value": float})
    rows = {points.rows[row] for row in values["row"][values["value"].abs() < math.inf]}
    of_rows = {cell.id for (row, _), by_heading in points.cells.items() if row in rows
               for cells in by_heading.values() for cell in cells}  # fmt: skip
    one_plan = replace(one_plan, cells=[cell for cell in one_plan.cells if cell.id in of_rows or not rows])
    (grid,) = sheets([table], one_plan, numbers, published=False, digits=digits, images=images)
    if left := names_of(table.rows, [*map(dict, points.rows)], [dict(row) for row in points.rows if row not in rows]):
        grid.notes.append(("not measured", "; ".join(left)))
    headed = [replace(column, heading=headings.get(column.metric, column.metric)) for column in grid.columns]
    name = f"{suite.title}: differences from {label}"
    grid = replace(grid, id=f"differences-{metric}", name=name, columns=headed)
    grid = grid if rows else grid.only([], range(len(headed)))
    differences = from_baseline(plan, numbers.evaluated, [metric], declared_by(suite.tests, plan, numbers.evaluated))
    shown_cells = [{cell for value in row.values[0] for cell in value.cells} for row in grid.rows]
    beside = [next((one for one in differences if one.cells <= ids), None) for ids in shown_cells]
    return Differences(grid, beside, metric, headings.get(metric, metric), plan.baseline, digits)


def sheet(table: Differences) -> Sheet:
    """The accuracies, then the difference with its interval, the size not excluded, and p after Holm's correction."""
    (grid, _), width = varying(table.grid), len(table.grid.columns)
    sizes = sorted({one.size for one in table.differences if one is not None and one.test is not None})
    over = f" over {' and '.join(map(str, sizes))}" if sizes else ""
    axis, label = table.baseline
    like = replace(grid.columns[0], best="none", images="")
    columns = [
        replace(like, heading=f"{table.heading}: points above {label} (95 % interval)", minus={axis: [label]},
                metric=f"{table.metric} minus {label}"),
        replace(like, heading="differs by at most", metric="at_most"),
        replace(like, heading=f"p after Holm{over}", metric="p_holm"),
    ]  # fmt: skip
    empty = {**ENTRY, **dict.fromkeys(TEXTS, ""), "difference": None}
    further = []
    for labels, one in zip(grid.entries.drop_duplicates("row").to_dict("records"), table.differences, strict=True):
        for at, (number, interval) in enumerate(_texts(one, table.digits), width):
            # a number that is there keeps its column
            mean = None if number in ("", MISSING) else 0.0
            shown = {"mean": mean, "planned": bool(number), "number": number, "spread": interval}
            further.append(labels | empty | shown | {"column": at})
    entries = pandas.concat([grid.entries, DataFrame(further, columns=grid.entries.columns, dtype=object)])
    entries = entries.sort_values(["row", "group", "column"], kind="stable", ignore_index=True)
    return replace(grid, entries=entries, columns=[*grid.columns, *columns])


def _texts(one: Difference | None, digits: int) -> list[tuple[str, str]]:
    """(number, what stands beside it) of points, size not excluded and p; empty texts where nothing is compared."""
    if one is None or one.difference is None:
        return [("", "")] * 3
    mean = rounded(100 * one.difference, digits)
    if one.test is None:
        return [(mean, ""), (MISSING, ""), (MISSING, "")]
    low, high = (rounded(100 * end, digits) for end in (one.test.low, one.test.high))
    at_most = MISSING if one.at_most is None else points_up(one.at_most, digits)
    return [(mean, f"({low} to {high})"), (at_most, ""), (p_text(one.p_corrected or 0.0), "")]


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
        differs = {name: getattr(one, key, None) for name, key in names.items()}
        rows.append(record | differs | {"doubts": "; ".join(doubts)})
    return rows


def as_data(table: Differences, format: str) -> str:
    """The table as csv or json, fractions, unrounded."""
    rows, grid = records(table), table.grid
    if format == "csv":
        return csv_text(DataFrame(rows))
    facts = {"title": grid.title, "suite": grid.suite, "preset": grid.preset, "metric": table.heading}
    return json.dumps({**facts, "baseline": table.baseline[1], "rows": rows}, indent=2) + "\n"
