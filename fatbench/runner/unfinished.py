"""Half-done cells between machines: which they are and what they need, and which of two halves stays.

A half is a cell's rows and the files that its next run reads: the state of its last checkpoint, the models that are
selected so far, what a round keeps for figures. A cell that another begins with, or is attacked with, comes along.

The further half wins as a whole. Only of a cell that both sides have trained to the same model are evaluations of both
kept, each from one side.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from sqlalchemy import Connection, select, update
from sqlalchemy.exc import DataError, IntegrityError

from fatbench.errors import NothingMatched, Unavailable
from fatbench.runner import checkpoints, progress, provenance
from fatbench.runner.checkpoints import DamagedCheckpoint
from fatbench.runner.executors import local
from fatbench.runner.slots import gpu_name
from fatbench.runner.stage import files_of
from fatbench.runner.transfer import last_model
from fatbench.store import cell_records, tar
from fatbench.store.cell_records import LOCAL
from fatbench.store.database import lock
from fatbench.store.document import Cell, ExchangeError, Run, sealed
from fatbench.store.merge import contradiction, merge
from fatbench.store.rows import dumps
from fatbench.store.schema import CELLS, STAGES
from fatbench.store.stages import StageRow, Store
from fatbench.store.tar import Half, Listed
from fatbench.suite import weights
from fatbench.suite.cells import Plan

TRIES = 5  # a run that goes on meanwhile removes the checkpoint before

# --- what is half done --------------------------------------------------------------------------------------------


class HalfDone(NamedTuple):
    """A cell that has begun and is not finished, or one that it needs."""

    cell: str
    label: str
    state: str  # "round 30 of 100"
    bytes: int  # of its files
    running: bool


class Collected(NamedTuple):
    """What a tar of half-done cells would hold."""

    cells: list[HalfDone]
    left: dict[str, str]  # cell -> why it is left out
    content: tar.Content
    folder: Path
    opened: dict[str, BinaryIO]

    def __str__(self) -> str:
        """A line for each cell, and the sum."""
        lines = [
            f"{row.cell}  {row.state}  {row.bytes / 1e6:.1f} MB  {row.label}".rstrip()
            + ("  (a process works on it: as of its last checkpoint)" if row.running else "")
            for row in self.cells
        ]
        lines += [f"{cell} is left out: {reason}" for cell, reason in self.left.items()]
        return "\n".join([*lines, f"{len(self.cells)} half-done, {self.content.size / 1e6:.1f} MB"])

    def write(self, file: Path) -> None:
        """Write the tar. MachineError: it cannot be written, or a run has gone on with one of its cells."""
        tar.write(file, self.content, self.folder, self.opened)


@contextmanager
def collected(
    store: Store, folder: Path, plans: Iterable[Plan], cells: Sequence[str] | None = None
) -> Iterator[Collected]:
    """The half-done cells of plans, or those of them that are named in `cells`. NothingMatched: there is none.

    folder: with the folders of the database's cells. A cell that a process works on is taken as of its last checkpoint.
    """
    begun: dict[str, progress.CellProgress] = {}
    for plan in plans:
        for row in progress.cells_of(plan, store):
            if row.status != "done" and (cells is None or row.cell.id in cells):
                begun.setdefault(row.cell.id, row)
    for attempt in range(1, TRIES + 1):
        with ExitStack() as stack:
            try:
                found = _collect(store, folder, begun, stack, attempt == TRIES)
            except DamagedCheckpoint:
                continue
            if not found.cells:
                reasons = "".join(f"; {cell}: {reason}" for cell, reason in list(found.left.items())[:3])
                raise NothingMatched(f"nothing is half done in {store.database.shown}{reasons}")
            yield found
            return


def _collect(
    store: Store, folder: Path, begun: Mapping[str, progress.CellProgress], stack: ExitStack, last: bool
) -> Collected:
    """Read the rows once, and look at the files that they name. DamagedCheckpoint: a run has removed one meanwhile.

    last: leave such a cell out instead.
    """
    origins = set[str | None]()  # cells whose models these begin with, or are attacked with
    for cell in (row.cell for row in begun.values()):
        origins |= {weights.trained_by(cell.spec), *(one.origin.cell for one in cell.evaluations if one.origin)}
    others = sorted({id for id in origins if id} - begun.keys())
    ids = [*begun, *others]
    with store.database.reading() as connection:
        documents = {cell.cell: cell for cell in cell_records.read(connection, ids) if not cell.replicate}
    rows = store.stages(ids)
    taken, left = list[HalfDone](), dict[str, str]()
    halves, opened = dict[str, Half](), dict[str, BinaryIO]()
    for id in ids:
        train = rows.get((id, "train"))
        if train is None or id not in documents or not (train.round or train.status == "done"):
            continue
        running = any(row.alive for (cell, _), row in rows.items() if cell == id)
        if documents[id].by_stage["train"].round != train.round or (
            documents[id].by_stage["train"].status == "done"
        ) != (train.status == "done"):
            raise DamagedCheckpoint(f"{id} goes on")
        try:
            files = _files(folder / id, _needed(train, id in others), train, opened if running else None, stack)
        except DamagedCheckpoint as error:
            if running and not last:
                raise
            left[id] = str(error)
            continue
        if isinstance(files, str):
            left[id] = files
            continue
        halves[id] = Half(checkpoint=None if train.status == "done" else train.checkpoint, files=files)
        state = f"round {train.round} of {train.total}"
        if id in begun and train.status == "done":
            state = f"trained, {begun[id].stages_done - 1} of {begun[id].stages - 1} evaluations done"
        label = ", ".join(begun[id].cell.key.values()) if id in begun else "another cell needs its model"
        taken.append(HalfDone(id, label, state, sum(one.bytes for one in files.values()), running))
    content = tar.content([documents[id] for id in sorted(halves)], halves)
    return Collected(taken, left, content, folder, opened)


def _needed(train: StageRow, is_origin: bool) -> set[str]:
    """The files that the next run of a cell reads; of an origin, only its last model."""
    if is_origin:
        model = last_model(train.cell, train)
        return {model.file} if model is not None else set()
    if train.status == "done":
        return set(files_of(train.record))
    # the next round replaces the last model, and the state has its tensors
    selected = files_of({name: value for name, value in train.record.items() if name != "last"})
    return {train.checkpoint or "", *selected}


def _files(
    folder: Path, needed: set[str], train: StageRow, opened: dict[str, BinaryIO] | None, stack: ExitStack
) -> dict[str, Listed] | str:
    """{file: size and SHA-256} of a half, or why a run could not go on from it. DamagedCheckpoint: one has changed.

    opened: where files of a running cell are kept open.
    """
    digests: Mapping[str, str] = train.record.get(LOCAL, {})
    if train.status == "done" and not needed & digests.keys():
        return "its models are not here: its results were imported"
    if train.status != "done" and train.checkpoint not in digests:
        return "it has no checkpoint here: a run begins it anew anywhere"
    files = {}
    for name, sha256 in digests.items():
        is_artifact = "/" in name
        if not is_artifact and name not in needed:
            continue
        try:
            checkpoints.check(folder / name, sha256)
        except DamagedCheckpoint:
            if is_artifact:  # a run goes on without it, too
                continue
            raise
        files[name] = Listed(sha256=sha256, bytes=(folder / name).stat().st_size)
        if opened is not None:
            opened[f"{folder.name}/{name}"] = stack.enter_context((folder / name).open("rb"))
    return files


# --- taking in ----------------------------------------------------------------------------------------------------


class TakenIn(NamedTuple):
    """What of a tar was taken in."""

    cells: list[str]  # further there than here
    joined: list[str]  # trained on both sides to the same model: evaluations were joined
    left: dict[str, str]  # cell -> why it was left as it is here
    numbers: int


def take_in(store: Store, folder: Path, parts: tar.Parts) -> TakenIn:
    """Take in the cells of a tar that are further than here, in one transaction. Doing it twice changes nothing.

    folder: with the folders of the database's cells, marked as its own. ExchangeError, and nothing was written: what is
    in it contradicts the database. Unavailable: the disk is full, or a run has gone on meanwhile.
    """
    with store.database.reading() as connection:
        verdicts = _verdicts(connection, store, folder, parts)
    halves = {id: parts.halves[id] for id, verdict in verdicts.items() if verdict.of != "left"}
    files = {f"{id}/{name}": one.bytes for id, half in halves.items() for name, one in half.files.items()}
    if (need := sum(files.values())) > shutil.disk_usage(folder).free:
        raise Unavailable(f"{parts.file}: its files need {need / 1e6:.0f} MB in {folder}, where less is free")
    ending = f".{secrets.token_hex(8)}.part"
    waiting = {name: (folder / name).with_name(f".{Path(name).name}{ending}") for name in files}
    parents = {parent for path in waiting.values() for parent in path.parents if folder in parent.parents}
    made = {parent for parent in parents if not parent.exists()}
    try:
        for path in waiting.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        tar.unpack(parts, waiting)
        numbers = _write(store, folder, parts, verdicts, waiting)
    except (OSError, DataError, IntegrityError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else f"contradicts what is here: {error.orig}"
        raise ExchangeError(f"{parts.file}: {reason}; nothing was imported") from None
    finally:
        for path in waiting.values():
            path.unlink(missing_ok=True)
        for path in made:
            with suppress(OSError):  # it has files now
                path.rmdir()
    for id, verdict in verdicts.items():
        if verdict.of == "taken":
            _sweep(folder / id, parts.halves[id])
    return TakenIn(
        [id for id, verdict in verdicts.items() if verdict.of == "taken"],
        [id for id, verdict in verdicts.items() if verdict.of == "joined"],
        {id: verdict.reason for id, verdict in verdicts.items() if verdict.of == "left"},
        numbers,
    )


class _Verdict(NamedTuple):
    of: Literal["taken", "joined", "left"]
    reason: str = ""


def _verdicts(connection: Connection, store: Store, folder: Path, parts: tar.Parts) -> dict[str, _Verdict]:
    rows = store.stages([*parts.cells])
    known = {cell.cell: cell for cell in cell_records.read(connection, [*parts.cells])}
    verdicts = {}
    for id, there in parts.cells.items():
        of_cell = {stage: row for (cell, stage), row in rows.items() if cell == id}
        verdicts[id] = _verdict(of_cell, known.get(id), there, parts.halves[id], folder / id)
    return verdicts


def _verdict(rows: Mapping[str, StageRow], here: Cell | None, there: Cell, half: Half, folder: Path) -> _Verdict:
    """Which half of a cell stays. rows: its stages here."""
    if here is None:
        return _Verdict("taken")
    if any(row.alive for row in rows.values()):
        return _Verdict("left", "a process works on it here")
    train = rows.get("train")
    ours = 0.0 if train is None else _rounds_to_go_on_from(train, folder)
    theirs = math.inf if half.checkpoint is None else there.by_stage["train"].round
    if ours < theirs:
        return _Verdict("taken")
    if ours > theirs:
        return _Verdict("left", "it is trained here" if ours == math.inf else f"it is at round {ours:.0f} here")
    if train is None or ours < math.inf:
        return _Verdict("left", "it is as far here")
    digests = train.record.get(LOCAL, {})
    models = {name: sha256 for name, sha256 in half.digests.items() if "/" not in name}
    if contradiction(here, there) or any(digests.get(name, sha256) != sha256 for name, sha256 in models.items()):
        return _Verdict("left", "another run has trained it here")
    if merge(here, there) == here and all(name in digests and (folder / name).is_file() for name in half.files):
        return _Verdict("left", "it is as far here")
    return _Verdict("joined")


def _rounds_to_go_on_from(train: StageRow, folder: Path) -> float:
    """The round from which a run would train a cell here; infinite if it is trained."""
    if train.status == "done":
        return math.inf
    digests = {name: sha256 for name, sha256 in train.record.get(LOCAL, {}).items() if "/" not in name}
    try:
        for name, sha256 in digests.items():
            checkpoints.check(folder / name, sha256)
    except DamagedCheckpoint:
        return 0.0
    return train.round if train.checkpoint in digests else 0.0


def _write(
    store: Store, folder: Path, parts: tar.Parts, verdicts: Mapping[str, _Verdict], waiting: Mapping[str, Path]
) -> int:
    """Write rows and give the files their names; how many numbers are new. Unavailable: the verdicts have changed."""
    numbers = 0
    with store.database.writing() as connection:
        lock(connection)
        # the lock that `claim` takes
        connection.execute(select(CELLS.c.id).where(CELLS.c.id.in_(parts.cells)).with_for_update(key_share=True)).all()
        if _verdicts(connection, store, folder, parts) != verdicts:
            raise Unavailable(f"{parts.file}: a run has gone on meanwhile; nothing was imported: import it again")
        for id in (id for id, verdict in verdicts.items() if verdict.of != "left"):
            there, digests = parts.cells[id], parts.halves[id].digests
            here = next(iter(cell_records.read(connection, [id])), None)
            before = 0
            if here is None:
                cell_records.add(connection, [(id, there)])
            elif verdicts[id].of == "taken":
                cell_records.clear(connection, [id])
                whole = sealed(there.model_copy(update={"created": here.created}))
                cell_records.replace(connection, id, here.model_copy(update={"runs": [], "stages": []}), whole)
            else:
                before = _count(here)
                cell_records.replace(connection, id, here, merge(here, there))
                digests = {**digests, **store.stages([id])[id, "train"].record.get(LOCAL, {})}
            cell_records.add_points(connection, [there])
            record = {**there.by_stage["train"].record, LOCAL: digests}
            values = {"checkpoint": parts.halves[id].checkpoint, "record": dumps(record)}
            connection.execute(update(STAGES).where(STAGES.c.cell == id, STAGES.c.stage == "train").values(values))
            numbers += max(0, _count(there) - before)
        for name, path in waiting.items():
            os.replace(path, folder / name)
    return numbers


def _count(cell: Cell) -> int:
    return sum(len(stage.rows) for stage in cell.stages)


def _sweep(folder: Path, half: Half) -> None:
    """Remove the files of the half that was here before."""
    for file in folder.rglob("*.safetensors*"):
        if file.relative_to(folder).as_posix() not in half.files:
            file.unlink(missing_ok=True)


# --- where the rest cannot have the same bytes ----------------------------------------------------------------------


def differences(parts: tar.Parts, cells: Iterable[str]) -> dict[str, list[str]]:
    """{in what this machine differs from the one where cells were trained so far: those cells}, in words."""
    result: dict[str, list[str]] = {}
    devices = [gpu_name(f"cuda:{gpu}") for gpu in range(local.gpu_count())]
    devices.append(f"cpu ({provenance.processor()})")
    code = provenance.code_version()
    for id in cells:
        cell = parts.cells[id]
        train = cell.by_stage["train"]
        if train.status != "done" and train.run is not None:
            for words in _differences(cell.runs[train.run], devices, code):
                result.setdefault(words, []).append(id)
    return result


def _differences(run: Run, devices: Sequence[str | None], code: Mapping[str, object]) -> Iterator[str]:
    if run.device not in devices:
        yield f"on {run.device}, which is not here"
    for package, before in sorted((run.versions or {}).items()):
        if package in ("torch", "numpy"):
            with suppress(PackageNotFoundError):
                if (now := version(package)) != before:
                    yield f"with {package} {before}, here is {now}"
    if (run.dirty or code["dirty"]) and (run.commit, run.extra.get("diff")) != (code["commit"], code.get("diff")):
        yield "by code that is not committed and not here: a run begins it anew"
    elif run.commit and code["commit"] and run.commit != code["commit"]:
        yield f"by commit {run.commit[:8]}, here is {str(code['commit'])[:8]}"
    if reason := run.extra.get("not_reproducible"):
        yield f"not bit for bit: {reason}"
