"""Clients evaluated on their own images: closed forms, resumption after a kill, clients that never train, refusals."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from crew import fork_server, numbers

import fatbench
from fatbench.data import digits
from fatbench.engine.accuracy import accuracy, attack_in_chunks, unpacked
from fatbench.engine.rounds import Problem
from fatbench.engine.setup import Runtime, setup
from fatbench.engine.splits import split, written_images
from fatbench.errors import SpecError
from fatbench.methods.algorithms.fedbn import mean_of_clients
from fatbench.report.contrasts import CLIENT, declared_by
from fatbench.report.figures import series
from fatbench.report.numbers.sources import OwnImages, Source
from fatbench.report.numbers.statistics import OfClients, contrast, least_of_equals
from fatbench.report.pairs import measured_numbers
from fatbench.report.site.leaderboards import tasks
from fatbench.runner import checkpoints
from fatbench.runner.attacking import _numbers, own_images
from fatbench.runner.jobs import Machine, Recovery
from fatbench.runner.start import jobs_of
from fatbench.runner.transfer import ModelPair
from fatbench.runner.worker import work
from fatbench.store.stages import Store
from fatbench.suite import asked, calls, cost, files
from fatbench.suite.cells import Evaluation

SUITE = """
name: own
title: Each client on its own images
seeds: [1, 2]
base:
  data: digits
  train: 240
  test: 60
  partition: {name: dirichlet, clients: 4, alpha: 0.5}
  client_holdout: 0.3
  model: {name: small_cnn, width: 2}
  algorithm:
    name: fedavg
    rounds: 2
    local: &local {epochs: 1, batch: 16, lr: 0.05, objective: standard}
    aggregator: samples
axes:
  method:
    FedAvg: {}
    FedBN: {algorithm: {name: fedbn, rounds: 2, local: *local, aggregator: samples}}
baseline: FedAvg
evaluate:
  batch: 7
  checkpoints: [last]
  on: {clients: [own_natural, own_fgsm]}
  least: 3
  unseen: 1
  attacks:
    natural: natural
    own_natural: natural
    own_fgsm: {name: fgsm, eps: 25/255}
presets: {paper: {}}
tables:
  - id: own
    title: Own
    rows: [method]
    values: {mean: own_fgsm, worst: "worst:own_fgsm", unseen: "unseen:own_fgsm", first: "clients:own_fgsm[0]"}
tests: {family: own, axis: method, metrics: [own_fgsm], contrasts: {gain: {FedBN: 1, FedAvg: -1}}}
"""


def suite_of(folder: Path, text: str = SUITE) -> files.Suite:
    (folder / "own.yaml").write_text(text)
    return files.load(str(folder / "own.yaml"))


# --- closed forms -------------------------------------------------------------------------------------------------

THREE = OwnImages({0: (0.5, 2), 1: (0.75, 4), 2: (1.0, 1)}, {3: (0.25, 4)}, {0: 0.5, 1: 0.75, 2: 1.0, 3: 0.5})


def test_the_bits_of_outcomes_are_the_clients_one_after_the_other() -> None:
    """Of 2, 4, 1 and, of a client that never trains, 4 images: 10 0111 1 0001."""
    assert THREE.shares(0b10_0111_1_0001, 11) == {0: 0.5, 1: 0.75, 2: 1.0, 3: 0.25}
    assert not THREE.contradiction(0.75, 7, 0b10_0111_1_0001, 11)
    assert THREE.contradiction(0.75, 7, 0b10_0111_0_0001, 11) and THREE.contradiction(0.75, 7, 0b10_0111_1, 7)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("pooled:m", 5 / 7), ("worst:m", 0.5), ("tenth:m", 0.5), ("std:m", 0.20412414523193148),
        ("below_chance:m", 0.0),
        ("not_above_chance:m", 1.0), ("unseen:m", 0.25), ("clients:m[1]", 0.75), ("clients:m[3]", 0.25),
    ],
)  # fmt: skip
def test_three_clients_with_two_four_and_one_image(text: str, value: float) -> None:
    found = THREE.number(Source.parse(text))
    assert found is not None and found[0] == pytest.approx(value, abs=1e-15)
    assert found[1] == {"unseen:m": 4, "clients:m[1]": 4, "clients:m[3]": 4}.get(text, 7)
    assert replace(THREE, accuracies={}, unseen={}).number(Source.parse(text)) is None


def test_a_constant_below_its_own_chance_and_one_above_it() -> None:
    clients = OwnImages({0: (0.4, 100), 1: (0.9, 100)}, {}, {0: 0.5, 1: 0.5})
    assert clients.number(Source.parse("below_chance:m")) == (0.5, 200)
    assert clients.number(Source.parse("not_above_chance:m")) == (0.5, 200)


def test_the_least_of_two_fair_coins_is_a_quarter() -> None:
    assert least_of_equals([1, 1], 0.5) == pytest.approx(0.25, abs=0.02)
    assert least_of_equals([3, 9], 1.0) == 1.0 and least_of_equals([8], 0.5) == pytest.approx(0.5, abs=0.01)


def by_seed(accuracies: list[tuple[float, ...]], images: list[str]) -> list[OfClients]:
    return [OfClients.of(sum(one) / len(one), 20, one, same) for one, same in zip(accuracies, images, strict=True)]


def test_clients_that_are_the_same_in_all_seeds_take_the_place_of_images() -> None:
    """Two writers in three seeds, D = ((.5, 0), (.5, 0), (.5, 0)): MS_E 0, MS_I .375."""
    a, b = [(1.0, 0.5)] * 3, [(0.5, 0.5)] * 3
    test = contrast([(1.0, by_seed(a, ["w"] * 3)), (-1.0, by_seed(b, ["w"] * 3))])
    assert test is not None and (test.mean, test.images, test.seeds) == (0.25, 2, 3)
    assert test.image_variance == pytest.approx(0.0625, abs=1e-15)
    assert test.seed_variance == pytest.approx((1 / 40) ** 2 / 3)
    for images in (["x", "y", "z"], [""] * 3):  # other clients in each seed, or nobody knows
        alone = contrast([(1.0, by_seed(a, images)), (-1.0, by_seed(b, images))])
        assert alone is not None and alone.image_variance == 0 and alone.seed_variance == test.seed_variance
    assert contrast([(1.0, by_seed(a[:1], ["w"])), (-1.0, by_seed(b[:1], ["w"]))]) is None  # one seed: no test


# --- which images -------------------------------------------------------------------------------------------------


def test_unseen_clients_are_the_last_ones_and_the_others_keep_their_order() -> None:
    labels = numpy.arange(40) % 4
    dataset: Any = SimpleNamespace(train_labels=labels, writers=None, test_writers=None)

    def deal(labels: Any, rng: Any, writers: Any) -> list[Any]:
        return numpy.array_split(numpy.arange(len(labels)), 5)

    whole, parts = (split(dataset, 3, deal, client_holdout=0.25, unseen=unseen) for unseen in (0, 0.4))
    assert (whole.unseen, parts.unseen) == (0, 2)
    first = [shard.min() // 8 for shard in parts.shards]
    assert sorted(first[:3]) == first[:3] and sorted(first[3:]) == first[3:] and sorted(first) == [0, 1, 2, 3, 4]
    for k, old in enumerate(first):
        assert (parts.shards[k] == whole.shards[old]).all() and (parts.held[k] == whole.held[old]).all()
    for wrong in (0.1, 5, 6):
        with pytest.raises(ValueError, match="at least one must be unseen, and one train"):
            split(dataset, 3, deal, unseen=wrong)


def test_a_client_has_the_test_images_of_its_writers() -> None:
    dataset: Any = SimpleNamespace(
        train_labels=numpy.zeros(4), writers=numpy.array([7, 7, 8, 9]), test_writers=numpy.array([9, 7, 8, 7, 5])
    )
    parts = split(dataset, 0, lambda labels, rng, writers: [numpy.array([0, 1]), numpy.array([2, 3])])
    assert [own.tolist() for own in written_images(dataset, parts, None)] == [[1, 3], [0, 2]]
    assert [own.tolist() for own in written_images(dataset, parts, 2)] == [[1], [0]]
    unknown: Any = SimpleNamespace(train_labels=numpy.zeros(4), writers=None, test_writers=None)
    assert [len(own) for own in written_images(unknown, parts, None)] == [0, 0]


class Constant(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(x), 2) + 0 * x.flatten(1).sum(1, keepdim=True)


def test_two_clients_of_one_class_each_are_right_on_their_own_images_and_half_right_on_all() -> None:
    images, labels = torch.zeros(8, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1] * 4)
    problem = Problem(Constant(), images, labels, [*labels[:2].split(1)], 2, 0, torch.device("cpu"))
    held = [torch.tensor([2, 4, 6]), torch.tensor([3, 5, 7])]
    ready: Any = SimpleNamespace(problem=problem, held=held, written=[], test=(images, labels))
    evaluation = Evaluation("own", {"name": "natural"}, None, 2, on="held_out >= 3")
    stage: Any = SimpleNamespace(evaluation=evaluation, round=1)
    pairs = [ModelPair(k, {"logits": torch.eye(2)[k]}) for k in (0, 1)]

    def right(pair: ModelPair, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chunks = attack_in_chunks(problem, pair.judged, images, labels, lambda model, x, y, g: x, ("k",), batch=2)
        return torch.cat([chunk.correct for chunk in chunks])

    own = own_images(ready, evaluation)
    assert {k: index.tolist() for k, (index, *_) in own.items()} == {0: [2, 4, 6], 1: [3, 5, 7]}
    found = _numbers(stage, pairs, [right(pair, *own[pair.client][1:]) for pair in pairs], 2)
    assert [(one.metric, one.value, one.n, one.client) for one in found] == [
        ("own", 1.0, 6, -1), ("own", 1.0, 3, 0), ("own", 1.0, 3, 1)
    ]  # fmt: skip
    on_test: Any = SimpleNamespace(evaluation=replace(evaluation, on=""), round=1)
    assert _numbers(on_test, pairs, [right(pair, images, labels) for pair in pairs])[0].value == 0.5
    assert {*own_images(ready, replace(evaluation, n=2))[0][2].tolist()} == {0}
    with pytest.raises(SpecError, match=r"evaluate: own: no client that trains has 4 own images \(held_out\)"):
        own_images(ready, replace(evaluation, on="held_out >= 4"))
    ready.problem = replace(problem, malicious=SimpleNamespace(numbers=(0,)))
    assert [*own_images(ready, evaluation)] == [1]


def test_a_client_that_never_trains_has_the_mean_of_the_others_statistics() -> None:
    first = {"mean": torch.zeros(2), "count": torch.tensor(4)}
    found = mean_of_clients({2: {"mean": torch.tensor([1.0, 2.0]), "count": torch.tensor(3)}, 0: first})
    assert found["mean"].tolist() == [0.5, 1.0] and found["count"].tolist() == 3 and found["count"].dtype == torch.int64


# --- a suite ------------------------------------------------------------------------------------------------------


def test_an_evaluation_on_test_images_keeps_its_name_and_another_has_its_own() -> None:
    one = Evaluation("pgd", {"name": "fgsm", "eps": "8/255"}, 10, 4)
    others = [replace(one, on=on) for on in ("held_out", "writers", "held_out >= 3")]
    assert len({one.id, *(other.id for other in others)}) == 4
    for other in others:
        settings = {**other.attack, "on": other.on}
        assert asked.evaluation(other.stage(3), settings, {"n": 10, "batch": 4}) == other
        assert asked.is_another(other.stage(3), other.attack, 40, 4, {"n": 10, "batch": 4})
        assert not asked.is_another(other.stage(3), settings, 40, 4, {"n": 10, "batch": 4})


FEDBN = "algorithm: {name: fedbn, rounds: 2, local: *local, aggregator: samples}"
HELD = "client_holdout: 0.3"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (HELD, "client_holdout: 0",
         "evaluate: own_natural: on: clients needs images that clients hold out: set client_holdout"),
        ("unseen: 1", "unseen: 4", "unseen: 4 of 4 clients: at least one must be unseen, and one train"),
        (FEDBN, "algorithm: {name: local_only, rounds: 2, local: *local}",
         "local_only keeps a model for each client, and its entry does not say which one"),
        ("on: {clients: [own_natural, own_fgsm]}", "on: client",
         "expected test, clients, or {clients: [names of attacks]}, got 'client'"),
        ("own_fgsm]}", "own_fgsm], images: held_out}", "images stands in evaluate, beside on"),
        ("[own_natural, own_fgsm]}", "[own_pgd]}", "no attack is named 'own_pgd'"),
        ("unseen: 1", "transfer: {moved: {attack: own_fgsm, axis: method}}\n  unseen: 1",
         "'own_fgsm' is on the clients' own images: a transfer needs"),
        (HELD, f"{HELD}\n  malicious: {{clients: '3', attack: sign_flip}}", "no client 3: the 3 clients count from 0"),
    ],
    ids=["nothing held out", "all unseen", "local only", "on client", "images", "attack", "transfer", "malicious"],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_runs(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(SpecError) as raised:
        suite_of(tmp_path, SUITE.replace(old, new)).plan()
    assert said in str(raised.value)


def test_images_whose_writers_nobody_knows_are_refused(tmp_path: Path) -> None:
    text = SUITE.replace("data: digits\n", "data: fashion_mnist\n").replace("least: 3", "least: 3\n  images: writers")
    with pytest.raises(SpecError, match="images: writers: nobody knows who wrote the images of fashion_mnist"):
        suite_of(tmp_path, text).plan()


def test_a_plan_counts_the_images_of_every_client_and_who_trains(tmp_path: Path) -> None:
    plan = suite_of(tmp_path).plan()
    cell = plan.cells[0]
    natural, own_natural, own_fgsm = cell.evaluations
    images = 4 * 18  # 240 images, 0.3 of them held out
    assert cost.evaluation(cell.spec, [own_natural], 1) == cost.Work(forward=images, backward=0, disk=images / 8)
    assert cost.evaluation(cell.spec, [replace(own_natural, n=5)], 2) == cost.Work(forward=2 * 20, disk=20 / 8)
    both = cost.evaluation(cell.spec, [natural, own_fgsm], 1)
    assert both is not None and (both.forward, both.backward) == (60 + 2 * images, images)
    bn = next(cell for cell in plan.cells if cell.key["method"] == "FedBN")
    assert cost.deploys(bn.spec) == 3 and cell.spec["unseen"] == 1


def test_rows_on_own_images_are_another_leaderboard(tmp_path: Path) -> None:
    suite = suite_of(tmp_path)
    plan = suite.plan()
    other = replace(plan, cells=[replace(cell, evaluations=tuple(replace(one, on="") for one in cell.evaluations))
                                 for cell in plan.cells])  # fmt: skip
    assert len(tasks([(suite, plan)])) == 1 and len(tasks([(suite, plan), (suite, other)])) == 2


# --- run, killed and resumed --------------------------------------------------------------------------------------


def place(folder: Path) -> Machine:
    folder.mkdir(exist_ok=True)
    return Machine(db=str(folder / "r.db"), files=str(folder / "files"), data=str(folder / "data"), recovery=Recovery())


def dies(job: Any, machine: Machine, stage: str, call: int) -> None:
    """Work until a stage commits for the `call`-th time, and die there."""
    commit, calls = Store.commit, 0

    def deadly(store: Store, run: int, **given: Any) -> None:
        nonlocal calls
        commit(store, run, **given)
        of_stage = any(row.run == run and row.stage.startswith(stage) for row in store.stages([job.cell]).values())
        calls += of_stage
        if of_stage and calls == call:
            os.kill(os.getpid(), signal.SIGKILL)

    Store.commit = deadly  # type: ignore[method-assign]
    with Store.open(machine.db, create=True) as store:
        work(job, machine, store)
    os._exit(1)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[files.Suite, Machine]:
    folder = tmp_path_factory.mktemp("own")
    suite = suite_of(folder)
    with Store.open(place(folder).db, create=True) as store:
        for job in jobs_of(suite.plan()):
            assert work(job, place(folder), store) == "done"
    return suite, place(folder)


def test_outcomes_are_those_of_clients_one_after_the_other(measured) -> None:
    """They were all False; with an unseen client of as many images, they passed for those of several models."""
    suite, machine = measured
    rights = fatbench.outcomes(suite, "own_fgsm", seeds=1, db=str(machine.db))
    assert rights.index.names == ["method", "seed"]
    rows = fatbench.results(suite, clients=True, db=str(machine.db))
    rows = rows[(rows["seed"] == 1) & rows["stage"].str.startswith("own_fgsm") & (rows["client"] >= 0)]
    for (method, _), right in zip(rights.index, rights.to_numpy(), strict=True):
        of_method = rows[(rows["method"] == method) & rows["metric"].isin(["own_fgsm", "unseen_accuracy"])]
        of_method = of_method.sort_values("client")
        ends = of_method["n"].cumsum().tolist()
        assert len(right) == ends[-1] and right.any()
        shares = [part.mean() for part in numpy.split(right, ends[:-1])]
        assert shares == pytest.approx(of_method["value"].tolist())
    with pytest.raises(SpecError, match="'own_fgsm' is on clients' own images, which differ between these cells"):
        fatbench.outcomes(suite, "own_fgsm", db=str(machine.db))


@pytest.mark.parametrize(("stage", "call"), [("own_natural", 1), ("own_fgsm", 4)])
def test_killed_in_an_evaluation_the_same_comes_out(measured, tmp_path: Path, stage: str, call: int) -> None:
    suite, whole = measured
    job = next(job for job in jobs_of(suite.plan()) if job.spec["algorithm"]["name"] == "fedbn")
    here = place(tmp_path)
    process = fork_server().Process(target=dies, args=(job, here, stage, call))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    with Store.open(here.db) as store:
        row = next(row for row in store.stages([job.cell]).values() if row.stage.startswith(stage))
        assert (row.status, 0 < row.round < row.total) == ("running", True)
        assert work(job, here, store) == "done"
    assert numbers(here, job) == numbers(whole, job)
    assert kept(here, job) == kept(whole, job)


def kept(machine: Machine, job: Any) -> list[Any]:
    with Store.open(machine.db) as store:
        rows = sorted(store.stages([job.cell]).values(), key=lambda row: row.stage)
        return [[row.record.get(key) for key in ("clients", "images", "seen")] for row in rows] + [
            [bit for _, n, data in store.outcomes(job.cell, row.stage) for bit in unpacked(data, n).tolist()]
            for row in rows
        ]


def test_numbers_of_clients_their_mean_and_those_that_never_trained(measured) -> None:
    suite, machine = measured
    for cell in suite.plan().cells:
        with Store.open(machine.db) as store:
            (row,) = [one for one in store.stages([cell.id]).values() if one.stage.startswith("own_fgsm")]
            rows = store.measurements([cell.id], stages=[row.stage])
            outcomes = store.outcomes(cell.id, row.stage)
        found, clients = {(r["metric"], r["client"]): (r["value"], r["n"]) for r in rows}, row.record["clients"]
        values, images = zip(*(found["own_fgsm", k] for k, _ in clients if k < 3), strict=True)
        assert found["own_fgsm", -1] == (pytest.approx(sum(values) / len(values)), sum(images))
        assert [[k, found["own_fgsm" if k < 3 else "unseen_accuracy", k][1]] for k, _ in clients] == clients
        assert sum(n for _, n, _ in outcomes) == sum(n for _, n in clients)


def test_a_test_between_methods_takes_clients_as_units(measured) -> None:
    suite, machine = measured
    plan = suite.plan()
    with Store.open(machine.db) as store:
        numbers_of = measured_numbers(store, {cell.id for cell in plan.cells}, "last").__getitem__
        (gain,) = declared_by(suite.tests, plan, numbers_of)
    assert (gain.unit, gain.over, gain.images) == (CLIENT, "seeds and clients", ())
    assert gain.test is not None and gain.test.image_variance == 0  # each seed deals anew


def test_a_figure_ranks_the_clients_of_each_seed(measured, tmp_path: Path) -> None:
    _, machine = measured
    kind = "figures: [{id: c, title: C, kind: clients, lines: [method], series: {FGSM: 'clients:own_fgsm[*]'}}]\n"
    drawn = suite_of(tmp_path, SUITE + kind)
    with Store.open(machine.db) as store:
        (plot,) = series.drawn_from(drawn, drawn.plan(), store, drawn.figures)
        rows = store.measurements()
    assert [line.key for line in plot.lines] == [{"method": "FedAvg"}, {"method": "FedBN"}]
    for line in plot.lines:
        assert [point.round for point in line.points] == [*range(1, len(line.points) + 1)]
        for seed, cell in zip((1, 2), line.cells, strict=True):
            own = [
                row["value"] for row in rows
                if row["cell"] == cell and row["client"] >= 0 and row["stage"].startswith("own_fgsm")
                and row["metric"] in ("own_fgsm", "unseen_accuracy")
            ]  # fmt: skip
            assert [p.values[p.seeds.index(seed)] for p in line.points if seed in p.seeds] == sorted(own)
        assert not line.partial(line.points[:1])
    uneven = len({len(point.seeds) for line in plot.lines for point in line.points}) > 1
    assert "incomplete" not in dict(plot.notes) and ("places" in dict(plot.notes)) == uneven
    with pytest.raises(SpecError, match=r"write 'clients:own_fgsm\[\*\]', not 'own_fgsm'"):
        suite_of(tmp_path, SUITE + kind.replace("clients:own_fgsm[*]", "own_fgsm"))


def test_every_client_is_judged_as_it_would_be_alone(measured) -> None:
    """Bit for bit: its own model, its own images, and a stream of its own."""
    suite, machine = measured
    cell = next(cell for cell in suite.plan().cells if cell.key["method"] == "FedBN")
    evaluation = next(one for one in cell.evaluations if one.label == "own_fgsm")
    ready = setup(Runtime(Path(machine.data), torch.device("cpu")), **calls.bind_cell(cell.spec, Path(machine.data)))
    with Store.open(machine.db) as store:
        row = store.stages([cell.id])[cell.id, evaluation.stage(2)]
        stored = [bit for _, n, data in store.outcomes(cell.id, row.stage) for bit in unpacked(data, n).tolist()]
    model, own, _ = checkpoints.load_model(Path(machine.files) / cell.id / checkpoints.model_file(2), "cpu")
    assert set(own) == {0, 1, 2} and row.record["clients"][-1][0] == 3
    attack, expected = calls.build("Attack", evaluation.attack), []
    for k, n in row.record["clients"]:
        of_client = {**model, **(own[k] if k in own else mean_of_clients(own))}
        images, labels = ready.problem.images[ready.held[k]], ready.problem.labels[ready.held[k]]
        key = ("evaluate", evaluation.id, 2, k)
        correct, _ = accuracy(ready.problem, of_client, images, labels, attack, key, batch=evaluation.batch)
        assert len(correct) == n
        expected += correct.tolist()
    assert stored == expected


def test_clients_are_judged_on_the_test_images_of_their_writers(tmp_path: Path) -> None:
    """Three clients of one writer each: as many images as the writer has in the test set, and the mean over clients."""
    text = SUITE
    for old, new in (
        ("  client_holdout: 0.3\n", ""), ("{name: dirichlet, clients: 4, alpha: 0.5}", "by_writer"),
        ("unseen: 1", "images: writers"), ("unseen:own_fgsm", "pooled:own_fgsm"), ("seeds: [1, 2]", "seeds: [1]"),
    ):  # fmt: skip
        text = text.replace(old, new)
    suite, machine = suite_of(tmp_path, text), place(tmp_path)
    with Store.open(machine.db, create=True) as store:
        for job in jobs_of(suite.plan()):
            assert work(job, machine, store) == "done"
    counts = numpy.unique(digits(tmp_path).test_writers[:60], return_counts=True)[1].tolist()
    rows = fatbench.results(suite, clients=True, db=machine.db)
    rows = rows[(rows["method"] == "FedAvg") & (rows["metric"] == "own_fgsm")].set_index("client")
    alone = rows[rows.index >= 0]
    assert alone.sort_index()["n"].tolist() == counts == [20, 30, 10]
    table = fatbench.table(suite, "own", db=machine.db)
    frame = table.frame().set_index(["method", "heading"])
    assert frame["mean"]["FedAvg", "mean"] == pytest.approx(alone["value"].mean())
    assert "fgsm(eps=25/255, on=each client's writers' test images, where there are 3)" in table.markdown()
