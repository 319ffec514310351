"""Aggregators for cohorts in which some clients are malicious.

    multi_krum(updates, context, byzantine=4)   -> Mixing(weights=[...], model={...})

Each looks at the uploads u_k = theta_k - theta^t alone, never at N_k or a loss, which a client may invent. Distances
and norms are those of all trainable tensors together. Each gives the next model itself: float buffers (running averages
of batch normalisation) are combined as the uploads are, or as plain means where that could make a variance negative.
Clients are taken in the order of their numbers, so equal scores go to the smaller number.

A client whose upload was refused because it was not finite (`Update.refused`) was one of the `byzantine`.

| here | papers | what |
|---|---|---|
| m | n | clients of the round |
| byzantine | f | malicious clients that the aggregator is built to bear |
| keep | q | clients that multi-Krum averages |
| radius | tau | what an upload is clipped to |
| memory["centre"] | v | what centred clipping clips around, kept from round to round |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fatbench.engine.local import trainable
from fatbench.engine.mixing import mix
from fatbench.engine.rounds import Context, Mixing, Tensors, Update
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Natural, Positive

# --- what each coordinate says ------------------------------------------------------------------------------------


def coordinate_median(updates: Sequence[Update], context: Context) -> Mixing:
    """The median of each coordinate; of an even number of values the mean of the two in the middle.

    Float buffers are medians too.

    Source: Yin et al. 2018 (ICML).
    """
    return _by_coordinate(updates, context, lambda values: _middle(values.sort(0).values))


def trimmed_mean(updates: Sequence[Update], context: Context, *, byzantine: Natural) -> Mixing:
    """The mean of each coordinate without its `byzantine` largest and smallest values.

    byzantine 0 is `uniform`. Float buffers are trimmed too.

    Source: Yin et al. 2018 (ICML).
    """
    malicious_left = _fewer(updates, byzantine, "trimmed_mean", 2 * byzantine + 1)
    return _by_coordinate(
        updates,
        context,
        lambda values: values.sort(0).values[malicious_left : len(values) - malicious_left or None].mean(0),
    )


def bulyan(updates: Sequence[Update], context: Context, *, byzantine: Natural) -> Mixing:
    """Krum chooses m - 2 `byzantine` uploads one by one; then, per coordinate, a mean of those nearest to their median.

    Of each coordinate m - 4 `byzantine` of the chosen values are averaged; of two equally near the smaller is first.
    After a choice, Krum scores the uploads that are left again; its neighbours are at least one. Float buffers are
    averaged in the same way over the chosen clients.

    Source: El Mhamdi et al. 2018 (arXiv 1802.07927).
    """
    f = _fewer(updates, byzantine, "bulyan", 4 * byzantine + 3)
    positions_by_client = by_number(updates)
    squared = _squared_distances(_gram(updates, positions_by_client, context))
    chosen_rows: list[int] = []
    while len(chosen_rows) < len(positions_by_client) - 2 * f:
        rows_left = [k for k in range(len(positions_by_client)) if k not in chosen_rows]
        scores = _krum_scores(squared[rows_left][:, rows_left], f)
        chosen_rows.append(rows_left[min(range(len(rows_left)), key=scores.__getitem__)])
    nearest = len(chosen_rows) - 2 * f

    def near_the_median(values: Tensor) -> Tensor:
        ordered = values.sort(0).values
        order = (ordered - _middle(ordered)).abs().sort(dim=0, stable=True).indices[:nearest]
        return ordered.gather(0, order).mean(0)

    positions = [positions_by_client[k] for k in chosen_rows]
    return _by_coordinate(updates, context, near_the_median, positions)


def _middle(ordered: Tensor) -> Tensor:
    """The median over the first dimension of sorted values; torch's own takes the lower of two."""
    low, high = (len(ordered) - 1) // 2, len(ordered) // 2
    return (ordered[low] + ordered[high]) / 2


def _by_coordinate(
    updates: Sequence[Update],
    context: Context,
    combine: Callable[[Tensor], Tensor],
    positions: Sequence[int] | None = None,
) -> Mixing:
    """The model whose tensors are `combine` of the clients' (m, ...), of the clients at `positions` alone if given."""
    used_positions = by_number(updates) if positions is None else list(positions)
    models = [updates[k].model for k in used_positions]
    network = context.problem.model
    frozen = {name for name, _ in network.named_parameters(remove_duplicate=False)} - set(trainable(network))
    combined: Tensors = {
        name: combine(torch.stack([model[name].float() for model in models])).to(value.dtype)
        if value.is_floating_point() and name not in frozen
        else models[0][name]
        for name, value in context.broadcast.items()
    }
    return _mixing(
        updates,
        dict.fromkeys(used_positions, 1 / len(used_positions)),
        combined,
        () if positions is None else used_positions,
    )


# --- what the distances say ---------------------------------------------------------------------------------------


def krum(updates: Sequence[Update], context: Context, *, byzantine: Natural) -> Mixing:
    """The one upload that is nearest to its m - `byzantine` - 2 nearest others, by the sum of squared distances.

    Several libraries square the squared distances, or return a sum.

    Source: Blanchard et al. 2017 (arXiv 1703.02757).
    """
    return _multi_krum("krum", updates, context, byzantine, 1)


def multi_krum(updates: Sequence[Update], context: Context, *, byzantine: Natural, keep: Count | None = None) -> Mixing:
    """The mean of the `keep` uploads with the least Krum scores; without `keep`, of m - `byzantine`.

    Source: Blanchard et al. 2017 (arXiv 1703.02757).
    """
    return _multi_krum("multi_krum", updates, context, byzantine, keep)


def _multi_krum(name: str, updates: Sequence[Update], context: Context, byzantine: int, keep: int | None) -> Mixing:
    f = _fewer(updates, byzantine, name, 2 * byzantine + 3)
    positions = by_number(updates)
    scores = _krum_scores(_squared_distances(_gram(updates, positions, context)), f)
    best = sorted(range(len(positions)), key=scores.__getitem__)[: keep or len(positions) - f]
    chosen_positions = [positions[k] for k in best]
    return _weighted(updates, context, dict.fromkeys(chosen_positions, 1 / len(chosen_positions)), chosen_positions)


def _krum_scores(squared: Tensor, byzantine: int) -> list[float]:
    """Of each upload the sum of its squared distances (m, m) to its m - byzantine - 2 nearest others, at least one."""
    neighbours = max(len(squared) - byzantine - 2, 1)
    return [float(x) for x in squared.sort(1).values[:, 1 : 1 + neighbours].sum(1).tolist()]


def geometric_median(
    updates: Sequence[Update],
    context: Context,
    *,
    iterations: Count = 4,
    smoothing: Positive = 0.00001,
    by_samples: bool = False,
) -> Mixing:
    """The point with the least sum of distances to the uploads, by smoothed Weiszfeld steps from their mean (RFA).

    A step weighs each upload by 1 / max(smoothing, its distance from the point); `by_samples` also by N_k, as RFA does,
    which trusts a client's word. Steps end early where the sum falls by less than a millionth.

    Source: Pillutla et al. 2019 (arXiv 1912.13445).
    """
    positions = by_number(updates)
    gram = _gram(updates, positions, context)
    alpha = torch.tensor([float(updates[k].n if by_samples else 1) for k in positions], dtype=torch.float64)
    weights = alpha = alpha / alpha.sum()

    def distances(weights: Tensor) -> Tensor:
        squared = gram.diag() - 2 * gram @ weights + weights @ gram @ weights
        return squared.clamp(min=0).sqrt()

    lengths = distances(weights)
    for _ in range(iterations):
        old_objective = float(alpha @ lengths)
        weights = alpha / lengths.clamp(min=smoothing)
        weights = weights / weights.sum()
        lengths = distances(weights)
        if old_objective - float(alpha @ lengths) < 1e-6 * old_objective:
            break
    return _weighted(updates, context, dict(zip(positions, weights.tolist(), strict=True)))


def _gram(updates: Sequence[Update], positions: Sequence[int], context: Context) -> Tensor:
    """The products (m, m) of the uploads at the positions `positions`, float64 on the CPU."""
    total = torch.zeros(len(positions), len(positions), dtype=torch.float64)
    for name in trainable(context.problem.model):
        u = torch.stack([(updates[k].model[name] - context.broadcast[name]).flatten() for k in positions]).double()
        total += (u @ u.T).cpu()
    return total


def _squared_distances(gram: Tensor) -> Tensor:
    squares = gram.diag()
    return (squares.unsqueeze(0) + squares.unsqueeze(1) - 2 * gram).clamp(min=0).fill_diagonal_(-1)  # itself first


# --- clipping -----------------------------------------------------------------------------------------------------


def centred_clipping(
    updates: Sequence[Update], context: Context, *, radius: Positive = 10.0, iterations: Count = 1
) -> Mixing:
    """Steps from a centre v by the mean of what each upload differs from it, clipped to the norm `radius`.

    v <- v + (1/m) sum_k (u_k - v) min(1, radius / |u_k - v|), `iterations` times; theta^{t+1} = theta^t + v. The centre
    is kept for the next round and is 0 before the first. Float buffers are plain means. Metric: clipped, the fraction
    of uploads outside the radius in the last step. Its proof needs momentum that a client keeps over rounds, which
    clients here do not.

    Source: Karimireddy et al. 2021 (arXiv 2012.10333).
    """
    positions = by_number(updates)
    u = _flat(updates, positions, context)
    centre: Tensor = context.memory["centre"].to(u) if "centre" in context.memory else torch.zeros_like(u[0])
    for _ in range(iterations):
        difference = u - centre
        norms = torch.linalg.vector_norm(difference, dim=1, keepdim=True)
        centre = centre + (difference * _at_most(radius, norms)).mean(0)
    mixing = _moved(updates, context, positions, centre, float((norms > radius).double().mean()))
    return replace(mixing, memory={"centre": centre})


def _at_most(bound: float, norms: Tensor) -> Tensor:
    """The factors that bring vectors of these norms to at most `bound`; 1 for a vector of zeros."""
    return (bound / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)


def _flat(updates: Sequence[Update], positions: Sequence[int], context: Context) -> Tensor:
    """The uploads at the positions `positions`, one row each."""
    names = trainable(context.problem.model)
    return torch.stack(
        [torch.cat([(updates[k].model[name] - context.broadcast[name]).flatten() for name in names]) for k in positions]
    )


def _moved(updates: Sequence[Update], context: Context, positions: Sequence[int], by: Tensor, clipped: float) -> Mixing:
    """theta^t moved by the vector `by`, with plain means of the buffers at the positions `positions`."""
    mixing = _weighted(updates, context, dict.fromkeys(positions, 1 / len(positions)))
    assert mixing.model is not None
    names = trainable(context.problem.model)
    pieces = by.split([context.broadcast[name].numel() for name in names])
    moved = {
        name: context.broadcast[name] + piece.view_as(context.broadcast[name])
        for name, piece in zip(names, pieces, strict=True)
    }
    return replace(mixing, model={**mixing.model, **moved}, metrics={**mixing.metrics, "clipped": clipped})


# --- how many malicious clients each bears ------------------------------------------------------------------------


def any_minority(cell: Facts) -> int:
    return (cell.cohort - 1) // 2


def so_many(*, byzantine: int) -> int:
    return byzantine


def some_are_left(cell: Facts, *, byzantine: int) -> str | None:
    if 2 * byzantine >= cell.cohort:
        return f"byzantine: twice {byzantine} of {cell.cohort} clients of a round leaves none"
    return None


def enough_for_bulyan(cell: Facts, *, byzantine: int) -> str | None:
    return _too_few("Bulyan", cell, byzantine, 4 * byzantine + 3)


def enough_for_krum(cell: Facts, *, byzantine: int) -> str | None:
    return _too_few("Krum", cell, byzantine, 2 * byzantine + 3)


def _too_few(name: str, cell: Facts, byzantine: int, minimum: int) -> str | None:
    if cell.cohort < minimum:
        return (
            f"byzantine: {name} needs {minimum} clients in a round to bear {byzantine} malicious ones, and there are "
            f"{cell.cohort}"
        )
    return None


def keeps_of_the_round(cell: Facts, *, keep: int | None) -> str | None:
    if keep is not None and keep > cell.cohort:
        return f"keep: {keep} of {cell.cohort} clients of a round"
    return None


# --- all of them --------------------------------------------------------------------------------------------------


def by_number(updates: Sequence[Update]) -> list[int]:
    """Positions of the updates in the order of the clients' numbers."""
    return sorted(range(len(updates)), key=lambda k: updates[k].client)


def _fewer(updates: Sequence[Update], byzantine: int, name: str, minimum: int) -> int:
    """How many malicious clients are left among the updates. ValueError: fewer than `minimum` clients in the round."""
    refused = updates[0].refused
    if len(updates) + refused < minimum:
        clients = len(updates) + refused
        raise ValueError(f"{name}: byzantine={byzantine} needs {minimum} clients in a round, and there are {clients}")
    return max(byzantine - refused, 0)


def _weighted(
    updates: Sequence[Update], context: Context, weights: dict[int, float], selected: Sequence[int] = ()
) -> Mixing:
    """The sum of models with `weights` by position, which sum to 1; of float buffers too."""
    # `mix` weighs buffers by n, which is a whole number.
    reweighted = [replace(updates[k], n=round(weight * 2**52)) for k, weight in weights.items()]
    model = mix(reweighted, Mixing(list(weights.values())), context.broadcast, context.problem.model)
    return _mixing(updates, weights, model, selected)


def _mixing(updates: Sequence[Update], weights: dict[int, float], model: Tensors, selected: Sequence[int]) -> Mixing:
    return Mixing([weights.get(k, 0.0) for k in range(len(updates))], model=model, selected=tuple(selected))
