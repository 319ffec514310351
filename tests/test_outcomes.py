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
from fatbench.methods.evasion import ATTACKS
from fatbench.models.external_network import Preprocessed
from fatbench.report.numbers.doubts import DIRECTIONAL
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
    assert plausible.doubts(on, state, COLOURS[:n], CLASSES[:n]) == [plausible.BATCH]


def test_a_network_that_treats_every_image_for_itself_is_not() -> None:
    assert plausible.doubts(*problem(Fragile()), COLOURS, CLASSES) == []
    noisy = nn.Sequential(nn.Flatten(), nn.Linear(1, 4))
    noisy.register_forward_hook(lambda module, given, out: out + torch.rand_like(out))
    assert plausible.doubts(*problem(noisy), COLOURS, CLASSES) == [plausible.RANDOM]


# --- outputs that are no logits -----------------------------------------------------------------------------------

LABELS = torch.arange(100) % 10


def outputs_of(seed: int = 0, right: float = 0.9) -> Tensor:
    """Logits of a network that is sure of its answers, and right on most images."""
    draws = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(100, 10, generator=draws) - 2
    answers = torch.where(torch.rand(100, generator=draws) < right, LABELS, (LABELS + 1) % 10)
    return logits.scatter_add(1, answers[:, None], 8 + 2 * torch.randn(100, 1, generator=draws))


@pytest.mark.parametrize(
    ("squeeze", "expected"),
    [
        (lambda z: z, []),
        (lambda z: 1000 * z, []),
        (lambda z: z + 50, []),
        (lambda z: z.log_softmax(1), []),
        (torch.relu, []),
        (lambda z: z.softmax(1), [plausible.PROBABILITIES]),
        (torch.sigmoid, [plausible.SIGMOID]),
        (lambda z: 0.9 * z.softmax(1), [plausible.SIGMOID]),
        (lambda z: 100 * (3 * z).softmax(1), [plausible.SQUEEZED]),
        (lambda z: 5 * (3 * z).sigmoid(), [plausible.SQUEEZED]),
        (torch.tanh, [plausible.SQUEEZED]),
        (lambda z: 20 * z.tanh(), [plausible.SQUEEZED]),
        (lambda z: (20 * z).atan(), [plausible.SQUEEZED]),
        (lambda z: z / 10, [plausible.SQUEEZED]),
        (lambda z: z / 100, [plausible.SQUEEZED]),
        (lambda z: nn.functional.normalize(z), [plausible.SQUEEZED]),
        (lambda z: z.clamp(0, 5), [plausible.SQUEEZED]),
    ],
)
def test_squeezed_outputs_are_doubted(squeeze: Callable[[Tensor], Tensor], expected: list[str]) -> None:
    for seed in range(5):
        assert plausible._of_form(squeeze(outputs_of(seed)).double(), LABELS, "logits") == expected
    assert plausible._of_form(squeeze(outputs_of()).double(), LABELS, None) == []  # not declared


def test_outputs_of_a_network_that_has_learned_nothing_are_not_doubted() -> None:
    """Small outputs are what it has, and no number of it means anything."""
    for squeeze in (lambda z: z / 100, torch.sigmoid, lambda z: 0 * z + z[:1]):
        assert plausible._of_form(squeeze(outputs_of(right=0.12)).double(), LABELS, "logits") == []


@pytest.mark.parametrize("declared", ["probabilities", "sigmoid"])
def test_what_is_declared_must_be_returned(declared: Any) -> None:
    x = outputs_of()[:, :, None, None]
    squeezed = {"probabilities": x.softmax(1), "sigmoid": x.sigmoid()}
    wrap = Preprocessed(nn.Flatten(), outputs=declared)
    doubts = {name: plausible._of_form(wrap(given).double(), LABELS, declared) for name, given in squeezed.items()}
    expected = {"probabilities": [plausible.PROBABILITIES], "sigmoid": [plausible.NOT_PROBABILITIES]}
    assert doubts == {**expected, declared: []}
    wrong = plausible.NOT_SIGMOID if declared == "sigmoid" else plausible.NOT_PROBABILITIES
    assert plausible._of_form(wrap(x).double(), LABELS, declared) == [wrong]


def test_a_sigmoid_is_undone() -> None:
    logits = torch.linspace(-60, 12, 73)[:, None, None, None].expand(73, 4, 1, 1).clone().requires_grad_()
    found = Preprocessed(nn.Sequential(nn.Sigmoid(), nn.Flatten()), outputs="sigmoid")(logits)
    torch.testing.assert_close(found, logits.flatten(1), rtol=0.02, atol=1e-4)  # a unit of float32 near 1 is 1 % there
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(gradient, torch.ones_like(gradient), rtol=1e-3, atol=0)
    ends = Preprocessed(nn.Flatten(), outputs="sigmoid")(torch.tensor([0.0, 1.0])[:, None, None, None])
    assert ends.isfinite().all() and ends[0] < -60 and ends[1] > 16


# --- a network that answers otherwise under attack ----------------------------------------------------------------


class Turns(Fragile):
    """Fragile, which turns its answers round from some call on, or where a gradient is asked for."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when, self.calls = when, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        asked = {"requires_grad": x.requires_grad, "grad": torch.is_grad_enabled()}.get(self.when, False)
        if asked or (self.when.isdigit() and self.calls > int(self.when)):
            return super().forward(x).flip(1)
        return super().forward(x)


@pytest.mark.parametrize(("when", "changed"), [("no", 0), ("requires_grad", 12), ("grad", 12), ("0", 12), ("1", 12)])
def test_a_network_must_answer_clean_images_as_before(when: str, changed: int) -> None:
    on, state = problem(Turns(when))
    right = torch.ones(12, dtype=torch.bool)
    assert plausible.changed_answers(on, state, COLOURS, CLASSES, right) == changed
    assert plausible.changed_answers(on, state, COLOURS, CLASSES, right[:5]) == min(changed, 5)


def test_what_an_attack_does_to_the_weights_is_seen() -> None:
    on, state = problem(Fragile())
    on.model.scale.data.neg_()  # type: ignore[union-attr]
    right = torch.ones(12, dtype=torch.bool)
    assert plausible.changed_answers(on, None, COLOURS, CLASSES, right) == 12
    assert plausible.changed_answers(on, state, COLOURS, CLASSES, right) == 0


def test_rounding_and_draws_change_no_answer() -> None:
    on, state = problem(Fragile())
    on.model.register_forward_hook(lambda module, given, out: torch.tensor([[3.0, 3 + 1e-6, 0, 0]]).expand_as(out))
    second = CLASSES == 1
    assert plausible.changed_answers(on, state, COLOURS, CLASSES, second) == 0
    assert plausible.changed_answers(on, state, COLOURS, CLASSES, CLASSES == 0) == 0  # the first by rounding
    assert plausible.changed_answers(on, state, COLOURS, CLASSES, second | (CLASSES == 3)) == 0
    noisy = nn.Sequential(nn.Flatten(), nn.Linear(1, 4))
    noisy.register_forward_hook(lambda module, given, out: 9 * torch.rand_like(out))
    assert plausible.changed_answers(*problem(noisy), COLOURS, CLASSES, torch.ones(12, dtype=torch.bool)) == 0


@pytest.mark.parametrize("when", ["requires_grad", "grad"])
def test_outputs_that_a_gradient_changes_are_doubted(when: str) -> None:
    assert plausible.doubts(*problem(Turns(when)), COLOURS, CLASSES) == [plausible.ASKED]


# --- gradients that do not follow the loss ------------------------------------------------------------------------

MANY = torch.randint(256, (16, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
MANY[:, :, 5:] = 0  # a flat background, on whose ties pooling has its kinks
OF_MANY = torch.arange(16) % 4


class _Backward(torch.autograd.Function):
    """The images, with a gradient of its own."""

    @staticmethod
    def forward(context: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        context.change = change
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return context.change(gradient), None


class Led(nn.Module):
    """A network of convolutions, batch normalisation, pooling and ReLU, called in its own way."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.inner = nn.Sequential(
                nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                nn.Linear(72, 4),
            )  # fmt: skip
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.inner, x)


def rounded(x: Tensor, levels: int) -> Tensor:
    """Rounded, with a straight-through gradient."""
    return x + ((x * levels).round() / levels - x).detach()


def quantised(m: nn.Module, x: Tensor) -> Tensor:
    """Images and activations of eight bits, with the straight-through gradient of training for them."""
    for layer in m:  # type: ignore[attr-defined]
        low, high = min(0.0, float(x.detach().min())), float(x.detach().max())
        scale = max(high - low, 1e-6) / 255
        x = layer(torch.fake_quantize_per_tensor_affine(x, scale, round(-low / scale), 0, 255))
    return x


HONEST: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda m, x: m(x),
    "sure": lambda m, x: 1e4 * m(x),
    "unsure": lambda m, x: 1e-6 * m(x),
    "logarithms": lambda m, x: m(x).softmax(1).clamp(min=1e-30).log(),
    "sigmoid": lambda m, x: m(x).sigmoid(),
    "float32": lambda m, x: m.float()(x.float()),
    "half": lambda m, x: m.float()(x.half().float()),
    "dropout": lambda m, x: nn.functional.dropout(m(x), 0.5, training=True),
    "noise": lambda m, x: m(x + 0.05 * torch.randn_like(x)),
    "clamped": lambda m, x: m(x.clamp(0, 1)),
    "a byte": lambda m, x: m(rounded(x, 255)),
    "five bits": lambda m, x: m(rounded(x, 31)),
    "quantised": quantised,
}
LEFT = torch.ones(8).where(torch.arange(8) < 4, 0)
ASTRAY: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cut, and another": lambda m, x: m(x.detach()) + 1e-6 * x.sum((1, 2, 3))[:, None] * torch.arange(4),
    "the same in float32": lambda m, x: m.float()(x.detach().float())
    + 1e-6 * x.float().sum((1, 2, 3))[:, None] * torch.arange(4),
    "rounded, and another": lambda m, x: m((255 * x.detach()).round() / 255) + 1e-6 * x.sum((1, 2, 3))[:, None]
    * torch.arange(4),
    "turned": lambda m, x: m(_Backward.apply(x, lambda g: -g)),
    "scaled": lambda m, x: m(_Backward.apply(x, lambda g: 1e-6 * g)),
    "shuffled": lambda m, x: m(_Backward.apply(x, lambda g: g.flip(-1))),
    "of other images": lambda m, x: m(_Backward.apply(x, lambda g: g.roll(1, 0))),
    "of the left half": lambda m, x: m(x * LEFT + (x * (1 - LEFT)).detach()),
    "of one pixel in two": lambda m, x: m(torch.where(torch.arange(8) % 2 > 0, x, x.detach())),
    "shattered": lambda m, x: m(x + 3e-3 * (1e4 * x).sin()),
    "finely shattered": lambda m, x: m(x + 1e-3 * (1e6 * x).sin()),
    "outputs shattered": lambda m, x: m(x) + 0.1 * (1e5 * x.flatten(1)[:, :4]).sin(),
    "by requires_grad": lambda m, x: m(x.detach()) + 1e-3 * x.sum((1, 2, 3))[:, None] * torch.arange(4)
    if x.requires_grad else m(x),
    "two levels": lambda m, x: m(rounded(x, 1)),
}  # fmt: skip


def led(way: Callable[[Any, Tensor], Tensor]) -> tuple[float, int]:
    model = Led(way)
    on = Problem(model, MANY, OF_MANY, [], 4, 3, torch.device("cpu"), path="reference")
    return plausible.not_followed(on, model.state_dict(), MANY, OF_MANY)


@pytest.mark.parametrize("way", HONEST)
def test_gradients_of_an_honest_network_follow_its_loss(way: str) -> None:
    share, used = led(HONEST[way])
    assert used == 8 and share <= (DIRECTIONAL if way == "quantised" else 1 / 8)


@pytest.mark.parametrize("way", ASTRAY)
def test_gradients_that_do_not_follow_the_loss_are_found(way: str) -> None:
    share, used = led(ASTRAY[way])
    assert used >= 7 and share >= 3 / 4


def test_images_without_a_gradient_are_not_tried() -> None:
    """They are counted by `zero_gradients`."""
    assert led(lambda m, x: m(_Backward.apply(x, torch.zeros_like))) == (0, 0)
    assert led(lambda m, x: m(x.detach())) == (0, 0)
    assert led(lambda m, x: m(x) * torch.where(x.flatten(1)[:, :1] > 0.5, 1.0, torch.nan))[1] < 8


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
