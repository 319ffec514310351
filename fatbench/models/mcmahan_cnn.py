"""The convolutional network of McMahan et al. for MNIST (AdFL's here)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.models.shapes import image_side
from fatbench.suite.types import Count


def mcmahan_cnn(shape: tuple[int, int, int], classes: int, *, width: Count = 32) -> nn.Module:
    """Two 5x5 convolutions of `width` and 2 * width channels, each with a 2x2 max pool; 16 * width units; ReLU between.

    Maps (B, C, H, W) in [0, 1] to (B, classes); H = W >= 4. With `width` 32, 28 x 28 grey images and 10 classes it has
    the paper's 1,663,370 parameters. Convolutions are padded to keep the side. No normalisation, no dropout. ReLU
    follows the pool, which gives the same result from a quarter of the numbers. Initial weights are PyTorch's.
    Raises ValueError for images that are not square or smaller than 4 x 4.

    Source: McMahan et al. 2017, section 3. Danilenka et al. 2022 do not say which model they used.
    """
    return McMahanCNN(shape[0], image_side("mcmahan_cnn", shape, 4), classes, width)


def mcmahan_cnn_parameters(shape: tuple[int, int, int], classes: int, *, width: int) -> int:
    """The number of trainable parameters."""
    channels, side, _ = shape
    hidden = 32 * width * width * (side // 4) ** 2  # 2 w channels, twice pooled, to 16 w units
    # convolutions of 5x5; biases: 1 + 2 of them, 16 of the hidden layer
    return (25 * channels + 50 * width + 19) * width + hidden + (16 * width + 1) * classes


class McMahanCNN(nn.Module):
    """See `mcmahan_cnn`."""

    def __init__(self, channels: int, size: int, classes: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 5, padding=2)
        self.conv2 = nn.Conv2d(width, 2 * width, 5, padding=2)
        self.fc1 = nn.Linear(2 * width * (size // 4) ** 2, 16 * width)
        self.fc2 = nn.Linear(16 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, classes)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits
