"""Evasion attacks: functions that perturb a batch of images inside a ball, L-infinity or L2, and the [0, 1] box.

    x_adv = ATTACKS["pgd"](model, x, y, generator, eps=8 / 255, step=2 / 255, steps=20)

`model` maps (B, C, H, W) to logits (B, classes) and is in eval mode; `x` is (B, C, H, W), float in [0, 1]; `y` is
(B,) int64; `generator` is a torch.Generator on the device of `x`. The result has the shape, type and memory layout
of `x`, lies in the box, and within eps of `x` (up to float rounding, 6e-8). eps = 0 returns x. Radii and steps are in
units of the pixel range: 8/255, not 8. The ball is that of the maximum norm unless `norm` is "L2": then eps bounds the
Euclidean length of an image's whole perturbation.

Of the losses only the gradient by the image is computed: autograd.grad prunes the weight gradients (measured for
convolution, linear, attention and normalisation layers: the same backward kernels as with frozen weights). The
weights are not frozen for the time of an attack because autocast keeps the half-precision copies of weights only
where these require a gradient.

`verdict` of an attack that takes steps says which of its iterates is handed over. "last": the one after the last step,
which the papers' columns judge, and training uses. "any": the first that the model gets wrong, the start included: the
worst case over the steps, for whoever asks what an attack can do, and several times faster, because that image is
attacked no further. The two are different numbers; "any" is never above "last" but for rounding.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fatbench import __version__
from fatbench.engine import precision
from fatbench.engine.accuracy import natural
from fatbench.engine.fast.draws import Streams, normal, uniform
from fatbench.engine.gradients import Loss, cross_entropy, gradient_of, part_of, predict
from fatbench.engine.randomness import forked
from fatbench.errors import SpecError, did_you_mean
from fatbench.suite import signatures
from fatbench.suite.types import Count, NonNegative, Radius


class AttackError(SpecError, ValueError):
    """An attack that cannot run as it was asked for: unknown to its package, or not on this many classes."""


# --- gradient attacks ---------------------------------------------------------------------------------------------


def fgsm(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, eps: Radius) -> Tensor:
    """Fast gradient sign method: one step of size eps along the sign of the cross-entropy gradient, no random start.

    (B, C, H, W) in [0, 1] to the same, as every attack here. Goodfellow, Shlens and Szegedy 2015 (arXiv 1412.6572),
    section 4.

    Forward: 1
    Backward: 1
    """
    return _ascend(model, cross_entropy, x, y, x, eps, eps, 1, generator)


def fgsm_sfat(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, eps: Radius, step: Radius
) -> Tensor:
    """What SFAT's evaluation file calls FGSM: uniform random start in the ball, one step of size `step`, projection.

    Zhu et al. 2023, eval_pgd.py, FGSM (differences: sfat-fgsm). CIFAR: eps 8/255, step 8/255. SVHN: eps 4/255, step
    1/255, a quarter of the radius, so a much weaker attack than `fgsm`. The paper has the step of training and a random
    start; the label that the file prints says "without random start". Published FGSM numbers compare with this only.

    Forward: 1
    Backward: 1
    """
    return _ascend(model, cross_entropy, x, y, _uniform_start(x, eps, generator), eps, step, 1, generator)


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
    verdict: Literal["last", "any"] = "last",
    norm: Literal["Linf", "L2"] = "Linf",
) -> Tensor:
    """Projected gradient descent: `steps` steps on the cross-entropy, each followed by a projection.

    Madry et al. 2018 (arXiv 1706.06083), section 2.1. A step moves every pixel by `step` along the gradient's sign.
    With `norm` "L2" it moves the image by the length `step` along its gradient; an image without a gradient stays.

    `start`: "uniform" in the ball, clipped to the box; "none" at the image; "gaussian" at x + 0.001 N(0, 1), which is
    MART's. In L2 "uniform" draws a direction and a length below eps, so that it is closer to x than a uniform point.
    `verdict`: see the module; with "any" the passes are at most those below.

    x and the result are (B, C, H, W) in [0, 1], y is (B,). A model of one pixel that takes bright for class 1:

    >>> model = lambda x: torch.cat([1 - x.flatten(1), x.flatten(1)], 1)
    >>> x, y = torch.tensor([0.5, 0.98]).view(2, 1, 1, 1), torch.tensor([1, 0])
    >>> x_adv = pgd(model, x, y, torch.Generator(), eps=0.1, step=0.06, steps=2, start="none")
    >>> [round(value, 2) for value in x_adv.flatten().tolist()]
    [0.4, 1.0]

    Forward: steps
    Backward: steps
    Refuse if norm == 'Linf' and max(eps, step) > 1: eps and step are parts of the pixel range: 8/255, not 8
    """
    if start == "uniform":
        x_start = _uniform_start(x, eps, generator, norm)
    elif start == "gaussian":
        x_start = _gaussian_start(x, generator)
    else:
        x_start = x
    return _ascend(model, cross_entropy, x, y, x_start, eps, step, steps, generator, verdict, norm)


def pgd_kl(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    *,
    eps: Radius,
    step: Radius,
    steps: Count,
) -> Tensor:
    """The inner attack of TRADES: `steps` sign steps that increase KL(p(x) || p(x_adv)), from x + 0.001 N(0, 1).

    Zhang et al. 2019 (arXiv 1901.08573), Algorithm 1. The labels are not used. There is no setting for the start: at
    x itself the divergence is zero and so is its gradient.

    Forward: steps + 1
    Backward: steps
    """
    # Detached, not made under no_grad: inside autocast that leaves half-precision copies of the weights without history
    # in autocast's cache (PyTorch issues 65766, 112583; mended in 2.15), and a loss made in the same autocast region,
    # as TRADES's is, does not reach the weights.
    with torch.enable_grad():
        target = predict(model, x.detach()).detach().softmax(1)

    def divergence(logits: Tensor, target: Tensor) -> Tensor:
        return F.kl_div(logits.log_softmax(1), target, reduction="sum")

    return _ascend(model, divergence, x, target, _gaussian_start(x, generator), eps, step, steps, generator)


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
    verdict: Literal["last", "any"] = "last",
) -> Tensor:
    """CW-inf: PGD on the margin loss -max(z_y - max_{j != y} z_j + kappa, 0), uniform random start.

    The loss of Carlini and Wagner 2017 (arXiv 1608.04644), f_6, inside PGD as in Madry et al.; SFAT, column CW:
    30 steps in the code, no count in the paper. Any number of classes from 2 (the released file has 10 written into
    its loss). torchattacks' CW is another attack, in L2. At kappa 50 the maximum practically never cuts in. `verdict`:
    see the module; with "any" the passes are at most those below.

    Forward: steps
    Backward: steps
    """

    def margin(logits: Tensor, y: Tensor) -> Tensor:
        label = y.unsqueeze(1)
        other = logits.scatter(1, label, -torch.inf).max(1).values
        return -(logits.gather(1, label).squeeze(1) - other + kappa).clamp(min=0).sum()

    return _ascend(model, margin, x, y, _uniform_start(x, eps, generator), eps, step, steps, generator, verdict)


def _uniform_start(x: Tensor, eps: float, generator: torch.Generator, norm: str = "Linf") -> Tensor:
    if norm == "L2":
        lengths = eps * uniform(x[:, :1, :1, :1], 0.0, 1.0, generator)
        return (x + lengths * _direction(normal(x, generator))).clamp(0, 1)
    return (x + uniform(x, -eps, eps, generator)).clamp(0, 1)


def _gaussian_start(x: Tensor, generator: torch.Generator) -> Tensor:
    # Not clipped to the box, as in the code of TRADES and MART: the first step's projection does that.
    return x + 0.001 * normal(x, generator)


def _ascend(
    model: nn.Module,
    loss: Loss,
    x: Tensor,
    y: Tensor,
    x_adv: Tensor,
    eps: float,
    step: float,
    steps: int,
    generator: torch.Generator,
    verdict: Literal["last", "any"] = "last",
    norm: Literal["Linf", "L2"] = "Linf",
) -> Tensor:
    """`steps` steps up the loss from x_adv, projected on the eps ball around x and the box after each.

    `y`: what the loss takes, one row per image. At most `part_of` images go through the model at once, unless the batch
    holds several clients: a model of those maps images to clients by their places in the batch.
    """
    several = isinstance(generator, Streams)
    if several and verdict == "any":
        raise AttackError("verdict 'any' takes images out of the batch, so no batch may hold several clients")
    walk = _to_the_last if verdict == "last" else _until_wrong
    ball = _Cube.around(x, eps, step) if norm == "Linf" else _Sphere(x, eps, step)
    return walk(model, loss, y, x_adv.detach(), ball, steps, None if several else part_of(x, model))


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

    def only(self, left: Tensor) -> _Cube:
        """The balls of some of the images, by their places."""
        return _Cube(self.low[left], self.high[left], self.step)


class _Sphere(NamedTuple):
    """The L2 balls of radius eps around images x (B, C, H, W), cut by the box."""

    x: Tensor
    eps: float
    step: float

    def move(self, x_adv: Tensor, gradient: Tensor) -> Tensor:
        """A step along the gradient, projected: first on the ball, then on the box, which keeps it in the ball."""
        moved = x_adv.add(_direction(gradient), alpha=self.step) - self.x
        length = torch.linalg.vector_norm(moved, dim=(1, 2, 3), keepdim=True)
        return (self.x + moved * (self.eps / length.clamp(min=TINY)).clamp(max=1)).clamp(0, 1)

    def only(self, left: Tensor) -> _Sphere:
        """The balls of some of the images, by their places."""
        return self._replace(x=self.x[left])


TINY = 1e-30  # stands for a length of zero, so that nothing is divided by it


def _direction(gradient: Tensor) -> Tensor:
    """Every image's gradient (B, C, H, W) at length 1; zeros stay zeros."""
    # Divided by its largest value first: the squares of a confident image's gradient are below what float32 holds.
    largest = gradient.abs().amax((1, 2, 3), keepdim=True)
    scaled = gradient / torch.where(largest > 0, largest, 1)
    return scaled / torch.linalg.vector_norm(scaled, dim=(1, 2, 3), keepdim=True).clamp(min=TINY)


@torch.no_grad()
def _to_the_last(
    model: nn.Module, loss: Loss, y: Tensor, x_adv: Tensor, ball: _Cube | _Sphere, steps: int, part: int | None
) -> Tensor:
    """The iterate after the last step."""
    for _ in range(steps):
        _, gradient = gradient_of(model, loss, x_adv, y, part)
        x_adv = ball.move(x_adv, gradient)
    return x_adv


@torch.no_grad()
def _until_wrong(
    model: nn.Module, loss: Loss, y: Tensor, x_adv: Tensor, ball: _Cube | _Sphere, steps: int, part: int | None
) -> Tensor:
    """Of every image the first iterate that the model gets wrong, else the last; those left are attacked together.

    The host looks once per step which are left.
    """
    result, place = x_adv.clone(), torch.arange(len(y), device=y.device)
    for _ in range(steps):
        logits, gradient = gradient_of(model, loss, x_adv, y, part)
        left = (~_wrong(model, x_adv, y, logits)).nonzero().squeeze(1)
        if len(left) == 0:
            break
        x_adv = ball.move(x_adv, gradient)
        if len(left) < len(y):
            x_adv, y, place = (tensor[left] for tensor in (x_adv, y, place))
            ball = ball.only(left)
        result[place] = x_adv
    return result


def _wrong(model: nn.Module, x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
    """Which images (B,) the model gets wrong, in float32 also where the logits were made with fewer bits."""
    wrong = logits.argmax(1) != y
    if precision.reduced(x.device) and len(doubtful := wrong.nonzero().squeeze(1)):
        with precision.ieee(x.device):
            wrong[doubtful] = predict(model, x[doubtful]).argmax(1) != y[doubtful]
    return wrong


# --- attacks of other packages ------------------------------------------------------------------------------------


def autoattack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    *,
    eps: NonNegative,
    version: Literal["standard", "rand", "plus"] = "standard",
    norm: Literal["Linf", "L2"] = "Linf",
) -> Tensor:
    """AutoAttack: APGD-CE (100 steps), targeted APGD-DLR, targeted FAB (9 classes each), Square (5000 queries).

    That is `version` "standard". "rand" is for models that draw at test time: APGD-CE and APGD-DLR, each gradient a
    mean over 20 draws. "plus" adds to the standard ones untargeted APGD-DLR and FAB, and gives 5 restarts to those that
    are not targeted.

    Croce and Hein 2020 (arXiv 2003.01690), by its authors' code: the package `autoattack` where it is installed,
    else `pyautoattack`; `implementation("autoattack")` says which. A stage attacks only what withstood those before it;
    an image that is misclassified already, or withstands all stages, comes back unperturbed.

    The targets are the 9 most likely wrong classes, so all of them with 10 classes; the packages fail below 10, where
    all C - 1 are taken here. AttackError: fewer than 4 classes, where the targeted DLR loss has no value.

    With fewer bits the stages are run by `_in_fewer_bits`, and float32 decides what a success is; without, the
    package runs them itself. The passes below are at most: those of an image that withstands every stage, in float32
    and with 10 classes or more (of "plus", with 10: untargeted FAB asks for a gradient of every class).

    Package: autoattack, pyautoattack
    Forward: 4048 if version == 'rand' else 9788 if version == 'plus' else 7865
    Backward: 4040 if version == 'rand' else 7819 if version == 'plus' else 1910
    Refuse if norm == 'Linf' and eps > 1: eps is a part of the pixel range: 8/255, not 8
    Refuse if classes < 4: AutoAttack's targeted losses need at least 4 classes, {data.name} has {classes}
    """
    if eps == 0:
        return x
    with _foreign(model, generator, x.device) as (victim, seed):
        classes = victim(x[:1]).shape[1]
        if classes < 4:
            raise AttackError(f"AutoAttack needs at least 4 classes (targeted DLR loss), the model has {classes}")
        package = "autoattack" if _installed("autoattack") else "pyautoattack"
        adversary = importlib.import_module(package).AutoAttack(
            victim, norm=norm, eps=eps, seed=seed, version=version, device=x.device
        )
        adversary.verbose = False
        adversary.apgd_targeted.n_target_classes = adversary.fab.n_target_classes = min(9, classes - 1)
        evaluate = adversary.run_standard_evaluation
        # The packages reshape gradients with view(), which a channels_last tensor does not have.
        images = x.detach().contiguous()
        if precision.reduced(x.device):
            x_adv = _in_fewer_bits(adversary, victim, images, y, seed)
        elif package == "pyautoattack":
            x_adv, _ = evaluate(images, y, batch_size=len(x))
        else:
            x_adv = evaluate(images, y, bs=len(x))
    return torch.empty_like(x).copy_(x_adv)


class _Stage(NamedTuple):
    """A stage of AutoAttack: an attribute of the package's class, what is set on it, and whether half precision does.

    It does not for FAB: that walks along the boundary, and there bfloat16 does not know on which side it is. TF32, with
    eight times as many steps between 1 and 2, does.
    """

    attribute: str
    settings: dict[str, Any]
    half: bool


STAGES = {
    "apgd-ce": _Stage("apgd", {"loss": "ce"}, True),
    "apgd-dlr": _Stage("apgd", {"loss": "dlr"}, True),
    "apgd-t": _Stage("apgd_targeted", {}, True),
    "fab": _Stage("fab", {"targeted": False}, False),
    "fab-t": _Stage("fab", {"targeted": True, "n_restarts": 1}, False),
    "square": _Stage("square", {}, True),
}


def _in_fewer_bits(adversary: Any, victim: _Logits, x: Tensor, y: Tensor, seed: int) -> Tensor:
    """The stages of AutoAttack on what is still right in float32; only a success that float32 confirms is one.

    An image that fewer bits take for broken, and float32 does not, is attacked by the same stage in float32: else
    that stage, which stops at what it takes for a success, would be weaker than the package's.
    """
    victim.part = part_of(x, victim.model)

    def bits(fewer: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if fewer else precision.ieee(x.device)

    def right(images: Tensor, labels: Tensor, half: bool) -> Tensor:
        with torch.no_grad(), bits(half):
            return victim(images).argmax(1) == labels

    x_adv, standing = x.clone(), right(x, y, half=False)
    for name in adversary.attacks_to_run:
        attribute, settings, half_too = STAGES[name]
        stage = getattr(adversary, attribute)
        for setting, value in {**settings, "seed": seed}.items():
            setattr(stage, setting, value)
        places = standing.nonzero().squeeze(1)
        for half in (True, False) if half_too or not torch.is_autocast_enabled(x.device.type) else (False,):
            if len(places) == 0:
                break
            with bits(half):
                found = stage.perturb(x[places], y[places])
            holds = right(found, y[places], half=False)
            broken = places[~holds]
            x_adv[broken], standing[broken] = found[~holds], False
            places = places[holds & ~right(found, y[places], half=True)]
    return x_adv


def torchattacks(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, attack: str, **settings: Any
) -> Tensor:
    """Any attack of the package torchattacks, by the name of its class, with that class's settings.

    {name: torchattacks, attack: MIFGSM, eps: 8/255, steps: 10}. Those that are not L-infinity attacks (CW, JSMA,
    OnePixel, ...) leave the ball. A seed the class takes is drawn from the generator unless it is given. AttackError:
    no such attack or setting; AutoAttack (10 APGD steps instead of 100: use `autoattack`); what the package raises, in
    one line. The passes are not known.

    Package: torchattacks
    """
    with _foreign(model, generator, x.device) as (victim, seed):
        package = importlib.import_module("torchattacks")
        if attack == "AutoAttack":
            raise AttackError(
                "torchattacks.AutoAttack runs 10 steps of APGD and FAB instead of 100 and gives other numbers than "
                "AutoAttack; use the attack named 'autoattack'"
            )
        known: dict[str, Any] = {
            name: value
            for name, value in vars(package).items()
            if inspect.isclass(value) and issubclass(value, package.attack.Attack)
        }
        for name in ("AutoAttack", *package.__wrapper__):  # the wrappers take attacks or data, not images alone
            known.pop(name, None)
        if attack in package.__wrapper__:
            raise AttackError(f"torchattacks.{attack} is made of other attacks or of data, which a suite cannot name")
        if attack not in known:
            raise AttackError(f"torchattacks has no attack '{attack}'{did_you_mean(attack, known)}")
        accepted = [name for name in inspect.signature(known[attack]).parameters if name != "model"]
        for name in settings:
            if name not in accepted:
                raise AttackError(f"torchattacks.{attack} has no setting '{name}'{did_you_mean(name, accepted)}")
        if "seed" in accepted:
            settings.setdefault("seed", seed)
        victim.contiguous = True
        try:
            adversary = known[attack](victim, **settings)
            with torch.enable_grad():
                x_adv = adversary(x.detach().contiguous(), y)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            said = " ".join(str(error).split()) or "it gives no reason"
            raise AttackError(f"torchattacks.{attack} failed: {type(error).__name__}: {said}") from error
    if x_adv.shape != x.shape or not torch.isfinite(x_adv).all():
        raise AttackError(f"torchattacks.{attack} gave no images: {tuple(x_adv.shape)}, some values are not finite")
    return torch.empty_like(x).copy_(x_adv.detach())


def implementation(name: str) -> str:
    """The code behind a registered attack, with its version: "fatbench 0.1.0", "pyautoattack 0.2.0", a plugin's file.

    A docstring's line `Package: a, b` says that the code is that package's, the first of them that is installed.
    SpecError: no attack is named so.
    """
    signature = signatures.describe("Attack", name)
    line = re.search(r"^\s*Package: (.+)$", signature.doc, re.MULTILINE)
    if line is None:
        ours = Path(signature.file).resolve().is_relative_to(Path(__file__).resolve().parents[1])
        return f"fatbench {__version__}" if ours else Path(signature.file).name
    package = next((name for name in re.split(r",\s*", line[1].strip()) if _installed(name)), line[1])
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:  # imported from a checkout on the path
        return f"{package} (version unknown)"


def _installed(package: str) -> bool:
    # No origin: a mere folder of that name.
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


class _Contiguous(torch.autograd.Function):
    """The identity, whose gradient is contiguous."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class _Logits(nn.Module):
    """The model as the packages expect one: a module in eval mode whose logits are float32; `part` images at a time.

    On a GPU whose memory does not take the whole batch, activations are computed again when a gradient asks for them.
    `contiguous`: the gradient by the images is contiguous, whatever the model's layout, for packages that use view().
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.part: int | None = None
        self.contiguous = False

    def forward(self, x: Tensor) -> Tensor:
        if self.contiguous:
            x = _Contiguous.apply(x)
        if x.device.type != "cpu" and len(x) > (fits := part_of(x, self.model)):
            if torch.is_grad_enabled():
                from torch.utils.checkpoint import checkpoint

                kept = functools.partial(checkpoint, predict, self.model, use_reentrant=False)
                return torch.cat([kept(part) for part in x.split(fits)])
            return torch.cat([predict(self.model, part) for part in x.split(fits)])
        if self.part is None or len(x) <= self.part:
            return predict(self.model, x)
        return torch.cat([predict(self.model, part) for part in x.split(self.part)])


@contextlib.contextmanager
def _foreign(model: nn.Module, generator: torch.Generator, device: torch.device) -> Iterator[tuple[_Logits, int]]:
    """Run another package's attack on `model`: yields the module to hand to it and a seed drawn from the generator.

    Nothing of it is left behind: the global random states, the modes of all modules, which weights require a
    gradient (FAB calls backward(), which would fill .grad), the tracing function (AutoAttack's check for dynamic
    defences clears it, and with it a coverage run). It prints, logs and warns nothing.
    """
    seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
    modes = [(module, module.training) for module in model.modules()]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    trace, logger = sys.gettrace(), logging.getLogger("auto-attack")
    logged = logger.disabled
    with (
        forked(seed, "attack", device=device),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        try:
            logger.disabled = True
            for weight in weights:
                weight.requires_grad_(False)
            yield _Logits(model).eval(), seed
        finally:
            sys.settrace(trace)
            logger.disabled = logged
            for weight in weights:
                weight.requires_grad_(True)
            for module, training in modes:
                module.training = training


ATTACKS: dict[str, Callable[..., Tensor]] = {
    "natural": natural,
    "fgsm": fgsm,
    "fgsm_sfat": fgsm_sfat,
    "pgd": pgd,
    "pgd_kl": pgd_kl,
    "cw": cw,
    "autoattack": autoattack,
    "torchattacks": torchattacks,
}
