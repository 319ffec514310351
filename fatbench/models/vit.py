"""Vision Transformer on timm's blocks (Aldahdooh et al. 2022)."""

from __future__ import annotations

from typing import Literal

from torch import nn

from fatbench.models import heads as heads_module
from fatbench.models.heads import cls_vis_parameters
from fatbench.models.lora import adapt
from fatbench.models.pretrained import load_pretrained
from fatbench.models.transformer import Transformer, check_grid, check_heads
from fatbench.suite.types import Count, Natural, Weights

TIMM = {(16, 384, 12, 6, 4): "vit_small_patch16_224", (16, 768, 12, 12, 4): "vit_base_patch16_224"}


def vit(
    shape: tuple[int, int, int],
    classes: int,
    *,
    head: Literal["cls", "vis", "cls_vis"] = "cls",
    patch: Count = 16,
    dim: Count = 384,
    depth: Count = 12,
    heads: Count = 6,
    mlp: Count = 4,
    d1: Count | None = None,
    d2: Count | None = None,
    head_norm: Literal["bn", "ln", "none"] = "bn",
    head_start: Literal["timm", "kaiming"] = "timm",
    normalise: Literal["half", "imagenet", "none"] = "half",
    weights: Weights | None = None,
    lora: Natural | None = None,
) -> nn.Module:
    """Vision Transformer; ViT-S/16 at the defaults, ViT-B/16 with dim 768 and heads 12.

    Maps (B, C, H, W) in [0, 1] to (B, classes); H = W, a multiple of `patch`. `depth` blocks of `heads` attention heads
    and an MLP `mlp` times as wide as `dim`, a class token, learned positions. No dropout, no drop path.

    `head`: which tokens are classified (fatbench/models/heads.py); `d1`, `d2`, `head_norm`, `head_start` belong to
    cls_vis, whose paper starts it with "kaiming".
    `normalise`: pixel mean and std, 0.5 and 0.5 ("half", those of timm's weights) or ImageNet's.
    `weights`: None, from scratch; "timm", those of timm's vit_small_patch16_224 or vit_base_patch16_224; "timm/TAG",
    those of a tag; or a file with such a model's weights (fatbench/suite/weights.py says how a suite names them; of a
    file, here its path). Positions are interpolated, the classifier is new unless it fits.
    `lora`: None, all trains; else the backbone is frozen, and its linear layers train changes of this rank (Hu et al.
    2022); 0: the head alone trains.

    Raises ValueError for images that are not square or not tiled by the patches, dim not a multiple of heads, or
    another model's weights, and MachineError for weights that cannot be fetched or read.

    Source: Dosovitskiy et al. 2021; Aldahdooh et al. 2022, Tables 1-3.
    """
    from timm.models.vision_transformer import VisionTransformer  # here, because it takes seconds

    size = check_grid("vit", shape, patch, head)
    check_heads("vit", dim, heads)
    backbone = VisionTransformer(
        img_size=size,
        patch_size=patch,
        in_chans=shape[0],
        num_classes=0,
        global_pool="",
        embed_dim=dim,
        depth=depth,
        num_heads=heads,
        mlp_ratio=mlp,
    )
    model = Transformer(
        backbone,
        heads_module.build(head, dim, classes, d1=d1, d2=d2, norm=head_norm, start=head_start),
        normalise,
        shape[0],
    )
    if weights is not None:
        load_pretrained("vit", model, weights, TIMM.get((patch, dim, depth, heads, mlp)), position="pos_embed")
    if lora is not None:
        adapt(backbone, lora)
    return model


def vit_parameters(
    shape: tuple[int, int, int],
    classes: int,
    *,
    patch: int,
    dim: int,
    depth: int,
    mlp: int,
    head: str,
    d1: int | None,
    d2: int | None,
    head_norm: str,
    lora: int | None,
) -> int:
    """The number of trainable parameters."""
    channels, side, _ = shape
    head_layers = (dim + 1) * classes + cls_vis_parameters(
        classes, dim=dim, head=head, d1=d1, d2=d2, head_norm=head_norm
    )
    if lora is not None:  # two matrices beside queries, keys and values, the projection, and two layers of the MLP
        return depth * lora * dim * (4 + 2 + 2 * (1 + mlp)) + head_layers
    # a token of each patch and its position; 5: bias, class token, its position, scale and shift of the last LayerNorm
    embedding = dim * (channels * patch * patch + (side // patch) ** 2 + 5)
    # queries, keys, values and projection: 4 dim dim; biases of all, and two LayerNorms: mlp + 9
    blocks = depth * ((2 * mlp + 4) * dim * dim + (mlp + 9) * dim)
    return embedding + blocks + head_layers
