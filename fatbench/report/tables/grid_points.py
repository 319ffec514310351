"""Which cells a number of a table or a figure is made of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fatbench.errors import SpecError
from fatbench.report.numbers.measurements import Source
from fatbench.suite import threats
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.files import Suite
from fatbench.suite.model import Condition, Key
from fatbench.suite.standard_attacks import TITLES
from fatbench.suite.tables import OVER, Displayed, Heading, Table

Names = tuple[tuple[str, str], ...]
TablePoints = dict[tuple[Names, Names], dict[str, list[Cell]]]


def sweeps(plan: Plan) -> dict[str, dict[str, str]]:
    """Attack with a list of radii, or of another setting -> metric of each value -> the value as the suite writes it.

    A transfer has a metric for each model that its attack is computed on.
    """
    found: dict[str, dict[str, str]] = {}
    for evaluations in {id(cell.evaluations): cell.evaluations for cell in plan.cells}.values():
        for one in evaluations:
            if one.sweep:
                found.setdefault(one.sweep, {})[one.label] = one.mark
    return found


S = TypeVar("S", bound=Displayed)


def spread(shown: S, plan: Plan) -> S:
    """A table or figure with a heading for each radius, where its source is an attack with a list of them."""
    swept = sweeps(plan)
    headings: dict[str, Heading] = {}
    for heading, one in shown.headings.items():
        source = Source.parse(one.source)
        if source.stage in ("train", *OVER) or source.metric not in swept:
            headings[heading] = one
            continue
        plain = any(e.label == source.metric for cell in plan.cells for e in cell.evaluations)
        if plain:
            headings[heading] = one
        for metric, mark in swept[source.metric].items():
            text = re.sub(rf"(^|:){source.metric}\b", rf"\g<1>{metric}", one.source)
            headings[f"{heading} {mark}"] = one.model_copy(update={"source": text})
    changed: dict[str, Any] = {"sources": headings}
    if isinstance(shown, Table):
        best = {heading: shown.best.get(heading) for heading in headings}
        for heading, chosen in shown.best.items():
            best |= {other: chosen for other in headings if other.startswith(f"{heading} ") and best[other] is None}
        changed["best"] = best
    return shown if list(headings) == list(shown.headings) else shown.model_copy(update=changed)


def with_added(suite: Suite, plan: Plan) -> Suite:
    """The suite, its tables of accuracies with a heading for each attack that `--attacks` has added to the plan."""
    if not plan.added:
        return suite
    tables = [_with_added(table, plan) for table in suite.tables]
    return replace(suite, contents=suite.contents.model_copy(update={"tables": tables}))


def _with_added(table: Table, plan: Plan) -> Table:
    metrics = {*plan.metrics()}
    sources = {heading: Source.parse(one.source) for heading, one in table.sources.items()}
    shown = {source.metric for source in sources.values() if source.stage == "evaluation"}
    conditions: list[Condition] = []  # of the accuracies that are there
    for heading, source in sources.items():
        condition = table.sources[heading].where
        plain = source.text == source.metric and not table.sources[heading].relative
        if plain and source.metric in metrics and condition not in conditions:
            conditions.append(condition)
    more = {
        ", ".join([*itertools.chain(*condition.values()), TITLES.get(label, label)]): Heading.model_construct(
            source=label, where=condition
        )
        for condition in conditions
        for label in plan.added
        if label not in shown
    }
    best = dict.fromkeys(more, "max")
    return table.model_copy(update={"sources": {**table.sources, **more}, "best": {**table.best, **best}})


def points_of_table(plan: Plan, table: Table) -> TablePoints:
    """(labels of the row, labels of the group) -> heading -> its cells, one a seed; only what some heading shows."""
    words = ("table", "a row holds", "'rows', 'across' or 'where'")
    return grouped_points(plan, table, table.rows, table.across, words)


def grouped_points(
    plan: Plan, shown: Displayed, first: Sequence[str], second: Sequence[str], words: tuple[str, str, str]
) -> TablePoints:
    """The cells of a table or a figure: (labels of the first axes, of the second) -> heading -> cells, one a seed.

    words: what it is, what may hold only one point of the grid, and where to say which. SpecError: it holds several.
    """
    conditions, headings = shown.conditions, list(shown.headings)
    kinds: list[Condition] = []
    for heading in headings:
        if conditions.get(heading, {}) not in kinds:
            kinds.append(conditions.get(heading, {}))
    points: dict[tuple[Names, Names, int], Key] = {}
    cells: dict[tuple[Names, Names], dict[int, list[Cell]]] = {}
    for cell in plan.cells:
        key = cell.key
        if not inside(key, shown.where):
            continue
        said = {**threats.of_cell(cell.spec), **key} if {*threats.AXES} & {*first} else key
        a, b = tuple((axis, said.get(axis, "")) for axis in first), tuple((axis, said.get(axis, "")) for axis in second)
        for kind, condition in enumerate(kinds):
            if condition and not inside(key, condition):
                continue
            known = points.setdefault((a, b, kind), key)
            if known is not key and known != key:
                axes = sorted(axis for axis in {*known, *key} if known.get(axis) != key.get(axis))
                what, holds, say = words
                if condition:
                    heading = next(h for h in headings if conditions.get(h) == condition)
                    holds, say = f"{holds} under '{heading}'", f"{say.replace(' or', ',')} or that of the heading"
                raise SpecError(
                    f"{what} {shown.id}: {holds} more than one point of the grid:"
                    f" name the axis {' and '.join(axes)} in {say}"
                )
            cells.setdefault((a, b), {}).setdefault(kind, []).append(cell)
    at = {heading: kinds.index(conditions.get(heading, {})) for heading in headings}
    return {row_and_group: {h: here[k] for h, k in at.items() if k in here} for row_and_group, here in cells.items()}


def absent(sources: Mapping[str, Source], found: TablePoints) -> dict[str, str]:
    """Heading -> why none of the cells can have such a number: a reduced preset lacks the attack, or ends before."""
    why = {}
    for heading, source in sources.items():
        cells = [cell for here in found.values() for cell in here.get(heading, ())[:1]]
        rounds = max((int(cell.spec["algorithm"]["rounds"]) for cell in cells), default=0)
        if not cells:
            why[heading] = "not in the grid of this preset"
        elif source.stage == "train":
            if (source.round or 0) > rounds:
                why[heading] = f"training ends after round {rounds} in this preset"
        elif not any(measures(cell, source) for cell in cells):
            why[heading] = "not evaluated in this preset"
    return why


def measures(cell: Cell, source: Source) -> bool:
    """Whether such a number of the cell is ever measured: one of training, or an attack that it is evaluated with."""
    return source.stage == "train" or any(map(source.shows, cell.evaluations))


def unfilled(plan: Plan, table: Table) -> dict[str, str]:
    """Heading of a table -> why no cell of the plan can fill it; empty where the table has no cells at all."""
    found = points_of_table(plan, spread(table, plan))
    if not found:
        return {}
    return absent({heading: Source.parse(text) for heading, text in spread(table, plan).values.items()}, found)


def inside(key: Key, where: Condition) -> bool:
    """Whether a point of the grid has one of the labels that a condition names, on each of its axes."""
    return all(key.get(axis) in labels for axis, labels in where.items())


PointKey = tuple[Names, int]


def point_key(cell: Cell, labels: Mapping[str, Sequence[str]]) -> PointKey:
    """The point of a cell with some of its labels exchanged, and its seed."""
    key = {**cell.key, **{axis: chosen[0] for axis, chosen in labels.items()}}
    return tuple(sorted(key.items())), int(cell.spec["seed"])


def baselines(plan: Plan, minus: Condition) -> dict[PointKey, Cell]:
    """Where the cells are whose numbers are taken off; none without `minus`."""
    return {point_key(cell, {}): cell for cell in plan.cells if minus and inside(cell.key, minus)}
