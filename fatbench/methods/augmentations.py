"""Augmentations: what training does to a batch, on its device and without a loop over images.

    AUGMENTS["crop_flip"](x, generator, padding=28)      (B, C, H, W) -> (B, C, H, W)

Every draw comes from the given generator, which is on the device of x.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fatbench.suite.types import Natural


def crop_flip(x: Tensor, generator: Generator, *, padding: Natural, flip: bool = True) -> Tensor:
    """A random crop of the image's own size after zero padding, then a horizontal flip of about half of them.

    x (B, C, H, W) of any dtype -> the same shape, dtype and memory format. Each image has its own offsets, uniform in
    0..2 * padding, and is flipped with probability 1/2 if `flip` is set. FAT: padding 28 after resizing to 224;
    the customary padding for 32 x 32 images is 4.
    """
    n, _, height, width = x.shape
    top_edge, left_edge = torch.randint(0, 2 * padding + 1, (2, n, 1), generator=generator, device=x.device)
    rows = top_edge + torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device).expand(n, width)
    if flip:
        mirrored = torch.rand((n, 1), generator=generator, device=x.device) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    columns = columns + left_edge
    padded = F.pad(x, (padding, padding, padding, padding))
    image = torch.arange(n, device=x.device)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return torch.empty_like(x).copy_(cropped)


AUGMENTS: dict[str, Callable[..., Tensor]] = {"crop_flip": crop_flip}
