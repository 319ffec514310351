"""The perturbation that a task allows: norm and radius, for every attack of a cell that does not state its own.

    perturbation: {norm: Linf, eps: 25/255, training: {step: 6/255, steps: 10}}

A radius belongs to the images, not to a method, so a suite writes it where it names the data. It is merged like any
setting and resolved before the cell is checked: `eps`, and `norm` if it is L2, go to the attacks of training, monitor
and evaluations; `training` holds further settings of the attacks of training alone. The checked cell has no setting of
this name, so it has the same identity as a cell whose attacks state their radius.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, TypeAdapter, ValidationError

from fatbench.errors import SpecError
from fatbench.suite import model, types
from fatbench.suite.located import LocatedMap
from fatbench.suite.signatures import CLASSES, Signature, describe

KEY = "perturbation"
OF_TRAINING = ("step", "steps")  # the keys allowed under `training`


RADIUS: TypeAdapter[float] = TypeAdapter(types.NonNegative)


def _radius(value: Any) -> Any:
    try:
        RADIUS.validate_python(value)
    except ValidationError:
        raise ValueError(f"expected a radius such as 8/255 or 0.1, got {value!r}") from None
    return value


class Perturbation(model.Node):
    """The perturbation that every attack of a cell may apply to an image."""

    what = "the perturbation's"
    norm: Literal["Linf", "L2"] = "Linf"
    eps: Annotated[Any, PlainValidator(_radius, json_schema_input_type=types.NonNegative)]
    training: Annotated[LocatedMap, PlainValidator(model.mapping, json_schema_input_type=dict[str, Any])] = Field(
        default=LocatedMap()
    )

    def __str__(self) -> str:
        return f"{self.norm} {self.eps}"


def in_words(tasks: Iterable[tuple[str, str]]) -> str:
    """The text of a caption for pairs (data set, perturbation): "Linf 8/255 (cifar10), Linf 25/255 (mnist)"."""
    data_by_perturbation: dict[str, list[str]] = {}
    for data, perturbation in dict.fromkeys(tasks):
        if perturbation:
            data_by_perturbation.setdefault(perturbation, []).append(data)
    return ", ".join(
        f"{perturbation} ({', '.join(data)})" if len(data_by_perturbation) > 1 else perturbation
        for perturbation, data in data_by_perturbation.items()
    )


def split(spec: LocatedMap) -> tuple[LocatedMap, Perturbation | None]:
    """(settings of a cell without `perturbation`, the perturbation or None)."""
    if KEY not in spec:
        return spec, None
    other_settings = LocatedMap({key: value for key, value in spec.items() if key != KEY}, spec.where, spec.at)
    perturbation = model.read(Perturbation, spec[KEY], spec.place(KEY))
    for key in perturbation.training:
        if key not in OF_TRAINING:
            raise SpecError(
                f"{perturbation.training.place(key)}: unknown key '{key}': expected {' or '.join(OF_TRAINING)}"
            )
    return other_settings, perturbation


def of_cell(spec: LocatedMap, perturbation: Perturbation) -> LocatedMap:
    """The settings of a cell as written, completed by the perturbation where its attacks state no radius."""
    signature = describe("Experiment")
    return _nested(spec, signature, perturbation, False)


def of_attack(attack: Any, perturbation: Perturbation) -> Any:
    """An attack of `evaluate` as written, completed by the perturbation; SpecError if it has another norm."""
    return _filled("Attack", attack, perturbation, training=False)


def _filled(kind: str, node: Any, perturbation: Perturbation, training: bool) -> Any:
    """A call as written, its attacks completed; an invalid node is returned for `calls.check` to refuse."""
    call = LocatedMap({"name": node}) if isinstance(node, str) else node
    try:
        signature = describe(kind) if kind in CLASSES else describe(kind, call["name"])
    except (SpecError, KeyError, TypeError):
        return node
    if missing_settings := _missing_settings(kind, signature, call, perturbation, training):
        locations = {**call.where, **dict.fromkeys(missing_settings, perturbation.node.at)}
        return LocatedMap({**_nested(call, signature, perturbation, training), **missing_settings}, locations, call.at)
    filled = _nested(call, signature, perturbation, training or kind == "Algorithm")
    return node if filled is call else filled


def _nested(node: LocatedMap, signature: Signature, perturbation: Perturbation, training: bool) -> LocatedMap:
    """The call with the calls among its settings completed; the same object if nothing changed."""
    changed = {}
    for setting in signature.settings:
        value = node.get(setting.name)
        if setting.kind is not None and isinstance(value, str | LocatedMap):
            filled_call = _filled(setting.kind, value, perturbation, training)
            if filled_call is not value:
                changed[setting.name] = filled_call
    return LocatedMap({**node, **changed}, node.where, node.at) if changed else node


def _missing_settings(
    kind: str, signature: Signature, node: LocatedMap, perturbation: Perturbation, training: bool
) -> dict[str, Any]:
    """The settings that one call settings_by_name from the perturbation because it does not state them."""
    settings_by_name = signature.by_name
    if kind not in ("Attack", "Objective"):
        return {}
    accepted = {key: value for key, value in perturbation.training.items() if key in settings_by_name}
    training_settings = {key: value for key, value in accepted.items() if key not in node}
    missing_settings = training_settings if kind == "Attack" and training else {}
    if "eps" not in settings_by_name or "eps" in node:
        return missing_settings
    norm = node.get("norm", perturbation.norm) if "norm" in settings_by_name else "Linf"
    if norm != perturbation.norm:
        raise SpecError(
            f"{node.place('name')}: {node['name']} attacks in {norm}, but the perturbation is {perturbation} "
            f"({perturbation.node.at}): state its eps"
        )
    if perturbation.norm != "Linf" and "norm" not in node:
        missing_settings["norm"] = perturbation.norm
    return {**missing_settings, "eps": perturbation.eps}
