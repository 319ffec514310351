"""What training costs a client's device: parameters, floating-point operations, memory.

| number | what |
|---|---|
| edge_parameters | parameters that the device trains |
| edge_flops | floating-point operations of one forward pass, per image |
| edge_step_flops | of one forward and one backward pass under standard training, per image |
| edge_memory | bytes: weights and buffers, gradients, the optimizer's moments, what backward needs of one batch |

A model of an edge and a server (`fatbench.models.edge`) is trained on the device up to the edge's own classifier; any
other model is trained there as a whole. The device is assumed to be small: float32, the whole batch at once, and
attention with its matrices, without fused kernels. Convolutions and matrix products are counted (multiply and add are
two operations), elementwise operations are not. Memory is a lower bound: without kernels' workspaces and allocators.

Two batches, of 2 and of 3 images of zeros, go through a copy of the network on the CPU; all counts are linear in the
batch. Without storage (`device="meta"`) torch computes shapes in Python, and imports its compiler to do so.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fatbench.engine.counters import Flops
from fatbench.engine.gradients import demand_logits
from fatbench.engine.rounds import Problem


def footprint(problem: Problem, batch: int, *, moments: int = 1) -> dict[str, float]:
    """The numbers above for the problem's model at this batch size; the model is not changed.

    moments: copies of the weights that the optimizer keeps: 0 for SGD, 1 with momentum, 2 for Adam.
    """
    network = _on_the_device(problem.model)
    channels, height, width = problem.images.shape[1:]
    image = (channels, problem.size or height, problem.size or width)
    parameters = sum(p.numel() for p in network.parameters() if p.requires_grad)
    trained = sum(_bytes(p) for p in network.parameters() if p.requires_grad)
    model_bytes = sum(_bytes(t) for t in (*network.parameters(), *network.buffers()))
    with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
        two, three = (_count(network, (images, *image)) for images in (2, 3))
    # linear in the batch, so two sizes give every other
    forward, step, activations = (a + (batch - 2) * (b - a) for a, b in zip(two, three, strict=True))
    return {
        "edge_parameters": float(parameters),
        "edge_flops": forward / batch,
        "edge_step_flops": step / batch,
        "edge_memory": float(model_bytes + (1 + moments) * trained + activations),
    }


def _on_the_device(model: nn.Module) -> nn.Module:
    """A copy on the CPU of the part that a client trains."""
    client_model = model
    if hasattr(model, "edge_logits"):
        client_model = nn.Sequential(model.get_submodule("extractor"), model.get_submodule("classifier"))
    client_model = copy.deepcopy(client_model).to("cpu", torch.float32)
    for module in client_model.modules():
        module.__dict__.pop("forward", None)  # `microbatch.bound` put it there, for this machine
    return client_model


class _Matrices(TorchFunctionMode):
    """Computes attention with its matrices in this thread only: `sdpa_kernel` would switch the whole process."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_attention_math(*args, **(kwargs or {}))[0]
        return func(*args, **(kwargs or {}))


def _count(network: nn.Module, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(operations of a forward pass, of a forward and a backward pass, bytes kept between them) of one batch."""
    network.train()
    storages = [t.untyped_storage() for t in (*network.parameters(), *network.buffers())]
    model_storages = {storage.data_ptr() for storage in storages}
    saved: dict[int, Tensor] = {}  # by storage: several layers may keep the same one

    def save(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in model_storages:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x, y = torch.zeros(shape), torch.zeros(shape[0], dtype=torch.int64)
    with Flops() as flops, _Matrices(), torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            loss = F.cross_entropy(demand_logits(network(x)), y)
        forward = flops.total
        activations = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
        loss.backward()
    network.zero_grad()
    return forward, flops.total, activations


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
