"""A network's fingerprint: its logits for a few images, which distinguish networks that share their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.engine.randomness import forked

IMAGES = 8  # the first of the test images
CLASSES = 100  # whose logits are kept one by one; the logsumexp covers the others
PIXELS = 256  # for which the sign of the gradient is kept, in each image
NOISE = 8 / 255  # added to every second image: networks that round their input may differ only off the clean images
ROUNDING = 1e-2  # of an image's largest gradient: below it, a unit at the edge of its ReLU may flip the sign


def answers(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """The logits and the signs of the loss gradient at images x (B, C, H, W) in [0, 1] with labels y (B,).

    Every second image gets noise of up to `NOISE`. Returns {"logits": ..., "signs": ...}, as `store.fingerprints`
    reads it, or {"random": True} if a second pass with the same seed gives other logits. The network runs in eval mode
    and is left as it was.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    x = x.detach().clone()
    noise = torch.rand(x[1::2].shape, generator=torch.Generator().manual_seed(0)).to(x)
    x[1::2] += NOISE * (2 * noise - 1)
    try:
        with torch.enable_grad():
            return _answers(model, x.clamp_(0, 1).requires_grad_(), y)
    finally:
        for module, mode in modes.items():
            module.training = mode


def _answers(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    with forked(0, "answers", device=x.device):
        logits = model(x)
    with torch.no_grad(), forked(0, "answers", device=x.device):
        second_logits = model(x)
    largest = logits.detach().nan_to_num(posinf=0, neginf=0).abs().amax()
    if not torch.allclose(logits.detach(), second_logits, rtol=0, atol=1e-4 * float(largest), equal_nan=True):
        return {"random": True}
    kept_logits = torch.cat([logits[:, :CLASSES], logits.logsumexp(1, keepdim=True)], dim=1).detach().double().cpu()
    rounded_logits = [
        [float(f"{v:.6g}") if abs(v) < float("inf") else None for v in image] for image in kept_logits.tolist()
    ]
    return {"logits": rounded_logits, "signs": _signs(logits, x, y)}


def _signs(logits: Tensor, x: Tensor, y: Tensor) -> list[str]:
    """The signs of the loss gradient, as text of "+", "-" and "0" for each image; empty without a gradient."""
    if not logits.requires_grad:
        return []
    loss = F.cross_entropy(logits, y, reduction="sum")
    gradient: Tensor | None = torch.autograd.grad(loss, x, allow_unused=True)[0]
    if gradient is None:
        return []
    flat = gradient.nan_to_num(0, 0, 0).flatten(1)
    threshold = ROUNDING * flat.abs().amax(1, keepdim=True)
    signs = torch.where(flat.abs() > threshold, flat.sign(), 0)[:, :: max(1, flat.shape[1] // PIXELS)]
    return ["".join("0+-"[int(sign)] for sign in image) for image in signs.tolist()]
