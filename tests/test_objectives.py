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
from torch.utils._python_dispatch import TorchDispatchMode

from fatbench.engine.fast.draws import Streams
from fatbench.errors import SpecError
from fatbench.methods import objectives
from fatbench.methods.objectives import OBJECTIVES, PROXIMALS
from fatbench.suite import calls, formulas

torch.set_num_threads(1)

INNER = {"name": "pgd", "eps": "8/255", "step": "2/255", "steps": 3}
WITH_ATTACK = [name for name in OBJECTIVES if members.takes("Objective", name, "attack")]


def spec(name: str, attack: object = INNER) -> dict[str, object]:
    """A canonical call of the objective with this attack, if it takes one."""
    given = {**members.settings("Objective", name), **({"attack": attack} if name in WITH_ATTACK else {})}
    return calls.check("Objective", {"name": name, **given})


def built(name: str, attack: object = INNER) -> Callable[..., tuple[Tensor, Tensor]]:
    """The objective of `spec`, given what it asks for: as of client 0, whose classes are equally frequent."""
    counts, theta = torch.full((1, 4), 3.0), conv().eval()
    return members.given_what_it_asks(
        calls.build("Objective", spec(name, attack)), client=0, class_counts=counts, broadcast=theta
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def conv(dropout: float = 0.0) -> nn.Module:
    """A small network with batch norm and dropout for (B, 3, 6, 6) images and 4 classes."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(8 * 36, 4),
        )


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
    loss, _ = OBJECTIVES[name](*two_pixels(), generator(), **settings)
    return loss.item()


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
    expected = mean(
        [-math.log(softmax(x)[y]) + beta * kl(softmax(x), softmax(moved(x))) for x, y in zip(X, Y, strict=True)]
    )
    assert value("trades", attack=shift, beta=beta) == pytest.approx(expected, abs=1e-12)


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
        model, x, _ = two_pixels()
        loss, _ = objectives.mart(model, x, torch.tensor(labels), generator(), attack=shift, beta=beta)
        assert loss.item() == pytest.approx(mean(expected), abs=1e-10)


def test_trades_and_mart_default_to_beta_6() -> None:
    for name in ("trades", "mart"):
        assert value(name, attack=shift) == value(name, attack=shift, beta=6.0) != value(name, attack=shift, beta=5.0)


@pytest.mark.parametrize("name", ["standard", "at", "trades", "mart"])
def test_gradients_are_those_of_the_value(name: str) -> None:
    """Finite differences by every weight: in TRADES and MART the gradient passes through both distributions."""
    settings = {} if name == "standard" else {"attack": shift}
    model, x, y = two_pixels()
    loss, _ = OBJECTIVES[name](model, x, y, generator(), **settings)
    loss.backward()
    weight, step = model[1].weight, 1e-6
    for row in range(3):
        for column in range(2):
            values = []
            for sign in (1, -1):
                weight.data[row, column] += sign * step
                values.append(OBJECTIVES[name](model, x, y, generator(), **settings)[0].item())
                weight.data[row, column] -= sign * step
            assert weight.grad[row, column].item() == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-7)


@pytest.mark.parametrize("name", ["at", "trades", "mart"])
def test_certainty_gives_finite_gradients(name: str) -> None:
    """Logits of 0 and 200: every probability is 0 or 1 in float32, before and after the attack, which swaps them."""
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.tensor([[400.0, 0.0], [0.0, 400.0]])
    model, x = nn.Sequential(nn.Flatten(), layer), torch.tensor([[[[0.5, 0.0]]], [[[0.0, 0.5]]]])
    for labels in ([0, 1], [1, 0]):
        loss, _ = OBJECTIVES[name](
            model, x, torch.tensor(labels), generator(), attack=lambda model, x, y, generator: x.flip(3)
        )
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
    objective = members.given_what_it_asks(members.member("Objective", name, **ratio), client=0)
    _, correct = objective(model, x, y, generator(), attack=turn(0))
    assert correct.dtype == torch.bool and correct.tolist() == [True] * 8
    _, correct = objective(model, x, y, generator(), attack=turn(1))
    assert correct.tolist() == [False] * 8


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
        model = Observation()
        objectives.mixed_at(
            model, torch.zeros(24, 1, 2, 2), torch.zeros(24, dtype=torch.long), generator(seed),
            attack=lambda model, x, y, generator: x + 1,
        )  # fmt: skip
        return model.calls[0][1][:, 0, 0, 0].bool().tolist()

    assert subset(1) == subset(1) != subset(2)
    assert sum(subset(1)) == 12


# --- every objective in the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_attack_in_eval_mode_loss_in_train_mode(name: str) -> None:
    """From either mode; and the model is left in train mode."""
    for before in (True, False):
        model = Observation().train(before)
        x, y = torch.rand(4, 1, 2, 2), torch.arange(4) % 3
        built(name)(model, x, y, generator())
        modes = [training for training, _ in model.calls]
        trained = modes.count(True)
        assert modes == [False] * (len(modes) - trained) + [True] * trained and trained >= 1
        assert modes.count(False) == (3 if name in WITH_ATTACK else 0)
        assert model.training and model.layer.training


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_of_several_clients_is_that_of_each(name: str) -> None:
    """Two clients of four images in a batch, each with a generator of its own: two losses, those of each alone."""
    objective = built(name)
    model, (x, y) = conv().eval(), batch(8)
    model[1] = nn.Identity()  # batch norm would see both clients together; they are stacked under vmap
    each = [objective(model, x[part], y[part], generator(seed)) for seed, part in enumerate((slice(4), slice(4, 8)))]
    losses, correct = objective(model, x, y, Streams([generator(0), generator(1)]))
    if losses.shape == () and name not in ("standard", "at", "trades", "mart", "mixed_at"):
        return  # trains client by client
    torch.testing.assert_close(losses, torch.stack([loss for loss, _ in each]))
    assert torch.equal(correct, torch.cat([right for _, right in each]))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_batch_norm_counts_the_training_forwards_alone(name: str) -> None:
    """The attack leaves the running statistics alone; the others are those of `Forward:`, in TRADES and MART two."""
    model = conv()
    built(name)(model, *batch(), generator())
    assert model[1].num_batches_tracked == formulas.passes(calls.call("Objective", spec(name, "natural")))[0]
    alone = conv()
    built(name, "natural")(alone, *batch(), generator())
    assert model[1].num_batches_tracked == alone[1].num_batches_tracked


@pytest.mark.parametrize("name", ["trades", "mart"])
def test_adversarial_forward_comes_first(name: str) -> None:
    """With momentum 1 the running mean is that of the last forward: the clean batch."""
    model = nn.Sequential(nn.BatchNorm2d(1, momentum=1.0), nn.Flatten(), nn.Linear(4, 3))
    x, y = torch.rand(6, 1, 2, 2), torch.arange(6) % 3
    OBJECTIVES[name](model, x, y, generator(), attack=lambda model, x, y, generator: x + 5)
    assert model[0].running_mean.item() == pytest.approx(x.mean().item(), abs=1e-6)


class Passes:
    """Image passes through a model: forward by a hook, backward by a hook on the logits."""

    def __init__(self, model: nn.Module):
        self.forward = self.backward = 0
        model.register_forward_hook(self._count)

    def _count(self, module: nn.Module, inputs: object, logits: Tensor) -> None:
        self.forward += len(logits)
        if logits.requires_grad:
            logits.register_hook(self._count_backward)

    def _count_backward(self, gradient: Tensor) -> None:
        self.backward += len(gradient)


@pytest.mark.parametrize("inner", ["natural", INNER, {**INNER, "name": "pgd_kl", "steps": 2}])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_passes_are_those_of_the_docstring(name: str, inner: object) -> None:
    """One training step with its backward: attack and loss together, for B = 6 (half of which is whole)."""
    model, (x, y) = conv(), batch(6)
    passes, call = Passes(model), spec(name, inner)
    loss, _ = built(name, inner)(model, x, y, generator())
    loss.backward()
    assert (passes.forward / 6, passes.backward / 6) == formulas.passes(calls.call("Objective", call))


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
def test_the_generator_alone_decides(name: str) -> None:
    """Without dropout nothing is drawn from the global generator, and nothing depends on it."""
    state, losses = torch.get_rng_state(), []
    for seed in (1, 1, 2):
        loss, _ = built(name)(conv(), *batch(), generator(seed))
        losses.append(loss.item())
    assert torch.equal(torch.get_rng_state(), state)
    assert losses[0] == losses[1]
    assert (losses[1] == losses[2]) == (name not in WITH_ATTACK)


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
    x, y = batch()
    call = built(name)
    plain, _ = call(conv(), x, y, generator())
    last, _ = call(
        conv().to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last), y, generator()
    )
    assert plain.item() == pytest.approx(last.item(), abs=1e-5)


def test_mixed_at_keeps_the_layout() -> None:
    model, (x, y) = Observation(), batch()
    model.layer = nn.Linear(108, 4)
    layouts = []
    model.register_forward_pre_hook(
        lambda module, inputs: layouts.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    call = calls.build("Objective", spec("mixed_at"))
    call(model, x.contiguous(memory_format=torch.channels_last), y, generator())
    assert layouts == [True] * 4


class HostSync(TorchDispatchMode):
    """Fails on an operation whose result or shape depends on the data: on a GPU each of these waits for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        by_number = func is torch.ops.aten.index.Tensor and all(index.dtype == torch.int64 for index in args[1])
        assert by_number or not tags & set(func.tags), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_step_waits_for_the_device(name: str) -> None:
    objective, model, (x, y) = built(name), conv(0.5), batch()
    with HostSync():
        loss, _ = objective(model, x, y, generator())
        loss.backward()


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"name": "trades", "attack": INNER, "beta": -1}, "beta: should be greater than or equal to 0, got -1"),
        ({"name": "mixed_at", "attack": INNER, "ratio": 1.5}, "ratio: should be less than or equal to 1, got 1.5"),
        ({"name": "at", "attack": "pdg"}, r"no attack is named 'pdg' \(did you mean 'pgd'\?\)"),
        ({"name": "at"}, "'at' needs 'attack'"),
    ],
)
def test_a_suite_with_a_bad_setting_is_refused(node: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        calls.check("Objective", node)


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
    penalty = sum(mu * PENALTIES[name](w - b) for w, b in zip(weights, broadcast, strict=True))
    expected = torch.autograd.grad(penalty, weights)
    weights = [weight.detach() for weight in weights]
    copies = [weight.clone() for weight in weights]
    gradients = PROXIMALS[name](weights, broadcast, 1, mu=mu)
    assert isinstance(gradients, list)
    for gradient, wanted, weight, copy in zip(gradients, expected, weights, copies, strict=True):
        assert gradient.shape == weight.shape and torch.equal(weight, copy)
        assert torch.allclose(gradient, wanted, atol=1e-5)
    for gradient in PROXIMALS[name](weights, weights, 1, mu=mu):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_norm_per_tensor_is_bounded_however_near() -> None:
    """Differences whose squares underflow have norm 0 in float32; the pull stays within mu / 2 and finite."""
    for scale in (1e-6, 1e-13, 1e-30, 0.0):
        [gradient] = PROXIMALS["norm_per_tensor"]([torch.full((4,), scale)], [torch.zeros(4)], 1, mu=0.01)
        assert gradient.isfinite().all() and gradient.norm() <= 0.005 * (1 + 1e-5)


@pytest.mark.parametrize("name", PROXIMALS)
def test_proximal_settings(name: str) -> None:
    with pytest.raises(SpecError, match=r"mu: should be greater than or equal to 0, got -0\.1"):
        calls.check("Proximal", {"name": name, "mu": -0.1})
    assert calls.check("Proximal", {"name": "norm_per_tensor", "mu": 0.01})["skip_first"] is True
