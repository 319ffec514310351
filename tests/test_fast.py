"""Clients trained as one program: what each gets is what the readable loop gives it alone, or it is not stacked."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import members
import pytest
import torch
from algorithm_runs import nested
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import counters
from fatbench import models
from fatbench.cli.watch import Watch
from fatbench.engine import local as local_module
from fatbench.engine import randomness as rng
from fatbench.engine.cohort import train_cohort
from fatbench.engine.fast import clients as fast
from fatbench.engine.fast.channels import ChannelStack
from fatbench.engine.fast.draws import Streams, clients_of, normal, per_client, subset, uniform
from fatbench.engine.local import Client, LocalTraining
from fatbench.engine.rounds import Problem, Round, State, Update
from fatbench.errors import SpecError
from fatbench.methods import aggregators, attacks, objectives
from fatbench.methods import augmentations as augment
from fatbench.methods.algorithms import ALGORITHMS
from fatbench.runner import checkpoints, worker
from fatbench.runner import start as run
from fatbench.runner.jobs import Machine
from fatbench.runner.run_options import RunOptions
from fatbench.store.stages import Store
from fatbench.suite import files

CPU = torch.device("cpu")
SHARDS = (7, 6, 3, 7, 4)  # in batches of 4: 4 and 3, 4 and 2, 3, 4 and 3, 4
SIZES = {"leaf_cnn": (3, 32, 32), "efficientnet_lite0": (3, 64, 64), "bare_vit": (3, 12, 12)}
TINY = {"patch": 4, "dim": 16, "depth": 1, "heads": 2, "head": "cls_vis", "d1": 6, "d2": 5}
SETTINGS = {
    "nin": {"width": 6, "init": "he"},
    "leaf_cnn": {},
    "efficientnet_lite0": {},
    "vit": TINY,
    "bare_vit": {"patch": 4, "dim": 64, "depth": 1, "heads": 2},
    "tnt": {**TINY, "inner": 8},
    "t2t": {**TINY, "token_dim": 8},
    "whole_vit": {"width": 4, "dim": 16, "depth": 1, "heads": 2},
    "edge_vit": {"width": 4, "dim": 16, "depth": 1, "heads": 2},
    "whole_edge": {"width": 4},
    "whole_resnet": {"width": 4, "planes": 4, "blocks": 1},
    "edge_resnet8": {"width": 4, "planes": 4, "blocks": 1},
    "linear": {},
    "constant": {},
}
LONG = {"efficientnet_lite0": pytest.mark.nightly}  # takes half a minute
TRAINED_WHOLE = [model for model in models.MODELS if not model.startswith("edge_")]  # those are FedGKT's and FedVKD's


OTHERS = [name for name in objectives.OBJECTIVES if name != "mart"]


def objective(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    inner = {"eps": 8 / 255, "step": 4 / 255, "steps": 2}
    if name == "trades":
        return functools.partial(objectives.trades, attack=functools.partial(attacks.pgd_kl, **inner))
    attack = functools.partial(attacks.pgd, **inner, start="gaussian" if name == "mart" else "uniform")
    return members.member("Objective", name, attack=attack)


def network(model: str, seed: int = 3) -> nn.Module:
    with rng.forked(seed, "model"):
        if model == "dual_cnn":
            return models.MODELS["small_cnn"]((3, 8, 8), 10, width=4, norm="dual")
        return models.MODELS[model.removeprefix("bare_")](
            SIZES.get(model, (3, 8, 8)), 10, **SETTINGS.get(model, {"width": 4})
        )


def problem(model: str | nn.Module, path: str, shards: tuple[int, ...] = SHARDS, seed: int = 3) -> Problem:
    shape = SIZES.get(model, (3, 8, 8)) if isinstance(model, str) else (3, 8, 8)
    n = sum(shards)
    images = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=rng.generator(seed, "images"))
    labels = torch.randint(0, 10, (n,), generator=rng.generator(seed, "labels"))
    parts = list(torch.randperm(n, generator=rng.generator(seed, "deal")).split(shards))
    on = network(model, seed) if isinstance(model, str) else model
    return Problem(on, images, labels, parts, 10, seed, CPU, "fp32", path)


def local(name: str = "at", **changes: object) -> LocalTraining:
    settings = {"epochs": 1, "batch": 4, "lr": 0.02, "momentum": 0.9, "weight_decay": 1e-3, "clip": None}
    return LocalTraining(**{**settings, **changes}, objective=objective(name))


def state_of(on: Problem) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in on.model.state_dict().items()}


def train(
    on: Problem, how: LocalTraining, cohort: tuple[int, ...] = (3, 1, 0, 2, 4), **settings: object
) -> list[Update]:
    return train_cohort(on, state_of(on), list(cohort), 1, how, **settings)


def agree(ours: list[Update], theirs: list[Update]) -> None:
    """In float64, to rounding; counts exactly."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a.client, a.n) == (b.client, b.n)
        for name in ("steps", "momentum_steps", "batches", "accuracy"):
            assert getattr(a.stats, name) == getattr(b.stats, name), name
        for name in ("loss", "loss_released", "broadcast_loss"):
            if getattr(b.stats, name) is not None:
                assert getattr(a.stats, name) == pytest.approx(getattr(b.stats, name), rel=1e-9), name
        assert list(a.model) == list(b.model)
        for name in a.model:
            torch.testing.assert_close(a.model[name], b.model[name], rtol=1e-8, atol=1e-10, msg=name)


def same(ours: list[Update], theirs: list[Update]) -> None:
    """Bit for bit."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.stats == b.stats
        assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images, and so all computing, in float64: the sign of a gradient makes a whole step of a rounding error."""
    pixels = local_module.pixels
    for name, module in list(sys.modules.items()):
        if name.startswith("fatbench.") and getattr(module, "pixels", None) is pixels:
            monkeypatch.setattr(module, "pixels", lambda problem, images: pixels(problem, images).double())


# --- the same numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(pytest.param(model, "mart", marks=LONG.get(model, ())) for model in TRAINED_WHOLE),
        *(("nin", name) for name in OTHERS),
        ("small_cnn", "trades"),
    ],
)
def test_clients_on_the_fast_path_are_those_of_the_loop(model: str, name: str, double: None) -> None:
    """Every model that is trained whole, with batch norm and dropout, and every objective; clients of unequal size."""
    results = []
    for path in ("reference", "fast"):
        on = problem(model, path)
        on.model.double()
        results.append(train(on, local(name)))
    agree(*results)
    assert [u.stats.stack for u in results[1]] == [5 if members.stacks(name) else 1] * 5


@pytest.mark.parametrize(("name", "stack"), [("at", 5), ("awp_at", 1)])
def test_several_rounds_at_a_high_rate_differ_by_rounding_alone(name: str, stack: int, double: None) -> None:
    """In float32 two paths have other weights from the second round on: where a gradient is nearly zero, rounding
    decides the sign by which PGD moves a pixel. In float64 they agree after four rounds at lr 0.1.
    """
    ends = []
    for path in ("reference", "loop", "fast"):
        on = problem("small_cnn", path)
        on.model.double()
        aggregator = aggregators.AGGREGATORS["samples"]
        how = nested(
            rounds=4, objective=objective(name), epochs=1, batch=4, lr=0.1, momentum=0.9, aggregator=aggregator
        )
        *_, last = ALGORITHMS["fedavg"](on, State(0, state_of(on)), **how)
        ends.append(last)
    assert [u.stats.stack for u in ends[2].updates] == [stack] * 5
    for other in ends[1:]:
        torch.testing.assert_close(other.state.model, ends[0].state.model, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("model", "proximal"), [("small_cnn", "squared"), ("vit", "norm_per_tensor")])
def test_all_that_a_algorithm_asks_of_local_training(model: str, proximal: str, double: None) -> None:
    """Epochs, clipping, proximal terms, shifts of gradients, weights and buffers, the loss of theta^t, augmentation."""
    results = []
    for path in ("reference", "fast"):
        on = replace(problem(model, path), augment=functools.partial(augment.crop_flip, padding=1), size=12)
        on = replace(on, model=models.MODELS[model]((3, 12, 12), 10, **SETTINGS.get(model, {"width": 4})))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            on.model.load_state_dict({k: torch.rand(v.shape).to(v.dtype) for k, v in on.model.state_dict().items()})
        on.model.double()
        floats = {name: value for name, value in on.model.state_dict().items() if value.is_floating_point()}
        weights = {k: {name: 1e-3 * (k + 1) * torch.ones_like(v) for name, v in floats.items()} for k in range(5)}
        pull = functools.partial(objectives.PROXIMALS[proximal], mu=0.1)
        how = replace(local("trades", epochs=2, clip=0.5), proximal=pull)
        results.append(
            train(on, how, gradient_shift=weights, weight_shift=weights, aggregator=aggregators.AGGREGATORS["afl"])
        )
    agree(*results)
    assert results[1][0].stats.stack == 5 and results[1][0].stats.broadcast_loss is not None


@pytest.mark.parametrize("model", ["nin", "bare_vit", "vit"])
def test_in_bf16_weights_stay_in_fp32_and_the_loss_is_near(model: str) -> None:
    """By channels and by vmap: to what bf16 resolves, as on the loop path in bf16."""
    exact, low = (train(replace(problem(model, p), precision="bf16"), local("standard")) for p in ("loop", "fast"))
    for a, b in zip(exact, low, strict=True):
        assert not {value.dtype for value in b.model.values()} - {torch.float32, torch.int64}  # of batches, a count
        assert a.stats.loss == pytest.approx(b.stats.loss, rel=0.01) and b.stats.stack == 5


def test_the_same_bytes_again_and_the_global_generators_left_alone() -> None:
    before = torch.get_rng_state()
    first = train(problem("nin", "fast"), local())
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    same(first, train(problem("nin", "fast"), local()))


def test_a_step_of_five_clients_is_not_much_more_to_launch_than_one_of_one() -> None:
    """NIN, PGD-10: each of the loop's five clients launches what the stack launches twice at most for all of them."""
    pgd = functools.partial(attacks.pgd, eps=8 / 255, step=2 / 255, steps=10)
    at = functools.partial(objectives.at, attack=pgd)
    alone = counters.per_batch(counters.cohort_batches(problem("nin", "loop", (12,)), at, 4))
    five = counters.per_batch(counters.program_batches(problem("nin", "fast", (12,) * 5), at, 4))
    assert five[1] < 1.5 * alone[1] and five[2] == 0


# --- every algorithm -----------------------------------------------------------------------------------------------

TOGETHER = {"batch": 4, "lr": 0.05, "aggregator": aggregators.AGGREGATORS["uniform"], "epochs": 2, "momentum": 0.9,
            "participation": 0.8}  # fmt: skip
NETWORKS = (
    "nin",
    "small_cnn",
    "dual_cnn",
    "edge_resnet8",
    "edge_vit",
    "bare_vit",
)  # an algorithm gets the first that it takes
MIXED = {"participation": 1.0, "adversarial": 3}
MORE: dict[str, tuple[str, dict[str, object]]] = {  # another network, and settings that ask for more than `Example:`
    "fedavg": ("nin", {"aggregator": functools.partial(aggregators.AGGREGATORS["q_ffl"], q=1.0)}),
    "fedavg_validated": ("nin", {"participation": 1.0}),
    "scaffold_sfat": ("small_cnn", {"buffers": True}),
    "fedavg_mixed": ("nin", MIXED),
    "fltrust": ("small_cnn", {"root": 6}),
    "fedrbn": ("dual_cnn", {**MIXED, "objective": objective("dual_at")}),
    # At its own rate Adam makes whole steps of the rounding noise of gradients that are zero.
    "fedaux": ("small_cnn", {"privacy": "none", "distillation_lr": 1e-7}),
    "gradient_inversion": ("bare_vit", {"candidates": 10, "objective": objective("standard")}),
}
COHORT = [name for name, algorithm in ALGORITHMS.items() if "train_cohort" in algorithm.function.__globals__]
ALONE = [name for name in ALGORITHMS if name not in COHORT]  # gradients alone, or training of their own


def rounds(name: str, path: str, count: int, *, double: bool) -> list[Round]:
    """An algorithm with five clients of unequal size, on the first network that it takes."""
    networks, more = ([MORE[name][0]], MORE[name][1]) if name in MORE else (NETWORKS, {})
    example = members.settings("Algorithm", name)
    rest = {key: value for key, value in TOGETHER.items() if key not in example}
    flat = {"rounds": count, "objective": objective("at"), **rest, **more}
    asks_local = {"local": nested(**{**TOGETHER, **flat})["local"]} if "local" in example else {}
    box = members.member("Algorithm", name, **flat, **asks_local)
    refused: list[Exception] = []
    for model in networks:
        on = problem(model, path, (7, 4, 7, 3, 6))
        on = replace(on, auxiliary=on.images.flip(3), held_out=(on.images, on.labels))
        if double:
            on.model.double()
        if name == "centralized":
            on = replace(on, shards=[torch.arange(27)])
        try:
            return list(box(on, State(0, state_of(on))))
        except (ValueError, SpecError) as error:  # a network without the parts that it needs
            refused.append(error)
    raise refused[0]


def programs(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    """Its rounds; on the fast path all clients of a cohort with the same settings have trained as one program."""

    def watched(on: Problem, theta: object, cohort: Sequence[int], t: int, how: LocalTraining, **more: Any) -> object:
        updates = train_cohort(on, theta, cohort, t, how, **more)
        settings = {k: id((more.get("locals") or {}).get(k, how)) for k in cohort}
        together = Counter(settings.values())
        assert [u.stats.stack for u in updates] == [together[settings[u.client]] ** (path == "fast") for u in updates]
        return updates

    monkeypatch.setitem(ALGORITHMS[name].function.__globals__, "train_cohort", watched)
    return rounds(name, path, 2, double=True)


@pytest.mark.parametrize("name", COHORT)
def test_every_algorithm_gives_the_same_on_every_path(name: str, double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, *others = (programs(name, path, monkeypatch) for path in ("reference", "loop", "fast"))
    for other in others:
        for a, b in zip(reference, other, strict=True):
            assert [u.client for u in a.updates] == [u.client for u in b.updates]
            for part in ("model", "server", "clients"):  # a server's arithmetic may be in float32
                torch.testing.assert_close(getattr(a.state, part), getattr(b.state, part), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALONE)
def test_a_algorithm_without_a_cohort_to_stack_is_as_on_the_loop(name: str) -> None:
    loop, other = (rounds(name, path, 1, double=False) for path in ("loop", "fast"))
    for a, b in zip(loop, other, strict=True):
        assert all(torch.equal(a.state.model[key], b.state.model[key]) for key in a.state.model)
        assert a.metrics == b.metrics and [u.stats for u in a.updates] == [u.stats for u in b.updates]


def test_a_run_that_was_stopped_ends_with_the_same_bytes(tmp_path: Path) -> None:
    on = problem("nin", "fast", (7, 4, 7, 3, 6))
    start = state_of(on)
    box = functools.partial(ALGORITHMS["scaffold"], **nested(rounds=3, objective=objective("at"), **TOGETHER))
    straight = list(box(on, State(0, start)))
    checkpoints.save_state(tmp_path / "state", straight[0].state)
    for weight in on.model.parameters():
        nn.init.normal_(weight)
    again = list(box(replace(on, model=network("nin", 8)), checkpoints.load_state(tmp_path / "state", "cpu")))
    for a, b in zip(straight[1:], again, strict=True):
        assert [u.stats for u in a.updates] == [u.stats for u in b.updates]
        assert all(torch.equal(a.state.model[key], b.state.model[key]) for key in a.state.model)


# --- what fits, and what cannot be stacked ------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "stacks"), [(5, [5]), (4, [3, 2]), (2, [2, 2, 1]), (1, []), (0, [])])
def test_no_stack_is_larger_than_what_fits(clients: int, stacks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    on = problem("nin", "fast")
    one_by_one = train(problem("nin", "loop"), local("standard"))
    updates = 5 * sum(value.numel() * value.element_size() for value in on.model.state_dict().values())
    monkeypatch.setattr(fast, "_bytes_of_one", lambda *_: 1000)
    monkeypatch.setattr(fast, "_free", lambda _: updates + 1001 * clients / fast.FRACTION)
    seen = []
    real = fast.train
    monkeypatch.setattr(fast, "train", lambda clients, *a, **k: seen.append(clients) or real(clients, *a, **k))
    got = train(on, local("standard"))
    assert [len(clients) for clients in seen if len(clients) > 1] == [size for size in stacks if size > 1]
    assert [u.client for u in got] == [u.client for u in one_by_one]
    for a, b in zip(got, one_by_one, strict=True):
        for name in a.model:
            torch.testing.assert_close(a.model[name], b.model[name], rtol=1e-4, atol=1e-6)
    if not stacks:
        same(got, one_by_one)


def test_what_a_client_takes_is_counted_on_a_cpu_and_more_for_more_images(monkeypatch: pytest.MonkeyPatch) -> None:
    on = problem("nin", "fast")
    clients = [Client(on, state_of(on), k, 0) for k in (0, 2)]
    few, many = (fast._bytes_of_one(clients, local(batch=b)) for b in (1, 4))
    assert few is not None and many is not None and 1.5 * few < many
    assert fast._free(CPU) > 1e6


def plain_mean(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    model.train()
    logits = model(x)
    return nn.functional.cross_entropy(logits, y), logits.argmax(1) == y


def draws_for_all(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    return (x + 0.01 * torch.rand(x.shape, generator=generator)).clamp(0, 1)


class Unstackable(nn.Module):
    """A model of another's making: torch's own dropout, or a look at its numbers."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 10), nn.Dropout(0.5 if what == "dropout" else 0.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "look" and float(x.detach().mean()) > 2:
            return x
        return self.body(x)


class SecondHead(nn.Module):
    """A network with a head that its logits do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
        self.projection = nn.Linear(192, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def second_head() -> nn.Module:
    with rng.forked(3, "heads"):
        return SecondHead().double()


@pytest.mark.parametrize("name", ["standard", "at", "awp_at"])
def test_a_weight_that_the_objective_does_not_use_has_a_zero_gradient(name: str, double: None) -> None:
    """It stays where it was, while the others train; weight decay shrinks it, as it shrinks every weight."""
    start = second_head().state_dict()
    loop, stacked = (train(problem(second_head(), path), local(name, weight_decay=0.0)) for path in ("loop", "fast"))
    agree(stacked, loop)
    bare = train(problem(second_head().body, "loop"), local(name, weight_decay=0.0))
    for update, alone in zip(loop, bare, strict=True):
        assert torch.equal(update.model["projection.weight"], start["projection.weight"])
        assert torch.equal(update.model["body.1.weight"], alone.model["1.weight"])
    shrunk = train(problem(second_head(), "loop"), local(name, weight_decay=0.5))
    assert all(update.model["projection.weight"].norm() < start["projection.weight"].norm() for update in shrunk)


@pytest.mark.parametrize(
    ("model", "training", "reason"),
    [
        ("nin", plain_mean, r"the objective gives a loss of shape \(\), not one per client"),
        (
            "nin",
            functools.partial(objectives.at, attack=draws_for_all),
            "from a generator shared by clients",
        ),
        (Unstackable("dropout"), objectives.standard, "from a generator shared by clients"),
        (Unstackable("look"), objectives.standard, r"vmap"),
    ],
)
def test_what_cannot_be_stacked_trains_one_by_one_and_says_why(
    model: str | nn.Module, training: object, reason: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fast.log, "propagate", True)
    on, how = problem(model, "fast"), replace(local(), objective=training)
    start = state_of(on)
    got = train_cohort(on, start, [0, 1], 1, how)
    said = {record.getMessage() for record in caplog.records}  # a handler may stand at two loggers
    assert len(said) == 1 and "clients are not vectorised: " in caplog.text
    assert re.search(reason, caplog.text)
    same(got, train_cohort(replace(on, path="loop"), start, [0, 1], 1, how))


# Objectives that look across the stack: one client at a time each does what its name says.


def perturbs_layers(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, gamma: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Adversarial weight perturbation: every layer moved along its gradient by gamma times its length."""
    model.train()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    clean = per_client(F.cross_entropy, generator, model(x), y)
    gradients = torch.autograd.grad(clean.sum(), list(weights.values()), allow_unused=True)
    moved = {
        name: weight + gamma * weight.detach().norm() * g / g.norm()
        for (name, weight), g in zip(weights.items(), gradients, strict=True)
        if g is not None
    }
    logits = torch.func.functional_call(model, moved, (x,))
    return per_client(F.cross_entropy, generator, logits, y), logits.argmax(1) == y


def differentiates_its_loss(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    model.train()
    x = x.clone().requires_grad_()
    logits = model(x)
    loss = per_client(F.cross_entropy, generator, logits, y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    penalty = per_client(lambda s: s.square().sum(), generator, slope)
    return loss + 0.1 * penalty, logits.argmax(1) == y


def penalises_the_weights(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    loss, hits = objectives.standard(model, x, y, generator)
    return loss + 0.01 * sum(weight.square().sum() for weight in model.parameters()), hits


def weighs_the_classes(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    model.train()
    logits, weights = model(x), 1 / y.bincount(minlength=10).clamp(min=1)
    loss = per_client(functools.partial(F.cross_entropy, weight=weights), generator, logits, y)
    return loss, logits.argmax(1) == y


@pytest.mark.parametrize(
    ("model", "training", "reason"),
    [
        ("nin", perturbs_layers, "what the objective gives a client depends on the clients stacked with it"),
        ("bare_vit", perturbs_layers, "what the objective gives a stacked client is not what it gives"),
        ("nin", differentiates_its_loss, "grad can be implicitly created only for scalar outputs"),
        ("nin", penalises_the_weights, "what the objective gives a stacked client is not what it gives"),
        ("nin", weighs_the_classes, "what the objective gives a client depends on the clients stacked with it"),
    ],
)
def test_an_objective_that_looks_across_the_stack_trains_one_by_one_and_the_log_says_so(
    model: str, training: object, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast.log, "propagate", True)
    on, how = problem(model, "fast"), replace(local(), objective=training)
    start = state_of(on)
    got = train_cohort(on, start, [0, 1, 2], 1, how)
    said = {record.getMessage() for record in caplog.records}
    assert len(said) == 1 and re.search(f"clients are not vectorised: {reason}", said.pop())
    same(got, train_cohort(replace(on, path="loop"), start, [0, 1, 2], 1, how))


@pytest.mark.parametrize("model", ["nin", "small_cnn", "leaf_cnn", "resnet18", "vit"])
def test_our_objectives_pass_the_check_of_company_in_float32(model: str) -> None:
    on = problem(model, "fast")
    for name in filter(members.stacks, objectives.OBJECTIVES):
        fast._check_company(Client(on, state_of(on), 0, 1), local(name))


# --- by channels or by vmap --------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """Channels that look at each other: side by side, clients would."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).softmax(1).mean((2, 3)))


def test_convolutional_networks_stack_by_channels_and_others_by_vmap() -> None:
    def form(model: nn.Module) -> type[nn.Module]:
        on = problem(model, "fast")
        return fast._form(on, on.model)

    assert {form(network(m)) for m in ("nin", "small_cnn", "resnet18", "mcmahan_cnn", "whole_resnet")} == {ChannelStack}
    assert form(network("vit")) is form(network("whole_vit")) is form(Mixing()) is fast.VmapStack


def test_images_of_one_channel_stack_by_channels_too() -> None:
    """Side by side they are a view of the images, which NIN's first convolution would take for channels innermost."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        grey = models.MODELS["nin"]((1, 8, 8), 10, width=6)
    state = {name: torch.stack([value, value]) for name, value in grey.state_dict().items()}
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    together = ChannelStack(grey, state, [torch.Generator(), torch.Generator()], []).eval()
    torch.testing.assert_close(together(x), grey.eval()(x))


def test_convolutions_of_single_pixels_are_batched_products() -> None:
    """NIN has nine convolutions, six of them 1 x 1; one product for each where they have a bias."""
    nin = network("nin").eval()
    state = {name: torch.stack([value, value]) for name, value in nin.state_dict().items()}
    together = ChannelStack(nin, state, [torch.Generator(), torch.Generator()], []).eval()
    with counters.Counter() as counted, torch.no_grad():
        together(torch.rand(4, 3, 8, 8))
    assert counted.seen["baddbmm"] == 6
    assert counted.seen["convolution"] == 3


def test_what_does_not_stack_by_channels_is_stacked_all_the_same(double: None) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mixing = Mixing().double()
    start = state_of(problem(mixing, "reference"))
    ours, theirs = (train_cohort(problem(mixing, p), start, [0, 1], 0, local()) for p in ("fast", "reference"))
    agree(ours, theirs)
    assert ours[0].stats.stack == 2


# --- batches and draws --------------------------------------------------------------------------------------------


@examples(max_examples=40)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), batch=st.integers(1, 12))
def test_every_client_sees_the_batches_it_would_see_alone(sizes: list[int], batch: int) -> None:
    """Of split(batch), in order; and those who go together have as many images and are neighbours."""
    sizes = sorted(sizes, reverse=True)
    seen: list[list[int]] = [[] for _ in sizes]
    for start, length, i, j in fast.groups(sizes, batch):
        assert i < j
        for at in range(i, j):
            assert sum(seen[at]) == start
            seen[at].append(length)
    assert seen == [[len(part) for part in torch.arange(n).split(batch)] for n in sizes]


def test_draws_are_each_clients_own() -> None:
    def streams() -> list[torch.Generator]:
        return [rng.generator(0, "attack", k) for k in range(3)]

    x, every = torch.zeros(6, 2, 3), Streams(streams())
    for draw in (functools.partial(uniform, low=-1.0, high=2.0), normal):
        alone = torch.cat([draw(x[:2], generator=g) for g in streams()])
        assert torch.equal(draw(x, generator=Streams(streams())), alone)
    chosen = subset(x, 1, every)
    assert [int(i) // 2 for i in chosen] == [0, 1, 2]
    assert [int(i) % 2 for i in chosen] == [int(torch.randperm(2, generator=g)[0]) for g in streams()]
    assert len(clients_of(every)) == 3 and clients_of(every.clients[0]) == (every.clients[0],)


# --- from the command line to the database ------------------------------------------------------------------------

SUITE = """
name: stack
title: Two rounds of three clients on a few digits
seeds: [3]
base:
  data: digits
  train: 60
  test: 20
  partition: {name: shah, clients: 3, skew: 2}
  model: {name: nin, width: 4, init: he}
  algorithm: {name: fedavg, rounds: 2, aggregator: uniform, local: {batch: 16, lr: 0.05, objective: standard}}
evaluate: {n: 20, attacks: {natural: natural}}
presets: {paper: {}}
"""


def test_path_and_stack_are_recorded_with_every_number(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SUITE)
    [job] = run.jobs_of(files.load(str(tmp_path / "s.yaml")).plan())
    found = {}
    for path in ("loop", "fast"):
        machine = Machine(f"{tmp_path}/{path}.db", f"{tmp_path}/{path}", str(tmp_path), path=path)
        with Store.open(machine.db, create=True) as store:
            assert worker.work(job, machine, store) == "done"
            [train] = [row for row in store.runs([job.cell]) if row["stage"] == "train"]
            losses = [n["value"] for n in store.measurements([job.cell]) if n["metric"] == "train_loss"]
        found[path] = (train["path"], train.get("stack"), losses)
    assert found["loop"][:2] == ("loop", None) and found["fast"][:2] == ("fast", 3)
    assert found["loop"][2] == pytest.approx(found["fast"][2], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"path": "refrence"},
            r"--path: no path is named 'refrence' \(did you mean 'reference'\?\)",
        ),
        ({"path": "fast", "microbatch": 4}, "--path fast and --microbatch 4 contradict each other"),
    ],
)
def test_a_path_that_there_is_not_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        run.run([], Watch(""), RunOptions(**settings))  # type: ignore[arg-type]
