"""The duration of a run, estimated from stages of the same kind, less the work that is done already.

Training and attacks have different rates. Training: seconds per image pass of the same network on the same data set
at the same batch size. An attack: seconds per image of the same attack on the same network; for an attack that was
never run there, its counted passes at the average pace of the others. Each stage also has a fixed overhead.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fatbench.errors import FatbenchError
from fatbench.suite import cost, facts, weights
from fatbench.suite.cells import Cell, Evaluation, Plan, digest
from fatbench.suite.entry import Unknown


class TimedStage(Protocol):
    """A finished stage with its times: see `fatbench.store.timing`."""

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
    """The measured speeds of a machine, in seconds."""

    training: Mapping[str, float] = field(default_factory=dict)  # kind -> seconds per image pass
    attacks: Mapping[tuple[str, str], float] = field(default_factory=dict)  # (network, attack) -> seconds per image
    passes: Mapping[str, float] = field(default_factory=dict)  # network -> seconds per image pass of any attack
    autoattack: Mapping[str, float] = field(default_factory=dict)  # network -> the same of AutoAttack, if it differs
    monitoring: Mapping[str, float] = field(default_factory=dict)  # network -> the same of the monitor, if it differs
    overhead: tuple[float, float] = (0.0, 0.0)  # to begin and end a training, an attack


@dataclass(frozen=True)
class Estimate:
    """The remaining work of a plan on one worker."""

    seconds: float
    unknown: int  # cells with work left but no comparable measurement
    done: int  # cells without work left
    bound: bool  # True: an upper bound, because an untimed AutoAttack counts as if every image survived


def network(spec: Mapping[str, Any]) -> str:
    """The key of an attack's speed: a digest of the network and the images it takes."""
    data_and_size = spec["data"]["name"], spec.get("size")
    return digest([_architecture(spec["model"]), *data_and_size])[:12]


def kind(spec: Mapping[str, Any]) -> str:
    """The key of a training's speed: a digest of the network, the images and the batch size."""
    data_size_batch = spec["data"]["name"], spec.get("size"), cost.local(spec["algorithm"]).get("batch")
    return digest([_architecture(spec["model"]), *data_size_batch])[:12]


def _architecture(model: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a network without its weights, which do not change its speed."""
    return weights.changed(model, lambda _: None)


def speeds(timed: Iterable[TimedStage]) -> Speeds:
    """Speeds from finished stages; repeated measurements are weighted by their work.

    Stages with a name that is unknown here, of a plug-in or of another version, are left out.
    """
    training: dict[str, list[float]] = {}  # key -> [work, seconds]
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
        except (FatbenchError, Unknown):
            continue
        if timed_stage.attack is None:
            add(training, kind(timed_stage.spec), timed_stage.count, timed_stage.seconds)
        else:
            network_key = network(timed_stage.spec)
            add(attacks, (network_key, digest(timed_stage.attack)), timed_stage.count, timed_stage.seconds)
            if timed_stage.attack["name"] != "autoattack":  # which skips images that have fallen
                add(passes, network_key, timed_stage.count * passes_each, timed_stage.seconds)
        stages.append(timed_stage)
    measured_speeds = Speeds(_rates(training), _rates(attacks), _rates(passes))
    overheads: tuple[list[float], list[float]] = ([], [])  # of trainings, of attacks
    for timed_stage in stages:
        if timed_stage.wall is not None:
            monitor_seconds = 0.0 if timed_stage.attack else _monitoring(timed_stage.spec, measured_speeds)
            rest = timed_stage.wall - timed_stage.seconds - monitor_seconds
            overheads[timed_stage.attack is not None].append(max(0.0, rest))
    return replace(measured_speeds, overhead=(_median(overheads[0]), _median(overheads[1])))


def _rates(totals: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    return {key: seconds / count for key, (count, seconds) in totals.items() if count}


def _median(values: Sequence[float]) -> float:
    """The upper median: a mean would count the long first stage of a process, which does not come again."""
    return sorted(values)[len(values) // 2] if values else 0.0


# cell -> (fraction of its training, [(evaluation, number of models to attack), ...])
WorkLeft = Callable[[Cell], tuple[float, list[tuple[Evaluation, float]]]]


def whole_plan(plan: Plan, models: float | None = None) -> WorkLeft:
    """The work left before anything is done: all training, and each attack on the models of all checkpoints.

    models: the usual number of models, where it is known: the best round is often the last, which is then one model.
    """

    def work_of_cell(cell: Cell) -> tuple[float, list[tuple[Evaluation, float]]]:
        model_count = min(len(plan.checkpoints), int(cell.spec["algorithm"]["rounds"]))
        return 1.0, [(evaluation, model_count if models is None else models) for evaluation in cell.evaluations]

    return work_of_cell


def estimate(cells: Iterable[Cell], speeds: Speeds, work_left: WorkLeft) -> Estimate:
    """The time that the cells still take, at these speeds."""
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
        network_key = network(cell.spec)
        bound |= any(e.attack["name"] == "autoattack" and (network_key, digest(e.attack)) not in speeds.attacks
                     for e, _ in evaluations)  # fmt: skip
    return Estimate(total, unknown, done_count, bound)


def lengths(cells: Iterable[Cell], speeds: Speeds, work_left: WorkLeft) -> list[RemainingWork]:
    """The remaining lengths of the cells, in order, without cells that have no comparable measurement."""
    all_lengths = [_length(cell, *work_left(cell), speeds) for cell in cells]
    return [length for length in all_lengths if length is not None and length.stages]


def _length(
    cell: Cell, fraction: float, evaluations: Sequence[tuple[Evaluation, float]], speeds: Speeds
) -> RemainingWork | None:
    """The remaining length of a cell; None without a comparable measurement."""
    training, spec = 0.0, cell.spec
    if fraction:
        if (rate := speeds.training.get(kind(spec))) is None or (work := cost.training(spec)) is None:
            return None
        passes = work.image_passes - cost.monitoring(spec).image_passes
        training = fraction * (rate * passes + _monitoring(spec, speeds)) + speeds.overhead[0]
    attacks = [_attack(cell.spec, evaluation, models, speeds) for evaluation, models in evaluations]
    if None in attacks:
        return None
    images = spec["test"] or facts.of_data(spec["data"]).test or 0
    return RemainingWork(
        training,
        sum(item for item in attacks if item is not None),
        math.ceil(fraction * int(spec["algorithm"]["rounds"])),
        sum(math.ceil(models * min(images, item.n or images) / item.batch) for item, models in evaluations),
        (fraction > 0) + sum(math.ceil(models) for _, models in evaluations),
    )


def _monitoring(spec: Mapping[str, Any], speeds: Speeds) -> float:
    """The seconds of the monitor: at its own pace, else that of attacks, else that of training."""
    network_key = network(spec)
    attack_speed = speeds.passes.get(network_key, speeds.training.get(kind(spec), 0.0))
    seconds_per_pass = speeds.monitoring.get(network_key, attack_speed)
    return seconds_per_pass * cost.monitoring(spec).image_passes


def _attack(spec: Mapping[str, Any], evaluation: Evaluation, models: float, speeds: Speeds) -> float | None:
    network_key = network(spec)
    n = spec["test"] or facts.of_data(spec["data"]).test
    if not n:
        return None
    n = min(n, evaluation.n or n)
    seconds_per_image = speeds.attacks.get((network_key, digest(evaluation.attack)))
    if seconds_per_image is None:
        seconds_per_pass = speeds.passes.get(network_key, speeds.training.get(kind(spec)))
        if evaluation.attack["name"] == "autoattack":
            seconds_per_pass = speeds.autoattack.get(network_key, seconds_per_pass)
        if seconds_per_pass is None:
            return None
        seconds_per_image = seconds_per_pass * (cost.attack_passes(evaluation.attack).total + 1)
    return models * (n * seconds_per_image + speeds.overhead[1])


# --- on many GPUs ---------------------------------------------------------------------------------------------------

STAGE = 3  # transactions of a stage besides its commits: claim, description, end
# writes per second up to which a SQLite file on a local disk is no bottleneck; docs/clusters.md has figures
SQLITE = 20.0


@dataclass(frozen=True)
class RemainingWork:
    """The remaining work of one cell."""

    training: float  # seconds
    attacks: float  # seconds
    rounds: int  # to train
    chunks: int  # of images to attack, each committed
    stages: int

    def writes(self, checkpoint_seconds: float) -> float:
        """The number of transactions; training commits at its end and at most every `checkpoint_seconds`."""
        commits = min(float(self.rounds), self.training / checkpoint_seconds) if checkpoint_seconds > 0 else self.rounds
        return STAGE * self.stages + math.ceil(commits) + self.chunks


@dataclass(frozen=True)
class Schedule:
    """A plan on workers that take the next cell as soon as they are free, as in `fatbench run`."""

    gpus: int
    seconds: float  # from the first cell's start to the last one's end
    idle: float  # fraction of the GPUs' time without work
    writes: float  # per second, averaged over the whole time
    longest: float  # seconds of the longest cell, a lower bound for any number of GPUs


def schedule(cells: Sequence[RemainingWork], gpus: int, checkpoint_seconds: float) -> Schedule:
    """The schedule if the cells are taken in this order."""
    lengths = [cell.training + cell.attacks for cell in cells]
    free_at = [0.0] * min(gpus, len(cells))  # a heap: when each GPU is free next
    for seconds in lengths:
        heapq.heapreplace(free_at, free_at[0] + seconds)
    end = max(free_at, default=0.0)
    busy, writes = sum(lengths), sum(cell.writes(checkpoint_seconds) for cell in cells)
    return Schedule(
        gpus, end, 1 - busy / (gpus * end) if end else 0.0, writes / end if end else 0.0, max(lengths, default=0.0)
    )
