"""Two lower bounds: a network that is linear in the pixels, and one that ignores them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def linear(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Softmax regression: one linear layer on the raw pixels.

    Maps (B, C, H, W) in [0, 1] to (B, classes). Its worst case in a ball has a closed form, the attack `exact_linear`.
    Initial weights are PyTorch's.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def linear_parameters(shape: tuple[int, int, int], classes: int) -> int:
    """The number of trainable parameters."""
    channels, side, _ = shape
    return (channels * side * side + 1) * classes


def constant(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The same logits for every image (B, C, H, W): after training, it always predicts the most frequent class.

    Initial weights are 0. Its gradient by the images is 0, so every attack runs, and none succeeds.
    """
    return Constant(classes)


def constant_parameters(shape: tuple[int, int, int], classes: int) -> int:
    """The number of trainable parameters."""
    return classes


class Constant(nn.Module):
    """One logit for each class."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits + 0 * x.flatten(1)[:, :1]  # so that there is a gradient by the images
