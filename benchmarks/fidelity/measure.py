"""What is compared of two programs, and when they count as the same.

| measure | what | same when |
|---|---|---|
| output, gradient, run | numbers of both from the same weights, images and draws | they differ by rounding |
| initial distribution | what a weight starts with, over many draws | Kolmogorov-Smirnov does not tell them apart |
| one-step change | how far one step of SGD moves a weight, in parts of its start | within a half of each other |

Two networks with the same output may still train differently: one-step changes see what a start hides behind a
normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROUNDING = 1e-4  # of the greatest number of a tensor: float32, many steps
LEVEL = 0.001  # of the two-sample test, over all tensors together
APART = 1.5  # least ratio of one-step changes that counts as another program
STARTS = 20  # of each side: with six, medians of the same program are up to 1.9 apart


@dataclass(frozen=True)
class Row:
    """One comparison."""

    id: str  # "sfat.script.small_cnn": what CLAIMS name
    theirs: str  # which piece of their program
    ours: str  # which of ours
    measure: str
    value: float  # greatest difference, least p, or greatest ratio
    limit: float
    passes: bool
    note: str = ""
    expected: bool = True  # False: known to differ, docs/differences.md says why
    altered: str = ""  # what their program computes otherwise here than on its own


def equal(
    id: str,
    theirs: str,
    ours: str,
    measure: str,
    value: float,
    limit: float = ROUNDING,
    note: str = "",
    altered: str = "",
) -> Row:
    """A row of numbers that have to agree to rounding."""
    return Row(id, theirs, ours, measure, value, limit, value <= limit, note, altered=altered)


def differs(
    id: str, theirs: str, ours: str, measure: str, value: float, limit: float = ROUNDING, note: str = ""
) -> Row:
    """A row that is there to show a difference that fatbench means: it is no claim, and passes only by accident."""
    return Row(id, theirs, ours, measure, value, limit, value <= limit, note, expected=False)


def difference(a: Mapping[str, Tensor] | Tensor, b: Mapping[str, Tensor] | Tensor) -> float:
    """The greatest difference of two tensors, or of the tensors of two states, in parts of the second's greatest.

    NaN on one side only is an infinite difference. ValueError: states with other names or shapes.
    """
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        a, b = {"": torch.as_tensor(a)}, {"": torch.as_tensor(b)}
    if a.keys() != b.keys():
        raise ValueError(f"tensors of one side only: {', '.join(sorted(a.keys() ^ b.keys())[:3])}")
    worst = 0.0
    for name, value in a.items():
        x, y = value.detach().double().flatten(), b[name].detach().double().flatten()
        if x.shape != y.shape:
            raise ValueError(f"{name}: {len(x)} and {len(y)} numbers")
        if not torch.equal(x.isnan(), y.isnan()):
            return math.inf
        kept = ~y.isnan()
        if kept.any():
            worst = max(worst, float((x[kept] - y[kept]).abs().max() / y[kept].abs().max().clamp_min(1e-12)))
    return worst


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient of the cross-entropy by each weight that is trained."""
    weights = {name: w for name, w in model.named_parameters() if w.requires_grad}
    loss = F.cross_entropy(model(x), y)
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


Network = Callable[[], nn.Module]  # makes it, at a new random start
Names = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]  # their tensors under our names, in our shapes


def network(
    id: str, theirs: str, ours: str, upstream: Network, mine: Network, names: Names, x: Tensor, y: Tensor
) -> list[Row]:
    """Output and gradient at the same weights, distributions of the starts, relative change of one step of SGD.

    Outputs and gradients are compared in eval mode, one-step changes in train mode.
    """
    a, b = upstream().eval(), mine().eval()
    b.load_state_dict({**b.state_dict(), **names(a.state_dict())})
    rows = [
        equal(f"{id}.output", theirs, ours, "output", difference(b(x), a(x))),
        equal(f"{id}.gradient", theirs, ours, "gradient", difference(gradients(b, x, y), names(gradients(a, x, y)))),
    ]
    starts_a: list[dict[str, Tensor]] = []
    starts_b: list[dict[str, Tensor]] = []
    steps_a: list[dict[str, float]] = []
    steps_b: list[dict[str, float]] = []
    for seed in range(STARTS):
        for make, starts, steps in ((upstream, starts_a, steps_a), (mine, starts_b, steps_b)):
            torch.manual_seed(1000 + seed + (500 if make is mine else 0))
            model = make().train()
            rename = names if make is upstream else dict
            values = rename({n: w.detach().clone() for n, w in model.named_parameters() if w.requires_grad})
            torch.manual_seed(seed)
            starts.append(values)
            steps.append(_relative(values, rename(gradients(model, x, y))))
    probability, where = _least_p(starts_a, starts_b)
    rows.append(
        Row(f"{id}.start", theirs, ours, "initial distribution", probability, LEVEL, probability >= LEVEL, where)
    )
    ratio, where = _greatest_ratio(steps_a, steps_b)
    rows.append(Row(f"{id}.step", theirs, ours, "one-step change", ratio, APART, ratio <= APART, where))
    return rows


def _relative(values: Mapping[str, Tensor], by: Mapping[str, Tensor]) -> dict[str, float]:
    """How far a step of rate 1 moves each weight, in parts of its length; of those that start at zero, how far."""
    return {n: float(by[n].norm() / (values[n].norm() if values[n].norm() > 0 else 1.0)) for n in values}


def _least_p(a: Sequence[Mapping[str, Tensor]], b: Sequence[Mapping[str, Tensor]]) -> tuple[float, str]:
    """Least p of the two-sample tests of all tensors, times their number, and the tensor; constants must be equal."""
    from scipy.stats import ks_2samp

    found = []
    for name in a[0]:
        x, y = (torch.cat([start[name].flatten()[:20_000] for start in side]).numpy() for side in (a, b))
        if x.std() == 0 or y.std() == 0:
            found.append((1.0 if (x == x[0]).all() and (y == x[0]).all() else 0.0, name))
        else:
            found.append((float(ks_2samp(x, y).pvalue), name))
    least, name = min(found)
    return min(1.0, least * len(found)), name


def _greatest_ratio(a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]]) -> tuple[float, str]:
    """Greatest ratio, above 1, of the median changes of a tensor on both sides, and the tensor.

    Tensors that hardly move on either side (a bias before a normalisation) are left out: their change is rounding.
    """
    found = []
    for name in a[0]:
        x, y = (sorted(step[name] for step in side)[len(side) // 2] for side in (a, b))
        if max(x, y) > 1e-6:
            found.append((max(x, y) / max(min(x, y), 1e-30), name))
    return max(found)
