"""Cells: every point of a suite's grid as one fully specified experiment, checked, with an identity.

Nothing here imports torch: every name, key and value is checked against the source of the function it will reach,
before a GPU second is spent.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fatbench.errors import SpecError
from fatbench.settings import PRECISIONS
from fatbench.suite import calls, facts
from fatbench.suite.entry import AlgorithmEntry
from fatbench.suite.located import LocatedMap
from fatbench.suite.model import Key


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
        short_attack = calls.without_defaults(calls.call("Attack", self.attack))
        identity_parts = [short_attack, self.n, self.batch, *([] if self.origin is None else [self.origin.said])]
        return f"{self.label}-{digest(identity_parts)[:8]}"

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
    return tuple(f"{evaluation}{'' if precision == 'fp32' else f'.{precision}'}@{round}" for precision in PRECISIONS)


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
    written: Mapping[str, frozenset[str]] = field(
        default_factory=dict, compare=False
    )  # see `confounders.written_paths`

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
        own_cells = {cell.id: cell for cell in self.unique()}
        origin_cells = {
            origin.id: own_cells.get(origin.id, origin) for cell in own_cells.values() for origin in cell.origins
        }
        return list({**origin_cells, **own_cells}.values())

    def unique(self) -> list[Cell]:
        """The cells of the suite: grid points that come to the same experiment are one, with the evaluations of all."""
        cells: dict[str, Cell] = {}
        for cell in self.cells:
            first_cell = cells.get(cell.id)
            if first_cell is not None and first_cell.evaluations != cell.evaluations:
                merged_evaluations = {
                    evaluation.id: evaluation for evaluation in (*first_cell.evaluations, *cell.evaluations)
                }
                cell = replace(first_cell, evaluations=tuple(merged_evaluations.values()))
            cells[cell.id] = cell if first_cell is None or cell.evaluations != first_cell.evaluations else first_cell
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
        evaluated = {key: value for key, value in spec["evaluated"].items() if not key.startswith("name")}
        return digest({**spec, "evaluated": evaluated})[:12]
    return digest(calls.without_defaults(calls.call("Experiment", spec)))[:12]


def canonical(spec: Mapping[str, Any], location: str = "cell", refuse: bool = True) -> calls.Call:
    """The canonical form of one cell, every default filled in and checked. SpecError names file, line and key.

    refuse: False where results are read: no function is asked whether it can run in the cell.
    """
    cell = calls.check_cell(spec if isinstance(spec, LocatedMap) else LocatedMap(spec), location)
    if refuse:
        _fits_its_data(cell, location)
        facts.refuse(cell, cell, location)
    return cell


def _fits_its_data(spec: calls.Call, location: str) -> None:
    """SpecError: more images, validation images or clients than the data set has."""
    data, name = facts.of_data(spec["data"]), spec["data"]["name"]
    for key, available in (("train", data.train), ("test", data.test)):
        if not data.about and spec[key] and available and spec[key] > available:
            raise SpecError(f"{location}: {key}: {spec[key]} images wanted, {name} has {available}")
    if not data.about and data.train and spec["train_from"] + (spec["train"] or 1) > data.train:
        request = f"{spec['train']} images wanted after" if spec["train"] else "no image is left after"
        raise SpecError(f"{location}: train_from: {request} the first {spec['train_from']}, {name} has {data.train}")
    total = facts.training_images(spec)
    if total and spec["validation"] >= total:
        raise SpecError(
            f"{location}: validation: {spec['validation']} held-out images of {total} leave none for training"
        )
    clients = spec["partition"].get("clients")
    if total and clients and clients > total - spec["validation"]:
        images_left = total - spec["validation"]
        raise SpecError(f"{location}: partition: {clients} clients, but only {images_left} training images")
    for call in spec.walk():
        if call.kind == "Attack" and "index" in call.signature.asks:
            raise SpecError(
                f"{location}: '{call.name}' asks for 'index', the places of test images, which only an attack of "
                "'evaluate' has"
            )
    if spec["malicious"] is not None:
        _can_be_malicious(spec, f"{location}: malicious")
    if spec["diagnostic"] is not None and spec["monitor"] is None:
        raise SpecError(
            f"{location}: diagnostic: needs 'monitor': it runs with the monitor, on the images that the monitor attacks"
        )


def _can_be_malicious(spec: Mapping[str, Any], location: str) -> None:
    """SpecError: no such client, no honest one, or an algorithm whose clients' updates an adversary would not reach."""
    clients, liars = spec["partition"].get("clients"), facts.malicious(spec)
    if clients and max(liars) >= clients:
        raise SpecError(f"{location}: clients: there is no client {max(liars)}: there are {clients}, counted from 0")
    if clients and len(liars) == clients:
        raise SpecError(f"{location}: clients: all {clients} clients are malicious: none is honest")
    algorithm = spec["algorithm"]
    while algorithm.wrapped is not None:
        algorithm = algorithm.wrapped
    entry = calls.entry(algorithm.signature)
    sends = "aggregator" in algorithm or (isinstance(entry, AlgorithmEntry) and entry.aggregates)
    for attack in spec["malicious"].nested.values():
        if not sends and "images" not in attack.signature.asks:
            raise SpecError(
                f"{location}: '{attack['name']}' changes what clients train or send, and {algorithm['name']} does not "
                "aggregate their models: use an adversary that changes images or labels"
            )
