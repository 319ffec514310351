"""Privacy defences: what a client does to its gradient before it is sent.

    sent, mask = DEFENCES["random_binary"](gradient, upload, mask_probability=0.5)

`gradient` is {name of a parameter: Tensor}, the gradient of one batch (or, under FedAvg, theta^t - theta_k). A defence
that treats each tensor on its own calls it `part`, and may be given only the tensors that an inversion reads; one that
calls it `gradient` is given all of them. `upload` says whose it is, and when. All randomness comes from streams
keyed by it and by the tensor's name, so that a defence is a pure function and a tensor's mask does not depend on the
other tensors. The result has the same names, shapes and types; `gradient` is not changed.

`mask` is None if the client has a value for every entry, else {name: bool Tensor}: True where it contributes, False
where it withholds the entry and sends zero. Names that are missing contribute everywhere. A server that averages over
contributors divides by the sum of the masks (fatbench/methods/algorithms/fedsgd.py).

| here | Sawada et al. 2024 | what |
|---|---|---|
| mask_probability | R | probability that an entry of the mask is 0 |
| mask | B_n | client n's binary weights |
| upload.client, .epoch, .step | n, -, m | whose upload, in which epoch of the client, which batch of that epoch |
| clip, noise | C, sigma | the norm that a gradient is clipped to, and noise in units of it |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fatbench.engine.randomness import generator
from fatbench.methods.accountants import gaussian_epsilon, laplace_epsilon, sampled_gaussian_epsilon
from fatbench.suite.entry import Entry, entry_of
from fatbench.suite.facts import Facts
from fatbench.suite.types import Momentum, NonNegative, Positive, rounded_down

Gradient = dict[str, Tensor]
Mask = dict[str, Tensor] | None


@dataclass(frozen=True)
class Upload:
    """Whose upload, and when. Under FedAvg the epoch is the round and the step is 0."""

    seed: int
    client: int
    epoch: int = 0
    step: int = 0


@dataclass(frozen=True)
class Examples:
    """The examples behind an upload, for a defence that asks for `examples`."""

    model: nn.Module
    weights: dict[str, Tensor]
    x: Tensor  # (B, C, H, W) in [0, 1]
    y: Tensor  # (B,) int64
    gradients: Callable[[], Gradient]  # {name: (B, ...)}: the gradient of each example's loss
    expected: float  # batch size; its mean under Poisson sampling


def none(part: Gradient, upload: Upload) -> tuple[Gradient, Mask]:
    """No defence: the gradient as it is."""
    return part, None


def fixed_position(part: Gradient, upload: Upload) -> tuple[Gradient, Mask]:
    """Withhold the gradient of the position embedding, which then never moves.

    The rest still reveals much: the gradient of the class token is row 0 of the withheld one, that of the patch
    embedding's bias is the sum of its other rows, and that of its weight spans the patches (inversion `patch_span`).
    Raises ValueError if no parameter is called pos_embed.

    Source: Lu et al. 2022 (APRIL), section 5; the comparison of Sawada et al. 2024.
    """
    positions = [name for name in part if name.endswith("pos_embed")]
    if not positions:
        raise ValueError("fixed_position: the model has no learned positions (no parameter named pos_embed)")
    mask = {name: torch.zeros_like(part[name], dtype=torch.bool) for name in positions}
    return _masked(part, mask), mask


def learned_positions(cell: Facts) -> str | None:
    if "patches" not in cell.model.parts:
        return "fixed_position withholds learned positions, which this model lacks; {name: vit} has them"
    return None


def random_binary(
    part: Gradient,
    upload: Upload,
    *,
    mask_probability: Momentum,
    period: Literal["epoch", "step"] = "epoch",
    layers: dict[str, Momentum] | None = None,
) -> tuple[Gradient, Mask]:
    """Random binary weights: every entry is withheld with probability `mask_probability`, anew each `period`.

    mask_probability in [0, 1): 0 is no defence, 1 would send nothing. Every client draws its own mask. `layers` gives
    other probabilities to parameters whose name begins with a key, or has it after a dot: {pos_embed: 0.9}. The longest
    matching key applies. Raises ValueError for a probability outside [0, 1) or a key that no parameter matches.

    Source: Sawada et al. 2024, Eq. 11-12: the text draws once per epoch, Eq. 12 per update (differences: masks-period).
    """
    time_key: tuple[int, ...] = (upload.epoch,) if period == "epoch" else (upload.epoch, upload.step)
    mask = _draw("random_binary", part, upload.seed, ("mask", upload.client, *time_key), mask_probability, layers)
    return _masked(part, mask), mask


def locked_binary(
    part: Gradient,
    upload: Upload,
    *,
    mask_probability: Momentum,
    shared: bool = False,
    layers: dict[str, Momentum] | None = None,
) -> tuple[Gradient, Mask]:
    """Locked binary weights: as random_binary, but one mask for the whole training.

    Each client has its own mask, so that with mask probability p an entry never moves with probability p^n. With
    `shared`, all clients have one mask, and it never moves with probability p. The paper does not say which it means.

    Source: Sawada et al. 2024, Fig. 6 (differences: masks-locked).
    """
    owner_key: tuple[int, ...] = () if shared else (upload.client,)
    mask = _draw("locked_binary", part, upload.seed, ("locked mask", *owner_key), mask_probability, layers)
    return _masked(part, mask), mask


def gaussian(gradient: Gradient, upload: Upload, *, noise: NonNegative, clip: Positive = 1.0) -> tuple[Gradient, Mask]:
    """Clip the gradient to L2 norm `clip`, then add normal noise of standard deviation noise * clip to every entry.

    Clipping the gradient of the whole batch protects the upload as a whole; `gaussian_epsilon` says how well. Not in
    Sawada et al. 2024. Source: the Gaussian mechanism; Abadi et al. 2016 clip each example's gradient.
    """
    length = torch.stack([g.double().norm() for g in gradient.values()]).norm()
    return _noisy(gradient, upload, clip / length.clamp(min=clip), noise * clip, "gaussian"), None


def laplace(gradient: Gradient, upload: Upload, *, noise: NonNegative, clip: Positive = 1.0) -> tuple[Gradient, Mask]:
    """Clip the gradient to L1 norm `clip`, then add Laplace noise of scale noise * clip to every entry.

    The Laplace mechanism's epsilon is measured in the L1 norm (`laplace_epsilon`); breaching adds such noise to
    gradients that are clipped in L2 or not at all. Not in Sawada et al. 2024. Source: Dwork et al. 2006.
    """
    length = torch.stack([g.double().abs().sum() for g in gradient.values()]).sum()
    return _noisy(gradient, upload, clip / length.clamp(min=clip), noise * clip, "laplace"), None


def pruning(part: Gradient, upload: Upload, *, fraction: Momentum) -> tuple[Gradient, Mask]:
    """Send zero in place of the `fraction` of entries that are smallest in magnitude, tensor by tensor.

    Exactly floor(fraction entries) of them; of equal ones the first. There is no mask: the zeros count in the server's
    mean, as when gradients are pruned to save bytes.
    Source: Zhu, Liu and Han 2019 (Deep leakage from gradients), section 5.
    """
    _check_fraction("pruning", fraction)

    def prune(g: Tensor) -> Tensor:
        dropped_count = rounded_down(fraction * g.numel())
        if dropped_count == 0:
            return g
        smallest = g.abs().flatten().argsort(stable=True)[:dropped_count]  # kthvalue has no deterministic kernel
        return g.flatten().index_fill(0, smallest, 0).view_as(g)

    return {name: prune(g) for name, g in part.items()}, None


def dpsgd(
    gradient: Gradient, upload: Upload, examples: Examples, *, noise: NonNegative, clip: Positive = 1.0
) -> tuple[Gradient, Mask]:
    """DP-SGD: clip the gradient of each example to L2 norm `clip`, sum, add normal noise, divide by the batch size.

    The noise on the sum has standard deviation noise * clip. It protects single examples; `fedsgd` reports epsilon. The
    argument `gradient` gives only names and shapes.

    Source: Abadi et al. 2016, algorithm 1.
    """
    example_gradients = examples.gradients()
    length = torch.stack([example_gradients[name].double().flatten(1).norm(dim=1) for name in gradient]).norm(dim=0)
    factor = clip / length.clamp(min=clip)
    mean = {
        name: torch.tensordot(factor.to(g), example_gradients[name], 1) / examples.expected
        if len(length)
        else torch.zeros_like(g)
        for name, g in gradient.items()
    }
    return _noisy(mean, upload, torch.ones(()), noise * clip / examples.expected, "gaussian"), None


def one_gradient_of_examples(cell: Facts) -> str | None:
    if cell.algorithm.get("mode") == "train":
        return (
            "dpsgd clips the gradient of each example, and in train mode no example has one of its own: set mode: eval"
        )
    if cell.algorithm.get("local"):
        return "dpsgd clips the gradient of each example: leave out 'local'"
    return None


def soteria(part: Gradient, upload: Upload, examples: Examples, *, fraction: Momentum) -> tuple[Gradient, Mask]:
    """Send zero for the `fraction` of the last layer's columns whose features reveal most about the image.

    Features r_f are ranked by the sum over the batch of |d r_f / d x| / (|r_f| + 0.1), and the smallest are dropped:
    they are far from zero and hardly change with the image. All other tensors are sent unchanged, so `patch_ls` works
    as without a defence (differences: soteria-features).

    Source: Sun et al. 2021 (Soteria), as its program approximates it.
    """
    _check_fraction("soteria", fraction)
    layer = next(name for name in reversed(list(part)) if part[name].dim() == 2)
    layer_inputs: list[Tensor] = []
    module = examples.model.get_submodule(layer.rpartition(".")[0])
    handle = module.register_forward_pre_hook(lambda _, inputs: layer_inputs.append(inputs[0]))
    try:
        with torch.enable_grad():
            x = examples.x.detach().requires_grad_()
            functional_call(examples.model, examples.weights, (x,))
            r = layer_inputs[0]
            slopes = [torch.autograd.grad(column.sum(), x, retain_graph=True)[0] for column in r.unbind(1)]
    finally:
        handle.remove()
    lengths = torch.stack([slope.flatten(1).norm(dim=1) for slope in slopes], 1)
    score = (lengths / (r.detach().abs() + 0.1)).sum(0)
    dropped_columns = score.argsort()[: rounded_down(fraction * len(score))]
    sent_weight = part[layer].clone()
    sent_weight[:, dropped_columns] = 0
    return {**part, layer: sent_weight}, None


def one_gradient_of_features(cell: Facts) -> str | None:
    if cell.algorithm.get("mode") == "train":
        return "soteria ranks the features of each example by itself: set mode: eval"
    if cell.algorithm.get("local"):
        return "soteria ranks the features of one gradient: leave out 'local'"
    return None


def _check_fraction(name: str, fraction: float) -> None:
    if not 0 <= fraction < 1:
        reason = ": at 1 nothing is sent" if fraction == 1 else ""
        raise ValueError(f"{name}: the fraction withheld must be in [0, 1), got {fraction:g}{reason}")


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
    names_by_prefix = {prefix: [n for n in gradient if n.startswith(prefix) or f".{prefix}" in n] for prefix in layers}
    if unmatched := [prefix for prefix, names in names_by_prefix.items() if not names]:
        raise ValueError(f"{defence}: layers: no parameter is named '{unmatched[0]}...', only {', '.join(gradient)}")
    mask = {}
    for name, g in gradient.items():
        longest_prefix = max(
            (prefix for prefix, names in names_by_prefix.items() if name in names), key=len, default=None
        )
        draw = generator(seed, *key, name, device=g.device)
        mask[name] = torch.rand(g.shape, generator=draw, device=g.device) >= (
            mask_probability if longest_prefix is None else layers[longest_prefix]
        )
    return mask


def _masked(gradient: Gradient, mask: dict[str, Tensor]) -> Gradient:
    return {name: g.masked_fill(~mask[name], 0) if name in mask else g for name, g in gradient.items()}


def _noisy(gradient: Gradient, upload: Upload, factor: Tensor, scale: float, kind: str) -> Gradient:
    noisy_gradient = {}
    for name, g in gradient.items():
        draw = generator(upload.seed, "noise", upload.client, upload.epoch, upload.step, name, device=g.device)
        if kind == "gaussian":
            noise = torch.randn(g.shape, generator=draw, device=g.device, dtype=g.dtype)
        else:  # the difference of two exponentials
            exponentials = torch.empty(2, *g.shape, device=g.device, dtype=g.dtype).exponential_(generator=draw)
            noise = exponentials[0] - exponentials[1]
        noisy_gradient[name] = g * factor.to(g.dtype) + scale * noise
    return noisy_gradient


DEFENCES: dict[str, Callable[..., tuple[Gradient, Mask]]] = {
    "none": none,
    "fixed_position": Entry(fixed_position, refuse=(learned_positions,), cites=("lu2022", "sawada2024")),
    "random_binary": Entry(random_binary, cites=("sawada2024",)),
    "locked_binary": Entry(locked_binary, cites=("sawada2024",)),
    "gaussian": Entry(gaussian, cites=("abadi2016", "sawada2024")),
    "laplace": Entry(laplace, cites=("dwork2006", "sawada2024")),
    "pruning": Entry(pruning, cites=("zhu2019",)),
    "dpsgd": Entry(dpsgd, refuse=(one_gradient_of_examples,), cites=("abadi2016",)),
    "soteria": Entry(soteria, refuse=(one_gradient_of_features,), cites=("sun2021",)),
}


@dataclass(frozen=True)
class Spent:
    """How much a client has sent so far."""

    epochs: int  # passes over its examples; one that has begun counts in full
    steps: int
    rate: float | None  # probability that a step draws an example; None: epochs go through all examples


Guarantee = tuple[float, float]  # epsilon, delta


def _gaussian_guarantee(spent: Spent, delta: float, noise: float, clip: float = 1.0) -> Guarantee:
    uploads = spent.epochs if spent.rate is None else spent.steps
    return gaussian_epsilon(
        noise, delta, uploads, sensitivity=2
    ), delta  # a replaced example may turn the clipped gradient around


def _laplace_guarantee(spent: Spent, delta: float, noise: float, clip: float = 1.0) -> Guarantee:
    return laplace_epsilon(noise, spent.epochs if spent.rate is None else spent.steps, sensitivity=2), 0.0


def _dpsgd_guarantee(spent: Spent, delta: float, noise: float, clip: float = 1.0) -> Guarantee:
    if spent.rate is None:
        return gaussian_epsilon(noise, delta, spent.epochs), delta
    return sampled_gaussian_epsilon(noise, spent.rate, spent.steps, delta), delta


# The privacy of one example in a client's uploads, compared with uploads without it.
GUARANTEES: dict[Callable[..., tuple[Gradient, Mask]], Callable[..., Guarantee]] = {
    gaussian: _gaussian_guarantee,
    laplace: _laplace_guarantee,
    dpsgd: _dpsgd_guarantee,
}


def guarantee(defence: Callable[..., tuple[Gradient, Mask]], spent: Spent, delta: float) -> Guarantee | None:
    """(epsilon, delta) of a client's uploads under a defence with its settings; None if it gives no such guarantee.

    `delta` is the requested one; Laplace noise needs none, and its guarantee has delta 0.
    """
    accountant = GUARANTEES.get(entry_of(defence).function)
    return None if accountant is None else accountant(spent, delta, **getattr(defence, "keywords", {}))
