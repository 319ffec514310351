"""What is shown while cells run: slots that say what they do, lines with the time, runs elsewhere looked at."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from small import small

from fatbench import settings
from fatbench.cli import watch as watching
from fatbench.cli.watch import Watch
from fatbench.runner.jobs import Event, Summary
from fatbench.runner.start import jobs_of
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.suite.cells import Plan


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(tmp_path)
    methods = "{FAT: {}, SFAT: {algorithm: {aggregator: {name: sfat, alpha: 1/6, top: 1}}}}"
    partition, axes = "{name: shah, clients: 5, skew: 2}", f"{{split: {{Non-IID: {{}}}}, method: {methods}}}"
    Path("two.yaml").write_text(small(name="two", seeds="[6]", rounds=10, partition=partition, axes=axes, train=""))
    return files.load("two.yaml").plan()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time that has passed, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, 1000.0 + seconds)


def shown(watch: Watch, width: int = 80) -> list[str]:
    """The live table as lines of a terminal."""
    watch.console = console = Console(file=io.StringIO(), width=width)
    console.print(watch.render())
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return [re.sub(r" {2,}", "  ", line).strip() for line in lines]


def test_a_slot_says_what_it_runs(plan: Plan, clock: Callable[[float], None]) -> None:
    """Before the first word of a worker all start; then labels, rounds, pace and time left, on 80 letters."""
    a, b = jobs_of(plan)
    watch = Watch("suite two")
    watch.begin([a, b], {a.cell: "todo", b.cell: "todo"}, ["cpu", "cpu"])
    assert shown(watch)[1:] == ["starting", "starting"]
    watch.see(0, Event(a.cell, "slot", "given"))
    clock(7)
    assert shown(watch)[1] == "FAT, seed 6  starting  7 s"  # Non-IID is what all of them are
    assert shown(watch)[2] == "idle"  # the other slot has nothing to do, and says so only now
    watch.see(0, Event(a.cell, "train", "start", 2, 10))  # it goes on from round 2
    clock(17)
    watch.see(0, Event(a.cell, "train", "progress", 4, 10, 100.0, loss=1.2345, accuracy=0.312))
    clock(27)  # 20 s since the training began: 2 rounds, 10 s each; 6 are left
    assert shown(watch)[1] == "FAT, seed 6  round 4/10  10 s/round  1 min 0 s left"
    assert shown(watch, 120)[1].endswith("1 min 0 s left  loss 1.234, accuracy 31.2 %")
    watch.see(0, Event(a.cell, "train", "done", 10, 10))
    watch.see(0, Event(a.cell, "natural-1ecdbe1a@10", "start", 0, 1000))
    clock(28)
    watch.see(0, Event(a.cell, "natural-1ecdbe1a@10", "progress", 580, 1000))
    assert "580 images/s" in shown(watch)[1]
    head = shown(watch)[0]
    watch.see(0, Event(a.cell, "natural-1ecdbe1a@10", "progress", 600, 1000, 9e6))  # passes at most, no speed
    assert shown(watch)[0] == head
    clock(27)
    watch.see(0, Event(a.cell, "autoattack-1ecdbe1a@10", "start", 0, 100))
    assert "autoattack 0/100" in shown(watch)[1] and "1ecdbe1a" not in shown(watch)[1]
    watch.see(0, Event(a.cell, "autoattack-1ecdbe1a@10", "progress", 0, 100, message="FAB-T on 31 of 100"))
    assert "autoattack FAB-T on 31 of 100" in shown(watch)[1]
    watch.see(0, Event(a.cell, "cell", "done"))
    assert shown(watch)[1] == "idle" and "1/2 cells" in shown(watch)[0]


@pytest.mark.parametrize("lines", ["none", "cell", "event"])
def test_a_plain_line_has_the_time(lines: str, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """One a cell; with --verbose one an event; with --quiet what fails, and nothing where all is done."""
    a, b = jobs_of(plan)
    watch = Watch("suite two", lines)
    watch.begin([a, b], {a.cell: "todo", b.cell: "todo"}, ["cpu"])
    watch.note("runs the plug-in mine.py")
    watch.see(0, Event(a.cell, "slot", "given"))
    watch.see(0, Event(a.cell, "train", "progress", 1, 10, loss=0.5, accuracy=0.25))
    watch.see(0, Event(a.cell, "cell", "done"))
    watch.see(0, Event(b.cell, "moved@4", "waiting", message="for the model of FAT"))
    watch.see(0, Event(b.cell, "cell", "elsewhere"))
    watch.summary(Summary(2, [], [], [], {}))
    written = capsys.readouterr().err.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in written)
    of_cells = [
        "suite two: 2 cells, 0 done, 2 to go",
        "runs the plug-in mine.py",
        f"{a.cell} done: Non-IID, FAT, seed 6",
        f"{b.cell} moved@4 waiting: for the model of FAT",
        f"{b.cell} is being run by another process",
        "suite two: 2 of 2 cells done in 0 s",
    ]
    of_events = [f"{a.cell} starts: Non-IID, FAT, seed 6", f"{a.cell} train 1/10 loss 0.5, accuracy 25.0 %"]
    expected = {"none": [], "cell": of_cells, "event": [*of_cells[:2], *of_events, *of_cells[2:]]}
    assert [line[9:] for line in written] == expected[lines]


@pytest.mark.parametrize("lines", ["none", "cell"])
def test_what_fails_is_always_said(lines: str, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = jobs_of(plan)
    watch = Watch("suite two", lines)
    watch.begin([a, b], {a.cell: "todo", b.cell: "todo"}, ["cpu"])
    watch.see(0, Event(a.cell, "train", "failed", 1, 10, message="no memory"))
    watch.see(0, Event(a.cell, "cell", "failed"))
    watch.summary(Summary(2, [a.cell], [], [], {}))
    written = capsys.readouterr().err
    assert f"{a.cell} train failed: no memory\n" in written and "1 of 2 cells done, 1 failed" in written


def test_the_time_left_is_told_once_a_cell_is_done(plan: Plan, clock: Callable[[float], None]) -> None:
    """A cell's attacks may take longer than its training: two cells, the first in 40 s, so 40 s are left."""
    a, b = jobs_of(plan)
    watch = Watch("suite two")
    watch.begin([a, b], {a.cell: "todo", b.cell: "todo"}, ["cpu"])
    watch.see(0, Event(a.cell, "train", "start", 0, 10))
    clock(20)
    watch.see(0, Event(a.cell, "train", "progress", 9, 10, 100.0))
    assert "about" not in shown(watch, 120)[0]
    clock(40)
    watch.see(0, Event(a.cell, "cell", "done"))
    assert "about 40 s left" in shown(watch, 120)[0]


def test_looking_at_runs_elsewhere_ends_when_nothing_is_left(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another process trains between two looks: first nothing, then one cell at round 3, then all."""
    db = str(tmp_path / "a.db")
    a, b = plan.unique()
    steps = iter(range(3))

    def elsewhere(_: float) -> None:
        step = next(steps)
        with Store.open(db, create=True) as store:
            for cell in (a, b)[: 1 if step == 0 else 2]:
                store.add_cell(cell.id, cell.spec)
                for stage in ("train", cell.evaluations[0].stage(10)):
                    if step == 0 and stage != "train":
                        continue
                    run = store.claim(cell.id, stage, suite="two", total=10, provenance={})
                    run = run or store.stages([cell.id])[cell.id, stage].run
                    if step == 0:
                        store.commit(run, round=3)
                    else:
                        store.finish(run, round=10, record={"last": {"round": 10}})

    monkeypatch.setattr(time, "sleep", elsewhere)
    Store.open(db, create=True).close()
    with settings.options({"db": db}):
        watching.watch_plan("two", lambda store: plan, 5.0)
    lines = [line[9:] for line in capsys.readouterr().out.splitlines()]
    head = "suite two, preset paper: "
    assert lines == [
        f"{head}0 done, 0 failed, 0 running, 2 todo",
        f"{head}0 done, 0 failed, 1 running, 1 todo",
        f"{head}2 done, 0 failed, 0 running, 0 todo",
    ]


def test_one_error_of_two_cells_is_said_once(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (job.cell for job in jobs_of(plan))
    watch = Watch("suite two")
    watch.begin(jobs_of(plan), {a: "todo", b: "todo"}, ["cpu"])
    for cell in (a, b):
        watch.see(0, Event(cell, "train", "failed", message="ValueError: no"))
        watch.see(0, Event(cell, "cell", "failed"))
    watch.summary(Summary(2, [a, b], [], [], {}))
    lines = [line[9:] for line in capsys.readouterr().err.splitlines()]
    assert lines[1:3] == [f"{a} train failed: ValueError: no", f"{b} train failed: as above"]
    assert lines[4:] == [
        f"  failed: {a}, {b}: ValueError: no (fatbench show {a} --log)",
        "  run them again with --rerun failed",
    ]
