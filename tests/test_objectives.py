"""Objectives and proximal terms: values by hand on two pixels, and properties of every table entry."""

from __future__ import annotations

import math
from collections.abc import Callable

import members
import pytest
import torch
from hypothesis import example
from hypothesis import given as drawn
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn

from fatbench.errors import SpecError
from fatbench.methods import objectives
from fatbench.methods.objectives import OBJECTIVES, PROXIMALS
from fatbench.suite import calls

torch.set_num_threads(1)

INNER = {"name": "pgd", "eps": "8/255", "step": "2/255", "steps": 3}
WITH_ATTACK = [name for name in OBJECTIVES if members.takes("Objective", name, "attack")]


def spec(name: str, attack: object = INNER) -> dict[str, object]:
    """A canonical call of the objective with this attack, if it takes one."""
    given = {**members.settings("Objective", name), **({"attack": attack} if name in WITH_ATTACK else {})}
    return calls.check("Objective", {"name": name, **given})


def built(
    name: str, attack: object = INNER, classes: int = 4, theta: nn.Module | None = None
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The objective of `spec`, given what it asks for: as of client 0, whose classes are equally frequent."""
    counts, theta = torch.full((1, classes), 3.0), (theta or conv()).eval().requires_grad_(False)
    return members.given_what_it_asks(
        calls.build("Objective", spec(name, attack)), client=0, class_counts=counts, broadcast=theta
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def conv(dropout: float = 0.0) -> nn.Module:
    """A small network with batch norm and dropout for (B, 3, 6, 6) images and 4 classes."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        features = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), nn.Dropout(dropout)
        return nn.Sequential(*features, nn.Flatten(), nn.Linear(8 * 36, 4))


def batch(size: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = generator(seed)
    return torch.rand(size, 3, 6, 6, generator=g), torch.randint(0, 4, (size,), generator=g)


# --- values by hand -----------------------------------------------------------------------------------------------
# Two images of two pixels, three classes, z = W x in double precision; the attack moves x by (-0.1, +0.2).

W = [[1.0, -2.0], [0.5, 1.0], [-1.0, 0.0]]
X = [[0.5, 0.25], [0.2, 0.6]]
Y = [0, 2]
SHIFT = [-0.1, 0.2]


def two_pixels() -> tuple[nn.Module, Tensor, Tensor]:
    layer = nn.Linear(2, 3, bias=False, dtype=torch.float64)
    layer.weight.data = torch.tensor(W, dtype=torch.float64)
    return nn.Sequential(nn.Flatten(), layer), torch.tensor(X, dtype=torch.float64).reshape(2, 1, 1, 2), torch.tensor(Y)


def shift(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    return x + torch.tensor(SHIFT, dtype=x.dtype)


def unmoved(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    return x


def brighter(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    return x + 2


def loss_of(name: str, model: nn.Module, x: Tensor, y: Tensor, **settings: object) -> Tensor:
    return OBJECTIVES[name](model, x, y, generator(), **settings)[0]


def softmax(image: list[float]) -> list[float]:
    exponentials = [math.exp(sum(w * x for w, x in zip(row, image, strict=True))) for row in W]
    return [e / sum(exponentials) for e in exponentials]


def moved(image: list[float]) -> list[float]:
    return [x + s for x, s in zip(image, SHIFT, strict=True)]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def value(name: str, **settings: object) -> float:
    return loss_of(name, *two_pixels(), **settings).item()


def test_standard_is_the_cross_entropy() -> None:
    """z = (0, 0.5, -0.5) and (-1, 0.7, -0.2): losses log(1 + e^.5 + e^-.5) and log(e^-1 + e^.7 + e^-.2) + 0.2."""
    first = math.log(1 + math.exp(0.5) + math.exp(-0.5))
    second = math.log(math.exp(-1) + math.exp(0.7) + math.exp(-0.2)) + 0.2
    assert value("standard") == pytest.approx((first + second) / 2, abs=1e-12)
    assert value("standard") == pytest.approx(1.2717669, abs=1e-7)


def test_at_is_the_cross_entropy_of_the_adversarial_images() -> None:
    expected = mean([-math.log(softmax(moved(x))[y]) for x, y in zip(X, Y, strict=True)])
    assert value("at", attack=shift) == pytest.approx(expected, abs=1e-12)


def test_at_under_fgsm_in_closed_form() -> None:
    """f(x) = (x_1 - 2 x_2, 0), x = (.5, .5), class 0, eps .1: x_adv = (.4, .6), z = (-.8, 0), CE = log(1 + e^.8)."""
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0, -2.0], [0.0, 0.0]])
    attack = calls.build("Attack", calls.check("Attack", {"name": "fgsm", "eps": 0.1}))
    model, x = nn.Sequential(nn.Flatten(), layer), torch.full((1, 1, 1, 2), 0.5)
    loss, correct = objectives.at(model, x, torch.tensor([0]), generator(), attack=attack)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(0.8)), abs=1e-6)
    assert correct.tolist() == [False]


@pytest.mark.parametrize("beta", [0.0, 1.0, 6.0])
def test_trades_by_hand(beta: float) -> None:
    """Cross-entropy of the clean images + beta mean KL(clean || adversarial)."""
    expected = [-math.log(softmax(x)[y]) + beta * kl(softmax(x), softmax(moved(x))) for x, y in zip(X, Y, strict=True)]
    assert value("trades", attack=shift, beta=beta) == pytest.approx(mean(expected), abs=1e-12)


@pytest.mark.parametrize("beta", [0.0, 1.0, 6.0])
def test_mart_by_hand(beta: float) -> None:
    """-log p_y(x_adv) - log(1.0001 - max wrong p(x_adv)) + beta KL(clean || adversarial) (1.0000001 - p_y(x)).

    Both adversarial images are classified as 1, so with label 1 the likeliest wrong class is the second likeliest.
    """
    assert [max(range(3), key=softmax(moved(x)).__getitem__) for x in X] == [1, 1]
    for labels in ([0, 2], [1, 1], [2, 0]):
        expected = []
        for x, y in zip(X, labels, strict=True):
            p, q = softmax(x), softmax(moved(x))
            wrong = max(q[j] for j in range(3) if j != y)
            boosted = -math.log(q[y]) - math.log(1.0001 - wrong + 1e-12)
            expected.append(boosted + beta * kl(p, q) * (1.0000001 - p[y]))
        loss = loss_of("mart", *two_pixels()[:2], torch.tensor(labels), attack=shift, beta=beta)
        assert loss.item() == pytest.approx(mean(expected), abs=1e-10)


def test_trades_and_mart_default_to_beta_6() -> None:
    for name in ("trades", "mart"):
        assert value(name, attack=shift) == value(name, attack=shift, beta=6.0) != value(name, attack=shift, beta=5.0)


@pytest.mark.parametrize("name", ["standard", "at", "trades", "mart"])
def test_gradients_are_those_of_the_value(name: str) -> None:
    """Finite differences by every weight: in TRADES and MART the gradient passes through both distributions."""
    settings = {} if name == "standard" else {"attack": shift}
    model, x, y = two_pixels()
    loss_of(name, model, x, y, **settings).backward()
    weight, step = model[1].weight, 1e-6
    for row in range(3):
        for column in range(2):
            values = []
            for sign in (1, -1):
                weight.data[row, column] += sign * step
                values.append(loss_of(name, model, x, y, **settings).item())
                weight.data[row, column] -= sign * step
            assert weight.grad[row, column].item() == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-7)


@pytest.mark.parametrize("name", ["at", "trades", "mart"])
def test_certainty_gives_finite_gradients(name: str) -> None:
    """Logits of 0 and 200: every probability is 0 or 1 in float32, before and after the attack, which swaps them."""
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.tensor([[400.0, 0.0], [0.0, 400.0]])
    model, x = nn.Sequential(nn.Flatten(), layer), torch.tensor([[[[0.5, 0.0]]], [[[0.0, 0.5]]]])
    for labels in ([0, 1], [1, 0]):
        loss = loss_of(name, model, x, torch.tensor(labels), attack=lambda model, x, y, generator: x.flip(3))
        loss.backward()
        assert loss.isfinite() and layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("name", WITH_ATTACK)
def test_correct_is_counted_on_the_images_trained_on(name: str) -> None:
    """The attack turns every image into one of the class label (y + 1) % 4, which the model sees through."""
    x, y = torch.zeros(8, 1, 2, 2), torch.arange(8) % 4
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    model[1].weight.data, model[1].bias.data = torch.eye(4), torch.zeros(4)

    def turn(by: int) -> Callable[..., Tensor]:
        return lambda model, x, y, generator: nn.functional.one_hot((y + by) % 4, 4).float().reshape(-1, 1, 2, 2)

    ratio = {"ratio": 1.0}  # where it has one
    objective = members.given_what_it_asks(
        members.member("Objective", name, **ratio), client=0, class_counts=torch.ones(1, 4), broadcast=model
    )
    for by, seen in ((0, True), (1, False)):
        _, correct = objective(model, x, y, generator(), attack=turn(by))
        assert correct.dtype == torch.bool and correct.tolist() == [seen] * 8


# --- mixed-ratio adversarial training -----------------------------------------------------------------------------


class Observation(nn.Module):
    """A linear model that keeps what it was given and in which mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls: list[tuple[bool, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append((self.training, x.detach().clone()))
        return self.layer(x.flatten(1))


@drawn(size=st.integers(1, 40), ratio=st.integers(0, 100), seed=st.integers(0, 9))
@example(size=100, ratio=29, seed=0)  # 0.29 * 100 is 28.999999999999996
@examples(max_examples=60, deadline=None)
def test_mixed_at_replaces_exactly_floor_ratio_b(size: int, ratio: int, seed: int) -> None:
    """The attack adds 2 + label to its images; ratios in whole per cent, so the count is an integer division."""
    x, y = torch.rand(size, 1, 2, 2), torch.arange(size) % 3
    model, attacked = Observation().eval(), []

    def paint(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        attacked.append((len(x), model.training))
        return x + (2 + y).reshape(-1, 1, 1, 1)

    objectives.mixed_at(model, x, y, generator(seed), attack=paint, ratio=ratio / 100)
    count = ratio * size // 100
    assert attacked == ([(count, False)] if count else [])
    [(training, mixed)] = model.calls
    assert training
    painted = mixed[:, 0, 0, 0] >= 2
    assert painted.sum() == count
    assert torch.equal(mixed[~painted], x[~painted])
    assert torch.equal(mixed[painted], x[painted] + (2 + y[painted]).reshape(-1, 1, 1, 1))  # its own label and place


def test_mixed_at_draws_the_subset_from_the_generator() -> None:
    def subset(seed: int) -> list[bool]:
        model, y = Observation(), torch.zeros(24, dtype=torch.long)
        objectives.mixed_at(model, torch.zeros(24, 1, 2, 2), y, generator(seed), attack=brighter)
        return model.calls[0][1][:, 0, 0, 0].bool().tolist()

    assert subset(1) == subset(1) != subset(2)
    assert sum(subset(1)) == 12


# --- MixFAT, single-step training, AWP ------------------------------------------------------------------------------


class Known(nn.Module):
    """Cross-entropies of 1 for clean images and of 3 for adversarial ones, which are brighter than 1."""

    def forward(self, x: Tensor) -> Tensor:
        ce = torch.where(x[:, 0, 0, 0] > 1, 3.0, 1.0)
        return torch.stack([torch.zeros_like(ce), ce.expm1().log()], 1)  # log(1 + e^z) = ce for class 0


def test_the_ways_of_mixing_clean_and_adversarial_images() -> None:
    """B = 4, ratio 1/2: replace (2 + 6) / 4, append (4 + 6) / 6, weighted 1/2 + 3/2, sum 1 + 3."""
    x, y = torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)

    def of(name: str, **settings: object) -> float:
        return loss_of(name, Known(), x, y, attack=brighter, **settings).item()

    assert of("mixed_at") == pytest.approx(2)
    for mix, expected in (("append", 10 / 6), ("weighted", 2), ("sum", 4)):
        assert of("mixfat", mix=mix) == pytest.approx(expected, abs=1e-6)
    assert of("mixfat", mix="append", ratio=1.0) == pytest.approx(of("mixfat", mix="weighted", ratio=0.5))
    clean = loss_of("standard", Known(), x, y).item()
    assert of("mixfat", mix="append", ratio=0.0) == of("mixfat", mix="weighted", ratio=0.0) == clean


def test_appended_images_are_the_first_of_the_batch() -> None:
    """A batch of 5, ratio 1/2: two more, with their labels; the outcome of an image is that of its attack."""
    model, x, y = Observation(), torch.rand(5, 1, 2, 2), torch.arange(5) % 3
    loss, correct = objectives.mixfat(model, x, y, generator(), attack=brighter, mix="append")
    assert loss.shape == ()
    [(training, given)] = model.calls
    assert training and torch.equal(given, torch.cat([x, x[:2] + 2]))
    logits = model.layer(given.flatten(1))
    expected = logits.argmax(1) == torch.cat([y, y[:2]])
    assert correct.tolist() == [*expected[5:].tolist(), *expected[2:5].tolist()]


def test_noise_and_one_step_of_n_fgsm() -> None:
    """Away from the box, in units of eps: noise of U(-2, 2) and a step of 1 up. Mean 1, half of them outside of the
    ball, none beyond 3; mean absolute value 5/4. FGSM-RS, with steps of 5/4 from U(-1, 1): mean absolute 55/64."""
    model = Slope()
    x, y, eps = torch.full((4000, 1, 1, 1), 0.5), torch.zeros(4000, dtype=torch.int64), 0.01
    objectives.n_fgsm_at(model, x, y, generator(), eps=eps)
    moved = (model.seen[-1] - x).flatten() / eps
    assert float(moved.mean()) == pytest.approx(1, abs=0.06)
    assert float(moved.abs().mean()) == pytest.approx(5 / 4, abs=0.05)
    assert float((moved.abs() > 1).float().mean()) == pytest.approx(0.5, abs=0.03)
    assert -1.01 < float(moved.min()) < -0.99 and 2.99 < float(moved.max()) < 3.01
    objectives.n_fgsm_at(model, x, y, generator(), eps=eps, k=0.0)
    assert torch.allclose(model.seen[-1] - x, torch.tensor(eps), atol=1e-6)
    rs = calls.build("Attack", calls.check("Attack", {"name": "pgd", "eps": eps, "step": 1.25 * eps, "steps": 1}))
    moved = (rs(model, x, y, generator()) - x).flatten() / eps
    assert float(moved.abs().mean()) == pytest.approx(55 / 64, abs=0.03)
    assert float((moved > 0.999).float().mean()) == pytest.approx(5 / 8, abs=0.03)


class Slope(nn.Module):
    """A brighter pixel is less of class 0, so the gradient of the loss points up."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return torch.stack([-self.w * x.flatten(1)[:, 0], torch.zeros(len(x))], 1)


def test_weights_are_perturbed_by_a_part_of_their_norm() -> None:
    """The gradient is that of AT at w + v with v_l = gamma |w_l| g_l / |g_l|, biases and batch norm left alone."""
    x, y = batch()
    gamma, model = 0.05, conv()
    expected = conv()
    expected.load_state_dict(model.state_dict())
    loss = nn.functional.cross_entropy(expected(x), y)
    loss.backward()
    with torch.no_grad():
        for w in expected.parameters():
            if w.dim() > 1:
                v = gamma * w.norm() * w.grad / w.grad.norm()
                assert float(v.norm()) == pytest.approx(gamma * float(w.norm()), rel=1e-5)
                w += v
    expected.zero_grad()
    outer = nn.functional.cross_entropy(expected(x), y)
    outer.backward()
    found = loss_of("awp_at", model, x, y, attack=unmoved, gamma=gamma)
    found.backward()
    assert found.item() == pytest.approx(outer.item(), abs=1e-6) and found.item() > loss.item()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_weight_perturbation_of_two_numbers() -> None:
    """w = (3, 4) and g along (1, 1): v = 0.01 * 5 / sqrt 2 each. Without a gradient v is 0; gamma 0 is `at`."""
    seen: list[Tensor] = []

    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([[3.0, 4.0]]))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.w.detach().clone())
            return nn.functional.pad(x.flatten(1) @ self.w.T, (0, 1))

    y = torch.tensor([1])
    for x, moved in ((torch.ones(1, 1, 1, 2), 0.0353553), (torch.zeros(1, 1, 1, 2), 0.0)):
        loss_of("awp_at", Row(), x, y, attack=unmoved, gamma=0.01)
        assert (seen[-1] - torch.tensor([3.0, 4.0])).flatten().tolist() == pytest.approx([moved] * 2, abs=1e-6)
    model, (x, y) = conv(), batch()
    attack = calls.build("Attack", calls.check("Attack", INNER))
    ours = loss_of("awp_at", model, x, y, attack=attack, gamma=0.0)
    assert torch.equal(ours, loss_of("at", conv(), x, y, attack=attack))


# --- CalFAT and the margin by class frequency -----------------------------------------------------------------------

COUNTS = torch.tensor([[90.0, 10.0]])
CALIBRATED = [  # logits, then the losses of class 0 and 1: plain, calfat, calfat_released
    ((0.0, 0.0), (0.69315, 0.69315), (0.10536, 2.30259), (0.10536, 2.30259)),
    ((1.0, 0.0), (0.31326, 1.31326), (0.04006, 3.23729), (5.0444e-6, 12.19723)),
    ((0.0, math.log(9)), (2.30259, 0.10536), (0.69315, 0.69315), (19.77502, 2.58e-9)),
]


class Logits(nn.Module):
    """The same logits for every image."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


def unattacked(name: str, model: nn.Module, y: Tensor, counts: Tensor, **settings: object) -> Tensor:
    objective = members.given_what_it_asks(OBJECTIVES[name], class_counts=counts)
    return objective(model, torch.zeros(len(y), 1, 1, 1), y, generator(), attack=unmoved, **settings)[0]


@pytest.mark.parametrize(("logits", "plain", "calibrated", "released"), CALIBRATED)
def test_calfat_by_hand(
    logits: tuple[float, ...], plain: tuple[float, ...], calibrated: tuple[float, ...], released: tuple[float, ...]
) -> None:
    """Two classes with 90 and 10 examples."""
    for name, expected in (("at", plain), ("calfat", calibrated), ("calfat_released", released)):
        found = [unattacked(name, Logits(*logits), torch.tensor([y]), COUNTS).item() for y in (0, 1)]
        assert found == pytest.approx(expected, rel=3e-3 if name == "calfat_released" else 1e-4), name


def test_what_constant_logits_calibration_is_best_at() -> None:
    """On its own 90 and 10 examples a client's best constant logits are log pi plain, and equal when calibrated."""
    y = torch.tensor([0] * 9 + [1])
    for name, gap in (("at", math.log(9)), ("calfat", 0.0), ("calfat_released", 0.0)):
        model = Logits(gap, 0.0)
        unattacked(name, model, y, COUNTS).backward()
        assert model.logits.grad.abs().max() < 1e-6, name


def test_calfat_of_equal_classes_is_at_and_scale_is_nothing() -> None:
    inner = {"name": "pgd_kl", "eps": "8/255", "step": "2/255", "steps": 3}
    x, y = batch()
    losses = {
        (name, scale): members.given_what_it_asks(
            calls.build("Objective", spec(name, inner)), class_counts=torch.full((1, 4), scale)
        )(conv().double(), x.double(), y, generator())[0].item()  # in float32 rounding turns a step at some pixel
        for name, scale in (("at", 1.0), ("calfat", 3.0), ("calfat", 300.0))
    }
    assert max(losses.values()) - min(losses.values()) < 1e-5
    skewed = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    images = Logits(0.3, 0.1, 0.0, 0.2), torch.tensor([0, 3])
    first, second = (unattacked("calfat", *images, counts).item() for counts in (skewed, 10 * skewed))
    assert first == pytest.approx(second, rel=1e-6)


def test_the_attack_sees_calibrated_logits_and_nobody_after_it() -> None:
    """softmax(log(90, 10)) is (0.9, 0.1); the release attacks on a tenth of it: (0.55471, 0.44529)."""
    seen: list[list[float]] = []

    def look(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        seen.append(model(x).softmax(1)[0].tolist())
        return x

    for name, expected in (("calfat", 0.9), ("calfat_released", 0.55471)):
        model = Logits(0.0, 0.0)
        objective = members.given_what_it_asks(OBJECTIVES[name], class_counts=COUNTS)
        objective(model, torch.zeros(1, 1, 1, 1), torch.tensor([0]), generator(), attack=look)
        assert seen[-1][0] == pytest.approx(expected, abs=1e-5)
        assert model(torch.zeros(1, 1, 1, 1)).tolist() == [[0.0, 0.0]]


def test_missing_classes() -> None:
    """CalFAT counts 1, or what is said; the margin takes the class out of the softmax."""
    y, none, model = torch.tensor([0]), torch.tensor([[99.0, 0.0]]), Logits(0, 0)
    assert unattacked("calfat", model, y, none).item() == pytest.approx(math.log(100 / 99), rel=1e-5)
    assert unattacked("calfat", model, y, none, missing=9.0).item() == pytest.approx(math.log(108 / 99), rel=1e-5)
    assert unattacked("margin_at", model, y, none).item() == pytest.approx(0, abs=1e-6)


def test_margin_by_hand() -> None:
    """Counts 16 and 1: margins 1/2 and 1, losses log(1 + e^-.5) and that plus 1/2; tau 0 is `at`."""
    counts = torch.tensor([[16.0, 1.0]])
    found = [unattacked("margin_at", Logits(0, 0), torch.tensor([y]), counts).item() for y in (0, 1)]
    assert found == pytest.approx([0.47408, 0.97408], abs=1e-5)
    plain = unattacked("margin_at", Logits(0.4, 0), torch.tensor([1]), counts, tau=0.0).item()
    assert plain == unattacked("at", Logits(0.4, 0), torch.tensor([1]), counts).item()


# --- every objective in the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_attack_in_eval_mode_loss_in_train_mode(name: str) -> None:
    """From either mode; and the model is left in train mode."""
    for before in (True, False):
        model = Observation().train(before)
        x, y = torch.rand(4, 1, 2, 2), torch.arange(4) % 3
        built(name, classes=3, theta=Observation())(model, x, y, generator())
        modes = [training for training, _ in model.calls]
        trained = modes.count(True)
        assert modes == [False] * (len(modes) - trained) + [True] * trained and trained >= 1
        own = members.passes("Objective", spec(name))[0] - trained
        assert modes.count(False) == (3 if name in WITH_ATTACK else own)
        assert model.training and model.layer.training


def forwards_seen_by_batch_norm(name: str, attack: object) -> int:
    model = conv()
    built(name, attack)(model, *batch(), generator())
    return int(model[1].num_batches_tracked)


BY_HAND = {"at": 1, "trades": 2, "mart": 2, "mixed_at": 1, "mixfat": 2, "dual_at": 2, "n_fgsm_at": 1,
           "awp_at": 1}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTIVES)
def test_batch_norm_counts_the_training_forwards_alone(name: str) -> None:
    """Not those of an attack; a pass that only gives a direction, such as AWP's, is none."""
    declared = members.passes("Objective", spec(name, "natural"))[0]
    seen = forwards_seen_by_batch_norm(name, INNER)
    assert seen == forwards_seen_by_batch_norm(name, "natural") and 1 <= seen <= math.ceil(declared)
    assert seen == BY_HAND.get(name, seen)


@pytest.mark.parametrize("name", ["trades", "mart"])
def test_adversarial_forward_comes_first(name: str) -> None:
    """With momentum 1 the running mean is that of the last forward: the clean batch."""
    model = nn.Sequential(nn.BatchNorm2d(1, momentum=1.0), nn.Flatten(), nn.Linear(4, 3))
    x, y = torch.rand(6, 1, 2, 2), torch.arange(6) % 3
    OBJECTIVES[name](model, x, y, generator(), attack=lambda model, x, y, generator: x + 5)
    assert model[0].running_mean.item() == pytest.approx(x.mean().item(), abs=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("inner", [INNER, {**INNER, "name": "pgd_kl"}])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_weight_gets_its_gradient(name: str, inner: object, autocast: bool) -> None:
    """Also where attack and loss share an autocast region and with it the half-precision copies of the weights."""
    model, (x, y) = conv(), batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, correct = built(name, inner)(model, x, y, generator())
    assert loss.shape == () and loss.dtype == torch.float32 and loss.isfinite()
    assert correct.shape == (6,) and correct.dtype == torch.bool
    assert all(weight.grad is None for weight in model.parameters())  # the attack leaves none behind
    loss.backward()
    for key, weight in model.named_parameters():
        assert weight.grad is not None and weight.requires_grad, key
    assert model[0].weight.grad.abs().max() > 0 and model[5].weight.grad.abs().max() > 0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_dropout_is_drawn_from_the_global_generator(name: str) -> None:
    """It is on in the loss and off in the attack: with the same global state, the same loss."""
    losses = []
    for seed in (1, 1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            loss, _ = built(name)(conv(0.5), *batch(), generator())
        losses.append(loss.item())
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_layout_does_not_matter(name: str) -> None:
    (x, y), call = batch(), built(name)
    plain, _ = call(conv(), x, y, generator())
    x, model = (one.to(memory_format=torch.channels_last) for one in (x, conv()))
    assert plain.item() == pytest.approx(call(model, x, y, generator())[0].item(), abs=1e-5)


def test_mixed_at_keeps_the_layout() -> None:
    model, (x, y) = Observation(), batch()
    model.layer = nn.Linear(108, 4)
    layouts = []
    last = {"memory_format": torch.channels_last}
    model.register_forward_pre_hook(lambda module, inputs: layouts.append(inputs[0].is_contiguous(**last)))
    calls.build("Objective", spec("mixed_at"))(model, x.contiguous(**last), y, generator())
    assert layouts == [True] * 4


# --- proximal terms -----------------------------------------------------------------------------------------------


def tensors(*values: object) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float32) for value in values]


def test_squared_by_hand() -> None:
    """mu (w - w_t), also in round 0."""
    weights, broadcast = tensors([3.0, 4.0], [[1.0]]), tensors([0.0, 2.0], [[1.5]])
    for round in (0, 1):
        first, second = PROXIMALS["squared"](weights, broadcast, round, mu=0.1)
        assert torch.allclose(first, torch.tensor([0.3, 0.2])) and torch.allclose(second, torch.tensor([[-0.05]]))


def test_norm_per_tensor_by_hand() -> None:
    """(mu / 2) times the unit vector of each tensor: (3, 4) / 5 and -1, whatever the distance; nothing in round 0."""
    broadcast = tensors([0.0, 0.0], [[1.0]])
    for weights in (tensors([3.0, 4.0], [[0.5]]), tensors([0.003, 0.004], [[-9.0]])):
        first, second = PROXIMALS["norm_per_tensor"](weights, broadcast, 1, mu=0.01)
        assert torch.allclose(first, torch.tensor([0.003, 0.004])) and torch.allclose(second, torch.tensor([[-0.005]]))
        for gradient, weight in zip(PROXIMALS["norm_per_tensor"](weights, broadcast, 0, mu=0.01), weights, strict=True):
            assert torch.equal(gradient, torch.zeros_like(weight))
        first, _ = PROXIMALS["norm_per_tensor"](weights, broadcast, 0, mu=0.01, skip_first=False)
        assert torch.allclose(first, torch.tensor([0.003, 0.004]))


PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "squared": lambda difference: difference.square().sum() / 2,
    "norm_per_tensor": lambda difference: difference.norm() / 2,
}


@pytest.mark.parametrize("name", PROXIMALS)
@drawn(seed=st.integers(0, 99), mu=st.floats(0, 2), shapes=st.lists(st.sampled_from([(), (3,), (2, 4)]), min_size=1))
@examples(max_examples=30, deadline=None)
def test_proximal_gradients_are_those_of_their_penalty(name: str, seed: int, mu: float, shapes: list[tuple]) -> None:
    """By autograd from mu times the penalty, summed over tensors; the inputs are left alone; zero at equality."""
    g = generator(seed)
    weights = [torch.randn(shape, generator=g).requires_grad_() for shape in shapes]
    broadcast = [torch.randn(shape, generator=g) for shape in shapes]
    pull = members.member("Proximal", name, mu=mu)
    gradients = pull([weight.detach() for weight in weights], broadcast, 1)
    assert isinstance(gradients, list)
    if name in PENALTIES:
        penalty = sum(mu * PENALTIES[name](w - b) for w, b in zip(weights, broadcast, strict=True))
        for gradient, wanted in zip(gradients, torch.autograd.grad(penalty, weights), strict=True):
            assert torch.allclose(gradient, wanted, atol=1e-5)
    weights = [weight.detach() for weight in weights]
    copies = [weight.clone() for weight in weights]
    for gradient, weight, copy in zip(pull(weights, broadcast, 1), weights, copies, strict=True):
        assert gradient.shape == weight.shape and torch.equal(weight, copy)
    for gradient in pull(weights, weights, 1):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_norm_per_tensor_is_bounded_however_near() -> None:
    """Differences whose squares underflow have norm 0 in float32; the pull stays within mu / 2 and finite."""
    for scale in (1e-6, 1e-13, 1e-30, 0.0):
        [gradient] = PROXIMALS["norm_per_tensor"]([torch.full((4,), scale)], [torch.zeros(4)], 1, mu=0.01)
        assert gradient.isfinite().all() and gradient.norm() <= 0.005 * (1 + 1e-5)


@pytest.mark.parametrize("name", [name for name in PROXIMALS if members.takes("Proximal", name, "mu")])
def test_proximal_settings(name: str) -> None:
    with pytest.raises(SpecError, match=r"mu: should be greater than or equal to 0, got -0\.1"):
        calls.check("Proximal", {"name": name, "mu": -0.1})
    assert calls.check("Proximal", {"name": "norm_per_tensor", "mu": 0.01})["skip_first"] is True
