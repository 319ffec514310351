"""The points of suites' grids at which cells stand, with labels, method, data and evaluations, for SQL.

A cell that stands at several points, or in several suites, has a row for each. The table `asked` stores the evaluations
of each kind of point once; most points of a suite are of the same kind.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, insert, select

from fatbench.store.rows import dumps, fetch
from fatbench.store.schema import ASKED, POINTS


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

    @property
    def kind(self) -> str:
        """The hash of the evaluations; empty without any."""
        evaluations_text = dumps(sorted(self.evaluations)).encode()
        return hashlib.sha256(evaluations_text).hexdigest()[:12] if self.evaluations else ""

    @property
    def row(self) -> dict[str, Any]:
        """A row of `points`."""
        return {**{name: getattr(self, name) for name in FIELDS}, "kind": self.kind, "shown": self.cell}


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels as JSON, in the suite's order."""
    return json.dumps(dict(labels), separators=(",", ":"), ensure_ascii=False)


FIELDS = ("suite", "preset", "cell", "labels", "method", "data", "split", "model")


def write(connection: Connection, points: Iterable[Point], *, replace: bool) -> None:
    """Store the points of existing cells; replace: also if the suite's preset has points of the cell already."""
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
        stored_rows = rows_by_key.get(key, set())
        if stored_rows and (
            not replace or stored_rows == {tuple(point.row[name] for name in columns) for point in cell_points}
        ):
            continue
        if stored_rows:
            suite, preset, cell = key
            condition = (POINTS.c.suite == suite) & (POINTS.c.preset == preset) & (POINTS.c.cell == cell)
            connection.execute(delete(POINTS).where(condition))
        new_points += cell_points
    if new_points:
        connection.execute(insert(POINTS), [point.row for point in new_points])
        _store_kinds(connection, {point.kind: point.evaluations for point in new_points if point.kind})


def _store_kinds(connection: Connection, kinds: Mapping[str, Sequence[str]]) -> None:
    """Store the evaluations of kinds of points, each once."""
    known_kinds = set(connection.scalars(select(ASKED.c.kind).where(ASKED.c.kind.in_(sorted(kinds)))))
    rows = [
        {"kind": kind, "evaluation": evaluation, "attack": evaluation.rpartition("-")[0]}
        for kind, evaluations in kinds.items()
        if kind not in known_kinds
        for evaluation in dict.fromkeys(evaluations)
    ]
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
    query = select(*(POINTS.c[name] for name in FIELDS), POINTS.c.kind).order_by(*POINTS.primary_key)
    for row in fetch(connection, query, POINTS.c.cell, cells):
        yield Point(
            **{name: getattr(row, name) for name in FIELDS}, evaluations=tuple(evaluations_by_kind.get(row.kind, ()))
        )
