"""Numbers of a plan for tables and figures, without a database."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from fatbench.report.numbers import provenance
from fatbench.report.numbers.doubts import Outcomes, doubts
from fatbench.report.numbers.measurements import Numbers
from fatbench.report.numbers.number import Number
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
) -> Numbers:
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
    origins: dict[tuple[str | None, str], dict[provenance.Origin, None]] = {}
    for run in runs or rows:
        origins.setdefault((run["cell"], run["stage"]), {})[provenance.origin(run.get("provenance", run))] = None
    attacks = {
        one.id: one.attack if one.origin is None else {**one.attack, "origin": one.origin.stored_text}
        for evaluations in {id(cell.evaluations): cell.evaluations for cell in plan.cells}.values()
        for one in evaluations
    }
    return Numbers(
        known,
        select,
        rounds={**last, **best, **rounds},
        doubts=doubts(known, attacks, {cell.id: cell.spec["data"] for cell in plan.cells}, outcomes),
        outcomes=outcomes,
        runs=origins,
        checkpoints=plan.checkpoints,
        **stored,
    )


def _number(row: Mapping[str, Any]) -> Number:
    fields = {"client": -1, **row, "n": row["n"] or 0}
    return Number(**{name: fields[name] for name in Number._fields if name in fields})
