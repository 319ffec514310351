"""Tokens-to-Token ViT, which timm does not have (Aldahdooh et al. 2022).

Names of modules and parameters are those of the authors' release, so that their checkpoints load as they are.

    Symbol (paper)     | here              | what
    T2T module         | TokensToToken     | image -> N tokens: three soft splits, performers between
    soft split         | F.unfold          | overlapping patches, one token each
    T2T transformer    | Performer         | one layer of linear attention with m random features
    w                  | w                 | (m, token_dim), the features' directions; never trained
    PE                 | pos_embed         | (1, 1 + N, D), sinusoids; never trained
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.models import heads as heads_module
from fatbench.models.heads import cls_vis_parameters
from fatbench.models.pretrained import load_pretrained
from fatbench.models.transformer import Transformer, check_grid, check_heads
from fatbench.suite.types import Count, Weights


def t2t(
    shape: tuple[int, int, int],
    classes: int,
    *,
    head: Literal["cls", "vis", "cls_vis"] = "cls",
    patch: Count = 16,
    dim: Count = 384,
    token_dim: Count = 64,
    depth: Count = 14,
    heads: Count = 6,
    mlp: Count = 3,
    d1: Count | None = None,
    d2: Count | None = None,
    head_norm: Literal["bn", "ln", "none"] = "bn",
    head_start: Literal["timm", "kaiming"] = "timm",
    normalise: Literal["half", "imagenet", "none"] = "imagenet",
    weights: Weights | None = None,
) -> nn.Module:
    """Tokens-to-Token ViT with performers; T2T-ViT-14 at the defaults.

    Maps (B, C, H, W) in [0, 1] to (B, classes); H = W, a multiple of `patch`. Three overlapping splits, 7x7 with stride
    patch / 4, then twice 3x3 with stride 2, leave (H / patch)^2 tokens; between them a performer of `token_dim`
    channels and token_dim / 2 random features. `patch` is 4, 8, ..., 28, so that the 7x7 windows leave no gap. Then
    `depth` blocks as in ViT, queries, keys and values without bias. A class token; fixed sinusoid positions.

    The random features and the positions are parameters that are never trained: in the state, and equal on every
    client. paper's code: dropout 0.1 within the performers / here: none, as everywhere in the paper. With `weights`,
    attention is scaled by dim^-1/2, as the published weights were trained, else by (dim / heads)^-1/2.

    `head` and its settings, `normalise` and `weights` as for `vit`, but timm has none: `t2t_vit_14` is
    the authors' 81.5_T2T_ViT_14.pth.tar.

    Raises ValueError for images that are not square or not tiled by the patches, any other patch, dim not a multiple of
    heads, odd token_dim, or another model's weights, and MachineError for weights that cannot be read.

    Source: Yuan et al. 2021 and yitu-opensource/T2T-ViT, models/t2t_vit.py; Aldahdooh et al. 2022, Tables 1-3.
    """
    if patch % 4 or patch > 28:
        raise ValueError(f"t2t: patch must be 4, 8, 12, 16, 20, 24 or 28, got {patch}")
    size = check_grid("t2t", shape, patch, head)
    check_heads("t2t", dim, heads)
    if token_dim % 2:
        raise ValueError(f"t2t: token_dim must be even, for half as many random features, got {token_dim}")
    scale = (dim if weights is not None else dim // heads) ** -0.5
    backbone = T2T(shape[0], size, patch, dim=dim, token_dim=token_dim, depth=depth, heads=heads, mlp=mlp, scale=scale)
    model = Transformer(
        backbone,
        heads_module.build(head, dim, classes, d1=d1, d2=d2, norm=head_norm, start=head_start),
        normalise,
        shape[0],
    )
    if weights is not None:
        load_pretrained("t2t", model, weights, None, position="pos_embed")
    return model


def t2t_parameters(
    shape: tuple[int, int, int],
    classes: int,
    *,
    dim: int,
    token_dim: int,
    depth: int,
    mlp: int,
    head: str,
    d1: int | None,
    d2: int | None,
    head_norm: str,
) -> int:
    """The number of trainable parameters."""
    channels = shape[0]
    # two performers, of 49 C and of 9 token_dim channels, and the projection of the last split
    tokens = token_dim * (147 * channels + 33 * token_dim + 34) + 98 * channels + (9 * token_dim + 1) * dim
    # three biases less than a block of ViT, as queries, keys and values have none; class token and last LayerNorm
    blocks = depth * ((2 * mlp + 4) * dim * dim + (mlp + 6) * dim) + 3 * dim
    head_layers = (dim + 1) * classes + cls_vis_parameters(
        classes, dim=dim, head=head, d1=d1, d2=d2, head_norm=head_norm
    )
    return tokens + blocks + head_layers


class T2T(nn.Module):
    """The backbone: normalised images (B, C, H, W) -> tokens (B, 1 + N, D), after the last LayerNorm."""

    def __init__(
        self,
        channels: int,
        size: int,
        patch: int,
        *,
        dim: int,
        token_dim: int,
        depth: int,
        heads: int,
        mlp: int,
        scale: float,
    ) -> None:
        super().__init__()
        self.tokens_to_token = TokensToToken(channels, dim, token_dim, stride=patch // 4)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(sinusoids(1 + (size // patch) ** 2, dim), requires_grad=False)
        self.blocks = nn.ModuleList(Block(dim, heads, mlp, scale) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, 1 + N, D)."""
        x = self.tokens_to_token(x)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        tokens: Tensor = self.norm(x)
        return tokens


class TokensToToken(nn.Module):
    """Three soft splits with a performer after each of the first two: the image's side shrinks by stride, 2 and 2."""

    def __init__(self, channels: int, dim: int, token_dim: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.attention1 = Performer(channels * 7 * 7, token_dim)
        self.attention2 = Performer(token_dim * 3 * 3, token_dim)
        self.project = nn.Linear(token_dim * 3 * 3, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, D)."""
        x = F.unfold(x, 7, stride=self.stride, padding=math.ceil((7 - self.stride) / 2))
        x = as_image(self.attention1(x.transpose(1, 2)))
        x = F.unfold(x, 3, stride=2, padding=1)
        x = as_image(self.attention2(x.transpose(1, 2)))
        x = F.unfold(x, 3, stride=2, padding=1)
        tokens: Tensor = self.project(x.transpose(1, 2))
        return tokens


class Performer(nn.Module):
    """Attention whose softmax kernel is estimated with m positive random features: linear in the tokens.

    SM(q, k) = E_w[exp(w'q - |q|^2 / 2) exp(w'k - |k|^2 / 2)], m = dim / 2. The residual is the values, because the
    input has another width.
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.kqv = nn.Linear(width, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        m = dim // 2
        # orthogonal: the estimate varies less than with independent directions
        self.w = nn.Parameter(nn.init.orthogonal_(torch.empty(m, dim)) * math.sqrt(m), requires_grad=False)

    def features(self, x: Tensor) -> Tensor:
        """(B, N, dim) -> (B, N, m): exp(w'x - |x|^2 / 2) / sqrt(m)."""
        return torch.exp(x @ self.w.T - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(len(self.w))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, width) -> (B, N, dim)."""
        k, q, v = self.kqv(self.norm1(x)).chunk(3, dim=-1)
        # exponentials of differences need more than bfloat16
        with torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False):
            k, q, values = (t.to(self.w.dtype) for t in (k, q, v))
            k, q = self.features(k), self.features(q)
            total = q @ k.sum(1).unsqueeze(2)
            # keys and values first: m x dim numbers, whatever the number of tokens
            y = q @ (k.transpose(1, 2) @ values) / (total + 1e-8)
        x = v + self.proj(y)  # the input is wider than the output, so it cannot be the residual
        x = x + self.mlp(self.norm2(x))
        return x


class Block(nn.Module):
    """A pre-norm block of self-attention and MLP."""

    def __init__(self, dim: int, heads: int, mlp: int, scale: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, scale)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, mlp * dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class Attention(nn.Module):
    """Self-attention with a custom scale, which timm's lacks."""

    def __init__(self, dim: int, heads: int, scale: float) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        b, n, dim = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        mixed: Tensor = self.proj(y.transpose(1, 2).reshape(b, n, dim))
        return mixed


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        y: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return y


def as_image(tokens: Tensor) -> Tensor:
    """(B, n * n, D) -> (B, D, n, n)."""
    side = math.isqrt(tokens.shape[1])
    return tokens.transpose(1, 2).unflatten(2, (side, side))


def sinusoids(n: int, dim: int) -> Tensor:
    """(1, n, dim): position p has sin(p / 10000^(2i / dim)) at 2i and its cosine at 2i + 1."""
    position = torch.arange(n, dtype=torch.float64)[:, None]
    channel = torch.arange(dim)
    angle = position / 10000 ** (2 * (channel // 2).double() / dim)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).float()[None]
