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
    given = spec["data"]["name"], spec.get("size")
    return digest([_shape(spec["model"]), *given])[:12]


def kind(spec: Mapping[str, Any]) -> str:
    """What a measured speed of training is valid for: the same network at the same batch size."""
    given = spec["data"]["name"], spec.get("size"), cost.local(spec["algorithm"]).get("batch")
    return digest([_shape(spec["model"]), *given])[:12]


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
        known = rates.setdefault(key, [0.0, 0.0])
        known[0] += count
        known[1] += seconds

    for one in timed:
        try:
            each = cost.attack_passes(one.attack).total + 1 if one.attack else 0.0
            cost.monitoring(one.spec)
        except FatbenchError:
            continue
        if one.attack is None:
            add(training, kind(one.spec), one.count, one.seconds)
        else:
            place = network(one.spec)
            add(attacks, (place, _attacking(one.attack)), one.count, one.seconds)
            if one.attack["name"] != "autoattack":  # it stops at images that fall
                add(passes, place, one.count * each, one.seconds)
        stages.append(one)
    known = Speeds(_rates(training), _rates(attacks), _rates(passes))
    around: tuple[list[float], list[float]] = ([], [])
    for one in stages:
        if one.wall is not None:
            looking = 0.0 if one.attack else _monitoring(one.spec, known)
            around[one.attack is not None].append(max(0.0, one.wall - one.seconds - looking))
    return replace(known, around=(_middle(around[0]), _middle(around[1])))


def _rates(found: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    return {key: seconds / count for key, (count, seconds) in found.items() if count}


def _middle(values: Sequence[float]) -> float:
    """The median: the first of a process is long, and does not come again."""
    return sorted(values)[len(values) // 2] if values else 0.0


Left = Callable[[Cell], tuple[float, list[tuple[Evaluation, float]]]]


def everything(plan: Plan, models: float | None = None) -> Left:
    """Nothing is done: all of the training, each attack on the models of all checkpoints.

    models: how many rounds these usually are, where that is known: the best is often the last.
    """

    def of_cell(cell: Cell) -> tuple[float, list[tuple[Evaluation, float]]]:
        most = min(len(plan.checkpoints), int(cell.spec["algorithm"]["rounds"]))
        return 1.0, [(evaluation, most if models is None else models) for evaluation in cell.evaluations]

    return of_cell


def estimate(cells: Iterable[Cell], known: Speeds, left: Left) -> Estimate:
    """How long the cells take. left: of a cell the fraction of its training, and attacks on how many models, to do."""
    total, unknown, done, bound = 0.0, 0, 0, False
    for cell in cells:
        fraction, evaluations = left(cell)
        if not fraction and not evaluations:
            done += 1
            continue
        length = _length(cell, fraction, evaluations, known)
        if length is None:
            unknown += 1
            continue
        total += length.training + length.attacks
        place = network(cell.spec)
        bound |= any(e.attack["name"] == "autoattack" and (place, _attacking(e.attack)) not in known.attacks
                     for e, _ in evaluations)  # fmt: skip
    return Estimate(total, unknown, done, bound)


def lengths(cells: Iterable[Cell], known: Speeds, left: Left) -> list[Length]:
    """What is left of each cell that something comparable was measured for, in their order."""
    found = [_length(cell, *left(cell), known) for cell in cells]
    return [one for one in found if one is not None and one.stages]


def _length(
    cell: Cell, fraction: float, evaluations: Sequence[tuple[Evaluation, float]], known: Speeds
) -> Length | None:
    """None: nothing comparable was measured."""
    training = _training(cell.spec, fraction, known) if fraction else 0.0
    if training is None:
        return None
    attacks = [_attack(cell.spec, evaluation, models, known) for evaluation, models in evaluations]
    if None in attacks:
        return None
    images = cell.spec["test"] or facts.of_data(cell.spec["data"]).test or 0
    return Length(
        training,
        sum(one for one in attacks if one is not None),
        math.ceil(fraction * int(cell.spec["algorithm"]["rounds"])),
        sum(math.ceil(models * min(images, one.n or images) / one.batch) for one, models in evaluations),
        (fraction > 0) + sum(math.ceil(models) for _, models in evaluations),
    )


def _training(spec: Mapping[str, Any], fraction: float, known: Speeds) -> float | None:
    if (rate := known.training.get(kind(spec))) is None or (everything := cost.training(spec)) is None:
        return None
    trained = everything.image_passes - cost.monitoring(spec).image_passes
    return fraction * (rate * trained + _monitoring(spec, known)) + known.around[0]


def _monitoring(spec: Mapping[str, Any], known: Speeds) -> float:
    """Looking at the model while it trains, at the pace of attacks, else of training."""
    net = network(spec)
    a_pass = known.monitoring.get(net, known.passes.get(net, known.training.get(kind(spec), 0.0)))
    return a_pass * cost.monitoring(spec).image_passes


def _attack(spec: Mapping[str, Any], one: Evaluation, models: float, known: Speeds) -> float | None:
    place = network(spec)
    n = spec["test"] or facts.of_data(spec["data"]).test
    if not n:
        return None
    n = min(n, one.n or n)
    each = known.attacks.get((place, _attacking(one.attack)))
    if each is None:
        a_pass = known.passes.get(place, known.training.get(kind(spec)))
        if one.attack["name"] == "autoattack":
            a_pass = known.autoattack.get(place, a_pass)
        if a_pass is None:
            return None
        each = a_pass * (cost.attack_passes(one.attack).total + 1)
    return models * (n * each + known.around[1])
