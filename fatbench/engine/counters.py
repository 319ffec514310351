"""Floating-point operations of products, convolutions and attention, counted while code runs: multiply and add are two.

Beside them the kernels that are started. Not every operation starts one: views, empty tensors, and `detach`, by which
autograd keeps the output of a layer (twice for a ReLU, and only while something counts), do not.

The formulas agree with those of `torch.utils.flop_counter`, whose module imports Triton, and whose mode imports
TorchDynamo and SymPy: more than a second of every worker's start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Formula = Callable[..., int]  # (what the operation returned, its arguments) -> operations


def _product(_out: Any, a: Any, b: Any) -> int:
    return 2 * prod(a.shape) * b.shape[-1]


def _added_product(_out: Any, _to: Any, a: Any, b: Any) -> int:
    return 2 * prod(a.shape) * b.shape[-1]


def _convolution(out: Any, x: Any, w: Any, *arguments: Any) -> int:
    transposed = arguments[4]  # after bias, stride, padding and dilation
    return 2 * prod(w.shape) * x.shape[0] * prod((x if transposed else out).shape[2:])


def _convolution_backward(_out: Any, grad: Any, x: Any, w: Any, *arguments: Any) -> int:
    """Of the gradients of the input and of the weights, where they are wanted."""
    transposed, gradient_mask = (
        arguments[4],
        arguments[7],
    )  # after bias, stride, padding, dilation; output padding, groups
    of_input = 2 * prod(w.shape) * x.shape[0] * prod((x if transposed else grad).shape[2:])
    small, channels = (x, grad.shape[1]) if transposed else (grad, x.shape[1])
    of_weights = 2 * prod(small.shape) * channels * prod(w.shape[2:])
    return of_input * gradient_mask[0] + of_weights * gradient_mask[1]


def _attention(_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Scores and their product with the values, of (B, heads, tokens, d)."""
    return 2 * prod(query.shape[:3]) * key.shape[2] * (query.shape[3] + value.shape[3])


def _attention_backward(_out: Any, _grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """The scores once more, and two products for each of the two of the way forward."""
    scores = 2 * prod(query.shape[:3]) * key.shape[2]
    return scores * (3 * query.shape[3] + 2 * value.shape[3])


FORMULAS: dict[Any, Formula] = {
    torch.ops.aten.mm: _product,
    torch.ops.aten.bmm: _product,
    torch.ops.aten.addmm: _added_product,
    torch.ops.aten.baddbmm: _added_product,
    torch.ops.aten.convolution: _convolution,
    torch.ops.aten.convolution_backward: _convolution_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


NO_KERNEL = {"detach", "empty", "empty_like", "empty_strided", "new_empty"}


def starts_a_kernel(func: Any) -> bool:
    """Whether an operation of the dispatcher is work of the device."""
    return not (func.is_view or func.overloadpacket.__name__ in NO_KERNEL)


class Flops(TorchDispatchMode):
    """Counts into `total` by `formulas`, where an operation without one counts nothing, and `launches`."""

    def __init__(self, formulas: Mapping[Any, Formula] = FORMULAS) -> None:
        super().__init__()
        self.formulas = formulas
        self.total = 0
        self.launches = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports TorchDynamo, to tell it not to compile what follows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if formula := self.formulas.get(func.overloadpacket):
            self.total += formula(result, *args, **(kwargs or {}))
        self.launches += starts_a_kernel(func)
        return result
