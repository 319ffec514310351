"""Models of an edge and a server: a small device runs the front of a network, a server the rest (Tao et al. 2022).

| paper | here | what |
|---|---|---|
| W_e | extractor | the edge's feature extractor, images (B, C, H, W) -> features H (B, c, h, w) |
| W_c | classifier | the edge's own classifier on these features |
| W_t, W_s | server | the server's network on these features |

`forward(x)` is server(extractor(x)), the deployed model; `edge_logits(x)` is classifier(extractor(x)), the device's own
prediction. The names of an edge's tensors begin with "extractor." or "classifier.". The `whole_*` models are the same
networks without a classifier, for algorithms that train all of it on the device (FedAvg, FedAUX).

The shallow ResNet-18 is its first convolution and first stage; the classifier of that edge is the other three stages.
Residual and attention blocks are timm's, imported when one is built. No model here normalises its input (the paper does
not say). Initial weights are PyTorch's; a transformer's are timm's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import torch
from torch import Tensor, nn

from fatbench.models.resnet import BasicBlock
from fatbench.models.shapes import image_side, untiled
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count

Shape = tuple[int, int, int]


def edge_vit(
    shape: Shape,
    classes: int,
    *,
    width: Count = 64,
    stem: Literal[3, 7] = 3,
    dim: Count = 768,
    depth: Count = 12,
    heads: Count = 12,
    patch: Count = 4,
    takes: Count | None = None,
) -> nn.Module:
    """FedVKD: a shallow ResNet-18 on the edge, a vision transformer with a distillation token on the server.

    Maps (B, C, H, W) in [0, 1] to (B, classes), the mean of both heads; H = W >= 8. The edge emits (width, H, W), or
    (width, H / 4, W / 4) with `stem` 7, the ImageNet stem (stride 2 and a pool; 3: stride 1, no pool). A convolution of
    `patch` x `patch` with that stride makes tokens of `dim` numbers; a class token, a distillation token and learned
    positions are added; `depth` blocks of `heads` heads; one linear head on each of the two tokens. The defaults are
    ViT-B on 32 x 32 images; Xiao et al. 2021 use 11 blocks beside a stem of convolutions. `takes`: channels that the
    server takes, by default what the edge emits. Raises ValueError for images that are not square or smaller than 8 x
    8, for `dim` not a multiple of `heads`, or if the edge emits another shape than the server takes.

    Source: Tao et al. 2022, section 3.3; Touvron et al. 2021 for the two tokens. The projection is on the server, so
    that the extractor's output is sent, as in the paper's equations.
    """
    extractor = _shallow(shape, width, stem, "edge_vit")
    server = _vit(
        "edge_vit", extractor, shape, classes, channels=takes or width, dim=dim, depth=depth, heads=heads, patch=patch
    )
    return EdgeServer(extractor, _remaining_stages(width, classes), server, ("server.head", "server.head_dist"))


def whole_vit(
    shape: Shape,
    classes: int,
    *,
    width: Count = 64,
    stem: Literal[3, 7] = 3,
    dim: Count = 768,
    depth: Count = 12,
    heads: Count = 12,
    patch: Count = 4,
) -> nn.Module:
    """The network that `edge_vit` deploys, as one: the hybrid transformer of the paper's FedAvg (ViT) and FedAUX (ViT).

    Settings, shapes and errors as in `edge_vit`.

    Source: Tao et al. 2022, section 4.1.
    """
    extractor = _shallow(shape, width, stem, "whole_vit")
    server = _vit(
        "whole_vit", extractor, shape, classes, channels=width, dim=dim, depth=depth, heads=heads, patch=patch
    )
    return Whole(extractor, server, ("server.head", "server.head_dist"))


def edge_resnet(
    shape: Shape,
    classes: int,
    *,
    width: Count = 64,
    stem: Literal[3, 7] = 3,
    planes: Count = 16,
    blocks: Count = 12,
    takes: Count | None = None,
) -> nn.Module:
    """FedGKT in the FedVKD paper: a shallow ResNet-18 on the edge, a bottleneck ResNet-109 on the server.

    Maps (B, C, H, W) in [0, 1] to (B, classes); H = W >= 8. The server has three stages of `blocks` bottleneck blocks
    with `planes`, 2 and 4 times as many planes (12 blocks: 3 * 12 * 3 convolutions and a linear layer, hence 109), and
    no stem. FedGKT's takes 16 channels; here it takes what the edge emits, unless `takes` says otherwise. The first
    block of every stage has a 1x1 convolution on its shortcut. `stem` as in `edge_vit`. Raises ValueError for images
    that are not square or smaller than 8 x 8, or if the edge emits another shape than the server takes.

    Source: Tao et al. 2022, section 4.1 ("ResNet-109", "ResNet-113"); He et al. 2020; differences: fedvkd-layers.
    """
    extractor = _shallow(shape, width, stem, "edge_resnet")
    server = _bottlenecks(
        "edge_resnet", extractor, shape, classes, channels=takes or width, planes=planes, blocks=blocks
    )
    return EdgeServer(extractor, _remaining_stages(width, classes), server, ("server.fc",))


def edge_resnet8(
    shape: Shape,
    classes: int,
    *,
    width: Count = 16,
    planes: Count = 16,
    blocks: Count = 6,
    takes: Count | None = None,
    start: Literal["torch", "kaiming"] = "torch",
) -> nn.Module:
    """FedGKT's own pair: ResNet-8 on the edge, a bottleneck ResNet-55 on the server.

    Maps (B, C, H, W) in [0, 1] to (B, classes). The edge emits the output of its 3x3 stem, (width, H, W); its
    classifier is two bottleneck blocks of `width` planes and a linear layer. The server as in `edge_resnet`.
    start: initial weights of convolutions, "torch" (torch's own) or "kaiming" (FedML: normal of variance 2 / fan-out).
    After batch norm the output is the same, but a step of the same size changes torch's weights up to 20 times as much.
    Raises ValueError for images that are not square, or if the edge emits another shape than the server takes.

    Source: He et al. 2020, in the form of FedML's `resnet8_56` and `resnet56_server`.
    """
    image_side("edge_resnet8", shape, 4)
    extractor = nn.Sequential(OrderedDict(_stem(shape[0], width, 3)))
    classifier = nn.Sequential(_stage(width, width, 2, 1), *_classifier_layers(4 * width, classes).values())
    server = _bottlenecks(
        "edge_resnet8", extractor, shape, classes, channels=takes or width, planes=planes, blocks=blocks
    )
    if start == "kaiming":
        for module in nn.ModuleList((extractor, classifier, server)).modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return EdgeServer(extractor, classifier, server, ("server.fc",))


def whole_resnet(
    shape: Shape, classes: int, *, width: Count = 64, stem: Literal[3, 7] = 3, planes: Count = 16, blocks: Count = 12
) -> nn.Module:
    """The network that `edge_resnet` deploys, as one: the "ResNet-113" that FedAvg (CNN) and FedAUX (CNN) train.

    Settings, shapes and errors as in `edge_resnet`. 113 = 109 + 4, but the extractor has five convolutions.

    Source: Tao et al. 2022, section 4.1; differences: fedvkd-layers.
    """
    extractor = _shallow(shape, width, stem, "whole_resnet")
    return Whole(
        extractor,
        _bottlenecks("whole_resnet", extractor, shape, classes, channels=width, planes=planes, blocks=blocks),
        ("server.fc",),
    )


def whole_edge(shape: Shape, classes: int, *, width: Count = 64, stem: Literal[3, 7] = 3) -> nn.Module:
    """The edge's own network, extractor and classifier, as one: the ResNet-18 that a device trains without a server.

    Settings, shapes and errors as in `edge_vit`.

    Source: Tao et al. 2022, Figure 5.
    """
    return Whole(_shallow(shape, width, stem, "whole_edge"), _remaining_stages(width, classes), ("server.fc",))


def edge_vit_parameters(shape: Shape, classes: int, *, width: int, stem: int, dim: int, depth: int, patch: int) -> int:
    """The number of trainable parameters of edge and server."""
    server = _vit_size(_feature_side(shape[1], stem) // patch, classes, width, dim, depth, patch)
    return _shallow_size(shape[0], width, stem) + _remaining_stages_size(width, classes) + server


def whole_vit_parameters(shape: Shape, classes: int, *, width: int, stem: int, dim: int, depth: int, patch: int) -> int:
    """The number of trainable parameters."""
    server = _vit_size(_feature_side(shape[1], stem) // patch, classes, width, dim, depth, patch)
    return _shallow_size(shape[0], width, stem) + server


def edge_resnet_parameters(shape: Shape, classes: int, *, width: int, stem: int, planes: int, blocks: int) -> int:
    """The number of trainable parameters of edge and server."""
    return shallow_edge(shape, classes, width=width, stem=stem)[0] + _bottlenecks_size(classes, width, planes, blocks)


def edge_resnet8_parameters(shape: Shape, classes: int, *, width: int, planes: int, blocks: int) -> int:
    """The number of trainable parameters of edge and server."""
    return resnet8_edge(shape, classes, width=width)[0] + _bottlenecks_size(classes, width, planes, blocks)


def whole_resnet_parameters(shape: Shape, classes: int, *, width: int, stem: int, planes: int, blocks: int) -> int:
    """The number of trainable parameters."""
    return _shallow_size(shape[0], width, stem) + _bottlenecks_size(classes, width, planes, blocks)


def whole_edge_parameters(shape: Shape, classes: int, *, width: int, stem: int) -> int:
    """The number of trainable parameters."""
    return _shallow_size(shape[0], width, stem) + _remaining_stages_size(width, classes)


def shallow_edge(shape: Shape, classes: int, *, width: int, stem: int) -> tuple[int, int]:
    """(trainable parameters, features of an image) of the edge of `edge_vit` and `edge_resnet`."""
    features = width * _feature_side(shape[1], stem) ** 2
    return _shallow_size(shape[0], width, stem) + _remaining_stages_size(width, classes), features


def resnet8_edge(shape: Shape, classes: int, *, width: int) -> tuple[int, int]:
    """(trainable parameters, features of an image) of the edge of `edge_resnet8`."""
    # the stem, then two bottlenecks of 18 and 17 width * width; 34: their normalisations
    return width * (9 * shape[0] + 35 * width + 34) + (4 * width + 1) * classes, width * shape[1] ** 2


def _shallow_size(channels: int, width: int, stem: int) -> int:
    return width * (stem * stem * channels + 36 * width + 10)  # the stem, four of 3x3, five normalisations


def _remaining_stages_size(width: int, classes: int) -> int:
    # three stages: 128 + 512 + 2048 = 2688, as in `resnet18_parameters`
    return width * (2688 * width + 140) + (8 * width + 1) * classes


def _vit_size(tokens: int, classes: int, width: int, dim: int, depth: int, patch: int) -> int:
    blocks = depth * (12 * dim + 13)  # as in `vit_parameters` with an MLP four times as wide
    # 7: bias of the patches, two tokens with a position each, scale and shift of the last LayerNorm
    return dim * (patch * patch * width + 7 + blocks + tokens * tokens) + 2 * (dim + 1) * classes


def _bottlenecks_size(classes: int, width: int, planes: int, blocks: int) -> int:
    # planes of the stages are 1, 2 and 4 times `planes`: 17 * (1 + 4 + 16) = 357, 12 * (1 + 2 + 4) = 84
    later_blocks = (blocks - 1) * (357 * planes + 84)
    # first blocks, with a shortcut: 13 + 92 + 368 = 473 beside what takes the edge's features
    return planes * (5 * width + 473 * planes + 140 + later_blocks) + (16 * planes + 1) * classes


def _feature_side(side: int, stem: int) -> int:
    """The side of the features that an edge emits."""
    return side * 4 // (3 * stem - 5)


def features_tiled(cell: Facts, *, stem: int, patch: int) -> str | None:
    return untiled(patch, _feature_side(cell.side, stem))


def trained_by_edges(cell: Facts) -> str | None:
    if "edge" not in cell.algorithm.parts:
        whole_model = "whole_vit" if "distillation head" in cell.model.parts else "whole_resnet"
        return f"{cell.algorithm.name} needs a model without an edge ({whole_model}?), not {cell.model.name}"
    return None


class Whole(nn.Module):
    """An extractor and the network behind it, trained as one. `logit_layers` names the modules that emit logits."""

    def __init__(self, extractor: nn.Module, server: nn.Module, logit_layers: tuple[str, ...]) -> None:
        super().__init__()
        self.extractor = extractor
        self.server = server
        self.logit_layers = logit_layers

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, classes), the deployed prediction."""
        logits: Tensor = self.server(self.extractor(x))
        return logits


class EdgeServer(Whole):
    """An edge (extractor and classifier) and a server behind the same extractor."""

    def __init__(
        self, extractor: nn.Module, classifier: nn.Module, server: nn.Module, logit_layers: tuple[str, ...]
    ) -> None:
        super().__init__(extractor, server, logit_layers)
        self.classifier = classifier

    def extract(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> features (B, c, h, w), which are sent."""
        features: Tensor = self.extractor(x)
        return features

    def edge_logits(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, classes), the device's own prediction."""
        logits: Tensor = self.classifier(self.extractor(x))
        return logits


# --- edges -------------------------------------------------------------------------------------------------------


def _stem(channels: int, width: int, side: int) -> dict[str, nn.Module]:
    stride = 1 if side == 3 else 2
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(channels, width, side, stride, padding=side // 2, bias=False),
        "bn1": nn.BatchNorm2d(width),
        "relu": nn.ReLU(),
    }
    return layers if side == 3 else {**layers, "maxpool": nn.MaxPool2d(3, 2, padding=1)}


def _shallow(shape: Shape, width: int, stem: int, name: str) -> nn.Module:
    """ResNet-18 up to its first stage: (B, C, H, W) -> (B, width, H, W), a quarter of the side with stem 7."""
    image_side(name, shape, 8)
    layer1 = nn.Sequential(BasicBlock(width, width, 1), BasicBlock(width, width, 1))
    return nn.Sequential(OrderedDict({**_stem(shape[0], width, stem), "layer1": layer1}))


def _remaining_stages(width: int, classes: int) -> nn.Module:
    """ResNet-18 behind its first stage: (B, width, h, w) -> (B, classes)."""
    stages = {
        f"layer{i + 1}": nn.Sequential(
            BasicBlock(2 ** (i - 1) * width, 2**i * width, 2), BasicBlock(2**i * width, 2**i * width, 1)
        )
        for i in (1, 2, 3)
    }
    return nn.Sequential(OrderedDict({**stages, **_classifier_layers(8 * width, classes)}))


def _classifier_layers(width: int, classes: int) -> dict[str, nn.Module]:
    return {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(width, classes)}


# --- servers -----------------------------------------------------------------------------------------------------


def _vit(
    name: str,
    extractor: nn.Module,
    shape: Shape,
    classes: int,
    *,
    channels: int,
    dim: int,
    depth: int,
    heads: int,
    patch: int,
) -> nn.Module:
    """timm's distilled vision transformer on features; in eval mode it returns the mean of both heads."""
    if dim % heads:
        raise ValueError(f"{name}: dim {dim} is not a multiple of heads {heads}")
    side = max(patch, _feature_shape(extractor, shape)[1] // patch * patch)  # whole patches only
    _check_feature_shape(name, extractor, shape, (channels, side, side))
    from timm.models.deit import VisionTransformerDistilled

    server: nn.Module = VisionTransformerDistilled(
        img_size=side,
        patch_size=patch,
        in_chans=channels,
        num_classes=classes,
        embed_dim=dim,
        depth=depth,
        num_heads=heads,
    )
    return server


def _bottlenecks(
    name: str, extractor: nn.Module, shape: Shape, classes: int, *, channels: int, planes: int, blocks: int
) -> nn.Module:
    """Three stages of bottleneck blocks on features, strides 1, 2, 2: (B, channels, h, w) -> (B, classes)."""
    _, height, width = _feature_shape(extractor, shape)
    _check_feature_shape(name, extractor, shape, (channels, height, width))
    stages = {
        "layer1": _stage(channels, planes, blocks, 1),
        "layer2": _stage(4 * planes, 2 * planes, blocks, 2),
        "layer3": _stage(8 * planes, 4 * planes, blocks, 2),
    }
    return nn.Sequential(OrderedDict({**stages, **_classifier_layers(16 * planes, classes)}))


def _stage(channels: int, planes: int, blocks: int, stride: int) -> nn.Sequential:
    from timm.models.resnet import Bottleneck

    shortcut = nn.Sequential(nn.Conv2d(channels, 4 * planes, 1, stride, bias=False), nn.BatchNorm2d(4 * planes))
    return nn.Sequential(
        Bottleneck(channels, planes, stride, shortcut), *(Bottleneck(4 * planes, planes) for _ in range(blocks - 1))
    )


def _feature_shape(extractor: nn.Module, shape: Shape) -> tuple[int, ...]:
    """The shape (c, h, w) of the features of one image."""
    extractor.eval()  # a pass in training mode would change the running statistics
    with torch.no_grad():
        feature_shape = tuple(extractor(torch.zeros(1, *shape)).shape[1:])
    extractor.train()
    return feature_shape


def _check_feature_shape(name: str, extractor: nn.Module, shape: Shape, takes: Shape) -> None:
    feature_shape = _feature_shape(extractor, shape)
    if feature_shape != takes:
        raise ValueError(f"{name}: the edge emits features of shape {feature_shape}, the server takes {takes}")
