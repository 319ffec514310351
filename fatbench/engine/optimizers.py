"""Optimizers as functions: one step changes the weights in place and gives back what the optimizer remembers.

    moments = {}
    moments = step(weights, gradients, moments, Descent("adam", lr=1e-3))

`weights` and `gradients` are tensors in one order, each gradient of its weight's shape, `moments` holds lists of
tensors in that order; `packed` and `unpacked` turn it into named tensors and back, so that an algorithm can keep it in
its State and a run go on from there. Written out, and compared with torch.optim by tests, because making one of torch's
optimizers imports its compiler, which costs every worker seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fatbench.engine.rounds import Memory
from fatbench.suite.types import Count, Momentum, NonNegative, Positive

Moments = dict[str, list[Tensor]]
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam's


@dataclass(frozen=True)
class Descent:
    """An optimizer and its settings. `momentum` is SGD's; Adam has beta 0.9 and 0.999 and epsilon 1e-8."""

    name: Literal["sgd", "adam", "adamw"]
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    plain: bool = False  # one tensor after the other, as one would write it: what the fused form is compared with


@dataclass(frozen=True)
class ServerTraining:
    """How a server trains a network on what clients sent; the optimizer's moments are kept over rounds.

    lr_decay multiplies the rate once a round; momentum is SGD's.
    """

    epochs: Count
    lr: Positive
    batch: Count = 256
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    momentum: Momentum = 0.9
    weight_decay: NonNegative = 0.0
    lr_decay: Positive = 1.0

    def descent(self, round: int) -> Descent:
        """The optimizer of round `round`, counted from 0."""
        return Descent(self.optimizer, self.lr * self.lr_decay**round, self.momentum, self.weight_decay)


def step(weights: Sequence[Tensor], gradients: Sequence[Tensor], moments: Moments, how: Descent) -> Moments:
    """One step on `weights`, in place; the moments after it. Before the first step they are empty."""
    with torch.no_grad():
        if how.clip is not None:
            gradients = clipped(gradients, how.clip)
        return OPTIMIZERS[how.name](list(weights), list(gradients), moments, how)


def clipped(gradients: Sequence[Tensor], bound: float) -> list[Tensor]:
    """The gradients of one client, scaled to a joint norm of at most `bound`."""
    norm = torch.stack(torch._foreach_norm(list(gradients))).norm()
    factor = (bound / (norm + 1e-6)).clamp(max=1.0)
    return [gradient * factor for gradient in gradients]


def sgd(weights: list[Tensor], gradients: list[Tensor], moments: Moments, how: Descent) -> Moments:
    """SGD: d = g + weight_decay w; v = momentum v + d; w = w - lr v, as torch.optim.SGD does it."""
    velocity = moments.get("velocity", [])
    if how.plain:
        after = []
        for position, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            d = g.add(w, alpha=how.weight_decay) if how.weight_decay else g
            v = velocity[position].mul(how.momentum).add(d) if velocity and how.momentum else d
            w.sub_(v, alpha=how.lr)
            after.append(v)
        return {"velocity": after}
    change = gradients
    if how.weight_decay:
        change = list(torch._foreach_add(change, weights, alpha=how.weight_decay))
    if velocity and how.momentum:
        torch._foreach_mul_(velocity, how.momentum)
        torch._foreach_add_(velocity, change)
        change = list(velocity)
    torch._foreach_add_(weights, change, alpha=-how.lr)
    return {"velocity": change}


def adam(weights: list[Tensor], gradients: list[Tensor], moments: Moments, how: Descent) -> Moments:
    """Adam (Kingma and Ba 2015); weight decay is added to the gradient."""
    if how.weight_decay:
        gradients = list(torch._foreach_add(gradients, weights, alpha=how.weight_decay))
    return _adam(weights, gradients, moments, how.lr)


def adamw(weights: list[Tensor], gradients: list[Tensor], moments: Moments, how: Descent) -> Moments:
    """AdamW (Loshchilov and Hutter 2019): Adam, and weight decay that shrinks the weights themselves."""
    torch._foreach_mul_(weights, 1 - how.lr * how.weight_decay)
    return _adam(weights, gradients, moments, how.lr)


def masked_adam(
    weights: list[Tensor], gradients: list[Tensor], moments: Moments, how: Descent, moved: Sequence[Tensor]
) -> Moments:
    """Adam on the entries that `moved` (bool, as the weights) names; the others keep their weight and both moments.

    The bias of the moments is corrected by the number of steps of all, also where an entry has moved less often.
    """
    kept = {key: [t.clone() for t in moments[key]] for key in ("first", "second") if key in moments}
    before = [w.clone() for w in weights]
    after = _adam(weights, gradients, moments, how.lr)
    for position, here in enumerate(moved):
        weights[position].copy_(torch.where(here, weights[position], before[position]))
        for key in ("first", "second"):
            old = kept[key][position] if kept else torch.zeros_like(before[position])
            after[key][position] = torch.where(here, after[key][position], old)
    return after


def _adam(weights: list[Tensor], gradients: list[Tensor], moments: Moments, lr: float) -> Moments:
    if not moments:
        zeros = [torch.zeros_like(w) for w in weights]
        moments = {"steps": [torch.tensor(0)], "first": zeros, "second": [z.clone() for z in zeros]}
    first, second = moments["first"], moments["second"]
    count = int(moments["steps"][0]) + 1  # lives on the CPU, so nothing waits for the device
    torch._foreach_lerp_(first, gradients, 1 - BETA1)
    torch._foreach_mul_(second, BETA2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - BETA2)
    scale = list(torch._foreach_sqrt(second))
    torch._foreach_div_(scale, (1 - BETA2**count) ** 0.5)
    torch._foreach_add_(scale, EPSILON)
    torch._foreach_addcdiv_(weights, first, scale, -lr / (1 - BETA1**count))
    return {"steps": [torch.tensor(count)], "first": first, "second": second}


def packed(moments: Moments, names: Sequence[str]) -> Memory:
    """The moments as named tensors: {what: {name of the weight: tensor}}, and {"steps": how many}."""
    tensors: Memory = {}
    for what, parts in moments.items():
        copies = [part.detach().clone(memory_format=torch.contiguous_format) for part in parts]
        tensors[what] = copies[0] if what == "steps" else dict(zip(names, copies, strict=True))
    return tensors


def unpacked(tensors: Memory, names: Sequence[str]) -> Moments:
    """A copy of the moments that `packed` made; empty if nothing was."""
    moments: Moments = {}
    for what, own in tensors.items():
        moments[what] = [own[name].clone() for name in names] if isinstance(own, dict) else [own.cpu()]
    return moments


OPTIMIZERS: dict[str, Callable[[list[Tensor], list[Tensor], Moments, Descent], Moments]] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
}
