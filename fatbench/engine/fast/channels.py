"""K convolutional networks as one: clients side by side in the channels, every layer once for all of them.

| layer | of one client | of K |
|---|---|---|
| images, features | (B, C, H, W) | (B, K * C, H, W), client by client |
| convolution | (O, C, h, w), g groups | (K * O, C, h, w), K * g groups |
| convolution of single pixels | (O, C, 1, 1) | (K * O, C, 1, 1), a batched product |
| batch norm | C channels | K * C channels |
| linear | (O, F) | (K * O, F), a batched product |
| ReLU, pooling, sums, means over pixels, flattening | | as they are |

This takes as many kernels as one client takes, and the host as long. It is right where channels are dimension 1 from
the images to the logits and nothing else looks at them; `stacks_by_channels` finds out by trying. Other networks go by
vmap.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn

from fatbench.engine.rounds import Tensors
from fatbench.models.dropout import Dropout


class ChannelStack(nn.Module):
    """K models of one architecture as one: images (K * B, C, H, W), client by client, to logits (K * B, classes).

    `tensors`: parameters and buffers by name, (K, ...), which batch norm writes; `leaves`: the parameters `names`, to
    take gradients by, in the same storage; `dropout`: the stream of each client's masks.
    """

    def __init__(self, model: nn.Module, tensors: Tensors, dropout: Sequence[Generator], names: Sequence[str]) -> None:
        super().__init__()
        self.clients = len(dropout)
        self.model = _copy_without_tensors(model)
        for module in self.model.modules():
            if type(module) is nn.Conv2d and _of_single_pixels(module):
                module.__class__ = _Pointwise
                vars(module).update(clients=self.clients)
            elif isinstance(module, nn.Conv2d):
                module.groups *= self.clients
            elif type(module) in EXCHANGED:
                module.__class__ = EXCHANGED[type(module)]
                vars(module).update(clients=self.clients, streams=dropout)
        joined = {name: t.flatten(0, 1) if t.dim() > 1 else t for name, t in tensors.items()}
        self.leaves = [joined[name].requires_grad_() for name in names]
        for name, tensor in joined.items():
            prefix, _, own = name.rpartition(".")
            module = self.model.get_submodule(prefix)
            (module._parameters if own in module._parameters else module._buffers)[own] = tensor  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """(K * B, C, H, W) -> (K * B, classes)."""
        x = x.unflatten(0, (self.clients, -1)).transpose(0, 1).flatten(1, 2).contiguous()  # of one channel it is a view
        logits: Tensor = self.model(x)
        return logits.unflatten(1, (self.clients, -1)).transpose(0, 1).flatten(0, 1)


def _of_single_pixels(conv: nn.Conv2d) -> bool:
    return conv.kernel_size == conv.stride == (1, 1) and conv.groups == 1 and conv.padding == (0, 0)


class _Pointwise(nn.Conv2d):
    """A matrix product for every image and client: libraries are slow at convolutions of many groups."""

    clients: int

    def forward(self, x: Tensor) -> Tensor:
        images, _, height, width = x.shape

        def of_every_image(tensor: Tensor) -> Tensor:
            return tensor.view(self.clients, -1, self.in_channels if tensor.dim() == 4 else 1).repeat(images, 1, 1)

        x, weight = x.reshape(images * self.clients, self.in_channels, -1), of_every_image(self.weight)
        y = torch.bmm(weight, x) if self.bias is None else torch.baddbmm(of_every_image(self.bias), weight, x)
        return y.view(images, -1, height, width)


class _Linear(nn.Linear):
    clients: int

    def forward(self, x: Tensor) -> Tensor:
        return _linear(x, self.weight, self.bias, self.clients)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, clients: int) -> Tensor:
    """x (B, K * F), weight (K * O, F), bias (K * O,) -> (B, K * O)."""
    x, weight = x.unflatten(1, (clients, -1)).transpose(0, 1), weight.unflatten(0, (clients, -1)).transpose(1, 2)
    y = torch.bmm(x, weight) if bias is None else torch.baddbmm(bias.unflatten(0, (clients, 1, -1)), x, weight)
    return y.transpose(0, 1).flatten(1)


class _Dropout(Dropout):
    clients: int

    def uniform(self, x: Tensor) -> Tensor:
        assert self.streams is not None
        shape = (len(x), x.shape[1] // self.clients, *x.shape[2:])
        return torch.cat([torch.rand(shape, device=x.device, generator=stream) for stream in self.streams], 1)


EXCHANGED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: _Linear, Dropout: _Dropout}


def _copy_without_tensors(model: nn.Module) -> nn.Module:
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def stacks_by_channels(
    model: nn.Module,
    state: Tensors,
    x: Tensor,
    by_vmap: Callable[[nn.Module, Tensors, Sequence[Generator], Sequence[str]], nn.Module],
) -> bool:
    """Whether two different clients folded give what they give by vmap, on images x (2 * B, C, H, W), in both modes.

    Logits and the buffers left behind, as near as an ordinary precision allows: a network that does
    not fold is wrong altogether.
    """
    draws = torch.Generator().manual_seed(0)

    def results(form: Callable[..., nn.Module]) -> list[Tensor]:
        tensors = {name: value.clone() for name, value in start.items()}
        together = form(model, tensors, [torch.Generator(x.device).manual_seed(k) for k in (1, 2)], [])
        with torch.no_grad():
            logits = [together.train(training)(x) for training in (True, False)]
        return [*logits, *(value for name, value in tensors.items() if value.is_floating_point())]

    def other(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        return value + 0.1 * torch.rand(value.shape, generator=draws, dtype=value.dtype).to(value.device)

    start = {name: torch.stack([other(value), other(value)]) for name, value in state.items()}
    try:
        pairs = list(zip(results(ChannelStack), results(by_vmap), strict=True))
    except (RuntimeError, ValueError, IndexError):
        return False
    return all(a.shape == b.shape and float((a - b).norm()) <= 0.01 * float(b.norm()) for a, b in pairs)
