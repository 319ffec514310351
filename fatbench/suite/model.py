"""The pydantic models of the sections of a suite file: their keys and the values these may have.

The settings of a cell are checked elsewhere, against the functions that receive them (`fatbench.suite.calls`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fatbench.errors import SpecError, did_you_mean
from fatbench.suite.signatures import Signature
from fatbench.suite.types import Count, Natural, NonNegative, parse_seeds

Checkpoint = Literal["last", "best-val", "best-test"]
CHECKPOINTS: tuple[str, ...] = get_args(Checkpoint)


class Misfit(ValueError):
    """What is wrong with a value, or with one below it to which `keys` lead."""

    def __init__(self, problem: object, *keys: str | int) -> None:
        super().__init__(problem)
        self.keys = keys


class Node(BaseModel):
    """A mapping of a suite file with fixed keys."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, node: Any) -> Any:
        if isinstance(node, cls):
            return node
        if not isinstance(node, Mapping):
            raise Misfit(f"expected a mapping, got {node!r}")
        known = {field.alias or name: field for name, field in cls.model_fields.items()}
        for key in node:
            if key not in known:
                raise Misfit(f"unknown key '{key}'{did_you_mean(key, known)}", key)
        return node


N = TypeVar("N", bound=Node)


def read(model: type[N], node: Mapping[str, Any], option: str = "", **context: Any) -> N:
    """The model of a mapping; a SpecError has the keys of the fault, below `option` where that gave the mapping.

    context: see the validators below.
    """
    try:
        return model.model_validate(node, context=context)
    except ValidationError as error:
        problem = error.errors()[0]  # {"type": ..., "loc": (key, ...), "msg": ..., "input": ..., "ctx": ...}
        keys = [*problem["loc"], *getattr(problem.get("ctx", {}).get("error"), "keys", ())]
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "literal_error":
            expected_values = problem["ctx"]["expected"].replace("'", "")
            value = str(problem["input"])
            hint = did_you_mean(value, re.split(", | or ", expected_values))
            message = f"expected {expected_values}, got '{value}'{hint if 'mean' in hint else ''}"
        elif problem["type"] == "missing":
            message = f"'{keys.pop()}' is missing"
        elif problem["type"] != "value_error":
            message = f"{message.removeprefix('Input ')}, got {problem['input']!r}"
        wrong = SpecError(message)
        wrong.keys = (*([option] if option else []), *keys)
        raise wrong from None


# --- the values of keys ------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected a text, got {value!r}")
    return value.strip()


def mapping(value: Any) -> dict[str, Any]:
    """A mapping as written in the file; an empty one for null."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping, got {value!r}")
    return value


def labels(value: Any) -> list[str]:
    """One label or a list of labels, as a list of texts."""
    return [str(item) for item in (value if isinstance(value, list) else [value])]


def known_axis(axis: str, axes: Mapping[str, Any]) -> str:
    """The axis of this name; ValueError without one."""
    if axis not in axes:
        raise ValueError(f"no axis is named '{axis}'{did_you_mean(axis, axes)}")
    return axis


def known_label(axis: str, label: str, axes: Mapping[str, Any]) -> str:
    """The label of this name; ValueError if the axis lacks it."""
    if label not in axes[axis]:
        raise ValueError(f"axis '{axis}' has no label '{label}'{did_you_mean(label, axes[axis])}")
    return label


def condition(value: Any, info: ValidationInfo) -> dict[str, list[str]]:
    """axis -> labels, all of them known."""
    axes, labels_by_axis = (info.context or {})["axes"], {}
    for axis, wanted_labels in mapping(value).items():
        try:
            known_axis(axis, axes)
            labels_by_axis[axis] = [known_label(axis, label, axes) for label in labels(wanted_labels)]
        except ValueError as error:
            raise Misfit(error, axis) from None
    return labels_by_axis


def _having(value: Any) -> dict[str, list[str]]:
    settings = mapping(value)
    for path in settings:
        if "." not in path:
            raise Misfit(f"expected the path of a setting such as model.name, got '{path}'", path)
    return {path: labels(wanted_labels) for path, wanted_labels in settings.items()}


def _known_axes(value: Any, info: ValidationInfo) -> list[str]:
    return [known_axis(axis, (info.context or {})["axes"]) for axis in labels(value)]


def _demand_labels(value: dict[str, Any]) -> dict[str, Any]:
    if not value:
        raise ValueError("an axis needs at least one label")
    return value


def _seeds(value: Any) -> list[int]:
    if isinstance(value, str):
        try:
            return parse_seeds(value)
        except SpecError as error:
            raise ValueError(error.args[0]) from None
    if not (isinstance(value, list) and value and all(type(seed) is int and seed >= 0 for seed in value)):
        raise ValueError(f'expected seeds such as [6, 7] or "0-4", got {value!r}')
    if len(set(value)) != len(value):
        raise ValueError(f"a seed is given twice: {value!r}")
    return value


def _images(value: int | None) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"expected a number of test images, got {value!r}")
    return value


def _clients(value: Any) -> int:
    if type(value) is not int or value < 2:
        raise ValueError(f"expected a number of clients, two or more, got {value!r}")
    return value


def _checkpoints(value: Any) -> list[str]:
    for name in value if isinstance(value, list) else [value]:
        if name not in CHECKPOINTS:
            raise ValueError(f"no checkpoint is named '{name}'{did_you_mean(str(name), CHECKPOINTS)}")
    return value


def _metrics(value: Any) -> dict[str, Any]:
    attacks = mapping(value)
    for label in attacks:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", label):
            raise Misfit("a metric's name is lower case letters, digits and _", label)
    return attacks


def _limit(value: Any) -> dict[str, Any]:
    numbers = mapping(value)
    for label, number in numbers.items():
        if type(number) is not int or number < 1:
            raise Misfit(f"expected a number of test images, got {number!r}", label)
    return numbers


Key = dict[str, str]  # axis -> label, in the order of the suite
# The types of values as written in a file, for its JSON Schema, where they differ from those that are read.
Label = str | int | float | bool
OneOrMore = Label | list[Label]

# axis -> labels, one of which a point must have
Condition = Annotated[dict[str, list[str]], PlainValidator(condition, json_schema_input_type=dict[str, OneOrMore])]
Text = Annotated[str, PlainValidator(_text, json_schema_input_type=str)]
Note = Annotated[str, PlainValidator(lambda value: str(value or "").strip(), json_schema_input_type=Label | None)]
OverrideMap = Annotated[dict[str, Any], PlainValidator(mapping)]  # overrides settings of a cell
# names of axes
Axes = Annotated[list[str], PlainValidator(_known_axes, json_schema_input_type=OneOrMore)]
Some = Annotated[list[str], PlainValidator(labels, json_schema_input_type=OneOrMore)]  # one label or a list of them
Seeds = Annotated[list[int], PlainValidator(_seeds, json_schema_input_type=str | list[Natural])]
Images = Annotated[Any, PlainValidator(_images, json_schema_input_type=Count | None)]
# label -> override
Labels = Annotated[dict[str, OverrideMap], BeforeValidator(mapping), AfterValidator(_demand_labels)]


class Override(Node):
    """`{when: {axis: labels}, set: {...}}`: settings that override those of some points of the grid.

    having: setting -> values, one of which the cell must have after earlier overrides: {model.name: [whole_vit]}.
    """

    when: Condition = Field(default={})
    having: Annotated[dict[str, list[str]], PlainValidator(_having, json_schema_input_type=dict[str, OneOrMore])] = (
        Field(default={})
    )
    set: OverrideMap = {}

    def holds(self, key: Key, spec: Mapping[str, Any]) -> bool:
        """Whether the override applies to a point of the grid whose cell has these settings so far."""
        return all(key.get(axis) in labels for axis, labels in self.when.items()) and all(
            str(setting(spec, path)) in values for path, values in self.having.items()
        )


def setting(spec: Any, path: str) -> Any:
    """The value at a dotted path of a cell as written, or None; a bare name counts as `name`."""
    for key in path.split("."):
        if isinstance(spec, str) and key == "name":
            return spec
        spec = spec.get(key) if isinstance(spec, Mapping) else None
    return spec


class Exclude(Node):
    """`{when: {axis: labels}, reason: ...}`: points that the grid leaves out."""

    when: Condition = Field(default={})
    reason: Text


class GridSpec(Node):
    """The points of the grid; without any key, all combinations of labels."""

    product: Axes | None = None
    include: list[Condition] = Field(default=[])
    exclude: list[Exclude] = Field(default=[])
    overrides: list[Override] = Field(default=[])
    # False: the overrides of the extended suite come before these
    replace_overrides: bool = Field(default=False, strict=True)


class Transfer(Node):
    """An attack computed on one model and evaluated on another: a cell that differs in `axis` alone, or a client."""

    attack: Text  # the metric of the attack to transfer
    axis: Text | None = None
    labels: Some | None = None  # of the axis: the origins of the attack; None: all
    # the number of clients of the round, each with its model before averaging
    clients: Annotated[Any, PlainValidator(_clients, json_schema_input_type=Count)] = None

    @model_validator(mode="after")
    def _check_axis_or_clients(self, info: ValidationInfo) -> Transfer:
        axes = (info.context or {})["axes"]
        if (self.axis is None) == (self.clients is None):
            raise ValueError("a transfer needs 'axis' or 'clients', not both")
        if self.axis is None:
            if self.labels is not None:
                raise Misfit("'labels' needs 'axis'", "labels")
            return self
        try:
            known_axis(self.axis, axes)
            for label in self.labels or ():
                known_label(self.axis, label, axes)
        except ValueError as error:
            raise Misfit(error, "labels" if self.axis in axes else "axis") from None
        return self


LEAST = 10  # own images of a client that is evaluated on them


def _on(value: Any) -> Any:
    if value in ("test", "clients") or (isinstance(value, Mapping) and set(value) == {"clients"}):
        return value if isinstance(value, str) else {"clients": labels(value["clients"])}
    beside = [key for key in ("images", "least", "unseen") if isinstance(value, Mapping) and key in value]
    if beside:
        raise ValueError(f"{' and '.join(beside)} stand{'s' * (len(beside) == 1)} in evaluate, beside on")
    raise ValueError(f"expected test, clients, or {{clients: [names of attacks]}}, got {value!r}")


class Evaluate(Node):
    """The evaluation of trained models: attacks, the first `n` test images, their batches, the checkpoints.

    on: clients: each client's model on the first `n` of its own `images`, of clients with at least `least` of them; of
    some attacks alone {clients: [names]}. unseen: so many clients, or a fraction of them, never train.
    """

    n: Images = None
    batch: Images = 500
    on: Annotated[
        Any, PlainValidator(_on, json_schema_input_type=Literal["test", "clients"] | dict[str, OneOrMore])
    ] = "test"
    images: Literal["held_out", "writers"] = "held_out"
    least: Count = LEAST
    unseen: NonNegative = 0.0
    checkpoints: Annotated[
        list[Checkpoint], BeforeValidator(_checkpoints, json_schema_input_type=Checkpoint | list[Checkpoint])
    ] = Field(default=["last"])
    attacks: Annotated[dict[str, Any], PlainValidator(_metrics)] = {}  # metric -> attack; null removes one
    transfer: Annotated[dict[str, Transfer | None], BeforeValidator(_metrics)] = Field(default={})  # by metric
    # metric -> the attack's number of test images, if below n
    limit: Annotated[dict[str, Any], PlainValidator(_limit, json_schema_input_type=dict[str, Count])] = {}
    overrides: list[Override] = Field(default=[])

    def on_clients(self, label: str) -> str:
        """The clients' own images that an attack is run on, "held_out" or "writers >= 3"; empty: the test images."""
        is_on_clients = self.on == "clients" or (self.on != "test" and label in self.on["clients"])
        return (self.images + f" >= {self.least}" * (self.least != LEAST)) * is_on_clients

    @field_validator("batch")
    @classmethod
    def _check_batch(cls, value: Any) -> int:
        if value is None:
            raise ValueError("expected a number of test images, got None")
        return int(value)


class Preset(Node):
    """A named way to run a suite: fewer labels, and overrides of settings and evaluation."""

    note: Note = ""
    seeds: Seeds | None = None
    base: OverrideMap = {}
    axes: Annotated[
        dict[str, list[str]] | None, PlainValidator(lambda value: value, json_schema_input_type=dict[str, OneOrMore])
    ] = None
    include: list[Condition] = Field(default=[])  # further points, even of labels that `axes` leaves out
    evaluate: OverrideMap = {}
    set: OverrideMap = {}  # overrides every cell, after the axes
    overrides: list[Override] = Field(default=[])

    @field_validator("axes")
    @classmethod
    def _check_axes(cls, value: Any, info: ValidationInfo) -> dict[str, list[str]]:
        labels_by_axis = condition(value, info)
        for axis, axis_labels in labels_by_axis.items():
            if not axis_labels:
                raise Misfit(f"no label is left on axis '{axis}': the grid is empty", axis)
        return labels_by_axis


MOST_TUNED, MOST_TRIALS = 2, 12  # settings; combinations of their values


def _tried(value: Any) -> dict[str, list[Any]]:
    """path of a setting -> the values to try; the first is taken where others are no better."""
    settings = mapping(value)
    for path, values in settings.items():
        if not path.startswith("algorithm.") or path.rpartition(".")[2] in ("rounds", "epochs"):
            raise Misfit(f"expected a setting of the algorithm such as algorithm.local.lr, got '{path}'", path)
        if not isinstance(values, list) or len({str(one) for one in values}) != len(values) or not values:
            raise Misfit(f"expected a list of different values, got {values!r}", path)
    if not 1 <= len(settings) <= MOST_TUNED:
        raise ValueError(f"expected one setting or {MOST_TUNED}, got {len(settings)}")
    number = math.prod(map(len, settings.values()))
    if not 2 <= number <= MOST_TRIALS:
        raise ValueError(f"expected 2 to {MOST_TRIALS} combinations, got {number}")
    return settings


class Tune(Node):
    """What every row tries before it is compared, and how its choice is made."""

    settings: Annotated[dict[str, list[Any]], PlainValidator(_tried, json_schema_input_type=dict[str, list[Any]])]
    by: Text = "natural"  # an attack of `evaluate`; on validation images
    seeds: Seeds
    worst_over: Condition = Field(default={})  # rows that differ in these axes alone share a choice
    n: Count | None = None  # the first n validation images


def _presets(value: Any) -> dict[str, Any]:
    presets = mapping(value)
    if "paper" not in presets:
        raise ValueError("a preset named 'paper' is missing")
    return {k: {} if v is None else v for k, v in presets.items()}


Presets = Annotated[dict[str, Preset], BeforeValidator(_presets)]
AxesOfSuite = Annotated[dict[str, Labels], BeforeValidator(mapping)]


# --- what attacks may do to an image -------------------------------------------------------------------------------

PERTURBATION = "perturbation"
RADIUS: TypeAdapter[float] = TypeAdapter(NonNegative)


def _radius(value: Any) -> Any:
    try:
        RADIUS.validate_python(value)
    except ValidationError:
        raise ValueError(f"expected a radius such as 8/255 or 0.1, got {value!r}") from None
    return value


class OfTraining(Node):
    """Further settings of the attacks of training."""

    step: Any = None
    steps: Any = None


class Perturbation(Node):
    """The perturbation that every attack of a cell may apply to an image, if it states no radius of its own.

    A radius belongs to the images, not to a method, so a suite writes it where it names the data. It is merged like any
    setting and resolved before the cell is checked: `eps`, and `norm` if it is L2, go to the attacks of training,
    monitor and evaluations; `training` holds further settings of the attacks of training alone. The checked cell has no
    setting of this name, so it has the same identity as a cell whose attacks state their radius.
    """

    norm: Literal["Linf", "L2"] = "Linf"
    eps: Annotated[Any, PlainValidator(_radius, json_schema_input_type=NonNegative)]
    training: OfTraining = OfTraining()

    def __str__(self) -> str:
        return f"{self.norm} {self.eps}"

    def of_evaluation(self) -> Perturbation:
        """The perturbation without the settings of training."""
        return self.model_copy(update={"training": OfTraining()})

    def missing_settings(self, signature: Signature, node: Mapping[str, Any], training: bool) -> dict[str, Any]:
        """The settings that a call takes from the perturbation, since it does not state them itself.

        SpecError if it attacks in another norm.
        """
        missing: dict[str, Any] = {}
        if signature.kind not in ("Attack", "Objective"):
            return missing
        if signature.kind == "Attack" and training:
            stated = self.training.model_dump(exclude_unset=True)
            missing = {key: value for key, value in stated.items() if key in signature.by_name and key not in node}
        if "eps" not in signature.by_name or "eps" in node:
            return missing
        norm = node.get("norm", self.norm) if "norm" in signature.by_name else "Linf"
        if norm != self.norm:
            raise SpecError(f"{node['name']} attacks in {norm}, but the perturbation is {self}: state its eps")
        return {**missing, **({} if norm == "Linf" or "norm" in node else {"norm": norm}), "eps": self.eps}


def perturbations_in_words(tasks: Iterable[tuple[str, str]]) -> str:
    """The text of a caption for pairs (data set, perturbation): "Linf 8/255 (cifar10), Linf 25/255 (mnist)"."""
    data_by_perturbation: dict[str, list[str]] = {}
    for data, perturbation in dict.fromkeys(tasks):
        if perturbation:
            data_by_perturbation.setdefault(perturbation, []).append(data)
    return ", ".join(
        f"{perturbation} ({', '.join(data)})" if len(data_by_perturbation) > 1 else perturbation
        for perturbation, data in data_by_perturbation.items()
    )
