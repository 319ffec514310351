"""What TAB offers, asked as a shell asks; and `report` without a name, which finds one's own suites."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small import small

from fatbench.store.stages import Store
from fatbench.suite import files


def offered(*lines: list[str]) -> list[list[str]]:
    """What bash is offered for the last word of each line, in one process that does not import torch."""
    code = """
import contextlib, io, json, os, sys
from fatbench.cli.app import main
offers = []
for words in json.load(sys.stdin):
    os.environ |= {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main()
    offers.append(shown.getvalue().split())
assert "torch" not in sys.modules and "pandas" not in sys.modules
print(json.dumps(offers))
"""
    env = {**os.environ, "_FATBENCH_COMPLETE": "complete_bash"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=json.dumps(lines), env=env, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(small(presets="{paper: {}, tonight: {}}"))
    return tmp_path


def test_suites_presets_cells_and_formats(place: Path) -> None:
    Path("broken.yaml").write_text("name: [")
    cell = files.load("mine.yaml").plan().cells[0]
    with Store.open("a.db", create=True) as store:
        store.add_cell(cell.id, cell.spec)
    offers = {
        "report sfat-cifar1": ["sfat-cifar10", "sfat-cifar100"],
        "plan suite mine.yaml --preset ": ["paper", "tonight"],
        "run suite broken.yaml --preset ": [],  # a mistake offers nothing
        "report --format m": ["markdown"],
        "status --format ": ["text", "json"],
        "show --db none.db 01": [],
        f"show --db a.db {cell.id[:3]}": [cell.id],
    }
    lines = [["fatbench", *line.split(" ")] for line in offers]
    assert dict(zip(offers, offered(*lines), strict=True)) == offers
