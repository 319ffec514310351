"""Another run of a cell stands beside the first: in the database, in an export, in a table. Outcomes per image."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from fatbench import api, report, settings
from fatbench.engine.rounds import Number
from fatbench.errors import SpecError
from fatbench.report.numbers.long import frame
from fatbench.report.numbers.stored import runs_of_cell
from fatbench.report.pairs import measured_numbers
from fatbench.store import jsonl, replicates
from fatbench.store.grid_points import Point
from fatbench.store.stages import Store
from fatbench.suite import files

RESULTS = Path(__file__).parent.parent / "results"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url, create=True) as opened:
        yield opened


@pytest.fixture
def other(other_url: str) -> Iterator[Store]:
    with Store.open(other_url, create=True) as opened:
        yield opened


def trained(store: Store, loss: float, seconds: float, *, cell: str = "a", bits: bytes = b"\xa8") -> None:
    """A cell that is trained and evaluated on five images."""
    store.add_cell(cell, {"seed": 1})
    run = store.claim(cell, "train", suite="s", total=1, provenance={})
    store.finish(run, [Number("loss", loss, 1), Number("seconds", seconds, 1)], round=1)
    run = store.claim(cell, "e-00@1", suite="s", total=5, provenance={})
    store.commit(run, round=5, outcomes=(0, 5, bits))
    store.finish(run, [Number("e", bits[0].bit_count() / 5, 1, n=5)], round=5)


def exported(store: Store, tmp_path: Path, name: str = "results.jsonl") -> Path:
    jsonl.export(store, tmp_path / name)
    return tmp_path / name


def test_wall_time_is_no_difference(store: Store, other: Store, tmp_path: Path) -> None:
    """The same numbers after more seconds: nothing is new but the runs, and our seconds stay."""
    trained(store, 0.5, 10.0)
    trained(other, 0.5, 99.0)
    counts = jsonl.import_(other, exported(store, tmp_path))
    assert (counts["new replicates"], counts["new numbers"], counts["numbers already here"]) == (0, 0, 3)
    assert {row["value"] for row in other.measurements() if row["metric"] == "seconds"} == {99.0}
    assert len(other.runs()) == 4
    assert replicates.by_cell(other.database) == {}


def test_another_run_stands_beside_the_first(store: Store, other: Store, tmp_path: Path) -> None:
    """Another loss, and another outcome with the same loss; twice is once; an export keeps both; so does its import."""
    trained(other, 0.5, 1.0)
    trained(store, 0.5008, 1.0)
    file = exported(store, tmp_path)
    counts = jsonl.import_(other, file)
    assert (counts["new cells"], counts["new replicates"], counts["new numbers"]) == (0, 1, 3)
    before = other.measurements()
    assert jsonl.import_(other, file)["new replicates"] == 0
    assert other.measurements() == before
    losses = {(m["cell"], m["replicate_of"], m["replicate"]): m["value"] for m in before if m["metric"] == "loss"}
    assert losses == {("a", None, 0): 0.5, ("a~1", "a", 1): 0.5008}
    with Store.open(str(tmp_path / "third.db"), create=True) as third:
        trained(third, 0.5, 1.0, bits=b"\xb8")
        jsonl.import_(other, exported(third, tmp_path, "third.jsonl"))
        assert replicates.by_cell(other.database) == {"a": ["a", "a~1", "a~2"]}
    other.store_points([Point("t", "paper", "a")])  # of the cell, so it stands in its own line alone
    whole = exported(other, tmp_path, "whole.jsonl")
    lines = [json.loads(line) for line in whole.read_text().splitlines()[1:]]
    assert [line.get("replicate") for line in lines] == [None, 1, 2]
    assert [[point["suite"] for point in line.get("points", ())] for line in lines] == [["t"], [], []]
    with Store.open(str(tmp_path / "fourth.db"), create=True) as fourth:
        assert jsonl.import_(fourth, whole)["new replicates"] == 2
        assert exported(fourth, tmp_path, "again.jsonl").read_bytes() == whole.read_bytes()
    chosen = io.StringIO()
    assert jsonl.export(other, chosen, ["a"]) == 3


def test_the_runs_beside_each_other(store: Store, other: Store, tmp_path: Path) -> None:
    trained(other, 0.5, 1.0)
    trained(store, 0.6, 1.0, bits=b"\xf8")
    jsonl.import_(other, exported(store, tmp_path))
    found = [(run["id"], run["evaluations"]) for run in runs_of_cell(other, "a~1")]
    assert found == [("a", {"e-00@1": 0.6}), ("a~1", {"e-00@1": 1.0})]
    assert runs_of_cell(store, "a") == []


def test_the_view_of_outcomes(store: Store) -> None:
    """10101 and 000 00001 1: bits from the highest, padding left out, chunks one after the other."""
    trained(store, 0.5, 1.0)
    store.add_cell("b", {"seed": 1})
    run = store.claim("b", "e-00@1", suite="s", total=12, provenance={})
    store.commit(run, round=9, outcomes=(0, 9, b"\x01\x80"))
    store.commit(run, round=12, outcomes=(9, 3, b"\x60"))
    query = "SELECT cell, position, correct FROM outcomes ORDER BY cell, stage, position"
    with store.database.reading() as connection:
        rows = [tuple(row) for row in connection.execute(text(query))]
    assert [row[2] for row in rows if row[0] == "a"] == [1, 0, 1, 0, 1]
    assert [row[1:] for row in rows if row[0] == "b"] == list(enumerate([0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 1]))


# --- the committed results ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The committed SFAT results of both precisions in one database, in the order of their names: not that of time."""
    with Store.open(str(tmp_path_factory.mktemp("both") / "sfat.db"), create=True) as opened:
        jsonl.import_(opened, RESULTS / "sfat-fp32-cpu.jsonl.xz")
        assert jsonl.import_(opened, RESULTS / "sfat-bf16-cpu.jsonl.xz")["new replicates"] == 4
        yield opened


def table(store: Store, runs: str = "") -> Any:
    suite = files.load("sfat-audit")
    (grid,) = report.build_tables(suite, api.to_read(suite, suite.plan("jpeg75-precision"), store, runs), store)
    return grid


def value(grid: Any, method: str, heading: str) -> Any:
    position = [column.heading for column in grid.columns].index(heading)
    return next(row for row in grid.rows if row.key["method"] == method).values[0][position]


def test_the_run_that_is_shown_is_the_one_in_the_precision_of_most_cells(both: Store) -> None:
    """FAT under PGD-20, by seed: bf16 25.6 and 24.4, fp32 25.6 and 23.0. Only FAT and SFAT were run twice."""
    grid, fp32 = table(both), table(both, "precision=fp32")
    assert value(grid, "FAT", "PGD-20").values == pytest.approx((0.256, 0.244))
    assert value(fp32, "FAT", "PGD-20").values == pytest.approx((0.256, 0.230))
    assert value(fp32, "SFAT (released weights)", "PGD-20").mean is None  # was not run in fp32
    assert dict(grid.notes)["replicates"].startswith("4 of 8 cells were run more than once: shown is the one that")
    assert not any(what == "MIXED" and note.startswith("precision") for what, note in grid.notes)
    with pytest.raises(SpecError, match=r"runs: expected precision=.* got 'precison=fp32' \(did you mean 'precision'"):
        table(both, "precison=fp32")


def test_the_order_of_import_changes_no_number_and_every_view_reads_the_same_run(both: Store, tmp_path: Path) -> None:
    suite = files.load("sfat-audit")
    seen = []
    with Store.open(str(tmp_path / "reverse.db"), create=True) as other:
        jsonl.import_(other, RESULTS / "sfat-bf16-cpu.jsonl.xz")
        jsonl.import_(other, RESULTS / "sfat-fp32-cpu.jsonl.xz")
        for store in (both, other):
            plan = api.to_read(suite, suite.plan("jpeg75-precision"), store)
            fat = api.to_read(suite, suite.plan("jpeg75-precision", None, "method=FAT"), store)
            assert {cell.id for cell in fat.cells} < {cell.id for cell in plan.cells}
            (grid,) = report.build_tables(suite, plan, store)
            of = measured_numbers(store, [cell.id for cell in plan.cells], "last")
            numbers = frame(store, plan)
            natural = numbers.query("metric == 'natural' and round == 20 and stage != 'train'")
            compared = [sorted((name, one.value) for name, one in of[cell.id].items()) for cell in plan.cells]
            framed = natural.sort_values(["cell", "value"])[["cell", "value"]].values.tolist()
            seen.append(([value.values for value in grid.all()], compared, framed))
            means = {tuple(v.values) for row in grid.rows for v in row.values[0][:1]}
            assert {x for one in means for x in one} == set(natural["value"])
    assert seen[0] == seen[1]


def of_table(folder: Path, more: str, store: Store) -> Any:
    """The table of a suite that has one column of the audit's, with another setting."""
    table = f"{{id: audit, title: t, rows: [dataset, method], values: {{PGD-20: pgd20}}, {more}}}"
    text = f"name: own\ntitle: t\ndescription: d\nextends: sfat-audit-jpeg75\ntables: [{table}]\n"
    (folder / "own.yaml").write_text(text)
    suite = files.load(str(folder / "own.yaml"))
    (grid,) = report.build_tables(suite, suite.plan("precision"), store)
    return grid


def test_what_is_not_significantly_worse_than_the_best_has_no_mark(both: Store, tmp_path: Path) -> None:
    """Two seeds: every value of these columns, so that none is bold. A table without `ties` is not tested.

    With `compare_across: [dataset]` no two methods compete: no value is the best, and none is tied with it.
    """
    grid = table(both)
    values = [v for row in grid.rows for v in row.values[0] if v.mean is not None]
    assert {v.rank for v in values} == {"shared"}
    assert all(v.marks == () for v in values) and grid.footnotes == []
    assert dict(grid.notes)["marks"].startswith("nothing is bold: no number is shown to be significantly better")
    plain = of_table(tmp_path, "ties: false", both)
    assert value(plain, "FAT", "PGD-20").rank == "" and plain.footnotes == []
    apart = of_table(tmp_path, "compare_across: [dataset]", both)
    assert {value.rank for value in apart.all()} == {""} and apart.split and apart.footnotes == []


def test_one_seed_tells_no_two_methods_apart(both: Store) -> None:
    """Seed 6 under natural: McNemar's p of FAT shrunk and FAT is below 3e-7, about these two networks. No bold."""
    suite = files.load("sfat-audit")
    (grid,) = report.build_tables(suite, suite.plan("jpeg75-precision", [6]), both)
    ranks = {method: value(grid, method, "natural").rank for method in ("FAT", "FAT shrunk", "SFAT")}
    assert ranks == dict.fromkeys(ranks, "")
    assert grid.footnotes == [("°", "the best of its column, not tested: one seed")]


def test_a_replicate_is_no_further_cell(both: Store) -> None:
    """4 of 9 cells were run twice: the suite has 9, and the letters of a cell are not those of its replicate."""
    from fatbench.cli.shared import cell_in
    from fatbench.runner import progress

    (cell, *_), *_ = replicates.by_cell(both.database).values()
    assert progress.by_suite(both)["sfat-audit", "jpeg75-cpu"]["done"] == 9
    assert both.ids_beginning_with(cell) == [cell] and both.ids_beginning_with(f"{cell}~") == [f"{cell}~1"]
    assert cell_in(both, cell[:10]) == cell and cell_in(both, f"{cell}~1") == f"{cell}~1"


def test_one_table_of_all_options(both: Store, run: Any) -> None:
    """All of report's choices at once; FAT under PGD-20: bf16 25.6, 24.4; fp32 25.6, 23.0."""
    text = "report sfat-audit --preset jpeg75-precision --by suite,method --metric pgd20 --select last --format json"
    for runs, mean in (([], 0.25), (["-k", "run.precision=bf16"], 0.25), (["-k", "run.precision=fp32"], 0.243)):
        command = [*text.split(), "-c", "report.evaluated=true", *runs, "--db", str(both.database.path)]
        code, out, err = run(*command)
        assert not code and "no model has been evaluated with the attacks of 'sfat-audit'" in err
        rows = json.loads(out)["tables"][0]["rows"]
        (fat,) = [row for row in rows if row["key"] == {"suite": "sfat-audit", "method": "FAT"}]
        assert fat["measured"]["pgd20"]["mean"] == pytest.approx(mean)


# --- the command -------------------------------------------------------------------------------------------------


def test_outcomes_of_a_cell(both: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The lines of a metric are its accuracy; JSON says the same; without the data set there are no labels."""
    from fatbench.cli.showing import show

    def outcomes(metric: str, format: str) -> None:
        with settings.options({"db": str(both.database.path), "data": str(tmp_path)}):
            show("77d1", outcomes=True, metric=[metric], format=format)

    outcomes("pgd20", "csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    (number,) = [m for m in both.measurements(["77d1f3eb18a9"]) if m["metric"] == "pgd20"]
    assert len(rows) == number["n"] == 500
    assert sum(int(row["correct"]) for row in rows) / 500 == pytest.approx(number["value"])
    assert rows[7] == {
        "cell": "77d1f3eb18a9", "stage": "pgd20-bd68a097@20", "metric": "pgd20", "round": "20", "model": "0",
        "checkpoint": rows[7]["checkpoint"], "image": "7", "label": "", "correct": rows[7]["correct"],
    }  # fmt: skip
    assert "last" in rows[7]["checkpoint"].split(";")
    outcomes("pgd20", "json")
    found = json.loads(capsys.readouterr().out)["outcomes"]
    assert [str(row["correct"]) for row in found] == [row["correct"] for row in rows]
    with pytest.raises(SpecError, match=r"has no outcomes of 'pgd21' \(did you mean 'pgd20'\?\)"):
        outcomes("pgd21", "csv")
