"""Augmentations against a loop over the images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fatbench.engine.randomness import generator
from fatbench.methods.augmentations import AUGMENTS, crop_flip


def slow(x: torch.Tensor, noise: torch.Generator, padding: int, flip: bool) -> torch.Tensor:
    """One image at a time: pad with zeros, cut out, mirror."""
    n, channels, height, width = x.shape
    top, left = torch.randint(0, 2 * padding + 1, (2, n, 1), generator=noise)
    mirrored = torch.rand((n, 1), generator=noise) < 0.5 if flip else torch.zeros(n, 1)
    result = torch.zeros_like(x)
    for i in range(n):
        padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=x.dtype)
        padded[:, padding : padding + height, padding : padding + width] = x[i]
        image = padded[:, int(top[i]) : int(top[i]) + height, int(left[i]) : int(left[i]) + width]
        result[i] = image.flip(2) if mirrored[i] else image
    return result


@pytest.mark.parametrize("shape", [(5, 3, 8, 8), (1, 1, 6, 9), (40, 2, 32, 32)])
@pytest.mark.parametrize(("padding", "flip"), [(0, True), (2, True), (4, False), (4, True)])
def test_crop_flip_is_the_loop(shape: tuple[int, ...], padding: int, flip: bool) -> None:
    x = torch.rand(shape, generator=generator(0, "x"))
    fast = crop_flip(x, generator(0, "noise"), padding=padding, flip=flip)
    assert torch.equal(fast, slow(x, generator(0, "noise"), padding, flip))


def test_every_offset_and_both_sides() -> None:
    """A single lit pixel in the middle of 5 x 5 with padding 1: it lands on each of the nine places about it."""
    x = torch.zeros(3000, 1, 5, 5)
    x[:, :, 2, 2] = 1
    where = crop_flip(x, generator(0), padding=1).mean(0)[0]
    torch.testing.assert_close(where[1:4, 1:4], torch.full((3, 3), 1 / 9), rtol=0, atol=0.025)
    assert where.sum() == pytest.approx(1)
    edge = torch.zeros(3000, 1, 1, 4)
    edge[..., 0] = 1
    assert crop_flip(edge, generator(0), padding=0).mean(0)[0, 0, 3] == pytest.approx(0.5, abs=0.03)


def test_nothing_to_do_is_the_image() -> None:
    x = torch.rand(4, 3, 8, 8)
    assert torch.equal(crop_flip(x, generator(0), padding=0, flip=False), x)


class Calls(TorchDispatchMode):
    """How many operations of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", AUGMENTS)
def test_every_augmentation(name: str) -> None:
    """Shape, dtype, memory format and range are kept, the input too; the same stream gives the same images, layout or
    not; nothing is drawn from the global generator; there are as many calls of torch for 2 images as for 20."""
    x = torch.rand(20, 3, 8, 8)
    before, state = x.clone(), torch.get_rng_state()
    calls = []
    results = []
    for images in (x, x.contiguous(memory_format=torch.channels_last), x[:2]):
        with Calls() as counted:
            y = AUGMENTS[name](images, generator(3, "noise"), padding=2)
        calls.append(counted.total)
        assert (y.shape, y.dtype, y.stride()) == (images.shape, images.dtype, images.stride())
        assert y.min() >= 0 and y.max() <= 1
        results.append(y)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], AUGMENTS[name](x, generator(4, "noise"), padding=2))
    assert torch.equal(x, before)
    assert torch.equal(state, torch.get_rng_state())
    assert calls[0] == calls[2]
