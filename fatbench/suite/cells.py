"""Cells: every point of a suite's grid as one fully specified experiment, checked, with an identity.

Nothing here imports torch: every name, key and value is checked against the source of the function it will reach,
before a GPU second is spent.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fatbench.errors import SpecError, did_you_mean
from fatbench.settings import PRECISIONS
from fatbench.suite import (
    calls,
    confounders,
    facts,
    input_limits,
    model,
    perturbation,
    standard_attacks,
    threats,
    weights,
)
from fatbench.suite.contents import Contents
from fatbench.suite.entry import AlgorithmEntry
from fatbench.suite.located import LocatedMap, merge
from fatbench.suite.model import Condition, Evaluate, GridSpec, Key, Preset, Transfer


@dataclass(frozen=True)
class TransferOrigin:
    """Whose model an attack is computed on, where it is judged on another: a cell's last, or that of a client."""

    name: str  # "FedAvg", "client 0"; part of the metric's name
    cell: str = ""  # empty: the clients of the cell that is judged, before averaging
    spec: dict[str, Any] = field(default_factory=dict)  # of that cell
    client: int = 0  # which of `clients`, counted from 0 in the order of their numbers
    clients: int = 0

    @property
    def shown(self) -> str:
        """Its name for people, to whom clients count from 1."""
        return self.name if self.cell else f"client {self.client + 1}"

    @property
    def said(self) -> str:
        """As it stands in the settings of the stage."""
        return f"cell {self.cell}" if self.cell else f"client {self.client} of {self.clients}"


@dataclass(frozen=True)
class Evaluation:
    """One evaluation attack of a suite; `id` names its stage together with the round and the attack's precision."""

    label: str  # the metric's name: "pgd20"
    attack: dict[str, Any]
    n: int | None  # first n test examples; None = all the cell has
    batch: int
    sweep: str = ""  # "pgd20", of one value of an attack's setting with a list of them; not part of the identity
    origin: TransferOrigin | None = None  # None: the attack is computed on the model that it is judged on
    swept: str = ""  # that setting: "eps"

    @functools.cached_property
    def id(self) -> str:
        short = calls.without_defaults(calls.call("Attack", self.attack))
        said = [short, self.n, self.batch, *([] if self.origin is None else [self.origin.said])]
        return f"{self.label}-{digest(said)[:8]}"

    @property
    def mark(self) -> str:
        """What tells it from the others of its sweep: a value as the suite writes it, or where it comes from."""
        return str(self.attack[self.swept]) if self.origin is None else self.origin.shown

    def stage(self, round: int, precision: str = "fp32") -> str:
        """Where the outcomes of a round's model are, if the attack computed in this precision."""
        return self.stages(round)[PRECISIONS.index(precision)]

    def stages(self, round: int) -> tuple[str, ...]:
        """Where they may be: one name for each precision, float32 first."""
        return _stages(self.id, round)

    def computes_in(self, precision: str) -> str:
        """The attack's own precision in a run in this one: float32 where the entry of its function says so."""
        entry = calls.call("Attack", self.attack).signature.entry
        return "fp32" if precision in entry.get("float32", ()) else precision


@functools.lru_cache(1024)  # a report asks for those of each of 10,000 cells
def _stages(evaluation: str, round: int) -> tuple[str, ...]:
    return tuple(f"{evaluation}{'' if one == 'fp32' else f'.{one}'}@{round}" for one in PRECISIONS)


@dataclass(frozen=True)
class Cell:
    """One fully specified experiment. `id` is the hash of its canonical spec less defaults."""

    id: str
    key: Key  # axis -> label, in the order of the suite
    spec: dict[str, Any]
    evaluations: tuple[Evaluation, ...]  # what the suite asks of the trained model; not part of the identity
    origin: Cell | None = None  # whose last model it begins with
    suite: str = ""  # of an origin: the suite that it is of
    perturbation: str = field(default="", compare=False)  # of its task, in words: "Linf 25/255"
    written: Mapping[str, frozenset[str]] = field(default_factory=dict, compare=False)  # see `confounders.written`

    @property
    def origins(self) -> list[Cell]:
        """What has to be trained before it: its origin, and before that the origin's."""
        return [] if self.origin is None else [*self.origin.origins, self.origin]


@dataclass(frozen=True)
class Plan:
    """What one preset of a suite asks for."""

    suite: str
    preset: str
    note: str
    cells: list[Cell]
    checkpoints: list[str]
    excluded: list[tuple[Key, str]] = field(default_factory=list)
    added: tuple[str, ...] = ()  # metrics of attacks that the preset does without, see `--attacks`
    baseline: tuple[str, str] | None = None  # (axis, label)
    where: str = field(default="", compare=False)  # the filter that left these cells
    resolved: bool = field(default=False, compare=False)  # whether the cells' ids are those of the runs to read

    def to_run(self) -> list[Cell]:
        """The cells to run, each once; first those of any suite with whose models others begin."""
        own = {cell.id: cell for cell in self.unique()}
        first = {origin.id: own.get(origin.id, origin) for cell in own.values() for origin in cell.origins}
        return list({**first, **own}.values())

    def unique(self) -> list[Cell]:
        """The cells of the suite: grid points that come to the same experiment are one, with the evaluations of all."""
        cells: dict[str, Cell] = {}
        for cell in self.cells:
            first = cells.get(cell.id)
            if first is not None and first.evaluations != cell.evaluations:
                both = {evaluation.id: evaluation for evaluation in (*first.evaluations, *cell.evaluations)}
                cell = replace(first, evaluations=tuple(both.values()))
            cells[cell.id] = cell if first is None or cell.evaluations != first.evaluations else first
        return list(cells.values())

    def metrics(self) -> list[str]:
        """The names of all evaluation metrics, in the order of the suite."""
        return list(dict.fromkeys(evaluation.label for cell in self.cells for evaluation in cell.evaluations))


_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Any) -> str:
    """The hex SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(_JSON.encode(value).encode()).hexdigest()


def identity(spec: Mapping[str, Any]) -> str:
    """The identity of a canonical cell: 12 hex digits of the hash of its JSON, settings at their default left out.

    Of a model that was not trained here (`fatbench.suite.external_models`) the name of its file does not count.
    """
    if "evaluated" in spec:
        return _identity(
            {**spec, "evaluated": {k: v for k, v in spec["evaluated"].items() if not k.startswith("name")}}
        )
    return _identity(calls.without_defaults(calls.call("Experiment", spec)))


def _identity(short: Mapping[str, Any]) -> str:
    return digest(short)[:12]


def canonical(spec: Mapping[str, Any], place: str = "cell") -> calls.Call:
    """The canonical form of one cell, every default filled in and checked. SpecError names file, line and key."""
    return _canonical(spec if isinstance(spec, LocatedMap) else LocatedMap(spec), place, None, refuse=True)


def _canonical(spec: LocatedMap, place: str, like: calls.Checked | None, refuse: bool) -> calls.Call:
    """The canonical form. like: another cell, see `calls.check_cell`."""
    full = calls.check_cell(spec, place, like)
    if refuse:
        _fits_its_data(full, place)
        facts.refuse(full, full, place)
    return full


def _fits_its_data(spec: Mapping[str, Any], place: str) -> None:
    """SpecError: more images, validation images or clients than the data set has."""
    data, name = facts.of_data(spec["data"]), spec["data"]["name"]
    for key, have in (("train", data.train), ("test", data.test)):
        if not data.about and spec[key] and have and spec[key] > have:
            raise SpecError(f"{place}: {key}: {spec[key]} images wanted, {name} has {have}")
    if not data.about and data.train and spec["train_from"] + (spec["train"] or 1) > data.train:
        asked = f"{spec['train']} images wanted after" if spec["train"] else "no image is left after"
        raise SpecError(f"{place}: train_from: {asked} the first {spec['train_from']}, {name} has {data.train}")
    total = facts.training_images(spec)
    if total and spec["validation"] >= total:
        raise SpecError(f"{place}: validation: {spec['validation']} held-out images of {total} leave none for training")
    clients = spec["partition"].get("clients")
    if total and clients and clients > total - spec["validation"]:
        left = total - spec["validation"]
        raise SpecError(f"{place}: partition: {clients} clients, but only {left} training images")
    if asking := _without_index(spec):
        raise SpecError(
            f"{place}: '{asking}' asks for 'index', the places of test images, which only an attack of 'evaluate' has"
        )
    if spec["malicious"] is not None:
        _can_be_malicious(spec, f"{place}: malicious")
    if spec["diagnostic"] is not None and spec["monitor"] is None:
        raise SpecError(
            f"{place}: diagnostic: needs 'monitor': it runs with the monitor, on the images that the monitor attacks"
        )


def _without_index(call: Mapping[str, Any]) -> str:
    """The name of an attack in training or of the monitor that asks for positions of test images, which these lack."""
    nested = [value for value in call.values() if isinstance(value, calls.Call)]
    own = next((one["name"] for one in nested if one.kind == "Attack" and "index" in one.signature.asks), "")
    return own or next((found for one in nested if (found := _without_index(one))), "")


def _can_be_malicious(spec: Mapping[str, Any], place: str) -> None:
    """SpecError: no such client, no honest one, or an algorithm whose clients' updates an adversary would not reach."""
    clients, liars = spec["partition"].get("clients"), facts.malicious(spec)
    if clients and max(liars) >= clients:
        raise SpecError(f"{place}: clients: there is no client {max(liars)}: there are {clients}, counted from 0")
    if clients and len(liars) == clients:
        raise SpecError(f"{place}: clients: all {clients} clients are malicious: none is honest")
    algorithm = spec["algorithm"]
    while algorithm.wrapped is not None:
        algorithm = algorithm.wrapped
    entry = calls.entry(algorithm.signature)
    sends = "aggregator" in algorithm or (isinstance(entry, AlgorithmEntry) and entry.aggregates)
    for attack in spec["malicious"].nested.values():
        if not sends and "images" not in attack.signature.asks:
            raise SpecError(
                f"{place}: '{attack['name']}' changes what clients train or send, and {algorithm['name']} does not "
                "aggregate their models: use an adversary that changes images or labels"
            )


# --- from a suite to cells ---------------------------------------------------------------------------------------


Origin = Callable[[LocatedMap, str, int], Cell]  # what `weights` says of a cell, the preset, the seed -> that cell


def expand(
    name: str,
    contents: Contents,
    file: Path,
    preset: str,
    seeds: Sequence[int] | None = None,
    origin: Origin | None = None,
    *,
    only: Condition | None = None,
    points: Collection[tuple[tuple[str, str], ...]] | None = None,
    attacks: Sequence[str] = (),
    refuse: bool = True,
) -> Plan:
    """All grid points of a suite's preset as checked cells, in the order of the file; see `files.Suite.plan`.

    only: no points but these, of which there may be none. points: the labels of the points wanted; None: of all.
    """
    if preset not in contents.presets:
        raise SpecError(f"suite '{name}' has no preset '{preset}'{did_you_mean(preset, contents.presets)}")
    chosen = contents.presets[preset]
    base = merge(contents.base, chosen.base)
    overrides = [*contents.grid.overrides, model.Override(set=chosen.set), *chosen.overrides]
    axes = contents.axes
    lay = functools.partial(_laid_on, file=file, axes=axes)
    asked = contents.evaluate if not chosen.evaluate else lay(contents.evaluate, chosen.evaluate)
    if attacks:
        standard_attacks.known(attacks, [*contents.evaluate.attacks, *asked.attacks])
        said = standard_attacks.kept(contents.evaluate.node, attacks)
        asked = lay(model.read(Evaluate, said, str(file), axes=axes), standard_attacks.kept(chosen.evaluate, attacks))
    for label in asked.limit:
        if label not in {*asked.attacks, *asked.transfer, *attacks}:
            raise SpecError(
                f"{asked.limit.place(label)}: no attack is named '{label}'{did_you_mean(label, asked.attacks)}"
            )
    cells: list[Cell] = []
    excluded: list[tuple[Key, str]] = []
    like: calls.Checked | None = None  # the point before, as written and checked
    moved: dict[int, Evaluate] = {}  # by cell: what is asked of it, where that has a transfer
    overridden = _Overridden(base, axes)
    # by the overrides of `evaluate` that hold, and the perturbation
    asked_at: dict[tuple[tuple[int, ...], str], tuple[Evaluate, tuple[Evaluation, ...]]] = {}
    seeds = seeds if seeds is not None else chosen.seeds or contents.seeds
    kept = _restricted(axes, chosen)
    input_limits.cells(_count(contents.grid, kept) * len(seeds), f"{file}: preset '{preset}'")
    for key in _points(contents.grid, kept, axes):
        if only is not None and not _matches(key, only):
            continue
        if points is not None and tuple(key.items()) not in points:
            continue
        if reason := next((one.reason for one in contents.grid.exclude if _matches(key, one.when)), None):
            excluded.append((key, reason))
            continue
        spec = overridden.at(key)
        for override in overrides:
            if override.holds(key, spec):
                spec = merge(spec, override.set)
        place = f"{file}: {', '.join(f'{a}={v}' for a, v in key.items()) or 'base'} ({preset})"
        if "seed" in spec:
            raise SpecError(f"{spec.place('seed')}: set seeds with 'seeds' at the top of the suite, not in a cell")
        spec, allowed = perturbation.split(_without_idle(merge(spec, LocatedMap({"seed": 0}))))
        if allowed is not None:
            spec = perturbation.of_cell(spec, allowed)
        hold = tuple(i for i, override in enumerate(asked.overrides) if _matches(key, override.when))
        if (hold, str(allowed)) not in asked_at:
            asked_at[hold, str(allowed)] = _evaluations(asked, hold, lay, attacks, allowed)
        here, evaluations = asked_at[hold, str(allowed)]
        own = confounders.written(key, axes, overrides)
        for begin, begun, of_these in _begun(spec, seeds, origin, preset):
            first = _checked(begun, place, file, like, refuse)
            like = begun, first
            if refuse and contents.threat is not None:
                threats.refuse(first, contents.threat, begun, contents.place("threat"))
            for one in evaluations if refuse else ():
                facts.refuse(calls.call("Attack", one.attack), first, f"{place}: evaluate: {one.label}")
            _can_choose(asked.checkpoints, first, place)
            if begin is not None:
                _same_network(begin, first, place)
            short = calls.without_defaults(first)
            attacked = any(path.endswith(".eps") for path, _ in confounders.leaves(first))
            attacked |= any("eps" in path for one in evaluations for path, _ in confounders.leaves(one.attack))
            of_task = str(allowed) if allowed is not None and attacked else ""
            for seed in of_these:
                if here.transfer:
                    moved[len(cells)] = here
                seeded = calls.Call(first.signature, {**first, "seed": seed})
                id = _identity({**short, "seed": seed})
                cells.append(Cell(id, key, seeded, evaluations, begin, perturbation=of_task, written=own))
    if not cells and only is None:
        raise SpecError(f"{file}: preset '{preset}' leaves the grid empty")
    if attacks and not any(cell.evaluations for cell in cells):
        raise SpecError(f"--attacks: suite '{name}', preset '{preset}', evaluates no model on test images")
    if moved:
        cells = _with_transfers(cells, moved, kept)
    return Plan(name, preset, chosen.note, cells, [*asked.checkpoints], excluded, tuple(attacks), contents.baseline)


def _without_idle(spec: LocatedMap) -> LocatedMap:
    """The settings of a cell without the malicious clients of a suite that says how many, where none attacks."""
    malicious = spec.get("malicious")
    idle = isinstance(malicious, LocatedMap) and "attack" in malicious and malicious["attack"] is None
    return merge(spec, LocatedMap({"malicious": None})) if idle else spec


def _begun(
    spec: LocatedMap, seeds: Sequence[int], origin: Origin | None, preset: str
) -> Iterator[tuple[Cell | None, LocatedMap, list[int]]]:
    """(the cell that a point begins with, its settings with that one's name, the seeds); None: it begins with none."""
    written = spec["model"].get("weights") if isinstance(spec.get("model"), LocatedMap) else None
    if not isinstance(written, LocatedMap) or origin is None:
        yield None, spec, list(seeds)
        return
    found: dict[str, tuple[Cell, list[int]]] = {}
    for seed in seeds:
        begin = origin(written, preset, seed)
        found.setdefault(begin.id, (begin, []))[1].append(seed)
    for begin, of_these in found.values():
        named = LocatedMap({"weights": f"{weights.CELL}{begin.id}"}, at=written.at)
        yield begin, merge(spec, LocatedMap({"model": named})), of_these


def _same_network(begin: Cell, spec: Mapping[str, Any], place: str) -> None:
    """SpecError: a network that the weights of a cell do not fit; heads may differ, for a new one starts at random."""
    theirs, ours = begin.spec["model"], spec["model"]
    for key in dict.fromkeys([*theirs, *ours]):
        if key in ("weights", "head") or key.startswith("head_") or theirs.get(key) == ours.get(key):
            continue
        raise SpecError(
            f"{place}: model: weights: cell {begin.id} of '{begin.suite}' ({', '.join(begin.key.values())}) trained"
            f" another network: {key} is {theirs.get(key)} there, {ours.get(key)} here"
        )
    one, other = (facts.of_data(cell["data"]).channels for cell in (begin.spec, spec))
    if one and other and one != other:
        raise SpecError(f"{place}: model: weights: cell {begin.id} has seen images of {one} channels, here are {other}")


def _checked(spec: LocatedMap, place: str, file: Path, like: calls.Checked | None, refuse: bool) -> calls.Call:
    """`_canonical`; an error that names a line of what the suite extends names the point of the grid too."""
    try:
        return _canonical(spec, place, like, refuse)
    except SpecError as error:
        if str(file) not in str(error):
            error.args = (f"{error} [{place}]",)
        raise


class _Overridden:
    """The base with the overrides of a point's labels; what a point has in common with the one before is kept."""

    def __init__(self, base: LocatedMap, axes: Mapping[str, Mapping[str, LocatedMap]]) -> None:
        self.axes = axes
        self.parts: list[tuple[str, str]] = []
        self.specs = [base]  # after none of the parts, after the first, ...

    def at(self, key: Key) -> LocatedMap:
        parts = list(key.items())
        same = 0
        while same < min(len(parts), len(self.parts)) and parts[same] == self.parts[same]:
            same += 1
        del self.specs[same + 1 :]
        for axis, label in parts[same:]:
            self.specs.append(merge(self.specs[-1], self.axes[axis][label]))
        self.parts = parts
        return self.specs[-1]


def _evaluations(
    asked: Evaluate,
    hold: Sequence[int],
    lay: Callable[[Evaluate, LocatedMap], Evaluate],
    added: Sequence[str],
    allowed: perturbation.Perturbation | None,
) -> tuple[Evaluate, tuple[Evaluation, ...]]:
    """What trained models are attacked with where these overrides hold, and that as stages."""
    here = asked
    radius = allowed.eps if allowed is not None and allowed.norm == "Linf" else None
    for i in hold:
        override = _without_removed(asked.overrides[i].set, asked.attacks)
        here = lay(here, standard_attacks.completed(override, here.attacks, added, radius))
    if added and any(attack is not None for attack in here.attacks.values()):  # else: no model is attacked here
        more = standard_attacks.lacking(here.attacks, added, radius)
        here = lay(here, LocatedMap({"attacks": LocatedMap(more)}))
    attacks = here.attacks
    if allowed is not None:
        filled = {label: perturbation.of_attack(attack, allowed) for label, attack in attacks.items()}
        attacks = LocatedMap(filled, attacks.where, attacks.at)
    return here, tuple(
        Evaluation(
            name,
            calls.check("Attack", one, attacks.place(label)),
            _images(here, label),
            here.batch,
            label if swept else "",
            swept=swept,
        )
        for label, attack in attacks.items()
        if attack is not None
        for name, one, swept in _sweep(label, attack, attacks)
    )


def _can_choose(checkpoints: Sequence[str], spec: Mapping[str, Any], place: str) -> None:
    """SpecError: a checkpoint that is chosen by numbers which the cell does not measure."""
    if "best-val" in checkpoints and not spec["validation"]:
        raise SpecError(f"{place}: checkpoint best-val needs 'validation: N' held-out images")
    if set(checkpoints) - {"last"} and spec["monitor"] is None:
        raise SpecError(f"{place}: checkpoints {', '.join(checkpoints)} need 'monitor', an attack run during training")


def _laid_on(
    under: Evaluate, override: LocatedMap, file: Path, axes: Mapping[str, Mapping[str, LocatedMap]]
) -> Evaluate:
    """`evaluate` with an override."""
    return model.read(Evaluate, merge(under.node, override), str(file), axes=axes)


def _sweep(label: str, attack: Any, attacks: LocatedMap) -> list[tuple[str, Any, str]]:
    """(metric, attack, setting) of each value of a list such as `eps: [2/255, 4/255]`: pgd20_2_255, pgd20_4_255.

    The attack itself, if none of its settings is a list.
    """
    lists = [key for key, value in attack.items() if isinstance(value, list)] if isinstance(attack, LocatedMap) else []
    if not lists:
        return [(label, attack, "")]
    swept, *others = lists
    place = attack.place(swept)
    if others:
        raise SpecError(f"{attack.place(others[0])}: '{swept}' has a list already: only one setting may have one")
    if not attack[swept]:
        raise SpecError(f"{place}: the list is empty: give one, such as eps: [2/255, 4/255, 8/255]")
    found: list[tuple[str, Any, str]] = []
    for value in attack[swept]:
        name = _of_sweep(label, str(value))
        if name in attacks or name in [other for other, _, _ in found]:
            raise SpecError(f"{place}: two metrics have the same name, '{name}'")
        one = LocatedMap({swept: value}, {swept: attack.where.get(swept, "")})
        found.append((name, merge(attack, one), swept))
    return found


def _of_sweep(label: str, mark: str) -> str:
    """The metric of one value, or one model, of several: "pgd20_2_255", "moved_fedavg"."""
    return f"{label}_{re.sub('[^0-9a-z]+', '_', mark.lower()).strip('_')}"


def _images(evaluate: Evaluate, label: str) -> int | None:
    """How many test images an attack takes; None: all that the cell has."""
    numbers = [number for number in (evaluate.n, evaluate.limit.get(label)) if number is not None]
    return min(numbers, default=None)


def _without_removed(override: LocatedMap, attacks: LocatedMap) -> LocatedMap:
    """An override of `evaluate` without the attacks that the preset has taken out (attack: null)."""
    more = override.get("attacks")
    if not isinstance(more, LocatedMap):
        return override
    kept = LocatedMap(
        {k: v for k, v in more.items() if k not in attacks or attacks[k] is not None}, more.where, more.at
    )
    return LocatedMap({**override, "attacks": kept}, override.where, override.at)


def _restricted(axes: Mapping[str, Mapping[str, LocatedMap]], preset: Preset) -> dict[str, list[str]]:
    """axis -> the labels that the preset keeps."""
    return {axis: (preset.axes or {}).get(axis, list(labels)) for axis, labels in axes.items()}


def grid_size(contents: Contents) -> int:
    """An upper bound of the number of cells of all presets, for little work."""
    return sum(
        _count(contents.grid, _restricted(contents.axes, preset)) * len(preset.seeds or contents.seeds)
        for preset in contents.presets.values()
    )


def _count(grid: GridSpec, axes: Mapping[str, Sequence[str]]) -> int:
    """An upper bound of the number of points, for little work."""
    product = axes if grid.product is None else grid.product
    points = math.prod(len(axes[axis]) for axis in product)
    return points + sum(math.prod(map(len, item.values())) for item in grid.include)


def _points(
    grid: GridSpec, axes: Mapping[str, Sequence[str]], every: Mapping[str, Mapping[str, LocatedMap]]
) -> list[Key]:
    """Grid points: the product of the named axes, and the points to include, each once.

    In the order of the axes and their labels in the file. `axes` are those of the preset, `every` those of the suite.
    """
    product = axes if grid.product is None else grid.product
    groups: list[list[Key]] = [[{axis: label} for label in axes[axis]] for axis in product]
    including = "include" in grid.node
    if axes and not groups and not including:
        raise SpecError(
            f"{grid.place('product')}: no axis is in the product and there is no include: the grid is empty"
        )
    combinations = itertools.product(*groups) if groups or not including else ()
    points = (dict(itertools.chain(*(part.items() for part in parts))) for parts in combinations)
    position = {axis: {label: i for i, label in enumerate(labels)} for axis, labels in every.items()}
    kept = {axis: set(labels) for axis, labels in axes.items()}
    found: dict[tuple[int, ...], Key] = {}
    for point in itertools.chain(points, _included(grid.include)):
        if all(label in kept[axis] for axis, label in point.items()):  # else: a label that this preset leaves out
            place = tuple(position[axis][point[axis]] if axis in point else -1 for axis in every)
            found[place] = {axis: point[axis] for axis in every if axis in point}
    return [found[place] for place in sorted(found)]


def _included(include: Sequence[Condition]) -> Iterator[Key]:
    """The points of `include`: each item maps axes to labels or lists of them, and stands for all combinations."""
    for item in include:
        for combination in itertools.product(*item.values()):
            yield dict(zip(item, combination, strict=True))


def _matches(key: Key, condition: Mapping[str, Sequence[str]]) -> bool:
    return all(key.get(axis) in labels for axis, labels in condition.items())


# --- attacks computed on other models ------------------------------------------------------------------------------
#
#     moved: {attack: pgd20, axis: method}     on the models of the cells that differ from this one in `method` alone
#     among: {attack: pgd20, clients: 5}       on five clients of the round, before averaging, and judged on all five
#
# One evaluation for every model that the attack comes from. Both models must take the same images.

At = Mapping[tuple[frozenset[tuple[str, str]], int], Cell]  # (labels of a point, seed) -> its cell


def _with_transfers(
    cells: Sequence[Cell], asked: Mapping[int, Evaluate], axes: Mapping[str, Sequence[str]]
) -> list[Cell]:
    """The cells, each with the evaluations of the transfers that are asked of it, by its place in the list.

    axes: axis -> the labels that the preset keeps. SpecError: no such attack, an attack with a list of radii, models
    that take other images, too few clients, a metric of that name.
    """
    at = {(frozenset(cell.key.items()), int(cell.spec["seed"])): cell for cell in cells}
    return [
        replace(cell, evaluations=(*cell.evaluations, *_of_cell(cell, asked[place], at, axes)))
        if place in asked
        else cell
        for place, cell in enumerate(cells)
    ]


def _of_cell(cell: Cell, asked: Evaluate, at: At, axes: Mapping[str, Sequence[str]]) -> Iterator[Evaluation]:
    taken = {evaluation.label for evaluation in cell.evaluations}
    for label, transfer in asked.transfer.items():
        if transfer is None or (white := _white(label, transfer, asked, cell)) is None:
            continue  # the preset has taken it, or its attack, out
        n = _images(asked, label) if label in asked.limit else white.n
        for origin in _origins(cell, transfer, at, axes):
            name = _of_sweep(label, origin.name)
            if name in taken:
                raise SpecError(f"{transfer.node.at}: two metrics have the same name, '{name}'")
            taken.add(name)
            yield Evaluation(name, white.attack, n, white.batch, label, origin)


def _white(label: str, transfer: Transfer, asked: Evaluate, cell: Cell) -> Evaluation | None:
    """The attack on the model itself; None: the preset leaves it out."""
    place, name = transfer.place("attack"), transfer.attack
    if label in asked.attacks:
        raise SpecError(f"{transfer.node.at}: '{label}' is also an attack: rename the transfer")
    if name not in asked.attacks:
        raise SpecError(f"{place}: no attack is named '{name}'{did_you_mean(name, asked.attacks)}")
    if any(one.sweep == name for one in cell.evaluations):
        raise SpecError(f"{place}: '{name}' has a list of radii: a transfer needs an attack with one radius")
    return next((one for one in cell.evaluations if one.label == name), None)


def _origins(cell: Cell, transfer: Transfer, at: At, axes: Mapping[str, Sequence[str]]) -> Iterator[TransferOrigin]:
    if transfer.axis is None:
        yield from _clients(cell, transfer)
        return
    if transfer.axis not in cell.key:
        return
    for label in axes[transfer.axis]:
        if transfer.labels is not None and label not in transfer.labels:
            continue
        other = at.get((frozenset({**cell.key, transfer.axis: label}.items()), int(cell.spec["seed"])))
        if other is None:
            continue  # no such point in the grid
        for key in ("data", "size"):
            if other.spec[key] != cell.spec[key]:
                one, two = (_said(c.spec[key]) for c in (other, cell))
                raise SpecError(
                    f"{transfer.place('axis')}: both models must be attacked on the same images:"
                    f" {label} has {key} {one}, {cell.key[transfer.axis]} has {two}"
                )
        yield TransferOrigin(label, other.id, other.spec)


def _clients(cell: Cell, transfer: Transfer) -> Iterator[TransferOrigin]:
    if not cell.spec["algorithm"].get("local"):
        raise SpecError(
            f"{transfer.place('clients')}: {cell.spec['algorithm']['name']} does not train models on clients"
        )
    known = cell.spec["partition"].get("clients") is not None
    if known and (cohort := facts.cohort(cell.spec)) < transfer.clients:
        raise SpecError(f"{transfer.place('clients')}: {transfer.clients} clients, but {cohort} take part in a round")
    yield from (TransferOrigin(f"client {k}", client=k, clients=transfer.clients) for k in range(transfer.clients))


def _said(value: Any) -> str:
    return str(value["name"] if isinstance(value, Mapping) else value or "as stored")
