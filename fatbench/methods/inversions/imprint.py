"""Reads images out of an imprint block, from the gradient of the layer that the server put in front.

    x of bin i = (dW_i - dW_{i+1}) / (db_i - db_{i+1}), 0 for the row after the last;    sparse: dW_i / db_i

Fowl et al. 2022; the block is `fatbench.methods.manipulations.imprint`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor, nn

from fatbench.methods.inversions.upload import Observation, find
from fatbench.suite.facts import Facts
from fatbench.suite.types import NonNegative

WEIGHT, BIAS = "imprint.weight", "imprint.bias"


def imprint(
    observed: Sequence[Observation],
    model: nn.Module,
    shape: tuple[int, int, int],
    generator: Generator,
    *,
    least: NonNegative = 1e-6,
) -> Tensor:
    """The images of the B bins with the largest signal, where B is the number of labels: (V, B, C, H, W) in [0, 1].

    A bin whose bias differs from the next one's by less than `least` times the largest such difference counts as empty
    and becomes grey. A bin with several images gives a mixture. Several rounds are averaged.

    The released readouts subtract the wrong neighbour (differences: imprint-readout). Raises ValueError without an
    imprint block.
    """
    gradient = observed[0].gradient
    names = [find(gradient, end, "imprint", "the gradient of an imprint block") for end in (WEIGHT, BIAS)]
    W, b = (torch.stack([s.gradient[name] for s in observed]).double().mean(0) for name in names)
    secret = observed[0].secret or {}
    if not bool(secret.get("sparse", False)):
        W, b = (rows - torch.cat([rows[:, 1:], torch.zeros_like(rows[:, :1])], 1) for rows in (W, b))
    count = min(observed[0].labels.shape[1], b.shape[1])
    top = b.abs().topk(count, 1).indices
    signals = b.gather(1, top)
    images = W.gather(1, top[:, :, None].expand(-1, -1, W.shape[2])) / signals[:, :, None]
    is_empty = signals.abs() <= least * b.abs().amax(1, keepdim=True)
    images = torch.where(is_empty[:, :, None], torch.full_like(images, 0.5), images)
    return images.unflatten(2, shape).nan_to_num(0.5, 1, 0).clamp(0, 1).float()


def imprint_manipulation(cell: Facts) -> str | None:
    manipulation = cell.algorithm.get("manipulation")
    if not manipulation or manipulation.name != "imprint":
        reason = "needs the block of a malicious server: manipulation: {name: imprint}"
        return f"imprint {reason}"
    return None
