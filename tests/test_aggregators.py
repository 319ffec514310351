"""Aggregators: exact small numbers, properties of every aggregator, the release transcribed by itself."""

from __future__ import annotations

import copy
import functools
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import members
import numpy
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from updates import Net, client, cohort, context, frozen_net, problem

import fatbench
from fatbench.engine.inject import asks
from fatbench.engine.mixing import aggregate, last_layer_cosines, mix
from fatbench.engine.rounds import Context, Mixing, Problem, Tensors, Update
from fatbench.errors import SpecError
from fatbench.methods.adfl import draw_images
from fatbench.methods.aggregators import AGGREGATORS, project_to_simplex
from fatbench.models import MODELS
from fatbench.suite import calls, facts, signatures
from fatbench.suite.entry import in_table
from fatbench.suite.facts import Facts

IMPROPER = {name for name in AGGREGATORS if "Improper" in signatures.describe("Aggregator", name).summary}
SIMPLE = [name for name in AGGREGATORS if not any(s.kind for s in signatures.describe("Aggregator", name).settings)]
ASKING = [aggregator for aggregator in AGGREGATORS if asks(AGGREGATORS[aggregator], "broadcast_losses")]

# Three clients with N = 1, 2, 5 and losses 3, 1, 2: client 1 has the smallest loss. N_k L_k = 3, 2, 10.
THREE = [client(0, 1, 3.0), client(1, 2, 1.0), client(2, 5, 2.0)]


def mixing_of(aggregator: str, updates: list[Update], at: Context, **arguments: object) -> Mixing:
    """As the engine calls an aggregator: given what it asks for."""
    return aggregate(functools.partial(AGGREGATORS[aggregator], **arguments), updates, at)


def weights(
    aggregator: str, updates: list[Update] = THREE, at: Context | None = None, **arguments: object
) -> list[float]:
    return mixing_of(aggregator, updates, at or context(len(updates)), **arguments).weights


# --- exact numbers ------------------------------------------------------------------------------------------------


NK = [1 / 8, 2 / 8, 5 / 8]
FIVE = [client(k, 10, loss) for k, loss in enumerate([3.0, 2.0, 1.0, 5.0, 4.0])]
SOFT = [client(0, 1, 0.0), client(1, 2, math.log(2)), client(2, 4, math.log(4))]
THIRD = {"alpha": 1 / 3, "top": 1}


@pytest.mark.parametrize(
    ("aggregator", "updates", "at", "settings", "expected"),
    [
        ("samples", THREE, {}, {}, NK),
        ("uniform", THREE, {}, {}, [1 / 3] * 3),
        # alpha 1/3 is r = 2: P N = 1, 4, 5, together 10. Round 0 is plain FedAvg, unless asked for
        ("sfat", THREE, {}, THIRD, [0.1, 0.4, 0.5]),
        ("sfat", THREE, {}, {"alpha": 0.0, "top": 1}, NK),
        ("sfat", THREE, {"round": 0}, THIRD, NK),
        ("sfat", THREE, {"round": 0}, {**THIRD, "first_round": True}, [0.1, 0.4, 0.5]),
        # the published slacks: of five equal clients the selected one gets r / (4 + r), the others 1 / (4 + r)
        *(("sfat", FIVE, {}, {"alpha": alpha, "top": 1}, [(r if k == 2 else 1) / (4 + r) for k in range(5)])
          for alpha, r in ((1 / 11, 1.2), (3 / 23, 1.3), (1 / 6, 1.4))),
        # N_k L_k is 3, 2, 10. r = 1/2 on the smallest: 1, 1, 5 of 7. r = 2 on the largest: 1, 2, 10 of 13
        ("resfat_deemph", THREE, {}, {"r": 0.5}, [1 / 7, 1 / 7, 5 / 7]),
        ("resfat_deemph", THREE, {}, {"r": 2.0}, [0.1, 0.4, 0.5]),
        ("resfat_up_large", THREE, {}, {"alpha": 1 / 3}, [1 / 13, 2 / 13, 10 / 13]),
        # r falls from 2 in round 0 to 1 in round 10 of 11; in round 5 it is 1.5, P N = 1, 3, 5 of 9
        ("sfat_annealed", THREE, {"round": 0}, {**THIRD, "first_round": True}, [0.1, 0.4, 0.5]),
        ("sfat_annealed", THREE, {"round": 5}, THIRD, [1 / 9, 3 / 9, 5 / 9]),
        ("sfat_annealed", THREE, {"round": 10}, THIRD, NK),
        ("sfat_annealed", THREE, {"round": 1, "rounds": 2}, THIRD, NK),
        ("sfat_annealed", THREE, {"round": 0, "rounds": 1}, {**THIRD, "first_round": True}, [0.1, 0.4, 0.5]),
        # losses 0, ln 2, ln 4 at temperature 1: exp = 1, 1/2, 1/4; times N = 1, 2, 4 gives thirds
        ("fedsoftbetter", SOFT, {}, {"temperature": 1.0}, [1 / 3] * 3),
        ("fedsoftbetter", SOFT, {}, {"temperature": 0.0}, [1 / 7, 2 / 7, 4 / 7]),
        ("fedsoftbetter", SOFT, {"round": 0}, {"temperature": 1.0}, [1 / 3] * 3),
    ],
)  # fmt: skip
def test_exact_weights(
    aggregator: str, updates: list[Update], at: dict[str, int], settings: dict[str, Any], expected: list[float]
) -> None:
    found = mixing_of(aggregator, updates, context(len(updates), **at), **settings)
    assert found.weights == pytest.approx(expected)
    if at.get("round") == 0 and "sfat" in aggregator and "first_round" not in settings:
        assert found == Mixing(weights("samples"))  # nobody is selected


def test_sfat_keeps_batch_normalisation() -> None:
    mixing = mixing_of("sfat", THREE, context(), **THIRD)
    assert (mixing.norm_match, mixing.selected) == ("modules", (1,)) and mixing.norm == pytest.approx(NK)
    assert mixing_of("resfat_deemph", THREE, context(), r=0.5).norm == pytest.approx(NK)


def test_two_levels() -> None:
    """Four clients of 100 examples train adversarially, two of 200 do not; r = 1.2 for client 1."""
    losses = [0.9, 0.5, 0.7, 0.8, 0.1, 0.2]
    updates = [client(k, 100 if k < 4 else 200, loss) for k, loss in enumerate(losses)]
    how = {"adversarial": 4, "alpha": 1 / 11, "top": 1}
    samples = pytest.approx(weights("samples", updates))
    mixing = mixing_of("two_level", updates, context(6), **how)
    assert mixing.weights == pytest.approx([0.11905, 0.14286, 0.11905, 0.11905, 0.25, 0.25], abs=1e-5)
    assert mixing.norm == samples and mixing.selected == (1,)
    assert mixing.metrics == pytest.approx({"adversarial_loss": 0.725, "standard_loss": 0.15})
    shares = pytest.approx([0.19048, 0.22857, 0.19048, 0.19048, 0.1, 0.1], abs=1e-5)
    assert weights("two_level", updates, share=0.8, **how) == shares
    assert mixing_of("sfat", updates, context(6), alpha=1 / 11, top=2).selected == (4, 5)
    assert weights("two_level", updates, **{**how, "alpha": 0.0}) == samples
    sfat = pytest.approx(weights("sfat", updates[:4], alpha=1 / 11, top=1))
    assert weights("two_level", updates[:4], share=0.8, **how) == sfat
    for few in (updates[4:], updates[3:]):  # nobody, and one, that trains adversarially
        assert weights("two_level", few, **how) == pytest.approx(weights("samples", few))


def test_sfat_rankings() -> None:
    """Losses 3, 1, 2 pick client 1; N_k L_k = 3, 4, 10 picks client 0; the release's number here picks client 2.

    Algorithm 1 ranks by N_k / N L_k, 0.3, 0.4 and 1.0: the plain name picks the small client, not the small loss.
    """
    sizes = [(1, 3.0), (4, 1.0), (5, 2.0)]
    updates = [client(k, n, loss, loss_released=30.0 - 10 * k) for k, (n, loss) in enumerate(sizes)]
    for by, chosen in (("mean_loss", (1,)), ("nk_weighted", (0,)), ("released", (2,))):
        assert mixing_of("sfat", updates, context(), **THIRD, rank_by=by).selected == chosen
        calls.check("Aggregator", {"name": "sfat", "alpha": "1/3", "top": 1, "rank_by": by})
    for aggregator in ("sfat", "sfat_annealed", "resfat_deemph"):
        slack = {"r": 0.5} if aggregator == "resfat_deemph" else {"alpha": 0.1}
        assert mixing_of(aggregator, updates, context(), top=1, **slack).selected == (0,)
    assert mixing_of("resfat_up_large", updates, context(), alpha=0.1, top=1).selected == (2,)


def test_sfat_rankings_agree_on_equal_shards() -> None:
    """Also where a product of neighbouring losses is rounded to one number."""
    draw = random.Random(0)
    for n in (3, 1000, 9800):
        loss = draw.uniform(0.1, 5)
        near = [math.nextafter(loss, 9), loss, math.nextafter(loss, 0), loss]
        for losses in (near, [draw.uniform(0.1, 5) for _ in range(4)]):
            updates = [client(k, n, one, loss_released=one * 32) for k, one in enumerate(losses)]
            for aggregator in ("sfat", "resfat_up_large"):
                how = {"alpha": 1 / 6, "top": 1}
                weighted = mixing_of(aggregator, updates, context(), **how, rank_by="nk_weighted")
                assert weighted == mixing_of(aggregator, updates, context(), **how, rank_by="mean_loss")


def test_sfat_ties_and_nan() -> None:
    """Of equal losses the lower client number is taken, wherever it stands; a NaN is never the smallest or largest.

    The released number is 5 for both; of losses 2 and 1 the second is the smallest, the first the largest.
    """
    updates = [client(5, 1, math.nan), client(9, 1, 1.0), client(3, 1, 1.0)]
    released = [client(0, 1, 2.0, loss_released=5.0), client(1, 1, 1.0, loss_released=5.0)]
    for aggregator, chosen in (("sfat", (1,)), ("resfat_up_large", (0,))):
        assert mixing_of(aggregator, updates, context(10), **THIRD).selected == (2,)
        assert mixing_of(aggregator, released, context(), **THIRD, rank_by="released").selected == chosen


@pytest.mark.parametrize("aggregator", ["sfat", "sfat_annealed", "resfat_deemph", "resfat_up_large"])
def test_at_most_half_selected(aggregator: str) -> None:
    slack = {"r": 0.5} if aggregator == "resfat_deemph" else {"alpha": 0.1}
    with pytest.raises(ValueError, match=rf"{aggregator}: top=2 of 3 participants, but at most half of them \(1\)"):
        mixing_of(aggregator, THREE, context(), top=2, **slack)


@pytest.mark.parametrize(
    ("m", "top", "r", "total"),
    [(5, 1, 1.4, 0.931), (5, 1, 1.2, 0.963), (5, 1, 0.8, 1.0435), (5, 1, 0.6, 1.0952), (20, 4, 1.2, 0.990)],
)
def test_released_weights_do_not_sum_to_one(m: int, top: int, r: float, total: float) -> None:
    """differences: sfat-released-sum. The sum when position 0 is not selected, to its digits."""
    updates = [client(k, 10, float(m - k)) for k in range(m)]  # the last `top` positions are selected
    mixing = mixing_of("sfat_released", updates, context(m), r=r, top=top)
    assert mixing.selected == tuple(range(m - top, m))
    assert sum(mixing.weights) == pytest.approx(total, abs=0.0005)
    assert sum(mixing.norm) == pytest.approx(m / (m - 1 + r))  # "bn" tensors
    updates.reverse()
    mixing = mixing_of("sfat_released", updates, context(m), r=r, top=top)
    assert sum(mixing.weights) == pytest.approx(1.0)
    assert sum(mixing.norm) == pytest.approx(1.0)


def test_released_exact() -> None:
    """m = 3, r = 2, client 1 selected: others among positions 1, 2 is one, divisor 1 + 2 * 2 = 5; bn: 2 + 2 = 4."""
    mixing = mixing_of("sfat_released", THREE, context(), r=2.0, top=1)
    assert mixing.weights == pytest.approx([1 / 5, 2 / 5, 1 / 5])
    assert mixing.norm == pytest.approx([1 / 4, 1 / 4, 1 / 4])
    assert mixing.norm_match == "substring"
    control = mixing_of("fedavg_shrink", THREE, context(), r=2.0, top=1)
    assert control.weights == pytest.approx([4 / 15] * 3)
    assert control.norm == pytest.approx([1 / 4] * 3) and control.norm_match == "substring"


def test_released_edges() -> None:
    """r = 1 and round 0 are the plain mean; ties select more than `top`; more than m selects everyone."""
    for arguments, at in (({"r": 1.0, "top": 1}, context()), ({"r": 1.4, "top": 1}, context(round=0))):
        for aggregator in ("sfat_released", "fedavg_shrink"):
            mixing = mixing_of(aggregator, THREE, at, **arguments)
            assert mixing.weights == pytest.approx(weights("uniform"))
            assert mixing.norm == pytest.approx(weights("uniform"))
    tied = [client(0, 1, 2.0), client(1, 1, 1.0), client(2, 1, 1.0)]
    assert mixing_of("sfat_released", tied, context(), r=2.0, top=1).selected == (1, 2)
    everyone = mixing_of("sfat_released", THREE, context(), r=2.0, top=7)
    assert everyone.selected == (0, 1, 2)
    assert sum(everyone.weights) == pytest.approx(1.0)


def released_by_description(updates: list[Update], r: float, top: int) -> dict[str, numpy.ndarray]:
    """SFAT as released, key by key with sums and a divisor, as prose describes it; no weights anywhere."""
    m = len(updates)
    scores = [-u.stats.loss_released for u in updates]
    bar = numpy.sort(scores)[::-1][min(top, m) - 1]
    model = {}
    for key in updates[0].model:
        tensors = [u.model[key].double().numpy() for u in updates]
        numerator, others = tensors[0] * (r if scores[0] >= bar else 1.0), 0
        for score, tensor in zip(scores[1:], tensors[1:], strict=True):
            if score >= bar and "bn" not in key:
                numerator = numerator + r * tensor
            else:
                others += 1
                numerator = numerator + tensor
        model[key] = numerator / (others + (m - others) * r)
    return model


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("r", [1.4, 0.6])
def test_released_against_its_description(seed: int, r: float) -> None:
    updates = cohort(m := 3 + seed % 6, seed)
    broadcast = Net().state_dict()
    mixing = mixing_of("sfat_released", updates, context(m), r=r, top=1 + seed % 3)
    mixed = mix(updates, mixing, broadcast, Net())
    for key, expected in released_by_description(updates, r, 1 + seed % 3).items():
        if broadcast[key].is_floating_point():
            numpy.testing.assert_allclose(mixed[key].numpy(), expected, rtol=2e-6, atol=1e-6, err_msg=key)
        else:
            assert mixed[key].item() == int(expected + 1e-6), key  # as load_state_dict cuts it off


def test_fedsoftbetter_released() -> None:
    """64 examples in one batch: l = L / 64, so -20 on l is 0.3125 on L. Two batches of 32 double l."""
    updates = [client(k, 64, loss, batches=1) for k, loss in enumerate([0.5, 1.0, 2.0])]
    assert weights("fedsoftbetter_released", updates) == pytest.approx(weights("fedsoftbetter", updates))
    twice = [client(k, 64, loss, batches=2) for k, loss in enumerate([0.5, 1.0, 2.0])]
    expected = weights("fedsoftbetter", updates, temperature=0.625)
    assert weights("fedsoftbetter_released", twice) == pytest.approx(expected)


class Heads(nn.Module):
    """A body and two layers of logits, of which the first is not the last module."""

    def __init__(self, layers: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.visual = nn.Linear(1, 1, bias=False)
        self.fc = nn.Linear(1, 1)
        if layers:
            self.logit_layers = layers


def test_fedwavg() -> None:
    """theta^t's last layer is (1, 0); the clients' are (2, 0), (0, 3), (-1, 0): cosines 1, 0, -1."""

    def weights_of(w: float, b: float) -> Tensors:
        fc = {"fc.weight": torch.tensor([[w]]), "fc.bias": torch.tensor([b])}
        return {"a.weight": torch.randn(2, 2), "visual.weight": torch.ones(1, 1), **fc}

    layers = [(2.0, 0.0), (0.0, 3.0), (-1.0, 0.0)]
    updates = [client(k, k + 1, model=weights_of(*last)) for k, last in enumerate(layers)]
    at = context(on=problem(model=Heads()), broadcast=weights_of(1.0, 0.0))
    total = math.e**2 + 1 + math.e**-2
    assert last_layer_cosines(updates, at.broadcast, ["fc.weight", "fc.bias"]) == pytest.approx([1.0, 0.0, -1.0])
    expected = pytest.approx([math.e**2 / total, 1 / total, math.e**-2 / total])
    assert weights("fedwavg", updates, at, q=2.0) == expected
    assert weights("fedwavg", updates, at, q=0.0) == pytest.approx([1 / 3] * 3)
    assert weights("fedwavg", updates, at, q=0.0, by_samples=True) == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    # the bias of theta^t is 0, so its cosine is 0 with everything
    assert weights("fedwavg", updates, at, q=2.0, last_layer="last_tensor") == pytest.approx([1 / 3] * 3)
    # weights alone: cosines 1, 0 (a zero weight), -1
    assert weights("fedwavg", updates, at, q=2.0, last_layer="weight_only") == expected
    # with biases of 1: cosines 1, -1 of the weights, 2^-1/2 and -2^-1/2 of both together
    biased = [client(k, 1, model=weights_of(weight, 1.0)) for k, weight in enumerate((1.0, -1.0))]
    for last, q in (("weight_only", 1.0), ("all", math.sqrt(2))):
        found = weights("fedwavg", biased, at, q=q, last_layer=last)
        assert found == pytest.approx([math.e / (math.e + 1 / math.e), 1 / (math.e**2 + 1)])


def test_fedwavg_of_a_weight_in_a_module_of_a_module() -> None:
    """`weight_only` of "0.0.weight": cosines 1 and -1, whatever the biases are."""

    def model(weight: float, bias: float) -> Tensors:
        return {"0.0.weight": torch.tensor([[weight]]), "0.0.bias": torch.tensor([bias])}

    updates = [client(0, 1, model=model(2.0, -9.0)), client(1, 1, model=model(-3.0, 9.0))]
    at = context(on=problem(model=nn.Sequential(nn.Sequential(nn.Linear(1, 1)))), broadcast=model(1.0, 1.0))
    found = weights("fedwavg", updates, at, last_layer="weight_only")
    assert found == pytest.approx([math.e / (math.e + 1 / math.e), 1 / (math.e**2 + 1)])


def test_fedwavg_of_a_head_with_two_classifiers() -> None:
    """theta^t is (1, 1, 0) in visual.weight, fc.weight, fc.bias, client 0 (1, 1, 0), client 1 (1, -1, 0): cosines 1 and
    0. fc alone, which is what a model without logit_layers has, would be 1 and -1."""
    theta = {"a.weight": torch.ones(2, 2), "visual.weight": torch.ones(1, 1), "fc.weight": torch.ones(1, 1)}
    theta["fc.bias"] = torch.zeros(1)
    updates = [client(0, model=theta), client(1, model={**theta, "fc.weight": -torch.ones(1, 1)})]
    both = context(2, problem(model=Heads(("visual", "fc"))), broadcast=theta)
    assert weights("fedwavg", updates, both) == pytest.approx([math.e / (math.e + 1), 1 / (math.e + 1)])
    only = context(2, problem(model=Heads()), broadcast=theta)
    assert weights("fedwavg", updates, only) == pytest.approx([math.e**2 / (math.e**2 + 1), 1 / (math.e**2 + 1)])
    with pytest.raises(ValueError, match="fedwavg: the model has no layer with parameters that emits logits"):
        mixing_of("fedwavg", updates, replace(only, problem=problem(model=nn.ReLU())))


class TwoPixels(nn.Module):
    """Logits of 2 classes, linear in 2 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


def two_pixels(scale: float, flip: float = 1.0) -> Tensors:
    """Label 0 is pixel 0 brighter than pixel 1, at `scale` the difference; flip -1: the other way round."""
    return {"fc.weight": scale * flip * torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "fc.bias": torch.zeros(2)}


def pixels_problem() -> Problem:
    return problem(model=TwoPixels(), images=torch.zeros(3, 1, 1, 2, dtype=torch.uint8), classes=2)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("start", ["black", "white", "noise"])
def test_adfl(start: str) -> None:
    """Logits are s times the pixels. For label 0 pixel 0 rises and pixel 1 falls, by 0.5 twice and cut to [0, 1]: from
    any start the image of label 0 is (1, 0), that of label 1 (0, 1). Models of scale 1 and 2 read them with p =
    sigmoid(1) and sigmoid(2). The third reads everything the other way round: its images are (0, 1) and (1, 0), which
    the others read wrong, and theirs it reads wrong.

    S_1 = 2 sigmoid(1) + 2 sigmoid(2) (its reading of 2's images, and 2's of its own) = S_2, S_3 = 0.
    """
    updates = [client(4, model=two_pixels(1)), client(1, model=two_pixels(2)), client(7, model=two_pixels(1, -1))]
    mixing = mixing_of("adfl", updates, context(on=pixels_problem()), start=start, steps=2, step=0.5)
    low, high = sigmoid(1), sigmoid(2)
    images = mixing.artifacts["adfl_images"]
    assert images.dtype == torch.uint8
    assert images.flatten(2).tolist() == [[[255, 0], [0, 255]]] * 2 + [[[0, 255], [255, 0]]]
    cross = mixing.artifacts["adfl_cross"]
    assert cross[..., 0].tolist() == cross[..., 1].tolist()
    expected = [[low, low, 0.0], [high, high, 0.0], [0.0, 0.0, low]]
    torch.testing.assert_close(cross[..., 0], torch.tensor(expected).double(), atol=1e-6, rtol=0)
    assert mixing.metrics["adfl_score"] == pytest.approx({4: 2 * low + 2 * high, 1: 2 * low + 2 * high, 7: 0.0})
    assert mixing.metrics["adfl_hit"] == {4: 1.0, 1: 1.0, 7: 1.0}
    assert mixing.weights == pytest.approx([0.5, 0.5, 0.0])
    assert mixing.artifacts["adfl_weights"].tolist() == mixing.weights
    assert mixing.artifacts["adfl_clients"].tolist() == [4, 1, 7]


def test_adfl_scores_need_no_symmetry() -> None:
    """Scales 1, 2, 3: p is sigmoid of the reader's scale whoever drew the image. S_i = 2 (2 s_i + s_j + s_k)."""
    s = [sigmoid(x) for x in (1, 2, 3)]
    updates = [client(k, model=two_pixels(k + 1)) for k in range(3)]
    mixing = mixing_of("adfl", updates, context(on=pixels_problem()), steps=1, step=1.0)
    assert mixing.weights == pytest.approx([(fraction + sum(s)) / (4 * sum(s)) for fraction in s], abs=1e-6)


def test_adfl_misses() -> None:
    """A bias of 5 for label 1 that no pixel can outweigh: the image of label 0 is not hit by its own model, and nobody
    else is asked: of two such models both read only label 1, with p = sigmoid(5 + 1)."""
    model = {**two_pixels(1), "fc.bias": torch.tensor([0.0, 5.0])}
    mixing = mixing_of("adfl", [client(0, model=model), client(1, model=model)], context(on=pixels_problem()), step=0.1)
    assert mixing.metrics["adfl_hit"] == {0: 0.5, 1: 0.5}
    assert mixing.metrics["adfl_score"] == pytest.approx({0: 2 * sigmoid(6), 1: 2 * sigmoid(6)})


@pytest.mark.parametrize("scales", [(1, -1), (math.nan, math.nan)])
def test_adfl_without_any_score_is_uniform(scales: tuple[float, float]) -> None:
    """Two models that read each other wrong, and two that diverged."""
    updates = [client(k, k + 1, model=two_pixels(scale)) for k, scale in enumerate(scales)]
    assert weights("adfl", updates, context(on=pixels_problem()), steps=3, step=0.5) == [0.5, 0.5]


def test_adfl_of_equal_models_is_uniform() -> None:
    """With noise, equal models draw equal images, in another round others."""
    model = cohort(1)[0].model
    updates = [client(k, k + 1, model=model) for k in range(5)]
    first, second = (mixing_of("adfl", updates, context(5, round=t), steps=4, step=0.02) for t in (0, 1))
    assert first.weights == pytest.approx([0.2] * 5)
    images = first.artifacts["adfl_images"]
    assert images.shape == (5, 3, 1, 2, 2)
    assert all(torch.equal(images[0], other) for other in images)
    assert not torch.equal(images, second.artifacts["adfl_images"])
    larger = mixing_of("adfl", cohort(2), context(on=problem(2, size=5)), steps=1, step=0.1)
    assert larger.artifacts["adfl_images"].shape == (2, 3, 1, 5, 5)  # the size that the models see


class Attention(nn.Module):
    """Eight rows of pixels that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 3 * 8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 8, 8) -> (B, 3)."""
        q, k, v = self.qkv(x.transpose(1, 2).flatten(2)).chunk(3, -1)
        return self.fc(nn.functional.scaled_dot_product_attention(q, k, v).mean(1))


@pytest.mark.parametrize("make", [lambda: MODELS["resnet18"]((3, 8, 8), 3, width=4), Attention])
def test_adfl_together_is_one_by_one(make: Callable[[], nn.Module]) -> None:
    """Stacked weights, which is how an accelerator draws, against one model after the other, with batch normalisation
    and with attention. In float64, where no gradient comes so near to zero that rounding turns its sign."""

    class Accelerator:
        type = "not a CPU"

    torch.manual_seed(0)
    networks = [make().double() for _ in range(3)]
    states = [network.state_dict() for network in networks]
    blank = torch.rand(3, 3, 8, 8, dtype=torch.float64)
    one = problem(model=copy.deepcopy(networks[0]))
    drawn = draw_images(one, states, blank, 3, 0.05)
    together = draw_images(replace(one, device=Accelerator()), states, blank, 3, 0.05)  # type: ignore[arg-type]
    torch.testing.assert_close(together, drawn)
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], blank)


def test_afl() -> None:
    """Equal N: lambda starts at (1/3, 1/3, 1/3). Losses 3, 1, 2 and gamma 0.1 give (.6333, .4333, .5333), 0.6 too much
    together, 0.2 each: (.4333, .2333, .3333). That is what the next round mixes with."""
    updates = [client(k, 4, loss) for k, loss in enumerate([3.0, 1.0, 2.0])]
    first = mixing_of("afl", updates, context(), gamma=0.1)
    assert first.weights == pytest.approx([1 / 3] * 3)
    assert first.memory["lambda"].tolist() == pytest.approx([13 / 30, 7 / 30, 10 / 30], rel=1e-14)
    second = mixing_of("afl", updates, context(round=1, memory=first.memory), gamma=0.1)
    assert second.weights == pytest.approx([13 / 30, 7 / 30, 10 / 30])


def test_afl_partial() -> None:
    """Clients 2 and 0 of 4 equal ones: lambda is 1/4 each; gamma 0.1 and losses 2, 1 make it (.35, .25, .45, .25), 0.3
    too much together: (.275, .175, .375, .175). Where the participants have no weight left, N_k decides. It starts at
    N_k / N, of the absent too: shards of 1, 2, 3 and 4 are shares 0.1 and 0.3 for clients 0 and 2."""
    updates = [client(2, 1, 2.0), client(0, 3, 1.0)]
    mixing = mixing_of("afl", updates, context(4), gamma=0.1)
    assert mixing.weights == [0.5, 0.5]
    assert mixing.memory["lambda"].tolist() == pytest.approx([0.275, 0.175, 0.375, 0.175])
    elsewhere = {"lambda": torch.tensor([0.0, 1.0, 0.0, 0.0])}
    assert mixing_of("afl", updates, context(4, memory=elsewhere), gamma=0.1).weights == [0.25, 0.75]
    unequal = context(on=problem(sizes=[1, 2, 3, 4]))
    assert mixing_of("afl", updates, unequal, gamma=0.1).weights == pytest.approx([0.75, 0.25])


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12))
def test_simplex_projection(values: list[float]) -> None:
    """Against bisection for the threshold t with sum max(v - t, 0) = 1, which needs no sorting."""
    v = numpy.array(values)
    low, high = v.min() - 1, v.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if numpy.maximum(v - middle, 0).sum() > 1 else (low, middle)
    assert project_to_simplex(values) == pytest.approx(numpy.maximum(v - low, 0).tolist(), abs=1e-9)


def test_q_ffl() -> None:
    """One weight; theta^t = 0, theta_k = 1 and 2, lr 0.1 (L = 10), F = 1 and 4, q = 1: numerators L F = 10, 40;
    |D|^2 = 100, 400; divisor 100 + 10 + 400 + 40 = 550, so w = 1/55 and 4/55 and 50/55 stays."""
    updates = [client(k, 7, loss, {"fc.weight": torch.tensor([w])}) for k, (loss, w) in enumerate([(1, 1.0), (4, 2.0)])]
    for q, expected, stays in ((1.0, [1 / 55, 4 / 55], 50 / 55), (0.0, [0.5, 0.5], 0.0)):
        mixing = mixing_of("q_ffl", updates, context(2), q=q)
        assert mixing.weights == pytest.approx(expected) and mixing.broadcast == pytest.approx(stays, abs=1e-12)
    # one client at distance 1: L F / (|D|^2 + L F) is 5 / 105 for F = 1/2; F is at least 1e-10
    for loss, weight in ((0.5, 5 / 105), (1e-9, 1e-8 / (100 + 1e-8)), (0.0, 1e-9 / (100 + 1e-9))):
        mixing = mixing_of("q_ffl", [client(0, 7, loss, {"fc.weight": torch.tensor([1.0])})], context(1), q=1.0)
        assert mixing.weights == pytest.approx([weight], rel=1e-9)
    for loss in (0.1, 10.0):  # 10^400 and 10^-400 are out of range; the ratio of numerator and divisor is not
        mixing = mixing_of("q_ffl", [client(0, 1, loss), client(1, 1, loss)], context(2), q=400.0)
        assert all(math.isfinite(w) for w in mixing.weights)
    # a running mean that moved by 100 does not count
    moved = [client(0, 1, 1.0, {"fc.weight": torch.ones(1), "bn.running_mean": torch.full((2,), 100.0)})]
    at = context(1, broadcast={"fc.weight": torch.zeros(1), "bn.running_mean": torch.zeros(2)})
    still = [client(0, 1, 1.0, {"fc.weight": torch.ones(1)})]
    assert weights("q_ffl", moved, at, q=1.0) == weights("q_ffl", still, q=1.0)


@pytest.mark.parametrize("aggregator", ASKING)
def test_missing_broadcast_loss(aggregator: str) -> None:
    updates = [client(4, broadcast_loss=None)]  # type: ignore[arg-type]
    arguments = members.arguments("Aggregator", aggregator)
    with pytest.raises(ValueError, match="client 4 did not measure"):
        mixing_of(aggregator, updates, context(5), **arguments)


@st.composite
def situations(draw: st.DrawFn, aggregator: str) -> tuple[list[Update], Context, dict[str, object]]:
    """A cohort, a context and settings of `aggregator` that its annotations allow and that it does not refuse."""
    updates = cohort(draw(st.integers(2, 8)), draw(st.integers(0, 10_000)))
    arguments: dict[str, object] = {
        setting.name: draw(members.allowed(setting.annotation, len(updates) // 2))
        for setting in signatures.describe("Aggregator", aggregator).settings
    }
    if "adversarial" in arguments:
        arguments["adversarial"] = 2 * int(str(arguments["top"]))
    asked = calls.call("Aggregator", {"name": aggregator, **arguments})
    cell = SimpleNamespace(cohort=len(updates), malicious=0, algorithm={})
    assume(not [*facts.reasons(asked, cast(Facts, cell))])
    clients, round = len(updates) + draw(st.integers(0, 2)), draw(st.integers(0, 10))
    return updates, context(clients, round=round, broadcast=cohort(1, 99)[0].model), arguments


@pytest.mark.parametrize("aggregator", SIMPLE)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_weights_of_every_aggregator(aggregator: str, data: st.DataObject) -> None:
    """Non-negative, one per update; a proper aggregator's sum to 1, and go with the client wherever it stands."""
    updates, at, arguments = data.draw(situations(aggregator))
    mixing = mixing_of(aggregator, updates, at, **arguments)
    for given_weights in (mixing.weights, mixing.norm or mixing.weights):
        assert len(given_weights) == len(updates)
        assert all(w >= 0 and isinstance(w, float) for w in given_weights)
        if aggregator not in IMPROPER:
            assert math.fsum(given_weights) == pytest.approx(1.0, abs=1e-9)
    if aggregator == "q_ffl":
        assert math.fsum(mixing.weights) + mixing.broadcast == pytest.approx(1.0, abs=1e-9)
    elif aggregator not in IMPROPER:
        assert mixing.broadcast == 0
        order = data.draw(st.permutations(range(len(updates))))
        moved = mixing_of(aggregator, [updates[k] for k in order], at, **arguments)
        assert moved.weights == pytest.approx([mixing.weights[k] for k in order])
        assert {order[k] for k in moved.selected} == set(mixing.selected)


@pytest.mark.parametrize("aggregator", [name for name in SIMPLE if name == "q_ffl" or name not in IMPROPER])
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_identical_models_are_fixed(aggregator: str, data: st.DataObject) -> None:
    """Clients that all return theta^t leave it there, in q-FedAvg too; the released ones and their control do not."""
    updates, at, arguments = data.draw(situations(aggregator))
    updates = [replace(update, model=at.broadcast) for update in updates]
    mixed = mix(updates, mixing_of(aggregator, updates, at, **arguments), at.broadcast, frozen_net())
    for key, value in at.broadcast.items():
        torch.testing.assert_close(mixed[key], value, rtol=1e-6, atol=1e-6)


def test_improper_aggregators_are_improper_and_every_aggregator_documented() -> None:
    """Each aggregator that says so has weights that do not sum to 1 where client 0 is not selected."""
    assert {"sfat_released", "fedavg_shrink", "q_ffl"} <= IMPROPER and {"afl", "q_ffl"} <= {*ASKING}
    for aggregator in sorted(IMPROPER):
        total = sum(weights(aggregator, **members.arguments("Aggregator", aggregator)))
        assert abs(total - 1) > 0.01, aggregator
    for aggregator in AGGREGATORS:
        assert "Source:" in str(in_table(AGGREGATORS[aggregator]).function.__doc__), aggregator


@pytest.mark.parametrize(
    ("uploads", "more", "message"),
    [
        ([1.0, 2.0], {"losses": [math.nan, 1.0]}, "losses: expected finite numbers, got nan at client 0"),
        ([1.0, 2.0], {"losses": [1.0, "high"]}, "losses: expected finite numbers, got high at client 1"),
        ([1j, 2.0], {}, "uploads: expected real numbers, got complex ones"),
        ([1.0, 2.0], {"sizes": 0}, "sizes: expected a list with one for each client, got 0"),
        ([1.0, 2.0], {"sizes": [2**70, 1]}, "sizes: expected whole numbers of at least 1"),
    ],
)
def test_what_is_no_upload_is_one_sentence(uploads: list[complex], more: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        fatbench.aggregate("fedsoftbetter", [torch.tensor([one]) for one in uploads], **{"losses": [1.0, 1.0], **more})
