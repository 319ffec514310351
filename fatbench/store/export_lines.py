"""Cells as lines of an export, and the digest by which every finished stage is known to be whole.

The digest is the SHA-256 of the canonical JSON of all that a line says of a stage: its row, its numbers, its outcomes,
its runs, and the cell's spec. It stands in the database and in exported lines, so a bit that flips in either is seen.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, select, update

from fatbench.store.rows import dumps
from fatbench.store.schema import CELLS, NUMBERS, OUTCOME_CHUNKS, RUNS, STAGES

RUN_COLUMNS = ("uid", "stage", "suite", "preset", "status", "started", "ended", "host", "pid", "device", "precision",
               "commit", "dirty", "log", "error")  # fmt: skip


def lines(
    connection: Connection,
    cells: Sequence[str],
    copies: Mapping[str, tuple[str, int]] | None = None,
    stages: Collection[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """The lines of some cells as JSON data, in order; a finished stage has the digest that the database holds of it.

    copies: replicate -> (its cell, its number). stages: only these of each cell; None: all.
    """

    def by_cell(table: Any, *order: Any) -> dict[str, list[Any]]:
        query = select(table).where(table.c.cell.in_(cells)).order_by(table.c.cell, *order)
        if stages is not None and table is not RUNS:  # a number may name a run of another stage
            query = query.where(table.c.stage.in_(list(stages)))
        return {cell: list(group) for cell, group in groupby(connection.execute(query), lambda row: row.cell)}

    runs = by_cell(RUNS, RUNS.c.stage, RUNS.c.started, RUNS.c.uid)
    rows = by_cell(STAGES, STAGES.c.stage)
    numbers = by_cell(NUMBERS, *(NUMBERS.c[name] for name in ("stage", "round", "client", "metric")))
    outcomes = by_cell(OUTCOME_CHUNKS, *OUTCOME_CHUNKS.primary_key)
    for cell in connection.execute(select(CELLS).where(CELLS.c.id.in_(cells)).order_by(CELLS.c.id)):
        mine = runs.get(cell.id, [])
        position = {run.id: number for number, run in enumerate(mine)}
        measured = {stage: list(group) for stage, group in groupby(numbers.get(cell.id, []), lambda row: row.stage)}
        chunks = {stage: list(group) for stage, group in groupby(outcomes.get(cell.id, []), lambda row: row.stage)}
        yield {
            **dict(zip(("cell", "replicate"), (copies or {}).get(cell.id, (cell.id,)), strict=False)),
            "spec": json.loads(cell.spec),
            "created": cell.created,
            "runs": [
                {
                    **{name: getattr(run, name) for name in RUN_COLUMNS},
                    "status": _rest(run.status),
                    "versions": None if run.versions is None else json.loads(run.versions),
                    "extra": json.loads(run.extra),
                }
                for run in mine
            ],
            "stages": [
                {
                    "stage": row.stage,
                    "status": _rest(row.status),
                    "round": row.round,
                    "total": row.total,
                    "record": {k: v for k, v in json.loads(row.record).items() if k != "sha256"},  # of files here
                    "settings": None if row.settings is None else json.loads(row.settings),
                    "run": position.get(row.run),
                    "error": row.error,
                    "digest": row.digest if row.status == "done" else None,
                    "numbers": [
                        [m.round, m.client, m.metric, float(m.value), m.n, position[m.run], m.created]
                        for m in measured.get(row.stage, [])
                    ],
                    "outcomes": [[c.start, c.n, base64.b64encode(c.bits).decode()] for c in chunks.get(row.stage, [])],
                }
                for row in rows.get(cell.id, [])
            ],
        }


def _rest(status: str) -> str:
    """A status as another database may take it: no process there runs the stage."""
    return "interrupted" if status == "running" else status


def digest(line: Mapping[str, Any], stage: Mapping[str, Any]) -> str:
    """The SHA-256 of a stage of a line, in hexadecimal; the same on every machine and in every order of the runs."""
    runs = line["runs"]
    said = {
        **{key: stage.get(key) for key in ("stage", "status", "round", "total", "record", "settings", "error")},
        "spec": line["spec"],
        "created": line["created"],
        "run": None if stage["run"] is None else runs[stage["run"]]["uid"],
        "runs": sorted((run for run in runs if run["stage"] == stage["stage"]), key=lambda run: str(run["uid"])),
        "numbers": sorted(
            [round, client, metric, float(value) + 0.0, n, runs[run]["uid"], created]
            for round, client, metric, value, n, run, created in stage["numbers"]
        ),
        "outcomes": stage["outcomes"],
    }
    return hashlib.sha256(dumps(said).encode()).hexdigest()


def seal(connection: Connection, cell: str, stages: Collection[str]) -> None:
    """Store the digests of those of these stages of a cell that are finished."""
    for line in lines(connection, [cell], stages=stages) if stages else ():
        for stage in line["stages"]:
            if stage["status"] == "done":
                key = (STAGES.c.cell == cell) & (STAGES.c.stage == stage["stage"])
                connection.execute(update(STAGES).where(key).values(digest=digest(line, stage)))


def mismatches(line: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The finished stages of a line that have no digest, or another than this, which is theirs as they are."""
    for stage in line["stages"]:
        if stage["status"] == "done" and stage.get("digest") != (own := digest(line, stage)):
            yield stage, own
