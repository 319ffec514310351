"""Results as JSON lines, between machines: `export` writes them, `import_` takes them in.

The first line says what the file is; every other line is the document of a cell (`fatbench.store.document`): its spec,
its runs (where, when, with which code), its stages, their numbers and their outcomes:

    {"cells":2,"format":"fatbench results","schema_version":2}
    {"cell":"0a1b2c...","created":"...","runs":[{...}],"spec":{...},"stages":[{"stage":"train","numbers":[...],...}]}

The numbers of a round are [round, clients, n, {metric: values}, run, created]: a value for each client, -1 for none,
where `n` is one for all or a list too, and `run` is a position in the cell's `runs`. Version 1 had a row for each,
[round, client, metric, value, n, run, created], which is read everywhere. Outcomes are [first example, how many, base64
of the packed bits]. The same results always give the same bytes. A file may be compressed (`fatbench.packed`).

Models and checkpoints are not in it. So a stage that was under way is imported as interrupted, with its numbers but
nothing to go on from; a stage that is further along here is left as it is. Another run of a cell that is here already
becomes its replicate, and has "replicate": 1, 2, ... in its line. A cell says at which points of which suites it
stands: "points": [{"suite": "sfat-mu", "preset": "quick", "labels": {"mu": "0.1", "method": "FAT"}, ...}].
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

from sqlalchemy import Connection, select
from sqlalchemy.exc import DataError, IntegrityError

from fatbench import packed, whole_file
from fatbench.errors import DatabaseError, MachineError
from fatbench.store import cell_records, document, integrity, leases, old_files, replicates
from fatbench.store.database import lock
from fatbench.store.document import FORMAT, LINE, SCHEMA_VERSION, Cell, ExchangeError, as_line, digest, sealed
from fatbench.store.merge import contradiction as contradiction_between
from fatbench.store.merge import merge
from fatbench.store.problems import Contradiction, Identify, misfits, problems
from fatbench.store.rows import batches, dumps, fetch
from fatbench.store.schema import CELLS, POINTS, REPLICATES, RUNS, STAGES
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
        copies = {row.id: row.cell for row in connection.execute(select(REPLICATES))}
        wanted = None if cells is None else set(cells)
        ids = sorted(
            id for id in connection.scalars(select(CELLS.c.id)) if wanted is None or copies.get(id, id) in wanted
        )
        with nullcontext(file) if hasattr(file, "write") else _new_file(Path(file)) as stream:
            try:
                for line in lines(cell_records.read(connection, ids), len(ids), without):
                    stream.write(line)
            except ExchangeError as error:
                raise DatabaseError(f"{error} (fatbench check)") from None
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # no JSON, a row of no run
                raise DatabaseError(f"{store.database.shown} cannot be read: {error} (fatbench check)") from None
    return len(ids)


def lines(cells: Iterable[Cell], count: int, without: Collection[str] = ()) -> Iterator[str]:
    """The lines of a file of `count` cells. DatabaseError: a finished stage is damaged."""
    yield dumps({"format": FORMAT, "schema_version": SCHEMA_VERSION, "cells": count}) + "\n"
    for cell in cells:
        yield _exported(cell, without)


@contextmanager
def _new_file(file: Path) -> Iterator[TextIO]:
    """A stream to a file that takes its name only when all is written."""
    try:
        with whole_file.replacing(file) as handle, packed.text_writer(handle, file.name) as stream:
            yield stream
    except OSError as error:
        raise MachineError(f"cannot write {file}: {error.strerror or error}") from None


def _exported(cell: Cell, without: Collection[str]) -> str:
    """The line of a cell. DatabaseError: a finished stage is not what it was when it was finished."""
    for stage in cell.stages:
        if stage.status == "done" and stage.digest != digest(cell, stage):
            problem = "it has changed since it was finished" if stage.digest else "it is finished and has no digest"
            raise DatabaseError(f"cell {cell.cell} {stage.stage} is damaged: {problem} (fatbench check)")
    if without:
        stages = []
        for stage in cell.stages:
            kept = (row for of_round in stage.rows.rounds() for row in of_round if row[1] < 0 or row[2] not in without)
            stages.append(stage.model_copy(update={"numbers": document.blocks_of(kept)}))
        cell = sealed(cell.model_copy(update={"stages": stages}))
    line = as_line(cell)
    if len(line) > LINE:
        advice = "leave out numbers of clients with --without METRIC"
        raise DatabaseError(f"cell {cell.cell} has {len(line)} characters, import takes {LINE}: {advice}")
    return line


# --- import ------------------------------------------------------------------------------------------------------


BATCH = 100  # cells of a transaction: other processes can write between two of them
PART = 2**20  # characters that are held at a time, and the line that goes beyond


class Checked(NamedTuple):
    """What `check` found in a file."""

    bad: Collection[int]  # numbers of lines
    cells: Collection[str]  # ids in the good lines
    known: Sequence[int]  # for each line of which the database has every word, how many numbers it has
    new: int  # lines that there is something to take in of


def check(
    store: Store | None,
    file: str | Path,
    *,
    identify: Identify | None = None,
    contradiction: Contradiction | None = None,
    problems: list[str] | None = None,
    target: BinaryIO | None = None,
) -> Checked:
    """Look at every line of a file that `export` wrote and write nothing: which are bad, and which are here already.

    store: the database that will take them in; None: it is not there yet. problems: what is wrong with each bad line is
    added to it; without it the first bad line is an ExchangeError. target: a stream that `take` reads the documents
    from, so that what is taken in is what was checked. A file that is none of ours always is an error, and one that
    cannot be read is a MachineError. Other arguments as for `import_`.
    """
    path, bad, ids, known, new = Path(file), set[int](), set[str](), list[int](), 0
    line_by_run: dict[str, int] = {}  # run -> the line it is in
    with read_parts(path) as (promised, version, numbered):
        count = 0
        for lines in numbered:
            read = [(number, _read(line, version, f"{path}:{number}", identify)) for number, line in lines]
            good = list[tuple[str, Cell]]()
            with nullcontext() if store is None else store.database.reading() as connection:
                here = _here(connection, [cell for _, cell in read if isinstance(cell, Cell)])
                for number, cell in read:
                    location = f"{path}:{number}"
                    count += 1
                    try:
                        if isinstance(cell, ExchangeError):
                            raise cell
                        if not (is_here := _is_here(cell, here)):
                            refuse(cell, location, identify, contradiction)
                        if count > promised:
                            raise ExchangeError(
                                f"{location}: more cells than the {promised} that the first line promises"
                            )
                        for run in cell.runs:
                            if line_by_run.setdefault(run.uid, number) != number:
                                raise ExchangeError(f"{location}: run {run.uid} is also in line {line_by_run[run.uid]}")
                        is_related = cell.cell in here.ids or any(run.uid in here.runs for run in cell.runs)
                        if not is_here and is_related and connection is not None and store is not None:
                            place = _place(connection, cell, location, store.database.path)
                            is_here = place is not None and place.merged == place.before and _points_stand(cell, here)
                        ids.add(cell.cell)
                        if is_here:
                            known.append(sum(len(stage.rows) for stage in cell.stages))
                        else:
                            good.append((location, cell))
                    except ExchangeError as error:
                        if problems is None:
                            raise
                        problems.append(str(error).removesuffix(NOTHING))
                        bad.add(number)
            new += len(good)
            if target is not None and good:
                pickle.dump(good, target)
        if count < promised:
            truncation = f"{path}: ends after {count} of {promised} cells: it is truncated"
            if problems is None:
                raise ExchangeError(truncation)
            problems.append(truncation)
    return Checked(bad, ids, known, new)


def import_(
    store: Store, file: str | Path, *, identify: Identify | None = None, contradiction: Contradiction | None = None
) -> dict[str, int]:
    """Take in a file that `export` wrote; counts of what was in it and what was new. Importing twice changes nothing.

    identify: the identity of a spec; a cell whose id is another is refused. contradiction: in what the name of a stage
    contradicts its settings (`fatbench.suite.asked`). ExchangeError, and nothing written: not such a file, damaged, or
    a number of the same run that is another here. A cell that has other numbers here, of other runs, is taken in as a
    replicate (`fatbench.store.replicates`). MachineError: the file cannot be read.
    """
    with tempfile.TemporaryFile() as documents:
        checked = check(store, file, identify=identify, contradiction=contradiction, target=documents)
        documents.seek(0)
        return take(store, checked, documents)


def take(store: Store, checked: Checked, documents: BinaryIO) -> dict[str, int]:
    """Take in the documents of a file that was checked; counts as of `import_`.

    BATCH cells are a transaction. Whoever is killed between two of them imports the file again.
    """
    names = ("cells", "new cells", "new replicates", "new stages", "new numbers", "numbers already here")
    counts = dict.fromkeys(names, 0) | {"cells": len(checked.known), "numbers already here": sum(checked.known)}
    taken = 0
    while taken < checked.new:
        cells: list[tuple[str, Cell]] = pickle.load(documents)
        suffix = f"; {taken} cells before it were imported" if taken else NOTHING
        try:
            with store.database.writing() as connection:
                lock(connection)
                take_in(connection, cells, counts, store.database.path)
        except (UnicodeEncodeError, DataError):
            raise ExchangeError(f"{cells[0][0]} or below: text that cannot be stored{suffix}") from None
        except IntegrityError as error:
            raise ExchangeError(f"{cells[0][0]} or below: contradicts what is here: {error.orig}{suffix}") from None
        except ExchangeError as error:  # somebody else wrote in the meantime
            raise ExchangeError(f"{str(error).removesuffix(NOTHING)}{suffix}") from None
        taken += len(cells)
        counts["cells"] += len(cells)
    return counts


NOTHING = "; nothing was imported"


@contextmanager
def read_parts(path: Path) -> Iterator[tuple[int, int, Iterator[list[tuple[int, str]]]]]:
    """(cells that a file promises, version of its form, its further lines with their numbers, BATCH at a time)."""
    try:
        with packed.read_text(whole_file.regular(path)) as stream:
            header_line = stream.readline(LINE)
            if not header_line:
                raise ExchangeError(f"{path}: empty; expected a file written by 'fatbench export'")
            yield *document.header(header_line, f"{path}:1"), _line_batches(stream, path)
    except UnicodeDecodeError:
        raise ExchangeError(f"{path}: not a text file; expected one written by 'fatbench export'") from None
    except packed.DAMAGED as error:
        raise ExchangeError(f"{path}: damaged: {error}") from None
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror or error}") from None


def _line_batches(stream: TextIO, path: Path) -> Iterator[list[tuple[int, str]]]:
    """The further lines with their numbers, BATCH at a time, or fewer where they are long. ExchangeError: too long."""
    lines: list[tuple[int, str]] = []
    characters = 0
    for number, line in enumerate(iter(lambda: stream.readline(LINE + 1), ""), 2):
        if len(line) > LINE:
            raise ExchangeError(f"{path}:{number}: a line of more than {LINE} characters is no cell that export wrote")
        lines.append((number, line))
        characters += len(line)
        if len(lines) == BATCH or characters > PART:
            yield lines
            lines, characters = [], 0
    if lines:
        yield lines


def cell_of(
    line: str, version: int, location: str, identify: Identify | None = None, contradiction: Contradiction | None = None
) -> Cell:
    """A line as a document in today's names. ExchangeError: it is none, or has problems; the message has its place."""
    cell = translated(line, version, location, identify)
    refuse(cell, location, identify, contradiction)
    return cell


def translated(line: str, version: int, location: str, identify: Identify | None = None) -> Cell:
    """A line as a document in today's names, which may have problems. ExchangeError: it is none."""
    cell = document.document(document.parsed(line, location), location)
    if old_files.is_old(line, version):
        for stage, problem in misfits(cell):
            raise _refusal(location, cell, stage, problem)
        for old in cell.stages:
            if old.digest is not None and old.status == "done" and old.digest != digest(cell, old):
                raise _refusal(
                    location, cell, old.stage, "its digest does not match its numbers or outcomes: was it edited?"
                )
        try:
            cell = old_files.translated(cell, version, identify, location)
        except ValueError as error:
            raise ExchangeError(f"{location}: cell {cell.cell}: {document.shorten(str(error))}") from None
    return cell


def _read(line: str, version: int, location: str, identify: Identify | None) -> Cell | ExchangeError:
    try:
        return translated(line, version, location, identify)
    except ExchangeError as error:
        return error


def refuse(
    cell: Cell, location: str, identify: Identify | None = None, contradiction: Contradiction | None = None
) -> None:
    """Raise an ExchangeError with the place of a document that has problems."""
    for stage, problem in problems(cell, identify, contradiction):
        raise _refusal(location, cell, stage, problem)


def _refusal(location: str, cell: Cell, stage: str, problem: str) -> ExchangeError:
    return ExchangeError(f"{location}: cell {cell.cell}{' ' * bool(stage)}{stage}: {problem}")


def is_export(file: str | Path) -> bool:
    """Whether a file is JSON lines rather than a database. MachineError: it cannot be read."""
    try:
        with packed.read(whole_file.regular(Path(file))) as stream:
            return stream.read(1) == b"{"
    except packed.DAMAGED:
        return True  # whoever reads it says so
    except OSError as error:
        raise MachineError(f"cannot read {file}: {error.strerror or error}") from None


# --- merging with the database -----------------------------------------------------------------------------------


class Place(NamedTuple):
    """The cell or replicate here that a document belongs to, before and after."""

    id: str
    before: Cell
    merged: Cell


def _place(connection: Connection, cell: Cell, location: str, file: Path | None) -> Place | None:
    """Where a document belongs: to what shares a run with it, else to what says the same; None: nothing here does.

    file: the SQLite file; None for PostgreSQL.

    ExchangeError: a number of the same run is another here, a run is of another cell, or what is here is damaged.
    """
    ids = replicates.ids_here(connection, cell.cell)
    for uids in batches(run.uid for run in cell.runs):
        foreign = select(RUNS.c.uid, RUNS.c.cell).where(RUNS.c.uid.in_(uids), RUNS.c.cell.not_in(ids))
        if row := connection.execute(foreign).first():
            raise ExchangeError(f"{location}: contradicts what is here: run {row.uid} is of cell {row.cell}{NOTHING}")
    uids_there = {run.uid for run in cell.runs}
    here = {replicates.name(known.cell, known.replicate): known for known in cell_records.read(connection, ids)}
    same = [id for id in ids if uids_there & {run.uid for run in here[id].runs}]
    if same and (problem := contradiction_between(here[same[0]], cell)):
        raise ExchangeError(f"{location}: cell {cell.cell} {problem}{NOTHING}")
    id = next(iter(same), None) or next((id for id in ids if contradiction_between(here[id], cell) is None), None)
    if id is None:
        return None
    before = here[id]
    for stage in before.stages:
        if stage.status == "done" and stage.digest != digest(before, stage):
            raise ExchangeError(f"{location}: cell {id} {stage.stage} is damaged here (fatbench check){NOTHING}")
    rows = cell_records.stage_rows(connection, id)
    running = [row for row in rows if row.status == "running"]
    time = leases.clock(connection, file) if running else 0.0
    held = {row.uid for row in running if leases.is_held(row, time)}
    resumable = {row.stage for row in rows if row.checkpoint is not None}
    return Place(id, before, merge(before, cell, held, resumable))


class Here(NamedTuple):
    """What the database has of the cells and runs of some documents."""

    ids: Mapping[str, Sequence[str]]  # of a cell and its replicates
    digests: Mapping[str, Mapping[str, str | None]]  # id -> finished stage -> its digest
    runs: Collection[str]  # uids
    points: Collection[tuple[str, str, str, bool]]  # cell, suite, preset, whether it is current


def _here(connection: Connection | None, cells: Sequence[Cell]) -> Here:
    ids: dict[str, list[str]] = {}
    digests: dict[str, dict[str, str | None]] = {}
    if connection is None:
        return Here(ids, digests, (), ())
    names = {cell.cell for cell in cells}
    for row in fetch(connection, select(CELLS.c.id), CELLS.c.id, names):
        ids[row.id] = [row.id]
    for row in fetch(connection, select(REPLICATES), REPLICATES.c.cell, names):
        ids.setdefault(row.cell, []).append(row.id)
    done = select(STAGES.c.cell, STAGES.c.stage, STAGES.c.digest).where(STAGES.c.status == "done")
    for row in fetch(connection, done, STAGES.c.cell, (id for of_cell in ids.values() for id in of_cell)):
        digests.setdefault(row.cell, {})[row.stage] = row.digest
    uids = (run.uid for cell in cells for run in cell.runs)
    runs = {row.uid for row in fetch(connection, select(RUNS.c.uid), RUNS.c.uid, uids)}
    points = select(POINTS.c.cell, POINTS.c.suite, POINTS.c.preset, POINTS.c.current)
    return Here(ids, digests, runs, {(*row,) for row in fetch(connection, points, POINTS.c.cell, ids)})


def _is_here(cell: Cell, here: Here) -> bool:
    """Whether every word of a document is here: finished stages of equal digests are equal, and so are their runs."""
    done = {stage.stage: stage.digest for stage in cell.stages if stage.status == "done"}
    return (
        bool(done)
        and len(done) == len(cell.stages)
        and all(run.stage in done for run in cell.runs)
        and any(done.items() <= here.digests.get(id, {}).items() for id in here.ids.get(cell.cell, ()))
        and _points_stand(cell, here)
        and not any(misfits(cell))
        and all(stage.digest == digest(cell, stage) for stage in cell.stages)
    )


def _points_stand(cell: Cell, here: Here) -> bool:
    """Whether the database says of all points of a cell whether they are current, as the file does."""
    return all((cell.cell, line.suite, line.preset, line.current) in here.points for line in cell.points)


def take_in(
    connection: Connection, cells: Sequence[tuple[str, Cell]], counts: dict[str, int], file: Path | None
) -> None:
    """Merge cells, [(place in the file, document)], into the database, counting what was new."""
    names = {cell.cell for _, cell in cells}
    # the lock that `claim` takes
    locked = select(CELLS.c.id).where(CELLS.c.id.in_(names)).with_for_update(key_share=True)
    known, new = set(connection.scalars(locked)), dict[str, tuple[str, Cell]]()
    for location, cell in cells:
        if cell.cell not in known:
            new[cell.cell] = cell.cell, cell.model_copy(update={"replicate": 0})
            known.add(cell.cell)
            counts["new cells"] += 1
            counts["new stages"] += len(cell.stages)
            counts["new numbers"] += sum(len(stage.rows) for stage in cell.stages)
            continue
        if cell.cell in new:
            cell_records.add(connection, [*new.values()])
            new.clear()
        place = _place(connection, cell, location, file)
        if place is None:
            ids = replicates.ids_here(connection, cell.cell)
            number = 1 + int(ids[-1].partition(replicates.SIGN)[2] or 0)  # one may be deleted
            cell_records.add(connection, [(replicates.name(cell.cell, number), cell)])
            counts["new replicates"] += 1
            counts["new stages"] += len(cell.stages)
            counts["new numbers"] += sum(len(stage.rows) for stage in cell.stages)
            continue
        if place.merged != place.before:
            cell_records.replace(connection, place.id, place.before, place.merged)
        cell_records.add_points(connection, [cell])  # what comes last is current
        for stage in cell.stages:
            ours, merged = place.before.by_stage.get(stage.stage), place.merged.by_stage[stage.stage]
            known_keys = set() if ours is None else {row[:3] for row in ours.rows}
            counts["new stages"] += ours is None or (ours.status, ours.round) != (merged.status, merged.round)
            counts["numbers already here"] += sum(row[:3] in known_keys for row in stage.rows)
            counts["new numbers"] += max(0, len(merged.rows) - len(known_keys))
    cell_records.add(connection, [*new.values()])
