"""Keeps the uploads of large networks in a file, so that only the tensors in use are in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from fatbench import settings
from fatbench.engine.rounds import Tensors
from fatbench.suite.cost import IN_MEMORY


class _File:
    """An unnamed file in the cache folder, deleted with its last reference. Raises OSError if the disk is full."""

    def __init__(self) -> None:
        folder = settings.cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as handle:
            self.descriptor = os.dup(handle.fileno())
        self.end = 0

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def append(self, data: memoryview) -> int:
        """Write the data at the end of the file and return where it begins."""
        begin = self.end
        while data:  # a call writes less than 2 GiB
            written = os.pwrite(self.descriptor, data, self.end)
            self.end, data = self.end + written, data[written:]
        return begin

    def read(self, begin: int, into: memoryview) -> None:
        while into:
            count = os.preadv(self.descriptor, [into], begin)
            begin, into = begin + count, into[count:]


class FiledTensors(Mapping[str, Tensor]):
    """A mapping from names to tensors that reads each tensor from the file whenever it is accessed."""

    def __init__(self, file: _File, tensors: Mapping[str, Tensor]):
        self.file = file
        # {name: (offset in bytes, dtype, shape)}
        self.places = {
            name: (file.append(_bytes(tensor.detach().contiguous())), tensor.dtype, tensor.shape)
            for name, tensor in tensors.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        begin, dtype, shape = self.places[name]
        tensor = torch.empty(shape, dtype=dtype)
        self.file.read(begin, _bytes(tensor))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def keeper(broadcast: Tensors, clients: int) -> Callable[[Tensors], Tensors]:
    """A function that keeps a client's model until the round ends: in memory, or in a file if the models are large.

    Models on a GPU stay there. If the disk is full, models stay in memory.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in broadcast.values())
    on_cpu = all(tensor.device.type == "cpu" for tensor in broadcast.values())
    if not on_cpu or clients * size <= IN_MEMORY * settings.available_memory():
        return lambda tensors: tensors
    files: list[_File] = []

    def keep_in_file(tensors: Tensors) -> Tensors:
        try:
            if not files:
                files.append(_File())
            return FiledTensors(files[0], tensors)  # type: ignore[return-value]
        except OSError:
            return tensors

    return keep_in_file


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
