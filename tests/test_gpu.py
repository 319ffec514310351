"""Every member of every table on a GPU that is not there (`pretended`): no mixed devices, no wait inside a step.

Walked, each by being in its table: attacks, objectives, proximal terms, augmentations, defences, aggregators, models,
algorithms, inversions, diagnostics, the monitor and evaluations. A step's waits are told from a round's by their
number: a round of more steps has no more.

Not walked: partitions and data sets, which know no device; the stages of AutoAttack and the classes of torchattacks by
themselves, whose waits are their packages'; how a GPU computes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import members
import pretended
import pytest
import torch
from members import refusals
from pretended import CUDA, MixedDevices, Pretended
from torch import Tensor, nn

from fatbench.engine import measures
from fatbench.engine import randomness as rng
from fatbench.engine.accuracy import accuracy, edge_accuracy, zero_gradients
from fatbench.engine.inject import requested_arguments
from fatbench.engine.local import LocalTraining, offers
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Problem, Round, State, Stats, Update
from fatbench.engine.setup import Setup
from fatbench.errors import FatbenchError
from fatbench.methods import packages
from fatbench.methods.aggregators import AGGREGATORS
from fatbench.methods.algorithms import ALGORITHMS
from fatbench.methods.augmentations import AUGMENTS
from fatbench.methods.defences import DEFENCES, Upload
from fatbench.methods.diagnostics import DIAGNOSTICS
from fatbench.methods.evasion import ATTACKS
from fatbench.methods.inversions import INVERSIONS
from fatbench.methods.objectives import OBJECTIVES, PROXIMALS
from fatbench.models import MODELS
from fatbench.suite import calls, signatures

EPS = 8 / 255
SMALL = {"width": 8, "dim": 16, "depth": 1, "heads": 2, "patch": 4, "blocks": 1, "planes": 2, "token_dim": 8,
         "inner": 4, "inner_heads": 2, "stem": 3}  # fmt: skip


def settings(kind: str, name: str, **more: Any) -> dict[str, Any]:
    """Small settings of a member: its example, and `more` where it has them."""
    signature = signatures.describe(kind, name)
    example = members.arguments(kind, name)
    found: dict[str, Any] = {}
    for setting in signature.settings:
        inner, optional = setting.kind, setting.optional
        if setting.name in more:
            found[setting.name] = more[setting.name]
        elif setting.name.endswith("batch") and setting.annotation == "Count":
            found[setting.name] = 4
        elif setting.name.endswith("epochs") and inner is None:
            found[setting.name] = 1
        elif setting.default is not signatures.REQUIRED or optional:
            continue
        elif inner in signatures.CLASSES:
            found[setting.name] = small_class(inner, **more)
        elif inner is not None or setting.name in example:
            found[setting.name] = example[setting.name]
    return {**found, **{key: value for key, value in example.items() if key not in more}}


def small_class(kind: str, **more: Any) -> Any:
    """An instance of a settings class with small values."""
    module, name = signatures.CLASSES[kind]
    owner = getattr(importlib.import_module(module), name)
    values: dict[str, Any] = {"batch": 4, "lr": 0.01, "epochs": 1, "objective": functools.partial(at, eps=EPS)}
    names = {field.name for field in fields(owner)}
    return owner(**{name: value for name, value in {**values, **more}.items() if name in names})


def at(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, eps: float) -> tuple[Tensor, Tensor]:
    """Adversarial training of one step: draws, and takes a gradient by the images."""
    pgd = functools.partial(ATTACKS["pgd"], eps=eps, step=eps, steps=1)
    return OBJECTIVES["at"](model, x, y, generator, attack=pgd)


def member(kind: str, name: str, **more: Any) -> Any:
    """A member of a table with small settings."""
    return functools.partial(calls.function(signatures.describe(kind, name)), **settings(kind, name, **more))


@pytest.fixture
def gpu() -> Iterator[Pretended]:
    with pretended.gpu() as mode:
        yield mode


def network(name: str = "vit", shape: tuple[int, int, int] = (3, 12, 12), seed: int = 0) -> nn.Module:
    """A small network of the table, on the CPU."""
    known = {s.name for s in signatures.describe("Model", name).settings}
    with rng.forked(seed, "model"):
        return MODELS[name](shape, 10, **{key: value for key, value in SMALL.items() if key in known})


def problem(model: nn.Module, each: int = 8, side: int = 12, clients: int = 2, **changes: Any) -> tuple[Problem, State]:
    """`clients` clients with `each` images, on the GPU."""
    n = each * clients
    images = torch.randint(0, 256, (n, 3, side, side), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    labels = torch.arange(n) % 10
    model = model.to(CUDA)
    shards = [shard.to(CUDA) for shard in torch.arange(n).split(each)]
    on = Problem(model, images.to(CUDA), labels.to(CUDA), shards, 10, 3, CUDA)
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return replace(on, **changes), State(0, start)


def batch(n: int = 4) -> tuple[Tensor, Tensor]:
    x = torch.rand(n, 3, 12, 12, generator=torch.Generator().manual_seed(2)).to(CUDA)
    return x, (torch.arange(n) % 10).to(CUDA)


# --- the pretended GPU itself -------------------------------------------------------------------------------------


CASES = {
    "cat": lambda a, b: torch.cat([a, b]),
    "add": lambda a, b: a + b,
    "add a number of the host": lambda a, b: a + b[0, 0],
    "a number of the device to the host": lambda a, b: b + a[0, 0],
    "where": lambda a, b: torch.where(a > 0, a, b),
    "index by the host": lambda a, b: a[torch.tensor([0])],
    "put": lambda a, b: a.index_put((torch.tensor([0]),), a[0]),
    "copy": lambda a, b: a.clone().copy_(b),
    "product": lambda a, b: a @ b.T,
}


@pytest.mark.parametrize("name", CASES)
def test_which_devices_may_be_mixed_is_what_torch_says(name: str, gpu: Pretended) -> None:
    """As `FakeTensorMode` has it, with the same tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._C._pop_torch_function_stack()
    try:
        with FakeTensorMode():
            a, b = torch.empty(2, 3, device="cuda"), torch.empty(2, 3)
            try:
                CASES[name](a, b)
                theirs = True
            except RuntimeError:
                theirs = False
    finally:
        torch._C._push_on_torch_function_stack(gpu)
    try:
        CASES[name](torch.zeros(2, 3).to(CUDA), torch.zeros(2, 3))
        ours = True
    except MixedDevices:
        ours = False
    assert ours == theirs


def test_what_the_host_waits_for_is_seen(gpu: Pretended) -> None:
    x = torch.zeros(4).to(CUDA)
    free = [lambda: x + 1, lambda: x.sum(), lambda: torch.where(x > 0, x, 1.0), lambda: x.to(torch.float64)]
    waits = [x.sum().item, x.cpu, x.tolist, lambda: bool((x > 0).any()), lambda: float(x[0]), lambda: x[x > 0],
             lambda: x.nonzero(), lambda: torch.tensor([1.0], device=CUDA), lambda: torch.ones(2).to(x),
             lambda: x[torch.tensor([1])]]  # fmt: skip
    for call in free:
        gpu.waits.clear()
        call()
        assert not gpu.waits
    for call in waits:
        gpu.waits.clear()
        call()
        assert sum(gpu.waits.values()) == 1, gpu.waits


def test_a_generator_of_the_host_does_not_draw_for_the_device(gpu: Pretended) -> None:
    x = torch.zeros(4).to(CUDA)
    for call in (lambda g: x.uniform_(generator=g), lambda g: torch.rand(4, device=CUDA, generator=g)):
        call(rng.generator(0, "a", device=CUDA))
        with pytest.raises(MixedDevices, match="a generator on cpu draws for cuda:0"):
            call(rng.generator(0, "a"))


# --- functions of a batch -----------------------------------------------------------------------------------------


# One that is of a data set needs its files.
OF_ANY = [name for name in ATTACKS if "test_images_of_cifar10" not in refusals("Attack", name)]


@pytest.mark.parametrize("name", OF_ANY)
def test_attack(name: str, gpu: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = network("linear" if name == "exact_linear" else "vit").to(CUDA).eval(), batch(2)
    attack, noise = member("Attack", name), rng.generator(0, "attack", device=CUDA)
    foreign = (signatures.describe("Attack", name).entry or {}).get("packages")
    if name == "autoattack":
        members.short_autoattack(monkeypatch, 2, 2)
        monkeypatch.setattr(packages, "_skip_unchanged", lambda ask: pytest.fail("more launches than it saves"))
    gpu.waits.clear()
    assert attack(model, x, y, noise).device == CUDA
    assert foreign or not gpu.waits


@pytest.mark.nightly
def test_autoattack_has_the_same_outcomes_whatever_fits_at_a_time(gpu: Pretended, monkeypatch: Any) -> None:
    members.short_autoattack(monkeypatch, 2, 2)
    model, (x, y) = network("vit").to(CUDA).eval(), batch(9)
    with torch.no_grad():
        y = model(x).argmax(1)  # so that all of them stand at first
    outcomes: list[list[bool]] = []
    physical: list[int] = []
    model.register_forward_pre_hook(lambda module, given: physical.append(len(given[0])))
    attack = member("Attack", "autoattack", eps=0.05)
    for fits in (1, 7, 500):
        monkeypatch.setattr(packages, "part_of", lambda x, model, fits=fits: fits)
        physical.clear()
        x_adv = attack(model, x, y, rng.generator(0, "attack", device=CUDA))
        assert max(physical) <= fits or fits == 500
        with torch.no_grad():
            outcomes.append((model(x_adv).argmax(1) == y).cpu().tolist())
    assert outcomes[0] == outcomes[1] == outcomes[2] and 0 < sum(outcomes[0]) < 9


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective(name: str, gpu: Pretended) -> None:
    model, (x, y) = network().to(CUDA), batch()
    on, _ = problem(network())
    noise = rng.generator(0, "attack", device=CUDA)
    objective = member("Objective", name)
    asked = requested_arguments(objective, offers(on, 0, lambda: model))
    gpu.waits.clear()
    loss, hits = objective(model, x, y, noise, **asked)
    torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    assert hits.device == CUDA
    assert not gpu.waits


@pytest.mark.parametrize("name", PROXIMALS)
def test_proximal(name: str, gpu: Pretended) -> None:
    weights = list(network().to(CUDA).parameters())
    gpu.waits.clear()
    member("Proximal", name)(weights, [w.detach().clone() for w in weights], 1)
    assert not gpu.waits


@pytest.mark.parametrize("name", AUGMENTS)
def test_augmentation(name: str, gpu: Pretended) -> None:
    x, _ = batch()
    gpu.waits.clear()
    assert member("Augment", name)(x, rng.generator(0, "augment", device=CUDA)).device == CUDA
    assert not gpu.waits


# A defence that works on the gradient of each image is run with the inversions.
ON_GRADIENTS = [name for name, defence in DEFENCES.items() if "examples" not in inspect.signature(defence).parameters]


@pytest.mark.parametrize("name", ON_GRADIENTS)
def test_defence(name: str, gpu: Pretended) -> None:
    gradient = {key: p.detach() for key, p in network().to(CUDA).named_parameters()}
    sent, mask = member("Defence", name)(gradient, Upload(0, 0))
    assert {g.device for g in [*sent.values(), *(mask or {}).values()]} == {CUDA}


@pytest.mark.parametrize("name", AGGREGATORS)
def test_aggregator(name: str, gpu: Pretended) -> None:
    on, state = problem(network())
    model = state.model
    near = [{k: v + 0.01 * s if v.is_floating_point() else v for k, v in model.items()} for s in (1, 2, 3)]
    stats = Stats(1.0, 1.0, 0.5, 1, 1.0, 1, broadcast_loss=1.0)
    updates = [Update(k, 8, own, replace(stats, loss=1.0 + k)) for k, own in enumerate(near)]
    on = replace(on, shards=[on.shards[0]] * 3)
    context = Context(1, 3, on, model, {}, 0.1)
    aggregator = member("Aggregator", name)
    for _ in range(2):  # what it remembers is on some device too
        mixing = aggregate(aggregator, updates, context)
        mixed = mix(updates, mixing, model, on.model)
        context = replace(context, round=2, memory=mixing.memory)
    assert {value.device for value in mixed.values()} == {CUDA}


# --- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, gpu: Pretended) -> None:
    """A round of one batch."""
    on, state = problem(network(name, (3, 16, 16)), each=2, side=16)
    if "edge" in calls.call("Model", {"name": name}).parts:
        return  # walked by the algorithms that train it
    local = LocalTraining(batch=2, lr=0.01, objective=OBJECTIVES["standard"])
    samples = AGGREGATORS["samples"]
    (result,) = ALGORITHMS["fedavg"](on, state, rounds=1, participation=1.0, aggregator=samples, local=local)
    assert {value.device for value in result.state.model.values()} == {CUDA}


# --- algorithms, and what looks at them ----------------------------------------------------------------------------


def networks(name: str) -> Iterator[nn.Module]:
    """Those that an algorithm may take: its entry says if it keeps the batch normalisation of a network apart."""
    if {"normalised_network", "two_statistics"} & refusals("Algorithm", name):
        yield from (MODELS["small_cnn"]((3, 12, 12), 10, width=4, norm=norm) for norm in ("one", "dual"))
    else:
        yield from map(network, ("vit", "edge_vit"))


def one_round(name: str, each: int, mode: Pretended, **more: Any) -> tuple[Round, Counter[str]]:
    """The first round of an algorithm whose clients have `each` images in batches of 4; what the host waited for."""
    on_side = torch.randint(0, 256, (2 * each, 3, 12, 12), dtype=torch.uint8).to(CUDA)
    held_out = (on_side[:8], torch.arange(8).to(CUDA) % 10)  # FLTrust trains on some of them
    refused: list[Exception] = []
    for model in networks(name):
        on, state = problem(model, each, auxiliary=on_side, held_out=held_out)
        rounds = ALGORITHMS[name](on, state, **settings("Algorithm", name, batch=4, **more))
        mode.waits.clear()
        try:
            return next(rounds), Counter(mode.waits)
        except (ValueError, FatbenchError) as error:  # a network without the parts that it needs
            refused.append(error)
    raise refused[0]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm(name: str, gpu: Pretended) -> None:
    """A round of four batches makes the host wait no more often than one of two."""
    (_, few), (result, more) = (one_round(name, each, gpu) for each in (8, 16))
    assert {value.device.type for value in result.state.model.values()} <= {"cuda"}
    assert not (more - few), "waits inside a step"


# One may read the block that a manipulation adds to the network.
ALONE = [name for name in INVERSIONS if "imprint_manipulation" not in refusals("Inversion", name)]


@pytest.mark.parametrize("name", ALONE)
def test_inversion(name: str, gpu: Pretended) -> None:
    result, _ = one_round("gradient_inversion", 8, gpu, inversion=member("Inversion", name))
    assert result.artifacts["reconstruction"].device == CUDA


@pytest.mark.parametrize("name", [name for name in INVERSIONS if "steps" in members.settings("Inversion", name)])
def test_a_step_of_an_inversion_waits_for_nothing(name: str, gpu: Pretended) -> None:
    inversion = member("Inversion", name)
    few, more = (
        one_round("gradient_inversion", 8, gpu, inversion=functools.partial(inversion, steps=steps))[1]
        for steps in (1, 3)
    )
    assert not (more - few), "waits inside a step"


@pytest.mark.parametrize("algorithm", ["fedavg", "fedgkt"])  # clients that upload a model, and features
@pytest.mark.parametrize("name", DIAGNOSTICS)
def test_diagnostic(name: str, algorithm: str, gpu: Pretended) -> None:
    said = refusals("Diagnostic", name)
    if "blocks_of_the_model" in said and algorithm == "fedgkt":
        return  # asks for the blocks of a transformer that clients upload
    if "points_in_the_plane" in said:
        return  # takes points in the plane, not images
    model = network("edge_vit" if algorithm == "fedgkt" else "vit")
    on, state = problem(model, 20)
    result = next(ALGORITHMS[algorithm](on, state, **settings("Algorithm", algorithm, batch=20)))
    few = members.settings("Diagnostic", name)
    if "n" in few:
        few["n"] = 40
    if name == "membership":
        few["scores"] = "loss"  # two clients are no shadow models of each other
    if name == "exposure":
        few["inversion"] = functools.partial(member("Inversion", "matching"), steps=1)
    if name == "exposure" and algorithm == "fedgkt":
        few |= {"inversion": None, "attackers": "component"}
    diagnostic = calls.function(signatures.describe("Diagnostic", name))
    diagnostic = functools.partial(diagnostic, **{**settings("Diagnostic", name), **few})
    noise = rng.generator(0, "probe", device=CUDA)
    assert diagnostic(on, result, on.images, on.labels, member("Attack", "fgsm"), noise)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedgkt"])
def test_what_is_measured_of_a_round(algorithm: str, gpu: Pretended) -> None:
    """The monitor, on test, validation and held-out images, and all that is measured once."""
    on, state = problem(network("edge_vit" if algorithm == "fedgkt" else "vit"))
    given = settings("Algorithm", algorithm, batch=4)
    result = next(ALGORITHMS[algorithm](on, state, **given))
    some = on.images[:4], on.labels[:4]
    ready = Setup(on, state, some, some, [on.shards[0][:2], on.shards[1][:0]], 10, {})
    numbers = [
        *measures.training(result, on),
        *measures.constant_numbers(ready, given, True),
        *measures.monitored(ready, result, 1, member("Attack", "fgsm"), 4, True),
    ]
    assert {"natural", "monitor", "val_monitor", "holdout_accuracy", "edge_memory"} <= {n.metric for n in numbers}


def test_evaluation(gpu: Pretended) -> None:
    """An attack on a stored model: its states come from files, on the CPU."""
    on, state = problem(network("edge_vit"))
    stored = {name: value.cpu() for name, value in state.model.items()}
    right, _ = accuracy(on, stored, on.images, on.labels, member("Attack", "pgd"), ("evaluate", "pgd"), batch=5)
    assert right.shape == (16,)
    assert 0 <= edge_accuracy(on, stored, on.images, on.labels) <= 1
    assert 0 <= zero_gradients(on, stored, on.images, on.labels) <= 1
