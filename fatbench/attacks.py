"""The attacks of fatbench on a module and a batch of yours: `fatbench.attacks.pgd(model, x, y, eps="8/255", ...)`.

`model` maps images (B, C, H, W) in [0, 1], up to a rounding, to logits (B, classes); `y` is (B,) int64. The result has
the shape and type of `x` and lies in the [0, 1] box, of an L-infinity attack within eps of `x`. The model is attacked
in eval mode and left as it was. Radii are parts of the pixel range, 8/255 and not 8, as numbers or as text. Every
attack of a suite file is here by its name, those of plug-ins too; `help(fatbench.attacks.dual)` shows its settings.

Without `seed`, every call has other random starts; the result's attribute `seed` says which, to have them again. `pgd`
and `cw` take `restarts`.

    >>> import torch, fatbench
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> x, y = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])
    >>> moved = fatbench.attacks.fgsm(model, x, y, eps="8/255")
    >>> bool((moved - x).abs().max() <= 8 / 255 + 1e-6)
    True
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from fatbench.errors import SpecError, did_you_mean
from fatbench.suite import calls, facts, signatures
from fatbench.suite.located import LocatedMap

if TYPE_CHECKING:
    from torch import Tensor, nn

    Model = nn.Module | Callable[[Tensor], Tensor]

Fraction = float | str  # 0.031, "0.031" or "8/255"
ROUNDINGS = 8  # of a float in [0, 1], that normalising and back again may add


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
    """Projected gradient descent (Madry et al. 2018); settings as in `fatbench.methods.attacks.pgd`."""
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
    """CW-inf: PGD on the margin loss of Carlini and Wagner 2017; settings as in `fatbench.methods.attacks.cw`."""
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
    name: str,
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    restarts: int = 1,
    seed: int | None = None,
    **settings: Any,
) -> Tensor:
    """The registered attack `name` with its settings.

    restarts: so many random starts; of each image the first result that the model gets wrong, else that of the first.
    seed: of the random starts; None: another one at each call. The result says which it was, as its attribute `seed`.
    SpecError: no such attack or setting, images beyond [0, 1], labels that are none, a model that does not take them.
    """
    place = f"attacks.{name}"
    spec = calls.check("Attack", LocatedMap({"name": name, **settings}, at=place), place)
    facts.refuse(spec, {}, place)  # of a batch no fact of a cell is known
    if restarts < 1:
        raise SpecError(f"{place}: restarts: expected 1 or more, got {restarts!r}")
    import torch

    x, y = _images(place, x), _labels(place, y, len(x))
    seed = secrets.randbits(31) if seed is None else seed
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    modes = [(module, module.training) for module in modules]
    try:
        for module in modules[:1]:
            module.eval()
        moved = _worst(calls.build("Attack", spec), name, model, x, y, seed, restarts)
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
        if why := _unfit(model, x, y):
            raise SpecError(f"{place}: {why}") from error
        raise
    finally:
        for module, training in modes:
            module.training = training
    moved.seed = seed  # type: ignore[attr-defined]
    return moved


def _worst(call: Any, name: str, model: Model, x: Tensor, y: Tensor, seed: int, restarts: int) -> Tensor:
    """Of each image the first result of a restart that the model gets wrong, else that of the first restart."""
    import torch

    from fatbench.engine.outcomes import is_correct
    from fatbench.engine.randomness import generator

    kept = torch.as_tensor(call(model, x, y, generator(seed, name, device=x.device))).detach()
    for restart in range(1, restarts):
        moved = torch.as_tensor(call(model, x, y, generator(seed, name, restart, device=x.device))).detach()
        with torch.no_grad():
            better = is_correct(model(kept), y) & ~is_correct(model(moved), y)
        kept = torch.where(better[:, None, None, None], moved, kept)
    return kept


def _images(place: str, x: Any) -> Tensor:
    """Images (B, C, H, W), cut to [0, 1] where a rounding left it. SpecError: they are none."""
    import torch

    x = torch.as_tensor(x)
    what = f"{place}: x: expected images (B, C, H, W) as floats in [0, 1]; normalise inside the model"
    if x.dim() != 4 or not x.is_floating_point():
        raise SpecError(f"{what}; got {x.dtype} {tuple(x.shape)}")
    rounding = ROUNDINGS * torch.finfo(x.dtype).eps
    if not bool(((x >= -rounding) & (x <= 1 + rounding)).all()):  # NaN neither
        raise SpecError(f"{what}; got {x.min():.3g} to {x.max():.3g}")
    return x.clamp(0, 1)


def _labels(place: str, y: Any, images: int) -> Tensor:
    """The class of each image (B,), int64. SpecError: they are none."""
    import torch

    y = torch.as_tensor(y)
    if y.dim() != 1 or len(y) != images or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise SpecError(f"{place}: y: expected {images} classes (B,) as whole numbers, got {y.dtype} {tuple(y.shape)}")
    return y.long()


def _unfit(model: Model, x: Tensor, y: Tensor) -> str:
    """Why an attack could not go on, where the model does not suit the images or the labels; else empty."""
    import torch

    size = "x".join(map(str, x.shape[1:]))
    if not callable(model):
        return f"model: expected a torch.nn.Module, got a {type(model).__name__}"
    try:
        with torch.no_grad():
            logits = model(x[:1])
    except Exception as error:  # the model's own code
        return f"the model does not take images of {size} as {x.dtype}: {(str(error).splitlines() or [''])[0]}"
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2:
        given = tuple(logits.shape) if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
        return f"the model gives {given}, not logits (B, classes)"
    least, most, classes = int(y.min()), int(y.max()), logits.shape[1]
    if not 0 <= least <= most < classes:
        return f"y: labels of {classes} classes are 0 to {classes - 1}, got {least} to {most}"
    return ""


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.startswith("_") and name in signatures.names("Attack"):
        return _function(name)
    known = signatures.names("Attack")
    raise AttributeError(
        f"fatbench.attacks has no attack '{name}'{did_you_mean(name, known)}; there are {', '.join(known)}"
    )


def _function(name: str) -> Callable[..., Any]:
    """The registered attack as a function whose help shows its settings."""
    known, kind = signatures.describe("Attack", name), inspect.Parameter

    def called(model: Any, x: Any, y: Any, **settings: Any) -> Tensor:
        return attack(name, model, x, y, **settings)

    settings = [
        kind(one.name, kind.KEYWORD_ONLY, annotation=one.annotation,
             default=kind.empty if one.default is signatures.REQUIRED else one.default)
        for one in known.settings
    ]  # fmt: skip
    more = [kind("restarts", kind.KEYWORD_ONLY, default=1), kind("seed", kind.KEYWORD_ONLY, default=None)]
    free = [kind("settings", kind.VAR_KEYWORD)] if known.free else []
    fixed = [kind(one, kind.POSITIONAL_OR_KEYWORD) for one in ("model", "x", "y")]
    called.__name__ = called.__qualname__ = name
    called.__doc__ = inspect.getdoc(calls.function(known))
    called.__signature__ = inspect.Signature([*fixed, *settings, *more, *free])  # type: ignore[attr-defined]
    return called


def __dir__() -> list[str]:
    return ["attack", *signatures.names("Attack")]
