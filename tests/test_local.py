"""Local training: the two paths agree, streams are independent of what ran before, nothing waits for the device."""

from __future__ import annotations

import functools

import pytest
import torch

from fatbench import attacks, models, objectives, rng
from fatbench import local as local_module
from fatbench.local import LocalSGD, train_cohort
from fatbench.rounds import Problem

SIZES = {"leaf_cnn": (3, 32, 32), "resnet18": (3, 16, 16)}
PGD = functools.partial(attacks.pgd, eps=8 / 255, step=4 / 255, steps=2)
KL = (
    functools.partial(attacks.ATTACKS["pgd_kl"], eps=8 / 255, step=4 / 255, steps=2)
    if "pgd_kl" in attacks.ATTACKS
    else PGD
)
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
        width = {} if model == "leaf_cnn" else {"width": 8}
        network = models.MODELS[model](shape, 10, **width)
    images = torch.randint(0, 256, (24, *shape), dtype=torch.uint8, generator=rng.generator(seed, "images"))
    labels = torch.randint(0, 10, (24,), generator=rng.generator(seed, "labels"))
    shards = [torch.arange(0, 14), torch.arange(14, 24)]
    return Problem(network, images, labels, shards, seed, torch.device("cpu"), precision, path)


def local(objective: str, **changes) -> LocalSGD:
    settings = {"epochs": 1, "batch": 8, "lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4, "clip": None}
    return LocalSGD(**{**settings, **changes}, objective=OBJECTIVES[objective])


def train(on: Problem, objective: str, **changes):
    start = {name: value.clone() for name, value in on.model.state_dict().items()}
    return train_cohort(on, start, [1, 0], 0, local(objective, **changes))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("model", models.MODELS)
def test_the_loop_and_the_fast_path_agree(model, objective, monkeypatch):
    """To rounding, for every model (with BatchNorm and Dropout) and every objective.

    In float64, because the sign step of an attack turns a rounding error of a zero gradient into a whole step.
    """
    pixels = local_module.pixels
    monkeypatch.setattr(local_module, "pixels", lambda images, path: pixels(images, path).double())
    results = []
    for path in ("loop", "fast"):
        on = problem(model, path)
        on.model.double()
        results.append(train(on, objective))
    for a, b in zip(*results, strict=True):
        assert (a.client, a.n, a.stats.steps) == (b.client, b.n, b.stats.steps)
        assert a.stats.loss == pytest.approx(b.stats.loss, rel=1e-9)
        for name in a.model:
            torch.testing.assert_close(a.model[name], b.model[name], rtol=1e-8, atol=1e-10, msg=f"{model} {name}")


@pytest.mark.parametrize("path", ["loop", "fast"])
def test_the_same_cell_gives_the_same_bytes_whatever_ran_before(path):
    first = train(problem("small_cnn", path), "at")
    torch.rand(17)
    train(problem("nin", path, seed=9), "at")
    again = train(problem("small_cnn", path), "at")
    for a, b in zip(first, again, strict=True):
        assert a.stats == b.stats
        assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)


def test_a_client_does_not_depend_on_who_else_takes_part():
    on = problem("nin", "fast")
    start = {name: value.clone() for name, value in on.model.state_dict().items()}
    together = train_cohort(on, start, [1, 0], 0, local("at"))[1]
    alone = train_cohort(on, start, [0], 0, local("at"))[0]
    assert all(torch.equal(together.model[name], alone.model[name]) for name in alone.model)


def test_training_leaves_the_global_generators_alone():
    state = torch.get_rng_state()
    train(problem("nin", "fast"), "at")
    assert torch.equal(state, torch.get_rng_state())


def test_bf16_stays_near_fp32_and_keeps_weights_in_fp32():
    exact, low = (train(problem("nin", "fast", precision=p), "standard") for p in ("fp32", "bf16"))
    for a, b in zip(exact, low, strict=True):
        assert all(value.dtype == torch.float32 for value in b.model.values())
        assert a.stats.loss == pytest.approx(b.stats.loss, rel=0.05)


def test_released_loss_is_mean_loss_times_mean_batch_length():
    """14 images in batches of 8 and 6: released = (8 l1 + 6 l2) / 2 = 7 * mean loss."""
    update = train(problem("nin", "loop"), "standard")[1]
    assert update.n == 14
    assert update.stats.loss_released == pytest.approx(7 * update.stats.loss, rel=1e-6)


def test_a_step_does_not_wait_for_the_device(monkeypatch):
    """No .item(), .tolist(), bool() or .cpu() of a tensor between the first and the last step of an epoch."""
    waits = []
    inside = []
    original = objectives.at

    def objective(*args, **kwargs):
        inside.append(True)
        result = original(*args, attack=PGD)
        inside.pop()
        return result

    for method in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        real = getattr(torch.Tensor, method)

        def spy(self, *args, _real=real, _name=method, **kwargs):
            if inside:
                waits.append(_name)
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, method, spy)
    on = problem("nin", "fast")
    start = {name: value.clone() for name, value in on.model.state_dict().items()}
    settings = LocalSGD(1, 8, 0.02, 0.9, 0.0, None, objective)
    train_cohort(on, start, [0], 0, settings)
    assert waits == []
