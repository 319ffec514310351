"""Attacks of other packages, and which package implements an attack.

They are called like those of `fatbench.methods.evasion` and keep their contract: the model and all random states are
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
from fatbench.suite import calls, signatures
from fatbench.suite.entry import Passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import NonNegative
from fatbench.version import __version__


class AttackError(SpecError, ValueError):
    """An attack cannot run with these settings: unknown to its package, or too few classes."""


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

    That is `version` "standard". "rand" is APGD-CE and APGD-DLR, each gradient a mean over 20 draws. "plus" adds
    untargeted APGD-DLR and FAB to the standard stages, and gives 5 restarts to the untargeted ones.

    Croce and Hein 2020 (arXiv 2003.01690): the authors' package `autoattack` if it is installed, else `pyautoattack`,
    their attacks unchanged under a driver of its own; `implementation("autoattack")` says which. A stage attacks only
    the images that withstood the stages before it; images that are misclassified from the start, or withstand all
    stages, come back unperturbed.

    The targets are the 9 most likely wrong classes, so all of them with 10 classes; the packages fail below 10, where
    all C - 1 are used here. Raises AttackError for fewer than 4 classes, for which the targeted DLR loss is undefined,
    and for a network that draws at test time: the package, also as "rand", and early stopping decide by a single
    forward pass, so that a lucky draw ends the attack on an image (Croce and Hein's repository, pull request 105).

    The package's stages run in float32 even if networks compute in bfloat16: APGD compares two losses, FAB walks along
    the boundary, Square keeps small improvements, and bfloat16 resolves none of these. Under TF32, with eight times as
    many steps between 1 and 2, `_in_tf32` runs them, and float32 confirms each success. The stages attack a copy of the
    network with its batch normalisation folded into the convolutions (`_fused`); the network itself judges the result.
    On a CPU, Square leaves out grey images that a query does not change (`_skip_unchanged`). The counted passes are an
    upper bound: those of an image that withstands every stage, in float32 and with 10 classes or more (for "plus", with
    10, because untargeted FAB needs a gradient of every class).
    """
    if eps == 0:
        return x
    with _other_package(model, generator, x.device) as (victim, seed):
        with torch.no_grad():
            logits, second_logits = victim(x[:1]), victim(x[:1])
        classes = logits.shape[1]
        if classes < 4:
            raise AttackError(f"AutoAttack needs at least 4 classes (targeted DLR loss), the model has {classes}")
        if not torch.allclose(logits, second_logits, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise AttackError(
                "the network draws at test time (the same image gives different logits): AutoAttack, also as 'rand', "
                "decides by a single forward pass, so one lucky draw would decide an image"
            )
        package = "autoattack" if calls.installed("autoattack") else "pyautoattack"
        adversary = importlib.import_module(package).AutoAttack(
            victim, norm=norm, eps=eps, seed=seed, version=version, device=x.device
        )
        adversary.verbose = False
        adversary.apgd_targeted.n_target_classes = adversary.fab.n_target_classes = min(9, classes - 1)
        surrogate = _Logits(_fused(model, x)).eval()
        surrogate.stands_in = victim.stands_in = 0
        adversary.apgd.model = adversary.apgd_targeted.model = surrogate
        adversary.fab.predict = adversary.square.predict = surrogate
        if (tell := stage_observer.get()) is not None:
            for attribute, name in NAMES.items():
                stage = getattr(adversary, attribute)
                stage.perturb = _with_progress(stage.perturb, name, tell)
        ask, evaluate = adversary.square.margin_and_loss, adversary.run_standard_evaluation
        # The packages reshape gradients with view(), which a channels_last tensor does not have.
        images = x.detach().contiguous()

        def run(images: Tensor, y: Tensor) -> Tensor:
            # a square of one colour in three is seldom what is there; on a GPU it costs more waits than it saves
            if x.device.type == "cpu" and x.shape[1] == 1:
                adversary.square.margin_and_loss = _skip_unchanged(ask)
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
            # Outputs that name no class stood for class 0, so images of class 0 passed as correct: attack them again.
            if surrogate.unclassed or victim.unclassed:
                surrogate.stands_in = victim.stands_in = 1
                mistaken = (y == 0).nonzero().squeeze(1)
                if len(mistaken):
                    x_adv[mistaken] = run(images[mistaken], y[mistaken])
    return torch.empty_like(x).copy_(x_adv)


# called with the name of each stage of AutoAttack as it begins, and the number of images that still stand
stage_observer: contextvars.ContextVar[Callable[[str, int], None] | None] = contextvars.ContextVar(
    "stage_observer", default=None
)
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
        return "eps is a fraction of the pixel range: 8/255, not 8"
    return None


def four_classes(cell: Facts) -> str | None:
    if cell.classes < 4:
        return f"AutoAttack's targeted losses need at least 4 classes, {cell.data.name} has {cell.classes}"
    return None


STAGES: dict[str, tuple[str, dict[str, Any]]] = {  # {stage: (attribute of the package's class, its settings)}
    "apgd-ce": ("apgd", {"loss": "ce"}),
    "apgd-dlr": ("apgd", {"loss": "dlr"}),
    "apgd-t": ("apgd_targeted", {}),
    "fab": ("fab", {"targeted": False}),
    "fab-t": ("fab", {"targeted": True, "n_restarts": 1}),
    "square": ("square", {}),
}


def _in_tf32(adversary: Any, victim: _Logits, x: Tensor, y: Tensor, seed: int) -> Tensor:
    """The stages of AutoAttack in TF32, each on the images that are still correct in float32.

    If a stage succeeds in TF32 but not in float32, it attacks that image again in float32: it stopped at a success that
    does not count, and would otherwise be weaker than the package's stage.
    """

    def is_correct(images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            return outcomes.is_correct(victim(images), labels)

    def is_correct_in_float32(images: Tensor, labels: Tensor) -> Tensor:
        with precision.ieee(x.device):
            return is_correct(images, labels)

    x_adv, standing = x.clone(), is_correct_in_float32(x, y)
    for name in adversary.attacks_to_run:
        attribute, settings = STAGES[name]
        stage = getattr(adversary, attribute)
        for setting, value in {**settings, "seed": seed}.items():
            setattr(stage, setting, value)
        positions = standing.nonzero().squeeze(1)
        for arithmetic in (contextlib.nullcontext(), precision.ieee(x.device)):  # TF32 first
            if len(positions) == 0:
                break
            with arithmetic:
                candidates = stage.perturb(x[positions], y[positions])
            withstood = is_correct_in_float32(candidates, y[positions])
            broken = positions[~withstood]
            x_adv[broken], standing[broken] = candidates[~withstood], False
            positions = positions[withstood & ~is_correct(candidates, y[positions])]
    return x_adv


def _fused(model: nn.Module, x: Tensor) -> nn.Module:
    """A copy of the model whose batch normalisation is folded into the convolutions.

    The model itself if torch cannot trace its forward pass, or if the copy gives other logits for the images x.
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
    except Exception:  # tracing runs the network's code, which may raise anything
        return model
    for hook in model._forward_pre_hooks.values():  # the heartbeat of a run
        fused.register_forward_pre_hook(hook)
    return fused if is_same else model


def _skip_unchanged(ask: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Square's `margin_and_loss` (x, y) that does not evaluate images which a query leaves unchanged.

    For grey images with a flat background, this saves most queries with small squares. Square continues with the images
    whose best margin is positive; those are remembered with their margin and loss. A remembered value is reused only
    for the same image and label.
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
    OnePixel, ...) leave the ball. If the class takes a seed, it is drawn from the generator unless it is given. Raises
    AttackError for an unknown attack or setting, for AutoAttack (10 APGD steps instead of 100: use `autoattack`), and,
    in one line, for any error of the package. Its passes are unknown.
    """
    if not calls.installed("torchattacks"):
        raise AttackError(calls.missing_package("torchattacks", "torchattacks"))
    with _other_package(model, generator, x.device) as (victim, seed):
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
        for name in ("AutoAttack", *package.__wrapper__):  # the wrappers take attacks or data besides images
            attack_classes.pop(name, None)
        if attack in package.__wrapper__:
            raise AttackError(f"torchattacks.{attack} needs other attacks or data, which a suite cannot give it")
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
            reason = " ".join(str(error).split()) or "no reason given"
            raise AttackError(f"torchattacks.{attack} failed: {type(error).__name__}: {reason}") from error
    if x_adv.shape != x.shape or not torch.isfinite(x_adv).all():
        raise AttackError(f"torchattacks.{attack} returned no valid images: {tuple(x_adv.shape)}, or values not finite")
    return torch.empty_like(x).copy_(x_adv.detach())


def implementation(name: str) -> str:
    """The code that implements a registered attack: "fatbench 0.1.0", "pyautoattack 0.2.0", or a plug-in's file.

    If its entry names packages, the first one that is installed. Raises SpecError if no attack has this name.
    """
    signature = signatures.describe("Attack", name)
    package_names = calls.packages(signature)
    if not package_names:
        file = Path(signatures.place_of(calls.function(signature)).rpartition(":")[0])
        return f"fatbench {__version__}" if file.is_relative_to(Path(__file__).parents[1]) else file.name
    package = next(filter(calls.installed, package_names), ", ".join(package_names))
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
    """The model as the packages expect it: a module in eval mode whose logits are float32.

    If the batch does not fit into a GPU's memory, activations are computed again for the gradient.
    `contiguous`: the gradient by the images is contiguous whatever the model's layout, for packages that use view().
    `stands_in`: the class given to outputs that name none, which a package would take for class 0; `unclassed` says
    whether there were any.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.contiguous = False
        self.stands_in: int | None = None
        self.unclassed: Tensor | bool = False

    def forward(self, x: Tensor) -> Tensor:
        logits = self._logits(x)
        # a finite sum: all outputs name a class; a GPU would have to be waited for
        if self.stands_in is None or (x.device.type == "cpu" and bool(logits.detach().sum().isfinite())):
            return logits
        has_class = outcomes.names_a_class(logits.detach())
        self.unclassed = ~has_class.all() | self.unclassed
        stand_in = torch.zeros_like(logits)
        stand_in[:, self.stands_in] = 1
        return torch.where(has_class[:, None], logits, stand_in)

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
def _other_package(model: nn.Module, generator: torch.Generator, device: torch.device) -> Iterator[tuple[_Logits, int]]:
    """A context to run another package's attack on `model`: yields the module to attack and a seed.

    Everything is restored afterwards: the global random states, the modes of all modules, which weights require a
    gradient (FAB calls backward(), which would fill .grad), and the tracing function (AutoAttack's check for dynamic
    defences clears it, and with it a coverage run). The package's output, logs and warnings are suppressed.
    """
    seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
    modes = [(module, module.training) for module in model.modules()]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    trace, logger = sys.gettrace(), logging.getLogger("auto-attack")
    logger_was_disabled = logger.disabled
    with forked(seed, "attack", device=device), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            logger.disabled = True
            for weight in weights:
                weight.requires_grad_(False)
            yield _Logits(model).eval(), seed
        finally:
            sys.settrace(trace)
            logger.disabled = logger_was_disabled
            for weight in weights:
                weight.requires_grad_(True)
            for module, training in modes:
                module.training = training
