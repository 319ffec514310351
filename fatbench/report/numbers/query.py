"""Read from the database for a report: only the columns and rows that its tables show.

`Store.measurements`, `stages` and `runs` give the same and more, as dicts; on 10,000 cells they take several seconds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import select as sql

from fatbench.report.numbers.cell_rows import OVERALL, doubts_of, fetch, numbers_of, outcomes, rounds_of
from fatbench.report.numbers.doubts import Doubt, Doubts
from fatbench.report.numbers.measurements import ENDS, EVERY, PRIOR, RANGE, Numbers, Source
from fatbench.store import integrity
from fatbench.store.schema import NUMBERS, RUNS, STAGES
from fatbench.store.selection import Checkpoint
from fatbench.store.stage_names import parsed
from fatbench.suite import asked

if TYPE_CHECKING:
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Evaluation, Plan


def numbers_of_sources(
    texts: Iterable[str], plan: Plan, store: Store, select: Checkpoint, *, curves: bool = False
) -> Numbers:
    """The numbers, checkpoints and runs that sources of a suite need of the plan's cells.

    curves: whether the numbers of training are those of every round; else of the rounds that the sources name.
    """
    sources = [Source.parse(text) for text in texts]
    cells = [cell.id for cell in plan.unique()]
    evaluated = any(source.stage not in ("train", "artifact") for source in sources)
    checkpoints: set[Checkpoint] = {select} if evaluated else set()  # those whose evaluations are read
    if any(source.stage == "gap" for source in sources):
        checkpoints |= {"best-test", "last"}
    specs = {cell.id: cell.spec for cell in plan.cells}
    rounds: dict[tuple[str, str], int] = {
        (cell, checkpoint): round
        for checkpoint in checkpoints
        for cell, round in rounds_of(specs, store, checkpoint).items()
    }
    rows, stages = _evaluated(rounds, plan, store, sources)
    training = NUMBERS.c.stage == "train"
    trained = [source for source in sources if source.stage == "train"]
    metrics = {source.metric for source in trained}
    if metrics:
        condition = training & NUMBERS.c.metric.in_(sorted(metrics))
        if not curves:
            # Without "@round" a training number is the last round's: of some suites that is one row in a hundred.
            ends = {int(cell.spec["algorithm"]["rounds"]) for cell in plan.cells}
            condition &= NUMBERS.c.round.in_(sorted({r for s in trained for r in ([s.round] if s.round else ends)}))
        clients = {source.client for source in trained}
        if clients.isdisjoint({EVERY, RANGE}):  # else every client is needed
            condition &= NUMBERS.c.client.in_(sorted(clients))
        rows += numbers_of(cells, store, condition)
        interval_metrics = {f"{base}_client" for base, _, end in (m.rpartition("_") for m in metrics) if end in ENDS}
        if interval_metrics:
            rows += numbers_of(cells, store, training & NUMBERS.c.metric.in_(interval_metrics))
    done_query = sql(STAGES.c.cell).where((STAGES.c.stage == "train") & (STAGES.c.status == "done"))
    failed_query = sql(STAGES.c.cell).where(STAGES.c.status == "failed").distinct()
    bits = outcomes(cells, store)
    return Numbers(
        plan,
        rows,
        select,
        rounds=rounds,
        runs=_runs(cells, store, stages),
        outcomes=bits,
        failed=frozenset(row.cell for row in fetch(store, failed_query, STAGES.c.cell, cells)),
        trained=frozenset(row.cell for row in fetch(store, done_query, STAGES.c.cell, cells if metrics else ())),
        known_doubts=_other_attacks(plan, cells, store, stages, doubts_of(cells, store, bits)) if evaluated else {},
    )


def _evaluated(
    rounds: Mapping[tuple[str, str], int], plan: Plan, store: Store, sources: Iterable[Source]
) -> tuple[list[Mapping[str, Any]], set[str]]:
    """The numbers of evaluations at some checkpoints, and the names of their stages."""
    by_round: dict[int, set[str]] = {}  # a database finds a few stages of each cell faster than all
    for (cell, _), round in rounds.items():
        by_round.setdefault(round, set()).add(cell)
    rows: list[Mapping[str, Any]] = []
    evaluations, stages = _evaluations(plan), set[str]()
    for round, cells in by_round.items():
        names = {name for evaluation in evaluations for name in evaluation.stages(round)}
        rows += numbers_of(cells, store, NUMBERS.c.stage.in_(sorted(names)) & _client_condition(sources))
        stages |= names
    integrity.check_accuracies(rows, store.database)
    return rows, stages


def _other_attacks(
    plan: Plan, cells: Sequence[str], store: Store, stages: Collection[str], known_doubts: Doubts
) -> Doubts:
    """Add a doubt about each stage whose attack has other settings than the plan's evaluation of that name."""
    by_id = {evaluation.id: evaluation for evaluation in _evaluations(plan)}
    condition = STAGES.c.stage.in_(sorted(stages)) & STAGES.c.settings.is_not(None)

    @functools.cache  # thousands of cells share a few attacks
    def difference(evaluation: str, settings: str) -> str | None:
        return asked.difference(json.loads(settings), by_id[evaluation])

    all_doubts = dict(known_doubts)
    query = sql(STAGES.c.cell, STAGES.c.stage, STAGES.c.settings).where(condition)
    for cell, stage, settings in fetch(store, query, STAGES.c.cell, cells):
        if words := difference(parsed(stage).evaluation, settings):
            all_doubts[cell, stage] = (*all_doubts.get((cell, stage), ()), Doubt(words))
    return all_doubts


def _client_condition(sources: Iterable[Source]) -> Any:
    """The condition on clients: single clients only where a source asks, since there may be a thousand of them."""
    sources = list(sources)
    if any(s.stage == "evaluation" and s.client != -1 for s in sources):
        return NUMBERS.c.client >= -1
    return OVERALL | (NUMBERS.c.metric == PRIOR) if any(s.stage.startswith("prior") for s in sources) else OVERALL


def logged_clients(plan: Plan, store: Store) -> list[tuple[str, bool]]:
    """(name of a number that training has logged, whether it is about no client or class), each once."""
    query = sql(NUMBERS.c.metric, OVERALL).where(NUMBERS.c.stage == "train").distinct()
    rows = fetch(store, query, NUMBERS.c.cell, [cell.id for cell in plan.unique()])
    return sorted({(metric, bool(overall)) for metric, overall in rows})


def _evaluations(plan: Plan) -> list[Evaluation]:
    """Every evaluation of a plan once; the seeds of a point share theirs."""
    by_point = {id(cell.evaluations): cell.evaluations for cell in plan.cells}
    # by text: points may hold equal evaluations in several tuples
    return list({repr(e): e for evaluations in by_point.values() for e in evaluations}.values())


_PROVENANCE = (RUNS.c.device, RUNS.c.precision, RUNS.c.commit, RUNS.c.dirty, RUNS.c.versions, RUNS.c.extra)
_BROKEN = ("failed", "interrupted")


def _runs(cells: Sequence[str], store: Store, stages: Iterable[str]) -> list[Mapping[str, Any]]:
    """The runs behind numbers of these stages and of training, as {"cell", "stage", "provenance"}.

    Where all runs of each stage say the same, one stands for all cells ("cell": None). A train run that failed or was
    interrupted counts where it left numbers behind.
    """
    provenance_by_columns: dict[tuple[Any, ...], Mapping[str, Any]] = {}

    def origin(columns: tuple[Any, ...]) -> Mapping[str, Any]:
        if columns not in provenance_by_columns:
            device, precision, commit, dirty, versions, extra = columns
            provenance_by_columns[columns] = {
                **json.loads(extra), "device": device, "precision": precision, "commit": commit, "dirty": dirty,
                "versions": json.loads(versions) if versions else {},
            }  # fmt: skip
        return provenance_by_columns[columns]

    condition = RUNS.c.stage.in_(["train", *sorted(stages)]) & ~RUNS.c.extra.contains('"dropped":true')
    distinct = sql(RUNS.c.stage, RUNS.c.status, *_PROVENANCE).where(condition).distinct()
    shared = {tuple(row) for row in fetch(store, distinct, RUNS.c.cell, cells)}
    if len({row[0] for row in shared}) == len(shared) and all(row[1] not in _BROKEN for row in shared):
        return [{"cell": None, "stage": row[0], "provenance": origin(row[2:])} for row in sorted(shared, key=repr)]

    runs: list[Mapping[str, Any]] = []  # {"cell", "stage", "provenance"}
    broken_runs: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    run_query = (
        sql(RUNS.c.id, RUNS.c.cell, RUNS.c.stage, RUNS.c.status, *_PROVENANCE).where(condition).order_by(RUNS.c.id)
    )
    for id, cell, stage, status, *columns in fetch(store, run_query, RUNS.c.cell, cells):
        run = {"cell": cell, "stage": stage, "provenance": origin(tuple(columns))}
        if stage == "train" and status in _BROKEN:
            broken_runs.setdefault(cell, []).append((id, run))
        else:
            runs.append(run)
    if broken_runs:
        run_ids = sql(NUMBERS.c.run).where(NUMBERS.c.stage == "train", NUMBERS.c.metric == "train_loss").distinct()
        used_runs = {row.run for row in fetch(store, run_ids, NUMBERS.c.cell, broken_runs)}
        runs += [run for attempts in broken_runs.values() for id, run in attempts if id in used_runs]
    return runs
