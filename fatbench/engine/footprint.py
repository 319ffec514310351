"""What training asks of a client's device: parameters, floating-point operations, memory. Counted, nothing is run.

| number | what |
|---|---|
| edge_parameters | parameters that the device trains |
| edge_flops | floating-point operations of one forward pass, per image |
| edge_step_flops | of one forward and one backward pass under standard training, per image |
| edge_memory | bytes: weights and buffers, gradients, the optimiser's moments, what backward needs of one batch |

A model of an edge and a server (`fatbench.models.edge`) is trained on the device up to the edge's own classifier; any
other model is trained there whole. The device is thought of as small: float32, the whole batch at once, and attention
with its matrices, without fused kernels. Multiply and add are two operations; those of convolutions and matrix products
are counted, element by element work is not. Memory is a lower bound: no workspace of a kernel, no allocator.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fatbench.engine.rounds import Problem


def footprint(problem: Problem, batch: int, *, moments: int = 1) -> dict[str, float]:
    """The numbers above for the problem's model at this batch size; the model and its weights are left alone.

    moments: copies of the weights that the optimiser keeps: 0 for SGD, 1 with momentum, 2 for Adam.
    """
    network = _on_the_device(problem.model)
    channels, height, width = problem.images.shape[1:]
    shape = (batch, channels, problem.size or height, problem.size or width)
    parameters = sum(p.numel() for p in network.parameters() if p.requires_grad)
    trained = sum(_bytes(p) for p in network.parameters() if p.requires_grad)
    kept = sum(_bytes(t) for t in (*network.parameters(), *network.buffers()))
    forward, step, activations = _count(network, shape, problem.classes)
    return {
        "edge_parameters": float(parameters),
        "edge_flops": forward / batch,
        "edge_step_flops": step / batch,
        "edge_memory": float(kept + (1 + moments) * trained + activations),
    }


def _on_the_device(model: nn.Module) -> nn.Module:
    """A copy, without storage, of the part that a client trains."""
    part = model
    if hasattr(model, "edge_logits"):
        part = nn.Sequential(model.get_submodule("extractor"), model.get_submodule("classifier"))
    part = copy.deepcopy(part).to("meta", torch.float32)
    for module in part.modules():
        module.__dict__.pop("forward", None)  # what `microbatch.bound` put there: a matter of this machine
    return part


def _count(network: nn.Module, shape: tuple[int, ...], classes: int) -> tuple[int, int, int]:
    """(operations of a forward pass, of a forward and a backward pass, bytes kept between them) of one batch."""
    network.train()
    own = [t.untyped_storage() for t in (*network.parameters(), *network.buffers())]
    known = {id(storage) for storage in own}
    saved: dict[int, torch.UntypedStorage] = {}  # by identity: several layers may keep the same tensor

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in known:
            saved[id(storage)] = storage
        return tensor

    x, y = torch.empty(shape, device="meta"), torch.empty(shape[0], dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = F.cross_entropy(network(x), y)
        forward = counter.get_total_flops()
        activations = sum(storage.nbytes() for storage in saved.values())
        loss.backward()
        return forward, counter.get_total_flops(), activations


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
