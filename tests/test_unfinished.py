"""Half-done cells between machines: cut in two they end as uncut, the further half wins, a bad tar writes nothing."""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_resume import SUITE

import fatbench
from fatbench import api
from fatbench.errors import FatbenchError, NothingMatched, SpecError
from fatbench.runner import unfinished
from fatbench.runner.jobs import Job, Machine, Recovery
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store import integrity, tar
from fatbench.store.stages import Store
from fatbench.suite import files

ROUNDS = (1, 2, 3)


@pytest.fixture(autouse=True)
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FATBENCH_FILES", raising=False)
    file = tmp_path / "crash.yaml"
    file.write_text(SUITE)
    return file


@pytest.fixture
def job(suite: Path) -> Job:
    return jobs_of(files.load(str(suite)).plan())[0]


def place(folder: Path) -> Machine:
    folder.mkdir(exist_ok=True)
    how = Recovery(checkpoint_seconds=0.0)
    return Machine(db=str(folder / "r.db"), files=str(folder / "r-files"), data=str(folder / "data"), recovery=how)


def go_on(job: Job, at: Machine, rounds: int = 0, chunks: int = 0) -> tuple[str, list[int]]:
    """(outcome, rounds that were trained) of a turn at a cell that ends after so many rounds or chunks of an attack."""
    trained, attacked = list[int](), list[str]()

    def notify(event: Any) -> None:
        if event.kind == "progress":
            trained.append(event.round) if event.stage == "train" else attacked.append(event.stage)

    def stop() -> bool:
        return 0 < rounds <= len(trained) or 0 < chunks <= len(attacked)

    with Store.open(at.db, create=True) as store:
        return work(job, at, store, notify, stop), trained


def seen(at: Machine, job: Job) -> Any:
    """What a cell has come to: numbers without times, outcomes, and the bytes of every file but the log."""
    with Store.open(at.db) as store:
        keys = ("stage", "round", "client", "metric", "value", "n")
        rows = store.measurements([job.cell])
        numbers = sorted(tuple(row[key] for key in keys) for row in rows if row["metric"] != "seconds")
        outcomes = {name: store.outcomes(job.cell, name) for _, name in sorted(store.stages([job.cell]))}
        states = {name: (row.status, row.round, row.checkpoint) for (_, name), row in store.stages([job.cell]).items()}
    folder = Path(at.files, job.cell)
    kept = (file for file in folder.rglob("*") if file.is_file() and file.name != "log.txt")
    content = {file.relative_to(folder).as_posix(): file.read_bytes() for file in kept}
    return numbers, outcomes, states, content


def exported(at: Machine, target: Path, **chosen: Any) -> Path:
    fatbench.export_results(target, unfinished=True, db=at.db, **chosen)
    return target


def imported(source: Path, at: Machine) -> dict[str, Any]:
    Path(at.db).parent.mkdir(exist_ok=True)
    (summary,), *_ = api.take_in([source], at.db, None)
    return summary


@pytest.mark.promise("Numbers", "A half-done cell goes on on another machine and ends in the same bytes")
@pytest.mark.parametrize(
    "cut",
    [
        {"chunks": 2},
        *(pytest.param(c, marks=pytest.mark.nightly) for c in ({"rounds": 1}, {"rounds": 2}, {"chunks": 5})),
    ],
    ids=str,
)
def test_a_cell_cut_in_two_ends_as_the_uncut_one(cut: dict[str, int], job: Job, tmp_path: Path) -> None:
    whole, first, second = (place(tmp_path / name) for name in ("whole", "first", "second"))
    assert go_on(job, whole) == ("done", [*ROUNDS])
    assert go_on(job, first, **cut)[0] == "interrupted"
    part = exported(first, tmp_path / "part.tar", suite="crash.yaml")
    assert imported(part, second)["cells to go on with"] == 1
    assert "intact" in integrity.check(second.db, files=Path(second.files))
    again = exported(second, tmp_path / "again.tar")  # the suite is found in the working directory
    assert again.read_bytes() == part.read_bytes()
    rounds = cut.get("rounds", 3)
    assert go_on(job, second) == ("done", [*ROUNDS[rounds:]])
    assert seen(second, job) == seen(whole, job)
    with pytest.raises(NothingMatched, match="nothing is half done"):
        exported(second, part)


def test_a_tar_has_what_a_run_goes_on_from_and_no_more(job: Job, tmp_path: Path) -> None:
    at = place(tmp_path / "at")
    go_on(job, at, rounds=2)
    part = exported(at, tmp_path / "part.tar")
    with Store.open(at.db) as store:
        record = store.stages([job.cell])[job.cell, "train"].record
    models = {f"model-{record[name]['round']:06d}.safetensors" for name in ("best-val", "best-test")}
    with tarfile.open(part) as opened:
        members = opened.getmembers()
    kept = sorted(f"{job.cell}/{name}" for name in models | {"state-000002.safetensors"})
    assert [member.name for member in members] == ["unfinished.json", "cells.jsonl.xz", *kept]
    assert {(member.mtime, member.uid, member.uname) for member in members} == {(0, 0, "")}


def test_what_is_half_done_is_said_before(job: Job, tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    at = place(tmp_path / "at")
    code, _, err = run("export", "--unfinished", "--db", at.db)
    assert code and "does not exist" in err
    go_on(job, at, rounds=2)
    code, out, err = run("export", "--unfinished", "--db", at.db)
    size = exported(at, tmp_path / "part.tar").stat().st_size
    line, total = out.splitlines()
    assert (code, err, line[:28], total[:13]) == (0, "", f"{job.cell}  round 2 of 3  ", "1 half-done, ")
    assert abs(float(total.split()[2]) - size / 1e6) < 0.1
    code, out, err = run("export", "--unfinished", job.cell[:6], "--db", at.db, "-o", "two.tar")
    assert (code, out) == (0, "") and err.splitlines()[:2] == [line, total] and "wrote two.tar" in err
    assert Path("two.tar").read_bytes() == Path("part.tar").read_bytes()
    for wrong in (["--format", "csv"], ["--without", "weight"], ["-k", "a=b"]):
        assert run("export", "--unfinished", "--db", at.db, *wrong)[0] == SpecError.exit_code
    code, out, err = run("import", "two.tar", "--db", "new.db")
    assert (code, err) == (0, "") and "1 cells to go on with" in out
    code, out, err = run("import", "two.tar", "--db", "new.db")
    assert code == 0 and f"{job.cell} stays as it is: it is as far here" in err


def test_a_cell_that_is_worked_on_goes_as_of_its_last_checkpoint(job: Job, tmp_path: Path) -> None:
    at, other = place(tmp_path / "at"), place(tmp_path / "other")
    go_on(job, at, rounds=1)
    with Store.open(at.db) as store:
        run = store.claim(job.cell, "train", suite="crash", total=3, provenance={})
        with api.half_done(db=at.db) as found:
            assert [(row.state, row.running) for row in found.cells] == [("round 1 of 3", True)]
            assert "as of its last checkpoint" in str(found)
            for file in Path(at.files).rglob("state-*"):  # a run that goes on removes it
                file.unlink()
            found.write(tmp_path / "part.tar")
        assert imported(tmp_path / "part.tar", other)["cells to go on with"] == 1
        shutil.copytree(Path(other.files), Path(at.files), dirs_exist_ok=True, ignore=shutil.ignore_patterns(".fat*"))
        summary = imported(tmp_path / "part.tar", at)  # nobody takes a cell from a process that works on it
        assert (summary["cells to go on with"], summary["cells left"]) == (0, 1)
        assert store.stages([job.cell])[job.cell, "train"].run == run
    assert go_on(job, other) == ("done", [2, 3])


@pytest.mark.parametrize(
    ("here", "there", "stays"), [(1, 2, "there"), pytest.param(2, 2, "here", marks=pytest.mark.nightly)]
)
@pytest.mark.promise("Input", "Of two halves of a cell the further one wins whole; they are never mixed")
def test_the_further_half_wins_whole(
    here: int, there: int, stays: str, job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each side trains by itself, so both have their own runs."""
    ours, theirs, fresh = (place(tmp_path / name) for name in ("ours", "theirs", "fresh"))
    go_on(job, theirs, rounds=there)
    part = exported(theirs, tmp_path / "part.tar")
    if here:
        go_on(job, ours, rounds=here)
    else:  # its checkpoint is lost, so a run would begin anew
        go_on(job, ours, rounds=2)
        next(Path(ours.files).rglob("state-*")).unlink()
    before, runs = seen(ours, job), {}
    for name, at in (("here", ours), ("there", theirs)):
        with Store.open(at.db) as store:
            runs[name] = {run["uid"] for run in store.runs()}
    for _ in range(2):  # twice changes nothing
        summary = imported(part, ours)
        with Store.open(ours.db) as store:
            assert {run["uid"] for run in store.runs()} == runs[stays]
        assert "intact" in integrity.check(ours.db, files=Path(ours.files))
        if stays == "here":
            assert seen(ours, job) == before
            assert (f"it is at round {here} here" if here > there else "it is as far here") in capsys.readouterr().err
    assert summary["cells to go on with"] == 0
    imported(part, fresh)
    if stays == "there":
        assert seen(ours, job) == seen(fresh, job)
    assert go_on(job, ours)[0] == go_on(job, fresh)[0] == "done"
    assert seen(ours, job) == seen(fresh, job)


def test_evaluations_of_the_same_model_are_joined_and_those_of_another_are_not(job: Job, tmp_path: Path) -> None:
    first, second = place(tmp_path / "first"), place(tmp_path / "second")
    go_on(job, first, rounds=3)
    part = exported(first, tmp_path / "part.tar")
    imported(part, second)
    assert go_on(job, first, chunks=4)[0] == "interrupted"
    assert go_on(job, second, chunks=1)[0] == "interrupted"
    part = exported(first, tmp_path / "part.tar")
    summary = imported(part, second)
    assert (summary["cells joined"], summary["cells left"]) == (1, 0)
    after, summary = seen(second, job), imported(part, second)
    assert (summary["cells joined"], summary["cells left"]) == (0, 1)
    assert seen(second, job) == after
    assert go_on(job, first) == go_on(job, second) == ("done", [])
    assert seen(first, job) == seen(second, job)
    with Store.open(second.db) as store, store.database.writing() as connection:  # as if another device had trained it
        connection.exec_driver_sql("UPDATE numbers SET value = value + 1 WHERE client = -1")
    before = seen(second, job)
    (summary,), *_ = api.take_in([part], second.db, None)
    assert summary["cells left"] == 1 and seen(second, job) == before


def test_a_plain_import_and_then_its_files(job: Job, tmp_path: Path) -> None:
    """What JSON lines brought cannot go on; the tar brings what is missing."""
    first, second = place(tmp_path / "first"), place(tmp_path / "second")
    go_on(job, first, chunks=2)
    fatbench.export_results(tmp_path / "rows.jsonl", db=first.db)
    imported(tmp_path / "rows.jsonl", second)
    assert go_on(job, second)[0] == "failed"  # no model is here
    imported(exported(first, tmp_path / "part.tar"), second)
    with Store.open(second.db) as store:
        assert store.stages([job.cell])[job.cell, "train"].record["sha256"]


# --- what is no such tar --------------------------------------------------------------------------------------------


@pytest.fixture
def part(job: Job, tmp_path: Path) -> Path:
    at = place(tmp_path / "at")
    go_on(job, at, rounds=1)
    return exported(at, tmp_path / "part.tar")


def refused(file: Path, folder: Path) -> str:
    """What is said of a tar of which nothing is taken in: one line, no database, no file."""
    with pytest.raises(FatbenchError) as raised:
        api.take_in([file], str(folder / "no" / "r.db"), None)
    assert not (folder / "no").exists()
    assert "\n" not in str(raised.value) and str(raised.value).startswith(str(file))
    return str(raised.value)


@pytest.mark.promise("Input", "A damaged, truncated or foreign tar of half-done cells is refused and writes nothing")
def test_every_cut_and_every_flipped_bit_is_refused(part: Path, tmp_path: Path) -> None:
    content, random_ = part.read_bytes(), random.Random(3)
    with tarfile.open(part) as opened:
        end = max(member.offset_data + -(-member.size // 512) * 512 for member in opened.getmembers())
    bad = tmp_path / "bad.tar"
    for size in [600, *(random_.randrange(513, end) for _ in range(40))]:
        bad.write_bytes(content[:size])
        assert "truncated" in refused(bad, tmp_path)
    for bit in (random_.randrange(8 * 600, 8 * end) for _ in range(120)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        bad.write_bytes(flipped)
        refused(bad, tmp_path)


Members = list[tuple[tarfile.TarInfo, bytes]]


def members_of(part: Path) -> Members:
    with tarfile.open(part) as opened:
        return [(member, opened.extractfile(member).read()) for member in opened.getmembers()]  # type: ignore[union-attr]


def packed(file: Path, members: Members, format: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(file, "w", format=format) as opened:
        for member, content in members:
            opened.addfile(member, io.BytesIO(content))
    return file


def listed_anew(part: Path, change: Callable[[Any], None]) -> Members:
    """The members with a changed list, written as a forger does who knows how."""
    (head, text), *rest = members_of(part)
    value = json.loads(text)
    change(value)
    content = json.dumps(value).encode()
    head.size = len(content)
    return [(head, content), *rest]


@pytest.mark.parametrize(
    "name",
    ["../../outside.safetensors", "/etc/outside.safetensors", "artifacts/../../outside.safetensors",
     "model-000001.safetensors\n", ".fatbench-database"],
)  # fmt: skip
def test_no_name_leads_elsewhere(name: str, part: Path, tmp_path: Path) -> None:
    def change(value: Any) -> None:
        (half,) = value["cells"].values()
        half["files"][name] = half["files"].popitem()[1]

    members = listed_anew(part, change)
    members[-1][0].name = f"{members[-1][0].name.partition('/')[0]}/{name}"
    assert "not valid" in refused(packed(tmp_path / "bad.tar", members), tmp_path)
    assert not list(tmp_path.parent.rglob("outside*"))


def test_members_that_are_no_plain_listed_files(part: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.tar"
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
        members = members_of(part)
        link = tarfile.TarInfo(members[-1][0].name)
        link.type, link.linkname = kind, "/etc/passwd"
        members[-1] = link, b""
        assert "more than plain files" in refused(packed(bad, members), tmp_path)
    members = members_of(part)
    assert "more follows" in refused(packed(bad, [*members, members[-1]]), tmp_path)
    assert "another member is here" in refused(packed(bad, [*members[:-2], members[-1], members[-2]]), tmp_path)
    long = tarfile.TarInfo("x" * 200)
    assert "more than plain files" in refused(packed(bad, [(long, b""), *members]), tmp_path)
    members[0][0].pax_headers = {"comment": "ä"}
    assert "more than plain files" in refused(packed(bad, members, tarfile.PAX_FORMAT), tmp_path)
    other = tarfile.TarInfo("README")
    assert "none of 'fatbench export --unfinished'" in refused(packed(bad, [(other, b"")]), tmp_path)
    assert refused(packed(bad, []), tmp_path)


def test_a_member_that_says_it_is_huge_takes_no_memory_and_no_disk(part: Path, tmp_path: Path) -> None:
    def change(value: Any) -> None:
        (half,) = value["cells"].values()
        half["files"][max(half["files"])]["bytes"] = 2**43

    members = listed_anew(part, change)
    bad = tmp_path / "bad.tar"
    content = packed(bad, members[:-1]).read_bytes().rstrip(b"\0")
    content += b"\0" * (-len(content) % 512)
    last = members[-1][0]
    last.size = 2**43
    bad.write_bytes(content + last.tobuf(tarfile.GNU_FORMAT) + members[-1][1])
    assert "truncated" in refused(bad, tmp_path)


def test_a_list_that_does_not_fit_its_cells(part: Path, job: Job, tmp_path: Path) -> None:
    for change, said in [
        (lambda value: value["cells"].update({"0" * 12: value["cells"].pop(job.cell)}), "another member is here"),
        (lambda value: value["cells"][job.cell].update(checkpoint=None), "its checkpoint is None"),
        (lambda value: value["cells"][job.cell].update(checkpoint="state-000007.safetensors"), "state-000007"),
        (lambda value: value.update(version=2), "of another version"),
        (lambda value: value["lines"].update(sha256="0" * 64), "another SHA-256"),
        (lambda value: value.update(more=1), "not valid"),
    ]:
        assert said in refused(packed(tmp_path / "bad.tar", listed_anew(part, change)), tmp_path)


def test_a_full_disk_leaves_everything_as_it_was(
    part: Path, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = place(tmp_path / "other")
    go_on(job, at, rounds=1)
    shutil.rmtree(Path(at.files, job.cell))
    before = seen(at, job)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tar, "_padding", full)
        with pytest.raises(FatbenchError, match="No space"):
            imported(part, at)
    with monkeypatch.context() as patched:
        patched.setattr(unfinished.os, "replace", full)
        with pytest.raises(FatbenchError, match="No space left on device; nothing was imported"):
            imported(part, at)
    assert seen(at, job) == before and not Path(at.files, job.cell).exists()
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(unfinished.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(FatbenchError, match=r"MB in .*, where less is free"):
        imported(part, at)


def test_where_the_rest_cannot_have_the_same_bytes(
    part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unfinished.provenance, "processor", lambda: "another processor")
    monkeypatch.setattr(unfinished, "version", lambda package: "0.1")
    code = {"commit": "a" * 40, "dirty": True, "diff": hashlib.sha256(b"").hexdigest()}
    monkeypatch.setattr(unfinished.provenance, "code_version", lambda: code)
    imported(part, place(tmp_path / "other"))
    said = capsys.readouterr().err
    assert "trained so far on cpu (" in said and "which is not here" in said
    assert "here is 0.1" in said and "a run begins it anew" in said
