"""Inverts an update by simulating the client's steps: images for which local training ends where it did.

| paper | here | what |
|---|---|---|
| X_e | x (E, N, C, H, W) | images of each epoch, in their unknown order; `shared`: the same in all epochs |
| theta_T - theta_0 | update | what the client sent |
| lambda_inv | invariance | weight of the distance between epochs, which differ only in their order |

    u(x) = (theta_0 - SGD(theta_0, x, y)) / eta
    min over x   f_i sum_l w_l |u_l(x) - u_l|^2 / steps an epoch + tv TV(x) + box |x - clip(x)|^2 + invariance inv(x)

w_l = exp(-l) over the layers in the order of the model, a weight and its bias counting as one; f_i goes geometrically
from `factor` to 2 over the first half of the iterations. inv: the mean over pairs of epochs of the squared distance of
phi(x_e), the maximum over the images of fixed random convolutions. In the end, all epochs are aligned with the first
one and averaged. In train mode, running statistics move as the client's do; `statistics` weights their distance to
those that were sent, for any number of steps.

Dimitrov et al. 2022 (Data leakage in federated averaging), sections 3 and 4; the settings are those that its code has
for CIFAR-100. paper: the layers' order is that of JAX's trees, by name / here: that of the model. Geiping et al. 2020,
section 6, is `shared: true` with `invariance: 0`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fatbench.engine.local import LocalTraining
from fatbench.engine.optimizers import Descent, Moments, step
from fatbench.methods.inversions.batch_statistics import buffers_of, distance, layers_of, moved, watched
from fatbench.methods.inversions.image_measures import mse
from fatbench.methods.inversions.upload import Observation, Tensors
from fatbench.suite.entry import Passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Fraction, NonNegative, Positive, Rate

FILTERS = 96  # of the random convolutions behind `inv`
MOST = 50  # simulated steps: each keeps its graph in memory


def simulated(
    observed: Sequence[Observation],
    model: nn.Module,
    shape: tuple[int, int, int],
    generator: Generator,
    *,
    iterations: Count = 400,
    lr: Rate = 0.1,
    lr_decay: Fraction = 0.997,
    factor: Positive = 4.0,
    tv: NonNegative = 2e-4,
    box: NonNegative = 10.0,
    invariance: NonNegative = 6.075,
    shared: bool = False,
    statistics: NonNegative = 0.0,
    first_layer: NonNegative = 10.0,
) -> Tensor:
    """Images whose simulated local training gives the update that was sent: (V, N, C, H, W) in [0, 1].

    N is the number of labels of an upload. Adam from normal noise; the rate is multiplied by `lr_decay` every 20
    iterations. A gradient counts as one step. Only the first of several rounds is used. The attacker knows the client's
    rate, epochs, batch, momentum and weight decay, and simulates the steps in the client's mode. Raises ValueError for
    Adam, for more than 50 steps, or for statistics that were not sent.
    """
    first_observation = observed[0]
    model.train(first_observation.mode == "train")
    if statistics and first_observation.buffers is None:
        raise ValueError("simulated: statistics of the upload need its buffers, and none were sent")
    count = first_observation.labels.shape[1]
    local = first_observation.local
    epochs, size = (1, count) if local is None else (local.epochs, local.batch)
    per_epoch = -(-count // size)
    if local is not None and (local.optimizer != "sgd" or epochs * per_epoch > MOST):
        raise ValueError(f"simulated: at most {MOST} steps of SGD, got {epochs * per_epoch} of {local.optimizer}")
    names = list(first_observation.gradient)
    layers: dict[str, int] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], len(layers))
    weight = {name: float(torch.tensor(-float(layers[name.rpartition(".")[0]])).exp()) for name in names}
    rate = 1.0 if local is None else local.lr
    filters = torch.randn(FILTERS, shape[0], 3, 3, generator=generator, device=generator.device)
    image_sets = 1 if shared else epochs
    buffers, kinds = first_observation.buffers or {}, ("running_mean", "running_var")
    sent = [
        {layer: (buffers[f"{layer}.{kinds[0]}"][v], buffers[f"{layer}.{kinds[1]}"][v]) for layer in layers_of(model)}
        if statistics
        else {}
        for v in range(len(first_observation.labels))
    ]
    reconstructions = []
    for v in range(len(first_observation.labels)):
        labels = first_observation.labels[v]
        target = {name: g[v].float() / rate for name, g in first_observation.gradient.items()}
        x = torch.randn(image_sets, count, *shape, generator=generator, device=generator.device).to(labels.device)
        moments: Moments = {}
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
            for i in range(iterations):
                x.requires_grad_()
                with watched(model) as seen:
                    simulated_update = simulate_steps(model, first_observation.weights, x, labels, local, names)
                gap = torch.stack([weight[n] * (simulated_update[n] - target[n]).square().sum() for n in names]).sum()
                strength = factor * (2 / factor) ** min(1.0, i / max(1, iterations // 2))
                loss = strength * gap / per_epoch + tv * _variation(x)
                loss = loss + box * (x - x.clamp(0, 1)).square().sum((-3, -2, -1)).mean()
                if statistics:
                    ours = moved(model, first_observation.weights, seen)
                    loss = loss + statistics * distance(ours, sent[v], first_layer)
                if image_sets > 1 and invariance:
                    loss = loss + invariance * _epoch_variance(x, filters.to(x))
                (slope,) = torch.autograd.grad(loss, x)
                x = x.detach()
                moments = step([x], [slope], moments, Descent("adam", lr * lr_decay ** (i // 20)))
        reconstructions.append(_align_epochs(x.detach()))
    return torch.stack(reconstructions).nan_to_num(0.5, 1, 0).clamp(0, 1).float()


def every_epoch(observed_rounds: int, epochs: int, *, iterations: int) -> Passes:
    """For each epoch of the client: a forward pass, its gradient by the weights, and that one's by the image."""
    return iterations * epochs * Passes(1, 2)


def steps_of_sgd(cell: Facts) -> str | None:
    local = cell.algorithm.get("local")
    return "simulated needs a client that trains by SGD" if local and local["optimizer"] != "sgd" else None


def at_most_50_steps(cell: Facts) -> str | None:
    local = cell.algorithm.get("local")
    images = cell.algorithm.get("batch") or math.ceil(cell.client_images)
    step_count = local["epochs"] * (images // local["batch"]) if local else 0
    if step_count > 50:
        return f"simulated: {step_count} local steps, but memory holds the graphs of 50 at most"
    return None


def statistics_that_are_sent(cell: Facts, *, statistics: float) -> str | None:
    """Refuse statistics that are not sent, and the mean of clients in train mode, whose steps differ."""
    if cell.algorithm.get("mode") == "train" and cell.algorithm.get("aggregate", 1) > 1:
        return "simulated: it simulates one client in train mode, not a mean of several: leave out 'aggregate'"
    known = cell.algorithm.get("buffers") == "sent" and cell.algorithm.get("attacker") != "eval"
    return None if known or not statistics else f"statistics {statistics:g} of the upload: set buffers: sent"


def simulate_steps(
    model: nn.Module, weights: Tensors, x: Tensor, y: Tensor, local: LocalTraining | None, names: Sequence[str]
) -> Tensors:
    """(theta_0 - theta_T) / eta after SGD on images x (E, N, ...), or (1, N, ...) for all epochs, by `names`.

    Differentiable by x. Batches are in the order of x. local None: the gradient of all images. In train mode, a copy of
    the buffers moves from step to step.
    """
    if model.training:
        weights = {**weights, **buffers_of(model, weights)}
    start = {name: weights[name].detach().requires_grad_() for name in names}
    theta: Tensors = dict(start)
    velocity: Tensors = {}
    epochs, size, rate = (1, len(y), 1.0) if local is None else (local.epochs, local.batch, local.lr)
    decay, momentum = (0.0, 0.0) if local is None else (local.weight_decay, local.momentum)
    for epoch in range(epochs):
        images = x[epoch if len(x) > 1 else 0]
        for image_batch, labels in zip(images.split(size), y.split(size), strict=True):
            loss = F.cross_entropy(functional_call(model, {**weights, **theta}, (image_batch,)), labels)
            slopes = torch.autograd.grad(loss, list(theta.values()), create_graph=True, materialize_grads=True)
            change = {n: g + decay * theta[n] if decay else g for n, g in zip(theta, slopes, strict=True)}
            velocity = {n: momentum * velocity[n] + g if velocity and momentum else g for n, g in change.items()}
            theta = {n: w - rate * velocity[n] for n, w in theta.items()}
    return {n: (start[n] - w) / rate for n, w in theta.items()}


def _variation(x: Tensor) -> Tensor:
    """Squared differences of neighbours, cyclic, summed over an image; the mean over images."""
    squares = (x - x.roll(1, -1)).square() + (x - x.roll(1, -2)).square()
    return squares.sum((-3, -2, -1)).mean()


def _epoch_variance(x: Tensor, filters: Tensor) -> Tensor:
    """The mean squared difference, over all pairs of epochs, of features that ignore the order of images."""
    maps = torch.stack([F.conv2d(images, filters).amax(0) for images in x])
    return (maps[:, None] - maps[None]).square().mean()


def _align_epochs(x: Tensor) -> Tensor:
    """(N, C, H, W): the images of all epochs (E, N, ...) assigned to those of the first one, and averaged."""
    from scipy.optimize import linear_sum_assignment

    total, count = x[0].clone(), x.shape[1]
    for images in x[1:]:
        cost = torch.stack([mse(image.expand(count, *image.shape), images) for image in x[0]])
        total += images[torch.as_tensor(linear_sum_assignment(cost.cpu().numpy())[1]).to(images.device)]
    return total / len(x)
