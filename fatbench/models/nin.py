"""Network in Network, the CIFAR-10 model of the SFAT paper (Zhu et al. 2023)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.models.dropout import Dropout
from fatbench.models.shapes import image_side
from fatbench.suite.types import Count


def nin(
    shape: tuple[int, int, int], classes: int, *, width: Count = 192, init: Literal["normal", "he"] = "normal"
) -> nn.Module:
    """Network in Network: nine convolutions, no normalisation, a ReLU on the logits.

    Maps (B, C, H, W) in [0, 1] to (B, classes); H = W >= 4. Channels are `width` everywhere but after the second and
    third convolution, where they are 5 * width // 6 and width // 2: 192, 160 and 96 at the default. At 32 x 32 the
    last pool is the paper's 8 x 8; other sizes end in a mean over whatever is left. The logits are >= 0.

    Biases start at 0. Weights start at N(0, 0.05) as in the paper (`init` "normal"), or at He's N(0, 2 / fan-in)
    ("he"). The paper's deviation suits its width: it passes on about 1 per cent of the input's spread. A narrower
    network would map every image to the same logits and not start to learn, so use "he" with a smaller width.
    Raises ValueError for images that are not square or smaller than 4 x 4, width below 2.

    Source: Lin et al. 2014; Zhu et al. 2023, Table 6 and its released models.py.
    """
    image_side("nin", shape, 4)
    if width < 2:
        raise ValueError(f"nin: width must be at least 2, got {width}")
    return NIN(shape[0], classes, width, init)


def nin_parameters(shape: tuple[int, int, int], classes: int, *, width: int) -> int:
    """The number of trainable parameters."""
    second, third = 5 * width // 6, width // 2
    to_width = width * (25 * shape[0] + 12 * width + 6)  # 5x5 of the images, one 3x3, three 1x1; biases of six layers
    from_width = (width + 1) * (second + classes)  # 1x1 to the second layer, and to the logits
    return to_width + from_width + third * (second + 1 + 25 * width)  # 1x1 to the third layer, 5x5 from it


class NIN(nn.Module):
    """See `nin`."""

    def __init__(self, channels: int, classes: int, width: int, init: str) -> None:
        super().__init__()
        second, third = 5 * width // 6, width // 2
        self.layers = nn.Sequential(
            _First(channels, width, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(width, second, 1),
            nn.ReLU(),
            nn.Conv2d(second, third, 1),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Dropout(0.5),
            nn.Conv2d(third, width, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
            nn.ReLU(),
            nn.AvgPool2d(3, 2, ceil_mode=True),
            Dropout(0.5),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
            nn.ReLU(),
            nn.Conv2d(width, classes, 1),
            nn.ReLU(),
        )
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                if init == "he":
                    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                else:
                    nn.init.normal_(layer.weight, 0.0, 0.05)
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, classes), all >= 0."""
        logits: Tensor = self.layers(x).mean((2, 3))
        return logits


class _First(nn.Conv2d):
    """The first convolution, at the images' size; on a CPU with channels_last, it unfolds the kernel's columns.

    There, the gradient by 3 channels is computed as if they were 16, which takes a tenth of an attack's step; with the
    columns unfolded they are 15. Equal up to rounding.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.is_contiguous():
            return super().forward(x)
        k = self.kernel_size[0]
        padded = F.pad(x, (k // 2, k // 2))
        # (B, k C, H, W): the image moved by each column of the kernel
        moved = torch.cat([padded[..., j : j + x.shape[3]] for j in range(k)], 1)
        weight = self.weight.permute(0, 3, 1, 2).reshape(self.out_channels, -1, k, 1)
        return F.conv2d(moved, weight, self.bias, padding=(k // 2, 0))
