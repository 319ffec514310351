"""Images on the device, or left in a memory-mapped file that may be larger than the memory."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

SHARE = 0.5  # of a GPU's free memory that images may take


class MappedImages:
    """Images (N, C, H, W) uint8 of a mapped file; indexing copies images to the device.

    It stands in for a tensor that is only indexed along its first axis.
    """

    dtype = torch.uint8

    def __init__(self, images: Tensor, rows: Tensor, device: torch.device):
        """images: (M, C, H, W) on the CPU. rows: (N,) int64 positions in `images`, on the CPU."""
        self.images, self.rows, self.device = images, rows, device
        self.shape = torch.Size((len(rows), *images.shape[1:]))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, Tensor):
            index = index.cpu()
        rows = self.rows[index]
        flat = self.images.index_select(0, rows.reshape(-1))
        return flat.reshape(*rows.shape, *self.shape[1:]).to(self.device)


def images_on_device(device: torch.device, images: Any, rows: Any) -> Tensor:
    """The images (N, C, H, W) of an array at `rows`, an index or a slice, as a tensor on the device.

    Nothing of a mapped file is copied: a slice stays in the file, an index is followed batch by batch
    (`MappedImages`). On a GPU the images are copied if they fit.
    """
    if not isinstance(images, np.memmap) or (device.type != "cpu" and images.nbytes < SHARE * free_memory(device)):
        return torch.from_numpy(np.asarray(images)[rows]).to(device)
    if isinstance(rows, slice):
        return torch.from_numpy(np.asarray(images)[rows]).to(device)
    index = torch.from_numpy(np.asarray(rows, np.int64))
    return cast(Tensor, MappedImages(torch.from_numpy(np.asarray(images)), index, device))


def free_memory(device: torch.device) -> int:
    """Free memory of a GPU in bytes."""
    return int(torch.cuda.mem_get_info(device)[0])


def in_memory(images: Tensor) -> Tensor:
    """The images as an ordinary tensor."""
    return images[:] if isinstance(images, MappedImages) else images
