"""FedAvg with validators: clients that never train, but decide when the learning rate falls.

| paper | here | what |
|---|---|---|
| theta^t | state.model | global model at the start of round t |
| w_k | mixing.weights | the aggregator's weights; AdFL's are those of the aggregator `adfl` |
| validators | problem.shards[clients:] | the shards of the last clients |

    for t = 0 .. T-1:
        draw m of the clients that train
        each: theta_k <- E epochs of SGD from theta^t on the objective, at rate lr / sqrt(passed)
        theta^{t+1} <- sum_k w_k theta_k
        validators: if the loss of theta^{t+1} is not the least so far, passed <- t + 1

Danilenka et al. 2022. The paper does not state when the rate falls (differences: adfl-validators).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fatbench.engine.accuracy import accuracy, natural
from fatbench.engine.cohort import cost, draw_cohort, train_cohort
from fatbench.engine.local import LocalTraining
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Metrics, Problem, Round, State, Tensors
from fatbench.methods.algorithms.work import federated
from fatbench.suite.entry import AlgorithmEntry, Work
from fatbench.suite.facts import Facts
from fatbench.suite.types import Aggregator, Count, Fraction, Local


def fedavg_validated(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    aggregator: Aggregator,
    local: Local,
    validators: Count,
    participation: Fraction = 1.0,
) -> Iterator[Round]:
    """Federated averaging in which the last `validators` clients never train; `participation` is of the others.

    The validators measure every new model: its mean cross-entropy on all their images, clean. Metrics:
    validation_loss, and lr, the rate of the round. Raises ValueError if no client is left to train.
    """
    clients = len(problem.shards) - validators
    if clients < 1:
        raise ValueError(f"validators: {validators} of {len(problem.shards)} clients leave none to train")
    training = replace(problem, shards=problem.shards[:clients])
    for t in range(state.round, rounds):
        cohort = draw_cohort(training, t, participation)
        validation_state: Tensors = state.server.get("validation", {})
        local_t = local.at(t)
        local_t = replace(local_t, lr=local_t.lr / math.sqrt(float(validation_state.get("passed", 1.0))))
        context = Context(t, rounds, problem, state.model, state.server.get("aggregator", {}), local_t.lr)
        updates = train_cohort(problem, state.model, cohort, t, local_t, aggregator=aggregator, context=context)
        mixing = aggregate(aggregator, updates, context)
        model = mix(updates, mixing, state.model, problem.model)
        loss, validation_state = _validate(problem, problem.shards[clients:], model, t, validation_state)
        metrics: Metrics = {"validation_loss": loss, "lr": local_t.lr}
        next_state = State(t + 1, model, {"aggregator": mixing.memory, "validation": dict(validation_state)})
        spent = cost(updates, local_t, state.model)
        spent = replace(spent, forward=spent.forward + sum(map(len, problem.shards[clients:])))
        yield Round(t, state.model, updates, mixing, next_state, spent, metrics=metrics)
        del updates, mixing  # frees the memory before the next round needs as much
        state = next_state


def work(cell: Facts, *, rounds: int, aggregator: Aggregator, local: LocalTraining, validators: int) -> Work:
    """The validators evaluate every new model."""
    validation = Work(forward=rounds * validators * cell.client_images)
    return federated(cell, rounds=rounds, local=local, aggregator=aggregator) + validation


def some_train(cell: Facts, *, validators: int) -> str | None:
    """Refuse cells whose clients are all validators."""
    if validators >= cell.clients:
        return f"validators: {validators} of {cell.clients} clients leave none to train"
    return None


def _validate(
    problem: Problem, validation_shards: list[Tensor], model: Tensors, t: int, validation_state: Tensors
) -> tuple[float, Tensors]:
    """(the loss of the model after round t on `validation_shards`, the server's new validation state).

    The state holds "least", the least loss so far, and "passed", the rounds passed when it was last not undercut.
    """
    held = torch.cat(validation_shards)
    _, loss = accuracy(problem, model, problem.images[held], problem.labels[held], natural, ("validators", t))
    least_loss = float(validation_state.get("least", math.inf))
    rate_divisor = float(validation_state.get("passed", 1.0)) if loss < least_loss else t + 1.0
    return loss, {
        "least": torch.tensor(min(loss, least_loss), dtype=torch.float64),
        "passed": torch.tensor(rate_divisor, dtype=torch.float64),
    }


FEDAVG_VALIDATED = AlgorithmEntry(
    fedavg_validated,
    foreseeable=True,
    work=work,
    refuse=(some_train,),
    example={"validators": 1},
    cites=("danilenka2022",),
)
