"""Read cells without their suite: numbers, outcomes of images, and every reason to doubt them."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import select as sql

from fatbench.report.numbers.doubts import Doubt, Doubts, Outcomes, doubts
from fatbench.store.consistency import impossible
from fatbench.store.rows import batches
from fatbench.store.schema import CELLS, NUMBERS, OUTCOME_CHUNKS, RUNS, STAGES
from fatbench.store.selection import MONITORED, Checkpoint, checkpoint_round
from fatbench.store.stage_names import parsed

if TYPE_CHECKING:
    from fatbench.store.stages import Store


OVERALL = NUMBERS.c.client == -1  # numbers about no single client or class


def fetch(store: Store, query: Any, key: Any, cells: Iterable[str]) -> Iterator[Any]:
    """The rows of `query` whose `key` is among `cells`, read at once so that no transaction stays open."""
    with store.database.reading() as connection:
        row_batches = [connection.execute(query.where(key.in_(cell_batch))).all() for cell_batch in batches(cells)]
    return itertools.chain.from_iterable(row_batches)


def outcomes(cells: Sequence[str], store: Store) -> Outcomes:
    """The outcomes of a cell's stage: those of all cells are read when the first of a stage is asked for."""

    @functools.cache
    def of_stage(stage: str) -> dict[str, list[tuple[int, int, bytes]]]:
        query = sql(OUTCOME_CHUNKS.c.cell, OUTCOME_CHUNKS.c.start, OUTCOME_CHUNKS.c.n, OUTCOME_CHUNKS.c.bits).where(
            OUTCOME_CHUNKS.c.stage == stage
        )
        chunks_by_cell: dict[str, list[tuple[int, int, bytes]]] = {}
        for cell, start, n, bits in fetch(store, query, OUTCOME_CHUNKS.c.cell, cells):
            chunks_by_cell.setdefault(cell, []).append((start, n, bytes(bits)))
        return chunks_by_cell

    return functools.cache(lambda cell, stage: join_chunks(of_stage(stage).get(cell, ())))


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


def doubts_of(cells: Sequence[str], store: Store, read_outcomes: Outcomes | None = None) -> Doubts:
    """Every reason to doubt the evaluations of some cells, by (cell, stage), from all that is stored of them.

    read_outcomes: the cells' outcomes, where they are at hand. What a plan asks for plays no part, so every view has
    the same.
    """
    numbers = numbers_of(cells, store, (NUMBERS.c.stage != "train") & OVERALL)
    evaluated = sorted({row["cell"] for row in numbers})
    stage_query = sql(STAGES.c.cell, STAGES.c.stage, STAGES.c.settings, RUNS.c.device, RUNS.c.commit)
    stage_query = stage_query.outerjoin(RUNS, RUNS.c.id == STAGES.c.run).where(STAGES.c.stage != "train")
    texts, further_doubts = {}, _without_images(numbers, evaluated, store)  # texts: evaluation -> settings as JSON
    for cell, stage, text, device, commit in fetch(store, stage_query, STAGES.c.cell, evaluated):
        if text is None:
            further_doubts.setdefault((cell, stage), []).append(Doubt("no_settings"))
        else:
            texts[parsed(stage).evaluation] = text
        if device is not None and commit is None:
            further_doubts.setdefault((cell, stage), []).append(Doubt("no_commit"))
    attacks = {evaluation: json.loads(text) for evaluation, text in texts.items()}
    specs = fetch(store, sql(CELLS.c.id, CELLS.c.spec), CELLS.c.id, evaluated)
    data = {cell: json.loads(spec).get("data", {}) for cell, spec in specs}
    doubts_by_stage = doubts(numbers, attacks, data, outcomes(cells, store) if read_outcomes is None else read_outcomes)
    return doubts_by_stage | {key: (*doubts_by_stage.get(key, ()), *reasons) for key, reasons in further_doubts.items()}


def _without_images(
    numbers: Iterable[Mapping[str, Any]], cells: Sequence[str], store: Store
) -> dict[tuple[str, str], list[Doubt]]:
    """The doubts about accuracies without stored outcomes, also where so many images cannot give the value.

    An accuracy that contradicts its outcomes is refused where it is read (`fatbench.store.integrity.agree`).
    """
    stages = sql(OUTCOME_CHUNKS.c.cell, OUTCOME_CHUNKS.c.stage).distinct()
    stages_with_outcomes = {tuple(row) for row in fetch(store, stages, OUTCOME_CHUNKS.c.cell, cells)}
    unbacked_rows = [
        row
        for row in numbers
        if row["n"]
        and row["metric"] == parsed(row["stage"]).metric
        and (row["cell"], row["stage"]) not in stages_with_outcomes
    ]
    client_rows = numbers_of(
        {row["cell"] for row in unbacked_rows}, store, (NUMBERS.c.stage != "train") & (NUMBERS.c.client >= 0)
    )
    # an accuracy over several deployed models is a multiple of 1 / (models n)
    models = Counter((row["cell"], row["stage"], row["metric"]) for row in client_rows)
    doubts_by_stage = {}
    for row in unbacked_rows:
        cell, stage, metric, value, n = (row[name] for name in ("cell", "stage", "metric", "value", "n"))
        if impossible(metric, value, n, models[cell, stage, metric] or 1):
            doubts_by_stage[cell, stage] = [Doubt("no_outcomes"), Doubt("impossible", n)]
        else:
            doubts_by_stage[cell, stage] = [Doubt("no_outcomes")]
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
    for row in numbers_of(unrecorded, store, (NUMBERS.c.stage == "train") & monitored):
        series.setdefault(row["cell"], {})[row["round"]] = row["value"]
    best = {cell: checkpoint_round(by_round) for cell, by_round in series.items()}
    return rounds | {cell: round for cell, round in best.items() if round is not None}


_COLUMNS = ("cell", "stage", "round", "client", "metric", "value", "n")


def numbers_of(cells: Iterable[str], store: Store, condition: Any) -> list[Mapping[str, Any]]:
    """The numbers of some cells that satisfy `condition`, each as a mapping of its columns."""
    query = sql(*(NUMBERS.c[name] for name in _COLUMNS)).where(condition)
    return [dict(zip(_COLUMNS, row, strict=True)) for row in fetch(store, query, NUMBERS.c.cell, cells)]


def accuracies(
    cells: Iterable[str], store: Store, stages: Iterable[str] | None = None
) -> dict[tuple[str, str], tuple[float, int]]:
    """(cell, stage) -> (accuracy, test images) of the evaluations of some cells, over all models; by cell and stage.

    stages: only these.
    """
    condition = (NUMBERS.c.stage != "train" if stages is None else NUMBERS.c.stage.in_(list(stages))) & OVERALL
    rows = numbers_of(cells, store, condition)
    accuracies = (row for row in rows if row["metric"] == parsed(row["stage"]).metric)
    return dict(sorted(((row["cell"], row["stage"]), (float(row["value"]), int(row["n"]))) for row in accuracies))
