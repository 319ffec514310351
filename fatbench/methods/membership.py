"""Membership inference: was an example among those that a client trained on, at an exact rate of false alarms?

| score (larger: member) | formula |
|---|---|
| `loss` | - CE(theta; x, y) (Yeom et al. 2018) |
| `adversarial` | - CE(theta; attack(x), y), by the monitor's attack (Song, Shokri and Mittal 2019) |
| `others` | (phi_k - mean_j phi_j) / sd_j over the other clients j of the round: they are the shadow models |

phi = log p_y - log(1 - p_y). The threshold is the k-th largest of m calibration scores, k = floor(fpr (m + 1)); above
it is a member. Over the draw of calibration images an outsider is then above with probability k / (m + 1), exactly; for
one draw this is Beta(k, m + 1 - k), so a rate of true positives means little without that of false ones beside it.

`others` follows Zhu et al. 2025 (FedMIA), one round, with phi of Carlini et al. 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fatbench.engine.gradients import logits_of
from fatbench.engine.local import load, pixels
from fatbench.engine.rounds import Metrics, Problem, Round, Tensors
from fatbench.methods.intervals import clopper_pearson, student
from fatbench.suite import calls, cost, facts
from fatbench.suite.entry import AlgorithmEntry, Passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Fraction, MemberScores, rounded_down

CHUNK = 250


def membership(
    problem: Problem,
    result: Round,
    images: Tensor,
    labels: Tensor,
    attack: Callable[..., Tensor],
    generator: Generator,
    *,
    members: Count = 200,
    calibration: Count = 1000,
    outsiders: Count = 1000,
    fpr: Fraction = 0.01,
    scores: MemberScores = "loss,others",
    of: Literal["uploads", "global"] = "uploads",
) -> Metrics:
    """True positives at `fpr` false positives, of the first `members` examples of each client of the round.

    Calibration images and outsiders are validation images, disjoint; test images if there are too few, which is a doubt
    at the numbers. Of uploads, each client has its own threshold; `of: global` attacks the new model (without
    `others`).

    member_<score>_tpr, with Clopper-Pearson's interval of the pooled members given the thresholds (_low, _high) and
    Student's over clients (_clients_low, _clients_high); _fpr of the outsiders, its interval of as many outsiders as
    images, however many clients; _auc; _epsilon, ln(low / high) of the limits of both rates if positive: a lower bound
    of any epsilon that holds; _above: 1 if the intervals do not overlap, without which no claim is made.
    """
    shards = [problem.shards[update.client][:members] for update in result.updates]
    own = torch.cat(shards)
    needed = calibration + outsiders
    is_held_out = problem.held_out is not None and len(problem.held_out[1]) >= needed
    beside = problem.held_out if is_held_out and problem.held_out is not None else (images, labels)
    pictures = torch.cat([problem.images[own], beside[0][:needed].to(own.device)])
    truth = torch.cat([problem.labels[own], beside[1][:needed].to(own.device)])
    slices = torch.arange(len(own), device=own.device).split([len(shard) for shard in shards])
    rest = torch.arange(len(own), len(truth), device=own.device)
    models: list[Tensors] = [
        {**result.broadcast, **u.upload} if of == "uploads" else {**result.state.model, **result.own.get(u.client, {})}
        for u in result.updates
    ]
    metrics: Metrics = {} if is_held_out else {"doubt_membership_is_calibrated_on_test_images": 1.0}
    names = scores.replace(" ", "").split(",")
    phi = torch.stack([log_odds(problem, state, pictures, truth) for state in models]) if "others" in names else None
    for name in names:
        by_client = []
        for k, rows in enumerate(slices):
            every = torch.cat([rows, rest])
            if phi is not None and name == "others":
                value = against_others(phi, k)[every]
            else:
                adversary = attack if name == "adversarial" else None
                value = -losses(problem, models[k], pictures[every], truth[every], adversary, generator)
            member, chosen, outside = value.split([len(rows), calibration, outsiders])
            by_client.append((*rates(member, chosen, outside, fpr), len(rows)))
        metrics |= {f"member_{name}_{what}": value for what, value in summary(by_client, outsiders).items()}
    return metrics


def passes_of_membership(cell: Facts, *, members: int, calibration: int, outsiders: int, scores: str) -> Passes:
    """Every network sees the members of all clients for `others`, those of its own client for the other scores; the
    global model is one for each client.
    """
    own, beside, spent = min(members, cell.client_images), calibration + outsiders, Passes()
    for name in scores.replace(" ", "").split(","):
        images = beside + own * (cell.cohort if name == "others" else 1)
        attack = cost.attack_passes(cell.spec["monitor"]) if name == "adversarial" else Passes()
        spent += cell.cohort * images * (Passes(1, 0) + attack)
    return spent


def rates(member: Tensor, calibration: Tensor, outside: Tensor, fpr: float) -> tuple[int, int, float]:
    """(members above the threshold, outsiders above it, AUC)."""
    k = rounded_down(fpr * (len(calibration) + 1))
    threshold = calibration.sort(descending=True).values[k - 1]
    order = outside.sort().values
    below = torch.searchsorted(order, member) + torch.searchsorted(order, member, right=True)
    return (
        int((member > threshold).sum()),
        int((outside > threshold).sum()),
        float(below.double().mean()) / 2 / len(order),
    )


def summary(by_client: list[tuple[int, int, float, int]], outsiders: int) -> dict[str, float]:
    """The numbers of one score from each client's hits, false alarms, AUC and number of members."""
    hits, count = sum(one[0] for one in by_client), sum(one[3] for one in by_client)
    false = sum(one[1] for one in by_client) / len(by_client)
    low, high = clopper_pearson(hits, count)
    false_low, false_high = clopper_pearson(round(false), outsiders)
    half = student([one[0] / one[3] for one in by_client])
    mean = sum(one[0] / one[3] for one in by_client) / len(by_client)
    over_clients = {} if math.isnan(half) else {
        "clients_low": max(0.0, mean - half), "clients_high": min(1.0, mean + half)
    }  # fmt: skip
    return {
        "tpr": hits / count, "tpr_low": low, "tpr_high": high, **over_clients,
        "fpr": false / outsiders, "fpr_low": false_low, "fpr_high": false_high,
        "auc": sum(one[2] for one in by_client) / len(by_client),
        "epsilon": max(0.0, math.log(low / false_high)) if low > 0 else 0.0,
        "above": float(low > false_high),
    }  # fmt: skip


def against_others(phi: Tensor, k: int) -> Tensor:
    """(n,): phi (K, n) of client k, in deviations (of n - 1) from the mean of the others; 0 where they agree."""
    others = torch.cat([phi[:k], phi[k + 1 :]])
    deviation, mean = torch.std_mean(others, 0)
    return torch.where(deviation > 0, (phi[k] - mean) / deviation.clamp(min=1e-30), torch.zeros_like(mean))


def log_odds(problem: Problem, state: Tensors, pictures: Tensor, y: Tensor) -> Tensor:
    """(n,) float64: log p_y - log(1 - p_y), from the log-softmax."""

    def of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        log_p = logits_of(model, x).double().log_softmax(1)
        other = log_p.scatter(1, y[:, None], -torch.inf).logsumexp(1)
        return log_p.gather(1, y[:, None])[:, 0] - other

    return _in_chunks(problem, state, pictures, y, of)


def losses(
    problem: Problem,
    state: Tensors,
    pictures: Tensor,
    y: Tensor,
    attack: Callable[..., Tensor] | None,
    generator: Generator,
) -> Tensor:
    """(n,) float64: the cross-entropy of each image, or of what an attack makes of it."""

    def of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x if attack is None else attack(model, x, y, generator)
        return F.cross_entropy(logits_of(model, x).double(), y, reduction="none")

    return _in_chunks(problem, state, pictures, y, of)


def _in_chunks(
    problem: Problem, state: Tensors, pictures: Tensor, y: Tensor, of: Callable[[nn.Module, Tensor, Tensor], Tensor]
) -> Tensor:
    """What `of` says of each image, by the network with these weights in eval mode."""
    model, chunks = load(problem, state).eval(), zip(pictures.split(CHUNK), y.split(CHUNK), strict=True)
    return torch.cat([of(model, pixels(problem, chunk), of_chunk) for chunk, of_chunk in chunks])


def calibration_for_the_rate(*, calibration: int, fpr: float) -> str | None:
    """Refuse calibration images that are too few for the rate."""
    if rounded_down(fpr * (calibration + 1)) >= 1:
        return None
    return f"calibration: {fpr:.2g} false positives need {math.ceil(1 / fpr - 1)} images at least, got {calibration}"


def models_and_others(cell: Facts, *, scores: str, of: str) -> str | None:
    """Refuse uploads without models, `others` without other clients, `adversarial` without an attack."""
    entry = calls.entry(cell.algorithm.signature)
    if of == "uploads" and isinstance(entry, AlgorithmEntry) and not entry.aggregates:
        return f"of: uploads: {cell.algorithm.name} uploads no models; set of: global"
    if "others" in scores and of == "global":
        return "scores: others compares uploads of the round; set of: uploads"
    if "others" in scores and cell.cohort < 3:
        return f"scores: others needs 3 clients in a round, got {cell.cohort}"
    if "adversarial" in scores and facts.role(cell.spec["monitor"]) == "natural":
        return "scores: adversarial attacks as the monitor does, which is natural"
    return None


def enough_outsiders(cell: Facts, *, calibration: int, outsiders: int) -> str | None:
    """Refuse more calibration images and outsiders than validation or test images."""
    available = max(cell.validation, cell.spec.get("test") or calibration + outsiders)
    if calibration + outsiders > available:
        return f"calibration and outsiders: {calibration + outsiders} of {available} validation or test images"
    return None
