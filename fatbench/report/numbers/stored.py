"""What a database holds of a plan's cells, as two frames: a row for each evaluation, a row for each other number.

Only the columns and rows that a view shows are read: `Store.measurements`, `stages` and `runs` give the same and more,
as dicts, which takes several seconds on 10,000 cells.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from pandas import DataFrame
from sqlalchemy import select as sql

from fatbench.report.numbers.cell_rows import (
    EVALUATED,
    OVERALL,
    Number,
    check_accuracies,
    doubts_of,
    fetch,
    numbers_of,
    outcomes,
    rounds_of,
)
from fatbench.report.numbers.doubts import Doubt, Doubts, Outcomes
from fatbench.report.numbers.provenance import Origin, origin
from fatbench.report.numbers.sources import ENDS, EVERY, PRIOR, RANGE, Source
from fatbench.report.numbers.statistics import ImageOutcomes
from fatbench.settings import PRECISIONS
from fatbench.store import inputs
from fatbench.store.inputs import Inputs
from fatbench.store.schema import NUMBERS, RUNS, STAGES
from fatbench.store.selection import Checkpoint
from fatbench.store.stage_names import parsed

if TYPE_CHECKING:
    from fatbench.report.numbers.statistics import Groups
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Cell, Plan

_TRAINING = NUMBERS.c.stage == "train"


NO_INPUTS: Inputs = {}


@dataclass(slots=True)  # a comparison of ten thousand cells makes fifty thousand
class Measurement:
    """One seed's accuracy with all that is known of it."""

    value: float
    n: int  # test images
    outcomes: ImageOutcomes | None = (
        None  # of every image, by each model that is deployed; None: not stored, or not read
    )
    doubts: tuple[Doubt, ...] = ()
    stage: str = ""  # of the evaluation
    inputs: Inputs = field(default_factory=lambda: NO_INPUTS)  # what answered it, see `fatbench.store.inputs`
    groups: Groups | None = field(default=None, compare=False)  # of its images; None: each is its own

    @property
    def precision(self) -> str:
        """The precision of the attack."""
        return parsed(self.stage).precision


@dataclass
class Stored:
    """The stored numbers that a view needs, and what is known of them; `stored` makes it of rows, `read` of a database.

    evaluations: cell, evaluation, round (of the model), stage, label, value, n, most (how many cells have this stage's
    name); of several precisions that of most cells, then the highest. series: cell, stage, metric, client, round,
    value, n of all other numbers. rounds: checkpoint -> cell -> round of its model. runs: (cell, stage), or (None,
    stage) where all cells share it -> what ran. failed: cells of which something failed and was not run again since.
    trained: cells whose training is done. checkpoints: those that are evaluated.
    """

    evaluations: DataFrame
    series: DataFrame
    select: Checkpoint = "last"
    rounds: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    doubts: Doubts = field(default_factory=dict)
    outcomes: Outcomes = lambda cell, stage: (0, 0)
    inputs: Mapping[tuple[str, str], Inputs] = field(default_factory=dict)  # what answered each stage
    runs: Mapping[tuple[str | None, str], Collection[Origin]] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()
    trained: frozenset[str] = frozenset()
    checkpoints: Collection[str] = ()

    def at(self, checkpoint: str) -> DataFrame:
        """The evaluations of each cell's model at a checkpoint."""
        rounds = self.evaluations["cell"].map(self.rounds.get(checkpoint, {}))
        return self.evaluations[self.evaluations["round"] == rounds]

    def origins(self, cell: str, stage: str) -> Collection[Origin]:
        """The origins of a stage of a cell: the machines and code that ran it."""
        return self.runs.get((cell, stage)) or self.runs.get((None, stage)) or ()

    def behind(self, cell: Cell, stage: str, metric: str, n: int) -> Iterable[tuple[Any, ...]]:
        """The runs of a stage behind a number, see `provenance.BEHIND`."""
        for ran in self.origins(cell.id, stage) or (None,):
            yield cell.id, cell.spec["data"]["name"], metric, n, stage, ran

    def images(self, cell: str, stage: str) -> set[str]:
        """The fingerprints of the data that a stage was measured on, as far as its runs say."""
        return {origin.data[2] for origin in self.origins(cell, stage) if origin.data is not None and origin.data[2]}

    def logged(self, cell: str, metric: str) -> dict[int, dict[int, float]]:
        """Client -> round -> each finite number that training has logged."""
        return self._logged.get((cell, metric), {})

    @functools.cached_property
    def _logged(self) -> dict[tuple[str, str], dict[int, dict[int, float]]]:
        training = self.series[(self.series["stage"] == "train") & np.isfinite(self.series["value"])]
        columns = (training[name].tolist() for name in ("cell", "metric", "client", "round", "value"))
        numbers: dict[tuple[str, str], dict[int, dict[int, float]]] = {}
        for cell, metric, client, round, value in zip(*columns, strict=True):
            numbers.setdefault((cell, metric), {}).setdefault(client, {})[round] = value
        return numbers

    def evaluated(self, cell: str) -> dict[str, Measurement]:
        """Evaluation ("pgd20-0a1b2c3d": attack, images and batch) -> a cell's number at the checkpoint, for tests."""
        return self._evaluated.get(cell, {})

    @functools.cached_property
    def _evaluated(self) -> dict[str, dict[str, Measurement]]:
        numbers: dict[str, dict[str, Measurement]] = {}
        columns = ["cell", "evaluation", "stage", "value", "n"]
        rows = self.at(self.select).sort_values("evaluation")[columns].itertuples(index=False, name=None)
        for cell, evaluation, stage, value, n in rows:
            bits, total = self.outcomes(cell, stage)
            answers = (bits, total) if n and total and total % n == 0 else None
            numbers.setdefault(cell, {})[evaluation] = Measurement(
                value, n, answers, self.doubts.get((cell, stage), ()), stage, self.inputs.get((cell, stage), {})
            )
        return numbers


def stored(rows: Sequence[Number], select: Checkpoint = "last", **known: Any) -> Stored:
    """What rows of numbers hold. known: the other fields of `Stored`."""
    numbers = DataFrame(rows, columns=[*Number._fields]).drop(columns=["run", "created"])
    numbers = numbers.astype({"round": int, "client": int, "n": int, "value": float})
    names = {stage: parsed(stage) for stage in numbers["stage"].unique()}
    label = numbers["stage"].map(lambda name: names[name].metric)
    is_accuracy = (numbers["client"] == -1) & (numbers["metric"] == label)
    found = numbers[is_accuracy]
    stages = found["stage"]
    found = found.assign(
        label=found["metric"],
        evaluation=stages.map(lambda name: names[name].evaluation),
        round=stages.map(lambda name: names[name].round).astype(int),
        most=stages.map(stages.value_counts()).astype(int),
        height=stages.map(lambda name: -PRECISIONS.index(names[name].precision)),
    ).sort_values(["most", "height"], kind="stable")
    found = found.drop_duplicates(["cell", "evaluation", "round"], keep="last")
    found = found[["cell", "evaluation", "round", "stage", "label", "value", "n", "most"]]
    return Stored(found, numbers[~is_accuracy], select, **known)


def evaluations(
    specs: Mapping[str, Mapping[str, Any]],
    store: Store,
    select: Checkpoint,
    further: Iterable[Checkpoint] = (),
    clients: Any = OVERALL,
    training: Any = None,
    **known: Any,
) -> Stored:
    """The numbers of all evaluations of some cells, at a checkpoint and further ones. specs: cell -> its spec.

    clients: a condition on the clients of numbers. training: a condition on numbers of training to read as well.
    DatabaseError: an accuracy is not the mean of its outcomes.
    """
    checkpoints: set[Checkpoint] = {select, *further}
    rounds = {checkpoint: rounds_of(specs, store, checkpoint) for checkpoint in sorted({*checkpoints, "last"})}
    numbers = numbers_of(specs, store, EVALUATED & clients)
    bits_of = outcomes(specs, store)
    evaluated = {(cell, round) for checkpoint in checkpoints for cell, round in rounds[checkpoint].items()}
    check_accuracies((number for number in numbers if (number.cell, number.round) in evaluated), store, bits_of)
    trained = [] if training is None else numbers_of(specs, store, _TRAINING & training)
    answered = inputs.stored_inputs(store.database, specs)
    return stored(
        [*numbers, *trained],
        select,
        rounds=rounds,
        doubts=doubts_of(specs, store, bits_of, numbers, answered),
        outcomes=bits_of,
        inputs=answered,
        **known,
    )


def read(texts: Iterable[str], plan: Plan, store: Store, select: Checkpoint, *, curves: bool = False) -> Stored:
    """The numbers, checkpoints and runs that sources of a suite need of the plan's cells, and all their evaluations.

    curves: whether the numbers of training are those of every round; else of the rounds that the sources name.
    """
    sources = [Source.parse(text) for text in texts]
    further: tuple[Checkpoint, ...] = ("best-test", "last") if any(source.stage == "gap" for source in sources) else ()
    specs = {cell.id: cell.spec for cell in plan.cells}
    trained = [source for source in sources if source.stage == "train"]
    metrics = {metric for source in trained for metric in (source.metric, source.chance.metric)}
    condition: Any = None
    if metrics:
        condition = NUMBERS.c.metric.in_(sorted(metrics))
        if not curves:
            # Without "@round" a training number is the last round's: of some suites that is one row in a hundred.
            ends = {int(spec["algorithm"]["rounds"]) for spec in specs.values()}
            condition &= NUMBERS.c.round.in_(sorted({r for s in trained for r in ([s.round] if s.round else ends)}))
        clients = {source.client for source in trained}
        if clients.isdisjoint({EVERY, RANGE}):  # else every client is needed
            condition &= NUMBERS.c.client.in_(sorted(clients))
        interval_metrics = {f"{base}_client" for base, _, end in (m.rpartition("_") for m in metrics) if end in ENDS}
        condition |= NUMBERS.c.metric.in_(sorted(interval_metrics))
    columns = (STAGES.c.cell, STAGES.c.stage, STAGES.c.status)
    stages = [tuple(row) for row in fetch(store, sql(*columns), STAGES.c.cell, specs)]
    numbers = evaluations(
        specs,
        store,
        select,
        further,
        _client_condition(sources),
        condition,
        failed=frozenset(cell for cell, _, status in stages if status == "failed"),
        trained=frozenset(cell for cell, stage, status in stages if (stage, status) == ("train", "done")),
        checkpoints=tuple(plan.checkpoints),
    )
    numbers.runs = _runs(specs, store, numbers.evaluations["stage"].unique())
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
