"""Optimizers as functions: a step changes the weights in place and returns the optimizer's moments.

    moments = {}
    moments = step(weights, gradients, moments, Descent("adam", lr=1e-3))

`weights` and `gradients` are tensors in the same order and of the same shapes; `moments` holds lists of tensors in that
order. `packed` and `unpacked` turn it into named tensors and back, so that an algorithm can keep it in its State.
torch.optim is not used, because creating one of its optimizers imports torch's compiler, which costs every worker
seconds; the tests compare with it.
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
    plain: bool = False  # one tensor after the other: the reference for the fused form


@dataclass(frozen=True)
class ServerTraining:
    """How a server trains a network on what clients sent; the optimizer's moments persist between rounds.

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


def step(weights: Sequence[Tensor], gradients: Sequence[Tensor], moments: Moments, descent: Descent) -> Moments:
    """Change `weights` in place by one step and return the new moments. Before the first step they are empty."""
    with torch.no_grad():
        if descent.clip is not None:
            gradients = clipped(gradients, descent.clip)
        return OPTIMIZERS[descent.name](list(weights), list(gradients), moments, descent)


def clipped(gradients: Sequence[Tensor], bound: float) -> list[Tensor]:
    """The gradients of one client, scaled to a joint norm of at most `bound`."""
    norm = torch.stack(torch._foreach_norm(list(gradients))).norm()
    factor = (bound / (norm + 1e-6)).clamp(max=1.0)
    return [gradient * factor for gradient in gradients]


def sgd(weights: list[Tensor], gradients: list[Tensor], moments: Moments, descent: Descent) -> Moments:
    """SGD: d = g + weight_decay w; v = momentum v + d; w = w - lr v, as torch.optim.SGD does it."""
    velocity = moments.get("velocity", [])
    if descent.plain:
        velocities = []
        for position, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            d = g.add(w, alpha=descent.weight_decay) if descent.weight_decay else g
            v = velocity[position].mul(descent.momentum).add(d) if velocity and descent.momentum else d
            w.sub_(v, alpha=descent.lr)
            velocities.append(v)
        return {"velocity": velocities}
    change = gradients
    if descent.weight_decay:
        change = list(torch._foreach_add(change, weights, alpha=descent.weight_decay))
    if velocity and descent.momentum:
        torch._foreach_mul_(velocity, descent.momentum)
        torch._foreach_add_(velocity, change)
        change = list(velocity)
    torch._foreach_add_(weights, change, alpha=-descent.lr)
    return {"velocity": change}


def adam(weights: list[Tensor], gradients: list[Tensor], moments: Moments, descent: Descent) -> Moments:
    """Adam (Kingma and Ba 2015); weight decay is added to the gradient."""
    if descent.weight_decay:
        gradients = list(torch._foreach_add(gradients, weights, alpha=descent.weight_decay))
    return _adam(weights, gradients, moments, descent.lr)


def adamw(weights: list[Tensor], gradients: list[Tensor], moments: Moments, descent: Descent) -> Moments:
    """AdamW (Loshchilov and Hutter 2019): Adam, and weight decay that shrinks the weights themselves."""
    torch._foreach_mul_(weights, 1 - descent.lr * descent.weight_decay)
    return _adam(weights, gradients, moments, descent.lr)


def masked_adam(
    weights: list[Tensor], gradients: list[Tensor], moments: Moments, descent: Descent, moved: Sequence[Tensor]
) -> Moments:
    """Adam on the entries where `moved` (bool, shaped as the weights) is True; the others keep weight and moments.

    The bias correction uses the total number of steps, also for entries that have moved less often.
    """
    old_moments = {key: [t.clone() for t in moments[key]] for key in ("first", "second") if key in moments}
    old_weights = [w.clone() for w in weights]
    new_moments = _adam(weights, gradients, moments, descent.lr)
    for position, moved_entries in enumerate(moved):
        weights[position].copy_(torch.where(moved_entries, weights[position], old_weights[position]))
        for key in ("first", "second"):
            old_moment = old_moments[key][position] if old_moments else torch.zeros_like(old_weights[position])
            new_moments[key][position] = torch.where(moved_entries, new_moments[key][position], old_moment)
    return new_moments


def _adam(weights: list[Tensor], gradients: list[Tensor], moments: Moments, lr: float) -> Moments:
    if not moments:
        zeros = [torch.zeros_like(w) for w in weights]
        moments = {"steps": [torch.tensor(0)], "first": zeros, "second": [z.clone() for z in zeros]}
    first_moment, second_moment = moments["first"], moments["second"]
    count = int(moments["steps"][0]) + 1  # lives on the CPU, so nothing waits for the device
    torch._foreach_lerp_(first_moment, gradients, 1 - BETA1)
    torch._foreach_mul_(second_moment, BETA2)
    torch._foreach_addcmul_(second_moment, gradients, gradients, 1 - BETA2)
    scale = list(torch._foreach_sqrt(second_moment))
    torch._foreach_div_(scale, (1 - BETA2**count) ** 0.5)
    torch._foreach_add_(scale, EPSILON)
    torch._foreach_addcdiv_(weights, first_moment, scale, -lr / (1 - BETA1**count))
    return {"steps": [torch.tensor(count)], "first": first_moment, "second": second_moment}


def packed(moments: Moments, names: Sequence[str]) -> Memory:
    """The moments as named tensors: {"velocity": {weight name: tensor}}, and "steps": a scalar tensor."""
    tensors: Memory = {}
    for moment_name, moment_tensors in moments.items():
        copies = [moment.detach().clone(memory_format=torch.contiguous_format) for moment in moment_tensors]
        tensors[moment_name] = copies[0] if moment_name == "steps" else dict(zip(names, copies, strict=True))
    return tensors


def unpacked(tensors: Memory, names: Sequence[str]) -> Moments:
    """A copy of the moments that `packed` made; empty if it packed none."""
    moments: Moments = {}
    for moment_name, tensors_by_name in tensors.items():
        moments[moment_name] = (
            [tensors_by_name[name].clone() for name in names]
            if isinstance(tensors_by_name, dict)
            else [tensors_by_name.cpu()]
        )
    return moments


OPTIMIZERS: dict[str, Callable[[list[Tensor], list[Tensor], Moments, Descent], Moments]] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
}
