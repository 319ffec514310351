"""FedBN: federated averaging in which every client keeps its batch normalisation.

| paper | here | what |
|---|---|---|
| w_BN of client k | state.clients[k]["normalisation"] | weights and statistics of batch normalisation, never sent |
| the other w | state.model | averaged as in FedAvg |

    for t = 0 .. T-1:
        draw m clients
        each: theta_k <- E epochs of SGD on the objective, from theta^t with its own batch normalisation
        theta^{t+1} <- sum_k w_k theta_k without batch normalisation

Li et al. 2021 (FedBN), algorithm 1. The clients' models are deployed. A client that has not taken part yet uses the
batch normalisation of the initial model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fatbench.engine.cohort import cost, draw_cohort, train_cohort
from fatbench.engine.local import LocalTraining
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Problem, Round, State, Tensors
from fatbench.methods.algorithms.work import federated
from fatbench.suite.entry import AlgorithmEntry
from fatbench.suite.facts import Facts
from fatbench.suite.types import Aggregator, Count, Fraction, Local


def fedbn(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    aggregator: Aggregator,
    local: Local,
    participation: Fraction = 1.0,
) -> Iterator[Round]:
    """FedBN under an aggregator; a fraction `participation` of the clients trains in a round.

    Raises ValueError if the network has no batch normalisation.
    """
    names = normalisation(problem.model)
    if not names:
        raise ValueError("fedbn: the network has no batch normalisation for a client to keep")
    return keeps_at_home("normalisation", names, problem, state, rounds, aggregator, local, participation)


def keeps_at_home(
    part: str,
    names: Collection[str],
    problem: Problem,
    state: State,
    rounds: int,
    aggregator: Aggregator,
    local: LocalTraining,
    participation: float,
) -> Iterator[Round]:
    """The rounds of an algorithm whose clients keep the tensors `names`, in their states as `part`."""
    frozen = [name for name, parameter in problem.model.named_parameters() if not parameter.requires_grad]
    shared = state.model.keys() - {*names, *frozen}
    for t in range(state.round, rounds):
        cohort = draw_cohort(problem, t, participation)
        local_t = local.at(t)
        own = {k: state.clients[k][part] for k in state.clients}
        context = Context(t, rounds, problem, state.model, state.server.get("aggregator", {}), local_t.lr)
        updates = train_cohort(
            problem, state.model, cohort, t, local_t, aggregator=aggregator, context=context, tensors_by_client=own,
            sent=dict.fromkeys(cohort, shared),
        )  # fmt: skip
        mixing = aggregate(aggregator, updates, context)
        own |= {update.client: {name: update.model[name] for name in names} for update in updates}
        next_state = State(
            t + 1,
            mix(updates, mixing, state.model, problem.model),
            {"aggregator": mixing.memory},
            {k: {part: tensors} for k, tensors in own.items()},
        )
        spent = cost(updates, local_t, state.model)
        yield Round(t, state.model, updates, mixing, next_state, spent, own=own)
        del updates, mixing  # frees the memory before the next round needs as much
        state = next_state


def normalised_network(cell: Facts) -> str | None:
    """Refuse networks without batch normalisation."""
    if not cell.batch_norm:
        reason = f"{cell.model.name} has no part 'batch normalisation'"
        return f"fedbn needs a network with batch normalisation, and {reason}"
    return None


def normalisation(model: nn.Module) -> list[str]:
    """The names of the parameters and buffers of batch normalisation."""
    return [
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name in module.state_dict()
    ]


def mean_of_clients(own: Mapping[int, Tensors]) -> Tensors:
    """The tensors of a client that never trains: the mean of what the others keep."""
    stacked = {name: torch.stack([own[k][name] for k in sorted(own)]) for name in next(iter(own.values()))}
    return {name: values.double().mean(0).to(values.dtype) for name, values in stacked.items()}


FEDBN = AlgorithmEntry(
    fedbn, foreseeable=True, work=federated, refuse=(normalised_network,), deploys=True, for_unseen=mean_of_clients,
    cites=("li2021",),
)  # fmt: skip
