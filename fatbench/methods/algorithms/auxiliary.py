"""Auxiliary images: what FedAUX does with unlabelled data before the first round.

| paper | here | what |
|---|---|---|
| D_d, D_- | divide | images to distil on (80 per cent), negatives for scoring (20) |
| h_0 | represent | features: what enters the layers of logits |
| | pretrain | SimCLR on the auxiliary images |
| s_k(x) | certainty | how much x looks like client k's data, by a private logistic regression |

Sattler, Korjakow, Rischke and Samek 2021 (FedAUX).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fatbench.engine.local import copy_state, gradients_of, load, pixels, precision_context, trainable
from fatbench.engine.optimizers import Descent, Moments, step
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Problem, Tensors
from fatbench.models import logit_parameters

PROJECTED = 128  # SimCLR's projection head: D -> D -> 128
SIMCLR_TEMPERATURE = 0.5


def divide(problem: Problem, algorithm: str) -> tuple[Tensor, Tensor]:
    """(images to distil on, negatives), uint8: a random 80 and 20 per cent of the auxiliary images.

    Raises ValueError if there are no auxiliary images, too few, or if their shape differs from the training images'.
    """
    images = problem.auxiliary
    if images is None:
        raise ValueError(f"{algorithm} needs unlabelled images: set the cell's 'auxiliary' to a data set")
    if len(images) < 5:
        raise ValueError(f"{algorithm}: {len(images)} auxiliary images cannot be divided 80 to 20; give at least 5")
    training_shape, auxiliary_shape = problem.images.shape[1:], images.shape[1:]
    if training_shape[0] != auxiliary_shape[0] or (training_shape != auxiliary_shape and problem.size is None):
        raise ValueError(
            f"{algorithm}: auxiliary images are {'x'.join(map(str, auxiliary_shape))}, training images "
            f"{'x'.join(map(str, training_shape))}"
            + ("; set 'size' to resize both" if training_shape[0] == auxiliary_shape[0] else "")
        )
    order = torch.randperm(len(images), generator=generator(problem.seed, "auxiliary")).to(images.device)
    distil_count = 4 * len(images) // 5
    return images[order[:distil_count]], images[order[distil_count:]]


# --- features ----------------------------------------------------------------------------------------------------


@contextmanager
def recorded_features(model: nn.Module) -> Iterator[list[Tensor]]:
    """A context with a list that holds, after each forward pass, the inputs (B, d) of the layers of logits."""
    layers = getattr(model, "logit_layers", (logit_parameters(model)[0].rpartition(".")[0],))
    features: list[Tensor] = []
    first_layer = model.get_submodule(layers[0])

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if module is first_layer:
            features.clear()
        features.append(inputs[0].flatten(1))

    handles = [model.get_submodule(layer).register_forward_pre_hook(record) for layer in layers]
    try:
        yield features
    finally:
        for handle in handles:
            handle.remove()


def represent(problem: Problem, model: nn.Module, images: Tensor, batch: int) -> Tensor:
    """Features (n, D) float32 of stored images (n, C, H, W), on the CPU: eval mode, no gradient."""
    model.eval()
    features = []
    with torch.no_grad(), recorded_features(model) as layer_inputs:
        for chunk in images.split(batch):
            model(pixels(problem, chunk))
            features.append(torch.cat(layer_inputs, 1).float())
    return torch.cat(features).cpu()


# --- SimCLR ------------------------------------------------------------------------------------------------------


def pretrain(problem: Problem, start: Tensors, epochs: int, batch: int, lr: float) -> tuple[Tensors, float]:
    """(the model after SimCLR on all auxiliary images, mean loss of the last epoch). Layers of logits do not change.

    Chen et al. 2020: two views of each image, cosine similarities at temperature 0.5, each view to find the other among
    the 2 (B - 1) + 1 of its batch; Adam; a projection head of two layers, discarded afterwards. If a single image is
    left at the end of an epoch, it is dropped, because it has no negatives.
    """
    assert problem.auxiliary is not None
    model = load(problem, start)
    frozen_prefixes = {f"{layer}." for layer in getattr(model, "logit_layers", ())} or set(logit_parameters(model))
    names = [name for name in trainable(model) if not name.startswith(tuple(frozen_prefixes))]
    order = generator(problem.seed, "simclr_order")
    draws = generator(problem.seed, "simclr_views", device=problem.device)
    moments: Moments = {}
    with forked(problem.seed, "simclr", device=problem.device), recorded_features(model) as layer_inputs:
        model.train()
        with torch.no_grad():  # only to learn how wide the features are
            model(pixels(problem, problem.auxiliary[:2]))
        size = sum(layer_input.shape[1] for layer_input in layer_inputs)
        head = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, PROJECTED)).to(problem.device)
        model.load_state_dict(start)  # undoes the batch statistics of the pass above
        weights = [*(model.get_parameter(name) for name in names), *head.parameters()]
        for _ in range(epochs):
            losses, sizes = [], []
            permutation = torch.randperm(len(problem.auxiliary), generator=order).to(problem.device)
            for rows in permutation.split(batch):
                if len(rows) == 1:
                    continue
                x = pixels(problem, problem.auxiliary[rows])
                with precision_context(problem):
                    model(torch.cat([view(x, draws), view(x, draws)]))
                    projected = head(torch.cat(layer_inputs, 1)).float()
                loss = contrast(projected)
                moments = step(weights, gradients_of(problem, loss, weights), moments, Descent("adam", lr))
                losses.append(loss.detach())
                sizes.append(len(rows))
    mean = sum(a * b for a, b in zip(torch.stack(losses).double().tolist(), sizes, strict=True)) / sum(sizes)
    return copy_state(model), mean


def contrast(projected: Tensor) -> Tensor:
    """SimCLR's NT-Xent of projections (2B, d) whose row i and row B + i are two views of one image."""
    z = F.normalize(projected, dim=1)
    similar = (z @ z.T / SIMCLR_TEMPERATURE).fill_diagonal_(-math.inf)  # no view is to find itself
    image_count = len(z) // 2
    # the other view is B rows further, cyclically
    return F.cross_entropy(similar, torch.arange(2 * image_count, device=z.device).roll(image_count))


def view(x: Tensor, draws: Generator) -> Tensor:
    """A random view of each image (B, C, H, W) in [0, 1].

    A crop of 20 to 100 per cent, flip, brightness, contrast and, for colour images, saturation; a fifth of them turn
    grey. SimCLR's hue and blur are left out, as is usual for small images.
    """
    b, channels = x.shape[:2]

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(b, generator=draws, device=x.device)

    area, ratio = uniform(0.2, 1.0), uniform(math.log(3 / 4), math.log(4 / 3)).exp()
    crop_width, crop_height = (area * ratio).sqrt().clamp(max=1.0), (area / ratio).sqrt().clamp(max=1.0)
    flip = (uniform(0, 1) < 0.5).float() * 2 - 1
    zero = torch.zeros_like(crop_width)
    # the crop's middle, so that the crop stays inside the image, whose coordinates are -1 to 1
    shift_x, shift_y = uniform(-1, 1) * (1 - crop_width), uniform(-1, 1) * (1 - crop_height)
    affine = torch.stack([crop_width * flip, zero, shift_x, zero, crop_height, shift_y], 1).reshape(b, 2, 3)
    grid = F.affine_grid(affine, list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, padding_mode="border", align_corners=False)

    def per_image(factor: Tensor) -> Tensor:
        return factor.reshape(b, 1, 1, 1)

    x = x * per_image(uniform(0.6, 1.4))
    middle = x.mean((1, 2, 3), keepdim=True)
    x = middle + (x - middle) * per_image(uniform(0.6, 1.4))
    if channels == 3:
        grey = x.mean(1, keepdim=True)
        colour = uniform(0.6, 1.4) * (uniform(0, 1) >= 0.2).float()  # 0 turns a fifth grey
        x = grey + (x - grey) * per_image(colour)
    return x.clamp(0, 1)


# --- certainty scores --------------------------------------------------------------------------------------------


def certainty(
    client_features: Tensor,
    negatives: Tensor,
    scored_features: Tensor,
    *,
    regularisation: float,
    privacy: Literal["calibrated", "released", "none"],
    epsilon: float,
    delta: float,
    draws: Generator,
) -> Tensor:
    """Scores (n,) in (0, 1]: how likely images with features `scored_features` (n, D) belong to a client's data.

    A logistic regression of `client_features` against the `negatives`, with L2 weight `regularisation` on the mean
    loss, made (epsilon, delta)-differentially private for the client's images by Gaussian noise; plus 1e-8.

    "calibrated": features are scaled by the largest norm of the negatives, which are public, clipped to norm 1, and get
    a constant, so that the intercept is regularised like the rest and rows have norm at most 1 when divided by sqrt 2.
    The minimiser then moves by at most 2 / (n lambda) when an image is replaced (Chaudhuri et al. 2011), and noise of
    deviation 2 / (n lambda) sqrt(2 ln(1.25 / delta)) / epsilon suffices (Dwork and Roth 2014, epsilon at most 1).
    "released": the same noise, but scikit-learn's C is 1 / lambda, which is a weight of lambda / n on the mean loss, so
    that the minimiser can move n times as far; the largest norm is taken over private features too, and the intercept
    is not regularised. Its guarantee does not hold (differences: fedaux-privacy). "none": calibrated without the noise.
    """
    released = privacy == "released"
    weights, rows = separator(client_features, negatives, regularisation, released)
    n = len(client_features) + len(negatives)
    if privacy != "none":
        deviation = 2 / (n * regularisation) * math.sqrt(2 * math.log(1.25 / delta)) / epsilon
        weights = weights + deviation * torch.randn(len(weights), generator=draws, dtype=torch.float64)
    # minus: negatives have label 1; 1e-8 keeps sums of scores above 0
    return torch.sigmoid(-rows(scored_features) @ weights).float() + 1e-8


def separator(
    client_features: Tensor, negatives: Tensor, regularisation: float, released: bool
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """(weights (D + 1,) of the regression, the map from features (n, D) to its rows (n, D + 1)), float64, no noise."""
    from sklearn.linear_model import LogisticRegression

    all_features = torch.cat([client_features, negatives])
    bound = float((all_features if released else negatives).norm(dim=1).max())

    def rows(features: Tensor) -> Tensor:
        scaled = (features / bound).double()
        if not released:
            scaled = scaled / scaled.norm(dim=1, keepdim=True).clamp(min=1.0) / math.sqrt(2)
        constant = torch.full((len(scaled), 1), 1.0 if released else math.sqrt(0.5), dtype=torch.float64)
        return torch.cat([scaled, constant], 1)

    x, y = (
        rows(all_features).numpy(),
        torch.cat([torch.zeros(len(client_features)), torch.ones(len(negatives))]).numpy(),
    )
    if released:
        regression = LogisticRegression(C=1 / regularisation, max_iter=1000).fit(x[:, :-1], y)
        weights = torch.cat([torch.from_numpy(regression.coef_[0]), torch.from_numpy(regression.intercept_)])
    else:
        regression = LogisticRegression(C=1 / (len(y) * regularisation), fit_intercept=False, max_iter=1000, tol=1e-8)
        weights = torch.from_numpy(regression.fit(x, y).coef_[0])
    return weights.double(), rows
