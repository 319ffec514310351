"""What the engine measures where the right number is known: models of single clients, classes, auxiliary images."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fatbench.data import DATASETS, Dataset
from fatbench.engine import measures
from fatbench.engine.accuracy import natural
from fatbench.engine.cohort import train_cohort
from fatbench.engine.experiment import _refuse_batches_of_one, experiment
from fatbench.engine.setup import Runtime, Setup, setup
from fatbench.engine.splits import auxiliary_images, split
from fatbench.errors import SpecError
from fatbench.methods import diagnostics
from fatbench.methods.aggregators import AGGREGATORS
from fatbench.methods.algorithms import ALGORITHMS
from fatbench.methods.partitions import PARTITIONS
from fatbench.report.figures import artifacts
from fatbench.runner.jobs import Machine, Recovery
from fatbench.runner.start import jobs_of
from fatbench.runner.training import artifact_file
from fatbench.runner.worker import work
from fatbench.store.stages import Store
from fatbench.suite import calls, cells, files, signatures
from fatbench.testing import initial_state, local, rounds, small_problem

# Client k's model answers class k whatever it sees: the shared weights with a bias of its own.
PLUGIN = '''
from fatbench.suite.types import Count, Local, Objective
from fatbench.engine.rounds import Cost, Round, State, Stats, Update


def stubborn(problem, state, *, rounds: Count, batch: Count, objective: Objective):
    """Clients that never change their mind."""
    import torch

    for t in range(state.round, rounds):
        own = {k: {"fc2.bias": 1e6 * torch.eye(problem.classes)[k]} for k in range(len(problem.shards))}
        stats = Stats(1.0, 1.0, 0.5, 1, 1.0, 1)
        updates = [Update(k, len(shard), {}, stats) for k, shard in enumerate(problem.shards)]
        state = State(t + 1, state.model)
        yield Round(t, state.model, updates, None, state, Cost(), own=own, metrics={"said": {0: 1.5, 1: 2.5}, "t": t},
                    artifacts={"images": torch.full((2, 1, 3, 3), t, dtype=torch.uint8)})


def parted(problem, state, *, rounds: Count, local: Local):
    """Clients that send their last layer alone."""
    from dataclasses import replace

    from fatbench.engine.cohort import cost, train_cohort

    names = ["fc2.weight", "fc2.bias"]
    for t in range(state.round, rounds):
        updates = train_cohort(problem, state.model, [0, 1, 2], t, local.at(t))
        updates = [replace(u, model={n: u.model[n] for n in names}) for u in updates]
        model = {**state.model, **{n: sum(u.model[n] for u in updates) / 3 for n in names}}
        up = {n: model[n] for n in names}
        yield Round(t, state.model, updates, None, State(t + 1, model), cost(updates, local.at(t), up))
        state = State(t + 1, model)


ALGORITHMS = {"stubborn": stubborn, "parted": parted}
'''
SUITE = """
name: stubborn
title: Clients that never change their mind
base:
  data: digits
  train: 80
  test: 40
  partition: {name: iid, clients: 3}
  model: {name: small_cnn, width: 2}
  per_class: true
  algorithm: {name: stubborn, rounds: 2, batch: 8, objective: {name: standard}}
  monitor: natural
evaluate: {n: 30, batch: 7, attacks: {natural: natural}}
presets: {paper: {}}
"""


@pytest.fixture
def cell(tmp_path, own_plugins):
    plugin, file = tmp_path / "stubborn.py", tmp_path / "stubborn.yaml"
    plugin.write_text(PLUGIN)
    file.write_text(SUITE)
    signatures.add_plugin(plugin)
    return jobs_of(files.load(str(file)).plan())[0]


def worked(cell, folder: Path, stops=()) -> dict[tuple[str, str, int, int], float]:
    """The numbers of the cell, which is stopped and taken up again as often as `stops` says so."""
    machine = Machine(str(folder / "r.db"), str(folder / "files"), "", recovery=Recovery(checkpoint_seconds=0.0))
    asked = iter(stops)
    with Store.open(machine.db, create=True) as store:
        for _ in range(sum(stops)):
            assert work(cell, machine, store, stop=lambda: next(asked, False)) == "interrupted"
        assert work(cell, machine, store) == "done"
        rows = store.measurements([cell.cell])
    return {(row["stage"].split("-")[0], row["metric"], row["round"], row["client"]): row["value"] for row in rows}


def test_clients_with_models_of_their_own(cell, tmp_path):
    """Client k is right on the images of class k, so accuracies are fractions of classes; stopped in between or not."""
    labels = DATASETS["digits"](tmp_path).test_labels
    # after round 1, then in the middle of client 1's images
    found = worked(cell, tmp_path, (True, False, False, False, False, True))
    of_class = [float(np.mean(labels[:40] == k)) for k in range(10)]
    assert found["train", "natural", 2, -1] == pytest.approx(sum(of_class[:3]) / 3)
    assert [found["train", "natural", 2, k] for k in range(3)] == pytest.approx(of_class[:3])
    first = [float(np.mean(labels[:30] == k)) for k in range(3)]
    assert [found["natural", "natural", 2, k] for k in range(3)] == pytest.approx(first)
    assert found["natural", "natural", 2, -1] == pytest.approx(sum(first) / 3)
    # Of the images of class 1, one client of three is right; of class 5, none.
    assert found["train", "natural_class", 2, 1] == pytest.approx(1 / 3)
    assert found["train", "natural_class", 2, 5] == 0
    assert (found["train", "said", 1, 1], found["train", "t", 2, -1]) == (2.5, 1)
    assert not any(metric.startswith("drift") for _, metric, _, _ in found)  # nobody uploaded a model
    for count in (1, 2):
        kept = artifacts.load(artifact_file(tmp_path / "files" / cell.cell, count))
        assert torch.equal(torch.from_numpy(kept["images"]), torch.full((2, 1, 3, 3), count - 1, dtype=torch.uint8))


def test_clients_that_send_a_part_of_their_model(cell, tmp_path):
    """Their drift is that of the part; the rest has not moved."""
    local = {"epochs": 1, "batch": 8, "lr": 0.1, "objective": {"name": "standard"}}
    spec = {**cell.spec, "algorithm": {"name": "parted", "rounds": 1, "local": local}}
    bound = calls.bind_cell(cells.canonical(spec), tmp_path)
    ready = setup(Runtime(tmp_path, torch.device("cpu")), **bound)
    ((result, measured),) = experiment(ready, ready.initial, **bound)
    assert all(update.model.keys() == result.broadcast.keys() for update in result.updates)
    (drift,) = (one.value for one in measured if one.metric == "drift_pre")
    sent = result.broadcast
    moved = [sum(float((u.model[n] - sent[n]).pow(2).sum()) for n in u.model) ** 0.5 for u in result.updates]
    assert drift == pytest.approx(sum(moved) / 3, rel=1e-5) and drift > 0


def test_how_many_clients_hold_a_class(cell, tmp_path):
    found = worked(cell, tmp_path)
    held = [found["train", "label_clients", 1, c] for c in range(10)]
    assert all(count == int(count) and 0 <= count <= 3 for count in held)
    assert sum(held) > 20  # 80 digits, dealt at random to three: nearly every class is everywhere


@pytest.mark.parametrize("inverted", [True, False])
def test_images_that_clients_hold_out_are_judged_clean_and_attacked(inverted):
    """Client 1 holds out three images, client 2 one: under the monitor, which inverts them, and as they are."""
    problem = small_problem()
    ready = Setup(problem, initial_state(problem), (problem.images, problem.labels), None, [], 4, {})
    ready = replace(ready, held=[torch.arange(0), torch.tensor([4, 5, 6]), torch.tensor([8])])
    how = partial(ALGORITHMS["fedavg"], rounds=1, aggregator=AGGREGATORS["samples"], local=local())
    (result,) = how(problem, ready.initial)

    def invert(model, x, y, generator):
        return 1 - x

    measured = measures.monitored(ready, result, 1, invert if inverted else natural, None, False)
    found = {(one.metric, one.client): one.value for one in measured}
    problem.model.load_state_dict(result.state.model)
    x, y = problem.images.float() / 255, problem.labels
    for metric, seen in (("holdout_natural", x), ("holdout_accuracy", 1 - x if inverted else x)):
        right = problem.model.eval()(seen).argmax(1) == y
        assert {k: found[metric, k] for name, k in found if name == metric} == {
            1: pytest.approx(float(right[4:7].double().mean())), 2: float(right[8])
        }  # fmt: skip


OUTPUTS = {  # what a network makes of its logits, and in training or not: what is said of it
    "both": (lambda z, training: (z, z.mean()), "a tuple"),
    "in training": (lambda z, training: (z, z.mean()) if training else z, "a tuple"),
    "deep": (lambda z, training: z[:, :, None, None], "a tensor "),
}


@pytest.mark.parametrize(("made", "returned"), OUTPUTS.values(), ids=OUTPUTS)
def test_a_network_of_two_outputs_is_refused_in_one_sentence(made, returned):
    """Before the first step, whether it returns two always or in training alone."""

    class Network(torch.nn.Linear):
        def forward(self, x):
            return made(super().forward(x.flatten(1)), self.training)

    problem = small_problem(Network(144, 4))
    how = partial(ALGORITHMS["fedavg"], rounds=1, aggregator=AGGREGATORS["samples"], local=local())
    with pytest.raises(SpecError, match=f"the model returns {returned}.*, not logits \\(B, classes\\)"):
        rounds(problem, how, monitor=natural)
    with pytest.raises(SpecError, match="not logits"):
        train_cohort(problem, initial_state(problem).model, [0], 0, local())


def test_a_diagnostic_has_its_own_rounds(cell, tmp_path, monkeypatch):
    """Of the three rounds the monitor looks at all, the diagnostic at those that 2 divides, and the last."""
    monkeypatch.setitem(diagnostics.DIAGNOSTICS, "svcca", lambda *_, **__: {"diagnosed": 1.0})
    cell.spec["algorithm"]["rounds"] = 3
    cell.spec.update(diagnostic=calls.check("Diagnostic", {"name": "svcca"}), diagnostic_every=2)
    found = worked(cell, tmp_path)
    assert sorted(t for stage, metric, t, k in found if (stage, metric, k) == ("train", "natural", -1)) == [1, 2, 3]
    assert sorted(t for _, metric, t, _ in found if metric == "diagnosed") == [2, 3]


def test_a_last_batch_of_one_is_refused_before_the_first_round():
    """Where the partition alone says how many examples each has: 4, 4 and 5 in batches of four."""
    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(4), torch.nn.BatchNorm1d(4))
    flat(torch.zeros(2, 1, 12, 12))

    def batches(batch):
        return partial(ALGORITHMS["fedavg"], local=local(batch=batch))

    with pytest.raises(SpecError) as error:
        _refuse_batches_of_one(small_problem(flat), batches(4))
    assert str(error.value).startswith("local.batch: 4: the last batch of client 2 has one example, and batch norm")
    with pytest.raises(SpecError, match="the last batch of 3 clients, such as 0, has one"):
        _refuse_batches_of_one(small_problem(flat), batches(1))
    for batch in (5, 8, None):
        _refuse_batches_of_one(small_problem(flat), batches(batch))
    before = torch.get_rng_state()
    _refuse_batches_of_one(small_problem("small_cnn"), batches(4))  # its feature maps are larger than one pixel
    assert torch.equal(before, torch.get_rng_state())


def dataset(train: int, test: int, seed: int = 0, side: int = 4) -> Dataset:
    images = np.random.default_rng(seed).integers(0, 256, (train + test, 1, side, side), dtype=np.uint8)
    labels = np.zeros(train + test, np.int64)
    return Dataset(images[:train], labels[:train], images[train:], labels[train:], 2, None, None, "made", None, "")


def test_images_after_the_first():
    """10 images: cells with `train: 5` and `train_from: 5` share none; of 2..6 one is held out, and no other is."""
    own, deal = dataset(10, 5), partial(PARTITIONS["iid"], clients=2)
    first, second = split(own, 0, deal, 5), split(own, 0, deal, None, train_from=5)
    assert (first.train.tolist(), second.train.tolist()) == ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])
    assert [len(shard) for shard in second.shards] == [2, 2]
    assert np.concatenate(second.shards).max() < 5  # positions in `train`
    held = split(own, 0, deal, 5, validation=1, train_from=2)
    assert sorted([*held.train, *held.validation]) == [2, 3, 4, 5, 6] and len(held.validation) == 1
    assert np.array_equal(auxiliary_images(own, own, 3, None, train_from=2), own.train_images[5:])


def test_auxiliary_images():
    """Of the clients' own data set those that no client has; of another one the first; never one of the test set."""
    own, other = dataset(10, 5), dataset(8, 2, seed=1)
    assert np.array_equal(auxiliary_images(own, own, 6, None), own.train_images[6:])
    assert np.array_equal(auxiliary_images(own, own, 6, 3), own.train_images[6:9])
    assert np.array_equal(auxiliary_images(own, other, 6, 3), other.train_images[:3])
    with pytest.raises(SpecError, match="auxiliary: all training images are the clients'; set 'train'"):
        auxiliary_images(own, own, None, None)
    with pytest.raises(SpecError, match="all training images are the clients'"):
        auxiliary_images(own, own, 10, None)
    with pytest.raises(SpecError, match=r"auxiliary: images of shape \(1, 5, 5\), the clients have \(1, 4, 4\)"):
        auxiliary_images(own, dataset(3, 1, side=5), None, None)
    leaky = dataset(8, 2, seed=1)
    leaky.train_images[3] = own.test_images[2]
    with pytest.raises(SpecError, match="auxiliary: 1 of 8 images are in the test set"):
        auxiliary_images(own, leaky, None, None)


SPEC = {
    "seed": 0, "data": "digits", "partition": {"name": "iid", "clients": 3}, "model": {"name": "small_cnn"},
    "algorithm": {"name": "fedavg", "rounds": 1, "aggregator": "samples",
                  "local": {"batch": 8, "lr": 0.1, "objective": "standard"}},
    "monitor": "natural",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": 1400, "train_from": 43}, "train_from: 1400 images wanted after the first 43, digits has 1442"),
        ({"train_from": 1442}, "train_from: no image is left after the first 1442, digits has 1442"),
        ({"model": {"name": "vit", "patch": 4}, "diagnostic": {"name": "svcca", "blocks": "one"}}, "1,9, got 'one'"),
        ({"diagnostic": "svcca", "monitor": None}, "diagnostic: needs 'monitor'"),
    ],
)
def test_settings_that_contradict_each_other(changes, message):
    with pytest.raises(SpecError, match=message):
        cells.canonical({**SPEC, **changes})
