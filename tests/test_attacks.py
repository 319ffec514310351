"""Attacks: closed forms on two pixels, agreement with torchattacks and AutoAttack, properties of every table entry."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import sys
import types
from pathlib import Path

import members
import pyautoattack
import pytest
import torch
import torchattacks
from hypothesis import given as drawn
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fatbench import __version__, testing
from fatbench.data import digits
from fatbench.errors import SpecError
from fatbench.methods import evasion, packages
from fatbench.methods.evasion import ATTACKS
from fatbench.methods.packages import implementation
from fatbench.models import MODELS
from fatbench.suite import calls, signatures
from fatbench.suite.entry import entry_of

torch.set_num_threads(1)


def declares(name: str, field: str) -> object:
    """What the attack's entry says."""
    return (signatures.describe("Attack", name).entry or {}).get(field)


# Corruptions are in tests/test_corruptions.py: they are in no ball and know no model.
PERTURBING = [name for name in ATTACKS if declares(name, "role") != "corruption"]
OURS = [name for name in PERTURBING if not declares(name, "packages")]
# Settings without a default, where their type's example says little. What torchattacks takes is its attack's.
VALUES = {"eps": "8/255", "step": "2/255", "steps": 3, "through": "clean", "predicts": "clean"}
FREE = {"eps": "8/255", "alpha": "2/255", "steps": 3}


def spec(name: str, **values: object) -> dict[str, object]:
    """A canonical call of the attack: every required setting from VALUES, `values` where the attack takes them."""
    free = inspect.getfullargspec(entry_of(ATTACKS[name]).function).varkw is not None
    node: dict[str, object] = {**members.settings("Attack", name), **FREE} if free else {}
    for setting in signatures.describe("Attack", name).settings:
        if setting.name in values:
            node[setting.name] = values[setting.name]
        elif setting.kind == "Attack":
            node[setting.name] = spec("pgd", **values)
        elif setting.default is signatures.REQUIRED and setting.name not in node:
            node[setting.name] = VALUES.get(setting.name, members.settings("Attack", name)[setting.name])
    if free:
        node.update({key: value for key, value in values.items() if key in node})
    return calls.check("Attack", {"name": name, **node})


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(*rows: list[float]) -> nn.Module:
    """A linear classifier without bias: one row of weights per class, images of shape (B, 1, 1, pixels)."""
    layer = nn.Linear(len(rows[0]), len(rows), bias=False)
    layer.weight.data = torch.tensor(rows, dtype=torch.float32)
    return nn.Sequential(nn.Flatten(), layer).eval()


def conv(classes: int = 4, channels: int = 3) -> nn.Module:
    """A small network with batch norm and dropout, in eval mode; its running statistics are not the initial ones."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), nn.Dropout(0.5)
        second = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten()
        model = nn.Sequential(*first, *second, nn.LazyLinear(classes))
        for _ in range(3):
            model(torch.rand(8, channels, 6, 6))
    return model.eval()


def batch(size: int = 5, classes: int = 4, channels: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = generator(seed)
    x = torch.randint(0, 256, (size, channels, 6, 6), generator=g) / 255
    return x, torch.randint(0, classes, (size,), generator=g)


def pixels(*values: float) -> Tensor:
    return torch.tensor(values).reshape(1, 1, 1, -1)


ZERO = torch.tensor([0])


def walk(*rows: list[float], **settings: object) -> Tensor:
    """Where PGD takes the image (0.5, 0.5) of class 0, begun at the image, under a linear network."""
    return evasion.pgd(linear(*rows), pixels(0.5, 0.5), ZERO, generator(), start="none", **settings)  # type: ignore[arg-type]


# --- closed forms on two pixels -----------------------------------------------------------------------------------
# f(x) = (x_1 - 2 x_2, 0). The gradient of the cross-entropy of class 0 is (p_0 - 1) (1, -2): its sign is (-1, +1).


@pytest.mark.parametrize(
    ("image", "label", "expected"),
    [((0.5, 0.5), 0, (0.4, 0.6)), ((0.5, 0.5), 1, (0.6, 0.4)), ((0.05, 1.0), 0, (0.0, 1.0))],
)
def test_fgsm_moves_each_pixel_by_eps_in_the_box(image: list[float], label: int, expected: list[float]) -> None:
    x_adv = evasion.fgsm(linear([1, -2], [0, 0]), pixels(*image), torch.tensor([label]), generator(), eps=0.1)
    assert torch.allclose(x_adv, pixels(*expected)) and x_adv.min() >= 0 and x_adv.max() <= 1


@pytest.mark.parametrize(("steps", "moved"), [(1, 0.04), (2, 0.08), (3, 0.1), (9, 0.1)])
def test_pgd_walks_to_the_corner_of_the_ball(steps: int, moved: float) -> None:
    """Steps of 0.04, then the projection at 0.1."""
    x_adv = walk([1, -2], [0, 0], eps=0.1, step=0.04, steps=steps)
    assert torch.allclose(x_adv, pixels(0.5 - moved, 0.5 + moved))


def test_pgd_without_start_and_one_step_of_eps_is_fgsm() -> None:
    model, (x, y) = conv(), batch()
    x_adv = evasion.pgd(model, x, y, generator(), eps=0.03, step=0.03, steps=1, start="none")
    assert torch.equal(x_adv, evasion.fgsm(model, x, y, generator(), eps=0.03))


def test_pgd_starts() -> None:
    """With steps of size 0 what is left is the start, projected; the noise is that of the generator."""
    x, y = batch()
    noise = torch.empty(x.shape).uniform_(-0.03, 0.03, generator=generator())
    normal = torch.randn(x.shape, generator=generator())
    expected = {"none": x, "uniform": (x + noise).clamp(0, 1), "gaussian": (x + 0.001 * normal).clamp(0, 1)}
    for start, image in expected.items():
        x_adv = evasion.pgd(conv(), x, y, generator(), eps=0.03, step=0.0, steps=1, start=start)  # type: ignore[arg-type]
        assert torch.allclose(x_adv, image, atol=1e-7), start


# --- the worst case of a linear network ---------------------------------------------------------------------------


def test_exact_linear_is_the_worst_corner_of_all() -> None:
    """Three pixels, four classes: of the corners of ball and box the one with the least margin; box and ball cut."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model, x, y, eps = linear(*torch.randn(4, 3).tolist()), torch.rand(200, 1, 1, 3), torch.randint(4, (200,)), 0.3
    x_adv = evasion.exact_linear(model, x, y, generator(), eps=eps)
    assert x_adv.min() >= 0 and x_adv.max() <= 1 and (x_adv - x).abs().max() <= eps + 1e-6

    def margins(images: Tensor) -> Tensor:
        logits = model(images).detach()
        right = logits.gather(1, y[:, None]).squeeze(1)
        return right - logits.scatter(1, y[:, None], -torch.inf).amax(1)

    low, high = (x - eps).clamp(min=0), (x + eps).clamp(max=1)
    ends = [torch.tensor(bits).reshape(1, 1, 1, 3) for bits in itertools.product([False, True], repeat=3)]
    least = torch.stack([margins(torch.where(end, high, low)) for end in ends]).amin(0)
    torch.testing.assert_close(margins(x_adv), least)
    pgd = evasion.pgd(model, x, y, generator(), eps=eps, step=0.1, steps=20)
    robust, seen = ((margins(images) > 0).sum() for images in (x_adv, pgd))
    assert 0 < robust <= seen < (margins(x) > 0).sum()


def test_a_constant_network_falls_to_no_attack() -> None:
    model, (x, y) = MODELS["constant"]((3, 6, 6), 4).eval(), batch(8)
    model.logits.data = torch.tensor([0.0, 2.0, 0.0, 1.0])
    for name in ("exact_linear", "pgd", "cw", "fgsm"):
        x_adv = calls.build("Attack", spec(name))(model, x, y, generator())
        assert model(x_adv).argmax(1).tolist() == [1] * 8 and x_adv.isfinite().all()


# --- the L2 ball --------------------------------------------------------------------------------------------------
# f(x) = (3 x_1 + 4 x_2, 0): the margin of class 0 is w x with w = (3, 4), so that within eps it falls by eps times the
# dual norm of w, ||w||_2 = 5 and ||w||_1 = 7.


@pytest.mark.parametrize(("norm", "fall", "end"), [("L2", 2.5, (0.2, 0.1)), ("Linf", 3.5, (0.0, 0.0))])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_margin_falls_by_eps_times_the_dual_norm(norm: str, fall: float, end: list[float], steps: int) -> None:
    """eps 0.5 at (0.5, 0.5): L2 goes 0.5 (3/5, 4/5) down, L-infinity 0.5 (1, 1); in one step, or in four of 0.125."""
    model, x = linear([3, 4], [0, 0]), pixels(0.5, 0.5)
    x_adv = walk([3, 4], [0, 0], eps=0.5, step=0.5 / steps, steps=steps, norm=norm)
    assert torch.allclose(x_adv, pixels(*end), atol=1e-6)
    with torch.no_grad():
        fell = float(model(x)[0, 0] - model(x_adv)[0, 0])
    assert fell == pytest.approx(fall, abs=1e-5)


def test_l2_steps_go_on_until_the_ball_ends() -> None:
    """Steps of 0.2 with eps 0.5 along -(3/5, 4/5): 0.2, 0.4, then the projection at 0.5."""
    for steps, length in ((1, 0.2), (2, 0.4), (3, 0.5), (9, 0.5)):
        x_adv = walk([3, 4], [0, 0], eps=0.5, step=0.2, steps=steps, norm="L2")
        assert torch.allclose(x_adv, pixels(0.5 - 0.6 * length, 0.5 - 0.8 * length), atol=1e-6), steps


@pytest.mark.parametrize("early_stop", [False, True])
def test_an_image_without_a_gradient_stays_in_l2(early_stop: bool) -> None:
    """Weights of zero: no direction, no move, no division by zero; the start is the image, or a draw around it."""
    call = functools.partial(evasion.pgd, linear([0, 0], [0, 0]), pixels(0.5, 0.25), ZERO)
    settings = {"eps": 0.5, "step": 0.1, "steps": 3, "norm": "L2", "early_stop": early_stop}
    assert torch.equal(call(generator(), start="none", **settings), pixels(0.5, 0.25))
    length = 0.5 * torch.empty(1, 1, 1, 1).uniform_(generator=(g := generator(2)))
    noise = torch.randn(1, 1, 1, 2, generator=g)
    expected = (pixels(0.5, 0.25) + length * noise / noise.norm()).clamp(0, 1)
    assert torch.allclose(call(generator(2), **settings), expected, atol=1e-6)


def test_a_tiny_gradient_is_a_direction_too() -> None:
    """Weights of 3e-25 and 4e-25, whose squares are zero in float32: the step is 0.5 (3/5, 4/5) all the same."""
    x_adv = walk([3e-25, 4e-25], [0, 0], eps=0.5, step=0.5, steps=1, norm="L2")
    assert torch.allclose(x_adv, pixels(0.2, 0.1), atol=1e-6)


@drawn(eps=st.floats(0, 3), step=st.floats(0, 3), seed=st.integers(0, 99), size=st.integers(1, 4))
@examples(max_examples=25, deadline=None)
def test_l2_ball_and_box(eps: float, step: float, seed: int, size: int) -> None:
    model, (x, y) = conv(), batch(size, seed=seed)
    x_adv = evasion.pgd(model, x, y, generator(seed), eps=eps, step=step, steps=3, norm="L2")
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    assert (x_adv - x).flatten(1).norm(dim=1).max() <= eps + 1e-5
    if eps == 0:
        assert torch.equal(x_adv, x)


def test_l2_equals_torchattacks() -> None:
    """Without a random start the same images; each of its own length, however the batch is made up."""
    model, (x, y) = conv(), batch(16)
    expected = torchattacks.PGDL2(model, eps=0.5, alpha=0.1, steps=10, random_start=False)(x, y)
    call = functools.partial(evasion.pgd, eps=0.5, step=0.1, steps=10, start="none", norm="L2")
    x_adv = call(model, x, y, generator())
    assert torch.allclose(x_adv, expected, atol=1e-5, rtol=0)
    assert (x_adv - x).flatten(1).norm(dim=1).max() > 0.49
    assert torch.allclose(call(model, x[3:4], y[3:4], generator()), x_adv[3:4], atol=1e-6, rtol=0)


def test_any_in_l2_is_the_first_wrong_iterate() -> None:
    """Margin 3.5 at (0.5, 0.5), less 1 a step of 0.2, class 1 at 1.6: wrong after two steps, and then left alone."""
    model, settings = linear([3, 4], [0, 0]), {"eps": 0.5, "step": 0.2, "steps": 9, "start": "none", "norm": "L2"}
    model[1].bias = nn.Parameter(torch.tensor([0.0, 1.6]))
    x_adv = evasion.pgd(model, pixels(0.5, 0.5), ZERO, generator(), early_stop=True, **settings)  # type: ignore[arg-type]
    assert torch.allclose(x_adv, pixels(0.26, 0.18), atol=1e-6)


def test_fgsm_sfat_is_a_random_start_and_one_step() -> None:
    """The start (u_1, u_2) from the generator, one step of (-step, +step), projected on the ball."""
    x, step = pixels(0.5, 0.5), 1 / 255
    noise = torch.empty(x.shape).uniform_(-4 / 255, 4 / 255, generator=generator(3))
    moved = (noise + step * pixels(-1, 1)).clamp(-4 / 255, 4 / 255)
    x_adv = evasion.fgsm_sfat(linear([1, -2], [0, 0]), x, ZERO, generator(3), eps=4 / 255, step=step)
    assert torch.allclose(x_adv, x + moved)
    assert (x_adv - x).abs().min() < 3 / 255  # FGSM moves every pixel by 4/255


def test_pgd_kl_goes_on_where_its_start_went() -> None:
    """For two linear classes KL(p(x) || p(x')) grows with |w (x' - x)|, so the steps follow sign(w noise) sign(w)."""
    w, x = torch.tensor([1.0, -2.0]), pixels(0.5, 0.5)
    seen = set()
    for seed in range(8):
        noise = torch.randn(x.shape, generator=generator(seed)).flatten()
        side = (w @ noise).sign()
        seen.add(side.item())
        x_adv = evasion.pgd_kl(linear([1, -2], [0, 0]), x, ZERO, generator(seed), eps=0.1, step=0.04, steps=5)
        assert torch.allclose(x_adv.flatten(), 0.5 + 0.1 * side * w.sign())
    assert seen == {-1.0, 1.0}


def test_cw_follows_the_most_likely_wrong_class() -> None:
    """z = (x_1, x_2, -6 x_2) at (0.5, 0.1): the best wrong class is 1 (z_1 = 0.1 > z_2 = -0.6), so x_2 must rise.

    The cross-entropy gradient of x_2 is p_1 - 6 p_2 < 0 (e^0.1 = 1.11 against 6 e^-0.6 = 3.29): PGD lowers it.
    """
    model, x, y = linear([1, 0], [0, 1], [0, -6]), pixels(0.5, 0.1), ZERO
    x_adv = evasion.cw(model, x, y, generator(), eps=0.02, step=0.02, steps=3)
    assert torch.allclose(x_adv, pixels(0.48, 0.12))
    x_adv = evasion.pgd(model, x, y, generator(), eps=0.02, step=0.02, steps=3)
    assert torch.allclose(x_adv, pixels(0.48, 0.08))


def test_cw_stops_at_minus_kappa() -> None:
    """An image already misclassified by more than kappa has loss 0 and gradient 0: it stays at its random start."""
    model, x, y = linear([1, 0], [0, 1]), pixels(0.1, 0.9), ZERO
    start = x + torch.empty(x.shape).uniform_(-0.02, 0.02, generator=generator())
    assert torch.allclose(evasion.cw(model, x, y, generator(), eps=0.02, step=0.01, kappa=0.5), start)
    assert torch.allclose(evasion.cw(model, x, y, generator(), eps=0.02, step=0.01, kappa=50), pixels(0.08, 0.92))


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_cw_is_right_for_any_number_of_classes(classes: int) -> None:
    """One step against the released loss (one-hot masks, 10 written into it) with the number of classes put right."""
    x, y = batch(6, classes)
    model = conv(classes)
    start = (x + torch.empty(x.shape).uniform_(-0.03, 0.03, generator=generator())).clamp(0, 1).requires_grad_()
    onehot, z = nn.functional.one_hot(y, classes), model(start)
    real, other = (onehot * z).sum(1), ((1 - onehot) * z - onehot * 10000).max(1)[0]
    loss = -torch.clamp(real - other + 50, min=0).sum()
    gradient = torch.autograd.grad(loss, start)[0]
    expected = torch.clamp(torch.clamp(start + 0.01 * gradient.sign(), x - 0.03, x + 0.03), 0, 1)
    x_adv = evasion.cw(model, x, y, generator(), eps=0.03, step=0.01, steps=1)
    assert torch.allclose(x_adv, expected, atol=1e-7)


# --- the two outcomes ---------------------------------------------------------------------------------------------

STEPPED = {"pgd": {"eps": 0.1, "step": 0.03}, "cw": {"eps": 0.1, "step": 0.03}}


@pytest.mark.parametrize("parts", [5, 32])
@pytest.mark.parametrize("name", STEPPED)
def test_any_is_the_union_over_the_steps(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop without compaction, stopped after 0, 1, ..., 6 steps: every image's first wrong iterate, or its last."""
    monkeypatch.setattr(evasion, "part_of", lambda x, model: parts)
    model, (x, y) = conv(), batch(24)
    y[: len(y) // 2] = model(x[: len(y) // 2]).argmax(1)
    attack = functools.partial(ATTACKS[name], model, x, y, **STEPPED[name])
    start = (x + torch.empty(x.shape).uniform_(-0.1, 0.1, generator=generator())).clamp(0, 1)
    iterates = torch.stack([start, *(attack(generator(), steps=steps) for steps in range(1, 7))])
    wrong = torch.stack([model(iterate).argmax(1) != y for iterate in iterates])
    first = torch.where(wrong.any(0), wrong.int().argmax(0), 6)
    expected = iterates[first, torch.arange(len(y))]
    x_adv = attack(generator(), steps=6, early_stop=True)
    assert torch.equal(model(x_adv).argmax(1) != y, wrong.any(0))
    torch.testing.assert_close(x_adv, expected, atol=1e-6, rtol=0)
    assert len(first.unique()) > 3 and not wrong.any(0).all()  # images fall at several steps, and some never


class Around(nn.Module):
    """A network around another one; what it noted."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.seen = model, []

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class HalfBlind(Around):
    """In half precision it gets every image wrong; in float32 it is the model."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits.roll(1, 1) if torch.is_autocast_enabled("cpu") else logits


@pytest.mark.parametrize("name", STEPPED)
def test_any_takes_float32_for_the_judge(name: str) -> None:
    """Every image is wrong under autocast and right in float32, at each step: none is left standing before the last."""
    model, x = HalfBlind(flat(5, margin=50)).eval(), torch.rand(6, 1, 2, 2, generator=generator())
    y = torch.zeros(6, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        step = functools.partial(ATTACKS[name], model, x, y, steps=3, **STEPPED[name])
        walked = [step(generator(), early_stop=early) for early in (True, False)]
    assert torch.equal(*walked)


# --- in parts ------------------------------------------------------------------------------------------------------


class Sizes(Around):
    """It notes how many images it was given at a time."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.model(x)


def asks_the_network(name: str) -> bool:
    return members.passes("Attack", spec(name))[0] > 0


@pytest.mark.parametrize("name", [*filter(asks_the_network, OURS)])
def test_parts_give_what_the_whole_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise and steps, through a network with batch norm; never more images at once than a part has."""
    model, (x, y) = Sizes(conv()), batch(13)
    attack = calls.build("Attack", spec(name))
    whole = attack(model, x, y, generator())
    assert set(model.seen) == {13}
    model.seen.clear()
    monkeypatch.setattr(evasion, "part_of", lambda x, model: 5)
    torch.testing.assert_close(attack(model, x, y, generator()), whole, atol=1e-6, rtol=0)
    assert model.seen[-3:] == [5, 5, 3]


@pytest.mark.parametrize(("size", "part"), [((3, 32, 32), 32), ((1, 8, 8), 1536), ((3, 224, 224), 32)])
def test_a_part_of_small_images_has_more_of_them(size: tuple[int, int, int], part: int) -> None:
    assert evasion.part_of(torch.empty(2, *size), nn.Identity()) == part


# --- agreement with torchattacks ----------------------------------------------------------------------------------


def test_fgsm_equals_torchattacks_bit_for_bit() -> None:
    model, (x, y) = conv(), batch(16)
    assert torch.equal(evasion.fgsm(model, x, y, generator(), eps=8 / 255), torchattacks.FGSM(model, 8 / 255)(x, y))


@pytest.mark.parametrize("random_start", [True, False])
def test_pgd_equals_torchattacks(random_start: bool) -> None:
    """Same seed, same start, same step: the same images (torchattacks projects the difference: 1 ulp of rounding)."""
    model, (x, y) = conv(), batch(16)
    theirs = torchattacks.PGD(model, eps=8 / 255, alpha=2 / 255, steps=10, random_start=random_start)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = theirs(x, y)
    start = "uniform" if random_start else "none"
    x_adv = evasion.pgd(model, x, y, generator(5), eps=8 / 255, step=2 / 255, steps=10, start=start)
    assert torch.allclose(x_adv, expected, atol=2e-7, rtol=0)
    assert (x_adv - x).abs().max() > 7.9 / 255


def test_pgd_kl_equals_torchattacks() -> None:
    """TPGD clips its start to the box and TRADES does not, so the images are ones that the noise keeps inside."""
    model, (x, y) = conv(), batch(16)
    x = 0.1 + 0.8 * x
    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = torchattacks.TPGD(model, eps=8 / 255, alpha=2 / 255, steps=10)(x)
    x_adv = evasion.pgd_kl(model, x, y, generator(5), eps=8 / 255, step=2 / 255, steps=10)
    assert torch.allclose(x_adv, expected, atol=2e-7, rtol=0)


# --- every attack in the table ------------------------------------------------------------------------------------


def check_ball_and_box(name: str, eps: float, step: float, steps: int, seed: int, size: int) -> None:
    model, (x, y) = conv(), batch(size, seed=seed)
    call = spec(name, eps=eps, step=step, alpha=step, steps=steps)
    x_adv = calls.build("Attack", call)(model, x, y, generator(seed))
    assert x_adv.shape == x.shape and x_adv.dtype == x.dtype and not x_adv.requires_grad
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    assert (x_adv - x).abs().max() <= (0 if declares(name, "role") == "natural" else eps + 1e-6)
    if eps == 0:
        assert torch.equal(x_adv, x)


RADII = st.sampled_from([0.0, 1 / 255, 8 / 255]) | st.floats(0, 1)


@pytest.mark.parametrize("name", [name for name in PERTURBING if name != "autoattack"])
@drawn(eps=RADII, step=RADII, steps=st.integers(1, 4), seed=st.integers(0, 99), size=st.integers(1, 4))
@examples(max_examples=25, deadline=None)
def test_ball_and_box(name: str, eps: float, step: float, steps: int, seed: int, size: int) -> None:
    check_ball_and_box(name, eps, step, steps, seed, size)


@pytest.mark.parametrize(("eps", "size"), [(0.0, 3), (8 / 255, 1), (0.3, 6)])
def test_ball_and_box_of_autoattack(eps: float, size: int) -> None:
    check_ball_and_box("autoattack", eps, 0, 1, 0, size)


@pytest.mark.parametrize("name", PERTURBING)
def test_the_model_is_left_alone(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Modes, weights, buffers, gradients, which weights require a gradient: all as before; nothing is printed."""
    model, (x, y) = conv(), batch(4)
    model[0].weight.requires_grad_(False)
    model[4].eval().train()  # a module in another mode than the rest stays in it
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    copies = x.clone(), y.clone()
    calls.build("Attack", spec(name, eps=0.3))(model, x, y, generator())
    assert [module.training for module in model.modules()] == modes
    assert [weight.requires_grad for weight in model.parameters()] == [False] + [True] * 7
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(x, copies[0]) and torch.equal(y, copies[1]) and not x.requires_grad
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", PERTURBING)
def test_works_where_gradients_are_off_and_in_any_layout(name: str) -> None:
    """Inside no_grad, and on channels_last images with the same result in the same layout."""
    model, (x, y) = conv(), batch(4)
    attack = calls.build("Attack", spec(name, eps=0.3))
    with torch.no_grad():
        expected = attack(model, x, y, generator())
    last = x.contiguous(memory_format=torch.channels_last)
    x_adv = attack(model, last, y, generator())
    assert x_adv.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(x_adv, expected, atol=1e-6)


class Recorded(Around):
    """It notes the types of its logits."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        self.seen.append(logits.dtype)
        return logits


@pytest.mark.parametrize("name", PERTURBING)
def test_works_under_autocast(name: str) -> None:
    """The logits are bfloat16, the images float32, in the ball."""
    model, (x, y) = Recorded(conv()).eval(), batch(4)
    with torch.autocast("cpu", torch.bfloat16):
        x_adv = calls.build("Attack", spec(name, eps=0.3))(model, x, y, generator())
    confirmed = {torch.float32} if name in PERTURBING and name not in OURS and declares(name, "float32") else set()
    asked = name not in OURS or asks_the_network(name)  # what a package does its docstring does not count
    assert set(model.seen) == ({torch.bfloat16} | confirmed if asked else set())
    assert x_adv.dtype == torch.float32
    assert (x_adv - x).abs().max() <= 0.3 + 1e-6


def test_logits_are_never_half_precision() -> None:
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    found = [evasion.predict(nn.Identity(), torch.zeros(1, 2, dtype=given)).dtype for given in types]
    assert found == [torch.float32] * 3 + [torch.float64]


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", OURS)
def test_passes_are_those_of_the_docstring(name: str, steps: int) -> None:
    model, (x, y) = conv(), batch(4)
    passes, call = testing.Passes(), spec(name, steps=steps)
    calls.build("Attack", call)(passes.watch(model), x, y, generator())
    assert (passes.forward / 4, passes.backward / 4) == members.passes("Attack", call)


def test_only_the_gradient_by_the_image_is_computed() -> None:
    """The backward kernels are asked for the input's gradient alone, although the weights require theirs."""
    asked = []

    class Masks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "convolution_backward" in str(func) or "batch_norm_backward" in str(func):
                asked.append(list(args[-1]))
            assert "linear_backward" not in str(func)
            return func(*args, **(kwargs or {}))

    model, (x, y) = conv(), batch(4)
    with Masks():
        evasion.fgsm(model, x, y, generator(), eps=0.1)
    assert asked == [[True, False, False]] * 3


# --- AutoAttack ---------------------------------------------------------------------------------------------------


def flat(classes: int, slope: float = 1.0, margin: float = 0.0) -> nn.Module:
    """A random linear classifier of 2 x 2 images; a margin in favour of class 0 that no attack can overcome."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, classes))
    model[1].weight.data = slope * torch.randn(classes, 4, generator=generator(4))
    model[1].bias.data = margin * torch.eye(classes)[0] + 0.01 * torch.arange(classes)
    return model.eval()


def judged(model: nn.Module, size: int = 8, side: int = 2) -> tuple[nn.Module, Tensor, Tensor]:
    """The network, images of one channel, and its own answers for labels."""
    x = torch.rand(size, 1, side, side, generator=generator())
    return model, x, model(x).argmax(1)


def by_the_package(model: nn.Module, x: Tensor, y: Tensor, **settings: object) -> tuple[Tensor, Tensor]:
    """pyautoattack itself with the seed that generator(3) draws: its images, and its answers for them."""
    seed = int(torch.randint(2**31, (1,), generator=generator(3)))
    adversary = pyautoattack.AutoAttack(model, seed=seed, **settings)
    adversary.apgd_targeted.n_target_classes = adversary.fab.n_target_classes = min(9, model(x).shape[1] - 1)
    with torch.random.fork_rng():
        return adversary.run_standard_evaluation(x, y, batch_size=len(x))


def test_autoattack_is_the_package_called_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed into pyautoattack itself: the same images, and some of them successful, some not."""
    members.short_autoattack(monkeypatch, 25, 500)
    model, x, y = judged(flat(5))
    x_adv = packages.autoattack(model, x, y, generator(3), eps=0.05)
    assert all(weight.grad is None for weight in model.parameters())
    expected, predicted = by_the_package(model, x, y, norm="Linf", eps=0.05, version="standard")
    assert torch.equal(x_adv, expected)
    assert 0 < (predicted == y).sum() < 8
    assert torch.equal(x_adv[predicted == y], x[predicted == y])  # what withstands comes back as it was


@pytest.mark.parametrize("version", ["rand", pytest.param("plus", marks=pytest.mark.nightly)])
def test_other_versions_of_autoattack_are_the_packages(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm and version reach the package: its own call gives the same images, in float32 and where all is repeated."""
    members.short_autoattack(monkeypatch)
    model, x, y = judged(wide(5), 2, 6)
    settings = {"norm": "L2", "eps": 0.3, "version": version}
    x_adv = packages.autoattack(model, x, y, generator(3), **settings)  # type: ignore[arg-type]
    expected, predicted = by_the_package(model, x, y, **settings)
    assert torch.equal(x_adv, expected)
    assert (predicted != y).sum() > 0
    assert (x_adv - x).flatten(1).norm(dim=1).max() <= 0.3 + 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        blind = packages.autoattack(HalfBlind(model).eval(), x, y, generator(3), **settings)  # type: ignore[arg-type]
    assert torch.equal(blind, expected)


class Noisy(Around):
    """A network that draws at test time."""

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x + 0.5 * torch.randn(x.shape))


@pytest.mark.parametrize("version", ["standard", "rand", "plus"])
def test_a_network_that_draws_at_test_time_is_refused_by_autoattack(version: str) -> None:
    """One forward pass would say what is robust."""
    model, x, y = judged(flat(5))
    noisy = Noisy(model).eval()
    before = torch.get_rng_state()
    with pytest.raises(packages.AttackError, match=r"the network draws at test time .* a single forward pass"):
        packages.autoattack(noisy, x, y, generator(3), eps=0.05, version=version)  # type: ignore[arg-type]
    assert torch.equal(before, torch.get_rng_state())


def wide(classes: int) -> nn.Module:
    """A random linear classifier of 6 x 6 images."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, classes))
    model[1].weight.data = torch.randn(classes, 36, generator=generator(4))
    model[1].bias.data = 0.01 * torch.arange(classes)
    return model.eval()


def test_autoattack_under_bfloat16_is_the_package_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, also for a model that is always wrong under autocast: nothing of it is asked there."""
    members.short_autoattack(monkeypatch)
    model, x, y = judged(flat(5))
    expected = packages.autoattack(model, x, y, generator(3), eps=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        x_adv = packages.autoattack(model, x, y, generator(3), eps=0.05)
        blind = packages.autoattack(HalfBlind(model).eval(), x, y, generator(3), eps=0.05)
    assert torch.equal(x_adv, expected) and torch.equal(blind, expected)
    assert 0 < (model(expected).argmax(1) != y).sum() < 8


def test_autoattack_breaks_what_bfloat16_sees_nothing_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near 3/4 bfloat16 has steps of 1/256: a pixel within 0.0015 of it is 3/4, and what is above has no gradient.

    In float32 1000 times what is above reaches 1.5: more than class 0 has of a last pixel of 1/4, 4 * 1/4, and less
    than it has of 1/2.
    """
    members.short_autoattack(monkeypatch)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False)).eval()
    model[1].weight.data, model[1].bias.data = torch.eye(4), torch.tensor([-0.75, -0.75, -0.75, 0.0])
    model[3].weight.data = torch.diag(torch.tensor([1000.0, 1000.0, 1000.0, 4.0])).roll(1, 0)  # class 0: the last
    x = torch.full((4, 1, 2, 2), 0.75)
    x[:, 0, 1, 1] = torch.tensor([0.25, 0.5, 0.25, 0.5])
    y = torch.zeros(4, dtype=torch.int64)
    expected = packages.autoattack(model, x, y, generator(3), eps=0.0015, version="rand")
    with torch.autocast("cpu", torch.bfloat16):
        found = packages.autoattack(model, x, y, generator(3), eps=0.0015, version="rand")
    assert (model(expected).argmax(1) != y).tolist() == [True, False, True, False]
    assert torch.equal(found, expected)


def test_autoattack_standard_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 steps of APGD-CE, 9 targets of APGD-T and FAB-T with 100 steps, 5000 queries, p 0.8; one restart each."""
    seen = []
    package, run = pyautoattack.AutoAttack, pyautoattack.AutoAttack.run_standard_evaluation
    spy = lambda adversary, *a, **k: seen.append(adversary) or run(adversary, *a, **k)  # noqa: E731
    monkeypatch.setattr(package, "run_standard_evaluation", spy)
    x = torch.rand(1, 1, 2, 2, generator=generator())
    for classes in (10, 100, 6, 4):
        packages.autoattack(flat(classes), x, torch.tensor([0]), generator(), eps=1.0)
    for adversary, targets in zip(seen, (9, 9, 5, 3), strict=True):
        assert adversary.attacks_to_run == ["apgd-ce", "apgd-t", "fab-t", "square"]
        assert adversary.norm == "Linf" and adversary.epsilon == 1.0
        assert adversary.apgd.n_iter == adversary.apgd_targeted.n_iter == adversary.fab.n_iter == 100
        assert adversary.apgd.n_restarts == adversary.apgd_targeted.n_restarts == adversary.fab.n_restarts == 1
        assert adversary.apgd_targeted.n_target_classes == adversary.fab.n_target_classes == targets
        assert adversary.square.n_queries == 5000 and adversary.square.p_init == 0.8


PASSES = {"standard": (7865, 1910), "rand": (4048, 4040), "plus": (9788, 7819)}


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["standard", "rand", "plus"])
def test_autoattack_costs_what_its_docstring_says_at_most(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 classes and a margin of 50 that nothing overcomes: every stage runs to its end, and the bound is attained.

    By queries that all change the image; of one channel many do not.
    """
    monkeypatch.setattr(packages, "_skip_unchanged", lambda ask: ask)
    model = flat(10, margin=50)
    passes, call = testing.Passes(), spec("autoattack", eps="8/255", version=version)
    passes.watch(model)
    x = torch.rand(1, 1, 2, 2, generator=generator())
    x_adv = calls.build("Attack", call)(model, x, torch.tensor([0]), generator())
    assert torch.equal(x_adv, x)
    looks = 1  # at one image of the batch a second time: does the network draw?
    assert (passes.forward - looks, passes.backward) == members.passes("Attack", call) == PASSES[version]


class Counting(Around):
    """A network whose logits are another number's each time it is asked."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return self.model(x).flatten(1) * len(self.seen)


class Branching(Around):
    """A network whose code looks at the images."""

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).flatten(1) if x.sum() > 0 else x.flatten(1)


def trained(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """A small SmallCNN after so many steps on 64 of the images."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = MODELS["small_cnn"](tuple(x.shape[1:]), 10, width=8)
        step = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(steps):
            some = torch.randint(len(x), (64,))
            step.zero_grad()
            nn.functional.cross_entropy(model(x[some]), y[some]).backward()
            step.step()
    return model.eval().requires_grad_(False)


def test_a_network_without_its_normalisation_gives_the_same_logits() -> None:
    """And beats as it does; a network that cannot be traced, or is another one then, stays as it is."""
    x = torch.rand(6, 3, 8, 8, generator=generator())
    model = trained(x, torch.arange(6), 3)
    beats: list[object] = []
    model.register_forward_pre_hook(lambda *_: beats.append(0))
    fused = packages._fused(model, x)
    assert fused is not model and not any(isinstance(one, nn.BatchNorm2d) for one in fused.modules())
    assert sum(isinstance(one, nn.BatchNorm2d) for one in model.modules()) == 6
    beats.clear()
    logits = fused(x)
    assert len(beats) == 1
    torch.testing.assert_close(logits, model(x), rtol=1e-5, atol=1e-6)
    grey = torch.rand(4, 1, 2, 2, generator=generator())
    for other in (Counting(nn.BatchNorm2d(1)).eval(), Branching(nn.BatchNorm2d(1)).eval(), flat(4)):
        assert packages._fused(other, grey) is other


def test_square_asks_nothing_about_an_image_that_stays_as_it_is() -> None:
    """Margins and losses are those of always asking, also where Square writes into what it was given."""
    asked: list[int] = []
    scale = torch.tensor([1.0, 2.0, 3.0])

    def ask(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(len(x))
        value = x.flatten(1).sum(1) * scale[y] - 1.0
        return value, value.clone()

    once = packages._skip_unchanged(ask)
    x, y = torch.full((3, 1, 1, 2), 2.0), torch.tensor([0, 1, 2])
    margin, loss = once(x, y)
    assert margin.tolist() == [3.0, 7.0, 11.0] and asked == [3]
    for written in (x, margin, loss):
        written.zero_()
    x = torch.full((3, 1, 1, 2), 2.0)
    assert once(x, y)[0].tolist() == [3.0, 7.0, 11.0] and asked == [3]  # nothing has changed
    x[1] = 3.0  # worse: the image before is kept
    assert once(x, y)[1].tolist() == [3.0, 11.0, 11.0] and asked == [3, 1]
    x[1] = 2.0
    assert once(x, y)[0].tolist() == [3.0, 7.0, 11.0] and asked == [3, 1]
    x[0], x[2] = 0.25, 1.0  # the first is wrong now, the last better: the first is not looked at again
    assert once(x, y)[0].tolist() == [-0.5, 7.0, 5.0] and asked == [3, 1, 2]
    assert once(x[1:], y[1:])[0].tolist() == [7.0, 5.0] and asked == [3, 1, 2]
    assert once(x[1:], y[:2])[0].tolist() == [3.0, 3.0] and asked == [3, 1, 2, 2]  # other labels: another attack


@pytest.mark.nightly
@pytest.mark.parametrize(("channels", "eps"), [(1, 0.1), (3, 0.01)])
def test_autoattack_has_the_outcomes_of_the_package(channels: int, eps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 digits, grey or in colours: the same are robust, some of them and not all. Both take fewer steps."""
    members.short_autoattack(monkeypatch, 5, 1500)
    model, x, y = coloured(channels)
    ours = packages.autoattack(model, x, y, generator(3), eps=eps)
    theirs, _ = by_the_package(model, x, y, norm="Linf", eps=eps, version="standard")
    robust = model(theirs).argmax(1) == y
    assert 5 < robust.sum() < 95
    assert torch.equal(model(ours).argmax(1) == y, robust)


def coloured(channels: int) -> tuple[nn.Module, Tensor, Tensor]:
    """100 digits, each in two colours of its own where there are channels, and a network that has learnt from 1,000."""
    dataset, g = digits(Path()), generator()
    grey, labels = (torch.from_numpy(part) for part in (dataset.train_images[:1100], dataset.train_labels[:1100]))
    x = grey.float() / 255
    if channels > 1:
        ink, paper = (torch.rand(len(x), channels, 1, 1, generator=g) for _ in range(2))
        x = x * ink + (1 - x) * paper
    return trained(x[100:], labels[100:].long(), 80), x[:100], labels[:100].long()


@pytest.mark.parametrize("classes", [2, 3])
def test_autoattack_refuses_fewer_than_four_classes(classes: int) -> None:
    message = rf"AutoAttack needs at least 4 classes \(targeted DLR loss\), the model has {classes}"
    with pytest.raises(packages.AttackError, match=message):
        packages.autoattack(flat(classes), torch.rand(1, 1, 2, 2), ZERO, generator(), eps=0.1)


def test_autoattack_leaves_tracing_as_it_was() -> None:
    """The package's check for dynamic defences ends every trace, which would cut a coverage measurement short."""

    def trace(frame: object, event: str, argument: object) -> None:
        return None

    outer = sys.gettrace()
    try:
        sys.settrace(trace)
        packages.autoattack(*judged(flat(4), 2), generator(), eps=1.0)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(outer)


def test_the_authors_own_package_gives_the_same_images() -> None:
    """Their attacks under their driver, and the same attacks under that of pyautoattack."""
    theirs = pytest.importorskip("autoattack")
    (model, x, y), found = judged(flat(5)), []
    for package, batch in ((theirs, "bs"), (pyautoattack, "batch_size")):
        adversary = package.AutoAttack(model, norm="Linf", eps=0.05, seed=3, version="standard", device="cpu")
        adversary.verbose, adversary.square.n_queries = False, 500
        adversary.apgd_targeted.n_target_classes = adversary.fab.n_target_classes = 4
        adversary.apgd.n_iter = adversary.apgd_targeted.n_iter = adversary.fab.n_iter = 25
        with torch.random.fork_rng():
            images = adversary.run_standard_evaluation(x, y, **{batch: 8})
        found.append(images[0] if isinstance(images, tuple) else images)
    assert torch.equal(*found) and not torch.equal(found[0], x)


def test_the_authors_own_package_is_used_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A stand-in with the signature of github.com/fra31/auto-attack: bs= and images alone for an answer."""
    (tmp_path / "autoattack.py").write_text(
        "class AutoAttack:\n"
        "    def __init__(self, model, norm='Linf', eps=.3, seed=None, verbose=True, attacks_to_run=[],\n"
        "                 version='standard', is_tf_model=False, device='cuda', log_path=None):\n"
        "        print('setting parameters for standard version')\n"
        "        self.eps, self.apgd = eps, type('', (), {})()\n"
        "        self.apgd_targeted, self.fab = type('', (), {})(), type('', (), {})()\n"
        "        self.square = type('', (), {'margin_and_loss': None})()\n"
        "    def run_standard_evaluation(self, x_orig, y_orig, bs=250, return_labels=False):\n"
        "        assert bs == len(x_orig) and self.fab.n_target_classes == 3 and not self.verbose\n"
        "        assert y_orig.tolist() == [0, 1] and not x_orig.requires_grad\n"
        "        return (x_orig + self.eps).clamp(0, 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    x = torch.rand(2, 1, 2, 2)
    try:
        x_adv = packages.autoattack(flat(4), x.requires_grad_(), torch.tensor([0, 1]), generator(), eps=0.1)
        assert torch.equal(x_adv, (x + 0.1).clamp(0, 1)) and not x_adv.requires_grad
        assert implementation("autoattack") == "autoattack (version unknown)"
    finally:
        sys.modules.pop("autoattack", None)
    (tmp_path / "autoattack.py").rename(tmp_path / "elsewhere.py")
    (tmp_path / "autoattack").mkdir()  # a folder of that name is no package
    importlib.invalidate_caches()
    assert implementation("autoattack").startswith("pyautoattack")
    assert capfd.readouterr() == ("", "")


# --- torchattacks by name -----------------------------------------------------------------------------------------


def test_torchattacks_by_name_is_the_package_called_directly() -> None:
    model, (x, y) = conv(), batch(8)
    x_adv = packages.torchattacks(model, x, y, generator(), attack="MIFGSM", eps=0.03, alpha=0.01, steps=4)
    assert torch.equal(x_adv, torchattacks.MIFGSM(model, eps=0.03, alpha=0.01, steps=4)(x, y))


def test_torchattacks_with_a_seed_of_its_own_takes_the_generators() -> None:
    """Square's default seed is 0 on every batch; here it is drawn, unless the suite gives it."""
    model, x, y = judged(flat(5))

    def square(draw: int, **settings: int) -> Tensor:
        return packages.torchattacks(model, x, y, generator(draw), attack="Square", eps=0.5, n_queries=9, **settings)

    assert torch.equal(square(1), square(1))
    assert not torch.equal(square(1), square(2))
    assert torch.equal(square(1, seed=4), square(2, seed=4))


def test_torchattacks_works_for_a_model_without_weights(capfd: pytest.CaptureFixture[str]) -> None:
    """The package prints that it failed to set the device; here it does not."""
    model = nn.Flatten().eval()
    x = pixels(0.5, 0.25)
    x_adv = packages.torchattacks(model, x, ZERO, generator(), attack="FGSM", eps=0.1)
    assert torch.allclose(x_adv, pixels(0.4, 0.35))
    assert capfd.readouterr() == ("", "")


TINY = {"steps": 2, "n_classes": 4, "n_queries": 5, "max_iterations": 10, "popsize": 4, "nb_sample": 2}
NOT_ALONE = ("AutoAttack", "MultiAttack", "LGV")  # refused by name, see below


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, value in vars(torchattacks).items()
        if isinstance(value, type) and issubclass(value, torchattacks.attack.Attack) and name not in NOT_ALONE
    ],
)
def test_every_attack_of_torchattacks_runs_on_channels_last_images(name: str) -> None:
    """PGDL2, DeepFool and others call view(), which the gradient of a channels_last network does not have."""
    model = conv().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, y = batch(3)
    settings = {k: v for k, v in TINY.items() if k in inspect.signature(getattr(torchattacks, name)).parameters}
    last = x.contiguous(memory_format=torch.channels_last)
    last = packages.torchattacks(model, last, y, generator(), attack=name, **settings)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert last.shape == x.shape and last.min() >= -1e-6 and last.max() <= 1 + 1e-6
    if name in ("PGDL2", "DeepFool", "PGD"):
        plain = packages.torchattacks(conv(), x, y, generator(), attack=name, **settings)
        assert torch.allclose(last, plain, atol=1e-4) and not torch.equal(last, x)


def test_what_torchattacks_raises_is_said_in_one_line() -> None:
    message = "^torchattacks.EADL1 failed: ZeroDivisionError: integer modulo by zero$"
    with pytest.raises(packages.AttackError, match=message):
        packages.torchattacks(conv(), *batch(2), generator(), attack="EADL1", max_iterations=2)


def test_memory_that_runs_out_in_torchattacks_is_not_a_mistake_of_the_caller() -> None:
    """So that the worker tries smaller batches."""

    class Full(Around):
        def forward(self, x: Tensor) -> Tensor:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        packages.torchattacks(Full(nn.Identity()).eval(), *batch(2), generator(), attack="FGSM")


@pytest.mark.parametrize("name", ["FAB", "CW", "DeepFool"])
def test_an_attack_that_calls_backward_leaves_no_gradient_on_the_weights(name: str) -> None:
    """These do, on every weight that requires a gradient; so does the FAB of AutoAttack."""
    model, x, y = judged(flat(5))
    classes = {"n_classes": 5} if name == "FAB" else {}
    packages.torchattacks(model, x, y, generator(), attack=name, steps=2, **classes)
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize(
    ("attack", "settings", "message"),
    [
        ("AutoAttack", {}, "torchattacks.AutoAttack runs 10 steps .* use the attack named 'autoattack'"),
        ("MultiAttack", {}, "torchattacks.MultiAttack needs other attacks or data"),
        ("LGV", {}, "torchattacks.LGV needs other attacks or data"),
        ("MIFGMS", {}, r"torchattacks has no attack 'MIFGMS' \(did you mean 'MIFGSM'\?\)"),
        ("pgd", {}, r"torchattacks has no attack 'pgd' \(did you mean 'PGD'\?\)"),
        ("???", {}, r"torchattacks has no attack '\?\?\?' \(known: APGD, APGDT, BIM, "),
        ("PGD", {"step": 0.1}, r"torchattacks.PGD has no setting 'step' \(did you mean 'steps'\?\)"),
        ("FGSM", {"zz": 1}, r"torchattacks.FGSM has no setting 'zz' \(known: eps\)"),
    ],
)
def test_torchattacks_refuses(attack: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(packages.AttackError, match=message):
        packages.torchattacks(conv(), *batch(1), generator(), attack=attack, **settings)


def test_without_torchattacks_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "installed", lambda package: package != "torchattacks")
    message = r"^'torchattacks' needs the package torchattacks: pip install --no-deps torchattacks$"
    with pytest.raises(packages.AttackError, match=message):
        packages.torchattacks(conv(), *batch(1), generator(), attack="FGSM")


# --- provenance and the suite's view ------------------------------------------------------------------------------


def test_implementation() -> None:
    assert {name: implementation(name) for name in ATTACKS} == {
        **dict.fromkeys(ATTACKS, f"fatbench {__version__}"),
        "autoattack": f"pyautoattack {pyautoattack.__version__}",
        "torchattacks": f"torchattacks {torchattacks.__version__}",
    }
    with pytest.raises(SpecError, match=r"no attack is named 'pdg' \(did you mean 'pgd'\?\)"):
        implementation("pdg")


def test_implementation_by_a_package_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "installed", lambda package: False)
    assert implementation("autoattack") == "autoattack, pyautoattack (version unknown)"


def test_implementation_of_a_plugin_is_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "describe", lambda kind, name: types.SimpleNamespace(entry={}))
    monkeypatch.setattr(packages.calls, "function", lambda signature: evasion.pgd)
    monkeypatch.setattr(signatures, "place_of", lambda function: "/elsewhere/my_attacks.py:12")
    assert implementation("mine") == "my_attacks.py"


def test_autoattack_tells_which_attack_begins_on_how_many_images(monkeypatch):
    members.short_autoattack(monkeypatch)
    told = []
    token = packages.stage_observer.set(lambda name, standing: told.append((name, standing)))
    try:
        packages.autoattack(*judged(nn.Sequential(nn.Flatten(), nn.Linear(4, 10)), 3), generator(1), eps=1e-6)
    finally:
        packages.stage_observer.reset(token)
    assert told == [("APGD-CE", 3), ("APGD-T", 3), ("FAB-T", 3), ("Square", 3)]
