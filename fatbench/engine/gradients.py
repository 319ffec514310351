"""The gradient of a loss with respect to the images, computed in parts that fit the device."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fatbench.engine.memory import out_of_memory
from fatbench.errors import SpecError

log = logging.getLogger("fatbench")

Loss = Callable[
    [Tensor, Tensor], Tensor
]  # from logits (B, classes) and labels (B,) to a scalar that the attack increases

# Numbers in a part on a CPU: those of 32 images of CIFAR-10, or of as many more smaller images. The activations of 500
# images of NIN take gigabytes, and from 64 images on, each takes up to 1.5 times as long. At 8x8 pixels, 64 images take
# as long as 32. Parts of larger images have 32 images, too: fewer gains nothing.
PART = 32 * 3 * 32 * 32


FRACTION = 0.75  # of a GPU's free memory: allocators fragment, and kernels need workspace
FEW = 32  # images that are computed at once without asking whether they fit

# {model: {image shape: how many fit into a GPU at once}}: powers of two, so that a little memory in use changes nothing
_FITS: WeakKeyDictionary[nn.Module, dict[torch.Size, int]] = WeakKeyDictionary()


class NoGradient(SpecError):
    """The network's outputs have no gradient with respect to the images."""


@contextlib.contextmanager
def gradient_asked() -> Iterator[None]:
    """Raise NoGradient, with one clear message, in place of torch's errors about a missing gradient."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad" not in str(error) and "not have been used in the graph" not in str(error):
            raise
        raise NoGradient(
            "the network's outputs have no gradient by the images (no_grad, an arg max or rounding in its forward?): "
            "gradient attacks cannot be computed"
        ) from None


def part_of(x: Tensor, model: nn.Module) -> int:
    """How many of the images x (B, C, H, W) are computed at once, for a model that treats each image on its own."""
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
    """GPU memory in bytes that the gradient of each further image takes: the peak of `FEW` images, divided by them."""
    torch.cuda.reset_peak_memory_stats(x.device)
    allocated_before = torch.cuda.memory_allocated(x.device)
    images = x[:FEW].detach().clone()
    gradient_of(model, cross_entropy, images, torch.zeros(len(images), dtype=torch.int64, device=x.device), None)
    return (torch.cuda.max_memory_allocated(x.device) - allocated_before) / len(images)


def free_memory(device: torch.device) -> int:
    """Free memory of a GPU in bytes, with what torch has cached."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def in_parts(
    model: nn.Module, limit: int | None, function: Callable[..., tuple[Tensor, ...]], *batch: Tensor
) -> tuple[Tensor, ...]:
    """`function` of the batch (B, ...), at most `limit` images at a time; None: all at once.

    If memory runs out, half as many are computed at once from then on, down to one.
    """
    x = batch[0]
    if limit is None or len(x) <= min(limit, _FITS.get(model, {}).get(x.shape[1:], limit)):
        try:
            return function(*batch)
        except Exception as error:
            if limit is None or len(x) == 1 or not out_of_memory(error):
                raise
        # outside the handler: the traceback keeps the tensors that filled the memory alive
        _FITS.setdefault(model, {})[x.shape[1:]] = len(x) // 2
        log.warning("out of memory with %d images at once; continuing with %d", len(x), len(x) // 2)
        if x.device.type == "cuda":
            torch.cuda.empty_cache()
    size = min(limit, _FITS.get(model, {}).get(x.shape[1:], limit))
    results = [in_parts(model, size, function, *chunk) for chunk in zip(*(t.split(size) for t in batch), strict=True)]
    return tuple(torch.cat(tensors) for tensors in zip(*results, strict=True))


def demand_logits(outputs: Any) -> Tensor:
    """What a network returned. Raises SpecError, in words, unless it is logits (B, classes)."""
    if isinstance(outputs, Tensor) and outputs.dim() == 2:
        return outputs
    returned = f"a tensor {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
    raise SpecError(f"the model returns {returned}, not logits (B, classes)")


def predict(model: nn.Module, x: Tensor) -> Tensor:
    """The logits (B, classes) of images x (B, C, H, W); float32 also under autocast: losses need the precision."""
    logits = demand_logits(model(x))
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The sum over images of the cross-entropy of logits (B, classes) and labels (B,)."""
    # Not a mean: the sign is the same, and a division by B could underflow the gradient of a confident image.
    return F.cross_entropy(logits, y, reduction="sum")


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """The logits (B, classes) of images x (B, C, H, W), without gradients, as many at a time as fit."""
    with torch.no_grad():
        return in_parts(model, part_of(x, model), lambda part: (demand_logits(model(part)),), x)[0]


def gradient_of(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, limit: int | None) -> tuple[Tensor, Tensor]:
    """The logits (B, classes) of x (B, C, H, W) and the gradient of the loss by x, `limit` images at a time.

    limit None: all at once. Raises NoGradient if there is none.
    """

    def at_once(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            logits = predict(model, x.requires_grad_())
            with gradient_asked():
                return logits, torch.autograd.grad(loss(logits, y), x)[0]

    logits, gradient = in_parts(model, limit, at_once, x, y)
    return logits, gradient
