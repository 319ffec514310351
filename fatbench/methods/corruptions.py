"""Common corruptions (Hendrycks and Dietterich 2019): evaluation functions that ignore the model.

    x = ATTACKS["corruption"](model, x, y, generator, kind="gaussian_noise", severity=3)

Images are (B, C, H, W) in [0, 1], as for attacks; the result may leave any ball, but stays in the box.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from fatbench.engine.randomness import normal, uniform
from fatbench.errors import MachineError, reason
from fatbench.settings import data_folder
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count

SEVERITIES: dict[str, tuple[float, ...]] = {  # for 32 x 32 images, from hendrycks/robustness, make_cifar_c.py
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg": (80, 65, 58, 50, 40),
}


def corruption(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    generator: Generator,
    *,
    kind: Literal["gaussian_noise", "shot_noise", "impulse_noise", "brightness", "contrast", "pixelate", "jpeg"],
    severity: Count = 1,
) -> Tensor:
    """One of the seven common corruptions that need no other file, at a severity from 1 to 5.

    Noise is drawn from the generator, so it differs from CIFAR-10-C's, which `cifar10_c` reads. The strengths are those
    for images of 32 x 32. `severity: [1, 3, 5]` makes three columns, and `mean:NAME` their mean.

    Source: Hendrycks and Dietterich 2019 (arXiv 1903.12261).
    """
    return CORRUPTIONS[kind](x, SEVERITIES[kind][severity - 1], generator).clamp(0, 1)


def cifar10_c(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    generator: Generator,
    index: Tensor,
    *,
    kind: Literal[
        "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur",
        "snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
        "speckle_noise", "gaussian_blur", "spatter", "saturate",
    ],
    severity: Count = 1,
) -> Tensor:  # fmt: skip
    """The images of CIFAR-10-C in place of the test images, at a severity from 1 to 5.

    The files, such as CIFAR-10-C/fog.npy, are in the data folder. The first 15 kinds are the benchmark, the last four
    are for validation. Raises MachineError if the file is missing or does not hold 50,000 images of 32 x 32.

    Source: Hendrycks and Dietterich 2019 (arXiv 1903.12261).
    """
    import numpy

    file = data_folder() / "CIFAR-10-C" / f"{kind}.npy"
    try:
        file_images = numpy.load(file, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise MachineError(
            f"{file}: {reason(error, file)}; CIFAR-10-C is at https://zenodo.org/records/2535967"
        ) from None
    if file_images.shape != (50_000, 32, 32, 3):
        raise MachineError(f"{file}: expected 50,000 images of 32 x 32, found an array {file_images.shape}")
    rows = 10_000 * (severity - 1) + index.cpu().numpy()  # a file holds the five severities one after the other
    images = torch.from_numpy(file_images[rows]).permute(0, 3, 1, 2)
    return torch.empty_like(x).copy_(images.to(x) / 255)


def five_severities(*, severity: int) -> str | None:
    return f"severity: expected 1 to 5, got {severity}" if severity > 5 else None


def test_images_of_cifar10(cell: Facts) -> str | None:
    if cell.data.name != "cifar10" or cell.side != 32:
        return f"cifar10_c holds the test images of cifar10 at 32 x 32, not those of {cell.data.name}"
    return None


def _gaussian_noise(x: Tensor, strength: float, generator: Generator) -> Tensor:
    return x + strength * normal(x, generator)


def _shot_noise(x: Tensor, strength: float, generator: Generator) -> Tensor:
    return torch.poisson(x * strength, generator=generator) / strength


def _impulse_noise(x: Tensor, strength: float, generator: Generator) -> Tensor:
    """Salt and pepper: each value turns white or black with this probability."""
    draws = uniform(x, 0.0, 1.0, generator)
    return torch.where(draws < strength, (draws < strength / 2).to(x.dtype), x)


def _brightness(x: Tensor, strength: float, generator: Generator) -> Tensor:
    """Raise the value of HSV; hue and saturation stay."""
    value = x.amax(1, keepdim=True)
    raised = (value + strength).clamp(max=1)
    return torch.where(value > 0, x * raised / value.clamp(min=1e-12), raised)


def _contrast(x: Tensor, strength: float, generator: Generator) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * strength + mean


def _pixelate(x: Tensor, strength: float, generator: Generator) -> Tensor:
    from PIL import Image

    def coarse(image: Image.Image) -> Image.Image:
        small = (int(image.width * strength), int(image.height * strength))
        return image.resize(small, Image.Resampling.BOX).resize(image.size, Image.Resampling.BOX)

    return _change_each(x, coarse)


def _jpeg(x: Tensor, strength: float, generator: Generator) -> Tensor:
    from PIL import Image

    def compressed(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=int(strength))
        return Image.open(file)

    return _change_each(x, compressed)


def _change_each(x: Tensor, change: Callable[..., object]) -> Tensor:
    """Apply `change` to each image, of one or three channels, at eight bits."""
    import numpy
    from PIL import Image

    byte_images = (x * 255).round().to("cpu", torch.uint8).permute(0, 2, 3, 1).numpy()
    changed = [
        numpy.asarray(change(Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)))
        for pixels in byte_images
    ]
    images = torch.from_numpy(numpy.stack(changed)).reshape(len(x), *x.shape[2:], x.shape[1]).permute(0, 3, 1, 2)
    return torch.empty_like(x).copy_(images.to(x) / 255)


CORRUPTIONS: dict[str, Callable[[Tensor, float, Generator], Tensor]] = {
    "gaussian_noise": _gaussian_noise,
    "shot_noise": _shot_noise,
    "impulse_noise": _impulse_noise,
    "brightness": _brightness,
    "contrast": _contrast,
    "pixelate": _pixelate,
    "jpeg": _jpeg,
}
