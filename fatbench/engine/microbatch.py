"""Bounded activation memory: a batch goes through a network in parts, and its gradient stays what it was."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fatbench.models.dropout import Dropout


def bound(model: nn.Module, limit: int) -> None:
    """Make `model`, or its `backbone` where it has one, take at most `limit` images at a time.

    Between the parts nothing is kept but inputs and outputs: the activations of a part are computed again when its
    gradient is asked for, at the price of one more forward pass. Works under every objective and every attack, because
    it is the network that is bounded and not the loop around it. Names of parameters and buffers stay.
    ValueError: the network has batch normalisation, whose statistics are those of the whole batch.
    """
    network: nn.Module = getattr(model, "backbone", model)
    if any(isinstance(module, _BatchNorm) for module in network.modules()):
        raise ValueError("--microbatch: batch normalisation needs its whole batch, and this model has it")
    network.forward = _in_parts(network.forward, limit)


def dropping(model: nn.Module) -> bool:
    """Whether a network has dropout: in parts it draws other masks, of the same distribution."""
    return any(isinstance(module, _DropoutNd | Dropout) and module.p > 0 for module in model.modules())


def _in_parts(forward: Callable[[Tensor], Tensor], size: int) -> Callable[[Tensor], Tensor]:
    from torch.utils.checkpoint import checkpoint

    def bounded(x: Tensor) -> Tensor:
        if len(x) <= size:
            return forward(x)
        if not torch.is_grad_enabled():
            return torch.cat([forward(images) for images in x.split(size)])
        return torch.cat([checkpoint(forward, images, use_reentrant=False) for images in x.split(size)])

    return bounded
