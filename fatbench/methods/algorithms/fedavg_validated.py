"""FedAvg with validators: clients that never train, and say when the learning rate is to fall.

| paper | here | what |
|---|---|---|
| theta^t | state.model | global model at the start of round t |
| w_k | mixing.weights | the aggregator's weights; AdFL's are those of the aggregator `adfl` |
| validators | held | the shards of the last clients |

    for t = 0 .. T-1:
        draw m of the clients that train
        each: theta_k <- E epochs of SGD from theta^t on the objective, at rate lr / sqrt(passed)
        theta^{t+1} <- sum_k w_k theta_k
        validators: if the loss of theta^{t+1} is not the least so far, passed <- t + 1

Danilenka et al. 2022. paper: when the rate falls is not stated (differences: adfl-validators) / here: as above.
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
    validation_loss, and lr, the rate of the round. ValueError: no client is left to train.
    """
    clients = len(problem.shards) - validators
    if clients < 1:
        raise ValueError(f"validators: {validators} of {len(problem.shards)} clients leave none to train")
    training = replace(problem, shards=problem.shards[:clients])
    for t in range(state.round, rounds):
        cohort = draw_cohort(training, t, participation)
        heard: Tensors = state.server.get("validation", {})
        now = local.at(t)
        now = replace(now, lr=now.lr / math.sqrt(float(heard.get("passed", 1.0))))
        updates = train_cohort(problem, state.model, cohort, t, now, aggregator=aggregator)
        memory = state.server.get("aggregator", {})
        mixing = aggregate(aggregator, updates, Context(t, rounds, problem, state.model, memory, now.lr))
        model = mix(updates, mixing, state.model, problem.model)
        loss, heard = _validate(problem, problem.shards[clients:], model, t, heard)
        metrics: Metrics = {"validation_loss": loss, "lr": now.lr}
        after = State(t + 1, model, {"aggregator": mixing.memory, "validation": dict(heard)})
        spent = cost(updates, now, state.model)
        spent = replace(spent, forward=spent.forward + sum(map(len, problem.shards[clients:])))
        yield Round(t, state.model, updates, mixing, after, spent, metrics=metrics)
        del updates, mixing  # before the next round sends as much
        state = after


def work(cell: Facts, *, rounds: int, aggregator: Aggregator, local: LocalTraining, validators: int) -> Work:
    """The validators look at every new model."""
    looking = Work(forward=rounds * validators * cell.client_images)
    return federated(cell, rounds=rounds, local=local, aggregator=aggregator) + looking


def some_train(cell: Facts, *, validators: int) -> str | None:
    """A client is left to train."""
    if validators >= cell.clients:
        return f"validators: {validators} of {cell.clients} clients leave none to train"
    return None


def _validate(problem: Problem, held: list[Tensor], model: Tensors, t: int, heard: Tensors) -> tuple[float, Tensors]:
    """The loss of the model after round t on the shards `held`, and what the server remembers of validation.

    That is the least loss so far, and how many rounds had passed when it was last not undercut.
    """
    every = torch.cat(held)
    _, loss = accuracy(problem, model, problem.images[every], problem.labels[every], natural, ("validators", t))
    least = float(heard.get("least", math.inf))
    passed = float(heard.get("passed", 1.0)) if loss < least else t + 1.0
    return loss, {
        "least": torch.tensor(min(loss, least), dtype=torch.float64),
        "passed": torch.tensor(passed, dtype=torch.float64),
    }


FEDAVG_VALIDATED = AlgorithmEntry(fedavg_validated, work=work, refuse=(some_train,), example={"validators": 1})
