"""Aggregators: the weight of each client in the next global model.

    AGGREGATORS["sfat"](updates, context, alpha=1 / 11, top=1)     -> Mixing(weights=[...])

An aggregator sees the round's updates and a Context and returns a Mixing; `fatbench.engine.mixing` computes the next
model. A proper aggregator returns non-negative weights that sum to 1 and that depend on the client, not on its position
in the list. The docstring of any other says "Improper.".

| here | papers | what |
|---|---|---|
| update.n | N_k | training examples of client k |
| update.stats.loss | L_k | mean training loss of the last local epoch |
| alpha, r | alpha, r | slack; r = (1 + alpha) / (1 - alpha) multiplies the weight of the selected clients (SFAT) |
| top | K-hat | how many clients are selected |
| context.broadcast | theta^t | the weights the round began with |
| memory["lambda"] | lambda | AFL's distribution over all clients |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from fatbench.engine.mixing import last_layer_cosines, normalised
from fatbench.engine.rounds import Context, Mixing, Tensors, Update
from fatbench.methods.adfl import adfl
from fatbench.methods.filtering_aggregators import caf, dnc, few_subsets, keeps_some, mda, smea
from fatbench.methods.preaggregators import after, bears_what_the_aggregator_bears, enough_are_made, one_upload_for_each
from fatbench.methods.robust_aggregators import (
    bulyan,
    centred_clipping,
    coordinate_median,
    enough_for_bulyan,
    enough_for_krum,
    geometric_median,
    is_minority,
    keeps_at_most_all,
    krum,
    leaves_some_values,
    meamed,
    multi_krum,
    rfa,
    tolerates_any_minority,
    tolerates_byzantine,
    trimmed_mean,
)
from fatbench.models import logit_parameters
from fatbench.suite.entry import AggregatorEntry
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Momentum, NonNegative, Positive, Probability, Real

RankBy = Literal["nk_weighted", "mean_loss", "released"]

# --- FedAvg ------------------------------------------------------------------------------------------------------


def samples(updates: Sequence[Update], context: Context) -> Mixing:
    """FedAvg: w_k = N_k / N, with N the sum over the participants.

    Source: McMahan et al. 2017; Aldahdooh et al. 2022, Eq. 2; Zhu et al. 2023, section 3.2.
    """
    return Mixing(normalised([float(update.n) for update in updates]))


def uniform(updates: Sequence[Update], context: Context) -> Mixing:
    """FedAvg as in FedTorch and in the SFAT release: w_k = 1 / m, whatever N_k is.

    Source: differences: fedavg-uniform.
    """
    return Mixing(normalised([1.0] * len(updates)))


# --- slack: SFAT and its relatives -------------------------------------------------------------------------------


def sfat(
    updates: Sequence[Update],
    context: Context,
    *,
    alpha: Momentum,
    top: Count,
    rank_by: Literal["nk_weighted", "mean_loss", "released"] = "nk_weighted",
    first_round: bool = False,
) -> Mixing:
    """SFAT: the `top` clients with the smallest N_k / N times training loss count (1 + alpha) / (1 - alpha) times.

    w_k = P_k N_k / sum_j P_j N_j, P_k = (1 + alpha) / (1 - alpha) for the selected clients and 1 for the others.
    alpha in [0, 1): 0 is FedAvg by samples, 1/11, 3/23 and 1/6 are the paper's 1.2, 1.3 and 1.4. `top` is at most half
    of the participants. `rank_by`: "nk_weighted" is the paper's N_k / N times the mean loss, which on unequal splits
    picks small clients; "mean_loss" leaves N_k out; "released" is the release's sum over batches / number of batches.
    All three agree on equal splits.
    Round 0 is plain FedAvg, as in the release, unless `first_round`. Batch normalisation keeps FedAvg's weights.
    Ties are broken by the loss, then by the client's number. Raises ValueError if top > m / 2.

    Three clients with 1, 2 and 5 examples and losses 3, 1 and 2: N_k L_k is 3, 2 and 10; r is 2, so client 1 counts
    twice:

    >>> from fatbench.engine.rounds import Stats
    >>> clients = [(0, 1, 3.0), (1, 2, 1.0), (2, 5, 2.0)]
    >>> updates = [Update(k, n, {}, Stats(loss, loss, 0.5, 1, 1.0, 1)) for k, n, loss in clients]
    >>> context = Context(round=1, rounds=10, problem=None, broadcast={}, memory={}, lr=0.1)
    >>> [round(weight, 3) for weight in sfat(updates, context, alpha=1 / 3, top=1).weights]
    [0.1, 0.4, 0.5]

    Source: Zhu et al. 2023, section 4.3 and Algorithm 1; methods: SFAT; differences: sfat-normaliser, sfat-ranking,
    sfat-round0.
    """
    factor = (1 + alpha) / (1 - alpha)
    return _slack("sfat", updates, context, factor, top=top, rank_by=rank_by, first_round=first_round)


def sfat_annealed(
    updates: Sequence[Update],
    context: Context,
    *,
    alpha: Momentum,
    top: Count,
    rank_by: Literal["nk_weighted", "mean_loss", "released"] = "nk_weighted",
    first_round: bool = False,
) -> Mixing:
    """SFAT whose factor falls linearly from r = (1 + alpha) / (1 - alpha) in round 0 to 1 in the last round.

    r_t = r - (r - 1) t / (T - 1). Everything else as in `sfat`. The paper gives only the end points: 1.4 (CIFAR-10) or
    1.2 (SVHN) to 1.0. Raises ValueError if top > m / 2.

    Source: Zhu et al. 2023, Table 12; methods: SFAT.
    """
    start = (1 + alpha) / (1 - alpha)
    # paper: the end points only / here: linear
    factor = start - (start - 1) * context.round / max(context.rounds - 1, 1)
    return _slack("sfat_annealed", updates, context, factor, top=top, rank_by=rank_by, first_round=first_round)


def resfat_deemph(
    updates: Sequence[Update],
    context: Context,
    *,
    r: Positive,
    top: Count = 1,
    rank_by: Literal["nk_weighted", "mean_loss", "released"] = "nk_weighted",
    first_round: bool = False,
) -> Mixing:
    """Re-SFAT of Table 10: the `top` clients with the smallest N_k / N times loss count r < 1 times.

    As `sfat` with the factor given; r >= 1 is SFAT itself, so that one grid over r covers the table.
    Raises ValueError if top > m / 2.

    Source: Zhu et al. 2023, Table 10 (r = 0.8, 0.6); differences: resfat-readings.
    """
    return _slack("resfat_deemph", updates, context, r, top=top, rank_by=rank_by, first_round=first_round)


def resfat_up_large(
    updates: Sequence[Update],
    context: Context,
    *,
    alpha: Momentum,
    top: Count = 1,
    rank_by: Literal["nk_weighted", "mean_loss", "released"] = "nk_weighted",
    first_round: bool = False,
) -> Mixing:
    """Re-SFAT of section 5.1: the `top` clients with the largest N_k / N L_k count (1 + alpha) / (1 - alpha) times.

    As `sfat` but for the direction; not the same as `resfat_deemph`. Raises ValueError if top > m / 2.

    Source: Zhu et al. 2023, section 5.1, Fig. 4 middle; differences: resfat-readings. The release cannot do this.
    """
    factor = (1 + alpha) / (1 - alpha)
    return _slack(
        "resfat_up_large", updates, context, factor, top=top, rank_by=rank_by, first_round=first_round, largest=True
    )


def at_most_half(cell: Facts, *, top: int) -> str | None:
    if 2 * top > cell.cohort:
        return f"top: {top} is more than half of the {cell.cohort} clients of a round"
    return None


def _slack(
    name: str,
    updates: Sequence[Update],
    context: Context,
    factor: float,
    *,
    top: int,
    rank_by: RankBy,
    first_round: bool,
    largest: bool = False,
) -> Mixing:
    m = len(updates)
    if 2 * top > m:
        raise ValueError(f"{name}: top={top} of {m} participants, but at most half of them ({m // 2}) may be selected")
    fedavg = normalised([float(update.n) for update in updates])
    if context.round == 0 and not first_round:
        return Mixing(fedavg)
    sign = -1 if largest else 1

    def rank(k: int) -> tuple[bool, float, float, int]:
        n, stats = updates[k].n, updates[k].stats
        # the paper's N_k / N * L_k: N is the same for all
        by = {"nk_weighted": n * stats.loss, "mean_loss": stats.loss, "released": stats.loss_released}
        value, loss = sign * by[rank_by], sign * stats.loss
        return math.isnan(value), value, loss, updates[k].client  # a client that diverged comes last in both directions

    selected = tuple(sorted(sorted(range(m), key=rank)[:top]))
    # paper: also divided by sum N_k, which read literally shrinks the model by K / here: weights that sum to 1
    emphasised = [update.n * (factor if k in selected else 1.0) for k, update in enumerate(updates)]
    return Mixing(normalised(emphasised), norm=fedavg, selected=selected)


def two_level(
    updates: Sequence[Update],
    context: Context,
    *,
    adversarial: Count,
    alpha: Momentum,
    top: Count = 1,
    share: Probability | None = None,
    rank_by: Literal["nk_weighted", "mean_loss", "released"] = "nk_weighted",
    first_round: bool = False,
) -> Mixing:
    """SFAT among the clients that train adversarially, FedAvg among the others, then a mean of the two.

    Clients that do not train adversarially have smaller losses, so SFAT over all clients would select only those.
    Clients 0 to `adversarial` - 1 train adversarially, as in `fedavg_mixed`. `share` is the weight of their group;
    without it, their fraction of the examples. `alpha`, `top`, `rank_by` and `first_round` are those of `sfat`; in a
    round with fewer than 2 `top` adversarial clients, as many as half of them are selected. A group that is not in the
    round has no weight. Batch normalisation keeps FedAvg's weights within a group. Metrics: adversarial_loss and
    standard_loss, mean losses weighted by examples.

    Two of four clients train adversarially, with losses 2 and 3; r = 2, so client 0 counts twice in its half:

    >>> from fatbench.engine.rounds import Stats
    >>> losses = enumerate([2.0, 3.0, 0.1, 0.2])
    >>> updates = [Update(k, 10, {}, Stats(loss, loss, 0.5, 1, 1.0, 1)) for k, loss in losses]
    >>> context = Context(round=1, rounds=10, problem=None, broadcast={}, memory={}, lr=0.1)
    >>> [round(weight, 3) for weight in two_level(updates, context, adversarial=2, alpha=1 / 3).weights]
    [0.333, 0.167, 0.25, 0.25]

    Source: ours, for the setting of Hong et al. 2023; methods: SFAT.
    """
    factor = (1 + alpha) / (1 - alpha)
    groups = [
        [k for k, u in enumerate(updates) if (u.client < adversarial) == is_adversarial]
        for is_adversarial in (True, False)
    ]
    updates_by_group = [[updates[k] for k in group] for group in groups]
    examples = [sum(update.n for update in group) for group in updates_by_group]
    shares = normalised([float(n) for n in examples])
    # a group that is not in the round has no examples, so no weight whatever `share` says
    if share is not None and all(groups):
        shares = [share, 1 - share]
    selected = min(top, len(groups[0]) // 2)  # partial participation may leave fewer than 2 `top` of them
    trained, standard = (Mixing(normalised([float(u.n) for u in group]) if group else []) for group in updates_by_group)
    if selected:
        trained = _slack(
            "two_level", updates_by_group[0], context, factor, top=selected, rank_by=rank_by, first_round=first_round
        )
    weights, norm = [0.0] * len(updates), [0.0] * len(updates)
    for group, group_share, mixing in zip(groups, shares, (trained, standard), strict=True):
        for position, k in enumerate(group):
            weights[k] = group_share * mixing.weights[position]
            norm[k] = group_share * (mixing.norm or mixing.weights)[position]
    losses = {
        name: math.fsum(update.n * update.stats.loss for update in group) / n
        for name, group, n in zip(("adversarial_loss", "standard_loss"), updates_by_group, examples, strict=True)
        if n
    }
    selected_clients = tuple(groups[0][position] for position in trained.selected)
    return Mixing(weights, norm=norm, selected=selected_clients, metrics={**losses})


# --- SFAT as released --------------------------------------------------------------------------------------------


def at_most_half_of_adversarial(*, top: int, adversarial: int) -> str | None:
    if 2 * top > adversarial:
        return f"top: {top} is more than half of the {adversarial} clients that train adversarially"
    return None


def as_in_the_algorithm(cell: Facts, *, adversarial: int) -> str | None:
    trained = cell.algorithm.get("adversarial")
    if trained and trained != adversarial:
        return f"adversarial: {adversarial} in the aggregator, {trained} in the algorithm"
    return None


def sfat_released(updates: Sequence[Update], context: Context, *, r: Positive, top: Count) -> Mixing:
    """SFAT as the authors' code computes it: weights that do not sum to 1 in most rounds. Improper.

    The clients with the `top` smallest release losses, and all that tie with the last of them, count r times. The
    divisor is (number of the others among positions 1 .. m - 1) + (m - that number) r: position 0 of the list, which
    is in random order, is never counted among the others. If position 0 is not selected, the weights sum to
    (m - K + K r) / (m - K - 1 + (K + 1) r), 0.931 for m = 5, K = 1, r = 1.4, and the model shrinks by that factor;
    r < 1 inflates it. Tensors with the letters "bn" in their name count every position but the first as one of the
    others, and the first r times if it is selected. N_k is ignored, buffers and counters are treated as weights, and
    round 0 is the plain mean. As in that code, `top` is not checked: more than m selects all.

    `updates` must be in the order in which the participants were drawn.

    Source: ZFancy/SFAT utils.py:122-138, SFAT.py:108-178; differences: sfat-released-sum, sfat-batchnorm.
    """
    m = len(updates)
    if context.round == 0:
        uniform_weights = [1 / m] * m  # released: N_k is ignored
        return Mixing(uniform_weights, norm=uniform_weights, norm_match="substring")
    scores = [-update.stats.loss_released for update in updates]
    threshold = sorted(scores, reverse=True)[min(top, m) - 1]
    selected = tuple(k for k in range(m) if scores[k] >= threshold)  # all that tie with the last
    unselected = sum(k not in selected for k in range(1, m))  # released: position 0 is never counted
    divisor = unselected + (m - unselected) * r
    weights = [(r if k in selected else 1.0) / divisor for k in range(m)]
    norm = [(r if k == 0 and k in selected else 1.0) / (m - 1 + r) for k in range(m)]
    return Mixing(weights, norm=norm, norm_match="substring", selected=selected)


def fedavg_shrink(updates: Sequence[Update], context: Context, *, r: Positive, top: Count) -> Mixing:
    """The control of `sfat_released`: the plain mean times what its weights sum to in the same round. Improper.

    Shrinks (r < 1: inflates) exactly when and as much as `sfat_released` with the same r and top would on the same
    updates, tensors named "bn" included, but favours no client. What `sfat_released` gains beyond this is the slack.

    Source: ours; differences: sfat-released-sum.
    """
    released = sfat_released(updates, context, r=r, top=top)
    assert released.norm is not None
    m = len(updates)
    return Mixing(
        [math.fsum(released.weights) / m] * m, norm=[math.fsum(released.norm) / m] * m, norm_match="substring"
    )


# --- other reweightings ------------------------------------------------------------------------------------------


def fedsoftbetter(updates: Sequence[Update], context: Context, *, temperature: NonNegative = 0.3125) -> Mixing:
    """FedSoftBetter on the mean loss: w_k proportional to N_k exp(-temperature L_k).

    temperature >= 0; 0 is FedAvg by samples, 0.3125 is the authors' 20 per batch of 64. Optimal losses are taken as 0.

    Source: Ben Mansour et al. 2022; differences: fedsoftbetter-loss.
    """
    return Mixing(_softmax([-temperature * update.stats.loss for update in updates], [update.n for update in updates]))


def fedsoftbetter_released(updates: Sequence[Update], context: Context, *, temperature: Real = -20.0) -> Mixing:
    """FedSoftBetter as in its authors' code: w_k proportional to exp(temperature l_k), N_k ignored.

    l_k is the sum over the batches of the last epoch of their mean losses, divided by N_k: about the mean loss per
    batch length. temperature < 0 favours small losses ("Better"), > 0 large ones ("Worse"); -20, -15 and -5 were used.
    Here the sum is L_k times the number of batches, which is exact if all batches have the same length; a shorter last
    batch counts by its length.

    Source: alexandreduplessis/Tamaya_Federated_Learning src/soft_mergers.py; differences: fedsoftbetter-loss.
    """
    # released: the sum of the batches' mean losses / N_k; exact for batches of equal length
    losses = [update.stats.loss * update.stats.batches / update.n for update in updates]
    return Mixing(_softmax([temperature * loss for loss in losses]))


def fedwavg(
    updates: Sequence[Update],
    context: Context,
    *,
    q: NonNegative = 1.0,
    last_layer: Literal["all", "weight_only", "last_tensor"] = "all",
    by_samples: bool = False,
) -> Mixing:
    """FedWAvg: w = softmax(q c), c_k the cosine between the last layers of theta^t and theta_k.

    q >= 0; 0 is `uniform`. The last layer is every parameter of every module that emits logits, together: both
    classifiers of a head that has two. `weight_only` uses their weights, `last_tensor` only the last tensor (often a
    bias: a naive interpretation). `by_samples` multiplies by N_k. A last layer of zeros has cosine 0.

    Source: Aldahdooh et al. 2022, Eq. 3 and Algorithm 1; differences: fedwavg-last-layer.
    """
    layers = logit_parameters(context.problem.model)
    match last_layer:
        case "weight_only":
            layers = [name for name in layers if name.split(".")[-1] == "weight"]
        case "last_tensor":
            layers = layers[-1:]
    cosines = last_layer_cosines(updates, context.broadcast, layers)
    return Mixing(_softmax([q * c for c in cosines], [update.n if by_samples else 1 for update in updates]))


def afl(
    updates: Sequence[Update], context: Context, broadcast_losses: Sequence[float], *, gamma: Positive = 0.01
) -> Mixing:
    """Agnostic federated learning: weights lambda, moved towards the clients that theta^t serves worst.

    w_k is lambda_k, normalised over the participants. Then lambda becomes the projection of lambda + gamma L onto the
    simplex, with L_k the loss of theta^t on client k and 0 for clients that do not take part. lambda, over all K
    clients, is kept in `memory["lambda"]` and starts at N_k / N. If all participants have weight 0, N_k replaces it.

    Source: Mohri et al. 2019; differences: fedtorch-afl. Nothing published to compare with (differences: sfat-afl).
    """
    if "lambda" in context.memory:
        fraction = [float(x) for x in context.memory["lambda"].tolist()]
    else:
        fraction = normalised([float(len(shard)) for shard in context.problem.shards])
    weights = [fraction[update.client] for update in updates]  # before this round's step on lambda
    if math.fsum(weights) <= 0:  # the projection may set the lambda of every participant to 0
        weights = [float(update.n) for update in updates]
    for update, loss in zip(updates, broadcast_losses, strict=True):
        fraction[update.client] += gamma * loss
    return Mixing(
        normalised(weights), memory={"lambda": torch.tensor(project_to_simplex(fraction), dtype=torch.float64)}
    )


def project_to_simplex(values: Sequence[float]) -> list[float]:
    """The nearest point of the probability simplex in the Euclidean norm, by sorting (Duchi et al. 2008)."""
    total, excess = 0.0, 0.0
    for count, value in enumerate(sorted(values, reverse=True), start=1):
        total += value
        if value * count > total - 1:  # this entry stays positive
            excess = (total - 1) / count
    return normalised([max(value - excess, 0.0) for value in values])


def q_ffl(updates: Sequence[Update], context: Context, broadcast_losses: Sequence[float], *, q: NonNegative) -> Mixing:
    """q-FedAvg: clients with a high loss of theta^t count more, at an estimated step size. Improper: uses theta^t.

    theta^{t+1} = theta^t - sum_k F_k^q D_k / sum_k (q F_k^(q-1) |D_k|^2 + L F_k^q), with D_k = L (theta^t - theta_k),
    L = 1 / lr and F_k the loss of theta^t on client k (at least 1e-10). As weights: w_k = L F_k^q / the divisor, and
    theta^t gets the remainder to 1. q >= 0; 0 is `uniform`. |D_k| is taken over the weights, without running averages
    of batch normalisation (by their names, running_mean and running_var).

    Source: Li et al. 2020 (q-FFL, Algorithm 2); differences: fedtorch-afl. Nothing published to compare with.
    """
    losses = [max(loss, 1e-10) for loss in broadcast_losses]  # F_k^(q-1) needs F_k > 0
    largest = max(losses)  # both numerator and divisor are divided by largest^q, which may overflow
    steepness = 1 / context.lr
    powers = [(loss / largest) ** q for loss in losses]
    divisor = math.fsum(
        q * power / loss * steepness**2 * (_squared_distance(context.broadcast, update.model) if q else 0.0)
        + steepness * power
        for loss, power, update in zip(losses, powers, updates, strict=True)
    )
    weights = [steepness * power / divisor for power in powers]
    return Mixing(weights, broadcast=max(1 - math.fsum(weights), 0.0))  # max: rounding at q = 0


def _squared_distance(broadcast: Tensors, model: Tensors) -> float:
    # running averages are not stepped along a gradient, so D_k lacks them
    keys = [
        key
        for key, value in broadcast.items()
        if value.is_floating_point() and not key.endswith(("running_mean", "running_var"))
    ]
    # foreach: one kernel for all tensors, one transfer to the CPU
    norms = torch._foreach_norm(torch._foreach_sub([broadcast[key] for key in keys], [model[key] for key in keys]))
    return math.fsum(norm * norm for norm in torch.stack(norms).tolist())  # ** raises where it overflows


def _softmax(exponents: Sequence[float], factors: Sequence[float] | None = None) -> list[float]:
    """factors[k] * exp(exponents[k]), normalised, without overflow."""
    largest = max(exponents)  # the largest power is then 1
    powers = [math.exp(exponent - largest) for exponent in exponents]
    return normalised([p * f for p, f in zip(powers, factors or [1.0] * len(powers), strict=True)])


AGGREGATORS: dict[str, Callable[..., Mixing]] = {
    "samples": AggregatorEntry(samples, cites=("aldahdooh2022", "mcmahan2017", "zhu2023")),
    "uniform": uniform,
    "sfat": AggregatorEntry(sfat, refuse=(at_most_half,), cites=("zhu2023",)),
    "sfat_annealed": AggregatorEntry(sfat_annealed, refuse=(at_most_half,), cites=("zhu2023",)),
    "two_level": AggregatorEntry(
        two_level,
        refuse=(at_most_half_of_adversarial, as_in_the_algorithm),
        example={"adversarial": 2},
        by_client=True,
        cites=("hong2023",),
    ),
    "resfat_deemph": AggregatorEntry(resfat_deemph, refuse=(at_most_half,), cites=("zhu2023",)),
    "resfat_up_large": AggregatorEntry(resfat_up_large, refuse=(at_most_half,), cites=("zhu2023",)),
    "sfat_released": AggregatorEntry(sfat_released, refuse=(at_most_half,)),
    "fedavg_shrink": AggregatorEntry(fedavg_shrink, refuse=(at_most_half,)),
    "fedsoftbetter": AggregatorEntry(fedsoftbetter, cites=("benmansour2022",)),
    "fedsoftbetter_released": fedsoftbetter_released,
    "fedwavg": AggregatorEntry(fedwavg, cites=("aldahdooh2022",)),
    "adfl": AggregatorEntry(
        adfl, example={"steps": 2}, fractions=("adfl_hit",), by_client=True, cites=("danilenka2022",)
    ),
    "afl": AggregatorEntry(afl, by_client=True, cites=("mohri2019",)),
    "q_ffl": AggregatorEntry(q_ffl, cites=("li2020qffl",)),
    "coordinate_median": AggregatorEntry(coordinate_median, bears=tolerates_any_minority, cites=("yin2018",)),
    "trimmed_mean": AggregatorEntry(
        trimmed_mean, refuse=(leaves_some_values,), bears=tolerates_byzantine, cites=("yin2018",)
    ),
    "krum": AggregatorEntry(
        krum, refuse=(enough_for_krum,), bears=tolerates_byzantine, example={"byzantine": 0}, cites=("blanchard2017",)
    ),
    "multi_krum": AggregatorEntry(
        multi_krum,
        refuse=(enough_for_krum, keeps_at_most_all),
        bears=tolerates_byzantine,
        example={"byzantine": 0},
        cites=("blanchard2017",),
    ),
    "bulyan": AggregatorEntry(
        bulyan,
        refuse=(enough_for_bulyan,),
        bears=tolerates_byzantine,
        example={"byzantine": 0},
        cites=("elmhamdi2018",),
    ),
    "meamed": AggregatorEntry(meamed, refuse=(is_minority,), bears=tolerates_byzantine, cites=("xie2018",)),
    "mda": AggregatorEntry(mda, refuse=(is_minority, few_subsets), bears=tolerates_byzantine, cites=("elmhamdi2020",)),
    "smea": AggregatorEntry(
        smea, refuse=(is_minority, few_subsets), bears=tolerates_byzantine, cites=("allouah2023smea",)
    ),
    "caf": AggregatorEntry(caf, refuse=(is_minority,), bears=tolerates_byzantine, cites=("allouah2025",)),
    "dnc": AggregatorEntry(dnc, refuse=(is_minority, keeps_some), bears=tolerates_byzantine, cites=("shejwalkar2021",)),
    "geometric_median": AggregatorEntry(geometric_median, bears=tolerates_any_minority, cites=("pillutla2019",)),
    "rfa": AggregatorEntry(rfa, cites=("pillutla2019",)),
    "centred_clipping": AggregatorEntry(
        centred_clipping, bears=tolerates_any_minority, fractions=("clipped",), cites=("karimireddy2021",)
    ),
    "after": AggregatorEntry(
        after, refuse=(one_upload_for_each, enough_are_made), bears=bears_what_the_aggregator_bears
    ),
}
