"""FedGATE: every client tracks how its average gradient differs from the global one, and subtracts the difference.

| paper | here | what |
|---|---|---|
| delta_k | state.clients[k] | client k's tracker, starts at 0 |
| theta-bar | mean | the aggregator's mean of the participants' models |
| S_k | step_divisors(...) | lr tau_k for plain SGD |
| gamma | server_lr | server rate, 1 |

    client:  y <- theta^t;  each step  g <- grad(y) - delta_k;  y <- SGD(y, g)
    server:  theta-bar = sum_k w_k y_k;   theta^{t+1} = theta^t - gamma (theta^t - theta-bar)
    client:  delta_k <- delta_k + (theta-bar - y_k) / S_k

Haddadpour et al. 2021, algorithm 1, without compression, as in FedTorch except for the divisor, which there is lr tau_k
of the round's last client. Under full participation, with equal weights and steps, this is SCAFFOLD with delta_k = c_k
- c, with the same trap: with momentum, S_k must count every step with the momentum that it still exerts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal

import torch

from fatbench.engine.cohort import cost, draw_cohort, step_divisors, train_cohort
from fatbench.engine.local import LocalTraining, trainable
from fatbench.engine.mixing import aggregate, mix, scaled
from fatbench.engine.rounds import Context, Problem, Round, State
from fatbench.methods.algorithms.scaffold import stepped
from fatbench.methods.algorithms.work import clients_train, models_cross
from fatbench.suite.entry import AlgorithmEntry, Work
from fatbench.suite.facts import Facts
from fatbench.suite.types import Aggregator, Count, Fraction, Local, Rate


def fedgate(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    aggregator: Aggregator,
    local: Local,
    participation: Fraction = 1.0,
    server_lr: Rate = 1.0,
    divisor: Literal["momentum", "literal", "released"] = "momentum",
) -> Iterator[Round]:
    """FedGATE under an aggregator; the published one uses the plain mean, aggregator `uniform`.

    Only trainable parameters are tracked. `divisor: literal` is lr tau_k whatever the momentum, `released` that of the
    last client for all, as in FedTorch. A client computes theta-bar from the next broadcast, so only models are sent;
    with server_lr other than 1, theta-bar is sent, too.
    """
    names = trainable(problem.model)
    zeros = {name: torch.zeros_like(state.model[name]) for name in names}
    models_down = 1 if server_lr == 1.0 else 2
    for t in range(state.round, rounds):
        cohort = draw_cohort(problem, t, participation)
        local_t = local.at(t)
        delta = {k: state.clients.get(k, zeros) for k in cohort}
        shift = {k: {name: -delta[k][name] for name in names} for k in cohort}
        context = Context(t, rounds, problem, state.model, state.server.get("aggregator", {}), local_t.lr)
        updates = train_cohort(
            problem, state.model, cohort, t, local_t, aggregator=aggregator, gradient_shift=shift, context=context,
            server=functools.partial(stepped, aggregator=aggregator, server_lr=server_lr),
        )  # fmt: skip
        mixing = aggregate(aggregator, updates, context)
        mean = mix(updates, mixing, state.model, problem.model)
        divisors = step_divisors(updates, local_t.lr, divisor)
        new_deltas = {  # delta_k + (theta-bar - y_k) / S_k
            u.client: {name: d + (mean[name] - u.model[name]) / s_k for name, d in delta[u.client].items()}
            for u, s_k in zip(updates, divisors, strict=True)
        }
        mixing = scaled(mixing, server_lr)
        next_state = State(
            round=t + 1,
            model=mix(updates, mixing, state.model, problem.model),
            server={"aggregator": mixing.memory},
            clients={**state.clients, **new_deltas},
        )
        spent = cost(updates, local_t, state.model, models_down=models_down)
        yield Round(t, state.model, updates, mixing, next_state, spent)
        del updates, mixing, mean, shift  # frees the memory before the next round needs as much
        state = next_state


def work(cell: Facts, *, rounds: int, aggregator: Aggregator, local: LocalTraining, server_lr: float) -> Work:
    """Training and models; the tracked gradients of every client that ever took part are stored."""
    training = clients_train(cell, local, rounds, aggregator=aggregator)
    tracked = 4 * cell.parameters * min(cell.clients, rounds * cell.cohort)
    return training + models_cross(cell, rounds, models_down=1 if server_lr == 1 else 2) + Work(disk=tracked)


FEDGATE = AlgorithmEntry(fedgate, foreseeable=True, work=work, cites=("haddadpour2021",))
