"""Heads that turn a transformer's tokens into logits: CLS, VIS and CLS+VIS (differences: cls-vis-head).

A head maps tokens (B, 1 + N, D), the class token first and all after the backbone's last LayerNorm, to (B, classes).
`logit_layers` names its modules that emit logits.

    Symbol (So-ViT)  | here          | what
    p, q             | d1, d2        | channels of the two branches of the visual tokens
    X                | covariance    | (B, d1, d2), cross-covariance of the branches over the N visual tokens
    sigma_1          | sigma         | (B, 1, 1), estimate of the largest singular value of X
    v_0              | start         | (d1,), learned start vector of the power iteration
    alpha = 1/2      |               | power of the singular-value normalisation: X / sqrt(sigma)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.models.dropout import Dropout

GUARD = 1e-10  # least sigma: a covariance of zero (all tokens equal) stays zero, its gradient finite


class ClsHead(nn.Module):
    """CLS: the class token, one linear layer."""

    logit_layers = ("fc",)

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.fc = linear(dim, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, 1 + N, D) -> (B, classes)."""
        logits: Tensor = self.fc(tokens[:, 0])
        return logits


class VisHead(nn.Module):
    """VIS: the mean over the visual tokens, one linear layer."""

    logit_layers = ("fc",)

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.fc = linear(dim, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, 1 + N, D) -> (B, classes)."""
        logits: Tensor = self.fc(tokens[:, 1:].mean(1))
        return logits


class ClsVisHead(nn.Module):
    """CLS+VIS: the class token's logits plus those of the visual tokens' normalised cross-covariance.

    Each branch is a linear map without bias (the 1x1 convolution of So-ViT), a normalisation over its channels and a
    ReLU. Dropout of 0.5 before the visual classifier if dim > 256, as in So-ViT, whose 256-wide models have none.
    start: the initial weights of the two maps, "kaiming" (So-ViT: normal of variance 2 / fan-out) or "timm" (as
    `linear`). After batch norm the output is the same, but a step of the same size changes the smaller weights 100
    times as much.
    """

    logit_layers = ("cls_fc", "visual_fc")

    def __init__(self, dim: int, classes: int, d1: int, d2: int, norm: str, start: str = "timm") -> None:
        super().__init__()
        self.branch1 = linear(dim, d1, bias=False)
        self.branch2 = linear(dim, d2, bias=False)
        if start == "kaiming":
            for branch in (self.branch1, self.branch2):
                nn.init.kaiming_normal_(branch.weight, mode="fan_out", nonlinearity="relu")
        self.norm1 = NORMS[norm](d1)
        self.norm2 = NORMS[norm](d2)
        self.start = nn.Parameter(torch.randn(d1))
        self.dropout = Dropout(0.5 if dim > 256 else 0.0)
        self.cls_fc = linear(dim, classes)
        self.visual_fc = linear(d1 * d2, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, 1 + N, D) -> (B, classes)."""
        visual = tokens[:, 1:]
        a = F.relu(self.norm1(self.branch1(visual).flatten(0, 1)).unflatten(0, visual.shape[:2]))
        b = F.relu(self.norm2(self.branch2(visual).flatten(0, 1)).unflatten(0, visual.shape[:2]))
        # the products are too small for bfloat16
        with torch.autocast("cuda" if tokens.is_cuda else "cpu", enabled=False):
            covariance = cross_covariance(a.to(self.start.dtype), b.to(self.start.dtype))
            second_order = power_normalised(covariance, self.start)
        logits: Tensor = self.cls_fc(tokens[:, 0]) + self.visual_fc(self.dropout(second_order.flatten(1)))
        return logits


NORMS = {"bn": nn.BatchNorm1d, "ln": nn.LayerNorm, "none": nn.Identity}


def linear(dim: int, out: int, bias: bool = True) -> nn.Linear:
    """A linear layer that starts as timm's do: truncated N(0, 0.02), bias 0."""
    layer = nn.Linear(dim, out, bias=bias)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def cross_covariance(a: Tensor, b: Tensor) -> Tensor:
    """(1/N) A B^T of two sets of tokens (B, N, d1), (B, N, d2), each minus its mean over the tokens: (B, d1, d2)."""
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    return a.transpose(1, 2) @ b / a.shape[1]


def power_normalised(x: Tensor, start: Tensor) -> Tensor:
    """X / sqrt(sigma_1), X (B, d1, d2), with sigma_1 from one power iteration from `start` (d1,).

    paper: the leading singular part is scaled to sigma_1^(1/2), the rest is divided by sigma_1^(1/2) + 1e-5
    here: both are divided by sigma_1^(1/2), which is the same without the guard; instead, sigma_1 is at least GUARD
    """
    u = F.normalize(torch.einsum("bij,i->bj", x, start), dim=1)
    xu = torch.einsum("bij,bj->bi", x, u)
    v = F.normalize(xu, dim=1)
    # u' X v is at most sigma_1, and near it where one singular value dominates
    sigma = torch.einsum("bi,bi->b", v, xu).abs().clamp_min(GUARD)
    return x / sigma.sqrt()[:, None, None]


def build(head: str, dim: int, classes: int, *, d1: int | None, d2: int | None, norm: str, start: str) -> nn.Module:
    """The head named `head`: cls, vis or cls_vis.

    d1, d2 None: those of So-ViT, 96 x 48 from dim 448 on, 64 x 48 from 384 on, 48 x 24 below. So-ViT has no model of
    width 768; ViT-B gets 96 x 48, as its widest.
    """
    if head == "cls_vis":
        d1 = d1 or 48 + 16 * (dim >= 384) + 32 * (dim >= 448)
        d2 = d2 or 24 + 24 * (dim >= 384)
        return ClsVisHead(dim, classes, d1, d2, norm, start)
    return {"cls": ClsHead, "vis": VisHead}[head](dim, classes)


def cls_vis_parameters(classes: int, *, dim: int, head: str, d1: int | None, d2: int | None, head_norm: str) -> int:
    """The number of trainable parameters of a head beyond those of the class token's linear layer."""
    if head != "cls_vis":
        return 0
    first_width = d1 or 48 + 16 * (dim >= 384) + 32 * (dim >= 448)
    second_width = d2 or 24 + 24 * (dim >= 384)
    normed = dim + 2 * (head_norm != "none")  # a branch's map, scale and shift
    # the first branch also has the start of the power iteration; last: the visual classifier
    return first_width * (normed + 1) + second_width * normed + classes + first_width * second_width * classes
