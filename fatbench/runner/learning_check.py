"""Watch the first cell of a plan learn, for `fatbench check --learn`. Nothing is stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fatbench.runner.start import check_data, jobs_of
from fatbench.suite import calls
from fatbench.suite.cells import Plan

IMAGES = 1000  # test images that are classified after each round


@dataclass(frozen=True)
class LearningCheck:
    """The model's accuracy on the first test images after a round."""

    round: int
    rounds: int
    steps: int  # of a client's optimizer so far, as the mean over the clients that took part
    loss: float  # mean training loss of the round's clients; nan where the algorithm reports none
    accuracy: float  # on clean images; the mean over the clients' models if there is no global one
    n: int
    chance: float  # the accuracy of naming the most frequent class


def check_learning(plan: Plan, data: Path, device: str) -> Iterator[LearningCheck]:
    """Train the plan's first cell and yield its natural accuracy after each round, until no model is finite.

    MachineError: data is missing or damaged. SpecError: the data cannot be split as the cell asks.
    """
    import torch

    from fatbench.engine.accuracy import accuracy, models_of, natural, of_client
    from fatbench.engine.malicious import finite
    from fatbench.engine.setup import Runtime, setup

    job = jobs_of(plan)[0]
    check_data([job], data)
    torch.set_num_threads(1)
    bound = calls.bind_cell(job.spec, data)
    ready = setup(Runtime(data, torch.device(device)), **bound)
    images, labels = ready.test[0][:IMAGES], ready.test[1][:IMAGES]
    n, fraction = len(labels), float(labels.bincount().max()) / len(labels)
    rounds, steps = int(job.spec["algorithm"]["rounds"]), 0.0
    for result in bound["algorithm"](ready.problem, ready.initial):
        count, updates = result.index + 1, result.updates
        client_steps = [update.stats.steps for update in updates]
        steps += sum(client_steps) / len(client_steps) if client_steps else result.cost.gradient_steps
        loss = sum(u.n * u.stats.loss for u in updates) / sum(u.n for u in updates) if updates else math.nan
        models = models_of(result.state.model, result.own)
        correct = [
            accuracy(ready.problem, model, images, labels, natural, ("learn", count, *of_client(k)))[0]
            for k, model in models.items()
        ]
        value = float(torch.stack(correct).double().mean())
        yield LearningCheck(count, rounds, round(steps), loss, value, n, fraction)
        if not any(map(finite, models.values())):
            return
