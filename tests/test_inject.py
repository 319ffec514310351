"""A function is the same under another name: every member of every table, and the same function called by a new one.

Each pair runs through the engine's own call, from the same seed, and gives the same bytes. Then what a function may ask
for by the names of its parameters: exact numbers for objectives, models that aggregators give, memories that cannot
meet.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import members
import numpy
import pytest
import torch
from algorithm_runs import nested, same
from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.engine.accuracy import accuracy
from fatbench.engine.cohort import train_cohort
from fatbench.engine.experiment import experiment
from fatbench.engine.fast import clients as fast
from fatbench.engine.fast.draws import per_client
from fatbench.engine.gradients import predict
from fatbench.engine.inject import asks, granted
from fatbench.engine.local import LocalTraining
from fatbench.engine.mixing import aggregate
from fatbench.engine.randomness import forked, generator, numpy_generator
from fatbench.engine.rounds import Context, Mixing, Problem, Round, State, Update
from fatbench.engine.setup import Setup
from fatbench.methods.aggregators import AGGREGATORS
from fatbench.methods.algorithms import ALGORITHMS
from fatbench.methods.attacks import ATTACKS
from fatbench.methods.defences import DEFENCES
from fatbench.methods.diagnostics import DIAGNOSTICS
from fatbench.methods.inversions import INVERSIONS
from fatbench.methods.inversions.april import without_block0_norm
from fatbench.methods.objectives import OBJECTIVES, PROXIMALS, standard
from fatbench.methods.partitions import PARTITIONS
from fatbench.models import MODELS
from fatbench.suite import signatures

CPU = torch.device("cpu")
MODEL_SETTINGS = {
    "small_cnn": {"width": 2},
    "vit": {"patch": 4, "dim": 16, "depth": 1, "heads": 2},
    "edge_vit": {"width": 2, "dim": 6, "depth": 1, "heads": 2},
    "edge_resnet8": {"width": 2, "planes": 2, "blocks": 1},
}


def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a plug-in would write: a function of the same parameters and docstring that only calls this one."""
    parameters = inspect.signature(function).parameters.values()
    defaults, heads, calls = {}, [], []
    for p in parameters:
        if p.kind is p.VAR_KEYWORD:
            heads.append(f"**{p.name}")
            calls.append(f"**{p.name}")
            continue
        if p.kind is p.KEYWORD_ONLY and "*" not in heads:
            heads.append("*")
        calls.append(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name)
        if p.default is not p.empty:
            defaults[p.name] = p.default
        heads.append(p.name if p.default is p.empty else f"{p.name}=_defaults['{p.name}']")
    names: dict[str, Any] = {"_member": function, "_defaults": defaults}
    exec(f"def another_name({', '.join(heads)}):\n    return _member({', '.join(calls)})", names)
    names["another_name"].__doc__ = function.__doc__
    return names["another_name"]


PGD = functools.partial(ATTACKS["pgd"], eps=8 / 255, step=4 / 255, steps=2)


def pair(table: dict[str, Callable[..., Any]], kind: str, name: str) -> Iterator[Callable[..., Any]]:
    """The member and the same under another name, with settings that the types of its settings allow."""
    chosen = members.arguments(kind, name)
    if kind == "Partition":
        chosen["clients"] = 3
    for function in (table[name], renamed(table[name])):
        yield functools.partial(function, **chosen)


def problem(model: str | nn.Module = "small_cnn", path: str = "loop", clients: int = 3, each: int = 4) -> Problem:
    """Clients of random images 1 x 12 x 12 in four classes; two of them have as many examples, the third one more."""
    n = clients * each + 1
    images = torch.randint(0, 256, (n, 1, 12, 12), generator=generator(0, "images"), dtype=torch.uint8)
    labels = torch.arange(n) % 4
    if isinstance(model, str):
        with forked(0, "model"):
            model = MODELS[model]((1, 12, 12), 4, **MODEL_SETTINGS[model])
    sizes = [each] * (clients - 1) + [each + 1]
    on = Problem(model, images, labels, list(torch.arange(n).split(sizes)), 4, 0, CPU, path=path)
    start(on)
    return on


@functools.cache
def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def start(on: Problem) -> State:
    """The weights that the model had when it was asked for the first time: training overwrites them."""
    return State(0, _weights(on.model))


def local(**settings: object) -> LocalTraining:
    return LocalTraining(**{"batch": 4, "lr": 0.05, "objective": standard, **settings})  # type: ignore[arg-type]


def equal(a: list[Update], b: list[Update]) -> bool:
    """Bit for bit."""
    pairs = list(zip(a, b, strict=True))
    return all(u.stats == v.stats and same(u.model, v.model) and same(u.extra, v.extra) for u, v in pairs)


# --- asking -------------------------------------------------------------------------------------------------------


def test_a_function_is_given_what_it_names_before_its_settings() -> None:
    def aggregator(updates: object, context: object, losses: object, *, scores: object = None) -> None: ...

    bound = functools.partial(aggregator, scores=1)
    assert asks(aggregator, "losses") and asks(bound, "losses")
    assert not asks(aggregator, "scores")  # a setting, whatever the engine offers under that name
    computed = []
    offers = {name: functools.partial(lambda n: computed.append(n) or n, name) for name in ("losses", "scores", "more")}
    assert granted(bound, offers) == {"losses": "losses"} and computed == ["losses"]


# --- every member under another name ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AGGREGATORS)
def test_every_aggregator(name: str) -> None:
    on = problem()
    theta = start(on).model
    found = []
    for aggregator in pair(AGGREGATORS, "Aggregator", name):
        updates = train_cohort(on, theta, [2, 0, 1], 1, local(), aggregator=aggregator)
        found.append(aggregate(aggregator, updates, Context(1, 3, on, theta, {}, 0.05)))
        assert all((u.stats.broadcast_loss is not None) == asks(aggregator, "broadcast_losses") for u in updates)
    ours, theirs = found
    plain = {"memory": {}, "artifacts": {}, "model": None}
    assert replace(ours, **plain) == replace(theirs, **plain)
    assert same(ours.memory, theirs.memory) and same(ours.artifacts, theirs.artifacts)
    assert same(ours.model or {}, theirs.model or {})


@pytest.mark.parametrize("path", ["loop", "fast"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective(name: str, path: str) -> None:
    on = problem(path=path)
    found = [
        train_cohort(on, start(on).model, [0, 2, 1], 0, local(objective=objective))
        for objective in pair(OBJECTIVES, "Objective", name)
    ]
    assert equal(*found)
    assert {u.stats.stack for u in found[1]} == ({3} if path == "fast" and members.stacks(name) else {1})


@pytest.mark.parametrize("path", ["loop", "fast"])
@pytest.mark.parametrize("name", PROXIMALS)
def test_every_proximal_term(name: str, path: str) -> None:
    on = problem(path=path)
    found = [
        train_cohort(on, start(on).model, [0, 2, 1], 1, local(batch=2, proximal=proximal))
        for proximal in pair(PROXIMALS, "Proximal", name)
    ]
    assert equal(*found)


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack(name: str) -> None:
    """Where a model is judged; AutoAttack, which takes thousands of passes an image, on a model of four numbers."""
    with forked(0, "model"):
        four = nn.Sequential(nn.AvgPool2d(6), nn.Flatten(), nn.Linear(4, 4))
    model = four if name == "autoattack" else "small_cnn"
    on = problem(model)
    found = [
        accuracy(on, start(on).model, on.images[:6], on.labels[:6], attack, ("test",))
        for attack in pair(ATTACKS, "Attack", name)
    ]
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


@pytest.mark.parametrize("path", ["loop", "fast"])
@pytest.mark.parametrize("name", ["fgsm", "fgsm_sfat", "pgd", "pgd_kl", "cw"])
def test_every_gradient_attack_in_training(name: str, path: str) -> None:
    on = problem(path=path)
    found = [
        train_cohort(
            on, start(on).model, [0, 1], 0, local(objective=functools.partial(OBJECTIVES["at"], attack=attack))
        )
        for attack in pair(ATTACKS, "Attack", name)
    ]
    assert equal(*found)
    assert {u.stats.stack for u in found[0]} == ({2} if path == "fast" else {1})


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_partition(name: str) -> None:
    """As `fatbench.engine.splits` calls one: labels, its stream, who wrote which example."""
    labels, writers = numpy.arange(60) % 4, numpy.arange(60) // 15
    ours, theirs = (
        partition(labels, numpy_generator(0, "partition"), writers) for partition in pair(PARTITIONS, "Partition", name)
    )
    assert len(ours) == len(theirs) and all(numpy.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", DEFENCES)
def test_every_defence_in_training(name: str) -> None:
    on = problem("vit")
    found = [
        list(ALGORITHMS["fedsgd"](on, start(on), rounds=1, batch=2, lr=0.1, objective=standard, defence=defence))
        for defence in pair(DEFENCES, "Defence", name)
    ]
    for a, b in zip(*found, strict=True):
        assert equal(a.updates, b.updates) and same(a.state.model, b.state.model)


def watched(defence: Callable[..., Any], inversion: Callable[..., Any]) -> Round:
    on = problem("vit")
    settings = {"rounds": 1, "target_clients": 2, "candidates": 4, "objective": standard, "block0": "bare"}
    (result,) = ALGORITHMS["gradient_inversion"](on, start(on), defence=defence, inversion=inversion, **settings)
    return result


@pytest.mark.parametrize("name", [name for name in DEFENCES if name != "fixed_position"])
def test_every_defence_observed(name: str) -> None:
    """The norm that `gaussian` cuts is that of the whole gradient, under any name: the same PSNR."""
    ours, theirs = (watched(defence, INVERSIONS["patch_ls"]) for defence in pair(DEFENCES, "Defence", name))
    assert ours.metrics == theirs.metrics and same(ours.artifacts, theirs.artifacts)


def test_a_defence_that_names_the_whole_gradient_is_given_it() -> None:
    """And one that names a part only what the inversion reads, with the last bias: three tensors of the network's."""
    seen: dict[str, set[str]] = {}

    def whole(gradient: dict[str, Tensor], at: object) -> tuple[dict[str, Tensor], None]:
        seen["whole"] = set(gradient)
        return gradient, None

    def some(part: dict[str, Tensor], at: object) -> tuple[dict[str, Tensor], None]:
        seen["part"] = set(part)
        return part, None

    for defence in (whole, some):
        watched(defence, INVERSIONS["patch_ls"])
    bare = without_block0_norm(problem("vit").model)
    assert seen["whole"] == {name for name, _ in bare.named_parameters()}
    assert seen["part"] == {"backbone.patch_embed.proj.weight", "backbone.pos_embed", "head.fc.bias"}


@pytest.mark.parametrize("name", INVERSIONS)
def test_every_inversion(name: str) -> None:
    ours, theirs = (watched(DEFENCES["none"], inversion) for inversion in pair(INVERSIONS, "Inversion", name))
    assert ours.metrics == theirs.metrics and same(ours.artifacts, theirs.artifacts)


def test_an_inversion_that_does_not_say_what_it_reads_is_given_everything() -> None:
    ours, theirs = pair(INVERSIONS, "Inversion", "patch_ls")
    theirs.func.__doc__ = None
    assert watched(DEFENCES["none"], theirs).metrics == watched(DEFENCES["none"], ours).metrics


def rounds(on: Problem, algorithm: Callable[..., Any], **settings: Any) -> list[tuple[Round, dict[Any, float]]]:
    """A cell as the engine runs it; its numbers without the seconds that it took."""
    held_out = (on.images[:8].repeat(5, 1, 1, 1), on.labels[:8].repeat(5))
    ready = Setup(on, start(on), held_out, None, [], 4, {})
    none: Any = None
    cell = {"seed": 0, "data": none, "partition": none, "model": none, "algorithm": algorithm, **settings}
    return [
        (result, {(n.metric, n.client): n.value for n in numbers if n.metric != "seconds"})
        for result, numbers in experiment(ready, ready.initial, (1.0, 1.0), **cell)
    ]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm(name: str) -> None:
    models = {"fedsgd": "vit", "gradient_inversion": "vit", "fedgkt": "edge_resnet8", "fedvkd": "edge_vit"}
    on = problem(models.get(name, "small_cnn"))
    if name == "fedaux":
        on = replace(on, auxiliary=on.images.flip(3))
    if name == "centralized":
        on = replace(on, shards=[torch.arange(13)])
    settings = {setting.name for setting in signatures.describe("Algorithm", name).settings}
    how: dict[str, object] = {
        "rounds": 2 if name != "gradient_inversion" else 1,
        "batch": 4,
        "lr": 0.05,
        "objective": standard,
    }
    how |= {"server_epochs": 1, "server_lr": 0.01} if "server" in settings else {}
    how = nested(**how) if "local" in settings else {key: value for key, value in how.items() if key in settings}
    found = []
    for algorithm in pair(ALGORITHMS, "Algorithm", name):
        bound = functools.partial(algorithm.func, **{**how, **algorithm.keywords, "rounds": how["rounds"]})
        found.append(rounds(on, bound, monitor=None if name == "gradient_inversion" else ATTACKS["natural"]))
    for (ours, a), (theirs, b) in zip(*found, strict=True):
        assert a == b
        assert same(ours.state.model, theirs.state.model) and equal(ours.updates, theirs.updates)
        assert same(ours.state.server, theirs.state.server) and same(ours.state.clients, theirs.state.clients)


@pytest.mark.parametrize("name", [name for name in DIAGNOSTICS if name != "boundaries"])  # of the plane
def test_every_diagnostic(name: str) -> None:
    on = problem("vit")
    fedavg = functools.partial(ALGORITHMS["fedavg"], rounds=1, aggregator=AGGREGATORS["samples"], local=local())
    found = [
        rounds(on, fedavg, monitor=PGD, diagnostic=functools.partial(diagnostic.func, **diagnostic.keywords))[0][1]
        for diagnostic in pair(DIAGNOSTICS, "Diagnostic", name)
    ]
    assert found[0] == found[1]
    assert any(metric.startswith(("svcca", "leak")) for metric, _ in found[0])


# --- what an objective may ask for --------------------------------------------------------------------------------


def balanced(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, class_counts: Tensor
) -> tuple[Tensor, Tensor]:
    """CE(f(x) + log n, y) with n_c the client's examples of class c (logit adjustment)."""
    model.train()
    logits = predict(model, x)

    def loss(logits: Tensor, y: Tensor, counts: Tensor) -> Tensor:
        return F.cross_entropy(logits + counts.log(), y)

    each = class_counts.expand(len(x), -1)
    return per_client(loss, generator, logits, y, each), logits.argmax(1) == y


def near_broadcast(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, broadcast: nn.Module
) -> tuple[Tensor, Tensor]:
    """KL(p of theta^t || p): nothing in the first step of a round, without dropout or batch normalisation."""
    model.train()
    logits, before = predict(model, x), predict(broadcast, x).detach()

    def loss(logits: Tensor, before: Tensor) -> Tensor:
        p = before.log_softmax(1)
        return (p.exp() * (p - logits.log_softmax(1))).sum(1).mean()

    return per_client(loss, generator, logits, before), logits.argmax(1) == y


def adjusted_and_near(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, class_counts: Tensor, broadcast: nn.Module
) -> tuple[Tensor, Tensor]:
    """Both; counts plus one, so that a class that a client does not have is possible."""
    adjusted, correct = balanced(model, x, y, generator, class_counts + 1)
    return adjusted + near_broadcast(model, x, y, generator, broadcast)[0], correct


def by_client(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, client: int) -> tuple[Tensor, Tensor]:
    """The loss times one more than the client's number."""
    loss, correct = standard(model, x, y, generator)
    return (client + 1) * loss, correct


class Zeros(nn.Module):
    """Two logits that are a bias, and begin at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 2)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 1, 1) -> (B, 2)."""
        logits: Tensor = self.fc(x.flatten(1))
        return logits


@pytest.mark.parametrize("path", ["reference", "loop", "fast"])
def test_class_counts_are_the_clients_own(path: str) -> None:
    """Client 0 has 90 examples of class 0 and 10 of class 1, client 1 the other way round; all logits are 0. An example
    of the frequent class costs -log 0.9 = 0.10536, one of the other -log 0.1 = 2.30259; the mean over a client's own is
    0.9 * 0.10536 + 0.1 * 2.30259. The gradient by the biases is (0.9, 0.1) less the client's shares, which is nothing.
    """
    labels = torch.cat([torch.zeros(90), torch.ones(10), torch.ones(90), torch.zeros(10)]).long()
    images = torch.zeros(200, 1, 1, 1, dtype=torch.uint8)
    on = Problem(Zeros(), images, labels, list(torch.arange(200).split(100)), 2, 0, CPU, path=path)
    x = torch.zeros(2, 1, 1, 1)
    losses = [
        float(balanced(on.model, x[:1], torch.tensor([c]), generator(0, "n"), torch.tensor([[90.0, 10.0]]))[0].detach())
        for c in (0, 1)
    ]
    assert losses == pytest.approx([0.10536, 2.30259], abs=1e-5)
    updates = train_cohort(on, start(on).model, [1, 0], 0, local(batch=100, objective=balanced))
    for update in updates:
        assert update.stats.loss == pytest.approx(0.9 * 0.10536 + 0.1 * 2.30259, abs=1e-5)
        torch.testing.assert_close(update.model["fc.bias"], torch.zeros(2), atol=1e-6, rtol=0)
    assert {u.stats.stack for u in updates} == ({2} if path == "fast" else {1})


@pytest.mark.parametrize("path", ["reference", "loop", "fast"])
def test_the_broadcast_model_stays_what_it_was(path: str) -> None:
    """One step: the divergence of theta^t from itself is 0 and so is its gradient. With the cross-entropy beside it,
    weights move, and the second step is told the divergence from where the round began."""
    on = problem(nn.Sequential(nn.Flatten(), nn.Linear(144, 4)), path)
    theta = start(on).model
    for update in train_cohort(on, theta, [0, 1], 0, local(objective=near_broadcast)):
        assert update.stats.loss == pytest.approx(0.0, abs=1e-6)
        torch.testing.assert_close(update.model, theta, atol=1e-6, rtol=0)
    one, two = (train_cohort(on, theta, [0, 1], 0, local(objective=adjusted_and_near, epochs=e)) for e in (1, 2))
    alone = train_cohort(on, theta, [0, 1], 0, local(objective=adjusted, epochs=2))
    for first, second, without in zip(one, two, alone, strict=True):
        assert second.stats.loss < first.stats.loss
        assert second.stats.loss > without.stats.loss + 1e-4  # by the divergence


def adjusted(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, class_counts: Tensor
) -> tuple[Tensor, Tensor]:
    return balanced(model, x, y, generator, class_counts + 1)


@pytest.mark.parametrize("model", ["small_cnn", "vit"])
def test_what_is_asked_for_is_the_same_on_the_fast_path(model: str) -> None:
    """By channels and by vmap, clients of unequal size, three steps each; the loss of theta^t too."""
    found = []
    for path in ("loop", "fast"):
        on = problem(model, path, each=9)
        found.append(
            train_cohort(
                on, start(on).model, [2, 0, 1], 1, local(objective=adjusted_and_near), aggregator=AGGREGATORS["afl"]
            )
        )
    assert {u.stats.stack for u in found[1]} == {3}
    for ours, theirs in zip(*found, strict=True):
        assert ours.stats.loss == pytest.approx(theirs.stats.loss, rel=1e-4)
        assert ours.stats.broadcast_loss == pytest.approx(theirs.stats.broadcast_loss, rel=1e-4)
        torch.testing.assert_close(ours.model, theirs.model, rtol=1e-3, atol=1e-5)


def test_a_loss_of_each_client_trains_one_by_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client k's loss counts k + 1 times: a step of rate r is that of rate (k + 1) r. The log says why no stack."""
    monkeypatch.setattr(fast.log, "propagate", True)
    caplog.set_level(logging.INFO, "fatbench")
    on = problem(path="fast")
    theta = start(on).model
    updates = train_cohort(on, theta, [0, 1], 0, local(objective=by_client))
    assert "clients are not vectorised: the objective takes client_number; use --path loop" in caplog.text
    for update in updates:
        assert update.stats.stack == 1
        alone = train_cohort(replace(on, path="loop"), theta, [update.client], 0, local(lr=0.05 * (update.client + 1)))
        assert update.stats.loss == pytest.approx((update.client + 1) * alone[0].stats.loss)
        for name, _ in on.model.named_parameters():
            torch.testing.assert_close(update.model[name], alone[0].model[name], rtol=1e-5, atol=1e-6)


def test_fedsgd_gives_an_objective_what_it_asks_for() -> None:
    on = problem(nn.Sequential(nn.Flatten(), nn.Linear(144, 4)))
    how = {"rounds": 1, "batch": 5, "lr": 0.1, "defence": DEFENCES["none"]}
    (still,) = ALGORITHMS["fedsgd"](on, start(on), objective=near_broadcast, **how)
    torch.testing.assert_close(still.state.model, start(on).model, atol=1e-6, rtol=0)  # every step begins at theta
    plain, scaled = (
        next(iter(ALGORITHMS["fedsgd"](on, start(on), objective=objective, **how))).updates
        for objective in (standard, by_client)
    )
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close((a.client + 1) * a.extra["gradient"]["1.weight"], b.extra["gradient"]["1.weight"])


def test_where_no_model_is_broadcast_an_objective_cannot_ask_for_it() -> None:
    on = problem("edge_resnet8")
    settings = nested(rounds=1, batch=4, lr=0.1, objective=near_broadcast, server_epochs=1, server_lr=0.1)
    with pytest.raises(ValueError, match="needs the broadcast model, and this algorithm does not broadcast one"):
        list(ALGORITHMS["fedgkt"](on, start(on), **settings))
    pull = functools.partial(PROXIMALS["squared"], mu=0.1)
    settings["local"] = replace(settings["local"], objective=standard, proximal=pull)
    with pytest.raises(ValueError, match="local: proximal: it pulls towards the broadcast weights"):
        list(ALGORITHMS["fedgkt"](on, start(on), **settings))


# --- what an aggregator may give
# -----------------------------------------------------------------------------------------


def median(updates: list[Update], context: Context) -> Mixing:
    """The coordinate-wise median of the clients' models."""
    middle = {}
    for name, value in context.broadcast.items():
        stacked = torch.stack([update.model[name] for update in updates])
        middle[name] = stacked.median(0).values if value.is_floating_point() else stacked[0]
    return Mixing([1 / len(updates)] * len(updates), model=middle)


def one_pixel(values: tuple[int, ...]) -> Problem:
    """A weight for every client to pull to its pixel; a step of rate 1 takes it there."""
    images = torch.tensor(values, dtype=torch.uint8).reshape(-1, 1, 1, 1)
    shards = list(torch.arange(len(values)).split(1))
    return Problem(One(), images, torch.zeros(len(values), dtype=torch.int64), shards, 2, 0, CPU, path="reference")


class One(nn.Module):
    """A model that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), 2)


def towards_the_pixel(model: Any, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return 0.5 * (model.w - x.flatten(1)).square().mean(), torch.ones(len(x), dtype=torch.bool)


MEDIAN = {"aggregator": median, "local": LocalTraining(batch=1, lr=1.0, objective=towards_the_pixel)}


@pytest.mark.parametrize(("name", "rate"), [("fedavg", 1.0), ("scaffold", 1.0), ("scaffold", 0.5), ("fedgate", 0.5)])
def test_a_aggregator_may_give_the_next_model_itself(name: str, rate: float) -> None:
    """Clients end at 0.2, 0.4 and 1: the median is 0.4, the mean 0.53. From theta 0 half of the way is 0.2."""
    settings = {"server_lr": rate} if name != "fedavg" else {}
    first, second = ALGORITHMS[name](one_pixel((51, 102, 255)), State(0, {"w": torch.zeros(1)}), rounds=2, **settings,
                                    **MEDIAN)  # fmt: skip
    assert first.state.model["w"].tolist() == pytest.approx([0.4 * rate])
    assert first.mixing.weights == pytest.approx([rate / 3] * 3)
    if name == "fedavg":  # a step of rate 1 forgets where it began
        assert second.state.model["w"].tolist() == pytest.approx([0.4])


def test_fednova_refuses_a_aggregator_that_gives_a_model() -> None:
    with pytest.raises(ValueError, match="fednova: the aggregator gives a model, and FedNova normalises weights"):
        list(ALGORITHMS["fednova"](one_pixel((0, 1, 2)), State(0, {"w": torch.zeros(1)}), rounds=1, **MEDIAN))


def remembers(updates: list[Update], context: Context) -> Mixing:
    """An aggregator that keeps what an algorithm might call its own: "c", and a count of the rounds."""
    before = context.memory.get("c", {"w": torch.zeros(1)})["w"]
    memory = {"c": {"w": before + 100}, "clients": torch.tensor(float(context.round))}
    return Mixing([1 / len(updates)] * len(updates), memory=memory)


@pytest.mark.parametrize("name", ["fedavg", "fedavg_validated", "scaffold", "scaffold_sfat", "fedgate", "fednova"])
def test_a_aggregators_memory_and_a_algorithms_state_cannot_meet(name: str) -> None:
    """Both call something "c"; each goes on with its own, and the model is that of an aggregator that keeps nothing."""
    settings = {"local": MEDIAN["local"], "rounds": 3, **({"validators": 1} if name == "fedavg_validated" else {})}
    settings["local"] = replace(settings["local"], lr=0.25)
    on, theta = one_pixel((51, 102, 255)), State(0, {"w": torch.zeros(1)})
    kept, plain = (
        list(ALGORITHMS[name](on, theta, aggregator=aggregator, **settings))
        for aggregator in (remembers, AGGREGATORS["uniform"])
    )
    for count, (a, b) in enumerate(zip(kept, plain, strict=True), start=1):
        assert same(a.state.model, b.state.model) and same(a.state.clients, b.state.clients)
        assert a.state.server["aggregator"]["c"]["w"].item() == 100 * count
        assert {key for key in a.state.server if key != "aggregator"} == {
            key for key in b.state.server if key != "aggregator"
        }
        for key in b.state.server.keys() - {"aggregator"}:
            assert same(a.state.server[key], b.state.server[key])
    if name == "scaffold":
        assert not math.isclose(float(kept[-1].state.server["c"]["w"]), 300)
