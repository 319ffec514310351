"""FedAvg and everything that is FedAvg with other weights or another local loss.

| paper | here | what |
|---|---|---|
| K, m | len(problem.shards), len(cohort) | clients, participants of the round |
| theta^t | state.model | global model at the start of round t |
| theta_k | update.model | client k's model after E local epochs |
| w_k | mixing.weights | the aggregator's weights |
| mu | local.proximal | FedProx's pull towards theta^t |

    for t = 0 .. T-1:
        draw m clients
        each: theta_k <- E epochs of SGD from theta^t on the objective (+ proximal term)
        theta^{t+1} <- sum_k w_k theta_k

McMahan et al. 2017, algorithm 1; Li et al. 2020 (FedProx); Zhu et al. 2023 (SFAT), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from fatbench.engine.cohort import cost, draw_cohort, train_cohort
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Problem, Round, State
from fatbench.methods.algorithms.work import federated
from fatbench.suite.entry import AlgorithmEntry
from fatbench.suite.types import Aggregator, Count, Fraction, Local


def fedavg(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    aggregator: Aggregator,
    local: Local,
    participation: Fraction = 1.0,
) -> Iterator[Round]:
    """Federated averaging under an aggregator; a fraction `participation` of the clients trains in a round.

    Two clients pull one number to the value of their pixel, 51/255 and 204/255, by one step of rate 1:

    >>> import torch
    >>> from fatbench.engine.local import LocalTraining
    >>> from fatbench.methods.aggregators import uniform
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> def objective(model, x, y, generator):
    ...     return (model.weight - x.flatten(1)).square().mean() / 2, torch.ones(len(x), dtype=torch.bool)
    >>> pixels = torch.tensor([51, 204], dtype=torch.uint8).view(2, 1, 1, 1)
    >>> shards = [torch.tensor([0]), torch.tensor([1])]
    >>> problem = Problem(model, pixels, torch.tensor([0, 0]), shards, classes=1, seed=0, device=torch.device("cpu"))
    >>> local = LocalTraining(batch=1, lr=1.0, objective=objective)
    >>> start = State(0, {"weight": torch.zeros(1, 1)})
    >>> (result,) = fedavg(problem, start, rounds=1, aggregator=uniform, local=local)
    >>> round(result.state.model["weight"].item(), 6)
    0.5
    """
    for t in range(state.round, rounds):
        cohort = draw_cohort(problem, t, participation)
        local_t = local.at(t)
        context = Context(t, rounds, problem, state.model, state.server.get("aggregator", {}), local_t.lr)
        updates = train_cohort(problem, state.model, cohort, t, local_t, aggregator=aggregator, context=context)
        mixing = aggregate(aggregator, updates, context)
        next_state = State(t + 1, mix(updates, mixing, state.model, problem.model), {"aggregator": mixing.memory})
        yield Round(t, state.model, updates, mixing, next_state, cost(updates, local_t, state.model))
        del updates, mixing  # frees the memory before the next round needs as much
        state = next_state


FEDAVG = AlgorithmEntry(fedavg, foreseeable=True, work=federated, cites=("li2020fedprox", "mcmahan2017", "zhu2023"))
