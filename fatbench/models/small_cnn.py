"""SmallCNN, the SVHN model of the SFAT paper (Zhu et al. 2023)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.models.dual_norm import with_dual_norm
from fatbench.models.pretrained import load_pretrained
from fatbench.models.shapes import image_side
from fatbench.suite.types import Count, Weights


def small_cnn(
    shape: tuple[int, int, int],
    classes: int,
    *,
    width: Count = 64,
    norm: Literal["one", "dual", "group"] = "one",
    weights: Weights | None = None,
) -> nn.Module:
    """SmallCNN: three blocks of two 3x3 convolutions with batch normalisation, then two linear layers.

    Maps (B, C, H, W) in [0, 1] to (B, classes); H = W >= 8. The blocks have `width`, 2 * width and 3 * width + 4
    channels (64, 128, 196 at the default), the hidden linear layer 4 * width (256); its input follows from the image
    size (3136 at 32 x 32). Batch normalisation precedes the ReLU. Initial weights are PyTorch's.
    `norm: dual` keeps statistics of clean and of attacked images apart (FedRBN), `norm: group` normalises each image by
    itself, all channels together, in place of batches. `weights`: a file with such a model's weights, or a suite's row.
    Raises ValueError for images that are not square or smaller than 8 x 8, or for another model's weights.

    The layers are called batchnorm1_1 and so on as in the release, because `sfat_released` selects by their names.

    Source: Zhu et al. 2023, Table 6 and its released models.py.
    """
    network = SmallCNN(shape[0], image_side("small_cnn", shape, 8), classes, width)
    if norm == "group":
        for name, layer in list(network.named_children()):
            if isinstance(layer, nn.BatchNorm2d):
                setattr(network, name, nn.GroupNorm(1, layer.num_features))
    if norm == "dual":
        with_dual_norm(network)
    if weights is not None:
        load_pretrained("small_cnn", network, weights, None)
    return network


def small_cnn_parameters(shape: tuple[int, int, int], classes: int, *, width: int) -> int:
    """The number of trainable parameters."""
    channels, side, _ = shape
    flattened = (12 * width + 16) * (side // 8) ** 2  # of 3 * width + 4 channels, each to four times the width
    # weights: 9 C w, 9 + 18 + 36 + 54 + 81 = 198 w w; the rest comes from the 4 of 3 w + 4, biases and normalisation
    return width * (9 * channels + 198 * width + 328 + 4 * classes + flattened) + 168 + classes


class SmallCNN(nn.Module):
    """See `small_cnn`."""

    pretrained: dict[str, str] | None = None  # the weights it was initialised with: {source, digest}
    classifier = None  # its weights are among the others

    @property
    def backbone(self) -> nn.Module:
        """What a file of weights fills: all of it."""
        return self

    def __init__(self, channels: int, size: int, classes: int, width: int) -> None:
        super().__init__()
        width1, width2, width3 = width, 2 * width, 3 * width + 4
        self.block1_conv1 = nn.Conv2d(channels, width1, 3, padding=1)
        self.batchnorm1_1 = nn.BatchNorm2d(width1)
        self.block1_conv2 = nn.Conv2d(width1, width1, 3, padding=1)
        self.batchnorm1_2 = nn.BatchNorm2d(width1)
        self.block2_conv1 = nn.Conv2d(width1, width2, 3, padding=1)
        self.batchnorm2_1 = nn.BatchNorm2d(width2)
        self.block2_conv2 = nn.Conv2d(width2, width2, 3, padding=1)
        self.batchnorm2_2 = nn.BatchNorm2d(width2)
        self.block3_conv1 = nn.Conv2d(width2, width3, 3, padding=1)
        self.batchnorm3_1 = nn.BatchNorm2d(width3)
        self.block3_conv2 = nn.Conv2d(width3, width3, 3, padding=1)
        self.batchnorm3_2 = nn.BatchNorm2d(width3)
        self.fc1 = nn.Linear(width3 * (size // 8) ** 2, 4 * width)
        self.fc2 = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, classes)."""
        x = F.relu(self.batchnorm1_1(self.block1_conv1(x)))
        x = F.max_pool2d(F.relu(self.batchnorm1_2(self.block1_conv2(x))), 2)
        x = F.relu(self.batchnorm2_1(self.block2_conv1(x)))
        x = F.max_pool2d(F.relu(self.batchnorm2_2(self.block2_conv2(x))), 2)
        x = F.relu(self.batchnorm3_1(self.block3_conv1(x)))
        x = F.max_pool2d(F.relu(self.batchnorm3_2(self.block3_conv2(x))), 2)
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits
