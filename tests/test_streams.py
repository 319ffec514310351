"""Standard streams that are closed, full or gone: no traceback, no other file in their place."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import fuzzing
import pytest

from fatbench.runner import processes
from fatbench.runner.waiting import StopRequest
from fatbench.store.stages import Store

SHELL = 'exec "$0" -m fatbench "$@"'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a suite and its results."""
    fuzzing.results(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FATBENCH_DB", "base.db")
    return tmp_path


def ended(streams: str, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the program with its standard streams as a shell opens or closes them."""
    command = ["sh", "-c", f"{SHELL} {streams}", sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


RARE = [pytest.param(streams, marks=pytest.mark.nightly) for streams in (">&-", "2>&-", "2> /dev/full")]


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", *RARE])
def test_what_is_closed_takes_nothing_and_stops_nothing(place: Path, streams: str) -> None:
    """A command that prints, one that writes a file, and one that refuses; also the database is only SQLite's."""
    before = (place / "base.db").read_bytes()
    code, out, err = ended(streams, "report", "fuzzed.yaml", "-o", "table.md")
    assert (code, out) == (0, ""), err
    assert "A: One" in (place / "table.md").read_text()
    assert err == ("" if "2>" in streams else "fatbench: wrote table.md\n")
    code, out, err = ended(streams, "report", "fuzzed.yaml")
    assert (code, err) == (0, "") and ("A: One" in out) == (">&-" not in streams.split())
    code, out, err = ended(streams, "reprot")
    assert (code, out) == (2, "") and ("did you mean 'report'" in err) == ("2>" not in streams)
    assert (place / "base.db").read_bytes() == before


@pytest.mark.parametrize("command", ["report fuzzed.yaml", pytest.param("export", marks=pytest.mark.nightly)])
def test_a_full_stdout_is_one_sentence(place: Path, command: str) -> None:
    assert ended("> /dev/full", *command.split()) == (5, "", "fatbench: stdout: No space left on device\n")


def test_a_reader_that_is_gone_ends_the_command(place: Path) -> None:
    line = '"$0" -m fatbench export | head -c 10; echo " ${PIPESTATUS[0]}"'
    done = subprocess.run(["bash", "-c", line, sys.executable], capture_output=True, text=True, timeout=300)
    assert done.stderr == "" and done.stdout.split()[-1] in ("141", "0")  # 0: all of it was in the pipe


@pytest.mark.nightly
def test_a_run_whose_terminal_is_closed_keeps_its_rounds(place: Path) -> None:
    """The shell says so and the system says so: the second is no word to stop at once. Its messages go nowhere."""
    (place / "long.yaml").write_text(fuzzing.SUITE.replace("rounds: 2", "rounds: 5000"))
    command = [sys.executable, "-m", "fatbench", "run", "long.yaml", "-k", "method=FAT and lr=high and seed=0"]
    command += ["--jobs", "1", "--device", "cpu", "-v"]
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"FATBENCH_DB": "long.db", "FATBENCH_RUN_CHECKPOINT_SECONDS": "3600", "TERM": "dumb"}
        os.execv(command[0], command)
    said = b""
    while b" train 1/" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    os.kill(child, signal.SIGHUP)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 129
    with Store.open("long.db") as store:
        ((_, row),) = store.stages().items()
    assert row.status == "interrupted" and row.round >= 1 and row.checkpoint


def test_under_nohup_a_run_goes_on_without_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.ask() == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert (request.ask(), request.code) == (1, 143)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert processes.heard_signals() == list(processes.SIGNALS)
    finally:
        signal.signal(signal.SIGHUP, before)
