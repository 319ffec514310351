"""Makes one document of two of the same cell: what the database should hold after an import."""

from __future__ import annotations

from collections.abc import Collection

from fatbench.store.document import Cell, Run, Stage, blocks_of, sealed
from fatbench.store.old_files import UNVERIFIED

CLOCK = ("seconds",)  # what a number tells of the machine: no two runs have the same
Key = tuple[int, int, str]  # round, client, metric
Found = tuple[float, int, str, str]  # value, n, uid of the run, created


def contradiction(here: Cell, there: Cell) -> str | None:
    """In what two documents contradict each other, in words; wall time is no part of it."""
    for theirs in there.stages:
        ours = here.by_stage.get(theirs.stage)
        if ours is None:
            continue
        known = {row[:3]: row[3:5] for row in ours.rows}
        for round, client, metric, value, n, *_ in theirs.rows:
            number = known.get((round, client, metric))
            if number is not None and number != (value, n) and metric not in CLOCK:
                owner = f" of client {client}" if client >= 0 else ""
                return (
                    f"{theirs.stage}: {metric}{owner} of round {round} is {value!r} (n={n}) there and {number[0]!r} "
                    f"(n={number[1]}) here"
                )
        shared = min(len(ours.bits), len(theirs.bits))
        if ours.outcomes != theirs.outcomes and ours.bits[:shared] != theirs.bits[:shared]:
            return f"{theirs.stage}: the outcomes per example differ from those here"
    return None


def merge(here: Cell, there: Cell, held: Collection[str] = (), resumable: Collection[str] = ()) -> Cell:
    """The document of two that do not contradict each other: the further stages, all runs, all points.

    held: uids of runs that work here now. resumable: stages that can go on from where they are here. The same twice
    changes nothing, and where all stages are finished the order of the two does not matter.
    """
    runs = {run.uid: run for run in there.runs}
    runs |= {run.uid: _later(run, runs.get(run.uid), held) for run in here.runs}
    ordered = sorted(runs.values(), key=lambda run: (run.stage, run.started, run.uid))
    position = {run.uid: i for i, run in enumerate(ordered)}
    presets = {(point.suite, point.preset) for point in here.points}
    merged = here.model_copy(
        update={
            "runs": ordered,
            "points": [*here.points, *(point for point in there.points if (point.suite, point.preset) not in presets)],
            "stages": [
                _stage(name, here, there, position, held, resumable)
                for name in sorted(here.by_stage.keys() | there.by_stage.keys())
            ],
        }
    )
    return sealed(merged)


def _later(ours: Run, theirs: Run | None, held: Collection[str]) -> Run:
    """A run with its end, if one side knows it."""
    if theirs is None or ours.ended is not None or theirs.ended is None or ours.uid in held:
        return ours
    return ours.model_copy(update={"status": theirs.status, "ended": theirs.ended, "error": theirs.error})


def _stage(
    name: str, here: Cell, there: Cell, position: dict[str, int], held: Collection[str], resumable: Collection[str]
) -> Stage:
    """A stage of the merged document; position: {uid of a run: its position there}."""
    ours, theirs = here.by_stage.get(name), there.by_stage.get(name)
    numbers = {} if ours is None else _numbers(here, ours)
    chosen, owner = (theirs, there) if ours is None else (ours, here)
    assert chosen is not None
    if ours is None and theirs is not None:
        numbers = _numbers(there, theirs)
    elif ours is not None and theirs is not None:
        both = ours.status == theirs.status == "done"
        if both or is_further(here, ours, theirs, held, resumable):
            numbers = _numbers(there, theirs) | numbers
            chosen, owner = (ours, here) if both else (theirs, there)
            longer = max(ours, theirs, key=lambda stage: len(stage.bits))
            chosen = chosen.model_copy(update={"outcomes": longer.outcomes})
            if both and not all(any(UNVERIFIED in block[3] for block in one.numbers) for one in (ours, theirs)):
                numbers = {key: found for key, found in numbers.items() if key[2] != UNVERIFIED}
    rows = sorted([*key, value, n, position[uid], created] for key, (value, n, uid, created) in numbers.items())
    run = None if chosen.run is None else position[owner.runs[chosen.run].uid]
    return chosen.model_copy(update={"numbers": blocks_of(rows), "run": run})


def _numbers(cell: Cell, stage: Stage) -> dict[Key, Found]:
    return {
        (round, client, metric): (value, n, cell.runs[run].uid, created)
        for round, client, metric, value, n, run, created in stage.rows
    }


def is_further(here: Cell, ours: Stage, theirs: Stage, held: Collection[str], resumable: Collection[str]) -> bool:
    """Whether a stage there should replace what is here: it knows more, and no run could continue from here."""
    if ours.status == "todo":
        return True
    if ours.status == "done" or (ours.run is not None and here.runs[ours.run].uid in held):
        return False
    return theirs.status == "done" or (ours.stage not in resumable and theirs.round > ours.round)
