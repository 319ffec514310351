"""The stored numbers as one data frame, a row for each: labels, value, provenance and doubts.

    numbers = frame(store, plan)          of a plan's points, with the labels of its axes
    numbers = frame(store)                of all that the database holds

| column | type and unit |
|---|---|
| cell, the axes, seed | text; an axis with the name of another column is called "axis:NAME"; seed is an integer |
| stage, metric, round, client | "train", or an evaluation; rounds from 1; client -1: about none |
| value, unit, n | a number in its unit, see `sources.unit`; n: test images behind it, 0: none |
| suite, preset, commit, dirty, device, precision, created, run | of the run that measured it; created: in UTC |
| attack, eps, norm | all settings of the attack; its radius as a number and the norm, None without a radius |
| outcomes | how many outcomes of single images are stored |
| replicate | 0: the first run of the cell in this database, else the number of a further one |
| doubts | in words, separated by "; "; empty: none is known |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas
from sqlalchemy import select as sql

from fatbench.report.numbers import cell_rows
from fatbench.report.numbers.cell_rows import Number
from fatbench.report.numbers.doubts import in_words
from fatbench.report.numbers.sources import unit
from fatbench.store.schema import CELLS, REPLICATES, RUNS, STAGES
from fatbench.store.stage_names import parsed
from fatbench.suite import format_call
from fatbench.suite.types import number

if TYPE_CHECKING:
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Plan

MEASURED = ("stage", "metric", "round", "client", "value", "unit", "n")
OF_RUN = ("suite", "preset", "commit", "dirty", "device", "precision")
ATTACK = ("attack", "eps", "norm")
COLUMNS = ("cell", "seed", *MEASURED, *OF_RUN, "created", "run", *ATTACK, "outcomes", "replicate", "doubts")


def frame(store: Store | None, plan: Plan | None = None, clients: bool = True) -> pandas.DataFrame:
    """Every number of a plan's cells, once for each point of the grid; without a plan, of all cells.

    clients: also those about single clients and classes. The ids of the plan's cells say which run of each is read.
    DatabaseError: an accuracy is not the mean of its outcomes.
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
    rows = [] if store is None else cell_rows.rows_of(points, store, None if clients else cell_rows.OVERALL)
    if store is None or not rows:
        return pandas.DataFrame(columns=columns)
    facts = _facts_of_runs(store, sorted({row[0] for row in rows}), [Number(*row) for row in rows if row[1] != "train"])
    if points is not None:
        labels = [
            {"stored": id, **{names[axis]: label for axis, label in key}} for id, keys in points.items() for key in keys
        ]
        facts = facts.merge(pandas.DataFrame(labels), on="stored")
    numbers = pandas.DataFrame(rows, columns=list(Number._fields)).drop(columns=list(STAGE)).merge(facts, on="run")
    # a doubt is about the accuracy of a stage and about none of its other metrics
    numbers["doubts"] = numbers["doubts"].where(numbers["metric"] == numbers["label"], "")
    of_stage = numbers["stage"].eq("train")
    units = {key: unit(*key) for key in {*zip(of_stage, numbers["metric"], strict=True)}}
    numbers["unit"] = [units[key] for key in zip(of_stage, numbers["metric"], strict=True)]
    numbers["created"] = pandas.to_datetime(numbers["created"], utc=True, format="ISO8601")
    return numbers[columns]


def _facts_of_runs(store: Store, cells: list[str], evaluations: list[Number]) -> pandas.DataFrame:
    """One row for each run, with the facts of itself, its stage and its cell that its numbers share."""
    runs = cell_rows.fetch(store, sql(*(RUNS.c[name] for name in ("id", *STAGE, *OF_RUN))), RUNS.c.cell, cells)
    settings = [*cell_rows.fetch(store, sql(*(STAGES.c[name] for name in (*STAGE, "settings"))), STAGES.c.cell, cells)]
    seeds = dict(map(tuple, cell_rows.fetch(store, sql(CELLS.c.id, CELLS.c.seed), CELLS.c.id, cells)))
    replicates = {
        row.id: (row.cell, row.number) for row in cell_rows.fetch(store, sql(REPLICATES), REPLICATES.c.id, cells)
    }
    attacks = {text: _attack(json.loads(text)) for _, _, text in settings if text is not None}
    attack_by_stage = {(cell, stage): attacks.get(text, (None, None, None)) for cell, stage, text in settings}
    bits_of = cell_rows.outcomes(cells, store)
    cell_rows.check_accuracies(evaluations, store, bits_of)
    doubts = cell_rows.doubts_of(cells, store, bits_of, evaluations)
    return pandas.DataFrame.from_records(
        [
            (
                run, cell, stage, *of_run, *replicates.get(cell, (cell, 0)), seeds[cell], *attack_by_stage[cell, stage],
                bits_of(cell, stage)[1], parsed(stage).metric, "; ".join(in_words(doubts.get((cell, stage), ()))),
            )
            for run, cell, stage, *of_run in runs
        ],
        columns=[
            "run", "stored", "stage", *OF_RUN, "cell", "replicate", "seed", *ATTACK, "outcomes", "label", "doubts"
        ],
    )  # fmt: skip


def _attack(settings: Mapping[str, Any]) -> tuple[str, float | None, str | None]:
    """(all settings as text, radius, norm) of an attack, the radius of one in another that it wraps."""
    inner = settings
    while "eps" not in inner and isinstance(inner.get("attack"), Mapping):
        inner = inner["attack"]
    radius = float(number(inner["eps"])) if "eps" in inner else None
    return format_call.with_all_settings(settings), radius, None if radius is None else inner.get("norm", "Linf")


STAGE = ("cell", "stage")
