"""FedAvg and everything that is FedAvg with other weights or another local loss.

| paper | here | what |
|---|---|---|
| K, m | len(problem.shards), len(cohort) | clients, participants of the round |
| theta^t | state.model | global model at the start of round t |
| theta_k | update.model | client k's model after E local epochs |
| w_k | mixing.weights | the rule's weights |
| mu | proximal | FedProx's pull towards theta^t |
| - | validators | the last clients: they never train, and say when the rate is to fall (AdFL) |

    for t = 0 .. T-1:
        draw m clients
        each: theta_k <- E epochs of SGD from theta^t on the objective (+ proximal term)
        theta^{t+1} <- sum_k w_k theta_k
        validators, where there are any: where the loss of theta^{t+1} is not the least so far, lr <- lr_0 / sqrt(t + 1)

McMahan et al. 2017, algorithm 1; Li et al. 2020 (FedProx); Zhu et al. 2023 (SFAT), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fatbench.engine.accuracy import accuracy
from fatbench.engine.local import LocalSGD, cost, draw_cohort, train_cohort
from fatbench.engine.rounds import Context, Metrics, Problem, Round, State, Tensors
from fatbench.methods.attacks import natural
from fatbench.methods.rules import mix, needs_broadcast_loss
from fatbench.suite.types import Count, Momentum, Natural, NonNegative, Objective, Positive, Proximal, Rule, Share


def fedavg(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    epochs: Count,
    batch: Count,
    lr: Positive,
    objective: Objective,
    rule: Rule,
    lr_decay: Positive = 1.0,
    momentum: Momentum = 0.0,
    weight_decay: NonNegative = 0.0,
    clip: Positive | None = None,
    participation: Share = 1.0,
    proximal: Proximal | None = None,
    validators: Natural = 0,
) -> Iterator[Round]:
    """Federated averaging under an aggregation rule.

    Momentum buffers start at zero every round. `lr_decay` multiplies the rate once a round; `clip` bounds the norm of
    the gradient. Passes are per training image over the whole run, as if every client trained.

    `validators`: so many clients, the last, never train; `participation` is of the others. When the mean cross-entropy
    of a new model on all their images, clean, is not below the least so far, the rate becomes lr / sqrt(rounds passed)
    (times lr_decay's factor) until the next such round. Paper: silent on when (differences: adfl-validators).
    Metrics: validation_loss, and lr, the rate of the round. ValueError: nobody is left to train.

    Forward: rounds * participation * epochs * objective
    Backward: rounds * participation * epochs * objective
    Up: 1
    Down: 1
    """
    clients = len(problem.shards) - validators
    if clients < 1:
        raise ValueError(f"fedavg: validators={validators} of {len(problem.shards)} clients leave nobody to train")
    training = replace(problem, shards=problem.shards[:clients])
    for t in range(state.round, rounds):
        cohort = draw_cohort(training, t, participation)
        rate = lr * lr_decay**t / math.sqrt(float(state.server.get("validation/passed", 1.0)))
        local = LocalSGD(epochs, batch, rate, momentum, weight_decay, clip, objective, proximal)
        updates = train_cohort(problem, state.model, cohort, t, local, broadcast_loss=needs_broadcast_loss(rule))
        memory = {name: value for name, value in state.server.items() if not name.startswith("validation/")}
        mixing = rule(updates, Context(t, rounds, problem, state.model, memory, local.lr))
        model = mix(updates, mixing, state.model, problem.model)
        metrics: Metrics = {}
        heard: Tensors = {}
        if validators:
            loss, heard = _validate(problem, problem.shards[clients:], model, t, state.server)
            metrics = {"validation_loss": loss, "lr": rate}
        after = replace(state, round=t + 1, model=model, server={**mixing.server, **heard})
        yield Round(t, state.model, updates, mixing, after, cost(updates, local, state.model), metrics=metrics)
        state = after


def _validate(problem: Problem, held: list[Tensor], model: Tensors, t: int, server: Tensors) -> tuple[float, Tensors]:
    """The loss of the model after round t on the shards `held`, and what the server remembers of validation.

    That is the least loss so far, and how many rounds had passed when it was last not undercut.
    """
    every = torch.cat(held)
    _, loss = accuracy(problem, model, problem.images[every], problem.labels[every], natural, ("validators", t))
    least = float(server.get("validation/least", math.inf))
    passed = float(server.get("validation/passed", 1.0)) if loss < least else t + 1.0
    return loss, {
        "validation/least": torch.tensor(min(loss, least), dtype=torch.float64),
        "validation/passed": torch.tensor(passed, dtype=torch.float64),
    }
