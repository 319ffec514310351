"""Aggregators for cohorts in which some clients are malicious: exact small numbers, far uploads, properties of each."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import members
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from updates import Net, client, cohort, context, frozen_net, problem

import fatbench
from fatbench.engine.malicious import finite
from fatbench.engine.mixing import mix
from fatbench.engine.rounds import Context, Mixing, Update
from fatbench.errors import SpecError
from fatbench.methods import filtering_aggregators, robust_aggregators
from fatbench.methods.aggregators import AGGREGATORS
from fatbench.methods.algorithms import ALGORITHMS
from fatbench.methods.algorithms.fltrust import trust
from fatbench.methods.objectives import standard
from fatbench.suite import calls, facts
from fatbench.testing import initial_state, local, small_problem

MODULES = (robust_aggregators, filtering_aggregators)
NAMES = [name for name in AGGREGATORS if any(hasattr(module, name) for module in MODULES)]


class Vector(nn.Module):
    """A model that is one vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))


def vectors(uploads: Sequence[Sequence[float]]) -> tuple[list[Update], Context]:
    """Clients 0, 1, ... whose uploads are these, from theta^t = 0."""
    updates = [client(k, model={"w": torch.tensor(u, dtype=torch.float32)}) for k, u in enumerate(uploads)]
    size = len(uploads[0])
    return updates, context(on=problem(len(uploads), Vector(size)), broadcast={"w": torch.zeros(size)})


def result(name: str, uploads: Sequence[Sequence[float]], at: Context | None = None, **arguments: object) -> Tensor:
    updates, here = vectors(uploads)
    mixing = AGGREGATORS[name](updates, at or here, **arguments)
    return mix(updates, mixing, here.broadcast, here.problem.model)["w"]


def scalar(name: str, uploads: Sequence[float], **arguments: object) -> float:
    return float(result(name, [[u] for u in uploads], **arguments))


# --- exact numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 3, 8, 13, 33])
def test_short_columns_are_sorted_as_long_ones(m: int) -> None:
    values = torch.randn(m, 5, 7, generator=torch.Generator().manual_seed(m)).round(decimals=1)
    values[0, 0, 0] = math.inf
    kept = values.clone()
    assert torch.equal(robust_aggregators.ascending(values), values.sort(0).values) and torch.equal(values, kept)
    values[0, 1, 1] = math.nan
    assert robust_aggregators.ascending(values)[-1, 1, 1].isnan()


@pytest.mark.parametrize(
    ("name", "uploads", "expected", "settings"),
    [
        ("coordinate_median", [10, 0, 1], 1, {}),
        ("coordinate_median", [10, 0, 2, 1], 1.5, {}),  # between the two in the middle
        ("trimmed_mean", [100, 1, -100, 0, 2], 1, {"byzantine": 1}),
        ("trimmed_mean", [100, 1, -100, 0, 4], 1, {"byzantine": 0}),
        ("trimmed_mean", [100, 1, -100, 0, 2], 1, {"byzantine": 2}),
        # 0, 1, 5, 8, 11 and f = 1: the sums of the two least squared distances are 26, 17, 25, 18 and 45
        ("krum", [0, 1, 5, 8, 11], 1, {"byzantine": 1}),
        ("multi_krum", [0, 1, 5, 8, 11], 4.5, {"byzantine": 1, "keep": 2}),
        ("multi_krum", [0, 1, 5, 8, 11], (0 + 1 + 5 + 8) / 4, {"byzantine": 1}),
        # 0, 1, 2, 3 without one: 0, 1, 2 and 1, 2, 3 have the same diameter and the same spread; the first is taken
        ("mda", [0, 1, 2, 3], 1, {"byzantine": 1}),
        ("smea", [0, 1, 2, 3], 1, {"byzantine": 1}),
    ],
)
def test_exact_numbers(name: str, uploads: list[float], expected: float, settings: dict[str, int]) -> None:
    assert scalar(name, uploads, **settings) == expected


def test_buffers_keep_their_type() -> None:
    """Medians are taken in float32, and a buffer of float64 stays one."""
    updates, at = vectors([[1.0], [2.0], [9.0]])
    updates = [replace(u, model={**u.model, "b": u.model["w"].double()}) for u in updates]
    at = replace(at, broadcast={**at.broadcast, "b": torch.zeros(1, dtype=torch.float64)})
    model = AGGREGATORS["coordinate_median"](updates, at).model
    found = {name: (value.item(), value.dtype) for name, value in model.items()}
    assert found == {"w": (2.0, torch.float32), "b": (2.0, torch.float64)}
    assert result("coordinate_median", [[0, 5], [1, -5], [9, 0]]).tolist() == [1, 0]


def test_float_buffers_are_weighed_as_the_weights_are() -> None:
    """Of clients with 1 and 9 examples and weights 1/4 and 3/4 the running mean is 3/4, not 9/10."""
    network = Vector(1)
    network.register_buffer("running", torch.zeros(1))
    at = context(on=problem(2, network), broadcast={"w": torch.zeros(1), "running": torch.zeros(1)})
    updates = [client(k, n, model={"w": torch.tensor([x]), "running": torch.tensor([x])}) for k, n, x in
               ((0, 1, 0.0), (1, 9, 1.0))]  # fmt: skip
    mixing = robust_aggregators.weighted(updates, at, {0: 0.25, 1: 0.75}, selected=[1])
    assert {name: float(v) for name, v in mixing.model.items()} == {"w": 0.75, "running": 0.75}
    assert (mixing.weights, mixing.selected) == ([0.25, 0.75], (1,))


def test_krum_gives_a_tie_to_the_smaller_client() -> None:
    mixing = AGGREGATORS["multi_krum"](*vectors([[0], [1], [5], [8], [11]]), byzantine=1, keep=2)
    assert mixing.weights == [0, 0.5, 0, 0.5, 0] and mixing.selected == (1, 3)
    updates, at = vectors([[3.0], [1.0], [2.0], [0.0]])  # 1 and 2 have one neighbour at 1 and one further on
    for order in itertools.permutations(updates):
        mixing = AGGREGATORS["krum"](list(order), at, byzantine=0)
        assert [order[k].client for k in mixing.selected] == [1]


@pytest.mark.parametrize(
    ("uploads", "expected", "chosen"),
    [
        ([0, 1, 2, 4, 7, 8, 50], 1, [2, 4, 1, 7, 0]),  # median 2; 0 and 4 are both 2 away, the smaller is taken
        ([0, 1, 3, 4, 6, 8, 100], 8 / 3, [3, 4, 1, 6, 0]),
        ([0, 1, 2, 3, 5, 9, 30], 2, [2, 3, 1, 5, 0]),
    ],
)
def test_bulyan_of_seven_scalars(uploads: list[float], expected: float, chosen: list[float]) -> None:
    """f = 1: five are chosen, and three of each coordinate averaged."""
    assert scalar("bulyan", uploads, byzantine=1) == pytest.approx(expected)
    updates, at = vectors([[u] for u in uploads])
    mixing = AGGREGATORS["bulyan"](updates, at, byzantine=1)
    assert [uploads[k] for k in mixing.selected] == chosen


def test_geometric_median_begins_at_the_median() -> None:
    """From 0 the distances of three uploads along the axes are 3, 4 and 12: weights 4, 3 and 1 of 8."""
    axes = [[3, 0, 0], [0, 4, 0], [0, 0, 12]]
    updates, at = vectors(axes)
    weights = AGGREGATORS["geometric_median"](updates, at, iterations=1).weights
    assert weights == pytest.approx([1 / 2, 3 / 8, 1 / 8])
    assert result("geometric_median", axes, iterations=1).tolist() == pytest.approx([1.5, 1.5, 1.5])


@pytest.mark.parametrize("far", [10.0, 1e3, 1e10, 1e18, 1e30, 3e38])
def test_geometric_median_of_four_corners_is_where_the_diagonals_cross(far: float) -> None:
    """Whatever the length of one of them: y = x and y = 4 - 2 x / 3 meet at 2.4."""
    corners = [[0, 0], [0, 4], [far, far], [6, 0]]
    assert result("geometric_median", corners).tolist() == pytest.approx([2.4, 2.4], abs=1e-4)


def test_rfa_begins_at_the_mean() -> None:
    """From the mean 2 the distances of 0, 0, 0, 8 are 2, 2, 2, 6: (8 / 6) / (3 / 2 + 1 / 6) = 0.8."""
    assert scalar("rfa", [0, 0, 0, 8], iterations=1) == pytest.approx(0.8)
    assert scalar("rfa", [0, 0, 0, 8], iterations=100) == pytest.approx(0, abs=1e-4)
    corners = [[math.cos(a), math.sin(a)] for a in (0, 2 * math.pi / 3, 4 * math.pi / 3)]
    assert result("rfa", [[x + 5, y] for x, y in corners]).tolist() == pytest.approx([5, 0], abs=1e-6)
    updates, at = vectors([[0.0], [1.0]])
    updates[1] = client(1, 3, model={"w": torch.ones(1)})
    weights = AGGREGATORS["rfa"](updates, at, iterations=1, by_samples=True).weights
    assert weights == pytest.approx([0.1, 0.9])  # 1/4 / (3/4) and 3/4 / (1/4): 1/3 and 3
    weights = AGGREGATORS["geometric_median"](updates, at, iterations=2, by_samples=True).weights
    assert weights == pytest.approx([0.1, 0.9])  # the first step, from 1/2, ends at 3/4


def test_rfa_returns_by_less_than_it_was_moved() -> None:
    """One of ten uploads is R away: from R / 10 each step leaves about a ninth, four of them 1.4e-5 R."""
    uploads = [[float(k)] for k in range(9)] + [[1e12]]
    assert float(result("rfa", uploads)) == pytest.approx(1e12 / 10 / 9**4, rel=0.2)
    assert float(result("geometric_median", uploads)) == pytest.approx(4.5, abs=0.51)


def test_centred_clipping_and_its_memory() -> None:
    """0, 0, 0, 8 around v = 0 at radius 1: 1/4; then (3 * -1/4 + 1) / 4 more; towards 1/3."""
    uploads = [[0.0], [0.0], [0.0], [8.0]]
    for iterations, expected in ((1, 0.25), (2, 0.3125), (3, 0.328125), (60, 1 / 3)):
        assert float(result("centred_clipping", uploads, radius=1.0, iterations=iterations)) == pytest.approx(expected)
    updates, at = vectors(uploads)
    mixing = AGGREGATORS["centred_clipping"](updates, at, radius=1.0)
    for expected in (0.3125, 0.328125):
        mixing = AGGREGATORS["centred_clipping"](updates, replace(at, memory=mixing.memory), radius=1.0)
        assert float(mixing.model["w"]) == pytest.approx(expected)


FOUR = [[1, 0], [3, 2], [2, 4], [10, 10]]


@pytest.mark.parametrize("name", ["mda", "meamed", "smea", "dnc"])
def test_of_four_the_far_one_is_left_out(name: str) -> None:
    assert result(name, FOUR, byzantine=1).tolist() == pytest.approx([2, 2])


def test_caf_of_four() -> None:
    updates, at = vectors(FOUR)
    expected = pytest.approx([0.171809, 0.457746, 0.370446, 0], abs=1e-6)
    assert AGGREGATORS["caf"](updates, at, byzantine=1).weights == expected
    assert result("caf", FOUR, byzantine=1).tolist() == pytest.approx([2.285937, 2.397274], abs=1e-6)
    assert scalar("caf", [0, 1, 2, 11], byzantine=1) == pytest.approx(1.097678, abs=1e-6)
    assert scalar("caf", [3, 3, 3], byzantine=1) == 3


def test_dnc_takes_the_least_often_dropped() -> None:
    """Of 0, 1, 2, 11 one pass drops 11, and as all are looked at, each pass drops the same."""
    updates, at = vectors([[0.0], [1.0], [2.0], [11.0]])
    for iterations in (1, 5):
        assert AGGREGATORS["dnc"](updates, at, byzantine=1, iterations=iterations).selected == (0, 1, 2)
    assert AGGREGATORS["dnc"](updates, at, byzantine=1, factor=2.0).selected in ((1, 2), (0, 1))
    few = AGGREGATORS["dnc"](*vectors(torch.eye(9).tolist()), byzantine=2, iterations=20, coordinates=2)
    assert sum(few.weights) == pytest.approx(1) and few.selected


def test_fltrust() -> None:
    """u_0 = (1, 0): scores 1, 0, 0 and 0.70711. Without a score above 0 nothing moves."""
    zero, own = {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 0.0])}
    uploads = [[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0], [1.0, 1.0]]
    updates, at = vectors(uploads)
    mixing = trust([update.model for update in updates], own, zero, ["w"])
    moved = mix(updates, mixing, zero, at.problem.model)["w"]
    assert moved.tolist() == pytest.approx([0.87868, 0.29289], abs=1e-5)
    assert [weight > 0 for weight in mixing.weights] == [True, False, False, True]
    for uploads, root in (([[0.0, 3.0], [-1.0, 0.0], [0.0, 0.0]], own), ([[1.0, 0.0]], zero)):
        updates, at = vectors(uploads)
        mixing = trust([update.model for update in updates], root, zero, ["w"])
        assert mixing.weights == [0.0] * len(uploads) and mixing.broadcast == 1


# --- against what torch has, by another way ------------------------------------------------------------------------


@pytest.mark.parametrize("m", [7, 8])
def test_against_torch_functions(m: int) -> None:
    """torch.quantile, topk and cdist on the same matrix, where ours sort and multiply."""
    torch.manual_seed(m)
    uploads = torch.randn(m, 30)
    rows = uploads.tolist()
    expected = torch.quantile(uploads, 0.5, dim=0)
    torch.testing.assert_close(result("coordinate_median", rows), expected)
    ends = uploads.topk(2, 0).values.sum(0) + uploads.topk(2, 0, largest=False).values.sum(0)
    trimmed = (uploads.sum(0) - ends) / (m - 4)
    torch.testing.assert_close(result("trimmed_mean", rows, byzantine=2), trimmed, rtol=1e-4, atol=1e-5)
    apart = torch.cdist(uploads.double(), uploads.double()).square()
    scores = apart.topk(m - 2 - 2 + 1, largest=False).values.sum(1)
    torch.testing.assert_close(result("krum", rows, byzantine=2), uploads[scores.argmin()])
    best = scores.topk(3, largest=False).indices
    torch.testing.assert_close(result("multi_krum", rows, byzantine=2, keep=3), uploads[best].mean(0))
    point = uploads.double().mean(0)
    for _ in range(10_000):
        near = 1 / (uploads - point).norm(dim=1)
        point = (near.unsqueeze(1) * uploads).sum(0) / near.sum()
    found = result("geometric_median", rows, iterations=1000)
    sums = [float((uploads - z).norm(dim=1).sum()) for z in (found, point)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-4)


# --- each of them -------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, dict[str, object]] = {  # beside the examples of their types
    "centred_clipping": {"radius": 2.0, "iterations": 3},
    "rfa": {"iterations": 8},
}


def bound(name: str, scale: float = 1.0) -> Callable[..., Mixing]:
    one = {"byzantine": 1} if members.takes("Aggregator", name, "byzantine") else {}
    chosen = {**members.arguments("Aggregator", name), **one, **ARGUMENTS.get(name, {})}
    lengths = {key: value * scale for key, value in chosen.items() if key == "radius"}
    return functools.partial(AGGREGATORS[name], **{**chosen, **lengths})


def of(name: str, uploads: Tensor, scale: float = 1.0) -> Tensor:
    updates, at = vectors(uploads.tolist())
    return mix(updates, bound(name, scale)(updates, at), at.broadcast, at.problem.model)["w"]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000), m=st.integers(7, 9))
def test_permuted_scaled_moved(name: str, seed: int, m: int) -> None:
    """The order of clients changes no bit; uploads twice as long give a step twice as long; a vector added is added."""
    torch.manual_seed(seed)
    uploads = torch.randn(m, 5)
    found = of(name, uploads)
    updates, at = vectors(uploads.tolist())
    moved = [updates[k] for k in torch.randperm(m)]  # with their numbers, which decide a tie
    mixing = bound(name)(moved, at)
    assert torch.equal(mix(moved, mixing, at.broadcast, at.problem.model)["w"], found)
    torch.testing.assert_close(of(name, 2 * uploads, scale=2.0), 2 * found, rtol=1e-3, atol=1e-4)
    if name != "centred_clipping":  # it clips around a point of its own
        torch.testing.assert_close(of(name, uploads + 3), found + 3, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_one_far_upload_moves_none_of_them_far(name: str) -> None:
    """Nine honest uploads near (1, ..., 1); one of a million times that. The mean would be 100,000 away."""
    torch.manual_seed(0)
    uploads = 1 + 0.1 * torch.randn(10, 5)
    uploads[3] = -1e6
    assert float((of(name, uploads) - 1).norm()) < 3


@pytest.mark.parametrize("name", [name for name in NAMES if members.takes("Aggregator", name, "byzantine")])
def test_a_refused_upload_was_a_malicious_one(name: str) -> None:
    """Of eight clients one was refused: the other seven are aggregated for one malicious client less."""
    torch.manual_seed(1)
    uploads = torch.randn(7, 4)
    rest, at = vectors(uploads.tolist())
    refused = [replace(update, refused=1) for update in rest]
    found = mix(refused, bound(name)(refused, at), at.broadcast, at.problem.model)["w"]
    expected = AGGREGATORS[name](rest, at, byzantine=0)
    assert torch.equal(found, mix(rest, expected, at.broadcast, at.problem.model)["w"])


# --- uploads of every length --------------------------------------------------------------------------------------

ROBUST: dict[str, dict[str, Any]] = {  # those that bear malicious clients, here two of eleven
    name: {"byzantine": 2} if members.takes("Aggregator", name, "byzantine") else ARGUMENTS.get(name, {})
    for name in NAMES
    if getattr(AGGREGATORS[name], "bears", None) is not None
}
LENGTHS = (1e10, 1e20, 3e38)  # the squares of the second are beyond float32
SHAPES = ("all entries", "one entry", "opposite")


def honest(dtype: torch.dtype = torch.float64) -> Tensor:
    return (1 + 0.1 * torch.randn(9, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(5))).to(dtype)


def among(shape: str, size: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Two malicious clients with entries of this size, then nine honest ones."""
    sent = torch.ones(2, 40, dtype=dtype)
    if shape == "all entries":
        sent[:] = size
    elif shape == "one entry":
        sent[:, 3] = size
    else:
        sent[0], sent[1] = size, -size
    return [*sent, *honest(dtype)]


def test_these_are_the_aggregators_that_say_so() -> None:
    assert set(NAMES) - set(ROBUST) == {"rfa"} and len(ROBUST) == 12


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, torch.float32) for shape in SHAPES), (SHAPES[0], torch.float64)]
)
@pytest.mark.parametrize("name", ROBUST)
def test_the_length_of_an_upload_decides_nothing(name: str, shape: str, dtype: torch.dtype) -> None:
    """From 1e3 to the end of float32 the result is that at 1e3, near the honest ones, with and without `broadcast`."""
    for start in (torch.zeros(40, dtype=dtype), None):
        near = fatbench.aggregate(name, among(shape, 1e3, dtype), broadcast=start, **ROBUST[name])
        assert near.dtype == dtype and float((near - 1).norm()) < 1.5
        for size in (*LENGTHS, *((1e150,) if dtype == torch.float64 else ())):
            found = fatbench.aggregate(name, among(shape, size, dtype), broadcast=start, **ROBUST[name])
            torch.testing.assert_close(found, near, rtol=0, atol=2e-3, msg=f"{name}, {shape}, {size}")


@pytest.mark.parametrize(("shape", "size"), [*((shape, math.nan) for shape in SHAPES), (SHAPES[0], -math.inf)])
@pytest.mark.parametrize("name", NAMES)
def test_uploads_that_are_not_finite_are_left_out(name: str, shape: str, size: float) -> None:
    """The result is that of the nine others, of whom none is malicious any more; so for RFA, too."""
    arguments = ROBUST.get(name, {})
    for start in (torch.zeros(40, dtype=torch.float64), None):
        found = fatbench.aggregate(name, among(shape, size), broadcast=start, **arguments)
        rest = {**arguments, **({"byzantine": 0} if "byzantine" in arguments else {})}
        assert torch.equal(found, fatbench.aggregate(name, list(honest()), broadcast=start, **rest))
    for one in (among(shape, size)[:1], among("all entries", 1e300)[:1]):  # beyond 1e154 no length is known
        found = fatbench.aggregate(name, [*one, *honest()], broadcast=torch.zeros(40).double(), **bound(name).keywords)
        assert float((found - 1).norm()) < 1.5


@pytest.mark.parametrize("name", NAMES)
def test_uploads_of_which_none_is_finite_give_no_number_and_one_of_another_shape_is_refused(name: str) -> None:
    found = fatbench.aggregate(name, [torch.full((3,), math.nan)] * 11, **ROBUST.get(name, {}))
    assert not found.isfinite().any()
    for other in (torch.ones(39), torch.ones(2, 20), torch.tensor(1.0)):
        with pytest.raises(SpecError, match=r"has shape .* at client 1, .* at client 0"):
            fatbench.aggregate(name, [torch.ones(40), other, *[torch.ones(40)] * 9], **ROBUST.get(name, {}))


@pytest.mark.parametrize("size", [1e3, *LENGTHS])
@pytest.mark.parametrize("shape", SHAPES)
def test_beside_byzfl(shape: str, size: float) -> None:
    """On the same uploads in float64; its Krum has m - f - 1 neighbours, the paper's m - f - 2: so f is 3 there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that it imports
        byzfl = pytest.importorskip("byzfl")
    uploads, zeros = [upload.numpy() for upload in among(shape, size)], numpy.zeros(40)
    pairs = [
        ("coordinate_median", {}, byzfl.Median()),
        ("trimmed_mean", {"byzantine": 2}, byzfl.TrMean(2)),
        ("krum", {"byzantine": 2}, byzfl.Krum(3)),
        ("multi_krum", {"byzantine": 2, "keep": 8}, byzfl.MultiKrum(3)),
        ("geometric_median", {}, byzfl.GeometricMedian(nu=1e-5, T=3000)),
        ("centred_clipping", {"radius": 2.0, "iterations": 3}, byzfl.CenteredClipping(L=3, tau=2.0)),
        ("mda", {"byzantine": 2}, byzfl.MDA(2)),
        ("meamed", {"byzantine": 2}, byzfl.Meamed(2)),
    ]
    for name, arguments, theirs in pairs:
        ours = fatbench.aggregate(name, uploads, broadcast=zeros, **arguments)
        numpy.testing.assert_allclose(ours, theirs(uploads), rtol=1e-6, atol=1e-6, err_msg=name)


def test_one_client_does_not_undo_fltrust() -> None:
    """Its running averages are plain means: of those uploads that are finite, whether or not clients are malicious."""
    on = small_problem("small_cnn", clients=4, images_per_client=8)
    on = replace(on, held_out=(on.images[:8], on.labels[:8]))
    broken = functools.partial(standard_or_nan, breaks=1)
    rule = functools.partial(ALGORITHMS["fltrust"], rounds=1, root=8, local=local(objective=broken))
    (done,) = rule(on, initial_state(on))
    assert [update.client for update in done.updates if update.client != 1] == [u.client for u in done.updates]
    assert finite(done.state.model) and {update.refused for update in done.updates} == {1}


def standard_or_nan(model: nn.Module, x: Tensor, y: Tensor, generator: Any, client: int, *, breaks: int) -> Any:
    """Cross-entropy, or for one client NaN."""
    loss, correct = standard(model, x, y, generator)
    return loss * (math.nan if client == breaks else 1.0), correct


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([0, 0, 0], "got 0 at client 0"),
        ([1, 0, 2], "got 0 at client 1"),
        ([1, 2, -3], "got -3 at client 2"),
        ([1, 2.5, 3], "got 2.5 at client 1"),
        ([1, math.nan, 3], "got nan at client 1"),
        ([math.inf, 2, 3], "got inf at client 0"),
        ([1, "2", 3], "got 2 at client 1"),
        ([1, None, 3], "got None at client 1"),
    ],
)
@pytest.mark.parametrize("name", ["samples", "geometric_median"])
def test_a_client_has_a_whole_number_of_examples(name: str, sizes: list[Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"sizes: expected whole numbers of at least 1, {message}"):
        fatbench.aggregate(name, [torch.ones(2)] * 3, sizes=sizes)


def test_more_malicious_clients_than_an_aggregator_is_made_for_are_refused() -> None:
    for name, at_most in (("multi_krum", 2), ("bulyan", 2), ("trimmed_mean", 2), ("coordinate_median", 5)):
        given = {"name": name, **({} if name == "coordinate_median" else {"byzantine": 2})}
        call = calls.call("Aggregator", calls.check("Aggregator", given))
        for malicious in (at_most, at_most + 1):
            known: Any = SimpleNamespace(cohort=11, malicious=malicious)
            found = [r.reason for r in facts.refusals(call, known, "aggregator")]
            assert bool(found) == (malicious > at_most)
    assert found == ["6 malicious clients of 11, coordinate_median bears at most 5"]


# --- how many malicious clients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_running_averages_stay_possible(name: str) -> None:
    """A variance stays positive, a counter whole, a frozen parameter as it is."""
    updates = cohort(8, 3)
    broadcast = frozen_net().state_dict()
    at = context(8, problem(8, Net()), broadcast=broadcast)
    mixed = mix(updates, bound(name)(updates, at), broadcast, Net())
    assert all(bool((mixed[key] > 0).all()) for key in mixed if key.endswith("running_var"))
    assert mixed["bn1.num_batches_tracked"].dtype == torch.int64
    assert torch.equal(mixed["fixed"], updates[0].model["fixed"])


REFUSED = [
    ({"name": "trimmed_mean", "byzantine": 3}, 6, "none of 6 clients is left"),
    ({"name": "krum", "byzantine": 2}, 6,
     "Krum needs 7 clients in a round to tolerate 2 malicious ones, and there are 6"),
    ({"name": "multi_krum", "byzantine": 1, "keep": 7}, 6, "keep: 7 is more than the 6 clients"),
    ({"name": "bulyan", "byzantine": 1}, 6,
     "Bulyan needs 7 clients in a round to tolerate 1 malicious ones, and there are 6"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "cohort", "message"), REFUSED)
def test_too_many_malicious_clients_are_refused(spec: dict[str, object], cohort: int, message: str) -> None:
    def reasons(clients: int) -> list[str]:
        cell: Any = SimpleNamespace(cohort=clients, malicious=0)
        return [one.reason for one in facts.refusals(calls.call("Aggregator", spec), cell, "aggregator")]

    found = reasons(cohort)
    assert found and message in found[0]
    assert not reasons(cohort + 1)


def test_too_few_clients_of_a_caller_of_ours() -> None:
    updates, at = vectors([[0.0]] * 4)
    with pytest.raises(ValueError, match="krum: byzantine=1 needs 5 clients in a round, and there are 4"):
        AGGREGATORS["krum"](updates, at, byzantine=1)
    updates, at = vectors([[0.0]] * 5)
    refused = [replace(update, refused=1) for update in updates]
    with pytest.raises(ValueError, match="bulyan: byzantine=1 needs 7 clients in a round, and there are 6"):
        AGGREGATORS["bulyan"](refused, at, byzantine=1)
    with pytest.raises(SpecError, match="byzantine"):
        calls.check("Aggregator", {"name": "krum", "byzantine": -1})
