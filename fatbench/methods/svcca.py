"""SV-CCA: how similar two networks' features of the same images are (Raghu et al. 2017).

    a = activations(model, x, block=1)         -> (B, D), the mean over each image's visual tokens after a block
    svcca(a_client, a_server)                  -> the mean canonical correlation, in [0, 1]

Use many images: at least 2000, five per dimension. With as many dimensions as images, everything correlates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def svcca(a: Tensor, b: Tensor, variance: float = 0.99) -> float:
    """Mean canonical correlation of activations a (n, p) and b (n, q), row i of both for image i; in [0, 1].

    In float64. Both are centred and reduced to the leading singular directions that hold `variance` of the squared
    norm. Those are orthonormal bases of the two subspaces (the left singular vectors), so the canonical correlations
    are the singular values of their product; the mean is over the smaller number of directions. Rotating, scaling or
    shifting a or b changes nothing.

    Returns nan for activations that are not finite (a model that diverged) or the same for every image. Raises
    ValueError if the images differ or are too few: more than n - 1 directions in all force correlations of 1.
    """
    if a.dim() != 2 or b.dim() != 2 or len(a) != len(b):
        raise ValueError(f"svcca: expected (n, p) and (n, q), got {tuple(a.shape)} and {tuple(b.shape)}")
    directions_a, directions_b = leading_directions(a, variance), leading_directions(b, variance)
    if directions_a is None or directions_b is None:
        return float("nan")
    p, q = directions_a.shape[1], directions_b.shape[1]
    if p + q > len(a) - 1:
        raise ValueError(
            f"svcca: {len(a)} images are too few to compare {p} with {q} dimensions; more than {p + q} needed"
        )
    correlations = torch.linalg.svdvals(directions_a.T @ directions_b).clamp(0, 1)
    return float(correlations.mean())


def leading_directions(a: Tensor, variance: float) -> Tensor | None:
    """An orthonormal basis (n, k) of the fewest singular directions of the centred a (n, p) that hold `variance`.

    None if a is not finite, or all its rows are equal.
    """
    a = a.double()
    centred = a - a.mean(0)
    if not bool(centred.isfinite().all()):
        return None
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    if s[0] <= 1e-12 * a.norm():
        return None
    fraction = s.square().cumsum(0) / s.square().sum()
    return u[:, : int((fraction < variance).sum()) + 1]


@torch.no_grad()
def activations(model: nn.Module, x: Tensor, block: int) -> Tensor:
    """The mean over each image's visual tokens after block `block` (from 1): images (B, C, H, W) -> (B, D).

    The class token is left out. `model` is a transformer of fatbench/models; its mode stays, and its head does not run.
    Raises ValueError if it has no such block.
    """
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        raise ValueError(f"svcca: {type(model).__name__} has no blocks; svcca needs a vision transformer")
    if not 1 <= block <= len(blocks):
        raise ValueError(f"svcca: no block {block}: the model has {len(blocks)}")
    token_means: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, Tensor]) -> None:
        tokens = output if isinstance(output, Tensor) else output[-1]  # a TNT block returns pixel and patch tokens
        token_means.append(tokens[:, 1:].mean(1))

    handle = blocks[block - 1].register_forward_hook(keep)
    try:
        model.tokens(x)  # type: ignore[operator]
    finally:
        handle.remove()
    return torch.cat(token_means)  # several if run.microbatch splits the batch
