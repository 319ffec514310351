"""`mix`: every kind of tensor by its own aggregator, precision, what a released aggregator does, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from updates import client, cohort, context, frozen_net, problem

from fatbench.engine.mixing import _weighted_sum, aggregate, completed, mix, scaled
from fatbench.engine.rounds import Mixing
from fatbench.methods.aggregators import AGGREGATORS


def test_mix_by_kind_of_tensor() -> None:
    """Clients of zeros and fours, N = 1 and 3, weights .5 / .5, norm .2 / .8: every kind of tensor by its own rule."""
    model = frozen_net()
    zero = {key: torch.zeros_like(v) for key, v in model.state_dict().items()}
    four = {key: torch.full_like(v, 4) for key, v in model.state_dict().items()}
    updates = [client(0, 1, model=zero), client(1, 3, model=four)]
    mixed = mix(updates, Mixing([0.5, 0.5], norm=[0.2, 0.8]), zero, model)
    expected = {
        "conv.weight": 2.0, "conv.bias": 2.0, "fc.weight": 2.0, "fc.bias": 2.0,  # weights
        "bn1.weight": 3.2, "bn1.bias": 3.2, "batchnorm1_1.weight": 3.2, "batchnorm1_1.bias": 3.2,  # norm, by type
        "bn1.running_mean": 3.0, "bn1.running_var": 3.0,  # N_k / N
        "batchnorm1_1.running_mean": 3.0, "batchnorm1_1.running_var": 3.0,
        "bn1.num_batches_tracked": 0, "batchnorm1_1.num_batches_tracked": 0, "fixed": 0.0,  # the first client's
    }  # fmt: skip
    assert list(mixed) == list(zero)
    assert set(expected) == set(mixed)
    for key, value in mixed.items():
        assert value.flatten().tolist() == [pytest.approx(expected[key])] * value.numel(), key
    assert all(mixed[key].dtype == zero[key].dtype and mixed[key].shape == zero[key].shape for key in zero)


def test_scaled() -> None:
    """theta^t 8, clients 0 and 4, weights .25 / .5 (norm .5 / .25), .25 stays: 4, and half as far 8 - (8 - 4) / 2."""
    model = frozen_net()
    zero, four, eight = ({key: torch.full_like(v, n) for key, v in model.state_dict().items()} for n in (0, 4, 8))
    updates = [client(0, model=zero), client(1, model=four)]
    whole = Mixing([0.25, 0.5], broadcast=0.25, norm=[0.5, 0.25])
    assert scaled(whole, 1.0) == whole
    for rate, weight, norm in ((1.0, 4.0, 3.0), (0.5, 6.0, 5.5)):
        mixed = mix(updates, scaled(whole, rate), eight, model)
        assert mixed["conv.bias"].tolist() == [weight] * 2
        assert mixed["bn1.bias"].tolist() == [norm] * 2


def test_mix_released_by_substring() -> None:
    """The same, as the release does it: .5/.5 everywhere, .2/.8 where the name contains "bn", counters cut off."""
    model = frozen_net()
    zero = {key: torch.zeros_like(v) for key, v in model.state_dict().items()}
    seven = {key: torch.full_like(v, 7) for key, v in model.state_dict().items()}
    updates = [client(0, 1, model=zero), client(1, 3, model=seven)]
    mixed = mix(updates, Mixing([0.5, 0.5], norm=[0.2, 0.8], norm_match="substring"), zero, model)
    for key, value in mixed.items():
        expected = (5.6 if "bn" in key else 3.5) if value.is_floating_point() else (5 if "bn" in key else 3)
        assert value.flatten().tolist() == [pytest.approx(expected)] * value.numel(), key
    many = {key: torch.full_like(v, 2**24 + 1) for key, v in zero.items()}  # the first count that float32 has not
    mixed = mix([client(k, 1, model=many) for k in (0, 1)], Mixing([0.5, 0.5], norm_match="substring"), zero, model)
    assert {int(v) for key, v in mixed.items() if key.endswith("num_batches_tracked")} == {2**24 + 1}


def test_sums_of_float32_are_in_float32() -> None:
    """1 + 2^-24 is 1 there, twice over; in float64 it would be 1 + 2^-23, which float32 has."""
    one, little = {"w": torch.ones(1)}, {"w": torch.full((1,), 2.0**-24)}
    assert _weighted_sum(["w"], [(one, 1.0), (little, 1.0), (little, 1.0)], one)["w"].tolist() == [1.0]


def test_mix_keeps_some_of_the_broadcast() -> None:
    """0.25 * 8 + 0.5 * 0 + 0.25 * 4 = 3 for parameters; buffers are the clients' alone: (0 + 3 * 4) / 4 = 3."""
    model = nn.BatchNorm1d(1)
    eight, zero, four = ({key: torch.full_like(v, x) for key, v in model.state_dict().items()} for x in (8, 0, 4))
    updates = [client(0, 1, model=zero), client(1, 3, model=four)]
    mixed = mix(updates, Mixing([0.5, 0.25], broadcast=0.25), eight, model)
    assert [mixed[key].item() for key in ("weight", "bias", "running_mean", "running_var")] == [3, 3, 3, 3]


def test_a_whole_model_takes_the_place_of_the_sum() -> None:
    """The aggregator's model of eights, clients of fours, a broadcast of zeros: 8, and 6 where a quarter of zero stays.

    Counters are the aggregator's in both; so is everything else where nothing stays.
    """
    model = frozen_net()
    zero, four, eight = ({key: torch.full_like(v, n) for key, v in model.state_dict().items()} for n in (0, 4, 8))
    for stay, expected in ((0.0, 8.0), (0.25, 6.0)):
        mixed = mix([client(0, 1, model=four)], Mixing([1.0], model=eight, broadcast=stay), zero, model)
        assert list(mixed) == list(zero)
        for key, value in mixed.items():
            assert value.flatten().tolist() == [expected if value.is_floating_point() else 8] * value.numel(), key


def test_mix_precision() -> None:
    """bfloat16 is summed in float32: 256 + 1 clients of 1 mean 1, which a running bfloat16 sum cannot give; float64
    keeps what float32 would lose."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    updates = [client(k, 1, model={"weight": torch.ones(1, 1, dtype=torch.bfloat16)}) for k in range(512)]
    assert mix(updates, Mixing([1 / 512] * 512), updates[0].model, model)["weight"].item() == 1
    fine = 1 + 1e-12
    updates = [client(k, 1, model={"weight": torch.full((1, 1), fine, dtype=torch.float64)}) for k in range(2)]
    assert mix(updates, Mixing([0.5, 0.5]), updates[0].model, model.double())["weight"].item() == fine


def test_mix_leaves_out_clients_without_weight() -> None:
    model = nn.Linear(1, 1)
    nan = {key: torch.full_like(v, math.nan) for key, v in model.state_dict().items()}
    fine = {key: torch.ones_like(v) for key, v in model.state_dict().items()}
    updates = [client(0, model=fine), client(1, model=nan)]
    assert mix(updates, Mixing([1.0, 0.0]), fine, model)["weight"].item() == 1


def test_mix_does_not_touch_its_inputs() -> None:
    """The result shares no memory with the broadcast weights or an update, and nothing that went in has changed."""
    model = frozen_net()
    updates = cohort(3)
    before = [{key: value.clone() for key, value in update.model.items()} for update in updates]
    mixed = mix(updates, Mixing([1.0, 0.0, 0.0]), updates[0].model, model)
    for value in mixed.values():
        value.add_(1)
    for update, old in zip(updates, before, strict=True):
        for key, value in update.model.items():
            torch.testing.assert_close(value, old[key], rtol=0, atol=0)


def test_what_a_client_did_not_send_is_what_it_received() -> None:
    """In sums and in medians; a client that sent nothing has sent no model."""
    model = nn.Linear(2, 1)
    theta = {"weight": torch.zeros(1, 2), "bias": torch.ones(1)}
    parts = [client(k, model={"weight": torch.full((1, 2), float(k))}) for k in range(3)]
    assert mix(parts, Mixing([0.5, 0.25, 0.25]), theta, model)["weight"].tolist() == [[0.75, 0.75]]
    assert mix(parts, Mixing([0.5, 0.25, 0.25]), theta, model)["bias"].tolist() == [1]
    median = aggregate(AGGREGATORS["coordinate_median"], parts, context(on=problem(3, model), broadcast=theta)).model
    assert median is not None and (median["weight"].tolist(), median["bias"].tolist()) == ([[1, 1]], [1])
    assert completed([replace(parts[0], model={})], theta)[0].model == {}


def test_mix_errors() -> None:
    model = nn.Linear(1, 1)
    state = dict(model.state_dict())
    updates = [client(0, model=state), client(1, model=state)]
    half, other = Mixing([0.5, 0.5]), {f"_orig_mod.{key}": value for key, value in state.items()}
    for mixing, broadcast, said in (
        (Mixing([1.0]), state, "1 weights for 2 updates"),
        (replace(half, norm=[1.0, 0.0, 0.0]), state, "3 weights for 2 updates"),
        (half, other, r"model and broadcast weights differ in _orig_mod\.bias, _orig_mod\.weig"),
    ):
        with pytest.raises(ValueError, match=f"mix: {said}"):
            mix(updates, mixing, broadcast, model)
