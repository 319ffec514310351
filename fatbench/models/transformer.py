"""What the vision transformers share: normalisation, backbone, head; and the checks of their shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fatbench.models.heads import ClsHead
from fatbench.models.shapes import image_side

# (mean, std) per colour, in units of the [0, 1] pixel range
NORMALISATIONS = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # timm's ViT and TNT
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # T2T-ViT
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}


class Transformer(nn.Module):
    """A backbone and a head: images (B, C, H, W) in [0, 1] to logits (B, classes).

    `backbone` maps normalised images to tokens (B, 1 + N, D), the class token first, and has `blocks`. Mean and std are
    no part of the state: no client uploads them and no aggregator sees them. Grey images are normalised by the mean
    of the three colours' values.
    """

    mean: Tensor
    std: Tensor
    pretrained: dict[str, str] | None = None  # the weights it was initialised with: {source, digest}

    def __init__(self, backbone: nn.Module, head: nn.Module, normalise: str, channels: int) -> None:
        super().__init__()
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in NORMALISATIONS[normalise])
        if channels != 3:  # grey
            mean, std = mean.mean(1, keepdim=True), std.mean(1, keepdim=True)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        self.backbone = backbone
        self.head = head
        self.attentions = [module for module in backbone.modules() if hasattr(module, "fused_attn")]  # timm's
        self.logit_layers = tuple(f"head.{name}" for name in head.logit_layers)  # type: ignore[union-attr]

    @property
    def blocks(self) -> nn.ModuleList:
        """The backbone's blocks, first to last."""
        return self.backbone.blocks  # type: ignore[return-value]

    @property
    def classifier(self) -> nn.Linear | None:
        """The layer for a published classifier: only a CLS head has one."""
        return self.head.fc if isinstance(self.head, ClsHead) else None

    def tokens(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] -> (B, 1 + N, D), after the last LayerNorm."""
        tokens: Tensor = self.backbone((x - self.mean) / self.std)
        return tokens

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] -> (B, classes)."""
        # On a CPU in bfloat16, fused attention with its backward pass takes 1.2 (197 tokens) to 1.6 times (65) as long.
        fused = x.device.type != "cpu" or not torch.is_autocast_enabled("cpu")
        for attention in self.attentions:
            attention.fused_attn = fused  # type: ignore[assignment]
        logits: Tensor = self.head(self.tokens(x))
        return logits


def check_grid(model: str, shape: tuple[int, int, int], patch: int, head: str) -> int:
    """The side of square images. Raises ValueError if patches of `patch` pixels do not tile them, or are too few."""
    size = image_side(model, shape, patch)
    if size % patch:
        raise ValueError(f"{model}: patches of {patch}x{patch} do not tile images of {size}x{size}")
    if head == "cls_vis" and size == patch:
        raise ValueError(
            f"{model}: head cls_vis needs at least two patches, got images of {size}x{size}, patch {patch}"
        )
    return size


def check_heads(model: str, dim: int, heads: int, setting: str = "dim") -> None:
    """Raise ValueError if `dim` is not a multiple of the number of attention heads."""
    if dim % heads:
        raise ValueError(f"{model}: {setting} {dim} is not a multiple of its {heads} attention heads")
