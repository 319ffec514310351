"""Comparisons that a suite declares before it is run: contrasts of labels, families, margins of equivalence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo, model_validator

from fatbench.errors import did_you_mean
from fatbench.suite.model import (
    Condition,
    Label,
    Misfit,
    Node,
    Note,
    OneOrMore,
    Some,
    Text,
    condition,
    known_axis,
    known_label,
    mapping,
)
from fatbench.suite.types import number

LARGEST_WEIGHT = 1000


@dataclass(frozen=True)
class Contrast:
    """Weights of some labels of an axis, or of their metrics, that add up to 0."""

    axis: str
    weights: dict[tuple[str, str], float]  # (label, metric) -> weight; metric "": the metric under test

    @property
    def of_two(self) -> bool:
        """Whether it is a plain difference, A - B."""
        return sorted(self.weights.values()) == [-1, 1]


def _known_axis(axis: str | None, info: ValidationInfo) -> str | None:
    return axis and known_axis(axis, (info.context or {})["axes"])


def _margin(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 100):
        raise ValueError(f"expected a margin in points, such as 2, got {value!r}")
    return value


def _weight(value: Any) -> float:
    """A weight given as a number or as a fraction such as "1/2"."""
    weight = number(value)
    if not isinstance(weight, (int, float)) or not abs(weight) <= LARGEST_WEIGHT:  # written so that NaN is refused too
        raise ValueError(f"expected weights such as 1, -1 or 1/2, got {value!r}")
    return float(weight)


def axis_of(labels: Iterable[str], axis: str | None, axes: Mapping[str, Any]) -> str:
    """`axis`, or the only axis that has all the labels. ValueError if none has, or several have."""
    labels = list(labels)
    matching_axes = [name for name, axis_labels in axes.items() if all(label in axis_labels for label in labels)]
    if axis is None and len(matching_axes) == 1:
        return matching_axes[0]
    if axis is None and matching_axes:
        raise ValueError(f"{' and '.join(matching_axes)} have these labels: name the one with 'axis'")
    if axis is None:
        axis_labels = {label for labels_of_axis in axes.values() for label in labels_of_axis}
        for label in labels:
            if label not in axis_labels:
                raise ValueError(f"no axis has the label '{label}'{did_you_mean(label, axis_labels)}")
        raise ValueError(f"no axis has all of {', '.join(labels)}")
    for label in labels:
        known_label(axis, label, axes)
    return axis


def _contrast(value: Any, axis: str | None, axes: Mapping[str, Any]) -> Contrast:
    """`{VKD: 1, FedAvg: -1}`, or of a method and an attack `{VKD: {natural: 1, pgd20: -1}, ...}`, or `[1, -1, -1, 1]`:
    a weight for each label of the axis, in the order of the suite.
    """
    weights: dict[tuple[str, str], float] = {}
    if isinstance(value, list):
        matching_axes = (
            [name for name, axis_labels in axes.items() if len(axis_labels) == len(value)] if axis is None else [axis]
        )
        if len(matching_axes) != 1 or len(axes[matching_axes[0]]) != len(value):
            raise ValueError(
                f"{len(value)} weights fit no axis, or several: name one with 'axis', and give a weight for each label"
            )
        (axis,) = matching_axes
        weights = {(label, ""): _weight(weight) for label, weight in zip(axes[axis], value, strict=True)}
    elif isinstance(value, Mapping) and value:
        axis = axis_of(value, axis, axes)
        for label, weight in value.items():
            if isinstance(weight, Mapping):
                weights |= {(label, metric): _weight(metric_weight) for metric, metric_weight in weight.items()}
            else:
                weights[label, ""] = _weight(weight)
    else:
        raise ValueError(f"expected weights such as {{A: 1, B: -1}} or [1, -1, -1, 1], got {value!r}")
    if len({bool(metric) for _, metric in weights}) > 1:
        raise ValueError("give weights by metric for every label, or for none")
    weights = {point: weight for point, weight in weights.items() if weight}
    if not weights:
        raise ValueError("every weight is 0")
    if abs(total := math.fsum(weights.values())) > 1e-9:
        raise ValueError(f"the weights of a contrast must add up to 0, got {total:g}")
    return Contrast(axis, weights)


def _contrasts(value: Any, info: ValidationInfo) -> dict[str, Contrast]:
    contrasts = {}
    for name, weights in mapping(value).items():
        try:
            contrasts[name] = _contrast(weights, info.data.get("axis"), (info.context or {})["axes"])
        except ValueError as error:
            raise Misfit(error, name) from None
    return contrasts


def _headline(value: Any, info: ValidationInfo) -> tuple[str, str, str] | None:
    """(contrast, metric, row) of the result to quote: [SFAT - FAT, pgd20] or [SFAT - FAT, pgd20, multi-Krum]."""
    if value is None:
        return None
    contrasts = info.data.get("contrasts") or {}
    if not isinstance(value, list) or len(value) not in (2, 3) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"expected [contrast, metric] or [contrast, metric, row], got {value!r}")
    if value[0] not in contrasts:
        raise ValueError(f"no contrast is named '{value[0]}'{did_you_mean(value[0], contrasts)}")
    return value[0], value[1], value[2] if len(value) == 3 else ""


def _baseline(value: Any, info: ValidationInfo) -> tuple[str, str] | None:
    """(axis, label) of a label that only one axis has; a YAML file may write it as a number."""
    return None if value is None else (axis_of([str(value)], None, (info.context or {})["axes"]), str(value))


Point = dict[str, list[str]]  # as a Condition


def _points(value: Any, info: ValidationInfo) -> dict[str, tuple[Point, Point | float]]:
    """Name -> [A, B], labels of two points, B with those of A but for its own; or [A, a fraction]."""
    points: dict[str, tuple[Point, Point | float]] = {}
    for name, sides in mapping(value).items():
        a, b = sides if isinstance(sides, list) and len(sides) == 2 else (None, None)
        if not isinstance(a, Mapping) or not (isinstance(b, Mapping) or (isinstance(b, float) and 0 < b < 1)):
            raise Misfit(f"expected [labels of A, labels of B] or [labels of A, a fraction], got {sides!r}", name)
        try:
            labels = condition(a, info)
            points[name] = labels, b if isinstance(b, float) else {**labels, **condition(b, info)}
        except ValueError as error:
            raise Misfit(error, name) from None
    return points


Weight = float | str
Weights = list[Weight] | dict[str, Weight | dict[str, Weight]]  # [1, -1], {A: 1, B: -1} or {A: {natural: 1}, ...}
Baseline = Annotated[tuple[str, str] | None, PlainValidator(_baseline, json_schema_input_type=Label | None)]


def as_list(value: Any) -> Any:
    """A list of families; a single mapping becomes a list of one."""
    return [value] if isinstance(value, Mapping) else value


class Tests(Node):
    """A family of comparisons that a suite declares before it is run; Holm's correction is over all of them."""

    family: Text | None = None  # its name
    note: Note = ""  # printed with the family, such as when it was declared
    where: Condition = Field(default={})  # only these points of the grid
    # of equivalence, in points
    margin: Annotated[Any, PlainValidator(_margin, json_schema_input_type=float | None)] = None
    axis: Annotated[str | None, AfterValidator(_known_axis)] = None
    metrics: Some | None = None  # the metrics under test; None: all of the suite
    contrasts: Annotated[dict[str, Contrast], PlainValidator(_contrasts, json_schema_input_type=dict[str, Weights])] = (
        Field(default={})
    )
    headline: Annotated[  # the comparison that is quoted
        tuple[str, str, str] | None, PlainValidator(_headline, json_schema_input_type=list[str] | None)
    ] = None
    # an axis: each contrast is also tested as its mean over the axis
    mean_over: Annotated[str | None, AfterValidator(_known_axis)] = None
    # {axis: [A, B]}: each contrast is also tested as its value at A minus that at B
    between: Condition = Field(default={})
    # {axis: [A, B, ...]}: each contrast is tested between the worst cases over these labels, instead of at each
    worst_over: Condition = Field(default={})

    clients: Text | None = None  # a yes or no of each client that training logs, by which `points` are compared
    points: Annotated[
        dict[str, tuple[Point, Point | float]],
        PlainValidator(_points, json_schema_input_type=dict[str, list[dict[str, OneOrMore] | float]]),
    ] = Field(default={})

    def metric_names(self) -> list[str]:
        """The metrics that the family names anywhere, each once."""
        contrast_metrics = (metric for contrast in self.contrasts.values() for _, metric in contrast.weights if metric)
        headline_metric = [self.headline[1]] if self.headline else []
        return list(dict.fromkeys([*(self.metrics or ()), *contrast_metrics, *headline_metric]))

    @model_validator(mode="after")
    def _family_of_contrasts(self) -> Tests:
        if self.contrasts and self.family is None:
            raise Misfit("contrasts belong to a family: name it with 'family'", "contrasts")
        if self.between and [len(axis_labels) for axis_labels in self.between.values()] != [2]:
            raise Misfit("expected two labels of one axis, such as {method: [A, B]}", "between")
        if self.worst_over and (self.between or self.mean_over or len(self.worst_over) > 1):
            raise Misfit("expected one axis, and neither 'between' nor 'mean_over' beside it", "worst_over")
        if self.worst_over and not all(contrast.of_two for contrast in self.contrasts.values()):
            raise Misfit("a worst case is compared with another: expected contrasts such as {A: 1, B: -1}", "contrasts")
        if self.points and (self.family is None or self.clients is None):
            raise Misfit("points belong to a family and compare 'clients': name both", "points")
        if self.points and (self.contrasts or self.metrics or self.axis):
            raise Misfit("points stand in a family of their own, without contrasts, metrics or axis", "points")
        if self.family is not None and not self.contrasts and not self.points:
            raise Misfit("a family without 'contrasts' declares nothing", "family")
        return self
