"""Bounds the memory of activations: a batch goes through a network in parts, with the same gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fatbench.models.dropout import Dropout


def bound(model: nn.Module, limit: int) -> None:
    """Make `model`, or its `backbone` if it has one, compute at most `limit` images at a time.

    Only inputs and outputs of the parts are kept: a part's activations are computed again for its gradient, at the cost
    of one more forward pass. This works under every objective and attack, because it changes the network and not the
    loop around it. Names of parameters and buffers stay. Raises ValueError if the network has batch normalisation,
    whose statistics need the whole batch.
    """
    network: nn.Module = getattr(model, "backbone", model)
    if any(isinstance(module, _BatchNorm) for module in network.modules()):
        raise ValueError("run.microbatch: this model has batch normalisation, which needs the whole batch")
    network.forward = _in_parts(network.forward, limit)


def has_dropout(model: nn.Module) -> bool:
    """Whether a network has dropout: in parts, it draws other masks from the same distribution."""
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
