"""Pre-aggregators: closed forms, what an aggregator sees of what they make, and ByzFL's beside ours."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from test_robust_aggregators import FOUR, vectors
from torch import Tensor
from updates import client, cohort, context, problem

import fatbench
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.randomness import generator
from fatbench.methods.aggregators import AGGREGATORS
from fatbench.methods.preaggregators import PREAGGREGATORS, after
from fatbench.suite import calls, facts

NINE = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def made(name: str, uploads: Sequence[Sequence[float]], **settings: Any) -> Tensor:
    u = torch.tensor(uploads, dtype=torch.float64)
    return PREAGGREGATORS[name](u @ u.T, generator(0, "pre"), **settings) @ u


def test_nnm_is_the_mean_of_the_nearest() -> None:
    expected = [[2, 2], [2, 2], [2, 2], [5, 16 / 3]]
    numpy.testing.assert_allclose(made("nnm", FOUR, byzantine=1), expected)
    numpy.testing.assert_allclose(made("nnm", NINE, byzantine=1), [[2.5, 3.5, 4.5]] * 2 + [[5.5, 6.5, 7.5]])
    with pytest.raises(ValueError, match="byzantine=3 leaves none of 3"):
        made("nnm", NINE, byzantine=3)


def test_buckets_are_means_in_random_order() -> None:
    rows = PREAGGREGATORS["bucketing"](torch.eye(5, dtype=torch.float64), generator(0, "pre"), size=2)
    assert sorted(sorted(row.tolist()) for row in rows) == [[0, 0, 0, 0, 1], [0, 0, 0, 0.5, 0.5], [0, 0, 0, 0.5, 0.5]]
    assert rows.sum(0).tolist() == [row.max() for row in rows.T]  # each client is in one
    alone = PREAGGREGATORS["bucketing"](torch.eye(4, dtype=torch.float64), generator(0, "pre"), size=1)
    assert torch.equal(alone @ alone.T, torch.eye(4, dtype=torch.float64))


def test_clip_and_arc_of_four() -> None:
    clipped = [[1, 0], [1.664101, 1.109400], [0.894427, 1.788854], [1.414214, 1.414214]]
    numpy.testing.assert_allclose(made("clip", FOUR, radius=2.0), clipped, atol=1e-6)
    numpy.testing.assert_allclose(made("arc", FOUR, byzantine=1), [*FOUR[:3], [3.162278, 3.162278]], atol=1e-6)
    numpy.testing.assert_allclose(made("arc", NINE, byzantine=1)[2], [4.410040, 5.040046, 5.670052], atol=1e-6)


def partial(pre: str, aggregator: str, inner: dict[str, Any], **settings: Any) -> Any:
    bound = functools.partial(PREAGGREGATORS[pre], **settings)
    return functools.partial(after, pre=bound, aggregator=functools.partial(AGGREGATORS[aggregator], **inner))


def test_the_aggregator_sees_what_is_made() -> None:
    """Of (2, 2) thrice and (5, 16/3) the median is (2, 2), which is the mean of the first three clients."""
    updates, at = vectors(FOUR)
    mixing = partial("nnm", "coordinate_median", {}, byzantine=1)(updates, at)
    assert mix(updates, mixing, at.broadcast, at.problem.model)["w"].tolist() == [2, 2]
    mixing = partial("nnm", "uniform", {}, byzantine=1)(updates, at)
    assert mixing.weights == pytest.approx([(3 / 3) / 4, (4 / 3) / 4, (4 / 3) / 4, (1 / 3) / 4])
    moved = mix(updates, mixing, at.broadcast, at.problem.model)["w"]
    assert moved.tolist() == pytest.approx([11 / 4, (6 + 16 / 3) / 4])


def test_a_clipped_upload_stays_near_theta_t() -> None:
    """theta^t is (1, 1): u = (10, 10) clipped to 2 ends at 1 + 1.414214."""
    updates, at = vectors([[11, 11]])
    at = replace(at, broadcast={"w": torch.ones(2)})
    mixing = partial("clip", "uniform", {}, radius=2.0)(updates, at)
    assert mix(updates, mixing, at.broadcast, at.problem.model)["w"].tolist() == pytest.approx([2.414214] * 2)


def test_float_buffers_are_mixed_by_rows_that_sum_to_one() -> None:
    updates = cohort(5)
    at = context(on=problem(5), broadcast=updates[0].model)
    seen: list[Any] = []

    def look(made: Any, context: Any) -> Any:
        seen.extend(made)
        return AGGREGATORS["uniform"](made, context)

    bound = functools.partial(PREAGGREGATORS["bucketing"], size=5)
    aggregate(functools.partial(after, pre=bound, aggregator=look), updates, at)
    (one,) = seen
    mean = torch.stack([update.model["bn1.running_mean"] for update in updates]).mean(0)
    torch.testing.assert_close(one.model["bn1.running_mean"], mean)
    assert one.stats.loss == pytest.approx(sum(update.stats.loss for update in updates) / 5)
    assert one.n == round(sum(update.n for update in updates) / 5)


def test_a_chain_nests_and_random_order_is_of_the_round() -> None:
    updates, at = vectors([[float(k**2), k % 3] for k in range(9)])
    inner = partial("bucketing", "coordinate_median", {}, size=2)
    chain = functools.partial(after, pre=functools.partial(PREAGGREGATORS["nnm"], byzantine=3), aggregator=inner)
    rounds = (at, at, replace(at, round=2))
    one, again, other = (mix(updates, chain(updates, r), at.broadcast, at.problem.model)["w"] for r in rounds)
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_a_chain_makes_what_its_steps_make_in_turn() -> None:
    """Clipped uploads are mixed; what clients report is a mean by shares, which clipping leaves alone."""
    updates, at = vectors(FOUR)
    updates = [replace(u, n=10 * (k + 1), stats=replace(u.stats, loss=float(k))) for k, u in enumerate(updates)]
    seen: list[Any] = []

    def look(made: Any, context: Any) -> Any:
        seen.extend(made)
        return AGGREGATORS["uniform"](made, context)

    inner = functools.partial(after, pre=functools.partial(PREAGGREGATORS["nnm"], byzantine=1), aggregator=look)
    clip = functools.partial(PREAGGREGATORS["clip"], radius=2.0)
    mixing = aggregate(functools.partial(after, pre=clip, aggregator=inner), updates, at)
    in_turn = made("nnm", made("clip", FOUR, radius=2.0).tolist(), byzantine=1)
    numpy.testing.assert_allclose(torch.stack([u.model["w"] for u in seen]), in_turn, rtol=1e-6)
    shares = PREAGGREGATORS["nnm"](made("clip", FOUR, radius=2.0) @ made("clip", FOUR, radius=2.0).T,
                                   generator(0, "pre"), byzantine=1)  # fmt: skip
    assert [u.n for u in seen] == [round(x) for x in (shares @ torch.tensor([10.0, 20, 30, 40]).double()).tolist()]
    weights = torch.tensor([1.0, 2 / 13**0.5, 2 / 20**0.5, 2 / 200**0.5]).double() * shares.mean(0)
    assert mixing.weights == pytest.approx(weights.tolist())


def test_uploads_that_are_not_finite_are_left_out_and_clipped_to_nothing_is_no_upload() -> None:
    nnm = {"pre": {"name": "nnm", "byzantine": 2}, "aggregator": {"name": "trimmed_mean", "byzantine": 2}}
    uploads = [torch.full((3,), float(k)) for k in range(5)]
    assert fatbench.aggregate("after", [*uploads, torch.full((3,), math.nan)], **nnm).isfinite().all()
    arc = {"pre": {"name": "arc", "byzantine": 2}, "aggregator": "uniform"}
    found = fatbench.aggregate("after", [torch.zeros(3)] * 3 + [torch.ones(3)] * 2, broadcast=torch.zeros(3), **arc)
    assert found.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["afl", "two_level", "adfl"])
def test_a_bucket_is_no_client(name: str) -> None:
    """What keeps something for each client is refused where uploads are not one for each, before the run and in it."""
    call = calls.check("Aggregator", {"name": "after", "pre": "bucketing", "aggregator": inner(name)})
    cell = facts.Facts({"partition": {"clients": 6}, "algorithm": {"name": "fedavg_mixed", "adversarial": 2}})
    said = [reason for _, reason in facts.reasons(call, cell)]
    assert said == [f"aggregator: {name} treats clients by their numbers, and of 6 clients' uploads 3 are made"]
    updates = [client(k, model={"w": torch.ones(2)}) for k in range(6)]
    at = vectors([[1.0, 1.0]] * 6)[1]
    with pytest.raises(ValueError, match="treats clients by their numbers"):
        call.bound(updates, at)
    square = {"name": "after", "pre": {"name": "clip", "radius": 1}, "aggregator": inner(name)}
    assert not list(facts.reasons(calls.check("Aggregator", square), cell))


def inner(name: str) -> Any:
    return {"name": name, **({"adversarial": 2, "alpha": 0.1} if name == "two_level" else {})}


@pytest.mark.parametrize("seed", range(10))
def test_beside_byzfl(seed: int) -> None:
    """Its ARC and Clipping write into the array that they get, and its buckets come from numpy's own generator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that it imports
        byzfl = pytest.importorskip("byzfl")
    u = torch.randn(11, 50, dtype=torch.float64, generator=generator(seed, "uploads")).numpy()
    pairs = [
        ("nnm", {"byzantine": 3}, byzfl.NNM(3)), ("clip", {"radius": 6.5}, byzfl.Clipping(6.5)),
        ("arc", {"byzantine": 3}, byzfl.ARC(3)),
    ]  # fmt: skip
    for name, settings, theirs in pairs:
        numpy.testing.assert_allclose(made(name, u.tolist(), **settings), theirs(u.copy()), rtol=1e-9, err_msg=name)
    rows = PREAGGREGATORS["bucketing"](torch.eye(11, dtype=torch.float64), generator(0, "pre"), size=3)
    order = rows.argmax(1)
    assert len(rows) == len(byzfl.Bucketing(3)(u.copy())) == 4 and len(set(order.tolist())) == 4
