"""Centralised training: all data in one place, the upper reference of SFAT's Table 21.

One "round" is one epoch, so that curves and checkpoints line up with the federated runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from fatbench.engine.cohort import cost, train_cohort
from fatbench.engine.local import Client, LocalTraining, copy_state, load, train, trainable
from fatbench.engine.optimizers import packed, unpacked
from fatbench.engine.rounds import Memory, Mixing, Problem, Round, State, Update
from fatbench.methods.algorithms.work import clients_train, moments_of
from fatbench.suite.entry import AlgorithmEntry, Work
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Local


def centralized(
    problem: Problem, state: State, *, rounds: Count, local: Local, moments: Literal["reset", "released"] = "reset"
) -> Iterator[Round]:
    """SGD on one shard that holds everything; `rounds` times `local.epochs` epochs.

    The momentum buffer starts at zero every round, like a client's in the rows that it is compared with. With `moments:
    released` it is kept over the whole run (Centralized_AT.py; differences: sfat-centralised). Needs a partition with
    one client.
    """
    for t in range(state.round, rounds):
        local_t = local.at(t)
        server = state.server
        if moments == "reset":
            updates = train_cohort(problem, state.model, [0], t, local_t)
        else:
            update, moments_kept = _train_with_moments(problem, state, t, local_t)
            updates, server = [update], {"moments": moments_kept}
        next_state = replace(state, round=t + 1, model=updates[0].model, server=server)
        spent = replace(cost(updates, local_t, state.model), bytes_up=0, bytes_down=0)
        yield Round(t, state.model, updates, Mixing([1.0]), next_state, spent)
        del updates  # frees the memory before the next round needs as much
        state = next_state


def work(cell: Facts, *, rounds: int, local: LocalTraining, moments: str) -> Work:
    """Nothing is sent."""
    moment_bytes = cell.size * moments_of(local) if moments == "released" else 0.0
    return clients_train(cell, local, rounds) + Work(disk=moment_bytes)


def one_client(cell: Facts) -> str | None:
    """Refuse more than one client."""
    return "centralized needs 'partition: {name: iid, clients: 1}'" if cell.clients != 1 else None


def no_proximal_over_the_run(*, moments: str, local: LocalTraining) -> str | None:
    """Refuse proximal terms without rounds, which broadcast the weights to pull towards."""
    if moments == "released" and local.proximal is not None:
        return "local: proximal: no weights are broadcast to pull towards"
    return None


def _train_with_moments(problem: Problem, state: State, t: int, local: LocalTraining) -> tuple[Update, Memory]:
    """A round that continues with the optimizer's moments of the last round: (update, new moments)."""
    model = load(problem, state.model)
    names = trainable(model)
    parameters = dict(model.named_parameters())
    old_moments = unpacked(state.server.get("moments", {}), names)
    client = Client(problem, state.model, 0, t)
    new_moments, client_stats = train(client, model, [parameters[name] for name in names], local, moments=old_moments)
    return Update(0, client.n, copy_state(model), client_stats), packed(new_moments, names)


CENTRALIZED = AlgorithmEntry(centralized, work=work, refuse=(one_client, no_proximal_over_the_run), aggregates=False)
