"""Centralised training: all data in one place, the upper reference of SFAT's Table 21.

One "round" is one epoch, so that curves and checkpoints line up with the federated runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fatbench.engine.cohort import cost, train_cohort
from fatbench.engine.rounds import Mixing, Problem, Round, State
from fatbench.suite.types import Count, Local


def centralized(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    local: Local,
) -> Iterator[Round]:
    """SGD on one shard that holds everything; `rounds` times `local.epochs` epochs.

    The momentum buffer starts at zero every epoch here, because an epoch is a round and rounds can be resumed; the
    release keeps it (Centralized_AT.py). Needs a partition with one client.

    Forward: rounds * local
    Backward: rounds * local
    Up: 0
    Down: 0
    Refuse if clients != 1: {name} needs 'partition: {{name: iid, clients: 1}}'
    """
    for t in range(state.round, rounds):
        now = local.at(t)
        updates = train_cohort(problem, state.model, [0], t, now)
        after = replace(state, round=t + 1, model=updates[0].model)
        yield Round(
            t,
            state.model,
            updates,
            Mixing([1.0]),
            after,
            replace(cost(updates, now, state.model), bytes_up=0, bytes_down=0),
        )
        state = after
