"""The number of cells in each preset: of our suites from listing.json (`make settings`), of others by counting.

listing.json also has the attack that each evaluation of our suites is named after, see `fatbench.suite.asked`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fatbench.errors import SpecError
from fatbench.suite import asked, files
from fatbench.suite.cells import Plan

FILE = asked.LISTING


def listing() -> Iterator[dict[str, Any]]:
    """{"name", "title", "presets": {preset: cells}} for each valid suite file, {"name", "error"} for an invalid one."""
    shipped_listing = json.loads(FILE.read_text(encoding="utf-8"))["suites"]
    for name in files.available():
        shipped = shipped_listing.get(name)
        if shipped is not None and shipped["sha256"] == _digest(name):
            yield {"name": name, "title": shipped["title"], "presets": shipped["presets"]}
            continue
        try:
            yield {"name": name, **_preset_sizes(name, _plans(name))}
        except SpecError as error:
            yield {"name": name, "error": error}


def shipped() -> str:
    """The content that listing.json should have, one line for each suite and each evaluation."""
    suites: dict[str, Any] = {}
    attacks: dict[str, Any] = {}
    for name in files.available():
        plans = _plans(name)
        suites[name] = {"sha256": _digest(name), **_preset_sizes(name, plans)}
        by_point = {id(cell.evaluations): cell.evaluations for plan in plans.values() for cell in plan.cells}
        evaluations = (evaluation for of_point in by_point.values() for evaluation in of_point)
        attacks |= {
            evaluation.id: asked.short_form(evaluation.attack, getattr(evaluation.origin, "stored_text", None))
            for evaluation in evaluations
        }
    sections = {"suites": suites, "attacks": dict(sorted(attacks.items()))}
    texts = {
        section: ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
        for section, entries in sections.items()
    }
    return "{\n" + ",\n".join(f" {json.dumps(section)}: {{\n{text}\n }}" for section, text in texts.items()) + "\n}\n"


def _plans(name: str) -> dict[str, Plan]:
    suite = files.load(name)
    return {preset: suite.plan(preset, refuse=False) for preset in suite.presets()}


def _preset_sizes(name: str, plans: Mapping[str, Plan]) -> dict[str, Any]:
    return {"title": files.load(name).title, "presets": {preset: len(plan.to_run()) for preset, plan in plans.items()}}


def _digest(name: str) -> str:
    return hashlib.sha256(files.locate(name).read_bytes()).hexdigest()
