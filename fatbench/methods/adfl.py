"""AdFL's aggregator: how the models classify the images that each of them draws.

| paper | here | what |
|---|---|---|
| probability | cross[i, k, c] | how model i classifies the image that model k drew of label c |
| S_i | scores[i] | how the others classify model i's images, and how it classifies theirs |
| w_i | weights[i] | S_i / sum S |

    each model k draws an image of every label c, by targeted iterated FGSM
    S_i = sum over k != i and c of cross[i, k, c] + cross[k, i, c];   w_i = S_i / sum_j S_j
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fatbench.engine.local import gradients_of, load, precision_context
from fatbench.engine.mixing import normalised
from fatbench.engine.randomness import generator
from fatbench.engine.rounds import Context, Mixing, Problem, Tensors, Update
from fatbench.suite.types import Count, Radius


def adfl(
    updates: Sequence[Update],
    context: Context,
    *,
    start: Literal["noise", "black", "white"] = "noise",
    steps: Count = 100,
    step: Radius = 0.01,
) -> Mixing:
    """AdFL: weights by how well the images that each model draws, one for every label, are recognised by the others.

    From `start`, model k draws an image of every label c by steps of targeted iterated FGSM, x <- clip(x - step * sign
    of the gradient of CE(f_k(x), c), 0, 1), without an epsilon ball. p[i, k, c] is the probability of c that model i
    gives that image where c is its prediction, else 0. S_i = sum over k != i and c of p[i, k, c] + p[k, i, c], and
    w_i = S_i / sum S; all S zero: 1 / m. N_k is ignored. Models run in eval mode; p is read in float32 whatever the
    precision. `step` 0.01 and 100 `steps` span [0, 1]. Uses no data, only the shape of the images.

    The noise is uniform, new every round, and the same for every model, so that equal models draw equal images and
    have equal weights. Costs m * C * steps backward passes and m^2 * C forward passes on the server, no bytes.
    Metrics per client: adfl_score, S; adfl_hit, the fraction of its images that a model itself classifies as labelled.
    Artifacts: adfl_images (m, C, channels, H, W) uint8, adfl_cross p (m, m, C), adfl_weights (m,), in the order of the
    updates, whose clients are adfl_clients (m,).

    Source: Danilenka et al. 2022; differences: adfl-images, adfl-scores. Start, steps and step are not stated there.
    """
    problem = context.problem
    side = problem.images.shape[-2:] if problem.size is None else (problem.size, problem.size)
    shape = (problem.classes, problem.images.shape[1], *side)
    if start == "noise":
        draw = generator(problem.seed, "adfl", context.round, device=problem.device)
        blank = torch.rand(shape, generator=draw, device=problem.device)
    else:
        blank = torch.full(shape, 1.0 if start == "white" else 0.0, device=problem.device)
    images = draw_images(problem, [update.model for update in updates], blank, steps, step)
    cross = _cross_prediction(problem, updates, images)
    cross_scores = cross.sum(2).fill_diagonal_(0)  # [i, k]: model i on the images of model k
    scores = [float(score) for score in cross_scores.sum(1) + cross_scores.sum(0)]
    weights = normalised(scores) if math.fsum(scores) > 0 else [1 / len(updates)] * len(updates)
    hits = (cross.diagonal().T > 0).double().mean(1).tolist()
    clients = [update.client for update in updates]
    return Mixing(
        weights,
        metrics={
            "adfl_score": dict(zip(clients, scores, strict=True)),
            "adfl_hit": dict(zip(clients, hits, strict=True)),
        },
        artifacts={
            "adfl_images": (images * 255).round().to("cpu", torch.uint8),
            "adfl_cross": cross,
            "adfl_weights": torch.tensor(weights, dtype=torch.float64),
            "adfl_clients": torch.tensor(clients),
        },
    )


def draw_images(problem: Problem, states: Sequence[Tensors], blank: Tensor, steps: int, step: float) -> Tensor:
    """Image c of model k, (m, C, channels, H, W) in [0, 1]: from blank[c] towards what model k classifies as c.

    The C images of a model go through it together. On an accelerator so do all m models, as one with stacked weights;
    on a CPU that costs more than it saves.
    """
    if problem.path != "reference" and problem.device.type != "cpu":
        model = load(problem, states[0]).eval()
        stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}

        def logits_of(tensors: Tensors, x: Tensor) -> Tensor:
            logits: Tensor = torch.func.functional_call(model, tensors, (x,))
            return logits

        all_models = functools.partial(torch.vmap(logits_of), stacked)
        with sdpa_kernel(SDPBackend.MATH):  # vmap takes no fused attention on a CPU
            return _towards_labels(problem, all_models, blank.expand(len(states), *blank.shape), steps, step)
    images = []
    for state in states:
        model = load(problem, state).eval()
        images.append(_towards_labels(problem, model, blank, steps, step))
    return torch.stack(images)


def _towards_labels(problem: Problem, model: Callable[[Tensor], Tensor], x: Tensor, steps: int, step: float) -> Tensor:
    """Targeted iterated FGSM on x (..., C, channels, H, W) whose logits (..., C, C) have the targets 0 .. C - 1."""
    for _ in range(steps):
        x = x.detach().requires_grad_()
        with precision_context(problem):
            logits = model(x)
        # the sum gives each image the gradient of its own loss; log_softmax keeps the digits of small probabilities
        loss = -logits.float().log_softmax(-1).diagonal(dim1=-2, dim2=-1).sum()
        x = (x.detach() - step * gradients_of(problem, loss, [x])[0].sign()).clamp(0, 1)
    return x.detach()


def _cross_prediction(problem: Problem, updates: Sequence[Update], images: Tensor) -> Tensor:
    """p (m, m, C) float64 on the CPU: model i's probability of c for image c of model k, 0 if it is misclassified."""
    m, classes = images.shape[:2]
    labels = torch.arange(classes, device=images.device).expand(m, classes)
    probabilities_by_model = []
    with torch.no_grad():
        for update in updates:
            model = load(problem, update.model).eval()
            probabilities = model(images.flatten(0, 1)).float().softmax(1).view(m, classes, classes)
            is_correct = probabilities.argmax(2) == labels
            probabilities_by_model.append(
                torch.where(is_correct, probabilities.gather(2, labels[..., None])[..., 0], 0.0).nan_to_num()
            )
    return torch.stack(probabilities_by_model).to("cpu", torch.float64)
