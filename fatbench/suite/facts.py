"""Facts about a cell before it runs, and the refusals of its functions.

    refuse(call, cell, location)     SpecError if the entry of a call's function, or of a nested one, refuses the cell

A function of an entry receives a `Facts`. A fact that only the files of a data set hold raises `Unknown`; then nothing
is refused.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from fatbench.errors import FatbenchError, SpecError, UnknownName, did_you_mean
from fatbench.suite import calls, signatures
from fatbench.suite.calls import Call, call
from fatbench.suite.entry import (
    AggregatorEntry,
    AlgorithmEntry,
    DataEntry,
    Images,
    ModelEntry,
    PartitionEntry,
    Role,
    Unknown,
    ask,
)
from fatbench.suite.signatures import known_functions, place_of
from fatbench.suite.types import client_rounds, count_of, number, rounded_down


def of_data(spec: Mapping[str, Any]) -> Images:
    """The size of a data set, as its entry states it."""
    data = call("Data", spec)
    entry = calls.entry(data.signature)
    if not isinstance(entry, DataEntry):
        return Images()
    return entry.images if isinstance(entry.images, Images) else ask(entry.images, data.bound)


def fractions() -> frozenset[str]:
    """The metrics that are fractions, and so printed as per cent, of all functions that a cell may call."""
    kinds = ("Experiment", "Algorithm", "Aggregator", "Diagnostic")
    signatures = [signature for kind in kinds for signature in known_functions(kind).values()]
    return frozenset(metric for signature in signatures for metric in signature.entry.get("fractions", ()))


def role(attack: Mapping[str, Any]) -> str:
    """The role of an attack, from the entry of its function or of the attack that it wraps; "attack" by default.

    "natural" leaves images as they are, a "corruption" changes them without using a model. A function that this process
    does not know, such as one of another program's notebook, is an attack. SpecError for other roles.
    """
    try:
        attack_call, roles = call("Attack", attack), get_args(Role)
    except UnknownName:
        return "attack"
    declared_role = attack_call.signature.entry.get(
        "role", "attack" if attack_call.wrapped_call is None else role(attack_call.wrapped_call)
    )
    if declared_role not in roles:
        raise SpecError(
            f"{place_of(calls.function(attack_call.signature))}: role '{declared_role}': expected {', '.join(roles)}"
            f"{did_you_mean(declared_role, roles)}"
        )
    return str(declared_role)


def trained_clients(spec: Mapping[str, Any]) -> int | None:
    """The clients without those that never train; None if only the files tell."""
    clients = spec["partition"].get("clients")
    return clients and int(clients) - count_of(number(spec.get("unseen") or 0), int(clients))


def cohort(spec: Mapping[str, Any]) -> int:
    """m = max(1, floor(C K)): how many of the K training clients take part in a round."""
    clients = (trained_clients(spec) or 1) - spec["algorithm"].get("validators", 0)
    return max(1, rounded_down(float(number(spec["algorithm"].get("participation", 1.0))) * clients))


def malicious(spec: Mapping[str, Any]) -> set[int]:
    """The numbers of a cell's malicious clients; if they are drawn in each round, as many."""
    clients = (spec.get("malicious") or {}).get("clients", 0)
    return set(range(clients)) if isinstance(clients, int) else {int(k) for k in clients.split(",")}


def training_images(cell: Mapping[str, Any]) -> int | None:
    """The training images that a canonical cell takes of its data set; None if only the files tell."""
    available = of_data(cell["data"]).train
    return cell["train"] or (available - cell.get("train_from", 0) if available else None)


class Facts:
    """Facts about a canonical cell, or a part of one, before it runs; those that only files hold raise Unknown."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec = spec
        self._data = of_data(spec["data"]) if "data" in spec else Images()
        self.validation = int(spec.get("validation", 0))

    @property
    def clients(self) -> int:
        """Clients that may train."""
        return _or_unknown(trained_clients(self.spec) if "partition" in self.spec else None, "clients")

    @property
    def cohort(self) -> int:
        """Clients in a round."""
        return _or_unknown(self.clients and cohort(self.spec), "cohort")

    @property
    def present(self) -> float:
        """Clients that take part in an average round: the cohort without those that are away."""
        availability, rounds = self.spec.get("availability") or {}, self.spec["algorithm"]["rounds"]
        late = sum(min(first, rounds) for first in client_rounds(availability.get("late")).values())
        there = (1 - float(number(availability.get("drop", 0)))) * (1 - late / (rounds * self.clients))
        return self.cohort * there if availability else self.cohort

    @property
    def malicious(self) -> int:
        """Malicious clients in an average round, rounded down; if they are drawn in each, in every round."""
        malicious_clients = len(malicious(self.spec))
        if (self.spec.get("malicious") or {}).get("drawn") == "each_round":
            return min(malicious_clients, self.cohort)
        return malicious_clients * self.cohort // self.clients if malicious_clients else 0

    @property
    def images(self) -> int:
        """Training images without those held out for validation."""
        return _or_unknown(training_images(self.spec) if "data" in self.spec else None, "images") - self.validation

    @property
    def client_images(self) -> float:
        """Training images of an average client, without those that it holds out."""
        dealt = _or_unknown(self.spec.get("partition", {}).get("clients"), "clients")
        return self.images / dealt * (1 - float(number(self.spec["client_holdout"])))

    @property
    def last_batch(self) -> int:
        """Examples in a client's last batch of an epoch, if all clients have equally many."""
        entry = calls.entry(self.algorithm.signature)
        if isinstance(entry, AlgorithmEntry) and entry.last_batch is not None:
            return _or_unknown(ask(entry.last_batch, self.algorithm.bound), "last_batch")
        is_known = self.spec["train"] or not self._data.about
        return _or_unknown(last_batch(self.spec, self.images) if is_known else None, "last_batch")

    @property
    def classes(self) -> int:
        return _or_unknown(self._data.classes, "classes")

    @property
    def side(self) -> int:
        """Width and height of an image in pixels."""
        return _or_unknown(self.spec.get("size") or self._data.side, "side")

    @property
    def channels(self) -> int:
        return _or_unknown(self._data.channels, "channels")

    @property
    def data(self) -> Call:
        return call("Data", _or_unknown(self.spec.get("data"), "data"))

    @property
    def algorithm(self) -> Call:
        return call("Algorithm", _or_unknown(self.spec.get("algorithm"), "algorithm"))

    @property
    def model(self) -> Call:
        return call("Model", _or_unknown(self.spec.get("model"), "model"))

    @property
    def batch_norm(self) -> bool:
        """Whether the model is known to have batch normalisation: its entry says so, or its head has it."""
        batches = "batch normalisation" in self.model.parts and self.model.get("norm") != "group"
        return batches or self.model.get("head") == "cls_vis"

    @property
    def dropout(self) -> bool:
        """Whether the model is known to drop out: its entry says so, or its head does."""
        is_wide = self.model.get("head") == "cls_vis" and (self.model.get("dim") or 0) > 256
        return "dropout" in self.model.parts or is_wide

    @property
    def auxiliary(self) -> Call | None:
        """The data set of the server's unlabelled images."""
        return None if self.spec.get("auxiliary") is None else call("Data", self.spec["auxiliary"])

    @property
    def auxiliary_images(self) -> int:
        available = None if self.auxiliary is None else of_data(self.auxiliary).train
        return _or_unknown(self.spec.get("auxiliary_n") or available, "auxiliary_images")

    @property
    def parameters(self) -> float:
        """The number of the model's weights; nan if its entry does not state it."""
        return self._parameters(self.classes)

    @property
    def head(self) -> float:
        """Those of them that emit logits: they grow with the number of classes (of an edge's own classifier, too)."""
        return self.classes * (self._parameters(self.classes + 1) - self._parameters(self.classes))

    def _parameters(self, classes: int) -> float:
        entry = calls.entry(self.model.signature)
        if not isinstance(entry, ModelEntry) or entry.parameters is None:
            return math.nan
        return float(ask(entry.parameters, self.model.bound, (self.channels, self.side, self.side), classes))

    @property
    def edge(self) -> tuple[int, int]:
        """(weights at a client, numbers sent per image) of a model split between edge and server."""
        entry = calls.entry(self.model.signature)
        if not isinstance(entry, ModelEntry) or entry.edge is None:
            raise Unknown("edge")
        shape = self.channels, self.side, self.side
        edge: tuple[int, int] = ask(entry.edge, self.model.bound, shape, self.classes)
        return edge

    @property
    def size(self) -> float:
        """Bytes of the model's weights; nan if its entry, or that of the data set, does not state them."""
        try:
            return 4 * self.parameters
        except Unknown:  # nan, so that steps and passes stay known
            return math.nan


T = TypeVar("T")


def _or_unknown(value: T | None, name: str) -> T:
    if value is None:
        raise Unknown(name)
    return value


def last_batch(cell: Mapping[str, Any], images: int) -> int | None:
    """Examples in a client's last batch of an epoch, if the partition gives all clients equally many of the images.

    The entry of the partition states this. None if it does not, or if clients do not train with `local`.
    """
    batch = (cell.get("algorithm", {}).get("local") or {}).get("batch")
    partition = call("Partition", cell["partition"])
    entry = calls.entry(partition.signature)
    if not batch or not isinstance(entry, PartitionEntry) or entry.each is None:
        return None
    client_images = ask(entry.each, partition.bound, images)
    if not client_images:
        return None
    training_left = int(client_images) - rounded_down(float(number(cell["client_holdout"])) * int(client_images))
    return (training_left - 1) % int(batch) + 1


@dataclass(frozen=True)
class Refusal:
    """The reason why a function cannot run in a cell."""

    place: str  # of the call: "algorithm: aggregator"
    kind: str
    name: str
    condition: str  # the name of the entry's function that refuses
    reason: str


def refuse(call: Call, cell: Mapping[str, Any], location: str) -> None:
    """SpecError if the function of this call, or of a nested one, refuses the cell."""
    for refusal in refusals(call, Facts(cell), location):
        raise SpecError(f"{refusal.place}: {refusal.reason}")


def refusals(call: Call, cell: Facts, location: str) -> Iterator[Refusal]:
    """The refusals of the cell by this call and those nested in it."""
    if call.kind != "Experiment":
        for condition, reason in reasons(call, cell):
            yield Refusal(location, call.kind, call.name, condition, reason)
    for name, inner in call.nested.items():
        yield from refusals(inner, cell, f"{location}: {name}" if location else name)


def reasons(call: Call, cell: Facts) -> Iterator[tuple[str, str]]:
    """(function, reason) of each refusal in the entry of a call's function; unknown facts refuse nothing."""
    entry = calls.entry(call.signature)
    for refuse in entry.refuse:
        with contextlib.suppress(Unknown):
            reason = ask(refuse, call.bound, cell)
            if reason is not None:
                yield refuse.__name__, reason
    if isinstance(entry, AggregatorEntry) and entry.bears is not None:
        with contextlib.suppress(Unknown):
            bearable = ask(entry.bears, call.bound, cell)
            if bearable is not None and cell.malicious > bearable:
                malicious_of_cohort = f"{cell.malicious} malicious clients of {cell.cohort}"
                yield entry.bears.__name__, f"{malicious_of_cohort}, {call.name} bears at most {bearable}"


# --- how many images a cell reads of its data sets: a reader that asks for `first` reads no more ---------------------

First = tuple[int | None, int | None]  # training and test images; None: all


def images_read(train: int | None, test: int | None, train_from: int = 0, auxiliary_n: int | None = 0) -> First:
    """(training images, test images) that a cell reads from the beginning of its data set; None for all.

    auxiliary_n: the number of images after its own, which the server uses.
    """
    return (None if not train or auxiliary_n is None else train_from + train + auxiliary_n), test


def first_images(spec: Mapping[str, Any]) -> dict[str, First]:
    """{"data": ..., "auxiliary": ...}: the counts of `images_read` for the cell's data set and the server's."""
    n, is_same_set = spec.get("auxiliary_n"), spec.get("auxiliary") == spec.get("data")
    train = 1 if "evaluated" in spec else spec.get("train")  # an external model is only attacked
    own_images = images_read(train, spec.get("test"), spec.get("train_from") or 0, n if is_same_set else 0)
    return {"data": own_images, "auxiliary": own_images if is_same_set else (n, 1)}


def data_key(data: Any, image_counts: First) -> str:
    """The key under which the database remembers the content of a data set when it was last read.

    image_counts: the images that were read; part of the key only if the reader stops after them, for then the digest
    depends on them.
    """
    is_partial = False
    with contextlib.suppress(FatbenchError):  # the reader is of a plug-in that is not loaded
        is_partial = "first" in signatures.describe("Data", data["name"]).asks and image_counts != (None, None)
    return json.dumps([data, image_counts] if is_partial else data, sort_keys=True, separators=(",", ":"))


def data_keys(spec: Mapping[str, Any]) -> dict[str, str]:
    """{"data": key, "auxiliary": key} of the data sets that a cell reads, see `data_key`."""
    counts_by_setting = first_images(spec)
    return {
        name: data_key(spec[name], counts_by_setting[name]) for name in counts_by_setting if spec.get(name) is not None
    }
