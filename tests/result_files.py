"""Files of results as tests read and change them: the lines of an export, its numbers as rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fatbench import packed
from fatbench.store import export_schema
from fatbench.store.rows import dumps

RESULTS = Path(__file__).parent.parent / "results"


def committed(name: str) -> Path:
    """The committed file of this name without its ending."""
    (file,) = (file for file in packed.results_in(RESULTS) if file.name.partition(".")[0] == name)
    return file


def lines(file: Path) -> list[str]:
    """Its lines, whether it is compressed or not, each with its end."""
    with packed.read_text(file) as text:
        return list(text)


def cells(file: Path) -> list[dict[str, Any]]:
    """Its cells; a number is [round, client, metric, value, n, run, created]."""
    return [json.loads(line) for line in map(rows, lines(file)[1:])]


def rows(line: str) -> str:
    """A line with its numbers as rows, which can be imported too."""
    cell = json.loads(line)
    export_schema.unpack(cell, "")
    return dumps(cell) + "\n"
