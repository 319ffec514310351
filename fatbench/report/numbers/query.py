"""What a report reads from the database: only the columns and the rows that its tables show.

`Store.measurements`, `stages` and `runs` give the same and more, as dicts; on 10,000 cells they take several seconds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import select as sql

from fatbench.report.numbers.cell_rows import doubts_of, fetch, numbers_of, outcomes
from fatbench.report.numbers.doubts import Doubt, Doubts
from fatbench.report.numbers.measurements import ENDS, EVERY, PRIOR, RANGE, Source, Stages, StoredResults
from fatbench.store import integrity
from fatbench.store.schema import NUMBERS, RUNS, STAGES
from fatbench.store.selection import MONITORED, Checkpoint, checkpoint_round
from fatbench.store.stage_names import parsed
from fatbench.suite import asked
from fatbench.suite.tables import OVER

if TYPE_CHECKING:
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Evaluation, Plan
    from fatbench.suite.files import Suite
    from fatbench.suite.tables import Figure


def gather(suite: Suite, plan: Plan, store: Store, select: Checkpoint) -> StoredResults:
    """The numbers, checkpoints and runs that the suite's tables need of the plan's cells."""
    sources = [Source.parse(text) for table in suite.tables for text in table.values.values()]
    cells = [cell.id for cell in plan.unique()]
    evaluated = any(s.stage in ("evaluation", *OVER) or s.stage.startswith("prior") for s in sources)
    checkpoints = {select} if evaluated else set()
    if any(source.stage == "gap" for source in sources):
        checkpoints |= {"best-test", "last"}
    found = StoredResults(outcomes=outcomes(cells, store))
    stages = _evaluated(found, plan, cells, store, checkpoints, sources)
    metrics = {source.metric for source in sources if source.stage == "train"}
    if metrics:
        # Without "@round" a training number is the last round's: of some suites that is one row in a hundred.
        ends = {int(cell.spec["algorithm"]["rounds"]) for cell in plan.cells}
        at = {r for s in sources if s.stage == "train" for r in ([s.round] if s.round else ends)}
        here = (NUMBERS.c.stage == "train") & NUMBERS.c.metric.in_(sorted(metrics)) & NUMBERS.c.round.in_(sorted(at))
        found.rows += numbers_of(cells, store, here)
        of_intervals = {f"{base}_client" for base, _, end in (m.rpartition("_") for m in metrics) if end in ENDS}
        if of_intervals:
            found.rows += numbers_of(cells, store, (NUMBERS.c.stage == "train") & NUMBERS.c.metric.in_(of_intervals))
    found.runs = _runs(cells, store, stages)
    if checkpoints:
        found.doubts = _other_attacks(plan, cells, store, stages, doubts_of(cells, store, found.outcomes))
    trained = sql(STAGES.c.cell).where((STAGES.c.stage == "train") & (STAGES.c.status == "done"))
    found.trained = frozenset(row.cell for row in fetch(store, trained, STAGES.c.cell, cells if metrics else ()))
    broken = sql(STAGES.c.cell).where(STAGES.c.status == "failed").distinct()
    found.failed = frozenset(row.cell for row in fetch(store, broken, STAGES.c.cell, cells))
    return found


def _evaluated(
    found: StoredResults,
    plan: Plan,
    cells: Sequence[str],
    store: Store,
    checkpoints: Iterable[Checkpoint],
    sources: Iterable[Source],
) -> set[str]:
    """Read the numbers of evaluations at some checkpoints into `found`: the names of their stages."""
    found.rounds = _rounds(cells, store, checkpoints)
    names, evaluations, stages = Stages(), _evaluations(plan), set()
    for round, there in _by_round(plan, found.rounds, checkpoints).items():
        names_here = {name for evaluation in evaluations for name in names.of(evaluation, round)}
        rows = numbers_of(there, store, NUMBERS.c.stage.in_(sorted(names_here)) & _clients(sources))
        integrity.agree(rows, store.database)
        found.rows += rows
        stages |= names_here
    return stages


def _other_attacks(plan: Plan, cells: Sequence[str], store: Store, stages: Collection[str], why: Doubts) -> Doubts:
    """Doubts, and that of each stage whose settings are not those of the plan's evaluation that has its name."""
    by_id = {evaluation.id: evaluation for evaluation in _evaluations(plan)}
    here = STAGES.c.stage.in_(sorted(stages)) & STAGES.c.settings.is_not(None)

    @functools.cache
    def said(evaluation: str, settings: str) -> str | None:
        return asked.differs(json.loads(settings), by_id[evaluation])

    found = dict(why)
    query = sql(STAGES.c.cell, STAGES.c.stage, STAGES.c.settings).where(here)
    for cell, stage, settings in fetch(store, query, STAGES.c.cell, cells):
        if words := said(parsed(stage).evaluation, settings):
            found[cell, stage] = (*found.get((cell, stage), ()), Doubt(words))
    return found


def gather_series(figures: Sequence[Figure], plan: Plan, store: Store, select: Checkpoint = "last") -> StoredResults:
    """The numbers over all rounds, those of evaluations, and the runs, that figures need of the plan's cells."""
    cells = [cell.id for cell in plan.unique()]
    wanted: dict[str, set[int]] = {}
    sources = [Source.parse(text) for figure in figures for text in figure.series.values()]
    for source in sources:
        if source.stage == "train":
            wanted.setdefault(source.metric, set()).add(source.client)
    found = StoredResults(outcomes=outcomes(cells, store))
    stages: set[str] = set()
    if any(source.stage not in ("train", "artifact") for source in sources):
        stages = _evaluated(found, plan, cells, store, {select}, sources)
        found.doubts = _other_attacks(plan, cells, store, stages, doubts_of(cells, store, found.outcomes))
    found.runs = _runs(cells, store, stages)
    for metric, clients in wanted.items():
        here = (NUMBERS.c.stage == "train") & (NUMBERS.c.metric == metric)
        found.rows += numbers_of(
            cells, store, here if {EVERY, RANGE} & clients else here & NUMBERS.c.client.in_(sorted(clients))
        )
    return found


def _clients(sources: Iterable[Source]) -> Any:
    """Of an evaluation the numbers of single clients only where a source asks: there may be a thousand of each."""
    sources = list(sources)
    if any(s.stage == "evaluation" and s.client != -1 for s in sources):
        return NUMBERS.c.client >= -1
    overall = NUMBERS.c.client == -1
    return overall | (NUMBERS.c.metric == PRIOR) if any(s.stage.startswith("prior") for s in sources) else overall


def logged(plan: Plan, store: Store) -> list[str]:
    """The names of all numbers that training has logged of the plan's cells."""
    query = sql(NUMBERS.c.metric).where(NUMBERS.c.stage == "train").distinct()
    return sorted({row.metric for row in fetch(store, query, NUMBERS.c.cell, [cell.id for cell in plan.unique()])})


def overall(cells: Sequence[str], store: Store) -> list[Mapping[str, Any]]:
    """Every number of some cells that is not about one client."""
    return numbers_of(cells, store, NUMBERS.c.client == -1)


def logged_clients(plan: Plan, store: Store) -> list[tuple[str, bool]]:
    """(name of a number that training has logged, whether it is about no client or class), each once."""
    query = sql(NUMBERS.c.metric, NUMBERS.c.client == -1).where(NUMBERS.c.stage == "train").distinct()
    rows = fetch(store, query, NUMBERS.c.cell, [cell.id for cell in plan.unique()])
    return sorted({(metric, bool(overall)) for metric, overall in rows})


def _evaluations(plan: Plan) -> list[Evaluation]:
    """Every evaluation of a plan once; the seeds of a point share theirs."""
    by_point = {id(cell.evaluations): cell.evaluations for cell in plan.cells}
    return list({repr(e): e for evaluations in by_point.values() for e in evaluations}.values())


def _by_round(
    plan: Plan, rounds: Mapping[tuple[str, str], int], checkpoints: Iterable[str]
) -> dict[int, dict[str, None]]:
    """Round -> the cells with a checkpoint there: a database finds a few stages of each cell faster than all."""
    found: dict[int, dict[str, None]] = {}
    for cell in plan.unique():
        for checkpoint in checkpoints:
            at = int(cell.spec["algorithm"]["rounds"]) if checkpoint == "last" else rounds.get((cell.id, checkpoint))
            if at is not None:
                found.setdefault(at, {})[cell.id] = None
    return found


def _rounds(cells: Sequence[str], store: Store, checkpoints: Iterable[str]) -> dict[tuple[str, str], int]:
    """The rounds of the best-* checkpoints, from the records of the train stages."""
    wanted = [checkpoint for checkpoint in checkpoints if checkpoint in MONITORED]
    if not wanted:
        return {}
    rounds = {}
    lacking = []
    query = sql(STAGES.c.cell, STAGES.c.record).where(STAGES.c.stage == "train")
    for cell, text in fetch(store, query, STAGES.c.cell, cells):
        record = json.loads(text)
        for checkpoint in wanted:
            if checkpoint in record:
                rounds[cell, checkpoint] = int(record[checkpoint]["round"])
            else:
                lacking.append(cell)
    if lacking:  # results of another program, say, that have numbers but no record
        metrics = [MONITORED[checkpoint] for checkpoint in wanted]
        here = (NUMBERS.c.stage == "train") & NUMBERS.c.metric.in_(metrics) & (NUMBERS.c.client == -1)
        series: dict[tuple[str, str], dict[int, float]] = {}
        for row in numbers_of(lacking, store, here):
            series.setdefault((row["cell"], row["metric"]), {})[row["round"]] = row["value"]
        for checkpoint in wanted:
            for cell in lacking:
                best = checkpoint_round(series.get((cell, MONITORED[checkpoint]), {}))
                if best is not None:
                    rounds.setdefault((cell, checkpoint), best)
    return rounds


_PROVENANCE = (RUNS.c.device, RUNS.c.precision, RUNS.c.commit, RUNS.c.dirty, RUNS.c.versions, RUNS.c.extra)
_BROKEN = ("failed", "interrupted")


def _runs(cells: Sequence[str], store: Store, stages: Iterable[str]) -> list[Mapping[str, Any]]:
    """The runs behind numbers of these stages and of training, as {"cell", "stage", "provenance"}.

    Where all runs of each stage say the same, one stands for all cells ("cell": None). A train run that failed or was
    interrupted counts where it left numbers behind.
    """
    known: dict[tuple[Any, ...], Mapping[str, Any]] = {}

    def origin(columns: tuple[Any, ...]) -> Mapping[str, Any]:
        if columns not in known:
            device, precision, commit, dirty, versions, extra = columns
            known[columns] = {
                **json.loads(extra), "device": device, "precision": precision, "commit": commit, "dirty": dirty,
                "versions": json.loads(versions) if versions else {},
            }  # fmt: skip
        return known[columns]

    here = RUNS.c.stage.in_(["train", *sorted(stages)]) & ~RUNS.c.extra.contains('"dropped":true')
    distinct = sql(RUNS.c.stage, RUNS.c.status, *_PROVENANCE).where(here).distinct()
    shared = {tuple(row) for row in fetch(store, distinct, RUNS.c.cell, cells)}
    if len({row[0] for row in shared}) == len(shared) and all(row[1] not in _BROKEN for row in shared):
        return [{"cell": None, "stage": row[0], "provenance": origin(row[2:])} for row in sorted(shared, key=repr)]

    runs: list[Mapping[str, Any]] = []
    broken: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    every = sql(RUNS.c.id, RUNS.c.cell, RUNS.c.stage, RUNS.c.status, *_PROVENANCE).where(here).order_by(RUNS.c.id)
    for id, cell, stage, status, *columns in fetch(store, every, RUNS.c.cell, cells):
        run = {"cell": cell, "stage": stage, "provenance": origin(tuple(columns))}
        if stage == "train" and status in _BROKEN:
            broken.setdefault(cell, []).append((id, run))
        else:
            runs.append(run)
    if broken:
        left = sql(NUMBERS.c.run).where(NUMBERS.c.stage == "train", NUMBERS.c.metric == "train_loss").distinct()
        used = {row.run for row in fetch(store, left, NUMBERS.c.cell, broken)}
        runs += [run for tried in broken.values() for id, run in tried if id in used]
    return runs
