"""Local training: the two paths agree, streams are independent of what ran before, nothing waits for the device."""

from __future__ import annotations

import functools
from dataclasses import replace

import path_runs
import pytest
import torch

from fatbench import models
from fatbench.engine import local as local_module
from fatbench.engine import microbatch
from fatbench.engine import randomness as rng
from fatbench.engine.cohort import train_cohort
from fatbench.engine.local import LocalTraining
from fatbench.engine.optimizers import Moments, step
from fatbench.engine.rounds import Problem
from fatbench.methods import augmentations, evasion, objectives
from fatbench.methods.aggregators import AGGREGATORS
from fatbench.methods.objectives import PROXIMALS
from fatbench.testing import initial_state, small_problem

SIZES = {"leaf_cnn": (3, 32, 32), "resnet18": (3, 16, 16), "efficientnet_lite0": (3, 64, 64)}
TINY = {"patch": 4, "dim": 16, "depth": 2, "heads": 2, "head": "cls_vis", "d1": 6, "d2": 5}
SETTINGS = {
    "constant": {},
    "linear": {},
    "leaf_cnn": {},
    "efficientnet_lite0": {},
    "vit": TINY,
    "tnt": {**TINY, "inner": 8},
    "t2t": {**TINY, "token_dim": 8},
    "whole_vit": {"width": 8, "dim": 16, "depth": 1, "heads": 2},
    "whole_edge": {"width": 8},
    "whole_resnet": {"width": 8, "planes": 4, "blocks": 1},
}
LONG = {"efficientnet_lite0": pytest.mark.nightly}  # takes half a minute
TRAINED_WHOLE = [model for model in models.MODELS if not model.startswith("edge_")]  # those are FedGKT's and FedVKD's
PGD = functools.partial(evasion.pgd, eps=8 / 255, step=4 / 255, steps=2)
KL = functools.partial(evasion.pgd_kl, eps=8 / 255, step=4 / 255, steps=2)
OBJECTIVES = {
    "standard": objectives.standard,
    "at": functools.partial(objectives.at, attack=PGD),
    "trades": functools.partial(objectives.trades, attack=KL, beta=6.0),
    "mart": functools.partial(objectives.mart, attack=PGD, beta=6.0),
    "mixed_at": functools.partial(objectives.mixed_at, attack=PGD, ratio=0.5),
}


def problem(model: str, path: str, seed: int = 3, precision: str = "fp32") -> Problem:
    shape = SIZES.get(model, (3, 8, 8))
    with rng.forked(seed, "model"):
        network = models.MODELS[model](shape, 10, **SETTINGS.get(model, {"width": 8}))
    images = torch.randint(0, 256, (24, *shape), dtype=torch.uint8, generator=rng.generator(seed, "images"))
    labels = torch.randint(0, 10, (24,), generator=rng.generator(seed, "labels"))
    shards = [torch.arange(0, 14), torch.arange(14, 24)]
    return Problem(network, images, labels, shards, 10, seed, torch.device("cpu"), precision, path)


def local(objective: str, **changes) -> LocalTraining:
    settings = {"epochs": 1, "batch": 8, "lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4, "clip": None}
    return LocalTraining(**{**settings, **changes}, objective=OBJECTIVES[objective])


def start_of(on: Problem) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in on.model.state_dict().items()}


def train(on: Problem, objective: str, **changes):
    return train_cohort(on, start_of(on), [1, 0], 0, local(objective, **changes))


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images in float64: the sign step of an attack turns a rounding error of a zero gradient into a whole step."""
    pixels = local_module.pixels
    monkeypatch.setattr(local_module, "pixels", lambda problem, images: pixels(problem, images).double())


@pytest.mark.parametrize(
    ("model", "objective"),
    [
        *(pytest.param(model, "mart", marks=LONG.get(model, ())) for model in TRAINED_WHOLE),
        *(("small_cnn", objective) for objective in OBJECTIVES),
    ],
)
def test_the_loop_is_the_reference(model, objective, double):
    """To rounding, for every model (with BatchNorm and Dropout) and every objective."""
    results = []
    for path in ("reference", "loop"):
        on = problem(model, path)
        on.model.double()
        results.append(train(on, objective))
    for a, b in zip(*results, strict=True):
        assert (a.client, a.n, a.stats.steps) == (b.client, b.n, b.stats.steps)
        assert a.stats.loss == pytest.approx(b.stats.loss, rel=1e-9)
        for name in a.model:
            torch.testing.assert_close(a.model[name], b.model[name], rtol=1e-7, atol=2e-8, msg=f"{model} {name}")


@pytest.mark.parametrize("proximal", ["squared", "norm_per_tensor"])
def test_all_that_an_algorithm_asks_is_the_reference_s(proximal, double):
    """Epochs, clipping, a proximal term, shifts of gradients, weights and buffers, the loss of theta^t, other sizes."""
    results = []
    for path in ("reference", "loop"):
        on = replace(problem("small_cnn", path), augment=functools.partial(augmentations.crop_flip, padding=1), size=12)
        with rng.forked(0, "model"):
            on = replace(on, model=models.MODELS["small_cnn"]((3, 12, 12), 10, width=4).double())
        floats = {name: value for name, value in on.model.state_dict().items() if value.is_floating_point()}
        shifts = {k: {name: 1e-3 * (k + 1) * torch.ones_like(v) for name, v in floats.items()} for k in range(2)}
        how = replace(local("trades", epochs=2, clip=0.5), proximal=functools.partial(PROXIMALS[proximal], mu=0.1))
        more = {"gradient_shift": shifts, "weight_shift": shifts, "aggregator": AGGREGATORS["afl"]}
        results.append(train_cohort(on, start_of(on), [1, 0], 1, how, **more))
    for a, b in zip(*results, strict=True):
        assert a.stats.broadcast_loss == pytest.approx(b.stats.broadcast_loss, rel=1e-9)
        torch.testing.assert_close(a.model, b.model, rtol=1e-8, atol=1e-10)


class SecondHead(torch.nn.Module):
    """A network with a head that its logits do not use."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10))
        self.projection = torch.nn.Linear(192, 3)

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("name", ["standard", "at", "awp_at"])
def test_a_weight_that_the_objective_does_not_use_has_a_zero_gradient(name):
    """It stays where it was, while the others train; weight decay shrinks it, as it shrinks every weight."""

    def trained(part, weight_decay):
        with rng.forked(3, "heads"):
            network = SecondHead()
        start = {key: value.clone() for key, value in network.state_dict().items()}
        on = path_runs.problem(part(network), "loop")
        return start, path_runs.train(on, path_runs.local(name, weight_decay=weight_decay))

    start, updates = trained(lambda network: network, 0.0)
    _, bare = trained(lambda network: network.body, 0.0)
    for update, alone in zip(updates, bare, strict=True):
        assert torch.equal(update.model["projection.weight"], start["projection.weight"])
        assert torch.equal(update.model["body.1.weight"], alone.model["1.weight"])
    _, shrunk = trained(lambda network: network, 0.5)
    assert all(update.model["projection.weight"].norm() < start["projection.weight"].norm() for update in shrunk)


@pytest.mark.parametrize("path", ["reference", "loop"])
def test_the_same_cell_gives_the_same_bytes_whatever_ran_before(path):
    first = train(problem("small_cnn", path), "at")
    torch.rand(17)
    train(problem("nin", path, seed=9), "at")
    again = train(problem("small_cnn", path), "at")
    for a, b in zip(first, again, strict=True):
        assert a.stats == b.stats
        assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)


@pytest.mark.parametrize("width, path, laid_out", [
    (4, "loop", torch.contiguous_format), (15, "loop", torch.contiguous_format), (16, "loop", torch.channels_last),
    (16, "reference", torch.contiguous_format), (4, "graphs", torch.contiguous_format),
])  # fmt: skip
def test_a_narrow_resnet_is_not_channels_last_on_a_cpu(width, path, laid_out):
    """oneDNN would write beyond its workspace: a crash, or a wrong gradient."""
    network = models.MODELS["resnet18"]((3, 8, 8), 10, width=width)
    on = replace(problem("leaf_cnn", path), model=network)
    assert local_module.memory_format(on) == laid_out
    assert local_module.pixels(on, on.images[:2]).is_contiguous(memory_format=laid_out)
    weight = local_module.load(on, dict(network.state_dict())).state_dict()["conv1.weight"]
    assert weight.is_contiguous(memory_format=laid_out)
    if path != "reference":
        assert local_module.memory_format(replace(on, device=torch.device("cuda"))) == torch.channels_last


def test_gradients_of_a_narrow_resnet_are_right():
    """Against float64, at a size at which oneDNN's are not: with AVX2 the process would end here."""
    network = models.MODELS["resnet18"]((3, 16, 16), 10, width=4)
    images = torch.randint(0, 256, (32, 3, 16, 16), dtype=torch.uint8, generator=rng.generator(1, "images"))
    on = replace(problem("leaf_cnn", "loop"), model=network, images=images)
    exact = models.MODELS["resnet18"]((3, 16, 16), 10, width=4).double()
    exact.load_state_dict(network.state_dict())
    found, right = [], []
    for model, x, gradients in ((local_module.load(on, network.state_dict()), local_module.pixels(on, images), found),
                                (exact, images.double() / 255, right)):  # fmt: skip
        gradients += torch.autograd.grad(model(x).logsumexp(1).sum(), list(model.parameters()))
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3)


def test_a_client_does_not_depend_on_who_else_takes_part():
    on = problem("nin", "loop")
    start = start_of(on)
    together, alone = (train_cohort(on, start, who, 0, local("at"))[-1] for who in ([1, 0], [0]))
    assert all(torch.equal(together.model[name], alone.model[name]) for name in alone.model)


def test_bf16_stays_near_fp32_and_keeps_weights_in_fp32():
    exact, low = (train(problem("nin", "loop", precision=p), "standard") for p in ("fp32", "bf16"))
    for a, b in zip(exact, low, strict=True):
        assert all(value.dtype == torch.float32 for value in b.model.values())
        assert a.stats.loss == pytest.approx(b.stats.loss, rel=0.05)


def test_released_loss_is_mean_loss_times_mean_batch_length():
    """14 images in batches of 8 and 6: released = (8 l1 + 6 l2) / 2 = 7 * mean loss."""
    update = train(problem("nin", "reference"), "standard")[1]
    assert update.n == 14
    assert update.stats.loss_released == pytest.approx(7 * update.stats.loss, rel=1e-6)


@pytest.mark.parametrize("path", ["reference", "loop"])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.1}, {"clip": 0.5}])
def test_the_step_is_torchs(path, settings):
    """Five steps on ||w - t||^2 / 2 against torch.optim.SGD and clip_grad_norm_."""
    changes = {"momentum": 0.0, "weight_decay": 0.0, "clip": None, **settings}
    local = LocalTraining(epochs=1, batch=1, lr=0.3, objective=None, **changes)
    target = [torch.tensor([[1.0, -2.0], [3.0, 0.5]]), torch.tensor([4.0])]
    ours = [torch.zeros(2, 2), torch.zeros(1)]
    theirs = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(theirs, lr=0.3, momentum=changes["momentum"], weight_decay=changes["weight_decay"])
    moments: Moments = {}
    for _ in range(5):
        gradients = [w - t for w, t in zip(ours, target, strict=True)]
        moments = step(ours, gradients, moments, local.descent(plain=path == "reference"))
        for w, t in zip(theirs, target, strict=True):
            w.grad = w.detach() - t
        if local.clip:
            torch.nn.utils.clip_grad_norm_(theirs, local.clip)
        optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-6, atol=1e-7)


def test_resized_and_augmented_images_reach_the_objective():
    """8 x 8 images are seen at 16 x 16, in [0, 1], flipped by the augmentation; a training pass draws its own noise."""
    seen = []

    def objective(model, x, y, generator):
        seen.append(x)
        return objectives.standard(model, x, y, generator)

    on = replace(problem("resnet18", "reference"), size=16, augment=lambda x, noise: x.flip(3))
    train_cohort(on, dict(on.model.state_dict()), [0], 0, LocalTraining(batch=14, lr=0.1, objective=objective))
    assert seen[0].shape == (14, 3, 16, 16)
    assert float(seen[0].min()) >= 0 and float(seen[0].max()) <= 1
    first = torch.randperm(14, generator=rng.generator(on.seed, "order", 0, 0))[0]
    expected = torch.nn.functional.interpolate(on.images[first][None] / 255, (16, 16), mode="bilinear").flip(3)
    torch.testing.assert_close(seen[0][:1], expected)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_microbatch_gives_the_same_model(objective, double):
    """In float64, for every objective: what an attack, a forward and a backward see does not depend on the parts."""
    results = []
    for parts in (None, 3):
        on = problem("nin", "reference")
        on.model.double()
        for module in on.model.modules():
            if hasattr(module, "p"):
                module.p = 0.0
        if parts:
            microbatch.bound(on.model, parts)
        results.append(train(on, objective))
    for a, b in zip(*results, strict=True):
        for name in a.model:
            torch.testing.assert_close(a.model[name], b.model[name], rtol=1e-9, atol=1e-11, msg=name)


def test_a_microbatch_holds_less():
    """What is saved for the backward pass of 24 images in parts of 4 is less than a third of what it is at once."""

    def held(parts):
        on = problem("nin", "reference")
        if parts:
            microbatch.bound(on.model, parts)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            on.model(on.images / 255).sum()
        return sum(sizes)

    assert held(4) < held(None) / 3


def test_accuracy_is_of_all_epochs():
    """Every example is right in each of three epochs: 1, not 3."""

    def always_right(model, x, y, generator):
        return objectives.standard(model, x, y, generator)[0], torch.ones_like(y, dtype=torch.bool)

    on = small_problem()
    how = LocalTraining(batch=4, lr=0.01, objective=always_right, epochs=3)
    updates = train_cohort(on, initial_state(on).model, [0, 1, 2], 0, how)
    assert [update.stats.accuracy for update in updates] == [1.0, 1.0, 1.0]


def test_seeds_have_more_than_32_bits():
    """Two seeds, and two names, that differ above the 32nd bit are two streams."""
    drawn = [rng.generator(seed, "x").initial_seed() for seed in (0, 1, 2**32, 2**32 + 1, 2**63)]
    assert len(set(drawn)) == 5 and drawn == [rng.stream(seed, "x") for seed in (0, 1, 2**32, 2**32 + 1, 2**63)]
    assert max(rng.stream(seed, "x") for seed in range(64)) > 2**60
    first, second = (rng.numpy_generator(seed, "x").integers(2**62, size=4).tolist() for seed in (0, 2**32))
    assert first != second
    assert rng.numpy_generator(0, "y").integers(2**62, size=4).tolist() not in (first, second)
