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

from fatbench.engine.cohort import cost, draw_cohort, train_cohort
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Problem, Round, State
from fatbench.suite.types import Count, Local, Rule, Share


def fednova(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    rule: Rule,
    local: Local,
    participation: Share = 1.0,
) -> Iterator[Round]:
    """FedNova under any aggregation rule without memory (the rule's weights are p_k).

    With equal numbers of steps it is FedAvg. BatchNorm buffers are averaged with p_k as in FedAvg.

    Forward: rounds * participation * local
    Backward: rounds * participation * local
    Up: 1
    Down: 1
    """
    for t in range(state.round, rounds):
        cohort = draw_cohort(problem, t, participation)
        now = local.at(t)
        updates = train_cohort(problem, state.model, cohort, t, now, rule=rule)
        p = aggregate(rule, updates, Context(t, rounds, problem, state.model, state.server.get("rule", {}), now.lr))
        if p.model is not None:
            raise ValueError("fednova: the rule gives a model, and FedNova normalises weights")
        effective = sum(w * u.stats.momentum_steps for w, u in zip(p.weights, updates, strict=True))
        weights = [w * effective / u.stats.momentum_steps for w, u in zip(p.weights, updates, strict=True)]
        mixing = replace(p, weights=weights, broadcast=1.0 - sum(weights))
        after = replace(
            state, round=t + 1, model=mix(updates, mixing, state.model, problem.model), server={"rule": mixing.memory}
        )
        yield Round(t, state.model, updates, mixing, after, cost(updates, now, state.model))
        state = after
