"""The progress of cells, from the stages in the database and the suite's plan. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import select

from fatbench.runner import transfer, versions
from fatbench.runner.jobs import Job, evaluation_rounds
from fatbench.store.inputs import Reason
from fatbench.store.rows import fetch
from fatbench.store.schema import STAGES, SUITE_CELLS
from fatbench.store.stage_names import parsed
from fatbench.store.stages import StageRow, Store
from fatbench.suite import asked, duration, standard_attacks
from fatbench.suite.cells import Cell, Evaluation, Plan
from fatbench.suite.files import Suite

STATES = ("done", "failed", "running", "todo")
CHANGED = "changed"  # computed with inputs that have changed since; listed only if there are any


@dataclass(frozen=True)
class CellProgress:
    """The state of one cell of a plan, and the progress of its training."""

    cell: Cell
    status: str  # one of STATES, where an interrupted cell is "todo", or CHANGED
    round: int
    total: int
    stages_done: int
    stages: int
    error: str
    changed: Mapping[str, Sequence[Reason]]  # stage -> which of its inputs have changed


def cells_of(plan: Plan, store: Store | None) -> list[CellProgress]:
    """The state of each cell of a plan."""
    cells, jobs = plan.to_run(), _jobs(plan)
    rows = {} if store is None else _by_cell(store.stages(list(jobs)))
    changed_by_cell = {} if store is None else versions.changed(list(jobs.values()), store)
    result = []
    for cell in cells:
        cell_rows = rows.get(cell.id, {})
        train = cell_rows.get("train")
        status, stages_done, stages_asked = _state(jobs[cell.id], cell_rows, changed_by_cell.get(cell.id, {}))
        error = next((row.error for row in cell_rows.values() if row.status == "failed" and row.error), "") or ""
        result.append(
            CellProgress(
                cell,
                status,
                train.round if train else 0,
                int(cell.spec["algorithm"]["rounds"]),
                stages_done,
                stages_asked,
                error.strip().splitlines()[-1] if error.strip() else "",
                changed_by_cell.get(cell.id, {}),
            )
        )
    return result


def _jobs(plan: Plan) -> dict[str, Job]:
    return {
        cell.id: Job(cell.id, cell.spec, list(cell.evaluations), plan.checkpoints, plan.suite, plan.preset)
        for cell in plan.to_run()
    }


def states_of(jobs: Sequence[Job], store: Store, changed: versions.Changed | None = None) -> dict[str, str]:
    """The state of each job's cell. changed: what `versions.changed` gives for these jobs, if known."""
    rows = _by_cell(store.stages([job.cell for job in jobs]))
    changed_by_cell = versions.changed(jobs, store) if changed is None else changed
    return {job.cell: _state(job, rows.get(job.cell, {}), changed_by_cell.get(job.cell, {}))[0] for job in jobs}


def _by_cell(stages: Mapping[tuple[str, str], StageRow]) -> dict[str, dict[str, StageRow]]:
    rows: dict[str, dict[str, StageRow]] = {}
    for (cell, stage), row in stages.items():
        rows.setdefault(cell, {})[stage] = row
    return rows


def _state(job: Job, rows: Mapping[str, StageRow], changed: Collection[str]) -> tuple[str, int, int]:
    """(state, stages done, stages asked for) of one cell.

    A changed stage is not done. A cell whose training has changed is "changed", whatever its other stages are.
    """
    asked_stages: list[tuple[str, ...]] = [("train",)]
    train = rows.get("train")
    if train is not None and train.status == "done":
        asked_stages += [e.stages(r) for r in evaluation_rounds(job, train.record) for e in job.evaluations]
    else:
        asked_stages += [(e.id,) for e in job.evaluations]  # one stage each: the rounds are not known yet
    unfinished = ("running", "failed", "todo", "interrupted", CHANGED)
    # an attack counts as done if it is done in any precision
    rank = ("done", "running", "failed", CHANGED, "interrupted", "todo")
    status_by_stage = {stage: _stage_state(row, stage in changed, train) for stage, row in rows.items()}
    states = [min((status_by_stage.get(stage, "todo") for stage in stages), key=rank.index) for stages in asked_stages]
    done_count = states.count("done")
    state = next((state for state in unfinished if state in states), "done")
    if state != "running" and states[0] == CHANGED:
        state = CHANGED
    return ("todo" if state == "interrupted" else state), done_count, len(asked_stages)


def _stage_state(row: StageRow, changed: bool, train: StageRow | None) -> str:
    """The state of a stage. train: the stage of its cell's training."""
    if changed and not row.alive:
        return CHANGED
    if row.status == "running" and not row.alive:
        return "todo"
    if row.status == "done" and train is not None and row.stage != "train" and transfer.of_former_model(row, train):
        return "todo"
    return row.status


def cells_left(plan: Plan, store: Store) -> duration.WorkLeft:
    """What is to do of each of the plan's cells, for an estimate of its time."""
    jobs = _jobs(plan)
    rows, changed = _by_cell(store.stages(list(jobs))), versions.changed(list(jobs.values()), store)

    def rounds(cell: Cell) -> list[int] | None:
        """The rounds whose models are attacked; None until the cell is trained."""
        train = rows.get(cell.id, {}).get("train")
        if train is None or train.status != "done":
            return None
        return evaluation_rounds(jobs[cell.id], train.record)

    round_counts = [len(attacked_rounds) for cell in plan.to_run() if (attacked_rounds := rounds(cell)) is not None]
    nothing_done = duration.whole_plan(plan, sum(round_counts) / len(round_counts) if round_counts else None)

    def of_cell(cell: Cell) -> tuple[float, list[tuple[Evaluation, float]]]:
        cell_rows = rows.get(cell.id, {})
        changed_stages = changed.get(cell.id, {})
        if "train" in changed_stages:
            return nothing_done(cell)
        if (attacked_rounds := rounds(cell)) is None:
            train = cell_rows.get("train")
            fraction = 1 - train.round / train.total if train is not None and train.total else 1.0
            return fraction, nothing_done(cell)[1]
        status_by_stage = {
            stage: _stage_state(row, stage in changed_stages, cell_rows["train"]) for stage, row in cell_rows.items()
        }
        done = {stage for stage, status in status_by_stage.items() if status == "done"}
        todo = [(one, sum(done.isdisjoint(one.stages(n)) for n in attacked_rounds)) for one in cell.evaluations]
        return 0.0, [(evaluation, float(models)) for evaluation, models in todo if models]

    return of_cell


def count(rows: Iterable[CellProgress]) -> dict[str, int]:
    """{"done": n, "failed": n, "running": n, "todo": n}, and "changed" if there are any."""
    states = [row.status for row in rows]
    return {state: states.count(state) for state in (*STATES, *([CHANGED] if CHANGED in states else []))}


def preset_run(suite: Suite, store: Store) -> str | None:
    """The preset of `presets_run` of which the database has most cells, of several the first; else None."""
    presets = [*presets_run(suite, store)]
    if len(presets) < 2:
        return next(iter(presets), None)
    plans = {preset: [cell.id for cell in suite.plan(preset, refuse=False).cells] for preset in presets}
    return max(presets, key=lambda preset: len(store.known_cells(plans[preset])))


def presets_run(suite: Suite, store: Store) -> Iterator[str]:
    """The presets of a suite that have been run; without one, those whose cells another suite has run.

    What the suite that it extends has run counts as its own where cells are the same: an own row stands beside those.
    """
    extended = Path(suite.contents.extends or "").stem
    query = select(SUITE_CELLS.c.suite, SUITE_CELLS.c.preset).where(SUITE_CELLS.c.suite.in_([suite.name, extended]))
    with store.database.reading() as connection:
        run = {(row.suite, row.preset) for row in connection.execute(query.distinct())}

    def has_cells(preset: str) -> bool:
        return bool(store.known_cells(cell.id for cell in suite.plan(preset, refuse=False).cells))

    has_run = False
    for preset in suite.presets():
        if (suite.name, preset) in run or ((extended, preset) in run and has_cells(preset)):
            has_run = True
            yield preset
    if not has_run and store.has_cells():
        yield from filter(has_cells, suite.presets())


def with_stored_attacks(suite: Suite, plan: Plan, store: Store) -> Plan:
    """Add to a plan the attacks in the database that earlier runs have added to its cells with `--attack`."""
    attack_names = dict.fromkeys((*standard_attacks.TITLES, *suite.contents.evaluate.attacks))
    planned_ids = {id(cell.evaluations): {item.id for item in cell.evaluations} for cell in plan.cells}
    everywhere = set.intersection(*planned_ids.values()) if planned_ids else set()
    own = select(STAGES.c.stage, STAGES.c.settings).where(STAGES.c.record.contains('"added"')).distinct()
    with store.database.reading() as connection:
        stages = connection.scalars(select(STAGES.c.stage).where(STAGES.c.stage != "train").distinct()).all()
        own_texts = {  # as they were written in `--attack`
            stage: f"{parsed(stage).metric}={json.dumps(asked.attack_of(json.loads(settings)))}"
            for stage, settings in connection.execute(own)
            if settings and parsed(stage).metric not in attack_names
        }
        named = [one for one in stages if parsed(one).metric in attack_names or one in own_texts]
        other_stages = [one for one in named if parsed(one).evaluation not in everywhere]
        stage_query = select(STAGES.c.cell, STAGES.c.stage).where(STAGES.c.stage.in_(other_stages))
        rows = fetch(connection, stage_query, STAGES.c.cell, [cell.id for cell in plan.cells]) if other_stages else ()
        stored_evaluations = {(cell, parsed(stage).evaluation) for cell, stage in rows}
    stored_evaluations -= {(cell.id, item.id) for cell in plan.cells for item in cell.evaluations}
    if not stored_evaluations:
        return plan
    seeds = list(dict.fromkeys(int(cell.spec["seed"]) for cell in plan.cells))
    names = {name for _, name in stored_evaluations}
    labels = {name.rpartition("-")[0] for name in names}
    attacks = [label for label in attack_names if label in labels]
    attacks += [text for stage, text in own_texts.items() if parsed(stage).evaluation in names]
    plan_with_all = suite.plan(plan.preset, seeds, attacks=attacks, refuse=False)
    extra_by_cell = {
        cell.id: [item for item in cell.evaluations if (cell.id, item.id) in stored_evaluations]
        for cell in plan_with_all.cells
    }
    found = {item.label for extra_evaluations in extra_by_cell.values() for item in extra_evaluations}
    added_labels = tuple(label for label in plan_with_all.added if label in found)
    cells = [
        replace(cell, evaluations=(*cell.evaluations, *extra_by_cell[cell.id])) if extra_by_cell.get(cell.id) else cell
        for cell in plan.cells
    ]
    return replace(plan, cells=cells, added=added_labels)


def by_suite(store: Store) -> dict[tuple[str, str], dict[str, int]]:
    """(suite, preset) -> how many of its cells in the database are in each state of training."""
    result: dict[tuple[str, str], dict[str, int]] = {}
    for (suite, preset, status), cells in store.count_trainings().items():
        states = result.setdefault((suite, preset or ""), dict.fromkeys(STATES, 0))
        states[status if status in STATES else "todo"] += cells
    return dict(sorted(result.items()))
