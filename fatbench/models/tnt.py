"""Transformer in Transformer on timm's blocks (Aldahdooh et al. 2022)."""

from __future__ import annotations

from typing import Literal

from torch import nn

from fatbench.models import heads as heads_module
from fatbench.models.heads import cls_vis_parameters
from fatbench.models.pretrained import load_pretrained
from fatbench.models.transformer import Transformer, check_grid, check_heads
from fatbench.suite.types import Count, Weights

TIMM = {
    (16, 4, 384, 24, 12, 6, 4, 4, False): "tnt_s_patch16_224",
    (16, 4, 384, 24, 12, 6, 4, 4, True): "tnt_s_legacy_patch16_224",
}


def tnt(
    shape: tuple[int, int, int],
    classes: int,
    *,
    head: Literal["cls", "vis", "cls_vis"] = "cls",
    patch: Count = 16,
    pixels: Count = 4,
    dim: Count = 384,
    inner: Count = 24,
    depth: Count = 12,
    heads: Count = 6,
    inner_heads: Count = 4,
    mlp: Count = 4,
    legacy: bool = False,
    d1: Count | None = None,
    d2: Count | None = None,
    head_norm: Literal["bn", "ln", "none"] = "bn",
    head_start: Literal["timm", "kaiming"] = "timm",
    normalise: Literal["half", "imagenet", "none"] = "half",
    weights: Weights | None = None,
) -> nn.Module:
    """Transformer in Transformer; TNT-S at the defaults.

    Maps (B, C, H, W) in [0, 1] to (B, classes); H = W, a multiple of `patch`. Each patch is also a sequence of
    `pixels` x `pixels` "pixels" of `inner` channels, from a 7x7 convolution within the patch of stride patch / pixels.
    A block attends among the pixels of each patch (`inner_heads` heads, an MLP 4 times as wide), adds them, projected,
    to the patch's token of `dim` channels, and attends among the tokens (`heads` heads, an MLP `mlp` times as wide).
    With patch 4 each pixel is one of the image's. A class token, learned positions. No dropout, no drop path.
    `legacy`: timm's network of before May 2025, which normalises pixels one by one before they are projected, and whose
    7x7 windows look over the border of a patch (differences: tnt-weights).

    `head` and its settings, `normalise` and `weights` as for `vit`; "timm": tnt_s_patch16_224 or
    tnt_s_legacy_patch16_224.

    Raises ValueError for images that are not square or not tiled by the patches, patch not a multiple of pixels, dim or
    inner not a multiple of its heads, or another model's weights, and MachineError for weights that cannot be fetched
    or read.

    Source: Han et al. 2021; Aldahdooh et al. 2022, Tables 1-3.
    """
    from timm.models.tnt import TNT  # here, because it takes seconds

    from fatbench.models.fused import fuse

    size = check_grid("tnt", shape, patch, head)
    check_heads("tnt", dim, heads)
    check_heads("tnt", inner, inner_heads, "inner")
    if patch % pixels:
        raise ValueError(f"tnt: a patch of {patch}x{patch} is not divided into {pixels}x{pixels} equal pixels")
    backbone = TNT(
        img_size=size,
        patch_size=patch,
        in_chans=shape[0],
        num_classes=0,
        global_pool="",
        embed_dim=dim,
        inner_dim=inner,
        depth=depth,
        num_heads_inner=inner_heads,
        num_heads_outer=heads,
        mlp_ratio=mlp,
        first_stride=patch // pixels,
        legacy=legacy,
    )
    model = Transformer(
        fuse(backbone),
        heads_module.build(head, dim, classes, d1=d1, d2=d2, norm=head_norm, start=head_start),
        normalise,
        shape[0],
    )
    if weights is not None:
        published = TIMM.get((patch, pixels, dim, inner, depth, heads, inner_heads, mlp, legacy))
        load_pretrained("tnt", model, weights, published, position="patch_pos")
    return model


def tnt_parameters(
    shape: tuple[int, int, int],
    classes: int,
    *,
    patch: int,
    pixels: int,
    dim: int,
    inner: int,
    depth: int,
    mlp: int,
    legacy: bool,
    head: str,
    d1: int | None,
    d2: int | None,
    head_norm: str,
) -> int:
    """The number of trainable parameters."""
    channels, side, _ = shape
    words = pixels * pixels * inner  # numbers of a patch's pixels
    embedding = (49 * channels + 1) * inner + words * (dim + 3) + dim * ((side // patch) ** 2 + 7)
    block = 12 * inner * inner + 10 * inner + words * (dim + 2) + (2 * mlp + 4) * dim * dim + (mlp + 8) * dim
    blocks = depth * (block + legacy * (2 * inner - 2 * words - dim))
    head_layers = (dim + 1) * classes + cls_vis_parameters(
        classes, dim=dim, head=head, d1=d1, d2=d2, head_norm=head_norm
    )
    return embedding + blocks + head_layers
