"""Cells: every point of a suite's grid as one fully specified experiment, checked, with an identity.

Nothing here imports torch. Every name, key and value is checked against the signature of the function that will
receive it, before any GPU time is spent.
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
from fatbench.suite.model import Key
from fatbench.suite.types import client_rounds, count_of, number


@dataclass(frozen=True)
class TransferOrigin:
    """The model on which a transferred attack is computed: the last one of another cell, or that of a client."""

    name: str  # "FedAvg", "client 0"; part of the metric's name
    cell: str = ""  # id; empty: a client's model of the attacked cell itself, before averaging
    spec: dict[str, Any] = field(default_factory=dict)  # of that cell
    client: int = 0  # which of `clients`, counted from 0 in the order of their numbers
    clients: int = 0

    @property
    def display_name(self) -> str:
        """The name in tables, where clients are counted from 1."""
        return self.name if self.cell else f"client {self.client + 1}"

    @property
    def stored_text(self) -> str:
        """The text under `origin` in the stored settings of a stage."""
        return f"cell {self.cell}" if self.cell else f"client {self.client} of {self.clients}"


@dataclass(frozen=True)
class Evaluation:
    """One attack of a suite's `evaluate`; a stage's name is its `id`, the precision and the round."""

    label: str  # the metric's name: "pgd20"
    attack: dict[str, Any]
    n: int | None  # the first n test images; None: all of the cell
    batch: int
    sweep: str = ""  # "pgd20" of "pgd20_2_255": one value of a setting with a list; not part of the identity
    origin: TransferOrigin | None = None  # None: the attack is computed on the model under attack
    swept: str = ""  # the setting with the list: "eps"
    added: bool = False  # written out in `--attack`, and in no suite; not part of the identity
    on: str = ""  # the clients' own images, see `Evaluate.on_clients`; empty: the test images

    @functools.cached_property
    def id(self) -> str:
        short_attack = calls.without_defaults(calls.call("Attack", self.attack))
        origin = [] if self.origin is None else [self.origin.stored_text]
        identity_parts = [short_attack, self.n, self.batch, *origin, *([f"on {self.on}"] if self.on else [])]
        return f"{self.label}-{digest(identity_parts)[:8]}"

    @property
    def sweep_value(self) -> str:
        """The swept setting's value as the suite writes it, or the name of the attack's origin."""
        return str(self.attack[self.swept]) if self.origin is None else self.origin.display_name

    def stage(self, round: int, precision: str = "fp32") -> str:
        """The stage of a round's model attacked in this precision: "pgd20-0a1b2c3d.bf16@50"."""
        return self.stages(round)[PRECISIONS.index(precision)]

    def stages(self, round: int) -> tuple[str, ...]:
        """The stages that may hold them: one for each precision, float32 first."""
        return _stages(self.id, round)

    def computes_in(self, precision: str) -> str:
        """The precision of the attack in a run with `--precision`: float32 where its entry demands that."""
        entry = calls.call("Attack", self.attack).signature.entry
        return "fp32" if precision in entry.get("float32", ()) else precision


@functools.lru_cache(1024)  # a report asks for the same few names in every one of its cells
def _stages(evaluation: str, round: int) -> tuple[str, ...]:
    return tuple(f"{evaluation}{'' if precision == 'fp32' else f'.{precision}'}@{round}" for precision in PRECISIONS)


@dataclass(frozen=True)
class Cell:
    """One fully specified experiment. `id` is the hash of its canonical spec less defaults."""

    id: str
    key: Key  # axis -> label, in the order of the suite
    spec: dict[str, Any]
    evaluations: tuple[Evaluation, ...]  # the attacks on the trained model; not part of the identity
    origin: Cell | None = None  # the cell whose last model this one starts from
    suite: str = ""  # of an origin alone: its suite
    preset: str = ""  # and the preset in which that has it
    perturbation: str = field(default="", compare=False)  # what attacks may do, in words: "Linf 25/255"
    # see `confounders.written_paths`
    written: Mapping[str, frozenset[str]] = field(default_factory=dict, compare=False)

    @property
    def origins(self) -> list[Cell]:
        """The cells that must be trained before this one, in that order."""
        return [] if self.origin is None else [*self.origin.origins, self.origin]


@dataclass(frozen=True)
class Plan:
    """The cells and evaluations of one preset of a suite."""

    suite: str
    preset: str
    note: str
    cells: list[Cell]
    checkpoints: list[str]
    excluded: list[tuple[Key, str]] = field(default_factory=list)
    added: tuple[str, ...] = ()  # metrics that `--attack` adds to those of the preset
    baseline: tuple[str, str] | None = None  # (axis, label)
    where: str = field(default="", compare=False)  # the filter (-k) that selected these cells
    tuned: str = field(default="", compare=False)  # what each row tried and chose
    untuned: str = field(default="", compare=False)  # the command that tunes its rows, until it has run
    resolved: bool = field(default=False, compare=False)  # True: the cells' ids are those of the runs to read

    @property
    def ending(self) -> str:
        """What the names of its files end in: "-quick"; nothing for the preset `paper`."""
        return "" if self.preset == "paper" else f"-{self.preset}"

    def to_run(self) -> list[Cell]:
        """The cells to run, each once; first the origins, of any suite, from whose models others start."""
        own_cells = {cell.id: cell for cell in self.unique()}
        origin_cells = {
            origin.id: own_cells.get(origin.id, origin) for cell in own_cells.values() for origin in cell.origins
        }
        return list({**origin_cells, **own_cells}.values())

    def unique(self) -> list[Cell]:
        """The cells, each once: grid points of one experiment are merged into one, with the evaluations of all."""
        cells: dict[str, Cell] = {}
        for cell in self.cells:
            first_cell = cells.get(cell.id)  # of an earlier point of the same experiment
            if first_cell is not None and first_cell.evaluations != cell.evaluations:
                merged = {one.id: one for one in (*first_cell.evaluations, *cell.evaluations)}
                cell = replace(first_cell, evaluations=tuple(merged.values()))
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
    """The identity of a canonical cell: 12 hex digits of the hash of its JSON, without settings at their default.

    The file name of an external model (`fatbench.suite.external_models`) does not count.
    """
    if "evaluated" in spec:
        # "name" and "named" are for people: the same weights under another file name are the same cell
        evaluated = {key: value for key, value in spec["evaluated"].items() if not key.startswith("name")}
        return digest({**spec, "evaluated": evaluated})[:12]
    return digest(calls.without_defaults(calls.call("Experiment", spec)))[:12]


def canonical(spec: Mapping[str, Any], location: str = "cell", refuse: bool = True) -> calls.Call:
    """The canonical form of one cell: checked, every default filled in. A SpecError names file, line and key.

    refuse: False to read results: then no method is imported to ask whether it can run in the cell.
    """
    cell = calls.check("Experiment", spec, location)
    if refuse:
        demand_possible(cell, location)
    return cell


def demand_possible(cell: calls.Call, location: str) -> None:
    """SpecError if a cell wants more than its data set has, or a function refuses it."""
    _check_against_data(cell, location)
    facts.refuse(cell, cell, location)


def _check_against_data(spec: calls.Call, location: str) -> None:
    """SpecError if a cell wants more images, held-out images or clients than the data set has."""
    data, name = facts.of_data(spec["data"]), spec["data"]["name"]
    for key, available in (("train", data.train), ("test", data.test)):
        if not data.about and spec[key] and available and spec[key] > available:
            raise SpecError(f"{location}: {key}: {spec[key]} images wanted, {name} has {available}")
    if not data.about and data.train and spec["train_from"] + (spec["train"] or 1) > data.train:
        request = f"{spec['train']} images wanted after" if spec["train"] else "no image is left after"
        raise SpecError(f"{location}: train_from: {request} the first {spec['train_from']}, {name} has {data.train}")
    # None: only the files of the data set tell; the partition then refuses when they are read
    total = facts.training_images(spec)
    if total and spec["validation"] >= total:
        raise SpecError(
            f"{location}: validation: holding out {spec['validation']} of {total} images leaves none for training"
        )
    clients = spec["partition"].get("clients")
    if total and clients and clients > total - spec["validation"]:
        images_left = total - spec["validation"]
        raise SpecError(f"{location}: partition: {clients} clients, but only {images_left} training images")
    if spec["unseen"]:
        _refuse_unseen(spec, f"{location}: unseen")
    for call in spec.walk():
        if call.kind == "Attack" and "index" in call.signature.asks:
            raise SpecError(
                f"{location}: '{call.name}' asks for 'index', the positions of test images: only attacks under "
                "'evaluate' have these"
            )
    if spec["malicious"] is not None:
        _refuse_malicious(spec, f"{location}: malicious")
    if spec["availability"] is not None:
        _refuse_availability(spec, f"{location}: availability")
    if spec["diagnostic"] is not None and spec["monitor"] is None:
        raise SpecError(
            f"{location}: diagnostic: needs 'monitor', because it looks at the images that the monitor attacks"
        )


def _refuse_availability(spec: Mapping[str, Any], location: str) -> None:
    """SpecError if a client that comes late does not exist, or the algorithm needs all clients in every round."""
    clients, late = facts.trained_clients(spec), client_rounds(spec["availability"]["late"])
    if clients and late and max(late) >= clients:
        train = "clients that train" if spec["unseen"] else "clients"
        raise SpecError(f"{location}: late: no client {max(late)}: the {clients} {train} count from 0")
    algorithm = spec["algorithm"]
    while algorithm.wrapped_call is not None:
        algorithm = algorithm.wrapped_call
    if "participation" not in algorithm:
        raise SpecError(f"{location}: {algorithm['name']} needs all clients in every round: no setting 'participation'")


def _refuse_unseen(spec: Mapping[str, Any], location: str) -> None:
    """SpecError if no client is unseen, none is left to train, or nobody says which model an unseen client has."""
    clients = spec["partition"].get("clients")
    if clients and not 0 < count_of(number(spec["unseen"]), clients) < clients:
        raise SpecError(
            f"{location}: {number(spec['unseen']):g} of {clients} clients: at least one must be unseen, and one train"
        )
    algorithm = spec["algorithm"]
    entry = calls.entry(algorithm.signature)
    if getattr(entry, "deploys", False) and getattr(entry, "for_unseen", None) is None:
        raise SpecError(
            f"{location}: {algorithm['name']} keeps a model for each client, and its entry does not say which one a "
            "client has that never trained (`for_unseen`)"
        )


def demand_own_images(spec: Mapping[str, Any], evaluation: Evaluation, location: str) -> None:
    """SpecError if an attack is to be run on the clients' own images and they have none."""
    if evaluation.on.startswith("held_out") and not float(number(spec["client_holdout"])):
        raise SpecError(f"{location}: on: clients needs images that clients hold out: set client_holdout, such as 0.3")
    data = calls.call("Data", spec["data"])
    if evaluation.on.startswith("writers") and "writers" not in data.parts:
        raise SpecError(f"{location}: images: writers: nobody knows who wrote the images of {data.name}")


def _refuse_malicious(spec: Mapping[str, Any], location: str) -> None:
    """SpecError if a client does not exist, none is honest, or the adversary would not reach what is aggregated."""
    clients, malicious_clients = facts.trained_clients(spec), facts.malicious(spec)
    if clients and max(malicious_clients) >= clients:
        raise SpecError(f"{location}: clients: no client {max(malicious_clients)}: the {clients} clients count from 0")
    if clients and len(malicious_clients) == clients:
        raise SpecError(f"{location}: clients: all {clients} clients are malicious: none is honest")
    drawn = spec["malicious"]["drawn"] == "each_round"
    if drawn and not isinstance(spec["malicious"]["clients"], int):
        raise SpecError(f"{location}: drawn: each_round: 'clients' is their number, not a list of clients")
    if drawn and len(malicious_clients) >= (cohort := facts.cohort(spec)):
        raise SpecError(f"{location}: clients: all {cohort} clients of a round are malicious: none is honest")
    algorithm = spec["algorithm"]
    while algorithm.wrapped_call is not None:
        algorithm = algorithm.wrapped_call
    entry = calls.entry(algorithm.signature)
    # an aggregator reads the updates of clients, so an adversary that changes them has an effect
    sends_updates = "aggregator" in algorithm or (isinstance(entry, AlgorithmEntry) and entry.aggregates)
    for attack in spec["malicious"].nested.values():
        if drawn and "images" in attack.signature.asks:
            raise SpecError(f"{location}: drawn: each_round: '{attack['name']}' changes data, which are dealt once")
        if "aggregate" in attack.signature.asks and not getattr(entry, "foreseeable", False):
            raise SpecError(
                f"{location}: '{attack['name']}' asks what the server would do ('aggregate'), and {algorithm['name']} "
                "does not say so (`foreseeable` of its entry)"
            )
        poisons_features = "features" in attack.signature.asks
        if poisons_features and "edge" not in algorithm.parts:
            raise SpecError(f"{location}: '{attack['name']}' changes features, and {algorithm['name']} sends none")
        if not sends_updates and not poisons_features and "images" not in attack.signature.asks:
            raise SpecError(
                f"{location}: '{attack['name']}' changes how clients train or what they send, but {algorithm['name']} "
                "aggregates no models: use an adversary that changes images or labels"
            )
