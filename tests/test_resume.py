"""Killed at any instant, the same work again: the same numbers, none lost, none twice.

Workers run in processes of their own and kill themselves with SIGKILL at every point of the commit algorithm: before
and after each checkpoint file and each transaction.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from crew import diverging, fork_server, recovering

from fatbench.runner import attacking
from fatbench.runner.jobs import Event, Job, Machine, Recovery
from fatbench.runner.stage import spec_of
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store.stages import LeaseLost, Store
from fatbench.suite import cells, files
from fatbench.suite.cells import Evaluation

SUITE = """
name: crash
title: Three rounds of two clients on a few digits
seeds: [3]
base:
  data: digits
  monitor: &pgd2 {name: pgd, eps: 8/255, step: 4/255, steps: 2}
  train: 80
  test: 40
  validation: 16
  client_holdout: 0.1
  partition: {name: shah, clients: 2, skew: 2}
  model: {name: nin, width: 4, init: he}
  algorithm:
    name: scaffold
    rounds: 3
    local: {epochs: 1, batch: 16, lr: 0.05, momentum: 0.9, objective: {name: at, attack: *pgd2}}
    aggregator: {name: sfat, alpha: 1/6, top: 1}
evaluate:
  n: 40
  batch: 15
  checkpoints: [last, best-val, best-test]
  attacks: {natural: natural, pgd2: *pgd2}
presets: {paper: {}}
"""


@pytest.fixture
def job(tmp_path) -> Job:
    file = tmp_path / "crash.yaml"
    file.write_text(SUITE)
    return jobs_of(files.load(str(file)).plan())[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """The cell worked on to its end by nobody disturbed, in a folder that is only read."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "crash.yaml").write_text(SUITE)
    place = machine(folder)
    with Store.open(place.db, create=True) as store:
        assert work(jobs_of(files.load(str(folder / "crash.yaml")).plan())[0], place, store) == "done"
    return place


@pytest.fixture
def done(whole: Machine, tmp_path: Path) -> Machine:
    """A copy of it."""
    shutil.copytree(Path(whole.db).parent, tmp_path, dirs_exist_ok=True)
    return machine(tmp_path)


def machine(folder: Path, every: float = 0.0) -> Machine:
    how = Recovery(checkpoint_seconds=every)
    return Machine(str(folder / "r.db"), str(folder / "files"), str(folder / "data"), recovery=how)


def child(job: Job, machine: Machine, crash: tuple[str, str, int] | None) -> None:
    """Work in this process; with `crash` = (function, before|after, k) die there the k-th time it is called."""
    from fatbench.runner import checkpoints

    calls = 0

    def deadly(holder, name: str, when: str, k: int) -> None:
        real = getattr(holder, name)

        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if when == "before" and calls == k:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if when == "after" and calls == k:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(holder, name, wrapped)

    if crash:
        function, when, k = crash
        holder = Store if function in ("commit", "finish", "claim") else checkpoints
        deadly(holder, function, when, k)
    with Store.open(machine.db, create=True) as store:
        os._exit(0 if work(job, machine, store) == "done" else 3)


@pytest.fixture(scope="module")
def spawn():
    context = fork_server()

    def run(job: Job, machine: Machine, crash: tuple[str, str, int] | None = None) -> int:
        process = context.Process(target=child, args=(job, machine, crash))
        process.start()
        process.join(600)
        assert process.exitcode is not None
        return process.exitcode

    return run


def numbers(machine: Machine) -> list[tuple]:
    """Every number but the wall times, sorted; floats exactly."""
    with Store.open(machine.db) as store:
        rows = store.measurements()
    keys = ("cell", "stage", "round", "client", "metric", "value", "n")
    return sorted(tuple(row[key] for key in keys) for row in rows if row["metric"] != "seconds")


def outcomes(machine: Machine, job: Job) -> list:
    with Store.open(machine.db) as store:
        return [store.outcomes(job.cell, stage) for _, stage in sorted(store.stages([job.cell]))]


FGSM = Evaluation("fgsm", {"name": "fgsm", "eps": "8/255"}, 40, 15)
# (function, before or after it, which call): each kind of point once, in training and in evaluation; two deaths a cell
CRASHES = [
    (("claim", "after", 1), ("commit", "after", 4)),
    (("save_model", "after", 1), ("finish", "before", 2)),
    (("save_state", "before", 2), ("finish", "after", 1)),
    (("save_state", "after", 1), ("finish", "before", 1)),
    (("commit", "before", 1), ("commit", "after", 2)),
]


@pytest.mark.promise("Numbers", "A run killed at any point of a commit resumes to the same numbers")
def test_killed_anywhere_the_same_numbers_come_out(job, tmp_path, spawn, whole):
    expected = numbers(whole)
    models = {file.name for file in Path(whole.files, job.cell).glob("*.safetensors*")}
    assert len(expected) > 60
    for number, crash in enumerate(CRASHES):
        place = machine(tmp_path / f"crash{number}")
        for death in crash:
            assert spawn(job, place, death) == -signal.SIGKILL, f"{death} was never reached"
        assert spawn(job, place) == 0
        assert numbers(place) == expected, crash
        assert outcomes(place, job) == outcomes(whole, job), crash
        assert {file.name for file in Path(place.files, job.cell).glob("*.safetensors*")} == models, crash
        with Store.open(place.db) as store:
            assert {row.status for row in store.stages([job.cell]).values()} == {"done"}


def test_many_kills_in_a_row_and_rare_checkpoints(job, tmp_path, spawn, whole):
    """Checkpoints every 1,000 s: nothing is committed before the last round, and nothing is lost for it."""
    rare = machine(tmp_path / "rare", every=1000.0)
    for crash in (("finish", "before", 1), ("finish", "before", 1), ("commit", "before", 2)):
        assert spawn(job, rare, crash) == -signal.SIGKILL
    assert spawn(job, rare) == 0
    assert numbers(rare) == numbers(whole)


def test_stopping_after_a_round_and_going_on(job, tmp_path, whole):
    stopped = machine(tmp_path / "stopped", every=1000.0)
    with Store.open(stopped.db, create=True) as store:
        results = []
        for _ in range(20):
            results.append(work(job, stopped, store, stop=lambda: True))
            if results[-1] == "done":
                break
        assert results.count("interrupted") == len(results) - 1 >= 4
    assert numbers(stopped) == numbers(whole)


def test_what_the_database_names_is_on_disk_at_every_instant(job, tmp_path, monkeypatch):
    """Looked at around each transaction of training: a file is there before it counts, and as long as it does.

    A process killed in between would only train again, so the numbers of the tests above do not show it.
    """
    from fatbench.runner import checkpoints

    place, seen = machine(tmp_path), []

    def look(store):
        row = store.stages([job.cell])[job.cell, "train"]
        digests = row.record.get("sha256", {})
        for name, digest in digests.items():
            checkpoints.check(tmp_path / "files" / job.cell / name, digest)
        assert row.checkpoint is None or row.checkpoint in digests
        seen.append((row.round, len(digests) > 0))

    def looking(real):
        def wrapped(self, *arguments, **named):
            look(self)
            real(self, *arguments, **named)
            look(self)

        return wrapped

    for name in ("commit", "finish"):
        monkeypatch.setattr(Store, name, looking(getattr(Store, name)))
    with Store.open(place.db, create=True) as store:
        assert work(job, place, store) == "done"
        look(store)
    assert seen[:6] == [(0, False), (1, True), (1, True), (2, True), (2, True), (3, True)]


def test_a_run_that_has_lost_its_stage_writes_no_file(job, tmp_path, monkeypatch):
    """The lease is renewed before a checkpoint is written: whoever took the stage over has files there."""
    place = machine(tmp_path)

    def stolen(self, run):
        raise LeaseLost("another process has it")

    monkeypatch.setattr(Store, "heartbeat", stolen)
    with Store.open(place.db, create=True) as store:
        assert work(job, place, store) != "done"
    assert list((tmp_path / "files").rglob("*.safetensors")) == []


def test_done_work_is_not_done_again(job, tmp_path, done, whole):
    events: list[Event] = []
    with Store.open(done.db) as store:
        assert work(job, done, store, events.append) == "done"
    assert events == [] and numbers(done) == numbers(whole)
    from fatbench.runner.checkpoints import load_model

    header = load_model(tmp_path / "files" / job.cell / "model-000003.safetensors", "cpu")[2]
    # enough to attack it outside any suite, and no setting that a later version may add: the file stays the same
    assert {**header, "spec": ""} == {"cell": job.cell, "round": "3", "classes": "10", "spec": ""}
    assert cells.digest(json.loads(header["spec"]))[:12] == job.cell
    assert spec_of(header) == job.spec


def test_an_attack_added_later_does_not_train_again(job, done):
    with Store.open(done.db) as store:
        events = []
        assert work(replace(job, evaluations=[*job.evaluations, FGSM]), done, store, events.append) == "done"
        assert {event.stage.split("-")[0] for event in events} == {"fgsm"}
        assert any(row["metric"] == "fgsm" for row in store.measurements([job.cell]))


def test_an_attack_in_other_hands_or_failed_leaves_the_others_to_run(job, tmp_path):
    """Another process has one; it fails there, and is tried again only when somebody asks for it."""
    place, events = machine(tmp_path), []
    with Store.open(place.db, create=True) as store:
        assert work(replace(job, evaluations=[]), place, store, events.append) == "done"
        assert [(event.kind, event.round, event.total) for event in events] == [
            ("start", 0, 3), *(("progress", round, 3) for round in (1, 2, 3)), ("done", 3, 3)
        ]  # fmt: skip
        numbers = {(row["metric"], row["round"]): row["value"] for row in store.measurements() if row["client"] < 0}
        for event in events[1:4]:
            assert event.images == numbers["forward", event.round] + numbers["backward", event.round]
            assert event.loss == numbers["train_loss", event.round]
        theirs = job.evaluations[0].stage(3)
        run = store.claim(job.cell, theirs, suite="crash", total=0, provenance={"host": "elsewhere", "pid": 1})
        assert run is not None and work(job, place, store) == "elsewhere"
        others = {stage: row.status for (_, stage), row in store.stages([job.cell]).items() if stage != theirs}
        assert set(others.values()) == {"done"} and len(others) == len(job.evaluations)
        store.fail(run, "no")
        assert work(job, place, store) == "failed"
        assert work(job, recovering(place, retry_failed=True), store) == "done"


def test_models_that_are_gone_are_trained_again_for_an_attack_added_later(job, done, whole):
    """A log is written of it although another library has configured logging: unless told not to, `dictConfig`
    disables every logger that it does not name.
    """
    import logging.config

    for file in Path(done.files, job.cell).glob("model-*"):
        file.unlink()
    Path(done.files, job.cell, "log.txt").unlink()
    logging.config.dictConfig({"version": 1})
    with Store.open(done.db) as store:
        assert work(replace(job, evaluations=[FGSM]), done, store) == "done"
    assert [row for row in numbers(done) if not row[1].startswith("fgsm")] == numbers(whole)
    assert "no such checkpoint: training begins again" in Path(done.files, job.cell, "log.txt").read_text()


def test_a_training_that_diverges_is_a_row_with_its_reason(job, tmp_path):
    wild = diverging(job)
    place = machine(tmp_path)
    with Store.open(place.db, create=True) as store:
        assert work(wild, place, store) == "failed"
        row = store.stages(["wild"])["wild", "train"]
        assert row.status == "failed"
        assert "Diverged" in row.error and "training loss of client" in row.error
        assert work(wild, place, store) == "failed"  # not tried again without being asked
        assert work(job, place, store) == "done"  # what failed leaves this process as it was


def test_gradients_are_looked_at_on_a_few_images(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of every image costs twice its accuracy: of 10,000 at 224x224 more than a quarter of an hour."""
    monkeypatch.setattr(attacking, "GRADIENT_IMAGES", 7)
    with Store.open(machine(tmp_path).db, create=True) as store:
        assert work(job, machine(tmp_path), store) == "done"
        found = {row["metric"]: row["n"] for row in store.measurements() if row["stage"].startswith("natural")}
    assert (found["natural"], found["chance"], found["zero_gradients"]) == (40, 40, 7)
