"""FedAvg and everything that is FedAvg with other weights or another local loss.

| paper | here | what |
|---|---|---|
| K, m | len(problem.shards), len(cohort) | clients, participants of the round |
| theta^t | state.model | global model at the start of round t |
| theta_k | update.model | client k's model after E local epochs |
| w_k | mixing.weights | the rule's weights |
| mu | proximal | FedProx's pull towards theta^t |

    for t = 0 .. T-1:
        draw m clients
        each: theta_k <- E epochs of SGD from theta^t on the objective (+ proximal term)
        theta^{t+1} <- sum_k w_k theta_k

McMahan et al. 2017, algorithm 1; Li et al. 2020 (FedProx); Zhu et al. 2023 (SFAT), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fatbench.aggregation import NEEDS_BROADCAST_LOSS, mix
from fatbench.kinds import Count, Momentum, NonNegative, Objective, Positive, Proximal, Rule, Share
from fatbench.local import LocalSGD, cost, draw_cohort, train_cohort
from fatbench.rounds import Context, Problem, Round, State


def fedavg(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    epochs: Count,
    batch: Count,
    lr: Positive,
    objective: Objective,
    rule: Rule,
    lr_decay: Positive = 1.0,
    momentum: Momentum = 0.0,
    weight_decay: NonNegative = 0.0,
    clip: Positive | None = None,
    participation: Share = 1.0,
    proximal: Proximal | None = None,
) -> Iterator[Round]:
    """Federated averaging under an aggregation rule.

    Momentum buffers start at zero every round. `lr_decay` multiplies the rate once a round; `clip` bounds the norm of
    the gradient. Passes are per training image over the whole run.

    Forward: rounds * participation * epochs * objective
    Backward: rounds * participation * epochs * objective
    Up: 1
    Down: 1
    """
    asks = getattr(rule, "func", rule).__name__ in NEEDS_BROADCAST_LOSS
    for t in range(state.round, rounds):
        cohort = draw_cohort(problem, t, participation)
        local = LocalSGD(epochs, batch, lr * lr_decay**t, momentum, weight_decay, clip, objective, proximal)
        updates = train_cohort(problem, state.model, cohort, t, local, broadcast_loss=asks)
        context = Context(t, rounds, len(problem.shards), state.model, state.server, problem.seed, local.lr)
        mixing = rule(updates, context)
        after = replace(
            state, round=t + 1, model=mix(updates, mixing, state.model, problem.model), server=mixing.server
        )
        yield Round(t, state.model, updates, mixing, after, cost(updates, local, state.model))
        state = after
