"""Every suite runs in its smoke preset, from the cells to its tables."""

from __future__ import annotations

import json

import pytest

from fatbench import report
from fatbench.runner import progress
from fatbench.runner.jobs import Machine
from fatbench.runner.start import check_data, jobs_of
from fatbench.runner.worker import work
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.suite.tables import SOURCE

# Without the variants of a data set: their smoke cells are those of the suite they extend.
SUITES = [name for name in files.available() if not name.endswith(("-jpeg75", "-jpeg"))]


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_runs_in_smoke(name, tmp_path):
    machine = Machine(db=str(tmp_path / "r.db"), files=str(tmp_path / "files"), data=str(tmp_path / "data"))
    chosen = files.load(name)
    plan = chosen.plan("smoke")
    jobs = jobs_of(plan)
    rounds = max(cell.spec["algorithm"]["rounds"] for cell in plan.cells)
    beyond = {  # tables that only have columns of later rounds than smoke reaches
        table.id: all(int(SOURCE.match(source)["round"] or 0) > rounds for source in table.values.values())
        for table in chosen.tables
    }
    check_data(jobs, tmp_path / "data")
    with Store.open(machine.db, create=True) as store:
        for job in jobs:
            assert work(job, machine, store) == "done", [row.error for row in store.stages([job.cell]).values()]
        assert progress.count(progress.of(plan, store))["done"] == len(jobs)
        for select in ("last", "best-val", "best-test"):
            tables = json.loads(report.render(report.build_tables(chosen, plan, store, select=select), "json"))[
                "tables"
            ]
            reached = [table for table in tables if not beyond[table["id"]]]
            for table in reached:
                assert table["rows"], table["id"]
                measured = [value for row in table["rows"] for value in row["measured"].values() if value]
                assert measured, f"{name} {table['id']}: no number at all"
        plots = report.build_figures(chosen, plan, store)
        drawn = report.drawable(plots, tmp_path / "files")
        assert [plot.figure.id for plot in plots if plot not in drawn] == [], "figures of which nothing is measured"
        text = report.render(report.build_tables(chosen, plan, store), "markdown")
        assert "SMOKE" in text or not reached
