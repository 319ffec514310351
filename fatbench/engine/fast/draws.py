"""Batches that hold several clients, one after the other: every client draws from its own stream and has its own loss.

`fatbench.engine.fast.clients` trains K clients as one program: a batch is (K * B, ...), and in place of a generator
there are `Streams`. An attack never mixes images, so it runs on such a batch as it is, if it draws by the functions
here; an objective also takes its means by `per_client`. With a plain generator each of these is what it would be
without K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor


class Streams(Generator):
    """The generators of K clients, in the order in which their images lie in a batch.

    Itself a generator that must not be drawn from: if its state has changed, something took K clients for one.
    """

    clients: Sequence[Generator]

    def __new__(cls, clients: Sequence[Generator]) -> Streams:
        """All on one device."""
        self = super().__new__(cls, device=clients[0].device)  # type: ignore[call-arg]
        self.clients = clients
        return self

    def __init__(self, clients: Sequence[Generator]) -> None:
        pass


def clients_of(generator: Generator) -> Sequence[Generator]:
    """One generator per client of the batch; a plain one stands for itself."""
    return generator.clients if isinstance(generator, Streams) else (generator,)


def uniform(x: Tensor, low: float, high: float, generator: Generator) -> Tensor:
    """Uniform in [low, high), of the shape (B, ...) and type of x, drawn in the order of the shape, not of memory."""
    if isinstance(generator, Streams):
        parts = x.chunk(len(generator.clients))
        return torch.cat([uniform(part, low, high, g) for part, g in zip(parts, generator.clients, strict=True)])
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).uniform_(low, high, generator=generator)


def normal(x: Tensor, generator: Generator) -> Tensor:
    """N(0, 1), of x's shape and type, in the order of the shape."""
    if isinstance(generator, Streams):
        parts = x.chunk(len(generator.clients))
        return torch.cat([normal(part, g) for part, g in zip(parts, generator.clients, strict=True)])
    return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)


def subset(x: Tensor, size: int, generator: Generator) -> Tensor:
    """Places of `size` different images drawn from every client's part of the batch x, (K * size,)."""
    if isinstance(generator, Streams):
        each = len(x) // len(generator.clients)
        parts = [subset(x[:each], size, g) + k * each for k, g in enumerate(generator.clients)]
        return torch.cat(parts)
    return torch.randperm(len(x), generator=generator, device=x.device)[:size]


def per_client(loss: Callable[..., Tensor], generator: Generator, *batch: Tensor) -> Tensor:
    """`loss(*batch)`, a scalar; (K,) for several clients, each from one client's part of every tensor of the batch."""
    if not isinstance(generator, Streams):
        return loss(*batch)
    losses: Tensor = torch.vmap(loss)(*(tensor.unflatten(0, (len(generator.clients), -1)) for tensor in batch))
    return losses
