"""The structure of a whole suite file; its sections are in `model.py`, `tables.py` and `contrasts.py`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from fatbench.suite.contrasts import Baseline, Tests, as_list
from fatbench.suite.model import AxesOfSuite, Evaluate, GridSpec, Node, Note, OverrideMap, Presets, Seeds, Text
from fatbench.suite.tables import Figure, Table, distinct
from fatbench.suite.threats import Letter


def _in_context(axes: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """The axes, against which the fields after this one are checked."""
    if info.context is not None:
        info.context["axes"] = axes
    return axes


def _file_name(name: str) -> str:
    """`name`, with which the names of figures, pages and exports begin. ValueError if it could be a path."""
    if re.search(r"[/\\]", name) or name.startswith(".") or not name.isprintable():
        raise ValueError(f"expected a name without / and \\ that files can begin with, got {name!r}")
    return name


class Contents(Node):
    """A suite file, merged over the suite that it extends."""

    name: Annotated[Text, AfterValidator(_file_name)]
    title: Text
    description: Note = ""
    extends: Text | None = None
    plugins: list[str] = Field(default=[])  # paths; first those of the suite that it extends
    seeds: Seeds = Field(default=[0])
    threat: Letter | None = None  # the most that an attack on privacy may assume
    base: OverrideMap
    axes: Annotated[AxesOfSuite, AfterValidator(_in_context)] = Field(default={})
    baseline: Baseline = None  # the label with which all others of its axis are compared
    grid: GridSpec = GridSpec()
    evaluate: Evaluate = Evaluate()
    presets: Presets
    tables: list[Table] = Field(default=[])
    figures: Annotated[list[Figure], AfterValidator(distinct)] = Field(default=[])
    tests: Annotated[list[Tests], BeforeValidator(as_list, json_schema_input_type=Tests | list[Tests])] = Field(
        default=[]
    )
