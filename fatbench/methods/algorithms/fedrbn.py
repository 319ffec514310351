"""FedRBN: clients without adversarial training receive the robustness of the others through batch normalisation.

| paper | here | what |
|---|---|---|
| AT users, ST users | clients below `adversarial`; the others | who trains adversarially |
| BN_c, BN_n | running_*, attacked_* | statistics of clean and of attacked images (`fatbench.models.dual_norm`) |
| w_BN of client k | state.clients[k]["normalisation"] | all tensors of batch normalisation, never averaged |

    for t = 0 .. T-1:
        draw m clients
        AT user: E epochs on the objective of `local`;  ST user: E epochs on `standard`; each from its own w_BN
        theta^{t+1} <- sum_k w_k theta_k without batch normalisation
        each ST user j: BN_n,j <- sum_i a_i BN_n,i over AT users i,
            a = softmax_i(100 * mean over layers of (cos(mean_c,i, mean_c,j) + cos(var_c,i, var_c,j)) / 2)

Hong et al. 2023 (FedRBN). The formulas are those of its code: illidanlab/FedRBN federated/aggregation.py:284-322. Left
out: the gradient through BN_n that its option PNC, off by default, adds to the training of ST users.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch.nn import functional as F

from fatbench.engine.cohort import cost, draw_cohort, train_cohort
from fatbench.engine.local import LocalTraining
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Problem, Round, State, Tensors
from fatbench.methods.algorithms.fedbn import mean_of_clients, normalisation
from fatbench.methods.algorithms.work import adversarial_and_standard_train, models_cross, no_more_than_clients
from fatbench.suite.entry import AlgorithmEntry, Work
from fatbench.suite.facts import Facts
from fatbench.suite.types import Aggregator, Count, Fraction, Local, Objective


def fedrbn(
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
    """FedRBN; clients 0 to `adversarial` - 1 are its AT users. The model has `norm: dual`.

    The objective of `local` is `dual_at`. The clients' models are deployed and predict with the clean statistics unless
    an evaluation says otherwise (attack `dual`). Nothing is propagated until an AT user has taken part. Raises
    ValueError if the network does not have two statistics.
    """
    names = normalisation(problem.model)
    if not any(name.endswith("attacked_mean") for name in names):
        raise ValueError("fedrbn: the network has no statistics of attacked images: build it with norm: dual")
    shared = state.model.keys() - names  # what crosses the wire
    for t in range(state.round, rounds):
        cohort = draw_cohort(problem, t, participation)
        local_t = local.at(t)
        standard_local = replace(local_t, objective=standard)
        locals = {k: local_t if k < adversarial else standard_local for k in cohort}
        norm_by_client = {k: state.clients[k]["normalisation"] for k in state.clients}
        context = Context(t, rounds, problem, state.model, state.server.get("aggregator", {}), local_t.lr)
        updates = train_cohort(
            problem, state.model, cohort, t, local_t, aggregator=aggregator, context=context, locals=locals,
            tensors_by_client=norm_by_client, sent=dict.fromkeys(cohort, shared),
        )  # fmt: skip
        mixing = aggregate(aggregator, updates, context)
        norm_by_client |= {update.client: {name: update.model[name] for name in names} for update in updates}
        # clients that pause keep theirs, and are sources and receivers with it
        norm_by_client = propagate(norm_by_client, [k for k in norm_by_client if k < adversarial])
        next_state = State(
            t + 1,
            mix(updates, mixing, state.model, problem.model),
            {"aggregator": mixing.memory},
            {k: {"normalisation": tensors} for k, tensors in norm_by_client.items()},
        )
        spent = cost(updates, local_t, state.model, locals=locals)
        yield Round(t, state.model, updates, mixing, next_state, spent, own=norm_by_client)
        del updates, mixing  # frees the memory before the next round needs as much
        state = next_state


def work(
    cell: Facts, *, rounds: int, aggregator: Aggregator, local: LocalTraining, standard: Objective, adversarial: int
) -> Work:
    """Every client trains on its objective and receives and sends a model."""
    training = adversarial_and_standard_train(cell, local, standard, adversarial, rounds, aggregator)
    return training + models_cross(cell, rounds)


def two_statistics(cell: Facts) -> str | None:
    """Refuse networks without statistics of attacked images."""
    if cell.model.get("norm") != "dual":
        return f"fedrbn needs a network with `norm: dual` (small_cnn, resnet18), not {cell.model.name}"
    return None


def propagate(norm_by_client: Mapping[int, Tensors], sources: Sequence[int]) -> dict[int, Tensors]:
    """Every client's batch normalisation, where BN_n of clients not in `sources` is a mean over the sources."""
    statistics = dict(norm_by_client)
    for k in norm_by_client.keys() - set(sources) if sources else ():  # else nothing to receive yet
        weights = similarity(norm_by_client[k], [norm_by_client[i] for i in sources]).tolist()
        pairs = list(zip(weights, sources, strict=True))
        statistics[k] = {
            name: torch.stack([a * norm_by_client[i][name] for a, i in pairs]).sum(0)
            if name.endswith(("attacked_mean", "attacked_var"))
            else value
            for name, value in norm_by_client[k].items()
        }
    return dict(sorted(statistics.items()))


def similarity(target: Tensors, sources: Sequence[Tensors]) -> torch.Tensor:
    """Softmax at temperature 0.01 of the cosines of clean means and variances, averaged over layers."""
    names = [name for name in target if name.endswith(("running_mean", "running_var"))]
    cosines = [
        torch.stack([F.cosine_similarity(source_tensors[name], target[name], 0) for name in names]).mean()
        for source_tensors in sources
    ]
    return (100 * torch.stack(cosines)).softmax(0)


FEDRBN = AlgorithmEntry(
    fedrbn,
    foreseeable=True,
    work=work,
    refuse=(no_more_than_clients, two_statistics),
    deploys=True,
    for_unseen=mean_of_clients,
    example={"adversarial": 1, "standard": "standard"},
    cites=("hong2023",),
)
