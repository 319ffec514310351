"""FedSGD on quadratics: client k minimises (1/2)||w - a_k||^2, whose gradient is w - a_k, so every step has a closed
form. One image a client: its pixels are a_k. Two entries, three clients.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from algorithm_runs import same
from torch import Tensor, nn

from fatbench.engine.rounds import Problem, Round, State
from fatbench.methods.accountants import gaussian_epsilon, sampled_gaussian_epsilon
from fatbench.methods.algorithms.fedsgd import epoch_batches, fedsgd
from fatbench.methods.defences import DEFENCES, Upload

TARGETS = [[51, 102], [204, 0], [255, 153]]  # a_k in 1/255
A = torch.tensor(TARGETS) / 255
THETA = torch.tensor([1.0, -1.0])


class Point(nn.Module):
    """A model that is one point, repeated `width` times."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.mean(0).expand(len(x), 2)


def quadratic(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    loss = 0.5 * (model.w - x.flatten(1)[:, None]).square().sum((1, 2)).mean()
    return loss, torch.ones(len(x), dtype=torch.bool)


def problem(copies: tuple[int, ...] = (1, 1, 1), width: int = 1, clients: int = 3) -> Problem:
    images = torch.tensor([TARGETS[k % 3] for k, n in enumerate(copies) for _ in range(n)], dtype=torch.uint8)
    starts = [sum(copies[:k]) for k in range(len(copies))]
    shards = [torch.arange(s, s + n) for s, n in zip(starts, copies, strict=True)]
    labels = torch.zeros(len(images), dtype=torch.int64)
    images, device = images.reshape(-1, 1, 1, 2), torch.device("cpu")
    return Problem(Point(width), images, labels, shards, 2, 0, device, path="reference")


def run(on: Problem, rounds: int = 1, start: State | None = None, **settings: object) -> list[Round]:
    theta = start or State(0, {"w": THETA.expand(on.model.w.shape).clone()})
    defaults = {"batch": 1, "lr": 0.1, "objective": quadratic, "defence": DEFENCES["none"]}
    return list(fedsgd(on, theta, rounds=rounds, **{**defaults, **settings}))


def defence(name: str, **settings: object) -> object:
    return functools.partial(DEFENCES[name], **settings)


masked = functools.partial(defence, "random_binary")
locked = functools.partial(defence, "locked_binary")
private = functools.partial(defence, "dpsgd")


def test_a_step_is_one_of_sgd_on_the_mean_gradient():
    result = run(problem())[0]
    torch.testing.assert_close(result.state.model["w"][0], THETA - 0.1 * (THETA - A.mean(0)))
    for update in result.updates:
        torch.testing.assert_close(update.extra["gradient"]["w"][0], THETA - A[update.client])
        assert update.model == {}
        assert update.stats.loss == pytest.approx(float(0.5 * (THETA - A[update.client]).square().sum()))
    assert result.cost.gradient_steps == 3
    assert result.cost.bytes_up == result.cost.bytes_down == 3 * 2 * 4


def test_many_steps_are_a_plain_loop_of_sgd():
    """Two copies of each image, batch 1: two steps an epoch. theta_s = mean + 0.9^s (theta - mean)."""
    by_epoch, by_step = run(problem((2, 2, 2)), rounds=3), run(problem((2, 2, 2)), rounds=6, steps=1)
    expected = A.mean(0) + 0.9**6 * (THETA - A.mean(0))
    torch.testing.assert_close(by_epoch[-1].state.model["w"][0], expected)
    assert torch.equal(by_epoch[-1].state.model["w"], by_step[-1].state.model["w"])
    assert torch.equal(by_epoch[-1].updates[1].extra["gradient"]["w"], by_step[-1].updates[1].extra["gradient"]["w"])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_rate_zero_is_no_defence_bit_for_bit(optimizer):
    on = problem((3, 2, 2), width=50)
    plain = run(on, rounds=3, optimizer=optimizer)[-1].state.model["w"]
    for zero in (masked(mask_probability=0.0), locked(mask_probability=0.0), defence("pruning", fraction=0.0)):
        assert torch.equal(plain, run(on, 3, defence=zero, optimizer=optimizer)[-1].state.model["w"])


@pytest.mark.parametrize("count", ["mask", "nonzero"])
def test_an_entry_is_averaged_over_its_contributors_and_stays_without_any(count):
    on = problem(width=200)
    result = run(on, defence=masked(mask_probability=0.6), count=count)[0]
    gradient = THETA - A[:, None].expand(3, 200, 2)
    masks = [masked(mask_probability=0.6)({"w": g}, Upload(0, k))[1]["w"] for k, g in enumerate(gradient)]
    kept = torch.stack(masks).float()
    if count == "nonzero":  # client 2 is at its optimum in entry 0: a genuine zero that does not count
        kept = kept * (gradient != 0)
    mean = torch.where(kept.sum(0) > 0, (kept * gradient).sum(0) / kept.sum(0).clamp(min=1), 0)
    torch.testing.assert_close(result.state.model["w"], THETA - 0.1 * mean)
    assert (result.state.model["w"] == THETA)[kept.sum(0) == 0].all()
    assert ("mask" in result.updates[0].extra) == (count == "mask")
    assert result.cost.bytes_up == 3 * 400 * 4 + (3 * 400 // 8 if count == "mask" else 0)


def test_only_what_was_defended_is_in_an_update():
    update = run(problem(width=200), defence=masked(mask_probability=0.5))[0].updates[0]
    assert set(update.extra) == {"gradient", "mask"}
    assert not update.extra["gradient"]["w"][~update.extra["mask"]["w"]].any()
    assert (~update.extra["mask"]["w"]).any()


def test_adam_is_torchs_where_everybody_contributes():
    on = problem()
    w = THETA.clone().requires_grad_(True)
    reference = torch.optim.Adam([w], lr=0.1)
    for _ in range(5):
        w.grad = (w - A.mean(0)).detach()
        reference.step()
    torch.testing.assert_close(run(on, rounds=5, optimizer="adam")[-1].state.model["w"][0], w.detach())


def test_adam_leaves_entries_without_contribution_alone():
    shared = locked(mask_probability=0.7, shared=True)
    last = run(problem(width=100), rounds=4, defence=shared, optimizer="adam")[-1]
    never = ~last.updates[0].extra["mask"]["w"]
    assert never.any()
    assert (last.state.model["w"] == THETA)[never].all()
    for moment in ("first", "second"):
        assert not last.state.server["optimizer"][moment]["w"][never].any()
        assert last.state.server["optimizer"][moment]["w"][~never].all()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("steps", [None, 1, 3])
def test_going_on_from_a_state_is_the_same_as_not_stopping(optimizer, steps):
    settings = {"defence": masked(mask_probability=0.5), "optimizer": optimizer, "steps": steps}
    whole = run(problem((2, 3, 1), width=20), 4, **settings)
    rest = run(problem((2, 3, 1), width=20), 4, whole[1].state, **settings)
    assert [r.index for r in rest] == [2, 3]
    assert same(whole[-1].state.server, rest[-1].state.server)
    assert torch.equal(whole[-1].state.model["w"], rest[-1].state.model["w"])
    assert torch.equal(whole[-1].mixing.artifacts["update_counts"], rest[-1].mixing.artifacts["update_counts"])


def test_clients_without_a_batch_left_pause_until_the_next_epoch():
    """Client 0 has one image, the others two: the second step of an epoch is the mean of clients 1 and 2."""
    result = run(problem((1, 2, 2)))[0]
    middle = THETA - 0.1 * (THETA - A.mean(0))
    torch.testing.assert_close(result.state.model["w"][0], middle - 0.1 * (middle - A[1:].mean(0)))
    assert [u.n for u in result.updates] == [1, 2, 2]
    assert result.updates[0].extra == {}
    assert result.cost.gradient_steps == 5
    assert [len(epoch_batches(problem((1, 2, 2)), k, 0, 1)) for k in range(3)] == [1, 2, 2]


def test_an_epoch_sees_every_example_once():
    on = problem((7, 4, 5))
    for epoch in (0, 1):
        seen = torch.cat(epoch_batches(on, 0, epoch, 3))
        assert sorted(seen.tolist()) == list(range(7))
    assert epoch_batches(on, 0, 0, 3)[0].tolist() != epoch_batches(on, 0, 1, 3)[0].tolist()


@pytest.mark.parametrize(
    ("defence", "kind"),
    [
        (masked(mask_probability=0.8), "random"),
        (locked(mask_probability=0.8), "locked"),
        (locked(mask_probability=0.8, shared=True), "locked_shared"),
    ],
)
def test_update_counts_follow_the_closed_form(defence, kind):
    """Sawada et al. 2024, Eq. 13, corrected (differences: masks-update-counts).

    20,000 entries, 3 clients, 6 epochs of 2 steps: a fraction's sigma is at most 0.5 / sqrt(20000) = 0.0035.

    The mask lasts for an epoch, so two steps count once.
    """
    last = run(problem((2, 2, 2), width=10_000), rounds=6, defence=defence)[-1]
    measured = last.mixing.artifacts["update_counts"].double() / 20_000
    never = 0.8 if kind == "locked_shared" else 0.8**3
    if kind == "random":
        law = torch.tensor([math.comb(6, f) * (1 - never) ** f * never ** (6 - f) for f in range(7)])
    else:
        law = torch.tensor([never, *[0.0] * 5, 1 - never])
    assert float((measured - law).abs().max()) < 4 * 0.0035
    assert last.metrics["never_updated"] == pytest.approx(float(measured[0]))
    assert last.metrics["updated_fraction"] == pytest.approx(dict(enumerate(measured.tolist())))
    assert last.metrics["updated_rounds"] == pytest.approx(float((torch.arange(7) * measured).sum()))


# --- DP-SGD -------------------------------------------------------------------------------------------------------


def test_dp_sgd_that_neither_cuts_nor_adds_noise_is_no_defence():
    plain = run(problem((3, 3, 3)), batch=2)[-1]
    same_as = run(problem((3, 3, 3)), batch=2, defence=private(noise=0.0, clip=1e6))[-1]
    torch.testing.assert_close(plain.state.model, same_as.state.model)


def test_a_round_says_what_the_run_has_spent():
    """Two epochs of shuffled batches are two uploads of an example; drawn batches are four steps at rate 1/2."""
    noisy = private(noise=3.0, clip=1.0)
    shuffled = run(problem((4, 4, 4)), rounds=2, batch=2, defence=noisy)
    assert [r.metrics["epsilon"] for r in shuffled] == [gaussian_epsilon(3, 1e-5, n) for n in (1, 2)]
    drawn = run(problem((4, 4, 4)), rounds=2, batch=2, defence=noisy, sampling="poisson")
    assert drawn[-1].metrics["epsilon"] == sampled_gaussian_epsilon(3, 0.5, 4, 1e-5)
    assert drawn[-1].metrics["delta"] == 1e-5
    pure = run(problem((4, 4, 4)), batch=2, defence=defence("laplace", noise=3.0))[-1].metrics
    assert (pure["epsilon"], pure["delta"]) == (pytest.approx(2 / 3), 0)
    assert not {"epsilon", "delta"} & run(problem())[0].metrics.keys()


def test_drawn_batches_may_be_empty_and_have_the_right_mean():
    sizes = [len(b) for epoch in range(200) for b in epoch_batches(problem((4, 4, 4)), 0, epoch, 1, "poisson")]
    assert 0 in sizes and sum(sizes) / len(sizes) == pytest.approx(1, abs=0.1)
    rounds = run(problem((4, 4, 4)), rounds=6, batch=1, defence=private(noise=0.1), sampling="poisson")
    assert all(torch.isfinite(r.state.model["w"]).all() for r in rounds)
