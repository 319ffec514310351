"""SCAFFOLD: client drift corrected by control variates.

| paper | here | what |
|---|---|---|
| c | state.server | server variate, starts at 0 |
| c_k | state.clients[k] | client variate, starts at 0 |
| c_k+ | new[k] | option II: c_k - c + (theta^t - y) / S_k |
| S_k | divisor(...) | lr tau_k for plain SGD |
| eta_g | server_lr | server rate, 1 |

    client:  y <- theta^t;  each step  g <- grad(y) + (c - c_k);  y <- SGD(y, g)
             c_k+ = c_k - c + (theta^t - y) / S_k
    server:  theta^{t+1} = theta^t + eta_g sum_k w_k (y_k - theta^t);   c <- c + (1/K) sum_k (c_k+ - c_k)

Karimireddy et al. 2020, algorithm 1, option II. With momentum the displacement of a step is about 1/(1 - momentum)
times its rate, so S_k counts every step with the momentum it still exerts, ||a_k||_1 of FedNova; lr tau_k there makes
the variates ten times too large and the recursion diverge (tests/test_protocols.py shows both).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch

from fatbench.engine.local import LocalSGD, cost, draw_cohort, step_divisor, train_cohort, trainable
from fatbench.engine.rounds import Context, Problem, Round, State, Tensors, Update
from fatbench.methods.rules import mix, scaled
from fatbench.suite.types import Count, Momentum, NonNegative, Objective, Positive, Rule, Share


def scaffold(
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
    server_lr: Positive = 1.0,
    divisor: Literal["momentum", "literal"] = "momentum",
) -> Iterator[Round]:
    """SCAFFOLD, option II, under an aggregation rule for the models; variates are averaged uniformly over all K.

    Only trainable parameters carry variates. `divisor: literal` is lr tau_k whatever the momentum.

    Forward: rounds * participation * epochs * objective
    Backward: rounds * participation * epochs * objective
    Up: 2
    Down: 2
    """
    names = trainable(problem.model)
    zeros = {name: torch.zeros_like(state.model[name]) for name in names}
    c = {name: state.server.get(f"c/{name}", zeros[name]) for name in names}
    for t in range(state.round, rounds):
        cohort = draw_cohort(problem, t, participation)
        local = LocalSGD(epochs, batch, lr * lr_decay**t, momentum, weight_decay, clip, objective)
        own = {k: state.clients.get(k, zeros) for k in cohort}
        shift = {k: {name: c[name] - own[k][name] for name in names} for k in cohort}
        trained = train_cohort(problem, state.model, cohort, t, local, gradient_shift=shift)
        updates = [replace(u, extra=_change(u, state.model, c, local.lr, divisor)) for u in trained]

        memory = {k: v for k, v in state.server.items() if not k.startswith("c/")}
        context = Context(t, rounds, problem, state.model, memory, local.lr)
        mixing = scaled(rule(updates, context), server_lr)
        new = {u.client: {name: own[u.client][name] + u.extra[name] for name in names} for u in updates}
        c = {name: c[name] + sum(u.extra[name] for u in updates) / len(problem.shards) for name in names}
        after = State(
            round=t + 1,
            model=mix(updates, mixing, state.model, problem.model),
            server={**mixing.server, **{f"c/{name}": c[name] for name in names}},
            clients={**state.clients, **new},
        )
        yield Round(t, state.model, updates, mixing, after, cost(updates, local, state.model, up=2, down=2))
        state = after


def _change(update: Update, broadcast: Tensors, c: Tensors, lr: float, divisor: str) -> Tensors:
    """c_k+ - c_k = (theta^t - y) / S_k - c."""
    s_k = step_divisor(update, lr, divisor)
    return {name: (broadcast[name] - update.model[name]) / s_k - c[name] for name in c}
