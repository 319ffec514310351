"""Pre-aggregators: what is done to the uploads of a round before an aggregator sees them, from inner products alone.

    PREAGGREGATORS["nnm"](gram, generator, byzantine=2)       -> W (m', m); row i makes the new upload sum_k W[i, k] u_k

gram (m, m) float64 on the CPU are the inner products of the uploads u_k, in the order of the clients' numbers. Each
returns W in float64. The aggregator `after` applies one:
`{name: after, pre: {name: nnm, byzantine: 2}, aggregator: {name: trimmed_mean, byzantine: 2}}`; a chain nests `after`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from fatbench.engine import randomness
from fatbench.engine.local import trainable
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Mixing, Stats, Tensors, Update
from fatbench.methods.robust_aggregators import (
    at_most,
    by_number,
    inner_products,
    is_minority,
    mixed,
    squared_distances,
    wide,
)
from fatbench.suite.entry import AggregatorEntry, Entry, PreAggregatorEntry, ask, entry_of
from fatbench.suite.facts import Facts
from fatbench.suite.types import Aggregator, Count, Natural, Positive, PreAggregator


def nnm(gram: Tensor, generator: Generator, *, byzantine: Natural) -> Tensor:
    """Nearest neighbour mixing: each upload becomes the mean of the m - `byzantine` nearest to it, itself included.

    Ties go to the smaller client. Raises ValueError unless fewer than m are malicious.

    Source: Allouah et al. 2023 (NNM).
    """
    if byzantine >= len(gram):
        raise ValueError(f"nnm: byzantine={byzantine} leaves none of {len(gram)} clients")
    neighbours = len(gram) - byzantine
    nearest = squared_distances(gram).sort(dim=1, stable=True).indices[:, :neighbours]
    return torch.zeros_like(gram).scatter(1, nearest, 1 / neighbours)


def bucketing(gram: Tensor, generator: Generator, *, size: Count = 2) -> Tensor:
    """The means of `size` uploads each, in random order; the last bucket may have fewer.

    Source: Karimireddy et al. 2022.
    """
    order = torch.randperm(len(gram), generator=generator, device=generator.device).cpu()
    rows = torch.zeros(buckets(len(gram), size=size), len(gram), dtype=gram.dtype)
    for row, members in zip(rows, order.split(size), strict=True):
        row[members] = 1 / len(members)
    return rows


def clip(gram: Tensor, generator: Generator, *, radius: Positive) -> Tensor:
    """Each upload is scaled to at most the norm `radius`.

    Source: ByzFL's Clipping, whose default is 2.
    """
    return at_most(radius, gram.diag().sqrt()).diag()


def arc(gram: Tensor, generator: Generator, *, byzantine: Natural) -> Tensor:
    """Adaptive robust clipping: the floor(2 f (m - f) / m) longest uploads are scaled to the norm of the next one.

    f is `byzantine`. Raises ValueError unless fewer than m are malicious.

    Source: Allouah et al. 2024 (ARC).
    """
    clients = len(gram)
    if byzantine >= clients:
        raise ValueError(f"arc: byzantine={byzantine} leaves none of {clients} clients")
    norms = gram.diag().sqrt()
    clipped = 2 * byzantine * (clients - byzantine) // clients
    return at_most(float(norms.sort().values[clients - clipped - 1]), norms).diag()


def buckets(uploads: int, *, size: Count) -> int:
    return -(-uploads // size)


PREAGGREGATORS: dict[str, Callable[..., Tensor]] = {
    "nnm": Entry(nnm, refuse=(is_minority,), cites=("allouah2023nnm",)),
    "bucketing": PreAggregatorEntry(bucketing, makes=buckets, cites=("karimireddy2022",)),
    "clip": clip,
    "arc": Entry(arc, refuse=(is_minority,), cites=("allouah2024",)),
}


def after(updates: Sequence[Update], context: Context, *, pre: PreAggregator, aggregator: Aggregator) -> Mixing:
    """An aggregator of the uploads that a pre-aggregator makes of the clients'.

    Float buffers are mixed as the uploads are, by weights that sum to 1; examples and losses are means by these
    weights. A made upload has the number of its row, if there are as many as clients that of the client. The weights
    shown are those of the clients' uploads. Raises ValueError where the aggregator treats clients by number and the
    uploads are not one for each.
    Source: Karimireddy et al., ICLR 2022 (bucketing before an aggregator); Allouah et al., AISTATS 2023 (nnm).
    """
    positions = by_number(updates)
    gram = inner_products(updates, positions, context)
    rows = shares = torch.eye(len(positions), dtype=gram.dtype)
    one_each, chain = True, [pre]
    while entry_of(aggregator).function is after:  # its rows times these: the uploads are made once
        chain.append(aggregator.keywords["pre"])  # type: ignore[attr-defined]
        aggregator = aggregator.keywords["aggregator"]  # type: ignore[attr-defined]
    for step in chain:
        further = step(rows @ gram @ rows.T, randomness.generator(context.problem.seed, "preaggregate", context.round))
        one_each = one_each and len(further) == len(rows)
        if not one_each and _by_client(aggregator):
            raise ValueError(_cannot_tell(aggregator, len(further), len(positions)))
        rows, shares = further @ rows, _shares(further) @ shares
    refused = updates[0].refused + len(updates) - len(positions)
    made = []
    for number, model in enumerate(_models(updates, positions, context, rows, shares)):
        share = dict(zip(positions, shares[number].tolist(), strict=True))
        n = max(round(sum(weight * updates[k].n for k, weight in share.items())), 1)
        client, stats = number, _mean_stats(updates, share)
        if one_each:
            client, stats = updates[positions[number]].client, updates[positions[number]].stats
        made.append(Update(client, n, model, stats, refused=refused))
    inner = aggregate(aggregator, made, context)
    weights = (rows.T @ torch.tensor(inner.weights, dtype=rows.dtype)).tolist()
    shown = dict(zip(positions, weights, strict=True))
    return replace(
        inner,
        weights=[shown.get(k, 0.0) for k in range(len(updates))],
        broadcast=0.0,
        norm=None,
        norm_match="modules",
        model=mix(made, inner, context.broadcast, context.problem.model),
        selected=tuple(positions[k] for k in inner.selected) if one_each else (),
    )


def _shares(rows: Tensor) -> Tensor:
    """Rows (m', m) that sum to 1; one of zeros, of uploads clipped to nothing, becomes a mean."""
    sums = rows.sum(1, keepdim=True)
    return torch.where(sums > 0, rows / sums, 1 / rows.shape[1])


def _models(
    updates: Sequence[Update], positions: Sequence[int], context: Context, rows: Tensor, shares: Tensor
) -> list[Tensors]:
    """For each row (m,) of weights the model theta^t plus that sum of the uploads at `positions`."""
    names, theta = trainable(context.problem.model), context.broadcast
    models: list[Tensors] = [{} for _ in rows]
    if theta.keys() - set(names):  # buffers are means, frozen parameters those of theta^t
        models = [mixed(updates, context, dict(zip(positions, share, strict=True))) for share in shares.tolist()]
    for name in names:
        own = wide(theta[name])
        uploads = torch.stack([wide(updates[k].model[name]) - own for k in positions])
        made = own + torch.tensordot(rows.to(uploads), uploads, 1)
        for model, value in zip(models, made.to(theta[name].dtype), strict=True):
            model[name] = value
    return models


def _mean_stats(updates: Sequence[Update], share: dict[int, float]) -> Stats:
    """The mean of what the clients report, of counts the first; as it is where nothing is reported."""
    first: Any = updates[next(iter(share))].stats
    if not isinstance(first, Stats):
        return first
    names = ("loss", "loss_released", "accuracy", *(() if first.broadcast_loss is None else ("broadcast_loss",)))
    means = {name: sum(weight * getattr(updates[k].stats, name) for k, weight in share.items()) for name in names}
    return replace(first, **means)


def _by_client(aggregator: Callable[..., Any]) -> bool:
    """Whether an aggregator, or one among its settings, treats clients by their numbers."""
    inner = getattr(aggregator, "keywords", {}).values()
    return getattr(entry_of(aggregator), "by_client", False) or any(_by_client(f) for f in inner if callable(f))


def _cannot_tell(aggregator: Callable[..., Any], made: int, clients: int) -> str:
    name = entry_of(aggregator).function.__name__
    return f"aggregator: {name} treats clients by their numbers, and of {clients} clients' uploads {made} are made"


def one_upload_for_each(cell: Facts, *, pre: PreAggregator, aggregator: Aggregator) -> str | None:
    made = _Made(cell, pre).cohort
    return _cannot_tell(aggregator, made, cell.cohort) if made != cell.cohort and _by_client(aggregator) else None


def enough_are_made(cell: Facts, *, pre: PreAggregator, aggregator: Aggregator) -> str | None:
    made = _Made(cell, pre)
    if made.cohort == cell.cohort:
        return None  # the aggregator refuses these itself
    reasons = (ask(refuse, aggregator, made) for refuse in entry_of(aggregator).refuse)
    return next((f"{made.cohort} uploads are made of {cell.cohort}: {reason}" for reason in reasons if reason), None)


def bears_what_the_aggregator_bears(cell: Facts, *, pre: PreAggregator, aggregator: Aggregator) -> int | None:
    entry = entry_of(aggregator)
    bears = entry.bears if isinstance(entry, AggregatorEntry) else None
    return None if bears is None else ask(bears, aggregator, _Made(cell, pre))


class _Made:
    """A cell's facts, with the number of uploads that a pre-aggregator makes in place of that of clients."""

    def __init__(self, cell: Facts, pre: PreAggregator) -> None:
        entry = entry_of(pre)
        makes = entry.makes if isinstance(entry, PreAggregatorEntry) else None
        self.cell, self.cohort = cell, cell.cohort if makes is None else ask(makes, pre, cell.cohort)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cell, name)
