"""Plans on many GPUs: makespans, idle shares and writes worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import fuzzing
import pytest

from fatbench.suite import duration
from fatbench.suite.duration import RemainingWork, schedule


def lengths(*seconds: float) -> list[RemainingWork]:
    return [RemainingWork(one, 0.0, 0, 0, 0) for one in seconds]


def test_slots_take_the_next_cell_when_they_are_free() -> None:
    """Two slots, 3 2 2 1: the first ends at 3, the second at 4, and 1 goes to the first: both end at 4."""
    done = schedule(lengths(3, 2, 2, 1), 2, 30)
    assert (done.seconds, done.idle, done.longest) == (4.0, 0.0, 3.0)
    done = schedule(lengths(1, 1, 4), 2, 30)
    assert (done.seconds, done.idle) == (5.0, pytest.approx(1 - 6 / 10))


def test_more_gpus_than_cells_are_idle() -> None:
    """Three cells of 2 s on 1000 GPUs: 2 s, and 6 of 2000 GPU seconds are used."""
    done = schedule(lengths(2, 2, 2), 1000, 30)
    assert (done.seconds, done.longest, done.gpus) == (2.0, 2.0, 1000)
    assert done.idle == pytest.approx(0.997)


def test_writes_are_counted() -> None:
    """100 rounds in 60 s are committed every 30 s: 2; two evaluations of 4 chunks; 3 stages of 3 more: 19 in 80 s."""
    cell = RemainingWork(60.0, 20.0, 100, 8, 3)
    assert cell.writes(30) == 2 + 8 + 9
    assert cell.writes(0) == 100 + 8 + 9
    assert RemainingWork(60.0, 20.0, 1, 8, 3).writes(30) == 1 + 8 + 9
    assert schedule([cell, cell], 2, 30).writes == pytest.approx(38 / 80)


def test_nothing_to_do_takes_no_time() -> None:
    assert schedule([], 8, 30).seconds == schedule([], 8, 30).idle == schedule([], 8, 30).writes == 0.0


def test_the_command_says_what_the_lengths_of_the_cells_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one GPU the makespan is the estimate for one slot; the database's cells were trained at 30 passes a second."""
    monkeypatch.chdir(tmp_path)
    fuzzing.results(tmp_path)
    plan = ("plan", "suite", "fuzzed.yaml", "--db", "base.db")
    code, text = fuzzing.program(*plan, "--jobs", "1", "--format", "json")
    assert code == 0
    said = json.loads(text)
    assert said["schedule"]["seconds"] == pytest.approx(said["time"]["seconds"]) and said["time"]["seconds"] > 0
    assert said["schedule"]["idle"] == pytest.approx(0.0)
    many = json.loads(fuzzing.program(*plan, "--jobs", "1000", "--format", "json")[1])["schedule"]
    assert many["seconds"] == many["longest"] < said["schedule"]["seconds"] and many["idle"] > 0.99
    assert "on 1000 workers as fast as this machine's worker: " in fuzzing.program(*plan, "--jobs", "1000")[1]
    unknown = fuzzing.program("plan", "suite", "fuzzed.yaml", "--db", "no.db", "--jobs", "2")[1]
    assert "schedule: unknown" in unknown
    assert "schedule" not in json.loads(fuzzing.program(*plan, "--format", "json")[1])
    assert duration.lengths([], duration.Speeds(), lambda cell: (0.0, [])) == []
