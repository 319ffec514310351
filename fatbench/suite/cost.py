"""What a run will cost, counted from the suite alone: image passes, gradient steps, bytes, disk.

Nothing is run and torch is not imported: passes come from the docstrings (`fatbench.suite.formulas`), which tests
compare with what really happens.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fatbench.suite import facts, formulas
from fatbench.suite.calls import call
from fatbench.suite.cells import Cell, Evaluation, Plan
from fatbench.suite.memoise import memoised_part
from fatbench.suite.types import number


@dataclass(frozen=True)
class Work:
    """Counted work; None where the size of the data set is not known until it is read."""

    gradient_steps: float = 0
    forward: float = 0  # image passes
    backward: float = 0
    bytes_up: float = 0
    bytes_down: float = 0
    disk: float = 0

    @property
    def image_passes(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Work) -> Work:
        return Work(*map(operator.add, vars(self).values(), vars(other).values()))


def local(algorithm: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a client does in a round: the setting `local`; else `batch` and `objective` of an algorithm without it.

    Of an algorithm around another it is that one's.
    """
    if "local" in algorithm or "batch" in algorithm:
        return algorithm.get("local") or algorithm
    inner = [value for value in algorithm.values() if isinstance(value, Mapping) and "rounds" in value]
    return local(inner[0]) if inner else algorithm


def images_at_once(spec: Mapping[str, Any]) -> int:
    """Images of one batch of a client of average size, which may have fewer than its batch asks for."""
    batch = local(spec["algorithm"]).get("batch")
    total = facts.training_images(spec)
    if not total:
        return batch or 1
    images = (total - spec["validation"]) * (1 - float(number(spec["client_holdout"])))
    each = max(1, round(images / (spec["partition"].get("clients") or 1)))
    return min(batch or each, each)


def epochs_in_round(start: int, factor: float, every: int, round: int) -> int:
    """Local epochs of a round, counted from 0: max(1, floor(start factor^floor(round / every)))."""
    return max(1, int(start * factor ** (round // every) + 1e-9))


def mean_epochs(local: Mapping[str, Any], rounds: int) -> float | None:
    """Local epochs of a round, the mean over the rounds; None of an algorithm whose clients have none."""
    if "epochs" not in local:
        return None
    factor, every = float(number(local.get("epochs_factor", 1.0))), local.get("epochs_every", 1)
    return sum(epochs_in_round(local["epochs"], factor, every, t) for t in range(rounds)) / rounds


def passes(algorithm: Mapping[str, Any]) -> tuple[float, float]:
    """(forward, backward) passes per training image of an epoch: those of the objective, 1 if there is none."""
    objective = local(algorithm).get("objective")
    return (1.0, 1.0) if objective is None else formulas.passes(call("Objective", objective))


def training(spec: Mapping[str, Any]) -> Work | None:
    """The work of a cell's training, its monitoring included. None: the data set's size is unknown."""
    total = facts.training_images(spec)
    if not total:
        return None
    algorithm = call("Algorithm", spec["algorithm"])
    images = (total - spec["validation"]) * (1 - float(number(spec["client_holdout"])))
    at_once = local(algorithm)
    clients = spec["partition"].get("clients") or 1
    m, rounds = facts.cohort(spec), algorithm["rounds"]
    epochs = mean_epochs(at_once, rounds)
    variables = {"participation": m / clients, "images": images, **({} if epochs is None else {"epochs": epochs})}
    forward, backward = formulas.passes(algorithm, **variables)
    per_client = math.ceil(images / clients / (at_once.get("batch") or images))
    size = 4 * (parameters(spec) or 0.0)
    up = formulas.formula(algorithm, "Up", batches=per_client) or 0.0
    down = formulas.formula(algorithm, "Down", batches=per_client) or 0.0
    steps = formulas.formula(algorithm, "Steps")  # of an algorithm that does not train for `epochs`
    disk = size * (3 + (up - 1) * (clients + 1)) if up else 3 * size
    work = Work(
        gradient_steps=rounds * m * (epochs or 1) * per_client if steps is None else steps,
        forward=forward * images,
        backward=backward * images,
        bytes_up=up * size * m * rounds,
        bytes_down=down * size * m * rounds,
        disk=0 if steps == 0 else disk,
    )
    return work + monitoring(spec)


def monitoring(spec: Mapping[str, Any]) -> Work:
    """The work of looking at the model while a cell trains."""
    if spec.get("monitor") is None:
        return Work()
    data = facts.of_data(spec["data"])
    times = math.ceil(spec["algorithm"]["rounds"] / (spec.get("monitor_every") or 1))
    sets = (spec.get("test") or data.test or 0, spec.get("validation"))  # imported cells may lack what has a default
    tested = sum(min(n, spec.get("monitor_n") or n) for n in sets if n)
    forward, backward = formulas.passes(call("Attack", spec["monitor"]))
    held = float(number(spec.get("client_holdout") or 0)) * (
        (facts.training_images(spec) or 0) - (spec.get("validation") or 0)
    )
    models = times * tested * models_watched(spec)
    return Work(
        forward=models * (forward + 2) + times * held * (forward + 1), backward=(models + times * held) * backward
    )


def models_watched(spec: Mapping[str, Any]) -> float:
    """How many models the monitor looks at in a round, on average: those of clients that ever took part, or one."""
    clients, rounds = spec["partition"].get("clients") or 1, int(spec["algorithm"]["rounds"])
    if formulas.formula(call("Algorithm", spec["algorithm"]), "Deploys", clients=clients) in (None, 1):
        return 1.0
    never = 1 - facts.cohort(spec) / clients
    return sum(clients * (1 - never ** (t + 1)) for t in range(rounds)) / rounds


def evaluation(spec: Mapping[str, Any], evaluations: Iterable[Evaluation], checkpoints: int) -> Work | None:
    """The work of attacking the models of `checkpoints` rounds; AutoAttack counts as if every image survived."""
    available = spec["test"] or facts.of_data(spec["data"]).test
    if not available:
        return None
    clients = spec["partition"].get("clients") or 1
    deployed = formulas.formula(call("Algorithm", spec["algorithm"]), "Deploys", clients=clients)
    models = checkpoints * int(deployed or 1)
    found: Work = memoised_part(
        "work", "Attack", evaluations, lambda: _evaluation(evaluations, available, models), available, models
    )
    return found


def _evaluation(evaluations: Iterable[Evaluation], available: int, models: int) -> Work:
    """The work of attacking so many models on so many images at most."""
    work = Work()
    for item in evaluations:
        n = min(available, item.n or available) * (item.origin.clients or 1 if item.origin else 1)
        forward, backward = formulas.passes(call("Attack", item.attack))
        work += Work(forward=models * n * (forward + 1), backward=models * n * backward, disk=n / 8)
    return work


def parameters(spec: Mapping[str, Any]) -> float | None:
    """The number of parameters of a cell's model, from its docstring; None where that does not say."""
    data = facts.of_data(spec["data"])
    return formulas.formula(
        call("Model", spec["model"]),
        "Parameters",
        channels=data.channels,
        side=spec["size"] or data.side,
        classes=data.classes,
    )


def cell_work(cell: Cell, plan: Plan) -> Work | None:
    """Training and all evaluations of one cell."""
    train = training(cell.spec)
    test = evaluation(cell.spec, cell.evaluations, len(plan.checkpoints))
    return None if train is None or test is None else train + test


def total(works: Iterable[Work | None]) -> Work:
    """The sum of what is known."""
    result = Work()
    for work in works:
        if work is not None:
            result += work
    return result
