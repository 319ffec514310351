"""Cells as lines of an export, and the digest that shows whether a finished stage is intact.

The digest is the SHA-256 of the canonical JSON of all that a line says about a stage: its row, its numbers, its
outcomes, its runs, and the cell's spec. It is stored in the database and in exported lines, so a flipped bit in either
is detected.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

from sqlalchemy import Connection, select, update

from fatbench.store import number_text
from fatbench.store.rows import dumps
from fatbench.store.schema import CELLS, NUMBERS, OUTCOME_CHUNKS, RUNS, STAGES

RUN_COLUMNS = ("uid", "stage", "suite", "preset", "status", "started", "ended", "host", "pid", "device", "precision",
               "commit", "dirty", "log", "error")  # fmt: skip


def lines(
    connection: Connection,
    cells: Sequence[str],
    copies: Mapping[str, tuple[str, int]] | None = None,
    stages: Collection[str] | None = None,
    numbers: bool = True,
) -> Iterator[dict[str, Any]]:
    """The lines of some cells as JSON data, in order; a finished stage has the digest stored in the database.

    copies: {replicate: (its cell, its number)}. stages: only these of each cell; None: all. numbers: False leaves them
    out; many numbers of a stage are `StoredNumbers`.
    """

    def by_cell(table: Any, *order: Any) -> dict[str, list[Any]]:
        query = select(table).where(table.c.cell.in_(cells)).order_by(table.c.cell, *order)
        if stages is not None and table is not RUNS:  # a number may name a run of another stage
            query = query.where(table.c.stage.in_(list(stages)))
        return {cell: list(group) for cell, group in groupby(connection.execute(query), lambda row: row.cell)}

    runs = by_cell(RUNS, RUNS.c.stage, RUNS.c.started, RUNS.c.uid)
    rows = by_cell(STAGES, STAGES.c.stage)
    outcomes = by_cell(OUTCOME_CHUNKS, *OUTCOME_CHUNKS.primary_key)
    for cell in connection.execute(select(CELLS).where(CELLS.c.id.in_(cells)).order_by(CELLS.c.id)).all():
        cell_runs = runs.get(cell.id, [])
        position = {run.id: number for number, run in enumerate(cell_runs)}
        by_uid = {run.uid: number for number, run in enumerate(cell_runs)}
        chunks = {stage: list(group) for stage, group in groupby(outcomes.get(cell.id, []), lambda row: row.stage)}
        yield {
            **dict(zip(("cell", "replicate"), (copies or {}).get(cell.id, (cell.id,)), strict=False)),
            "spec": json.loads(cell.spec),
            "created": cell.created,
            "runs": [
                {
                    **{name: getattr(run, name) for name in RUN_COLUMNS},
                    "status": _portable_status(run.status),
                    "versions": None if run.versions is None else json.loads(run.versions),
                    "extra": json.loads(run.extra),
                }
                for run in cell_runs
            ],
            "stages": [
                {
                    "stage": row.stage,
                    "status": _portable_status(row.status),
                    "round": row.round,
                    "total": row.total,
                    "record": {
                        k: v for k, v in json.loads(row.record).items() if k != "sha256"
                    },  # digests of local files
                    "settings": None if row.settings is None else json.loads(row.settings),
                    "run": position.get(row.run),
                    "error": row.error,
                    "digest": row.digest if row.status == "done" else None,
                    "numbers": _numbers(connection, cell.id, row.stage, by_uid) if numbers else [],
                    "outcomes": [[c.start, c.n, base64.b64encode(c.bits).decode()] for c in chunks.get(row.stage, [])],
                }
                for row in rows.get(cell.id, [])
            ],
        }


FEW = 100_000  # numbers of a stage that may be in memory


class StoredNumbers(number_text.Numbers):
    """The numbers of a stage in the database, as in a line, which can be iterated repeatedly."""

    def __init__(self, connection: Connection, cell: str, stage: str, position: Mapping[str, int]):
        """position: {uid of a run: its position in the line}."""
        self.connection, self.cell, self.stage, self.position = connection, cell, stage, position

    def rounds(self) -> Iterator[list[Any]]:
        for numbers in rounds(self.connection, self.cell, self.stage):
            yield [
                [round, client, metric, float(value), n, self.position[uid], created]
                for round, client, metric, value, n, uid, created in numbers
            ]


def _numbers(connection: Connection, cell: str, stage: str, position: Mapping[str, int]) -> list[Any] | StoredNumbers:
    stored = StoredNumbers(connection, cell, stage, position)
    first = list(islice(stored, FEW + 1))
    return first if len(first) <= FEW else stored


def _portable_status(status: str) -> str:
    """A status for another database, where no process runs the stage."""
    return "interrupted" if status == "running" else status


def rounds(
    connection: Connection, cell: str, stage: str, first_round: int = 0, end: int | None = None
) -> Iterator[list[Any]]:
    """The numbers of a stage from round `first_round` to before round `end`: a list for each round, in order.

    Numbers are as in a line, but with the uid of their run.
    """
    columns = [NUMBERS.c[name] for name in ("round", "client", "metric", "value", "n")]
    query = select(*columns, RUNS.c.uid, NUMBERS.c.created).join(RUNS, RUNS.c.id == NUMBERS.c.run)
    condition = (NUMBERS.c.cell == cell) & (NUMBERS.c.stage == stage) & (NUMBERS.c.round >= first_round)
    condition = condition if end is None else condition & (NUMBERS.c.round < end)
    rows = connection.execute(query.where(condition).order_by(NUMBERS.c.round), execution_options={"yield_per": 10_000})
    for _, group in groupby(rows, lambda row: row[0]):
        yield sorted(map(list, group))


class Digest:
    """The digest of a stage whose numbers are added in order, some at a time.

    line, stage: JSON data, whose own numbers are ignored.
    """

    def __init__(self, line: Mapping[str, Any], stage: Mapping[str, Any]):
        runs = line["runs"]
        content = {
            **{key: stage.get(key) for key in ("stage", "status", "round", "total", "record", "settings", "error")},
            "spec": line["spec"],
            "created": line["created"],
            "run": None if stage["run"] is None else runs[stage["run"]]["uid"],
            "runs": sorted((run for run in runs if run["stage"] == stage["stage"]), key=lambda run: str(run["uid"])),
            "numbers": [],
            "outcomes": stage["outcomes"],
        }
        head, self.after = split_at_numbers(dumps(content))
        self.sha256, self.has_numbers = hashlib.sha256(head.encode()), False

    def add(self, numbers: Sequence[Any]) -> None:
        """Add numbers in order, each with the uid of its run."""
        self.sha256.update(f"{',' * (self.has_numbers and bool(numbers))}{dumps(numbers)[1:-1]}".encode())
        self.has_numbers |= bool(numbers)

    def hexdigest(self) -> str:
        """The SHA-256 in hexadecimal; the same on every machine and in every order of the runs."""
        complete = self.sha256.copy()
        complete.update(self.after.encode())
        return str(complete.hexdigest())


def split_at_numbers(text: str) -> tuple[str, str]:
    """Split the canonical JSON of a mapping with an empty list of numbers before and after the list's content.

    The first match is the list: no key before "numbers" has a mapping as its value, and strings escape their quotes.
    """
    key = '"numbers":['
    head, _, tail = text.partition(f"{key}]")
    return head + key, "]" + tail


def digest(line: Mapping[str, Any], stage: Mapping[str, Any]) -> str:
    """The digest of a stage of a line that has its numbers."""
    uids = [run["uid"] for run in line["runs"]]
    stage_digest = Digest(line, stage)
    for numbers in number_text.rounds(stage["numbers"]):
        stage_digest.add(
            sorted(
                [round, client, metric, float(value) + 0.0, n, uids[run], created]
                for round, client, metric, value, n, run, created in numbers
            )
        )
    return stage_digest.hexdigest()


def begin_digest(connection: Connection, cell: str, stage: str, end: int | None) -> Digest:
    """The digest that a stage will have once it is done, up to the numbers of rounds before `end`.

    What a run has committed does not change while it holds the stage, so other processes may write meanwhile.
    """
    created = connection.execute(select(CELLS.c.created).where(CELLS.c.id == cell)).scalar_one()
    unknown: dict[str, Any] = {
        "stage": stage,
        "run": None,
        "outcomes": [],
    }  # the keys that follow the numbers are added later
    stage_digest = Digest({"runs": [], "spec": {}, "created": created}, unknown)
    for numbers in rounds(connection, cell, stage, end=end):
        stage_digest.add(numbers)
    return stage_digest


def seal(
    connection: Connection,
    cell: str,
    stages: Collection[str],
    partial_digest: Digest | None = None,
    first_round: int | None = 0,
) -> None:
    """Store the digests of these stages of a cell, if they are finished.

    partial_digest: of the only stage, with its numbers of rounds before `first_round` (None: all), from `begin_digest`.
    """
    for line in lines(connection, [cell], stages=stages, numbers=False) if stages else ():
        for stage in line["stages"]:
            if stage["status"] == "done":
                stage_digest = Digest(line, stage)
                if partial_digest is not None:
                    stage_digest.sha256, stage_digest.has_numbers = partial_digest.sha256, partial_digest.has_numbers
                for numbers in () if first_round is None else rounds(connection, cell, stage["stage"], first_round):
                    stage_digest.add(numbers)
                key = (STAGES.c.cell == cell) & (STAGES.c.stage == stage["stage"])
                connection.execute(update(STAGES).where(key).values(digest=stage_digest.hexdigest()))


def mismatches(line: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """(stage, its right digest) of finished stages of a line whose digest is missing or wrong."""
    for stage in line["stages"]:
        if stage["status"] == "done" and stage.get("digest") != (computed_digest := digest(line, stage)):
            yield stage, computed_digest
