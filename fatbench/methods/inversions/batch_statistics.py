"""Batch normalisation in train mode: what the buffers of an upload give away, and the statistics of simulated batches.

| here | what |
|---|---|
| r, s; r', s' | running mean and variance of a layer, before and after the client's work |
| m | momentum of the layer; None: the mean over all batches so far |
| T | steps of the client: `num_batches_tracked` afterwards less before, exactly |
| mu, v | mean of a batch and its unbiased variance: of the one step, or the weighted mean over T steps |

    r' = (1 - m)^T r + m sum_t (1 - m)^(T - 1 - t) mu_t,  so  mu = (r' - (1 - m)^T r) / (1 - (1 - m)^T);  s' alike

The error of mu in float32 is about 6e-8 |r| / m. The mean of several clients' buffers gives the means of their mu and
of their v, not the variance of their pooled images. LeakPro corrects v by the number of images; a layer sees one number
for each of their positions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.linalg import vector_norm
from torch.nn.modules.batchnorm import _BatchNorm

from fatbench.engine.rounds import Tensors

Statistics = dict[str, tuple[Tensor, Tensor]]  # layer: its mean and its variance, a number for each channel


@dataclass(frozen=True)
class Pass:
    """What one layer saw in one forward pass."""

    mean: Tensor
    variance: Tensor  # of the population
    count: int  # numbers behind each


def layers_of(model: nn.Module) -> dict[str, _BatchNorm]:
    """The layers of batch normalisation that keep running statistics."""
    modules = model.named_modules()
    return {n: m for n, m in modules if isinstance(m, _BatchNorm) and m.running_mean is not None}


def buffers_of(model: nn.Module, weights: Mapping[str, Tensor]) -> Tensors:
    """Copies of the model's buffers among `weights`, for a pass in train mode to move."""
    return {name: weights[name].clone() for name, _ in model.named_buffers() if name in weights}


def local_steps(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> int | None:
    """T, the number of local steps; None without buffers that count."""
    counts = [name for name in after if name.endswith("num_batches_tracked")]
    return max(int(after[name]) - int(before[name]) for name in counts) if counts else None


def sent_statistics(model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Statistics:
    """(mu, v) of each layer from its buffers before and after."""
    found: Statistics = {}
    for name, layer in layers_of(model).items():
        old_count, count = (int(tensors[f"{name}.num_batches_tracked"]) for tensors in (before, after))
        kept = old_count / count if layer.momentum is None else (1 - layer.momentum) ** (count - old_count)
        mean, variance = (
            (after[f"{name}.{kind}"] - kept * before[f"{name}.{kind}"]) / (1 - kept)
            for kind in ("running_mean", "running_var")
        )
        found[name] = mean, variance
    return found


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, list[Pass]]]:
    """Collect what each layer of batch normalisation sees in the forward passes of this context."""
    seen: dict[str, list[Pass]] = {name: [] for name in layers_of(model)}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor]) -> None:
            rows = inputs[0].transpose(0, 1).flatten(1)
            seen[name].append(Pass(rows.mean(1), rows.var(1, correction=0), rows.shape[1]))

        return hook

    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers_of(model).items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def statistics_of_images(model: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> Statistics:
    """Mean and population variance of each layer for these images as one batch, in the model's mode."""
    with watched(model) as seen, torch.no_grad():
        functional_call(model, {**weights, **buffers_of(model, weights)}, (x,))
    return {name: (passes[0].mean, passes[0].variance) for name, passes in seen.items()}


def mean_over_passes(seen: Mapping[str, Sequence[Pass]]) -> Statistics:
    """Mean over the passes, such as those of the clients of a sum."""
    return {
        name: (torch.stack([p.mean for p in passes]).mean(0), torch.stack([p.variance for p in passes]).mean(0))
        for name, passes in seen.items()
    }


def moved(model: nn.Module, before: Mapping[str, Tensor], seen: Mapping[str, Sequence[Pass]]) -> Statistics:
    """(r', s') of each layer after these passes, differentiable by what it saw."""
    after: Statistics = {}
    for name, layer in layers_of(model).items():
        mean, variance = before[f"{name}.running_mean"], before[f"{name}.running_var"]
        for t, one in enumerate(seen[name], start=int(before[f"{name}.num_batches_tracked"]) + 1):
            m = 1 / t if layer.momentum is None else layer.momentum
            unbiased = one.variance * one.count / (one.count - 1)
            mean, variance = (1 - m) * mean + m * one.mean, (1 - m) * variance + m * unbiased
        after[name] = mean, variance
    return after


def distance(ours: Statistics, theirs: Statistics, first: float) -> Tensor:
    """Sum over the layers of the distances of means and of variances; that of the first layer times `first`.

    Source: Yin et al. 2020 (DeepInversion), the norms not squared.
    """
    if not theirs:
        raise ValueError("statistics: no layer of batch normalisation keeps running statistics")
    gaps = [sum(vector_norm(a - b) for a, b in zip(ours[n], theirs[n], strict=True)) for n in theirs]
    return torch.stack([gap * (1 if i else first) for i, gap in enumerate(gaps)]).sum()
