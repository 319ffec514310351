"""Imported specs of cells: checked like those of a suite before their identity is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fatbench.errors import SpecError
from fatbench.suite import calls, cells, external_models

_MODEL = TypeAdapter(external_models.Model)


def identity(spec: Mapping[str, Any]) -> str:
    """The identity of a cell's spec; SpecError if no suite and no `fatbench evaluate` can have made the spec."""
    if "evaluated" in spec:
        _check_external_model(spec)
    else:
        calls.check("Experiment", spec, "spec")
    return cells.identity(spec)


def _check_external_model(spec: Mapping[str, Any]) -> None:
    """SpecError if `external_models.cell` would not make this spec."""
    try:
        model = _MODEL.validate_python(spec["evaluated"])
    except ValidationError as error:
        problem = error.errors()[0]
        path = ".".join(str(path_part) for path_part in problem["loc"])
        raise SpecError(f"spec: evaluated: {path}: {problem['msg']}") from None
    for key in ("test", "size"):
        if spec.get(key) is not None and not (type(spec[key]) is int and 0 < spec[key] < 2**31):
            raise SpecError(f"spec: {key}: expected a number, got {str(spec[key])[:60]!r}")
    expected_cell = external_models.cell(model, spec.get("data"), spec.get("test"), spec.get("size"))
    if expected_cell != dict(spec):
        key = next(key for key in {**expected_cell, **spec} if expected_cell.get(key) != spec.get(key))
        raise SpecError(f"spec: {key}: not what 'fatbench evaluate' writes")
