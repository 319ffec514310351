"""Randomness from named streams: every draw has a key, and no draw depends on draws elsewhere.

    generator(cell_seed, "client", round, k)        a torch.Generator
    numpy_generator(cell_seed, "partition")         a numpy.random.Generator

Two keys give independent streams, and a key gives the same stream in every run. So a run that was killed and resumed
equals one that was not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    import torch
    from torch import Tensor


def stream(seed: int, *key: str | int) -> int:
    """The 63-bit seed of the stream named `key` under the cell's `seed`."""
    name = json.dumps([seed, *key], separators=(",", ":")).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


def generator(seed: int, *key: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator at the start of the stream named `key`."""
    import torch

    return torch.Generator(device=device).manual_seed(stream(seed, *key))


def numpy_generator(seed: int, *key: str | int) -> numpy.random.Generator:
    """A numpy generator at the start of the stream named `key`."""
    import numpy

    return numpy.random.default_rng(stream(seed, *key))


def uniform(x: Tensor, low: float, high: float, generator: torch.Generator) -> Tensor:
    """Uniform in [low, high), of the shape and type of x, drawn in the order of the shape, not of memory."""
    import torch

    return torch.empty(x.shape, dtype=x.dtype, device=x.device).uniform_(low, high, generator=generator)


def normal(x: Tensor, generator: torch.Generator) -> Tensor:
    """N(0, 1), of the shape and type of x, drawn in the order of the shape."""
    import torch

    return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)


@contextmanager
def forked(seed: int, *key: str | int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Run code that draws from the global generators (dropout, third-party attacks) inside the stream named `key`.

    The global generators of torch, numpy and Python are seeded on entry and restored on exit.
    """
    import random

    import numpy
    import torch

    device = torch.device(device)
    python_state, numpy_state = random.getstate(), numpy.random.get_state()  # noqa: NPY002
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(stream(seed, *key))
        torch.default_generator.manual_seed(stream(seed, *key))
        random.seed(stream(seed, *key))
        numpy.random.seed(stream(seed, *key) % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)  # noqa: NPY002
