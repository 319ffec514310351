"""Results as JSON lines, between machines: `export` writes them, `import_` takes them in.

The first line says what the file is; every other line is one cell with its spec, its runs (where, when, with which
code), its stages, their numbers and their outcomes:

    {"cells":2,"format":"fatbench results","schema_version":1}
    {"cell":"0a1b2c...","created":"...","runs":[{...}],"spec":{...},"stages":[{"stage":"train","numbers":[...],...}]}

A number is [round, client, metric, value, n, run, created], where `run` is a position in the cell's `runs`; outcomes
are [first example, how many, base64 of the packed bits]. The same results always give the same bytes.

Models and checkpoints are not in it. So a stage that was under way is imported as interrupted, with its numbers but
nothing to go on from; a stage that is further along here is left as it is. Another run of a cell that is here already
becomes its replicate, and has "replicate": 1, 2, ... in its line.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import DataError, IntegrityError

from fatbench.errors import FatbenchError, MachineError, UnknownName
from fatbench.store import leases, replicates
from fatbench.store.database import lock
from fatbench.store.rows import batches, cell_row, dumps
from fatbench.store.schema import CELLS, NUMBERS, OUTCOMES, REPLICATES, RUNS, STAGES
from fatbench.store.stages import Status, Store

FORMAT = "fatbench results"
SCHEMA_VERSION = 1


class ExchangeError(FatbenchError):
    """A file that cannot be taken in; nothing of it was."""


# --- what a line holds -------------------------------------------------------------------------------------------

Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")]
Name = Annotated[str, Field(min_length=1, max_length=190)]
Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
# strict about what is in them, but JSON knows lists only
NumberLine = Annotated[tuple[Natural, Integer, Name, FiniteFloat, Natural, Natural, Time], Field(strict=False)]
Chunk = Annotated[tuple[Natural, Annotated[Natural, Field(ge=1)], str], Field(strict=False)]


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Header(_Line):
    format: Literal["fatbench results"]
    schema_version: int
    cells: Natural


class _Run(_Line):
    uid: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    stage: Name
    suite: str
    preset: str | None
    status: Status
    started: Time
    ended: Time | None
    host: str | None
    pid: Integer | None
    device: str | None
    precision: str | None
    commit: str | None
    dirty: bool | None
    versions: dict[str, Any] | None
    log: str | None
    error: str | None
    extra: dict[str, Any]


class _Stage(_Line):
    stage: Name
    status: Status
    round: Natural
    total: Natural
    record: dict[str, Any]
    settings: dict[str, Any] | None = None  # of the attack of an evaluation
    run: Natural | None
    error: str | None
    numbers: list[NumberLine]
    outcomes: list[Chunk]


class _Cell(_Line):
    cell: Name
    replicate: Natural = 0
    spec: dict[str, Any]
    created: Time
    runs: list[_Run]
    stages: list[_Stage]


RUN_COLUMNS = [name for name in _Run.model_fields if name not in ("versions", "extra")]

# --- export ------------------------------------------------------------------------------------------------------


def export(store: Store, file: str | Path | TextIO, cells: Iterable[str] | None = None) -> int:
    """Write cells (default: all), with their replicates, to a file or an open text stream; how many lines there were.

    A file appears whole or not at all. The lines are in the order of the cells' ids; cells that are not in the
    database are left out. MachineError: the file cannot be written.
    """
    with store.database.reading() as connection:
        copies = {row.id: (row.cell, row.number) for row in connection.execute(select(REPLICATES))}
        wanted = None if cells is None else set(cells)
        known = connection.scalars(select(CELLS.c.id))
        chosen = sorted(id for id in known if wanted is None or copies.get(id, (id,))[0] in wanted)
        with nullcontext(file) if hasattr(file, "write") else _whole(Path(file)) as stream:
            stream.write(dumps({"format": FORMAT, "schema_version": SCHEMA_VERSION, "cells": len(chosen)}) + "\n")
            for part in batches(chosen, 100):
                for line in _lines(connection, part, copies):
                    stream.write(line + "\n")
    return len(chosen)


@contextmanager
def _whole(file: Path) -> Iterator[TextIO]:
    """A stream to a file that takes its name only when all is written."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("x", encoding="utf-8", newline="\n") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(f"cannot write {file}: {error.strerror or error}") from None


def _lines(connection: Connection, cells: Sequence[str], copies: Mapping[str, tuple[str, int]]) -> Iterator[str]:
    """The lines of some cells, in order. copies: replicate -> (its cell, its number)."""
    runs = _by_cell(connection, select(RUNS).order_by(RUNS.c.cell, RUNS.c.stage, RUNS.c.started, RUNS.c.uid), cells)
    stages = _by_cell(connection, select(STAGES).order_by(STAGES.c.cell, STAGES.c.stage), cells)
    numbers = _by_cell(connection, select(NUMBERS).order_by(*NUMBERS.primary_key), cells)
    outcomes = _by_cell(connection, select(OUTCOMES).order_by(*OUTCOMES.primary_key), cells)
    for cell in connection.execute(select(CELLS).where(CELLS.c.id.in_(cells)).order_by(CELLS.c.id)):
        mine = runs.get(cell.id, [])
        position = {run.id: place for place, run in enumerate(mine)}
        measured = {stage: list(rows) for stage, rows in groupby(numbers.get(cell.id, []), lambda row: row.stage)}
        chunks = {stage: list(rows) for stage, rows in groupby(outcomes.get(cell.id, []), lambda row: row.stage)}
        yield dumps(
            {
                **dict(zip(("cell", "replicate"), copies.get(cell.id, (cell.id,)), strict=False)),
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
                        "numbers": [
                            [m.round, m.client, m.metric, m.value, m.n, position[m.run], m.created]
                            for m in measured.get(row.stage, [])
                        ],
                        "outcomes": [
                            [c.start, c.n, base64.b64encode(c.bits).decode()] for c in chunks.get(row.stage, [])
                        ],
                    }
                    for row in stages.get(cell.id, [])
                ],
            }
        )


def _rest(status: str) -> str:
    """What a status means elsewhere: nobody there runs it."""
    return "interrupted" if status == "running" else status


def _by_cell(connection: Connection, query: Any, cells: Sequence[str]) -> dict[str, list[Any]]:
    """The rows of a query on one table, cell -> its rows in the query's order."""
    table = query.get_final_froms()[0]
    rows = connection.execute(query.where(table.c.cell.in_(cells)))
    return {cell: list(group) for cell, group in groupby(rows, lambda row: row.cell)}


# --- import ------------------------------------------------------------------------------------------------------


def import_(
    store: Store, file: str | Path, *, identify: Callable[[Mapping[str, Any]], str] | None = None
) -> dict[str, int]:
    """Take in a file that `export` wrote; counts of what was in it and what was new. Importing twice changes nothing.

    identify: the identity of a spec; a cell whose id is another is refused. ExchangeError, and nothing written: not
    such a file, damaged, or a number of the same run that is another here. A cell that has other numbers here, of other
    runs, is taken in as a replicate (`fatbench.store.replicates`). MachineError: the file cannot be read.
    """
    path = Path(file)
    what = ("cells", "new cells", "new replicates", "new stages", "new numbers", "numbers already here")
    counts = dict.fromkeys(what, 0)
    at = str(path)
    try:
        with path.open(encoding="utf-8") as stream, store.database.writing() as connection:
            lock(connection)
            promised = None
            for place, line in enumerate(stream, 1):
                at = f"{path}:{place}"
                if promised is None:
                    promised = _header(line, at)
                    continue
                cell = _read(_CELL, line, at)
                if counts["cells"] == promised:
                    raise ExchangeError(f"{at}: more than the {promised} cells that the first line promises")
                _check(cell, at, identify)
                _take(connection, cell, at, counts, store.database.path)
                counts["cells"] += 1
            if promised is None:
                raise ExchangeError(f"{path}: empty; expected a file written by 'fatbench export'")
            if counts["cells"] < promised:
                raise ExchangeError(f"{path}: ends after {counts['cells']} of {promised} cells: it was cut off")
    except UnicodeDecodeError:
        raise ExchangeError(f"{path}: not a text file; expected one written by 'fatbench export'") from None
    except (UnicodeEncodeError, DataError):
        raise ExchangeError(f"{at}: text that cannot be stored (a NUL, or half of a surrogate pair)") from None
    except IntegrityError as error:
        raise ExchangeError(f"{at}: contradicts what is here: {error.orig}") from None
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror or error}") from None
    return counts


def is_export(file: str | Path) -> bool:
    """Whether a file is JSON lines rather than a database. MachineError: it cannot be read."""
    try:
        with Path(file).open("rb") as stream:
            return stream.read(1) == b"{"
    except OSError as error:
        raise MachineError(f"cannot read {file}: {error.strerror or error}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _read(form: TypeAdapter[Any], line: str, at: str) -> Any:
    """One line as what it should be. ExchangeError says where it is not."""
    try:
        value = json.loads(line, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        cut = "" if line.endswith("\n") else "; the file was cut off here"
        reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise ExchangeError(f"{at}: not JSON ({reason}){cut}") from None
    except (ValueError, RecursionError) as error:
        raise ExchangeError(f"{at}: {error}") from None
    if not isinstance(value, dict):
        raise ExchangeError(f"{at}: expected a JSON object, got a {type(value).__name__}")
    try:
        return form.validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ExchangeError(f"{at}: {where + ': ' if where else ''}{problem['msg']}") from None


_HEADER, _CELL = TypeAdapter(_Header), TypeAdapter(_Cell)


def _header(line: str, at: str) -> int:
    """How many cells the file promises."""
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ExchangeError(f"{at}: not a file written by 'fatbench export'")
    if value.get("schema_version") != SCHEMA_VERSION:
        raise ExchangeError(
            f"{at}: written by another fatbench (schema_version {value.get('schema_version')};"
            f" this one reads {SCHEMA_VERSION})"
        )
    return int(_read(_HEADER, line, at).cells)


def _check(cell: _Cell, at: str, identify: Callable[[Mapping[str, Any]], str] | None) -> None:
    """Refuse a line that contradicts itself."""
    if identify is not None:
        try:
            identity = identify(cell.spec)
        except (FatbenchError, KeyError, TypeError, ValueError) as error:
            raise ExchangeError(f"{at}: cell {cell.cell}: {error}{_brought(cell, error)}") from None
        if identity != cell.cell:
            raise ExchangeError(f"{at}: cell {cell.cell}: its spec is that of {identity}; was the file edited?")
    _distinct([run.uid for run in cell.runs], "run", cell, at)
    _distinct([stage.stage for stage in cell.stages], "stage", cell, at)
    for stage in cell.stages:
        for run in [number[5] for number in stage.numbers] + ([] if stage.run is None else [stage.run]):
            if run >= len(cell.runs):
                raise ExchangeError(f"{at}: cell {cell.cell} {stage.stage}: there is no run {run}")
        _distinct([number[:3] for number in stage.numbers], "number", cell, at)
        position = 0
        for start, n, text in stage.outcomes:
            try:
                length = len(_bits(text))
            except ValueError as error:
                raise ExchangeError(f"{at}: cell {cell.cell} {stage.stage}: outcomes: {error}") from None
            if start != position or length != (n + 7) // 8:
                raise ExchangeError(f"{at}: cell {cell.cell} {stage.stage}: the outcomes from {start} on do not fit")
            position += n


def _brought(cell: _Cell, error: Exception) -> str:
    """The plug-in that a cell's runs had a name from that is unknown here, for the message."""
    records = (record for run in cell.runs for record in run.extra.get("plugins", ()))
    names = {
        f"{record['plugin']} (sha256 {record['sha256'][:12]})"
        for record in records
        if isinstance(error, UnknownName) and error.entry in record["names"]
    }
    return f"; its runs have it from the plug-in {' and '.join(sorted(names))}: give it with --plugin" if names else ""


def _distinct(keys: Sequence[Any], what: str, cell: _Cell, at: str) -> None:
    seen = set()
    for key in keys:
        if key in seen:
            raise ExchangeError(f"{at}: cell {cell.cell}: {what} {key} is there twice")
        seen.add(key)


def _bits(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _take(connection: Connection, cell: _Cell, at: str, counts: dict[str, int], file: Path | None) -> None:
    """Merge one cell into the database, counting what was new."""
    connection.scalar(select(CELLS.c.id).where(CELLS.c.id == cell.cell).with_for_update(key_share=True))  # as `claim`
    known = replicates.here(connection, cell.cell)
    place = _place(connection, cell, known)
    if place is None:
        number = len(known)
        place = replicates.name(cell.cell, number)
        connection.execute(insert(CELLS), [cell_row(place, cell.spec, cell.created)])
        if number:
            connection.execute(insert(REPLICATES), [{"id": place, "cell": cell.cell, "number": number}])
        counts["new replicates" if number else "new cells"] += 1
    cell = cell.model_copy(update={"cell": place})
    here = _here(connection, cell.cell)
    running = [stage.row for stage in here.values() if stage.row.status == "running"]
    time = leases.clock(connection, file) if running else 0.0
    held = {row.run for row in running if leases.held(row, time)}
    runs = _take_runs(connection, cell, held)
    for stage in cell.stages:
        mine = here.get(stage.stage)
        new = _compare(mine, stage, cell, at)
        counts["numbers already here"] += len(stage.numbers) - len(new)
        if mine is not None and mine.row.status == stage.status == "done":
            pass  # the same work; a later version may have measured more of it
        elif _further(mine, stage, held):
            _take_stage(connection, cell, stage, runs, new=mine is None)
            counts["new stages"] += 1
        else:
            continue
        if new:
            rows = [
                {
                    "cell": cell.cell, "stage": stage.stage, "round": round, "client": client, "metric": metric,
                    "value": value + 0.0, "n": n, "run": runs[run], "created": created,
                }
                for round, client, metric, value, n, run, created in new
            ]  # fmt: skip
            connection.execute(insert(NUMBERS), rows)
            counts["new numbers"] += len(rows)
        chunks = [] if mine is None else mine.outcomes
        if sum(n for _, n, _ in stage.outcomes) > sum(n for _, n, _ in chunks):
            # the same examples, perhaps cut into other chunks, and more of them
            connection.execute(OUTCOMES.delete().where(OUTCOMES.c.cell == cell.cell, OUTCOMES.c.stage == stage.stage))
            rows = [
                {"cell": cell.cell, "stage": stage.stage, "start": start, "n": n, "bits": _bits(text)}
                for start, n, text in stage.outcomes
            ]
            connection.execute(insert(OUTCOMES), rows)


@dataclass
class _Here:
    """What the database holds of a stage."""

    row: Any
    numbers: dict[tuple[int, int, str], tuple[float, int]] = field(default_factory=dict)
    outcomes: list[tuple[int, int, bytes]] = field(default_factory=list)


def _here(connection: Connection, cell: str) -> dict[str, _Here]:
    """The stages of a cell here, locked."""
    query = (
        select(STAGES, RUNS.c.host, RUNS.c.pid, RUNS.c.process, RUNS.c.extra)
        .outerjoin(RUNS, RUNS.c.id == STAGES.c.run)
        .where(STAGES.c.cell == cell)
        .with_for_update(of=STAGES)
    )
    here = {row.stage: _Here(row) for row in connection.execute(query)}
    for row in connection.execute(select(NUMBERS).where(NUMBERS.c.cell == cell)) if here else ():
        here[row.stage].numbers[row.round, row.client, row.metric] = (row.value, row.n)
    chunks = select(OUTCOMES).where(OUTCOMES.c.cell == cell).order_by(*OUTCOMES.primary_key)
    for row in connection.execute(chunks) if here else ():
        here[row.stage].outcomes.append((row.start, row.n, bytes(row.bits)))
    return here


CLOCK = ("seconds",)  # what a number tells of the machine: no two runs have the same


def _place(connection: Connection, cell: _Cell, known: Sequence[str]) -> str | None:
    """The replicate here that the file's cell is: one that shares a run with it, else one that says the same.

    None: it is another run, for which there is no place yet.
    """
    uids = {run.uid for run in cell.runs}
    for id in known:
        if uids & set(connection.scalars(select(RUNS.c.uid).where(RUNS.c.cell == id))):
            return id
    for id in known:
        here = _here(connection, id)
        if all(_differs(here[stage.stage], stage) is None for stage in cell.stages if stage.stage in here):
            return id
    return None


def _compare(mine: _Here | None, stage: _Stage, cell: _Cell, at: str) -> list[Any]:
    """The numbers of the file's stage that are not here. ExchangeError: one of the same run is another here."""
    if mine is None:
        return stage.numbers
    if problem := _differs(mine, stage):
        raise ExchangeError(f"{at}: cell {cell.cell} {stage.stage}: {problem}; nothing was imported")
    return [number for number in stage.numbers if tuple(number[:3]) not in mine.numbers]


def _differs(mine: _Here, stage: _Stage) -> str | None:
    """In what the file's stage contradicts the one here; wall time is no part of it."""
    for round, client, metric, value, n, *_ in stage.numbers:
        found = mine.numbers.get((round, client, metric))
        if found is not None and found != (value, n) and metric not in CLOCK:
            who = f" of client {client}" if client >= 0 else ""
            return f"{metric}{who} of round {round} is {value!r} (n={n}) there and {found[0]!r} (n={found[1]}) here"
    if not _agree(mine.outcomes, [(start, n, _bits(text)) for start, n, text in stage.outcomes]):
        return "the outcomes per example differ from those here"
    return None


def _take_stage(connection: Connection, cell: _Cell, stage: _Stage, runs: Sequence[int], *, new: bool) -> None:
    """The stage's row, as the file has it; there is no checkpoint of it here."""
    values = {
        "status": stage.status, "round": stage.round, "total": stage.total, "record": dumps(stage.record),
        "run": None if stage.run is None else runs[stage.run], "error": stage.error, "checkpoint": None,
        "settings": None if stage.settings is None else dumps(stage.settings),
    }  # fmt: skip
    if new:
        connection.execute(insert(STAGES).values(cell=cell.cell, stage=stage.stage, **values))
    else:
        key = (STAGES.c.cell == cell.cell) & (STAGES.c.stage == stage.stage)
        connection.execute(update(STAGES).where(key).values(**values))


def _further(mine: _Here | None, stage: _Stage, held: set[int]) -> bool:
    """Whether the file's stage should replace what is here: it knows more, and nobody could go on from here."""
    if mine is None or mine.row.status == "todo":
        return True
    if mine.row.status == "done" or mine.row.run in held:
        return False
    return stage.status == "done" or (mine.row.checkpoint is None and stage.round > mine.row.round)


def _take_runs(connection: Connection, cell: _Cell, held: set[int]) -> list[int]:
    """The ids here of the file's runs, in its order; new ones are added, ended ones get their end."""
    here = {
        row.uid: row
        for row in connection.execute(select(RUNS.c.uid, RUNS.c.id, RUNS.c.ended).where(RUNS.c.cell == cell.cell))
    }
    ids = []
    for run in cell.runs:
        row = here.get(run.uid)
        if row is None:
            values = run.model_dump()
            values["versions"] = None if run.versions is None else dumps(run.versions)
            values["extra"] = dumps(run.extra)
            added = connection.execute(insert(RUNS).values(cell=cell.cell, **values)).inserted_primary_key
            assert added is not None
            ids.append(added[0])
            continue
        ids.append(row.id)
        if row.ended is None and run.ended is not None and row.id not in held:
            end = {"status": run.status, "ended": run.ended, "error": run.error}
            connection.execute(update(RUNS).where(RUNS.c.id == row.id).values(**end))
    return ids


def _agree(mine: Sequence[tuple[int, int, bytes]], theirs: Sequence[tuple[int, int, bytes]]) -> bool:
    """Whether two lists of chunks say the same of the examples that both cover."""
    if mine == theirs or not mine or not theirs:
        return True
    first, second = (
        "".join(f"{int.from_bytes(bits):0{8 * len(bits)}b}"[:n] for _, n, bits in chunks) for chunks in (mine, theirs)
    )
    shared = min(len(first), len(second))
    return first[:shared] == second[:shared]
