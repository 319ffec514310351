"""The cells behind each number of a table or a figure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fatbench.errors import SpecError, did_you_mean
from fatbench.report.numbers.sources import Source
from fatbench.store.replicates import SIGN
from fatbench.store.rows import grouped
from fatbench.suite import confounders, cost, standard_attacks, threats
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.confounders import Confounder
from fatbench.suite.files import Suite
from fatbench.suite.model import Condition, Key
from fatbench.suite.model import read as read_node
from fatbench.suite.standard_attacks import did_you_mean_metric
from fatbench.suite.tables import KEPT, SERIES, SOURCE, Displayed, Figure, Heading, Table

Names = tuple[tuple[str, str], ...]  # (axis, label) pairs
IF_EQUAL = ", if all were equal"  # of the heading beside that of a worst client
TablePoints = dict[tuple[Names, Names], dict[str, list[Cell]]]  # (row, group) -> heading -> cells, one a seed


def sweeps(plan: Plan) -> dict[str, dict[str, str]]:
    """Attack with a list of radii, or of another setting -> metric of each value -> the value as the suite writes it.

    A transfer has a metric for each model that its attack is computed on.
    """
    metrics_by_sweep: dict[str, dict[str, str]] = {}  # sweep -> metric -> value as text
    for evaluations in {id(cell.evaluations): cell.evaluations for cell in plan.cells}.values():
        for evaluation in evaluations:
            if evaluation.sweep:
                metrics_by_sweep.setdefault(evaluation.sweep, {})[evaluation.label] = evaluation.sweep_value
    return metrics_by_sweep


S = TypeVar("S", bound=Displayed)


def spread(display: S, plan: Plan) -> S:
    """Give a table or figure a heading for each radius where its source is an attack with a list of radii."""
    metrics_by_sweep = sweeps(plan)
    headings: dict[str, Heading] = {}
    for heading, heading_spec in display.headings.items():
        source = Source.parse(heading_spec.source)
        if source.stage == "worst":  # chosen and judged on the same images: biased down
            text = f"worst_if_equal:{source.metric}"
            headings[heading] = heading_spec
            headings[f"{heading}{IF_EQUAL}"] = heading_spec.model_copy(update={"source": text})
            continue
        if source.stage in ("train", "all") or source.metric not in metrics_by_sweep:
            headings[heading] = heading_spec
            continue
        # an attack of this name may also have one radius in other cells
        is_plain = any(e.label == source.metric for cell in plan.cells for e in cell.evaluations)
        if is_plain:
            headings[heading] = heading_spec
        for metric, value_text in metrics_by_sweep[source.metric].items():
            text = re.sub(rf"(^|:){source.metric}\b", rf"\g<1>{metric}", heading_spec.source)
            headings[f"{heading} {value_text}"] = heading_spec.model_copy(update={"source": text})
    changed: dict[str, Any] = {"sources": headings}
    if isinstance(display, Table):
        best = {heading: display.best.get(heading) for heading in headings}
        for heading, best_choice in display.best.items():
            best |= {
                other_heading: best_choice
                for other_heading in headings
                if other_heading.startswith(f"{heading} ") and best[other_heading] is None
            }
        changed["best"] = best | {name: "none" for name in headings if name.endswith(IF_EQUAL)}
    return display if list(headings) == list(display.headings) else display.model_copy(update=changed)


def with_added(suite: Suite, plan: Plan) -> Suite:
    """Add a heading for each attack of `--attack` to the suite's tables of accuracies."""
    if not plan.added:
        return suite
    tables = [_with_added(table, plan) for table in suite.tables]
    return replace(suite, contents=suite.contents.model_copy(update={"tables": tables}))


def _with_added(table: Table, plan: Plan) -> Table:
    metrics = {*plan.metrics()}
    sources = {heading: Source.parse(heading_spec.source) for heading, heading_spec in table.sources.items()}
    shown_metrics = {source.metric for source in sources.values() if source.stage == "evaluation"}
    conditions: list[Condition] = []  # of the accuracies that are there
    for heading, source in sources.items():
        condition = table.sources[heading].where
        is_plain = source.text == source.metric and not table.sources[heading].relative
        if is_plain and source.metric in metrics and condition not in conditions:
            conditions.append(condition)
    added_headings = {
        ", ".join([*itertools.chain(*condition.values()), standard_attacks.heading(label)]): Heading.model_construct(
            source=label, where=condition
        )
        for condition in conditions
        for label in plan.added
        if label not in shown_metrics
    }
    best = dict.fromkeys(added_headings, "max")
    return table.model_copy(update={"sources": {**table.sources, **added_headings}, "best": {**table.best, **best}})


SUITE = "suite"  # the axis of suite names


def combined(parts: Sequence[tuple[Suite, Plan]], rows: Sequence[str], columns: Sequence[str]) -> tuple[Suite, Plan]:
    """Several suites as one with a single table. rows: axes, default all; columns: axes and sources, default metrics.

    "suite" is an axis. If the table does not show it, a cell that several suites have is there once.
    SpecError: no such axis or metric.
    """
    (first, first_plan), plans = parts[0], [plan for _, plan in parts]
    axes: dict[str, Any] = {SUITE: {suite.name: {} for suite, _ in parts}}  # axis -> label -> overrides
    for suite, _ in parts:
        for axis, labels in suite.contents.axes.items():
            axes.setdefault(axis, {}).update(labels)
    metrics = [*dict.fromkeys(e.sweep or e.label for plan in plans for c in plan.cells for e in c.evaluations)]
    known = {*metrics, *(metric for plan in plans for radii in sweeps(plan).values() for metric in radii)}
    across, sources = ([one for one in columns if (one in axes) is is_axis] for is_axis in (True, False))
    for source in sources:
        match = SOURCE.match(source)
        of_training = match is not None and match["stage"] == "train"
        if match is None or not (of_training or known.issuperset((match["metrics"] or match["metric"]).split("+"))):
            hint = did_you_mean_metric(source, [*axes, *metrics])
            raise SpecError(f"no axis or metric is named '{source}'{hint}", option="metric")
    if unknown := [axis for axis in rows if axis not in axes]:
        raise SpecError(f"no axis is named '{unknown[0]}'{did_you_mean(unknown[0], axes)}", option="by")
    row_axes = [*rows] or [axis for axis in axes if axis not in across]
    cells: dict[object, Cell] = {}
    for suite, plan in parts:
        for cell in plan.cells:
            id = cell.id.partition(SIGN)[0]  # replicates of a cell count as that cell
            if SUITE in (*row_axes, *across):
                cells.setdefault(
                    (suite.name, *cell.key.items(), id), replace(cell, key={SUITE: suite.name, **cell.key})
                )
            else:
                cells.setdefault(id, cell)
    name = " + ".join(dict.fromkeys(suite.name for suite, _ in parts))
    values = standard_attacks.headings(sources or metrics)
    node = {"id": "combined", "title": name, "rows": row_axes, "across": across, "values": values}
    table = read_node(Table, node, "by, metric", axes=axes, folders=[])
    contents = first.contents.model_copy(update={"name": name, "tables": [table], "figures": []})
    presets = " + ".join(dict.fromkeys(plan.preset for plan in plans))
    notes = " ".join(dict.fromkeys(f"{suite.name}: {plan.note}" for suite, plan in parts if plan.note))
    checkpoints = [one for one in first_plan.checkpoints if all(one in plan.checkpoints for plan in plans)]
    resolved = all(plan.resolved for plan in plans)
    merged = Plan(name, presets, notes, [*cells.values()], checkpoints, where=first_plan.where, resolved=resolved)
    return replace(first, contents=contents), merged


def points_of_table(plan: Plan, table: Table) -> TablePoints:
    """(labels of the row, labels of the group) -> heading -> its cells, one a seed; only what some heading shows."""
    words = ("table", "a row holds", "'rows', 'across' or 'where'")
    return grouped_points(plan, table, table.rows, table.across, words)


def grouped_points(
    plan: Plan, display: Displayed, first_axes: Sequence[str], second_axes: Sequence[str], words: tuple[str, str, str]
) -> TablePoints:
    """The cells of a table or a figure: (labels of the first axes, of the second) -> heading -> cells, one a seed.

    words: what it is, what may hold only one point of the grid, and where to say which. SpecError: it holds several.
    """
    conditions, headings = display.conditions, list(display.headings)
    kinds: list[Condition] = []  # the distinct conditions of headings
    for heading in headings:
        if conditions.get(heading, {}) not in kinds:
            kinds.append(conditions.get(heading, {}))
    points: dict[tuple[Names, Names, int], Key] = {}  # (row, group, kind) -> the only key that it may hold
    cells: dict[tuple[Names, Names], dict[int, list[Cell]]] = {}
    for cell in plan.cells:
        key = cell.key
        if not is_inside(key, display.where):
            continue
        all_labels = {**threats.of_cell(cell.spec), **key} if {*threats.AXES} & {*first_axes} else key
        first_labels, second_labels = (
            tuple((axis, all_labels.get(axis, "")) for axis in first_axes),
            tuple((axis, all_labels.get(axis, "")) for axis in second_axes),
        )
        for kind, condition in enumerate(kinds):
            if condition and not is_inside(key, condition):
                continue
            earlier_key = points.setdefault((first_labels, second_labels, kind), key)
            if earlier_key is not key and earlier_key != key:
                axes = sorted(axis for axis in {*earlier_key, *key} if earlier_key.get(axis) != key.get(axis))
                kind_name, holds, where_to_name = words
                if condition:
                    heading = next(h for h in headings if conditions.get(h) == condition)
                    holds = f"{holds} under '{heading}'"
                    where_to_name = f"{where_to_name.replace(' or', ',')} or that of the heading"
                raise SpecError(
                    f"{kind_name} {display.id}: {holds} more than one point of the grid:"
                    f" name the axis {' and '.join(axes)} in {where_to_name}"
                )
            cells.setdefault((first_labels, second_labels), {}).setdefault(kind, []).append(cell)
    kind_by_heading = {heading: kinds.index(conditions.get(heading, {})) for heading in headings}
    return {
        row_and_group: {h: cells_by_kind[k] for h, k in kind_by_heading.items() if k in cells_by_kind}
        for row_and_group, cells_by_kind in cells.items()
    }


def absent_headings(sources: Mapping[str, Source], cells_by_point: TablePoints) -> dict[str, str]:
    """Heading -> why none of the cells can have such a number: a reduced preset lacks the attack, or ends before."""
    reasons = {}
    for heading, source in sources.items():
        cells = [cell for cells_by_heading in cells_by_point.values() for cell in cells_by_heading.get(heading, ())[:1]]
        rounds = max((int(cell.spec["algorithm"]["rounds"]) for cell in cells), default=0)
        if not cells:
            reasons[heading] = "not in the grid of this preset"
        elif source.stage == "train":
            if (source.round or 0) > rounds:
                reasons[heading] = f"training ends after round {rounds} in this preset"
        elif not any(measures(cell, source) for cell in cells):
            reasons[heading] = "not evaluated in this preset"
    return reasons


def measures(cell: Cell, source: Source) -> bool:
    """Whether the cell ever has this number: training may log any, an attack must be among its evaluations."""
    return source.stage == "train" or any(map(source.shows, cell.evaluations))


def unfilled(plan: Plan, table: Table) -> dict[str, str]:
    """Heading of a table -> why no cell of the plan can fill it; empty where the table has no cells at all."""
    cells_by_point = points_of_table(plan, spread(table, plan))
    if not cells_by_point:
        return {}
    sources = {heading: Source.parse(text) for heading, text in spread(table, plan).values.items()}
    return absent_headings(sources, cells_by_point)


def is_inside(key: Key, condition: Condition) -> bool:
    """Whether a point of the grid has one of the labels that a condition names, on each of its axes."""
    return all(key.get(axis) in labels for axis, labels in condition.items())


PointKey = tuple[Names, int]


def point_key(cell: Cell, labels: Mapping[str, Sequence[str]]) -> PointKey:
    """The point of a cell with some of its labels exchanged, and its seed."""
    key = {**cell.key, **{axis: axis_labels[0] for axis, axis_labels in labels.items()}}
    return tuple(sorted(key.items())), int(cell.spec["seed"])


def baselines(plan: Plan, minus: Condition) -> dict[PointKey, Cell]:
    """The cells whose numbers `minus` subtracts, by their points; empty without `minus`."""
    return {point_key(cell, {}): cell for cell in plan.cells if minus and is_inside(cell.key, minus)}


@dataclass(frozen=True)
class Points:
    """What a table shows before anything is measured: its points of the grid and its headings."""

    table: Table
    cells: TablePoints  # (row, group) -> heading -> cells
    sources: Mapping[str, Source]
    headings: list[str]  # those for which some point can have a number
    rows: list[Names]
    groups: list[Names]

    @classmethod
    def of(cls, plan: Plan, table: Table) -> tuple[Points | None, dict[str, str]]:
        """(the points of a table, heading -> why none of them has such a number); None where nothing can be shown."""
        cells = points_of_table(plan, table)
        if not cells:
            return None, {}
        sources = {heading: Source.parse(text) for heading, text in table.values.items()}
        absent_reasons = absent_headings(sources, cells)
        headings = [heading for heading in sources if heading not in absent_reasons]
        rows, groups = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
        # blocks of the first axis of `rows`, in them blocks of the second, whatever the order of the suite's axes
        prefixes = (row[:k] for row in rows for k in range(1, len(row) + 1))
        first = {prefix: i for i, prefix in enumerate(dict.fromkeys(prefixes))}
        rows.sort(key=lambda row: [first[row[:k]] for k in range(1, len(row) + 1)])
        points = cls(table, cells, sources, headings, rows, groups)
        return points if headings else None, absent_reasons  # the report says why, see `unfilled`

    def cells_at(self, row: int, group: int, column: int) -> list[Cell]:
        if row >= len(self.rows):  # of an external model
            return []
        return self.cells.get((self.rows[row], self.groups[group]), {}).get(self.headings[column], [])

    def all_cells(self) -> list[Cell]:
        return [cell for by_heading in self.cells.values() for cells in by_heading.values() for cell in cells]


def points_of_figure(plan: Plan, figure: Figure) -> TablePoints:
    """(labels of the panel, labels of the line) -> heading -> its cells. SpecError: a line of several points."""
    panels = [axis for axis in figure.panels if axis != SERIES]
    if figure.include:
        cells = [cell for cell in plan.cells if any(is_inside(cell.key, condition) for condition in figure.include)]
        plan = replace(plan, cells=cells)
    words = ("figure", "a line shows", "'panels', 'lines' or 'where'")
    return grouped_points(plan, figure, panels, figure.lines, words)


def check_figure(plan: Plan, figure: Figure) -> None:
    """Refuse a line of several points, a panel of fractions and plain numbers, or a curve of one radius (SpecError)."""
    points_of_figure(plan, figure)
    if figure.kind == "lines":
        evaluations = [one for cell in plan.cells for one in cell.evaluations]
        single = {one.label for one in evaluations if not one.sweep or one.origin}
        single |= {evaluation.sweep for cell in plan.cells for evaluation in cell.evaluations if evaluation.origin}
        for heading, text in figure.series.items():
            if (source := Source.parse(text)).stage != "train" and source.metric in single:
                raise SpecError(
                    f"figure {figure.id}: {heading}: '{source.metric}' has one radius and makes no curve:"
                    " give the attack a list, eps: [2/255, 4/255, 8/255], or draw 'bars' or a 'matrix'"
                )
    if SERIES in figure.panels or figure.kind in KEPT:
        return
    by_unit = grouped((Source.parse(text).fraction, heading) for heading, text in figure.series.items())
    if len(by_unit) > 1:
        raise SpecError(
            f"figure {figure.id}: {', '.join(by_unit[True])} in per cent and {', '.join(by_unit[False])} share a panel:"
            f" make two figures, or add '{SERIES}' to 'panels'"
        )


def find_confounders(plan: Plan, table: Table, cells_by_point: TablePoints) -> list[Confounder]:
    """The confounders of a table: settings besides the labels in which rows differ that it compares or subtracts."""
    groups: dict[tuple[Any, ...], dict[str, Cell]] = {}
    pairs: dict[tuple[str, str], list[Cell]] = {}
    for heading, text in table.values.items():
        source, minus = Source.parse(text), table.sources[heading].minus
        baseline_cells = baselines(plan, minus)
        for (row, group), cells_by_heading in cells_by_point.items():
            for cell in cells_by_heading.get(heading, ())[:1]:  # seeds differ in nothing else
                if baseline_cells and (baseline_cell := baseline_cells.get(point_key(cell, minus))) is not None:
                    pairs[baseline_cell.id, cell.id] = [baseline_cell, cell]
                elif table.best[heading] != "none" or table.paired:
                    side = row if table.best_within == "row" else group
                    key = (side, *comparison_key(cell, source, table))
                    groups.setdefault(key, {})[cell.id] = cell
    compared = {tuple(cells): [*cells.values()] for cells in groups.values()}
    baseline = table.paired or plan.baseline
    return [
        *(confounder for cells in compared.values() for confounder in confounders.confounders(cells, baseline)),
        *(confounder for pair in pairs.values() for confounder in confounders.confounders(pair)),
    ]


def comparison_key(cell: Cell, source: Source, table: Table) -> tuple[str, str]:
    """A key that two cells share if their numbers can be ranked: (data set, attack and partition; training objective).

    With `compare_across` the labels of all other axes of the table stand in place of partition and objective.
    """
    attack = next((evaluation.attack for evaluation in cell.evaluations if source.shows(evaluation)), None)
    data_and_attack = repr((cell.spec["data"], attack if source.stage != "train" else None))
    if table.compare_across:
        shown_axes = (*table.rows, *table.across)
        return data_and_attack + repr(
            [cell.key.get(axis) for axis in shown_axes if axis not in table.compare_across]
        ), ""
    own = next((evaluation.on for evaluation in cell.evaluations if source.shows(evaluation)), "")
    return data_and_attack + own + repr(cell.spec["partition"]), repr(
        cost.local(cell.spec["algorithm"]).get("objective")
    )
