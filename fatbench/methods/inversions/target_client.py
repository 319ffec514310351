"""What target clients send: a gradient or the update of local training, after the defence, in the wire's type."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from fatbench.engine.inject import asks
from fatbench.engine.local import Client, LocalTraining, train_client
from fatbench.engine.rounds import Problem, Tensors
from fatbench.methods.defences import Examples, Upload
from fatbench.methods.inversions.batch_statistics import buffers_of
from fatbench.methods.inversions.upload import Mode, Observation, gradients, observe, trained_gradients

Wire = Literal["float64", "float32", "float16"]


@dataclass(frozen=True)
class ClientImages:
    """The images of V clients: indices into problem.images (V, B), x (V, B, C, H, W) in [0, 1] and y (V, B)."""

    indices: Tensor
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class TargetClient:
    """How every target client computes and sends."""

    problem: Problem
    defence: Callable[..., Any]
    local: LocalTraining | None = None
    wire: Wire = "float32"
    mode: Mode = "eval"
    buffers: Literal["kept", "sent"] = "kept"

    @property
    def needs_all(self) -> bool:
        """Whether the defence needs all tensors, whatever the inversion reads."""
        return any(asks(self.defence, name) for name in ("gradient", "examples"))


def update(
    client: TargetClient,
    model: nn.Module,
    weights: Tensors,
    images: ClientImages,
    names: Sequence[str] | None,
    round: int,
) -> Tensors:
    """{name: (V, ...)}: what V clients have computed, before any defence, and their buffers if they send them.

    Without local training, the gradient by `names` (None: all). Else theta_0 - theta_T of FedAvg's client, with the
    batches that (seed, round, v) draw.
    """
    x = images.x
    if client.wire == "float64":
        model, weights, x = copy.deepcopy(model).double(), _cast(weights, torch.float64), x.double()
    is_sent = client.buffers == "sent"
    if client.local is None and client.mode == "train":
        computed, buffers = trained_gradients(model, weights, x, images.y, names)
        return computed | (buffers if is_sent else {})
    if client.local is None:
        return gradients(model, weights, x, images.y, names)
    problem = replace(client.problem, model=model, shards=list(images.indices))
    if client.wire == "float64":
        client_augment = problem.augment

        def augment(batch: Tensor, views: Generator) -> Tensor:
            return (batch if client_augment is None else client_augment(batch, views)).double()

        problem = replace(problem, augment=augment)
    trained = [train_client(Client(problem, weights, v, round), client.local).model for v in range(len(x))]
    updates = {
        name: torch.stack([weights[name] - trained_state[name] for trained_state in trained])
        for name, _ in model.named_parameters()
        if names is None or name.endswith(tuple(names))
    }
    return updates | {
        name: torch.stack([trained_state[name] for trained_state in trained])
        for name in (buffers_of(model, weights) if is_sent else ())
    }


def observed_upload(
    client: TargetClient,
    model: nn.Module,
    weights: Tensors,
    computed: Tensors,
    images: ClientImages,
    uploads: Sequence[Upload],
) -> Observation:
    """What the server observes of V clients' gradients or updates (V, ...), after the defence and the wire."""

    def examples(v: int) -> Examples:
        x, y = images.x[v], images.y[v]
        return Examples(model, weights, x, y, lambda: gradients(model, weights, x[:, None], y[:, None]), len(y))

    parameters = dict(model.named_parameters())
    buffers = {name: value for name, value in computed.items() if name not in parameters} or None
    computed = {name: value for name, value in computed.items() if name in parameters}
    observation = observe(weights, computed, images.y, client.defence, uploads, examples)
    gradient = observation.gradient
    if client.wire == "float16":
        start = weights if client.local is not None else dict.fromkeys(gradient, torch.zeros(()))
        # a client that trains sends its weights, so these are rounded, not the update
        start_weights = {name: start[name].to(g) for name, g in gradient.items()}
        gradient = {
            name: start_weights[name] - (start_weights[name] - g).half().float() for name, g in gradient.items()
        }
        buffers = buffers and _cast(_cast(buffers, torch.float16), torch.float32)
    return replace(observation, gradient=gradient, local=client.local, mode=client.mode, buffers=buffers)


def _cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
