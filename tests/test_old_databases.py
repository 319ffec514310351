"""A database of every schema from 0005 on becomes one of today in one command; the old file stays."""

from __future__ import annotations

import hashlib
import lzma
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import insert, select, update

from fatbench import api
from fatbench.errors import DatabaseError, FatbenchError, SpecError
from fatbench.store import integrity
from fatbench.store.cell_records import read, seal
from fatbench.store.document import digest
from fatbench.store.schema import POINTS, RUNS, SCHEMA, STAGES, VALUES, VERSION
from fatbench.store.stages import Store

FOLDER = Path(__file__).parent / "old_databases"
SCHEMAS = sorted(file.name.partition(".")[0] for file in FOLDER.iterdir())
CELL, UNFINISHED = "0123456789ab", "ba9876543210"


def old(folder: Path, number: str) -> Path:
    """The database of this schema, with a model and a checkpoint beside it."""
    file = folder / "old.db"
    file.write_bytes(lzma.decompress((FOLDER / f"{number}.db.xz").read_bytes()))
    for cell, name in ((CELL, "last.safetensors"), (UNFINISHED, "state-000001.safetensors")):
        (folder / "old-files" / cell).mkdir(parents=True, exist_ok=True)
        (folder / "old-files" / cell / name).write_text(cell)
    return file


def test_there_is_one_of_every_schema() -> None:
    """Whoever raises the schema adds the database that the version before wrote."""
    assert [f"{number:04}" for number in range(5, int(SCHEMA) + 1)] == SCHEMAS


@pytest.mark.parametrize("number", SCHEMAS)
@pytest.mark.promise("Input", "A database of an older schema is taken over in one command")
def test_an_older_database_is_taken_over(number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FATBENCH_FILES", raising=False)
    file, new = old(tmp_path, number), tmp_path / "new.db"
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    (summary,), *_ = api.take_in([file], str(new), None)
    assert (summary["cells"], summary["new numbers"], summary["files of models"]) == (2, 5, 2)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before
    assert "intact" in integrity.check(str(new))
    with Store.open(str(new)) as store:
        rows = store.stages()
        assert rows[CELL, "train"].record["sha256"] == {"last.safetensors": "0" * 64}
        assert (rows[UNFINISHED, "train"].status, rows[UNFINISHED, "train"].checkpoint) == (
            "interrupted",
            "state-000001.safetensors",
        )
        with store.database.reading() as connection:
            for cell in read(connection, [CELL, UNFINISHED]):
                assert all(stage.digest == digest(cell, stage) for stage in cell.stages if stage.status == "done")
                assert len(cell.points) == (int(number) > 6 and cell.cell == CELL)
        assert store.claim(UNFINISHED, "train", suite="s", total=2, provenance={}) is not None
    assert (tmp_path / "new-files" / CELL / "last.safetensors").read_text() == CELL
    with pytest.raises(SpecError, match="is not empty: models of"):
        api.take_in([file], str(new), None)


@pytest.mark.parametrize("edited", [False, True])
def test_suites_that_became_presets_have_their_names_of_today(edited: bool, tmp_path: Path) -> None:
    """The digests are of today's names; what was edited before is still seen, and no point is there twice."""
    file, new = old(tmp_path, SCHEMA), tmp_path / "new.db"
    with Store.open(str(file)) as store, store.database.writing() as connection:
        connection.execute(update(RUNS).values(suite="sfat-audit-jpeg75+train=60", preset="paper"))
        point = connection.execute(select(POINTS)).one()._asdict()
        connection.execute(update(POINTS).values(suite="sfat-audit-jpeg75", preset="cpu"))
        connection.execute(insert(POINTS).values({**point, "suite": "sfat-audit", "preset": "jpeg75-cpu"}))
        for cell, stage in connection.execute(select(STAGES.c.cell, STAGES.c.stage)).all():
            seal(connection, cell, stage)
        if edited:
            connection.execute(update(VALUES).values(value=0.5))
        connection.execute(update(VERSION).values(version_num="0008"))
    api.take_in([file], str(new), None)
    with Store.open(str(new)) as store:
        runs = store.runs()
        assert {(run["suite"], run["preset"]) for run in runs} == {("sfat-audit+train=60", "jpeg75")}
        with store.database.reading() as connection:
            points = connection.execute(select(POINTS.c.suite, POINTS.c.preset)).all()
    assert points == [("sfat-audit", "jpeg75-cpu")]
    if edited:
        with pytest.raises(DatabaseError, match="digest"):
            integrity.check(str(new))
    else:
        assert "intact" in integrity.check(str(new))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            "0005",
            "old.db has schema 0005, last written by commit 0{40}, older than .*: fatbench import .*old.db --db NEW",
        ),
        ("9999", "old.db has schema 9999, .*newer than .* of this fatbench: update fatbench"),
    ],
)
def test_another_schema_says_who_wrote_it_and_what_helps(number: str, said: str, tmp_path: Path) -> None:
    file = old(tmp_path, "0005")
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE fatbench_version SET version_num = ?", (number,))
        connection.execute('UPDATE runs SET "commit" = ?', ("0" * 40,))
    connection.close()
    with pytest.raises(DatabaseError, match=said):
        Store.open(str(file))


def test_what_is_no_database_of_ours_is_not_taken_over(tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE a (b)")
    connection.close()
    with pytest.raises(FatbenchError, match="is not a fatbench database that can be taken over"):
        api.take_in([file], str(tmp_path / "new.db"), None)
    assert not (tmp_path / "new.db").exists()
