"""Two users in one folder and on one server: rights are looked at before anything is changed."""

from __future__ import annotations

import os
import pty
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fuzzing
import pytest
from sqlalchemy import text
from users import ANN, NOBODY, done_as

from fatbench.engine.rounds import Number
from fatbench.errors import FatbenchError, MachineError
from fatbench.runner import start
from fatbench.runner.jobs import Job
from fatbench.store import folder
from fatbench.store.database import Database
from fatbench.store.stages import Store

A, B, C = "a" * 12, "b" * 12, "c" * 12


def fill(url: str, files: Path, cells: tuple[str, ...] = (A, B)) -> None:
    """Cells that were trained here, with a model each."""
    with folder.opened(url, files) as store:
        for cell in cells:
            store.add_cell(cell, {"seed": 1})
            run = store.claim(cell, "train", suite="s", total=1, provenance={})
            (files / cell / "artifacts").mkdir(parents=True)
            for name in ("model-000001.safetensors", "artifacts/round-000001.safetensors", "log.txt"):
                (files / cell / name).write_text(name)
            digests = {"model-000001.safetensors": "0"}
            store.finish(run, [Number("loss", 1.0, 1)], round=1, record={"last": {"round": 1}, "sha256": digests})


def all_files(place: Path) -> set[str]:
    """The files below a folder, but for SQLite's log."""
    return {str(file.relative_to(place)) for file in place.rglob("*") if not file.name.endswith(("-wal", "-shm"))}


def program_as(uid: int, *arguments: str) -> str:
    """What the program prints for another user, after its exit code: "5 fatbench: ..."."""

    def call() -> None:
        code, said = fuzzing.program(*arguments)
        raise FatbenchError(f"{code} {said.strip()}")

    return done_as(uid, call).removeprefix("FatbenchError: ")


@pytest.fixture
def of_nobody(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database that all may write, with two trained cells whose files only nobody may."""
    monkeypatch.chdir(shared)
    monkeypatch.setenv("FATBENCH_DB", "x.db")
    assert done_as(NOBODY, lambda: fill("x.db", Path("x-files"))) == ""
    (shared / "x.db").chmod(0o666)
    # another user may not read Python where root has it: what a command imports is loaded before they are that user
    fuzzing.results(tmp_path)
    for command in (f"delete {A} -n", "delete --unused -n", f"import {tmp_path}/base.jsonl --db {tmp_path}/other.db"):
        code, said = fuzzing.program(*command.split())
        assert code == 0, said
    return shared


@pytest.mark.parametrize(
    ("closed", "reason"),
    [
        ("x-files", "x-files belongs to nobody"),
        pytest.param("x-files/bbbbbbbbbbbb", "x-files/bbbbbbbbbbbb belongs to nobody", marks=pytest.mark.nightly),
        ("x-files/bbbbbbbbbbbb/artifacts", "x-files/bbbbbbbbbbbb/artifacts belongs to nobody"),
        ("sticky", "x-files/aaaaaaaaaaaa belongs to nobody"),
    ],
)
@pytest.mark.promise("Input", "`delete` deletes nothing if the files of one of the cells cannot be removed")
def test_who_may_not_remove_the_models_deletes_nothing(closed: str, reason: str, of_nobody: Path) -> None:
    for place in (of_nobody / "x-files", *(of_nobody / "x-files").rglob("*")):
        place.chmod(0o777 if str(place.relative_to(of_nobody)) != closed else 0o755)
    if closed == "sticky":
        (of_nobody / "x-files").chmod(0o1777)
    before = all_files(of_nobody)
    assert program_as(ANN, "delete", A, B) == f"5 fatbench: {reason}: nothing was deleted"
    assert all_files(of_nobody) == before
    with Store.open("x.db") as store:
        assert len(store.cells()) == 2
    said = program_as(NOBODY, "delete", A, B)
    assert said == "\n".join([f"0 {A}: 1 cell, 1 run, 1 stage, 1 number, 0 outcomes deleted", said.splitlines()[-1]])
    assert os.listdir(of_nobody / "x-files") == [folder.MARK]


def test_who_may_not_write_the_database_deletes_no_model(of_nobody: Path, tmp_path: Path) -> None:
    (of_nobody / "x.db").chmod(0o644)
    for place in (of_nobody / "x-files", *(of_nobody / "x-files").rglob("*")):
        place.chmod(0o777)
    (of_nobody / "base.jsonl").write_bytes((tmp_path / "base.jsonl").read_bytes())
    before = all_files(of_nobody)
    for command in (("delete", A), ("import", "base.jsonl")):
        said = program_as(ANN, *command)
        assert said == "5 fatbench: x.db cannot be written: it belongs to nobody"
    assert all_files(of_nobody) == before


def test_models_in_another_folder_are_named(of_nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another user's folder, and of one that no run has used; a run says it when it first uses a second one."""
    monkeypatch.setenv("FATBENCH_FILES", "mine")
    said = program_as(ANN, "delete", A)
    assert said.splitlines() == [
        f"0 {A}: 1 cell, 1 run, 1 stage, 1 number, 0 outcomes deleted",
        f"fatbench: mine has no files of {A}: models elsewhere stay there",
    ]
    assert (of_nobody / "x-files" / A / "log.txt").exists()
    notes: list[str] = []

    def use() -> None:
        for _ in range(2):
            with folder.opened("x.db", Path("mine"), notes.append):
                pass
        raise FatbenchError(" / ".join(notes))

    assert done_as(ANN, use) == (
        "FatbenchError: mine is new and has no models of the 1 trained cell of x.db: if another user or machine has"
        " them, name one folder for all in FATBENCH_FILES"
    )


def test_clean_removes_what_it_may_and_names_the_rest(of_nobody: Path) -> None:
    files = of_nobody / "x-files"
    files.chmod(0o1777)

    def leave(cell: str) -> None:
        (files / cell).mkdir()
        (files / cell / "model-000001.safetensors").write_bytes(b"12345")
        for place in (files / cell / "model-000001.safetensors", files / cell):
            os.utime(place, (time.time() - 3600,) * 2)

    assert done_as(NOBODY, lambda: leave(C)) == done_as(ANN, lambda: leave("d" * 12)) == ""
    for option, words in (("-n", "would be removed"), ("--yes", "removed")):
        said = program_as(ANN, "delete", "--unused", option)
        assert said.splitlines() == [
            f"5 x-files/{'d' * 12}",
            f"1 {words}, 0.0 MB in x-files",
            f"fatbench: 1 you may not remove: x-files/{C} belongs to nobody",
        ]
    assert {name for name in os.listdir(files) if name != folder.MARK} == {A, B, C}


@pytest.mark.parametrize("closed", ["", "log.txt"])
def test_cells_that_another_user_began_are_refused_before_a_run(closed: str, of_nobody: Path) -> None:
    """Whether only the log may not be written or the folder neither; rows and files stay as they were."""
    cell = of_nobody / "x-files" / A
    cell.chmod(0o777 if closed else 0o755)
    jobs = [Job(C, {}, [], [], "s", ""), Job(A, {}, [], [], "s", "")]
    check: Callable[[], object] = lambda: start._check_rights(jobs, of_nobody / "x-files")  # noqa: E731
    assert done_as(NOBODY, check) == ""
    where = cell / closed if closed else cell
    cell.parent.chmod(0o777)
    assert done_as(ANN, check) == f"MachineError: cell {A} cannot be run: {where} belongs to nobody"
    cell.parent.chmod(0o755)  # a cell that nobody has begun has no folder yet
    assert done_as(ANN, check) == f"MachineError: cell {C} cannot be run: {cell.parent} belongs to nobody"


# --- asking -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [pytest.param(("delete", A), marks=pytest.mark.nightly), ("delete", "--unused")])
def test_a_terminal_is_asked(command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No, an end of input, yes; --yes asks nobody, and so does a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FATBENCH_DB", "x.db")
    fill("x.db", Path("x-files"))
    stray = tmp_path / "x-files" / C
    stray.mkdir()
    os.utime(stray, (0, 0))

    def on_terminal(answer: str, *options: str) -> tuple[int, str]:
        child, terminal = pty.fork()
        if child == 0:
            os.execv(sys.executable, [sys.executable, "-m", "fatbench", *command, *options])
        said = b""
        while True:
            try:
                said += os.read(terminal, 4096)
            except OSError:  # it has ended
                break
            if said.endswith(b"[y/N]: "):
                os.write(terminal, answer.encode())
        os.close(terminal)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.decode()

    before = all_files(tmp_path)
    for answer, words in (("n\n", "nothing was deleted"), ("\x04", "")):
        code, said = on_terminal(answer)
        assert code == 130 and words in said and all_files(tmp_path) == before
        question = "1 files and folders will be removed, 0.0 MB in x-files?"
        if command == ("delete", A):
            question = "Delete 1 cell, 1 run, 1 stage, 1 number, 0 outcomes, 1 folder of x.db and x-files?"
        assert question in said
    code, said = on_terminal("", "--yes")
    assert code == 0 and "?" not in said and len(all_files(tmp_path)) < len(before)
    if command == ("delete", A):
        fill("x.db", Path("x-files"), (A,))
        assert on_terminal("y\n")[0] == 0 and A not in os.listdir("x-files")


# --- one PostgreSQL -----------------------------------------------------------------------------------------------


@pytest.fixture
def as_member(new_postgres: Callable[[], str]) -> Callable[..., str]:
    """A function that gives a member of a group some rights on the owner's database, and returns its address."""
    url = new_postgres()
    with Store.open(url, create=True) as store:
        store.add_cell(A, {"seed": 1})
    schema = url.rpartition("%3D")[2]
    member = f"member_{schema}"

    def give_anew(*grants: str) -> str:
        with Database(url).writing() as connection:
            if connection.scalar(text(f"SELECT 1 FROM pg_roles WHERE rolname = '{member}'")):
                connection.execute(text(f"DROP OWNED BY {member}"))
            connection.execute(text(f"DROP ROLE IF EXISTS {member}; CREATE ROLE {member} LOGIN"))
            for grant in grants:
                connection.execute(text(f"GRANT {grant} TO {member}".replace("SCHEMA", f"SCHEMA {schema}")))
        return url.replace("postgres:geheim", f"{member}:geheim")

    return give_anew


USE, READ = "USAGE ON SCHEMA", "SELECT ON ALL TABLES IN SCHEMA"
WRITE = "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA"
COUNT = "USAGE ON ALL SEQUENCES IN SCHEMA"


def test_what_the_page_grants_is_enough_to_run_and_to_read(as_member: Callable[..., str], tmp_path: Path) -> None:
    page = " ".join((Path(__file__).parent.parent / "docs" / "clusters.md").read_text(encoding="utf-8").split())
    for grant in (READ, WRITE, COUNT):
        assert f"GRANT {grant} public TO" in page
    url = as_member(USE, WRITE, COUNT)
    fill(url, tmp_path / "files", (B,))
    fuzzing.results(tmp_path)
    for command in ("status", "export", f"delete {B}", f"import {tmp_path / 'base.jsonl'}", "check --repair"):
        code, said = fuzzing.program(*command.split(), "--db", url)
        assert code == 0, said
    url = as_member(USE, READ)
    for command in ("status", "export", "check", f"show {A}"):
        code, said = fuzzing.program(*command.split(), "--db", url)
        assert code == 0, said


def test_which_rights_are_missing_is_said_before_anything_is_written(
    as_member: Callable[..., str], tmp_path: Path
) -> None:
    """Nothing may be read; only read; written without the counters, or all but deleted; no schema at all."""

    def refused(url: str, *, create: bool) -> str:
        with pytest.raises(MachineError) as caught:
            Store.open(url, create=create)
        return str(caught.value).partition(" cannot be ")[2]

    for grants, said in (
        ((), "this user may use no schema there (GRANT USAGE ON SCHEMA)"),
        ((USE,), "permission denied for table fatbench_version"),
    ):
        url = as_member(*grants)
        assert refused(url, create=False) == refused(url, create=True) == f"read: {said}"
    for grants, lacking in (
        ((USE, READ), "DELETE, INSERT, UPDATE, USAGE on asked and 13 more"),
        ((USE, WRITE), "USAGE on round_metrics_id_seq and 1 more"),
        ((USE, WRITE.replace(", DELETE", ""), COUNT), "DELETE on asked and 11 more"),
    ):
        url = as_member(*grants)
        said = refused(url, create=True)
        assert said == f"written: this user has no {lacking} (docs/clusters.md lists the grants)"
        if grants == (USE, READ):
            denied = r"cannot be written: permission denied for table cells$"
            with Store.open(url) as store, pytest.raises(MachineError, match=denied):
                store.claim(A, "train", suite="s", total=1, provenance={})
    code, said = fuzzing.program("delete", A, "--db", url)
    assert code == 5 and "cannot be written: permission denied for table" in said
    with Store.open(url) as store:
        assert len(store.cells()) == 1
