"""Defences: what is sent, what is withheld, and the closed forms that say how often and how private."""

from __future__ import annotations

import functools
import math
from decimal import Decimal
from fractions import Fraction

import members
import numpy
import pytest
import torch
from torch import Tensor, nn

from fatbench.engine import randomness as rng
from fatbench.engine.inject import asks
from fatbench.errors import SpecError
from fatbench.methods.accountants import gaussian_epsilon, laplace_epsilon, renyi, sampled_gaussian_epsilon
from fatbench.methods.defences import DEFENCES, Examples, Spent, Upload, guarantee
from fatbench.methods.inversions.upload import gradients
from fatbench.models import MODELS
from fatbench.suite import calls

AT = Upload(seed=3, client=1, epoch=2, step=4)
WITHHELD = {"random_binary": "mask_probability", "locked_binary": "mask_probability", "pruning": "fraction"}


def gradient(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"vit.pos_embed": (1, 50, 20), "vit.patch_embed.proj.weight": (20, 3, 8, 8), "head.bias": (10,)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([v.flatten() for v in values.values()])


@pytest.mark.parametrize("name", [name for name in DEFENCES if not asks(DEFENCES[name], "examples")])
def test_a_defence_is_a_pure_function_and_withheld_entries_are_zero(name):
    before = gradient()
    defence = members.member("Defence", name)
    sent, mask = defence(before, AT)
    again, _ = defence(gradient(), AT)
    torch.testing.assert_close(before, gradient(), rtol=0, atol=0)
    torch.testing.assert_close(sent, again, rtol=0, atol=0)
    assert {n: (v.shape, v.dtype) for n, v in sent.items()} == {n: (v.shape, v.dtype) for n, v in before.items()}
    for key, contributes in (mask or {}).items():
        assert contributes.dtype == torch.bool
        assert not sent[key][~contributes].any()
        torch.testing.assert_close(sent[key][contributes], before[key][contributes], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["random_binary", "locked_binary", "pruning"])
def test_rate_zero_is_no_defence(name):
    sent, mask = DEFENCES[name](gradient(), AT, **{WITHHELD[name]: 0.0})
    torch.testing.assert_close(sent, gradient(), rtol=0, atol=0)
    assert all(m.all() for m in (mask or {}).values())


def test_the_rate_is_the_share_of_zeros():
    """n = 4,850 entries: four standard deviations of a fraction are 4 sqrt(R (1 - R) / n) <= 0.029."""
    for rate in (0.2, 0.5, 0.8):
        _, mask = DEFENCES["random_binary"](gradient(), AT, mask_probability=rate)
        assert float((~flat(mask)).float().mean()) == pytest.approx(rate, abs=0.029)


def test_who_shares_a_mask_and_for_how_long():
    def mask(name: str, client: int, epoch: int, step: int, **settings: object) -> Tensor:
        return flat(DEFENCES[name](gradient(), Upload(0, client, epoch, step), mask_probability=0.5, **settings)[1])

    def same(name: str, **settings: object) -> tuple[bool, bool, bool]:
        """Is the mask the same in the next step, the next epoch, for the next client?"""
        first = mask(name, 0, 0, 0, **settings)
        others = [(0, 0, 1), (0, 1, 0), (1, 0, 0)]
        return tuple(torch.equal(first, mask(name, *other, **settings)) for other in others)

    assert same("random_binary") == (True, False, False)
    assert same("random_binary", period="step") == (False, False, False)
    assert same("locked_binary") == (True, True, False)
    assert same("locked_binary", shared=True) == (True, True, True)


def test_rates_per_layer():
    """The mask of a tensor does not depend on the others."""
    layers = {"pos_embed": 0.9, "vit": 0.5, "head": 0.0}
    _, mask = DEFENCES["random_binary"](gradient(), AT, mask_probability=0.0, layers=layers)
    fractions = {name: float((~m).float().mean()) for name, m in mask.items()}
    assert fractions["vit.pos_embed"] == pytest.approx(0.9, abs=0.04)
    assert fractions["vit.patch_embed.proj.weight"] == pytest.approx(0.5, abs=0.04)
    assert fractions["head.bias"] == 0
    alone = {"head.bias": gradient()["head.bias"]}
    masks = (DEFENCES["random_binary"](part, AT, mask_probability=0.5)[1]["head.bias"] for part in (alone, gradient()))
    assert torch.equal(*masks)


def test_fixed_position_withholds_the_position_embedding_alone():
    sent, mask = DEFENCES["fixed_position"](gradient(), AT)
    assert list(mask) == ["vit.pos_embed"]
    assert not sent["vit.pos_embed"].any()
    assert torch.equal(sent["head.bias"], gradient()["head.bias"])


def test_gaussian_noise_has_its_size_and_the_gradient_is_cut_in_l2():
    sent, _ = DEFENCES["gaussian"](gradient(), AT, noise=0.0, clip=2.0)
    assert float(flat(sent).norm()) == pytest.approx(2, rel=1e-5)
    noise = flat(DEFENCES["gaussian"](gradient(), AT, noise=0.5, clip=2.0)[0]) - flat(sent)
    assert float(noise.std()) == pytest.approx(1.0, rel=0.05)
    short = {"w": torch.tensor([0.3, 0.4])}
    torch.testing.assert_close(DEFENCES["gaussian"](short, AT, noise=0.0, clip=2.0)[0], short)


def test_laplace_noise_has_its_size_and_the_gradient_is_cut_in_l1():
    """The mean absolute value of Laplace noise is its scale, its standard deviation sqrt(2) times that."""
    sent, _ = DEFENCES["laplace"](gradient(), AT, noise=0.0, clip=2.0)
    assert float(flat(sent).abs().sum()) == pytest.approx(2, rel=1e-5)
    noise = flat(DEFENCES["laplace"](gradient(), AT, noise=0.5, clip=2.0)[0]) - flat(sent)
    assert float(noise.abs().mean()) == pytest.approx(1.0, rel=0.06)
    assert float(noise.std()) == pytest.approx(math.sqrt(2), rel=0.08)


def test_pruning_keeps_the_largest_and_drops_as_many_entries_as_it_says():
    """Half of four is two, whatever else is as small; of the equal ones the first."""
    for entries, expected in (
        ([3.0, -1.0, 0.5, -4.0], [3.0, 0.0, 0.0, -4.0]),
        ([1.0, -1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]),
        ([2.0, 1.0, -1.0, 1.0], [2.0, 0.0, 0.0, 1.0]),
        ([0.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 5.0]),
    ):
        sent, mask = DEFENCES["pruning"]({"w": torch.tensor(entries)}, AT, fraction=0.5)
        assert sent["w"].tolist() == expected and mask is None
    steps = torch.arange(1000).remainder(7).sub(3.0).reshape(10, 100)  # a seventh of them zero
    sent, _ = DEFENCES["pruning"]({"w": steps}, AT, fraction=0.9)
    assert sent["w"].count_nonzero() == 100 and sent["w"].abs().amax() == 3


@pytest.mark.parametrize(("rate", "words"), [(1.0, "at 1 nothing is sent"), (1.5, "got 1.5"), (-0.1, "got -0.1")])
@pytest.mark.parametrize("name", ["random_binary", "locked_binary", "pruning"])
def test_a_rate_outside_its_range_is_refused(name, rate, words):
    with pytest.raises(ValueError, match=words):
        DEFENCES[name](gradient(), AT, **{WITHHELD[name]: rate})
    with pytest.raises(SpecError, match=WITHHELD[name]):
        calls.check("Defence", {"name": name, WITHHELD[name]: rate})


def test_other_mistakes():
    with pytest.raises(ValueError, match=r"no learned positions \(no parameter named pos_embed\)"):
        DEFENCES["fixed_position"]({"w": torch.ones(2)}, AT)
    with pytest.raises(ValueError, match=r"no parameter is named 'block\.\.\.'"):
        DEFENCES["random_binary"](gradient(), AT, mask_probability=0.1, layers={"block": 0.5})
    with pytest.raises(ValueError, match=r"must be in \[0, 1\), got 1"):
        DEFENCES["random_binary"](gradient(), AT, mask_probability=0.1, layers={"head": 1.0})
    with pytest.raises(ValueError, match="delta must be in"):
        gaussian_epsilon(1.0, 0.0)


def test_settings_of_a_suite_are_checked_and_fractions_read():
    spec = calls.check("Defence", {"name": "random_binary", "mask_probability": "1/5", "layers": {"pos_embed": "1/2"}})
    sent, mask = calls.build("Defence", spec)(gradient(), AT)
    assert float((~mask["vit.pos_embed"]).float().mean()) == pytest.approx(0.5, abs=0.07)
    assert sent.keys() == gradient().keys()
    with pytest.raises(SpecError, match="layers"):
        calls.check("Defence", {"name": "random_binary", "mask_probability": 0.2, "layers": {"pos_embed": 1}})


def test_guarantee_one_gaussian_solves_its_equation_and_known_values():
    """sigma = sqrt(2 ln(1.25 / delta)) / eps is the classical sufficient noise for eps < 1, so the exact one is below.

    Composition: 100 uploads at sigma = 10 are one at sigma = 1. delta(0) = 2 Phi(mu / 2) - 1.
    """
    delta = 1e-5
    classical = math.sqrt(2 * math.log(1.25 / delta)) / 0.9
    assert 0.5 < gaussian_epsilon(classical, delta) < 0.9
    assert gaussian_epsilon(10, delta, uploads=100) == pytest.approx(gaussian_epsilon(1, delta), rel=1e-9)
    assert gaussian_epsilon(1, delta, sensitivity=2) == pytest.approx(gaussian_epsilon(0.5, delta), rel=1e-9)
    mu = 0.2
    assert gaussian_epsilon(1 / mu, math.erf(mu / 2 / math.sqrt(2))) == pytest.approx(0, abs=1e-9)
    assert gaussian_epsilon(0, delta) == laplace_epsilon(0) == math.inf
    assert laplace_epsilon(0.1, uploads=3) == pytest.approx(30)
    # sigma 1e-3: mu = 1000, epsilon = mu^2 / 2 + mu Phi^-1(1 - delta) up to a relative 1e-5; 4.2649 is the quantile
    assert gaussian_epsilon(1e-3, delta) == pytest.approx(500_000 + 4264.9, rel=2e-5)


@pytest.mark.parametrize(("noise", "uploads"), [(1.0, 1), (2.0, 10), (0.5, 1), (5.0, 100)])
def test_epsilon_agrees_with_an_accountant(noise, uploads):
    """Opacus' accountant of privacy loss random variables at sampling rate 1 has an error of 0.01 in epsilon."""
    accountants = pytest.importorskip("opacus.accountants")
    accountant = accountants.PRVAccountant()
    accountant.history = [(noise, 1.0, uploads)]
    with numpy.errstate(divide="ignore"):  # it takes a logarithm of 0 at rate 1
        expected = accountant.get_epsilon(1e-5)
    assert gaussian_epsilon(noise, 1e-5, uploads) == pytest.approx(expected, abs=0.011)


# --- defences that look at every example --------------------------------------------------------------------------


def examples(model: nn.Module, x: Tensor, y: Tensor) -> Examples:
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    each = gradients(model, weights, x[:, None], y[:, None])
    return Examples(model, weights, x, y, lambda: each, len(y))


def test_dp_sgd_cuts_each_example_and_gaussian_their_mean():
    """The noise of DP-SGD is that of a sum."""
    each = {"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}
    behind = Examples(nn.Identity(), {}, torch.zeros(2), torch.zeros(2), lambda: each, 2)
    mean = {"w": each["w"].mean(0)}
    torch.testing.assert_close(DEFENCES["dpsgd"](mean, AT, behind, noise=0)[0]["w"], torch.tensor([0.45, 0.6]))
    torch.testing.assert_close(DEFENCES["gaussian"](mean, AT, noise=0)[0]["w"], torch.tensor([0.6, 0.8]))
    zeros = {"w": torch.zeros(8, 20000)}
    behind = Examples(nn.Identity(), {}, torch.zeros(8), torch.zeros(8), lambda: zeros, 8)
    sent, _ = DEFENCES["dpsgd"]({"w": torch.zeros(20000)}, AT, behind, noise=2, clip=3)
    assert float(sent["w"].std()) == pytest.approx(2 * 3 / 8, rel=0.02)


def test_soteria_changes_the_last_layer_alone():
    with rng.forked(0, "model"):
        model = MODELS["vit"]((1, 12, 12), 10, patch=4, dim=32, depth=1, heads=2).eval()
    behind = examples(model, torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2]))
    whole = {name: value.mean(0) for name, value in behind.gradients().items()}
    sent, _ = DEFENCES["soteria"](whole, AT, behind, fraction=0.25)
    assert {name for name in whole if not torch.equal(sent[name], whole[name])} == {"head.fc.weight"}
    assert int((sent["head.fc.weight"] == 0).all(0).sum()) == 8


@pytest.mark.parametrize(
    ("rate", "noise", "steps"),
    [(0.01, 1, 1000), (0.05, 2, 500), (0.064, 1, 160), (0.05, 0.3, 20), (0.2, 0.7, 3), (0.01, 8, 10000)],
)
def test_guarantee_of_drawn_batches_is_that_of_an_accountant(rate, noise, steps):
    accountants = pytest.importorskip("opacus.accountants")
    accountant = accountants.RDPAccountant()
    accountant.history = [(noise, rate, steps)]
    expected = accountant.get_epsilon(1e-5)
    assert sampled_gaussian_epsilon(noise, rate, steps, 1e-5) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("order", [2, 3, 20, 63])
@pytest.mark.parametrize(("noise", "rate"), [(0.3, 0.05), (1.0, 0.001), (4.0, 0.5)])
def test_renyi_divergence_at_whole_orders_is_the_closed_form(noise, rate, order):
    """Mironov, Talwar and Zhang 2019, section 3.3: a binomial sum."""
    q, sigma = Fraction(rate), Fraction(noise)
    terms = [
        Decimal(math.comb(order, i) * float((1 - q) ** (order - i) * q**i))
        * Decimal(float((i * i - i) / (2 * sigma**2))).exp()
        for i in range(order + 1)
    ]
    expected = float(sum(terms).ln()) / (order - 1)
    assert renyi(order, noise, rate) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(("noise", "rate", "steps"), [(0.05, 0.16, 10), (0.3, 0.999, 1), (4, 0.9, 1), (0.02, 1e-3, 1)])
def test_drawing_a_part_never_gives_more_away_than_taking_all(noise, rate, steps):
    assert 0 < sampled_gaussian_epsilon(noise, rate, steps, 1e-5) <= gaussian_epsilon(noise, 1e-5, steps)
    assert sampled_gaussian_epsilon(4, 1, 10, 1e-5) == gaussian_epsilon(4, 1e-5, 10) == pytest.approx(3.3414, abs=1e-4)
    assert renyi(2, 1.0, 0.01) == pytest.approx(1.718134e-4, rel=1e-6)


def test_what_a_defence_has_spent():
    """Clipped batches may turn round (sensitivity 2); an example takes part once an epoch, or is drawn in each step."""
    four, drawn, delta = Spent(4, 40, None), Spent(4, 40, 0.1), 1e-5
    for name, spent, expected in (
        ("dpsgd", four, (gaussian_epsilon(2, delta, 4), delta)),
        ("gaussian", four, (gaussian_epsilon(1, delta, 4), delta)),
        ("laplace", four, (pytest.approx(4), 0)),
        ("dpsgd", drawn, (sampled_gaussian_epsilon(2, 0.1, 40, delta), delta)),
    ):
        assert guarantee(functools.partial(DEFENCES[name], noise=2), spent, delta) == expected
    assert guarantee(DEFENCES["none"], four, delta) is None
