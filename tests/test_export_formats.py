"""`fatbench export --format`: each format as its own reader reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fatbench import packed
from fatbench.runner.cell_labels import points_of
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


def test_the_ending_of_the_file_decides_the_format(run: Run, db: str, tmp_path: Path) -> None:
    """A copy of the database is one; what is to be written must fit it."""
    for name in ("x.csv", "x.jsonl", "x.jsonl.xz", "copy.db"):
        options = () if name == "copy.db" else ("sfat-fashion", "--preset", "cpu")
        assert run("export", *options, "-o", str(tmp_path / name), "--db", db)[0] == 0
    assert pandas.read_csv(tmp_path / "x.csv")["metric"].eq("autoattack").any()
    for name in ("x.jsonl", "x.jsonl.xz"):
        with packed.read_text(tmp_path / name) as lines:
            assert lines.read(1) == "{"
    with Store.open(str(tmp_path / "copy.db")) as copy, Store.open(db) as store:
        assert copy.cells() == store.cells()
    cells = sorted(pandas.read_csv(tmp_path / "x.csv")["cell"].unique())[:2]
    assert run("export", *cells, "-o", str(tmp_path / "two.csv"), "--db", db)[0] == 0
    assert sorted(pandas.read_csv(tmp_path / "two.csv")["cell"].unique()) == cells
    assert run("export", *cells, "-o", str(tmp_path / "two.jsonl"), "--db", db)[0] == 0
    assert (tmp_path / "two.jsonl").read_text().count("\n") == 3
    for words, said in {
        ("sfat-fashion", "-o", "no.db"): "--format sqlite copies the whole database: leave out sfat-fashion",
        ("--format", "parquet"): "--format parquet: say where with -o FILE",
        ("-k", "method=FAT"): "--preset and -k need a suite: fatbench export NAME -k FILTER",
    }.items():
        assert run("export", *words, "--db", db)[::2] == (2, f"fatbench: {said}\n")
