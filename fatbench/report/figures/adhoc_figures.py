"""Figures from the command line, without YAML: an axis along, numbers upward, and axes that separate lines.

figure(suite, plan, store, x="round", y=["pgd20"], by=["method"])      -> a Figure for `series.drawn_from`
curves(store, cell)                                                    -> the learning curves of one cell
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fatbench.errors import NothingMatched, SpecError, did_you_mean
from fatbench.report.figures import series
from fatbench.report.figures.series import Plot
from fatbench.report.numbers.points import sweeps
from fatbench.report.numbers.stored import logged_clients
from fatbench.store.selection import Checkpoint
from fatbench.suite import model
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.files import Suite
from fatbench.suite.tables import SERIES, Contents, Figure

if TYPE_CHECKING:
    from fatbench.store.stages import Store

ROUND, RADIUS, INDEX = "round", "eps", "client"
INDICES = (INDEX, "class", "index")
USUAL = {  # the learning curves of a cell: a panel each
    "accuracy": ("natural", "monitor", "train_accuracy", "val_natural", "val_monitor", "edge_natural"),
    "loss": ("train_loss", "natural_loss", "monitor_loss", "val_natural_loss", "val_monitor_loss"),
}


class Available(NamedTuple):
    """The metrics of a plan that can be drawn."""

    overall: list[str]  # logged in training, a number a round
    indexed: list[str]  # logged in training, a number a round and client or class
    evaluated: list[str]  # attacks on the finished model
    swept: dict[str, str]  # those with a list of radii, or of another setting's values -> "eps", that setting
    monitors: list[str]  # of `evaluated`: what the monitor measures in training, in all cells


def available_metrics(plan: Plan, store: Store | None) -> Available:
    """The metrics that training has logged of the plan's cells, and those of its suite's evaluations."""
    logged = logged_clients(plan, store) if store is not None else []
    asked = [(cell.spec.get("monitor"), evaluation) for cell in plan.cells for evaluation in cell.evaluations]
    metrics = plan.metrics()
    others = {one.label for monitor, one in asked if monitor != one.attack}
    of_radii = {metric for of_sweep in sweeps(plan).values() for metric in of_sweep}
    return Available(
        sorted({metric for metric, overall in logged if overall}),
        sorted({metric for metric, overall in logged if not overall}),
        metrics,
        {one.sweep: one.swept for _, one in asked if one.sweep},
        [metric for metric in metrics if metric not in of_radii | others],
    )


def figure(suite: Suite, plan: Plan, store: Store | None, x: str | None, y: Sequence[str], by: Sequence[str]) -> Figure:
    """The figure that --x, --metric and --by ask for.

    x: round, eps (the radius of an attack) or another setting that has a list, client or class, or an axis of the
    suite, whose labels are bars.
    y: names of numbers. by: axes that tell lines or bars apart. Axes that are left and vary are panels, and so are
    several numbers. SpecError: an unknown axis or number. NothingMatched: nothing has been measured.
    """
    known = available_metrics(plan, store)
    if not known.overall and not known.indexed:
        raise NothingMatched(
            f"suite '{suite.name}' has no results yet: fatbench run {suite.name} --preset {plan.preset}"
        )
    axes, x = suite.axes(), x or ROUND
    settings = {RADIUS, *known.swept.values()} - {"", *axes}
    if x not in (ROUND, *axes, *settings, *INDICES):
        hint = did_you_mean(x, (ROUND, *settings, INDEX, *axes))
        raise SpecError(f"'{x}' is neither round, eps, client nor an axis{hint}", option="x")
    for axis in by:
        if axis not in axes:
            raise SpecError(f"no axis is named '{axis}'{did_you_mean(axis, axes)}", option="by")
    names = list(y)
    if not names and x in axes:
        names = [name for name in known.evaluated if name not in known.swept][:4] or known.overall[:1]
    elif not names and x in settings:
        names = [name for name, setting in known.swept.items() if setting == x]
    elif not names and x in INDICES:
        names = known.indexed[:1]
    elif not names:
        names = [name for name in ("natural", "monitor") if name in known.overall] or known.overall[:1]
    sources = {name: _source(name, x, list(axes), known) for name in names}
    varying = [axis for axis in axes if len({cell.key.get(axis, "") for cell in plan.cells}) > 1 and axis != x]
    lines = list(by) or varying[-1:]  # the last axis separates lines, the others panels
    over = {ROUND: "over the rounds", RADIUS: "over the radius", **{one: f"over {one}" for one in settings - {RADIUS}}}
    monitored = [name for name in names if sources[name] == "train:monitor" and name != "monitor"]
    node = {  # as a suite file would write the figure
        "id": re.sub("[^A-Za-z0-9._-]+", "-", "-".join([*names, "over", x, *(["by", *lines] if lines else [])])),
        "title": f"{', '.join(names)} {f'by {x}' if x in axes else over.get(x, f'by {x}')}"
        + f", by {' and '.join(lines)}" * bool(lines),
        "kind": "lines" if x in {ROUND, *settings} - {*axes} else "bars",
        "panels": [axis for axis in varying if axis not in lines] + [SERIES] * (len(names) > 1),
        "lines": [x, *(axis for axis in lines if axis != x)] if x in axes else lines,
        "series": sources,
        "note": f"{', '.join(monitored)}: measured by the monitor during training, with the same attack"
        * bool(monitored),
    }
    return model.read(Figure, node, "x, metric, by", axes=suite.contents.axes, folders=[])


def _source(name: str, x: str, axes: Sequence[str], known: Available) -> str:
    """The source of a figure's series for a number. SpecError: the number is not known, or not over this x."""
    metric, bracket, _ = name.partition("[")
    metrics = [*known.overall, *known.indexed, *known.evaluated, *known.swept]
    if metric not in metrics:
        raise SpecError(f"no number is named '{name}'{did_you_mean(metric, metrics)}", option="metric")
    if x in axes and metric in (*known.evaluated, *known.swept):
        return name
    if x not in axes and x in (RADIUS, *known.swept.values()):
        swept = [one for one, setting in known.swept.items() if setting == x]
        if metric in swept:
            return name
        values = "radii" if x == RADIUS else f"values of {x}"
        remark = f"these are: {', '.join(swept)}" if swept else "no attack of this suite is"
        raise SpecError(f"'{name}' is not evaluated at a list of {values}; {remark}", option="metric")
    if x not in axes and x in INDICES:
        if metric not in known.indexed:
            of_clients = f"those are: {', '.join(known.indexed)}"
            raise SpecError(f"'{name}' is not logged for each client or class; {of_clients}", option="metric")
        return f"train:{metric}[*]"
    if bracket or metric in known.overall:
        return f"train:{name}"
    if metric in known.indexed:
        return f"train:{metric}[*]"
    if metric in known.monitors:
        return "train:natural" if metric == "natural" else "train:monitor"
    raise SpecError(
        f"'{name}' is measured on the final model, not in each round: take x from {next(iter(axes), ROUND)}, or one of"
        f" {', '.join(dict.fromkeys([*known.monitors, *known.overall]))}",
        option="metric",
    )


def curves(store: Store, cell: str, y: Sequence[str], select: Checkpoint = "last") -> list[Plot]:
    """The learning curves of one cell: accuracies and losses, or the numbers that are asked for, a panel each.

    SpecError: no such number; NothingMatched: training has logged nothing.
    """
    suite, plan = _suite_of_cell(store, cell)
    logged = available_metrics(plan, store).overall
    if not logged:
        raise NothingMatched(f"the training of cell {cell} has not logged anything yet")
    asked = {kind: [name for name in names if name in logged] for kind, names in USUAL.items()} if not y else {"": y}
    panels, plot = [], None
    for kind, names in asked.items():
        of_kind = figure(suite, plan, store, ROUND, names, []) if names else None
        if of_kind is not None:
            of_kind = of_kind if y else of_kind.model_copy(update={"panels": []})
            [drawn] = series.drawn_from(suite, plan, store, [of_kind], select)
            panels += [replace(panel, key={"what": kind}) for panel in drawn.panels]
            plot = plot or drawn
    if plot is None:
        raise NothingMatched(f"cell {cell} has none of the usual curves: choose with --metric from {', '.join(logged)}")
    named = {"title": plot.figure.title, "id": plot.figure.id}
    if not y:
        named = {"title": "Learning curves", "id": "curves"}
        plot = replace(plot, panels=panels, figure=plot.figure.model_copy(update={"panels": ["what"]}))
    named = {"title": f"{named['title']}: cell {cell}", "id": f"{cell}-{named['id']}"}
    return [replace(plot, figure=plot.figure.model_copy(update=named))]


def _suite_of_cell(store: Store, cell: str) -> tuple[Suite, Plan]:
    """(suite, plan) of just one cell, under the name and preset of the suite that ran it."""
    spec = store.cells([cell])[cell]
    runs = [run for run in store.runs([cell]) if run.get("suite")]
    name, preset = (runs[-1]["suite"], runs[-1].get("preset") or "paper") if runs else ("cell", "paper")
    raw: dict[str, Any] = {"name": name, "title": f"Cell {cell}", "base": {}, "presets": {"paper": {}}}
    contents = model.read(Contents, raw, axes={}, folders=[])
    return Suite(Path(cell), contents), Plan(name, preset, "", [Cell(cell, {}, spec, ())], ["last"])
