"""Entries: what a table states about a function beyond its signature, such as refusals, costs and examples.

A table maps names to functions or to entries:

    AGGREGATORS = {
        "samples": samples,
        "sfat": AggregatorEntry(sfat, refuse=(at_most_half,)),
    }

A function of an entry stands beside the method and receives what it names: `cell`, the `fatbench.suite.facts.Facts` of
a cell before it runs, and by keyword any setting of the method, in the form that the method receives: a number, a
`LocalTraining`, an attack with its settings bound.

    def at_most_half(cell: Facts, *, top: int) -> str | None:
        if 2 * top > cell.cohort:
            return f"top: {top} is more than half of the {cell.cohort} clients of a round"
        return None

A fact that only the files of a data set hold raises `Unknown`: then no cell is refused, and a cost is unknown.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

Role = Literal["natural", "corruption", "attack"]
Threat = Literal["A", "B", "C", "D", "E", "F", "G", "H", "bound"]
INPUTS = ("variable ", "module ", "file ")  # how what `reads` declares begins
Refusal = Callable[..., "str | None"]  # (cell, *, settings) -> why the cell cannot run


class Unknown(LookupError):
    """A fact of a cell that only the files of its data set hold."""


@dataclass(frozen=True)
class Passes:
    """Passes of an image through a network; a number stands for as many of both: `ratio * passes(attack) + 1`."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, summand: Passes | float) -> Passes:
        added = summand if isinstance(summand, Passes) else Passes(summand, summand)
        return Passes(self.forward + added.forward, self.backward + added.backward)

    def __mul__(self, times: float) -> Passes:
        return Passes(self.forward * times, self.backward * times)

    __radd__, __rmul__ = __add__, __mul__

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Work:
    """The counted work of clients and server; nan where it is unknown before the run."""

    gradient_steps: float = 0.0
    forward: float = 0.0  # image passes
    backward: float = 0.0
    bytes_up: float = 0.0  # that clients send
    bytes_down: float = 0.0
    disk: float = 0.0  # bytes: the state after a round, kept models, outcomes

    @property
    def image_passes(self) -> float:
        return self.forward + self.backward

    def __add__(self, summand: Work) -> Work:
        return Work(*map(operator.add, vars(self).values(), vars(summand).values()))

    def __mul__(self, times: float) -> Work:
        return Work(*(times * value for value in vars(self).values()))

    __rmul__ = __mul__


@dataclass(frozen=True, eq=False)
class Entry:
    """A function of a table with statements about it; calling the entry calls the function.

    cites: keys of the papers in `suites/references.bib` that it follows.
    example: settings, as in a suite, with which tests call it. fractions: its metrics that are printed as per cent.
    passes: (*, settings) -> the passes of an image that is trained on (objective) or attacked (attack); without it,
    those of the functions among its settings. Of a diagnostic: (cell, *, settings) -> those of a round; without, none.
    reads: inputs that nobody sees it read: "variable NAME", "module NAME", "file PATH"; a change of one of them is
    another version.
    """

    function: Callable[..., Any]
    _: KW_ONLY
    refuse: tuple[Refusal, ...] = ()
    cites: tuple[str, ...] = ()
    example: Mapping[str, Any] = field(default_factory=dict)
    fractions: tuple[str, ...] = ()
    passes: Passes | Callable[..., Passes] | None = None
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for read in self.reads if not isinstance(self, InversionEntry) else ():
            if not read.startswith(INPUTS):
                raise ValueError(
                    f"reads: expected texts as {', '.join(f'{kind}NAME' for kind in INPUTS)}, got {read!r}"
                )
        _ENTRIES.setdefault(self.function, self)  # `entry_of` finds it by the function alone

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return self.function(*args, **settings)

    @property
    def __wrapped__(self) -> Callable[..., Any]:  # so that `inspect.signature` sees the function's
        return self.function


@dataclass(frozen=True, eq=False)
class AggregatorEntry(Entry):
    """bears: (cell, *, settings) -> the most malicious clients in a round; a cell with more is refused.

    None stands for any number. by_client: it treats clients by their numbers.
    """

    bears: Callable[..., int | None] | None = None
    by_client: bool = False


@dataclass(frozen=True, eq=False)
class PreAggregatorEntry(Entry):
    """makes: (uploads, *, settings) -> how many it makes of so many uploads; None: as many."""

    makes: Callable[..., int] | None = None


@dataclass(frozen=True, eq=False)
class AttackEntry(Entry):
    """role: "natural" leaves images as they are, a "corruption" changes them without using a model.

    float32: values of --precision under which it still computes in float32. packages: any one of these runs the
    attack; its version is stored with every number.
    """

    role: Role = "attack"
    float32: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ProximalEntry(Entry):
    """rate: (*, settings) -> the factor of a pull proportional to the distance; None for any other pull."""

    rate: Callable[..., float] | None = None


@dataclass(frozen=True, eq=False)
class PartitionEntry(Entry):
    """each: (images, *, settings) -> the examples of a client, if all clients have equally many."""

    each: Callable[..., int] | None = None


@dataclass(frozen=True, eq=False)
class ModelEntry(Entry):
    """parameters: (shape, classes, *, settings) -> the number of trained weights. parts: names of its parts.

    edge, of a model split between an edge and a server: (shape, classes, *, settings) -> (weights at the edge, numbers
    sent per image).
    """

    parameters: Callable[..., float] | None = None
    edge: Callable[..., tuple[int, int]] | None = None
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Images:
    """The size of a data set as known before it is read; None where only its files tell.

    about: `train` and `test` are approximate.
    """

    train: int | None = None
    test: int | None = None
    classes: int | None = None
    side: int | None = None  # pixels
    channels: int | None = None
    about: bool = False


@dataclass(frozen=True, eq=False)
class DataEntry(Entry):
    """images: its size, or (*, settings) -> its size. parts: "writers", if it tells who wrote which example."""

    images: Images | Callable[..., Images] = Images()
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class PrivacyEntry(Entry):
    """threat: a letter of `fatbench.suite.threats`, or (*, settings) -> one. labels: it reads the images' labels."""

    threat: Threat | Callable[..., Threat] | None = None
    labels: bool = False


@dataclass(frozen=True, eq=False)
class InversionEntry(PrivacyEntry):
    """reads: also the endings of the names of the gradients that it uses; none for all."""

    @property
    def gradients(self) -> tuple[str, ...]:
        return tuple(read for read in self.reads if not read.startswith(INPUTS))


@dataclass(frozen=True, eq=False)
class AlgorithmEntry(PrivacyEntry):
    """work: (cell, *, settings) -> the `Work` of all rounds; without it the work is unknown.

    deploys: the networks of all clients are attacked after a round, not one network. parts: the parts of a model that
    it trains separately. aggregates: adversaries reach what its clients send. foreseeable: they may ask what its server
    would do, as it gives `train_cohort` its `context`, or a `server`. last_batch: (*, settings) -> the examples in a
    client's last batch, where clients do not train on their shards. for_unseen: {client: its own tensors} -> those of a
    client that never trains.
    """

    work: Callable[..., Work] | None = None
    aggregates: bool = True
    foreseeable: bool = False
    last_batch: Callable[..., int | None] | None = None
    deploys: bool = False
    for_unseen: Callable[..., Any] | None = None
    parts: tuple[str, ...] = ()


_ENTRIES: dict[Callable[..., Any], Entry] = {}


def in_table(value: Any) -> Entry:
    """The entry of a table's value: the value itself, or the entry of a bare function."""
    return value if isinstance(value, Entry) else _ENTRIES.get(value) or Entry(value)


def entry_of(function: Callable[..., Any]) -> Entry:
    """The entry of a function, with or without bound settings; an empty entry if it has none."""
    bare_function = function.func if isinstance(function, functools.partial) else function
    return bare_function if isinstance(bare_function, Entry) else _ENTRIES.get(bare_function) or Entry(bare_function)


def passes(method: Any, *facts: Any) -> Passes:
    """The passes of one image through a function with its settings bound. facts: as for `ask`."""
    own_passes = entry_of(method).passes
    if own_passes is not None:
        return own_passes if isinstance(own_passes, Passes) else ask(own_passes, method, *facts)
    inner = method.keywords.values() if isinstance(method, functools.partial) else ()
    return sum((passes(value) for value in inner if isinstance(value, functools.partial)), Passes())


def ask(function: Callable[..., Any], method: Any, *facts: Any) -> Any:
    """The answer of an entry's function about a method with its settings bound, or a settings class.

    facts: its positional arguments, such as the cell; it may take fewer. Unknown if the answer needs an unknown fact.
    """
    by_position, by_name = _parameters(function)
    bound: Mapping[str, Any] = method.keywords if isinstance(method, functools.partial) else {}
    if not all(name in bound for name in by_name):  # a setting at its default is not among the keywords
        if callable(method):
            bound = {name: parameter.default for name, parameter in inspect.signature(method).parameters.items()}
        else:
            bound = vars(method)
    return function(*facts[:by_position], **{name: bound[name] for name in by_name})


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[int, tuple[str, ...]]:
    """(number of facts that it takes by position, names of the settings that it takes)."""
    parameters = inspect.signature(function).parameters.values()
    by_name = tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)
    return len(parameters) - len(by_name), by_name
