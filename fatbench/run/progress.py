"""How far cells are: from the stages in the database and what a suite asks for. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select

from fatbench.run.worker import Job, evaluation_rounds
from fatbench.store import replicates
from fatbench.store.schema import RUNS
from fatbench.store.stages import StageRow, Store
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.files import Suite

STATES = ("done", "failed", "running", "todo")


@dataclass(frozen=True)
class Row:
    """One cell of a plan: its state, and what is known of its training."""

    cell: Cell
    status: str  # done, failed, running, todo (an interrupted cell is one to do)
    round: int
    total: int
    stages_done: int
    stages: int
    error: str


def of(plan: Plan, store: Store | None) -> list[Row]:
    """The state of each cell of a plan."""
    cells = plan.unique()
    jobs = {
        cell.id: Job(cell.id, cell.spec, list(cell.evaluations), plan.checkpoints, plan.suite, plan.preset)
        for cell in cells
    }
    rows = {} if store is None else _by_cell(store.stages(list(jobs)))
    result = []
    for cell in cells:
        mine = rows.get(cell.id, {})
        train = mine.get("train")
        status, done, wanted = _state(jobs[cell.id], mine)
        error = next((row.error for row in mine.values() if row.status == "failed" and row.error), "") or ""
        result.append(
            Row(cell, status, train.round if train else 0, int(cell.spec["protocol"]["rounds"]), done, wanted,
                error.strip().splitlines()[-1] if error.strip() else "")
        )  # fmt: skip
    return result


def of_jobs(jobs: Sequence[Job], store: Store) -> dict[str, str]:
    """The state of each job's cell."""
    rows = _by_cell(store.stages([job.cell for job in jobs]))
    return {job.cell: _state(job, rows.get(job.cell, {}))[0] for job in jobs}


def _by_cell(stages: Mapping[tuple[str, str], StageRow]) -> dict[str, dict[str, StageRow]]:
    rows: dict[str, dict[str, StageRow]] = {}
    for (cell, stage), row in stages.items():
        rows.setdefault(cell, {})[stage] = row
    return rows


def _state(job: Job, rows: Mapping[str, StageRow]) -> tuple[str, int, int]:
    """(state, stages done, stages asked for) of one cell."""
    wanted = ["train"]
    train = rows.get("train")
    if train is not None and train.status == "done":
        wanted += [e.stage(r) for r in evaluation_rounds(job, train.record) for e in job.evaluations]
    else:
        wanted += [e.id for e in job.evaluations]  # which rounds is not known yet
    found = (rows.get(stage) for stage in wanted)
    states = ["todo" if row is None or (row.status == "running" and not row.alive) else row.status for row in found]
    done = states.count("done")
    for state in ("running", "failed"):
        if state in states:
            return state, done, len(wanted)
    return ("done" if done == len(wanted) else "todo"), done, len(wanted)


def count(rows: Iterable[Row]) -> dict[str, int]:
    """{"done": n, "failed": n, "running": n, "todo": n}."""
    states = [row.status for row in rows]
    return {state: states.count(state) for state in STATES}


def preset_run(suite: Suite, store: Store) -> str | None:
    """The first preset of a suite that has been run, by this suite or, cells being shared, by another; else None."""
    query = select(RUNS.c.preset).where(RUNS.c.suite == suite.name).distinct()
    with store.database.reading() as connection:
        run = {row.preset for row in connection.execute(query)}
    if found := next((preset for preset in suite.presets() if preset in run), None):
        return found
    known = set(store.cells())
    return next((p for p in suite.presets() if any(cell.id in known for cell in suite.plan(p).cells)), None)


def by_suite(store: Store) -> dict[tuple[str, str], dict[str, int]]:
    """What the database holds: (suite, preset) -> cells by the state of their training."""
    stages = store.stages()
    result: dict[tuple[str, str], dict[str, int]] = {}
    seen = set()
    for run in store.runs():
        key = (run["suite"], run["preset"] or "")
        if (key, run["cell"]) in seen or replicates.SIGN in run["cell"]:
            continue
        seen.add((key, run["cell"]))
        train = stages.get((run["cell"], "train"))
        status = train.status if train is not None else "todo"
        states = result.setdefault(key, dict.fromkeys(STATES, 0))
        states[status if status in STATES else "todo"] += 1
    return dict(sorted(result.items()))
