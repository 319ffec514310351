"""Malicious clients: the closed form of each adversary, where it enters a round, what becomes of what it destroys."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import members
import pytest
import torch
from algorithm_runs import same
from test_inject import one_pixel, towards_the_pixel
from torch import nn

import fatbench
from fatbench.engine.accuracy import natural
from fatbench.engine.cohort import draw_cohort, train_cohort
from fatbench.engine.experiment import Diverged
from fatbench.engine.inject import asks
from fatbench.engine.local import LocalTraining
from fatbench.engine.malicious import Malicious, NoHonestClient, deal, finite, target_of
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.randomness import generator
from fatbench.engine.rounds import Context, Cost, Problem, Round, State
from fatbench.errors import SpecError
from fatbench.methods.adversaries import ADVERSARIES, with_square
from fatbench.methods.aggregators import AGGREGATORS, uniform
from fatbench.methods.algorithms import ALGORITHMS
from fatbench.methods.objectives import standard
from fatbench.report import render
from fatbench.report.numbers.doubts import Doubt
from fatbench.suite import cells, signatures
from fatbench.testing import initial_state, local, rounds, small_problem

U = torch.tensor([1.0, -2.0])
OTHERS = torch.tensor([[1.0, 0.0], [3.0, 2.0], [2.0, 4.0]])


def adversary(name: str, **settings: Any) -> Callable[..., Any]:
    return functools.partial(ADVERSARIES[name], **settings)


def averaged(on: Problem, lr: float) -> Round:
    """A round of FedAvg on one weight from 0, whose clients take a step towards their pixel."""
    how = LocalTraining(batch=1, lr=lr, objective=towards_the_pixel)
    (result,) = ALGORITHMS["fedavg"](on, State(0, {"w": torch.zeros(1)}), rounds=1, aggregator=uniform, local=how)
    return result


# --- closed forms -------------------------------------------------------------------------------------------------


def test_label_flip_takes_y_to_c_minus_1_minus_y() -> None:
    images = torch.zeros(5, 1, 1, 1, dtype=torch.uint8)
    same_images, labels = ADVERSARIES["label_flip"](images, torch.tensor([0, 1, 2, 3, 4]), 5)
    assert same_images is images and labels.tolist() == [4, 3, 2, 1, 0]


def test_sign_flips_differ_after_two_steps() -> None:
    """Loss h (w - a)^2 / 2 with h = rate 0.1, two steps from w = 0, a = 1: honest u = 0.19, the upload flipped -0.19,
    the gradients flipped -0.21; the loss that is reported is that of the clients' own last step.
    """
    how = LocalTraining(batch=1, lr=0.1, epochs=2, objective=towards_the_pixel)
    on = one_pixel((255, 255))
    found = {}
    for name in ("sign_flip", "sign_flip_gradients"):
        liar = replace(on, malicious=Malicious("1", adversary(name)))
        honest, other = train_cohort(liar, {"w": torch.zeros(1)}, [0, 1], 0, how)
        assert honest.model["w"].item() == pytest.approx(0.19)
        found[name] = other
    assert found["sign_flip"].model["w"].item() == pytest.approx(-0.19)
    assert found["sign_flip_gradients"].model["w"].item() == pytest.approx(-0.21)
    assert found["sign_flip_gradients"].stats.loss == pytest.approx(0.5 * 1.1**2)  # at w = -0.1


def test_gaussian_upload_has_nothing_of_the_update() -> None:
    gaussian = adversary("gaussian_upload", mean=0.1, std=0.5)
    noise, other = (gaussian(torch.full((20_000,), value), generator(0, "g")) for value in (0.0, 9.0))
    assert torch.equal(noise, other)
    assert noise.mean().item() == pytest.approx(0.1, abs=0.02)
    assert noise.std().item() == pytest.approx(0.5, abs=0.02)
    standard = torch.empty(20_000).normal_(generator=generator(0, "g"))
    assert torch.equal(noise, 0.1 + 0.5 * standard)


def test_ipm_is_minus_epsilon_times_the_mean() -> None:
    assert ADVERSARIES["ipm"](U, OTHERS, epsilon=0.5).tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("n", "f", "z"), [(20, 4, 0.15731), (50, 12, 0.33604), (60, 18, 0.49720), (10, 2, 0.0), (8, 5, 0.43073)]
)
def test_alie_is_as_far_from_the_mean_as_enough_honest_clients(n: int, f: int, z: float) -> None:
    """s = floor(n/2) + 1 - f, z = Phi^-1((n - f - s) / (n - f)), s > 0; updates with mean 3 and deviation 2."""
    others = torch.randn(n - f, 1, generator=generator(0, "alie"), dtype=torch.float64)
    others = 3 + 2 * (others - others.mean()) / others.std()
    for sign, way in (("minus", -1), ("plus", 1)):
        sent = ADVERSARIES["alie"](torch.zeros(1, dtype=torch.float64), others, f, sign=sign)
        assert sent.item() == pytest.approx(3 + way * 2 * z, abs=2e-5)
    assert ADVERSARIES["alie"](torch.zeros(1), others, f, z=1.5).item() == pytest.approx(0.0, abs=1e-6)
    assert torch.equal(ADVERSARIES["alie"](U, OTHERS[:1], 1), OTHERS[0])  # one honest client does not deviate


def test_min_max_is_as_far_out_as_the_honest_are_apart() -> None:
    """Updates 0, 2 and 4: mean 2, deviation 2, largest distance 4. 2 - 2 gamma is 4 away from 4 at gamma 1."""
    others = torch.tensor([[0.0], [2.0], [4.0]])
    sent = ADVERSARIES["min_max"](torch.zeros(1), others, tolerance=1e-6)
    assert sent.item() == pytest.approx(0.0, abs=1e-4)
    assert float((others - sent).abs().max()) <= 4.0  # the last gamma that fits


def test_badnets_changes_a_fraction_of_the_images_and_nothing_else_of_them() -> None:
    images = torch.randint(0, 255, (10, 3, 8, 8), generator=generator(0, "b"), dtype=torch.uint8)
    labels = torch.arange(10) % 3
    x, y = ADVERSARIES["badnets"](images, labels, generator(0, "p"), target=2, fraction=0.35, size=5)
    changed = (x != images).flatten(1).any(1)
    assert int(changed.sum()) == 3 and set(y[changed].tolist()) == {2} and torch.equal(y[~changed], labels[~changed])
    assert (x != images)[changed].flatten(1).sum(1).tolist() == [25 * 3] * 3
    assert torch.equal(with_square(x[changed], 5), x[changed])
    assert torch.equal(with_square(images / 255, 5), with_square(images, 5) / 255)
    with pytest.raises(ValueError, match="a square of 8 pixels on images of 8 x 8"):
        ADVERSARIES["badnets"](images, labels, generator(0, "p"), target=2, size=8)


def test_badnets_takes_the_floor_of_the_fraction() -> None:
    """0.29 of 100 is 28.999999999999996 in floats, and means 29."""
    for fraction, n, changed in ((0.29, 100, 29), (0.5, 4, 2), (0.35, 20, 7), (0.349, 20, 6), (0.0, 5, 0), (1.0, 5, 5)):
        images, labels = torch.zeros(n, 1, 2, 2, dtype=torch.uint8), torch.zeros(n, dtype=torch.int64)
        x, y = ADVERSARIES["badnets"](images, labels, generator(0, "p"), target=1, fraction=fraction, size=1)
        assert int(y.sum()) == int((x == 255).sum()) == changed


def test_a_scaled_update_replaces_the_model() -> None:
    """Three clients; two honest ones stand at their optimum, u = 0, the third is scaled by 3: the mean is its model."""
    on = replace(one_pixel((0, 0, 255)), malicious=Malicious("2", adversary("model_replacement", factor=3.0)))
    assert averaged(on, 0.5).state.model["w"].item() == pytest.approx(0.5)


def malicious(name: str, which: int | str = 1) -> Malicious:
    return Malicious(which, members.member("Adversary", name))


# --- where they enter ---------------------------------------------------------------------------------------------


def test_the_mean_reverses_if_epsilon_is_above_honest_by_malicious() -> None:
    """IPM under the mean: mean (n - f (1 + epsilon)) / n of the honest step; 0 at epsilon 4 with n = 10, f = 2."""
    for epsilon, factor in ((4.0, 0.0), (9.0, -1.0), (0.5, 0.7)):
        on = replace(one_pixel((255,) * 10), malicious=Malicious(2, adversary("ipm", epsilon=epsilon)))
        result = averaged(on, 0.1)
        assert result.state.model["w"].item() == pytest.approx(0.1 * factor, abs=1e-7)
        sent = {update.client: update.model["w"].item() for update in result.updates}
        assert sent[0] == sent[1] == pytest.approx(-0.1 * epsilon) and sent[5] == pytest.approx(0.1)


def test_an_adversary_is_given_what_it_names() -> None:
    """Which parameters are the last layer's, those received, how many are malicious, the round, a stream of its own."""
    seen: list[Any] = []

    def curious(update, others, broadcast, last_layer, malicious, round, generator):  # type: ignore[no-untyped-def]
        seen.append((others.shape, malicious, round, torch.rand(1, generator=generator).item()))
        torch.testing.assert_close(broadcast, theta)
        assert last_layer.tolist() == [False] * 6 + [True] * 16
        return torch.zeros_like(update)

    model = nn.Sequential(nn.AvgPool2d(12), nn.Flatten(), nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 4))
    on = replace(small_problem(model, clients=4), malicious=Malicious("1,3", curious))
    theta = torch.cat([value.flatten() for value in initial_state(on).model.values()])
    updates = train_cohort(on, initial_state(on).model, [3, 0, 1], 7, local())
    draws = [torch.rand(1, generator=generator(on.seed, "adversary", 7, k)).item() for k in (3, 1)]
    assert seen == [((1, 22), 2, 7, draw) for draw in draws] and draws[0] != draws[1]
    for update in (updates[0], updates[2]):
        assert same(update.model, initial_state(on).model)  # nothing is what it sends


def test_without_an_honest_client_in_the_round_an_omniscient_one_sends_what_is_honest() -> None:
    on = small_problem()
    liar = replace(on, malicious=Malicious(1, adversary("ipm")))
    (round_,) = [t for t in range(3) if draw_cohort(on, t, 0.4) == [0]]
    given = draw_cohort(on, round_, 0.4), round_, local()
    ours, theirs = (train_cohort(one, initial_state(on).model, *given) for one in (on, liar))
    torch.testing.assert_close(ours[0].model, theirs[0].model)


def a_call_a_client(problem: Problem, state: State, *, rounds: int, local: LocalTraining, groups: Any = None) -> Any:
    """FedAvg whose clients train in several calls: those of `groups`, or one by one."""
    for t in range(state.round, rounds):
        updates = []
        for group in groups or [[k] for k in draw_cohort(problem, t, 1.0)]:
            updates += train_cohort(problem, state.model, group, t, local)
        mixing = aggregate(uniform, updates, Context(t, rounds, problem, state.model, {}, local.lr))
        state = State(t + 1, mix(updates, mixing, state.model, problem.model))
        yield Round(t, updates[0].model, updates, mixing, state, Cost())


@pytest.mark.parametrize(
    "name", [name for name, one in ADVERSARIES.items() if asks(one, "others") and target_of(one) == "update"]
)
def test_a_call_of_malicious_clients_alone_disarms_nobody(name: str) -> None:
    """Refused with the call; where it has an honest client, or the adversary asks for nobody, it runs."""
    liar = malicious(name, "1")
    on = replace(small_problem(clients=4), malicious=liar)
    one_by_one = functools.partial(a_call_a_client, rounds=1, local=local())
    of = rf"train_cohort of round 1 is called with the malicious clients \[1\] alone, .* adversary {name}"
    message = rf"{of} asks for "
    for groups in (None, [[1], [0, 2, 3]], [[0, 2, 3], (1,)]):
        with pytest.raises(NoHonestClient, match=message + "'others'"):
            rounds(on, functools.partial(one_by_one, groups=groups), malicious=liar)
    (result, _), honest = (
        rounds(replace(on, malicious=one), functools.partial(one_by_one, groups=[[2, 1], [0, 3]]), malicious=one)[0]
        for one in (liar, None)
    )
    sent, trained = ({u.client: u.model for u in done.updates} for done in (result, honest[0]))
    assert [same(sent[k], trained[k]) for k in range(4)] == [True, False, True, True]
    for other in (None, malicious("sign_flip", "1")):
        rounds(replace(on, malicious=other), one_by_one, malicious=other)


def test_an_adversary_that_asks_how_many_they_are_is_not_told_one() -> None:
    def counting(update, malicious):  # type: ignore[no-untyped-def]
        return malicious * update

    on = replace(small_problem(clients=4), malicious=Malicious("0,1", counting))
    with pytest.raises(NoHonestClient, match="adversary counting asks for 'malicious'"):
        train_cohort(on, initial_state(on).model, [0], 0, local())
    first, second, *_ = train_cohort(on, initial_state(on).model, range(4), 0, local())
    plain = train_cohort(replace(on, malicious=None), initial_state(on).model, range(4), 0, local())
    for ours, theirs in ((first, plain[0]), (second, plain[1])):
        for key, _ in on.model.named_parameters():
            theta = initial_state(on).model[key]
            torch.testing.assert_close(ours.model[key] - theta, 2 * (theirs.model[key] - theta))


def test_uploads_that_are_not_finite_are_left_out_and_counted() -> None:
    on = small_problem()
    broken = replace(on, malicious=Malicious("1", adversary("model_replacement", factor=math.inf)))
    updates = train_cohort(broken, initial_state(on).model, [0, 1, 2], 0, local())
    assert [(update.client, update.refused) for update in updates] == [(0, 1), (2, 1)]
    (alone,) = train_cohort(broken, initial_state(on).model, [1], 0, local())
    assert alone.refused == 0 and not finite(alone.model)  # nobody else is left


def with_a_client_that_breaks(aggregator: Any) -> tuple[Problem, list[Any]]:
    """Five honest clients, of which the second trains at a rate that no float survives."""
    on, broken = small_problem(clients=5), {1: local(lr=1e38, epochs=3)}
    model = initial_state(on).model
    return on, train_cohort(on, model, [*range(5)], 0, local(), aggregator=aggregator, locals=broken)


ROBUST = {
    "krum": {"byzantine": 1}, "multi_krum": {"byzantine": 1}, "trimmed_mean": {"byzantine": 1},
    "geometric_median": {}, "coordinate_median": {}, "centred_clipping": {},
}  # fmt: skip


@pytest.mark.parametrize(("name", "settings"), ROBUST.items())
def test_a_robust_aggregator_leaves_out_what_is_not_finite_without_malice(name: str, settings: dict[str, Any]) -> None:
    """Krum chose the client whose distances are NaN, and the geometric median ended in an error."""
    aggregator = functools.partial(AGGREGATORS[name], **settings)
    on, updates = with_a_client_that_breaks(aggregator)
    assert [(update.client, update.refused) for update in updates] == [(0, 1), (2, 1), (3, 1), (4, 1)]
    mixing = aggregate(aggregator, updates, Context(0, 3, on, initial_state(on).model, {}, 0.05))
    assert finite(mixing.model or mix(updates, mixing, initial_state(on).model, on.model))


@pytest.mark.parametrize(
    "aggregator", [None, AGGREGATORS["samples"], functools.partial(AGGREGATORS["trimmed_mean"], byzantine=0)]
)
def test_one_that_says_of_itself_that_it_bears_none_gets_every_upload(aggregator: Any) -> None:
    _, updates = with_a_client_that_breaks(aggregator)
    assert len(updates) == 5 and not finite(updates[1].model)


def test_data_are_changed_where_they_are_dealt_and_nobody_elses() -> None:
    on = small_problem()
    images, labels = deal(Malicious("0,2", adversary("label_flip")), on.shards, on.images, on.labels, 4, 0)
    assert images is on.images
    for k, shard in enumerate(on.shards):
        assert torch.equal(labels[shard], on.labels[shard] if k == 1 else 3 - on.labels[shard])
    draws: list[float] = []

    def drawing(images, labels, generator):  # type: ignore[no-untyped-def]
        draws.append(torch.rand(1, generator=generator).item())
        return images, labels

    deal(Malicious("0,2", drawing), on.shards, on.images, on.labels, 4, 9)
    assert draws == [torch.rand(1, generator=generator(9, "adversary", k)).item() for k in (0, 2)]
    with pytest.raises(ValueError, match="client 3 does not exist"):
        deal(Malicious("3", adversary("label_flip")), on.shards, on.images, on.labels, 4, 0)


# --- what makes a training diverge --------------------------------------------------------------------------------


def everywhere(update: torch.Tensor, *, size: float) -> torch.Tensor:
    return torch.full_like(update, size)


def trained_among(
    size: float, aggregator: Any, *, algorithm: str = "fedavg", rounds_: int = 2, monitor: Any = natural
) -> tuple[list[Any], dict[Any, float]]:
    """The rounds of five clients of whom client 0 sends `size` everywhere, and the numbers of the last."""
    liar = Malicious("0", functools.partial(everywhere, size=size))
    on = replace(small_problem(clients=5, images_per_client=8), malicious=liar)
    settings = {"rounds": rounds_, "local": local(), "aggregator": aggregator}
    done = rounds(on, functools.partial(ALGORITHMS[algorithm], **settings), monitor=monitor, malicious=liar)
    return [result for result, _ in done], done[-1][1]


@pytest.mark.parametrize(("name", "settings"), ROBUST.items())
def test_one_long_upload_changes_no_number_of_the_model(name: str, settings: dict[str, Any]) -> None:
    """From 1e15 to 1e30 the model stays the same, and drift is |u| / m: its squares do not fit into float32."""
    aggregator = functools.partial(AGGREGATORS[name], **settings)
    found = {size: trained_among(size, aggregator) for size in (1e15, 1e18, 1e20, 1e30, 3e38)}
    for size, (results, numbers) in found.items():
        assert len(results) == 2 and ("diverged", -1) not in numbers
        assert numbers["natural", -1] == found[1e15][1]["natural", -1]
        assert all(math.isfinite(value) for value in numbers.values())
        assert not [metric for metric, _ in numbers if metric.startswith("doubt_")]
        sent = size * math.sqrt(sum(weight.numel() for weight in small_problem().model.parameters()))
        assert numbers["drift_pre", -1] == pytest.approx(sent / 5, rel=1e-5)
        assert numbers["drift_post", -1] == pytest.approx(sent / 5, rel=1e-5)
        assert numbers["grad_var", -1] == pytest.approx(0.16 * sent**2, rel=1e-5)  # (16 + 4) / 25 of five


def test_a_mean_of_long_uploads_has_diverged() -> None:
    """Its model is finite, and its loss on clean images not a number, whether or not a monitor looks."""
    for monitor in (natural, None):
        for size in (1e18, 1e30):
            results, numbers = trained_among(size, AGGREGATORS["uniform"], rounds_=1, monitor=monitor)
            assert finite(results[-1].state.model) and numbers["diverged", -1] == 1


def test_the_loss_of_one_client_decides_nothing() -> None:
    """Client 0 reports NaN and trains on 0: the number is left out, with a mark, and training goes on."""

    def nan(model, x, y, generator, client):  # type: ignore[no-untyped-def]
        loss, correct = standard(model, x, y, generator)
        return loss if client else 0 * loss + math.nan, correct

    for liar in (None, Malicious("0", functools.partial(everywhere, size=0.0))):
        on = replace(small_problem(clients=3), malicious=liar)
        how = functools.partial(ALGORITHMS["fedavg"], rounds=2, aggregator=uniform, local=local(objective=nan))
        done = rounds(on, how, monitor=natural, malicious=liar)
        assert len(done) == 2 and finite(done[-1][0].state.model)
        for _, numbers in done:
            assert {name for name, _ in numbers if name.startswith("doubt_")} == {
                "doubt_train_loss_is_not_finite", "doubt_mixed_loss_is_not_finite"
            }  # fmt: skip
            assert ("train_loss", 0) not in numbers and ("train_loss", 1) in numbers


def test_a_long_upload_of_a_client_that_nobody_calls_malicious() -> None:
    """A rate of 1e20 in a single step: the upload is finite, and a median bears it."""
    liar = replace(local(epochs=1, batch=64), lr=1e20)

    def one_wild(problem: Problem, state: State, *, rounds: int, local: LocalTraining) -> Any:
        for t in range(state.round, rounds):
            updates = train_cohort(problem, state.model, [0, 1, 2], t, local, locals={0: liar})
            context = Context(t, rounds, problem, state.model, {}, 0.1)
            mixing = aggregate(AGGREGATORS["coordinate_median"], updates, context)
            state = State(t + 1, mix(updates, mixing, state.model, problem.model))
            yield Round(t, updates[0].model, updates, mixing, state, Cost())

    done = rounds(small_problem(), functools.partial(one_wild, rounds=2, local=local()), monitor=natural)
    for _, numbers in done:
        assert 1e15 < numbers["drift_post", -1] < math.inf and numbers["grad_var", -1] > 1e30
        assert not [name for name, _ in numbers if name.startswith("doubt_")]


def test_a_training_without_malicious_clients_still_fails_where_its_model_is_not_finite() -> None:
    how = functools.partial(ALGORITHMS["fedavg"], rounds=3, aggregator=uniform, local=local(lr=1e30, epochs=2))
    with pytest.raises(Diverged, match=r"round 1: training loss of client \d is "):
        rounds(small_problem(), how)


@pytest.mark.parametrize("size", [1e18, 1e30, math.nan])
def test_one_clients_own_model_does_not_end_the_others(size: float) -> None:
    """FedBN deploys a model a client; that of the malicious one answers nothing, the others do."""
    results, numbers = trained_among(size, AGGREGATORS["coordinate_median"], algorithm="fedbn")
    assert len(results) == 2 and ("diverged", -1) not in numbers
    for k in (1, 2, 3, 4):
        assert numbers["natural", k] > 0
    results, numbers = trained_among(1e30, AGGREGATORS["uniform"], algorithm="fedbn", rounds_=1)
    assert numbers["diverged", -1] == 1  # here the shared weights of all are broken


def test_a_number_that_is_not_finite_is_left_out_with_a_mark() -> None:
    def odd(updates, context):  # type: ignore[no-untyped-def]
        return replace(uniform(updates, context), metrics={"odd": math.inf, "even": {0: math.nan, 1: 2.0}})

    how = functools.partial(ALGORITHMS["fedavg"], rounds=1, aggregator=odd, local=local())
    for liar in (None, malicious("sign_flip")):
        ((_, numbers),) = rounds(replace(small_problem(), malicious=liar), how, malicious=liar)
        assert ("odd", -1) not in numbers and ("even", 0) not in numbers and numbers["even", 1] == 2.0
        assert numbers["doubt_odd_is_not_finite", -1] == numbers["doubt_even_is_not_finite", -1] == 1.0
    assert Doubt("odd_is_not_finite_in_rounds", 1.0).words == "odd is not finite in 1 rounds"


# --- in a suite ---------------------------------------------------------------------------------------------------

SUITE = """
name: liars
title: Malicious clients
seeds: [0]
base:
  data: digits
  train: 200
  test: 100
  validation: 40
  partition: {name: iid, clients: 4}
  model: {name: mlp}
  monitor: natural
  algorithm: {name: fedavg, rounds: 12, aggregator: samples, local: &local {batch: 20, lr: 0.5, objective: standard}}
axes:
  clients:
    honest: {}
    destroyed: {malicious: {clients: 1, attack: {name: ipm, epsilon: 100000000.0}}}
    infinite: {malicious: {clients: "2", attack: {name: model_replacement, factor: 1.0e+60}}}
    distrusted:
      malicious: {clients: 3, attack: sign_flip}
      algorithm: {name: fltrust, rounds: 12, participation: 0.25, root: 40, local: *local}
evaluate:
  attacks: {natural: natural, fgsm: {name: fgsm, eps: 0.1}}
presets: {paper: {}}
tables:
  - {id: T, title: T, rows: [clients], values: {Clean: natural, FGSM: fgsm}}
"""


def cell(**changes: Any) -> dict[str, Any]:
    """A cell of ten clients with three malicious ones."""
    spec = {
        "data": "digits", "partition": {"name": "iid", "clients": 10}, "model": "mlp", "seed": 0,
        "algorithm": {"name": "fedavg", "rounds": 1, "aggregator": "uniform",
                      "local": {"batch": 8, "lr": 0.1, "objective": "standard"}},
        "malicious": {"clients": 3, "attack": "sign_flip"},
    }  # fmt: skip
    return {**spec, **changes}


@pytest.mark.parametrize(
    ("malicious", "message"),
    [
        ({"clients": 0}, 'expected a number of clients, or their numbers such as "3,7", got 0'),
        ({"clients": "3-7"}, 'expected a number of clients, or their numbers such as "3,7", got'),
        ({"clients": 10}, "malicious: clients: all 10 clients are malicious: none is honest"),
        ({"clients": 11}, "malicious: clients: no client 10: "),
        ({"clients": "0,12"}, "malicious: clients: no client 12: "),
        ({"attack": "ipn"}, "no adversary is named 'ipn' (did you mean 'ipm'?)"),
        ({"attack": {"name": "alie", "z": 0}}, "should be greater than 0, got 0"),
    ],
)
def test_bad_input_is_refused_with_the_suite(malicious: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        cells.canonical(cell(malicious={**cell()["malicious"], **malicious}))
    assert message in str(caught.value)


def test_an_aggregator_says_how_many_it_bears(tmp_path: Path, own_plugins: None) -> None:
    """Of three malicious clients in all, one takes part in an average round of five."""
    plugin = tmp_path / "krum.py"
    plugin.write_text(
        "from fatbench.suite.entry import AggregatorEntry\n"
        "from fatbench.suite.types import Count\n\n\n"
        'def krum(updates, context, *, bad: Count = 1):\n    """Krum."""\n\n\n'
        "def so_many(cell, *, bad):\n    return min(bad, (cell.cohort - 3) // 2)\n\n\n"
        "AGGREGATORS = {'my_krum': AggregatorEntry(krum, bears=so_many)}\n"
    )
    signatures.add_plugin(plugin)
    algorithm = {**cell()["algorithm"], "aggregator": "my_krum"}
    with pytest.raises(SpecError) as caught:
        cells.canonical(cell(algorithm=algorithm))
    assert "algorithm: aggregator: 3 malicious clients of 10, my_krum bears at most 1" in str(caught.value)
    for allowed in ({"aggregator": {"name": "my_krum", "bad": 3}}, {"participation": 0.5}):
        cells.canonical(cell(algorithm={**algorithm, **allowed}))


def test_an_adversary_that_an_algorithm_would_not_hear_is_refused() -> None:
    algorithm = {"name": "fedsgd", "rounds": 1, "batch": 4, "lr": 0.1, "objective": "standard", "defence": "none"}
    with pytest.raises(SpecError, match=r"'sign_flip' changes .* fedsgd aggregates no models"):
        cells.canonical(cell(algorithm=algorithm, model={"name": "vit", "patch": 4, "dim": 16, "depth": 1, "heads": 2}))


def test_a_model_that_malicious_clients_destroy_is_a_result(tmp_path: Path, monkeypatch: Any, forks: None) -> None:
    """Trained to the round that ended it, with chance as its accuracy under every attack, and a mark at the number in
    every format; the cell whose infinite uploads were left out is as good as an honest one, and says so.
    """
    monkeypatch.chdir(tmp_path)
    Path("liars.yaml").write_text(SUITE)
    done = fatbench.run("liars.yaml", jobs=1, device="cpu", quiet=True)
    assert done["status"].tolist() == ["done"] * 4
    table = fatbench.table("liars.yaml")
    (grid,) = table.grids
    honest, destroyed, infinite, distrusted = (row.values[0] for row in grid.rows)
    results = fatbench.results("liars.yaml", stage=None)
    (chance,) = set(results[results["metric"] == "chance"]["value"])
    assert [value.mean for value in destroyed] == [chance, chance]
    (said,) = {value.doubts for value in destroyed}
    assert [flag for flag in said if "diverged" in flag] == [said[0]]
    assert said[0].startswith("training diverged in round ") and said[0].endswith("that of the most frequent class")
    assert "12 uploads were not finite and were left out" in infinite[0].doubts
    assert infinite[0].mean > 0.5 and honest[0].doubts == ()
    kept = results.query("metric == 'trusted' and value == 0")
    assert 0 < len(kept) < 12 and f"no update was trusted in {len(kept)} rounds" in distrusted[0].doubts
    for how in ("markdown", "latex", "csv", "json", "html", "terminal"):
        assert "training diverged in round" in render(table.grids, how), how
    assert (results[results["metric"] == "diverged"]["value"] < 12).all()
