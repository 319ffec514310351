"""What `make soak` would say of results that a disturbance has changed. See tests/soak.py."""

from __future__ import annotations

import os
import random
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
import soak
from crew import rows

from fatbench.runner.jobs import Job, Machine
from fatbench.runner.worker import work
from fatbench.store.stages import Store


@pytest.fixture
def twice(jobs: list[Job], machine: Machine) -> tuple[Path, Path]:
    """A cell that is done, and a copy of its database."""
    with Store.open(machine.db) as store:
        assert work(jobs[0], machine, store) == "done"
    copy = Path(machine.db).with_name("copy.db")
    with sqlite3.connect(machine.db) as here, sqlite3.connect(copy) as there:
        here.backup(there)
    return Path(machine.db), copy


OF = "round_metric IN (SELECT id FROM round_metrics WHERE metric ="
DAMAGE: dict[str, tuple[str, str]] = {
    "nothing": ("SELECT 1", ""),
    "a number": (f"UPDATE numbers SET value = value + 1e-12 WHERE {OF} 'fgsm')", "numbers: 1 missing or other"),
    "a lost number": (f"DELETE FROM numbers WHERE {OF} 'natural' AND round = 3)", "numbers: 1 missing or other"),
    "an outcome": ("UPDATE outcome_chunks SET bits = x'00112233' WHERE stage LIKE 'fgsm%'", "outcomes: "),
    "a stage": ("UPDATE stages SET status = 'running' WHERE stage = 'train'", "stages: 1 missing or other"),
    "a cell more": ("INSERT INTO stages SELECT cell, 'x', status, round, total, NULL, record, NULL, run, NULL, NULL, "
                    "NULL FROM stages WHERE stage = 'train'", "stages: 1 too many or other"),
    "a failure": ("UPDATE runs SET status = 'failed' WHERE stage = 'train'", "train: 1 runs failed"),
    "a stage done twice": ("UPDATE runs SET stage = 'train'", "train: done 3 times"),
}  # fmt: skip


def test_a_soak_draws_its_disturbances_from_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    monkeypatch.setattr(sys, "argv", ["soak.py", "--minutes", "0", "--seed", "7"])
    monkeypatch.setattr(os, "environ", {**os.environ})  # which the program changes
    monkeypatch.setattr(soak.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(soak, "wave", lambda *given: drawn.append(given[4].random()) is None)
    with pytest.raises(SystemExit, match="False"):
        soak.main()
    assert drawn == [random.Random(7).random()]


@pytest.mark.nightly
@pytest.mark.promise(
    "Input",
    "Eight runners with kills, stops, foreign locks, full disks and wrong clocks end as if undisturbed (`make soak`)",
)
def test_what_the_soak_sees(twice: tuple[Path, Path], jobs: list[Job], machine: Machine) -> None:
    db, undisturbed = twice
    assert {status for status, _ in rows(machine, jobs[0]).values()} == {"done"}
    with closing(sqlite3.connect(db)) as here, closing(sqlite3.connect(undisturbed)) as there:
        for damage, said in DAMAGE.values():
            here.execute(damage)
            here.commit()
            found = soak.faults(db, undisturbed)
            assert bool(found) == bool(said) and (not said or any(said in line for line in found)), (damage, found)
            there.backup(here)
