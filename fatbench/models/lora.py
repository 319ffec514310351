"""LoRA: a frozen network that trains changes of low rank, and its last layer whole.

    W + B A in place of the weight W of a linear layer; B = 0 at the start

Hu et al. 2022. If a server averages A and B, their product is not the mean of the clients' B A: an approximation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class LowRank(nn.Module):
    """A weight plus the product of two narrow matrices."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        out, into = weight.shape
        self.a = nn.Parameter(torch.randn(rank, into) / math.sqrt(into))
        self.b = nn.Parameter(torch.zeros(out, rank))

    def forward(self, weight: Tensor) -> Tensor:
        """W + B A."""
        return weight + self.b @ self.a


def adapt(backbone: nn.Module, rank: int) -> None:
    """Freeze a backbone, in place; with a rank above 0 its linear layers train changes of that rank."""
    backbone.requires_grad_(False)
    if rank:
        for layer in [part for part in backbone.modules() if isinstance(part, nn.Linear)]:
            parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))
