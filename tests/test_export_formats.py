"""`fatbench export --format`: each format as its own reader reads it."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fatbench.report.formats.croissant import COLUMNS
from fatbench.runner.labels import points_of
from fatbench.store.jsonl import import_
from fatbench.store.stages import Store
from fatbench.suite import files

pandas = pytest.importorskip("pandas")
RESULTS = Path(__file__).parent.parent / "results"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The committed rows of SFAT on Fashion-MNIST: AutoAttack on 500 of 10,000 images."""
    file = tmp_path_factory.mktemp("exports") / "f.db"
    with Store.open(str(file), create=True) as store:
        import_(store, RESULTS / "sfat-fashion-cpu.jsonl.xz")
        store.store_points(points_of(files.load("sfat-fashion").plan("cpu")))
    return str(file)


def test_pandas_reads_csv_and_parquet_alike(run: Run, db: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    found = {}
    for format, read in (("csv", pandas.read_csv), ("parquet", pandas.read_parquet)):
        file = tmp_path / f"x.{format}"
        options = ("sfat-fashion", "--preset", "cpu", "--format", format, "-o", str(file), "--db", db)
        assert run("export", *options)[0] == 0
        frame = read(file)
        found[format] = frame[frame["metric"] == "autoattack"].pivot_table(index="method", values="value")
    assert found["csv"].round(12).equals(found["parquet"].round(12))
    assert found["csv"]["value"]["Re-SFAT"] == pytest.approx(0.6176)


def test_robustbench_reads_its_records(run: Run, db: str, tmp_path: Path) -> None:
    """What its leaderboard and its list of models take from model_info/DATASET/THREAT/NAME.json, and as what."""
    options = ("sfat-fashion", "--preset", "cpu", "--format", "robustbench", "-o", str(tmp_path), "--db", db)
    code, out, said = run("export", *options)
    assert "RobustBench has boards of cifar10, cifar100, imagenet, none of fashion_mnist" in said
    files = sorted((tmp_path / "fashion_mnist" / "Linf").glob("*.json"))
    assert code == 0 and sorted(out.splitlines()) == [str(file) for file in files] and len(files) == 31
    for file in files:
        record = json.loads(file.read_text(encoding="utf-8"))
        assert 0 < float(record["autoattack_acc"]) <= float(record["clean_acc"]) <= 100
        for key in ("name", "link", "venue", "authors", "architecture", "eps", "dataset", "reported"):
            assert type(record[key]) is str, key
        assert (record["dataset"], record["additional_data"], record["number_forward_passes"]) == (
            "fashion_mnist",
            False,
            1,
        )
        assert (record["n_examples"], record["unreliable"]) == (500, True)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--format", "parquett"], "--format: no format is named 'parquett' (did you mean 'parquet'?)"),
        (["--format", "parquet"], "--format parquet: say where with -o FILE"),
        (["--format", "parquet", "-o", "/"], "-o /: Is a directory"),
        (["--format", "robustbench", "-o", "x"], "--format robustbench: name the suite, fatbench export NAME"),
        (["sfat-fashion", "--preset", "paper"], "the database has no cell of 'sfat-fashion', preset paper"),
        (
            ["--format", "robustbench", "-o", "x", "adfl-mnist"],
            "'adfl-mnist' has no network that AutoAttack took: fatbench run ... --attacks autoattack",
        ),
    ],
)
def test_what_cannot_be_exported(run: Run, db: str, options: list[str], message: str) -> None:
    code, out, said = run("export", *options, "--db", db)
    assert code in (2, 3) and out == "" and message in said


def test_croissant_says_what_the_rows_are(run: Run, db: str, tmp_path: Path) -> None:
    options = ("sfat-fashion", "--preset", "cpu", "--format", "croissant", "-o", str(tmp_path), "--db", db)
    code, out, said = run("export", *options)
    csv, described = tmp_path / "sfat-fashion-cpu.csv", tmp_path / "croissant.json"
    assert (code, said) == (0, "") and out.split() == [str(csv), str(described)]
    found = json.loads(described.read_text(encoding="utf-8"))
    assert found["conformsTo"] == "http://mlcommons.org/croissant/1.0"
    (file,) = found["distribution"]
    assert file["contentUrl"] == csv.name and file["sha256"] == hashlib.sha256(csv.read_bytes()).hexdigest()
    frame = pandas.read_csv(csv)
    fields = {one["name"]: one for one in found["recordSet"][0]["field"]}
    assert list(fields) == list(frame.columns)
    assert fields["method"]["description"] == "the label of the axis 'method'"
    assert [fields[name]["dataType"] for name in ("cell", "round", "value", "dirty")] == [
        "sc:Text", "sc:Integer", "sc:Float", "sc:Boolean"
    ]  # fmt: skip
    undescribed = [name for name, one in fields.items() if name not in COLUMNS and "the axis" not in one["description"]]
    assert not undescribed


def test_croissant_s_own_reader_reads_the_rows(run: Run, db: str, tmp_path: Path) -> None:
    mlcroissant = pytest.importorskip("mlcroissant")
    options = ("sfat-fashion", "--preset", "cpu", "--format", "croissant", "-o", str(tmp_path), "--db", db)
    assert run("export", *options)[0] == 0
    data = mlcroissant.Dataset(str(tmp_path / "croissant.json"))
    assert not data.metadata.ctx.issues.errors
    rows = [row for row, _ in zip(data.records("numbers"), range(20), strict=False)]
    assert len(rows) == 20 and all(row["numbers/value"] >= 0 for row in rows)


def test_datasette_s_metadata_names_what_is_there_and_its_queries_run(run: Run, db: str, tmp_path: Path) -> None:
    file = tmp_path / "metadata.json"
    assert run("export", "--format", "datasette", "-o", str(file), "--db", db) == (0, "", f"fatbench: wrote {file}\n")
    ((name, found),) = json.loads(file.read_text(encoding="utf-8"))["databases"].items()
    assert name == Path(db).stem
    with closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as connection:
        there = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
        assert set(found["tables"]) <= there
        for table, described in found["tables"].items():
            columns = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            assert table != "measurements" or set(described["columns"]) == columns
        (cell,) = connection.execute("SELECT cell FROM measurements LIMIT 1").fetchone()
        rows = {
            title: connection.execute(query["sql"], {"cell": cell, "metric": "natural"}).fetchall()
            for title, query in found["queries"].items()
        }
    assert rows["final_accuracies"] and rows["one_cell"] and not rows["failures"]
    assert {len(row) for row in rows["learning_curve"]} <= {2}
