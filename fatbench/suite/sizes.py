"""The number of cells in each preset: of our suites from listing.json (`make settings`), of others by counting."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fatbench.errors import SpecError
from fatbench.suite import files

FILE = Path(__file__).with_name("listing.json")


def listing() -> Iterator[dict[str, Any]]:
    """{"name", "title", "presets": {preset: cells}} for each valid suite file, {"name", "error"} for an invalid one."""
    shipped_listing = json.loads(FILE.read_text(encoding="utf-8"))
    for name in files.available():
        shipped = shipped_listing.get(name)
        if shipped is not None and shipped["sha256"] == _digest(name):
            yield {"name": name, "title": shipped["title"], "presets": shipped["presets"]}
            continue
        try:
            yield {"name": name, **_preset_sizes(name)}
        except SpecError as error:
            yield {"name": name, "error": error}


def shipped() -> str:
    """The content that listing.json should have, one line for each suite."""
    lines = [
        f" {json.dumps(name)}: {json.dumps({'sha256': _digest(name), **_preset_sizes(name)})}"
        for name in files.available()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _preset_sizes(name: str) -> dict[str, Any]:
    suite = files.load(name)
    presets = {preset: len(suite.plan(preset, refuse=False).to_run()) for preset in suite.presets()}
    return {"title": suite.title, "presets": presets}


def _digest(name: str) -> str:
    return hashlib.sha256(files.locate(name).read_bytes()).hexdigest()
