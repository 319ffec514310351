"""What the cells of a suite need: data sets, files of weights, functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fatbench.suite import calls, facts, files, format_call, signatures, weights


def data_of(
    name: str, rows_by_name: Mapping[str, dict[str, Any]], root: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of data sets with the presets of a suite that read them; the files of weights that its cells begin with.

    rows_by_name: rows of the data sets with published files. Of another, as a folder or a plug-in's, the row has its
    settings.
    """
    chosen_suite, rows, texts = files.load(name), dict[str, dict[str, Any]](), dict[str, None]()
    for preset in chosen_suite.presets():
        specs = [cell.spec for cell in chosen_suite.plan(preset, refuse=False).to_run()]
        data_settings = [data for spec in specs for data in (spec["data"], spec.get("auxiliary")) if data]
        for brief, data in sorted({format_call.brief("Data", data): data for data in data_settings}.items()):
            row = rows_by_name.get(data["name"])
            if row is None:
                size = facts.of_data(calls.call("Data", data))
                row = {"name": data["name"], "state": "own", "train": size.train, "test": size.test, "where": brief}
            presets = rows.setdefault(brief if row["state"] == "own" else row["name"], {**row, "presets": []})[
                "presets"
            ]
            presets += [preset] * (preset not in presets)
        texts.update(dict.fromkeys(weights.weights_of(specs)))
    known = [weight for text in texts if (weight := weights.parse_weights(text))]
    return [*rows.values()], [weights.status(weight, root) for weight in known]


def functions_of(name: str, kind: str) -> list[str]:
    """The names of a table of functions that the cells of a suite use, in the order of the table."""
    suite = files.load(name)
    plans = [suite.plan(preset, refuse=False) for preset in suite.presets()]
    used: set[tuple[str, str]] = set()
    for cell in {cell.id: cell for plan in plans for cell in plan.cells}.values():
        used |= _calls(cell.spec) | {("Attack", str(one.attack["name"])) for one in cell.evaluations}
    return [function for function in signatures.names(kind) if (kind, function) in used]


def _calls(node: Any, key: str = "", parent: str = "") -> set[tuple[str, str]]:
    """(kind, name) of every function that a cell's settings call."""
    if not isinstance(node, Mapping):
        return set()
    kind = (
        "Adversary" if (parent, key) == ("malicious", "attack") else "Attack" if key == "monitor" else key.capitalize()
    )
    found = {(kind, str(node["name"]))} if "name" in node else set()
    return found.union(*(_calls(value, name, key) for name, value in node.items()))
