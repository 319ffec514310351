"""Aggregates the uploads of a training loop outside the engine with one of fatbench's aggregators."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

import numpy
import torch
from torch import Tensor, nn

from fatbench.engine.malicious import finite, tolerates_one
from fatbench.engine.mixing import aggregate as mixing_of
from fatbench.engine.mixing import middle, mix
from fatbench.engine.rounds import Context, Mixing, Problem, Stats, Tensors, Update
from fatbench.errors import SpecError, shown

VECTOR = "vector"  # the name of a plain vector, as the only tensor of a model
OF_BATCH_NORM = "running_mean"  # a buffer that only batch normalisation has


def aggregate(
    aggregator: Callable[..., Mixing],
    uploads: Sequence[Any],
    *,
    sizes: Sequence[int] | None = None,
    losses: Sequence[float] | None = None,
    broadcast: Any = None,
    round: int = 1,
    rounds: int = 2,
    memory: dict[str, Any] | None = None,
    model: nn.Module | None = None,
) -> Any:
    """The next model, of the same type as the uploads: vectors, lists of arrays, state dicts; see `fatbench.aggregate`.

    Raises SpecError if the uploads do not fit each other.
    """
    if not isinstance(uploads, Sequence | Tensor | numpy.ndarray) or isinstance(uploads, str):
        raise SpecError(f"uploads: expected a list with one for each client, got a {type(uploads).__name__}")
    names = () if model is None else tuple(model.state_dict())
    states = [_state(upload, names) for upload in uploads]
    if not states:
        raise SpecError("uploads: expected at least one")
    if memory is not None and not isinstance(memory, dict):
        raise SpecError(f"memory: expected a dictionary, the same in every round, got {shown(memory)}")
    for client, state in enumerate(states):
        _demand_alike("uploads", state, f"at client {client}", states[0])
    counts = [_size(client, n) for client, n in enumerate(_one_per_client("sizes", sizes, [1] * len(states)))]
    stats = (
        [_Missing("losses: this aggregator needs the clients' {}: pass losses, one for each client")] * len(states)
        if losses is None
        else [_stats(client, loss) for client, loss in enumerate(_one_per_client("losses", losses, counts))]
    )
    if broadcast is None:
        start_state = _centre(states, tolerates_one(aggregator, len(states)))
    else:
        start_state = _state(broadcast, names)
        sent = {key: value for key, value in start_state.items() if key in states[0]}  # clients may send a part
        _demand_alike("broadcast", sent, "in it", states[0])
        if not finite(start_state):
            raise SpecError("broadcast: expected finite numbers: its training has diverged")
    network = _network(states[0]) if model is None else model
    updates = [
        Update(client, n, state, client_stats)  # type: ignore[arg-type]
        for client, (n, state, client_stats) in enumerate(zip(counts, states, stats, strict=True))
    ]
    no_labels = torch.zeros(1, dtype=torch.int64)
    shards = [no_labels.expand(n) for n in counts]
    images: Any = _Missing("aggregate: this aggregator needs images, whose {} only a suite says")
    problem = Problem(
        model=network, images=images, labels=no_labels[:0], shards=shards, classes=0, seed=0,
        device=next(iter(start_state.values())).device,
    )  # fmt: skip
    context = Context(round, rounds, problem, start_state, {} if memory is None else memory, 1.0)
    mixing = mixing_of(aggregator, updates, context)
    if memory is not None:
        memory.clear()
        memory.update(mixing.memory)
    return _like(uploads[0], mix(updates, mixing, start_state, network))


def _demand_alike(name: str, state: Tensors, where: str, first: Tensors) -> None:
    """Raise SpecError unless a state has the tensors and shapes of the first client's."""
    shape, first_shape = ({key: tuple(value.shape) for key, value in one.items()} for one in (state, first))
    for key in {**shape, **first_shape}:
        if shape.get(key) != first_shape.get(key):
            raise SpecError(f"{name}: '{key}' has shape {shape.get(key)} {where}, {first_shape.get(key)} at client 0")


class _Missing:
    """Stands for what was not given; raises SpecError, with a part's name in `text`, if the aggregator reads one."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise SpecError(self._text.format(name.replace("_", " ")))


def _stats(client: int, loss: Any) -> Stats:
    """The statistics of a client with this loss. Raises SpecError unless it is a finite number."""
    if not isinstance(loss, SupportsFloat) or isinstance(loss, str) or not math.isfinite(float(loss)):
        raise SpecError(f"losses: expected finite numbers, got {loss} at client {client}")
    return Stats(float(loss), float(loss), 0.0, 1, 1.0, 1, broadcast_loss=float(loss))


def _is_list(upload: Any) -> bool:
    """Whether an upload is a list of arrays, as Flower sends a state dict; numbers in a list are a vector."""
    is_of_arrays = isinstance(upload, list | tuple) and all(isinstance(v, numpy.ndarray | Tensor) for v in upload)
    return is_of_arrays and any(v.ndim for v in upload)


def _state(upload: Any, names: Sequence[str] = ()) -> Tensors:
    """An upload as a state dict; names: of a list's arrays, if they are as many.

    Raises SpecError unless it is a module, a state dict, a list of arrays or a vector.
    """
    if _is_list(upload):
        upload = dict(zip(names if len(names) == len(upload) else map(str, range(len(upload))), upload, strict=True))
    if isinstance(upload, nn.Module):
        upload = upload.state_dict()
    if isinstance(upload, Mapping):
        state = {str(key): torch.as_tensor(value).detach() for key, value in upload.items()}
        if complex_key := next((key for key, value in state.items() if value.is_complex()), None):
            raise SpecError(f"uploads: '{complex_key}' has complex numbers, of which no mean is a model")
        return state
    try:
        vector = torch.as_tensor(upload).detach()
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(
            f"uploads: expected vectors, lists of arrays or state dicts, got a {type(upload).__name__}"
        ) from None
    if vector.is_complex():
        raise SpecError("uploads: expected real numbers, got complex ones")
    return {VECTOR: vector if vector.is_floating_point() else vector.float()}


def _one_per_client(name: str, values: Sequence[Any] | None, default: list[Any]) -> list[Any]:
    if values is None:
        return default
    if not isinstance(values, Sequence | Tensor | numpy.ndarray) or isinstance(values, str):
        raise SpecError(f"{name}: expected a list with one for each client, got {values}")
    if len(values) != len(default):
        raise SpecError(f"{name}: expected {len(default)}, one for each client, got {len(values)}")
    return list(values)


def _size(client: int, n: Any) -> int:
    """A client's number of examples. Raises SpecError unless it is a whole number of at least 1, below 2^53."""
    if not isinstance(n, SupportsFloat) or not 1 <= float(n) < 2**53 or float(n) % 1:
        raise SpecError(f"sizes: expected whole numbers of at least 1, got {n} at client {client}")
    return int(float(n))


def _centre(states: Sequence[Tensors], robust: bool) -> Tensors:
    """The mean of float tensors over the finite states, or with `robust` their median, which no far upload moves.

    Integer tensors are the first one's.
    """
    states = [state for state in states if finite(state)] or states

    def of(values: Tensor) -> Tensor:
        return middle(values.sort(0).values) if robust else values.mean(0)

    return {
        key: of(torch.stack([state[key] for state in states])) if value.is_floating_point() else value
        for key, value in states[0].items()
    }


def _network(state: Tensors) -> nn.Module:
    """A module with these tensors; a submodule with running statistics is batch normalisation."""
    root = nn.Module()
    for key, value in state.items():
        *path, name = key.split(".")
        module = root
        for depth, module_name in enumerate(path):
            if module_name not in module._modules:
                norm = f"{'.'.join(path[: depth + 1])}.{OF_BATCH_NORM}" in state
                module.add_module(module_name, _bare_norm() if norm else nn.Module())
            module = module._modules[module_name]  # type: ignore[assignment]
        buffer = name.startswith("running_") or not value.is_floating_point()
        if buffer:
            module.register_buffer(name, value.clone())
        else:
            module.register_parameter(name, nn.Parameter(value.clone()))
    return root


def _bare_norm() -> nn.Module:
    return nn.BatchNorm2d(1, affine=False, track_running_stats=False)


def _like(upload: Any, state: Tensors) -> Any:
    if isinstance(upload, Mapping | nn.Module):
        return state
    if _is_list(upload):
        return [_like(array, {VECTOR: value}) for array, value in zip(upload, state.values(), strict=True)]
    return state[VECTOR].numpy() if isinstance(upload, numpy.ndarray) else state[VECTOR]
