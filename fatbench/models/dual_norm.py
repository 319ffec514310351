"""Batch normalisation with two sets of statistics, for clean and for attacked images (Hong et al. 2023, FedRBN)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def with_dual_norm(network: nn.Module) -> nn.Module:
    """Give each layer of 2D batch normalisation two sets of statistics; the network predicts with the clean ones.

    Both share the layer's weight and bias. Source: illidanlab/FedRBN nets/dual_bn.py.
    """
    for name, module in list(network.named_modules()):
        if type(module) is nn.BatchNorm2d:  # not one that has two already
            parent, _, attribute = name.rpartition(".")
            setattr(network.get_submodule(parent), attribute, DualBatchNorm2d(module))
    return network


class DualBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation as `layer` is, with a second pair of running statistics."""

    attacked_mean: Tensor
    attacked_var: Tensor
    attacked = False  # which pair is used

    def __init__(self, layer: nn.BatchNorm2d) -> None:
        super().__init__(layer.num_features, layer.eps, layer.momentum, layer.affine)
        self.load_state_dict(layer.state_dict())
        self.register_buffer("attacked_mean", torch.zeros(layer.num_features))
        self.register_buffer("attacked_var", torch.ones(layer.num_features))

    def train(self, mode: bool = True) -> DualBatchNorm2d:
        """As for any module, but also return to the clean statistics, with which an evaluation begins."""
        self.attacked = False
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the same."""
        if not self.attacked:
            return super().forward(x)
        assert self.momentum is not None
        return F.batch_norm(
            x, self.attacked_mean, self.attacked_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )


@contextlib.contextmanager
def on_attacked_images(model: nn.Module) -> Iterator[None]:
    """A context in which the network uses the statistics of attacked images, until its mode changes."""
    use_statistics(model, attacked=True)
    try:
        yield
    finally:
        use_statistics(model, attacked=False)


def use_statistics(model: nn.Module, *, attacked: bool) -> None:
    """Use the statistics of attacked or of clean images until the network's mode changes."""
    for module in model.modules():
        if isinstance(module, DualBatchNorm2d):
            module.attacked = attacked
