"""Confounders: settings in which compared rows differ although none of their labels sets them.

A label of an axis owns the settings that it writes: those of its override, and of an exception, an override whose
`when` names fewer than half of the axis' labels. A label that names a function also owns the defaults of that function.
All other settings must be equal in compared rows; a row that differs in one does not compare labels alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fatbench.suite import calls
from fatbench.suite.model import Key, Override

LOGGED = ("seed", "per_class", "diagnostic", "diagnostic_every")  # settings of logging, which change no model
EVERYTHING = frozenset({"*"})  # what labels own in a table over several suites, whose files are not compared
RADIUS = "algorithm.local.objective.attack.eps"
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


class Row(Protocol):
    """The cell behind a compared row: what this module needs of a `cells.Cell`."""

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
    """A setting at which some rows differ from the row that they are compared with."""

    path: str  # "algorithm.local.lr"
    value: Any
    usual: Any  # the value of the baseline, else of most rows
    rows: tuple[str, ...]  # the labels of the rows that differ
    cells: tuple[str, ...]  # the ids of their cells
    others: tuple[str, ...]  # the labels of the rows with the usual value

    def __str__(self) -> str:
        """ "clipmean trains at 8/255, the other ten at 25/255"."""
        names = " and ".join(filter(None, (", ".join(self.rows[:-1]), self.rows[-1])))
        other_count = len(self.others)
        others_text = f"the other {COUNTS[other_count] if other_count < len(COUNTS) else other_count}"
        others_text = self.others[0] if other_count == 1 else others_text
        if self.path == RADIUS:
            return f"{names} train{'s' * (len(self.rows) == 1)} at {self.value}, {others_text} at {self.usual}"
        return f"{names}: {self.path} is {self.value}, of {others_text} {self.usual}"


def written_paths(
    key: Key, axes: Mapping[str, Mapping[str, Any]], overrides: Iterable[Override]
) -> dict[str, frozenset[str]]:
    """axis -> dotted paths of the settings that the point's label writes, those of its exceptions included."""
    paths = {axis: {*leaves(axes[axis][label])} for axis, label in key.items()}
    for override in overrides:
        for axis, labels in override.when.items():
            if key.get(axis) in labels and 2 * len(labels) < len(axes[axis]):
                paths[axis] |= leaves(override.set).keys()
    return {axis: frozenset(axis_paths) for axis, axis_paths in paths.items()}


def leaves(node: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """{"algorithm.local.lr": 0.1, ...}: the settings of a nested mapping by dotted path."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= leaves(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found


def confounders(rows: Sequence[Row], baseline: tuple[str, str] | None = None) -> list[Confounder]:
    """The confounders of rows, each given by one cell of any seed.

    baseline: (axis, label) of the row that the others are compared with. Without one, the usual value is that of most
    rows; the first of equally frequent ones.
    """
    rows = [row for row in rows if "evaluated" not in row.spec]  # external models have no settings of training
    if len(rows) < 2:
        return []
    parts = dict.fromkeys(key for row in rows for key in row.spec if key not in LOGGED)
    differing_parts = [key for key in parts if any(row.spec.get(key) != rows[0].spec.get(key) for row in rows)]
    settings_by_row = [leaves({key: row.spec[key] for key in differing_parts if key in row.spec}) for row in rows]
    axes = [axis for axis in rows[0].key if len({row.key.get(axis) for row in rows}) > 1]
    names = [", ".join(row.key[axis] for axis in axes if axis in row.key) for row in rows]
    baseline_row = next((i for i, row in enumerate(rows) if baseline and row.key.get(baseline[0]) == baseline[1]), None)
    own_paths = _OwnPaths(rows)
    confounding = []
    for path in dict.fromkeys(path for settings in settings_by_row for path in settings):
        if len({repr(settings.get(path, "")) for settings in settings_by_row}) == 1:
            continue
        values = [repr(_setting_at(path, settings)) for settings in settings_by_row]
        reference_row = baseline_row if baseline_row is not None else values.index(Counter(values).most_common(1)[0][0])
        indices_by_value: dict[str, list[int]] = {}
        for i, settings in enumerate(settings_by_row):
            is_other = _differ(path, settings, settings_by_row[reference_row])
            if is_other and not _is_own(path, rows[i], rows[reference_row], own_paths[i, reference_row]):
                indices_by_value.setdefault(values[i], []).append(i)
        for differing in indices_by_value.values():
            usual = [i for i, value in enumerate(values) if value == values[reference_row]]
            confounding.append(
                Confounder(
                    path,
                    _setting_at(path, settings_by_row[differing[0]]),
                    _setting_at(path, settings_by_row[reference_row]),
                    tuple(names[i] for i in differing),
                    tuple(rows[i].id for i in differing),
                    tuple(names[i] for i in usual),
                )
            )
    return confounding


def against(rows: Iterable[Row], baseline: tuple[str, str] | None) -> list[Confounder]:
    """`confounders` of all labels of the baseline's axis, at each combination of other labels and each seed."""
    if baseline is None:
        return []
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        other_labels = tuple((axis, label) for axis, label in row.key.items() if axis != baseline[0])
        groups.setdefault((other_labels, row.spec.get("seed")), {}).setdefault(row.key.get(baseline[0], ""), row)
    return [confounder for group in groups.values() for confounder in confounders([*group.values()], baseline)]


def differences(baseline: Row, other_row: Row) -> tuple[str, ...]:
    """The confounders of two rows, in words."""
    return tuple(sentences(confounders([baseline, other_row])))


def uncompared_cells(confounding: Iterable[Confounder]) -> frozenset[str]:
    """The ids of the cells that confounders keep out of comparisons."""
    return frozenset(id for confounder in confounding for id in confounder.cells)


def sentences(confounding: Iterable[Confounder]) -> list[str]:
    """One sentence per confounder; one whose rows are all covered by another sentence is left out."""
    confounders_by_value: dict[tuple[str, str, str], dict[str, Confounder]] = {}
    for one in confounding:
        confounders_by_value.setdefault((one.path, str(one.value), str(one.usual)), {})[str(one)] = one
    return [
        sentence
        for group in confounders_by_value.values()
        for sentence, confounder in group.items()
        if not any(
            confounder is not other and {*confounder.rows} <= {*other.rows} and {*confounder.others} <= {*other.others}
            for other in group.values()
        )
    ]


def _setting_at(path: str, settings: Mapping[str, Any]) -> Any:
    """The value of a setting for a message: of a call, its name."""
    return settings.get(path, settings.get(f"{path}.name"))


def _differ(path: str, settings_a: Mapping[str, Any], settings_b: Mapping[str, Any]) -> bool:
    """Whether two rows differ in a setting that both have, or one has a call where the other has None."""
    if path in settings_a and path in settings_b:
        return repr(settings_a[path]) != repr(settings_b[path])
    with_path, without_path = (settings_a, settings_b) if path in settings_a else (settings_b, settings_a)
    return with_path.get(path, "") is None and any(lower.startswith(f"{path}.") for lower in without_path)


class _OwnPaths(dict[tuple[int, int], frozenset[str]]):
    """(row, row) -> the paths owned by the labels in which they differ; EVERYTHING for rows of two suites."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __missing__(self, key: tuple[int, int]) -> frozenset[str]:
        row_a, row_b = (self.rows[i] for i in key)
        axes = [axis for axis in {**row_a.key, **row_b.key} if row_a.key.get(axis) != row_b.key.get(axis)]
        if any(axis not in row_a.written and axis not in row_b.written for axis in axes):
            paths = EVERYTHING
        else:
            paths = frozenset[str]().union(*(row.written.get(axis, ()) for row in (row_a, row_b) for axis in axes))
        self[key] = paths
        return paths


def _is_own(path: str, row_a: Row, row_b: Row, paths: frozenset[str]) -> bool:
    """Whether a label in which two rows differ owns the setting."""
    if path in paths or paths is EVERYTHING:
        return True
    if any(path.startswith(f"{own_path}.") or own_path.startswith(f"{path}.") for own_path in paths):
        return True
    if any(_is_of_perturbation(path, own_path) or path.startswith(f"{own_path.split('.')[0]}_") for own_path in paths):
        return True  # a label that sets `auxiliary` owns `auxiliary_n`
    # own path "algorithm.name": the label chose the function, and with it the defaults of its settings
    is_of_function = any(
        own_path.endswith(".name") and path.startswith(own_path.removesuffix("name")) for own_path in paths
    )
    return is_of_function and not any(
        path in leaves(calls.without_defaults(calls.call("Experiment", row.spec))) for row in (row_a, row_b)
    )


def _is_of_perturbation(path: str, own_path: str) -> bool:
    """Whether a label that writes a perturbation thereby writes this setting of an attack."""
    return own_path.startswith("perturbation.") and own_path.rpartition(".")[2] == path.rpartition(".")[2]
