"""Gradient matching: search the image whose gradient has the direction of the one that was sent. For any model.

    min over x in [0, 1]   1 - cos(grad L(x, y), g) + tv TV(x)

This is what is usually meant by inverting a gradient, though the papers here do not compare with it. It needs neither a
transformer nor learned positions. Its gradients are taken in eval mode, as `upload.gradients` are. Geiping et al. 2020
(arXiv 2003.14053), equation 4: Adam on the signs of the
gradient, its rate divided by ten after 3/8, 5/8 and 7/8 of the steps, the image clamped to the box after each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fatbench.engine.optimizers import Descent, Moments, step
from fatbench.methods.inversions.upload import Observation, Tensors, differentiable
from fatbench.suite.entry import Passes
from fatbench.suite.types import Count, NonNegative, Rate


def matching(
    observed: Sequence[Observation],
    model: nn.Module,
    shape: tuple[int, int, int],
    generator: Generator,
    *,
    steps: Count = 1000,
    lr: Rate = 0.1,
    tv: NonNegative = 0.01,
    zeros: Literal["as_sent", "ignored"] = "as_sent",
) -> Tensor:
    """Images whose gradient has the direction of the one that was sent: (V, B, C, H, W) in [0, 1].

    B is the number of labels of an upload; the distances of several rounds are added. All gradients of the upload are
    matched; `tv` weights the mean absolute difference of neighbouring pixels. `zeros`: zero entries are matched as
    zeros, or ignored (an attacker who knows that a defence withholds some). The labels are those of the observation:
    told, or restored from the update.
    """
    model.eval()
    reconstructions = []
    for v in range(len(observed[0].labels)):
        labels = observed[0].labels[v]
        device = labels.device
        x = torch.rand(len(labels), *shape, generator=generator, device=generator.device).to(device)
        moments: Moments = {}
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
            for i in range(steps):
                x.requires_grad_()
                loss = sum(
                    _cosine_distance(model, s.weights, x, labels, {n: g[v] for n, g in s.gradient.items()}, zeros)
                    for s in observed
                )
                roughness = x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()
                (slope,) = torch.autograd.grad(loss + tv * roughness, x)
                x = x.detach()
                decay = 0.1 ** sum(i >= steps * eighths // 8 for eighths in (3, 5, 7))
                moments = step([x], [slope.sign()], moments, Descent("adam", lr * decay))
                x.clamp_(0, 1)
        reconstructions.append(x)
    return torch.stack(reconstructions)


def every_step(observed_rounds: int, *, steps: int) -> Passes:
    """For each observed round: a forward pass, the gradient by the weights, and the gradient of that by the image."""
    return observed_rounds * steps * Passes(1, 2)


def _cosine_distance(model: nn.Module, weights: Tensors, x: Tensor, y: Tensor, target: Tensors, zeros: str) -> Tensor:
    guessed_gradient = differentiable(model, weights, x, y, target)
    if zeros == "ignored":
        guessed_gradient = {name: g * (target[name] != 0) for name, g in guessed_gradient.items()}
    inner_product = torch.stack([(g * target[name]).sum() for name, g in guessed_gradient.items()]).sum()
    lengths = torch.stack([g.square().sum() for g in guessed_gradient.values()]).sum().sqrt()
    target_norm = torch.stack([g.square().sum() for g in target.values()]).sum().sqrt()
    return 1 - inner_product / (lengths * target_norm).clamp(min=1e-30)
