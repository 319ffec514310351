"""What a suite file says as a whole; its parts are in `model.py`, `tables.py` and `contrasts.py`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from fatbench.suite.contrasts import Baseline, Tests, listed
from fatbench.suite.model import AxesOfSuite, Evaluate, GridSpec, Node, Note, OverrideMap, Presets, Seeds, Text
from fatbench.suite.tables import Figure, Table
from fatbench.suite.threats import Letter


def _file_name(name: str) -> str:
    """`name`, which figures, pages and exported files are called by. ValueError: it is a path."""
    if re.search(r"[/\\]", name) or name.startswith(".") or not name.isprintable():
        raise ValueError(f"expected a name without / and \\ that files can begin with, got {name!r}")
    return name


class Axes(Node):
    """The axes alone."""

    axes: AxesOfSuite = Field(default={})


class Contents(Node):
    """What a suite file says, what it extends merged under it."""

    name: Annotated[Text, AfterValidator(_file_name)]  # files are called by it
    title: Text
    description: Note = ""
    extends: Text | None = None
    plugins: list[str] = Field(default=[])  # paths, those of what it extends before its own
    seeds: Seeds = Field(default=[0])
    threat: Letter | None = None  # no attack on privacy may need more
    base: OverrideMap
    axes: AxesOfSuite = Field(default={})
    baseline: Baseline = None  # what all others of its axis are compared with
    grid: GridSpec = GridSpec()
    evaluate: Evaluate = Evaluate()
    presets: Presets
    tables: list[Table] = Field(default=[])
    figures: list[Figure] = Field(default=[])
    tests: Annotated[list[Tests], BeforeValidator(listed, json_schema_input_type=Tests | list[Tests])] = Field(
        default=[]
    )
