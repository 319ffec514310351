"""Read from the database for a report: only the columns and rows that its tables show.

`Store.measurements`, `stages` and `runs` give the same and more, as dicts; on 10,000 cells they take several seconds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import select as sql

from fatbench.report.numbers.cell_rows import (
    EVALUATED,
    OVERALL,
    check_accuracies,
    doubts_of,
    fetch,
    numbers_of,
    outcomes,
    rounds_of,
)
from fatbench.report.numbers.measurements import ENDS, EVERY, PRIOR, RANGE, Numbers, Source
from fatbench.report.numbers.provenance import Origin, origin
from fatbench.store import inputs
from fatbench.store.schema import NUMBERS, RUNS, STAGES
from fatbench.store.selection import Checkpoint

if TYPE_CHECKING:
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Plan


def evaluations(
    specs: Mapping[str, Mapping[str, Any]],
    store: Store,
    select: Checkpoint,
    further: Iterable[Checkpoint] = (),
    clients: Any = OVERALL,
) -> Numbers:
    """The numbers of all evaluations of some cells, at a checkpoint and further ones. specs: cell -> its spec.

    clients: a condition on the clients of numbers. DatabaseError: an accuracy is not the mean of its outcomes.
    """
    checkpoints: set[Checkpoint] = {select, *further}
    rounds: dict[tuple[str, str], int] = {
        (cell, checkpoint): round
        for checkpoint in {*checkpoints, "last"}
        for cell, round in rounds_of(specs, store, checkpoint).items()
    }
    numbers = numbers_of(specs, store, EVALUATED & clients)
    bits_of = outcomes(specs, store)
    evaluated = {(cell, round) for (cell, checkpoint), round in rounds.items() if checkpoint in checkpoints}
    check_accuracies((number for number in numbers if (number.cell, number.round) in evaluated), store, bits_of)
    return Numbers(
        numbers,
        select,
        rounds=rounds,
        doubts=doubts_of(specs, store, bits_of, numbers),
        outcomes=bits_of,
        inputs=functools.cache(lambda: inputs.stored_inputs(store.database, specs)),
    )


def numbers_of_sources(
    texts: Iterable[str], plan: Plan, store: Store, select: Checkpoint, *, curves: bool = False
) -> Numbers:
    """The numbers, checkpoints and runs that sources of a suite need of the plan's cells, and all their evaluations.

    curves: whether the numbers of training are those of every round; else of the rounds that the sources name.
    """
    sources = [Source.parse(text) for text in texts]
    further: tuple[Checkpoint, ...] = ("best-test", "last") if any(source.stage == "gap" for source in sources) else ()
    specs = {cell.id: cell.spec for cell in plan.cells}
    numbers = evaluations(specs, store, select, further, _client_condition(sources))
    training = NUMBERS.c.stage == "train"
    trained = [source for source in sources if source.stage == "train"]
    metrics = {source.metric for source in trained}
    if metrics:
        condition: Any = NUMBERS.c.metric.in_(sorted(metrics))
        if not curves:
            # Without "@round" a training number is the last round's: of some suites that is one row in a hundred.
            ends = {int(spec["algorithm"]["rounds"]) for spec in specs.values()}
            condition &= NUMBERS.c.round.in_(sorted({r for s in trained for r in ([s.round] if s.round else ends)}))
        clients = {source.client for source in trained}
        if clients.isdisjoint({EVERY, RANGE}):  # else every client is needed
            condition &= NUMBERS.c.client.in_(sorted(clients))
        interval_metrics = {f"{base}_client" for base, _, end in (m.rpartition("_") for m in metrics) if end in ENDS}
        numbers.add(numbers_of(specs, store, training & (condition | NUMBERS.c.metric.in_(sorted(interval_metrics)))))
    columns = (STAGES.c.cell, STAGES.c.stage, STAGES.c.status)
    stages = [tuple(row) for row in fetch(store, sql(*columns), STAGES.c.cell, specs)]
    numbers.checkpoints = tuple(plan.checkpoints)
    numbers.runs = _runs(specs, store, [*numbers.cell_counts])
    numbers.failed = frozenset(cell for cell, _, status in stages if status == "failed")
    numbers.trained = frozenset(cell for cell, stage, status in stages if (stage, status) == ("train", "done"))
    return numbers


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


_PROVENANCE = (RUNS.c.device, RUNS.c.precision, RUNS.c.commit, RUNS.c.dirty, RUNS.c.versions, RUNS.c.extra)
_BROKEN = ("failed", "interrupted")


def _runs(
    cells: Collection[str], store: Store, stages: Iterable[str]
) -> dict[tuple[str | None, str], dict[Origin, None]]:
    """(cell, stage) -> what ran, of these stages and of training; (None, stage) where it is the same for all cells.

    A train run that failed or was interrupted counts where it left numbers behind.
    """

    @functools.cache  # thousands of runs share a few
    def origin_of(*columns: Any) -> Origin:
        device, precision, commit, dirty, versions, extra = columns
        stated = {"device": device, "precision": precision, "commit": commit, "dirty": dirty}
        return origin({**json.loads(extra), **stated, "versions": json.loads(versions) if versions else {}})

    condition = RUNS.c.stage.in_(["train", *sorted(stages)]) & ~RUNS.c.extra.contains('"dropped":true')
    distinct = sql(RUNS.c.stage, RUNS.c.status, *_PROVENANCE).where(condition).distinct()
    shared = {tuple(row) for row in fetch(store, distinct, RUNS.c.cell, cells)}
    if len({row[0] for row in shared}) == len(shared) and all(row[1] not in _BROKEN for row in shared):
        return {(None, stage): {origin_of(*columns): None} for stage, _, *columns in sorted(shared, key=repr)}

    origins: dict[tuple[str | None, str], dict[Origin, None]] = {}
    broken_runs: dict[str, list[tuple[int, Origin]]] = {}
    columns = (RUNS.c.id, RUNS.c.cell, RUNS.c.stage, RUNS.c.status, *_PROVENANCE)
    run_query = sql(*columns).where(condition).order_by(RUNS.c.id)
    for id, cell, stage, status, *columns in fetch(store, run_query, RUNS.c.cell, cells):
        if stage == "train" and status in _BROKEN:
            broken_runs.setdefault(cell, []).append((id, origin_of(*columns)))
        else:
            origins.setdefault((cell, stage), {})[origin_of(*columns)] = None
    if broken_runs:
        run_ids = sql(NUMBERS.c.run).where(NUMBERS.c.stage == "train", NUMBERS.c.metric == "train_loss").distinct()
        used_runs = {row.run for row in fetch(store, run_ids, NUMBERS.c.cell, broken_runs)}
        for cell, attempts in broken_runs.items():
            origins.setdefault((cell, "train"), {}).update(
                {made_by: None for id, made_by in attempts if id in used_runs}
            )
    return origins
