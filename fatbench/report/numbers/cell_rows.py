"""The one reader of stored numbers and outcomes, and every reason to doubt them.

numbers_of(cells, store, NUMBERS.c.stage == "train")       the numbers, a `Number` each
doubts_of(cells, store)                                    (cell, stage) -> why its accuracy is doubtful
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import select as sql

from fatbench.errors import DatabaseError
from fatbench.report.numbers.doubts import Doubt, Doubts, Outcomes, doubts
from fatbench.report.numbers.shown_runs import changed_since
from fatbench.store import inputs
from fatbench.store.inputs import Inputs
from fatbench.store.problems import disagreement, impossible
from fatbench.store.rows import batches
from fatbench.store.schema import CELLS, NUMBERS, OUTCOME_CHUNKS, RUNS, STAGES
from fatbench.store.selection import MONITORED, Checkpoint, checkpoint_round
from fatbench.store.stage_names import parsed

if TYPE_CHECKING:
    from fatbench.store.stages import Store


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
        chunks_by_stage: dict[tuple[str, str], list[tuple[int, int, bytes]]] = {}
        for cell, stage, start, n, bits in fetch(store, sql(OUTCOME_CHUNKS), OUTCOME_CHUNKS.c.cell, cells):
            chunks_by_stage.setdefault((cell, stage), []).append((start, n, bits))
        return chunks_by_stage

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


def check_accuracies(numbers: Iterable[Number], store: Store, outcomes: Outcomes) -> None:
    """Raise DatabaseError for an accuracy among these numbers that is not the mean of its outcomes."""
    for number in numbers:
        if number.is_accuracy:
            bits, total = outcomes(number.cell, number.stage)
            if problem := disagreement(number.metric, number.value, number.n, bits.bit_count(), total):
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
    from fatbench.suite import asked, format_call  # the cells of suites, which `show` of no evaluation does not need

    examples = {stages[0]: attack for attack, stages in stages_by_attack.items()}  # thousands of cells share a few
    first_chunks = sql(OUTCOME_CHUNKS.c.cell, OUTCOME_CHUNKS.c.stage, OUTCOME_CHUNKS.c.n)
    first_chunks = first_chunks.where(OUTCOME_CHUNKS.c.start == 0)
    cells = {cell for cell, _ in examples}
    sizes = {(cell, stage): n for cell, stage, n in fetch(store, first_chunks, OUTCOME_CHUNKS.c.cell, cells)}
    rows = fetch(store, sql(STAGES.c.cell, STAGES.c.stage, STAGES.c.record), STAGES.c.cell, cells)
    records = {(cell, stage): record for cell, stage, record in rows}
    images = {
        (number.cell, number.stage): number.n for number in numbers if number.cell in cells and number.is_accuracy
    }
    for key, (evaluation, text) in examples.items():
        settings = json.loads(text)
        requested = json.loads(records[key]).get("requested")
        if asked.is_another(key[1], settings, images.get(key), sizes.get(key), requested):
            attack_text = format_call.brief("Attack", asked.attack_of(settings))
            yield stages_by_attack[evaluation, text], Doubt("other_attack", against=attack_text)


def _without_images(numbers: Iterable[Number], bits_of: Outcomes, store: Store) -> dict[tuple[str, str], list[Doubt]]:
    """The doubts about accuracies without stored outcomes, also where so many images cannot give the value."""
    unbacked = [
        number for number in numbers if number.n and number.is_accuracy and not bits_of(number.cell, number.stage)[1]
    ]
    of_clients = numbers_of({number.cell for number in unbacked}, store, EVALUATED & (NUMBERS.c.client >= 0))
    # an accuracy over several deployed models is a multiple of 1 / (models n)
    models = Counter((number.cell, number.stage, number.metric) for number in of_clients)
    doubts_by_stage = {}
    for cell, stage, _, _, metric, value, n, *_ in unbacked:
        doubts_by_stage[cell, stage] = [Doubt("no_outcomes")]
        if impossible(metric, value, n, models[cell, stage, metric] or 1):
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
