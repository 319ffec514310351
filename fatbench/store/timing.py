"""How long stages took on this machine, as the basis of estimates."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from fatbench.store.database import patient
from fatbench.store.leases import epoch
from fatbench.store.schema import CELLS, NUMBERS, RUNS, STAGES
from fatbench.store.stages import Store

LATEST = 5_000  # runs that an estimate uses
PAUSE = 10.0  # seconds between two stages of a process that still count for the second


@dataclass(frozen=True)
class TimedRun:
    """One run of a stage.

    `wall` is the time from the end of its process's previous stage to its own end, minus rounds that do not count.
    """

    spec: Mapping[str, Any]
    attack: Mapping[str, Any] | None  # None: training
    count: float  # image passes of training; images attacked, once for each model
    seconds: float
    wall: float | None  # None if the run did not finish


@patient
def timed_runs(store: Store, after_round: int = 0, everywhere: bool = False) -> list[TimedRun]:
    """The LATEST runs on this machine, or everywhere, on the device of the last run.

    Only training rounds after `after_round` count. Older runs are ignored: the machine may have changed, and there may
    be a million.
    """
    condition = RUNS.c.host.is_not(None) if everywhere else RUNS.c.host == socket.gethostname()
    latest = select(RUNS.c.id).where(condition).order_by(RUNS.c.id.desc()).limit(LATEST).subquery()
    with store.database.reading() as connection:
        condition &= RUNS.c.id >= (connection.scalar(select(func.min(latest.c.id))) or 0)
    counts = (NUMBERS.c.round > after_round) | (NUMBERS.c.stage != "train")
    numbers = (
        select(NUMBERS.c.run, NUMBERS.c.metric, counts, func.sum(NUMBERS.c.value))
        .join(RUNS, RUNS.c.id == NUMBERS.c.run)
        # restricted to cells that ran here: numbers are indexed by cell, and there may be millions
        .where(
            condition,
            NUMBERS.c.cell.in_(select(RUNS.c.cell).where(condition)),
            NUMBERS.c.client == -1,
            NUMBERS.c.metric.in_(["forward", "backward", "seconds"]),
        )
        .group_by(NUMBERS.c.run, NUMBERS.c.metric, counts)
    )
    runs = (
        select(
            RUNS.c.id, RUNS.c.cell, RUNS.c.stage, RUNS.c.status, RUNS.c.started, RUNS.c.ended, RUNS.c.device,
            RUNS.c.pid, RUNS.c.process, RUNS.c.extra, STAGES.c.total, STAGES.c.settings,
        )
        .join(STAGES, (STAGES.c.cell == RUNS.c.cell) & (STAGES.c.stage == RUNS.c.stage) & (STAGES.c.run == RUNS.c.id))
        .where(condition)
        .order_by(RUNS.c.id)
    )  # fmt: skip
    with store.database.reading() as connection:
        sums_by_run: dict[int, dict[str, float]] = {}
        uncounted: dict[int, float] = {}
        for run, metric, is_counted, value in connection.execute(numbers):
            if is_counted:
                sums_by_run.setdefault(run, {})[metric] = value
            elif metric == "seconds":
                uncounted[run] = value
        rows = [row for row in connection.execute(runs).all() if sums_by_run.get(row.id, {}).get("seconds")]
        rows = [row for row in rows if row.device == rows[-1].device]
        specs = select(CELLS.c.id, CELLS.c.spec).where(CELLS.c.id.in_(select(RUNS.c.cell).where(condition)))
        spec_by_cell = {id: json.loads(spec) for id, spec in connection.execute(specs)} if rows else {}
    attacks = {
        text: {key: value for key, value in json.loads(text).items() if key not in ("implementation", "on", "origin")}
        for text in {row.settings for row in rows if row.settings}
    }
    timed = []
    process_ended: dict[tuple[Any, Any], float] = {}  # {(pid, process): end of its last stage}
    for row in rows:
        run_sums = sums_by_run[row.id]
        attack = attacks.get(row.settings)
        count = row.total if attack else run_sums.get("forward", 0.0) + run_sums.get("backward", 0.0)
        seconds, wall = run_sums["seconds"], None
        if row.status == "done":
            start_time, end_time = epoch(row.started) or 0.0, epoch(row.ended) or 0.0
            last_end = process_ended.get((row.pid, row.process), 0.0)
            if 0 <= start_time - last_end < PAUSE:
                start_time = last_end
            process_ended[row.pid, row.process] = end_time
            wall = end_time - start_time - uncounted.get(row.id, 0.0)
        if count and seconds > 0:
            timed.append(TimedRun(spec_by_cell[row.cell], attack, float(count), seconds, wall))
    return timed


@patient
def gpu_memory(store: Store, kind: Callable[[Mapping[str, Any]], str]) -> dict[str, float]:
    """{kind of a cell's spec: the largest memory in bytes that a training took on a GPU}."""
    query = select(CELLS.c.spec, RUNS.c.extra).join(RUNS, RUNS.c.cell == CELLS.c.id)
    memory_by_kind: dict[str, float] = {}
    with store.database.reading() as connection:
        for spec, extra in connection.execute(query.where(RUNS.c.extra.contains('"gpu_memory"'))):
            name, bytes_used = kind(json.loads(spec)), float(json.loads(extra)["gpu_memory"])
            memory_by_kind[name] = max(bytes_used, memory_by_kind.get(name, 0.0))
    return memory_by_kind
