"""Which attacks are run on which models, and what is stored of each image; stand-ins are the networks and attacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crew import recovering
from torch import Tensor

from fatbench.engine.accuracy import unpacked
from fatbench.engine.outcomes import Seen
from fatbench.engine.rounds import Number
from fatbench.errors import MachineError, Unavailable
from fatbench.runner import attacking, checkpoints
from fatbench.runner.attacking import _attack, _Loaded, _Stage, attack_models
from fatbench.runner.heartbeat import Heartbeat
from fatbench.runner.jobs import Event, Job, Machine, Turn
from fatbench.runner.stage import claim
from fatbench.runner.transfer import ModelPair, TrainedModel
from fatbench.store.leases import LEASE
from fatbench.store.stages import Store
from fatbench.suite.cells import Evaluation, TransferOrigin

NATURAL = Evaluation("natural", {"name": "natural"}, 10, 20)
FGSM = Evaluation("fgsm", {"name": "fgsm", "eps": "8/255"}, 10, 4)
ORIGIN = TransferOrigin("Other", "fedcba987654")
MOVED = replace(FGSM, label="moved", origin=ORIGIN)
SPEC = {"seed": 7, "data": {"name": "digits"}, "model": {"name": "nin"}}
JOB = Job("0123456789ab", SPEC, [NATURAL, FGSM], ["last", "best-test"], "crash", "paper")
FILES = {f"{what}-00000{n}.safetensors": f"{what[0]}{n}" for what in ("model", "clients") for n in (2, 3)}
RECORD = {"last": {"round": 3}, "best-test": {"round": 2, "value": 0.5}, "sha256": FILES}
REQUESTED = {"requested": {"n": FGSM.n, "batch": FGSM.batch}}  # in the record of each stage of an attack


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(db=str(tmp_path / "r.db"), files=str(tmp_path / "files"), data=str(tmp_path))


@pytest.fixture
def store(machine: Machine) -> Iterator[Store]:
    with Store.open(machine.db, create=True) as opened:
        train(opened, JOB.cell, RECORD)
        yield opened


def train(store: Store, cell: str, record: dict[str, Any]) -> None:
    store.add_cell(cell, {"seed": 7})
    run = store.claim(cell, "train", suite="crash", total=3, provenance={}, fresh=True)
    store.finish(run, round=3, record=record)


def turn(store: Store, machine: Machine, notify: Any = lambda event: None, stop: Any = lambda: False) -> Turn:
    return Turn(JOB, store, Path(machine.files) / JOB.cell, notify, stop, Heartbeat())


# --- which --------------------------------------------------------------------------------------------------------


class Attacks:
    """In place of `_attack`: notes what it is asked for, and ends as it is told, of each label."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.asked, self.loaded, self.machines = list[_Stage](), list[_Loaded](), list[Machine]()
        self.ends: dict[str, Any] = {}
        patch.setattr(attacking, "_attack", self)

    def __call__(self, stage: _Stage, turn: Turn, loaded: _Loaded, run: int, machine: Machine) -> str:
        self.asked.append(stage)
        self.loaded.append(loaded)
        self.machines.append(machine)
        end = self.ends.get(stage.evaluation.label, "done")
        if isinstance(end, Exception):
            raise end
        if end == "done":
            origin = {"origin": stage.source.digest} if stage.evaluation.origin else {}
            turn.store.finish(run, record={"model": stage.digest, **origin})
        elif end == "interrupted":
            turn.store.release(run)
        return end

    def said(self) -> list[tuple[str, int]]:
        """(label, round) of what was asked for since the last look."""
        found = [(stage.evaluation.label, stage.round) for stage in self.asked]
        self.asked.clear()
        return found


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> Attacks:
    return Attacks(monkeypatch)


EVERY = [("natural", 3), ("fgsm", 3), ("natural", 2), ("fgsm", 2)]


def test_every_attack_on_every_model_once(attacks, machine, store) -> None:
    ready: Any = object()
    assert attack_models(turn(store, machine), replace(machine, microbatch=5), False, ready) == "done"
    assert attacks.asked == [
        _Stage(
            round, one, one.stage(round), f"m{round}",
            TrainedModel(JOB.cell, round, f"clients-00000{round}.safetensors", f"c{round}"), RECORD,
        )
        for round in (3, 2) for one in (NATURAL, FGSM)
    ]  # fmt: skip
    assert {(id(loaded), loaded.microbatch) for loaded in attacks.loaded} == {(id(attacks.loaded[0]), 5)}
    assert attacks.loaded[0].ready is ready and all(one == replace(machine, microbatch=5) for one in attacks.machines)
    assert attacks.said() == EVERY
    asked = [row for row in store.stages().values() if row.stage != "train"]
    assert {(row.settings["name"], row.total) for row in asked if row.settings} == {("natural", 0), ("fgsm", 0)}
    for precision in ("fp32", "bf16"):  # what is done in another precision is not repeated
        assert attack_models(turn(store, machine), replace(machine, precision=precision), False) == "done"
        assert attacks.said() == []
    train(store, JOB.cell, {**RECORD, "sha256": {**FILES, "model-000002.safetensors": "new"}})
    assert attack_models(turn(store, machine), replace(machine, precision="bf16"), False) == "done"
    assert attacks.said() == EVERY[2:]
    emptied, ours = FGSM.stage(2), FGSM.stage(2, "bf16")
    rows = {stage: (row.status, row.record, row.settings) for (_, stage), row in store.stages().items()}
    settings = rows[FGSM.stage(3)][2]
    assert settings and rows[emptied] == ("interrupted", {}, settings)
    assert rows[ours] == ("done", {"model": "new"}, settings)
    # of imported results no model was here: whatever they say of it, they stay
    train(store, JOB.cell, {"last": {"round": 3}})
    assert attack_models(turn(store, machine), machine, False) == "done"
    assert attacks.said() == []


def test_what_an_attack_s_plug_in_does_to_torch_the_others_do_not_meet(
    attacks, machine, store, monkeypatch, tmp_path
) -> None:
    """Those that use a file that training does not are last."""
    training, other = tmp_path / "a.py", tmp_path / "b.py"
    for file in (training, other):
        file.write_text("")

    def files(spec: Any, asked: Any = ()) -> set[Path]:
        assert spec == JOB.spec
        of_one = [one.label for one in asked] == ["natural"]
        return {training, other} if of_one else {training}

    monkeypatch.setattr(attacking.plugins, "files", files)
    assert attack_models(turn(store, machine), machine, False) == "done"
    assert attacks.said() == [("fgsm", 3), ("fgsm", 2), ("natural", 3), ("natural", 2)]


def test_one_that_fails_or_is_elsewhere_leaves_the_others_to_run(attacks, machine, store) -> None:
    """The worst counts; what is stopped or has no disk ends the turn."""
    theirs = store.claim(JOB.cell, NATURAL.stage(3), suite="crash", total=0, provenance={"host": "elsewhere", "pid": 1})
    assert attack_models(turn(store, machine), machine, False) == "elsewhere"
    assert attacks.said() == EVERY[1:]
    store.fail(theirs, "no")
    assert attack_models(turn(store, machine), machine, False) == "failed" and attacks.said() == []
    events = list[Event]()
    again = recovering(machine, retry_failed=True)
    attacks.ends["natural"] = ZeroDivisionError("by 0")
    assert attack_models(turn(store, machine, events.append), again, False) == "failed"
    assert events == [Event(JOB.cell, NATURAL.stage(3), "failed", message="ZeroDivisionError: by 0")]
    assert attacks.said() == EVERY[:1]
    attacks.ends["natural"] = "interrupted"
    train(store, JOB.cell, {**RECORD, "sha256": {**FILES, "model-000003.safetensors": "new"}})
    assert attack_models(turn(store, machine), again, False) == "interrupted"
    assert attacks.said() == EVERY[:1]
    attacks.ends["natural"] = Unavailable("no disk")
    assert attack_models(turn(store, machine), again, False) == "blocked"
    assert attacks.said() == EVERY[:1]


def test_an_attack_with_another_cell_s_model_waits_for_it(attacks, machine, store) -> None:
    """And is done again, if a person asks for it, when that is another; what fails is said before what waits."""
    events = list[Event]()
    at = replace(turn(store, machine, events.append), job=replace(JOB, evaluations=[MOVED, NATURAL]))
    assert attack_models(at, machine, False) == "waiting"
    said = "for the model of fedcba987654 (Other), which is not trained yet"
    assert events == [Event(JOB.cell, "transfer", "waiting", message=said)]
    assert attacks.said() == [("natural", 3), ("natural", 2)]
    for digest in ("theirs", "another"):
        train(store, ORIGIN.cell, {"last": {"round": 1}, "sha256": {"model-000001.safetensors": digest}})
        if digest == "another":
            assert attack_models(at, machine, False) == "done" and attacks.said() == []  # kept
        assert attack_models(at, recovering(machine, rerun_changed=True), False) == "done"
        there = TrainedModel(ORIGIN.cell, 1, "model-000001.safetensors", digest)
        assert {stage.source for stage in attacks.asked} == {there}
        assert attacks.said() == [("moved", 3), ("moved", 2)]
    assert attack_models(at, machine, False) == "done" and attacks.said() == []
    store.reopen(ORIGIN.cell, "train")
    store.reopen(JOB.cell, NATURAL.stage(3))
    attacks.ends["natural"] = ZeroDivisionError("by 0")
    events.clear()
    assert attack_models(at, machine, False) == "failed"
    assert [event.kind for event in events] == ["failed"]


def test_an_attack_out_of_memory_is_tried_again_while_its_lease_is_renewed(machine, store, monkeypatch) -> None:
    """20 images at once, then 5; its run says so."""
    did = list[Any]()
    at = replace(turn(store, machine), job=replace(JOB, evaluations=[NATURAL], checkpoints=["last"]))

    @contextmanager
    def renewing(db: str, run: int, heartbeat: Heartbeat, lease: float) -> Iterator[None]:
        did.append((db, run, heartbeat, lease))
        yield
        did.append("ended")

    def attack(stage: _Stage, there: Turn, loaded: _Loaded, run: int, how: Machine) -> str:
        did.append((run, there, how))
        if how.microbatch is None:
            raise MemoryError("no more")
        return "done"

    monkeypatch.setattr("fatbench.runner.stage.renewing", renewing)
    monkeypatch.setattr(attacking, "_attack", attack)
    assert attack_models(at, machine, False) == "done"
    (row,) = [run for run in store.runs() if run["stage"] != "train"]
    run, smaller = row["id"], replace(machine, microbatch=5)
    assert did == [(machine.db, run, at.heartbeat, LEASE), (run, at, machine), (run, at, smaller), "ended"]
    assert (row["microbatch"], row["out_of_memory"]) == (5, "no more")


# --- what they share ----------------------------------------------------------------------------------------------


def test_a_cell_is_made_ready_once_and_its_network_takes_what_fits(machine, store, monkeypatch) -> None:
    asked, bound, ready = list[Any](), list[Any](), SimpleNamespace(problem=SimpleNamespace(model="network"))
    monkeypatch.setattr(attacking, "ready_for", lambda *given: asked.append(given) or ({}, ready))
    monkeypatch.setattr("fatbench.engine.microbatch.bound", lambda *given: bound.append(given))
    at, loaded, smaller = turn(store, machine), _Loaded(), replace(machine, microbatch=3)
    assert loaded.setup(at, replace(machine, microbatch=9)) is ready and bound == []
    assert asked == [(at, replace(machine, microbatch=9), None)] and loaded.microbatch == 9
    for place in (smaller, smaller, machine):
        assert loaded.setup(at, place) is ready and loaded.microbatch == 3
    assert bound == [("network", 3)] and len(asked) == 1


def test_models_are_read_once_for_all_attacks_of_a_round(machine, monkeypatch, tmp_path) -> None:
    """Of the cell itself and of the one that an attack is computed on; a damaged file is not taken."""
    own, read, folder = {1: {"b": torch.ones(1)}, 0: {"b": torch.zeros(1)}}, list[Any](), tmp_path / JOB.cell
    files = {round: folder / checkpoints.model_file(round) for round in (2, 3)}
    digests = {
        round: checkpoints.save_model(file, {"w": torch.full((1,), round)}, own, cell=JOB.cell, round=str(round))
        for round, file in files.items()
    }
    real = checkpoints.load_model

    def load(file: Path, *given: Any) -> Any:
        read.append((file, *given))
        return real(file, *given)

    def origins(*given: Any) -> Any:
        read.append(given)
        return "problem", {-1: {"w": "theirs"}}

    monkeypatch.setattr(checkpoints, "load_model", load)
    monkeypatch.setattr(attacking.transfer, "read_origins", origins)
    ready: Any = SimpleNamespace(problem=None)
    loaded = _Loaded(ready)
    first, second = (TrainedModel(ORIGIN.cell, 1, "m", digest) for digest in ("x", "y"))

    def pairs(round: int, one: Evaluation, there: TrainedModel = first) -> list[ModelPair]:
        stage = _Stage(round, one, "s", digests[round], there, RECORD)
        return loaded.pairs(stage, files[round], digests[round], machine)

    found = pairs(3, NATURAL)
    assert [(pair.client, pair.judged["w"].item(), pair.judged["b"].item(), pair.origin) for pair in found] == [
        (0, 3, 0, None), (1, 3, 1, None)
    ]  # fmt: skip
    moved = pairs(3, MOVED)
    assert [(pair.client, pair.origin) for pair in moved] == [(k, ("problem", {"w": "theirs"})) for k in (0, 1)]
    assert pairs(3, MOVED) == moved and len(read) == 2
    assert pairs(2, MOVED, second)[0].judged["w"].item() == 2
    assert read == [
        (files[3], "cpu", digests[3], JOB.cell, 3), (ORIGIN, first, ready, machine),
        (files[2], "cpu", digests[2], JOB.cell, 2), (ORIGIN, second, ready, machine),
    ]  # fmt: skip
    digests[3] = "0" * 64
    with pytest.raises(checkpoints.DamagedCheckpoint):
        pairs(3, NATURAL)


# --- image by image -----------------------------------------------------------------------------------------------

LABELS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2])  # of the first ten most are 0
RIGHT = {"first": "1100110110", "second": "0001000001"}
M = {name: {"name": name} for name in RIGHT}


def ready_of(malicious: Any = None) -> Any:
    shards = [torch.tensor([0, 1, 2]), torch.tensor([3])]
    problem = SimpleNamespace(labels=torch.tensor([0, 0, 1, 2]), shards=shards, malicious=malicious)
    images = torch.arange(12)[:, None, None, None].to(torch.uint8)
    return SimpleNamespace(test=(images, LABELS), problem=problem, classes=3, data={"data": {"name": "x"}}, doubts={})


class Judged:
    """In place of `accuracy.attack_in_chunks` and `zero_gradients`: right is what RIGHT says of a model."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.asked, self.looked, self.now, self.seen = list[Any](), list[Any](), 50.0, Seen()
        self.answered, self.others = list[tuple[str | None, str]](), 0
        patch.setattr("fatbench.engine.plausible.doubts", lambda *given: [])
        patch.setattr("fatbench.engine.accuracy.attack_in_chunks", self)
        patch.setattr("fatbench.engine.accuracy.zero_gradients", self.dead)
        patch.setattr("fatbench.engine.plausible.not_followed", self.astray)
        patch.setattr("fatbench.engine.plausible.changed_answers", self.changed)
        patch.setattr(attacking, "time", SimpleNamespace(perf_counter=lambda: self.now))
        patch.setattr(attacking, "GRADIENT_IMAGES", 6)

    def __call__(self, problem, model, images, labels, attack, key, *, batch, start, origin) -> Iterator[Any]:
        assert images.flatten().tolist() == list(range(10)) and labels.equal(LABELS[:10]) and callable(attack)
        self.asked.append((problem, model, key, batch, start, origin))
        for first in range(start, 10, batch):
            self.now += 2
            part = RIGHT[model["name"]][first : first + batch]
            yield first, torch.tensor([bit == "1" for bit in part]), None, self.seen

    def dead(self, problem: Any, model: Any, images: Tensor, labels: Tensor) -> float:
        self.looked.append((problem, model, images.flatten().tolist(), labels.tolist()))
        return {"first": 0.25, "second": 0.75}[model["name"]]

    def changed(self, problem: Any, model: Any, images: Tensor, labels: Tensor, right: Tensor) -> int:
        self.answered.append((model and model["name"], "".join("01"[bit] for bit in right.int())))
        return self.others

    def astray(self, problem: Any, model: Any, images: Tensor, labels: Tensor) -> tuple[float, int]:
        assert images.flatten().tolist() == list(range(10)) and labels.equal(LABELS[:10])
        return {"first": (0.25, 8), "second": (0.5, 4)}[model["name"]]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Judged:
    return Judged(monkeypatch)


def begun(
    store: Store, machine: Machine, one: Evaluation, digest: str | None = "m3", record: Any = RECORD
) -> tuple[_Stage, int]:
    run = claim(turn(store, machine), one.stage(3), machine, 0, one)
    return _Stage(3, one, one.stage(3), digest, TrainedModel(ORIGIN.cell, 1, "m", "theirs"), record), run


def found(store: Store, stage: str) -> dict[tuple[str, int], tuple[float, int]]:
    rows = store.measurements(stages=[stage])
    assert {row["round"] for row in rows} == {3}
    return {(row["metric"], row["client"]): (row["value"], row["n"]) for row in rows}


def bits(store: Store, stage: str) -> list[tuple[int, str]]:
    outcomes = store.outcomes(JOB.cell, stage)
    return [(start, "".join("01"[bool(bit)] for bit in unpacked(data, n))) for start, n, data in outcomes]


def test_an_attack_on_every_client_s_model_is_stopped_and_goes_on(judged, machine, store) -> None:
    """Two models of ten images, four at once; stopped after four of the second. FGSM: two passes, one to judge.

    A malicious client has no accuracy of its own images.
    """
    judged.seen = Seen(unclassed=1, distance=0.5)  # of each chunk
    events, ready = list[Event](), ready_of(SimpleNamespace(numbers=(1,)))
    loaded = _Loaded(ready, 6, 3, {0: M["first"], 1: M["second"]})
    stage, run = begun(store, machine, FGSM)
    at = turn(store, machine, events.append, lambda: events[-1].round == 14)
    assert _attack(stage, at, loaded, run, machine) == "interrupted"
    row = store.stages()[JOB.cell, stage.name]
    assert (row.status, row.round, row.total) == ("interrupted", 14, 20)
    assert row.record == {"model": "m3", "seen": asdict(Seen(4, 0, 0.5, 0.0)), **REQUESTED}
    stage, run = begun(store, machine, FGSM)
    assert _attack(stage, at, loaded, run, machine) == "done"
    key = ("evaluate", FGSM.id, 3)
    assert judged.asked == [
        (ready.problem, M["first"], (*key, 0), 4, 0, None), (ready.problem, M["second"], (*key, 1), 4, 0, None),
        (ready.problem, M["second"], (*key, 1), 4, 4, None),
    ]  # fmt: skip
    whole = "".join(RIGHT.values())
    ends = [(0, 0, 4), (0, 4, 8), (0, 8, 10), (0, 10, 14), (1, 14, 18), (1, 18, 20)]
    assert bits(store, stage.name) == [(first, whole[first:end]) for _, first, end in ends]

    def told(kind: Any, round: int, **more: Any) -> Event:
        return Event(JOB.cell, stage.name, kind, round, 20, **more)

    right = {end: whole[:end].count("1") / end for _, _, end in ends}
    progress = [told("progress", end, images=3.0 * (end - first), accuracy=right[end]) for _, first, end in ends]
    assert events == [
        told("start", 0), *progress[:4], told("interrupted", 14), told("start", 14), *progress[4:], told("done", 20)
    ]  # fmt: skip
    assert found(store, stage.name) == {
        ("fgsm", -1): (0.4, 10), ("fgsm", 0): (0.6, 10), ("fgsm", 1): (0.2, 10), ("seconds", -1): (4.0, 0),
        ("prior_accuracy", 0): (pytest.approx(2 / 3 * 2 / 4 + 1 / 3 * 2 / 3), 10),
        ("doubt_outputs_are_not_finite", -1): (6.0, 0), ("doubt_an_attack_leaves_its_radius", -1): (0.5, 0),
    }  # fmt: skip
    for run in (run for run in store.runs() if run["stage"] == stage.name):
        assert (run["data"], run["microbatch"]) == ({"name": "x"}, 6) and run["attack"].startswith("fatbench ")


def test_clean_images_say_what_is_doubtful_about_a_model(judged, machine, store, monkeypatch) -> None:
    """Gradients of the first six images; the most frequent of the first ten labels is 0, four times."""
    ready, asked = ready_of(), list[Any]()
    ready.doubts = {"c of d": 3.0}
    monkeypatch.setattr("fatbench.engine.plausible.doubts", lambda *given: asked.append(given) or ["a b"])
    at = turn(store, machine)
    at = replace(at, job=replace(JOB, spec={**JOB.spec, "evaluated": {"outputs": "logits"}}))
    stage, run = begun(store, machine, NATURAL, record={**RECORD, "uploads_refused": 2})
    assert _attack(stage, at, _Loaded(ready, None, 3, {-1: M["first"]}), run, machine) == "done"
    numbers = found(store, stage.name)
    assert {key: value for key, value in numbers.items() if key[0] != "prior_accuracy"} == {
        ("natural", -1): (0.6, 10), ("seconds", -1): (2.0, 0), ("zero_gradients", -1): (0.25, 6),
        ("directional", -1): (0.25, 8),
        ("chance", -1): (0.4, 10), ("doubt_a_b", -1): (1.0, 0), ("doubt_c_of_d", -1): (3.0, 0),
        ("doubt_uploads_refused", -1): (2.0, 0),
    }  # fmt: skip
    assert {key for key in numbers if key[0] == "prior_accuracy"} == {("prior_accuracy", 0), ("prior_accuracy", 1)}
    assert judged.looked == [(ready.problem, M["first"], list(range(6)), LABELS[:6].tolist())]
    (problem, model, images, labels, outputs) = asked[0]
    assert (problem, model, outputs) == (ready.problem, M["first"], "logits") and len(images) == len(labels) == 10
    assert judged.asked[0][2:] == (("evaluate", NATURAL.id, 3), 20, 0, None)
    assert "microbatch" not in store.runs()[-1]


def test_a_network_must_answer_as_it_did_before_and_after_an_attack(judged, machine, store) -> None:
    """The last client's model, as it is stored and as the attack left it; natural accuracy has no earlier answers."""
    loaded = _Loaded(ready_of(), None, 3, {0: M["first"], 1: M["second"]})
    at = turn(store, machine)
    at = replace(at, job=replace(JOB, evaluations=[FGSM, NATURAL]))
    for one in (NATURAL, FGSM):
        stage, run = begun(store, machine, one)
        assert _attack(stage, at, loaded, run, machine) == "done"
        judged.others = 3
    assert judged.answered == [(None, RIGHT["second"]), ("second", RIGHT["second"]), (None, RIGHT["second"])]
    assert found(store, stage.name)["doubt_clean_images_are_answered_otherwise", -1] == (3.0, 0)
    numbers = found(store, NATURAL.stage(3))
    assert ("doubt_clean_images_are_answered_otherwise", -1) not in numbers


def test_gradients_of_a_thousand_images_are_looked_at(monkeypatch) -> None:
    looked = list[int]()
    monkeypatch.setattr("fatbench.engine.accuracy.zero_gradients", lambda *given: looked.append(len(given[3])) or 0.0)
    monkeypatch.setattr("fatbench.engine.plausible.doubts", lambda *given: [])
    monkeypatch.setattr("fatbench.engine.plausible.not_followed", lambda *given: (0.0, 0))
    labels = torch.zeros(1200, dtype=torch.int64)
    problem = SimpleNamespace(labels=labels, shards=[torch.arange(3)], malicious=None)
    ready = SimpleNamespace(problem=problem, test=(labels, labels), classes=1)
    stage = _Stage(3, NATURAL, "natural", None, TrainedModel(JOB.cell, 3, "m", None), RECORD)
    right = torch.ones(1, 1200, dtype=torch.bool)
    found = attacking._side_numbers(stage, _Loaded(ready, None, 3, {-1: {}}), right, JOB)
    assert looked == [1000] and Number("zero_gradients", 0.0, 3, n=1000) in found
    assert "directional" not in {number.metric for number in found}  # no image has a gradient


def test_gradients_of_clients_models_are_a_mean_and_of_one_that_diverged_not_looked_at(judged, machine, store) -> None:
    """A model that diverged answers with the most frequent class."""
    stage, run = begun(store, machine, NATURAL)
    loaded = _Loaded(ready_of(), None, 3, {0: M["first"], 1: M["second"]})
    assert _attack(stage, turn(store, machine), loaded, run, machine) == "done"
    assert found(store, stage.name)["zero_gradients", -1] == (0.5, 6)
    assert found(store, stage.name)["directional", -1] == (0.5, 4)  # of the worst
    assert [model for _, model, *_ in judged.looked] == [*M.values()]
    judged.asked.clear(), judged.looked.clear()
    stage, run = begun(store, machine, replace(NATURAL, n=9), record={**RECORD, "diverged": 2})
    assert _attack(stage, turn(store, machine), _Loaded(ready_of(), None, 3, {-1: M["first"]}), run, machine) == "done"
    assert bits(store, stage.name) == [(0, "111100000")] and judged.asked == judged.looked == []
    numbers = found(store, stage.name)
    assert numbers["natural", -1] == (4 / 9, 9) and ("zero_gradients", -1) not in numbers
    assert numbers["doubt_diverged", -1] == (2.0, 0)


def test_an_attack_with_another_s_model_says_whose_and_nothing_beside(judged, machine, store, monkeypatch) -> None:
    """What was begun with another begins again; a chunk that was its end is no reason to stop."""
    monkeypatch.setattr(attacking.transfer, "read_origins", lambda *given: ("problem", {-1: "theirs"}))
    loaded = _Loaded(ready_of(), None, 3, {-1: M["second"]})
    stage, run = begun(store, machine, MOVED)
    store.commit(run, round=4, outcomes=(0, 4, b"\xf0"), record={"model": "m3", "origin": "older"})
    assert _attack(stage, turn(store, machine, stop=lambda: False), loaded, run, machine) == "done"
    assert judged.asked[0][3:] == (4, 0, ("problem", "theirs"))
    row = store.stages()[JOB.cell, stage.name]
    assert row.record == {"model": "m3", "origin": "theirs", **REQUESTED} and row.round == 10
    assert found(store, stage.name) == {("moved", -1): (0.2, 10), ("seconds", -1): (6.0, 0)}
    stage, run = begun(store, machine, NATURAL)
    assert _attack(stage, turn(store, machine, stop=lambda: True), loaded, run, machine) == "done"


def test_a_model_that_is_not_here_says_what_to_do(judged, machine, store) -> None:
    """Imported numbers say which model they are of: a file beside them is taken only if it is that."""
    stage, run = begun(store, machine, FGSM, None)
    file = Path(machine.files, JOB.cell, "model-000003.safetensors")
    with pytest.raises(MachineError) as error:
        _attack(stage, turn(store, machine), _Loaded(ready_of()), run, machine)
    assert str(error.value) == (
        f"the model of round 3 is not here ({file}): its results were imported, or it was removed. Copy it from where"
        f" it was trained; or, to train it here, fatbench delete {JOB.cell} and run the suite again; this deletes the"
        " imported numbers"
    )
    asked = list[Any]()
    loaded: Any = SimpleNamespace(
        setup=lambda *given: asked.append(given) or ready_of(), microbatch=None, models={-1: M["first"]},
        ready=ready_of(),
        pairs=lambda *given: asked.append(given) or [ModelPair(-1, M["first"])],
    )  # fmt: skip
    file.parent.mkdir(parents=True)
    file.touch()
    other = store.claim(JOB.cell, NATURAL.stage(2), suite="crash", total=0, provenance={})
    store.finish(other, record={"model": "of round 2"})
    at = turn(store, machine)
    assert _attack(stage, at, loaded, run, machine) == "done"
    assert store.stages()[JOB.cell, stage.name].record == REQUESTED
    assert asked == [(at, machine), (stage, file, None, machine)]
    theirs = store.claim(JOB.cell, NATURAL.stage(3), suite="crash", total=0, provenance={})
    store.finish(theirs, record={"model": "m3"})
    store.reopen(JOB.cell, stage.name)
    stage, run = begun(store, machine, FGSM, None)
    assert _attack(stage, at, loaded, run, machine) == "done"
    record = store.stages()[JOB.cell, stage.name].record
    assert asked[-1][2] == "m3" and record == {"model": "m3", **REQUESTED}


def test_numbers_of_one_client_s_model_are_its_own() -> None:
    stage = _Stage(3, FGSM, "s", None, TrainedModel("a", 1, "m", None), RECORD)
    each = torch.tensor([[True, False, True, True]])
    assert attacking._numbers(stage, [ModelPair(-1, {})], each) == [Number("fgsm", 0.75, 3, n=4)]
    assert attacking._numbers(stage, [ModelPair(0, {})], each) == [
        Number("fgsm", 0.75, 3, n=4), Number("fgsm", 0.75, 3, 4, 0)
    ]  # fmt: skip
