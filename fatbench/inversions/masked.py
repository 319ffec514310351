"""The attacker who knows that entries are withheld: systems built from what survived, and from nothing else.

A masked update is no noisy update. With a = 1 where an entry of A was sent and b = 1 where one of M was,

    min over X, A_missing of  sum_t | b_t (A_t^T X - M_t) |^2 + mu | A_t,missing |^2

is linear in X = up(z) for given A (weighted least squares over the surviving entries, by conjugate gradients with the
system of a full update as preconditioner) and linear in the missing entries of A for given X (one small system for each
of the D columns), so the two are solved in turn. Rounds t at the same weights are first laid over each other: an entry
that any of them sent is known exactly, so m fresh masks withhold R^m. Rounds at other weights have their own A_t.

The start is what `patch_ls` makes of the zeros. Rescaling by 1 / (1 - R) would do nothing, because A and M share it.
Each turn is one of expectation maximisation: the missing entries of A have a normal prior of the variance of the
others, and how uncertain they still are is added to A A^T, so that X is not fitted to errors in A.

Ours; not in P002, whose attacker takes masked updates as complete (A-54). Symbols: fatbench/inversions/seen.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn

from fatbench.inversions.patch_ls import determined, filtered, latent_ls
from fatbench.inversions.seen import (
    Geometry,
    Seen,
    bilinear,
    down,
    geometry,
    normal_matrix,
    normalisation,
    patch_gradient,
    rows,
    shown,
    to_images,
    token_gradient,
    up,
)
from fatbench.kinds import Count, Natural, Positive

PRIOR = 0.25  # variance of a normalised image, for the ridge
System = tuple[Tensor, Tensor, Tensor, Tensor]  # A (N, D), M (D, K), and what of them is known


def masked(
    seen: Sequence[Seen],
    model: nn.Module,
    shape: tuple[int, int, int],
    generator: Generator,
    *,
    latent: Count | None = 32,
    iterations: Natural = 8,
    inner: Count = 6,
    floor: Positive = 1e-4,
) -> Tensor:
    """The image behind one or several masked uploads of it, by alternation: (V, 1, C, H, W) in [0, 1].

    Masks are those of the upload; where there are none, a zero is taken for a withheld entry. Where all rounds together
    leave nothing out, the system is that of `patch_ls` and is solved at once. `latent`: the image is `latent` x
    `latent` behind bilinear upsampling; null: the pixels themselves. `iterations` 0: the start alone, without
    alternation; `inner`: steps of conjugate gradients; `ridge`, `mu`: regularisation, relative to the systems' size.

    ValueError: nothing of the gradient of the positions was sent; too many unknowns, as in `patch_ls`.
    """
    at = geometry(seen[0], shape, "masked")
    determined(at, latent, "masked")
    groups = _merged(seen, at)
    pictures = []
    for v in range(len(seen[0].labels)):
        systems = [(A[v], M[v], a[v], b[v]) for A, M, a, b in groups]
        complete = [s for s in systems if s[2].all() and s[3].all()]
        if not all(a.any() for _, _, a, _ in systems):
            raise ValueError("masked: nothing of the gradient of the positions was sent; patch_span does without it")
        u = rows(bilinear(shape[1], latent, systems[0][0]), at) if latent else None
        if complete:
            A, M = torch.cat([s[0] for s in complete], 1).double(), torch.cat([s[1] for s in complete]).double()
            X = (
                up(latent_ls(A[None], M[None], u.double()), u.double())
                if u is not None
                else filtered(A[None], M[None], "ridge")[0]
            )
        else:
            X = _alternate(systems, at, u, model, iterations, inner, floor)[None].double()
        pictures.append(shown(to_images(X, at), model))
    return torch.cat(pictures)


def _merged(seen: Sequence[Seen], at: Geometry) -> list[System]:
    """One system (V, ...) for each set of weights: the known entries of all its rounds, zero elsewhere."""
    groups: list[tuple[Seen, System]] = []
    for s in seen:
        A, M = token_gradient(s.gradient, at, "masked"), patch_gradient(s.gradient, "masked")
        mask = {name: g != 0 for name, g in s.gradient.items()} if s.mask is None else s.mask
        mask = {name: mask.get(name, torch.ones_like(g, dtype=torch.bool)) for name, g in s.gradient.items()}
        a, b = token_gradient(mask, at, "masked"), patch_gradient(mask, "masked")
        for position, (other, (A0, M0, a0, b0)) in enumerate(groups):
            if all(torch.equal(w, other.weights[name]) for name, w in s.weights.items()):
                groups[position] = (other, (torch.where(a0, A0, A), torch.where(b0, M0, M), a | a0, b | b0))
                break
        else:
            groups.append((s, (A, M, a, b)))
    return [system for _, system in groups]


def _alternate(
    systems: list[System], at: Geometry, u: Tensor | None, model: nn.Module, iterations: int, inner: int,
    floor: float,
) -> Tensor:  # fmt: skip
    """X (N, K). The unknown is z (l, l, C) flattened to (l l, C), or X itself."""
    scaled = []
    for A, M, a, b in systems:  # A at unit size, so that mu and ridge mean the same at any round of training
        size = A[a].square().mean().sqrt().clamp(min=1e-30)
        scaled.append((A / size, M / size, a, b.to(A)))
    mean, std = normalisation(model, scaled[0][0])
    low, high = float((-mean / std).min()), float(((1 - mean) / std).max())

    def lift(z: Tensor) -> Tensor:
        return z if u is None else up(z.T.unflatten(1, (u.shape[2],) * 2)[None], u)[0]

    def drop(X: Tensor) -> Tensor:
        return X if u is None else down(X[None], u)[0].flatten(1).T

    def normal(gram: Tensor) -> Tensor:
        return gram if u is None else normal_matrix(gram[None], u.double())[0]

    sent = [float(b.mean()) for _, _, _, b in scaled]
    A = torch.cat([A for A, _, _, _ in scaled], 1)[None].double()
    M = torch.cat([M for _, M, _, _ in scaled])[None].double()
    start = filtered(A, M, "ridge")[0][0] if u is None else latent_ls(A, M, u.double())[0].flatten(1).T
    z = start.to(scaled[0][0])
    full = [A for A, _, _, _ in scaled]
    for _ in range(iterations):
        X = lift(z).clamp(low, high)
        gaps = [(b * (A.T @ X - M)).square().sum() / b.sum() for A, (_, M, _, b) in zip(full, scaled, strict=True)]
        noise = [max(float(gap), floor) for gap in gaps]
        answers = [_completed(system, X, level) for system, level in zip(scaled, noise, strict=True)]
        full = [A for A, _ in answers]
        z = _solve(answers, scaled, noise, lift, drop, normal, z, sent, inner)
    return lift(z)


def _completed(system: System, X: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """A with its missing entries' posterior mean, given X, and the sum over columns of their covariance (N, N).

    Column d from the surviving entries of row d of M; prior: mean 0, variance 1, the variance of the entries that were
    sent.
    """
    A, M, a, b = system
    missing = (~a).T.to(A)  # (D, N)
    gap = M - b * (A.T @ X)
    answers, spread = [], torch.zeros(len(A), len(A), dtype=torch.float64, device=A.device)
    for lost, kept, left in zip(missing.split(64), b.split(64), gap.split(64), strict=True):
        gram = (X * kept[:, None]) @ X.T * lost[:, :, None] * lost[:, None, :]
        factor = torch.linalg.cholesky((gram + torch.diag_embed(noise + (1 - lost))).double())
        answers.append(torch.cholesky_solve((left @ X.T * lost).double()[:, :, None], factor).squeeze(2).to(A) * lost)
        inverse = torch.cholesky_inverse(factor)
        spread += noise * (inverse * (lost[:, :, None] * lost[:, None, :])).sum(0)
    return A + torch.cat(answers).T, spread


def _solve(
    answers: list[tuple[Tensor, Tensor]], systems: list[System], noise: list[float], lift: Callable[[Tensor], Tensor],
    drop: Callable[[Tensor], Tensor], normal: Callable[[Tensor], Tensor], z: Tensor, sent: list[float], inner: int,
) -> Tensor:  # fmt: skip
    """z by preconditioned conjugate gradients on the surviving entries, given A and how uncertain it is."""
    weights = [min(noise) / level for level in noise]
    grams = [w * share * ((A @ A.T).double() + C) for (A, C), share, w in zip(answers, sent, weights, strict=True)]
    H = normal(torch.stack(grams).sum(0))
    small = min(noise) / PRIOR
    factor = torch.linalg.cholesky(H + (small + 1e-9 * float(H.diagonal().mean())) * torch.eye(len(H)).to(H))

    def precondition(r: Tensor) -> Tensor:
        return torch.cholesky_solve(r.double(), factor).to(r)

    def back(parts: list[Tensor]) -> Tensor:
        return drop(torch.stack(parts).sum(0))

    terms = [
        (A, (share * C).to(A), M, b, w)
        for (A, C), (_, M, _, b), share, w in zip(answers, systems, sent, weights, strict=True)
    ]

    def apply(x: Tensor) -> Tensor:
        X = lift(x)
        return back([w * (A @ (b * (A.T @ X)) + C @ X) for A, C, _, b, w in terms]) + small * x

    r = back([w * (A @ (b * M)) for A, _, M, b, w in terms]) - apply(z)
    y = precondition(r)
    p, power = y, (r * y).sum()
    for _ in range(inner):
        q = apply(p)
        step = power / (p * q).sum().clamp(min=1e-30)
        z, r = z + step * p, r - step * q
        y = precondition(r)
        power, before = (r * y).sum(), power
        p = y + power / before.clamp(min=1e-30) * p
    return z
