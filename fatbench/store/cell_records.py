"""Reads documents of cells from the database and writes them to it; seals the stages that a run has finished."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from fatbench.store import grid_points, numbers, replicates
from fatbench.store.document import RUN_COLUMNS, Cell, Run, Sealing, Stage, blocks_of, document
from fatbench.store.rows import batches, cell_row, dumps
from fatbench.store.schema import CELLS, DOUBTS, NUMBERS, OUTCOME_CHUNKS, REPLICATES, ROUND_METRICS, RUNS, STAGES

LOCAL = "sha256"  # key of a record: digests of files that are here alone

# --- reading -----------------------------------------------------------------------------------------------------


def read(
    connection: Connection, ids: Iterable[str], stages: Collection[str] | None = None, with_numbers: bool = True
) -> Iterator[Cell]:
    """The documents of cells and replicates, in the order of their ids; unknown ids are left out.

    stages: only these of each cell. with_numbers: False leaves their numbers and all checks out. Raises ExchangeError
    for an invalid field, and ArithmeticError, LookupError, TypeError or ValueError for what is no JSON or of no run.
    """
    for cells in batches(ids, 100):
        copies = {row.id: row for row in connection.execute(select(REPLICATES).where(REPLICATES.c.id.in_(cells)))}
        grid: dict[str, list[dict[str, Any]]] = {}
        for point in grid_points.points_of_cells(connection, cells):
            fields = {**point._asdict(), "labels": json.loads(point.labels), "evaluations": list(point.evaluations)}
            grid.setdefault(fields.pop("cell"), []).append(fields)
        runs = _by_cell(connection, RUNS, cells, RUNS.c.stage, RUNS.c.started, RUNS.c.uid)
        rows = _by_cell(connection, STAGES, cells, STAGES.c.stage, stages=stages)
        outcomes = _by_cell(connection, OUTCOME_CHUNKS, cells, *OUTCOME_CHUNKS.primary_key, stages=stages)
        for row in connection.execute(select(CELLS).where(CELLS.c.id.in_(cells)).order_by(CELLS.c.id)).all():
            copy, cell_runs = copies.get(row.id), runs.get(row.id, [])
            chunks = {name: list(group) for name, group in groupby(outcomes.get(row.id, []), lambda row: row.stage)}
            position = {run.id: number for number, run in enumerate(cell_runs)}
            place_by_uid = {run.uid: i for i, run in enumerate(cell_runs)}
            blocks = _blocks(connection, row.id, place_by_uid) if with_numbers else {}
            cell_stages = [
                {
                    "stage": stage.stage,
                    "status": "interrupted" if stage.status == "running" else stage.status,  # nowhere else it runs
                    "round": stage.round,
                    "total": stage.total,
                    "record": {key: value for key, value in json.loads(stage.record).items() if key != LOCAL},
                    "settings": None if stage.settings is None else json.loads(stage.settings),
                    "run": position.get(stage.run),
                    "error": stage.error,
                    "digest": stage.digest if stage.status == "done" else None,
                    "numbers": blocks.get(stage.stage, []),
                    "outcomes": [
                        [c.start, c.n, base64.b64encode(c.bits).decode()] for c in chunks.get(stage.stage, [])
                    ],
                }
                for stage in rows.get(row.id, [])
            ]
            value = {
                "cell": row.id if copy is None else copy.cell,
                "replicate": 0 if copy is None else copy.number,
                "points": grid.get(row.id, []),
                "spec": json.loads(row.spec),
                "created": row.created,
                "runs": [
                    {
                        **{name: getattr(run, name) for name in RUN_COLUMNS},
                        "status": "interrupted" if run.status == "running" else run.status,
                        "versions": None if run.versions is None else json.loads(run.versions),
                        "extra": json.loads(run.extra),
                    }
                    for run in cell_runs
                ],
                "stages": cell_stages,
            }
            if with_numbers:
                yield document(value, f"cell {row.id}")
            else:  # what a run has measured is sealed whatever it says of itself
                value["runs"] = [Run.model_construct(**run) for run in value["runs"]]
                value["stages"] = [Stage.model_construct(**stage) for stage in value["stages"]]
                yield Cell.model_construct(**value)


def _by_cell(
    connection: Connection, table: Any, cells: Sequence[str], *order: Any, stages: Collection[str] | None = None
) -> dict[str, list[Any]]:
    query = select(table).where(table.c.cell.in_(cells)).order_by(table.c.cell, *order)
    if stages is not None:
        query = query.where(table.c.stage.in_(list(stages)))
    return {cell: list(group) for cell, group in groupby(connection.execute(query), lambda row: row.cell)}


def _blocks(connection: Connection, cell: str, position: Mapping[str, int]) -> dict[str, list[Any]]:
    """{stage: its numbers in blocks} of a cell; position: {uid of a run: its position in the document}."""
    blocks: dict[str, list[Any]] = {}
    for stage, rows in _rounds(connection, NUMBERS.c.cell == cell):
        blocks.setdefault(stage, []).extend(
            blocks_of([[*row[:3], float(row[3]), row[4], position[row[5]], row[6]] for row in rows])
        )
    return blocks


def _rounds(connection: Connection, condition: Any) -> Iterator[tuple[str, list[list[Any]]]]:
    """(stage, [round, client, metric, value, n, uid of the run, created] of a round) in order, round by round."""
    columns = [NUMBERS.c[name] for name in ("stage", "round", "client", "metric", "value", "n")]
    query = select(*columns, RUNS.c.uid, NUMBERS.c.created).join(RUNS, RUNS.c.id == NUMBERS.c.run).where(condition)
    rows = connection.execute(query.order_by(NUMBERS.c.stage, NUMBERS.c.round), execution_options={"yield_per": 10_000})
    for (stage, _), group in groupby(rows, lambda row: row[:2]):
        yield stage, sorted([*row[1:]] for row in group)


# --- sealing what a run has finished -----------------------------------------------------------------------------


def begin_sealing(connection: Connection, cell: str, stage: str, end: int | None) -> Sealing:
    """The digest that a stage will have once it is done, up to the numbers of rounds before `end`.

    What a run has committed does not change while it holds the stage, so other processes may write meanwhile.
    """
    sealing = Sealing(connection.execute(select(CELLS.c.created).where(CELLS.c.id == cell)).scalar_one())
    condition = (NUMBERS.c.cell == cell) & (NUMBERS.c.stage == stage)
    for _, rows in _rounds(connection, condition if end is None else condition & (NUMBERS.c.round < end)):
        sealing.add(rows)
    return sealing


def seal(
    connection: Connection, cell: str, stage: str, begun: Sealing | None = None, first_round: int | None = 0
) -> None:
    """Store the digest of a stage of a cell, if it is finished.

    begun: with its numbers of rounds before `first_round` (None: all), from `begin_sealing`.
    """
    for read_cell in read(connection, [cell], stages=[stage], with_numbers=False):
        for finished in read_cell.stages:
            if finished.status != "done":
                continue
            sealing = Sealing.of(read_cell, finished)
            if begun is not None:
                sealing.sha256, sealing.has_numbers = begun.sha256, begun.has_numbers
            if first_round is not None:
                condition = (NUMBERS.c.cell == cell) & (NUMBERS.c.stage == stage) & (NUMBERS.c.round >= first_round)
                for _, rows in _rounds(connection, condition):
                    sealing.add(rows)
            connection.execute(update(STAGES).where(_key(STAGES, cell, stage)).values(digest=sealing.hexdigest()))


def _key(table: Any, cell: str, stage: str) -> Any:
    return (table.c.cell == cell) & (table.c.stage == stage)


# --- writing -----------------------------------------------------------------------------------------------------


def add(connection: Connection, cells: Sequence[tuple[str, Cell]]) -> None:
    """Write the documents of cells of which nothing is there, [(id, document)], with few statements."""
    if not cells:
        return
    connection.execute(insert(CELLS), [cell_row(id, cell.spec, cell.created) for id, cell in cells])
    copies = [{"id": id, "cell": cell.cell, "number": _number(id)} for id, cell in cells if id != cell.cell]
    if copies:
        connection.execute(insert(REPLICATES), copies)
    add_points(connection, [cell for _, cell in cells])
    ids = _add_runs(connection, [(id, run) for id, cell in cells for run in cell.runs])
    stages = [
        {"cell": id, "stage": stage.stage, **_stage_values(stage, cell, ids)}
        for id, cell in cells
        for stage in cell.stages
    ]
    if stages:
        connection.execute(insert(STAGES), stages)
    _add_numbers(connection, ((id, cell, stage) for id, cell in cells for stage in cell.stages), ids)
    _add_outcomes(connection, [(id, stage) for id, cell in cells for stage in cell.stages])


def clear(connection: Connection, ids: Sequence[str]) -> dict[str, int]:
    """Delete the stages and runs of cells with their numbers, outcomes and doubts; how many there were of each."""
    counts = {"numbers": numbers.remove(connection, ROUND_METRICS.c.cell.in_(ids))}
    connection.execute(delete(DOUBTS).where(DOUBTS.c.cell.in_(ids)))
    for table in (OUTCOME_CHUNKS, STAGES, RUNS):
        counts[table.name] = connection.execute(delete(table).where(table.c.cell.in_(ids))).rowcount
    return counts


def add_points(connection: Connection, cells: Iterable[Cell]) -> None:
    """Write the points of cells; of a suite's preset that has points of the cell, which are current alone."""
    grid_points.write(connection, [line.of_cell(cell.cell) for cell in cells for line in cell.points], replace=False)


def _number(id: str) -> int:
    return int(id.partition(replicates.SIGN)[2] or 0)


def _stage_values(stage: Stage, cell: Cell, ids: Mapping[str, int]) -> dict[str, Any]:
    """The columns of a stage of which there is no checkpoint here."""
    return {
        "status": stage.status, "round": stage.round, "total": stage.total, "record": dumps(stage.record),
        "run": None if stage.run is None else ids[cell.runs[stage.run].uid], "error": stage.error, "checkpoint": None,
        "settings": None if stage.settings is None else dumps(stage.settings), "digest": stage.digest,
    }  # fmt: skip


def _add_runs(connection: Connection, runs: Sequence[tuple[str, Run]]) -> dict[str, int]:
    """{uid: id} of runs that are added."""
    if not runs:
        return {}
    rows = [
        {
            **{name: getattr(run, name) for name in RUN_COLUMNS},
            "cell": cell,
            "versions": None if run.versions is None else dumps(run.versions),
            "extra": dumps(run.extra),
        }
        for cell, run in runs
    ]
    return {row.uid: row.id for row in connection.execute(insert(RUNS).returning(RUNS.c.uid, RUNS.c.id), rows)}


def _add_numbers(connection: Connection, of_stages: Iterable[tuple[str, Cell, Stage]], ids: Mapping[str, int]) -> None:
    """Add the numbers of (id of the cell, its document, stage), some at a time: there may be millions."""
    groups: dict[tuple[str, str, int, str, int, str], list[tuple[int, float, int]]] = {}
    count = 0
    for id, cell, stage in of_stages:
        for round, metric, clients, values, sizes, run, created in stage.rows.series():
            group = (id, stage.stage, round, metric, ids[cell.runs[run].uid], created)
            groups.setdefault(group, []).extend(zip(clients, values, sizes, strict=True))
            count += len(clients)
            if count > 20_000:
                numbers.append(connection, groups)
                groups, count = {}, 0
    numbers.append(connection, groups)


def _add_outcomes(connection: Connection, stages: Iterable[tuple[str, Stage]]) -> None:
    chunks = [
        {"cell": id, "stage": stage.stage, "start": start, "n": n, "bits": bits}
        for id, stage in stages
        for start, n, bits in stage.chunks
    ]
    if chunks:
        connection.execute(insert(OUTCOME_CHUNKS), chunks)


def replace(connection: Connection, id: str, before: Cell, merged: Cell) -> None:
    """Make the database hold `merged` where it holds `before`; stages that are equal stay as they are."""
    known = {run.uid: run for run in before.runs}
    ids = {row.uid: row.id for row in connection.execute(select(RUNS.c.uid, RUNS.c.id).where(RUNS.c.cell == id))}
    ids |= _add_runs(connection, [(id, run) for run in merged.runs if run.uid not in known])
    for run in merged.runs:
        if run.uid in known and run != known[run.uid]:
            end = {"status": run.status, "ended": run.ended, "error": run.error}
            connection.execute(update(RUNS).where(RUNS.c.uid == run.uid).values(**end))
    for stage in merged.stages:
        ours, key = before.by_stage.get(stage.stage), _key(STAGES, id, stage.stage)
        values = _stage_values(stage, merged, ids)
        if ours is None:
            connection.execute(insert(STAGES).values(cell=id, stage=stage.stage, **values))
        elif _row(before, ours) != _row(merged, stage):
            connection.execute(update(STAGES).where(key).values(**values))
        elif ours.digest != stage.digest:  # its row knows the files that are here
            connection.execute(update(STAGES).where(key).values(digest=stage.digest))
        known_keys = set() if ours is None else {row[:3] for row in ours.rows}
        if known_keys <= {row[:3] for row in stage.rows}:
            rows = [row for row in stage.rows if row[:3] not in known_keys]
        else:  # a doubt is gone
            numbers.remove(connection, _key(ROUND_METRICS, id, stage.stage))
            rows = list(stage.rows)
        _add_numbers(connection, [(id, merged, stage.model_copy(update={"numbers": blocks_of(rows)}))], ids)
        if ours is None or ours.outcomes != stage.outcomes:
            connection.execute(delete(OUTCOME_CHUNKS).where(_key(OUTCOME_CHUNKS, id, stage.stage)))
            _add_outcomes(connection, [(id, stage)])


def _row(cell: Cell, stage: Stage) -> dict[str, Any]:
    """What the row of a stage says, apart from its digest."""
    return dict(stage) | {
        "numbers": [], "outcomes": [], "digest": None, "run": None if stage.run is None else cell.runs[stage.run].uid
    }  # fmt: skip


def stage_rows(connection: Connection, id: str) -> list[Any]:
    """The rows of the stages of a cell, each with its run; whoever writes has locked the cell."""
    query = select(STAGES, RUNS.c.uid, RUNS.c.host, RUNS.c.pid, RUNS.c.process, RUNS.c.extra)
    return list(connection.execute(query.outerjoin(RUNS, RUNS.c.id == STAGES.c.run).where(STAGES.c.cell == id)))
