"""Privacy defences: what a client does to its gradient before anybody else sees it.

    sent, mask = DEFENCES["random_binary"](gradient, at, rate=0.5)

`gradient` is a dict, name of parameter -> Tensor, the gradient of one batch (or, under FedAvg, theta^t - theta_k). A
defence that treats every tensor for itself calls it `part`, and may be given only those that an inversion reads; one
that calls it `gradient` is given all of it. `at`
says whose upload it is and when: all randomness comes from streams keyed by it and by the name of the tensor, so a
defence is a pure function, and the mask of a tensor does not depend on which other tensors there are. The result has
the same names, shapes and types; `gradient` is left alone.

`mask` is None where the client has a value for every entry, else a dict, name -> bool Tensor: True where it
contributes, False where it withholds the entry and sends zero. Names that are not in it contribute everywhere. A server
that averages over contributors divides by the sum of the masks (fatbench/methods/algorithms/fedsgd.py).

| here | Sawada et al. 2024 | what |
|---|---|---|
| mask_probability | R | probability that an entry of the mask is 0 |
| mask | B_n | client n's binary weights |
| at.client, at.epoch, at.step | n, -, m | whose upload, in which epoch of the client, which batch of that epoch |
| clip, noise | C, sigma | norm that a gradient is cut to, and noise in units of it |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fatbench.engine.randomness import generator
from fatbench.suite.types import Momentum, NonNegative, Positive

Gradient = dict[str, Tensor]
Mask = dict[str, Tensor] | None


@dataclass(frozen=True)
class Upload:
    """Whose upload and when; under FedAvg the epoch is the round and the step 0."""

    seed: int
    client: int
    epoch: int = 0
    step: int = 0


def none(part: Gradient, at: Upload) -> tuple[Gradient, Mask]:
    """No defence: the gradient as it is."""
    return part, None


def fixed_position(part: Gradient, at: Upload) -> tuple[Gradient, Mask]:
    """Withhold the gradient of the position embedding, which then never moves.

    What is left still tells: the gradient of the class token is row 0 of the one withheld, that of the patch
    embedding's bias the sum of its other rows, and that of its weight spans the patches (inversion `patch_span`).
    ValueError: no parameter is called pos_embed.

    Source: Lu et al. 2022 (APRIL), section 5; the comparison of Sawada et al. 2024.
    """
    positions = [name for name in part if name.endswith("pos_embed")]
    if not positions:
        raise ValueError("fixed_position: the model has no learned positions (no parameter named pos_embed)")
    mask = {name: torch.zeros_like(part[name], dtype=torch.bool) for name in positions}
    return _masked(part, mask), mask


def random_binary(
    part: Gradient,
    at: Upload,
    *,
    mask_probability: Momentum,
    period: Literal["epoch", "step"] = "epoch",
    layers: dict[str, Momentum] | None = None,
) -> tuple[Gradient, Mask]:
    """Random binary weights: every entry is withheld with probability `mask_probability`, anew each `period`.

    mask_probability in [0, 1): 0 is no defence, 1 would send nothing. Every client draws its own mask. `layers` gives
    the probability of the parameters whose name begins with a key, or has it after a dot: {pos_embed: 0.9}; of several
    keys the longest. ValueError: a probability outside [0, 1), a key that no parameter matches.

    Source: Sawada et al. 2024, Eq. 11-12: the text draws once per epoch, Eq. 12 per update (differences: masks-period).
    """
    when: tuple[int, ...] = (at.epoch,) if period == "epoch" else (at.epoch, at.step)
    mask = _draw("random_binary", part, at.seed, ("mask", at.client, *when), mask_probability, layers)
    return _masked(part, mask), mask


def locked_binary(
    part: Gradient,
    at: Upload,
    *,
    mask_probability: Momentum,
    shared: bool = False,
    layers: dict[str, Momentum] | None = None,
) -> tuple[Gradient, Mask]:
    """Locked binary weights: as random_binary, but one mask for the whole training.

    Each client has its own, and with p the mask probability an entry never moves with probability p^n; `shared`: one
    mask for all of them, and it never moves with probability p. The paper does not say which of the two it means.

    Source: Sawada et al. 2024, Fig. 6 (differences: masks-locked).
    """
    whose: tuple[int, ...] = () if shared else (at.client,)
    mask = _draw("locked_binary", part, at.seed, ("locked mask", *whose), mask_probability, layers)
    return _masked(part, mask), mask


def gaussian(gradient: Gradient, at: Upload, *, noise: NonNegative, clip: Positive = 1.0) -> tuple[Gradient, Mask]:
    """Cut the gradient to L2 norm `clip`, then add normal noise of standard deviation noise * clip to every entry.

    What is cut is the gradient of the whole batch, so that what is protected is the upload; `gaussian_epsilon` says how
    well. Not in Sawada et al. 2024. Source: the Gaussian mechanism; Abadi et al. 2016 cut each example's gradient.
    """
    length = torch.stack([g.double().norm() for g in gradient.values()]).norm()
    return _noisy(gradient, at, clip / length.clamp(min=clip), noise * clip, "gaussian"), None


def laplace(gradient: Gradient, at: Upload, *, noise: NonNegative, clip: Positive = 1.0) -> tuple[Gradient, Mask]:
    """Cut the gradient to L1 norm `clip`, then add Laplace noise of scale noise * clip to every entry.

    The L1 norm, because that is what the Laplace mechanism's epsilon is measured in (`laplace_epsilon`); breaching adds
    it to gradients that are cut in L2 or not at all. Not in Sawada et al. 2024. Source: Dwork et al. 2006.
    """
    length = torch.stack([g.double().abs().sum() for g in gradient.values()]).sum()
    return _noisy(gradient, at, clip / length.clamp(min=clip), noise * clip, "laplace"), None


def pruning(part: Gradient, at: Upload, *, fraction: Momentum) -> tuple[Gradient, Mask]:
    """Send zero in place of the `fraction` of entries that are smallest in magnitude, tensor by tensor.

    The zeros count in the server's mean, as they do where gradients are pruned to save bytes, so there is no mask.
    Source: Zhu, Liu and Han 2019 (Deep leakage from gradients), section 5.
    """
    _check_fraction("pruning", fraction)

    def prune(g: Tensor) -> Tensor:
        dropped = int(fraction * g.numel())
        if dropped == 0:
            return g
        threshold = g.abs().flatten().sort().values[dropped - 1]  # kthvalue has no deterministic kernel
        return g.masked_fill(g.abs() <= threshold, 0)

    return {name: prune(g) for name, g in part.items()}, None


def _check_fraction(name: str, withheld: float) -> None:
    if not 0 <= withheld < 1:
        why = ": at 1 nothing is sent" if withheld == 1 else ""
        raise ValueError(f"{name}: the fraction withheld must be in [0, 1), got {withheld:g}{why}")


def _draw(
    defence: str,
    gradient: Gradient,
    seed: int,
    key: tuple[str | int, ...],
    mask_probability: float,
    layers: dict[str, float] | None,
) -> dict[str, Tensor]:
    layers = layers or {}
    for value in (mask_probability, *layers.values()):
        _check_fraction(defence, value)
    fits = {key_: [n for n in gradient if n.startswith(key_) or f".{key_}" in n] for key_ in layers}
    if unused := [key_ for key_, names in fits.items() if not names]:
        raise ValueError(f"{defence}: layers: no parameter is named '{unused[0]}...', there are {', '.join(gradient)}")
    mask = {}
    for name, g in gradient.items():
        own = max((key_ for key_, names in fits.items() if name in names), key=len, default=None)
        draw = generator(seed, *key, name, device=g.device)
        mask[name] = torch.rand(g.shape, generator=draw, device=g.device) >= (
            mask_probability if own is None else layers[own]
        )
    return mask


def _masked(gradient: Gradient, mask: dict[str, Tensor]) -> Gradient:
    return {name: g.masked_fill(~mask[name], 0) if name in mask else g for name, g in gradient.items()}


def _noisy(gradient: Gradient, at: Upload, factor: Tensor, scale: float, kind: str) -> Gradient:
    sent = {}
    for name, g in gradient.items():
        draw = generator(at.seed, "noise", at.client, at.epoch, at.step, name, device=g.device)
        if kind == "gaussian":
            noise = torch.randn(g.shape, generator=draw, device=g.device, dtype=g.dtype)
        else:  # the difference of two exponentials
            size = torch.empty(2, *g.shape, device=g.device, dtype=g.dtype).exponential_(generator=draw)
            noise = size[0] - size[1]
        sent[name] = g * factor.to(g.dtype) + scale * noise
    return sent


# --- what the noise buys, and what the masks update --------------------------------------------------------------


def gaussian_epsilon(noise: float, delta: float, uploads: int = 1, sensitivity: float = 1.0) -> float:
    """The epsilon of (epsilon, delta) differential privacy that `uploads` uploads under `gaussian` give away. Exact.

    `noise` is sigma in units of the clipping norm. `sensitivity` 1: an upload is there or is not; 2: the examples
    behind it are replaced by any others. Composing k Gaussian mechanisms is one with mu = sensitivity sqrt(k) / sigma,
    and

        delta = Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu).

    An example takes part in one upload per epoch, so `uploads` is the number of epochs for an example and the number of
    batches for a client. No amplification by sampling: an epoch goes through all examples. A formula and not a
    package's accountant, because without sampling the formula is exact at any sigma, while the accountants' grids and
    orders end where a defence of a single gradient begins (epsilon beyond some hundreds). ValueError: delta outside (0,
    1).

    Source: Balle and Wang 2018, theorem 8; Dong, Roth and Su 2019, corollary 3.3.
    """
    from scipy.optimize import brentq  # half a second of CPU time, and few cells have such a defence
    from scipy.special import log_ndtr

    if not 0 < delta < 1:
        raise ValueError(f"gaussian_epsilon: delta must be in (0, 1), got {delta:g}")
    if noise == 0:
        return math.inf
    mu = sensitivity * math.sqrt(uploads) / noise

    def excess(epsilon: float) -> float:  # log delta(epsilon) - log delta, through logarithms: exp(epsilon) overflows
        first, second = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        return float(first + math.log1p(-math.exp(min(second - first, -1e-16))) - math.log(delta))

    if excess(0.0) <= 0:
        return 0.0
    top = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    return float(brentq(excess, 0.0, top, xtol=1e-12, rtol=1e-12))


def laplace_epsilon(noise: float, uploads: int = 1, sensitivity: float = 1.0) -> float:
    """The epsilon of pure differential privacy (delta 0) under `laplace`: sensitivity * uploads / noise."""
    return math.inf if noise == 0 else sensitivity * uploads / noise


DEFENCES: dict[str, Callable[..., tuple[Gradient, Mask]]] = {
    "none": none,
    "fixed_position": fixed_position,
    "random_binary": random_binary,
    "locked_binary": locked_binary,
    "gaussian": gaussian,
    "laplace": laplace,
    "pruning": pruning,
}
