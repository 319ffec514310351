"""The queries of docs/queries.md on SQLite and PostgreSQL, and that the view says what the frame says."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas
import pytest
from sqlalchemy import delete, insert, text, update
from stored import claimed, finished
from typer.testing import CliRunner

from fatbench.cli.app import app
from fatbench.engine.rounds import Number
from fatbench.report.numbers import sql_tables
from fatbench.report.numbers.long import frame
from fatbench.report.numbers.shown_runs import shown_plan
from fatbench.report.numbers.sql_tables import judge
from fatbench.store.grid_points import Point
from fatbench.store.integrity import Damaged
from fatbench.store.schema import DOUBTS
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.suite.cells import Evaluation

ROOT = Path(__file__).parent.parent
QUERIES = dict(re.findall(r"\n\n([^\n]+):\n\n```sql\n(.*?)```", (ROOT / "docs" / "queries.md").read_text(), re.S))
FILES = ("sfat-fashion", "sfat-bf16", "sfat-jpeg75", "sfat-fp32")


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("queries") / "results.db"
    rows = [str(ROOT / "results" / f"{name}-cpu.jsonl.xz") for name in FILES]
    result = CliRunner().invoke(app, ["import", *rows, "--db", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return path


def asked(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def measured(store: Store, suite: str, preset: str) -> pandas.DataFrame:
    """The accuracies of a plan's last rounds, from the frame."""
    plan = shown_plan(files.load(suite).plan(preset), store)
    numbers = frame(store, plan)
    asked = {one.id for cell in plan.cells for one in cell.evaluations}
    of_stage = numbers["stage"].str.extract(r"^(?P<evaluation>.*?)(?:\.\w+)?@")["evaluation"]
    own = (numbers["metric"] == of_stage.str.rpartition("-")[0]) & of_stage.isin(asked) & (numbers["client"] == -1)
    return numbers[own & (numbers["round"] == int(plan.cells[0].spec["algorithm"]["rounds"]))]


@pytest.mark.parametrize(("suite", "preset"), [("sfat-fashion", "cpu"), ("sfat-audit", "jpeg75-cpu")])
def test_the_view_has_what_the_frame_has(sqlite: Path, suite: str, preset: str) -> None:
    """With the run that is shown where a cell has several: twice as many in one precision as in the other."""
    with Store.open(str(sqlite)) as store:
        expected = measured(store, suite, preset)
    query = "SELECT * FROM results WHERE suite = ? AND preset = ? AND is_last"
    with closing(sqlite3.connect(sqlite)) as connection:
        found = pandas.read_sql(query, connection, params=(suite, preset))
    columns = ["method", "seed", "attack", "cell", "value", "n", "device", "precision"]
    mine = expected.assign(attack=expected["metric"])[columns].astype(object)
    assert len(found) == len(expected) > 40
    assert sorted(map(tuple, found[columns].astype(object).to_numpy())) == sorted(map(tuple, mine.to_numpy()))
    doubtful, said = (one.loc[one["doubts"] != "", ["cell", "stage"]].to_numpy() for one in (expected, found))
    assert set(map(tuple, doubtful)) == set(map(tuple, said))


@pytest.mark.parametrize("title", QUERIES)
def test_a_query_of_the_docs_has_rows(title: str, sqlite: Path) -> None:
    rows = asked(sqlite, QUERIES[title])
    assert rows or "diverged" in title, title
    if title.startswith("Robust accuracy"):
        assert rows[0] == ("Re-SFAT", pytest.approx(0.6176), 5)
    if title.startswith("How many images"):
        assert rows == [(10_000, 899)]


def test_there_are_ten() -> None:
    assert len(QUERIES) == 10


FGSM = {"name": "fgsm", "eps": "8/255"}
EVALUATIONS = {name: Evaluation(name, FGSM, 4, 4) for name in ("natural", "pgd20", "autoattack")}


def small(store: Store) -> None:
    """A cell that diverged and one that did not, at two points of a suite."""
    spec = {"seed": 6, "algorithm": {"rounds": 2}, "data": {"name": "mnist"}}
    store.add_cells({"a": spec, "b": {**spec, "seed": 7}})
    for cell, value in (("a", 0.1), ("b", 0.6)):
        run = claimed(store, cell, "train", suite="sfat-fashion", total=2, preset="cpu")
        best = {"best-test": {"round": 2, "value": value}}
        store.finish(run, [Number("natural", value, t, 4) for t in (1, 2)], round=2, record=best)
        for attack, evaluation in EVALUATIONS.items():
            numbers = [Number(attack, 0.25 if cell == "a" else 0.75, 2, 4)]
            numbers += [Number("doubt_diverged", 2.0, 2)] if cell == "a" else []
            outcomes = (0, 4, b"\x80" if cell == "a" else b"\xe0")
            finished(store, cell, evaluation.stage(2, "bf16"), numbers, round=4, outcomes=outcomes,
                     suite="sfat-fashion", total=4, settings=FGSM, preset="cpu", precision="bf16")  # fmt: skip
    asked = tuple(evaluation.id for evaluation in EVALUATIONS.values())
    at = {"a": '{"split":"IID","method":"FAT"}', "b": '{"split":"IID","method":"SFAT"}'}
    store.store_points(
        Point("sfat-fashion", "cpu", cell, labels, method, "mnist", "IID", "cnn", asked)
        for (cell, labels), method in zip(at.items(), ("FAT", "SFAT"), strict=True)
    )
    judge(store, ["a", "b"])


def test_both_databases_answer_alike(tmp_path: Path, new_postgres: Callable[[], str]) -> None:
    """Every query, and the columns of the view; what diverged says so."""
    answers = []
    for url in (str(tmp_path / "x.db"), new_postgres()):
        with Store.open(url, create=True) as store:
            small(store)
            with store.database.reading() as connection:
                of_view = connection.execute(text("SELECT * FROM results ORDER BY cell, attack")).mappings().all()
                ask = connection.exec_driver_sql
                rows = {title: ask(sql.replace("%", "%%")).all() for title, sql in QUERIES.items()}
        flat = [{k: (bool(v) if k.startswith("is_") else v) for k, v in row.items()} for row in of_view]
        answers.append((flat, {title: [tuple(row) for row in found] for title, found in rows.items()}))
    (view, rows), (view_pg, rows_pg) = answers
    assert view == view_pg and len(view) == 6
    assert all(rows[title] == [tuple(map(plain, row)) for row in rows_pg[title]] for title in QUERIES)
    assert {row["doubts"] for row in view if row["cell"] == "a"} == {"bf16, diverged"}
    diverged = rows["The round in which each training diverged"]
    assert diverged == [("sfat-fashion", '{"split":"IID","method":"FAT"}', 6, 2.0)]


def test_stored_doubts_that_do_not_follow_from_the_numbers_are_named_and_mended(tmp_path: Path) -> None:
    db = str(tmp_path / "x.db")
    with Store.open(db, create=True) as store:
        small(store)
        assert sql_tables.outdated(store) == {}
        with store.database.writing() as connection:
            connection.execute(delete(DOUBTS).where(DOUBTS.c.cell == "a", DOUBTS.c.code == "diverged"))
            connection.execute(update(DOUBTS).where(DOUBTS.c.cell == "b").values(code="diverged"))
        outdated = sql_tables.outdated(store)
        assert outdated["a", EVALUATIONS["pgd20"].stage(2, "bf16")] == (["bf16"], ["bf16", "diverged"])
        assert outdated["b", EVALUATIONS["natural"].stage(2, "bf16")] == (["diverged"], ["bf16"]) and len(outdated) == 6
        sql_tables.judge(store, ["a", "b"])
        assert sql_tables.outdated(store) == {}
        changed = {"cell": "a", "stage": "train", "code": "changed", "against": "another x.py", "value": None}
        with store.database.writing() as connection:  # as a run stores, which had the plug-in at hand
            connection.execute(insert(DOUBTS).values(changed))
        assert sql_tables.outdated(store) == {}


def test_db_check_names_stored_doubts_that_are_none(tmp_path: Path) -> None:
    db = tmp_path / "copy.db"
    rows = Path(__file__).parent.parent / "results" / "vit-s-half-jpeg75-cpu.jsonl.xz"
    assert CliRunner().invoke(app, ["import", str(rows), "--db", str(db)]).exit_code == 0
    with closing(sqlite3.connect(db)) as connection, connection:
        doubt = "SELECT cell, stage, 'chance', '', 0.1 FROM stages WHERE stage != 'train'"
        connection.execute(f"INSERT INTO doubts {doubt}")
    check = ["check", "--db", str(db)]
    refused = CliRunner().invoke(app, check)
    assert isinstance(refused.exception, Damaged) and "(chance; now none)" in str(refused.exception)
    assert CliRunner().invoke(app, [*check, "--repair"]).exit_code == 0
    assert CliRunner().invoke(app, check).exit_code == 0


def plain(value: Any) -> Any:
    """PostgreSQL's exact numbers as Python's."""
    return float(value) if type(value).__name__ == "Decimal" else value


EDITED = """
name: edited
title: One cell, whose rate is edited
seeds: [1, 2]
base:
  data: digits
  train: 60
  test: 30
  partition: {name: shah, clients: 2, skew: 2}
  model: {name: nin, width: 4, init: he}
  algorithm:
    {name: fedavg, rounds: 1, aggregator: uniform, local: {epochs: 1, batch: 16, lr: 0.05, objective: standard}}
  monitor: natural
axes: {method: {A: {}, B: {algorithm: {local: {momentum: 0.5}}}}}
evaluate: {attacks: {natural: natural}}
presets: {paper: {}}
tables: [{id: A, title: Edited, rows: [method], values: {natural: natural}}]
"""


def rates(db: Path) -> set[tuple[str, int, float]]:
    """(method, seed, rate) of the rows that are current."""
    rate = "json_extract(spec, '$.algorithm.local.lr')"
    query = f"SELECT method, r.seed, {rate} FROM results r JOIN cells c ON c.id = r.cell WHERE current"
    rows = asked(db, query)
    assert len(rows) == len(set(rows))
    return set(rows)


def test_sql_tells_what_a_suite_asks_for_from_what_it_asked_for(tmp_path: Path, monkeypatch) -> None:
    """After an edit, a run of a part, a second suite of the name, an import: never two answers to one question."""
    monkeypatch.chdir(tmp_path)
    files_by_rate = {rate: tmp_path / str(rate) / "edited.yaml" for rate in (0.05, 0.02)}
    for rate, file in files_by_rate.items():
        file.parent.mkdir()
        file.write_text(EDITED.replace("lr: 0.05", f"lr: {rate}"))
    first, second = map(str, files_by_rate.values())

    def fatbench(*arguments: str, db: str = "a.db") -> None:
        result = CliRunner().invoke(app, [*arguments, "--db", db], catch_exceptions=False)
        assert result.exit_code == 0, result.output

    both = {(method, seed) for method in "AB" for seed in (1, 2)}
    fatbench("run", "suite", first, "--device", "cpu", "--jobs", "1")
    assert rates(Path("a.db")) == {(*place, 0.05) for place in both}
    # one cell of the edited suite: what its file no longer gives is of the past, with or without a cell in its place
    fatbench("run", "suite", second, "-k", "method=A", "--seeds", "1", "--device", "cpu", "--jobs", "1")
    assert rates(Path("a.db")) == {("A", 1, 0.02)}
    fatbench("status", first, "-k", "method=B")
    assert rates(Path("a.db")) == {(*place, 0.05) for place in both}
    fatbench("export", "-o", "all.jsonl")
    fatbench("import", "all.jsonl", db="b.db")
    assert rates(Path("b.db")) == rates(Path("a.db"))
    fatbench("status", second)
    fatbench("export", "-o", "second.jsonl")
    fatbench("import", "second.jsonl", db="b.db")  # the file that came last is right where it has a cell
    assert rates(Path("b.db")) == {("A", 1, 0.02)} | {(*place, 0.05) for place in both - {("A", 1)}}


def test_all_that_this_repository_ships_is_current(sqlite: Path) -> None:
    assert asked(sqlite, "SELECT suite, preset, count(*) FROM points WHERE NOT current GROUP BY 1, 2") == []
