"""Dropout whose mask does not depend on how the tensor lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn


class Dropout(nn.Module):
    """Dropout with probability p; the mask is drawn in the order (B, C, H, W) whatever the memory format.

    torch's own draws in memory order, so that channels_last and contiguous runs of one cell would differ.

    The mask comes from the global generator. `streams`: while several clients run as one program
    (`fatbench.engine.fast.clients`, under vmap), the generator that each of them draws from instead.
    """

    streams: Sequence[Generator] | None = None

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = self.uniform(x) >= self.p
        return x * keep / (1 - self.p)

    def uniform(self, x: Tensor) -> Tensor:
        """Numbers in [0, 1) of x's shape."""
        if self.streams is None:
            return torch.rand(x.shape, device=x.device)
        drawn: Tensor = _EachItsOwn.apply(x.detach(), self.streams)
        return drawn

    def extra_repr(self) -> str:
        return f"p={self.p}"


class _EachItsOwn(torch.autograd.Function):
    """Under vmap over clients: uniform numbers of x's shape, those of client k from streams[k]."""

    @staticmethod
    def forward(x: Tensor, streams: Sequence[Generator]) -> Tensor:
        raise NotImplementedError("one stream per client is for models under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, streams: Sequence[Generator]) -> tuple[Tensor, int]:
        shape = x.movedim(in_dims[0], 0).shape[1:]
        return torch.stack([torch.rand(shape, device=x.device, generator=stream) for stream in streams]), 0
