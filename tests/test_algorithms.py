"""Algorithms on quadratics: client k minimises (1/2)||w - a_k||^2, whose gradient is w - a_k, so every round has a
closed form. One image a client: its pixels are a_k, so full-batch steps and known targets.

tau SGD steps of rate lr from theta end at a_k + (1 - lr)^tau (theta - a_k).
"""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Iterator
from dataclasses import replace

import members
import pytest
import torch
from algorithm_runs import nested, same
from members import refusals
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fatbench.engine.local import LocalTraining
from fatbench.engine.malicious import Malicious
from fatbench.engine.rounds import Problem, Round, State, Update
from fatbench.methods import aggregators, objectives, preaggregators
from fatbench.methods.adversaries import ADVERSARIES
from fatbench.methods.algorithms import ALGORITHMS
from fatbench.methods.algorithms.fedsgd import epoch_batches
from fatbench.suite import signatures

TARGETS = [[51, 102], [204, 0], [255, 153]]  # a_k in 1/255
A = torch.tensor(TARGETS) / 255


class Point(nn.Module):
    """A model that is one point."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), 2)


def quadratic(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    loss = 0.5 * (model.w - x.flatten(1)).square().sum(1).mean()
    return loss, torch.ones(len(x), dtype=torch.bool)


def problem(copies: tuple[int, ...] = (1, 1, 1), seed: int = 0) -> Problem:
    """Three clients with `copies[k]` copies of the image a_k."""
    images = torch.tensor([TARGETS[k] for k, n in enumerate(copies) for _ in range(n)], dtype=torch.uint8)
    starts = [sum(copies[:k]) for k in range(len(copies))]
    shards = [torch.arange(s, s + n) for s, n in zip(starts, copies, strict=True)]
    return Problem(
        Point(), images.reshape(-1, 1, 1, 2), torch.zeros(len(images), dtype=torch.int64), shards, 2,
        seed, torch.device("cpu"), path="reference",
    )  # fmt: skip


def aggregator(name: str, **settings: object) -> object:
    return functools.partial(aggregators.AGGREGATORS[name], **settings)


def run(name: str, on: Problem, rounds: int = 1, start: State | None = None, **settings: object) -> list:
    return list(boxed(name, on, rounds, start, **settings))


def boxed(name: str, on: Problem, rounds: int = 1, start: State | None = None, **settings: object) -> Iterator[Round]:
    flat = {"rounds": rounds, "batch": 100, "lr": 0.1, "objective": quadratic, "standard": quadratic}
    flat |= {"epochs": 1 if name == "centralized" else 4, "aggregator": aggregator("samples"), **settings}
    box = members.member("Algorithm", name, **flat, local=nested(**flat)["local"])
    held_out = (on.images.repeat(2, 1, 1, 1), on.labels.repeat(2))
    return box(replace(on, held_out=held_out), start or State(0, {"w": torch.tensor([1.0, -1.0])}))


def after(theta: Tensor, target: Tensor, steps: int, lr: float = 0.1) -> Tensor:
    return target + (1 - lr) ** steps * (theta - target)


THETA = torch.tensor([1.0, -1.0])


def test_fedavg_is_the_mean_of_the_closed_forms():
    result = run("fedavg", problem(), epochs=4)[0]
    for update in result.updates:
        torch.testing.assert_close(update.model["w"], after(THETA, A[update.client], 4))
    torch.testing.assert_close(result.state.model["w"], after(THETA, A.mean(0), 4))
    assert result.cost.gradient_steps == 12
    assert result.cost.bytes_up == result.cost.bytes_down == 3 * 2 * 4
    by_samples = run("fedavg", problem((1, 2, 5)))[0].state.model["w"]
    expected = (after(THETA, A[0], 4) + 2 * after(THETA, A[1], 4) + 5 * after(THETA, A[2], 4)) / 8
    torch.testing.assert_close(by_samples, expected)


def test_local_only_is_every_client_alone():
    """Three rounds of 4 steps are 12 from the first network on one's own image; nothing is sent or mixed."""
    results = run("local_only", problem(), rounds=3)
    for k, target in enumerate(A):
        torch.testing.assert_close(results[-1].own[k]["w"], after(THETA, target, 12))
    assert torch.equal(results[-1].state.model["w"], THETA)
    assert results[-1].cost.bytes_up == results[-1].cost.bytes_down == 0


def test_stats_of_a_client():
    """Two images, batch 1, two epochs, momentum 0.5: 4 steps, ||a||_1 = 1 + 1.5 + 1.75 + 1.875 = 6.125.

    One step a round of 2 epochs: the last epoch's loss is that at a + 0.9 (theta - a).
    """
    update = run("fedavg", problem((2, 2, 2)), batch=1, epochs=2, momentum=0.5)[0].updates[0]
    assert (update.stats.steps, update.stats.batches, update.n) == (4, 2, 2)
    assert update.stats.momentum_steps == pytest.approx(6.125) and update.stats.accuracy == 1.0
    for update in run("fedavg", problem(), epochs=2)[0].updates:
        expected = 0.5 * (0.9 * (THETA - A[update.client])).square().sum()
        assert update.stats.loss == pytest.approx(float(expected), rel=1e-5)


def test_fedprox_has_its_closed_form_and_mu_zero_is_fedavg():
    """One step from theta has no pull; the second adds mu (w - theta): w2 = w1 - lr (w1 - a + mu (w1 - theta))."""
    prox = functools.partial(objectives.PROXIMALS["squared"], mu=0.5)
    update = run("fedavg", problem(), epochs=2, proximal=prox)[0].updates[0]
    w1 = after(THETA, A[update.client], 1)
    torch.testing.assert_close(update.model["w"], w1 - 0.1 * (w1 - A[update.client] + 0.5 * (w1 - THETA)))
    none = run("fedavg", problem(), rounds=3, proximal=functools.partial(objectives.PROXIMALS["squared"], mu=0.0))
    torch.testing.assert_close(none[-1].state.model, run("fedavg", problem(), rounds=3)[-1].state.model)


def test_fednova_removes_the_bias_of_unequal_steps_and_with_equal_ones_is_fedavg():
    """Batch 1 and 1, 2, 5 copies: tau = 4, 8, 20, p = n/8. theta - tau_eff sum p_k (theta - y_k)/tau_k."""
    result = run("fednova", problem((1, 2, 5)), batch=1)[0]
    p, tau = torch.tensor([1, 2, 5]) / 8, torch.tensor([4.0, 8.0, 20.0])
    delta = torch.stack([THETA - after(THETA, A[k], int(tau[k])) for k in range(3)])
    expected = THETA - (p * tau).sum() * (p / tau) @ delta
    torch.testing.assert_close(result.state.model["w"], expected)
    nova, avg = (run(name, problem(), rounds=3, momentum=0.9)[-1].state.model for name in ("fednova", "fedavg"))
    torch.testing.assert_close(nova, avg)


def test_fednova_counts_what_a_proximal_term_takes_back():
    """A gradient of one everywhere, SGD with momentum 0.9 and mu 3 from 0, 1 to 10 steps: how far the weight moved."""
    from fatbench.methods.algorithms.fednova import travelled_distance

    prox = functools.partial(objectives.PROXIMALS["squared"], mu=3.0)
    for momentum, steps in ((0.0, 7), (0.9, 10), (0.5, 1)):
        w = torch.zeros(1, requires_grad=True, dtype=torch.float64)
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=momentum)
        for _ in range(steps):
            optimizer.zero_grad()
            (w.sum() + 1.5 * w.square().sum()).backward()
            optimizer.step()
        local = LocalTraining(batch=1, lr=0.1, objective=quadratic, momentum=momentum, proximal=prox)
        assert travelled_distance(steps, local) == pytest.approx(-w.item() / 0.1)
        assert travelled_distance(steps, replace(local, proximal=None)) != pytest.approx(-w.item() / 0.1) or steps == 1
    closed = replace(local, momentum=0.0)
    assert travelled_distance(7, closed) == pytest.approx((1 - 0.7**7) / 0.3)  # Wang et al. 2020: (1 - (1 - a)^tau) / a


def test_fednova_removes_the_bias_of_unequal_steps_under_a_proximal_term():
    """Batch 1 and 1, 2, 5 copies: 1, 2, 5 steps an epoch. One gradient for all: every client's d_k is that gradient."""

    def slope(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return (model.w * torch.tensor([1.0, -2.0])).sum(), torch.ones(len(x), dtype=torch.bool)

    prox = functools.partial(objectives.PROXIMALS["squared"], mu=0.5)
    (result,) = run("fednova", problem((1, 2, 5)), batch=1, epochs=1, objective=slope, proximal=prox)
    far = [(1 - 0.95**tau) / 0.05 for tau in (1, 2, 5)]
    effective = sum(p * a for p, a in zip((1 / 8, 2 / 8, 5 / 8), far, strict=True))
    torch.testing.assert_close(result.state.model["w"], THETA - 0.1 * effective * torch.tensor([1.0, -2.0]))


@pytest.mark.parametrize("name", ["scaffold", "fedgate"])
def test_one_client_alone_is_sgd(name):
    result = run(name, problem((1,)), rounds=5)[-1].state
    torch.testing.assert_close(result.model["w"], after(THETA, A[0], 20))
    assert name == "scaffold" or result.clients[0]["w"].tolist() == [0.0, 0.0]


def scaffold_by_hand(theta: Tensor, rounds: int, lr: float, tau: int) -> Tensor:
    """Karimireddy et al., option II, three clients, all participating."""
    c, own = torch.zeros(2), [torch.zeros(2) for _ in range(3)]
    for _ in range(rounds):
        ends, new = [], []
        for k in range(3):
            y = theta.clone()
            for _ in range(tau):
                y = y - lr * (y - A[k] - own[k] + c)
            ends.append(y)
            new.append(own[k] - c + (theta - y) / (tau * lr))
        c = c + sum(n - o for n, o in zip(new, own, strict=True)) / 3
        own, theta = new, sum(ends) / 3
    return theta


def test_scaffold_follows_the_algorithm_box():
    """And divides by all clients when few take part."""
    state = run("scaffold", problem(), rounds=4, epochs=5)[-1].state
    torch.testing.assert_close(state.model["w"], scaffold_by_hand(THETA, 4, 0.1, 5))
    total = sum(own["w"] for own in state.clients.values())
    torch.testing.assert_close(total, 3 * state.server["c"]["w"])  # sum_k c_k = K c
    few = run("scaffold", problem(), rounds=1, participation=0.34)[0]
    assert len(few.updates) == 1
    torch.testing.assert_close(few.state.server["c"]["w"], few.updates[0].extra["w"] / 3)


@pytest.mark.parametrize("name", ["scaffold", "fedgate"])
def test_momentum_needs_the_momentum_aware_divisor(name):
    """lr 0.02, momentum 0.9, 5 steps: lr tau_k overflows, lr ||a_k||_1 converges to the mean of the targets."""
    good = run(name, problem(), rounds=60, lr=0.02, epochs=5, momentum=0.9)[-1].state.model["w"]
    bad = run(name, problem(), rounds=60, lr=0.02, epochs=5, momentum=0.9, divisor="literal")
    torch.testing.assert_close(good, A.mean(0), atol=2e-3, rtol=0)
    variates = max(float(own["w"].abs().max()) for own in bad[-1].state.clients.values())
    assert variates > 1e6 or variates != variates


@pytest.mark.parametrize("name", ["scaffold", "fedgate"])
def test_the_divisor_is_of_the_rate_of_the_round(name):
    """The second round, at a quarter of the first rate, begins with what the first left behind, and what it leaves is
    again an average gradient, (theta - y_k) / S_k with S_k = 3 * 0.025."""
    result = run(name, problem(), rounds=2, epochs=3, lr_decay=0.25)
    theta = result[1].broadcast["w"]
    for update in result[1].updates:
        before = result[0].state.clients[update.client]["w"]
        shift = before - result[0].state.server["c"]["w"] if name == "scaffold" else before
        y = theta.clone()
        for _ in range(3):
            y = y - 0.025 * (y - A[update.client] - shift)
        torch.testing.assert_close(update.model["w"], y)
        gradient = (theta - y) / (0.025 * 3)
        after_round = result[1].state.clients[update.client]["w"]
        if name == "scaffold":
            torch.testing.assert_close(after_round, before - result[0].state.server["c"]["w"] + gradient)
        else:
            torch.testing.assert_close(after_round, before + gradient - (theta - result[1].state.model["w"]) / 0.075)


def test_scaffold_as_fedtorch_released_it_changes_c_within_the_round():
    """Clients of 1, 2, 5 steps: c moves after each of them, and all divide by the last one's lr tau."""
    on = problem((1, 2, 5))
    settings = {"batch": 1, "epochs": 1, "aggregator": aggregator("uniform")}
    results = run("scaffold", on, rounds=3, divisor="released", variates="released", **settings)
    theta, c, own = THETA, torch.zeros(2), [torch.zeros(2)] * 3
    for result in results:
        order = [u.client for u in result.updates]
        ends = {}
        for k in order:
            y = theta
            for _ in range((1, 2, 5)[k]):
                y = y - 0.1 * (y - A[k] + c - own[k])
            ends[k] = y
        last = (1, 2, 5)[order[-1]]
        for k in order:
            new = own[k] - c + (theta - ends[k]) / (0.1 * last)
            c = c + (new - own[k]) / 3
            own[k] = new
        theta = sum(ends.values()) / 3
        torch.testing.assert_close(result.state.model["w"], theta)
        torch.testing.assert_close(result.state.server["c"]["w"], c)
    canonical = run("scaffold", on, rounds=3, **settings)[-1].state.model["w"]
    assert (canonical - theta).abs().max() > 0.01  # the release is another method


def test_fedgate_as_fedtorch_released_it_divides_by_the_last_clients_steps():
    settings = {"batch": 1, "epochs": 1, "aggregator": aggregator("uniform"), "divisor": "released"}
    (result,) = run("fedgate", problem((1, 2, 5)), **settings)
    last = (1, 2, 5)[result.updates[-1].client]
    for update in result.updates:
        expected = (result.state.model["w"] - update.model["w"]) / (0.1 * last)
        torch.testing.assert_close(result.state.clients[update.client]["w"], expected)


def fedgate_by_hand(theta: Tensor, rounds: int, lr: float, tau: int, gamma: float) -> tuple[Tensor, list[Tensor]]:
    """Haddadpour et al., three clients, all participating."""
    delta = [torch.zeros(2) for _ in range(3)]
    for _ in range(rounds):
        ends = []
        for k in range(3):
            y = theta.clone()
            for _ in range(tau):
                y = y - lr * (y - A[k] - delta[k])
            ends.append(y)
        mean = sum(ends) / 3
        delta = [d + (mean - y) / (lr * tau) for d, y in zip(delta, ends, strict=True)]
        theta = theta - gamma * (theta - mean)
    return theta, delta


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_fedgate_follows_the_algorithm_box(gamma):
    """And sum_k delta_k stays 0. The unscaled mean is sent besides where it is not the broadcast."""
    result = run("fedgate", problem(), rounds=4, epochs=5, aggregator=aggregator("uniform"), server_lr=gamma)[-1]
    theta, delta = fedgate_by_hand(THETA, 4, 0.1, 5, gamma)
    torch.testing.assert_close(result.state.model["w"], theta)
    for k in range(3):
        torch.testing.assert_close(result.state.clients[k]["w"], delta[k])
    torch.testing.assert_close(sum(own["w"] for own in result.state.clients.values()), torch.zeros(2))
    assert result.cost.bytes_down == (1 if gamma == 1 else 2) * result.cost.bytes_up == (1 if gamma == 1 else 2) * 24


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedgate_is_scaffold_under_full_participation(momentum):
    """The same trajectory, delta_k = c_k - c."""
    settings = {"rounds": 6, "epochs": 5, "momentum": momentum, "lr": 0.05}
    gate, fold = (run(name, problem(), **settings) for name in ("fedgate", "scaffold"))
    for a, b in zip(gate, fold, strict=True):
        torch.testing.assert_close(a.state.model["w"], b.state.model["w"])
        for k in range(3):
            apart = b.state.clients[k]["w"] - b.state.server["c"]["w"]
            torch.testing.assert_close(a.state.clients[k]["w"], apart, atol=1e-5, rtol=1e-5)


def test_fedgate_only_those_who_took_part_track():
    result = run("fedgate", problem(), rounds=1, participation=0.67)[0]
    assert set(result.state.clients) == {u.client for u in result.updates}
    assert len(result.updates) == 2


@pytest.mark.parametrize("name", ["scaffold", "fedgate"])
@pytest.mark.parametrize("method", ["sfat", "q_ffl"])
def test_the_server_rate_shortens_the_step_of_any_aggregator(name, method):
    """theta + (1/2) (what the aggregator alone gives - theta), also where it keeps some of theta (q-FFL)."""
    chosen = aggregator("sfat", alpha=0.2, top=1, first_round=True) if method == "sfat" else aggregator("q_ffl", q=1.0)
    whole, half = (run(name, problem(), aggregator=chosen, server_lr=rate)[0] for rate in (1.0, 0.5))
    torch.testing.assert_close(half.state.model["w"], THETA + 0.5 * (whole.state.model["w"] - THETA))


def released_scaffold(rounds: int, constant: float, tau: int, lr: float) -> Tensor:
    """The release's update in its own units: y <- y - l (c - c_k), c_k+ = c_k - c + (theta - y)/(tau l)."""
    theta, c, own = THETA.double(), torch.zeros(2).double(), [torch.zeros(2).double() for _ in range(3)]
    for _ in range(rounds):
        ends, new = [], []
        for k in range(3):
            y = theta.clone()
            for _ in range(tau):
                y = y - lr * (y - A[k])
                y = y - constant * (c - own[k])
            ends.append(y)
            new.append(own[k] - c + (theta - y) / (tau * constant))
        c = c + sum(n - o for n, o in zip(new, own, strict=True)) / 3
        own, theta = new, sum(ends) / 3
    return theta


@pytest.mark.parametrize("constant", [1e-4, 1e-2])
def test_the_released_scaffold_does_not_depend_on_its_constant(constant):
    ours = run("scaffold_sfat", problem(), rounds=4, epochs=5)[-1].state.model["w"]
    torch.testing.assert_close(ours, released_scaffold(4, constant, 5, 0.1).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rounds", "steps"), [(3, 1), (1, 3)])
def test_dsgd_follows_the_algorithm_box(rounds, steps):
    """Momentum at the clients, the median of what they send, weight decay at the server; rounds only group steps."""
    settings = {"momentum": 0.9, "weight_decay": 0.01, "aggregator": aggregator("coordinate_median")}
    last = run("dsgd", problem(), rounds, steps=steps, **settings)[-1]
    theta, m = THETA, torch.zeros(3, 2)
    for _ in range(3):
        m = 0.9 * m + 0.1 * (theta - A)
        theta = theta - 0.1 * (m.median(0).values + 0.01 * theta)
    torch.testing.assert_close(last.state.model["w"], theta)
    kept = torch.stack([last.state.clients[k]["momentum"]["w"] for k in range(3)])
    torch.testing.assert_close(kept, m, atol=1e-6, rtol=1e-5)  # it is read off an update, which is rounded
    assert last.cost.gradient_steps == 3 * steps


def test_dsgd_is_byzfls(monkeypatch):
    """ByzFL's clients, server and optimal IPM, on our batches: clipping and NNM before the trimmed mean, four steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it needs warns as it is imported
        byzfl = pytest.importorskip("byzfl")
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (51, 1, 2, 2), dtype=torch.uint8, generator=draws)
    labels = torch.randint(0, 3, (51,), generator=draws)
    shards = [torch.tensor([50]), *torch.arange(50).split(10)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    monkeypatch.setattr(byzfl.fed_framework.models, "ours", lambda: copy.deepcopy(model), raising=False)
    common = {"model_name": "ours", "device": "cpu", "learning_rate": 0.1, "weight_decay": 0.01, "milestones": [],
              "learning_rate_decay": 1.0, "optimizer_name": "SGD"}  # fmt: skip
    rule = {"aggregator_info": {"name": "TrMean", "parameters": {"f": 1}}}
    rule["pre_agg_list"] = [{"name": "Clipping", "parameters": {"c": 0.5}}, {"name": "NNM", "parameters": {"f": 1}}]
    server = byzfl.Server({**common, **rule, "test_loader": DataLoader([0])})
    attack = {"name": "Optimal_InnerProductManipulation", "f": 1, "parameters": {**rule, "f": 1}}
    malicious = byzfl.ByzantineClient(attack)

    on = Problem(model, images, labels, shards, 3, 0, torch.device("cpu"), path="reference",
                 malicious=Malicious(1, functools.partial(ADVERSARIES["optimal_ipm"], search="byzfl")))  # fmt: skip
    batches = {k: [b for epoch in range(2) for b in epoch_batches(on, k, epoch, 5)] for k in range(1, 6)}
    clients = [
        byzfl.Client({**common, "loss_name": "CrossEntropyLoss", "LabelFlipping": False, "nb_labels": 3,
                      "momentum": 0.9, "store_per_client_metrics": False, "training_dataloader":
                      DataLoader([(images[b] / 255, labels[b]) for b in batches[k]], batch_size=None)})
        for k in batches
    ]  # fmt: skip
    for _ in range(4):
        for client in clients:
            client.set_model_state(server.get_dict_parameters())
            client.compute_gradients()
        honest = [client.get_flat_gradients_with_momentum() for client in clients]
        server.update_model_with_gradients(honest + malicious.apply_attack(honest))

    steps = {"clip": {"radius": 0.05}, "nnm": {"byzantine": 1}}
    chained = aggregator("trimmed_mean", byzantine=1)
    for pre in ("nnm", "clip"):
        chained = functools.partial(
            preaggregators.after, aggregator=chained,
            pre=functools.partial(preaggregators.PREAGGREGATORS[pre], **steps[pre]),
        )  # fmt: skip
    start = State(0, {name: value.clone() for name, value in model.state_dict().items()})
    box = functools.partial(ALGORITHMS["dsgd"], on, start, rounds=1, steps=4, batch=5, lr=0.1, momentum=0.9)
    (last,) = box(weight_decay=0.01, objective=objectives.standard, aggregator=chained)
    for name, value in server.get_dict_parameters().items():
        torch.testing.assert_close(last.state.model[name], value, atol=1e-6, rtol=1e-5)


def test_dsgd_takes_every_image_once_an_epoch():
    """A client of three images and batches of two has two steps an epoch, the second with one image."""
    sizes, seen = [], []

    def objective(model, x, y, generator):
        sizes.append(len(x))
        seen.extend((x.flatten(1)[:, 0] * 255).round().tolist())
        return quadratic(model, x, y, generator)

    on = replace(
        problem((3, 0, 0)), shards=[torch.arange(3)], images=torch.arange(6, dtype=torch.uint8).view(3, 1, 1, 2)
    )
    run("dsgd", on, 2, batch=2, steps=2, objective=objective)
    assert sizes == [2, 1, 2, 1] and sorted(seen[:3]) == sorted(seen[3:]) == [0, 2, 4]


def test_centralized_is_sgd_on_everything():
    """As released it keeps its momentum over epochs: torch's own SGD with one buffer for the whole run; it goes on from
    any epoch, to the same bytes."""
    pool = replace(problem(), shards=[torch.arange(3)])
    plain = run("centralized", pool, rounds=4)
    torch.testing.assert_close(plain[-1].state.model["w"], after(THETA, A.mean(0), 4))
    assert plain[0].cost.bytes_up == 0
    settings = {"momentum": 0.9, "weight_decay": 0.01, "moments": "released"}
    results = run("centralized", pool, rounds=4, **settings)
    w = THETA.clone().requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.01)
    for result in results:
        optimizer.zero_grad()
        (0.5 * (w - A).square().sum(1).mean()).backward()
        optimizer.step()
        torch.testing.assert_close(result.state.model["w"], w.detach())
    rest = run("centralized", pool, rounds=4, start=results[1].state, **settings)
    assert torch.equal(rest[-1].state.model["w"], results[-1].state.model["w"])
    reset = run("centralized", pool, rounds=4, momentum=0.9, weight_decay=0.01)[-1].state.model["w"]
    assert not torch.allclose(reset, w.detach())


def trains_a_number(name):
    """Whether it needs no parts of a network, no unlabelled images, and trains: the others have tests of their own."""
    signature = signatures.describe("Algorithm", name)
    needs = refusals("Algorithm", name) & {
        "auxiliary_images", "edge_and_server", "normalised_network", "two_statistics", "window_of_ssim"
    }  # fmt: skip
    return not needs and "batch" not in signature.by_name


ONE_MODEL = [name for name in ALGORITHMS if trains_a_number(name)]


@pytest.mark.parametrize("name", ONE_MODEL)
def test_uploads_of_a_round_are_gone_before_the_next_is_trained(name):
    """No `Update` is held when the first client of the second round trains: models are large."""
    on = replace(problem(), shards=[torch.arange(3)]) if name == "centralized" else problem()

    def held() -> int:
        return sum(isinstance(one, Update) for one in gc.get_objects())

    gc.collect()
    before, alive = held(), []

    def objective(*given):
        alive.append(held() - before)
        return quadratic(*given)

    steps = 0
    for result in boxed(name, on, rounds=2, objective=objective, standard=objective):
        first = steps
        steps = len(alive)
        del result
    assert 0 < first < steps and alive[first] == 0


@pytest.mark.parametrize("name", [n for n in ONE_MODEL if n != "centralized"])
@pytest.mark.parametrize("k", range(3))
def test_identical_clients_are_a_fixed_point_at_their_optimum(name, k):
    on = replace(problem(), shards=[torch.tensor([k])] * 3)
    start = State(0, {"w": A[k].clone()})
    torch.testing.assert_close(run(name, on, rounds=3, start=start)[-1].state.model["w"], A[k])


def test_a_cohort_is_drawn_in_random_order_without_repetition():
    orders = [[u.client for u in r.updates] for r in run("fedavg", problem(), rounds=12)]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert {len(r.updates) for r in run("fedavg", problem(), rounds=3, participation=0.67)} == {2}


def test_clipping_decay_and_warm_up():
    """Rates 0.1 and 0.05, one step a round: factors 0.9 and 0.95. Two rounds of warm-up at the objective with twice the
    gradient: factors 0.8, 0.8 and 0.9."""
    update = run("fedavg", problem(), epochs=1, clip=0.01)[0].updates[0]
    assert float((update.model["w"] - THETA).norm()) == pytest.approx(0.1 * 0.01, rel=1e-3)

    def doubled(*given):
        loss, correct = quadratic(*given)
        return 2 * loss, correct

    for rounds, factor, settings in (
        (2, 0.9 * 0.95, {"lr_decay": 0.5}), (3, 0.8 * 0.8 * 0.9, {"warmup": doubled, "warmup_rounds": 2}),
    ):  # fmt: skip
        result = run("fedavg", problem(), rounds=rounds, epochs=1, **settings)[-1].state.model["w"]
        torch.testing.assert_close(result, A.mean(0) + factor * (THETA - A.mean(0)))


def test_local_epochs_fall_over_the_rounds_and_the_plan_counts_them():
    """20 halved every 10 rounds and cut to whole ones, at least 1; a factor of 1 is what it was."""
    local = LocalTraining(batch=1, lr=0.1, objective=None, epochs=20, epochs_factor=0.5, epochs_every=10)
    assert [local.at(t).epochs for t in (0, 9, 10, 20, 30, 40, 50, 60)] == [20, 20, 10, 5, 2, 1, 1, 1]
    assert [replace(local, epochs_factor=1.0).at(t).epochs for t in (0, 99)] == [20, 20]
    results = run("fedavg", problem(), rounds=5, epochs=4, epochs_factor=0.5, epochs_every=2)
    assert [result.cost.gradient_steps for result in results] == [12, 12, 6, 6, 3]
    torch.testing.assert_close(results[-1].state.model["w"], after(THETA, A.mean(0), 13))


def test_broadcast_loss_is_measured_only_for_aggregators_that_ask():
    assert run("fedavg", problem())[0].updates[0].stats.broadcast_loss is None
    update = run("fedavg", problem(), aggregator=aggregator("q_ffl", q=1.0))[0].updates[0]
    expected = 0.5 * float((THETA - A[update.client]).square().sum())
    assert update.stats.broadcast_loss == pytest.approx(expected, rel=1e-5)


def cross_entropy_of(w: Tensor) -> float:
    """Of label 0 and logits (w_1, w_2), which is what Point gives for any image."""
    return float(torch.log1p(torch.exp(w[1] - w[0])))


def test_validators_never_train_and_lower_the_rate():
    """Clients 0 and 1 train, client 2 validates: log(1 + exp(w_2 - w_1)) of each new model. The targets pull w_2 - w_1
    from -4 up, so the loss rises from round to round: the first is the least there is, and from then on the rate is
    lr / sqrt(rounds passed) of the round before, 1, 1, 2, 3, ... One step of rate r: theta + r (mean of a - theta)."""
    start = State(0, {"w": torch.tensor([3.0, -1.0])})
    result = run("fedavg_validated", problem(), rounds=5, epochs=1, validators=1, start=start)
    theta, target = start.model["w"], A[:2].mean(0)
    for t, r in enumerate(result):
        assert sorted(u.client for u in r.updates) == [0, 1]
        rate = 0.1 / max(t, 1) ** 0.5
        assert r.metrics["lr"] == pytest.approx(rate)
        theta = theta + rate * (target - theta)
        torch.testing.assert_close(r.state.model["w"], theta)
        assert r.metrics["validation_loss"] == pytest.approx(cross_entropy_of(theta), rel=1e-5)


def test_the_rate_stays_while_the_validation_loss_falls_and_falls_again_from_where_it_is():
    """From w_2 - w_1 = 4 down to 0.3, the loss falls every round. With lr_decay both factors apply.

    Best so far 0, last failure after 4 rounds: the rate is lr / 2 until round 9 fails as well, then lr / 3.
    """
    start = State(0, {"w": torch.tensor([-1.0, 3.0])})
    result = run("fedavg_validated", problem(), rounds=4, epochs=1, validators=1, start=start, lr_decay=0.5)
    assert [r.metrics["lr"] for r in result] == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    losses = [r.metrics["validation_loss"] for r in result]
    assert losses == sorted(losses, reverse=True)
    known = {"validation": {"least": torch.tensor(0.0), "passed": torch.tensor(4.0)}}
    result = run("fedavg_validated", problem(), rounds=10, validators=1, start=State(8, {"w": THETA}, known))
    assert [r.metrics["lr"] for r in result] == pytest.approx([0.1 / 2, 0.1 / 3])
    assert float(result[-1].state.server["validation"]["least"]) == 0.0


def test_participation_is_of_those_who_train():
    """10 clients of which 5 validate, 0.4 of the others: 2, drawn from 0 .. 4."""
    on = replace(problem((10,)), shards=list(torch.arange(10).split(1)))
    rounds = run("fedavg_validated", on, rounds=8, validators=5, participation=0.4)
    assert {len(r.updates) for r in rounds} == {2}
    assert {u.client for r in rounds for u in r.updates} == {0, 1, 2, 3, 4}
    assert run("fedavg", problem())[0].metrics == {}


def test_validation_resumes_bit_for_bit_beside_a_aggregator_with_memory():
    """AFL keeps lambda, the algorithm its validation: neither sees the other's, and both go on after round 2."""
    afl = aggregator("afl", gamma=0.5)
    settings = {"rounds": 5, "validators": 1, "batch": 2, "participation": 0.67, "aggregator": afl}
    on = problem((2, 3, 4))
    whole = run("fedavg_validated", on, **settings)
    kept = {name: set(own) for name, own in whole[-1].state.server.items()}
    assert kept == {"aggregator": {"lambda"}, "validation": {"least", "passed"}}
    rest = run("fedavg_validated", on, start=whole[1].state, **settings)
    for a, b in zip(whole[2:], rest, strict=True):
        assert torch.equal(a.state.model["w"], b.state.model["w"])
        assert a.metrics == b.metrics
        assert same(a.state.server, b.state.server)
