"""How long a run will take: from what stages of the same kind took, less what is done already.

Training and attacks have different rates. Training: seconds an image pass, of the same network on the same data set
at the same batch size. An attack: seconds an image, of the same attack on the same network; one that was never run
there takes the passes it counts at the pace of the others. What begins and ends a stage is added to each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fatbench.errors import FatbenchError
from fatbench.suite import cost, facts
from fatbench.suite.cells import Cell, Evaluation, Plan, digest
from fatbench.suite.schedule import Length


class Timed(Protocol):
    """A stage that was run: see `fatbench.store.timing`."""

    @property
    def spec(self) -> Mapping[str, Any]: ...
    @property
    def attack(self) -> Mapping[str, Any] | None: ...
    @property
    def count(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def wall(self) -> float | None: ...


@dataclass(frozen=True)
class Speeds:
    """What is known of a machine, in seconds."""

    training: Mapping[str, float] = field(default_factory=dict)  # kind -> an image pass
    attacks: Mapping[tuple[str, str], float] = field(default_factory=dict)  # (network, attack) -> an image
    passes: Mapping[str, float] = field(default_factory=dict)  # network -> an image pass of any attack
    autoattack: Mapping[str, float] = field(default_factory=dict)  # network -> one of AutoAttack, where it is another
    monitoring: Mapping[str, float] = field(default_factory=dict)  # network -> one of the monitor, where it is another
    around: tuple[float, float] = (0.0, 0.0)  # what begins and ends a training, an attack


@dataclass(frozen=True)
class Estimate:
    """Seconds of work on one worker that are left."""

    seconds: float
    unknown: int  # cells with work left that nothing comparable was measured for
    done: int  # cells without work left
    bound: bool  # AutoAttack, never timed there, is counted as if every image survived


def network(spec: Mapping[str, Any]) -> str:
    """What the speed of an attack is valid for: the same model on images of the same data set."""
    data_and_size = spec["data"]["name"], spec.get("size")
    return digest([_shape(spec["model"]), *data_and_size])[:12]


def kind(spec: Mapping[str, Any]) -> str:
    """What a measured speed of training is valid for: the same network at the same batch size."""
    data_size_batch = spec["data"]["name"], spec.get("size"), cost.local(spec["algorithm"]).get("batch")
    return digest([_shape(spec["model"]), *data_size_batch])[:12]


def _shape(model: Mapping[str, Any]) -> dict[str, Any]:
    """A network's settings less its weights, which change no time."""
    return {key: value for key, value in model.items() if key != "weights"}


def _attacking(attack: Mapping[str, Any]) -> str:
    """What tells an attack from others."""
    return digest(attack)


def speeds(timed: Iterable[Timed]) -> Speeds:
    """Rates from stages that were run; what was measured several times counts by its work.

    Stages of which a name is unknown here, of a plug-in or of another version, are left out.
    """
    training: dict[str, list[float]] = {}
    attacks: dict[tuple[str, str], list[float]] = {}
    passes: dict[str, list[float]] = {}
    stages = []

    def add(rates: dict[Any, list[float]], key: Any, count: float, seconds: float) -> None:
        totals = rates.setdefault(key, [0.0, 0.0])
        totals[0] += count
        totals[1] += seconds

    for timed_stage in timed:
        try:
            passes_each = cost.attack_passes(timed_stage.attack).total + 1 if timed_stage.attack else 0.0
            cost.monitoring(timed_stage.spec)
        except FatbenchError:
            continue
        if timed_stage.attack is None:
            add(training, kind(timed_stage.spec), timed_stage.count, timed_stage.seconds)
        else:
            network_digest = network(timed_stage.spec)
            add(attacks, (network_digest, _attacking(timed_stage.attack)), timed_stage.count, timed_stage.seconds)
            if timed_stage.attack["name"] != "autoattack":  # it stops at images that fall
                add(passes, network_digest, timed_stage.count * passes_each, timed_stage.seconds)
        stages.append(timed_stage)
    measured_speeds = Speeds(_rates(training), _rates(attacks), _rates(passes))
    around: tuple[list[float], list[float]] = ([], [])
    for timed_stage in stages:
        if timed_stage.wall is not None:
            looking = 0.0 if timed_stage.attack else _monitoring(timed_stage.spec, measured_speeds)
            around[timed_stage.attack is not None].append(max(0.0, timed_stage.wall - timed_stage.seconds - looking))
    return replace(measured_speeds, around=(_middle(around[0]), _middle(around[1])))


def _rates(totals: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    return {key: seconds / count for key, (count, seconds) in totals.items() if count}


def _middle(values: Sequence[float]) -> float:
    """The median: the first of a process is long, and does not come again."""
    return sorted(values)[len(values) // 2] if values else 0.0


Left = Callable[[Cell], tuple[float, list[tuple[Evaluation, float]]]]


def everything(plan: Plan, models: float | None = None) -> Left:
    """Nothing is done: all of the training, each attack on the models of all checkpoints.

    models: how many rounds these usually are, where that is known: the best is often the last.
    """

    def of_cell(cell: Cell) -> tuple[float, list[tuple[Evaluation, float]]]:
        model_count = min(len(plan.checkpoints), int(cell.spec["algorithm"]["rounds"]))
        return 1.0, [(evaluation, model_count if models is None else models) for evaluation in cell.evaluations]

    return of_cell


def estimate(cells: Iterable[Cell], speeds: Speeds, work_left: Left) -> Estimate:
    """How long the cells take. work_left: of a cell the fraction of its training, and attacks on how many models, to
    do.
    """
    total, unknown, done_count, bound = 0.0, 0, 0, False
    for cell in cells:
        fraction, evaluations = work_left(cell)
        if not fraction and not evaluations:
            done_count += 1
            continue
        length = _length(cell, fraction, evaluations, speeds)
        if length is None:
            unknown += 1
            continue
        total += length.training + length.attacks
        network_digest = network(cell.spec)
        bound |= any(e.attack["name"] == "autoattack" and (network_digest, _attacking(e.attack)) not in speeds.attacks
                     for e, _ in evaluations)  # fmt: skip
    return Estimate(total, unknown, done_count, bound)


def lengths(cells: Iterable[Cell], speeds: Speeds, work_left: Left) -> list[Length]:
    """What is left of each cell that something comparable was measured for, in their order."""
    all_lengths = [_length(cell, *work_left(cell), speeds) for cell in cells]
    return [length for length in all_lengths if length is not None and length.stages]


def _length(
    cell: Cell, fraction: float, evaluations: Sequence[tuple[Evaluation, float]], speeds: Speeds
) -> Length | None:
    """None: nothing comparable was measured."""
    training = _training(cell.spec, fraction, speeds) if fraction else 0.0
    if training is None:
        return None
    attacks = [_attack(cell.spec, evaluation, models, speeds) for evaluation, models in evaluations]
    if None in attacks:
        return None
    images = cell.spec["test"] or facts.of_data(cell.spec["data"]).test or 0
    return Length(
        training,
        sum(item for item in attacks if item is not None),
        math.ceil(fraction * int(cell.spec["algorithm"]["rounds"])),
        sum(math.ceil(models * min(images, item.n or images) / item.batch) for item, models in evaluations),
        (fraction > 0) + sum(math.ceil(models) for _, models in evaluations),
    )


def _training(spec: Mapping[str, Any], fraction: float, speeds: Speeds) -> float | None:
    if (rate := speeds.training.get(kind(spec))) is None or (training_work := cost.training(spec)) is None:
        return None
    trained = training_work.image_passes - cost.monitoring(spec).image_passes
    return fraction * (rate * trained + _monitoring(spec, speeds)) + speeds.around[0]


def _monitoring(spec: Mapping[str, Any], speeds: Speeds) -> float:
    """Looking at the model while it trains, at the pace of attacks, else of training."""
    net = network(spec)
    a_pass = speeds.monitoring.get(net, speeds.passes.get(net, speeds.training.get(kind(spec), 0.0)))
    return a_pass * cost.monitoring(spec).image_passes


def _attack(spec: Mapping[str, Any], evaluation: Evaluation, models: float, speeds: Speeds) -> float | None:
    network_digest = network(spec)
    n = spec["test"] or facts.of_data(spec["data"]).test
    if not n:
        return None
    n = min(n, evaluation.n or n)
    seconds_each = speeds.attacks.get((network_digest, _attacking(evaluation.attack)))
    if seconds_each is None:
        a_pass = speeds.passes.get(network_digest, speeds.training.get(kind(spec)))
        if evaluation.attack["name"] == "autoattack":
            a_pass = speeds.autoattack.get(network_digest, a_pass)
        if a_pass is None:
            return None
        seconds_each = a_pass * (cost.attack_passes(evaluation.attack).total + 1)
    return models * (n * seconds_each + speeds.around[1])
