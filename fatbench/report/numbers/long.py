"""The numbers behind a table or figure as one frame: a row for each number of one seed.

    numbers, _ = long(plan, points, stored)     those of a table
    numbers = found(asked, stored)              the asked cells and sources with their value, n, stages and doubts
    numbers = frame(store, plan)                all that is stored of a plan's points, with the labels of its axes

What tables and figures print is a query over such a frame (`fatbench.report.tables.entries`).
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas
from pandas import DataFrame, Series
from sqlalchemy import select as sql

from fatbench.methods.intervals import wilson
from fatbench.report.numbers.doubts import Doubt, in_words
from fatbench.report.numbers.points import Points, baselines, measures, point_key
from fatbench.report.numbers.sources import ENDS, OVER_OWN, PRIOR, PRIOR_STAGE, Source, over_clients, unit
from fatbench.report.numbers.statistics import OfClients
from fatbench.report.numbers.stored import (
    OVERALL,
    Number,
    Stored,
    check_accuracies,
    doubts_of,
    fetch,
    outcomes,
    rows_of,
)
from fatbench.store.rows import grouped
from fatbench.store.schema import CELLS, REPLICATES, RUNS, STAGES
from fatbench.store.stage_names import parsed
from fatbench.suite import confounders, format_call
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.types import number

if TYPE_CHECKING:
    from fatbench.store.stages import Store

FOUND = ("value", "n", "stages", "doubts")
NOT_CUT = Doubt("not_cut")
CUT = ("value", "n", "doubts", "outcomes")


def found(asked: DataFrame, stored: Stored) -> DataFrame:
    """The asked rows with value, n, stages (those that it was read from, the last an evaluation's) and doubts.

    asked: cell (a `Cell`) and source (a `Source`), perhaps others. A number that is not measured has the value None.
    """
    asked = asked.reset_index(drop=True)
    of_training = asked["source"].map(lambda source: source.stage == "train").astype(bool)
    parts = [_logged(asked[of_training], stored), _evaluated(asked[~of_training], stored)]
    rows: dict[int, tuple[Any, ...]] = {}
    for part in parts:
        rows.update(part)
    none = (None, 0, (), ())
    return asked.assign(**columns(FOUND, [rows.get(i, none) for i in asked.index]))


def columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, Series[Any]]:
    """Columns of anything: texts, tuples, and integers of a thousand bits, which no array holds."""
    return {name: Series([row[i] for row in rows], dtype=object) for i, name in enumerate(names)}


Found = dict[int, tuple[Any, ...]]  # row -> value, n, stages, doubts


def _logged(asked: DataFrame, stored: Stored) -> Found:
    """Numbers of training in the round of their source, by default the last."""
    if asked.empty:
        return {}
    training = stored.series[stored.series["stage"] == "train"]
    last = stored.rounds.get("last", {})
    pairs = [*zip(asked["cell"], asked["source"], strict=True)]
    wanted = DataFrame(
        {
            "row": asked.index,
            "cell": [cell.id for cell, _ in pairs],
            "metric": [source.metric for _, source in pairs],
            "client": [source.client for _, source in pairs],
            "round": [source.round or last.get(cell.id, 0) for cell, source in pairs],
        }
    )
    of_one = wanted.merge(training, on=["cell", "metric", "client", "round"])
    doubts = {row: stored.doubts.get((cell, "train"), ()) for row, cell in _rows(wanted, "row", "cell")}
    numbers = {row: (value, n, ("train",), doubts[row]) for row, value, n in _rows(of_one, "row", "value", "n")}
    for row, cell, metric, client in _rows(wanted, "row", "cell", "metric", "client"):
        base, _, end = metric.rpartition("_")
        if client == -1 and end in ENDS and row not in numbers:  # of a fraction over clients
            of_clients = training[(training["cell"] == cell) & (training["metric"] == f"{base}_client")]
            values = [*of_clients["value"]]  # over all rounds
            if values and {*values} <= {0.0, 1.0}:
                end_value = wilson(int(sum(values)), len(values))[ENDS.index(end)]
                numbers[row] = end_value, len(values), ("train",), doubts[row]
    return numbers


def _rows(frame: DataFrame, *columns: str) -> Any:
    """The rows of some columns as tuples of Python's own numbers."""
    return zip(*(frame[name].tolist() for name in columns), strict=True)


def _parts(source: Source, cell: Cell, select: str) -> list[tuple[str, list[str]]]:
    """(checkpoint, ids of the evaluations that may be it) of each evaluation that a number is computed from."""

    def named(label: str) -> list[str]:
        return [evaluation.id for evaluation in cell.evaluations if evaluation.label == label]

    if source.stage == "gap":
        return [("best-test", named(source.metric)), ("last", named(source.metric))]
    if source.stage == "all":
        return [(select, named(e.label)) for e in cell.evaluations if source.shows(e)]
    return [(select, named(source.metric))]


def _evaluated(asked: DataFrame, stored: Stored) -> Found:
    """Numbers of evaluations, of several under one name that of most cells, and what is computed from them."""
    kinds: dict[tuple[str, int], int] = {}  # (source, evaluations of a cell), which thousands of cells share
    wanted, counts = [], {}  # one row for each evaluation that may be it
    codes = []
    for cell, source in zip(asked["cell"], asked["source"], strict=True):
        code = kinds.get(key := (source.text, id(cell.evaluations)))
        if code is None:
            code = kinds[key] = len(kinds)
            possible_parts = _parts(source, cell, stored.select)
            counts[code] = len(possible_parts)
            wanted += [(code, i, at, id) for i, (at, ids) in enumerate(possible_parts) for id in ids]
        codes.append(code)
    rows = DataFrame({"row": asked.index, "kind": codes, "cell": [cell.id for cell in asked["cell"]]})
    if not wanted:
        return {}
    possible = rows.merge(DataFrame(wanted, columns=["kind", "part", "checkpoint", "evaluation"]), on="kind")
    at = [stored.at(name).assign(checkpoint=name) for name in possible["checkpoint"].unique()]
    measured = pandas.concat(at)
    measured = possible.merge(measured, on=["cell", "evaluation", "checkpoint"])
    measured = measured.sort_values("most", ascending=False, kind="stable").drop_duplicates(["row", "part"])
    measured = measured.sort_values(["row", "part"], kind="stable")
    # row -> stage, value, n of each part
    parts_of = grouped((row, tuple(part)) for row, *part in _rows(measured, "row", "stage", "value", "n"))
    by_client = _by_client(asked, stored)
    numbers = {}
    for row, kind, cell, source in zip(rows["row"].tolist(), codes, rows["cell"], asked["source"], strict=True):
        parts = parts_of.get(row, [])
        if not parts or len(parts) < counts[kind]:
            continue
        stage, value, n = parts[0]
        doubts = stored.doubts.get((cell, stage), ())
        stages: tuple[str, ...] = ("train", *dict.fromkeys(stage for stage, _, _ in parts))
        if source.stage == "gap":
            value, doubts = value - parts[1][1], ()
        elif source.stage == "all":
            n = min(n for _, _, n in parts)
            every = (doubt for stage, _, _ in parts for doubt in stored.doubts.get((cell, stage), ()))
            doubts = tuple(dict.fromkeys(every))
            answers = [stored.outcomes(cell, stage) for stage, _, _ in parts]
            if {total for _, total in answers} != {answers[0][1]} or not answers[0][1]:
                continue  # not of the same images and models
            # an image counts where its bit is set under every evaluation
            bits, total = functools.reduce(int.__and__, (bits for bits, _ in answers)), answers[0][1]
            own_of_parts = [stored.own.get((cell, stage)) for stage, _, _ in parts]
            if len({None if one is None else one.images for one in own_of_parts}) > 1:
                continue  # as many images, but others
            value = bits.bit_count() / total
            if (own := own_of_parts[0]) is not None:  # as of each part: the mean over the clients that train
                shares = own.shares(bits, total)
                value = statistics.fmean(shares[k] for k in own.accuracies)
        elif (own := stored.own.get((cell, stage))) is not None and (source.client != -1 or source.stage in OVER_OWN):
            if (of_own := own.number(source)) is None:
                continue
            value, n = of_own
        elif source.stage in OVER_OWN:
            continue  # one set of images for all
        elif source.stage.startswith(PRIOR_STAGE):
            of_clients = by_client.get((cell, stage, PRIOR), {})
            prior = over_clients(source, {client: value for client, (value, _) in of_clients.items()})
            if prior is None:
                continue
            value, doubts = prior, ()
        elif source.client != -1:
            of_clients = by_client.get((cell, stage, source.metric), {})
            if source.client not in of_clients:
                continue
            value, n = of_clients[source.client]
        numbers[row] = value, n, stages, doubts
    return numbers


def _by_client(asked: DataFrame, stored: Stored) -> dict[tuple[str, str, str], dict[int, tuple[float, int]]]:
    """(cell, stage, metric) -> client -> (value, n), of the selected model under attacks; empty where none is asked."""
    if not any(source.client != -1 or source.stage.startswith(PRIOR_STAGE) for source in asked["source"]):
        return {}
    series = stored.series[stored.series["stage"] != "train"]
    series = series[series["round"] == series["cell"].map(stored.rounds.get(stored.select, {}))]
    numbers: dict[tuple[str, str, str], dict[int, tuple[float, int]]] = {}
    for cell, stage, metric, client, value, n in _rows(series, "cell", "stage", "metric", "client", "value", "n"):
        numbers.setdefault((cell, stage, metric), {})[client] = value, n
    return numbers


def on_common_images(numbers: DataFrame, counted: Series, stored: Stored) -> tuple[DataFrame, list[str]]:
    """(the numbers, each attack's on the images that all attacks on its data took, from `outcomes`; what was done).

    An attack takes the first n test images, or n of each client's own, so the common ones are those of the attack with
    the fewest. counted: whether a number counts among these attacks.
    """
    rows = [*zip(*(numbers[name] for name in ("cell", "source", "stages", *CUT)), counted, strict=True)]
    shared: dict[str, int] = {}  # data -> images
    shared_own: dict[str, dict[int, int]] = {}  # cell -> client -> images
    for cell, source, stages, value, n, _, of, counts in rows:
        if not (counts and value is not None and n and source.of_images):
            continue
        if isinstance(of, OfClients):
            sizes = stored.own[cell.id, stages[-1]].sizes
            least = shared_own.get(cell.id, sizes)
            shared_own[cell.id] = {k: min(size, sizes[k]) for k, size in least.items() if k in sizes}
        else:
            data = repr(cell.spec["data"])
            shared[data] = min(n, shared.get(data, n))
    cut: list[tuple[Any, ...]] = []
    for cell, source, stages, value, n, doubts, of, _ in rows:
        if isinstance(of, OfClients):
            own, images = stored.own[cell.id, stages[-1]], shared_own.get(cell.id, {})
            if images and own.sizes != images:
                bits, total = stored.outcomes(cell.id, stages[-1])
                if own.sizes.keys() == images.keys() and total == sum(own.sizes.values()):
                    own = own.first(bits, total, images)
                    value, n = own.number(source) or (value, n)
                    of = own.outcomes(value, n, source.of_images)
                else:
                    doubts = (*doubts, NOT_CUT)
            cut.append((value, n, doubts, of))
            continue
        count, (bits, total) = shared.get(repr(cell.spec["data"]), 0), of
        if value is not None and source.of_images and 0 < count < n and total:
            bits, total = first_outcomes((bits, total), n, count)
            value, n = bits.bit_count() / total, count
        elif value is not None and source.of_images and 0 < count < n:
            doubts = (*doubts, NOT_CUT)
        cut.append((value, n, doubts, (bits, total)))
    said = []
    if shared:
        counts = " or ".join(f"{n:,}" for n in dict.fromkeys(shared.values()))
        said.append(f"every attack on the first {counts} test images, which all of them have")
    if shared_own:
        said.append("every attack on own images on the first ones of each client, which all of them have")
    return numbers.assign(**columns(CUT, cut)), said


def first_outcomes(outcomes: tuple[int, int], n: int, image_count: int) -> tuple[int, int]:
    """Cut outcomes (bits, count) of several deployed models to the first `image_count` of their n images."""
    bits, total = outcomes
    first_bits = 0
    for end in range(total - n, -1, -n):  # the first model's images are in the highest bits
        first_bits = first_bits << image_count | (bits >> end + n - image_count) & (1 << image_count) - 1
    return first_bits, total // n * image_count


# --- a row for each number of a seed ------------------------------------------------------------------------------

WORST = "worst:"  # before the label of each side of a worst case
OWN, MINUS, FROM, TO = "", "minus", "from", "to"  # whose number it is: the point's, or one that it is compared with


def long(
    plan: Plan, points: Points, stored: Stored, evaluated: Sequence[Cell] = (), images: str = "all"
) -> tuple[DataFrame, list[str]]:
    """(a row for each number of one seed of a table; how its attacks were cut to the same images, where that is asked).

    Columns: row, group, column (positions in the table), side, cell, source, seed, value (None: not measured), n,
    stages, doubts, outcomes (bits, how many: of an evaluation), never (it will not be measured), chance (what random
    guesses would reach, where training logs it).
    """
    names = ["row", "group", "column", "side", "cell", "source"]
    asked = DataFrame(_asked(plan, points, evaluated), columns=names, dtype=object)
    numbers = found(asked, stored)
    numbers["seed"] = [int(cell.spec["seed"]) for cell in numbers["cell"]]
    pairs = [*zip(numbers["cell"], numbers["source"], numbers["stages"], strict=True)]
    measured = [*zip(numbers["value"], numbers["n"], strict=True)]
    known = [
        (_outcomes(stored, cell, source, stages, *number), not stages and _never(cell, source, stored))
        for (cell, source, stages), number in zip(pairs, measured, strict=True)
    ]
    logged = numbers.loc[numbers["source"].map(lambda source: source.stage == "train"), ["cell", "source"]]
    chances = found(logged.assign(source=[source.chance for source in logged["source"]]), stored)["value"]
    numbers = numbers.assign(**columns(("outcomes", "never"), known), chance=None)
    numbers.loc[logged.index, "chance"] = [*chances]
    if images != "common":
        return numbers, []
    return on_common_images(numbers, numbers["side"].eq(OWN) & numbers["row"].lt(len(points.rows)), stored)


def _outcomes(
    stored: Stored, cell: Cell, source: Source, stages: Sequence[str], value: float | None, n: int
) -> tuple[int, int]:
    """What a test of a number compares: outcomes of images, or numbers of clients; (0, 0) without any."""
    if not stages or value is None:
        return 0, 0
    own = stored.own.get((cell.id, stages[-1]))
    if own is not None and (source.of_images or source.stage in OVER_OWN):
        return own.outcomes(value, n, source.of_images)
    return stored.outcomes(cell.id, stages[-1]) if source.of_images else (0, 0)


def _asked(plan: Plan, points: Points, evaluated: Sequence[Cell]) -> Iterable[tuple[Any, ...]]:
    """(row, group, column, side, cell, source) of each number, in the order in which a table is read."""
    of_headings = [points.table.sources[heading] for heading in points.headings]
    minus = [baselines(plan, spec.minus) for spec in of_headings]
    ends: list[list[tuple[str, Any, Any]]] = [
        [(side, {axis: [name]}, baselines(plan, {axis: [name]})) for axis, names in spec.share.items()
         for side, name in zip((FROM, TO), names, strict=True)]
        + [(f"{WORST}{name}", {axis: [name]}, baselines(plan, {axis: [name]}))
           for axis, names in spec.worst.items() for name in names]
        for spec in of_headings
    ]  # fmt: skip
    known: dict[tuple[int, str], bool] = {}
    for row, row_key in enumerate(points.rows):
        for group, group_key in enumerate(points.groups):
            by_heading = points.cells.get((row_key, group_key), {})
            for column, (heading, spec) in enumerate(zip(points.headings, of_headings, strict=True)):
                source = points.sources[heading]
                cells = []
                for cell in by_heading.get(heading, ()):
                    key = (id(cell.evaluations), heading)
                    if key not in known:
                        known[key] = measures(cell, source)
                    if known[key]:
                        cells.append(cell)
                place = (row, group, column)
                if spec.minus:
                    baseline = {id(cell): minus[column].get(point_key(cell, spec.minus)) for cell in cells}
                    # a cell that differs from the baseline in more than its labels is not compared with it
                    pairs = [
                        (cell, other) for cell in cells
                        if (other := baseline[id(cell)]) not in (None, cell)
                        and other is not None and not confounders.confounders([other, cell])
                    ]  # fmt: skip
                    cells = [cell for cell, _ in pairs]
                    others = [(MINUS, cell) for _, cell in pairs]
                else:
                    others = [
                        (side, other) for side, labels, by_point in ends[column] for cell in cells
                        if (other := by_point.get(point_key(cell, labels))) is not None
                    ]  # fmt: skip
                for side, cell in (*((OWN, cell) for cell in cells), *others):
                    yield *place, side, cell, source
    for row, cell in enumerate(evaluated, len(points.rows)):
        for group, group_key in enumerate(points.groups):
            same_data = any(
                planned.spec["data"] == cell.spec["data"]
                for (_, key), by_heading in points.cells.items()
                if key == group_key
                for cells in by_heading.values()
                for planned in cells
            )
            for column, (heading, spec) in enumerate(zip(points.headings, of_headings, strict=True)):
                source = points.sources[heading]
                if same_data and not spec.relative and source.stage == "evaluation":
                    yield row, group, column, OWN, cell, source


def _never(cell: Cell, source: Source, stored: Stored) -> bool:
    """Whether a missing number will stay missing: its checkpoint is not evaluated, or training does not log it."""
    if source.stage == "train":
        return (source.round or 0) > int(cell.spec["algorithm"]["rounds"]) or cell.id in stored.trained
    checkpoints_read = ("last", "best-test") if source.stage == "gap" else (stored.select,)
    return not set(checkpoints_read) <= {*stored.checkpoints}


# --- all that is stored ----------------------------------------------------------------------------------------

STAGE = ("cell", "stage")
MEASURED = ("stage", "metric", "round", "client", "value", "unit", "n")
OF_RUN = ("suite", "preset", "commit", "dirty", "device", "precision")
ATTACK = ("attack", "eps", "norm")
COLUMNS = ("cell", "seed", *MEASURED, *OF_RUN, "created", "run", *ATTACK, "outcomes", "replicate", "doubts")


def frame(store: Store | None, plan: Plan | None = None, clients: bool = True) -> DataFrame:
    """Every number of a plan's cells, once for each point of the grid; without a plan, of all cells.

    clients: also those about single clients and classes. The ids of the plan's cells say which run of each is read.
    DatabaseError: an accuracy is not the mean of its outcomes.

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
    points: dict[str, dict[tuple[tuple[str, str], ...], None]] | None = None  # cell -> its keys, as an ordered set
    axes: list[str] = []
    if plan is not None:
        points = {}
        for cell in plan.cells:
            points.setdefault(cell.id, {})[tuple(cell.key.items())] = None
        axes = list(dict.fromkeys(axis for keys in points.values() for key in keys for axis, _ in key))
    names = {axis: f"axis:{axis}" if axis in COLUMNS else axis for axis in axes}
    columns = ["cell", *names.values(), *COLUMNS[1:]]
    rows = [] if store is None else rows_of(points, store, None if clients else OVERALL)
    if store is None or not rows:
        return DataFrame(columns=columns)
    facts = _facts_of_runs(store, sorted({row[0] for row in rows}), [Number(*row) for row in rows if row[1] != "train"])
    if points is not None:
        labels = [
            {"stored": id, **{names[axis]: text for axis, text in key}} for id, keys in points.items() for key in keys
        ]
        facts = facts.merge(DataFrame(labels), on="stored")
    numbers = DataFrame(rows, columns=list(Number._fields)).drop(columns=list(STAGE)).merge(facts, on="run")
    # a doubt is about the accuracy of a stage and about none of its other metrics
    numbers["doubts"] = numbers["doubts"].where(numbers["metric"] == numbers["label"], "")
    of_stage = numbers["stage"].eq("train")
    units = {key: unit(*key) for key in {*zip(of_stage, numbers["metric"], strict=True)}}
    numbers["unit"] = [units[key] for key in zip(of_stage, numbers["metric"], strict=True)]
    numbers["created"] = pandas.to_datetime(numbers["created"], utc=True, format="ISO8601")
    return numbers[columns]


def _facts_of_runs(store: Store, cells: list[str], evaluations: list[Number]) -> DataFrame:
    """One row for each run, with the facts of itself, its stage and its cell that its numbers share."""
    runs = fetch(store, sql(*(RUNS.c[name] for name in ("id", *STAGE, *OF_RUN))), RUNS.c.cell, cells)
    settings = [*fetch(store, sql(*(STAGES.c[name] for name in (*STAGE, "settings"))), STAGES.c.cell, cells)]
    seeds = dict(map(tuple, fetch(store, sql(CELLS.c.id, CELLS.c.seed), CELLS.c.id, cells)))
    replicates = {row.id: (row.cell, row.number) for row in fetch(store, sql(REPLICATES), REPLICATES.c.id, cells)}
    attacks = {text: _attack(json.loads(text)) for _, _, text in settings if text is not None}
    attack_by_stage = {(cell, stage): attacks.get(text, (None, None, None)) for cell, stage, text in settings}
    bits_of = outcomes(cells, store)
    check_accuracies(evaluations, store, bits_of)
    doubts = doubts_of(cells, store, bits_of, evaluations)
    return DataFrame.from_records(
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
