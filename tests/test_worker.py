"""What a worker hands to the parts of its work, and what it makes of what they give back; stand-ins are the parts."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crew import recovering
from safetensors.torch import load_file

from fatbench.engine import graphs
from fatbench.engine.rounds import Cost, Mixing, Number, Round, State, Stats, Update
from fatbench.errors import MachineError
from fatbench.runner import checkpoints, training, worker
from fatbench.runner.heartbeat import Heartbeat
from fatbench.runner.jobs import Event, Job, Machine, Turn
from fatbench.store.rows import dumps
from fatbench.store.schema import STAGES
from fatbench.store.stages import Store
from fatbench.suite.cells import Evaluation, TransferOrigin

ALGORITHM = {"name": "fedavg", "rounds": 5, "local": {"batch": 8, "lr": 0.1, "objective": {"name": "standard"}}}
SPEC: dict[str, Any] = {"seed": 7, "model": {"name": "mlp"}, "algorithm": ALGORITHM}
AMONG = Evaluation("among", {"name": "natural"}, 10, 4, origin=TransferOrigin("client 0", client=0, clients=1))
JOB = Job("0123456789ab", SPEC, [AMONG], ["last", "best-test"], "crash", "paper")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(db=str(tmp_path / "r.db"), files=str(tmp_path / "files"), data=str(tmp_path / "data"))


@pytest.fixture
def store(machine: Machine) -> Iterator[Store]:
    with Store.open(machine.db, create=True) as opened:
        yield opened


def never() -> bool:
    return False


def of_file() -> list[logging.FileHandler]:
    return [handler for handler in worker.log.handlers if isinstance(handler, logging.FileHandler)]


# --- a turn at a cell --------------------------------------------------------------------------------------------


def test_what_is_not_trained_is_not_attacked(machine, store, monkeypatch) -> None:
    """Nobody has to listen, and nobody asks it to stop."""

    def train(turn: Turn, there: Machine) -> str:
        assert turn.heartbeat.limit is None and not turn.stop()
        turn.notify(Event(JOB.cell, "train", "start"))
        return "waiting"

    monkeypatch.setattr(worker, "train", train)
    assert worker.work(JOB, machine, store) == "waiting"


def test_the_log_of_a_cell_is_its_thread_s_and_a_full_disk_ends_nothing(machine, store, monkeypatch, capfd) -> None:
    def train(turn: Turn, there: Machine) -> str:
        worker.log.info("küche")
        thread = threading.Thread(target=worker.log.info, args=("of another",))
        thread.start()
        thread.join()
        (handler,) = of_file()
        stream, handler.stream = handler.stream, SimpleNamespace(write=None)
        worker.log.info("lost")
        handler.stream = stream
        return "waiting"

    monkeypatch.setattr(worker, "train", train)
    monkeypatch.setattr(worker.log, "disabled", True)
    assert worker.work(JOB, machine, store) == "waiting"
    lines = Path(machine.files, JOB.cell, "log.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["INFO küche"]
    assert capfd.readouterr() == ("", "")


def test_what_a_cell_was_begun_with_is_kept_wherever_it_is_resumed(machine, store, monkeypatch) -> None:
    """Chosen by the machine where nothing is done, asked for by name where a person wants it so."""
    on_gpu = iter(["graphs", "loop"] * 2)
    monkeypatch.setattr(worker, "path_for", lambda spec: next(on_gpu))
    monkeypatch.setattr(worker.slots, "has_tf32", lambda device: device == "cuda:0")
    auto = replace(machine, precision="auto", path="auto")

    def chosen(device: str, **asked: Any) -> tuple[str, str]:
        found = worker.resolve_auto(JOB, replace(auto, device=device, **asked), store)
        return found.precision, found.path

    store.add_cell(JOB.cell, JOB.spec)
    for _ in range(2):  # also where it was claimed and no round was done
        expected = [("fp32", "loop"), ("tf32", "graphs"), ("fp32", "loop")]
        assert [chosen(device) for device in ("cpu", "cuda:0", "cuda:1")] == expected
        begun = {"precision": "tf32", "path": "graphs", "device": "a GPU"}
        if store.claim(JOB.cell, "train", suite="s", total=5, provenance=begun) is None:
            break
    run = store.runs([JOB.cell])[-1]["id"]
    store.commit(run, round=2, checkpoint="state")
    assert chosen("cuda:0") == ("tf32", "graphs")
    with pytest.raises(MachineError, match="begun in tf32, which this machine lacks"):
        chosen("cpu")
    with pytest.raises(MachineError, match=r"begun with run\.path=graphs, which needs a GPU"):
        chosen("cpu", precision="fp32")
    assert chosen("cuda:0", path="loop") == ("tf32", "loop")
    told: list[Event] = []
    assert worker.work(JOB, auto, store, told.append) == "interrupted" and "begun in tf32" in told[0].message
    store.finish(run, round=5)
    assert chosen("cpu") == ("fp32", "loop")


@pytest.mark.parametrize("path", ["fast", "reference"])
def test_what_was_begun_on_a_path_of_before_goes_on_where_a_person_says_so(path, machine, store) -> None:
    store.add_cell(JOB.cell, JOB.spec)
    run = store.claim(JOB.cell, "train", suite="s", total=5, provenance={"path": path, "precision": "fp32"})
    store.commit(run, round=2, checkpoint="state")
    with pytest.raises(MachineError, match=f"begun with run.path={path}, which no longer exists"):
        worker.resolve_auto(JOB, replace(machine, path="auto"), store)
    assert worker.resolve_auto(JOB, replace(machine, path="loop"), store).path == "loop"


def test_a_model_that_was_not_trained_here_is_its_cell_s_only_round(machine, store, monkeypatch) -> None:
    """And stays it when the command is given again; what the network does keeps the lease."""
    network, events, stops, handlers = torch.nn.Identity(), list[Event](), list[bool](), []
    ready: Any = ready_with(problem=SimpleNamespace(model=network), initial=State(0, {"w": torch.ones(2)}))

    def attack(turn: Turn, there: Machine, again: bool, given: Any) -> str:
        assert there == machine and again is True and given is ready
        assert (turn.job, turn.store, turn.folder) == (JOB, store, Path(machine.files) / JOB.cell)
        before = turn.heartbeat.beats
        network(torch.zeros(1))
        assert turn.heartbeat.beats > before
        stops.append(turn.stop())
        turn.notify(Event(JOB.cell, "x", "done"))
        handlers.extend(of_file())
        return "done"

    monkeypatch.setattr(worker, "attack_models", attack)
    assert worker.evaluate(JOB, machine, store, ready, events.append, lambda: True) == "done"
    assert worker.evaluate(JOB, machine, store, ready) == "done"
    assert len(events) == 1 and stops[0] is True and not stops[1]
    file = Path(machine.files, JOB.cell, "model-000005.safetensors")
    model, own, header = checkpoints.load_model(file, "cpu")
    assert model["w"].tolist() == [1, 1] and own == {}
    assert header == {"cell": JOB.cell, "round": "5", "classes": "10"}
    row, (run,) = store.stages()[JOB.cell, "train"], store.runs()
    record = {"last": {"round": 5}, "sha256": {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}}
    assert (row.status, row.round, row.total, row.record) == ("done", 5, 5, record) and run["data"] == {"name": "x"}
    assert store.cells() == {JOB.cell: SPEC} and (file.parent / "log.txt").is_file()
    assert len(handlers) == 2 and all(handler.stream is None for handler in handlers)


# --- training ----------------------------------------------------------------------------------------------------


def turn(store: Store, machine: Machine, events: list[Event], stop: Any = never) -> Turn:
    store.add_cell(JOB.cell, JOB.spec)
    return Turn(JOB, store, Path(machine.files) / JOB.cell, events.append, stop, Heartbeat())


@pytest.mark.parametrize("reason", [graphs.NotRecorded("a step waits"), torch.OutOfMemoryError("CUDA out of memory")])
def test_steps_that_cannot_be_recorded_are_trained_without_recordings(reason, machine, store, monkeypatch) -> None:
    """Whoever resumes the cell finds the path that it took."""
    paths = []

    def rounds(there: Turn, run: int, how: Machine) -> str:
        paths.append(how.path)
        if how.path == "graphs":
            raise reason
        return "interrupted"

    monkeypatch.setattr(training, "_rounds", rounds)
    assert training.train(turn(store, machine, []), replace(machine, path="graphs")) == "interrupted"
    assert paths == ["graphs", "loop"] and [run["path"] for run in store.runs()] == ["loop"]


STATS = Stats(loss=0.0, loss_released=0.0, accuracy=1.0, steps=1, momentum_steps=1.0, batches=1)
MONITORED = [0.1, 0.9, 0.2, 0.3, 0.4]


def ready_with(**more: Any) -> Any:
    """What stands for a cell that is set up."""
    return SimpleNamespace(classes=10, data={"data": {"name": "x"}}, **more)


class Experiment:
    """Five rounds of ten seconds each. A client's numbers are never the cell's; the last round has no updates."""

    def __init__(self, patch: pytest.MonkeyPatch, weights: dict[str, str] | None = None):
        self.clock, self.begun = 100.0, list[Any]()
        self.ready = ready_with(problem=None, initial=State(0, {"w": torch.zeros(1)}), weights=weights)
        patch.setattr("fatbench.engine.experiment.experiment", self)
        patch.setattr(training, "ready_for", self.made_ready)
        patch.setattr(training, "time", SimpleNamespace(monotonic=lambda: self.clock))

    def made_ready(self, turn: Turn, machine: Machine, trained: Path | None) -> tuple[dict[str, Any], Any]:
        self.begun.append((turn.job, machine, trained))
        return {"seed": 3}, self.ready

    def __call__(self, ready: Any, state: State, seed: int) -> Iterator[tuple[Round, list[Number]]]:
        assert (ready, seed) == (self.ready, 3)
        self.begun.append((state.round, state.model["w"].item()))
        for t in range(state.round, 5):
            self.clock += 10
            count = t + 1
            series = {"train_loss": count / 8, "natural": count / 16, "monitor": MONITORED[t]}
            series |= {"forward": 20.0 * count, "backward": 3.0, "seconds": 1.0, "uploads_refused": float(count % 2)}
            series |= {"diverged": 4.0} if count == 4 else {}
            series |= {"doubt_a_b": 1.0} if count in (1, 4) else {}
            numbers = [Number(metric, value, count) for metric, value in series.items()]
            numbers += [Number(metric, 99.0, count, client=0) for metric in ("train_loss", "monitor", "forward")]
            model = {"w": torch.full((1,), float(count))}
            own = {"w": torch.full((1,), count + 0.5)}
            updates = [] if count == 5 else [Update(0, 3, own, STATS)]
            kept = {"image": torch.full((1,), 7.0)} if count in (1, 3) else {}
            mixing = Mixing([1.0], artifacts={"seen": torch.full((1,), 8.0)} if count == 3 else {})
            end = State(count, model)
            yield Round(t, {}, updates, mixing if count % 2 else None, end, Cost(), artifacts=kept), numbers


def test_what_training_commits_keeps_and_says_round_by_round(machine, store, monkeypatch) -> None:
    """A checkpoint every 20 s: after round 2, and after round 3, where it is stopped. Goes on from there to the end."""
    origin = {"source": "a.pt", "digest": "d"}
    experiment, events, seen = Experiment(monkeypatch, origin), list[Event](), list[Any]()
    monkeypatch.setattr(training.weights, "trained_by", lambda spec: "fedcba987654")
    known = ("fedcba987654", store)
    monkeypatch.setattr(training.transfer, "trained_model", lambda *given: given == known)
    monkeypatch.setattr(training.transfer, "model_of", lambda cell, where, there: Path(cell, "m"))
    monkeypatch.setattr(training, "gpu_memory", lambda device: 7 if device == "cpu" else 0)
    place = recovering(machine, checkpoint_seconds=20.0)
    folder = Path(machine.files, JOB.cell)

    def notify(event: Event) -> None:
        row = store.stages()[JOB.cell, "train"]
        files = sorted(file.name.partition(".")[0] for file in folder.glob("*.safetensors"))
        seen.append((event.kind, event.round, row.round, row.checkpoint, files))
        events.append(event)

    at = replace(turn(store, machine, []), notify=notify, stop=lambda: events[-1].round == 3)
    folder.mkdir(parents=True)
    (folder / "state-000009.safetensors").touch()
    assert training.train(at, place) == "interrupted"
    two = ["clients-000002", "model-000002", "state-000002"]
    three = [*two[:2], "model-000003", "state-000003"]
    names = [f"state-00000{n}.safetensors" for n in (2, 3)]
    assert seen == [
        ("start", 0, 0, None, []), ("progress", 1, 0, None, []), ("progress", 2, 0, None, []),
        ("progress", 3, 2, names[0], two), ("interrupted", 3, 3, names[1], three),
    ]  # fmt: skip
    row = store.stages()[JOB.cell, "train"]
    assert (row.status, row.round, row.checkpoint) == ("interrupted", 3, names[1])
    assert training.train(at, place) == "done"
    last = ["clients-000002", "model-000002", "model-000005"]
    assert seen[5:] == [
        ("start", 3, 3, names[1], three), ("progress", 4, 3, names[1], three), ("progress", 5, 3, names[1], three),
        ("done", 5, 5, None, last),
    ]  # fmt: skip
    ready = (JOB, place, Path("fedcba987654", "m"))
    assert experiment.begun == [ready, (0, 0.0), ready, (3, 3.0)]
    for count, event in zip([0, 1, 2, 3, 3, 3, 4, 5, 5], events, strict=True):
        said = {"images": 20 * count + 3.0, "loss": count / 8, "accuracy": count / 16}
        assert event == Event(JOB.cell, "train", event.kind, count, 5, **(said if event.kind == "progress" else {}))
    row = store.stages()[JOB.cell, "train"]
    digests = row.record.pop("sha256")
    assert row.record == {
        "last": {"round": 5}, "best-test": {"round": 2, "value": 0.9}, "diverged": 4, "uploads_refused": 3,
        "said": {"a_b": 2},
    }  # fmt: skip
    kept = {"artifacts/round-000001.safetensors": {"image": 7.0}}
    kept["artifacts/round-000003.safetensors"] = {"image": 7.0, "seen": 8.0}
    models = {"model-000002.safetensors": 2.0, "model-000005.safetensors": 5.0, "clients-000002.safetensors": 2.5}
    assert digests == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in {**models, **kept}}
    for name, tensors in kept.items():
        assert {key: value.item() for key, value in load_file(folder / name).items()} == tensors
    for name, value in models.items():
        assert [one.item() for one in load_file(folder / name).values()] == [value]
    for name, clients in (("clients", {0}), ("model", set())):
        _, own, header = checkpoints.load_model(folder / f"{name}-000002.safetensors", "cpu", None, JOB.cell, 2)
        assert own.keys() == clients and header["classes"] == "10"
    first, second = store.runs()
    assert [first.get("gpu_memory"), second.get("gpu_memory")] == [7, 7]
    assert first["data"] == {"name": "x"} and first["weights"] == {**origin, "cell": "fedcba987654"}
    found = [m["round"] for m in store.measurements() if (m["metric"], m["client"]) == ("natural", -1)]
    assert found == [1, 2, 3, 4, 5]


def test_numbers_without_a_state_to_go_on_from_are_taken_away(machine, store, monkeypatch) -> None:
    """What was imported unfinished. Weights of a file have no cell; a CPU has no memory to tell of."""
    experiment, events = Experiment(monkeypatch, {"source": "a.pt"}), list[Event]()
    at = turn(store, machine, events, lambda: events[-1].round == 4)
    run = store.claim(JOB.cell, "train", suite="crash", total=5, provenance={})
    store.commit(run, numbers=[Number("natural", 0.5, 1)], round=1, record={"diverged": 1, "uploads_refused": 9})
    store.release(run)
    place = recovering(machine, checkpoint_seconds=1e9)
    assert training.train(at, place) == "interrupted"
    assert experiment.begun[1:] == [(0, 0.0)] and experiment.begun[0][2] is None
    assert training.train(at, place) == "done" and experiment.begun[3] == (4, 4.0)
    row, (_, mine, last) = store.stages()[JOB.cell, "train"], store.runs()
    assert (row.record["uploads_refused"], row.record["diverged"]) == (3, 4)
    assert mine["weights"] == {"source": "a.pt"} and "gpu_memory" not in last
    found = [m["value"] for m in store.measurements() if (m["metric"], m["client"]) == ("natural", -1)]
    assert found == [count / 16 for count in range(1, 6)]


def test_a_state_whose_digest_nobody_knows_is_not_gone_on_from(machine, store, monkeypatch) -> None:
    experiment, events = Experiment(monkeypatch), list[Event]()
    at = turn(store, machine, events, lambda: events[-1].round == 3)
    assert training.train(at, machine) == "interrupted"
    record = store.stages()[JOB.cell, "train"].record
    del record["sha256"]["state-000003.safetensors"]
    with store.database.writing() as connection:
        connection.execute(STAGES.update().values(record=dumps(record)))
    assert training.train(replace(at, stop=never), machine) == "done" and experiment.begun[3] == (0, 0.0)
