"""The perturbation that a task allows: norm and radius, for every attack of a cell that does not state its own.

    perturbation: {norm: Linf, eps: 25/255, training: {step: 6/255, steps: 10}}

A radius belongs to the images, not to a method, so a suite writes it where it names the data. It is merged like any
setting and resolved before the cell is checked: `eps`, and `norm` if it is L2, go to the attacks of training, monitor
and evaluations; `training` holds further settings of the attacks of training alone. The checked cell has no setting of
this name, so it has the same identity as a cell whose attacks state their radius.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, TypeAdapter, ValidationError

from fatbench.errors import SpecError
from fatbench.suite import model, types
from fatbench.suite.signatures import Signature

KEY = "perturbation"
RADIUS: TypeAdapter[float] = TypeAdapter(types.NonNegative)


def _radius(value: Any) -> Any:
    try:
        RADIUS.validate_python(value)
    except ValidationError:
        raise ValueError(f"expected a radius such as 8/255 or 0.1, got {value!r}") from None
    return value


class OfTraining(model.Node):
    """Further settings of the attacks of training."""

    step: Any = None
    steps: Any = None


class Perturbation(model.Node):
    """The perturbation that every attack of a cell may apply to an image."""

    norm: Literal["Linf", "L2"] = "Linf"
    eps: Annotated[Any, PlainValidator(_radius, json_schema_input_type=types.NonNegative)]
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
