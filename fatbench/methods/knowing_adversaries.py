"""Adversaries that know the aggregator or one another, and those that aim at robustness: one function each.

    optimal_ipm(updates, others, aggregate)       -> (f, P): what the malicious clients send

updates (f, P) are those of the round's malicious clients, others (n - f, P) the honest ones, both in the order of the
clients' numbers; `aggregate` is the server as a function of what they would send. The other symbols are those of
`fatbench.methods.adversaries`. That malicious clients may aim at robustness is known: Zizzo et al. 2020 mask gradients
by distillation and pass Krum, Kim et al. 2023 (ARU) inject models without it and pass the median and the trimmed mean,
Qi et al. 2025 (Lorica) train adapters among Byzantine clients. Between clients: Kim et al. 2022 (pFedDef).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fatbench.engine import randomness
from fatbench.engine.gradients import predict
from fatbench.engine.outcomes import ball
from fatbench.methods.objectives import adversarial_images
from fatbench.suite.entry import Passes, passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import Attack, Count, Natural, Objective, Positive

Search = Literal["grid", "byzfl"]
Aggregate = Callable[[Tensor], Tensor]

# --- the search over t --------------------------------------------------------------------------------------------


def _best(value: Callable[[float], float], search: Search, both: bool = False) -> float:
    """The t with the largest value; of those that are equal to a millionth, the one nearest to 0.

    "grid" looks at 0 and 23 geometric values from 0.01 to 1000, then at 16 even ones between the neighbours of the
    best; with `both` at their negatives, too. "byzfl" is ByzFL's line search, which begins at 10 and finds 24 to 100 %
    of the attainable distance.
    """
    if search == "byzfl":
        return _line_search(value)
    found: dict[float, float] = {}

    def at(t: float) -> float:
        if t not in found:
            found[t] = value(t)
        return found[t] if math.isfinite(found[t]) else -math.inf

    def first(ts: Sequence[float]) -> float:
        most = max(map(at, ts))
        return min((t for t in ts if at(t) >= most - 1e-6 * abs(most)), key=abs)

    for sign in (1, -1) if both else (1,):
        coarse = [0.0, *(sign * 10 ** (-2 + 5 * k / 22) for k in range(23))]
        k = coarse.index(first(coarse))
        low, high = coarse[max(k - 1, 0)], coarse[min(k + 1, 23)]
        for j in range(16):
            at(low + (high - low) * (j + 1) / 17)
    return first(list(found))


def _line_search(value: Callable[[float], float]) -> float:
    """ByzFL's: from 0 by steps of 10, doubled while each is better, then by 0.8 of the last, 20 values in all."""
    best, step, most, expands = 0.0, 10.0, value(0.0), True
    for _ in range(19):
        tried = value(best + step)
        better = tried > most
        if better:
            best, most = best + step, tried
        expands = expands and better
        step *= 2 if expands else 0.8
    return best


def _spread(others: Tensor) -> Tensor:
    """The unbiased deviation of each number; of a single update 0."""
    return others.std(0) if len(others) > 1 else torch.zeros_like(others[0])


def _farthest(
    uploads: Callable[[float], Tensor], others: Tensor, aggregate: Aggregate, search: Search, both: bool
) -> Tensor:
    mean = others.mean(0)
    t = _best(lambda t: float((aggregate(uploads(t)) - mean).norm()), search, both)
    return uploads(t)


def optimal_ipm(updates: Tensor, others: Tensor, aggregate: Aggregate, *, search: Search = "grid") -> Tensor:
    """IPM with the factor that moves the aggregate farthest: -t times the mean of the honest updates, t >= 0.

    search: "grid" of 40 values of t, or ByzFL's line search ("byzfl"), which is weaker.

    Source: Xie et al. 2019 (IPM); the search in each round is ByzFL's idea.

    Knows: the honest updates of the round, the aggregator
    """
    mean = others.mean(0)
    return _farthest(lambda t: (-t * mean).expand_as(updates), others, aggregate, search, both=False)


def optimal_alie(updates: Tensor, others: Tensor, aggregate: Aggregate, *, search: Search = "grid") -> Tensor:
    """ALIE with the factor that moves the aggregate farthest: the honest mean minus t deviations, t of either sign.

    search: as in `optimal_ipm`, of both signs; ByzFL's looks at t >= 0 alone and adds the deviations, in its
    distributed SGD to gradients, here to updates, which go the other way.

    Source: Baruch et al. 2019 (ALIE); the search in each round is ByzFL's idea.

    Knows: the honest updates of the round, the aggregator
    """
    mean, deviation = others.mean(0), _spread(others)
    way = -1.0 if search == "grid" else 1.0
    return _farthest(
        lambda t: (mean + way * t * deviation).expand_as(updates), others, aggregate, search, both=search == "grid"
    )


def aimed(
    updates: Tensor,
    others: Tensor,
    aggregate: Aggregate,
    robust_accuracy: Callable[[Tensor], float],
    *,
    direction: Literal["ipm", "alie", "own"] = "ipm",
) -> Tensor:
    """The factor of IPM, ALIE or the clients' own deviation after which the aggregate is least robust.

    Robust accuracy is that of the next model on the malicious clients' images under one step of training's radius.
    "own" sends u + t (u - the honest mean). The grid is that of `optimal_ipm`; ties go to the smaller t.

    Source: ours, for the aim of Kim et al. 2023 (ARU).

    Knows: the honest updates of the round, the aggregator, its own data
    """
    mean, deviation = others.mean(0), _spread(others)

    def uploads(t: float) -> Tensor:
        if direction == "own":
            return updates + t * (updates - mean)
        return (-t * mean if direction == "ipm" else mean - t * deviation).expand_as(updates)

    return uploads(_best(lambda t: -robust_accuracy(aggregate(uploads(t))), "grid", both=direction == "alie"))


# --- by the honest updates ------------------------------------------------------------------------------------------


def min_sum(update: Tensor, others: Tensor) -> Tensor:
    """Min-Sum: the honest mean minus gamma deviations, as far out as the sum of squared distances allows.

    gamma is the largest with which that sum, to the honest updates, is at most the largest sum of an honest one. It is
    sqrt((max_i sum_j |h_i - h_j|^2 - sum_j |h_j - mean|^2) / ((n - f) |std|^2)), so nothing is searched.

    Source: Shejwalkar and Houmansadr 2021.

    Knows: the honest updates of the round
    """
    mean, deviation = others.mean(0), _spread(others)
    # not by a matrix product, whose rounding is large beside the distance of two near updates
    distances = torch.cdist(others, others, compute_mode="donot_use_mm_for_euclid_dist").square().sum(1).max()
    reach = distances - (others - mean).square().sum()
    length = len(others) * deviation.square().sum()
    gamma = (reach.clamp(min=0) / length).sqrt() if length > 0 else torch.zeros_like(reach)
    return mean - gamma * deviation


def mimic(
    updates: Tensor,
    others: Tensor,
    honest: Tensor,
    memory: dict[str, Tensor],
    generator: Generator,
    *,
    warmup: Count = 10,
) -> tuple[Tensor, dict[str, Tensor]]:
    """All copy the honest client that is farthest along z, the direction in which honest updates differ most.

    z and the mean of the honest updates are running means over `warmup` rounds; z begins as a normal vector times the
    covariance. Afterwards the client stays the one of the last round of the warm-up, and z decides while it is away.

    Source: Karimireddy et al. 2022 and its code, whose experiments set the warm-up; 10 is ours.

    Knows: the honest updates of the round; remembers their mean and direction
    """
    mean, seen = others.mean(0), int(memory.get("rounds", torch.tensor(0)))
    kept = dict(memory)
    if seen < warmup:
        centre = (seen * memory["mean"] + mean) / (seen + 1) if seen else mean
        deviations = others - centre
        z = memory["direction"] if seen else randomness.normal(mean, generator)
        step = F.normalize((deviations @ z) @ deviations, dim=0)
        z = F.normalize(seen * z + step, dim=0) if seen else step
        kept |= {"mean": centre, "direction": z}
    chosen = int((others @ kept["direction"]).argmax())
    client = honest[chosen]
    if seen >= warmup and bool((here := honest == memory["client"]).any()):
        client, chosen = memory["client"], int(here.int().argmax())
    if seen < warmup:
        kept["client"] = client
    return others[chosen].expand_as(updates), {**kept, "rounds": torch.tensor(seen + 1)}


def mimic_fixed(updates: Tensor, others: Tensor, *, client: Natural = 0) -> Tensor:
    """All copy one honest client of the round, number `client` of them, from 0.

    Source: ByzFL and FLPoison.

    Knows: the honest updates of the round
    """
    return others[client].expand_as(updates)


def fang_krum(updates: Tensor, others: Tensor, aggregate: Aggregate, *, start: Positive | None = None) -> Tensor:
    """All send -lambda times the sign of the honest mean, with the largest lambda that Krum chooses.

    lambda is halved from `start` until the aggregate is what is sent, or lambda is below 1e-5. The default is the
    paper's bound, (sqrt(min_i s_i / (n - 2 f - 1)) + max_i |u_i|) / sqrt(P), s_i the sum of squared distances from i to
    the n - f - 2 nearest honest updates.

    Source: Fang et al. 2020; FLPoison begins at 1.

    Knows: the honest updates of the round, the aggregator
    """
    f, n = len(updates), len(updates) + len(others)
    if start is None:
        squared = torch.cdist(others, others, compute_mode="donot_use_mm_for_euclid_dist").square()
        scores = squared.sort(1).values[:, 1 : n - f - 1].sum(1)  # from 1: an update is nearest to itself
        longest = float(others.norm(dim=1).max())
        start = (math.sqrt(float(scores.min()) / max(n - 2 * f - 1, 1)) + longest) / math.sqrt(others.shape[1])
    sign, size = others.mean(0).sign(), start
    while size >= 1e-5:
        sent = (-size * sign).expand_as(updates)
        # theta^t + u - theta^t is u but for rounding
        if float((aggregate(sent) - sent[0]).norm()) <= 0.01 * float(sent[0].norm()):
            return sent
        size /= 2
    return (-size * sign).expand_as(updates)


def fang_trimmed(
    updates: Tensor, others: Tensor, generator: Generator, *, b: Positive = 2.0, partial: bool = False
) -> Tensor:
    """Each number lies beyond the honest ones, on the side against their mean, drawn anew for each client.

    Where the honest mean is positive it is uniform between their minimum and the minimum / b (b times it, if it is
    negative), where it is negative between the maximum and b times it (/ b). `partial` is the attack of one who sees
    only the malicious clients' own updates (`knows: own`): 3 to 4 deviations from their mean, uniformly.

    Source: Fang et al. 2020, section 4, there on parameters, here on updates, as the authors of FLTrust have it.

    Knows: the honest updates of the round
    """
    mean, draw = others.mean(0), randomness.uniform(updates, 0.0, 1.0, generator)
    down = mean > 0
    if partial:
        return mean + torch.where(down, -1.0, 1.0) * (3 + draw) * _spread(others)
    low, high = others.min(0).values, others.max(0).values
    below = torch.where(low > 0, low / b, low * b)
    above = torch.where(high > 0, high * b, high / b)
    return torch.where(down, low + draw * (below - low), high + draw * (above - high))


def within_honest(
    update: Tensor, others: Tensor, *, reach: Literal["radius", "min_max"] = "radius", stretch: bool = False
) -> Tensor:
    """As near to the upload as the honest updates allow: m + gamma (u - m), m their mean, gamma at most 1.

    reach: "radius" allows the distance of the farthest honest update from m; with "min_max" no honest update may be
    farther than two of them are from each other. `stretch` goes out to the reach also from within it.

    Source: a rule for the projection of Kim et al. 2023 (ARU).

    Knows: the honest updates of the round
    """
    mean = others.mean(0)
    way, around = update - mean, others - mean
    length = way.norm()
    if not length > 0:
        return update
    if reach == "radius":
        gamma = around.norm(dim=1).max() / length
    else:
        largest = torch.cdist(others, others, compute_mode="donot_use_mm_for_euclid_dist").max()
        along = around @ way / length
        gamma = ((along + (along.square() - around.square().sum(1) + largest**2).clamp(min=0).sqrt()) / length).min()
    return update if gamma >= 1 and not stretch else mean + gamma * way


def agree(updates: Tensor) -> Tensor:
    """All send the mean of their uploads: to Krum, copies are at distance 0.

    Source: Fang et al. 2020; Zizzo et al. 2020.

    Knows: the malicious clients' updates
    """
    return updates.mean(0).expand_as(updates)


# --- at robustness ------------------------------------------------------------------------------------------------


def objective_of(
    objective: Objective, model: nn.Module, x: Tensor, y: Tensor, generator: Generator, *, instead: Objective
) -> tuple[Tensor, Tensor]:
    """The client trains on the objective `instead`: `standard` skips adversarial training.

    Source: Kim et al. 2023 (ARU), whose malicious clients train without it.

    Knows: its own data
    """
    loss, correct = instead(model, x, y, generator)
    return loss, correct


def passes_of_instead(*, instead: Objective) -> Passes:
    return passes(instead)


def inject(update: Tensor, malicious: int, cohort: int, *, rate: Positive = 0.5, scale: bool = True) -> Tensor:
    """The share `rate` of the way to the clients' own model, as far as the f uploads together can move a mean.

    Of n clients f send n / f `rate` times their update, which moves a plain mean by `rate` times it; `scale: false`,
    against medians and Krum, sends `rate` / f times it. With `attack: objective_of` the model is trained without
    adversarial training.

    Source: the code of Kim et al. 2023 (ARU): rates 0.5, 0.3, 0.15 for 1, 5, 10 of 40 clients, late in the training.
    There the model is trained beforehand, here in the round.

    Knows: its own update, the number of clients and of malicious ones
    """
    return (rate * cohort if scale else rate) / malicious * update


def masking(
    objective: Objective,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    generator: Generator,
    broadcast: nn.Module,
    *,
    attack: Attack,
    temperature: Positive = 2.0,
) -> tuple[Tensor, Tensor]:
    """Distillation from the broadcast model at a temperature T, on adversarial images: T^2 CE(softmax(z' / T), z / T).

    z are the logits, z' the broadcast model's. `then: agree` lets Krum take one.

    Source: after Zizzo et al. 2020, section on Krum, whose teacher is another network; the temperature is ours.

    Knows: its own data
    """
    images = adversarial_images(model, x, y, generator, attack)
    with torch.no_grad():
        target = (predict(broadcast, images) / temperature).softmax(1)
    logits = predict(model, images)
    return temperature**2 * F.cross_entropy(logits / temperature, target), logits.detach().argmax(1) == y


def attack_and_teacher(*, attack: Attack) -> Passes:
    return passes(attack) + 1 + Passes(1, 0)


def scale_logits(update: Tensor, broadcast: Tensor, last_layer: Tensor, *, factor: Positive = 10.0) -> Tensor:
    """The last layer sends `factor` times its weights, so that cross-entropy's gradients vanish; the rest is honest.

    The sender's accuracy stays the same.

    Source: the cheapest mask of gradients; Athalye et al. 2018.

    Knows: its own update, the model
    """
    return torch.where(last_layer, factor * (broadcast + update) - broadcast, update)


# --- refusals -----------------------------------------------------------------------------------------------------


def two_for_a_spread(cell: Facts) -> str | None:
    if (cell.spec.get("malicious") or {}).get("knows") == "own" and cell.malicious < 2:
        return "knows: own: one malicious client's updates have no deviation: two or more are needed"
    return None


def an_attack_with_a_radius(cell: Facts) -> str | None:
    objective = (cell.algorithm.get("local") or cell.algorithm).get("objective")
    if objective is not None and ball(objective.bound) is None:
        return f"aimed measures robust accuracy within the radius of training, and {objective.name} has no attack"
    return None


def an_honest_client(cell: Facts, *, client: int) -> str | None:
    if client >= (honest := cell.cohort - cell.malicious):
        return f"client: {client} of {honest} honest clients in a round, counted from 0"
    return None


def enough_for_fang(cell: Facts) -> str | None:
    if cell.cohort < (needed := 2 * cell.malicious + 3):
        return f"fang_krum needs {needed} clients in a round, of whom {cell.malicious} are malicious, as Krum does"
    return None
