"""The convolutional network of LEAF for CelebA (Zhu et al. 2023, Table 19)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.models.shapes import image_side
from fatbench.suite.types import Count


def leaf_cnn(shape: tuple[int, int, int], classes: int, *, width: Count = 32) -> nn.Module:
    """LEAF's CelebA network: four times 3x3 convolution, batch normalisation, 2x2 max pool, ReLU; one linear layer.

    Maps (B, C, H, W) in [0, 1] to (B, classes); H = W >= 2, 84 in LEAF. The pools round up, as the "same" padding of
    the original does: 84 -> 42 -> 21 -> 11 -> 6, and 8 -> 4 -> 2 -> 1 -> 1, so that tiny images need no exception.
    Here, batch normalisation uses its running statistics in eval mode; the original always uses those of the batch,
    which lets the images of a batch influence each other's predictions. Initial weights are PyTorch's.
    Raises ValueError for images that are not square or smaller than 2 x 2.

    Source: Caldas et al. 2018 (LEAF), models/celeba/cnn.py. Zhu et al. 2023 do not say which model they used.
    """
    return LeafCNN(shape[0], image_side("leaf_cnn", shape, 2), classes, width)


def leaf_cnn_parameters(shape: tuple[int, int, int], classes: int, *, width: int) -> int:
    """The number of trainable parameters."""
    channels, side, _ = shape
    flattened = width * ((side + 15) // 16) ** 2  # four pools that round up
    # four convolutions of 3x3, each with a bias and normalisation: (1 + 2) * 4 = 12
    return 9 * channels * width + 27 * width * width + 12 * width + (flattened + 1) * classes


class LeafCNN(nn.Module):
    """See `leaf_cnn`."""

    def __init__(self, channels: int, size: int, classes: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width, 3, padding=1)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv4 = nn.Conv2d(width, width, 3, padding=1)
        self.bn4 = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width * ((size + 15) // 16) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, classes)."""
        x = F.relu(F.max_pool2d(self.bn1(self.conv1(x)), 2, ceil_mode=True))
        x = F.relu(F.max_pool2d(self.bn2(self.conv2(x)), 2, ceil_mode=True))
        x = F.relu(F.max_pool2d(self.bn3(self.conv3(x)), 2, ceil_mode=True))
        x = F.relu(F.max_pool2d(self.bn4(self.conv4(x)), 2, ceil_mode=True))
        logits: Tensor = self.fc(x.flatten(1))
        return logits
