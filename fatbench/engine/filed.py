"""Uploads of large networks, in a file: of each only the tensors that are asked for are in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from fatbench import settings
from fatbench.engine.rounds import Tensors
from fatbench.suite.memory_need import IN_MEMORY


class _File:
    """A file without a name in the cache folder, which goes with the last who holds it. OSError: no room."""

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
        """Where the data begins."""
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
    """Tensors by name as a dictionary has them, each read from the file whenever it is asked for."""

    def __init__(self, file: _File, tensors: Mapping[str, Tensor]):
        self.file = file
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
    """What keeps the models of so many clients of a round: as they are, or in a file where they take much memory.

    Models on a GPU stay there, and those for which the file has no room where they are.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in broadcast.values())
    here = all(tensor.device.type == "cpu" for tensor in broadcast.values())
    if not here or clients * size <= IN_MEMORY * settings.available_memory():
        return lambda tensors: tensors
    files: list[_File] = []

    def filed(tensors: Tensors) -> Tensors:
        try:
            if not files:
                files.append(_File())
            return FiledTensors(files[0], tensors)  # type: ignore[return-value]
        except OSError:
            return tensors

    return filed


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
