"""The points of suites' grids at which cells stand, with labels, method, data and evaluations, for SQL.

A cell that stands at several points, or in several suites, has a row for each. The table `asked` stores the evaluations
of each kind of point once; most points of a suite are of the same kind.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from fatbench.store.rows import dumps, fetch
from fatbench.store.schema import ASKED, CELLS, POINTS


class Point(NamedTuple):
    """One point of a grid."""

    suite: str
    preset: str
    cell: str
    labels: str = "{}"  # JSON {axis: label}, in the suite's order
    method: str = ""  # the label on the suite's baseline axis, else on its axis "method", else the algorithm
    data: str = ""
    split: str = ""
    model: str = ""
    evaluations: tuple[str, ...] = ()  # what the suite asks of the trained model: "pgd20-0a1b2c3d"
    current: bool = True  # False: the suite's file gives another cell, or none, with these labels and this seed

    @property
    def kind(self) -> str:
        """The hash of the evaluations; empty without any."""
        evaluations_text = dumps(sorted(self.evaluations)).encode()
        return hashlib.sha256(evaluations_text).hexdigest()[:12] if self.evaluations else ""

    @property
    def row(self) -> dict[str, Any]:
        """A row of `points`."""
        return {name: getattr(self, name) for name in (*FIELDS, "kind", "current")} | {"shown": self.cell}


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels as JSON, in the suite's order."""
    return json.dumps(dict(labels), separators=(",", ":"), ensure_ascii=False)


Place = tuple[str, frozenset[tuple[str, str]]]  # a cell and its labels for comparing
FIELDS = ("suite", "preset", "cell", "labels", "method", "data", "split", "model")


def write(connection: Connection, points: Iterable[Point], *, replace: bool) -> None:
    """Store the points of existing cells; replace: also if the suite's preset has points of the cell already.

    What is written last is current: another cell with the same suite, preset, labels and seed is of an earlier file.
    """
    points = list(points)
    points_by_key: dict[tuple[str, str, str], dict[Point, None]] = {}
    for point in points:
        points_by_key.setdefault((point.suite, point.preset, point.cell), {})[point] = None
    rows_by_key: dict[tuple[str, str, str], set[tuple[Any, ...]]] = {}
    columns = (*FIELDS, "kind")
    query = select(*(POINTS.c[name] for name in columns))
    for row in fetch(connection, query, POINTS.c.cell, {cell for _, _, cell in points_by_key}):
        rows_by_key.setdefault((row.suite, row.preset, row.cell), set()).add(tuple(row))
    new_points: list[Point] = []
    for key, cell_points in points_by_key.items():
        if stored_rows := rows_by_key.get(key, set()):
            if not replace or stored_rows == {tuple(point.row[name] for name in columns) for point in cell_points}:
                continue
            suite, preset, cell = key
            condition = (POINTS.c.suite == suite) & (POINTS.c.preset == preset) & (POINTS.c.cell == cell)
            connection.execute(delete(POINTS).where(condition))
        new_points += cell_points
    if new_points:
        connection.execute(insert(POINTS), [point.row for point in new_points])
        _store_kinds(connection, {point.kind: point.evaluations for point in new_points if point.kind})
    for suite, preset in {(point.suite, point.preset): None for point in points if point.current}:
        here = [one for one in points if (one.suite, one.preset, one.current) == (suite, preset, True)]
        places = {(point.cell, labels_key(point.labels)) for point in here}
        rows = _grid(connection, suite, preset)
        taken = {(labels, row.seed) for row, labels in rows if (row.cell, labels) in places}
        kept = {(row.cell, labels) for row, labels in rows if row.current and (labels, row.seed) not in taken}
        mark_current(connection, suite, preset, places | kept)


def labels_key(labels: str) -> frozenset[tuple[str, str]]:
    """Labels for comparing: a file has them in another order than the suite."""
    return frozenset(json.loads(labels).items())


def _grid(connection: Connection, suite: str, preset: str) -> list[tuple[Any, frozenset[tuple[str, str]]]]:
    """The stored points of a suite's preset, each with its labels for comparing."""
    query = select(*(POINTS.c[name] for name in ("cell", "labels", "current")), CELLS.c.seed)
    query = query.join(CELLS, CELLS.c.id == POINTS.c.cell).where(POINTS.c.suite == suite, POINTS.c.preset == preset)
    return [(row, labels_key(row.labels)) for row in connection.execute(query)]


def wrongly_marked(connection: Connection, suite: str, preset: str, places: Collection[Place]) -> list[Any]:
    """The points of a suite's preset that are current and not at these places, or the other way round."""
    return [row for row, labels in _grid(connection, suite, preset) if ((row.cell, labels) in places) != row.current]


def mark_current(connection: Connection, suite: str, preset: str, places: Collection[Place]) -> None:
    """Make the points of a suite's preset at these places current, and its others not."""
    condition = (POINTS.c.suite == suite) & (POINTS.c.preset == preset)
    condition &= (POINTS.c.cell == bindparam("at")) & (POINTS.c.labels == bindparam("named"))
    wrong_rows = wrongly_marked(connection, suite, preset, places)
    if wrong_rows:
        values = [{"at": row.cell, "named": row.labels, "now": not row.current} for row in wrong_rows]
        connection.execute(update(POINTS).where(condition).values(current=bindparam("now")), values)


def seeds_of(connection: Connection, suite: str, preset: str) -> set[int]:
    """The seeds of the stored points of a suite's preset."""
    return {row.seed for row, _ in _grid(connection, suite, preset) if row.seed is not None}


def _store_kinds(connection: Connection, kinds: Mapping[str, Sequence[str]]) -> None:
    """Store the evaluations of kinds of points, each once."""
    known_kinds = set(connection.scalars(select(ASKED.c.kind).where(ASKED.c.kind.in_(sorted(kinds)))))
    pairs = [(kind, one) for kind in kinds if kind not in known_kinds for one in dict.fromkeys(kinds[kind])]
    rows = [{"kind": kind, "evaluation": one, "attack": one.rpartition("-")[0]} for kind, one in pairs]
    if rows:
        connection.execute(insert(ASKED), rows)


def labelled(connection: Connection, label: str) -> dict[tuple[str, str], list[str]]:
    """(suite, axis) -> the cells with this label on the axis, in order."""
    query = select(POINTS.c.suite, POINTS.c.cell, POINTS.c.labels).order_by(*POINTS.primary_key)
    quoted = json.dumps(label, ensure_ascii=False)
    cells: dict[tuple[str, str], dict[str, None]] = {}
    for suite, cell, labels in connection.execute(query.where(POINTS.c.labels.contains(quoted, autoescape=True))):
        for axis, cell_label in json.loads(labels).items():
            if cell_label == label:
                cells.setdefault((suite, axis), {})[cell] = None
    return {place: [*ids] for place, ids in cells.items()}


def points_of_cells(connection: Connection, cells: Iterable[str]) -> Iterator[Point]:
    """The points of some cells, in order."""
    evaluations_by_kind: dict[str, list[str]] = {}
    for kind, evaluation in connection.execute(select(ASKED.c.kind, ASKED.c.evaluation).order_by(*ASKED.primary_key)):
        evaluations_by_kind.setdefault(kind, []).append(evaluation)
    query = select(*(POINTS.c[name] for name in FIELDS), POINTS.c.kind, POINTS.c.current).order_by(*POINTS.primary_key)
    for row in fetch(connection, query, POINTS.c.cell, cells):
        yield Point(
            **{name: getattr(row, name) for name in FIELDS},
            evaluations=tuple(evaluations_by_kind.get(row.kind, ())),
            current=row.current,
        )
