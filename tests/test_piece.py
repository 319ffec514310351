"""`make gpu-piece` without a GPU: what it restores, how large what it writes back is, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import piece
from fatbench.suite import files

PLAN = files.load(piece.SUITE).plan(piece.PRESET)


def test_the_preset_is_the_pair_of_table_9_through_jpeg() -> None:
    """As printed: one local epoch, 100 rounds, weight decay 1e-4, all images; not printed: lr 0.01, the release's."""
    key = {"dataset": "CIFAR-10", "E": "1"}
    assert [cell.key for cell in PLAN.cells] == [{**key, "method": method} for method in ("FAT", "SFAT")]
    assert PLAN.checkpoints == ["last", "best-test"]
    for cell in PLAN.cells:
        local = cell.spec["algorithm"]["local"]
        assert (local["epochs"], local["lr"], float(local["weight_decay"])) == (1, 0.01, 1e-4)
        assert (cell.spec["algorithm"]["rounds"], cell.spec["validation"], cell.spec["seed"]) == (100, 0, 6)
        assert cell.spec["data"]["variant"] == "jpeg75" and cell.spec["model"]["name"] == "nin"
        assert "autoattack" not in {one.label for one in cell.evaluations}


def called(monkeypatch: pytest.MonkeyPatch, folder: Path, run: int, export: int, size: int) -> tuple[Any, list[str]]:
    """(exit code, commands) of a call in which `run` and `export --unfinished` end with these codes."""
    commands: list[str] = []

    def done(command: list[str], check: bool = False) -> Any:
        words = command[3:]
        commands.append(" ".join(words[:2]))
        code = export if "--unfinished" in words else 0
        if "-o" in words and code == 0:
            Path(words[words.index("-o") + 1]).write_bytes(bytes(range(256)) * (size // 256))
        if words[0] == "import":
            assert all(Path(word).exists() for word in words[1 : words.index("--db")])
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(piece.subprocess, "run", done)
    monkeypatch.setattr(piece, "run_until", lambda command, seconds: run)
    monkeypatch.setattr(sys, "argv", ["piece", "--device", "cpu", "-o", str(folder)])
    with pytest.raises(SystemExit) as stopped:
        piece.main()
    return stopped.value.code, commands


def test_pieces_are_written_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece, "LARGEST", 1024)
    assert called(monkeypatch, tmp_path, 130, 0, 2560) == (75, ["export --unfinished", "export -o"])
    assert sorted(file.name for file in tmp_path.glob("part*")) == ["part.tar.000", "part.tar.001", "part.tar.002"]
    (whole,) = piece.restored(tmp_path)
    assert whole.read_bytes() == bytes(range(256)) * 10
    code, commands = called(monkeypatch, tmp_path, 130, 0, 512)
    assert code == 75 and commands[0].startswith("import ")
    assert [file.name for file in tmp_path.glob("part*")] == ["part.tar.000"]
    # what cannot be written leaves the pieces of before
    assert called(monkeypatch, tmp_path, 130, 4, 0)[0] == 4
    assert [file.name for file in tmp_path.glob("part*")] == ["part.tar.000"]
    assert called(monkeypatch, tmp_path, 1, 0, 512)[0] == 1
    assert called(monkeypatch, tmp_path, 0, 3, 0)[0] == 0  # all is done: nothing is half done
    assert not list(tmp_path.glob("part*"))


@pytest.mark.nightly
def test_a_command_is_asked_to_stop_when_its_time_is_over() -> None:
    """Which then ends in its own way."""
    program = "import signal, time\nsignal.signal(signal.SIGINT, lambda *_: exit(7))\ntime.sleep(60)"
    assert piece.run_until([sys.executable, "-c", program], 3) in (7, -2)  # -2: it was asked before it listened
    assert piece.run_until([sys.executable, "-c", "exit(0)"], 60) == 0
