"""The gradient of a loss by the images, in parts that a device takes well. Attacks walk along it, checks look at it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]  # of logits (B, classes) and labels (B,), or what else: a scalar to ascend

# What a CPU takes at once where nothing depends on it: 32 images of CIFAR-10, or as many smaller ones as have as many
# values. The activations of 500 images of NIN are gigabytes, and from 64 on an image takes up to 1.5 times as long; of
# 8x8 pixels 32 images take as long as 64. Larger images are taken by 32 too: halving that gains nothing.
PART = 32 * 3 * 32 * 32


def part_of(x: Tensor) -> int:
    """How many of the images x (B, C, H, W) a model takes at once, if it treats every image for itself."""
    return max(32, PART // max(1, x[:1].numel())) if x.device.type == "cpu" else max(1, len(x))


def predict(model: nn.Module, x: Tensor) -> Tensor:
    """The logits (B, classes) of images x (B, C, H, W); float32 also under autocast, because no loss survives less."""
    logits: Tensor = model(x)
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The sum over images of the cross-entropy of logits (B, classes) and labels (B,)."""
    # Not a mean: the sign is the same, and a division by B could underflow the gradient of a confident image.
    return F.cross_entropy(logits, y, reduction="sum")


def gradient_of(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, part: int) -> tuple[Tensor, Tensor]:
    """The logits (B, classes) of x (B, C, H, W) and the gradient of the loss by x, `part` images at a time."""
    if len(x) > part:
        pairs = zip(x.split(part), y.split(part), strict=True)
        logits, gradients = zip(*(gradient_of(model, loss, *pair, part) for pair in pairs), strict=True)
        return torch.cat(logits), torch.cat(gradients)
    with torch.enable_grad():
        one = predict(model, x.requires_grad_())
        return one, torch.autograd.grad(loss(one, y), x)[0]
