"""Confounders: settings in which compared rows differ and which none of their labels sets.

A label of an axis is compared for what it writes: its override, and that of an exception, an override whose `when`
names fewer than half of the axis' labels. A label that names a function owns what this function has by itself, its
defaults. Everything else is shared by what is compared: a row that differs in it is no comparison of labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fatbench.suite import calls
from fatbench.suite.model import Key, Override

LOGGED = ("seed", "per_class", "diagnostic", "diagnostic_every")  # settings that change no model
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
    full = [dict(leaves(row.spec)) for row in rows]
    stated = [{path for path, _ in leaves(calls.without_defaults(calls.call("Experiment", row.spec)))} for row in rows]
    axes = [axis for axis in rows[0].key if len({row.key.get(axis) for row in rows}) > 1]
    names = [", ".join(row.key[axis] for axis in axes if axis in row.key) for row in rows]
    at = next((i for i, row in enumerate(rows) if baseline and row.key.get(baseline[0]) == baseline[1]), None)
    found = []
    for path in dict.fromkeys(path for each in full for path in each):
        if path.split(".")[0] in LOGGED or len({repr(each.get(path)) for each in full}) == 1:
            continue
        values = [repr(each[path]) for each in full if path in each]
        first = at if at is not None else next(
            i for i, each in enumerate(full) if path in each and repr(each[path]) == max(values, key=values.count)
        )  # fmt: skip
        odd: dict[str, list[int]] = {}
        for i, each in enumerate(full):
            if _differ(path, each, full[first]) and not _own(path, (rows[i], rows[first]), (stated[i], stated[first])):
                odd.setdefault(repr(each.get(path)), []).append(i)
        for differing in odd.values():
            usual = [i for i, each in enumerate(full) if repr(each.get(path)) == repr(full[first].get(path))]
            found.append(
                Confounder(
                    path,
                    full[differing[0]].get(path),
                    full[first].get(path),
                    tuple(names[i] for i in differing),
                    tuple(rows[i].id for i in differing),
                    tuple(names[i] for i in usual),
                )
            )
    return found


def _differ(path: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both have the setting and differ in it, or one has a call where the other has none."""
    if path in one and path in other:
        return repr(one[path]) != repr(other[path])
    (has, lacks) = (one, other) if path in one else (other, one)
    return path in has and has[path] is None and any(below.startswith(f"{path}.") for below in lacks)


def _own(path: str, pair: tuple[Row, Row], stated: tuple[set[str], set[str]]) -> bool:
    """Whether a label in which two rows differ writes the setting, or names a function that has it by itself."""
    paths = {
        own
        for axis in {**pair[0].key, **pair[1].key}
        if pair[0].key.get(axis) != pair[1].key.get(axis)
        for row in pair
        for own in row.written.get(axis, ())
    }
    if any(path == own or path.startswith(f"{own}.") or own.startswith(f"{path}.") for own in paths):
        return True
    if any(_of_perturbation(path, own) or path.startswith(f"{own.split('.')[0]}_") for own in paths):
        return True  # auxiliary_n is of `auxiliary`
    below = any(own.endswith(".name") and path.startswith(own.removesuffix("name")) for own in paths)
    return below and not any(path in each for each in stated)


def _of_perturbation(path: str, own: str) -> bool:
    """Whether a label that writes a perturbation writes this setting of an attack."""
    return own.startswith("perturbation.") and own.rpartition(".")[2] == path.rpartition(".")[2]
