"""APRIL in closed form: the tokens of one image from the gradients of the first attention and of the positions.

| paper | here | what |
|---|---|---|
| z | Z, (V, 1 + N, D) | tokens after adding the positions |
| dl / dE_pos | A, (V, 1 + N, D) | gradient of the position embedding; equals that of Z for one image |
| W, dl / dW | W, G | weight of queries, keys and values and its gradient, (3 D, D) |
| E | E_pos | the positions themselves |

If Z feeds queries, keys and values and nothing else, A^T Z = W^T G: D equations for each token. LayerNorm before the
attention, or the residual around it, breaks the identity, so it needs a model whose block 0 has neither
(`without_block0_norm`); for any other model the result is not the image. The paper does not say so (differences:
april-block0).

Lu et al. 2022 (APRIL), section 4.1; Sawada et al. 2024, Eq. 8-9; breaching analytic_attack.py:827-896.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from fatbench.methods.inversions.upload import (
    PATCH,
    POSITION,
    Observation,
    as_reconstructions,
    find,
    geometry,
    patch_gradient,
    to_images,
)
from fatbench.suite.types import NonNegative

QKV = "blocks.0.attn.qkv.weight"


def april(
    observed: Sequence[Observation],
    model: nn.Module,
    shape: tuple[int, int, int],
    generator: Generator,
    *,
    cut: NonNegative = 0.0,
) -> Tensor:
    """Closed-form APRIL: least squares for the tokens, then for the patches: (V, 1, C, H, W) in [0, 1].

    Treats the upload as complete; several rounds are averaged (at the first round's weights). Exact for one image if D
    >= 1 + N and D >= C p p. With D < C p p, as in ViT-S/16, the result is the patch of least norm that explains its
    token, about 24 dB without any defence. paper (Eq. 9): multiplies by E where an inverse is meant, and omits the bias
    / here: the pseudo-inverse, after subtracting the bias. `cut`: singular values of A below `cut` times the largest
    count as zero; 0: those below rounding. Raises ValueError without learned positions, or without one weight for
    queries, keys and values.
    """
    embedding_geometry = geometry(observed[0], shape, "april")
    weights = {name: value.double() for name, value in observed[0].weights.items() if value.is_floating_point()}

    def mean(name: str) -> Tensor:
        return torch.stack([s.gradient[name] for s in observed]).double().mean(0)

    position = find(weights, POSITION, "april", "learned positions")
    qkv = find(weights, QKV, "april", "queries, keys and values in one layer")
    embedding = find(weights, PATCH, "april", "a patch embedding")
    A = mean(position).flatten(1, -2)
    right_side = weights[qkv].T @ mean(qkv)
    Z = torch.linalg.pinv(A.transpose(1, 2), rtol=cut or None) @ right_side
    tokens = (Z - weights[position].flatten(0, -2))[:, embedding_geometry.prefix :] - weights[
        embedding.removesuffix("weight") + "bias"
    ]
    patches = tokens @ torch.linalg.pinv(patch_gradient({PATCH: weights[embedding][None]}, "april")[0]).T
    return as_reconstructions(to_images(patches, embedding_geometry), model)


def without_block0_norm(model: nn.Module) -> nn.Module:
    """A copy of a ViT on timm's blocks whose block 0 is x -> attn(x) -> mlp(norm2(x)): no norm1, no residuals.

    The other blocks and the parameters' names stay, so that trained weights fit (norm1's are dropped). Raises
    ValueError if block 0 is not timm's.

    Source: breaching model_preparation.py:525-536 (ModifiedBlock).
    """
    changed = copy.deepcopy(model)
    blocks = getattr(changed, "blocks", None)
    if blocks is None or not all(hasattr(blocks[0], attribute) for attribute in ("attn", "norm2", "mlp")):
        raise ValueError("without_block0_norm: needs blocks with attn, norm2 and mlp, as timm's VisionTransformer has")
    blocks[0] = _AprilBlock(blocks[0])
    return changed


class _AprilBlock(nn.Module):
    """See `without_block0_norm`."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.attn, self.norm2, self.mlp = block.attn, block.norm2, block.mlp

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.norm2(self.attn(x)))
        return out
