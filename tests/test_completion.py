"""What TAB offers, asked as a shell asks; and `report` without a name, which finds one's own suites."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fatbench.cli import app
from fatbench.store.stages import Store
from fatbench.suite import files

SUITE = """
name: mine
title: My suite
seeds: [6]
base:
  data: digits
  partition: {name: shah, clients: 5, skew: 2}
  model: {name: small_cnn, width: 4}
  algorithm: {name: fedavg, rounds: 1, local: {epochs: 1, batch: 16, lr: 0.1, objective: standard}, aggregator: samples}
axes: {method: {FAT: {}}}
evaluate:
  attacks: {natural: natural}
presets:
  paper: {}
  tonight: {}
tables:
  - {id: A, title: Mine, rows: [method], values: {natural: natural}}
"""


def offered(*words: str) -> list[str]:
    """What bash is offered for the last word, in a process of its own that does not import torch."""
    code = (
        "import sys\nfrom fatbench.cli.app import main\ntry:\n    main()\nfinally:\n"
        "    assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    asked = {"_FATBENCH_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(SUITE)
    return tmp_path


def test_suites_presets_cells_and_formats(place: Path) -> None:
    assert offered("fatbench", "report", "sfat-cifar1") == ["sfat-cifar10", "sfat-cifar10-jpeg75", "sfat-cifar100"]
    assert offered("fatbench", "plan", "suite", "mine.yaml", "--preset", "") == ["paper", "tonight"]
    Path("broken.yaml").write_text("name: [")
    assert offered("fatbench", "run", "suite", "broken.yaml", "--preset", "") == []  # a mistake offers nothing
    assert offered("fatbench", "report", "--format", "m") == ["markdown"]
    assert offered("fatbench", "status", "--format", "") == ["text", "json"]
    cell = files.load("mine.yaml").plan().cells[0]
    assert offered("fatbench", "show", "--db", "a.db", "") == []
    with Store.open("a.db", create=True) as store:
        store.add_cell(cell.id, cell.spec)
    assert offered("fatbench", "show", "--db", "a.db", cell.id[:3]) == [cell.id]


def test_report_without_a_name_shows_own_suites(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file is in the working directory; one whose file is elsewhere is said."""
    plan = files.load("mine.yaml").plan()
    with Store.open("a.db", create=True) as store:
        for suite in ("mine", "gone"):
            store.add_cell(plan.cells[0].id, plan.cells[0].spec)
            run = store.claim(plan.cells[0].id, f"natural-{suite}@1", suite=suite, total=1, provenance={})
            assert run is not None
            store.finish(run)
    monkeypatch.setattr(sys, "argv", ["fatbench", "report", "--format", "markdown", "--db", "a.db"])
    with pytest.raises(SystemExit) as exit:
        app.main()
    out, err = capsys.readouterr()
    assert exit.value.code in (0, None) and out.startswith("### A: Mine") and out.count("###") == 1
    assert err == "fatbench: suite 'gone' has results, but its file was not found: fatbench report FILE\n"
