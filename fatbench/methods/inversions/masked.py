"""The attacker who knows that entries are withheld: solves with the entries that were sent, and with nothing else.

A masked update is not a noisy update. With a = 1 where an entry of A was sent and b = 1 where one of M was,

    M_d = A_d^T X + noise for the entries of row d with b = 1,    A_d ~ N(0, S), some of its entries known,

for each of the D columns d. The missing entries of A are integrated out: the part of a column that they could explain
does not count, and a complete column counts in full, so that a few of those suffice. The result is the image of largest
posterior probability. The steps:

1. S, the covariance of the tokens' gradients, from the entries that were sent (probabilistic principal components with
   missing entries; A has few directions: the first five of ViT-S/16 at random weights hold 99 % of it);
2. the missing entries of A, given S and X, and their remaining uncertainty (one small system a column);
3. X by a Newton step on the rest, and the noise from the residual; then step 2 again, as long as the noise falls.

Rounds at the same weights are merged first: an entry that any of them sent is known exactly, so m fresh masks withhold
a fraction R^m. Rounds at other weights have their own A. Rescaling by 1 / (1 - R) would change nothing, because A and M
share the factor.

Ours; the paper treats masked updates as complete (differences: masks-attacker). Elimination: Golub and Pereyra 1973,
with Kaufman's approximation; the components: Tipping and Bishop 1999. Symbols: fatbench/methods/inversions/upload.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from fatbench.methods.inversions.patch_ls import check_determined, latent_ls, solve_filtered
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
    token_gradient,
    too_few_equations,
    too_large_a_prior,
    upsample,
)
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Natural, Positive

# Prior variances of a normalised image (0.5 is one standard deviation): of pixels and, behind the upsampling, of the
# difference of neighbours and of the brightness, as in photographs.
PIXEL, DIFFERENCE, BRIGHTNESS = 0.25, 0.03, 2.0
Map = Callable[[Tensor], Tensor]


class System(NamedTuple):
    """Columns of the gradient, at one set of weights or at several side by side."""

    A: Tensor  # (N, D), zero where unknown
    M: Tensor  # (D, K)
    a: Tensor  # as A: True, or 1, where known
    b: Tensor  # as M


class Completion(NamedTuple):
    """A completed by the posterior mean of its missing entries, and their systems, padded to the longest column."""

    A: Tensor  # (N, D)
    spread: Tensor  # (N, N): sum of the columns' covariances, each times the fraction of its row of M that was sent
    loose: Tensor  # (D,): trace of a column's covariance
    lost: Tensor  # (D, k) int64: tokens whose entry is missing, then padding
    real: Tensor  # (D, k): 0 for padding, else 1
    factor: Tensor  # (D, k, k): Cholesky factor


def masked(
    observed: Sequence[Observation],
    model: nn.Module,
    shape: tuple[int, int, int],
    generator: Generator,
    *,
    latent: Count | None = 32,
    iterations: Natural = 8,
    inner: Count = 6,
    floor: Positive = 1e-4,
    rank: Count = 32,
) -> Tensor:
    """The image behind one or several masked uploads, with the gradient completed: (V, 1, C, H, W) in [0, 1].

    Masks are those of the upload; without masks, a zero counts as a withheld entry. If all rounds together leave
    nothing out, the system is that of `patch_ls` and is solved directly. `latent`: the image has `latent` x `latent`
    pixels behind bilinear upsampling; null: all pixels are free. `iterations` 0: A is completed only from its own
    entries; `inner`: steps of conjugate gradients; `floor`: smallest variance of the noise, in units of A's mean
    square; `rank`: principal components of A.

    Raises ValueError if nothing of the positions' gradient was sent, or for too many unknowns, as in `patch_ls`.
    """
    embedding_geometry = geometry(observed[0], shape, "masked")
    check_determined(embedding_geometry, latent, "masked")
    groups = _merge_rounds(observed, embedding_geometry)
    u = rows_by_patch(bilinear(shape[1], latent, groups[0].A), embedding_geometry) if latent else None
    mean, std = normalisation(model, groups[0].A)
    reconstructions = []
    for v in range(len(observed[0].labels)):
        systems = [System(*(tensor[v] for tensor in group)) for group in groups]
        if not all(s.a.any() for s in systems):
            raise ValueError("masked: the update has no gradient of the position embedding; use patch_span")
        if complete := [s for s in systems if s.a.all() and s.b.all()]:
            A, M = torch.cat([s.A for s in complete], 1)[None], torch.cat([s.M for s in complete])[None]
            X = solve_filtered(A, M, "ridge")[0] if u is None else upsample(latent_ls(A, M, u), u)
        else:
            low, high = float((-mean / std).min()), float(((1 - mean) / std).max())
            merged_system = _side_by_side(systems)
            X = _alternate(merged_system, u, low, high, iterations=iterations, inner=inner, floor=floor, rank=rank)[
                None
            ]
        reconstructions.append(as_reconstructions(to_images(X, embedding_geometry), model))
    return torch.cat(reconstructions)


def patches_without_prior(cell: Facts, *, latent: int | None) -> str | None:
    return None if latent else too_few_equations(cell)


def prior_if_any(cell: Facts, *, latent: int | None) -> str | None:
    return too_large_a_prior(cell, latent) if latent else None


def _merge_rounds(observed: Sequence[Observation], embedding_geometry: Geometry) -> list[System]:
    """One system (V, ...) in float64 for each set of weights: the known entries of its rounds, zero elsewhere."""
    groups: list[tuple[Observation, System]] = []
    for s in observed:
        A, M = (
            token_gradient(s.gradient, embedding_geometry, "masked").double(),
            patch_gradient(s.gradient, "masked").double(),
        )
        mask = {name: g != 0 for name, g in s.gradient.items()} if s.mask is None else s.mask
        mask = {name: mask.get(name, torch.ones_like(g, dtype=torch.bool)) for name, g in s.gradient.items()}
        a, b = token_gradient(mask, embedding_geometry, "masked"), patch_gradient(mask, "masked")
        for position, (other_observation, (A0, M0, a0, b0)) in enumerate(groups):
            if all(
                w is other_observation.weights[name] or torch.equal(w, other_observation.weights[name])
                for name, w in s.weights.items()
            ):
                groups[position] = (
                    other_observation,
                    System(torch.where(a0, A0, A), torch.where(b0, M0, M), a | a0, b | b0),
                )
                break
        else:
            groups.append((s, System(A, M, a, b)))
    return [system for _, system in groups]


def _side_by_side(systems: Sequence[System]) -> System:
    """All columns as one system, with A scaled to unit size for each set of weights, so that all of them count."""
    sizes = [s.A[s.a].square().mean().sqrt().clamp(min=1e-30) for s in systems]
    return System(
        torch.cat([s.A / size for s, size in zip(systems, sizes, strict=True)], 1),
        torch.cat([s.M / size for s, size in zip(systems, sizes, strict=True)]),
        torch.cat([s.a for s in systems], 1).to(systems[0].A),
        torch.cat([s.b for s in systems]).to(systems[0].A),
    )


def _alternate(
    system: System, u: Tensor | None, low: float, high: float, *, iterations: int, inner: int, floor: float, rank: int
) -> Tensor:
    """X (N, K), from the unknown z (l l, C), or X itself without upsampling."""
    A, M, a, b = system
    fraction = b.mean(1)

    def lift(z: Tensor) -> Tensor:
        return z if u is None else upsample(z.T.unflatten(1, (u.shape[2],) * 2)[None], u)[0]

    def drop(X: Tensor) -> Tensor:
        return X if u is None else downsample(X[None], u)[0].flatten(1).T

    def step(
        z: Tensor, right_side: Tensor, A: Tensor, weigh: Map, *, weight: Tensor, spread: Tensor, noise: float
    ) -> Tensor:
        """z + d, where (A weigh A^T + spread + noise / prior) d = right_side - noise / prior z."""

        def apply(d: Tensor) -> Tensor:
            D = lift(d)
            return drop(A @ weigh(A.T @ D) + spread @ D) + noise * (prior @ d)

        preconditioner = (A * weight) @ A.T + spread
        preconditioner = preconditioner if u is None else normal_matrix(preconditioner[None], u)[0]
        preconditioner = preconditioner + noise * prior
        preconditioner.diagonal().add_(1e-12 * preconditioner.diagonal().mean())
        return z + _conjugate_gradients(
            apply, torch.linalg.cholesky(preconditioner), drop(right_side) - noise * (prior @ z), inner
        )

    X = torch.zeros(len(A), M.shape[1]).to(A)
    z = drop(X)
    prior = torch.eye(len(A)).to(A) / PIXEL if u is None else _smoothness_precision(u.shape[2]).to(A)
    precision = torch.linalg.inv(covariance_of(A, a, min(rank, len(A))))
    completion = _complete(system, X, precision, 1.0)
    trust = (floor / (floor + PIXEL * completion.loose))[:, None]  # low if the missing entries could explain much
    z = step(
        z, completion.A @ (trust * b * M), completion.A, lambda E: trust * b * E,
        weight=trust[:, 0] * fraction, spread=0 * completion.spread, noise=floor,
    )  # fmt: skip
    X = lift(z).clamp(low, high)
    noise = float((b * (M - completion.A.T @ X)).square().sum() / b.sum())
    for turn in range(iterations):
        level = max(noise, floor)
        completion = _complete(system, X, precision, level)
        gap = b * (M - completion.A.T @ X)
        weight = fraction * (1 - completion.real.sum(1) / b.sum(1).clamp(min=1)).clamp(min=0.1)
        tried = step(
            z,
            completion.A @ gap - completion.spread @ X,
            completion.A,
            lambda E, full=completion, X=X: _unexplained_part(b * E, b, X, full),  # type: ignore[misc]
            weight=weight,
            spread=completion.spread,
            noise=level,
        )
        candidate = lift(tried).clamp(low, high)
        residual = float((b * (M - completion.A.T @ candidate)).square().sum() / b.sum())
        if turn and residual > noise / 2:  # in the first turn the noise may rise: A was completed without M before
            break
        z, X, noise = tried, candidate, min(noise, residual)
        if noise < floor:
            break
    return X


def covariance_of(A: Tensor, a: Tensor, rank: int, rounds: int = 30) -> Tensor:
    """S (N, N) of the columns of A (N, D), known where `a` is 1: F F^T + variance with F (N, rank), by EM."""
    joint_counts = (a @ a.T).clamp(min=1)
    eigen, Q = torch.linalg.eigh((A @ A.T) / joint_counts)
    F = Q[:, -rank:] * eigen[-rank:].clamp(min=1e-4 * float(eigen[-1])).sqrt()
    eye = torch.eye(rank).to(A)
    variance = 0.1
    for _ in range(rounds):
        inverse = torch.linalg.inv((a.T @ _outer(F)).unflatten(1, (rank, rank)) + variance * eye)
        c = (inverse @ (A.T @ F)[:, :, None]).squeeze(2)  # (D, rank)
        second = a @ (_outer(c) + variance * inverse.flatten(1))  # (N, rank * rank)
        ridge = (1e-6 * second[:, :: rank + 1].mean(1)).clamp(min=1e-12)  # for tokens of which nothing was sent
        F = torch.linalg.solve(second.unflatten(1, (rank, rank)) + ridge[:, None, None] * eye, (A @ c)[:, :, None])
        F = F.squeeze(2)
        doubt = variance * (a.T @ _outer(F) * inverse.flatten(1)).sum()
        variance = max(float(((a * (A - F @ c.T)).square().sum() + doubt) / a.sum()), 1e-5)
    return F @ F.T + variance * torch.eye(len(A)).to(A)


def _outer(rows: Tensor) -> Tensor:
    return (rows[:, :, None] * rows[:, None, :]).flatten(1)


def _complete(system: System, X: Tensor, precision: Tensor, noise: float) -> Completion:
    """A's missing entries from its known ones, by the prior with this precision, and from M, given X."""
    A, M, a, b = system
    longest, widest = int((1 - a).sum(0).max()), int(b.sum(1).max())
    order, columns = (
        (1 - a).T.argsort(dim=1, descending=True, stable=True),
        b.argsort(dim=1, descending=True, stable=True),
    )
    missing_rows, observed = order[:, : max(longest, 1)], columns[:, : max(widest, 1)]
    real = (1 - a).T.gather(1, missing_rows)
    pull = ((b * (M - A.T @ X)) @ X.T - noise * (A.T @ precision)).gather(1, missing_rows) * real
    completed, loose, factors = A.clone(), A.new_zeros(A.shape[1]), []
    spread = A.new_zeros(len(A), len(A))
    fraction = b.mean(1)
    start = 0
    for i, j, r, p in zip(missing_rows.split(64), observed.split(64), real.split(64), pull.split(64), strict=True):
        column_index = torch.arange(start, start + len(i), device=A.device)
        start += len(i)
        x = X[i[:, :, None], j[:, None, :]] * b[column_index].gather(1, j)[:, None, :]
        pair = (i[:, :, None], i[:, None, :])
        joint_mask = r[:, :, None] * r[:, None, :]
        gram = joint_mask * (x @ x.transpose(1, 2) + noise * precision[pair])
        gram.diagonal(dim1=1, dim2=2).mul_(1 + 1e-10).add_(1 - r)
        factor = torch.linalg.cholesky(gram)
        completed[i.T, column_index] += (torch.cholesky_solve(p[:, :, None], factor).squeeze(2) * r).T
        doubt = noise * joint_mask * torch.cholesky_inverse(factor)
        loose[column_index] = doubt.diagonal(dim1=1, dim2=2).sum(1)
        spread.index_put_(pair, fraction[column_index, None, None] * doubt, accumulate=True)
        factors.append(factor)
    return Completion(completed, spread, loose, missing_rows, real, torch.cat(factors))


def _unexplained_part(E: Tensor, b: Tensor, X: Tensor, completion: Completion) -> Tensor:
    """The part of a change E (D, K) of M's known entries that no change of A's missing entries can explain."""
    moved = (E @ X.T).gather(1, completion.lost) * completion.real
    answer = torch.cholesky_solve(moved[:, :, None], completion.factor).squeeze(2) * completion.real
    return E - b * (torch.zeros(len(E), len(X)).to(E).scatter_add(1, completion.lost, answer) @ X)


def _smoothness_precision(side: int) -> Tensor:
    """The precision (l l, l l) of a prior for photographs: neighbours differ little, the brightness is free."""
    d = torch.eye(side, dtype=torch.float64).diff(dim=0)
    identity, line = torch.eye(side, dtype=torch.float64), d.T @ d
    return (torch.kron(line, identity) + torch.kron(identity, line)) / DIFFERENCE + torch.eye(side**2).to(
        identity
    ) / BRIGHTNESS


def _conjugate_gradients(apply: Map, factor: Tensor, r: Tensor, steps: int) -> Tensor:
    """The solution d of apply(d) = r, preconditioned with the Cholesky factor of an approximation."""
    d = torch.zeros_like(r)
    y = torch.cholesky_solve(r, factor)
    p, power = y, (r * y).sum()
    for _ in range(steps):
        q = apply(p)
        length = power / (p * q).sum().clamp(min=1e-300)
        d, r = d + length * p, r - length * q
        y = torch.cholesky_solve(r, factor)
        power, old_power = (r * y).sum(), power
        p = y + power / old_power.clamp(min=1e-300) * p
    return d
