"""Files of results as tests read and change them: the lines of an export, its numbers as rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fatbench import packed
from fatbench.store.document import ExchangeError, Numbers, digest, document
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
    for stage in cell.get("stages", ()):
        if all(len(entry) == 6 for entry in stage["numbers"]):
            stage["numbers"] = [*Numbers(stage["numbers"])]
    return dumps(cell) + "\n"


def mismatches(line: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """(stage, its right digest) of finished stages of a valid line whose digest is missing or wrong."""
    try:
        cell = document(line, "")
    except ExchangeError:
        return
    for stage, of_document in zip(line["stages"], cell.stages, strict=True):
        right = digest(cell, of_document)
        if stage["status"] == "done" and stage.get("digest") != right:
            yield stage, right
