"""Federated averaging in which some clients train adversarially and the others do not.

| here | what |
|---|---|
| adversarial | the number of clients, from client 0, that train on the objective of `local` |
| standard | the objective of the others |

    for t = 0 .. T-1:
        draw m clients
        client k: theta_k <- E epochs of SGD from theta^t on the objective (k < adversarial) or on `standard` (else)
        theta^{t+1} <- sum_k w_k theta_k

The setting of Hong et al. 2023 (FedRBN), where few clients can afford adversarial training, and one interpretation of
the ratio of FAT (Zizzo et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fatbench.engine.cohort import cost, draw_cohort, train_cohort
from fatbench.engine.local import LocalTraining
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Problem, Round, State
from fatbench.methods.algorithms.work import adversarial_and_standard_train, models_cross, no_more_than_clients
from fatbench.suite.entry import AlgorithmEntry, Work
from fatbench.suite.facts import Facts
from fatbench.suite.types import Aggregator, Count, Fraction, Local, Objective


def fedavg_mixed(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    aggregator: Aggregator,
    local: Local,
    standard: Objective,
    adversarial: Count,
    participation: Fraction = 1.0,
) -> Iterator[Round]:
    """Federated averaging; clients 0 to `adversarial` - 1 train by `local`, the others on `standard`."""
    for t in range(state.round, rounds):
        cohort = draw_cohort(problem, t, participation)
        local_t = local.at(t)
        standard_local = replace(local_t, objective=standard)
        locals = {k: local_t if k < adversarial else standard_local for k in cohort}
        context = Context(t, rounds, problem, state.model, state.server.get("aggregator", {}), local_t.lr)
        updates = train_cohort(
            problem, state.model, cohort, t, local_t, aggregator=aggregator, locals=locals, context=context
        )
        mixing = aggregate(aggregator, updates, context)
        next_state = State(t + 1, mix(updates, mixing, state.model, problem.model), {"aggregator": mixing.memory})
        spent = cost(updates, local_t, state.model, locals=locals)
        yield Round(t, state.model, updates, mixing, next_state, spent)
        del updates, mixing  # frees the memory before the next round needs as much
        state = next_state


def work(
    cell: Facts, *, rounds: int, aggregator: Aggregator, local: LocalTraining, standard: Objective, adversarial: int
) -> Work:
    """Every client trains on its objective and receives and sends a model."""
    return adversarial_and_standard_train(cell, local, standard, adversarial, rounds, aggregator) + models_cross(
        cell, rounds
    )


FEDAVG_MIXED = AlgorithmEntry(
    fedavg_mixed,
    foreseeable=True,
    work=work,
    refuse=(no_more_than_clients,),
    example={"adversarial": 1, "standard": "standard"},
    cites=("hong2023", "zizzo2020"),
)
