"""FedNova: updates are divided by the distance that the client's optimizer could move, then averaged.

| paper | here | what |
|---|---|---|
| ||a_k||_1 | distances[k] | steps, each counted with the momentum it will still exert |
| d_k | (theta^t - theta_k) / (lr ||a_k||_1) | normalised update |
| tau_eff | sum_k p_k ||a_k||_1 | effective number of steps |
| p_k | mixing.weights | the aggregator's weights (N_k/N with the aggregator `samples`) |

    theta^{t+1} = theta^t - lr tau_eff sum_k p_k d_k
                = (1 - sum_k w_k) theta^t + sum_k w_k theta_k     with  w_k = p_k tau_eff / ||a_k||_1

Wang et al. 2020, eq. 6. A proximal term mu (w - theta^t) pulls back what a step has moved, so that a_k is (1 - lr mu)^
(tau - 1), ..., 1 instead of tau ones (section 4.1). `travelled_distance` covers momentum, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fatbench.engine.cohort import cost, draw_cohort, train_cohort
from fatbench.engine.local import LocalTraining
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Mixing, Problem, Round, State, Tensors, Update
from fatbench.methods.algorithms.work import federated
from fatbench.suite.entry import AlgorithmEntry, ProximalEntry, entry_of
from fatbench.suite.types import Aggregator, Count, Fraction, Local


def fednova(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    aggregator: Aggregator,
    local: Local,
    participation: Fraction = 1.0,
) -> Iterator[Round]:
    """FedNova under any aggregator without memory (the aggregator's weights are p_k).

    With equal numbers of steps it is FedAvg. BatchNorm buffers are averaged with p_k as in FedAvg. A proximal term must
    be linear: its entry gives the `rate`, the factor of w - theta^t.
    """
    for t in range(state.round, rounds):
        cohort = draw_cohort(problem, t, participation)
        local_t = local.at(t)
        context = Context(t, rounds, problem, state.model, state.server.get("aggregator", {}), local_t.lr)

        def server(updates: Sequence[Update], context: Context, local: LocalTraining = local_t) -> Tensors:
            mixing = normalised(updates, aggregate(aggregator, updates, context), local)
            return mix(updates, mixing, context.broadcast, problem.model)

        updates = train_cohort(
            problem, state.model, cohort, t, local_t, aggregator=aggregator, context=context, server=server
        )
        mixing = normalised(updates, aggregate(aggregator, updates, context), local_t)
        next_state = State(t + 1, mix(updates, mixing, state.model, problem.model), {"aggregator": mixing.memory})
        yield Round(t, state.model, updates, mixing, next_state, cost(updates, local_t, state.model))
        del updates, mixing  # frees the memory before the next round needs as much
        state = next_state


def normalised(updates: Sequence[Update], p: Mixing, local: LocalTraining) -> Mixing:
    """w_k = p_k tau_eff / ||a_k||_1, and the remainder to 1 for theta^t. Raises ValueError for a p that is a model."""
    if p.model is not None:
        raise ValueError("fednova: the aggregator returns a model, but FedNova needs weights to normalise")
    distances = [travelled_distance(u.stats.steps, local) for u in updates]
    effective_steps = sum(w * a for w, a in zip(p.weights, distances, strict=True))
    weights = [w * effective_steps / a for w, a in zip(p.weights, distances, strict=True)]
    return replace(p, weights=weights, broadcast=1.0 - sum(weights))


def proportional_pull(*, local: LocalTraining) -> str | None:
    """Refuse proximal terms for which the travelled distance is not known."""
    if local.proximal is None:
        return None
    term = entry_of(local.proximal)
    if isinstance(term, ProximalEntry) and term.rate is not None:
        return None
    return (
        "fednova divides by the distance that a client's steps can move, which needs a pull in proportion to the "
        f"distance ('squared'), not {term.function.__name__}"
    )


def travelled_distance(steps: int, local: LocalTraining) -> float:
    """||a_k||_1: the distance of `steps` steps under a constant gradient of one, in units of the rate.

    x = (theta^t - w) / lr and the momentum buffer v start at 0; each step v <- momentum v + 1 - lr mu x; x <- x + v.
    Without momentum x is (1 - (1 - lr mu)^steps) / (lr mu), with neither `steps`.
    """
    x = v = 0.0
    pull = [torch.tensor([0.0], dtype=torch.float64)]
    for _ in range(steps):
        pull_back = 0.0
        if local.proximal is not None:  # on one weight that has moved by -lr x
            pull_back = float(local.proximal([pull[0] - local.lr * x], pull, 1)[0])
        v = local.momentum * v + 1.0 + pull_back
        x += v
    return x


FEDNOVA = AlgorithmEntry(
    fednova, foreseeable=True, work=federated, refuse=(proportional_pull,), cites=("wang2020fednova",)
)
