"""Numbers of a plan for tables and figures, and entries of a table, without a database."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pandas import DataFrame

from fatbench.report.numbers import table_facts
from fatbench.report.numbers.doubts import Outcomes, doubts
from fatbench.report.numbers.stored import Number, Stored
from fatbench.report.numbers.stored import stored as stored_of
from fatbench.report.tables.sheet import ENTRY
from fatbench.store.selection import MONITORED, Checkpoint, checkpoint_round
from fatbench.suite.cells import Plan


def numbers(
    plan: Plan,
    rows: Collection[Any] = (),
    select: Checkpoint = "last",
    *,
    rounds: Mapping[tuple[str, str], int] = MappingProxyType({}),
    runs: Iterable[Mapping[str, Any]] = (),
    outcomes: Outcomes | None = None,
    **stored: Any,
) -> Stored:
    """The numbers of rows: each a `Number`, or a mapping of its fields and its provenance. runs: instead of that.

    rounds: (cell, checkpoint) -> round; one that it lacks is found in the rows of the monitor.
    """
    known = [row if isinstance(row, Number) else _number(row) for row in rows]
    best: dict[tuple[str, str], int] = {}
    for checkpoint, metric in MONITORED.items():
        series: dict[str, dict[int, float]] = {}
        for one in known:
            if one.metric == metric and (one.stage, one.client) == ("train", -1):
                series.setdefault(one.cell, {})[one.round] = one.value
        best |= {(cell, checkpoint): checkpoint_round(by_round) or 0 for cell, by_round in series.items()}
    last = {(cell.id, "last"): int(cell.spec["algorithm"]["rounds"]) for cell in plan.cells}
    origins: dict[tuple[str | None, str], dict[table_facts.Origin, None]] = {}
    for run in runs or rows:
        origins.setdefault((run["cell"], run["stage"]), {})[table_facts.origin(run.get("provenance", run))] = None
    attacks = {
        one.id: one.attack if one.origin is None else {**one.attack, "origin": one.origin.stored_text}
        for evaluations in {id(cell.evaluations): cell.evaluations for cell in plan.cells}.values()
        for one in evaluations
    }
    by_checkpoint: dict[str, dict[str, int]] = {}
    for (cell, checkpoint), round in {**last, **best, **rounds}.items():
        by_checkpoint.setdefault(checkpoint, {})[cell] = round
    return stored_of(
        known,
        select,
        rounds=by_checkpoint,
        doubts=doubts(known, attacks, {cell.id: cell.spec["data"] for cell in plan.cells}, outcomes),
        runs=origins,
        checkpoints=plan.checkpoints,
        **({} if outcomes is None else {"outcomes": outcomes}),
        **stored,
    )


def entries(*numbers: Mapping[str, Any], **columns: Any) -> DataFrame:
    """Entries of one column, a row each, of what is said of them; the rest is as of a number that is not measured."""
    records = [{"row": i, "group": 0, "column": 0, **ENTRY, **said} for i, said in enumerate(numbers)]
    return DataFrame(records, columns=["row", "group", "column", *ENTRY], dtype=object).assign(**columns)


def _number(row: Mapping[str, Any]) -> Number:
    fields = {"client": -1, **row, "n": row["n"] or 0}
    return Number(**{name: fields[name] for name in Number._fields if name in fields})
