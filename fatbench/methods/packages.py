"""Attacks of other packages, and what code is behind an attack.

Each is called as those of `fatbench.methods.attacks` are, and keeps their contract: the model and all random states are
left as they were.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.metadata
import inspect
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fatbench.engine import outcomes, precision
from fatbench.engine.gradients import NoGradient, gradient_asked, part_of, predict
from fatbench.engine.memory import out_of_memory
from fatbench.engine.randomness import forked
from fatbench.errors import SpecError, did_you_mean
from fatbench.suite import calls, foreign, signatures
from fatbench.suite.entry import Passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import NonNegative
from fatbench.version import __version__


class AttackError(SpecError, ValueError):
    """An attack that cannot run as it was asked for: unknown to its package, or not on this many classes."""


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

    That is `version` "standard". "rand" is APGD-CE and APGD-DLR, each gradient a mean over 20 draws. "plus" adds to the
    standard ones untargeted APGD-DLR and FAB, and gives 5 restarts to those that are not targeted.

    Croce and Hein 2020 (arXiv 2003.01690), by its authors' code: the package `autoattack` where it is installed,
    else `pyautoattack`; `implementation("autoattack")` says which. A stage attacks only what withstood those before it;
    an image that is misclassified already, or withstands all stages, comes back unperturbed.

    The targets are the 9 most likely wrong classes, so all of them with 10 classes; the packages fail below 10, where
    all C - 1 are taken here. AttackError: fewer than 4 classes, where the targeted DLR loss has no value, or a network
    that draws at test time. The package, also as "rand", and early stopping take a single forward pass for its
    prediction: a lucky draw ends the attack on an image (Croce and Hein's repository, pull request 105).

    The package runs its stages in float32, also where networks compute in bfloat16: APGD takes the larger of two
    losses, FAB walks along the boundary, Square keeps what is a little better, and bfloat16 knows none of these well.
    Under TF32, with eight times as many steps between 1 and 2, `_in_tf32` runs them; float32 says what a success is.
    Its stages attack a copy of the network that has its batch normalisation in the convolutions (`_fused`); what they
    broke the network itself says. On a CPU, Square asks nothing about an image that a query leaves as it is
    (`_asked_once`).
    The passes below are at most: those of an image that withstands every stage, in float32 and with 10 classes or more
    (of "plus", with 10: untargeted FAB asks for a gradient of every class).
    """
    if eps == 0:
        return x
    with _foreign(model, generator, x.device) as (victim, seed):
        with torch.no_grad():
            logits, second_logits = victim(x[:1]), victim(x[:1])
        classes = logits.shape[1]
        if classes < 4:
            raise AttackError(f"AutoAttack needs at least 4 classes (targeted DLR loss), the model has {classes}")
        if not torch.allclose(logits, second_logits, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise AttackError(
                "the network draws at test time (the same image twice, two answers): AutoAttack, also as 'rand', and"
                " early stopping go by a single forward pass, so one lucky draw would decide an image"
            )
        package = "autoattack" if foreign.installed("autoattack") else "pyautoattack"
        adversary = importlib.import_module(package).AutoAttack(
            victim, norm=norm, eps=eps, seed=seed, version=version, device=x.device
        )
        adversary.verbose = False
        adversary.apgd_targeted.n_target_classes = adversary.fab.n_target_classes = min(9, classes - 1)
        surrogate = _Logits(_fused(model, x)).eval()
        surrogate.stands_in = victim.stands_in = 0
        adversary.apgd.model = adversary.apgd_targeted.model = surrogate
        adversary.fab.predict = adversary.square.predict = surrogate
        if (tell := watching.get()) is not None:
            for attribute, name in NAMES.items():
                stage = getattr(adversary, attribute)
                stage.perturb = _with_progress(stage.perturb, name, tell)
        ask, evaluate = adversary.square.margin_and_loss, adversary.run_standard_evaluation
        # The packages reshape gradients with view(), which a channels_last tensor does not have.
        images = x.detach().contiguous()

        def run(images: Tensor, y: Tensor) -> Tensor:
            if x.device.type == "cpu":  # on a GPU it is more launches and waits than it saves
                adversary.square.margin_and_loss = _asked_once(ask)
            if precision.reduced_to_tf32():
                return _in_tf32(adversary, victim, images, y, seed)
            with precision.ieee(x.device):
                if package == "pyautoattack":
                    adversarial: Tensor = evaluate(images, y, batch_size=len(images))[0]
                else:
                    adversarial = evaluate(images, y, bs=len(images))
            return adversarial

        with gradient_asked():
            x_adv = run(images, y)
            if surrogate.unclassed or victim.unclassed:  # images of class 0 have passed for right: once more
                surrogate.stands_in = victim.stands_in = 1
                mistaken = (y == 0).nonzero().squeeze(1)
                if len(mistaken):
                    x_adv[mistaken] = run(images[mistaken], y[mistaken])
    return torch.empty_like(x).copy_(x_adv)


# told which attack of AutoAttack begins, and on how many images that still stand
watching: contextvars.ContextVar[Callable[[str, int], None] | None] = contextvars.ContextVar("watching", default=None)
NAMES = {"apgd": "APGD-CE", "apgd_targeted": "APGD-T", "fab": "FAB-T", "square": "Square"}  # of the standard version


def _with_progress(perturb: Callable[..., Any], name: str, tell: Callable[[str, int], None]) -> Callable[..., Any]:
    def run(x: Tensor, *arguments: Any, **keywords: Any) -> Any:
        tell(name, len(x))
        return perturb(x, *arguments, **keywords)

    return run


def if_every_image_survives(*, version: str) -> Passes:
    match version:
        case "rand":
            return Passes(4048, 4040)
        case "plus":
            return Passes(9788, 7819)
    return Passes(7865, 1910)


def radius_in_the_pixel_range(*, norm: str, eps: float) -> str | None:
    if norm == "Linf" and eps > 1:
        return "eps is a part of the pixel range: 8/255, not 8"
    return None


def four_classes(cell: Facts) -> str | None:
    if cell.classes < 4:
        return f"AutoAttack's targeted losses need at least 4 classes, {cell.data.name} has {cell.classes}"
    return None


STAGES: dict[str, tuple[str, dict[str, Any]]] = {  # an attribute of the package's class, and what is set on it
    "apgd-ce": ("apgd", {"loss": "ce"}),
    "apgd-dlr": ("apgd", {"loss": "dlr"}),
    "apgd-t": ("apgd_targeted", {}),
    "fab": ("fab", {"targeted": False}),
    "fab-t": ("fab", {"targeted": True, "n_restarts": 1}),
    "square": ("square", {}),
}


def _in_tf32(adversary: Any, victim: _Logits, x: Tensor, y: Tensor, seed: int) -> Tensor:
    """The stages of AutoAttack on what is still right in float32; only a success that float32 confirms is one.

    An image that TF32 takes for broken, and float32 does not, is attacked by the same stage in float32: else that
    stage, which stops at what it takes for a success, would be weaker than the package's.
    """

    def is_correct(images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            return outcomes.is_correct(victim(images), labels)

    def truly_right(images: Tensor, labels: Tensor) -> Tensor:
        with precision.ieee(x.device):
            return is_correct(images, labels)

    x_adv, standing = x.clone(), truly_right(x, y)
    for name in adversary.attacks_to_run:
        attribute, settings = STAGES[name]
        stage = getattr(adversary, attribute)
        for setting, value in {**settings, "seed": seed}.items():
            setattr(stage, setting, value)
        positions = standing.nonzero().squeeze(1)
        for bits in (contextlib.nullcontext(), precision.ieee(x.device)):
            if len(positions) == 0:
                break
            with bits:
                candidates = stage.perturb(x[positions], y[positions])
            holds = truly_right(candidates, y[positions])
            broken = positions[~holds]
            x_adv[broken], standing[broken] = candidates[~holds], False
            positions = positions[holds & ~is_correct(candidates, y[positions])]
    return x_adv


def _fused(model: nn.Module, x: Tensor) -> nn.Module:
    """A copy of the model in which a convolution and its batch normalisation are one convolution.

    The model itself where torch cannot follow its forward pass, or where the copy gives the images x other logits.
    """
    from torch.fx.experimental.optimization import fuse

    if not any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        return model
    try:
        fused: nn.Module = fuse(model.eval())
        with torch.no_grad(), precision.ieee(x.device):
            is_same = all(
                torch.allclose(fused(images), model(images), rtol=1e-3, atol=1e-4) for images in (x[:1], x[:3])
            )
    except Exception:  # what a network's code may raise when it is traced is anything
        return model
    for hook in model._forward_pre_hooks.values():  # the heartbeat of a run
        fused.register_forward_pre_hook(hook)
    return fused if is_same else model


def _asked_once(ask: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Square's `margin_and_loss` (x, y), which asks the network about no image that a query leaves as it is.

    Of grey images with a flat background that is most of the queries with small squares. Square goes on with the
    images whose best margin is positive: those are remembered, with what is known of them. What is remembered is
    taken for an image and label of these very values only, whoever asks.
    """
    best_so_far: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # images, labels, margins, losses

    def margin_and_loss(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal best_so_far
        if best_so_far is None or best_so_far[0].shape != x.shape or not torch.equal(best_so_far[1], y):
            margin, loss = ask(x, y)
            best = (x.clone(), y, margin.clone(), loss.clone())  # Square writes into all of them
        else:
            changed = (x != best_so_far[0]).flatten(1).any(1)
            margin, loss = best_so_far[2].clone(), best_so_far[3].clone()
            if changed.all():
                margin, loss = ask(x, y)
            elif changed.any():
                margin[changed], loss[changed] = ask(x[changed], y[changed])
            better = (loss < best_so_far[3]) | (margin <= 0)
            images = torch.where(better[:, None, None, None], x, best_so_far[0])
            best = (images, y, torch.where(better, margin, best_so_far[2]), torch.where(better, loss, best_so_far[3]))
        standing = best[2] > 0
        best_so_far = best if standing.all() else tuple(tensor[standing] for tensor in best)  # type: ignore[assignment]
        return margin, loss

    return margin_and_loss


def torchattacks(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, attack: str, **settings: Any
) -> Tensor:
    """Any attack of the package torchattacks, by the name of its class, with that class's settings.

    {name: torchattacks, attack: MIFGSM, eps: 8/255, steps: 10}. Those that are not L-infinity attacks (CW, JSMA,
    OnePixel, ...) leave the ball. A seed the class takes is drawn from the generator unless it is given. AttackError:
    no such attack or setting; AutoAttack (10 APGD steps instead of 100: use `autoattack`); what the package raises, in
    one line. The passes are not known.

    """
    if not foreign.installed("torchattacks"):
        raise AttackError(foreign.missing_package("torchattacks", "torchattacks"))
    with _foreign(model, generator, x.device) as (victim, seed):
        package = importlib.import_module("torchattacks")
        if attack == "AutoAttack":
            raise AttackError(
                "torchattacks.AutoAttack runs 10 steps of APGD and FAB instead of 100 and gives other numbers than "
                "AutoAttack; use the attack named 'autoattack'"
            )
        attack_classes: dict[str, Any] = {
            name: value
            for name, value in vars(package).items()
            if inspect.isclass(value) and issubclass(value, package.attack.Attack)
        }
        for name in ("AutoAttack", *package.__wrapper__):  # the wrappers take attacks or data, not images alone
            attack_classes.pop(name, None)
        if attack in package.__wrapper__:
            raise AttackError(f"torchattacks.{attack} is made of other attacks or of data, which a suite cannot name")
        if attack not in attack_classes:
            raise AttackError(f"torchattacks has no attack '{attack}'{did_you_mean(attack, attack_classes)}")
        accepted = [name for name in inspect.signature(attack_classes[attack]).parameters if name != "model"]
        for name in settings:
            if name not in accepted:
                raise AttackError(f"torchattacks.{attack} has no setting '{name}'{did_you_mean(name, accepted)}")
        if "seed" in accepted:
            settings.setdefault("seed", seed)
        victim.contiguous = True
        try:
            adversary = attack_classes[attack](victim, **settings)
            with torch.enable_grad(), gradient_asked():
                x_adv = adversary(x.detach().contiguous(), y)
        except Exception as error:
            if out_of_memory(error) or isinstance(error, NoGradient):
                raise
            reason = " ".join(str(error).split()) or "it gives no reason"
            raise AttackError(f"torchattacks.{attack} failed: {type(error).__name__}: {reason}") from error
    if x_adv.shape != x.shape or not torch.isfinite(x_adv).all():
        raise AttackError(f"torchattacks.{attack} gave no images: {tuple(x_adv.shape)}, some values are not finite")
    return torch.empty_like(x).copy_(x_adv.detach())


def implementation(name: str) -> str:
    """The code behind a registered attack, with its version: "fatbench 0.1.0", "pyautoattack 0.2.0", a plugin's file.

    Where its entry names packages the code is that of the first of them that is installed.
    SpecError: no attack is named so.
    """
    signature = signatures.describe("Attack", name)
    package_names = foreign.packages(signature)
    if not package_names:
        file = Path(signatures.place_of(calls.function(signature)).rpartition(":")[0])
        return f"fatbench {__version__}" if file.is_relative_to(Path(__file__).parents[1]) else file.name
    package = next(filter(foreign.installed, package_names), ", ".join(package_names))
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:  # imported from a checkout on the path
        return f"{package} (version unknown)"


class _Contiguous(torch.autograd.Function):
    """The identity, whose gradient is contiguous."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class _Logits(nn.Module):
    """The model as the packages expect one: a module in eval mode whose logits are float32.

    On a GPU whose memory does not take the whole batch, activations are computed again when a gradient asks for them.
    `contiguous`: the gradient by the images is contiguous, whatever the model's layout, for packages that use view().
    `stands_in`: the class that outputs which name no class are given, as a package would take NaN for class 0;
    `unclassed` says whether there were any.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.contiguous = False
        self.stands_in: int | None = None
        self.unclassed: Tensor | bool = False

    def forward(self, x: Tensor) -> Tensor:
        logits = self._logits(x)
        if self.stands_in is None:
            return logits
        fine = outcomes.classed(logits.detach())
        self.unclassed = ~fine.all() | self.unclassed
        stand_in = torch.zeros_like(logits)
        stand_in[:, self.stands_in] = 1
        return torch.where(fine[:, None], logits, stand_in)

    def _logits(self, x: Tensor) -> Tensor:
        if self.contiguous:
            x = _Contiguous.apply(x)
        if x.device.type == "cpu" or len(x) <= (fits := part_of(x, self.model)):
            return predict(self.model, x)
        if torch.is_grad_enabled():
            from torch.utils.checkpoint import checkpoint

            recomputed = functools.partial(checkpoint, predict, self.model, use_reentrant=False)
            return torch.cat([recomputed(chunk) for chunk in x.split(fits)])
        return torch.cat([predict(self.model, chunk) for chunk in x.split(fits)])


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
