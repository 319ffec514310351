"""SCAFFOLD: client drift corrected by control variates.

| paper | here | what |
|---|---|---|
| c | state.server | server variate, starts at 0 |
| c_k | state.clients[k] | client variate, starts at 0 |
| c_k+ | new_variates[k] | option II: c_k - c + (theta^t - y) / S_k |
| S_k | step_divisors(...) | lr tau_k for plain SGD |
| eta_g | server_lr | server rate, 1 |

    client:  y <- theta^t;  each step  g <- grad(y) + (c - c_k);  y <- SGD(y, g)
             c_k+ = c_k - c + (theta^t - y) / S_k
    server:  theta^{t+1} = theta^t + eta_g sum_k w_k (y_k - theta^t);   c <- c + (1/K) sum_k (c_k+ - c_k)

Karimireddy et al. 2020, algorithm 1, option II. With momentum the displacement of a step is about 1/(1 - momentum)
times its rate, so S_k counts every step with the momentum it still exerts, ||a_k||_1 of FedNova; lr tau_k there makes
the variates ten times too large and the recursion diverge (tests/test_algorithms.py shows both).

FedTorch as released (differences: scaffold-fedtorch) is `divisor: released`, `variates: released`, the aggregator
`uniform`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch

from fatbench.engine.cohort import cost, draw_cohort, step_divisors, train_cohort
from fatbench.engine.local import LocalTraining, trainable
from fatbench.engine.mixing import aggregate, mix, scaled
from fatbench.engine.rounds import Context, Problem, Round, State, Tensors, Update
from fatbench.methods.algorithms.work import clients_train, models_cross
from fatbench.suite.entry import AlgorithmEntry, Work
from fatbench.suite.facts import Facts
from fatbench.suite.types import Aggregator, Count, Fraction, Local, Rate


def scaffold(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    aggregator: Aggregator,
    local: Local,
    participation: Fraction = 1.0,
    server_lr: Rate = 1.0,
    divisor: Literal["momentum", "literal", "released"] = "momentum",
    variates: Literal["round", "released"] = "round",
) -> Iterator[Round]:
    """SCAFFOLD, option II, under an aggregator for the models; variates are averaged uniformly over all K.

    Only trainable parameters carry variates. `divisor: literal` is lr tau_k whatever the momentum, `released` that of
    the last client for all. `variates: released`: the server changes c after each client, so that later clients of the
    round subtract another c than they trained with.
    """
    names = trainable(problem.model)
    zeros = {name: torch.zeros_like(state.model[name]) for name in names}
    c: Tensors = state.server.get("c", zeros)
    for t in range(state.round, rounds):
        cohort = draw_cohort(problem, t, participation)
        local_t = local.at(t)
        client_variates = {k: state.clients.get(k, zeros) for k in cohort}
        shift = {k: {name: c[name] - client_variates[k][name] for name in names} for k in cohort}
        context = Context(t, rounds, problem, state.model, state.server.get("aggregator", {}), local_t.lr)
        trained = train_cohort(
            problem, state.model, cohort, t, local_t, aggregator=aggregator, gradient_shift=shift, context=context,
            server=functools.partial(stepped, aggregator=aggregator, server_lr=server_lr),
        )  # fmt: skip
        sequential = variates == "released"
        updates = []
        running_c = c
        for u, s_k in zip(trained, step_divisors(trained, local_t.lr, divisor), strict=True):
            change = _change(u, state.model, running_c if sequential else c, s_k)
            running_c = {name: running_c[name] + change[name] / len(problem.shards) for name in names}
            updates.append(replace(u, extra=change))

        mixing = scaled(aggregate(aggregator, updates, context), server_lr)
        new_variates = {
            u.client: {name: client_variates[u.client][name] + u.extra[name] for name in names} for u in updates
        }
        c = running_c
        next_state = State(
            round=t + 1,
            model=mix(updates, mixing, state.model, problem.model),
            server={"aggregator": mixing.memory, "c": dict(c)},
            clients={**state.clients, **new_variates},
        )
        yield Round(
            t, state.model, updates, mixing, next_state, cost(updates, local_t, state.model, models_up=2, models_down=2)
        )
        del trained, updates, mixing, u, change, shift  # frees the memory before the next round needs as much
        state = next_state


def stepped(updates: Sequence[Update], context: Context, *, aggregator: Aggregator, server_lr: float) -> Tensors:
    """The next model of a server that goes `server_lr` of the way to what the aggregator gives."""
    mixing = scaled(aggregate(aggregator, updates, context), server_lr)
    return mix(updates, mixing, context.broadcast, context.problem.model)


def work(cell: Facts, *, rounds: int, aggregator: Aggregator, local: LocalTraining) -> Work:
    """Training; models and variates both ways; c, and c_k of every client that ever took part, are stored."""
    training = clients_train(cell, local, rounds, aggregator=aggregator)
    variates = 4 * cell.parameters * (1 + min(cell.clients, rounds * cell.cohort))
    return training + models_cross(cell, rounds, models_up=2, models_down=2) + Work(disk=variates)


def _change(update: Update, broadcast: Tensors, c: Tensors, s_k: float) -> Tensors:
    """c_k+ - c_k = (theta^t - y) / S_k - c."""
    return {name: (broadcast[name] - update.model[name]) / s_k - c[name] for name in c}


SCAFFOLD = AlgorithmEntry(scaffold, foreseeable=True, work=work, cites=("karimireddy2020",))
