"""One table over the cells of several suites, as the command line asks; no suite file is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fatbench.errors import SpecError, did_you_mean
from fatbench.report.numbers.points import sweeps
from fatbench.store.replicates import SIGN
from fatbench.suite import model
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.files import Suite
from fatbench.suite.standard_attacks import did_you_mean_metric, headings
from fatbench.suite.tables import SOURCE, Table

SUITE = "suite"  # the axis of suite names


def combine(
    suite_plans: Sequence[tuple[Suite, Plan]], rows: Sequence[str], columns: Sequence[str]
) -> tuple[Suite, Plan]:
    """A suite of one table and its plan. rows: axes, default all; columns: axes and sources, default every metric.

    "suite" is an axis. If the table does not show it, a cell that several suites have is there once.
    SpecError: no such axis or metric.
    """
    axes: dict[str, Any] = {SUITE: {suite.name: {} for suite, _ in suite_plans}}  # axis -> label -> overrides
    for suite, _ in suite_plans:
        for axis, labels in suite.contents.axes.items():
            axes.setdefault(axis, {}).update(labels)
    metrics = list(
        dict.fromkeys(item.sweep or item.label for _, plan in suite_plans for c in plan.cells for item in c.evaluations)
    )
    across_axes = [column for column in columns if column in axes]
    sources = [column for column in columns if column not in axes]
    for source in sources:
        match = SOURCE.match(source)
        radii = {metric for _, plan in suite_plans for swept in sweeps(plan).values() for metric in swept}
        source_metrics = (
            [] if match is None or match["stage"] == "train" else (match["metrics"] or match["metric"]).split("+")
        )
        if match is None or not {*metrics, *radii}.issuperset(source_metrics):
            raise SpecError(
                f"no axis or metric is named '{source}'{did_you_mean_metric(source, [*axes, *metrics])}",
                option="metric",
            )
    for axis in rows:
        if axis not in axes:
            raise SpecError(f"no axis is named '{axis}'{did_you_mean(axis, axes)}", option="by")
    row_axes = list(rows) or [axis for axis in axes if axis not in across_axes]
    names_suite = SUITE in (*row_axes, *across_axes)
    cells: dict[object, Cell] = {}
    for suite, plan in suite_plans:
        for cell in plan.cells:
            key = {SUITE: suite.name, **cell.key} if names_suite else cell.key
            cell_id = cell.id.partition(SIGN)[0]
            # replicates of a cell count as that cell
            cells.setdefault((suite.name, *key.items(), cell_id) if names_suite else cell_id, replace(cell, key=key))
    name = " + ".join(dict.fromkeys(suite.name for suite, _ in suite_plans))
    presets = list(dict.fromkeys(plan.preset for _, plan in suite_plans))
    values = headings(sources or metrics)
    node = {"id": "combined", "title": name, "rows": row_axes, "across": across_axes, "values": values}
    table = model.read(Table, node, "by, metric", axes=axes, folders=[])
    contents = suite_plans[0][0].contents.model_copy(update={"name": name, "tables": [table], "figures": []})
    checkpoints = [
        item for item in suite_plans[0][1].checkpoints if all(item in plan.checkpoints for _, plan in suite_plans)
    ]
    notes = " ".join(dict.fromkeys(f"{suite.name}: {plan.note}" for suite, plan in suite_plans if plan.note))
    return replace(suite_plans[0][0], contents=contents), Plan(
        name,
        " + ".join(presets),
        notes,
        list(cells.values()),
        checkpoints,
        where=suite_plans[0][1].where,
        resolved=all(plan.resolved for _, plan in suite_plans),
    )
