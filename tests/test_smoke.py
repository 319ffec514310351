"""Smoke presets run from the cells to the tables: whatever a cell can call once, and at night every suite."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import members
import pytest

from fatbench import report
from fatbench.runner import progress
from fatbench.runner.jobs import Machine
from fatbench.runner.start import check_data, jobs_of
from fatbench.runner.worker import work
from fatbench.store.stages import Store
from fatbench.suite import files, signatures
from fatbench.suite.cells import Cell, Evaluation, Plan
from fatbench.suite.cost import cell_work, parameters
from fatbench.suite.tables import SOURCE
from fatbench.suite.weights import trained_by

# Without the variants of a data set: their smoke cells are those of the suite they extend.
SUITES = [name for name in files.available() if not name.endswith(("-jpeg75", "-jpeg"))]
START = 3000  # image passes that take as long as a cell needs before its first one and for its tables

Part = tuple[str, str]  # ("algorithm", "scaffold")
# Slow on a CPU: with every suite, and AutoAttack also in `make demo`.
AT_NIGHT: frozenset[Part] = frozenset({("model", "efficientnet_lite0"), ("attack", "autoattack")})
# test_testing trains with each of these, interrupts and resumes; at night they meet the store and tables too.
KINDS = {"aggregator": "Aggregator", "pre": "PreAggregator", "attack": "Adversary", "objective": "Objective"}
MET = ("samples", "uniform", "ipm", "standard", "at")
CONTRACTED: frozenset[Part] = frozenset(
    (key, name) for key, kind in KINDS.items() for name in signatures.names(kind) if name not in MET
)


@functools.cache
def smoke(name: str) -> Plan:
    return files.load(name).plan("smoke")


def named(kind: str, value: Any) -> Iterator[Part]:
    """The functions that a setting calls by name, each with the key it stands at."""
    if isinstance(value, dict):
        if "name" in value:
            yield kind, value["name"]
        for key, part in value.items():
            yield from named(key, part)


def attacks(evaluation: Evaluation) -> frozenset[Part]:
    """What an evaluation calls, and where its attack is computed."""
    found = {*named("attack", evaluation.attack)}
    if evaluation.origin:
        found.add(("transfer", "cells" if evaluation.origin.cell else "clients"))
    return frozenset(found)


def parts(cell: Cell) -> frozenset[Part]:
    """Every function that a cell calls by name."""
    return frozenset(named("cell", cell.spec)).union(*map(attacks, cell.evaluations))


def passes(cell: Cell, plan: Plan) -> float:
    work = cell_work(cell, plan)
    return work.image_passes if work else 0


@functools.cache
def chosen() -> dict[str, list[Cell]]:
    """Suite -> cells that together call everything any smoke cell calls, the cheapest first.

    Each has its first evaluation, and those of the other attacks that are cheapest on its model.
    """
    cells = {
        cell.id: (name, cell, parts(cell), START + passes(cell, smoke(name)))
        for name in SUITES
        for cell in smoke(name).unique()
        if not {*named("cell", cell.spec)} & AT_NIGHT
    }
    left = frozenset().union(*(calls for _, _, calls, _ in cells.values())) - AT_NIGHT - CONTRACTED
    taken: list[tuple[str, Cell]] = []
    while left:
        name, cell, calls, _ = cells[max(cells, key=lambda id: len(cells[id][2] & left) / cells[id][3])]
        taken.append((name, cell))
        left -= calls
    kept = {cell.id: [*cell.evaluations[:1]] for _, cell in taken}
    left = frozenset().union(*(attacks(one) for _, cell in taken for one in cell.evaluations))
    left -= AT_NIGHT.union(*(attacks(one) for few in kept.values() for one in few))
    offers = [(name, replace(cell, evaluations=(one,))) for name, cell in taken for one in cell.evaluations]
    offers.sort(key=lambda offer: passes(offer[1], smoke(offer[0])) * (parameters(offer[1].spec) or 1e6))
    for _, cell in offers:
        (one,) = cell.evaluations
        if attacks(one) & left:
            kept[cell.id].append(one)
            left -= attacks(one)
    found: dict[str, list[Cell]] = {}
    for name, cell in taken:
        found.setdefault(name, []).append(replace(cell, evaluations=tuple(kept[cell.id])))
    return found


def fewer(spec: dict[str, Any]) -> dict[str, Any]:
    """Trained on 120 images, but where writers or members are counted."""
    counted = spec["partition"]["name"] == "by_writer" or spec["diagnostic"]
    return spec if counted else {**spec, "train": min(spec["train"], 120)}


def run(name: str, tmp_path: Path, only: list[Cell] | None = None) -> None:
    """The smoke preset of a suite or some cells of it, trained, attacked and reported."""
    machine = Machine(db=str(tmp_path / "r.db"), files=str(tmp_path / "files"), data=str(tmp_path / "data"))
    suite, plan = files.load(name), smoke(name)
    every = jobs_of(plan)
    asked = {cell.id: list(cell.evaluations) for cell in (plan.unique() if only is None else only)}
    first = {trained_by(job.spec) for job in every if job.cell in asked}
    jobs = []
    for job in (job for job in every if job.cell in asked or job.cell in first):
        spec = job.spec if only is None else fewer(job.spec)
        jobs.append(replace(job, evaluations=asked.get(job.cell, job.evaluations[:1]), spec=spec))
    rounds = max(cell.spec["algorithm"]["rounds"] for cell in plan.cells)
    beyond = {  # tables that only have columns of later rounds than smoke reaches
        table.id: all(int(SOURCE.match(source)["round"] or 0) > rounds for source in table.values.values())
        for table in suite.tables
    }
    check_data(jobs, tmp_path / "data")
    with Store.open(machine.db, create=True) as store:
        for job in jobs:
            assert work(job, machine, store) == "done", [row.error for row in store.stages([job.cell]).values()]
        assert set(progress.states_of(jobs, store).values()) == {"done"}
        for select in ("last", "best-val", "best-test") if only is None else ("last",):
            text = report.render(report.build_tables(suite, plan, store, select=select), "json")
            reached = [table for table in json.loads(text)["tables"] if not beyond[table["id"]]]
            rows = {table["id"]: [row for row in table["rows"] if any(row["measured"].values())] for table in reached}
            assert (all if only is None else any)(rows.values()) or not reached, f"{name}: no number in {rows}"
        if only is None:
            plots = report.build_figures(suite, plan, store)
            drawn = report.drawable(plots, tmp_path / "files")
            assert [plot.figure.id for plot in plots if plot not in drawn] == [], "figures of which nothing is measured"
            text = report.render(report.build_tables(suite, plan, store), "markdown")
            assert "SMOKE" in text or not reached


@pytest.mark.parametrize("name", SUITES)
def test_whatever_a_cell_can_call_works_in_smoke(name, tmp_path, monkeypatch):
    members.short_search(monkeypatch)
    if name in chosen():  # the others call nothing that these do not
        run(name, tmp_path, chosen()[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", SUITES)
def test_every_suite_runs_in_smoke(name, tmp_path):
    run(name, tmp_path)


def test_nothing_that_a_smoke_preset_calls_is_left_out():
    cells = [cell for name in SUITES for cell in smoke(name).cells]
    taken = [cell for name in chosen() for cell in chosen()[name]]
    called = frozenset().union(*map(parts, taken))
    assert called >= frozenset().union(*map(parts, cells)) - AT_NIGHT - CONTRACTED
    assert {"algorithm", "aggregator", "objective", "model", "partition", "attack"} <= dict(called).keys()
    assert len(taken) < len(cells) / 4
