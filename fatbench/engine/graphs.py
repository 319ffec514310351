"""Steps recorded as CUDA graphs: a GPU repeats all kernels of a step at the price of launching one.

    recordings = Recordings()
    weights, noise = recordings.hold("weights", own), recordings.stream("attack", client.stream("attack"))
    take = recordings.step(key, step, changed)
    loss = take(batch)                  what step(batch) does and returns

A step may be recorded if all tensors that it reads and changes keep their addresses, if it never waits for the device,
and if it draws only from the recordings' streams and the device's own generator. The first calls of each shape run
unrecorded, while kernels are chosen and caches are filled. Then one call is recorded, and replayed for every client and
round. A replay draws what the step would have drawn. Before its first use, the step and its replay run from the same
state; if they differ by more than rounding, steps stay unrecorded, and the log says so.

The tests replay steps on a CPU, operation by operation, by a tape that refuses what a capture would refuse.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from fatbench.engine.memory import out_of_memory

log = logging.getLogger("fatbench")

MOST_STEPS = 4  # with different settings: each round of FedProx needs its own
ROUNDING = 0.2  # bf16 kernels sum in another order each time, and an attack steps by the sign
PLAIN_CALLS = 3  # of each shape before it is recorded: a recording costs as much as a few calls


class NotRecorded(RuntimeError):
    """A step cannot be recorded: it waits for the device, or does what a capture does not allow."""


class Recordings:
    """The recorded steps of a problem's clients, and the fixed buffers that they read."""

    def __init__(self) -> None:
        self.held: dict[Hashable, list[Tensor]] = {}
        self.streams: dict[str, Generator] = {}
        self.copies: dict[str, nn.Module] = {}
        self.steps: dict[Hashable, Callable[[Tensor], Tensor]] = {}

    def hold(self, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy `tensors` into the buffers `name` of their shapes, which keep their addresses, and return these."""
        key = name, *(t.shape for t in tensors)  # others may have a recording that reads them
        buffers = self.held.setdefault(key, [t.detach().clone() for t in tensors])
        for buffer, value in zip(buffers, tensors, strict=True):
            buffer.copy_(value)
        return buffers

    def stream(self, name: str, generator: Generator) -> Generator:
        """The generator `name`, the same object for every client, seeded as `generator` was."""
        held_stream = self.streams.setdefault(name, Generator(generator.device))
        return held_stream.manual_seed(generator.initial_seed())

    def copy(self, name: str, model: nn.Module) -> nn.Module:
        """The frozen copy `name` of the model in eval mode, at the same address for every client."""
        if name not in self.copies:
            self.copies[name] = copy.deepcopy(model).eval().requires_grad_(False)
        else:
            self.copies[name].load_state_dict(model.state_dict())
        return self.copies[name]

    def step(
        self, key: Hashable, step: Callable[[Tensor], Tensor], changed: Sequence[Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """The recorded step of this key. One serves all clients: their steps change the same tensors, `changed`."""
        if key not in self.steps:
            if len(self.steps) == MOST_STEPS:
                del self.steps[next(iter(self.steps))]
            self.steps[key] = record(step, list(self.streams.values()), changed)
        return self.steps[key]


def record(
    step: Callable[[Tensor], Tensor], generators: Sequence[Generator], changed: Sequence[Tensor]
) -> Callable[[Tensor], Tensor]:
    """`step(batch)`, recorded after a few calls; `batch` is copied to where the recording reads it."""
    calls: Counter[int] = Counter()
    recordings: dict[int, tuple[Tensor, Any, Tensor]] = {}  # {batch size: (buffer of the batch, graph, its result)}
    refused = False

    def recorded(batch: Tensor) -> Tensor:
        nonlocal refused
        length = len(batch)
        calls[length] += 1
        if refused or calls[length] <= PLAIN_CALLS:
            return step(batch)
        if length not in recordings:
            held_batch = batch.clone()
            pool = next(iter(recordings.values()))[1].pool() if recordings else None
            graph, result = capture(lambda: step(held_batch), generators, pool)
            loss, distance = checked(
                lambda: step(held_batch), graph.replay, [*generators, _default(batch.device)], changed
            )
            if refused := not distance <= ROUNDING:
                log.warning("a recorded step is %.2g of itself away from the step: steps are not recorded", distance)
            else:
                recordings[length] = (held_batch, graph, result)
            return loss
        held_batch, graph, result = recordings[length]
        held_batch.copy_(batch)
        graph.replay()
        return result.clone()

    return recorded


def checked(
    step: Callable[[], Tensor], replay: Callable[[], object], generators: Sequence[Generator], changed: Sequence[Tensor]
) -> tuple[Tensor, float]:
    """Run the replay, then the step from the same state; (the step's result, their distance / the step's length)."""
    values_before, positions = [t.clone() for t in changed], [generator.get_state() for generator in generators]
    replay()
    replayed = [t.clone() for t in changed]
    with torch.no_grad():
        for tensor, value in zip(changed, values_before, strict=True):
            tensor.copy_(value)
    for generator, position in zip(generators, positions, strict=True):
        generator.set_state(position)
    loss = step()

    def distance(values: Sequence[Tensor]) -> float:
        squares = [(a.double() - b.double()).square().sum() for a, b in zip(changed, values, strict=True)]
        return float(torch.stack(squares).sum().sqrt())

    deviation = distance(replayed)
    return loss, deviation / moved if (moved := distance(values_before)) else float(deviation > 0)


def _default(device: torch.device) -> Generator:
    """The generator that layers such as dropout draw from; a graph registers it by itself."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def capture(function: Callable[[], Tensor], generators: Sequence[Generator], pool: Any) -> tuple[Any, Tensor]:
    """Record the kernels of `function` without running them; (the graph, the tensor that holds its result).

    pool: another graph's memory to share, which is safe because the result is copied before the next replay. Raises
    NotRecorded if `function` waits for the device, and RuntimeError if memory runs out.
    """
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():  # from torch 2.12 on generators register themselves, and this only warns
        warnings.simplefilter("ignore")
        for generator in generators:
            graph.register_generator_state(generator)
    try:
        with torch.cuda.graph(graph, pool=pool):
            result = function()
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise NotRecorded(f"a step cannot be recorded ({reason})") from error
    return graph, result
