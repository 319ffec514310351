"""FedPer: federated averaging in which every client keeps its last layer.

| paper | here | what |
|---|---|---|
| W_P of client k | state.clients[k]["head"] | the layers that emit logits, never sent |
| W_B | state.model | averaged as in FedAvg; what the network freezes is not sent |

Arivazhagan et al. 2019, algorithms 1 and 2, with one personal layer. The clients' models are deployed. A client that
has not taken part yet uses the last layer of the initial model. With `vit` and its `lora`: LoRA with personal heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from fatbench.engine.local import LocalTraining
from fatbench.engine.rounds import Problem, Round, State
from fatbench.methods.algorithms.fedbn import keeps_at_home, mean_of_clients
from fatbench.methods.algorithms.work import clients_train, models_cross
from fatbench.models import logit_parameters
from fatbench.suite.entry import AlgorithmEntry, Work
from fatbench.suite.facts import Facts
from fatbench.suite.types import Aggregator, Count, Fraction, Local


def fedper(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    aggregator: Aggregator,
    local: Local,
    participation: Fraction = 1.0,
) -> Iterator[Round]:
    """FedPer under an aggregator; a fraction `participation` of the clients trains in a round."""
    head = logit_parameters(problem.model)
    return keeps_at_home("head", head, problem, state, rounds, aggregator, local, participation)


def work(cell: Facts, *, rounds: int, local: LocalTraining) -> Work:
    """Everybody trains; what is not the last layer crosses; the state has every client's last layer."""
    crossing = models_cross(cell, rounds, part=1 - cell.head / cell.parameters)
    return clients_train(cell, local, rounds) + crossing + Work(disk=4 * cell.head * cell.clients)


FEDPER = AlgorithmEntry(
    fedper, foreseeable=True, work=work, deploys=True, for_unseen=mean_of_clients, cites=("arivazhagan2019",)
)
