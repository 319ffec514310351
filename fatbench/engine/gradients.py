"""The gradient of a loss by the images, in parts that a device takes well. Attacks walk along it, checks look at it."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fatbench.engine.memory import out_of_memory
from fatbench.errors import SpecError

log = logging.getLogger("fatbench")

Loss = Callable[[Tensor, Tensor], Tensor]  # of logits (B, classes) and labels (B,), or what else: a scalar to ascend

# What a CPU takes at once where nothing depends on it: 32 images of CIFAR-10, or as many smaller ones as have as many
# values. The activations of 500 images of NIN are gigabytes, and from 64 on an image takes up to 1.5 times as long; of
# 8x8 pixels 32 images take as long as 64. Larger images are taken by 32 too: halving that gains nothing.
PART = 32 * 3 * 32 * 32


FRACTION = 0.75  # of a GPU's free memory may be filled: allocators fragment, and kernels want workspace
FEW = 32  # images are taken at once without asking whether they fit

# model -> the images of one size that fit into a GPU at once, a power of two: the same number where a little is taken
_FITS: WeakKeyDictionary[nn.Module, dict[torch.Size, int]] = WeakKeyDictionary()


class NoGradient(SpecError):
    """A network whose outputs have no gradient by the images."""


@contextlib.contextmanager
def gradient_asked() -> Iterator[None]:
    """Turn what torch says of a loss without a gradient into one message. NoGradient."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad" not in str(error) and "not have been used in the graph" not in str(error):
            raise
        raise NoGradient(
            "the network's outputs have no gradient by the images (no_grad, an arg max or rounding in its forward?): "
            "attacks that follow it cannot be computed"
        ) from None


def part_of(x: Tensor, model: nn.Module) -> int:
    """How many of the images x (B, C, H, W) `model` takes at once, if it treats every image for itself."""
    if x.device.type == "cpu":
        return max(32, PART // max(1, x[:1].numel()))
    if len(x) <= FEW:
        return max(1, len(x))
    fits = _FITS.setdefault(model, {})
    if x.shape[1:] not in fits:
        image_bytes, free_bytes = bytes_of_one(model, x), free_memory(x.device)
        fits[x.shape[1:]] = max(1, 2 ** math.floor(math.log2(max(1.0, FRACTION * free_bytes / max(1, image_bytes)))))
    return min(len(x), fits[x.shape[1:]])


def bytes_of_one(model: nn.Module, x: Tensor) -> float:
    """Bytes of a GPU's memory that the gradient of one image more takes: the peak with `FEW` images, by image."""
    torch.cuda.reset_peak_memory_stats(x.device)
    allocated_before = torch.cuda.memory_allocated(x.device)
    images = x[:FEW].detach().clone()
    gradient_of(model, cross_entropy, images, torch.zeros(len(images), dtype=torch.int64, device=x.device), None)
    return (torch.cuda.max_memory_allocated(x.device) - allocated_before) / len(images)


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory that can be had, with what torch keeps for later."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def in_parts(
    model: nn.Module, limit: int | None, function: Callable[..., tuple[Tensor, ...]], *batch: Tensor
) -> tuple[Tensor, ...]:
    """`function` of the batch (B, ...), at most `limit` images at a time; None: all at once, whatever happens.

    If memory runs out, half as many from then on, down to one; what was computed of them is computed again.
    """
    x = batch[0]
    if limit is None or len(x) <= min(limit, _FITS.get(model, {}).get(x.shape[1:], limit)):
        try:
            return function(*batch)
        except Exception as error:
            if limit is None or len(x) == 1 or not out_of_memory(error):
                raise
        # outside the handler, whose traceback holds what filled the memory
        _FITS.setdefault(model, {})[x.shape[1:]] = len(x) // 2
        log.warning("out of memory with %d images at once; continuing with %d", len(x), len(x) // 2)
        if x.device.type == "cuda":
            torch.cuda.empty_cache()
    size = min(limit, _FITS.get(model, {}).get(x.shape[1:], limit))
    several = [in_parts(model, size, function, *chunk) for chunk in zip(*(t.split(size) for t in batch), strict=True)]
    return tuple(torch.cat(column) for column in zip(*several, strict=True))


def predict(model: nn.Module, x: Tensor) -> Tensor:
    """The logits (B, classes) of images x (B, C, H, W); float32 also under autocast, because no loss survives less."""
    logits: Tensor = model(x)
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The sum over images of the cross-entropy of logits (B, classes) and labels (B,)."""
    # Not a mean: the sign is the same, and a division by B could underflow the gradient of a confident image.
    return F.cross_entropy(logits, y, reduction="sum")


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """The logits (B, classes) of images x (B, C, H, W), without gradients, so many at a time as fit."""
    with torch.no_grad():
        return in_parts(model, part_of(x, model), lambda part: (model(part),), x)[0]


def gradient_of(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, limit: int | None) -> tuple[Tensor, Tensor]:
    """The logits (B, classes) of x (B, C, H, W) and the gradient of the loss by x, `limit` images at a time.

    part None: all at once. NoGradient: it has none.
    """

    def at_once(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            logits = predict(model, x.requires_grad_())
            with gradient_asked():
                return logits, torch.autograd.grad(loss(logits, y), x)[0]

    logits, gradient = in_parts(model, limit, at_once, x, y)
    return logits, gradient
