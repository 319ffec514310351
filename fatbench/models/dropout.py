"""Dropout whose mask does not depend on the memory layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """Dropout with probability p; the mask is drawn in the order (B, C, H, W) whatever the memory format.

    torch's dropout draws in memory order, so that channels_last and contiguous runs of a cell would differ. The mask
    comes from the global generator.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = torch.rand(x.shape, device=x.device) >= self.p  # of the shape, not like x, whose memory format varies
        return x * keep / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"
