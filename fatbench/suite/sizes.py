"""How many cells the presets of suites have, remembered in the user's cache folder by the content it follows from."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fatbench import settings, whole_file
from fatbench.errors import FatbenchError, SpecError
from fatbench.suite import files, signatures
from fatbench.suite.files import Suite

FILE = "suite-sizes.json"
CODE = ("suite", "methods", "engine", "models", "data")  # what decides which cells are one
MOST = 1000  # suites, of all versions of their files


def listing() -> Iterator[dict[str, Any]]:
    """{"name", "title", "presets": {preset: cells}} of each valid suite file; of an invalid one {"name", "error"}."""
    counted = Sizes()
    for name in files.available():
        try:
            found = files.load(name)
            presets = counted.of(found)
        except SpecError as error:
            yield {"name": name, "error": error}
        else:
            yield {"name": name, "title": found.title, "presets": presets}
    counted.keep()


class Sizes:
    """Numbers of cells, read once; `keep` writes what was counted anew."""

    def __init__(self) -> None:
        self.file = settings.cache_folder() / FILE
        self.known = _read(self.file)
        self.code = _code()
        self.new: dict[str, dict[str, int]] = {}

    def of(self, suite: Suite) -> dict[str, int]:
        """Preset -> number of cells. SpecError: a cell is invalid."""
        said = f"{self.code} {suite.file.resolve()} {suite.contents.node!r}"
        key = hashlib.sha256(said.encode()).hexdigest()
        if key not in self.known:
            self.known[key] = self.new[key] = {p: len(suite.plan(p, refuse=False).to_run()) for p in suite.presets()}
        return self.known[key]

    def keep(self) -> None:
        """Remember what was counted; a folder that cannot be written costs only time."""
        if self.new:
            _write(self.file, self.known if len(self.known) < MOST else self.new)


def _code() -> str:
    """A digest of the sources of everything that a suite may call, and of what expands it."""
    folders = [signatures.PACKAGE / folder for folder in CODE]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    seen = hashlib.sha256()
    for file in [*files, *signatures.plugins()]:
        seen.update(file.read_bytes())
    return seen.hexdigest()


def _read(file: Path) -> dict[str, dict[str, int]]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(file: Path, content: dict[str, dict[str, int]]) -> None:
    """Replace the file at once."""
    with contextlib.suppress(FatbenchError):
        whole_file.write(file, json.dumps(content), make_folder=True)
