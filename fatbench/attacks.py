"""The attacks of fatbench on a module and a batch of yours: `fatbench.attacks.pgd(model, x, y, eps="8/255", ...)`.

`model` maps images (B, C, H, W) in [0, 1], up to a rounding, to logits (B, classes); `y` is (B,) int64. The result has
the shape and type of `x` and lies in the [0, 1] box, of an L-infinity attack within eps of `x`. The model is attacked
in eval mode and left as it was. Radii are numbers in units of the pixel range or fractions as text. Every attack of a
suite file is here by its name, those of plug-ins too.

    >>> import torch, fatbench
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> x, y = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])
    >>> moved = fatbench.attacks.fgsm(model, x, y, eps="8/255")
    >>> bool((moved - x).abs().max() <= 8 / 255 + 1e-6)
    True
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from fatbench.errors import SpecError
from fatbench.suite import calls, signatures
from fatbench.suite.located import LocatedMap

if TYPE_CHECKING:
    from torch import Tensor, nn

Fraction = float | str  # 0.031 or "8/255"
ROUNDINGS = 8  # of a float in [0, 1], that normalising and back again may add


def fgsm(model: nn.Module, x: Tensor, y: Tensor, *, eps: Fraction, seed: int = 0) -> Tensor:
    """Fast gradient sign method (Goodfellow, Shlens and Szegedy 2015): one step of size eps."""
    return attack("fgsm", model, x, y, seed=seed, eps=eps)


def pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: Fraction,
    step: Fraction,
    steps: int,
    start: Literal["uniform", "none", "gaussian"] = "uniform",
    early_stop: bool = False,
    norm: Literal["Linf", "L2"] = "Linf",
    seed: int = 0,
) -> Tensor:
    """Projected gradient descent (Madry et al. 2018); settings as in `fatbench.methods.attacks.pgd`."""
    settings = {"eps": eps, "step": step, "steps": steps, "start": start, "early_stop": early_stop, "norm": norm}
    return attack("pgd", model, x, y, seed=seed, **settings)


def cw(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: Fraction,
    step: Fraction,
    steps: int = 30,
    kappa: float = 50.0,
    early_stop: bool = False,
    seed: int = 0,
) -> Tensor:
    """CW-inf: PGD on the margin loss of Carlini and Wagner 2017; settings as in `fatbench.methods.attacks.cw`."""
    settings = {"eps": eps, "step": step, "steps": steps, "kappa": kappa, "early_stop": early_stop}
    return attack("cw", model, x, y, seed=seed, **settings)


def autoattack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: Fraction,
    version: Literal["standard", "rand", "plus"] = "standard",
    norm: Literal["Linf", "L2"] = "Linf",
    seed: int = 0,
) -> Tensor:
    """AutoAttack (Croce and Hein 2020) by its authors' package. Needs at least 4 classes."""
    return attack("autoattack", model, x, y, seed=seed, eps=eps, version=version, norm=norm)


def attack(name: str, model: nn.Module, x: Tensor, y: Tensor, *, seed: int = 0, **settings: Any) -> Tensor:
    """The registered attack `name` with its settings. SpecError: no such attack or setting, or images beyond [0, 1]."""
    spec = calls.check("Attack", LocatedMap({"name": name, **settings}), f"attacks.{name}")
    import torch

    rounding = ROUNDINGS * torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
    if x.dim() != 4 or not rounding or not bool(((x >= -rounding) & (x <= 1 + rounding)).all()):  # NaN neither
        raise SpecError(f"attacks.{name}: expected images (B, C, H, W) as floats in [0, 1]; normalise inside the model")
    x = x.clamp(0, 1)
    from fatbench.engine.randomness import generator

    modes = [(module, module.training) for module in model.modules()]
    try:
        moved: Tensor = calls.build("Attack", spec)(model.eval(), x, y, generator(seed, name, device=x.device))
    finally:
        for module, training in modes:
            module.training = training
    return torch.as_tensor(moved).detach()


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.startswith("_") and name in signatures.names("Attack"):
        return functools.partial(attack, name)
    raise AttributeError(f"fatbench.attacks has no attack '{name}'; there are {', '.join(signatures.names('Attack'))}")


def __dir__() -> list[str]:
    return ["attack", *signatures.names("Attack")]
