"""The stored numbers as one data frame, a row for each: labels, value, provenance and doubts.

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
from fatbench.store.rows import batches, fetch
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
    """Every number of a plan's cells, once for each point of the grid; without a plan, of all cells.

    The ids of the plan's cells say which run of each is read. DatabaseError: an accuracy is not the mean of its
    outcomes.
    """
    points: dict[str, dict[tuple[tuple[str, str], ...], None]] | None = None  # cell -> its keys, as an ordered set
    axes: list[str] = []
    if plan is not None:
        points = {}
        for cell in plan.cells:
            points.setdefault(cell.id, {})[tuple(cell.key.items())] = None
        axes = list(dict.fromkeys(axis for keys in points.values() for key in keys for axis, _ in key))
    names = {axis: f"axis:{axis}" if axis in COLUMNS else axis for axis in axes}
    columns = ["cell", *names.values(), *COLUMNS[1:]]
    values = pandas.DataFrame() if store is None else _values(store, points)
    if store is None or values.empty:
        return pandas.DataFrame(columns=columns)
    heads = _with_facts(store, _heads(store, points))
    accuracies = heads.loc[heads["metric"] == heads["label"], ["id", "stored", "stage", "metric"]]
    rows = values[values["client"] == -1].merge(accuracies, left_on="round_metric", right_on="id")
    integrity.check_accuracies(_rows(rows), store.database)  # an accuracy that contradicts its outcomes is refused here
    head_position = pandas.Index(heads["id"]).get_indexer(values["round_metric"])
    metric = pandas.factorize(heads["metric"], sort=True)[0][head_position]
    # the last key counts most: round, then client, then metric
    order = np.lexsort([metric, values["client"], heads["rank"].to_numpy()[head_position]])
    if points is not None:
        labels = [
            {"stored": id, **{names[axis]: label for axis, label in key}} for id, keys in points.items() for key in keys
        ]
        heads = heads.merge(pandas.DataFrame(labels), on="stored")
    numbers = values.iloc[order].merge(heads, left_on="round_metric", right_on="id")
    return numbers[columns]


def _values(store: Store, cells: Iterable[str] | None) -> pandas.DataFrame:
    """Every value of some cells, or of all, with the id of its row in `_heads`."""
    joined = VALUES.join(ROUND_METRICS, VALUES.c.round_metric == ROUND_METRICS.c.id)
    columns = ("round_metric", "client", "value", "n")
    numbers = _driver_rows(
        store, sql(*(VALUES.c[name] for name in columns)).select_from(joined), ROUND_METRICS.c.cell, cells
    )
    types = {"round_metric": "int64", "client": "int64", "value": "float64", "n": "int64"}
    return pandas.DataFrame(np.array(numbers, dtype=float).reshape(-1, 4), columns=list(columns)).astype(types)


def _heads(store: Store, cells: Iterable[str] | None) -> pandas.DataFrame:
    """One row for each metric of a round of a stage, with the facts its numbers share; `rank` orders the rounds."""
    query = sql(*(ROUND_METRICS.c[name] for name in HEAD))
    heads = pandas.DataFrame.from_records(_driver_rows(store, query, ROUND_METRICS.c.cell, cells), columns=list(HEAD))
    codes = [pandas.factorize(heads[name], sort=True)[0] for name in ("cell", "stage", "round")]
    rank = np.ravel_multi_index(codes, [int(code.max()) + 1 for code in codes])
    return heads.assign(rank=rank)


HEAD = ("id", "cell", "stage", "round", "metric", "run", "created")


def _with_facts(store: Store, heads: pandas.DataFrame) -> pandas.DataFrame:
    """Add the facts of the cell, the stage and the run to each head."""
    cells = sorted(heads["cell"].unique())
    with store.database.reading() as connection:  # rows of SQLAlchemy: a database may have no truth values
        runs_made = list(fetch(connection, sql(*(RUNS.c[name] for name in ("id", *OF_RUN))), RUNS.c.cell, cells))
        stage_rows = list(
            fetch(connection, sql(*(STAGES.c[name] for name in (*STAGE, "settings"))), STAGES.c.cell, cells)
        )
        count_query = sql(OUTCOME_CHUNKS.c.cell, OUTCOME_CHUNKS.c.stage, func.sum(OUTCOME_CHUNKS.c.n))
        count_query = count_query.group_by(OUTCOME_CHUNKS.c.cell, OUTCOME_CHUNKS.c.stage)
        outcome_counts = {
            (cell, stage): int(n) for cell, stage, n in fetch(connection, count_query, OUTCOME_CHUNKS.c.cell, cells)
        }
        seeds = dict(map(tuple, fetch(connection, sql(CELLS.c.id, CELLS.c.seed), CELLS.c.id, cells)))
        replicates_by_id = {row.id: row for row in fetch(connection, sql(REPLICATES), REPLICATES.c.id, cells)}
    attacks = {
        text: format_call.with_all_settings(json.loads(text)) for text in {row.settings for row in stage_rows} - {None}
    }
    doubts_by_stage = cell_rows.doubts_of(cells, store)
    rows = [
        (
            cell,
            stage,
            attacks.get(text),
            "; ".join(in_words(doubts_by_stage.get((cell, stage), ()))),
            outcome_counts.get((cell, stage), 0),
            parsed(stage).metric or None,
        )
        for cell, stage, text in stage_rows
    ]
    stages = pandas.DataFrame.from_records(rows, columns=[*STAGE, "attack", "doubts", "outcomes", "label"])
    cell_facts = pandas.DataFrame.from_records(
        [
            (id, replicates_by_id[id].cell, int(replicates_by_id[id].number), seeds.get(id))
            if id in replicates_by_id
            else (id, id, 0, seeds.get(id))
            for id in cells
        ],
        columns=["stored", "cell", "replicate", "seed"],
    )
    runs = pandas.DataFrame.from_records([tuple(row) for row in runs_made], columns=["run", *OF_RUN])
    heads = heads.merge(stages, on=["cell", "stage"], how="left").merge(runs, on="run", how="left")
    heads = heads.rename(columns={"cell": "stored"}).merge(cell_facts, on="stored", how="left")
    # a doubt is about the accuracy of a stage and about none of its other metrics
    heads["doubts"] = heads["doubts"].where(heads["metric"] == heads["label"], "")
    return heads


STAGE = ("cell", "stage")


def _driver_rows(store: Store, query: Any, key: Any, cells: Iterable[str] | None) -> list[tuple[Any, ...]]:
    """The rows of a query as the database driver gives them, in half the time of SQLAlchemy's own rows."""
    with store.database.reading() as connection:
        query_parts = [query] if cells is None else (query.where(key.in_(query_part)) for query_part in batches(cells))
        return [row for query_part in query_parts for row in connection.execute(query_part).cursor.fetchall()]


def _rows(numbers: pandas.DataFrame) -> list[Mapping[str, Any]]:
    columns = {"cell": "stored", "stage": "stage", "metric": "metric", "client": "client", "value": "value", "n": "n"}
    texts = [numbers[name].tolist() for name in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*texts, strict=True)]
