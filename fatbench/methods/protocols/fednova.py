"""FedNova: updates divided by how far the client's optimiser could move, before they are averaged.

| paper | here | what |
|---|---|---|
| ||a_k||_1 | stats.momentum_steps | steps, each counted with the momentum it will still exert |
| d_k | (theta^t - theta_k) / (lr ||a_k||_1) | normalised update |
| tau_eff | sum_k p_k ||a_k||_1 | effective number of steps |
| p_k | mixing.weights | the rule's weights (N_k/N with the rule `samples`) |

    theta^{t+1} = theta^t - lr tau_eff sum_k p_k d_k
                = (1 - sum_k w_k) theta^t + sum_k w_k theta_k     with  w_k = p_k tau_eff / ||a_k||_1

Wang et al. 2020, eq. 6; the recursion for ||a_k||_1 with momentum as in its appendix and in FedML.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fatbench.engine.local import LocalSGD, cost, draw_cohort, train_cohort
from fatbench.engine.rounds import Context, Problem, Round, State
from fatbench.methods.rules import mix
from fatbench.suite.types import Count, Momentum, NonNegative, Objective, Positive, Proximal, Rule, Share


def fednova(
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
    """FedNova under any aggregation rule without memory (the rule's weights are p_k).

    With equal numbers of steps it is FedAvg. BatchNorm buffers are averaged with p_k as in FedAvg.

    Forward: rounds * participation * epochs * objective
    Backward: rounds * participation * epochs * objective
    Up: 1
    Down: 1
    """
    for t in range(state.round, rounds):
        cohort = draw_cohort(problem, t, participation)
        local = LocalSGD(epochs, batch, lr * lr_decay**t, momentum, weight_decay, clip, objective, proximal)
        updates = train_cohort(problem, state.model, cohort, t, local)
        context = Context(t, rounds, problem, state.model, state.server, local.lr)
        p = rule(updates, context)
        effective = sum(w * u.stats.momentum_steps for w, u in zip(p.weights, updates, strict=True))
        weights = [w * effective / u.stats.momentum_steps for w, u in zip(p.weights, updates, strict=True)]
        mixing = replace(p, weights=weights, broadcast=1.0 - sum(weights))
        after = replace(
            state, round=t + 1, model=mix(updates, mixing, state.model, problem.model), server=mixing.server
        )
        yield Round(t, state.model, updates, mixing, after, cost(updates, local, state.model))
        state = after
