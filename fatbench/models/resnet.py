"""ResNet-18 for small images, the CIFAR-100 model of the SFAT paper (Zhu et al. 2023)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.models.dual_norm import with_dual_norm
from fatbench.models.shapes import image_side
from fatbench.suite.types import Count


def resnet18(
    shape: tuple[int, int, int], classes: int, *, width: Count = 64, norm: Literal["one", "dual"] = "one"
) -> nn.Module:
    """ResNet-18 with the CIFAR stem: 3x3, stride 1, no pool; basic blocks [2, 2, 2, 2].

    Maps (B, C, H, W) in [0, 1] to (B, classes); H = W >= 8. The stages have `width`, 2, 4 and 8 times as many channels
    (64 to 512 at the default). At 32 x 32 the last pool is 4 x 4; other sizes end in a mean over whatever is left.
    Initial weights are PyTorch's. `norm: dual` keeps statistics of clean and of attacked images apart (FedRBN).
    Raises ValueError for images that are not square or smaller than 8 x 8.

    The layers are called bn1, bn2 and shortcut.1 as in the release, because `sfat_released` selects by their names.

    Source: He et al. 2016 in the form of the SFAT release's models.py.
    """
    image_side("resnet18", shape, 8)
    network = ResNet(shape[0], classes, width)
    return with_dual_norm(network) if norm == "dual" else network


def resnet18_parameters(shape: tuple[int, int, int], classes: int, *, width: int) -> int:
    """The number of trainable parameters."""
    # 3x3 and 1x1 convolutions of the four stages: 36 + 128 + 512 + 2048 = 2724; normalisation: 2 * (5 + 10 + 20 + 40)
    return 9 * shape[0] * width + 2724 * width * width + 150 * width + (8 * width + 1) * classes


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) -> (B, width, ceil(H / stride), ceil(W / stride))."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """See `resnet18`."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(BasicBlock(width, width, 1), BasicBlock(width, width, 1))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(BasicBlock(2 * width, 4 * width, 2), BasicBlock(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(BasicBlock(4 * width, 8 * width, 2), BasicBlock(8 * width, 8 * width, 1))
        self.linear = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits
