"""Confounders: settings in which compared rows differ and which none of their labels sets.

A label of an axis is compared for what it writes: its override, and that of an exception, an override whose `when`
names fewer than half of the axis' labels. A label that names a function owns what this function has by itself, its
defaults. Everything else is shared by what is compared: a row that differs in it is no comparison of labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fatbench.suite import calls
from fatbench.suite.model import Key, Override

LOGGED = ("seed", "per_class", "diagnostic", "diagnostic_every")  # settings that change no model
EVERYTHING = frozenset({"*"})  # what a label of a table over several suites writes
RADIUS = "algorithm.local.objective.attack.eps"
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


class Row(Protocol):
    """One cell of a row of a comparison, a `cells.Cell`."""

    @property
    def id(self) -> str: ...
    @property
    def key(self) -> Key: ...
    @property
    def spec(self) -> Mapping[str, Any]: ...
    @property
    def written(self) -> Mapping[str, frozenset[str]]: ...


@dataclass(frozen=True)
class Confounder:
    """A setting of some compared rows that is another than that of the row they are compared with."""

    path: str  # "algorithm.local.lr"
    value: Any
    usual: Any  # of the baseline, else of most rows
    rows: tuple[str, ...]  # the labels of those that differ
    cells: tuple[str, ...]  # their ids
    others: tuple[str, ...]  # labels of the rows that have the usual value

    def __str__(self) -> str:
        """ "clipmean trains at 8/255, the other ten at 25/255"."""
        names = " and ".join(filter(None, (", ".join(self.rows[:-1]), self.rows[-1])))
        rest = len(self.others)
        others = self.others[0] if rest == 1 else f"the other {COUNTS[rest] if rest < len(COUNTS) else rest}"
        if self.path == RADIUS:
            return f"{names} train{'s' * (len(self.rows) == 1)} at {self.value}, {others} at {self.usual}"
        return f"{names}: {self.path} is {self.value}, of {others} {self.usual}"


def written(
    key: Key, axes: Mapping[str, Mapping[str, Any]], overrides: Iterable[Override]
) -> dict[str, frozenset[str]]:
    """Axis -> dotted paths of the settings that a point's label writes, with the exceptions made for it."""
    paths = {axis: {path for path, _ in leaves(axes[axis][label])} for axis, label in key.items()}
    for override in overrides:
        for axis, labels in override.when.items():
            if key.get(axis) in labels and 2 * len(labels) < len(axes[axis]):
                paths[axis] |= {path for path, _ in leaves(override.set)}
    return {axis: frozenset(own) for axis, own in paths.items()}


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of the settings of a mapping."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def confounders(rows: Sequence[Row], baseline: tuple[str, str] | None = None) -> list[Confounder]:
    """What rows differ in besides their labels; one cell a row, of any seed.

    baseline: (axis, label) of the row that the others are compared with; without it, or without that row, what most
    rows have is usual, of as many the first.
    """
    rows = [row for row in rows if "evaluated" not in row.spec]
    if len(rows) < 2:
        return []
    parts = [
        key
        for key in dict.fromkeys(key for row in rows for key in row.spec)
        if key not in LOGGED and any(row.spec.get(key) != rows[0].spec.get(key) for row in rows)
    ]
    full = [dict(leaves({key: row.spec[key] for key in parts if key in row.spec})) for row in rows]
    axes = [axis for axis in rows[0].key if len({row.key.get(axis) for row in rows}) > 1]
    names = [", ".join(row.key[axis] for axis in axes if axis in row.key) for row in rows]
    at = next((i for i, row in enumerate(rows) if baseline and row.key.get(baseline[0]) == baseline[1]), None)
    own = _OwnPaths(rows)
    found = []
    for path in dict.fromkeys(path for each in full for path in each):
        if len({repr(each.get(path, "")) for each in full}) == 1:
            continue
        values = [repr(_shown(path, each)) for each in full]
        first = at if at is not None else values.index(Counter(values).most_common(1)[0][0])
        odd: dict[str, list[int]] = {}
        for i, each in enumerate(full):
            if _differ(path, each, full[first]) and not _own(path, rows[i], rows[first], own[i, first]):
                odd.setdefault(values[i], []).append(i)
        for differing in odd.values():
            usual = [i for i, value in enumerate(values) if value == values[first]]
            found.append(
                Confounder(
                    path,
                    _shown(path, full[differing[0]]),
                    _shown(path, full[first]),
                    tuple(names[i] for i in differing),
                    tuple(rows[i].id for i in differing),
                    tuple(names[i] for i in usual),
                )
            )
    return found


def against(rows: Iterable[Row], baseline: tuple[str, str] | None) -> list[Confounder]:
    """`confounders` of all labels of the baseline's axis, at each combination of other labels and each seed."""
    if baseline is None:
        return []
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        others = tuple((axis, label) for axis, label in row.key.items() if axis != baseline[0])
        groups.setdefault((others, row.spec.get("seed")), {}).setdefault(row.key.get(baseline[0], ""), row)
    return [one for group in groups.values() for one in confounders([*group.values()], baseline)]


def between(baseline: Row, other: Row) -> tuple[str, ...]:
    """What two rows differ in besides their labels, in words; empty: nothing."""
    return tuple(sentences(confounders([baseline, other])))


def apart(found: Iterable[Confounder]) -> frozenset[str]:
    """The ids of the cells that are not compared with the others."""
    return frozenset(id for one in found for id in one.cells)


def sentences(found: Iterable[Confounder]) -> list[str]:
    """What rows differ in, each setting once: a part of what another says of more rows is left out."""
    alike: dict[tuple[str, str, str], dict[str, Confounder]] = {}
    for one in found:
        alike.setdefault((one.path, str(one.value), str(one.usual)), {})[str(one)] = one
    return [
        sentence
        for group in alike.values()
        for sentence, one in group.items()
        if not any(one is not other and _part(one, other) for other in group.values())
    ]


def _part(one: Confounder, other: Confounder) -> bool:
    return {*one.rows} <= {*other.rows} and {*one.others} <= {*other.others}


def _shown(path: str, settings: Mapping[str, Any]) -> Any:
    """A setting as it is said: a call by its name."""
    return settings.get(path, settings.get(f"{path}.name"))


def _differ(path: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both have the setting and differ in it, or one has a call where the other has none."""
    if path in one and path in other:
        return repr(one[path]) != repr(other[path])
    (has, lacks) = (one, other) if path in one else (other, one)
    return path in has and has[path] is None and any(below.startswith(f"{path}.") for below in lacks)


class _OwnPaths(dict[tuple[int, int], frozenset[str]]):
    """(row, other row) -> what the labels write in which they differ; EVERYTHING where one is of another suite."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __missing__(self, key: tuple[int, int]) -> frozenset[str]:
        one, other = (self.rows[i] for i in key)
        axes = [axis for axis in {**one.key, **other.key} if one.key.get(axis) != other.key.get(axis)]
        if any(axis not in one.written and axis not in other.written for axis in axes):
            paths = EVERYTHING
        else:
            paths = frozenset[str]().union(*(row.written.get(axis, ()) for row in (one, other) for axis in axes))
        self[key] = paths
        return paths


def _own(path: str, one: Row, other: Row, paths: frozenset[str]) -> bool:
    """Whether a label in which two rows differ writes the setting, or names a function that has it by itself."""
    if path in paths or paths is EVERYTHING:
        return True
    if any(path.startswith(f"{own}.") or own.startswith(f"{path}.") for own in paths):
        return True
    if any(_of_perturbation(path, own) or path.startswith(f"{own.split('.')[0]}_") for own in paths):
        return True  # auxiliary_n is of `auxiliary`
    below = any(own.endswith(".name") and path.startswith(own.removesuffix("name")) for own in paths)
    return below and not any(_stated(row, path) for row in (one, other))


def _stated(row: Row, path: str) -> bool:
    """Whether a cell has the setting at another value than its default."""
    short = calls.without_defaults(calls.call("Experiment", row.spec))
    return path in dict(leaves(short))


def _of_perturbation(path: str, own: str) -> bool:
    """Whether a label that writes a perturbation writes this setting of an attack."""
    return own.startswith("perturbation.") and own.rpartition(".")[2] == path.rpartition(".")[2]
