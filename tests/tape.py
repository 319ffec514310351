"""A recorded step without a GPU: kernels written down as they run, and run again where they stood.

A CUDA graph repeats kernels and knows no Python: same memory, same order, new draws. `Tape` does that with operations
of the CPU. It refuses what a capture refuses, hosts that wait, and what a replay would miss: draws from a generator
that was not named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "unique")

UNSAID = ("running_mean", "running_var")  # what batch norm changes in place without its schema saying so


class Tape(TorchDispatchMode):
    """Writes down all operations inside it, and keeps what they change as it was."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        super().__init__()
        self.known = {generator.initial_seed() for generator in generators}  # a wrapper is made anew for each call
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        if name in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        drawn = [given for given in tree_leaves((args, kwargs)) if isinstance(given, Generator)]
        if any(generator.initial_seed() not in self.known for generator in drawn):
            raise RuntimeError(f"{name} draws from a generator that the graph does not know")
        given = dict(zip((own.name for own in function._schema.arguments), args, strict=False)) | kwargs
        for own in function._schema.arguments:
            if (own.alias_info is not None and own.alias_info.is_write) or own.name in UNSAID:
                for tensor in tensors(given.get(own.name)):
                    storage = tensor.untyped_storage()
                    self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        results = function(*args, **kwargs)
        fresh: list[Tensor] = []
        if not any(own.alias_info for own in function._schema.returns):  # what is no view and no change in place
            fresh = tensors(results)
        self.operations.append((function, args, kwargs, fresh))
        return results

    def pool(self) -> Tape:
        return self

    def replay(self) -> None:
        """Every operation once more, its results where they were."""
        with torch.no_grad():
            for function, args, kwargs, fresh in self.operations:
                results = tensors(function(*args, **kwargs))
                for place, own in zip(fresh, results if fresh else [], strict=True):
                    place.detach().copy_(own)


def tensors(results: Any) -> list[Tensor]:
    return [own for own in tree_leaves(results) if isinstance(own, Tensor)]


def capture(function: Callable[[], Tensor], generators: Sequence[Generator], pool: Any = None) -> tuple[Tape, Tensor]:
    """As `graphs.capture`. To be written down operations must run here: what they changed is put back."""
    generators = [*generators, torch.default_generator]  # which a GPU's graphs know without being told
    positions = [generator.get_state() for generator in generators]
    tape = Tape(generators)
    with tape:
        result = function()
    for storage, before in tape.before.values():
        storage.copy_(before)
    for generator, position in zip(generators, positions, strict=True):
        generator.set_state(position)
    return tape, result
