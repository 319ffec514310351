"""The labels that a suite gives its cells; the database keeps them for readers who do not have the program."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, select

from fatbench.errors import FatbenchError
from fatbench.store import replicates
from fatbench.store.points import Point, labels_text, points_of_cells, seeds_of, wrongly_marked
from fatbench.store.schema import POINTS, RUNS
from fatbench.suite import files

if TYPE_CHECKING:
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Plan
    from fatbench.suite.files import Suite

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
                preset=plan.preset,
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


def mark_current(suite: Suite, preset: str, store: Store) -> None:
    """Tell SQL which stored cells a suite's preset has today, whatever filter or seeds a run was given."""
    cells = suite.plan(preset, refuse=False).cells
    with store.database.reading() as connection:
        other_seeds = seeds_of(connection, suite.name, preset) - {cell.spec["seed"] for cell in cells}
    if other_seeds:
        cells = [*cells, *suite.plan(preset, sorted(other_seeds), refuse=False).cells]
    places = {(cell.id, frozenset(cell.key.items())) for cell in cells}
    with store.database.reading() as connection:
        if not wrongly_marked(connection, suite.name, preset, places):
            return
    store.mark_current(suite.name, preset, places)


def mark_shipped(store: Store, cells: Collection[str]) -> None:
    """Tell SQL which of these cells stand in the suites of this program today."""
    with store.database.reading() as connection:
        presets = {(point.suite, point.preset) for point in points_of_cells(connection, cells)}
    for suite, preset in sorted(presets):
        if files.split_settings(suite)[0] in files.available():
            with suppress(FatbenchError):  # a preset or a setting of another version
                mark_current(files.load(suite), preset, store)


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
