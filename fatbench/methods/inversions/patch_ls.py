"""Least squares through the patch embedding: one image from two tensors of its gradient, on an ordinary ViT.

The embedding is linear and the positions are added to its output. So for one image, whatever the rest of the network
does,

    M = A^T X,    A = d loss / d E_pos (N, D) without the class token,    M = d loss / d W_embed (D, C p p),

which is D equations for the N unknowns of every pixel offset: exact if A has rank N. Local training by SGD sums such
gradients, A = sum_t c_t A_t and M = A^T X with the same X, for any number of steps, with momentum, a proximal term or
clipping; Adam, augmentation and adversarial images break it. Two images in a batch add up to M = A_1^T X_1 + A_2^T X_2
and A = A_1 + A_2, whose solution is a mixture. Symbols: fatbench/methods/inversions/upload.py.

Ours; methods: Inversions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from fatbench.methods.inversions.upload import (
    Geometry,
    Observation,
    as_reconstructions,
    bilinear,
    downsample,
    geometry,
    normal_matrix,
    normalisation,
    patch_gradient,
    rows_by_patch,
    to_images,
    to_patches,
    token_gradient,
    too_few_equations,
    too_large_a_prior,
    upsample,
)
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, NonNegative

EPS = torch.finfo(torch.float64).eps
STRENGTHS = [10 ** (t / 4) for t in range(-64, 1)]  # regularisation relative to the largest eigenvalue


def patch_ls(
    observed: Sequence[Observation],
    model: nn.Module,
    shape: tuple[int, int, int],
    generator: Generator,
    *,
    solver: Literal["lstsq", "ridge", "tsvd", "box", "tv", "upsample"] = "ridge",
    strength: NonNegative | None = None,
    latent: Count = 32,
    iterations: Count = 100,
    decay: Literal["ignored", "corrected"] = "ignored",
) -> Tensor:
    """The image whose patches explain the gradient of the patch embedding best: (V, 1, C, H, W) in [0, 1].

    Treats the upload as complete: several rounds are averaged, and withheld entries count as zeros. This is the
    attacker who does not adapt. A constant factor such as 1 / (1 - R) cancels.

    lstsq: the plain solution. ridge, tsvd: regularised, `strength` relative to the largest eigenvalue of A A^T (ridge:
    added to it; tsvd: smaller ones are dropped). box: also 0 <= x <= 1. tv: also total variation, `strength` its
    weight. upsample: ridge on a `latent` x `latent` image behind bilinear upsampling. strength null: chosen by
    generalised cross-validation (tv: the largest weight that still fits the data as well as the noise allows), without
    the truth; inversion `oracle` tries all. `decay`: whether the effect of weight decay in local training is subtracted
    from the update first, which needs the client's rate, decay, momentum and number of steps.

    Raises ValueError without learned positions, for more patches than the model's width, or for more latent pixels than
    equations.
    """
    embedding_geometry = geometry(observed[0], shape, "patch_ls")
    if decay == "corrected":
        observed = [_without_decay(s) for s in observed]
    A, M = mean_system(observed, embedding_geometry, "patch_ls")
    check_determined(embedding_geometry, latent if solver == "upsample" else None, "patch_ls")
    if solver == "upsample":
        u = rows_by_patch(bilinear(shape[1], latent, A), embedding_geometry)
        return as_reconstructions(to_images(upsample(latent_ls(A, M, u, strength), u), embedding_geometry), model)
    if solver in ("box", "tv"):
        return as_reconstructions(
            _solve_with_prior(A, M, embedding_geometry, model, solver=solver, strength=strength, iterations=iterations),
            model,
        )
    return as_reconstructions(to_images(solve_filtered(A, M, solver, strength)[0], embedding_geometry), model)


def patches_of_the_solver(cell: Facts, *, solver: str) -> str | None:
    return too_few_equations(cell) if solver != "upsample" else None


def prior_of_the_solver(cell: Facts, *, solver: str, latent: int) -> str | None:
    return too_large_a_prior(cell, latent) if solver == "upsample" else None


def _without_decay(s: Observation) -> Observation:
    """An update of SGD minus (1 - c) theta_0, where c is what T steps of pure weight decay leave of a weight of 1."""
    if s.local is None:
        return s
    weight, velocity = 1.0, 0.0  # of a parameter whose gradient is only the decay
    for _ in range(s.local.epochs * -(-s.labels.shape[1] // s.local.batch)):
        velocity = s.local.momentum * velocity + s.local.weight_decay * weight
        weight -= s.local.lr * velocity
    return replace(s, gradient={n: g.double() - (1 - weight) * s.weights[n].double() for n, g in s.gradient.items()})


def mean_system(observed: Sequence[Observation], embedding_geometry: Geometry, method: str) -> tuple[Tensor, Tensor]:
    """A (V, N, D) and M (V, D, K), float64: the means of several rounds, with zeros for withheld entries."""
    A = torch.stack([token_gradient(s.gradient, embedding_geometry, method) for s in observed]).double().mean(0)
    return A, torch.stack([patch_gradient(s.gradient, method) for s in observed]).double().mean(0)


def check_determined(embedding_geometry: Geometry, latent: int | None, method: str) -> None:
    """Raise ValueError, with the rank and the unknowns, if the equations do not determine the image."""
    rank = min(embedding_geometry.patches, embedding_geometry.width)
    if latent is None and embedding_geometry.width < embedding_geometry.patches:
        raise ValueError(
            f"{method}: images of {embedding_geometry.grid * embedding_geometry.patch} pixels are "
            f"{embedding_geometry.patches} unknown patches, and a model of width "
            f"{embedding_geometry.width} gives a system of rank {rank}; use a wider model, larger patches, or "
            "an upsampling prior"
        )
    if latent is not None and latent**2 > rank * embedding_geometry.patch**2:
        raise ValueError(
            f"{method}: latent {latent} is {latent**2} unknowns a channel, and the system has rank at most "
            f"{rank * embedding_geometry.patch**2}"
        )


def solve_filtered(A: Tensor, M: Tensor, solver: str, strength: float | None = None) -> tuple[Tensor, Tensor]:
    """X (V, N, K) of M = A^T X by a filter on the singular values of A, and the ridge (V,) that was added to A A^T.

    strength None: lstsq drops singular values below rounding; ridge and tsvd minimise |residual|^2 / (equations -
    effective unknowns)^2 (Golub, Heath and Wahba 1979).
    """
    V, s, Uh = torch.linalg.svd(A, full_matrices=False)  # A = V s U^T, so A^T = U s V^T
    eigen, beta = s.square(), Uh @ M  # beta: M in the basis of the singular vectors
    top = eigen[:, :1]
    if solver == "lstsq":
        strength, solver = (max(A.shape[1:]) * EPS) ** 2, "tsvd"  # squared, as eigenvalues are compared
    if solver == "tsvd":
        filters = (eigen[:, None] >= torch.tensor(STRENGTHS).to(A)[:, None] * top[:, None]).to(A)
        fixed = None if strength is None else (eigen >= strength * top).to(A)
    else:
        grid = torch.tensor(STRENGTHS).to(A)[:, None] * top[:, None]
        filters = eigen[:, None] / (eigen[:, None] + grid).clamp(min=1e-300)
        fixed = None if strength is None else eigen / (eigen + strength * top).clamp(min=1e-300)
    power = beta.square().sum(2)
    # what no X explains: the part of M outside the span of A
    residual_power = (M.square().sum((1, 2)) - power.sum(1)).clamp(min=0)
    score = (residual_power[:, None] + ((1 - filters).square() * power[:, None]).sum(2)) / (
        (A.shape[2] - filters.sum(2)).clamp(min=1e-6).square()
    )
    best = score.argmin(1)
    filter_values = filters[torch.arange(len(A), device=A.device), best] if fixed is None else fixed
    ridge = torch.tensor(STRENGTHS).to(A)[best] * top[:, 0]
    # 0 / 0 of a dropped direction is 0
    inverse = torch.where(filter_values > 0, filter_values / s.clamp(min=1e-300), 0)
    return V @ (inverse.unsqueeze(2) * beta), ridge


def latent_ls(A: Tensor, M: Tensor, u: Tensor, strength: float | None = None) -> Tensor:
    """The normalised image (V, C, l, l) behind the upsampling `u`, by ridge on the normal equations."""
    solutions = []
    for a, m in zip(A, M, strict=True):
        eigen, Q, gamma = _latent_system(a, m, u)
        grid = torch.tensor(STRENGTHS).to(A) * eigen[-1] if strength is None else (strength * eigen[-1])[None]
        grid = grid.clamp(min=EPS * float(eigen[-1]) + 1e-300)[:, None]
        # |M|^2 minus this is the squared residual; freedom: equations minus effective unknowns
        explained = gamma.square().sum(1) * (eigen + 2 * grid) / (eigen + grid).square()
        freedom = m.numel() - gamma.shape[1] * (eigen / (eigen + grid)).sum(1)
        score = (m.square().sum() - explained.sum(1)).clamp(min=0) / freedom.square()
        solutions.append(_latent_image(eigen, Q, gamma, grid[score.argmin()], u))
    return torch.stack(solutions)


def latent_all(A: Tensor, M: Tensor, u: Tensor, strengths: Sequence[float]) -> Tensor:
    """The results of `latent_ls` at each of several strengths: (P, V, C, l, l)."""
    systems = [_latent_system(a, m, u) for a, m in zip(A, M, strict=True)]
    return torch.stack(
        [torch.stack([_latent_image(*s, strength * s[0][-1] + 1e-300, u) for s in systems]) for strength in strengths]
    )


def _latent_system(a: Tensor, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(eigenvalues, eigenvectors) of the normal equations behind `u`, and their right side (l l, C) in that basis."""
    eigen, Q = torch.linalg.eigh(normal_matrix((a @ a.T)[None], u)[0])
    return eigen.clamp(min=0), Q, Q.T @ downsample((a @ m)[None], u)[0].flatten(1).T


def _latent_image(eigen: Tensor, Q: Tensor, gamma: Tensor, ridge: Tensor, u: Tensor) -> Tensor:
    return (Q @ (gamma / (eigen + ridge)[:, None])).T.unflatten(1, (u.shape[2],) * 2)


def _solve_with_prior(
    A: Tensor,
    M: Tensor,
    embedding_geometry: Geometry,
    model: nn.Module,
    *,
    solver: str,
    strength: float | None,
    iterations: int,
) -> Tensor:
    """Least squares with a prior, by splitting X = W (ADMM): X fits the data, W obeys the prior."""
    start, ridge = solve_filtered(A, M, "ridge")
    mean, std = normalisation(model, A)
    low, high = -mean / std, (1 - mean) / std  # black and white, normalised as the network does
    rho = ridge.clamp(min=1e-10 * float(A.square().sum((1, 2)).max()))[:, None, None]
    eigen, Q = torch.linalg.eigh(A @ A.transpose(1, 2))  # once, for the solution of every iteration
    right_side = A @ M

    def solve(prior: Callable[[Tensor], Tensor]) -> Tensor:
        W = prior(to_images(start, embedding_geometry))
        Y = torch.zeros_like(W)
        for _ in range(iterations):
            target = right_side + rho * to_patches(W - Y, embedding_geometry.patch)
            X = to_images(Q @ ((Q.transpose(1, 2) @ target) / (eigen[:, :, None] + rho)), embedding_geometry)
            W = prior(X + Y)
            Y = Y + X - W  # the scaled dual variable
        return W

    def box(x: Tensor) -> Tensor:
        return x.maximum(low).minimum(high)

    if solver == "box":
        return solve(box)
    if strength is not None:
        return solve(lambda x: box(tv_denoise(x, strength)))
    # the least squares solution's residual, per degree of freedom that it leaves
    noise = (
        (M - A.transpose(1, 2) @ start).square().sum((1, 2))
        * A.shape[2]
        / max(A.shape[2] - embedding_geometry.patches, 1)
    )
    best = solve(box)
    for weight in (1e-3, 1e-2, 3e-2, 1e-1):
        tried = solve(lambda x, weight=weight: box(tv_denoise(x, weight)))  # type: ignore[misc]
        fits = (M - A.transpose(1, 2) @ to_patches(tried, embedding_geometry.patch)).square().sum((1, 2)) <= 1.1 * noise
        best = torch.where(fits[:, None, None, None], tried, best)
    return best


def tv_denoise(x: Tensor, weight: float, iterations: int = 10) -> Tensor:
    """argmin over w of |w - x|^2 / 2 + weight TV(w), (V, C, H, W) as x, by projection of the dual (Chambolle 2004)."""
    p, q = torch.zeros_like(x), torch.zeros_like(x)

    def divergence() -> Tensor:
        return (p - p.roll(1, -1)) + (q - q.roll(1, -2))

    for _ in range(iterations):
        slope = divergence() - x / weight  # periodic differences; the border's are set to 0 below
        horizontal, vertical = slope.roll(-1, -1) - slope, slope.roll(-1, -2) - slope
        horizontal[..., -1], vertical[..., -1, :] = 0, 0
        length = 1 + 0.25 * (horizontal.square() + vertical.square()).sqrt()
        p, q = (p + 0.25 * horizontal) / length, (q + 0.25 * vertical) / length
    return x - weight * divergence()
