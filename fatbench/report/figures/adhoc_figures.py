"""Figures from the command line, without YAML: an axis along, numbers upward, and axes that separate lines.

figure(suite, plan, store, x="round", y=["pgd20"], by=["method"])      -> a Figure for `series.build`
curves(store, cell)                                                    -> the learning curves of one cell
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.errors import NothingMatched, SpecError, did_you_mean
from fatbench.report.figures import series
from fatbench.report.numbers.points import sweeps
from fatbench.report.numbers.stored import logged_clients, read
from fatbench.store.selection import Checkpoint
from fatbench.suite import model
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.files import Suite
from fatbench.suite.tables import SERIES, Contents, Figure

if TYPE_CHECKING:
    from fatbench.report.figures.series import Plot
    from fatbench.store.stages import Store

ROUND, RADIUS, INDEX = "round", "eps", "client"
INDICES = (INDEX, "class", "index")
ACCURACIES = ("natural", "monitor", "train_accuracy", "val_natural", "val_monitor", "edge_natural")
LOSSES = ("train_loss", "natural_loss", "monitor_loss", "val_natural_loss", "val_monitor_loss")


@dataclass(frozen=True)
class AvailableMetrics:
    """The metrics of a plan that can be drawn."""

    overall: list[str]  # logged in training, a number a round
    indexed: list[str]  # logged in training, a number a round and client or class
    evaluated: list[str]  # attacks on the finished model
    swept: dict[str, str]  # those with a list of radii, or of another setting's values -> "eps", that setting
    monitors: list[str]  # of `evaluated`: what the monitor measures in training, in all cells

    @property
    def names(self) -> list[str]:
        return [*self.overall, *self.indexed, *self.evaluated, *self.swept]


def available_metrics(plan: Plan, store: Store | None) -> AvailableMetrics:
    """The metrics that training has logged of the plan's cells, and those of its suite's evaluations."""
    clients: dict[str, set[bool]] = {}  # metric -> whether it is logged overall, and by client
    for metric, overall in logged_clients(plan, store) if store is not None else ():
        clients.setdefault(metric, set()).add(overall)
    swept = sweeps(plan)
    radii = {metric for metrics in swept.values() for metric in metrics}
    return AvailableMetrics(
        sorted(metric for metric, kinds in clients.items() if True in kinds),
        sorted(metric for metric, kinds in clients.items() if False in kinds),
        plan.metrics(),
        {
            evaluation.sweep: evaluation.swept
            for cell in plan.cells
            for evaluation in cell.evaluations
            if evaluation.sweep
        },
        [metric for metric in plan.metrics() if metric not in radii and _monitored(metric, plan)],
    )


def _monitored(metric: str, plan: Plan) -> bool:
    """Whether the monitor is this attack in every cell that is evaluated with it."""
    pairs = [
        (cell.spec.get("monitor"), evaluation.attack)
        for cell in plan.cells
        for evaluation in cell.evaluations
        if evaluation.label == metric
    ]
    return bool(pairs) and all(monitor == attack for monitor, attack in pairs)


def figure(suite: Suite, plan: Plan, store: Store | None, x: str | None, y: Sequence[str], by: Sequence[str]) -> Figure:
    """The figure that --x, --metric and --by ask for.

    x: round, eps (the radius of an attack) or another setting that has a list, client or class, or an axis of the
    suite, whose labels are bars.
    y: names of numbers. by: axes that tell lines or bars apart. Axes that are left and vary are panels, and so are
    several numbers. SpecError: an unknown axis or number. NothingMatched: nothing has been measured.
    """
    available = available_metrics(plan, store)
    if not available.overall and not available.indexed:
        raise NothingMatched(
            f"suite '{suite.name}' has no results yet: fatbench run {suite.name} --preset {plan.preset}"
        )
    axes = suite.axes()
    x = x or ROUND
    settings = {RADIUS, *available.swept.values()} - {"", *axes}
    if x not in (ROUND, *axes, *settings, *INDICES):
        raise SpecError(
            f"'{x}' is neither round, eps, client nor an axis{did_you_mean(x, (ROUND, *settings, INDEX, *axes))}",
            option="x",
        )
    for axis in by:
        if axis not in axes:
            raise SpecError(f"no axis is named '{axis}'{did_you_mean(axis, axes)}", option="by")
    metric_names = list(y) or _default_names(x, axes, available)
    sources = {name: _source(name, x, axes, available) for name in metric_names}
    varying = [axis for axis in axes if len({cell.key.get(axis, "") for cell in plan.cells}) > 1 and axis != x]
    lines = list(by) or varying[-1:]  # the last axis separates lines, the others panels
    panel_axes = [axis for axis in varying if axis not in lines]
    over_words = {
        ROUND: "over the rounds",
        RADIUS: "over the radius",
        **{setting: f"over {setting}" for setting in settings - {RADIUS}},
    }
    node = {  # as a suite file would write the figure
        "id": re.sub("[^A-Za-z0-9._-]+", "-", "-".join([*metric_names, "over", x, *(["by", *lines] if lines else [])])),
        "title": f"{', '.join(metric_names)} {over_words.get(x if x not in axes else '', f'by {x}')}"
        + (f", by {' and '.join(lines)}" if lines else ""),
        "kind": "lines" if x in {ROUND, *settings} - {*axes} else "bars",
        "panels": [*panel_axes, *([SERIES] if len(metric_names) > 1 else [])],
        "lines": [x, *(axis for axis in lines if axis != x)] if x in axes else lines,
        "series": sources,
        "note": _note(metric_names, sources),
    }
    return model.read(Figure, node, "x, metric, by", axes=suite.contents.axes, folders=[])


def _default_names(x: str, axes: dict[str, list[str]], available: AvailableMetrics) -> list[str]:
    """The default numbers, for a command without --metric."""
    if x in axes:
        return [name for name in available.evaluated if name not in available.swept][:4] or available.overall[:1]
    if x == RADIUS or x in available.swept.values():
        return [name for name, setting in available.swept.items() if setting == x]
    if x in INDICES:
        return available.indexed[:1]
    return [name for name in ("natural", "monitor") if name in available.overall] or available.overall[:1]


def _source(name: str, x: str, axes: dict[str, list[str]], available: AvailableMetrics) -> str:
    """The source of a figure's series for a number. SpecError: the number is not known, or not over this x."""
    metric, bracket, _ = name.partition("[")
    if metric not in available.names:
        raise SpecError(f"no number is named '{name}'{did_you_mean(metric, available.names)}", option="metric")
    if x in axes:
        if metric in (*available.evaluated, *available.swept):
            return name
        return f"train:{name}" if bracket or metric in available.overall else f"train:{metric}[*]"
    if x == RADIUS or x in available.swept.values():
        swept_metrics = [swept_metric for swept_metric, setting in available.swept.items() if setting == x]
        if metric not in swept_metrics:
            values_name = "radii" if x == RADIUS else f"values of {x}"
            remark = f"these are: {', '.join(swept_metrics)}" if swept_metrics else "no attack of this suite is"
            raise SpecError(f"'{name}' is not evaluated at a list of {values_name}; {remark}", option="metric")
        return name
    if x in INDICES:
        if metric not in available.indexed:
            raise SpecError(
                f"'{name}' is not logged for each client or class; those are: {', '.join(available.indexed)}",
                option="metric",
            )
        return f"train:{metric}[*]"
    if bracket:
        return f"train:{name}"
    if metric in available.overall:
        return f"train:{metric}"
    if metric in available.indexed:
        return f"train:{metric}[*]"
    if metric in available.monitors:
        return "train:natural" if metric == "natural" else "train:monitor"
    raise SpecError(
        f"'{name}' is measured on the final model, not in each round: take x from {next(iter(axes), ROUND)}, or"
        f" one of {', '.join(dict.fromkeys([*available.monitors, *available.overall]))}",
        option="metric",
    )


def _note(metric_names: Sequence[str], sources: dict[str, str]) -> str:
    monitored_names = [name for name in metric_names if sources[name] == "train:monitor" and name != "monitor"]
    return (
        f"{', '.join(monitored_names)}: measured by the monitor during training, with the same attack"
        if monitored_names
        else ""
    )


def curves(store: Store, cell: str, y: Sequence[str], select: Checkpoint = "last") -> list[Plot]:
    """The learning curves of one cell: accuracies and losses, or the numbers that are asked for, a panel each.

    SpecError: no such number; NothingMatched: training has logged nothing.
    """
    suite, plan = _suite_of_cell(store, cell)
    available = available_metrics(plan, store)
    if not available.overall:
        raise NothingMatched(f"the training of cell {cell} has not logged anything yet")
    if y:
        wanted_figure = figure(suite, plan, store, ROUND, y, [])
        return _of_one_cell(series_of(suite, plan, store, [wanted_figure], select), cell)
    kinds = [("accuracy", ACCURACIES), ("loss", LOSSES)]
    plots_by_kind = []
    for kind, names in kinds:
        if logged_names := [name for name in names if name in available.overall]:
            wanted_figure = figure(suite, plan, store, ROUND, logged_names, []).model_copy(update={"panels": []})
            plots_by_kind += [(kind, plot) for plot in series_of(suite, plan, store, [wanted_figure], select)]
    if not plots_by_kind:
        raise NothingMatched(
            f"cell {cell} has none of the usual curves: choose with --metric from {', '.join(available.overall)}"
        )
    panels = [replace(panel, key={"what": kind}) for kind, plot in plots_by_kind for panel in plot.panels]
    first_plot = plots_by_kind[0][1]
    joined_figure = first_plot.figure.model_copy(
        update={"panels": ["what"], "id": "curves", "title": "Learning curves"}
    )
    return _of_one_cell([replace(first_plot, figure=joined_figure, panels=panels)], cell)


def series_of(suite: Suite, plan: Plan, store: Store, figures: Sequence[Figure], select: Checkpoint) -> list[Plot]:
    """`series.build` with what the database has for these figures."""
    sources = [text for figure in figures for text in figure.series.values()]
    numbers = read(sources, plan, store, select, curves=True)
    return series.build(suite, plan, numbers, figures)


def _of_one_cell(plots: Sequence[Plot], cell: str) -> list[Plot]:
    """Name the cell in the titles and ids of its plots."""
    titled_plots = []
    for plot in plots:
        title = f"{plot.figure.title}: cell {cell}"
        titled_plots.append(
            replace(plot, figure=plot.figure.model_copy(update={"title": title, "id": f"{cell}-{plot.figure.id}"}))
        )
    return titled_plots


def _suite_of_cell(store: Store, cell: str) -> tuple[Suite, Plan]:
    """(suite, plan) of just one cell, under the name and preset of the suite that ran it."""
    spec = store.cells([cell])[cell]
    runs = [run for run in store.runs([cell]) if run.get("suite")]
    name, preset = (runs[-1]["suite"], runs[-1].get("preset") or "paper") if runs else ("cell", "paper")
    raw: dict[str, Any] = {
        "name": name, "title": f"Cell {cell}", "base": {}, "presets": {"paper": {}},
    }  # fmt: skip
    contents = model.read(Contents, raw, axes={}, folders=[])
    return Suite(Path(cell), contents), Plan(name, preset, "", [Cell(cell, {}, spec, ())], ["last"])
