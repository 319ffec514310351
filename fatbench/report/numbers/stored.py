"""What a database holds of some cells: the one reader of numbers, outcomes and every reason to doubt them.

numbers_of(cells, store, NUMBERS.c.stage == "train")     the numbers, a `Number` each
doubts_of(cells, store)                                  (cell, stage) -> why its accuracy is doubtful
read(sources, plan, store, "last")                       two frames: a row for each evaluation, for each other number

Only the columns and rows that a view shows are read: `Store.measurements`, `stages` and `runs` give the same and more,
as dicts, which takes several seconds on 10,000 cells.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import select as sql

from fatbench.errors import DatabaseError
from fatbench.report.numbers.doubts import Doubt, Doubts, Outcomes, doubts
from fatbench.report.numbers.shown_runs import changed_since
from fatbench.report.numbers.sources import ENDS, EVERY, PRIOR, OwnImages, Source
from fatbench.report.numbers.statistics import ImageOutcomes
from fatbench.report.numbers.table_facts import Origin, origin
from fatbench.settings import PRECISIONS
from fatbench.store import inputs, replicates
from fatbench.store.inputs import Inputs
from fatbench.store.problems import UNSEEN, disagreement, impossible
from fatbench.store.rows import batches, grouped
from fatbench.store.schema import CELLS, NUMBERS, OUTCOME_CHUNKS, RUNS, STAGES
from fatbench.store.selection import MONITORED, Checkpoint, checkpoint_round
from fatbench.store.stage_names import parsed
from fatbench.suite import asked, format_call

if TYPE_CHECKING:
    from pandas import DataFrame

    from fatbench.report.numbers.statistics import Groups
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Cell, Plan


class Number(NamedTuple):
    """One stored number."""

    cell: str
    stage: str  # "train", or an evaluation
    round: int
    client: int  # -1: about no single client or class
    metric: str
    value: float
    n: int  # test images behind it; 0: none
    run: int = 0  # the run that measured it
    created: str = ""

    @property
    def is_accuracy(self) -> bool:
        """Whether it is the result of an evaluation, over all images and models."""
        return self.client == -1 and self.metric == parsed(self.stage).metric


OVERALL = NUMBERS.c.client == -1  # numbers about no single client or class
EVALUATED = NUMBERS.c.stage != "train"
_TRAINING = NUMBERS.c.stage == "train"


def rows_of(cells: Iterable[str] | None, store: Store, condition: Any = None) -> list[tuple[Any, ...]]:
    """The fields of the stored numbers of some cells, or of all, by cell, stage, round, client and metric."""
    query = sql(*(NUMBERS.c[name] for name in Number._fields))
    query = query.order_by(*(NUMBERS.c[name] for name in ("cell", "stage", "round", "client", "metric")))
    query = query if condition is None else query.where(condition)
    with store.database.reading() as connection:
        parts = [query] if cells is None else [query.where(NUMBERS.c.cell.in_(part)) for part in batches(cells)]
        # the database driver's own rows take half the time of SQLAlchemy's
        return [row for part in parts for row in connection.execute(part).cursor.fetchall()]


def numbers_of(cells: Iterable[str], store: Store, condition: Any) -> list[Number]:
    """The stored numbers of some cells that satisfy a condition, by cell, stage, round, client and metric."""
    return [*map(Number._make, rows_of(cells, store, condition))]


def fetch(store: Store, query: Any, key: Any, cells: Iterable[str]) -> Iterator[Any]:
    """The rows of `query` whose `key` is among `cells`, read at once so that no transaction stays open."""
    with store.database.reading() as connection:
        row_batches = [connection.execute(query.where(key.in_(cell_batch))).all() for cell_batch in batches(cells)]
    return itertools.chain.from_iterable(row_batches)


def outcomes(cells: Iterable[str], store: Store) -> Callable[[str, str], tuple[int, int]]:
    """(cell, stage) -> its outcomes (bits, n), n 0 where none are stored; all are read when the first is asked for."""

    @functools.cache
    def chunks() -> dict[tuple[str, str], list[tuple[int, int, bytes]]]:
        rows = fetch(store, sql(OUTCOME_CHUNKS), OUTCOME_CHUNKS.c.cell, cells)
        return grouped(((cell, stage), (start, n, bits)) for cell, stage, start, n, bits in rows)

    return functools.cache(lambda cell, stage: join_chunks(chunks().get((cell, stage), ())))


def join_chunks(chunks: Iterable[tuple[int, int, bytes]]) -> tuple[int, int]:
    """Join stored chunks (start, n, packed bits) to outcomes (bits, n), the first image in the highest bit."""
    bits, total = 0, 0
    for start, n, data in sorted(chunks):
        if start != total:
            raise ValueError(f"outcomes have a gap at image {total}")
        # a chunk is padded to whole bytes at its end
        bits = (bits << n) | (int.from_bytes(data, "big") >> (8 * len(data) - n))
        total += n
    return bits, total


def own_images_of(cells: Collection[str], store: Store) -> dict[tuple[str, str], OwnImages]:
    """(cell, stage) -> the accuracies of clients on their own images, of the stages that are about these."""
    query = sql(STAGES.c.cell, STAGES.c.stage, STAGES.c.settings, STAGES.c.record)
    query = query.where(STAGES.c.settings.contains('"on"'))
    records = {
        (cell, stage): json.loads(record)
        for cell, stage, settings, record in fetch(store, query, STAGES.c.cell, cells)
        if "on" in json.loads(settings)
    }
    found: dict[tuple[str, str], dict[str, dict[int, tuple[float, int]]]] = {}
    condition = NUMBERS.c.stage.in_(sorted({stage for _, stage in records})) & (NUMBERS.c.client >= 0)
    for number in numbers_of({cell for cell, _ in records}, store, condition) if records else ():
        found.setdefault(number[:2], {}).setdefault(number.metric, {})[number.client] = number.value, number.n
    return {
        key: OwnImages(
            numbers.get(parsed(key[1]).metric, {}),
            numbers.get(UNSEEN, {}),
            {k: value for k, (value, _) in numbers.get("chance", {}).items()},
            records[key].get("images", ""),
        )
        for key, numbers in found.items()
        if key in records
    }


def check_accuracies(numbers: Iterable[Number], store: Store, outcomes: Outcomes) -> None:
    """Raise DatabaseError for an accuracy among these numbers that is not the mean of its outcomes."""
    of_cells: dict[str, dict[tuple[str, str], OwnImages]] = {}
    for number in numbers:
        if number.is_accuracy:
            bits, total = outcomes(number.cell, number.stage)
            if problem := disagreement(number.metric, number.value, number.n, bits.bit_count(), total):
                if number.cell not in of_cells:
                    of_cells[number.cell] = own_images_of([number.cell], store)
                own = of_cells[number.cell].get((number.cell, number.stage))
                if own is not None and not own.contradiction(number.value, number.n, bits, total):
                    continue
                text = f"cell {number.cell} {number.stage}: {problem}"
                raise DatabaseError(f"{store.database.shown}: {text} (fatbench check)")


def doubts_of(
    cells: Collection[str],
    store: Store,
    read_outcomes: Outcomes | None = None,
    read_numbers: Sequence[Number] | None = None,
    answered: Mapping[tuple[str, str], Inputs] | None = None,
) -> Doubts:
    """Every reason to doubt the evaluations of some cells, by (cell, stage), from all that is stored of them.

    read_outcomes, read_numbers, answered: the cells' outcomes, evaluations and inputs, where they are at hand. What a
    plan asks for plays no part, so every view has the same. A changed training is a doubt about ("train").
    """
    numbers = numbers_of(cells, store, EVALUATED & OVERALL) if read_numbers is None else read_numbers
    bits_of = outcomes(cells, store) if read_outcomes is None else read_outcomes
    evaluated = sorted({number.cell for number in numbers})
    stage_query = sql(STAGES.c.cell, STAGES.c.stage, STAGES.c.settings, RUNS.c.device, RUNS.c.commit, RUNS.c.versions)
    stage_query = stage_query.outerjoin(RUNS, RUNS.c.id == STAGES.c.run).where(STAGES.c.stage != "train")
    further_doubts = _without_images(numbers, bits_of, store)
    stages_by_attack: dict[tuple[str, str], list[tuple[str, str]]] = {}  # (evaluation, settings as JSON) -> its stages
    for cell, stage, text, device, commit, versions in fetch(store, stage_query, STAGES.c.cell, evaluated):
        if text is None:
            further_doubts.setdefault((cell, stage), []).append(Doubt("no_settings"))
        else:
            stages_by_attack.setdefault((parsed(stage).evaluation, text), []).append((cell, stage))
        if device is not None and commit is None and '"fatbench"' not in (versions or ""):  # no release either
            further_doubts.setdefault((cell, stage), []).append(Doubt("no_commit"))
    for stages, doubt in _other_attacks(stages_by_attack, numbers, store) if stages_by_attack else ():
        for key in stages:
            further_doubts.setdefault(key, []).append(doubt)
    answered = inputs.stored_inputs(store.database, cells) if answered is None else answered
    for key, reasons in changed_since(store, cells, answered).items():
        further_doubts.setdefault(key, []).extend(Doubt("changed", against=reason.words) for reason in reasons)
    attacks = {evaluation: json.loads(text) for evaluation, text in stages_by_attack}
    specs = fetch(store, sql(CELLS.c.id, CELLS.c.spec), CELLS.c.id, evaluated)
    data = {cell: json.loads(spec).get("data", {}) for cell, spec in specs}
    doubts_by_stage = doubts(numbers, attacks, data, bits_of)
    return doubts_by_stage | {key: (*doubts_by_stage.get(key, ()), *reasons) for key, reasons in further_doubts.items()}


def _other_attacks(
    stages_by_attack: Mapping[tuple[str, str], Sequence[tuple[str, str]]], numbers: Iterable[Number], store: Store
) -> Iterator[tuple[Sequence[tuple[str, str]], Doubt]]:
    """(stages, the doubt about them) of each attack whose settings are not those that its stages are named after.

    stages_by_attack: (evaluation, settings as JSON) -> (cell, stage) of its evaluations.
    """
    examples = {stages[0]: attack for attack, stages in stages_by_attack.items()}  # thousands of cells share a few
    first_chunks = sql(OUTCOME_CHUNKS.c.cell, OUTCOME_CHUNKS.c.stage, OUTCOME_CHUNKS.c.n)
    first_chunks = first_chunks.where(OUTCOME_CHUNKS.c.start == 0)
    cells = {cell for cell, _ in examples}
    sizes = {(cell, stage): n for cell, stage, n in fetch(store, first_chunks, OUTCOME_CHUNKS.c.cell, cells)}
    rows = fetch(store, sql(STAGES.c.cell, STAGES.c.stage, STAGES.c.record), STAGES.c.cell, cells)
    records = {(cell, stage): record for cell, stage, record in rows}
    images = {(one.cell, one.stage): one.n for one in numbers if one.cell in cells and one.is_accuracy}
    for key, (evaluation, text) in examples.items():
        settings = json.loads(text)
        requested = json.loads(records[key]).get("requested")
        if asked.is_another(key[1], settings, images.get(key), sizes.get(key), requested):
            attack_text = format_call.brief("Attack", asked.attack_of(settings))
            yield stages_by_attack[evaluation, text], Doubt("other_attack", against=attack_text)


def _without_images(numbers: Iterable[Number], bits_of: Outcomes, store: Store) -> dict[tuple[str, str], list[Doubt]]:
    """The doubts about accuracies without stored outcomes, also where so many images cannot give the value."""
    unbacked = [one for one in numbers if one.n and one.is_accuracy and not bits_of(one.cell, one.stage)[1]]
    of_clients = numbers_of({number.cell for number in unbacked}, store, EVALUATED & (NUMBERS.c.client >= 0))
    # an accuracy over several deployed models is a multiple of 1 / (models n)
    models = Counter((number.cell, number.stage, number.metric) for number in of_clients)
    images: Counter[tuple[str, str, str]] = Counter()  # of own images the sum over clients is n
    for number in of_clients:
        images[number.cell, number.stage, number.metric] += number.n
    doubts_by_stage = {}
    for cell, stage, _, _, metric, value, n, *_ in unbacked:
        doubts_by_stage[cell, stage] = [Doubt("no_outcomes")]
        if n != images[cell, stage, metric] and impossible(metric, value, n, models[cell, stage, metric] or 1):
            doubts_by_stage[cell, stage].append(Doubt("impossible", n))
    return doubts_by_stage


def rounds_of(specs: Mapping[str, Mapping[str, Any]], store: Store, checkpoint: Checkpoint) -> dict[str, int]:
    """Cell -> the round whose model a checkpoint is, for the cells where it is known. specs: cell -> its spec.

    The train stage has recorded the best rounds; those of another program may lack it and have the series alone.
    """
    if checkpoint == "last":
        return {cell: int(spec["algorithm"]["rounds"]) for cell, spec in specs.items()}
    rounds, unrecorded = {}, []
    query = sql(STAGES.c.cell, STAGES.c.record).where(STAGES.c.stage == "train")
    for cell, text in fetch(store, query, STAGES.c.cell, specs):
        record = json.loads(text)
        if checkpoint in record:
            rounds[cell] = int(record[checkpoint]["round"])
        else:
            unrecorded.append(cell)  # its best round is found in its series
    series: dict[str, dict[int, float]] = {}
    monitored = (NUMBERS.c.metric == MONITORED[checkpoint]) & OVERALL
    for number in numbers_of(unrecorded, store, (NUMBERS.c.stage == "train") & monitored):
        series.setdefault(number.cell, {})[number.round] = number.value
    best = {cell: checkpoint_round(by_round) for cell, by_round in series.items()}
    return rounds | {cell: round for cell, round in best.items() if round is not None}


def accuracies(
    cells: Iterable[str], store: Store, stages: Iterable[str] | None = None
) -> dict[tuple[str, str], tuple[float, int]]:
    """(cell, stage) -> (accuracy, test images) of the evaluations of some cells, over all models; by cell and stage.

    stages: only these.
    """
    condition = (EVALUATED if stages is None else NUMBERS.c.stage.in_(list(stages))) & OVERALL
    numbers = numbers_of(cells, store, condition)
    return {(number.cell, number.stage): (number.value, number.n) for number in numbers if number.is_accuracy}


def runs_of_cell(store: Store, cell: str) -> list[dict[str, Any]]:
    """One record for each run of a cell: where it ran, and its evaluations (stage -> value)."""
    original, _, _ = cell.partition(replicates.SIGN)
    run_records = []
    ids = replicates.by_cell(store.database, [original]).get(original, [])
    numbers = accuracies(ids, store)
    for id in ids:
        training_runs = (run for run in store.runs([id]) if run["stage"] == "train" and not run.get("dropped"))
        run = next(training_runs, {})  # an external model has no training
        values = {stage: value for (cell, stage), (value, _) in numbers.items() if cell == id}
        provenance = {key: run.get(key) for key in ("host", "device", "precision", "commit", "dirty", "started")}
        run_records.append({"id": id, **provenance, "evaluations": values})
    return run_records


# --- two frames ---------------------------------------------------------------------------------------------------

NO_INPUTS = Inputs()


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
    own: Mapping[tuple[str, str], OwnImages] = field(default_factory=dict)  # of stages on the clients' own images
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
        of_images = 0 if (cell.id, metric) in self._on_own_images else n  # they are others in each seed
        for ran in self.origins(cell.id, stage) or (None,):
            yield cell.id, cell.spec["data"]["name"], metric, of_images, stage, ran

    @functools.cached_property
    def _on_own_images(self) -> set[tuple[str, str]]:
        return {(cell, parsed(stage).metric) for cell, stage in self.own}

    def images(self, cell: str, stage: str) -> set[str]:
        """The fingerprints of the data that a stage was measured on, as far as its runs say."""
        return {origin.data[2] for origin in self.origins(cell, stage) if origin.data is not None and origin.data[2]}

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
            answers: ImageOutcomes | None = (bits, total) if n and total and total % n == 0 else None
            if (own := self.own.get((cell, stage))) is not None:
                answers = own.outcomes(value, n)
            numbers.setdefault(cell, {})[evaluation] = Measurement(
                value, n, answers, self.doubts.get((cell, stage), ()), stage, self.inputs.get((cell, stage), NO_INPUTS)
            )
        return numbers


def stored(rows: Sequence[Number], select: Checkpoint = "last", **known: Any) -> Stored:
    """What rows of numbers hold. known: the other fields of `Stored`."""
    from pandas import DataFrame  # `status` and a run import this module for its doubts alone

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
        own=own_images_of(specs, store),
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
        if EVERY not in clients:  # else every client is needed
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
            used = {made_by: None for id, made_by in attempts if id in used_runs}
            origins.setdefault((cell, "train"), {}).update(used)
    return origins
