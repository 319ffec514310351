"""Gradient matching: search the image whose gradient has the direction of the one that was sent. For any model.

    min over x in [0, 1]   1 - cos(grad L(x, y), g) + tv TV(x)
                           + statistics sum_l w_l (|mu_l(x) - mu_l| + |var_l(x) - var_l|)

This is what is usually meant by inverting a gradient, though the papers here do not compare with it. It needs neither a
transformer nor learned positions. Its gradients are taken in the client's mode. Geiping et al. 2020
(arXiv 2003.14053), equation 4: Adam on the signs of the
gradient, its rate divided by ten after 3/8, 5/8 and 7/8 of the steps, the image clamped to the box after each. The
statistics are those of batch normalisation, w_1 = `first_layer`, else 1 (Yin et al. 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fatbench.engine.optimizers import Descent, Moments, step
from fatbench.methods.inversions.batch_statistics import (
    Statistics,
    distance,
    layers_of,
    mean_over_passes,
    sent_statistics,
    statistics_of_images,
    watched,
)
from fatbench.methods.inversions.upload import Observation, Tensors, differentiable
from fatbench.suite.entry import Passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Fraction, NonNegative, Rate, rounded_down


def matching(
    observed: Sequence[Observation],
    model: nn.Module,
    shape: tuple[int, int, int],
    generator: Generator,
    *,
    steps: Count = 1000,
    lr: Rate = 0.1,
    tv: NonNegative = 0.01,
    zeros: Literal["as_sent", "ignored"] = "as_sent",
    statistics: NonNegative = 0.0,
    statistics_from: Literal["sent", "broadcast", "images"] = "sent",
    first_layer: NonNegative = 10.0,
    layers: Fraction = 1.0,
    restarts: Count = 1,
) -> Tensor:
    """Images whose gradient has the direction of the one that was sent: (V, B, C, H, W) in [0, 1].

    B is the number of labels of an upload; the distances of several rounds are added. All gradients of the upload are
    matched; `tv` weights the mean absolute difference of neighbouring pixels. `zeros`: zero entries are matched as
    zeros, or ignored (an attacker who knows that a defence withholds some). The labels are those of the observation:
    told, or restored from the update.

    `statistics_from`: of the batch, from buffers that are sent (after several steps their weighted mean); the running
    ones of the broadcast (Huang et al. 2021); or those of images of the server's own. `layers`: only this fraction of
    the tensors, those with the largest gradients (FedLeak-like: ours, without having seen its rule). Of `restarts`, the
    one with the smallest loss without `tv`. In a mean over clients, restored labels are dealt to clients as they come.
    Raises ValueError for statistics that are not sent, or of a model without them.
    """
    model.train(observed[0].mode == "train")

    def loss_of(s: Observation, x: Tensor, v: int, target: Tensors, known: Statistics | None) -> Tensor:
        if known is None:
            return _cosine_distance(model, s, x, v, target, zeros)
        with watched(model) as seen:
            cosine = _cosine_distance(model, s, x, v, target, zeros)
        for name, (passed, *_) in seen.items() if statistics_from == "sent" else ():
            # torch's running variance is unbiased, by the numbers behind one step of the client
            count = passed.count * (1 if s.local is None else s.local.batch * s.clients / len(s.labels[v]))
            known = {**known, name: (known[name][0], known[name][1] * (count - 1) / count)}
        return cosine + statistics * distance(mean_over_passes(seen), known, first_layer)

    def reconstruct(v: int) -> tuple[Tensor, float]:
        """One reconstruction and its loss, which is measured only among several."""
        labels = observed[0].labels[v]
        x = torch.rand(len(labels), *shape, generator=generator, device=generator.device).to(labels.device)
        moments: Moments = {}
        targets = [_largest({n: g[v] for n, g in s.gradient.items()}, layers) for s in observed]
        known = [_known_statistics(model, s, v, statistics_from) if statistics else None for s in observed]
        matched = list(zip(observed, targets, known, strict=True))
        for i in range(steps):
            x.requires_grad_()
            loss = sum(loss_of(s, x, v, target, goal) for s, target, goal in matched)
            roughness = x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()
            (slope,) = torch.autograd.grad(loss + tv * roughness, x)
            x = x.detach()
            decay = 0.1 ** sum(i >= steps * eighths // 8 for eighths in (3, 5, 7))
            moments = step([x], [slope.sign()], moments, Descent("adam", lr * decay))
            x.clamp_(0, 1)
        if restarts == 1:
            return x, 0.0
        return x, sum(float(loss_of(s, x, v, target, goal).detach()) for s, target, goal in matched)

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        tries = [[reconstruct(v) for _ in range(restarts)] for v in range(len(observed[0].labels))]
    return torch.stack([min(of_upload, key=lambda one: one[1])[0] for of_upload in tries])


def every_step(observed_rounds: int, *, steps: int) -> Passes:
    """For each observed round: a forward pass, the gradient by the weights, and the gradient of that by the image."""
    return observed_rounds * steps * Passes(1, 2)


def every_restart(observed_rounds: int, *, steps: int, restarts: int) -> Passes:
    """As `every_step`, of each restart; among several, one more gradient tells its loss."""
    return restarts * (every_step(observed_rounds, steps=steps) + observed_rounds * (restarts > 1) * Passes(1, 1))


def statistics_that_are_known(cell: Facts, *, statistics: float, statistics_from: str) -> str | None:
    """Refuse statistics of a model without them, and sent ones that are not sent or of another mode."""
    if not statistics:
        return None
    if not cell.batch_norm:
        return f"statistics: {cell.model.name} has no batch normalisation"
    if statistics_from == "sent" and cell.algorithm.get("buffers") == "kept":
        return f"statistics {statistics:g} of the upload: set buffers: sent, or statistics_from: broadcast or images"
    if statistics_from == "sent" and cell.algorithm.get("attacker") == "eval":
        return f"statistics {statistics:g} of the upload: attacker: eval simulates no batch statistics"
    return None


def _known_statistics(model: nn.Module, s: Observation, v: int, source: str) -> Statistics:
    if source == "broadcast":
        kinds = ("running_mean", "running_var")
        return {n: tuple(s.weights[f"{n}.{kind}"] for kind in kinds) for n in layers_of(model)}  # type: ignore[misc]
    if source == "images":
        if s.own_images is None:
            raise ValueError("matching: statistics_from: images needs images of the server's own")
        return statistics_of_images(model, s.weights, s.own_images())
    if s.buffers is None:
        raise ValueError("matching: statistics of the upload need its buffers, and none were sent")
    return sent_statistics(model, s.weights, {name: value[v] for name, value in s.buffers.items()})


def _largest(target: Tensors, fraction: float) -> Tensors:
    """The fraction of the tensors with the largest norm, at least one, in their order."""
    by_norm = sorted(target, key=lambda name: -float(target[name].norm()))
    kept = set(by_norm[: max(1, rounded_down(fraction * len(target)))])
    return {name: g for name, g in target.items() if name in kept}


def _cosine_distance(model: nn.Module, s: Observation, x: Tensor, v: int, target: Tensors, zeros: str) -> Tensor:
    guessed_gradient = differentiable(model, s.weights, x, s.labels[v], target, s.clients)
    if zeros == "ignored":
        guessed_gradient = {name: g * (target[name] != 0) for name, g in guessed_gradient.items()}
    inner_product = torch.stack([(g * target[name]).sum() for name, g in guessed_gradient.items()]).sum()
    lengths = torch.stack([g.square().sum() for g in guessed_gradient.values()]).sum().sqrt()
    target_norm = torch.stack([g.square().sum() for g in target.values()]).sum().sqrt()
    return 1 - inner_product / (lengths * target_norm).clamp(min=1e-30)
