"""The one check that every model shares: whether it can read images of this size."""

from __future__ import annotations


def image_side(model: str, shape: tuple[int, int, int], smallest: int) -> int:
    """The side of the square images of `shape` (C, H, W). ValueError: not square, or smaller than `smallest` pixels."""
    _, height, width = shape
    if height != width:
        raise ValueError(f"{model}: needs square images, got {height}x{width}")
    if height < smallest:
        raise ValueError(f"{model}: needs images of at least {smallest}x{smallest}, got {height}x{width}")
    return height
