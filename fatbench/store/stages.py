"""The database: cells, their stages of work, numbers; one transaction a round, numbers appended and never edited.

    with Store.open("results/fatbench.db", create=True) as store:
        store.add_cell(cell, spec)
        run = store.claim(cell, "train", suite="sfat-cifar10", total=100, provenance={"device": "cpu"})
        store.commit(run, numbers=[Number("pgd20", 0.31, round=1)], round=1, checkpoint="state-000001.safetensors")
        store.finish(run)

| noun | meaning |
|---|---|
| cell | an experiment, identified by the hash of its spec |
| stage | a resumable piece of a cell's work: training, or one attack on one saved model |
| run | one attempt at a stage by one process: where, when, with which code; every number names its run |
| number | a row of the public view `measurements` |

A stage's pointer (round, checkpoint, record), its numbers and its outcomes are written in one transaction, so a process
that is killed at any instant loses only what it had not committed, and nothing occurs twice. Only the run that holds a
stage may write to it; a run whose stage was taken over gets `LeaseLost` and has written nothing.

SQLite is the default, PostgreSQL is for several machines. Times are UTC, ISO 8601 with milliseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Protocol, Self, cast

from sqlalchemy import Connection, and_, delete, func, insert, select, update

from fatbench.errors import FatbenchError, printable
from fatbench.store import cell_records, grid_points, leases, replicates
from fatbench.store import numbers as written
from fatbench.store.database import Database, lock, patient
from fatbench.store.rows import LARGEST, batches, cell_row, current_time, dumps, fetch, run_values, split_provenance
from fatbench.store.schema import (
    CELLS,
    DOUBTS,
    NUMBERS,
    OUTCOME_CHUNKS,
    POINTS,
    ROUND_METRICS,
    RUNS,
    SEEN_DATA,
    STAGES,
    SUITE_CELLS,
    VIEW,
)

Status = Literal["todo", "running", "done", "failed", "interrupted"]

# --- what goes in and comes out ----------------------------------------------------------------------------------


class LeaseLost(FatbenchError):
    """Another process holds the stage now, or it has ended. Nothing was written."""

    exit_code = 1


class NumberLike(Protocol):
    """One measurement: what the store needs of `fatbench.engine.rounds.Number`."""

    @property
    def metric(self) -> str:
        """ "pgd20", "train_loss", "weight", ..."""

    @property
    def value(self) -> float:
        """Finite."""

    @property
    def round(self) -> int:
        """Rounds completed when it was measured."""

    @property
    def n(self) -> int:
        """Examples behind it; 0 if it is no mean over examples."""

    @property
    def client(self) -> int:
        """The client's number; -1 if it is not about one client."""


@dataclass(frozen=True)
class StageRow:
    """A stage as it stands in the database."""

    cell: str
    stage: str  # "train", or "<label>-<hash8 of the attack spec and n>@<round>" for an evaluation
    status: Status
    round: int  # train: rounds completed; evaluation: examples done
    total: int
    checkpoint: str | None  # file of the state to resume from, relative to the cell's folder
    record: dict[str, Any]  # small JSON of the stage's own, such as {"best-val": {"round": 7, "value": 0.4}}
    run: int | None  # the last run that claimed it
    error: str | None  # traceback of the last failure
    settings: dict[str, Any] | None  # of the attack, with all defaults, and its implementation; None: training
    heartbeat: float | None  # time of the last progress, seconds since the epoch on the database's clock
    age: float | None = field(default=None, compare=False)  # seconds since then, if it is running
    alive: bool = False  # running under a valid lease, so that no other process can claim it


# --- the store ---------------------------------------------------------------------------------------------------


class Store:
    """The cells, stages and numbers in an open database. Every method is one transaction."""

    def __init__(self, database: Database):
        self.database = database

    @classmethod
    def open(cls, url: str, *, create: bool = False) -> Self:
        """The store in the database at `url`; errors and `create` as for `Database.open`."""
        return cls(Database.open(url, create=create))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database. Nothing is pending: every method is one transaction."""
        self.database.close()

    # --- cells ---------------------------------------------------------------------------------------------------

    def add_cell(self, cell: str, spec: Mapping[str, Any]) -> None:
        """Add a cell; an existing one stays as it is."""
        self.add_cells({cell: spec})

    @patient
    def add_cells(self, specs: Mapping[str, Mapping[str, Any]]) -> None:
        """Add cells, {id: spec}, in one transaction; existing ones stay as they are."""
        with self.database.reading() as connection:
            new_ids = specs.keys() - _known_ids(connection, specs)
        if not new_ids:
            return
        with self.database.writing() as connection:
            lock(connection)
            new_ids -= _known_ids(connection, new_ids)
            if rows := [cell_row(cell, specs[cell], current_time()) for cell in sorted(new_ids)]:
                connection.execute(insert(CELLS), rows)

    @patient
    def cells(self, cells: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
        """{id: spec} of all cells, or of the given ones."""
        query = select(CELLS.c.id, CELLS.c.spec).order_by(CELLS.c.id)
        with self.database.reading() as connection:
            return {row.id: json.loads(row.spec) for row in fetch(connection, query, CELLS.c.id, cells)}

    @patient
    def ids_beginning_with(self, letters: str, maximum: int = 9) -> list[str]:
        """At most `maximum` ids that begin with these letters, in order; replicates only if the letters have a "~"."""
        query = select(CELLS.c.id).where(CELLS.c.id >= letters).order_by(CELLS.c.id)  # matching ids come first
        if replicates.SIGN not in letters:
            query = query.where(~CELLS.c.id.contains(replicates.SIGN))
        with self.database.reading() as connection:
            return [row.id for row in connection.execute(query.limit(maximum)) if row.id.startswith(letters)]

    @patient
    def known_cells(self, cells: Iterable[str]) -> set[str]:
        """The given cells that are in the database."""
        with self.database.reading() as connection:
            return _known_ids(connection, cells)

    @patient
    def has_cells(self) -> bool:
        """Whether the database holds any cell."""
        with self.database.reading() as connection:
            return connection.execute(select(CELLS.c.id).limit(1)).first() is not None

    @patient
    def store_points(self, labelled_points: Iterable[grid_points.Point]) -> None:
        """Store the points of suites' grids at which cells stand, for cells that are in the database."""
        points_wanted = list(labelled_points)
        if not points_wanted:
            return
        with self.database.writing() as connection:
            lock(connection)
            known_ids = _known_ids(connection, {point.cell for point in points_wanted})
            grid_points.write(connection, [point for point in points_wanted if point.cell in known_ids], replace=True)

    @patient
    def mark_current(self, suite: str, preset: str, places: Collection[grid_points.Place]) -> None:
        """Make the points of a suite's preset at these places current in SQL, and its others not."""
        with self.database.writing() as connection:
            lock(connection)
            grid_points.mark_current(connection, suite, preset, places)

    @patient
    def store_doubts(
        self,
        doubts: Mapping[str, Sequence[tuple[str, str, str, float | None]]],
        shown_runs: Mapping[tuple[str, str, str], str],
    ) -> None:
        """Store the doubts about cells, and which of their runs tables show.

        doubts: {cell: [(stage, code, against, value)]}. shown_runs: {(suite, preset, cell): run}.
        """
        columns = ("stage", "code", "against", "value")
        with self.database.writing() as connection:
            lock(connection)
            for cell_batch in batches(doubts):
                connection.execute(delete(DOUBTS).where(DOUBTS.c.cell.in_(cell_batch)))
            if rows := [
                {"cell": cell, **dict(zip(columns, one, strict=True))} for cell in doubts for one in doubts[cell]
            ]:
                connection.execute(insert(DOUBTS), rows)
            for (suite, preset, cell), run in shown_runs.items():
                condition = (POINTS.c.suite == suite) & (POINTS.c.preset == preset) & (POINTS.c.cell == cell)
                connection.execute(update(POINTS).where(condition, POINTS.c.shown != run).values(shown=run))

    # --- data sets -----------------------------------------------------------------------------------------------

    @patient
    def seen_data(self) -> dict[str, str]:
        """{setting of a data set, as canonical JSON: SHA-256 of the images and labels that the newest run read}."""
        with self.database.reading() as connection:
            return {row.data: row.fingerprint for row in connection.execute(select(SEEN_DATA))}

    @patient
    def record_data(self, seen_fingerprints: Mapping[str, str]) -> None:
        """Store what a run has read, in the form of `seen_data`."""
        new_data = dict(seen_fingerprints.items() - self.seen_data().items())
        if not new_data:
            return
        with self.database.writing() as connection:
            lock(connection)
            connection.execute(delete(SEEN_DATA).where(SEEN_DATA.c.data.in_(list(new_data))))
            columns = ({"data": data, "fingerprint": digest} for data, digest in sorted(new_data.items()))
            moment = {"created": current_time()}
            connection.execute(insert(SEEN_DATA), [row | moment for row in columns])

    # --- the life of a stage -------------------------------------------------------------------------------------

    @patient
    def claim(
        self,
        cell: str,
        stage: str,
        *,
        suite: str,
        total: int,
        provenance: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        retry_failed: bool = False,
        fresh: bool = False,
    ) -> int | None:
        """Claim a stage: the id of the new run, or None if the stage is done, failed or held by another process.

        A stage can be claimed if it was never started, was interrupted, failed (with `retry_failed`), or if its run has
        lost it: its process on this machine is gone, or its lease has ended (`fatbench.store.leases`). It resumes from
        its round and checkpoint, also after a failure. With `fresh`, a stage is claimed even if it is done, and starts
        from nothing: its numbers and outcomes are deleted. `total` 0 keeps the total. `settings`: of an evaluation's
        attack. `provenance` fills the columns of `runs` with the same names; the rest is stored as JSON.
        """
        with self.database.writing() as connection:
            # lock the cell's row, because the stage may have no row yet
            if connection.scalar(select(CELLS.c.id).where(CELLS.c.id == cell).with_for_update(key_share=True)) is None:
                raise ValueError(f"unknown cell {cell}: call add_cell first")
            key = (STAGES.c.cell == cell) & (STAGES.c.stage == stage)
            row = connection.execute(
                select(STAGES, RUNS.c.host, RUNS.c.pid, RUNS.c.process, RUNS.c.extra)
                .outerjoin(RUNS)
                .where(key)
                .with_for_update(of=STAGES)
            ).first()
            if row is not None:
                if not fresh and (row.status == "done" or (row.status == "failed" and not retry_failed)):
                    return None
                if row.status == "running":
                    if leases.is_held(row, self._clock(connection)):
                        return None
                    _end_run(connection, row.run, "interrupted", row.heartbeat)
            moment = current_time()
            values = run_values(provenance)
            attempt = {"uid": os.urandom(16).hex(), "cell": cell, "stage": stage, "suite": suite, "started": moment}
            primary_key = connection.execute(
                insert(RUNS).values(status="running", **attempt, **values)
            ).inserted_primary_key
            assert primary_key is not None
            settings_text = None if settings is None else dumps(settings)
            state = {"status": "running", "run": primary_key[0], "error": None, "settings": settings_text}
            state["heartbeat"] = self._beat(connection)
            if row is None:
                start = {"cell": cell, "stage": stage, "round": 0, "total": total, "record": "{}"}
                connection.execute(insert(STAGES).values(**start, **state))
            else:
                connection.execute(update(STAGES).where(key).values(total=total or row.total, **state))
                if fresh:
                    _discard_results(connection, cell, stage, primary_key[0])
            return int(primary_key[0])

    @patient
    def commit(
        self,
        run: int,
        *,
        numbers: Iterable[NumberLike] = (),
        round: int,
        checkpoint: str | None = None,
        record: Mapping[str, Any] | None = None,
        outcomes: tuple[int, int, bytes] | None = None,
    ) -> None:
        """Write a step of a stage in one transaction: its numbers, its outcomes and the point to resume from.

        round: rounds (train) or examples (evaluation) completed, never fewer than before. checkpoint: the file to
        resume from at that round, or None. record: None keeps it. outcomes: (first example, how many, packed bits), the
        next chunk. Raises LeaseLost if the stage is no longer this run's, and ValueError for a value that is not
        finite, a number that exists already, or a chunk that does not fit.
        """
        rows = list(numbers)
        _check_storable(rows)
        with self.database.writing() as connection:
            held = _held_stage(connection, run)
            if round < held.round:
                raise ValueError(f"{held.cell} {held.stage}: round {round} after round {held.round}")
            values: dict[str, Any] = {"round": round, "checkpoint": checkpoint, "heartbeat": self._beat(connection)}
            if record is not None:
                values["record"] = dumps(record)
            _update_stage(connection, held, values)
            _append_numbers(connection, held, run, rows)
            _append_outcomes(connection, held, round, outcomes)

    @patient
    def finish(
        self,
        run: int,
        numbers: Iterable[NumberLike] = (),
        *,
        round: int | None = None,
        record: Mapping[str, Any] | None = None,
        outcomes: tuple[int, int, bytes] | None = None,
    ) -> None:
        """Mark a stage as done, with its last numbers, round, record and outcomes. Raises as `commit` does."""
        rows = list(numbers)
        _check_storable(rows)
        first_round = min((number.round for number in rows), default=None)
        with self.database.reading() as connection:  # hash perhaps millions of numbers while others may write
            held_stage = connection.execute(select(RUNS.c.cell, RUNS.c.stage).where(RUNS.c.id == run)).first()
            partial_digest = None
            if held_stage is not None:
                partial_digest = cell_records.begin_sealing(connection, *held_stage, first_round)
        with self.database.writing() as connection:
            held = _held_stage(connection, run)
            values: dict[str, Any] = {"status": "done", "checkpoint": None, "error": None}
            if round is not None:
                values["round"] = round
            if record is not None:
                values["record"] = dumps(record)
            _update_stage(connection, held, values)
            _append_numbers(connection, held, run, rows)
            _append_outcomes(connection, held, round, outcomes)
            _end_run(connection, run, "done", current_time())
            cell_records.seal(connection, held.cell, held.stage, partial_digest, first_round)

    def fail(self, run: int, error: str) -> None:
        """Mark a run as failed, with its traceback; what was committed stays, and a retry resumes from there.

        If another process has taken the stage over, only the run is marked.
        """
        self._give_up(run, "failed", printable(error))

    def release(self, run: int) -> None:
        """Release a stage after an interruption, so that it can be resumed; without effect if it was taken over."""
        self._give_up(run, "interrupted", None)

    @patient
    def heartbeat(self, run: int) -> None:
        """Renew a run's lease after progress, as a commit does. Raises LeaseLost if the run should stop."""
        with self.database.writing() as connection:
            _update_stage(connection, _held_stage(connection, run), {"heartbeat": self._beat(connection)})

    @patient
    def describe_run(self, run: int, provenance: Mapping[str, Any], *, total: int | None = None) -> None:
        """Add to a run's provenance what was not known when it started, and set the total of its stage."""
        with self.database.writing() as connection:
            held = _held_stage(connection, run)
            columns, other_values = split_provenance(provenance)
            extra = connection.execute(select(RUNS.c.extra).where(RUNS.c.id == run)).scalar_one()
            columns["extra"] = dumps({**json.loads(extra), **other_values})
            connection.execute(update(RUNS).where(RUNS.c.id == run).values(**columns))
            if total is not None:
                _update_stage(connection, held, {"total": total})

    @patient
    def restart(self, run: int) -> None:
        """Restart a stage from nothing, if the checkpoint that its numbers lead up to is lost or damaged.

        Only this and `claim(fresh=True)` delete numbers; these belong to a lost model. Raises LeaseLost as `commit`.
        """
        with self.database.writing() as connection:
            held = _held_stage(connection, run)
            _discard_results(connection, held.cell, held.stage, run)
            _update_stage(connection, held, {"heartbeat": self._beat(connection)})

    @patient
    def reopen(self, cell: str, stage: str) -> None:
        """Let a done stage be claimed again, because its files are lost; whoever claims it calls `restart`."""
        with self.database.writing() as connection:
            key = (STAGES.c.cell == cell) & (STAGES.c.stage == stage) & (STAGES.c.status == "done")
            run = connection.scalar(select(STAGES.c.run).where(key).with_for_update())
            connection.execute(update(STAGES).where(key).values(status="interrupted"))
            connection.execute(update(RUNS).where(RUNS.c.id == run).values(status="interrupted"))

    def _clock(self, connection: Connection) -> float:
        return leases.clock(connection, self.database.path)

    def _beat(self, connection: Connection) -> str:
        return leases.stamp(self._clock(connection))

    @patient
    def _give_up(self, run: int, status: Status, error: str | None) -> None:
        with self.database.writing() as connection:
            moment = current_time()
            condition = (STAGES.c.run == run) & (STAGES.c.status == "running")
            connection.execute(update(STAGES).where(condition).values(status=status, error=error))
            connection.execute(
                update(RUNS)
                .where(RUNS.c.id == run, RUNS.c.status.in_(["running", "interrupted"]))
                .values(status=status, error=error, ended=func.coalesce(RUNS.c.ended, moment))
            )
            run_stage = connection.execute(select(RUNS.c.cell, RUNS.c.stage).where(RUNS.c.id == run)).first()
            # another run may have finished the stage, and this run's end is part of the digest
            if run_stage is not None:
                cell_records.seal(connection, run_stage.cell, run_stage.stage)

    # --- reading -------------------------------------------------------------------------------------------------

    @patient
    def stages(self, cells: Sequence[str] | None = None) -> dict[tuple[str, str], StageRow]:
        """{(cell, stage): its row} of all cells, or of the given ones; equal JSON values are shared objects."""
        query = (
            select(STAGES, RUNS.c.host, RUNS.c.pid, RUNS.c.process, RUNS.c.extra)
            .outerjoin(RUNS, and_(RUNS.c.id == STAGES.c.run, STAGES.c.status == "running"))
            .order_by(STAGES.c.cell, STAGES.c.stage)
        )
        result = {}
        with self.database.reading() as connection:
            time, parse = cache(lambda: self._clock(connection)), cache(json.loads)
            for row in fetch(connection, query, STAGES.c.cell, cells):
                # unpacked in the order of the table: access by name would double the time
                cell, stage, status, round, total, checkpoint, record, settings, run, error, heartbeat, *_ = row
                running, heartbeat_time = status == "running", leases.epoch(heartbeat)
                result[cell, stage] = StageRow(
                    cell, stage, status, round, total, checkpoint, parse(record), run, error,
                    None if settings is None else parse(settings),
                    heartbeat_time, None if heartbeat_time is None or not running else time() - heartbeat_time,
                    running and leases.is_held(row, time()),
                )  # fmt: skip
        return result

    @patient
    def count_trainings(self) -> dict[tuple[str, str | None, str], int]:
        """{(suite, preset, status of the training): number of cells}, "todo" before a training has started.

        The database counts. A cell of several suites counts for each, its replicates for none.
        """
        suite_cells = select(SUITE_CELLS).where(~SUITE_CELLS.c.cell.contains(replicates.SIGN)).subquery()
        train = and_(STAGES.c.cell == suite_cells.c.cell, STAGES.c.stage == "train")
        status = func.coalesce(STAGES.c.status, "todo")
        query = select(suite_cells.c.suite, suite_cells.c.preset, status, func.count()).select_from(
            suite_cells.outerjoin(STAGES, train)
        )
        with self.database.reading() as connection:
            rows = connection.execute(query.group_by(suite_cells.c.suite, suite_cells.c.preset, status))
            return {(suite, preset, state): count for suite, preset, state, count in rows}

    @patient
    def measurements(
        self,
        cells: Sequence[str] | None = None,
        *,
        stages: Sequence[str] | None = None,
        metrics: Sequence[str] | None = None,
    ) -> list[dict[str, Any]]:
        """Rows of the public view, by cell, stage, round, client and metric, of all cells or of the given ones."""
        order = ("cell", "stage", "round", "client", "metric")
        query = select(VIEW).order_by(*(VIEW.c[name] for name in order))
        if stages is not None:
            query = query.where(VIEW.c.stage.in_(list(stages)))
        if metrics is not None:
            query = query.where(VIEW.c.metric.in_(list(metrics)))
        names = [c.name for c in VIEW.c]
        with self.database.reading() as connection:
            return [dict(zip(names, row, strict=True)) for row in fetch(connection, query, VIEW.c.cell, cells)]

    def each_measurement(self, cell: str) -> Iterator[dict[str, Any]]:
        """The rows of `measurements` of a cell, one by one, because there may be millions."""
        order = ("stage", "round", "client", "metric")
        query = select(VIEW).where(VIEW.c.cell == cell).order_by(*(VIEW.c[name] for name in order))
        names = [c.name for c in VIEW.c]
        with self.database.reading() as connection:
            for row in connection.execute(query, execution_options={"yield_per": 10_000}):
                yield dict(zip(names, row, strict=True))

    @patient
    def last_trained(self, cell: str) -> tuple[int, int]:
        """(the last round with numbers of a cell's training, the count of numbers of earlier rounds)."""
        condition = (NUMBERS.c.cell == cell) & (NUMBERS.c.stage == "train")
        with self.database.reading() as connection:
            last_round = connection.scalar(select(func.max(NUMBERS.c.round)).where(condition)) or 0
            earlier_count = select(func.count()).select_from(NUMBERS).where(condition, NUMBERS.c.round < last_round)
            return last_round, connection.scalar(earlier_count) or 0

    @patient
    def outcomes(self, cell: str, stage: str) -> list[tuple[int, int, bytes]]:
        """The chunks of a stage's outcomes in order: (first example, how many, packed bits)."""
        query = select(OUTCOME_CHUNKS.c.start, OUTCOME_CHUNKS.c.n, OUTCOME_CHUNKS.c.bits)
        query = query.where(OUTCOME_CHUNKS.c.cell == cell, OUTCOME_CHUNKS.c.stage == stage)
        with self.database.reading() as connection:
            rows = connection.execute(query.order_by(OUTCOME_CHUNKS.c.start))
            return [(start, n, bytes(bits)) for start, n, bits in rows]

    @patient
    def runs(self, cells: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Every run, oldest first: its columns and the rest of its provenance in one mapping."""
        parsed_texts: dict[str | None, Any] = {None: {}}  # thousands of runs share a few texts

        def parse(text: str | None) -> Any:
            if text not in parsed_texts:
                parsed_texts[text] = json.loads(cast(str, text))
            return parsed_texts[text]

        names = [c.name for c in RUNS.c]
        result = []
        with self.database.reading() as connection:
            for row in fetch(connection, select(RUNS), RUNS.c.cell, cells):
                run = dict(zip(names, row, strict=True))
                del run["process"]
                run["versions"] = dict(parse(run["versions"]))
                result.append({**parse(run.pop("extra")), **run})
        return sorted(result, key=lambda run: run["id"])


# --- pieces of the transactions ----------------------------------------------------------------------------------


def _known_ids(connection: Connection, cells: Iterable[str]) -> set[str]:
    return {row.id for row in fetch(connection, select(CELLS.c.id), CELLS.c.id, cells)}


def _held_stage(connection: Connection, run: int) -> Any:
    """The stage that a run holds, locked. Raises LeaseLost if it does not hold one."""
    query = select(STAGES).where(STAGES.c.run == run, STAGES.c.status == "running").with_for_update()
    held = connection.execute(query).first()
    if held is not None:
        return held
    run_row = connection.execute(select(RUNS.c.cell, RUNS.c.stage, RUNS.c.status).where(RUNS.c.id == run)).first()
    if run_row is None:
        raise ValueError(f"unknown run {run}")
    raise LeaseLost(
        f"{run_row.cell} {run_row.stage}: run {run} ({run_row.status}) no longer owns this stage: another process "
        "took it over, and this run writes nothing more"
    )


def _update_stage(connection: Connection, held: Any, values: Mapping[str, Any]) -> None:
    key = (STAGES.c.cell == held.cell) & (STAGES.c.stage == held.stage)
    connection.execute(update(STAGES).where(key).values(**values))


def _discard_results(connection: Connection, cell: str, stage: str, run: int) -> None:
    """Delete all that a stage holds; earlier runs than `run` are marked as `dropped`, as they have no numbers left."""
    earlier_runs = (RUNS.c.cell == cell) & (RUNS.c.stage == stage) & (RUNS.c.id != run)
    for row in connection.execute(select(RUNS.c.id, RUNS.c.extra).where(earlier_runs)).all():
        extra = dumps({**json.loads(row.extra), "dropped": True})
        connection.execute(update(RUNS).where(RUNS.c.id == row.id).values(extra=extra))
    written.remove(connection, ROUND_METRICS.c.cell == cell, ROUND_METRICS.c.stage == stage)
    for table in (OUTCOME_CHUNKS, DOUBTS):
        connection.execute(delete(table).where((table.c.cell == cell) & (table.c.stage == stage)))
    empty_values = {"round": 0, "checkpoint": None, "record": "{}"}
    connection.execute(update(STAGES).where(STAGES.c.cell == cell, STAGES.c.stage == stage).values(**empty_values))


def _end_run(connection: Connection, run: int | None, status: Status, moment: str | None) -> None:
    connection.execute(update(RUNS).where(RUNS.c.id == run).values(status=status, ended=moment))


def _check_storable(numbers: Sequence[NumberLike]) -> None:
    """Raise ValueError for a number that cannot be stored, or is given twice."""
    given_keys = set()
    for number in numbers:
        if printable(number.metric) != number.metric:
            raise ValueError(f"a metric may have no control character in its name: {number.metric!r}")
        if not abs(number.value) <= LARGEST:
            raise ValueError(f"{number.metric} of round {number.round} is {number.value}: not a finite number")
        key = (number.metric, number.round, number.client)
        if key in given_keys:
            raise ValueError(f"{_number_name(number)} is given twice")
        given_keys.add(key)


def _append_outcomes(
    connection: Connection, held: Any, round: int | None, outcomes: tuple[int, int, bytes] | None
) -> None:
    """Write the next chunk of a stage's outcomes, which leads to `round`. ValueError: it does not fit."""
    if outcomes is None:
        return
    start, n, bits = outcomes
    if start != held.round or start + n != round or n < 1 or len(bits) != (n + 7) // 8:
        raise ValueError(
            f"{held.cell} {held.stage}: {n} outcomes from {start} on in {len(bits)} bytes do not lead"
            f" from {held.round} examples to {round}"
        )
    chunk = {"cell": held.cell, "stage": held.stage, "start": start, "n": n, "bits": bits}
    connection.execute(insert(OUTCOME_CHUNKS), [chunk])


def _append_numbers(connection: Connection, held: Any, run: int, numbers: Sequence[NumberLike]) -> None:
    """Write a stage's numbers. Raises ValueError if one exists already."""
    known_keys = written.known_keys(connection, held.cell, held.stage, {number.round for number in numbers})
    for number in numbers:
        if (number.metric, number.round, number.client) in known_keys:
            raise ValueError(f"{held.cell} {held.stage}: {_number_name(number)} is there already; nothing was written")
    created, groups = current_time(), dict[tuple[str, str, int, str, int, str], list[tuple[int, float, int]]]()
    for number in numbers:
        group = (held.cell, held.stage, number.round, number.metric, run, created)
        groups.setdefault(group, []).append((number.client, number.value, number.n))
    written.append(connection, groups)


def _number_name(number: NumberLike) -> str:
    client = f" of client {number.client}" if number.client >= 0 else ""
    return f"{number.metric}{client} of round {number.round}"
