"""One frame of the stored numbers, a row a number: its labels, its value, what made it, and why to doubt it.

    numbers = frame(store, plan)          of a plan's points, with the labels of its axes
    numbers = frame(store)                of all that the database holds

| column | type and unit |
|---|---|
| cell, the axes, seed | text; an axis with the name of another column is called "axis:NAME"; seed is an integer |
| stage, metric, round, client | "train", or an evaluation; rounds from 1; client -1: about none |
| value, n | a fraction in [0, 1] or a plain number; n: test images behind it, 0: none |
| suite, preset, commit, dirty, device, precision, created, run | of the run that measured it |
| attack, outcomes | all settings of the attack; how many outcomes of single images are stored |
| replicate | 0: the first run of the cell in this database, else the number of a further one |
| doubts | in words, separated by "; "; empty: none is known |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas
from sqlalchemy import func
from sqlalchemy import select as sql

from fatbench.report.numbers import cell_rows
from fatbench.report.numbers.doubts import in_words
from fatbench.store import integrity
from fatbench.store.rows import fetch
from fatbench.store.schema import CELLS, OUTCOME_CHUNKS, REPLICATES, ROUND_METRICS, RUNS, STAGES, VALUES
from fatbench.store.stage_names import parsed
from fatbench.suite import format_call

if TYPE_CHECKING:
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Plan

MEASURED = ("stage", "metric", "round", "client", "value", "n")
OF_RUN = ("suite", "preset", "commit", "dirty", "device", "precision")
COLUMNS = ("cell", "seed", *MEASURED, *OF_RUN, "created", "run", "attack", "outcomes", "replicate", "doubts")


def frame(store: Store | None, plan: Plan | None = None) -> pandas.DataFrame:
    """Every number of a plan's cells, of which a point of the grid has each row once; without a plan, of all cells.

    The ids of the plan's cells say which run of each is read. DatabaseError: an accuracy is not the mean of its
    outcomes.
    """
    points: dict[str, dict[tuple[tuple[str, str], ...], None]] | None = None
    if plan is not None:
        points = {}
        for cell in plan.cells:
            points.setdefault(cell.id, {})[tuple(cell.key.items())] = None
    numbers = pandas.DataFrame(columns=list(COLUMNS)) if store is None else _measured(store, points)
    if points is None:
        return numbers.drop(columns="stored", errors="ignore")
    axes = list(dict.fromkeys(axis for keys in points.values() for key in keys for axis, _ in key))
    names = {axis: f"axis:{axis}" if axis in COLUMNS else axis for axis in axes}
    labels = [
        {"stored": id, **{names[axis]: label for axis, label in key}} for id, keys in points.items() for key in keys
    ]
    if numbers.empty:
        return pandas.DataFrame(columns=["cell", *names.values(), *COLUMNS[1:]])
    found = numbers.merge(pandas.DataFrame(labels), on="stored", how="inner")
    return found[["cell", *names.values(), *COLUMNS[1:]]]


def _measured(store: Store, cells: Iterable[str] | None) -> pandas.DataFrame:
    """The rows of some cells, or of all, by cell, stage, round, client and metric."""
    cells = None if cells is None else list(cells)
    heads = _read(store, sql(*(ROUND_METRICS.c[name] for name in HEAD)), ROUND_METRICS.c.cell, cells, HEAD)
    joined = VALUES.join(ROUND_METRICS, VALUES.c.round_metric == ROUND_METRICS.c.id)
    columns = ("round_metric", "client", "value", "n")
    values = sql(*(VALUES.c[name] for name in columns)).select_from(joined)
    numbers = _read(store, values, ROUND_METRICS.c.cell, cells, columns)
    if numbers.empty:
        return pandas.DataFrame(columns=["stored", *COLUMNS])
    heads = _with_facts(store, heads, sorted(heads["cell"].unique()))
    place = pandas.Index(heads["id"]).get_indexer(numbers["round_metric"])
    for column in heads.columns.drop("id"):
        numbers[column] = heads[column].to_numpy()[place]
    accuracy = (numbers["metric"] == numbers["label"]).to_numpy()
    numbers["doubts"] = np.where(accuracy, numbers["doubts"], "")
    integrity.agree(_rows(numbers[accuracy & (numbers["client"] == -1)]), store.database)
    order = [numbers[name].to_numpy() for name in ("metric", "client", "round", "stage", "stored")]
    sorted_codes = [pandas.factorize(keys, sort=True)[0] for keys in order]
    return numbers.iloc[np.lexsort(sorted_codes)][["stored", *COLUMNS]].reset_index(drop=True)


HEAD = ("id", "cell", "stage", "round", "metric", "run", "created")


def _with_facts(store: Store, heads: pandas.DataFrame, cells: list[str]) -> pandas.DataFrame:
    """What all numbers of a metric of one round share, with what is known of their cell, their stage and their run."""
    runs = _read(store, sql(*(RUNS.c[name] for name in ("id", *OF_RUN))), RUNS.c.cell, cells, ("run", *OF_RUN))
    stages = _read(store, sql(STAGES.c.cell, STAGES.c.stage, STAGES.c.settings), STAGES.c.cell, cells, STAGE)
    attacks = {text: format_call.full(json.loads(text)) for text in stages["attack"].dropna().unique()}
    stages["attack"] = stages["attack"].map(attacks).astype(object).where(stages["attack"].notna(), None)
    keys = [*zip(stages["cell"], stages["stage"], strict=True)]
    why = cell_rows.doubts_of(cells, store)
    texts = {key: "; ".join(in_words(found)) for key, found in why.items()}
    stages["doubts"] = [texts.get(key, "") for key in keys]
    counted = sql(OUTCOME_CHUNKS.c.cell, OUTCOME_CHUNKS.c.stage, func.sum(OUTCOME_CHUNKS.c.n))
    counted = counted.group_by(OUTCOME_CHUNKS.c.cell, OUTCOME_CHUNKS.c.stage)
    with store.database.reading() as connection:
        kept = {(cell, stage): int(n) for cell, stage, n in fetch(connection, counted, OUTCOME_CHUNKS.c.cell, cells)}
        seeds = dict(map(tuple, fetch(connection, sql(CELLS.c.id, CELLS.c.seed), CELLS.c.id, cells)))
    stages["outcomes"] = [kept.get(key, 0) for key in keys]
    stages["label"] = [parsed(stage).metric or None for stage in stages["stage"]]
    heads = heads.merge(stages, on=["cell", "stage"], how="left").merge(runs, on="run", how="left")
    heads["stored"], heads["seed"] = heads["cell"], heads["cell"].map(seeds)
    with store.database.reading() as connection:
        found = {row.id: row for row in fetch(connection, sql(REPLICATES), REPLICATES.c.id, cells)}
    first = {id: row.cell for id, row in found.items()}
    number = {id: int(row.number) for id, row in found.items()}
    heads["cell"] = heads["stored"].map(lambda id: first.get(id, id))
    return heads.assign(replicate=heads["stored"].map(lambda id: number.get(id, 0)))


STAGE = ("cell", "stage", "attack")


def _read(store: Store, query: Any, key: Any, cells: Iterable[str] | None, columns: Iterable[str]) -> pandas.DataFrame:
    with store.database.reading() as connection:
        rows = [tuple(row) for row in fetch(connection, query, key, cells)]
    return pandas.DataFrame.from_records(rows, columns=list(columns))


def _rows(numbers: pandas.DataFrame) -> list[Mapping[str, Any]]:
    columns = ("cell", "stage", "metric", "client", "value", "n")
    shown = numbers.assign(cell=numbers["stored"])[list(columns)].astype(object)
    return [dict(zip(columns, row, strict=True)) for row in shown.itertuples(index=False, name=None)]
