"""A multilayer perceptron with one hidden layer, the toy network of the SFAT paper (Zhu et al. 2023, Figure 5)."""

from __future__ import annotations

import math

from torch import nn

from fatbench.suite.types import Count


def mlp(shape: tuple[int, int, int], classes: int, *, width: Count = 64) -> nn.Module:
    """One hidden layer of `width` ReLU units on the raw pixels, for images of any size and points in the plane.

    Maps (B, C, H, W) in [0, 1] to (B, classes): W2 relu(W1 x + b1) + b2. No normalisation. Initial weights are
    PyTorch's.

    Source: Zhu et al. 2023, Figure 5 (b, c), where the width is not stated (differences: sfat-toy).
    """
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU(), nn.Linear(width, classes)
    )  # fmt: skip


def mlp_parameters(shape: tuple[int, int, int], classes: int, *, width: int) -> int:
    """The number of trainable parameters."""
    channels, side, _ = shape
    return (channels * side * side + 1) * width + (width + 1) * classes
