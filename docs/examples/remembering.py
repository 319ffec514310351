"""An aggregator that remembers whom to trust, and the adversary that is aimed at it.

The aggregator weights clients by the inverse of their distance from the median, averaged over the rounds so far. The
adversary asks the server what it would do (`aggregate`), memory included, and sends what moves the model farthest
against the honest mean: a long upload is distrusted for rounds, so the best one is short at first.

    malicious: {clients: 2, attack: {name: patient}}
"""

import torch

from fatbench.engine.rounds import Mixing
from fatbench.suite.entry import AggregatorEntry
from fatbench.suite.types import Count, Fraction, Positive


def below_half(cell):
    """The median moves with the half: it bears fewer."""
    return (cell.cohort - 1) // 2


def remembering(updates, context, *, forget: Fraction = 0.3):
    """Weights by the inverse of a client's mean distance from the median; `forget` is the share of the last round."""
    names = [name for name, p in context.problem.model.named_parameters() if p.requires_grad]
    vectors = torch.stack([torch.cat([u.model[name].double().flatten() for name in names]) for u in updates])
    distances = (vectors - vectors.quantile(0.5, dim=0)).norm(dim=1)
    known = dict(context.memory.get("distance", {}))  # of clients that are not here, too
    for u, distance in zip(updates, distances, strict=True):
        before = known.get(str(u.client), distance)
        known[str(u.client)] = (1 - forget) * before + forget * distance
    trust = torch.stack([known[str(u.client)] for u in updates]).clamp(min=1e-12).reciprocal()
    return Mixing((trust / trust.sum()).tolist(), memory={"distance": known})


def patient(updates, others, aggregate, memory, *, tries: Count = 8, widest: Positive = 4.0):
    """The upload along the honest mean, up to `widest` times as long each way, that the server moves by farthest back.

    Knows: the honest updates, the aggregator and its memory
    """
    mean = others.mean(0)
    around = float(memory.get("factor", torch.tensor(0.0)))  # half of the tries are near what was best
    wide = torch.linspace(-widest, 1, tries, device=mean.device)
    near = around + torch.linspace(-0.2, 0.2, tries, device=mean.device)
    factors = torch.cat([wide, near])
    candidates = torch.stack([(f * mean).expand_as(updates) for f in factors])
    best = factors[(aggregate(candidates) @ mean).argmin()]
    return (best * mean).expand_as(updates).clone(), {"factor": best}


AGGREGATORS = {"remembering": AggregatorEntry(remembering, bears=below_half)}
ADVERSARIES = {"patient": patient}
