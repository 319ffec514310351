"""Cells taken out, files that no cell needs, copies of the database."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fuzzing
import pytest

from fatbench.engine.rounds import Number
from fatbench.errors import MachineError, SpecError, Unavailable
from fatbench.store import cleanup, folder, jsonl
from fatbench.store.integrity import check
from fatbench.store.schema import REPLICATES
from fatbench.store.stages import Store

pytest_plugins = ("databases",)
A, B, C = "a" * 12, "b" * 12, "c" * 12


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """A, with a replicate, and B: trained, one evaluation each."""
    with Store.open(url, create=True) as opened:
        for cell in (A, f"{A}~1", B):
            opened.add_cell(cell, {"seed": 1})
            for stage in ("train", "fgsm-0@1"):
                run = opened.claim(cell, stage, suite="s", total=4, provenance={})
                record = {"sha256": {"model-1.safetensors": "0", "artifacts/round-1.safetensors": "0"}}
                outcomes = (0, 4, b"\xf0")
                opened.commit(run, round=4, outcomes=outcomes, checkpoint="state-000004.safetensors", record=record)
                opened.release(run) if stage == "train" else opened.finish(run, [Number("fgsm", 1.0, 1, n=4)])
        with opened.database.writing() as connection:
            connection.execute(REPLICATES.insert(), [{"id": f"{A}~1", "cell": A, "number": 1}])
        yield opened


def whole(store: Store) -> str:
    url = store.database._engine.url.render_as_string(hide_password=False)
    return check(str(store.database.path) if store.database.path else url)


@pytest.mark.promise("Input", "`delete` leaves nothing of a cell")
def test_a_deleted_cell_leaves_nothing_and_its_replicates_go_with_it(store: Store) -> None:
    assert cleanup.delete_cell(store, A) == {"cells": 2, "runs": 4, "stages": 4, "numbers": 2, "outcomes": 4}
    assert sorted(store.cells()) == [B]
    assert {cell for cell, _ in store.stages()} == {run["cell"] for run in store.runs()} == {B}
    assert "1 cell," in whole(store) and "0 replicates" in whole(store)


def test_a_replicate_is_deleted_alone(store: Store) -> None:
    assert cleanup.delete_cell(store, f"{A}~1")["cells"] == 1
    assert sorted(store.cells()) == [A, B] and "3 cells" not in whole(store)


@pytest.mark.promise("Input", "`delete` refuses a cell that a process works on")
def test_a_cell_that_is_worked_on_is_not_deleted(store: Store) -> None:
    run = store.claim(A, "train", suite="s", total=4, provenance={})
    with pytest.raises(SpecError, match=f"^cell {A}: a process is working on train; stop it first$"):
        cleanup.delete_cell(store, A)
    assert len(store.cells()) == 3 and len(store.stages()) == 6
    store.release(run)
    cleanup.delete_cell(store, A)


def put(file: Path, age: float = 3600) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"12345")
    for place in (file, file.parent):
        os.utime(place, (time.time() - age,) * 2)
    return file


@pytest.mark.promise("Input", "`delete --unused` removes files that no cell needs and nothing else")
def test_files_that_no_cell_needs(store: Store, tmp_path: Path) -> None:
    """Of B the checkpoint, model and artifact that its record names stay; of C, which is not known, nothing does."""
    files = tmp_path / "files"
    named = ("state-000004.safetensors", "model-1.safetensors", "artifacts/round-1.safetensors")
    kept = [put(files / B / name) for name in (*named, "log.txt", "mine.txt")]
    kept += [put(files / "notes" / "x.safetensors"), put(files / "readme.txt")]
    unnamed = ("model-2.safetensors", "artifacts/round-2.safetensors", "state-000003.safetensors.99.tmp")
    gone = [put(files / B / name) for name in unnamed]
    kept += [put(files / B / "model-3.safetensors", age=5), put(files / ("d" * 12) / "model-1.safetensors", age=5)]
    put(files / C / "model-1.safetensors")
    found = dict(cleanup.unneeded_files(store, files))
    assert found == {**dict.fromkeys(gone, 5), files / C: 5}
    for place in found:
        cleanup.remove(place)
        cleanup.remove(place)
    assert all(file.exists() for file in kept) and not any(file.exists() for file in [*gone, files / C])
    assert list(cleanup.unneeded_files(store, files)) == list(cleanup.unneeded_files(store, tmp_path / "nothing")) == []


def test_files_of_a_cell_that_is_worked_on_stay(store: Store, tmp_path: Path) -> None:
    put(tmp_path / B / "model-2.safetensors")
    run = store.claim(B, "train", suite="s", total=4, provenance={})
    assert list(cleanup.unneeded_files(store, tmp_path)) == []
    store.release(run)
    assert len(list(cleanup.unneeded_files(store, tmp_path))) == 1


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(Store.open(str(tmp_path / f"{name}.db"), create=True)) for name in ("one", "two")
        )


def test_a_folder_serves_one_database(two: tuple[Store, Store], tmp_path: Path) -> None:
    """The first claims it; another is refused, whatever it wants there; a copy of the first is the first."""
    files, (one, other) = tmp_path / "files", two
    assert not folder.belongs(one, files)
    folder.claim(one, files)
    folder.claim(one, files)
    assert folder.belongs(one, files)
    said = r"holds the checkpoints of another database \(.*one\.db\), not of .*two\.db"
    for ask in (folder.claim, folder.belongs):
        with pytest.raises(SpecError, match=said):
            ask(other, files)
    cleanup.backup(one, tmp_path / "copy.db")
    one.close()
    with Store.open(str(tmp_path / "copy.db")) as copy:
        assert folder.belongs(copy, files)
    (tmp_path / "one.db").unlink()
    said = r"of an earlier .*one\.db: remove the folder to start afresh"
    with Store.open(str(tmp_path / "one.db"), create=True) as again, pytest.raises(SpecError, match=said):
        folder.claim(again, files)


def test_of_two_that_claim_a_folder_at_once_one_gets_it(two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both look, both find no owner, both write. The second gets the ordinary message, and the first keeps its mark."""
    files, link, (one, other) = tmp_path / "files", os.link, two

    def slow(part: Path, file: Path) -> None:
        file.write_bytes(mark)  # another process's
        link(part, file)

    folder.claim(one, tmp_path / "other")
    mark = (tmp_path / "other" / folder.MARK).read_bytes()
    monkeypatch.setattr(os, "link", slow)
    with pytest.raises(SpecError, match=r"another database \(.*one\.db\), not of .*two\.db"):
        folder.claim(other, files)
    assert folder.belongs(one, files) and os.listdir(files) == [folder.MARK]
    (files / folder.MARK).unlink()
    folder.claim(one, files)  # one database, two runs: both have it
    assert folder.belongs(one, files)


def test_no_database_is_made_that_would_not_get_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused for the folder's owner, for a file in its place, for a folder that cannot be made."""
    files, two = tmp_path / "files", tmp_path / "two.db"
    with folder.opened(str(tmp_path / "one.db"), files), folder.opened(str(tmp_path / "one.db"), files) as one:
        assert folder.belongs(one, files)
    monkeypatch.setenv("FATBENCH_FILES", str(files))
    code, said = fuzzing.program("run", "suite", "sfat-cifar10", "--smoke", "--db", str(two))
    assert code == 2 and "another database" in said and "not of" in said
    (tmp_path / "file").touch()
    for place, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "below", "Not a directory")):
        with pytest.raises(Unavailable, match=f"cannot make .*: {reason}"), folder.opened(str(two), place):
            pass
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(files.with_name("free")))
    with pytest.raises(Unavailable, match="free: Permission denied"), folder.opened(str(two), tmp_path / "free"):
        pass
    assert not list(tmp_path.glob("two*"))


def test_two_databases_in_one_folder_lose_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`clean` of the second used to remove the models of the first, whose cells it does not know."""
    monkeypatch.setenv("FATBENCH_FILES", str(tmp_path / "files"))
    with Store.open(str(tmp_path / "one.db"), create=True) as one:
        folder.claim(one, tmp_path / "files")
    Store.open(str(tmp_path / "two.db"), create=True).close()
    model = put(tmp_path / "files" / C / "model-1.safetensors")
    code, said = fuzzing.program("delete", "--unused", "--db", str(tmp_path / "two.db"))
    assert code == 2 and "another database" in said and model.exists()
    code, said = fuzzing.program("run", "suite", "sfat-cifar10", "--smoke", "--db", str(tmp_path / "two.db"))
    assert code == 2 and "another database" in said


@pytest.mark.promise("Input", "`export -o copy.db` makes a consistent copy while other processes write")
def test_a_copy_is_whole_while_somebody_writes(store: Store, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    if store.database.path is None:
        with pytest.raises(SpecError, match="pg_dump"):
            cleanup.backup(store, copy)
        return
    other = sqlite3.connect(store.database.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    other.execute("UPDATE cells SET seed = 7")  # not committed
    assert cleanup.backup(store, copy) == copy.stat().st_size > 10_000
    other.execute("ROLLBACK")
    other.close()
    assert "3 cells" in check(str(copy))
    with Store.open(str(copy)) as copied:
        assert copied.cells() == store.cells() and copied.measurements() == store.measurements()
    before = copy.read_bytes()
    with pytest.raises(SpecError, match="exists: name a new file"):
        cleanup.backup(store, copy)
    assert copy.read_bytes() == before
    with pytest.raises(MachineError, match="cannot write"):
        cleanup.backup(store, tmp_path / "no" / "copy.db")
    assert [file.name for file in tmp_path.glob(".copy*")] == []


def test_a_copy_is_on_the_disk_before_it_has_its_name(store: Store, tmp_path: Path, monkeypatch: Any) -> None:
    """Synced before it is linked; what appears under its name meanwhile is not replaced."""
    if store.database.path is None:
        return
    copy, steps = tmp_path / "copy.db", []
    sync, link = os.fsync, os.link
    monkeypatch.setattr(os, "fsync", lambda handle: (steps.append("fsync"), sync(handle)))
    monkeypatch.setattr(os, "link", lambda a, b: (steps.append("link"), link(a, b)))
    cleanup.backup(store, copy)
    assert steps[:2] == ["fsync", "link"]
    copy.unlink()
    monkeypatch.setattr(os, "link", lambda a, b: (copy.write_text("somebody's"), link(a, b)))
    with pytest.raises(SpecError, match="exists: name a new file"):
        cleanup.backup(store, copy)
    assert copy.read_text() == "somebody's" and [file.name for file in tmp_path.glob(".copy*")] == []


def test_a_copy_by_a_user_who_may_only_read_is_not_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their reading takes no lock: what is written meanwhile is noticed."""
    path, copy = tmp_path / "x.db", tmp_path / "copy.db"
    Store.open(str(path), create=True).close()
    with Store.open(str(path)) as store:
        monkeypatch.setattr(cleanup, "mode", lambda path: cleanup.IMMUTABLE)
        connect = store.database.connect

        class Slow(sqlite3.Connection):
            def backup(self, *arguments: Any, **options: Any) -> None:
                super().backup(*arguments, **options)
                os.utime(path)

        monkeypatch.setattr(store.database, "connect", lambda: sqlite3.connect(path, factory=Slow))
        with pytest.raises(Unavailable, match=r"x\.db was written while it was copied: run the command again$"):
            cleanup.backup(store, copy)
        assert not copy.exists()
        monkeypatch.setattr(store.database, "connect", connect)
        assert cleanup.backup(store, copy) == copy.stat().st_size


# --- the commands ------------------------------------------------------------------------------------------------


def test_the_commands_of_the_page_about_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/results.md, in this process, on three cells of the fuzzer's."""
    monkeypatch.chdir(tmp_path)
    line = min(fuzzing.results(tmp_path)[1:], key=lambda line: len(json.loads(line)["runs"]))
    monkeypatch.setenv("FATBENCH_DB", "base.db")
    id = json.loads(line)["cell"]
    put(tmp_path / "base-files" / id / "log.txt")
    put(tmp_path / "base-files" / C / "model-1.safetensors")
    with Store.open("base.db") as store:
        folder.claim(store, tmp_path / "base-files")
    page = (Path(__file__).parent.parent / "docs" / "results.md").read_text(encoding="utf-8")
    said = {}
    for block in re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for command in block.splitlines():
            if command.split()[1] not in ("delete", "check") and "copy.db" not in command:
                continue
            code, said[command] = fuzzing.program(*command.replace("0a1b2c3d4e5f", id[:6]).split()[1:])
            assert code == 0, said[command]
    assert said["fatbench delete 0a1b2c3d4e5f"].startswith(f"{id}: 1 cell, 1 run, 1 stage, 16 numbers")
    assert said["fatbench delete --unused -n"].endswith("1 would be removed, 0.0 MB in base-files\n")
    assert said["fatbench delete --unused"].startswith(f"base-files/{C}\n1 removed")
    assert not (tmp_path / "base-files" / id).exists() and not (tmp_path / "base-files" / C).exists()
    assert "2 cells" in said["fatbench check --db copy.db"]
    code, message = fuzzing.program("delete", id)
    advice = "(fatbench status NAME lists the cells; --db names another database)"
    assert (code, message) == (3, f"fatbench: no cell '{id}' in base.db {advice}\n")
    assert fuzzing.program("delete", "a")[0] == 2
    assert fuzzing.program("delete", "--unused", "--db", "no.db")[0] == 4


def test_what_names_a_suite_and_a_cell_deletes_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("aaaa.yaml").write_text("name: aaaa\n")
    with Store.open("r.db", create=True) as made:
        made.add_cell(A, {"seed": 1})
    code, message = fuzzing.program("delete", "aaaa", "--db", "r.db")
    assert code == 2 and "is both a suite and a cell" in message
    assert fuzzing.program("delete", "aaaaa", "-n", "--db", "r.db") == (0, f"{A}\n1 cell would be deleted\n")


def test_a_replicate_after_a_deleted_one_has_a_number_of_its_own(tmp_path: Path) -> None:
    """Of three runs of a cell the second is deleted; a fourth is the fourth, not another third."""

    def another(name: str) -> Path:
        with Store.open(str(tmp_path / f"{name}.db"), create=True) as made:
            made.add_cell(A, {"seed": 1})
            run = made.claim(A, "train", suite="s", total=1, provenance={})
            made.finish(run, [Number("loss", float(len(name)), 1)], round=1)
            jsonl.export(made, tmp_path / f"{name}.jsonl")
        return tmp_path / f"{name}.jsonl"

    with Store.open(str(tmp_path / "all.db"), create=True) as store:
        for name in ("a", "bb", "ccc"):
            jsonl.import_(store, another(name))
        cleanup.delete_cell(store, f"{A}~1")
        assert jsonl.import_(store, another("dddd"))["new replicates"] == 1
        assert sorted(store.cells()) == [A, f"{A}~2", f"{A}~3"]
