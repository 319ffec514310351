"""Results as JSON lines, between machines: `export` writes them, `import_` takes them in.

The first line says what the file is; every other line is one cell with its spec, its runs (where, when, with which
code), its stages, their numbers and their outcomes:

    {"cells":2,"format":"fatbench results","schema_version":2}
    {"cell":"0a1b2c...","created":"...","runs":[{...}],"spec":{...},"stages":[{"stage":"train","numbers":[...],...}]}

The numbers of a round are [round, clients, n, {metric: values}, run, created]: a value for each client, -1 for none,
where `n` is one for all or a list too, and `run` is a position in the cell's `runs`. Version 1 had a row for each,
[round, client, metric, value, n, run, created], which is read everywhere. Outcomes are [first example, how many, base64
of the packed bits]. A finished stage has its digest (`fatbench.store.export_lines`). The same results always give the
same bytes. A file may be compressed (`fatbench.packed`).

Models and checkpoints are not in it. So a stage that was under way is imported as interrupted, with its numbers but
nothing to go on from; a stage that is further along here is left as it is. Another run of a cell that is here already
becomes its replicate, and has "replicate": 1, 2, ... in its line. A cell says at which points of which suites it
stands: "points": [{"suite": "sfat-mu", "preset": "quick", "labels": {"mu": "0.1", "method": "FAT"}, ...}].
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import DataError, IntegrityError

from fatbench import packed, whole_file
from fatbench.errors import DatabaseError, MachineError
from fatbench.store import export_lines, export_schema, integrity, leases, number_text, numbers, points, replicates
from fatbench.store.database import lock
from fatbench.store.export_schema import FORMAT, SCHEMA_VERSION, CellLine, ExchangeError, Stage, bits_of
from fatbench.store.rows import batches, cell_row, dumps
from fatbench.store.schema import CELLS, NUMBERS, OUTCOME_CHUNKS, POINTS, REPLICATES, RUNS, STAGES
from fatbench.store.stages import Store

# --- export ------------------------------------------------------------------------------------------------------


def export(
    store: Store, file: str | Path | TextIO, cells: Iterable[str] | None = None, without: Collection[str] = ()
) -> int:
    """Write cells (default: all), with their replicates, to a file or an open text stream; how many lines there were.

    without: metrics whose numbers of clients are left out; digests are then of what is left. A file appears whole or
    not at all. The lines are in the order of the cells' ids; cells that are not in the database are left out.
    MachineError: the file cannot be written. DatabaseError: a stage is damaged.
    """
    with store.database.reading() as connection:
        integrity.check_keys(connection, store.database.shown)
        copies = {row.id: (row.cell, row.number) for row in connection.execute(select(REPLICATES))}
        wanted_cells = None if cells is None else set(cells)
        known_ids = connection.scalars(select(CELLS.c.id))
        exported_ids = sorted(
            id for id in known_ids if wanted_cells is None or copies.get(id, (id,))[0] in wanted_cells
        )
        with nullcontext(file) if hasattr(file, "write") else _new_file(Path(file)) as stream:
            stream.write(dumps({"format": FORMAT, "schema_version": SCHEMA_VERSION, "cells": len(exported_ids)}) + "\n")
            for id_batch in batches(exported_ids, 100):
                for text in lines_of(connection, id_batch, copies, without):
                    stream.write(text)
    return len(exported_ids)


@contextmanager
def _new_file(file: Path) -> Iterator[TextIO]:
    """A stream to a file that takes its name only when all is written."""
    try:
        with whole_file.replacing(file) as handle, packed.text_writer(handle, file.name) as stream:
            yield stream
    except OSError as error:
        raise MachineError(f"cannot write {file}: {error.strerror or error}") from None


def lines_of(
    connection: Connection, cells: Sequence[str], copies: Mapping[str, tuple[str, int]], without: Collection[str] = ()
) -> Iterator[str]:
    """The lines of some cells in order, in pieces: a stage may have millions of numbers.

    DatabaseError: a finished stage is not what it was when it was finished; the line then has no end.
    """
    of_cell: dict[str, list[dict[str, Any]]] = {}
    for point in points.points_of_cells(connection, cells):
        fields = {**point._asdict(), "labels": json.loads(point.labels), "evaluations": list(point.evaluations)}
        if fields["current"]:
            del fields["current"]  # as in files of earlier versions
        of_cell.setdefault(fields.pop("cell"), []).append(fields)
    try:
        for line in export_lines.lines(connection, cells, copies, numbers=False):
            if "replicate" not in line and line["cell"] in of_cell:
                line["points"] = of_cell[line["cell"]]
            yield dumps({key: line[key] for key in line if key < "stages"})[:-1] + ',"stages":['
            for number in range(len(line["stages"])):
                yield "," * (number > 0)
                yield from _stage_text(connection, line, number, without)
            export_schema.check_fields(line)
            line_end = dumps({key: line[key] for key in line if key > "stages"})[1:]
            yield f"]{',' * (len(line_end) > 1)}{line_end}\n"
    except ExchangeError as error:
        raise DatabaseError(f"{error} (fatbench check)") from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # text that is no JSON, a row of no run
        raise DatabaseError(f"cells {cells[0]} to {cells[-1]} cannot be read: {error} (fatbench check)") from None


def _stage_text(
    connection: Connection, line: Mapping[str, Any], number: int, without: Collection[str]
) -> Iterator[str]:
    """The JSON of one of a line's stages in pieces, with its numbers, which the line lacks."""
    stage, id = line["stages"][number], replicates.name(line["cell"], line.get("replicate", 0))
    position = {run["uid"]: i for i, run in enumerate(line["runs"])}
    sealed, digest = export_lines.Digest(line, stage), stage["digest"]
    if without and stage["status"] == "done":
        left = export_lines.Digest(line, stage)
        for of_round in export_lines.rounds(connection, id, stage["stage"]):
            left.add(_without(of_round, without))
        digest = left.hexdigest()
    head, tail = export_lines.split_at_numbers(dumps({**stage, "digest": digest}))
    yield head
    count = 0
    for of_round in export_lines.rounds(connection, id, stage["stage"]):
        sealed.add(of_round)
        rows = [[*of_all, position[uid], created] for *of_all, uid, created in _without(of_round, without)]
        if stage["status"] != "done":  # a digest covers numbers by itself
            export_schema.check_numbers(rows, f"cell {line['cell']}", number, count)
        yield "," * (count > 0 and bool(rows)) + dumps(number_text.blocks(rows))[1:-1]
        count += len(rows)
    if stage["status"] == "done" and sealed.hexdigest() != stage["digest"]:
        problem = "it has changed since it was finished" if stage["digest"] else "it is finished and has no digest"
        raise DatabaseError(f"cell {line['cell']} {stage['stage']} is damaged: {problem}")
    yield tail


def _without(numbers: Sequence[Any], metrics: Collection[str]) -> list[Any]:
    return [number for number in numbers if number[1] < 0 or number[2] not in metrics]


# --- import ------------------------------------------------------------------------------------------------------


BATCH = 100  # cells of a transaction: other processes can write between two of them


class Known(NamedTuple):
    """A line of which the database has every word."""

    sha256: bytes  # of the line
    cell: str
    numbers: int
    runs: tuple[str, ...]


class Checked(NamedTuple):
    """What `check` found: the bad lines by number, those of which there is nothing to take in, and the SHA-256 of the
    other good ones.
    """

    bad: Collection[int]
    known: Mapping[int, Known]
    good: Mapping[int, bytes]


def check(
    store: Store | None,
    file: str | Path,
    *,
    identify: Callable[[Mapping[str, Any]], str] | None = None,
    contradiction: Callable[[Mapping[str, Any]], str | None] | None = None,
    problems: list[str] | None = None,
) -> Checked:
    """Look at every line of a file that `export` wrote and write nothing: which are bad, and which are here already.

    store: the database that will take them in; None: it is not there yet. problems: what is wrong with each bad line is
    added to it; without it the first bad line is an ExchangeError. A file that is none of ours always is, and one that
    cannot be read is a MachineError. Other arguments as for `import_`.
    """
    path, bad_lines, known_lines, valid = Path(file), set[int](), dict[int, Known](), dict[int, bytes]()
    line_by_run: dict[str, int] = {}  # run -> the line it is in
    with read_parts(path) as (promised, numbered):
        count = 0
        for line_batch in numbered:
            with nullcontext() if store is None else store.database.reading() as connection:
                for number, line in line_batch:
                    location = f"{path}:{number}"
                    count += 1
                    try:
                        known_line = None if connection is None else _known_line(connection, line, location)
                        cell = (
                            export_schema.cell(line, location, identify, contradiction) if known_line is None else None
                        )
                        if count > promised:
                            raise ExchangeError(
                                f"{location}: more cells than the {promised} that the first line promises"
                            )
                        for uid in known_line.runs if known_line else [run.uid for run in cell.runs] if cell else ():
                            if line_by_run.setdefault(uid, number) != number:
                                raise ExchangeError(f"{location}: run {uid} is also in line {line_by_run[uid]}")
                        if known_line is not None:
                            known_lines[number] = known_line._replace(runs=())
                        elif connection is not None and cell is not None:
                            _contradiction(connection, cell, location)
                        if known_line is None:
                            valid[number] = _sha256(line)
                    except ExchangeError as error:
                        if problems is None:
                            raise
                        problems.append(str(error).removesuffix(NOTHING))
                        bad_lines.add(number)
        if count < promised:
            truncation = f"{path}: ends after {count} of {promised} cells: it is truncated"
            if problems is None:
                raise ExchangeError(truncation)
            problems.append(truncation)
    return Checked(bad_lines, known_lines, valid)


def import_(
    store: Store,
    file: str | Path,
    *,
    identify: Callable[[Mapping[str, Any]], str] | None = None,
    contradiction: Callable[[Mapping[str, Any]], str | None] | None = None,
    checked: Checked | None = None,
    imported_cells: set[str] | None = None,
) -> dict[str, int]:
    """Take in a file that `export` wrote; counts of what was in it and what was new. Importing twice changes nothing.

    identify: the identity of a spec; a cell whose id is another is refused. contradiction: in what the name of a stage
    contradicts its settings (`fatbench.suite.asked`). checked: what `check` found; without it the file is checked
    first. imported_cells: the ids of the file's cells are added to it. ExchangeError, and nothing written: not such
    a file, damaged, or a number of the same run that is another here. A cell that has other numbers here, of other
    runs, is taken in as a replicate (`fatbench.store.replicates`). MachineError: the file cannot be read.

    BATCH cells are a transaction. Whoever is killed between two of them imports the file again.
    """
    path = Path(file)
    checked = check(store, path, identify=identify, contradiction=contradiction) if checked is None else checked
    count_names = ("cells", "new cells", "new replicates", "new stages", "new numbers", "numbers already here")
    counts = dict.fromkeys(count_names, 0)
    with read_parts(path) as (_, numbered):
        for line_batch in numbered:
            known_lines, cells = [], []
            for number, line in line_batch:
                location, sha256 = f"{path}:{number}", _sha256(line)
                if number in checked.known and checked.known[number].sha256 == sha256:
                    known_lines.append(checked.known[number])
                elif number not in checked.bad:
                    sure = checked.good.get(number) == sha256
                    cells.append((location, export_schema.cell(line, location, identify, checked=sure)))
            location, cells_before = "", counts["cells"]
            try:
                with store.database.writing() as connection:
                    lock(connection)
                    for location, cell in cells:
                        take_in(connection, cell, location, counts, store.database.path)
                        counts["cells"] += 1
                counts["cells"] += len(known_lines)
                counts["numbers already here"] += sum(known_line.numbers for known_line in known_lines)
                if imported_cells is not None:
                    imported_cells |= {cell.cell for _, cell in cells} | {known_line.cell for known_line in known_lines}
            except (UnicodeEncodeError, DataError):
                raise ExchangeError(
                    f"{location}: text that cannot be stored{_already_imported(cells_before)}"
                ) from None
            except IntegrityError as error:
                raise ExchangeError(
                    f"{location}: contradicts what is here: {error.orig}{_already_imported(cells_before)}"
                ) from None
            except ExchangeError as error:  # somebody else wrote in the meantime
                raise ExchangeError(f"{str(error).removesuffix(NOTHING)}{_already_imported(cells_before)}") from None
    return counts


NOTHING = "; nothing was imported"


def _already_imported(cells: int) -> str:
    return f"; {cells} cells before it were imported" if cells else NOTHING


@contextmanager
def read_parts(path: Path) -> Iterator[tuple[int, Iterator[list[tuple[int, str]]]]]:
    """How many cells a file promises, and its further lines with their numbers, BATCH at a time."""
    try:
        with packed.read_text(whole_file.regular(path)) as stream:
            header_line = stream.readline(LINE)
            if not header_line:
                raise ExchangeError(f"{path}: empty; expected a file written by 'fatbench export'")
            yield export_schema.header(header_line, f"{path}:1"), _line_batches(stream, path)
    except UnicodeDecodeError:
        raise ExchangeError(f"{path}: not a text file; expected one written by 'fatbench export'") from None
    except packed.DAMAGED as error:
        raise ExchangeError(f"{path}: damaged: {error}") from None
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror or error}") from None


LINE = 2**30  # characters of a line, which are held
PART = 2**20  # characters that are held at a time, and the line that goes beyond


def _line_batches(stream: TextIO, path: Path) -> Iterator[list[tuple[int, str]]]:
    """The further lines with their numbers, BATCH at a time, or fewer where they are long. ExchangeError: too long."""
    line_batch: list[tuple[int, str]] = []
    characters = 0
    for number, line in enumerate(iter(lambda: stream.readline(LINE), ""), 2):
        if len(line) == LINE and not line.endswith("\n"):
            raise ExchangeError(f"{path}:{number}: a line of more than {LINE} characters is no cell that export wrote")
        line_batch.append((number, line))
        characters += len(line)
        if len(line_batch) == BATCH or characters > PART:
            yield line_batch
            line_batch, characters = [], 0
    if line_batch:
        yield line_batch


_CELL = re.compile(r'\{"cell":"([^"\\]{1,190})"')  # how a line of `export` begins


def _known_line(connection: Connection, text: str, location: str) -> Known | None:
    """A line of which the database has every word; None: it is another, or not as `export` writes it.

    Digests decide: a finished stage whose digest here is that of the line, and of what the line says, is the same.
    """
    begin = _CELL.match(text)
    ids = replicates.ids_here(connection, begin[1]) if begin else []
    finished_here = STAGES.c.cell.in_(ids) & (STAGES.c.status == "done")
    query = select(STAGES.c.cell, STAGES.c.stage, STAGES.c.digest).where(finished_here)
    digests: dict[str, dict[str, str]] = {}
    for id, stage, digest in connection.execute(query) if ids else ():
        if digest and digest in text:
            digests.setdefault(id, {})[stage] = digest
    for id, digest_by_stage in digests.items():
        line = export_schema.parsed(text, location)
        try:
            export_schema.unpack(line, location)
            export_schema.check_fields(line)
            agreements = [digest_by_stage[stage["stage"]] == stage["digest"] for stage in line["stages"]]
            agreements += [run["stage"] in digest_by_stage for run in line["runs"]]
            runs = tuple(run["uid"] for run in line["runs"])
            if not all(agreements) or len(line["stages"]) > len(digest_by_stage) or any(export_lines.mismatches(line)):
                continue
        except (ArithmeticError, ExchangeError, LookupError, TypeError, ValueError):
            return None  # whoever reads all of it says what is wrong
        uids = set(connection.scalars(select(RUNS.c.uid).where(RUNS.c.cell == id)))
        of_cell = select(POINTS.c.suite, POINTS.c.preset, POINTS.c.current).where(POINTS.c.cell == line["cell"])
        stand = {tuple(row) for row in connection.execute(of_cell)}
        points = {(point["suite"], point["preset"], point.get("current", True)) for point in line.get("points", ())}
        if uids.issuperset(runs) and points <= stand:
            numbers = sum(len(stage["numbers"]) for stage in line["stages"])
            return Known(_sha256(text), line["cell"], numbers, runs)
    return None


def _sha256(text: str) -> bytes:
    sha256 = hashlib.sha256()
    for begin in range(0, len(text), PART):
        sha256.update(text[begin : begin + PART].encode())
    return sha256.digest()


def _contradiction(connection: Connection, cell: CellLine, location: str) -> None:
    """ExchangeError: the database says something else."""
    known_ids = replicates.ids_here(connection, cell.cell)
    for uid_batch in batches(run.uid for run in cell.runs):
        foreign = select(RUNS.c.uid, RUNS.c.cell).where(RUNS.c.uid.in_(uid_batch), RUNS.c.cell.not_in(known_ids))
        if row := connection.execute(foreign).first():
            raise ExchangeError(f"{location}: contradicts what is here: run {row.uid} is of cell {row.cell}{NOTHING}")
    id = _id_for(connection, cell, known_ids)
    stages_here = {} if id is None else _stages_here(connection, id)
    for stage in cell.stages:
        _compare(stages_here.get(stage.stage), stage, cell, location)


def is_export(file: str | Path) -> bool:
    """Whether a file is JSON lines rather than a database. MachineError: it cannot be read."""
    try:
        with packed.read(whole_file.regular(Path(file))) as stream:
            return stream.read(1) == b"{"
    except packed.DAMAGED:
        return True  # whoever reads it says so
    except OSError as error:
        raise MachineError(f"cannot read {file}: {error.strerror or error}") from None


def take_in(connection: Connection, cell: CellLine, location: str, counts: dict[str, int], file: Path | None) -> None:
    """Merge one cell into the database, counting what was new."""
    connection.scalar(select(CELLS.c.id).where(CELLS.c.id == cell.cell).with_for_update(key_share=True))  # as `claim`
    known_ids = replicates.ids_here(connection, cell.cell)
    id = _id_for(connection, cell, known_ids)
    if id is None:
        number = 1 + int(known_ids[-1].partition(replicates.SIGN)[2] or 0) if known_ids else 0  # one may be deleted
        id = replicates.name(cell.cell, number)
        connection.execute(insert(CELLS), [cell_row(id, cell.spec, cell.created)])
        if number:
            connection.execute(insert(REPLICATES), [{"id": id, "cell": cell.cell, "number": number}])
        counts["new replicates" if number else "new cells"] += 1
    else:
        _undamaged(connection, id, location)
    of_suites = [point.of_cell(cell.cell) for point in cell.points]
    points.write(connection, of_suites, replace=False)
    cell = cell.model_copy(update={"cell": id})
    stages_here = _stages_here(connection, cell.cell)
    running = [stage.row for stage in stages_here.values() if stage.row.status == "running"]
    time = leases.clock(connection, file) if running else 0.0
    held_runs = {row.run for row in running if leases.is_held(row, time)}
    runs = _take_runs(connection, cell, held_runs)
    for stage in cell.stages:
        stage_here = stages_here.get(stage.stage)
        new_numbers = _compare(stage_here, stage, cell, location)
        counts["numbers already here"] += len(stage.numbers) - len(new_numbers)
        if stage_here is not None and stage_here.row.status == stage.status == "done":
            pass  # the same work; a later version may have measured more of it
        elif knows_more(stage_here, stage, held_runs):
            _take_stage(connection, cell, stage, runs, is_new=stage_here is None)
            counts["new stages"] += 1
        else:
            continue
        for part in number_text.rounds(new_numbers):
            rows = [
                {
                    "cell": cell.cell, "stage": stage.stage, "round": round, "client": client, "metric": metric,
                    "value": value, "n": n, "run": runs[run], "created": created,
                }
                for round, client, metric, value, n, run, created in part
            ]  # fmt: skip
            numbers.append(connection, rows)
            counts["new numbers"] += len(rows)
        chunks = [] if stage_here is None else stage_here.outcomes
        if sum(n for _, n, _ in stage.outcomes) > sum(n for _, n, _ in chunks):
            # the same examples, perhaps cut into other chunks, and more of them
            connection.execute(
                OUTCOME_CHUNKS.delete().where(OUTCOME_CHUNKS.c.cell == cell.cell, OUTCOME_CHUNKS.c.stage == stage.stage)
            )
            rows = [
                {"cell": cell.cell, "stage": stage.stage, "start": start, "n": n, "bits": bits_of(text)}
                for start, n, text in stage.outcomes
            ]
            connection.execute(insert(OUTCOME_CHUNKS), rows)
    export_lines.seal(connection, cell.cell, [stage.stage for stage in cell.stages])


def _undamaged(connection: Connection, cell: str, location: str) -> None:
    """ExchangeError: a finished stage of the cell here is damaged; what is added to it would give it a new digest."""
    for line in export_lines.lines(connection, [cell]):
        for stage, _ in export_lines.mismatches(line):
            raise ExchangeError(f"{location}: cell {cell} {stage['stage']} is damaged here (fatbench check){NOTHING}")


@dataclass
class StageHere:
    """What the database holds of a stage."""

    row: Any
    numbers: dict[tuple[int, int, str], tuple[float, int]]
    outcomes: list[tuple[int, int, bytes]]


def _stages_here(connection: Connection, cell: str) -> dict[str, StageHere]:
    """The stages of a cell here, locked."""
    query = (
        select(STAGES, RUNS.c.host, RUNS.c.pid, RUNS.c.process, RUNS.c.extra)
        .outerjoin(RUNS, RUNS.c.id == STAGES.c.run)
        .where(STAGES.c.cell == cell)
        .with_for_update(of=STAGES)
    )
    stages_by_name = {row.stage: StageHere(row, {}, []) for row in connection.execute(query)}
    for row in connection.execute(select(NUMBERS).where(NUMBERS.c.cell == cell)) if stages_by_name else ():
        stages_by_name[row.stage].numbers[row.round, row.client, row.metric] = (row.value, row.n)
    chunks = select(OUTCOME_CHUNKS).where(OUTCOME_CHUNKS.c.cell == cell).order_by(*OUTCOME_CHUNKS.primary_key)
    for row in connection.execute(chunks) if stages_by_name else ():
        stages_by_name[row.stage].outcomes.append((row.start, row.n, bytes(row.bits)))
    return stages_by_name


CLOCK = ("seconds",)  # what a number tells of the machine: no two runs have the same


def _id_for(connection: Connection, cell: CellLine, known_ids: Sequence[str]) -> str | None:
    """The replicate here that the file's cell is: one that shares a run with it, else one that says the same.

    None: it is another run, for which there is no id yet.
    """
    uids = {run.uid for run in cell.runs}
    for id in known_ids:
        if uids & set(connection.scalars(select(RUNS.c.uid).where(RUNS.c.cell == id))):
            return id
    for id in known_ids:
        stages_here = _stages_here(connection, id)
        if all(
            contradiction(stages_here[stage.stage], stage) is None
            for stage in cell.stages
            if stage.stage in stages_here
        ):
            return id
    return None


def _compare(stage_here: StageHere | None, stage: Stage, cell: CellLine, location: str) -> Any:
    """The numbers of the file's stage that are not here. ExchangeError: one of the same run is another here."""
    if stage_here is None:
        return stage.numbers
    if problem := contradiction(stage_here, stage):
        raise ExchangeError(f"{location}: cell {cell.cell} {stage.stage}: {problem}{NOTHING}")
    return [number for number in stage.numbers if tuple(number[:3]) not in stage_here.numbers]


def contradiction(stage_here: StageHere, stage: Stage) -> str | None:
    """In what the file's stage contradicts the one here; wall time is no part of it."""
    for round, client, metric, value, n, *_ in stage.numbers:
        number_here = stage_here.numbers.get((round, client, metric))
        if number_here is not None and number_here != (value, n) and metric not in CLOCK:
            owner = f" of client {client}" if client >= 0 else ""
            return (
                f"{metric}{owner} of round {round} is {value!r} (n={n}) there and {number_here[0]!r} "
                f"(n={number_here[1]}) here"
            )
    if not agree(stage_here.outcomes, [(start, n, bits_of(text)) for start, n, text in stage.outcomes]):
        return "the outcomes per example differ from those here"
    return None


def _take_stage(connection: Connection, cell: CellLine, stage: Stage, runs: Sequence[int], *, is_new: bool) -> None:
    """The stage's row, as the file has it; there is no checkpoint of it here."""
    values = {
        "status": stage.status, "round": stage.round, "total": stage.total, "record": dumps(stage.record),
        "run": None if stage.run is None else runs[stage.run], "error": stage.error, "checkpoint": None,
        "settings": None if stage.settings is None else dumps(stage.settings),
    }  # fmt: skip
    if is_new:
        connection.execute(insert(STAGES).values(cell=cell.cell, stage=stage.stage, **values))
    else:
        key = (STAGES.c.cell == cell.cell) & (STAGES.c.stage == stage.stage)
        connection.execute(update(STAGES).where(key).values(**values))


def knows_more(stage_here: StageHere | None, stage: Stage, held_runs: set[int]) -> bool:
    """Whether the file's stage should replace what is here: it knows more, and no run could continue from here."""
    if stage_here is None or stage_here.row.status == "todo":
        return True
    if stage_here.row.status == "done" or stage_here.row.run in held_runs:
        return False
    return stage.status == "done" or (stage_here.row.checkpoint is None and stage.round > stage_here.row.round)


def _take_runs(connection: Connection, cell: CellLine, held_runs: set[int]) -> list[int]:
    """The ids here of the file's runs, in its order; new ones are added, ended ones get their end."""
    runs_by_uid = {
        row.uid: row
        for row in connection.execute(select(RUNS.c.uid, RUNS.c.id, RUNS.c.ended).where(RUNS.c.cell == cell.cell))
    }
    ids = []
    for run in cell.runs:
        row = runs_by_uid.get(run.uid)
        if row is None:
            values = run.model_dump(exclude={"extra", "versions"})
            values["versions"] = None if run.versions is None else dumps(run.versions)
            values["extra"] = dumps(run.extra)
            primary_key = connection.execute(insert(RUNS).values(cell=cell.cell, **values)).inserted_primary_key
            assert primary_key is not None
            ids.append(primary_key[0])
            continue
        ids.append(row.id)
        if row.ended is None and run.ended is not None and row.id not in held_runs:
            end = {"status": run.status, "ended": run.ended, "error": run.error}
            connection.execute(update(RUNS).where(RUNS.c.id == row.id).values(**end))
    return ids


def agree(chunks_here: Sequence[tuple[int, int, bytes]], chunks_there: Sequence[tuple[int, int, bytes]]) -> bool:
    """Whether two lists of chunks say the same of the examples that both cover."""
    if chunks_here == chunks_there or not chunks_here or not chunks_there:
        return True
    bits_here, bits_there = (
        "".join(f"{int.from_bytes(bits):0{8 * len(bits)}b}"[:n] for _, n, bits in chunks)
        for chunks in (chunks_here, chunks_there)
    )
    shared = min(len(bits_here), len(bits_there))
    return bits_here[:shared] == bits_there[:shared]
