"""The figures of a suite: a row for each number of a seed, then lines of means with their spread over seeds.

    build(suite, plan, read(sources, plan, store, "last", curves=True))      those of a suite, or the own ones given
    drawn_from(suite, plan, store, figures, "last")                          the same, read from a database

A plot holds fractions in [0, 1] and plain numbers, unrounded; `plots` draws it and `render_csv` writes it. Nothing here
imports torch or matplotlib.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pandas import DataFrame, Series

from fatbench.errors import SpecError
from fatbench.report.numbers import table_facts
from fatbench.report.numbers.doubts import with_seeds
from fatbench.report.numbers.long import found
from fatbench.report.numbers.points import baselines, check_figure, point_key, points_of_figure, spread, sweeps
from fatbench.report.numbers.published import Lookup
from fatbench.report.numbers.sources import EVERY, Source, clients, in_words, mean_and_std
from fatbench.report.numbers.stored import Stored, read
from fatbench.report.tables import number_format
from fatbench.report.tables.notes import data_note
from fatbench.report.tables.sheet import as_tuples, label
from fatbench.store.rows import grouped
from fatbench.store.selection import PUBLISHED, WORDS, Checkpoint
from fatbench.suite import model, plugins
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.files import Suite
from fatbench.suite.model import Key
from fatbench.suite.tables import KEPT, SERIES, Figure
from fatbench.suite.types import number, seeds_text

if TYPE_CHECKING:
    from fatbench.store.stages import Store


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
    doubts: tuple[str, ...] = ()  # in words, with the seeds that they are about
    interval: tuple[float, float] | None = None  # of one seed, as training logs it


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

    def partial(self, points: Sequence[SeriesPoint]) -> bool:
        """Whether seeds are missing at one of these points."""
        return any(len(point.seeds) < self.wanted for point in points)


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
    facts: table_facts.Facts
    notes: list[tuple[str, str]] = field(default_factory=list)  # (what, text)

    @property
    def placed(self) -> list[tuple[Panel, Line]]:
        """The lines of all panels, each with its panel."""
        return [(panel, line) for panel in self.panels for line in panel.lines]

    @property
    def lines(self) -> list[Line]:
        """The lines of all panels."""
        return [line for _, line in self.placed]

    @property
    def empty(self) -> bool:
        """Whether no number of the figure has been measured."""
        return not any(line.points for line in self.lines)


def drawn_from(
    suite: Suite, plan: Plan, store: Store, figures: Sequence[Figure], select: Checkpoint = "last"
) -> list[Plot]:
    """`build` with what the database has for these figures."""
    sources = [text for figure in figures for text in figure.series.values()]
    of_bars = [Source.parse(text) for figure in figures if figure.kind == "bars" for text in figure.series.values()]
    sources += [f"train:{end}" for source in of_bars for ends in source.ends for end in ends]
    return build(suite, plan, read(sources, plan, store, select, curves=True), figures)


def build(suite: Suite, plan: Plan, numbers: Stored, figures: Sequence[Figure] | None = None) -> list[Plot]:
    """Build the figures of a suite (default: all) in which the plan's cells have a line; see `check_figure`."""
    plots = (_plot(suite, plan, figure, numbers) for figure in (suite.figures if figures is None else figures))
    return [plot for plot in plots if plot is not None]


def _plot(suite: Suite, plan: Plan, figure: Figure, numbers: Stored) -> Plot | None:
    check_figure(plan, figure)
    figure = spread(figure, plan) if figure.kind in ("bars", "matrix") else figure
    places = points_of_figure(plan, figure)
    if not places:
        return None
    taken = baselines(plan, figure.minus)
    taken_label = ", ".join(f"{axis} {labels[0]}" for axis, labels in figure.minus.items())
    if figure.minus and not taken:
        raise SpecError(f"figure {figure.id}: minus: no cell of preset '{plan.preset}' has {taken_label}")
    sources = {heading: Source.parse(text) for heading, text in figure.series.items()}
    lookup = None if figure.reference is None else Lookup(figure.reference)
    cells = {cell.id: cell for by_heading in places.values() for of_line in by_heading.values() for cell in of_line}
    own = {cell.id for cell in cells.values() if plugins.files(cell.spec)}
    panels: dict[tuple[tuple[str, str], ...], Panel] = {}
    wanted = []  # (panel, line without points, its cells)
    for (panel_names, line_names), by_heading in places.items():
        for heading, of_line in by_heading.items():
            if any(taken.get(point_key(cell, {})) is cell for cell in of_line):
                continue  # what is taken off is no difference
            key = {axis: heading if axis == SERIES else dict(panel_names)[axis] for axis in figure.panels}
            panel = panels.setdefault(tuple(key.items()), Panel(key, []))
            ids = tuple(cell.id for cell in of_line)
            source, indices = sources[heading], [None]
            if figure.kind == "clients":  # a line for all of them, see `_numbers`
                source = replace(source, client=-1)
            elif source.stage not in ("train", "artifact") and source.client == EVERY:
                indices = [*range(clients(of_line, source))]
            for k in indices:
                of_client = source if k is None else replace(source, client=k)
                wanted.append((panel, Line(dict(line_names), heading, of_client, k, [], len(ids), ids), of_line))
    every, behind = _numbers([(line, of_line) for _, line, of_line in wanted], plan, figure, numbers)
    rows, none = dict(iter(every.groupby("line"))), every.iloc[:0]
    for i, (panel, line, of_line) in enumerate(wanted):
        for filled in _lines(line, rows.get(i, none)):
            published = None if lookup is None else _published(lookup, of_line[0], filled)
            points = _with_intervals(filled, numbers) if figure.kind == "bars" else filled.points
            panel.lines.append(replace(filled, published=published, points=points))
    plot = Plot(suite.name, plan.preset, figure, label(plan), [*panels.values()], table_facts.Facts())
    if not all(own.intersection(line.cells) for line in plot.lines):
        for panel in plot.panels:
            panel.lines[:] = [replace(line, own=bool(own.intersection(line.cells))) for line in panel.lines]
    for line in plot.lines:
        for id in line.cells if line.points or line.source.stage == "artifact" else ():
            behind += numbers.behind(cells[id], "train", "", 0)
    plot = replace(plot, facts=table_facts.Facts(behind))
    plot.notes.extend(_notes(plot, plan, [*cells.values()], numbers, taken_label))
    return plot


def _published(lookup: Lookup, cell: Cell, line: Line) -> tuple[float, float] | None:
    """The published range of a line, found by its cells' labels, its heading (`series`) and its `index`."""
    index = {} if line.index is None else {"index": str(line.index)}
    least, most, *_ = lookup.find({**cell.key, **line.key, SERIES: line.heading, **index}, line.heading)
    return None if least is None else (least, least if most is None else most)


# --- a row for each number of a seed ------------------------------------------------------------------------------

# of a radius its text and its setting; cell: that of a number of training
COLUMNS = ["line", "client", "round", "seed", "value", "doubts", "radius", "swept"]


def _numbers(
    lines: Sequence[tuple[Line, Sequence[Cell]]], plan: Plan, figure: Figure, stored: Stored
) -> tuple[DataFrame, list[tuple[Any, ...]]]:
    """(COLUMNS of the numbers of lines, those of the point that `minus` names taken off; `provenance.BEHIND`)."""
    taken, swept = baselines(plan, figure.minus), sweeps(plan) if figure.kind == "lines" else {}
    settings = {one.sweep: one.swept for _, cells in lines for cell in cells for one in cell.evaluations if one.sweep}
    trained, evaluated = [], []
    for i, (line, cells) in enumerate(lines):
        source = line.source
        minus = [taken.get(point_key(cell, figure.minus)) if figure.minus else cell for cell in cells]
        pairs = [(cell, other) for cell, other in zip(cells, minus, strict=True) if other is not None]
        if source.stage in ("train", "artifact"):
            trained += [(i, cell.id, other.id, source.metric, int(cell.spec["seed"])) for cell, other in pairs]
            continue
        if figure.kind == "clients":
            every = [replace(source, client=k) for k in range(clients(cells, source))]
            evaluated += [(i, cell, cell, one, source.metric, -1, 0.0, "", "eps") for cell in cells for one in every]
            continue
        radii = swept.get(source.metric, {}) if figure.kind == "lines" else {source.metric: ""}
        for position, (metric, radius) in enumerate(radii.items()):
            try:  # on the curve a value stands where its number is, a word where it is in the list
                x = float(number(radius)) if radius else 0.0
            except ValueError:
                x = float(position)
            at = (source.client, x, radius, settings.get(source.metric, "eps"))
            of_radius = replace(source, metric=metric, text=f"{source.text} {radius}")
            evaluated += [(i, cell, other, of_radius, source.metric, *at) for cell, other in pairs]
    names = ["line", "cell", "minus", "source", "metric", "client", "round", "radius", "swept"]
    asked = found(DataFrame(evaluated, columns=names, dtype=object), stored)
    asked["less"] = found(asked.assign(cell=asked["minus"]), stored)["value"]
    known = [one for one in as_tuples(asked) if None not in (one.value, one.less) and math.isfinite(one.value)]
    rows = [
        (one.line, one.client, one.round, int(one.cell.spec["seed"]), one.value - (one.less if figure.minus else 0),
         one.doubts, one.radius, one.swept)
        for one in known
    ]  # fmt: skip
    behind = [row for one in known for stage in one.stages for row in stored.behind(one.cell, stage, one.metric, one.n)]
    of_training = _trained(DataFrame(trained, columns=["line", "cell", "minus", "metric", "seed"]), stored)
    doubts = [stored.doubts.get((cell, "train"), ()) for cell in of_training["cell"]]
    of_training = of_training.assign(doubts=Series(doubts, dtype=object), radius="", swept="eps")
    numbers = DataFrame([*of_training[COLUMNS].itertuples(index=False, name=None), *rows], columns=COLUMNS)
    if figure.kind == "clients":  # of each seed from the least accurate to the most, with their rank as a round
        ranks = numbers.sort_values("value", kind="stable").groupby(["line", "seed"]).cumcount() + 1.0
        numbers["round"] = ranks.reindex(numbers.index)
    return numbers, behind


def _trained(asked: DataFrame, stored: Stored) -> DataFrame:
    """The asked rows with client, round and value of each finite number of training, that of `minus` taken off."""
    training = stored.series[(stored.series["stage"] == "train") & np.isfinite(stored.series["value"])]
    training = training[["cell", "metric", "client", "round", "value"]]
    numbers = asked.merge(training, on=["cell", "metric"])
    if (numbers["minus"] != numbers["cell"]).any():
        others = training.rename(columns={"cell": "minus", "value": "less"})
        numbers = numbers.merge(others, on=["minus", "metric", "client", "round"])
        numbers["value"] -= numbers["less"]
    return numbers


MANY = 50  # clients from which they are not shown one by one
QUANTILES = {"least": 0.0, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "largest": 1.0}


def _lines(line: Line, numbers: DataFrame) -> Iterable[Line]:
    """The lines of one heading at one place: one, or one for each client or class that was measured; of many clients
    the quantiles of each round over them.
    """
    if line.source.client != EVERY:
        yield _with_points(line, numbers[numbers["client"] == line.source.client])
        return
    of_clients = numbers[numbers["client"] >= 0]
    by_seed = of_clients.groupby(["round", "seed"], sort=False)
    firsts, count = of_clients.drop_duplicates(["round", "seed"]), of_clients["client"].nunique()
    if count < MANY:
        for client in sorted(of_clients["client"].unique().tolist()):
            yield _with_points(replace(line, index=client), of_clients[of_clients["client"] == client])
    else:
        for name, fraction in QUANTILES.items():
            heading = f"{line.heading}, {name} of {count:,} clients"
            of_name = replace(line, heading=heading, source=replace(line.source, client=-1))
            yield _with_points(of_name, firsts.assign(value=by_seed["value"].quantile(fraction).tolist()))


def _with_points(line: Line, numbers: DataFrame) -> Line:
    """The line with a point for each round or radius."""
    rows = sorted(as_tuples(numbers), key=lambda row: row.round)
    points = []
    for round, of_round in itertools.groupby(rows, key=lambda row: row.round):
        found = [*of_round]
        seeds, values = zip(*((row.seed, row.value) for row in found), strict=True)
        doubts = with_seeds(((row.seed, row.doubts) for row in found), seeds, line.wanted)
        at = found[0].radius, found[0].swept
        points.append(SeriesPoint(round, *mean_and_std(values), seeds, values, *at, doubts))
    return replace(line, points=points)


def _with_intervals(line: Line, stored: Stored) -> list[SeriesPoint]:
    """The points of a line, those of a single seed with the interval that training logs beside the number."""
    if len(line.cells) != 1:
        return line.points
    series = stored.series[(stored.series["cell"] == line.cells[0]) & (stored.series["client"] == -1)]
    for ends in line.source.ends:
        limits = series[series["metric"].isin(ends)].pivot(index="round", columns="metric", values="value")
        if {*ends} == {*limits.columns}:
            intervals = dict(zip(limits.index, limits[[*ends]].itertuples(index=False, name=None), strict=True))
            return [replace(point, interval=intervals.get(point.round)) for point in line.points]
    return line.points


def merge_plots(plots: Sequence[Plot]) -> list[Plot]:
    """Merge figures of one id and kind from several suites, panels side by side; equal labels get the suite's name."""
    by_id = grouped(((plot.figure.id, plot.figure.kind), plot) for plot in plots)
    return [_merged(same_id) if len(same_id) > 1 else same_id[0] for same_id in by_id.values()]


def _merged(plots: Sequence[Plot]) -> Plot:
    keys = [({"suite": plot.suite}, panel) for plot in plots for panel in plot.panels]
    if len({tuple(panel.key.items()) for _, panel in keys}) == len(keys):
        keys = [({}, panel) for _, panel in keys]
    axes = list(dict.fromkeys(axis for suite, panel in keys for axis in (*suite, *panel.key)))
    # a suite may lack an axis of another's panels
    panels = [Panel({axis: {**suite, **one.key}.get(axis, "") for axis in axes}, one.lines) for suite, one in keys]
    notes: dict[str, dict[str, None]] = {}
    for name, text in (note for plot in plots for note in plot.notes):
        notes.setdefault(name, {})[text] = None
    return replace(
        plots[0], suite="+".join(dict.fromkeys(plot.suite for plot in plots)), panels=panels,
        preset="+".join(dict.fromkeys(plot.preset for plot in plots)),
        label=next((plot.label for plot in plots if plot.label), ""),
        figure=plots[0].figure.model_copy(update={"panels": axes}),
        notes=[(name, "; ".join(texts)) for name, texts in notes.items()],
    )  # fmt: skip


# --- what is said of a figure -------------------------------------------------------------------------------------

BANDS = 8  # lines of a panel that can have bands of their spread side by side
SPREAD = {
    "lines": "line: mean, band: ± sample standard deviation over seeds (ddof 1)",
    "bars": "bar: mean, whisker: ± sample standard deviation over seeds (ddof 1), dots: the seeds",
    "raster": "the first is drawn; on the right, the sum over rounds, mean over seeds",
    "clients": "line: mean of the client of each rank, band: ± sample standard deviation over seeds (ddof 1)",
    "matrix": "mean over seeds",
    **dict.fromkeys(KEPT, "the first with a stored tensor is shown"),
}
ONE_SEED = {
    **SPREAD, **dict.fromkeys(("lines", "bars", "clients", "matrix"), "one seed, no spread"),
    "raster": "on the right, the sum over rounds",
}  # fmt: skip
MISSING = 12  # names of a note


def _notes(
    plot: Plot, plan: Plan, cells: Sequence[Cell], stored: Stored, taken_label: str
) -> Iterable[tuple[str, str]]:
    """The notes of a figure, as under a table: the meaning of its lines and their provenance."""
    figure, lines, facts = plot.figure, plot.lines, plot.facts
    preset = f"{plot.suite}, preset {plot.preset}{f': {plot.label}' * bool(plot.label)}"
    perturbed = ((cell.spec["data"]["name"], cell.perturbation) for cell in cells)
    has_spread = any(point.std is not None for line in lines for point in line.points)
    spread_text = (SPREAD if has_spread else ONE_SEED)[figure.kind]
    if has_spread and figure.kind == "lines" and all(len(panel.lines) > BANDS for panel in plot.panels):
        spread_text = "line: mean over seeds"
    if any(point.interval for line in lines for point in line.points):
        spread_text = f"{spread_text}; whisker: 95 % interval over clients or images"
    evaluated = any(line.source.stage not in ("train", "artifact") for line in lines)
    of_paper = figure.published if any(line.published for line in lines) else None
    of_round = any(line.source.checkpoint(stored.select) for line in lines)
    at = f", {PUBLISHED[of_paper.select]}" if of_paper is not None and of_round else ""
    ranked = figure.kind == "clients"  # a seed with fewer clients has no last places
    partial = sum(line.partial(line.points[:1] if ranked else line.points) for line in lines)
    started = [panel for panel in plot.panels if any(line.points for line in panel.lines)]  # the others: not run at all
    without = (line for panel in started for line in panel.lines if not line.points and line.source.stage != "artifact")
    missing = [*dict.fromkeys(", ".join(filter(None, line.key.values())) or line.heading for line in without)]
    others = f" and {len(missing) - MISSING} others" * (len(missing) > MISSING)
    ids, changed = {cell.id for cell in cells}, dict[str, set[str]]()
    for cell, doubt in ((cell, one) for (cell, _), doubts in stored.doubts.items() if cell in ids for one in doubts):
        if doubt.code == "changed":
            changed.setdefault(doubt.words, set()).add(cell)
    words = in_words((line.heading, line.source) for line in lines)
    found: list[tuple[str, Any]] = [
        ("suite", f"{preset}. {plan.note}".removesuffix(". ")),
        ("filter", plan.where),
        ("perturbation", model.perturbations_in_words(perturbed)),
        ("data", data_note(facts, cells, words)),
        ("checkpoint", evaluated and WORDS[stored.select]),
        ("seeds", f"{seeds_text(sorted({int(cell.spec['seed']) for cell in cells}))}; {spread_text}"),
        ("differences", figure.minus and f"differences from {taken_label}, seed by seed"),
        ("formula", any(line.published for line in lines) and figure.published is None
            and "black marks: computed, printed by no paper"),
        ("published", of_paper and f"black marks: the paper's numbers{at}; a bar shows their range"),
        *(facts.notes(words=words) if facts.origins else ()),
        ("incomplete", partial
            and f"{partial} of {len(lines)} lines average fewer seeds than planned, at some rounds or all"),
        ("places", ranked and any(line.partial(line.points) for line in lines)
            and "the last are means over fewer seeds, where some have fewer clients"),
        ("missing", missing and f"no number of {', '.join(missing[:MISSING])}{others}"),
        ("note", figure.note),
        *(("changed", f"{said} ({len(of)} cell{'s' * (len(of) > 1)})") for said, of in changed.items()),
    ]  # fmt: skip
    return ((name, text) for name, text in found if text)


FIELDS = (
    "heading", "metric", "unit", "index", "round", "radius", "mean", "std", "seeds", "values", "seeds_planned",
    "doubts", "published", "published_most", "formula", "preset", "label",
)  # fmt: skip


def render_csv(plots: Sequence[Plot]) -> str:
    """One line for each point of each line, see `number_format.tidy`. Fractions in [0, 1]."""
    records: list[tuple[Key, dict[str, Any]]] = []
    for plot, (panel, line) in [(drawn, one) for drawn in plots for one in drawn.placed]:
        key = {axis: label for axis, label in {**panel.key, **line.key}.items() if axis != SERIES}
        low, high = line.published or (None, None)
        beside: Mapping[str, Any] = {"published": low, "published_most": high, "formula": None}
        if plot.figure.formula is not None:
            beside = {"published": None, "published_most": None, "formula": low}
        records += (
            (key, {
                "suite": plot.suite, "figure": plot.figure.id, "heading": line.heading, "metric": line.source.metric,
                "unit": "fraction" if line.source.fraction else "plain", "index": line.place,
                "round": point.round if line.source.stage == "train" else None, "radius": point.radius,
                "mean": point.mean, "std": point.std, "seeds": ";".join(map(str, point.seeds)),
                "seeds_planned": line.wanted, "values": ";".join(map(number_format.csv_number, point.values)),
                "doubts": ";".join(point.doubts), **beside, "preset": plot.preset, "label": plot.label,
            })
            for point in line.points
        )  # fmt: skip
    return number_format.csv_text(number_format.tidy(records, ("suite", "figure"), FIELDS))
