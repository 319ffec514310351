"""Build the plots of a suite's figures: numbers over the rounds, mean and spread over seeds.

A plot holds fractions in [0, 1] and plain numbers, unrounded; `plots` draws it and `render_csv` writes it. Nothing here
imports torch, numpy or matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fatbench.errors import SpecError
from fatbench.report.numbers import provenance, quantiles
from fatbench.report.numbers.long import finder
from fatbench.report.numbers.points import (
    PointKey,
    baselines,
    check_figure,
    point_key,
    points_of_figure,
    spread,
    sweeps,
)
from fatbench.report.numbers.published import Lookup
from fatbench.report.numbers.sources import EVERY, RANGE, Source, clients, in_words, mean_and_std
from fatbench.report.numbers.stored import Stored
from fatbench.report.tables import number_format
from fatbench.report.tables.notes import data_note
from fatbench.report.tables.sheet import label
from fatbench.store.selection import PUBLISHED, WORDS, Checkpoint
from fatbench.suite import model, plugins
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.files import Suite
from fatbench.suite.model import Key
from fatbench.suite.tables import SERIES, Figure
from fatbench.suite.types import number, seeds_text


@dataclass(frozen=True)
class SeriesPoint:
    """The mean at one round or radius, over the seeds that have a number there."""

    round: float  # of an evaluation: the radius of the attack, or where its value is in a list; 0 without one
    mean: float
    std: float | None  # ddof 1; None below two seeds
    seeds: tuple[int, ...]
    values: tuple[float, ...] = ()  # of each of these seeds
    radius: str = ""  # of an evaluation, as the suite writes it: "8/255"
    swept: str = "eps"  # the setting whose value that is


@dataclass(frozen=True)
class Line:
    """One curve, or one bar of each group: a heading at one combination of labels, perhaps of one client or class."""

    key: Key  # the labels of the axes in `lines`
    heading: str
    source: Source
    index: int | None  # of a source "metric[*]"
    points: list[SeriesPoint]  # in order of rounds; empty where nothing is measured
    wanted: int  # seeds that the plan asks for
    cells: tuple[str, ...]  # the cells behind it, in order of seeds
    published: tuple[float, float] | None = None  # (least, most) of what the paper gives
    own: bool = False  # a plug-in's function makes it, and not every line of the figure

    @property
    def place(self) -> str:
        """Its index as it is printed, see `Source.index_text`; empty where it has none."""
        return "" if self.index is None else self.source.index_text(self.index)

    @property
    def partial(self) -> bool:
        """Whether seeds are missing at some point."""
        return any(len(point.seeds) < self.wanted for point in self.points)


@dataclass(frozen=True)
class Panel:
    """One pair of axes: its labels and its lines."""

    key: Key  # the labels of the axes in `panels`; SERIES: the heading
    lines: list[Line]


@dataclass(frozen=True)
class Plot:
    """One figure, ready to draw."""

    suite: str
    preset: str
    figure: Figure
    label: str  # "SMOKE PRESET - not comparable with published numbers"; empty for the preset `paper`
    panels: list[Panel]
    facts: provenance.Facts
    notes: list[tuple[str, str]] = field(default_factory=list)  # (what, text)

    @property
    def empty(self) -> bool:
        """Whether no number of the figure has been measured."""
        return not any(line.points for panel in self.panels for line in panel.lines)


def build(suite: Suite, plan: Plan, numbers: Stored, figures: Sequence[Figure] | None = None) -> list[Plot]:
    """Build the figures of a suite (default: all) in which the plan's cells have a line; see `check_figure`."""
    plots = (_plot(suite, plan, figure, numbers) for figure in (suite.figures if figures is None else figures))
    return [plot for plot in plots if plot is not None]


def _plot(suite: Suite, plan: Plan, figure: Figure, numbers: Stored) -> Plot | None:
    check_figure(plan, figure)
    if figure.kind in ("bars", "matrix"):
        figure = spread(figure, plan)
    cells_by_line = points_of_figure(plan, figure)
    if not cells_by_line:
        return None
    swept = sweeps(plan)
    sources = {heading: Source.parse(text) for heading, text in figure.series.items()}
    behind: list[tuple[Any, ...]] = []  # see `provenance.BEHIND`
    subtracted_cells = _subtracted_cells(plan, figure)
    lookup = None if figure.reference is None else Lookup(figure.reference)
    panels: dict[tuple[tuple[str, str], ...], Panel] = {}
    for (panel_names, line_names), cells_by_heading in cells_by_line.items():
        for heading, cells in cells_by_heading.items():
            names = dict(panel_names)
            key = {axis: heading if axis == SERIES else names[axis] for axis in figure.panels}
            panel = panels.setdefault(tuple(key.items()), Panel(key, []))
            source = sources[heading]
            subtracted = (
                [subtracted_cells.get(point_key(cell, figure.minus)) for cell in cells] if figure.minus else None
            )
            if source.stage in ("train", "artifact"):
                lines = list(_lines(dict(line_names), heading, source, cells, subtracted, numbers))
            else:
                radii = swept.get(source.metric, {}) if figure.kind == "lines" else {source.metric: ""}
                ids = tuple(cell.id for cell in cells)
                lines = [
                    _with_evaluations(
                        Line(dict(line_names), heading, client_source, index, [], len(cells), ids),
                        cells,
                        subtracted,
                        numbers,
                        radii,
                        behind,
                    )
                    for index, client_source in _sources_by_client(source, cells)
                ]
            if lookup is not None:
                lines = [replace(line, published=_published(lookup, cells[0], line)) for line in lines]
            panel.lines.extend(lines)
    plugin_cells = {
        cell.id
        for cells_by_heading in cells_by_line.values()
        for cells in cells_by_heading.values()
        for cell in cells
        if plugins.files(cell.spec)
    }
    all_lines = [line for panel in panels.values() for line in panel.lines]
    if not all(plugin_cells.intersection(line.cells) for line in all_lines):
        for panel in panels.values():
            panel.lines[:] = [replace(line, own=bool(plugin_cells.intersection(line.cells))) for line in panel.lines]
    cells_by_id = {
        cell.id: cell
        for cells_by_heading in cells_by_line.values()
        for cells in cells_by_heading.values()
        for cell in cells
    }
    for panel in panels.values():
        for line in panel.lines:
            for id in (
                line.cells if line.points or line.source.stage == "artifact" else ()
            ):  # an evaluation has added its own stages already
                behind += numbers.behind(cells_by_id[id], "train", "", 0)
    plot = Plot(suite.name, plan.preset, figure, label(plan), list(panels.values()), provenance.Facts(behind))
    plot.notes.extend(_notes(plot, plan, list(cells_by_id.values()), numbers.select))
    changed: dict[str, set[str]] = {}
    for (cell, _), doubts in numbers.doubts.items():
        for doubt in doubts if cell in cells_by_id else ():
            if doubt.code == "changed":
                changed.setdefault(doubt.words, set()).add(cell)
    plot.notes.extend(("changed", f"{words} ({len(ids)} cell{'s' * (len(ids) > 1)})") for words, ids in changed.items())
    return plot


def _subtracted_cells(plan: Plan, figure: Figure) -> dict[PointKey, Cell]:
    """The cells whose numbers `minus` subtracts, by their points. SpecError: the plan has no such cell."""
    subtracted_cells = baselines(plan, figure.minus)
    if figure.minus and not subtracted_cells:
        label_text = ", ".join(f"{axis} {axis_labels[0]}" for axis, axis_labels in figure.minus.items())
        raise SpecError(f"figure {figure.id}: minus: no cell of preset '{plan.preset}' has {label_text}")
    return subtracted_cells


def _published(lookup: Lookup, cell: Cell, line: Line) -> tuple[float, float] | None:
    """The published range of a line, found by its cells' labels, its heading (`series`) and its `index`."""
    index = {} if line.index is None else {"index": str(line.index)}
    least, most, *_ = lookup.find({**cell.key, **line.key, SERIES: line.heading, **index}, line.heading)
    return None if least is None else (least, least if most is None else most)


def _lines(
    key: Key,
    heading: str,
    source: Source,
    cells: Sequence[Cell],
    subtracted: Sequence[Cell | None] | None,
    numbers: Stored,
) -> Iterable[Line]:
    """The lines of one heading at one place: one, or one for each client or class that was measured.

    subtracted: the cells whose numbers are taken off, for each of `cells`, or None.
    """
    ids = tuple(cell.id for cell in cells)
    by_client = [
        _value_differences(cell, subtracted_cell, source, numbers)
        for cell, subtracted_cell in zip(cells, subtracted or cells, strict=True)
    ]
    clients = [source.client]
    if source.client == EVERY:
        clients = sorted({client for values_by_round in by_client for client in values_by_round if client >= 0})
        if len(clients) >= quantiles.MANY:
            yield from _quantiles(key, heading, source, cells, by_client, len(clients))
            return
    for client in clients:
        client_series = [
            ranges(values_by_round) if client == RANGE else values_by_round.get(client, {})
            for values_by_round in by_client
        ]
        series = {
            int(cell.spec["seed"]): values_by_round for cell, values_by_round in zip(cells, client_series, strict=True)
        }
        rounds = sorted({round for values_by_round in series.values() for round in values_by_round})
        index = client if source.client == EVERY else None
        yield Line(key, heading, source, index, [_point(series, round) for round in rounds], len(cells), ids)


ByClient = Mapping[int, Mapping[int, float]]  # client -> round -> value


def _quantiles(
    key: Key, heading: str, source: Source, cells: Sequence[Cell], by_client: Sequence[ByClient], clients: int
) -> Iterable[Line]:
    """Five lines in place of one for each of many clients: the quantiles of each round over the clients."""
    quantiles_by_seed: dict[int, dict[int, dict[str, float]]] = {}
    for cell, client_values in zip(cells, by_client, strict=True):
        rounds: dict[int, list[float]] = {}
        for client, series in client_values.items():
            for round, value in series.items() if client >= 0 else ():
                rounds.setdefault(round, []).append(value)
        quantiles_by_seed[int(cell.spec["seed"])] = {round: quantiles.five(values) for round, values in rounds.items()}
    all_rounds = sorted({round for client_values in quantiles_by_seed.values() for round in client_values})
    for name in quantiles.five([0.0]):
        lines = {
            seed: {round: five[name] for round, five in client_values.items()}
            for seed, client_values in quantiles_by_seed.items()
        }
        points = [_point(lines, round) for round in all_rounds]
        heading_text = f"{heading}, {name} of {clients:,} clients"
        yield Line(
            key, heading_text, replace(source, client=-1), None, points, len(cells), tuple(cell.id for cell in cells)
        )


def ranges(by_client: Mapping[int, Mapping[int, float]]) -> Mapping[int, float]:
    """Round -> the largest number of all clients minus the smallest."""
    rounds: dict[int, list[float]] = {}
    for client, values_by_round in by_client.items():
        for round, value in values_by_round.items() if client >= 0 else ():
            rounds.setdefault(round, []).append(value)
    return {round: max(values) - min(values) for round, values in rounds.items()}


def _value_differences(cell: Cell, subtracted_cell: Cell | None, source: Source, numbers: Stored) -> ByClient:
    """Client -> round -> value of a cell, minus that of another cell if one is given."""
    cell_values = numbers.logged(cell.id, source.metric)
    if subtracted_cell is cell:
        return cell_values
    subtracted_values = {} if subtracted_cell is None else numbers.logged(subtracted_cell.id, source.metric)
    return {
        client: {
            round: value - subtracted_values[client][round]
            for round, value in values_by_round.items()
            if round in subtracted_values[client]
        }
        for client, values_by_round in cell_values.items()
        if client in subtracted_values
    }


def _sources_by_client(source: Source, cells: Sequence[Cell]) -> list[tuple[int | None, Source]]:
    """The source, or of "metric[*]" one for each client, with its index."""
    if source.client != EVERY:
        return [(None, source)]
    return [(k, replace(source, client=k)) for k in range(clients(cells, source))]


def _with_evaluations(
    line: Line,
    cells: Sequence[Cell],
    subtracted: Sequence[Cell | None] | None,
    numbers: Stored,
    radii: Mapping[str, str],
    behind: list[tuple[Any, ...]],
) -> Line:
    """Add the points of a line: its evaluation at each radius. radii: metric -> radius of the attack."""
    points = []
    source = line.source
    every_cell = [*cells, *(cell for cell in subtracted or () if cell is not None)]
    find = {metric: finder(every_cell, replace(source, metric=metric), numbers) for metric in radii}
    swept = next(
        (evaluation.swept for cell in cells for evaluation in cell.evaluations if evaluation.sweep == source.metric),
        "eps",
    )
    for position, (metric, radius) in enumerate(radii.items()):
        value_by_seed: dict[int, float] = {}
        found = find[metric]
        for cell, subtracted_cell in zip(cells, subtracted or cells, strict=True):
            value, n, stages = found(cell)
            subtracted_value = None if subtracted_cell is None else found(subtracted_cell)[0]
            if value is not None and math.isfinite(value) and subtracted_value is not None:
                value_by_seed[int(cell.spec["seed"])] = value - (0 if subtracted_cell is cell else subtracted_value)
                for stage in stages:  # of all radii
                    behind += numbers.behind(cell, stage, source.metric, n)
        if value_by_seed:
            point = _point({seed: {0: value} for seed, value in value_by_seed.items()}, 0)
            points.append(replace(point, round=_position(radius, position), radius=radius, swept=swept))
    return replace(line, points=sorted(points, key=lambda point: point.round))


def _position(value: str, position: int) -> float:
    """The position of a setting's value on a curve: the value itself if it is a number, else its index."""
    try:
        return float(number(value)) if value else 0.0
    except ValueError:
        return float(position)


def _point(series: Mapping[int, Mapping[int, float]], round: int) -> SeriesPoint:
    value_by_seed = {seed: values[round] for seed, values in series.items() if round in values}
    return SeriesPoint(
        round, *mean_and_std(tuple(value_by_seed.values())), tuple(value_by_seed), tuple(value_by_seed.values())
    )


def merge_plots(plots: Sequence[Plot]) -> list[Plot]:
    """Merge figures of one id from several suites, their panels side by side; equal labels get the suite's name."""
    by_id: dict[str, list[Plot]] = {}
    for plot in plots:
        by_id.setdefault(plot.figure.id, []).append(plot)
    return [_merge_same_id(same_id) if len(same_id) > 1 else same_id[0] for same_id in by_id.values()]


def _merge_same_id(plots: Sequence[Plot]) -> Plot:
    keys = [tuple(panel.key.items()) for plot in plots for panel in plot.panels]
    first_plot, same_labels = plots[0], len(set(keys)) < len(keys)
    panels = [
        replace(panel, key={"suite": plot.suite, **panel.key}) if same_labels else panel
        for plot in plots
        for panel in plot.panels
    ]
    axes = list(dict.fromkeys(axis for panel in panels for axis in panel.key))
    # a suite may lack an axis of another's panels
    panels = [replace(panel, key={axis: panel.key.get(axis, "") for axis in axes}) for panel in panels]
    texts_by_note: dict[str, list[str]] = {}
    for plot in plots:
        for note_name, text in plot.notes:
            if text not in texts_by_note.setdefault(note_name, []):
                texts_by_note[note_name].append(text)
    return replace(
        first_plot, suite="+".join(dict.fromkeys(plot.suite for plot in plots)), panels=panels,
        preset="+".join(dict.fromkeys(plot.preset for plot in plots)),
        label=next((plot.label for plot in plots if plot.label), ""),
        figure=first_plot.figure.model_copy(update={"panels": axes}),
        notes=[(note_name, "; ".join(texts)) for note_name, texts in texts_by_note.items()],
    )  # fmt: skip


BANDS = 8  # lines of a panel that can have bands of their spread side by side
SPREAD = {
    "lines": "line: mean, band: ± sample standard deviation over seeds (ddof 1)",
    "bars": "bar: mean, whisker: ± sample standard deviation over seeds (ddof 1), dots: the seeds",
    "raster": "the first is drawn; on the right, the sum over rounds, mean over seeds",
    "matrix": "mean over seeds",
    "heatmap": "the first with a stored tensor is shown",
    "images": "the first with a stored tensor is shown",
    "boundaries": "the first with a stored tensor is shown",
}
ONE_SEED = {
    **SPREAD, "lines": "one seed, no spread", "bars": "one seed, no spread",
    "matrix": "one seed, no spread",
    "raster": "on the right, the sum over rounds",
}  # fmt: skip


def _notes(plot: Plot, plan: Plan, cells: Sequence[Cell], select: Checkpoint) -> Iterable[tuple[str, str]]:
    """The notes of a figure, as under a table: the meaning of its lines and their provenance."""
    preset = f"{plot.suite}, preset {plot.preset}"
    if plot.label:
        preset += f": {plot.label}"
    yield "suite", f"{preset}. {plan.note}".removesuffix(". ")
    if plan.where:
        yield "filter", plan.where
    if perturbation_text := model.perturbations_in_words(
        (cell.spec["data"]["name"], cell.perturbation) for cell in cells
    ):
        yield "perturbation", perturbation_text
    lines = [line for panel in plot.panels for line in panel.lines]
    words = in_words((line.heading, line.source) for line in lines)
    yield "data", data_note(plot.facts, cells, words)
    if any(line.source.stage not in ("train", "artifact") for line in lines):
        yield "checkpoint", WORDS[select]
    seeds = sorted({int(cell.spec["seed"]) for cell in cells})
    has_spread = any(point.std is not None for line in lines for point in line.points)
    spread_text = (SPREAD if has_spread else ONE_SEED)[plot.figure.kind]
    if has_spread and plot.figure.kind == "lines" and all(len(panel.lines) > BANDS for panel in plot.panels):
        spread_text = "line: mean over seeds"
    yield "seeds", f"{seeds_text(seeds)}; {spread_text}"
    if plot.figure.minus:
        detail = ", ".join(f"{axis} {axis_labels[0]}" for axis, axis_labels in plot.figure.minus.items())
        yield "differences", f"differences from {detail}, seed by seed"
    if any(line.published for line in lines):
        published = plot.figure.published
        detail = (
            f", {PUBLISHED[published.select]}"
            if published and any(line.source.checkpoint(select) for line in lines)
            else ""
        )
        if published is None:
            yield "formula", "black marks: computed, printed by no paper"
        else:
            yield "published", f"black marks: the paper's numbers{detail}; a bar shows their range"
    if plot.facts.origins:
        yield from plot.facts.notes(words=words)
    if partial := sum(line.partial for line in lines):
        yield "incomplete", f"{partial} of {len(lines)} lines average fewer seeds than planned, at some rounds or all"
    if missing_lines := _lines_without_numbers(plot):
        shown_names = ", ".join(missing_lines[:MISSING]) + f" and {len(missing_lines) - MISSING} others" * (
            len(missing_lines) > MISSING
        )
        yield "missing", f"no number of {shown_names}"
    if plot.figure.note:
        yield "note", plot.figure.note


MISSING = 12  # names of a note


def _lines_without_numbers(plot: Plot) -> list[str]:
    """The lines that have no number, of panels in which others have: failed, or not run."""
    panels = [panel for panel in plot.panels if any(line.points for line in panel.lines)]
    empty_lines = (
        line for panel in panels for line in panel.lines if not line.points and line.source.stage != "artifact"
    )
    return list(dict.fromkeys(", ".join(filter(None, line.key.values())) or line.heading for line in empty_lines))


FIELDS = (
    "heading", "metric", "unit", "index", "round", "radius", "mean", "std", "seeds", "values", "seeds_planned",
    "published", "published_most", "formula", "preset", "label",
)  # fmt: skip
FIRST = ("suite", "figure")


def render_csv(plots: Sequence[Plot]) -> str:
    """One line for each point of each line, see `number_format.tidy`. Fractions in [0, 1]."""
    return number_format.csv_text(number_format.tidy(_points(plots), FIRST, FIELDS))


def _points(plots: Sequence[Plot]) -> Iterable[tuple[Key, dict[str, Any]]]:
    for plot in plots:
        for panel, line in ((plot_or_panel, line) for plot_or_panel in plot.panels for line in plot_or_panel.lines):
            key = {axis: label for axis, label in {**panel.key, **line.key}.items() if axis != SERIES}
            low, high = line.published or (None, None)
            computed = None
            if plot.figure.formula is not None:
                low, high, computed = None, None, low
            for point in line.points:
                yield (
                    key,
                    {
                        "suite": plot.suite, "figure": plot.figure.id, "heading": line.heading,
                        "metric": line.source.metric, "unit": "fraction" if line.source.fraction else "plain",
                        "index": line.place, "round": point.round if line.source.stage == "train" else None,
                        "radius": point.radius, "mean": point.mean, "std": point.std,
                        "seeds": ";".join(map(str, point.seeds)), "seeds_planned": line.wanted,
                        "values": ";".join(map(number_format.csv_number, point.values)),
                        "published": low, "published_most": high,
                        "formula": computed,
                        "preset": plot.preset, "label": plot.label,
                    },
                )  # fmt: skip
