"""Counts the floating-point operations of matrix products, convolutions and attention while code runs, and kernels.

A multiplication and an addition are two operations. Views, empty tensors and `detach` start no kernel; autograd calls
`detach` to keep the output of a layer (twice for a ReLU, and only while something counts).

The formulas agree with `torch.utils.flop_counter`, which is not used because it imports Triton, TorchDynamo and SymPy:
more than a second of every worker's start.
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
    """The gradients of the input and of the weights, each if the mask asks for it."""
    # arguments: bias sizes, stride, padding, dilation, transposed, output padding, groups, mask
    transposed, gradient_mask = arguments[4], arguments[7]
    of_input = 2 * prod(w.shape) * x.shape[0] * prod((x if transposed else grad).shape[2:])
    small, channels = (x, grad.shape[1]) if transposed else (grad, x.shape[1])
    of_weights = 2 * prod(small.shape) * channels * prod(w.shape[2:])
    return of_input * gradient_mask[0] + of_weights * gradient_mask[1]


def _attention(_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """The scores and their product with the values; all arguments are (B, heads, tokens, d)."""
    return 2 * prod(query.shape[:3]) * key.shape[2] * (query.shape[3] + value.shape[3])


def _attention_backward(_out: Any, _grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """The scores again, and two products for each of the two in the forward pass."""
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
    """Whether an operation of the dispatcher starts a kernel on the device."""
    return not (func.is_view or func.overloadpacket.__name__ in NO_KERNEL)


class Flops(TorchDispatchMode):
    """Counts operations into `total`, by `formulas`, and kernels into `launches`."""

    def __init__(self, formulas: Mapping[Any, Formula] = FORMULAS) -> None:
        super().__init__()
        self.formulas = formulas
        self.total = 0
        self.launches = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports TorchDynamo only to switch it off

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if formula := self.formulas.get(func.overloadpacket):
            self.total += formula(result, *args, **(kwargs or {}))
        self.launches += starts_a_kernel(func)
        return result
