"""Evasion attacks: functions that perturb a batch of images inside a ball, L-infinity or L2, and the [0, 1] box.

    x_adv = ATTACKS["pgd"](model, x, y, generator, eps=8 / 255, step=2 / 255, steps=20)

`model` maps (B, C, H, W) to logits (B, classes) and is in eval mode; `x` is (B, C, H, W), float in [0, 1]; `y` is
(B,) int64; `generator` is a torch.Generator on the device of `x`. The result has the shape, type and memory layout
of `x`, lies in the box, and within eps of `x` (up to float rounding, 6e-8). eps = 0 returns x. Radii and steps are in
units of the pixel range: 8/255, not 8. The ball is that of the maximum norm unless `norm` is "L2": then eps bounds the
Euclidean length of an image's whole perturbation.

Only the gradient of a loss by the image is computed: autograd.grad prunes the weight gradients (measured for
convolution, linear, attention and normalisation layers: the same backward kernels as with frozen weights). The weights
are not frozen during an attack, because autocast caches half-precision copies only of weights that require a gradient.

`early_stop` selects the iterate that an attack with steps returns. False: the one after the last step, which the papers
report and training uses. True: the first that the model misclassifies, the start included. That is the worst case over
the steps, and several times faster, because a misclassified image is attacked no further. The two give different
numbers; with `early_stop` the accuracy is never higher, except for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fatbench.engine import precision
from fatbench.engine.accuracy import natural
from fatbench.engine.gradients import Loss, cross_entropy, gradient_asked, gradient_of, in_parts, part_of, predict
from fatbench.engine.outcomes import is_correct
from fatbench.engine.randomness import normal, uniform
from fatbench.methods.corruptions import cifar10_c, corruption, five_severities, test_images_of_cifar10
from fatbench.methods.packages import (
    autoattack,
    four_classes,
    if_every_image_survives,
    radius_in_the_pixel_range,
    torchattacks,
)
from fatbench.models.dual_norm import use_statistics
from fatbench.suite.entry import AttackEntry, Passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import Attack, Count, NonNegative, Radius

Uphill = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# --- gradient attacks ---------------------------------------------------------------------------------------------


def fgsm(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, eps: Radius) -> Tensor:
    """Fast gradient sign method: one step of size eps along the sign of the cross-entropy gradient, no random start.

    (B, C, H, W) in [0, 1] to the same, as every attack here. Goodfellow, Shlens and Szegedy 2015 (arXiv 1412.6572),
    section 4.
    """
    return _ascend(_uphill(model, cross_entropy, x), y, x, _Cube.around(x, eps, eps), 1)


def fgsm_sfat(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, eps: Radius, step: Radius
) -> Tensor:
    """FGSM as in SFAT's evaluation file: uniform random start in the ball, one step of size `step`, projection.

    Zhu et al. 2023, eval_pgd.py, FGSM (differences: sfat-fgsm). CIFAR: eps 8/255, step 8/255. SVHN: eps 4/255, step
    1/255, a quarter of the radius, so a much weaker attack than `fgsm`. The paper has the step of training and a random
    start; the label that the file prints says "without random start". Compare published FGSM numbers with this only.
    """
    x_start = _uniform_start(x, eps, generator)
    return _ascend(_uphill(model, cross_entropy, x), y, x_start, _Cube.around(x, eps, step), 1)


def pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    *,
    eps: NonNegative,
    step: NonNegative,
    steps: Count,
    start: Literal["uniform", "none", "gaussian"] = "uniform",
    early_stop: bool = False,
    norm: Literal["Linf", "L2"] = "Linf",
) -> Tensor:
    """Projected gradient descent: `steps` steps on the cross-entropy, each followed by a projection.

    Madry et al. 2018 (arXiv 1706.06083), section 2.1. A step moves every pixel by `step` along the gradient's sign.
    With `norm` "L2" it moves the image by the length `step` along its gradient; an image without a gradient stays.

    `start`: "uniform" in the ball, clipped to the box; "none" at the image; "gaussian" at x + 0.001 N(0, 1), which is
    MART's. In L2 "uniform" draws a direction and a length below eps, so that it is closer to x than a uniform point.
    `early_stop`: see the module; it saves passes, so those stated are an upper bound.

    x and the result are (B, C, H, W) in [0, 1], y is (B,). A model of one pixel that takes bright for class 1:

    >>> model = lambda x: torch.cat([1 - x.flatten(1), x.flatten(1)], 1)
    >>> x, y = torch.tensor([0.5, 0.98]).view(2, 1, 1, 1), torch.tensor([1, 0])
    >>> x_adv = pgd(model, x, y, torch.Generator(), eps=0.1, step=0.06, steps=2, start="none")
    >>> [round(value, 2) for value in x_adv.flatten().tolist()]
    [0.4, 1.0]
    """
    if start == "uniform":
        x_start = _uniform_start(x, eps, generator, norm)
    elif start == "gaussian":
        x_start = _gaussian_start(x, generator)
    else:
        x_start = x
    uphill = _uphill(model, cross_entropy, x)
    ball = _Cube.around(x, eps, step) if norm == "Linf" else _Sphere(x, eps, step)
    if early_stop:
        return _until_wrong(model, uphill, y, x_start, ball, steps)
    return _ascend(uphill, y, x_start, ball, steps)


def in_the_pixel_range(*, eps: float, step: float, norm: str) -> str | None:
    if norm == "Linf" and max(eps, step) > 1:
        return "eps and step are fractions of the pixel range: 8/255, not 8"
    return None


def pgd_kl(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, eps: Radius, step: Radius, steps: Count
) -> Tensor:
    """The inner attack of TRADES: `steps` sign steps that increase KL(p(x) || p(x_adv)), from x + 0.001 N(0, 1).

    Zhang et al. 2019 (arXiv 1901.08573), Algorithm 1. The labels are not used. There is no setting for the start: at
    x itself the divergence is zero and so is its gradient.
    """
    # Detached rather than computed under no_grad: inside autocast, no_grad would leave half-precision copies of the
    # weights without history in autocast's cache (PyTorch issues 65766, 112583; fixed in 2.15), and a later loss in the
    # same autocast region, as in TRADES, would not reach the weights.
    with torch.enable_grad():
        target = predict(model, x.detach()).detach().softmax(1)

    def divergence(logits: Tensor, target: Tensor) -> Tensor:
        return F.kl_div(logits.log_softmax(1), target, reduction="sum")

    x_start = _gaussian_start(x, generator)
    return _ascend(_uphill(model, divergence, x), target, x_start, _Cube.around(x, eps, step), steps)


def clean_and_every_step(*, steps: int) -> Passes:
    return Passes(steps + 1, steps)


def cw(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    *,
    eps: Radius,
    step: Radius,
    steps: Count = 30,
    kappa: NonNegative = 50.0,
    early_stop: bool = False,
) -> Tensor:
    """CW-inf: PGD on the margin loss -max(z_y - max_{j != y} z_j + kappa, 0), uniform random start.

    The loss of Carlini and Wagner 2017 (arXiv 1608.04644), f_6, inside PGD as in Madry et al.; SFAT, column CW:
    30 steps in the code, no count in the paper. Any number of classes from 2 (the released file has 10 written into
    its loss). torchattacks' CW is another attack, in L2. At kappa 50 the maximum practically never applies.
    `early_stop`: see the module; it saves passes, so those stated are an upper bound.
    """

    def margin(logits: Tensor, y: Tensor) -> Tensor:
        label = y.unsqueeze(1)
        largest_other = logits.scatter(1, label, -torch.inf).max(1).values  # -inf: never the label itself
        return -(logits.gather(1, label).squeeze(1) - largest_other + kappa).clamp(min=0).sum()

    x_start = _uniform_start(x, eps, generator)
    uphill, ball = _uphill(model, margin, x), _Cube.around(x, eps, step)
    if early_stop:
        return _until_wrong(model, uphill, y, x_start, ball, steps)
    return _ascend(uphill, y, x_start, ball, steps)


def every_step(*, steps: int) -> Passes:
    return Passes(steps, steps)


def exact_linear(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, eps: Radius) -> Tensor:
    """The worst corner of the L-infinity ball, cut by the box, for a network that is linear in its pixels: no search.

    For every other class c, the margin z_y - z_c is least if each pixel moves by eps against its slope, as far as
    [0, 1] permits; the class with the smallest of these margins decides. No attack finds a smaller one. For any other
    network the result is not exact, and a suite refuses it. The slopes of all classes take one batched backward pass,
    which counts as one.

    A pixel of 0.95 that makes class 1 bright can be raised by 0.05 only:

    >>> model = lambda x: torch.cat([0 * x.flatten(1), 0.9 - x.flatten(1)], 1)
    >>> x, y = torch.tensor([0.95, 0.7]).view(2, 1, 1, 1), torch.tensor([0, 1])
    >>> [round(value, 2) for value in exact_linear(model, x, y, torch.Generator(), eps=0.2).flatten().tolist()]
    [0.75, 0.9]
    """

    def corners(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            logits = predict(model, x.requires_grad_())
            margins = logits.gather(1, y.unsqueeze(1)) - logits
            class_directions = (
                torch.eye(logits.shape[1], dtype=logits.dtype, device=x.device).unsqueeze(1).expand(-1, len(x), -1)
            )
            with gradient_asked():
                # (classes, B, C, H, W), in one batched pass
                (slopes,) = torch.autograd.grad(margins, x, class_directions, is_grads_batched=True)
        x = x.detach()
        moved = (x - eps * slopes.sign()).clamp(0, 1)
        least_margins = margins.detach() + ((moved - x) * slopes).flatten(2).sum(2).T
        target = least_margins.scatter(1, y.unsqueeze(1), torch.inf).argmin(1)  # inf: never the label itself
        return (moved[target, torch.arange(len(x), device=x.device)],)

    (x_adv,) = in_parts(model, part_of(x, model), corners, x.detach(), y)
    return torch.empty_like(x).copy_(x_adv)  # in the layout of x


def linear_network(cell: Facts) -> str | None:
    """Refuse nonlinear networks, whose worst case may lie anywhere in the ball."""
    if "linear" not in cell.model.parts:
        return f"exact_linear needs a network that is linear in its pixels, {cell.model.name} has no part 'linear'"
    return None


def dual(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    *,
    attack: Attack,
    through: Literal["clean", "attacked"],
    predicts: Literal["clean", "attacked"],
) -> Tensor:
    """An attack on a network with two statistics: computed `through` one of them, judged by the one that `predicts`.

    {name: dual, attack: {name: pgd, ...}, through: attacked, predicts: clean}. Four evaluations of one trained model;
    `all:a+b` counts the images that withstand both. A network without two statistics is attacked as usual.
    Hong et al. 2023 (FedRBN): the released test attacks and predicts by the clean statistics, its validation attacks
    through the others.
    """
    use_statistics(model, attacked=through == "attacked")
    x_adv: Tensor = attack(model, x, y, generator)
    use_statistics(model, attacked=predicts == "attacked")
    return x_adv


def _uniform_start(x: Tensor, eps: float, generator: torch.Generator, norm: str = "Linf") -> Tensor:
    if norm == "L2":
        lengths = eps * uniform(x[:, :1, :1, :1], 0.0, 1.0, generator)  # one length an image
        return (x + lengths * _direction(normal(x, generator))).clamp(0, 1)
    return (x + uniform(x, -eps, eps, generator)).clamp(0, 1)


def _gaussian_start(x: Tensor, generator: torch.Generator) -> Tensor:
    # Not clipped to the box, as in the code of TRADES and MART: the projection of the first step clips it.
    return x + 0.001 * normal(x, generator)


def _uphill(model: nn.Module, loss: Loss, x: Tensor) -> Uphill:
    """A function from images like x, and the loss's targets, to (logits, gradient of the loss by the images)."""
    part = part_of(x, model)
    return lambda x, y: gradient_of(model, loss, x, y, part)


class _Cube(NamedTuple):
    """The L-infinity balls around images, cut by the box: between `low` and `high` (B, C, H, W)."""

    low: Tensor
    high: Tensor
    step: float

    @classmethod
    def around(cls, x: Tensor, eps: float, step: float) -> _Cube:
        return cls((x - eps).clamp(min=0), (x + eps).clamp(max=1), step)

    def move(self, x_adv: Tensor, gradient: Tensor) -> Tensor:
        """A step along the gradient's sign, projected."""
        return x_adv.add(gradient.sign(), alpha=self.step).clamp(self.low, self.high)

    def select(self, indices: Tensor) -> _Cube:
        """The balls of the images at `indices`."""
        return _Cube(self.low[indices], self.high[indices], self.step)


class _Sphere(NamedTuple):
    """The L2 balls of radius eps around images x (B, C, H, W), cut by the box."""

    x: Tensor
    eps: float
    step: float

    def move(self, x_adv: Tensor, gradient: Tensor) -> Tensor:
        """A step along the gradient, projected onto the ball, then onto the box, which stays within the ball."""
        moved = x_adv.add(_direction(gradient), alpha=self.step) - self.x
        length = torch.linalg.vector_norm(moved, dim=(1, 2, 3), keepdim=True)
        return (self.x + moved * (self.eps / length.clamp(min=TINY)).clamp(max=1)).clamp(0, 1)

    def select(self, indices: Tensor) -> _Sphere:
        """The balls of the images at `indices`."""
        return self._replace(x=self.x[indices])


TINY = 1e-30  # replaces lengths of zero in divisions


def _direction(gradient: Tensor) -> Tensor:
    """Every image's gradient (B, C, H, W), scaled to length 1; zeros stay zeros."""
    # Scaled by the largest value first: the squares of a confident image's gradient underflow in float32.
    largest = gradient.abs().amax((1, 2, 3), keepdim=True)
    scaled = gradient / torch.where(largest > 0, largest, 1)
    return scaled / torch.linalg.vector_norm(scaled, dim=(1, 2, 3), keepdim=True).clamp(min=TINY)


@torch.no_grad()
def _ascend(uphill: Uphill, y: Tensor, x_adv: Tensor, ball: _Cube | _Sphere, steps: int) -> Tensor:
    """The iterate after the last of `steps` steps up the loss from x_adv, each projected on the ball."""
    x_adv = x_adv.detach()
    for _ in range(steps):
        _, gradient = uphill(x_adv, y)
        x_adv = ball.move(x_adv, gradient)
    return x_adv


@torch.no_grad()
def _until_wrong(
    model: nn.Module, uphill: Uphill, y: Tensor, x_adv: Tensor, ball: _Cube | _Sphere, steps: int
) -> Tensor:
    """For every image, the first iterate that the model misclassifies, else the last.

    The images that are still right are attacked together; finding them waits for the device once per step.
    """
    x_adv = x_adv.detach()
    result, positions = x_adv.clone(), torch.arange(len(y), device=y.device)
    for _ in range(steps):
        logits, gradient = uphill(x_adv, y)
        standing = (~_misclassified(model, x_adv, y, logits)).nonzero().squeeze(1)
        if len(standing) == 0:
            break
        x_adv = ball.move(x_adv, gradient)
        if len(standing) < len(y):
            x_adv, y, positions = (tensor[standing] for tensor in (x_adv, y, positions))
            ball = ball.select(standing)
        result[positions] = x_adv
    return result


def _misclassified(model: nn.Module, x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
    """Which images (B,) the model misclassifies, confirmed in float32 if the logits have fewer bits."""
    is_wrong = ~is_correct(logits, y)
    if precision.reduced(x.device) and len(to_confirm := is_wrong.nonzero().squeeze(1)):
        with precision.ieee(x.device):
            is_wrong[to_confirm] = ~is_correct(predict(model, x[to_confirm]), y[to_confirm])
    return is_wrong


ATTACKS: dict[str, Callable[..., Tensor]] = {
    "natural": AttackEntry(natural, passes=Passes(), role="natural", float32=("tf32", "bf16")),
    "fgsm": AttackEntry(fgsm, passes=Passes(1, 1), cites=("goodfellow2015",)),
    "fgsm_sfat": AttackEntry(fgsm_sfat, passes=Passes(1, 1), cites=("zhu2023",)),
    "pgd": AttackEntry(pgd, passes=every_step, refuse=(in_the_pixel_range,), cites=("madry2018",)),
    "pgd_kl": AttackEntry(pgd_kl, passes=clean_and_every_step, cites=("zhang2019",)),
    "cw": AttackEntry(cw, passes=every_step, cites=("carlini2017",)),
    "exact_linear": AttackEntry(
        exact_linear, passes=Passes(1, 1), refuse=(linear_network,), example={"model": {"name": "linear"}}
    ),
    "autoattack": AttackEntry(
        autoattack,
        passes=if_every_image_survives,
        refuse=(radius_in_the_pixel_range, four_classes),
        float32=("bf16",),
        packages=("autoattack", "pyautoattack"),
        cites=("croce2020",),
    ),
    "dual": AttackEntry(dual, cites=("hong2023",)),
    "torchattacks": AttackEntry(torchattacks, packages=("torchattacks",), example={"attack": "PGD", "steps": 1}),
    "corruption": AttackEntry(
        corruption, passes=Passes(), refuse=(five_severities,), role="corruption", cites=("hendrycks2019",)
    ),
    "cifar10_c": AttackEntry(
        cifar10_c,
        passes=Passes(),
        refuse=(five_severities, test_images_of_cifar10),
        role="corruption",
        cites=("hendrycks2019",),
    ),
}
