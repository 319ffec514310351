"""What counts as right, what an attack may do to an image, and what is said where an outcome is doubtful."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import members
import pytest
import torch
from torch import Tensor, nn

from fatbench.engine import accuracy, plausible
from fatbench.engine.gradients import NoGradient
from fatbench.engine.outcomes import NOT_FINITE, Ball, Seen, ball, is_correct, names_a_class
from fatbench.engine.rounds import Problem
from fatbench.methods.attacks import ATTACKS
from fatbench.suite import calls

LOST, RADIUS = "attacked images are not finite", "an attack leaves its radius"
RANGE = "an attack leaves the pixel range"
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("logits", "label", "expected"),
    [
        ([1.0, 2.0, 0.0], 1, True),
        ([1.0, 2.0, 0.0], 0, False),
        ([NAN, NAN, NAN], 0, False),
        ([0.0, NAN, 0.0], 1, False),
        ([3.0, 0.0, NAN], 0, False),
        ([INF, 0.0, 0.0], 0, False),
        ([-INF, -INF, -INF], 0, False),
        ([2.0, -INF, 0.0], 0, True),
    ],
)
def test_an_image_is_right_where_its_largest_output_is_finite_and_of_its_class(
    logits: list[float], label: int, expected: bool
) -> None:
    """Minus infinity is the logarithm of a probability of zero: the other classes are named all the same."""
    found = torch.tensor([logits, [0.0, 0.0, 5.0]])
    assert is_correct(found, torch.tensor([label, 2])).tolist() == [expected, True]
    assert names_a_class(found).tolist() == [math.isfinite(max(logits, key=lambda v: (math.isnan(v), v))), True]


def bound(name: str, **settings: Any) -> Callable[..., Any]:
    return calls.build("Attack", calls.check("Attack", {"name": name, **settings}))


def of_a_plug_in(model: Any, x: Tensor, y: Tensor, generator: Any, *, eps: float = 0.03, norm: str = "L2") -> Tensor:
    return x


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (accuracy.natural, None),
        (bound("fgsm", eps="8/255"), Ball(8 / 255, "Linf")),
        (bound("pgd", eps=0.5, step=0.1, steps=2, norm="L2"), Ball(0.5, "L2")),
        (bound("torchattacks", attack="PGD", eps=0.1), Ball(0.1, "Linf")),
        (bound("torchattacks", attack="PGDL2", eps=1), Ball(1.0, "L2")),
        (bound("torchattacks", attack="CW"), None),
        (bound("dual", attack={"name": "fgsm", "eps": 0.1}, through="clean", predicts="clean"), Ball(0.1, "Linf")),
        (of_a_plug_in, Ball(0.03, "L2")),
        (functools.partial(of_a_plug_in, eps=0.2, norm="Linf"), Ball(0.2, "Linf")),
        (functools.partial(of_a_plug_in, norm="L1"), None),
    ],
)
def test_the_ball_of_an_attack_is_in_its_settings(attack: Callable[..., Any], expected: Ball | None) -> None:
    assert ball(attack) == expected


def seen(move: Any, within: Ball | None, logits: Any = ((1.0, 0.0),) * 2) -> Seen:
    x = torch.tensor([0.5, 0.9]).reshape(2, 1, 1, 1).expand(2, 1, 2, 2)
    return Seen.of(torch.tensor(logits), x, x + torch.tensor(move).reshape(2, 1, 1, 1), within)


@pytest.mark.parametrize(
    ("move", "within", "expected"),
    [
        ([0.1, 0.0], Ball(0.1, "Linf"), {}),
        ([0.1 + 3e-7, 0.0], Ball(0.1, "Linf"), {}),
        ([-0.11, 0.0], Ball(0.1, "Linf"), {RADIUS: 0.11}),
        ([0.1, 0.0], Ball(0.2, "L2"), {}),  # four pixels: twice as long
        ([0.11, 0.0], Ball(0.2, "L2"), {RADIUS: 0.22}),
        ([0.0, 0.3], None, {RANGE: 0.2}),
        ([-0.7, 0.0], None, {RANGE: 0.2}),
        ([NAN, 0.0], Ball(0.1, "Linf"), {LOST: 1}),
        ([INF, 0.2], Ball(0.1, "Linf"), {LOST: 1, RADIUS: 0.2, RANGE: 0.1}),
    ],
)  # fmt: skip
def test_what_an_attack_did_is_measured(move: list[float], within: Ball | None, expected: dict[str, float]) -> None:
    assert seen(move, within).doubts(within) == pytest.approx(expected)


def test_chunks_add_up() -> None:
    first = seen([0.3, 0.0], Ball(0.1, "Linf"), ((NAN, 0.0), (0.0, 1.0)))
    second = seen([NAN, 0.2], Ball(0.1, "Linf"), ((NAN, 0.0), (INF, 1.0)))
    both = first + second
    assert (both.unclassed, both.lost) == (3, 1)
    assert (both.distance, both.outside) == (pytest.approx(0.3), pytest.approx(0.1))
    assert both.doubts(None) == pytest.approx({NOT_FINITE: 3, LOST: 1, RANGE: 0.1})


# --- a network that gives no class --------------------------------------------------------------------------------

COLOURS = torch.tensor([0, 64, 128, 255] * 3, dtype=torch.uint8).reshape(12, 1, 1, 1)
CLASSES = torch.tensor([0, 1, 2, 3] * 3)


class Fragile(nn.Module):
    """Class c is nearest to the colour c / 3; NaN for every pixel that is none of the four."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(20.0))

    def forward(self, x: Tensor) -> Tensor:
        away = x.flatten(1) - torch.tensor([0.0, 64 / 255, 128 / 255, 1.0])
        logits = -self.scale * away**2
        return torch.where((away.abs().amin(1) > 1e-3)[:, None], torch.full_like(logits, NAN), logits)

    def edge_logits(self, x: Tensor) -> Tensor:
        return self(x * 0.9)


def problem(model: nn.Module) -> tuple[Problem, dict[str, Tensor]]:
    on = Problem(model, COLOURS, CLASSES, [], 4, 3, torch.device("cpu"), path="reference")
    return on, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "attack",
    [
        bound("fgsm", eps=0.05),
        bound("pgd", eps=0.05, step=0.02, steps=3),
        bound("pgd", eps=0.05, step=0.02, steps=3, early_stop=True),
        bound("torchattacks", attack="PGD", eps=0.05, steps=2),
        bound("autoattack", eps=0.05),
        lambda model, x, y, generator: x * NAN,
    ],
)
def test_a_network_that_is_nan_on_every_attacked_image_is_wrong_on_all(
    attack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of twelve images are of class 0, which is what argmax makes of NaN."""
    members.short_autoattack(monkeypatch)
    on, state = problem(Fragile())
    found = accuracy.outcomes_of(on, state, COLOURS, CLASSES, attack, ("x",), batch=6)
    assert found.correct.sum() == 0 and found.seen.unclassed == 12
    clean = accuracy.outcomes_of(on, state, COLOURS, CLASSES, accuracy.natural, ("x",))
    assert clean.correct.all() and clean.seen == Seen()


def test_the_small_device_is_not_right_without_a_class() -> None:
    on, state = problem(Fragile())
    assert accuracy.edge_accuracy(on, state, COLOURS, CLASSES) == 3 / 12  # black stays black


# --- a network whose answers are not an image's own ---------------------------------------------------------------


class Centred(nn.Module):
    """Takes the mean image of the batch away, as statistics of the batch do."""

    def forward(self, x: Tensor) -> Tensor:
        return 20 * (x - x.mean(0)).flatten(1) @ torch.tensor([[-1.0, 0.0, 0.5, 1.0]])


class Placed(nn.Module):
    """Answers by the image's place in the batch."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x)) % 4
        return nn.functional.one_hot(places, 4) + x.flatten(1)


class Adapts(nn.Module):
    """Batch normalisation that stays in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(1, 4))

    def train(self, mode: bool = True) -> Adapts:
        return super().train(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("network", [Centred, Placed, Adapts])
def test_a_network_that_looks_at_the_batch_is_doubted(network: type[nn.Module], n: int) -> None:
    on, state = problem(network())
    assert plausible.doubts(on, state, COLOURS[:n]) == [plausible.BATCH]


def test_a_network_that_treats_every_image_for_itself_is_not() -> None:
    assert plausible.doubts(*problem(Fragile()), COLOURS) == []
    noisy = nn.Sequential(nn.Flatten(), nn.Linear(1, 4))
    noisy.register_forward_hook(lambda module, given, out: out + torch.rand_like(out))
    assert plausible.doubts(*problem(noisy), COLOURS) == [plausible.RANDOM]


# --- networks without a gradient ----------------------------------------------------------------------------------


class Cut(nn.Module):
    """Right on all four colours; its forward cuts the gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, Fragile()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                return self.inner(x)
        if self.how == "argmax":
            return nn.functional.one_hot(self.inner(x).argmax(1), 4).float()
        if self.how == "detach":
            return self.inner(x.detach())
        return self.inner((x * 255).to(torch.uint8).float() / 255)


@pytest.mark.parametrize("how", ["no_grad", "argmax", "detach", "bytes"])
def test_a_network_without_a_gradient_has_its_natural_accuracy_and_a_sentence_on_attacks(how: str) -> None:
    on, state = problem(Cut(how))
    assert accuracy.accuracy(on, state, COLOURS, CLASSES, accuracy.natural, ("x",))[0].all()
    assert accuracy.zero_gradients(on, state, COLOURS, CLASSES) == 1
    for attack in (
        bound("pgd", eps=0.05, step=0.02, steps=3),
        bound("torchattacks", attack="PGD", eps=0.05, steps=2),
        bound("autoattack", eps=0.05),
    ):
        with pytest.raises(NoGradient) as error:
            accuracy.accuracy(on, state, COLOURS, CLASSES, attack, ("x",))
        assert str(error.value).startswith("the network's outputs have no gradient by the images (no_grad, an arg max")
    pgd = ATTACKS["pgd"](Fragile(), COLOURS / 255, CLASSES, torch.Generator(), eps=0.05, step=0.02, steps=1)
    assert (pgd - COLOURS / 255).abs().max() > 0.01
