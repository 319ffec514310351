"""Attacks a module on a batch of images: `fatbench.attacks.pgd(model, x, y, eps="8/255", ...)`.

`model` is a module, or anything that maps images (B, C, H, W) in [0, 1], up to rounding, to logits (B, classes). It
gets them in the type of its weights, and its own copy if it changes them. `y` is (B,) int64. The result has the shape
and type of `x` and lies in the [0, 1] box; an L-infinity attack stays within eps of `x`. The model is attacked in eval
mode and left as it was. Radii are fractions of the pixel range, 8/255 and not 8, as numbers or as text. Every attack of
a suite file is here under its name, also those of plug-ins; `help(fatbench.attacks.dual)` shows its settings.

Without `seed`, every call draws new random starts; the result's attribute `seed` repeats them. `pgd` and `cw` take
`restarts`.

    >>> import torch, fatbench
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> x, y = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])
    >>> moved = fatbench.attacks.fgsm(model, x, y, eps="8/255")
    >>> bool((moved - x).abs().max() <= 8 / 255 + 1e-6)
    True
"""

from __future__ import annotations

import functools
import inspect
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from fatbench.errors import SpecError, did_you_mean, shown, whole
from fatbench.suite import calls, facts, signatures

if TYPE_CHECKING:
    from torch import Tensor, nn

    Model = nn.Module | Callable[[Tensor], Tensor]

Fraction = float | str  # 0.031, "0.031" or "8/255"
COLOURS = (1, 3)  # channels that images have
ROUNDINGS = 8  # units of rounding that images may leave [0, 1] by, after normalising and back


def fgsm(model: Model, x: Tensor, y: Tensor, *, eps: Fraction, seed: int | None = None) -> Tensor:
    """Fast gradient sign method (Goodfellow, Shlens and Szegedy 2015): one step of size eps."""
    return attack("fgsm", model, x, y, seed=seed, eps=eps)


def pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: Fraction,
    step: Fraction,
    steps: int,
    start: Literal["uniform", "none", "gaussian"] = "uniform",
    early_stop: bool = False,
    norm: Literal["Linf", "L2"] = "Linf",
    restarts: int = 1,
    seed: int | None = None,
) -> Tensor:
    """Projected gradient descent (Madry et al. 2018); settings as in `fatbench.methods.evasion.pgd`."""
    settings = {"eps": eps, "step": step, "steps": steps, "start": start, "early_stop": early_stop, "norm": norm}
    return attack("pgd", model, x, y, restarts=restarts, seed=seed, **settings)


def cw(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: Fraction,
    step: Fraction,
    steps: int = 30,
    kappa: float = 50.0,
    early_stop: bool = False,
    restarts: int = 1,
    seed: int | None = None,
) -> Tensor:
    """CW-inf: PGD on the margin loss of Carlini and Wagner 2017; settings as in `fatbench.methods.evasion.cw`."""
    settings = {"eps": eps, "step": step, "steps": steps, "kappa": kappa, "early_stop": early_stop}
    return attack("cw", model, x, y, restarts=restarts, seed=seed, **settings)


def autoattack(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: Fraction,
    version: Literal["standard", "rand", "plus"] = "standard",
    norm: Literal["Linf", "L2"] = "Linf",
    seed: int | None = None,
) -> Tensor:
    """AutoAttack (Croce and Hein 2020) by its authors' package. Needs at least 4 classes."""
    return attack("autoattack", model, x, y, seed=seed, eps=eps, version=version, norm=norm)


def attack(
    name: str, model: Model, x: Tensor, y: Tensor, *, restarts: int = 1, seed: int | None = None, **settings: Any
) -> Tensor:
    """The registered attack `name` with its settings.

    restarts: the number of random starts; for each image, the first result that the model misclassifies is returned,
    else that of the first start. seed: of the random starts; None draws a new one, and the result's attribute `seed`
    says which. Raises SpecError for an unknown attack or setting, images outside [0, 1], invalid labels, or a model
    that does not accept them.
    """
    location = f"attacks.{name}"
    spec = calls.check("Attack", {"name": name, **settings}, location)
    facts.refuse(spec, {}, location)  # only refusals that need no facts about a cell
    restarts = whole(f"{location}: restarts", restarts, 1)
    seed = secrets.randbits(31) if seed is None else whole(f"{location}: seed", seed)
    import torch

    from fatbench.models.external_network import Called

    x, y = _images(location, x), _labels(location, y, len(x))
    try:
        called = Called(model)
    except SpecError as error:
        raise SpecError(f"{location}: {error}") from None
    modes = [(module, module.training) for module in called.modules()]
    try:
        called.eval()
        # a module of the images' type is attacked itself: an attack may call its parts
        itself = not _changes_images(location, called, x, y) and isinstance(model, torch.nn.Module)
        attacked = model if itself else called
        adversarial = _attack_with_restarts(calls.build("Attack", spec), name, attacked, x, y, seed, restarts)
    finally:
        for module, training in modes:
            module.training = training
    adversarial.seed = seed  # type: ignore[attr-defined]
    return adversarial


def _attack_with_restarts(call: Any, name: str, model: Model, x: Tensor, y: Tensor, seed: int, restarts: int) -> Tensor:
    """For each image, the first result that the model misclassifies, else that of the first start."""
    import torch

    from fatbench.engine.outcomes import attacked_images, is_correct
    from fatbench.engine.randomness import generator

    result = attacked_images(call(model, x, y, generator(seed, name, device=x.device)), x)
    for restart in range(1, restarts):
        candidate = attacked_images(call(model, x, y, generator(seed, name, restart, device=x.device)), x)
        with torch.no_grad():
            better = is_correct(model(result), y) & ~is_correct(model(candidate), y)
        result = torch.where(better[:, None, None, None], candidate, result)
    return result


def _images(location: str, x: Any) -> Tensor:
    """Images (B, C, H, W), clipped to [0, 1] after rounding. Raises SpecError for anything else."""
    import torch

    expected_text = f"{location}: x: expected images (B, C, H, W) as floats in [0, 1]; normalise inside the model"
    x = _tensor(expected_text, x)
    if x.dim() != 4 or not x.is_floating_point():
        raise SpecError(f"{expected_text}; got {x.dtype} {tuple(x.shape)}")
    channels, height, width = x.shape[1:]
    if width in COLOURS and channels not in COLOURS and min(channels, height) > width:
        raise SpecError(f"{expected_text}; got {tuple(x.shape)}, with the channels last: x.permute(0, 3, 1, 2)")
    rounding = ROUNDINGS * torch.finfo(x.dtype).eps
    if not bool(((x >= -rounding) & (x <= 1 + rounding)).all()):  # also refuses NaN
        raise SpecError(f"{expected_text}; got {x.min():.3g} to {x.max():.3g}")
    return x.clamp(0, 1)


def _labels(location: str, y: Any, images: int) -> Tensor:
    """The class of each image, (B,) int64. Raises SpecError for anything else."""
    import torch

    expected_text = f"{location}: y: expected {images} classes (B,) as integers"
    y = _tensor(expected_text, y)
    if y.dim() != 1 or len(y) != images or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise SpecError(f"{expected_text}, got {y.dtype} {tuple(y.shape)}")
    return y.long()


def _tensor(expected_text: str, value: Any) -> Tensor:
    import torch

    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(f"{expected_text}; got {shown(value)}") from None


def _changes_images(location: str, called: Any, x: Tensor, y: Tensor) -> bool:
    """Whether the model takes other images than x: of another type, or its own copy, because it changes them in place.

    Raises SpecError if it takes none, or its classes are not those of the labels.
    """
    import torch

    from fatbench.engine.gradients import demand_logits

    size, image = "x".join(map(str, x.shape[1:])), x[:1].clone()
    try:
        with torch.no_grad():
            logits = demand_logits(called(image))
            try:
                called.network(image)
                is_other = bool(image._version) or not torch.equal(image, x[:1])  # `image.data` has no version
            except Exception:  # of another type
                is_other = True
    except SpecError as error:
        raise SpecError(f"{location}: {error}") from None
    except Exception as error:  # the model's own code
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SpecError(f"{location}: the model does not accept images of {size} as {x.dtype}: {line}") from error
    classes = logits.shape[1]
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
        raise SpecError(
            f"{location}: y: labels of {classes} classes are 0 to {classes - 1}, got {int(y.min())} to {int(y.max())}"
        )
    return is_other


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.startswith("_") and name in signatures.names("Attack"):
        return _function(signatures.describe("Attack", name))
    attack_names = signatures.names("Attack")
    raise AttributeError(
        f"fatbench.attacks has no attack '{name}'{did_you_mean(name, attack_names)}; it has {', '.join(attack_names)}"
    )


@functools.lru_cache  # so that pickle finds the same function
def _function(signature: signatures.Signature) -> Callable[..., Any]:
    """The registered attack as a function whose help shows its settings."""
    name, kind = signature.name, inspect.Parameter

    def attack_function(model: Any, x: Any, y: Any, **settings: Any) -> Tensor:
        return attack(name, model, x, y, **settings)

    settings = [
        kind(setting.name, kind.KEYWORD_ONLY, annotation=setting.annotation,
             default=kind.empty if setting.default is signatures.REQUIRED else setting.default)
        for setting in signature.settings
    ]  # fmt: skip
    restart_parameters = [kind("restarts", kind.KEYWORD_ONLY, default=1), kind("seed", kind.KEYWORD_ONLY, default=None)]
    other_settings = [kind("settings", kind.VAR_KEYWORD)] if signature.free else []
    positional = [kind(parameter, kind.POSITIONAL_OR_KEYWORD) for parameter in ("model", "x", "y")]
    attack_function.__name__ = attack_function.__qualname__ = name
    attack_function.__doc__ = inspect.getdoc(calls.function(signature))
    attack_function.__signature__ = inspect.Signature([*positional, *settings, *restart_parameters, *other_settings])  # type: ignore[attr-defined]
    return attack_function


def __dir__() -> list[str]:
    return ["attack", *signatures.names("Attack")]
