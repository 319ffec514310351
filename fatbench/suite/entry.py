"""What a table says of a function beside the function itself: which cells it refuses, what it costs, how it is tried.

A table maps names to functions, or to entries that say more than the signature:

    AGGREGATORS = {
        "samples": samples,
        "sfat": AggregatorEntry(sfat, refuse=(at_most_half,)),
    }

A function of an entry stands beside the method and is given what it names: `cell`, the `fatbench.suite.facts.Facts` of
a cell before it runs, and by keyword any setting of the method, as the method itself is given it: a number, a
`LocalTraining`, an attack with its settings bound.

    def at_most_half(cell: Facts, *, top: int) -> str | None:
        if 2 * top > cell.cohort:
            return f"top: {top} is more than half of the {cell.cohort} clients of a round"
        return None

What only the files of a data set know raises `Unknown` when it is asked for: then no cell is refused, and a cost is
unknown.
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
Refusal = Callable[..., "str | None"]  # (cell, *, settings) -> why the cell cannot run


class Unknown(LookupError):
    """A fact of a cell that only the files of its data set know."""


@dataclass(frozen=True)
class Passes:
    """Passes of an image through a network; `ratio * passes(attack) + 1` is one more of both than that part."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, addend: Passes | float) -> Passes:
        added = addend if isinstance(addend, Passes) else Passes(addend, addend)
        return Passes(self.forward + added.forward, self.backward + added.backward)

    def __mul__(self, times: float) -> Passes:
        return Passes(self.forward * times, self.backward * times)

    __radd__, __rmul__ = __add__, __mul__

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Work:
    """Counted work, of clients and server; nan: it cannot be said before it runs."""

    gradient_steps: float = 0.0
    forward: float = 0.0  # image passes
    backward: float = 0.0
    bytes_up: float = 0.0  # that clients send
    bytes_down: float = 0.0
    disk: float = 0.0  # bytes: the state after a round, kept models, outcomes

    @property
    def image_passes(self) -> float:
        return self.forward + self.backward

    def __add__(self, addend: Work) -> Work:
        return Work(*map(operator.add, vars(self).values(), vars(addend).values()))

    def __mul__(self, times: float) -> Work:
        return Work(*(times * value for value in vars(self).values()))

    __rmul__ = __mul__


@dataclass(frozen=True, eq=False)
class Entry:
    """A function of a table. Called, it is that function.

    example: settings, as in a suite, by which tests call it. fractions: its metrics that are printed as per cent.
    passes: (*, settings) -> what an image takes that is trained on (objective) or attacked (attack); without it, what
    the functions among its settings take.
    """

    function: Callable[..., Any]
    _: KW_ONLY
    refuse: tuple[Refusal, ...] = ()
    example: Mapping[str, Any] = field(default_factory=dict)
    fractions: tuple[str, ...] = ()
    passes: Passes | Callable[..., Passes] | None = None

    def __post_init__(self) -> None:
        _ENTRIES.setdefault(self.function, self)

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return self.function(*args, **settings)

    @property
    def __wrapped__(self) -> Callable[..., Any]:  # so that `inspect.signature` sees the function's
        return self.function


@dataclass(frozen=True, eq=False)
class AggregatorEntry(Entry):
    """bears: (cell, *, settings) -> malicious clients of a round that it is made for; a cell with more is refused."""

    bears: Callable[..., int] | None = None


@dataclass(frozen=True, eq=False)
class AttackEntry(Entry):
    """role: natural leaves images as they are, a corruption changes them without looking at a model.

    float32: values of --precision under which it computes in float32 all the same. packages: whose code runs, any of
    which will do; its version is stored with every number.
    """

    role: Role = "attack"
    float32: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ProximalEntry(Entry):
    """rate: (*, settings) -> the factor of a pull that is proportional to the distance; None: it is not."""

    rate: Callable[..., float] | None = None


@dataclass(frozen=True, eq=False)
class PartitionEntry(Entry):
    """each: (images, *, settings) -> examples of every client, where all have as many."""

    each: Callable[..., int] | None = None


@dataclass(frozen=True, eq=False)
class ModelEntry(Entry):
    """parameters: (shape, classes, *, settings) -> how many train. parts: what it is made of, for what needs that.

    edge: of an edge and a server (shape, classes, *, settings) -> (weights at the edge, numbers that it sends of an
    image).
    """

    parameters: Callable[..., float] | None = None
    edge: Callable[..., tuple[int, int]] | None = None
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Images:
    """What is known of a data set before it is read; None: only the files know.

    about: `train` and `test` are about right.
    """

    train: int | None = None
    test: int | None = None
    classes: int | None = None
    side: int | None = None  # pixels
    channels: int | None = None
    about: bool = False


@dataclass(frozen=True, eq=False)
class DataEntry(Entry):
    """images: what is known of it, or (*, settings) -> that. parts: "writers", if it says who wrote which example."""

    images: Images | Callable[..., Images] = Images()
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class PrivacyEntry(Entry):
    """threat: what an attacker must know or do, see `fatbench.suite.threats`, or (*, settings) -> that.

    labels: whether it reads the labels of the images.
    """

    threat: Threat | Callable[..., Threat] | None = None
    labels: bool = False


@dataclass(frozen=True, eq=False)
class InversionEntry(PrivacyEntry):
    """reads: the ends of the names of the gradients that it looks at; empty: all."""

    reads: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class AlgorithmEntry(PrivacyEntry):
    """work: (cell, *, settings) -> the `Work` of all its rounds; without it that is unknown.

    deploys: whether the networks of all clients are attacked after a round, not one. parts: of a model, that it trains
    apart. aggregates: whether an adversary reaches what its clients send.
    """

    work: Callable[..., Work] | None = None
    aggregates: bool = True
    deploys: bool = False
    parts: tuple[str, ...] = ()


_ENTRIES: dict[Callable[..., Any], Entry] = {}


def in_table(value: Any) -> Entry:
    """The entry of what a table maps a name to."""
    return value if isinstance(value, Entry) else _ENTRIES.get(value) or Entry(value)


def entry_of(function: Callable[..., Any]) -> Entry:
    """The entry of a function, with settings bound to it or not; without one there is nothing to say of it."""
    bare = function.func if isinstance(function, functools.partial) else function
    return bare if isinstance(bare, Entry) else _ENTRIES.get(bare) or Entry(bare)


def passes(method: Any, *facts: Any) -> Passes:
    """What an image takes of a function with its settings bound. facts: as for `ask`."""
    own_passes = entry_of(method).passes
    if own_passes is not None:
        return own_passes if isinstance(own_passes, Passes) else ask(own_passes, method, *facts)
    inner = method.keywords.values() if isinstance(method, functools.partial) else ()
    return sum((passes(value) for value in inner if isinstance(value, functools.partial)), Passes())


def ask(function: Callable[..., Any], method: Any, *facts: Any) -> Any:
    """What a function of an entry says of a method with its settings bound, or of a settings class.

    facts: what it takes by position, such as the cell; it may do without. Unknown: it depends on what is not known.
    """
    by_position, by_name = _parameters(function)
    bound: Mapping[str, Any] = method.keywords if isinstance(method, functools.partial) else {}
    if not all(name in bound for name in by_name):
        if callable(method):
            bound = {name: parameter.default for name, parameter in inspect.signature(method).parameters.items()}
        else:
            bound = vars(method)
    return function(*facts[:by_position], **{name: bound[name] for name in by_name})


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[int, tuple[str, ...]]:
    """How many facts it takes by position, and which settings."""
    parameters = inspect.signature(function).parameters.values()
    by_name = tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)
    return len(parameters) - len(by_name), by_name
