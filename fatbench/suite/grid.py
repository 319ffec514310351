"""The points of a suite's grid: the combinations of labels to run, in the order of the file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from fatbench.errors import SpecError
from fatbench.suite.contents import Contents
from fatbench.suite.located import LocatedMap
from fatbench.suite.model import Condition, Key, Preset


def labels_of(axes: Mapping[str, Mapping[str, LocatedMap]], preset: Preset) -> dict[str, list[str]]:
    """axis -> the labels that the preset keeps."""
    return {axis: (preset.axes or {}).get(axis, list(labels)) for axis, labels in axes.items()}


def grid_size(contents: Contents) -> int:
    """An upper bound of the number of cells of all presets, without expanding them."""
    return sum(
        upper_bound(contents, preset) * len(preset.seeds or contents.seeds) for preset in contents.presets.values()
    )


def upper_bound(contents: Contents, preset: Preset) -> int:
    """An upper bound of the number of points of a preset, without expanding it."""
    grid, axes = contents.grid, labels_of(contents.axes, preset)
    product = axes if grid.product is None else grid.product
    points = math.prod(len(axes[axis]) for axis in product)
    return points + sum(math.prod(map(len, item.values())) for item in [*grid.include, *preset.include])


def points(contents: Contents, preset: Preset) -> list[Key]:
    """The points of a preset, each once: the product of the named axes, and those under `include`.

    They are sorted by axes and labels as these are ordered in the file.
    """
    grid, all_axes = contents.grid, contents.axes
    axes = labels_of(all_axes, preset)
    product = axes if grid.product is None else grid.product
    groups: list[list[Key]] = [[{axis: label} for label in axes[axis]] for axis in product]
    has_include = "include" in grid.node
    if axes and not groups and not has_include:
        raise SpecError(
            f"{grid.place('product')}: the grid is empty: name an axis in 'product', or points in 'include'"
        )
    combinations = itertools.product(*groups) if groups or not has_include else ()
    points = (
        dict(itertools.chain(*(axis_label.items() for axis_label in combination))) for combination in combinations
    )
    position = {axis: {label: i for i, label in enumerate(labels)} for axis, labels in all_axes.items()}
    kept_labels = {axis: set(labels) for axis, labels in axes.items()}
    kept_points = (  # points of the suite without the labels that the preset leaves out
        point
        for point in itertools.chain(points, _included(grid.include))
        if all(label in kept_labels[axis] for axis, label in point.items())
    )
    key_by_position: dict[tuple[int, ...], Key] = {}
    for point in itertools.chain(kept_points, _included(preset.include)):
        position_key = tuple(position[axis][point[axis]] if axis in point else -1 for axis in all_axes)
        key_by_position[position_key] = {axis: point[axis] for axis in all_axes if axis in point}
    return [key_by_position[position_key] for position_key in sorted(key_by_position)]


def _included(include: Sequence[Condition]) -> Iterator[Key]:
    """The points of `include`, each item of which maps axes to lists of labels and stands for all combinations."""
    for item in include:
        for combination in itertools.product(*item.values()):
            yield dict(zip(item, combination, strict=True))


def matches(key: Key, condition: Mapping[str, Sequence[str]]) -> bool:
    """Whether a point has, on each axis of a condition, one of its labels."""
    return all(key.get(axis) in labels for axis, labels in condition.items())
