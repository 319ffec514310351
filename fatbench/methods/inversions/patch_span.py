"""What the patch embedding's gradient reveals alone, if the positions are withheld: the span of the patches.

M = A^T X, so the rows of M span what the rows of X span, if A (unknown here) has rank N. An image behind a known
upsampling, X = up(z), has all its patches in that span,

    up(z) (I - P) = 0,    P the projector on the N largest right singular vectors of M (D, C p p),

which are many more equations than the l^2 C unknowns z, and homogeneous: z is the eigenvector of the smallest
eigenvalue of S = up^T (1 x (I - P)) up, up to its length and its sign. These are chosen by the gradient that each
candidate would cause. Needs N < C p p and N <= D, and the exact upsampled image: rounding to 8 bits hides the small
singular values that hold most of the span.

Ours; the comparison of Sawada et al. 2024 considers the fixed position safe. Symbols: `upload.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fatbench.methods.inversions.upload import (
    PATCH,
    Geometry,
    Observation,
    as_reconstructions,
    bilinear,
    geometry,
    gradients,
    inversion_reason,
    normalisation,
    patch_gradient,
    rows_by_patch,
    to_images,
    upsample,
)
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Positive

# lengths to try for the normalised image: standard deviations of its pixels, in units of 1 / std
SPREADS = (0.25, 0.5, 1.0)


def patch_span(
    observed: Sequence[Observation],
    model: nn.Module,
    shape: tuple[int, int, int],
    generator: Generator,
    *,
    latent: Count = 32,
    iterations: Count = 20,
    cut: Positive = 1e-8,
) -> Tensor:
    """The image behind the upsampling whose patches lie in the row space of the patch gradient: (V, 1, C, H, W).

    Reads only the gradient of the patch embedding, the mean of several rounds at the same weights. Singular values
    below `cut` times the largest do not count as span. Among the lengths and signs, the one whose gradient is most
    similar to what was sent is chosen. Raises ValueError if there are so many patches that the span is everything.
    """
    embedding_geometry = geometry(observed[0], shape, "patch_span")
    M = torch.stack([patch_gradient(s.gradient, "patch_span") for s in observed]).double().mean(0)
    if not embedding_geometry.patches < M.shape[2] or embedding_geometry.patches > embedding_geometry.width:
        raise ValueError(
            f"patch_span: {embedding_geometry.patches} patches span the whole space; it needs fewer than "
            f"{M.shape[2]} (values of a patch) "
            f"and at most {embedding_geometry.width} (width)"
        )
    u = rows_by_patch(bilinear(shape[1], latent, M), embedding_geometry)
    z = torch.stack([_eigenvector(m, u, embedding_geometry, iterations, cut, generator) for m in M])
    z = z / z.flatten(1).std(1)[:, None, None, None]
    _, std = normalisation(model, z)
    candidates = [sign * length * z for length in SPREADS for sign in (1, -1)]
    reconstructions = torch.stack(
        [
            as_reconstructions(to_images(upsample(0.5 * s / std.mean(), u), embedding_geometry), model)
            for s in candidates
        ]
    )
    likeness = torch.stack([_likeness(observed[0], model, reconstruction) for reconstruction in reconstructions])
    return reconstructions[likeness.argmax(0), torch.arange(len(M))]


def prior_within_the_image(cell: Facts, *, latent: int) -> str | None:
    if latent > cell.side:
        prior = f"a prior of {latent} pixels a side is larger than the images of {cell.side}"
        return inversion_reason(cell, f"{prior}: latent is at most {cell.side}")
    return None


def _likeness(observed: Observation, model: nn.Module, reconstructions: Tensor) -> Tensor:
    """(V,): cosine between the patch embedding's gradient that a reconstruction causes and the one that was sent."""
    kind = next(w for w in observed.weights.values() if w.is_floating_point()).dtype
    caused = gradients(model, observed.weights, reconstructions.to(kind), observed.labels[:, :1], (PATCH,))
    return F.cosine_similarity(
        patch_gradient(caused, "patch_span").flatten(1), patch_gradient(observed.gradient, "patch_span").flatten(1)
    )


def _eigenvector(
    m: Tensor, u: Tensor, embedding_geometry: Geometry, iterations: int, cut: float, generator: Generator
) -> Tensor:
    """(C, l, l): the smallest eigenvector of S, by inverse iteration on its Cholesky factor."""
    _, s, Vh = torch.linalg.svd(m, full_matrices=False)
    channels = embedding_geometry.channels
    rank = min(embedding_geometry.patches, int((s > cut * s[0]).sum()))
    complement = torch.eye(m.shape[1], dtype=m.dtype, device=m.device) - Vh[:rank].T @ Vh[:rank]
    grid, patch, latent = u.shape
    S = m.new_zeros(channels, latent, latent, channels, latent, latent)
    Q = complement.view(channels, patch, patch, channels, patch, patch)
    touched = [row.abs().sum(0).nonzero().flatten() for row in u]  # latent rows behind a row of patches
    for r in range(grid):
        for c in range(grid):
            a, b = touched[r], touched[c]
            ua, ub = u[r][:, a], u[c][:, b]
            block = torch.einsum("hijgkl,ia,jb,kd,le->habgde", Q, ua, ub, ua, ub)
            S[:, a[0] : a[-1] + 1, b[0] : b[-1] + 1, :, a[0] : a[-1] + 1, b[0] : b[-1] + 1] += block
    S = S.reshape(channels * latent**2, -1)
    S.diagonal().add_(1e-12 * float(S.diagonal().mean()))
    L = torch.linalg.cholesky(S)
    z = torch.randn(len(S), 1, generator=generator, device=generator.device).to(S)
    for _ in range(iterations):
        z = torch.cholesky_solve(z / z.norm(), L)
    return (z / z.norm()).view(channels, latent, latent)
