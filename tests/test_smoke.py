"""Smoke presets run from the cells to the tables: whatever a cell can call once, and at night every suite."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fatbench import report
from fatbench.runner import progress
from fatbench.runner.jobs import Machine
from fatbench.runner.start import check_data, jobs_of
from fatbench.runner.worker import work
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.cost import cell_work
from fatbench.suite.tables import SOURCE
from fatbench.suite.weights import trained_by

# Without the variants of a data set: their smoke cells are those of the suite they extend.
SUITES = [name for name in files.available() if not name.endswith(("-jpeg75", "-jpeg"))]
START = 3000  # image passes that take as long as a cell needs before its first one and for its tables

Part = tuple[str, str]  # ("algorithm", "scaffold")


@functools.cache
def smoke(name: str) -> Plan:
    return files.load(name).plan("smoke")


def parts(cell: Cell) -> frozenset[Part]:
    """Every function that a cell calls by name, with the key it stands at; of its attacks also where they come from."""

    def named(kind: str, value: Any) -> Iterator[Part]:
        if isinstance(value, dict):
            if "name" in value:
                yield kind, value["name"]
            for key, part in value.items():
                yield from named(key, part)

    found = {*named("cell", cell.spec)}
    for evaluation in cell.evaluations:
        found |= {*named("attack", evaluation.attack)}
        if evaluation.origin:
            found.add(("transfer", "cells" if evaluation.origin.cell else "clients"))
    return frozenset(found)


@functools.cache
def chosen() -> dict[str, list[str]]:
    """Suite -> identities of cells that together call everything any smoke cell calls, the cheapest first."""
    cells: dict[str, tuple[str, frozenset[Part], float]] = {}
    for name in SUITES:
        for cell in smoke(name).unique():
            found = cell_work(cell, smoke(name))
            cells.setdefault(cell.id, (name, parts(cell), START + (found.image_passes if found else 0)))
    left = frozenset().union(*(calls for _, calls, _ in cells.values()))
    taken: dict[str, list[str]] = {}
    while left:
        best = max(cells, key=lambda cell: len(cells[cell][1] & left) / cells[cell][2])
        name, calls, _ = cells[best]
        taken.setdefault(name, []).append(best)
        left -= calls
    return taken


def run(name: str, tmp_path: Path, only: list[str] | None = None) -> None:
    """The smoke preset of a suite or some cells of it, trained, attacked and reported."""
    machine = Machine(db=str(tmp_path / "r.db"), files=str(tmp_path / "files"), data=str(tmp_path / "data"))
    suite, plan = files.load(name), smoke(name)
    every = jobs_of(plan)
    first = {trained_by(job.spec) for job in every if only is None or job.cell in only}
    jobs = [job for job in every if only is None or job.cell in only or job.cell in first]
    rounds = max(cell.spec["algorithm"]["rounds"] for cell in plan.cells)
    beyond = {  # tables that only have columns of later rounds than smoke reaches
        table.id: all(int(SOURCE.match(source)["round"] or 0) > rounds for source in table.values.values())
        for table in suite.tables
    }
    check_data(jobs, tmp_path / "data")
    with Store.open(machine.db, create=True) as store:
        for job in jobs:
            assert work(job, machine, store) == "done", [row.error for row in store.stages([job.cell]).values()]
        assert progress.count(progress.cells_of(plan, store))["done"] == len(jobs)
        for select in ("last", "best-val", "best-test"):
            text = report.render(report.build_tables(suite, plan, store, select=select), "json")
            reached = [table for table in json.loads(text)["tables"] if not beyond[table["id"]]]
            rows = {table["id"]: [row for row in table["rows"] if any(row["measured"].values())] for table in reached}
            assert (all if only is None else any)(rows.values()) or not reached, f"{name}: no number in {rows}"
        plots = report.build_figures(suite, plan, store)
        drawn = report.drawable(plots, tmp_path / "files")
        if only is None:
            assert [plot.figure.id for plot in plots if plot not in drawn] == [], "figures of which nothing is measured"
        text = report.render(report.build_tables(suite, plan, store), "markdown")
        assert "SMOKE" in text or not reached


@pytest.mark.parametrize(("name", "cells"), chosen().items(), ids=chosen())
def test_whatever_a_cell_can_call_works_in_smoke(name, cells, tmp_path):
    run(name, tmp_path, cells)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SUITES)
def test_every_suite_runs_in_smoke(name, tmp_path):
    run(name, tmp_path)


def test_nothing_that_a_smoke_preset_calls_is_left_out():
    cells = [(cell.id in chosen().get(name, []), cell) for name in SUITES for cell in smoke(name).cells]
    every = {part for _, cell in cells for part in parts(cell)}
    taken = {part for run, cell in cells if run for part in parts(cell)}
    assert (
        every == taken
        and {"algorithm", "aggregator", "objective", "model", "partition", "attack"} <= dict(taken).keys()
    )
    assert sum(run for run, _ in cells) < len(cells) / 4
