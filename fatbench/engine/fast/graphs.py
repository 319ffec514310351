"""Steps recorded as CUDA graphs: a GPU repeats all kernels of a step at the price of launching one.

    recorded = record(step, generators)
    loss = recorded(i, j, batch)        what step(i, j, batch) does and gives

A step may be recorded if all it reads and changes are tensors that stay where they are, if it waits for nothing, and if
it draws from `generators` alone. The first calls of each shape run as they are: kernels are chosen then, and what is
made once is made. Then one is recorded, and replayed from there on. A replay draws what the step would have drawn.

On no GPU has this run yet. The tests replay steps on a CPU, operation by operation, by a tape that refuses what a
capture would refuse.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

PLAIN_CALLS = 3  # of a shape before it is recorded: a recording costs as much as some of them


def record(step: Callable[[int, int, Tensor], Tensor], generators: Sequence[Generator]) -> Callable[..., Tensor]:
    """`step(i, j, batch)`, replayed where it comes often enough; `batch` is copied to where the recording reads it."""
    calls: Counter[tuple[int, int, int]] = Counter()
    known: dict[tuple[int, int, int], tuple[Tensor, Any, Tensor]] = {}  # where the batch goes, the graph, its result

    def recorded(i: int, j: int, batch: Tensor) -> Tensor:
        key = (i, j, len(batch))
        calls[key] += 1
        if calls[key] <= PLAIN_CALLS:
            return step(i, j, batch)
        if key not in known:
            own = batch.clone()
            pool = next(iter(known.values()))[1].pool() if known else None
            known[key] = (own, *capture(lambda: step(i, j, own), generators, pool))
        own, graph, result = known[key]
        own.copy_(batch)
        graph.replay()
        return result.clone()

    return recorded


def recording() -> bool:
    """Whether kernels are recorded here and now: then nothing may be asked of the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def capture(function: Callable[[], Tensor], generators: Sequence[Generator], pool: Any) -> tuple[Any, Tensor]:
    """(the graph of the kernels of `function`, the tensor that its result is in). Nothing is computed here.

    pool: the memory of another graph, which may take it over: of a replay only the result is wanted, and that at once.
    """
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():  # from torch 2.12 on generators register themselves, and this only warns
        warnings.simplefilter("ignore")
        for generator in generators:
            graph.register_generator_state(generator)
    with torch.cuda.graph(graph, pool=pool):
        result = function()
    return graph, result
