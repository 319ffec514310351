"""Every `-o` of every command, given a device, a pipe, a link and `-`; results read from `-` and from a pipe."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import result_files
import typer

from fatbench import __version__
from fatbench.cli import app
from fatbench.report.numbers import sql_tables
from fatbench.store.jsonl import import_
from fatbench.store.stages import Store

RESULTS = Path(__file__).parent.parent / "results"
Run = Callable[..., tuple[int, str, str]]
NAMED = ("sfat-fashion", "--preset", "cpu")
FILES = {
    "export": ("export",),
    "export csv": ("export", *NAMED, "--format", "csv"),
    "export parquet": ("export", *NAMED, "--format", "parquet"),
    "report": ("report", *NAMED),
    "outcomes": ("show", "CELL", "--outcomes"),
    "network": ("fetch", "vit-half-jpeg75"),
}
FOLDERS = {
    "show": ("show", "CELL", "--artifacts"),
    "invert": ("invert", "model.pt", "--after", "model.pt", "--model", "mlp", "--shape", "1,28,28"),
    "plot": ("plot", *NAMED),
    "plot csv": ("plot", *NAMED, "--format", "csv"),
    "site": ("site",),
}
WITHOUT_DATABASE = ("invert", "fetch")


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four cells, for each is exported many times."""
    folder = tmp_path_factory.mktemp("outputs")
    head, *cells = result_files.lines(RESULTS / "sfat-fashion-cpu.jsonl.xz")
    few = folder / "few.jsonl"
    few.write_text("".join([json.dumps(json.loads(head) | {"cells": 4}) + "\n", *cells[:4]]), encoding="utf-8")
    with Store.open(str(folder / "f.db"), create=True) as store:
        import_(store, few)
        sql_tables.judge(store, sorted(store.cells()))
    return str(folder / "f.db")


@pytest.fixture(autouse=True)
def _network(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fetch` knows a network from any folder."""
    monkeypatch.setattr("fatbench.packed.results_in", lambda folder: [RESULTS / "vit-half-jpeg75-cpu.jsonl.xz"])


@pytest.fixture(params=FILES)
def command(request: pytest.FixtureRequest, db: str) -> list[str]:
    if request.param == "export parquet":
        pytest.importorskip("pyarrow")
    return _filled(FILES[request.param], db)


def _filled(words: tuple[str, ...], db: str) -> list[str]:
    with Store.open(db) as store:
        cell = next(iter(store.cells()))
    return [cell if word == "CELL" else word for word in words] + ([] if words[0] in WITHOUT_DATABASE else ["--db", db])


@contextmanager
def stdout_to(file: Path, flags: int = os.O_TRUNC) -> Iterator[None]:
    """The process's own stdout is this file, as in a shell's `> file`."""
    kept, target = os.dup(1), os.open(file, os.O_WRONLY | os.O_CREAT | flags)
    try:
        os.dup2(target, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(target)


FILE_OF: dict[tuple[str, ...], bytes] = {}


def written(command: list[str], file: Path) -> str:
    return "" if command[0] == "fetch" else f"fatbench: wrote {file}\n"


def as_file(run: Run, command: list[str], tmp_path: Path) -> bytes:
    """What the command writes to an ordinary file; it is written once."""
    if (asked := tuple(command)) not in FILE_OF:
        plain = tmp_path / "plain"
        assert run(*command, "-o", str(plain)) == (0, "", written(command, plain))
        FILE_OF[asked] = plain.read_bytes()
        plain.unlink()
    return FILE_OF[asked]


def test_every_command_with_such_an_option_is_tried() -> None:
    commands: Any = typer.main.get_command(app.app).commands  # which are no groups: see test_grammar.py
    named = {name for name, one in commands.items() if any("-o" in parameter.opts for parameter in one.params)}
    assert named == {words[0] for words in (*FILES.values(), *FOLDERS.values())}


def test_a_device_is_written_and_stays_a_device(run: Run, command: list[str], tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.open("wb").close()
    except PermissionError:
        pytest.skip("no device can be made here")
    assert run(*command, "-o", str(device)) == (0, "", "")
    assert stat.S_ISCHR(device.stat().st_mode) and os.listdir(tmp_path) == ["null"]


def test_a_pipe_gets_what_a_file_gets_and_stays_a_pipe(run: Run, command: list[str], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert run(*command, "-o", str(pipe)) == (0, "", "")
    reader.join(timeout=60)
    assert received == [as_file(run, command, tmp_path)] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_the_target_of_a_link_is_written(run: Run, command: list[str], tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to("target")
    assert run(*command, "-o", str(link)) == (0, "", written(command, link))
    assert link.is_symlink() and target.read_bytes() == as_file(run, command, tmp_path)


def test_a_dash_and_dev_stdout_are_stdout(run: Run, command: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    """Also where stdout is a file that something stands in: `>> log`."""
    monkeypatch.chdir(tmp_path)
    expected = as_file(run, command, tmp_path)
    with stdout_to(Path("dash")):
        assert run(*command, "-o", "-") == (0, "", "")
    Path("log").write_text("before\n")
    with stdout_to(Path("log"), os.O_APPEND):
        assert run(*command, "-o", "/dev/stdout") == (0, "", "")
    assert Path("dash").read_bytes() == expected and Path("log").read_bytes() == b"before\n" + expected
    assert sorted(os.listdir()) == ["dash", "log"]


@pytest.mark.parametrize("output", ["-", "pipe", "file"])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_no_dash_pipe_or_file(run: Run, db: str, name: str, output: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("file").touch()
    said = f"fatbench: -o {output}: expected a folder, for several files are written\n"
    assert run(*_filled(FOLDERS[name], db), "-o", output) == (2, "", said)
    assert sorted(os.listdir()) == ["file", "pipe"] and stat.S_ISFIFO(Path("pipe").stat().st_mode)


@pytest.mark.nightly
def test_results_are_read_from_stdin_and_from_a_pipe(run: Run, db: str, tmp_path: Path) -> None:
    """`import` reads each file twice, `compare` and `site` look into it first."""
    exported = as_file(run, ["export", "--db", db], tmp_path)

    def given(content: bytes, *words: str | Path) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([sys.executable, "-m", "fatbench", *words], input=content, capture_output=True)

    done = given(exported, "import", "-", "--db", tmp_path / "a.db")
    assert done.returncode == 0 and done.stdout.startswith(b"-: 4 cells, 4 new cells"), done.stderr
    done = given(exported, "compare", "-", tmp_path / "a.db")
    assert done.returncode == 0 and b"\nA = -\n" in done.stdout, done.stderr
    done = given(b"no", "import", "-", "--db", tmp_path / "b.db")
    assert done.returncode == 2 and done.stderr.startswith(b"fatbench: -:1: "), done.stderr
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(exported,), daemon=True)
    writer.start()
    code, out, said = run("import", str(pipe), "--db", str(tmp_path / "c.db"))
    assert code == 0 and "4 new cells" in out and not said


def test_what_a_script_asks_is_answered_as_json(run: Run, db: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)

    def asked(*words: str, code: int = 0) -> dict[str, Any]:
        ended, out, said = run(*words, "--format", "json")
        assert (ended, said) == (code, ""), said
        found: dict[str, Any] = json.loads(out)
        assert found.pop("schema_version") == 1
        return found

    facts = {one["name"]: one["text"] for one in asked("doctor", "--db", db)["facts"]}
    assert facts["fatbench"].startswith(__version__) and "is intact" in facts["database"]
    checked = asked("check", "--db", db)
    assert checked["intact"] is True and checked["rows"]["cells"] == 4
    assert run("export", "--db", db, "-o", "some.jsonl")[0] == 0
    (taken,) = asked("import", "some.jsonl", "--db", "new.db")["files"]
    assert (taken["file"], taken["new_cells"], taken["invalid_lines"]) == ("some.jsonl", 4, 0)
    suite = asked("show", "sfat-fashion")
    assert suite["presets"]["cpu"]["attacks"] and suite["tables"][0]["id"] and suite["axes"]["method"]
    Path("wrong.yaml").write_text("name: wrong\n")
    right, wrong = asked("check", "sfat-fashion", "wrong.yaml", code=2)["suites"]
    assert right["ok"] and right["presets"]["cpu"] > 0 and not wrong["ok"] and "wrong.yaml" in wrong["error"]
    with Store.open(db) as store:
        cell = next(iter(store.cells()))
    log = str(Path(db).with_name("f-files") / cell / "log.txt")
    assert asked("show", "--log", cell, "--db", db) == {"cell": cell, "file": log, "log": None, "errors": {}}
