"""Aggregators for cohorts in which some clients are malicious.

    multi_krum(updates, context, byzantine=4)   -> Mixing(weights=[...], model={...})

Each uses the uploads u_k = theta_k - theta^t alone, never N_k or a loss, which a client may invent. Distances and norms
are those of all trainable tensors together. Each returns the next model itself: float buffers (running averages of
batch normalisation) are combined as the uploads are, or as plain means if a variance could become negative. Clients are
taken in the order of their numbers, so that ties go to the smaller number.

An upload that is not finite is left out, whoever calls; unless none is. Its client, and one that was refused before
(`Update.refused`), counts as one of the `byzantine`.

| here | papers | what |
|---|---|---|
| m | n | clients of the round |
| byzantine | f | malicious clients that the aggregator tolerates |
| keep | q | clients that multi-Krum averages |
| radius | tau | the norm that an upload is clipped to |
| memory["centre"] | v | the centre of centred clipping, kept between rounds |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fatbench.engine.local import trainable
from fatbench.engine.mixing import middle, mix
from fatbench.engine.rounds import Context, Mixing, Tensors, Update
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Natural, Positive

# --- by coordinate ------------------------------------------------------------------------------------------------


def coordinate_median(updates: Sequence[Update], context: Context) -> Mixing:
    """The median of each coordinate; for an even number of values, the mean of the middle two.

    Float buffers are medians too.

    Source: Yin et al. 2018 (ICML).
    """
    return _by_coordinate(updates, context, by_number(updates), lambda values: middle(ascending(values)))


def trimmed_mean(updates: Sequence[Update], context: Context, *, byzantine: Natural) -> Mixing:
    """The mean of each coordinate without its `byzantine` largest and smallest values.

    byzantine 0 is `uniform`. Float buffers are trimmed too.

    Source: Yin et al. 2018 (ICML).
    """
    positions = by_number(updates)
    trimmed_count = tolerated_count(updates, positions, byzantine, "trimmed_mean", 2 * byzantine + 1)
    return _by_coordinate(
        updates,
        context,
        positions,
        # a client that was refused is trimmed already, so `trimmed_count` may be less than `byzantine`
        lambda values: ascending(values)[trimmed_count : len(values) - trimmed_count or None].mean(0),
    )


def bulyan(updates: Sequence[Update], context: Context, *, byzantine: Natural) -> Mixing:
    """Krum chooses m - 2 `byzantine` uploads one by one; the values nearest to each coordinate's median are averaged.

    For each coordinate, m - 4 `byzantine` of the chosen values are averaged; ties go to the smaller. After each choice,
    Krum scores the remaining uploads again, with at least one neighbour. Float buffers are averaged in the same way
    over the chosen clients.

    Source: El Mhamdi et al. 2018 (arXiv 1802.07927).
    """
    positions_by_client = by_number(updates)
    f = tolerated_count(updates, positions_by_client, byzantine, "bulyan", 4 * byzantine + 3)
    squared = squared_distances(inner_products(updates, positions_by_client, context))
    chosen_rows: list[int] = []
    while len(chosen_rows) < len(positions_by_client) - 2 * f:
        rows_left = [k for k in range(len(positions_by_client)) if k not in chosen_rows]
        scores = _krum_scores(squared[rows_left][:, rows_left], f)
        chosen_rows.append(rows_left[min(range(len(rows_left)), key=scores.__getitem__)])
    chosen_positions = [positions_by_client[k] for k in chosen_rows]
    nearest = len(chosen_rows) - 2 * f
    mixing = _by_coordinate(updates, context, chosen_positions, lambda values: _near_the_median(values, nearest))
    return replace(mixing, selected=tuple(chosen_positions))


def meamed(updates: Sequence[Update], context: Context, *, byzantine: Natural) -> Mixing:
    """Mean around the median: of each coordinate, the mean of the m - `byzantine` values nearest to its median.

    Ties go to the smaller value. Float buffers are averaged in the same way.

    Source: Xie et al. 2018 (arXiv 1802.10116).
    """
    positions = by_number(updates)
    f = tolerated_count(updates, positions, byzantine, "meamed", 2 * byzantine + 1)
    return _by_coordinate(updates, context, positions, lambda values: _near_the_median(values, len(values) - f))


def _near_the_median(values: Tensor, count: int) -> Tensor:
    """The mean of the `count` of values (m, ...) that are nearest to their median; ties go to the smaller."""
    ordered = ascending(values)
    # stable, of sorted values: of two that are equally near, the smaller comes first
    order = (ordered - middle(ordered)).abs().sort(dim=0, stable=True).indices[:count]
    return ordered.gather(0, order).mean(0)


def _by_coordinate(
    updates: Sequence[Update], context: Context, positions: Sequence[int], combine: Callable[[Tensor], Tensor]
) -> Mixing:
    """The model whose tensors are `combine` of those (m, ...) of the clients at `positions`."""
    models = [updates[k].model for k in positions]
    network = context.problem.model
    # without duplicates removed: a frozen tensor that two layers share has two names
    frozen = {name for name, _ in network.named_parameters(remove_duplicate=False)} - set(trainable(network))
    combined: Tensors = {
        name: combine(torch.stack([wide(model[name]) for model in models])).to(value.dtype)
        if value.is_floating_point() and name not in frozen
        else models[0][name]
        for name, value in context.broadcast.items()
    }
    return _mixing(updates, dict.fromkeys(positions, 1 / len(positions)), combined, ())


def ascending(values: Tensor) -> Tensor:
    """The values (m, ...) in ascending order along the first dimension, as `sort` has them."""
    rows = values.clone()
    # min and max of neighbouring rows, m times over, are faster than sorting many short columns
    if len(rows) > 32 or bool(rows.isnan().any()):
        return values.sort(0).values
    for turn in range(len(rows)):
        lower, upper = rows[turn % 2 : len(rows) - 1 : 2], rows[turn % 2 + 1 :: 2]
        smaller = torch.minimum(lower, upper)
        torch.maximum(lower, upper, out=upper)
        lower.copy_(smaller)
    return rows


def wide(value: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if that is its type."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


# --- by distance --------------------------------------------------------------------------------------------------


def krum(updates: Sequence[Update], context: Context, *, byzantine: Natural) -> Mixing:
    """The one upload with the least sum of squared distances to its m - `byzantine` - 2 nearest others.

    Several libraries differ: they square the squared distances, or return a sum.

    Source: Blanchard et al. 2017 (arXiv 1703.02757).
    """
    return _multi_krum("krum", updates, context, byzantine, 1)


def multi_krum(updates: Sequence[Update], context: Context, *, byzantine: Natural, keep: Count | None = None) -> Mixing:
    """The mean of the `keep` uploads with the least Krum scores; without `keep`, of m - `byzantine`.

    Source: Blanchard et al. 2017 (arXiv 1703.02757).
    """
    return _multi_krum("multi_krum", updates, context, byzantine, keep)


def _multi_krum(name: str, updates: Sequence[Update], context: Context, byzantine: int, keep: int | None) -> Mixing:
    positions = by_number(updates)
    f = tolerated_count(updates, positions, byzantine, name, 2 * byzantine + 3)
    scores = _krum_scores(squared_distances(inner_products(updates, positions, context)), f)
    best = sorted(range(len(positions)), key=scores.__getitem__)[: keep or len(positions) - f]
    chosen_positions = [positions[k] for k in best]
    return weighted(updates, context, dict.fromkeys(chosen_positions, 1 / len(chosen_positions)), chosen_positions)


def _krum_scores(squared: Tensor, byzantine: int) -> list[float]:
    """For each upload, the sum of squared distances (m, m) to its m - byzantine - 2 nearest others, at least one."""
    neighbours = max(len(squared) - byzantine - 2, 1)
    # from 1: an upload itself is first in its row, see `squared_distances`
    return [float(x) for x in squared.sort(1).values[:, 1 : 1 + neighbours].sum(1).tolist()]


def geometric_median(
    updates: Sequence[Update],
    context: Context,
    *,
    iterations: Count = 100,
    smoothing: Positive = 0.00001,
    by_samples: bool = False,
) -> Mixing:
    """The point with the least sum of distances to the uploads, by smoothed Weiszfeld steps from their median.

    A step weighs each upload by 1 / max(smoothing, its distance from the point); with `by_samples` also by N_k, which
    trusts the client's word. The first point is the median of each coordinate, which no minority moves far, however
    long its uploads are. Steps end where they move the point by less than a millionth of the uploads' median distance
    from it, at the latest after `iterations`.

    Source: Pillutla et al. 2019 (arXiv 1912.13445), who begin at the mean: `rfa`.
    """
    positions = by_number(updates)
    gram, alpha = inner_products(updates, positions, context), _votes(updates, positions, by_samples)
    weights = _nearness(alpha, _distances_from_median(updates, positions, context), smoothing)
    for _ in range(iterations - 1):
        lengths, last_weights = _distances(gram, weights), weights
        weights = _nearness(alpha, lengths, smoothing)
        step = weights - last_weights
        # of the distances the median: the far uploads' would hide that the others still have a way to go
        if float(step @ gram @ step) < (1e-6 * float(lengths.median())) ** 2:
            break
    return weighted(updates, context, dict(zip(positions, weights.tolist(), strict=True)))


def rfa(
    updates: Sequence[Update],
    context: Context,
    *,
    iterations: Count = 4,
    smoothing: Positive = 0.00001,
    by_samples: bool = False,
) -> Mixing:
    """RFA: `iterations` Weiszfeld steps towards the `geometric_median`, from the uploads' mean and not their median.

    A long upload moves the mean, and a few steps do not return from there: one of m uploads at a distance R moves the
    result by about R / m^5 after four. So it bears no malicious client whatever that sends. Settings as in
    `geometric_median`; with `by_samples` it is the mean by N_k, as in the paper. Steps end early if the sum of
    distances falls by less than a millionth.

    Source: Pillutla et al. 2019 (arXiv 1912.13445).
    """
    positions = by_number(updates)
    gram, alpha = inner_products(updates, positions, context), _votes(updates, positions, by_samples)
    weights, lengths = alpha, _distances(gram, alpha)
    for _ in range(iterations):
        old_objective = float(alpha @ lengths)
        weights = _nearness(alpha, lengths, smoothing)
        lengths = _distances(gram, weights)
        if old_objective - float(alpha @ lengths) < 1e-6 * old_objective:
            break
    return weighted(updates, context, dict(zip(positions, weights.tolist(), strict=True)))


def _votes(updates: Sequence[Update], positions: Sequence[int], by_samples: bool) -> Tensor:
    """The share (m,) of each client in the sum of distances: equal, or by N_k."""
    alpha = torch.tensor([float(updates[k].n if by_samples else 1) for k in positions], dtype=torch.float64)
    return alpha / alpha.sum()


def _nearness(alpha: Tensor, lengths: Tensor, smoothing: float) -> Tensor:
    """The weights (m,) of a Weiszfeld step from a point at these distances from the uploads."""
    weights = alpha / lengths.clamp(min=smoothing)
    return weights / weights.sum()


def _distances(gram: Tensor, weights: Tensor) -> Tensor:
    """The distances (m,) of the uploads from their mean with these weights; their inner products suffice."""
    squared = gram.diag() - 2 * gram @ weights + weights @ gram @ weights
    return squared.clamp(min=0).sqrt()  # rounding may leave it slightly negative


def _distances_from_median(updates: Sequence[Update], positions: Sequence[int], context: Context) -> Tensor:
    """The distances (m,) of the uploads from the median of each coordinate, float64 on the CPU."""
    squared = torch.zeros(len(positions), dtype=torch.float64)
    for name in trainable(context.problem.model):
        values = torch.stack([wide(updates[k].model[name]).flatten() for k in positions])
        squared += (values - middle(ascending(values))).double().square().sum(1).cpu()
    return squared.sqrt()


def inner_products(updates: Sequence[Update], positions: Sequence[int], context: Context) -> Tensor:
    """The inner products (m, m) of the uploads at `positions`, float64 on the CPU."""
    total = torch.zeros(len(positions), len(positions), dtype=torch.float64)
    for name in trainable(context.problem.model):
        # float64: distances are small differences of large inner products
        u = torch.stack([(updates[k].model[name] - context.broadcast[name]).flatten() for k in positions]).double()
        total += (u @ u.T).cpu()
    return total


def squared_distances(gram: Tensor) -> Tensor:
    squares = gram.diag()
    distances = (squares.unsqueeze(0) + squares.unsqueeze(1) - 2 * gram).clamp(min=0)  # against rounding
    return distances.fill_diagonal_(-1)  # each upload sorts first in its own row, also before an equal one


# --- clipping -----------------------------------------------------------------------------------------------------


def centred_clipping(
    updates: Sequence[Update], context: Context, *, radius: Positive = 10.0, iterations: Count = 1
) -> Mixing:
    """Steps from a centre v by the mean of each upload's difference from it, clipped to the norm `radius`.

    v <- v + (1/m) sum_k (u_k - v) min(1, radius / |u_k - v|), `iterations` times; theta^{t+1} = theta^t + v. The centre
    is kept for the next round and is 0 before the first. Float buffers are plain means. Metric: clipped, the fraction
    of uploads outside the radius in the last step. The paper's proof needs momentum that clients keep between rounds;
    here they do not.

    Source: Karimireddy et al. 2021 (arXiv 2012.10333).
    """
    positions = by_number(updates)
    u = flat_uploads(updates, positions, context)
    centre: Tensor = context.memory["centre"].to(u) if "centre" in context.memory else torch.zeros_like(u[0])
    for _ in range(iterations):
        difference = u - centre
        # float64: the square of a long upload's norm overflows, and a vote of 0 is not one of length `radius`
        norms = torch.linalg.vector_norm(difference, dim=1, dtype=torch.float64)
        votes = zip(difference, at_most(radius, norms), strict=True)
        centre = centre + sum(row.double() * factor for row, factor in votes).to(u.dtype) / len(u)
    mixing = _moved(updates, context, positions, centre, float((norms > radius).double().mean()))
    return replace(mixing, memory={"centre": centre})


def at_most(bound: float, norms: Tensor) -> Tensor:
    """The factors that scale vectors of these norms to at most `bound`; 1 for a vector of zeros."""
    return (bound / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)


def flat_uploads(updates: Sequence[Update], positions: Sequence[int], context: Context) -> Tensor:
    """The uploads at `positions`, one row each."""
    names = trainable(context.problem.model)
    return torch.stack(
        [torch.cat([(updates[k].model[name] - context.broadcast[name]).flatten() for name in names]) for k in positions]
    )


def _moved(
    updates: Sequence[Update], context: Context, positions: Sequence[int], step: Tensor, clipped: float
) -> Mixing:
    """theta^t plus the vector `step`, with the plain means of the buffers of the clients at `positions`."""
    mixing = weighted(updates, context, dict.fromkeys(positions, 1 / len(positions)))
    assert mixing.model is not None
    names = trainable(context.problem.model)
    pieces = step.split([context.broadcast[name].numel() for name in names])
    moved = {
        name: context.broadcast[name] + piece.view_as(context.broadcast[name])
        for name, piece in zip(names, pieces, strict=True)
    }
    return replace(mixing, model={**mixing.model, **moved}, metrics={**mixing.metrics, "clipped": clipped})


# --- how many malicious clients each tolerates --------------------------------------------------------------------


def tolerates_any_minority(cell: Facts) -> int:
    return (cell.cohort - 1) // 2


def tolerates_byzantine(*, byzantine: int) -> int:
    return byzantine


def leaves_some_values(cell: Facts, *, byzantine: int) -> str | None:
    if 2 * byzantine >= cell.cohort:
        return f"byzantine: without {byzantine} values at each end, none of {cell.cohort} clients is left"
    return None


def is_minority(cell: Facts, *, byzantine: int) -> str | None:
    if 2 * byzantine >= cell.cohort:
        return f"byzantine: {byzantine} of {cell.cohort} clients in a round: fewer than half may be malicious"
    return None


def enough_for_bulyan(cell: Facts, *, byzantine: int) -> str | None:
    return _too_few("Bulyan", cell, byzantine, 4 * byzantine + 3)


def enough_for_krum(cell: Facts, *, byzantine: int) -> str | None:
    return _too_few("Krum", cell, byzantine, 2 * byzantine + 3)


def _too_few(name: str, cell: Facts, byzantine: int, minimum: int) -> str | None:
    if cell.cohort < minimum:
        return (
            f"byzantine: {name} needs {minimum} clients in a round to tolerate {byzantine} malicious ones, and there "
            f"are {cell.cohort}"
        )
    return None


def keeps_at_most_all(cell: Facts, *, keep: int | None) -> str | None:
    if keep is not None and keep > cell.cohort:
        return f"keep: {keep} is more than the {cell.cohort} clients of a round"
    return None


# --- shared -------------------------------------------------------------------------------------------------------


def by_number(updates: Sequence[Update]) -> list[int]:
    """Positions of the uploads that are finite, or of all if none is, in the order of the clients' numbers."""
    positions = sorted(range(len(updates)), key=lambda k: updates[k].client)
    return [k for k in positions if _has_a_length(updates[k].model)] or positions


def _has_a_length(model: Tensors) -> bool:
    """Whether float64 holds the lengths of all tensors: neither NaN nor infinite, nor beyond 1e154."""
    floats = [value for value in model.values() if value.is_floating_point()]
    lengths = [torch.linalg.vector_norm(value, dtype=torch.float64) for value in floats]
    return bool(torch.stack(lengths).isfinite().all())


def tolerated_count(
    updates: Sequence[Update], positions: Sequence[int], byzantine: int, name: str, minimum: int
) -> int:
    """The number of malicious clients still among those at `positions`. Raises ValueError below `minimum` clients."""
    clients = len(updates) + updates[0].refused  # of the round, the same in every update
    if clients < minimum:
        raise ValueError(f"{name}: byzantine={byzantine} needs {minimum} clients in a round, and there are {clients}")
    return max(byzantine - (clients - len(positions)), 0)


def weighted(
    updates: Sequence[Update], context: Context, weights: dict[int, float], selected: Sequence[int] = ()
) -> Mixing:
    """The weighted sum of models, float buffers included; `weights` by position sum to 1."""
    return _mixing(updates, weights, mixed(updates, context, weights), selected)


def mixed(updates: Sequence[Update], context: Context, weights: dict[int, float], stay: float = 0.0) -> Tensors:
    """theta^t `stay` times plus the weighted sum of models; float buffers by weights that sum to 1."""
    # `mix` weighs float buffers by n, an integer: 2**52 keeps a weight's digits
    counts = [round(weight * 2**52) if math.isfinite(weight) else 1 for weight in weights.values()]
    counts = counts if any(counts) else [1] * len(counts)
    reweighted = [replace(updates[k], n=n) for k, n in zip(weights, counts, strict=True)]
    return mix(reweighted, Mixing(list(weights.values()), stay), context.broadcast, context.problem.model)


def _mixing(updates: Sequence[Update], weights: dict[int, float], model: Tensors, selected: Sequence[int]) -> Mixing:
    return Mixing([weights.get(k, 0.0) for k in range(len(updates))], model=model, selected=tuple(selected))
