"""Optimisers as functions: one step changes the weights in place and gives back what the optimiser remembers.

    memory = {}
    memory = step(weights, gradients, memory, Descent("adam", lr=1e-3))

`weights` and `gradients` are tensors in one order, `memory` holds lists of tensors in that order; `packed` and
`unpacked` turn it into named tensors and back, so that a protocol can keep it in its State and a run go on from there.
Written out, and compared with torch.optim by tests, because making one of torch's optimisers imports its compiler,
which costs every worker seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fatbench.engine.local import LocalSGD, sgd_step
from fatbench.engine.rounds import Tensors

Memory = dict[str, list[Tensor]]


@dataclass(frozen=True)
class Descent:
    """An optimiser and its settings. `momentum` is SGD's; Adam's betas are 0.9 and 0.999, its epsilon 1e-8."""

    name: Literal["sgd", "adam", "adamw"]
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


def step(weights: Sequence[Tensor], gradients: Sequence[Tensor], memory: Memory, how: Descent) -> Memory:
    """One step on `weights`, in place; the memory after it. The memory before the first step is empty."""
    with torch.no_grad():
        return OPTIMISERS[how.name](list(weights), list(gradients), memory, how)


def sgd(weights: list[Tensor], gradients: list[Tensor], memory: Memory, how: Descent) -> Memory:
    """SGD with momentum; weight decay is added to the gradient."""
    local = LocalSGD(1, 1, how.lr, how.momentum, how.weight_decay, None, None)
    return {"velocity": sgd_step(weights, gradients, memory.get("velocity", []), local)}


def adam(weights: list[Tensor], gradients: list[Tensor], memory: Memory, how: Descent) -> Memory:
    """Adam (Kingma and Ba 2015); weight decay is added to the gradient."""
    if how.weight_decay:
        gradients = list(torch._foreach_add(gradients, weights, alpha=how.weight_decay))
    return _adam(weights, gradients, memory, how.lr)


def adamw(weights: list[Tensor], gradients: list[Tensor], memory: Memory, how: Descent) -> Memory:
    """AdamW (Loshchilov and Hutter 2019): Adam, and weight decay that shrinks the weights themselves."""
    torch._foreach_mul_(weights, 1 - how.lr * how.weight_decay)
    return _adam(weights, gradients, memory, how.lr)


def _adam(weights: list[Tensor], gradients: list[Tensor], memory: Memory, lr: float) -> Memory:
    if not memory:
        zeros = [torch.zeros_like(w) for w in weights]
        memory = {"steps": [torch.tensor(0)], "first": zeros, "second": [z.clone() for z in zeros]}
    first, second = memory["first"], memory["second"]
    count = int(memory["steps"][0]) + 1  # lives on the CPU, so nothing waits for the device
    torch._foreach_lerp_(first, gradients, 1 - 0.9)
    torch._foreach_mul_(second, 0.999)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - 0.999)
    scale = list(torch._foreach_sqrt(second))
    torch._foreach_div_(scale, (1 - 0.999**count) ** 0.5)
    torch._foreach_add_(scale, 1e-8)
    torch._foreach_addcdiv_(weights, first, scale, -lr / (1 - 0.9**count))
    return {"steps": [torch.tensor(count)], "first": first, "second": second}


def packed(memory: Memory, names: Sequence[str]) -> Tensors:
    """The memory as named tensors "optimiser/<what>/<name of the weight>"."""
    tensors = {f"optimiser/{what}": parts[0] for what, parts in memory.items() if what == "steps"}
    for what, parts in memory.items():
        if what != "steps":
            for name, part in zip(names, parts, strict=True):
                tensors[f"optimiser/{what}/{name}"] = part.detach().clone(memory_format=torch.contiguous_format)
    return tensors


def unpacked(tensors: Tensors, names: Sequence[str]) -> Memory:
    """A copy of the memory that `packed` made; empty where there is none."""
    memory: Memory = {}
    for key, value in tensors.items():
        if key == "optimiser/steps":
            memory["steps"] = [value.cpu()]
        elif key.startswith("optimiser/"):
            what = key.split("/")[1]
            if what not in memory:
                memory[what] = [tensors[f"optimiser/{what}/{each}"].clone() for each in names]
    return memory


OPTIMISERS: dict[str, Callable[[list[Tensor], list[Tensor], Memory, Descent], Memory]] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
}
