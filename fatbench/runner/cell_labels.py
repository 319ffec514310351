"""The labels that a suite gives its cells; the database keeps them for readers who do not have the program."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, select

from fatbench.errors import FatbenchError
from fatbench.store import replicates
from fatbench.store.grid_points import Place, Point, labels_key, labels_text, points_of_cells, seeds_of, wrongly_marked
from fatbench.store.schema import POINTS, RUNS
from fatbench.suite import files
from fatbench.suite.cells import Plan
from fatbench.suite.files import Suite

if TYPE_CHECKING:
    from fatbench.store.stages import Store

SPLITS = ("split", "partition")  # the axes whose labels describe how data are split among clients


def points_of(plan: Plan) -> list[Point]:
    """The points of a plan's cells, and of cells of other suites whose models they begin with."""
    own_ids = {cell.id for cell in plan.cells}
    cells = [*plan.cells, *(cell for cell in plan.to_run() if cell.id not in own_ids)]
    axis = "method" if plan.baseline is None else plan.baseline[0]
    points: dict[Point, None] = {}
    for cell in cells:
        spec, key = cell.spec, cell.key
        splits = [key[name] for name in SPLITS if name in key]
        points[
            Point(
                suite=cell.suite or plan.suite,
                preset=cell.preset or plan.preset,
                cell=cell.id,
                labels=labels_text(key),
                method=key.get(axis) or _name(spec.get("algorithm")),
                data=_name(spec.get("data")),
                split=splits[0] if splits else _name(spec.get("partition")),
                model=_name(spec.get("model")),
                evaluations=tuple(origin_cell.id for origin_cell in cell.evaluations),
            )
        ] = None
    return list(points)


def mark_current(suite: Suite, preset: str, store: Store) -> Collection[Place]:
    """Tell SQL which stored cells a suite's preset has today, whatever filter or seeds a run was given; its places."""
    cells = suite.plan(preset, refuse=False).cells
    with store.database.reading() as connection:
        other_seeds = seeds_of(connection, suite.name, preset) - {cell.spec["seed"] for cell in cells}
    if other_seeds:
        cells = [*cells, *suite.plan(preset, sorted(other_seeds), refuse=False).cells]
    places = {(cell.id, frozenset(cell.key.items())) for cell in cells}
    with store.database.reading() as connection:
        is_marked = not wrongly_marked(connection, suite.name, preset, places)
    if not is_marked:
        store.mark_current(suite.name, preset, places)
    return places


def mark_shipped(store: Store, cells: Collection[str]) -> list[str]:
    """Tell SQL which of these cells stand in the suites of this program today; a sentence on those labelled otherwise.

    A cell's settings are checked against its id, but nothing but the suite says which labels they have.
    """
    sentences = []
    with store.database.reading() as connection:
        points = [*points_of_cells(connection, cells)]
    for suite, preset in sorted({(point.suite, point.preset) for point in points}):
        if files.split_settings(suite)[0] not in files.available():
            continue
        with suppress(FatbenchError):  # a preset or a setting of another version
            places = mark_current(files.load(suite), preset, store)
            labels_here = {cell: dict(labels) for cell, labels in places}
            stated = [one for one in points if (one.suite, one.preset, one.current) == (suite, preset, True)]
            others = [
                one for one in stated if one.cell in labels_here and (one.cell, labels_key(one.labels)) not in places
            ]
            for one in others[:1]:
                theirs, ours = json.loads(one.labels), labels_here[one.cell]
                axis = next(axis for axis in {**theirs, **ours} if theirs.get(axis) != ours.get(axis))
                sentences.append(
                    f"{suite}, preset {preset}: {axis} of cell {one.cell} is {theirs.get(axis)!r} in the file and "
                    f"{ours.get(axis)!r} in the suite{f', and {len(others) - 1} more' if others[1:] else ''}"
                )
    return sentences


def _name(call: Mapping[str, Any] | None) -> str:
    """The name of a function of a cell, with the variant of a data set; empty for None."""
    if call is None:
        return ""
    variant = call.get("variant")
    return str(call["name"]) + (f" {variant}" if variant else "")


def of_unlabelled(store: Store) -> Iterator[Plan]:
    """The plans of shipped suites that ran cells without stored points, as older versions of the program left them."""
    same_point = and_(POINTS.c.cell == RUNS.c.cell, POINTS.c.suite == RUNS.c.suite, POINTS.c.preset == RUNS.c.preset)
    unlabelled = select(RUNS.c.suite, RUNS.c.preset).outerjoin(POINTS, same_point).where(POINTS.c.cell.is_(None))
    with store.database.reading() as connection:
        is_original = ~RUNS.c.cell.contains(replicates.SIGN) & RUNS.c.preset.is_not(None)
        suite_presets = connection.execute(unlabelled.where(is_original).distinct()).all()
    for suite, preset in sorted(map(tuple, suite_presets)):
        if files.split_settings(suite)[0] in files.available():  # never a path: a file would name plug-ins
            with suppress(FatbenchError):  # a preset or a setting of another version
                yield files.load(suite).plan(preset, refuse=False)
