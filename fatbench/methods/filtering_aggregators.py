"""Aggregators that leave out the uploads that spread the others most: by subsets, or by the direction of most spread.

    smea(updates, context, byzantine=2)   -> Mixing(weights=[...], model={...})

What `fatbench.methods.robust_aggregators` says of its aggregators and symbols holds for these, too. G is the matrix of
the uploads' inner products, (m, m): all but `dnc` need nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fatbench.engine.randomness import generator
from fatbench.engine.rounds import Context, Mixing, Update
from fatbench.methods.robust_aggregators import (
    by_number,
    flat_uploads,
    inner_products,
    squared_distances,
    tolerated_count,
    weighted,
)
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Natural, Positive

SUBSETS = 1_000_000  # at most so many are compared

# --- the best subset ----------------------------------------------------------------------------------------------


def mda(updates: Sequence[Update], context: Context, *, byzantine: Natural) -> Mixing:
    """Minimum diameter averaging: the mean of the m - `byzantine` uploads whose largest distance is smallest.

    Ties go to the first subset in the order of the clients' numbers. Raises ValueError for more than 10^6 subsets.

    Source: El Mhamdi et al. 2020.
    """

    def squared_diameters(gram: Tensor, subsets: Tensor) -> Tensor:
        return _blocks(squared_distances(gram), subsets).amax((1, 2))

    return _best_subset("mda", updates, context, byzantine, squared_diameters)


def smea(updates: Sequence[Update], context: Context, *, byzantine: Natural) -> Mixing:
    """Smallest maximum eigenvalue averaging: the mean of the m - `byzantine` uploads that spread least.

    The spread of a subset is the largest eigenvalue of its covariance, over the direction of most spread. Ties go to
    the first subset in the order of the clients' numbers. Raises ValueError for more than 10^6 subsets.

    Source: Allouah et al. 2023 (SMEA).
    """

    def largest_eigenvalues(gram: Tensor, subsets: Tensor) -> Tensor:
        inner = _blocks(gram, subsets)
        means = inner.mean(1, keepdim=True)
        centred = inner - means - means.mT + means.mean(2, keepdim=True)
        return torch.linalg.eigvalsh(centred)[:, -1]

    return _best_subset("smea", updates, context, byzantine, largest_eigenvalues)


def _best_subset(
    name: str, updates: Sequence[Update], context: Context, byzantine: int, spread: Callable[[Tensor, Tensor], Tensor]
) -> Mixing:
    """The mean of the subset with the least spread((m, m) inner products, (S, k) members of each) -> (S,)."""
    positions = by_number(updates)
    f = tolerated_count(updates, positions, byzantine, name, 2 * byzantine + 1)
    if (count := math.comb(len(positions), f)) > SUBSETS:
        raise ValueError(f"{name}: {count:,} subsets without {f} of {len(positions)} clients, more than {SUBSETS:,}")
    gram = inner_products(updates, positions, context)
    subsets = torch.tensor(list(itertools.combinations(range(len(positions)), len(positions) - f)))
    best = 0
    if bool(gram.isfinite().all()):  # else no upload is finite, and so will be the model
        # in parts: a part's blocks take a few megabytes
        best = int(torch.cat([spread(gram, part) for part in subsets.split(1000)]).argmin())
    chosen = [positions[k] for k in subsets[best].tolist()]
    return weighted(updates, context, dict.fromkeys(chosen, 1 / len(chosen)), chosen)


def _blocks(matrix: Tensor, subsets: Tensor) -> Tensor:
    """The rows and columns (S, k, k) of a matrix (m, m) that belong to each of the subsets (S, k)."""
    return matrix[subsets.unsqueeze(2), subsets.unsqueeze(1)]


# --- the direction of most spread ----------------------------------------------------------------------------------


def caf(updates: Sequence[Update], context: Context, *, byzantine: Natural) -> Mixing:
    """Covariance filter: passes that weigh down the uploads far out in the direction of most spread.

    A pass takes the mean by the weights c (1 at first), the direction in which the uploads spread most around it, and
    multiplies each c by 1 - tau / max tau, tau the squared length of the upload along that direction. Passes end where
    the weights sum to m - 2 `byzantine` or less, or neither their sum nor the least spread falls by a thousandth, as
    beside a very far upload, where the published loop does not end. The result is the mean of the pass with the least
    spread.

    Source: Allouah et al. 2025 (CafCor), which ByzFL has with one step of the power method for the direction.
    """
    positions = by_number(updates)
    f = tolerated_count(updates, positions, byzantine, "caf", 2 * byzantine + 1)
    gram = inner_products(updates, positions, context)
    c = torch.ones(len(gram), dtype=gram.dtype)
    best, least = c / c.sum(), math.inf
    while float(c.sum()) > len(gram) - 2 * f:
        total = c.sum()
        w = c / total
        means = gram @ w
        centred = gram - means - means.unsqueeze(1) + w @ means
        root = w.sqrt()
        spread, direction = _top(root * centred * root.unsqueeze(1))
        falls = spread < 0.999 * least
        if spread < least:
            best, least = w, spread
        if not spread > 0:  # all uploads that count are equal
            break
        along = (centred @ (root * direction)).abs()
        kept = 1 - (along / along.max()).square()
        c = c * kept.where(kept > 1e-9, 0.0)  # of two equally far uploads rounding would leave one a weight
        if not falls and c.sum() > 0.999 * total:
            break
    return weighted(updates, context, dict(zip(positions, best.tolist(), strict=True)))


def dnc(
    updates: Sequence[Update],
    context: Context,
    *,
    byzantine: Natural,
    iterations: Count = 1,
    factor: Positive = 1.0,
    coordinates: Count = 10_000,
) -> Mixing:
    """Divide and conquer: the mean of the uploads that are never far out in the direction of most spread.

    Each of the `iterations` looks at `coordinates` random parameters, or at all if there are fewer, and drops the
    ceil(`factor` `byzantine`) uploads farthest from the mean in the direction in which these parameters spread most;
    of two equally far ones, that with the larger number. If each was dropped once, the least often dropped are taken.

    Source: Shejwalkar and Houmansadr 2021.
    """
    positions = by_number(updates)
    f = tolerated_count(updates, positions, byzantine, "dnc", 2 * byzantine + 1)
    uploads = flat_uploads(updates, positions, context)
    draw = generator(context.problem.seed, "dnc", context.round)
    dropped = torch.zeros(len(uploads), dtype=torch.int64)
    for _ in range(iterations):
        seen = uploads
        if coordinates < uploads.shape[1]:
            seen = uploads[:, torch.randperm(uploads.shape[1], generator=draw)[:coordinates].to(uploads.device)]
        centred = seen.double() - seen.double().mean(0)
        _, direction = _top((centred @ centred.T).cpu())
        nearest_first = direction.abs().sort(stable=True).indices
        dropped[nearest_first[len(uploads) - math.ceil(factor * f) :]] += 1
    chosen = [positions[k] for k in range(len(uploads)) if dropped[k] == dropped.min()]
    return weighted(updates, context, dict.fromkeys(chosen, 1 / len(chosen)), chosen)


def _top(matrix: Tensor) -> tuple[float, Tensor]:
    """The largest eigenvalue of a symmetric matrix (m, m), and its eigenvector (m,); 0 of one that is not finite."""
    if not bool(matrix.isfinite().all()):
        return 0.0, torch.zeros(len(matrix), dtype=matrix.dtype)
    values, eigenvectors = torch.linalg.eigh(matrix)
    return float(values[-1]), eigenvectors[:, -1]


# --- refusals -----------------------------------------------------------------------------------------------------


def few_subsets(cell: Facts, *, byzantine: int) -> str | None:
    if (count := math.comb(cell.cohort, byzantine)) > SUBSETS:
        return f"byzantine: {count:,} subsets without {byzantine} of {cell.cohort} clients, more than {SUBSETS:,}"
    return None


def keeps_some(cell: Facts, *, byzantine: int, iterations: int, factor: float) -> str | None:
    if (dropped := iterations * math.ceil(factor * byzantine)) >= cell.cohort:
        return f"iterations: dnc may drop {dropped} uploads, and {cell.cohort} clients are in a round: none is left"
    return None
