"""Restores the number of images of each class behind an update, from the gradient of the last layer.

| here | papers | what |
|---|---|---|
| g, (V, K) | d loss / d b | gradient of the last layer's bias: g_c = mean over the batch of p_c, minus n_c / B |
| G, (V, K, D) | d loss / d W | gradient of its weight |
| n, (V, K) | n_c | images of class c; they sum to B |

An update of T local steps at rate eta is divided by eta T first, which makes it the mean gradient over the steps.

Ma et al. 2023 (iLRG); Wainakh et al. 2022 (LLG).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from fatbench.methods.inversions.batch_statistics import buffers_of
from fatbench.methods.inversions.upload import Observation, Tensors
from fatbench.models import logit_parameters

DUMMIES = 1000  # noise images from which `counts` estimates the mean probabilities


def ilrg(g: Tensor, G: Tensor, W: Tensor, b: Tensor, batch: int, p: Callable[[], Tensor]) -> Tensor:
    """Counts (K,) by iLRG: the mean features of a class are G_c / g_c, and their probabilities solve for the counts.

    sum_j n_j (p_j(c) - [j = c]) = B g_c for all c, and sum_j n_j = B, by the pseudo-inverse. A class whose g_c is 0
    is unknown and gets the probabilities of zero features.

    Source: Ma et al. 2023, section 4. paper's code: if the counts fall short, it adds one to nearly every class / here:
    to the classes that rounding reduced most.
    """
    features = torch.where(g.abs()[:, None] > 0, G / g[:, None], torch.zeros_like(G))
    probabilities = (features @ W.T + b).softmax(1)  # (j, c)
    system = torch.cat([(probabilities - torch.eye(len(g)).to(g)).T, torch.ones_like(g)[None]])
    right_side = torch.cat([batch * g, g.new_tensor([float(batch)])])
    return rounded(torch.linalg.pinv(system) @ right_side, batch)


def counts(g: Tensor, G: Tensor, W: Tensor, b: Tensor, batch: int, p: Callable[[], Tensor]) -> Tensor:
    """Counts (K,) by n_c = B (p_c - g_c), with p the mean probabilities of noise images: exact for a zero head."""
    return rounded(batch * (p() - g), batch)


def llg(g: Tensor, G: Tensor, W: Tensor, b: Tensor, batch: int, p: Callable[[], Tensor]) -> Tensor:
    """Counts (K,) by LLG: a label for each negative g_c, then repeatedly for the most negative; each uses up its share.

    Source: Wainakh et al. 2022, algorithm 1, the impact m estimated from the update alone.
    """
    g, counts = g.clone(), torch.zeros_like(g, dtype=torch.int64)
    share = g.clamp(max=0).sum() * (1 + 1 / len(g)) / batch  # negative: what one image adds to its own class
    for c in g.argsort().tolist():
        if g[c] < 0 and int(counts.sum()) < batch:
            counts[c] += 1
            g[c] -= share
    while int(counts.sum()) < batch:
        c = int(g.argmin())
        counts[c] += 1
        g[c] -= share
    return counts


LABELS: dict[str, Callable[..., Tensor]] = {"ilrg": ilrg, "llg": llg, "counts": counts}


def rounded(n: Tensor, batch: int) -> Tensor:
    """Integer counts (K,) that sum to `batch`: clipped at 0, rounded, the largest rounding errors reversed."""
    clipped = n.nan_to_num(0).clamp(min=0)
    counts = clipped.round()
    while (missing_count := batch - int(counts.sum())) != 0:
        error = clipped - counts
        if missing_count < 0:
            error = torch.where(counts > 0, error, torch.full_like(error, math.inf))
        c = int(error.argmax()) if missing_count > 0 else int(error.argmin())
        counts[c] += 1 if missing_count > 0 else -1
    return counts.long()


def head_of(model: nn.Module) -> tuple[str, str]:
    """The names of the last layer's weight and bias. Raises ValueError if it has no bias."""
    names = logit_parameters(model)[-2:]
    if len(names) < 2 or not names[0].endswith("weight") or not names[1].endswith("bias"):
        raise ValueError(
            "labels: the gradients of the last layer's weight and bias are needed, and it lacks one of them"
        )
    return names[0], names[1]


def restored(
    method_name: str, observed: Observation, model: nn.Module, batch: int, shape: tuple[int, ...], generator: Generator
) -> Tensor:
    """Labels (V, B) int64, ascending, restored from an upload by the method `method_name` of LABELS.

    Raises ValueError if the last layer has no bias, or the update lacks it.
    """
    weight, bias = head_of(model)
    scale = 1.0
    if observed.local is not None:
        steps = observed.local.epochs * -(-batch // observed.local.batch)
        scale = 1 / (observed.local.lr * steps)
    W, b = observed.weights[weight].double(), observed.weights[bias].double()

    def p() -> Tensor:
        model.train(observed.mode == "train")
        return noise_probabilities(model, observed.weights, shape, generator)

    counts_by_upload = [
        LABELS[method_name](g.double() * scale, G.double() * scale, W, b, batch, p)
        for g, G in zip(observed.gradient[bias], observed.gradient[weight], strict=True)
    ]
    return torch.stack([torch.arange(len(n), device=n.device).repeat_interleave(n) for n in counts_by_upload])


def noise_probabilities(model: nn.Module, weights: Tensors, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Mean probabilities (K,) of images of normal noise, clamped to [0, 1], in the model's mode."""
    weights = {**weights, **buffers_of(model, weights)}
    float_tensor = next(value for value in weights.values() if value.is_floating_point())
    noise = torch.randn(DUMMIES, *shape, generator=generator, device=generator.device).to(float_tensor)
    with torch.no_grad():
        probabilities = [functional_call(model, weights, (chunk.clamp(0, 1),)).softmax(1) for chunk in noise.split(250)]
    return torch.cat(probabilities).double().mean(0)


def label_counts(restored_labels: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(V,): the fraction of correct counts of labels (V, B), 1 - sum_c |restored n_c - n_c| / (2 B)."""
    restored_counts, true_counts = (
        torch.nn.functional.one_hot(label_rows, classes).sum(1).double() for label_rows in (restored_labels, labels)
    )
    return 1 - (restored_counts - true_counts).abs().sum(1) / (2 * labels.shape[1])
