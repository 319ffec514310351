"""What training and attacks share: what a claim writes of its run, and how a stage ends that cannot go on."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crew import recovering

from fatbench.engine.rounds import Number
from fatbench.errors import MachineError, SpecError, Unavailable
from fatbench.runner import attacking, stage, training
from fatbench.runner.heartbeat import Heartbeat
from fatbench.runner.jobs import Event, Job, Machine, Recovery, Turn
from fatbench.store.leases import LEASE
from fatbench.store.schema import STAGES
from fatbench.store.stages import LeaseLost, Store
from fatbench.suite.cells import Evaluation, TransferOrigin
from fatbench.version import __version__

NATURAL = Evaluation("natural", {"name": "natural"}, 40, 15)
JOB = Job("0123456789ab", {"seed": 7}, [NATURAL], ["last"], "crash", "paper")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(db=str(tmp_path / "r.db"), files=str(tmp_path / "files"), data=str(tmp_path / "data"))


@pytest.fixture
def store(machine: Machine) -> Iterator[Store]:
    with Store.open(machine.db, create=True) as opened:
        opened.add_cell(JOB.cell, JOB.spec)
        yield opened


def turn(store: Store, notify: Callable[[Event], None] = lambda event: None) -> Turn:
    return Turn(JOB, store, Path(), notify, lambda: False, Heartbeat())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, {}),
        ({"precision": "bf16", "path": "graphs", "threads": 3}, {"precision": "bf16", "path": "graphs", "threads": 3}),
        ({"device": "cuda:0"}, {}),
        ({"device": "cuda:0", "precision": "tf32"}, {"precision": "tf32"}),
        ({"device": "cuda:0", "precision": "bf16"}, {"precision": "bf16", "not_reproducible": "bf16 on a GPU"}),
        ({"microbatch": 4, "recovery": Recovery(lease=60.0)}, {"microbatch": 4, "lease": 60.0}),
        ({"recovery": Recovery(lease=LEASE)}, {}),
    ],
)
def test_what_a_claim_says_of_its_run(how: dict, said: dict, machine, store, monkeypatch) -> None:
    """Always who, where and with what; what is as usual is left out."""
    monkeypatch.setattr(stage, "produced_by", lambda device: {"device": f"a {device}", "versions": {"torch": "1"}})
    monkeypatch.setattr(stage.source_files, "run_here", set)  # other tests of this process may have run plug-ins
    run = stage.claim(turn(store), "train", replace(machine, **how), 3)
    (row,) = store.runs()
    usual = {"precision": "fp32", "path": "loop", "threads": 1, "preset": "paper", "suite": "crash", "id": run}
    usual |= {"cpu": stage.cpu()}
    expected = {**usual, "device": f"a {how.get('device', 'cpu')}", "versions": {"torch": "1"}, **said}
    assert {name: row[name] for name in expected} == expected
    for name in ("not_reproducible", "microbatch", "lease", "plugins", "other_plugins"):
        assert (name in row) == (name in said)
    assert store.stages()[JOB.cell, "train"].total == 3


def test_a_claim_says_which_plug_ins_it_uses_and_which_ran_here_beside_them(machine, store, monkeypatch) -> None:
    def used(spec: Any, asked: Any) -> dict[str, Path]:
        assert spec == JOB.spec
        return {f"attack {one.label}": Path(f"{one.label}.py") for one in asked} or {"aggregator a": Path("a.py")}

    monkeypatch.setattr(stage.plugins, "used", used)
    monkeypatch.setattr(stage.plugins, "version", lambda file: {"plugin": str(file)})
    monkeypatch.setattr(stage.plugins, "records", lambda used: [{"plugin": name} for name in used])
    monkeypatch.setattr(stage.source_files, "run_here", lambda: {*map(Path, ("natural.py", "c.py", "a.py", "b.py"))})
    assert stage.claim(turn(store), "train", machine)
    assert stage.claim(turn(store), NATURAL.stage(3), machine, 0, NATURAL)
    assert store.stages()[JOB.cell, "train"].total == 0
    train, attack = store.runs()
    assert (train["plugins"], attack["plugins"]) == ([{"plugin": "aggregator a"}], [{"plugin": "attack natural"}])
    for row, others in ((train, ["b.py", "c.py", "natural.py"]), (attack, ["a.py", "b.py", "c.py"])):
        assert row["other_plugins"] == [{"plugin": file} for file in others]


def test_an_attack_s_settings_say_whose_model_it_is_computed_on(machine: Machine, store: Store) -> None:
    moved = replace(NATURAL, origin=TransferOrigin("client 1", client=1, clients=2))
    assert stage.claim(turn(store), moved.stage(3), machine, 0, moved) is not None
    settings = store.stages()[JOB.cell, moved.stage(3)].settings
    assert moved.origin is not None and settings is not None and settings["origin"] == moved.origin.stored_text


def test_what_a_cell_is_made_ready_with(machine, monkeypatch) -> None:
    """Settings of the machine; a network that draws dropout masks is warned of where batches are cut."""
    from fatbench.engine.setup import Runtime

    network, did, said = torch.nn.Identity(), list[Any](), list[str]()
    ready = SimpleNamespace(problem=SimpleNamespace(model=network), note="")
    bound = {"seed": 7}
    monkeypatch.setattr("fatbench.engine.setup.setup", lambda runtime, **given: did.append((runtime, given)) or ready)
    monkeypatch.setattr("fatbench.engine.microbatch.has_dropout", lambda model: model is network)
    monkeypatch.setattr(torch, "set_num_threads", did.append)
    monkeypatch.setattr(stage.calls, "bind_cell", lambda *given: did.append(given) or bound)
    monkeypatch.setattr(stage.log, "warning", said.append)
    job, data, cpu = replace(JOB, spec={"model": {"name": "mlp", "a": 1}}), Path(machine.data), torch.device("cpu")
    at = Turn(job, None, Path(), lambda event: None, lambda: False, Heartbeat())  # type: ignore[arg-type]
    assert stage.ready_for(at, machine, Path("m")) == (bound, ready) and said == []
    assert did == [1, (job.spec, data, Path("m")), (Runtime(data, cpu), bound)]
    did.clear()
    other: dict[str, Any] = {"precision": "bf16", "path": "graphs", "microbatch": 4, "strict": False, "threads": 3}
    place = replace(machine, **other)  # type: ignore[arg-type]
    assert stage.ready_for(at, place, None) == (bound, ready) and len(said) == 1
    assert did == [3, (job.spec, data, None), (Runtime(data, cpu, "bf16", "graphs", 4, False), bound)]
    before = at.heartbeat.beats
    network(torch.zeros(1))
    assert at.heartbeat.beats > before


def test_a_file_s_cell_has_no_weights_that_it_began_with(monkeypatch) -> None:
    monkeypatch.setattr(stage, "canonical", lambda spec: spec)
    said = {"seed": 1, "model": {"name": "mlp", "weights": "a.pt"}}
    assert stage.spec_of({"spec": json.dumps(said)}) == {"seed": 1, "model": {"name": "mlp"}}


def test_what_can_be_claimed(machine: Machine, store: Store) -> None:
    """What failed only on demand, what is done only afresh; an attack keeps its settings."""
    at, settings = NATURAL.stage(3), {"name": "natural", "implementation": f"fatbench {__version__}"}
    run = stage.claim(turn(store), at, machine, 0, NATURAL)
    assert run is not None and store.stages()[JOB.cell, at].settings == settings
    store.fail(run, "no")
    assert stage.claim(turn(store), at, machine, 0, NATURAL) is None
    run = stage.claim(turn(store), at, recovering(machine, retry_failed=True), 0, NATURAL)
    store.finish(run, round=5)
    assert stage.claim(turn(store), at, machine, 0, NATURAL) is None
    assert stage.claim(turn(store), at, machine, 0, NATURAL, fresh=True) is not None
    assert store.stages()[JOB.cell, at].round == 0


def test_an_emptied_attack_keeps_its_settings_and_nothing_else(machine: Machine, store: Store) -> None:
    at, settings = NATURAL.stage(3), {"name": "natural", "implementation": f"fatbench {__version__}"}
    run = stage.claim(turn(store), at, machine, 8, NATURAL)
    assert stage.claim(turn(store), at, machine, 0, NATURAL, fresh=True) is None  # this run is alive
    assert store.stages()[JOB.cell, at].run == run
    store.commit(run, round=8, outcomes=(0, 8, b"x"), record={"model": "m"})
    store.finish(run, [Number("natural", 0.5, 3, 8)])
    emptied = stage.claim(turn(store), at, machine, 0, NATURAL, fresh=True)
    store.release(emptied)
    row = store.stages()[JOB.cell, at]
    assert (row.status, row.round, row.record, row.settings) == ("interrupted", 0, {}, settings)
    assert store.outcomes(JOB.cell, at) == store.measurements() == []


def test_what_training_says_stands_at_the_numbers_of_an_attack() -> None:
    """Diverged in the last round, which this is; of an earlier round's model that is not said."""
    record = {"last": {"round": 3}, "diverged": 2, "uploads_refused": 4, "said": {"a_b": 5}}
    there: Any = None
    words = [("diverged", 2), ("uploads_refused", 4), ("a_b_in_rounds", 5)]
    for round, said in ((3, words), (2, words[1:])):
        assert list(attacking._training_doubts(attacking._Stage(round, NATURAL, "x", None, there, record))) == said
    assert (
        list(attacking._training_doubts(attacking._Stage(3, NATURAL, "x", None, there, {"last": {"round": 3}}))) == []
    )


def test_training_waits_for_the_cell_whose_weights_it_begins_with(machine, store, monkeypatch) -> None:
    heard: list[Event] = []
    monkeypatch.setattr(training.weights, "trained_by", lambda spec: "fedcba987654")
    assert training.train(turn(store, heard.append), machine) == "waiting"
    said = "for the weights of cell fedcba987654, not trained yet"
    assert heard == [Event(JOB.cell, "train", "waiting", message=said)] and store.stages() == {}


def test_the_files_of_a_record_and_what_they_say_of_themselves() -> None:
    record = {"last": {"round": 3}, "best-test": {"round": 2, "value": 0.5}, "sha256": {"round": 9}}
    assert stage.files_of(record) == [
        "clients-000002.safetensors", "clients-000003.safetensors",
        "model-000002.safetensors", "model-000003.safetensors",
    ]  # fmt: skip
    assert stage.files_of({}) == []
    spec = {"seed": 7, "validation": 0, "model": {"name": "mlp", "weights": "a.pt"}}  # no validation is the default
    header = stage.header_of(replace(JOB, spec=spec), 3, 10)
    said = json.dumps({"model": {"name": "mlp"}, "seed": 7})
    assert header == {"cell": JOB.cell, "round": "3", "spec": said, "classes": "10"}


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("error", "outcome", "status", "stored", "message"),
    [
        (Unavailable("no disk"), "blocked", "interrupted", None, "no disk"),
        (FULL, "blocked", "interrupted", None, f"the disk is full: {FULL}"),
        (OSError(errno.EDQUOT, "quota"), "blocked", "interrupted", None, "the disk is full: [Errno 122] quota"),
        (OSError(errno.EIO, "broken"), "failed", "failed", "OSError: [Errno 5] broken", "OSError: [Errno 5] broken"),
        (MachineError("no\nGPU"), "failed", "failed", "MachineError: no\nGPU", "MachineError: no"),
        (SpecError("eps: no"), "failed", "failed", "SpecError: eps: no", "SpecError: eps: no"),
        (ZeroDivisionError("0"), "failed", "failed", "ZeroDivisionError: 0", "ZeroDivisionError: 0"),
    ],
)
def test_how_a_stage_ends_that_cannot_go_on(
    error, outcome, status, stored, message, machine, store, monkeypatch
) -> None:
    """What is nobody's fault is no failure; what a person can cause has no traceback, and what is ours has one."""
    run = stage.claim(turn(store), "train", machine, 3)
    store.database.patience = 9.0
    events, freed = list[Event](), list[bool]()
    monkeypatch.setattr(stage, "free_memory", lambda: freed.append(True))
    try:
        raise error
    except Exception as raised:
        assert stage.record_failure(raised, run, turn(store, events.append), "train") == outcome
    row = store.stages()[JOB.cell, "train"]
    assert row.status == status and [attempt["status"] for attempt in store.runs()] == [status]
    assert events == [Event(JOB.cell, "train", outcome, message=message)] and freed == [True] * (outcome == "failed")
    assert (store.database.patience == 0.0) == (outcome == "blocked")  # what is not to be had is not waited for again
    if isinstance(error, (OSError, ZeroDivisionError)) and stored:
        assert row.error.startswith("Traceback") and row.error.rstrip().endswith(stored)
        assert str(stage.HERE) not in row.error
    else:
        assert row.error == stored


def test_what_ends_the_process_gives_the_stage_back(machine: Machine, store: Store) -> None:
    run = stage.claim(turn(store), "train", machine, 3)
    with pytest.raises(KeyboardInterrupt):
        stage.record_failure(KeyboardInterrupt(), run, turn(store), "train")
    assert store.stages()[JOB.cell, "train"].status == "interrupted"


def test_a_stage_that_was_taken_over_is_left_to_the_other(machine: Machine, store: Store) -> None:
    run = stage.claim(turn(store), "train", machine, 3)
    before, events = store.stages(), list[Any]()
    assert stage.record_failure(LeaseLost("it is"), run, turn(store, events.append), "train") == "elsewhere"
    assert store.stages() == before and events == []


def test_a_stage_that_cannot_even_be_given_back_is_left_to_its_lease(machine, store, monkeypatch) -> None:
    def refuse(run: int) -> None:
        raise Unavailable("nor this")

    run = stage.claim(turn(store), "train", machine, 3)
    monkeypatch.setattr(store, "release", refuse)
    assert stage.record_failure(Unavailable("no"), run, turn(store), "train") == "blocked"
    with store.database.reading() as connection:
        assert connection.execute(STAGES.select()).one().status == "running"
