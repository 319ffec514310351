"""Local training only: every client trains on its own data and sends nothing, the lower bound of federation.

| symbol | here | what |
|---|---|---|
| theta_k | state.clients[k] | client k's network; the initial one is the same for all |

    for t = 0 .. T-1:
        each: theta_k <- E epochs of SGD on the objective, from theta_k

The clients' networks are deployed, and accuracies are means over them. The momentum buffer starts at zero every round,
as in the rows that it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fatbench.engine.cohort import cost, train_cohort
from fatbench.engine.local import LocalTraining
from fatbench.engine.rounds import Mixing, Problem, Round, State
from fatbench.methods.algorithms.work import clients_train
from fatbench.suite.entry import AlgorithmEntry, Work
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Local


def local_only(problem: Problem, state: State, *, rounds: Count, local: Local) -> Iterator[Round]:
    """Every client trains alone, for `rounds` times `local.epochs` epochs of its data."""
    clients = [*range(len(problem.shards))]
    for t in range(state.round, rounds):
        local_t = local.at(t)
        nothing = dict.fromkeys(clients, ())
        updates = train_cohort(problem, state.model, clients, t, local_t, tensors_by_client=state.clients, sent=nothing)
        model_by_client = {update.client: update.model for update in updates}
        next_state = replace(state, round=t + 1, clients=model_by_client)
        spent = cost(updates, local_t, state.model)
        yield Round(
            t, state.model, updates, Mixing([1 / len(clients)] * len(clients)), next_state, spent, own=model_by_client
        )
        del updates  # frees the memory before the next round needs as much
        state = next_state


def work(cell: Facts, *, rounds: int, local: LocalTraining) -> Work:
    """Nothing is sent; the state after a round holds every client's network."""
    return clients_train(cell, local, rounds) + Work(disk=cell.clients * cell.size)


def nothing_to_pull_towards(*, local: LocalTraining) -> str | None:
    """Refuse proximal terms, which pull towards broadcast weights."""
    return "local: proximal: no weights are broadcast to pull towards" if local.proximal is not None else None


LOCAL_ONLY = AlgorithmEntry(local_only, work=work, refuse=(nothing_to_pull_towards,), deploys=True, aggregates=False)
