"""Manipulations: what a malicious server changes in the model before it sends it to its target.

    changed = MANIPULATIONS["fishing"](model, weights, generator, labels)

`model` and `weights` are the honest ones. `labels` (B,) are what the server believes the target's labels to be,
`images` (S, C, H, W) in [0, 1] are the server's own. The clients follow the algorithm and send one gradient of their
batch, which is inverted with the changed model and weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from fatbench.methods.inversions.labels import head_of
from fatbench.suite.entry import PrivacyEntry
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count

Tensors = dict[str, Tensor]
FAR = 1000.0  # a logit so large that softmax gives every other exactly 0 in float32


@dataclass(frozen=True)
class Manipulated:
    """What the server sends: the architecture, the target's weights and the other clients'; `secret` it keeps."""

    model: nn.Module
    target: Tensors
    others: Tensors
    secret: Tensors | None = None


def fishing(
    model: nn.Module, weights: Tensors, generator: Generator, labels: Tensor, *, silence_others: bool = False
) -> Manipulated:
    """A head that passes gradients of one class only: the class with the fewest images in the batch.

    The rows of the other classes are 0 and their biases 1000, so p_c = 0 and images of other classes send no gradient
    into the backbone; row c is unchanged. B times the gradient is then the sum over the images of class c, which may be
    a single one. `silence_others`: the other clients' heads are those of `dead_heads`.

    Source: Wen et al. 2022, section 3.1. breaching writes 0.5 into row c, which gives no gradient behind a LayerNorm
    (differences: fishing-row).
    """
    weight, bias = head_of(model)
    class_counts = labels.bincount(minlength=len(weights[bias])).double()
    c = int(torch.where(class_counts > 0, class_counts, torch.inf).argmin())
    W, b = torch.zeros_like(weights[weight]), torch.full_like(weights[bias], FAR)
    W[c], b[c] = weights[weight][c], weights[bias][c]
    target = {**weights, weight: W, bias: b}
    return Manipulated(model, target, _with_zero_head(model, weights) if silence_others else target)


def dead_heads(model: nn.Module, weights: Tensors, generator: Generator) -> Manipulated:
    """Every client but the target gets a last layer of zeros: the sum of the backbones' gradients is the target's.

    Source: Pasquini, Francati and Ateniese 2022 (model inconsistency), with the last layer in place of a ReLU.
    """
    return Manipulated(model, dict(weights), _with_zero_head(model, weights))


def a_sum_of_several(cell: Facts) -> str | None:
    if cell.algorithm.get("aggregate", 2) < 2:
        return "dead_heads silences the other clients of a sum: set aggregate to 2 or more"
    return None


def imprint(
    model: nn.Module,
    weights: Tensors,
    generator: Generator,
    images: Tensor,
    *,
    bins: Count = 64,
    query: Literal["mean", "random"] = "mean",
    kind: Literal["cumulative", "sparse"] = "cumulative",
) -> Manipulated:
    """A first layer that sorts images into bins by q . x; the gradient of a bin with one image is that image.

    h_i = ReLU(q . x - t_i), with thresholds t_i at the quantiles of q . x over the server's own images. Their mean is
    added to the image, so that every row of the layer gets the same signal. The inversion `imprint` reads it. `sparse`:
    h_i = (q . x - t_i) / (t_{i+1} - t_i), clamped to [0, 1], which an image changes only in its own bin, so that it
    also works for several local steps. The released programs use the quantiles of a standard normal distribution.

    Raises ValueError if q . x is the same for all of the server's images.
    Source: Fowl et al. 2022 (Robbing the Fed); differences: imprint-readout.
    """
    flat = images.flatten(1)
    size = flat.shape[1]
    q = torch.ones(size) if query == "mean" else torch.randn(size, generator=generator, device=generator.device)
    q = (q / size**0.5 if query == "random" else q / size).to(flat)
    projections = flat @ q
    if not projections.std() > 0:
        raise ValueError(f"imprint: all {len(images)} images of the server have the same q . x")
    t = projections.quantile(torch.arange(bins).to(projections) / bins)
    block = Imprint(q, t, kind)
    network_behind = _Behind(block, model)
    target = {f"imprint.{name}": value.clone() for name, value in block.state_dict().items()}  # training changes them
    target |= {f"network.{name}": value for name, value in weights.items()}
    return Manipulated(network_behind, target, target, {"sparse": torch.tensor(kind == "sparse")})


def two_bins(*, bins: int) -> str | None:
    return "bins: an imprint block needs two bins or more" if bins < 2 else None


class Imprint(nn.Module):
    """x + mean(h): every row of `weight` (k, C H W) is the query, and `bias` (k,) are the negative thresholds."""

    def __init__(self, q: Tensor, t: Tensor, kind: str) -> None:
        super().__init__()
        width = torch.ones_like(t)
        if kind == "sparse":
            width = torch.cat([t.diff(), t.diff()[-1:]]).clamp(min=1e-6)
        self.sparse = kind == "sparse"
        self.weight = nn.Parameter(q.expand(len(t), -1) / width[:, None])
        self.bias = nn.Parameter(-t / width)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(x.flatten(1), self.weight, self.bias)
        h = h.clamp(0, 1) if self.sparse else h.relu()
        return x + h.mean(1)[:, None, None, None]


class _Behind(nn.Module):
    """A network with the imprint block in front."""

    def __init__(self, block: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self.imprint, self.network = block, network
        for name in ("mean", "std"):  # of the network's normalisation, which inversions ask for
            if isinstance(value := getattr(network, name, None), Tensor):
                self.register_buffer(name, value, persistent=False)
        self.logit_layers = tuple(f"network.{layer}" for layer in getattr(network, "logit_layers", ()))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(self.imprint(x))
        return logits


def _with_zero_head(model: nn.Module, weights: Tensors) -> Tensors:
    weight, _ = head_of(model)
    return {**weights, weight: torch.zeros_like(weights[weight])}


MANIPULATIONS: dict[str, Callable[..., Manipulated]] = {
    "fishing": PrivacyEntry(fishing, threat="F", labels=True, cites=("wen2022",)),
    "dead_heads": PrivacyEntry(dead_heads, threat="F", refuse=(a_sum_of_several,), cites=("pasquini2022",)),
    "imprint": PrivacyEntry(imprint, threat="G", refuse=(two_bins,), cites=("fowl2022",)),
}
