"""What `fatbench new --beside SUITE` writes: a suite that adds a row of one's own to the rows of another suite.

The suite extends the other, so that it asks for the same cells: numbers of them that are there are not run again.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML

from fatbench.api.making import points_with
from fatbench.errors import SpecError
from fatbench.suite.files import Suite
from fatbench.suite.trees import merge, nested

PATHS = {  # kind -> where its function stands in a cell
    "method": ("algorithm",),
    "aggregator": ("algorithm", "aggregator"),
    "objective": ("algorithm", "local", "objective"),
    "adversary": ("malicious", "attack"),
    "dataset": ("data",),
    "model": ("model",),
    "partition": ("partition",),
}


def text_of(kind: str, name: str, suite: Suite, base_name: str) -> tuple[str, str]:
    """The YAML of a suite `name` that extends `suite` by a function of this kind, and a filter of the cells it adds.

    base_name: the name or path by which the suite was found. The filter is empty for an attack, which all cells get.
    SpecError: the suite has no place for it.
    """
    sections: dict[str, Any] = {}
    if kind == "attack":
        sections |= _attack(name, suite)
        summary, cells = "an attack of my own on every row", ""
    else:
        axis, label, override = _row(kind, name, suite)
        sections["axes"] = {axis: {label: override}}
        sections |= points_with(suite, axis, [label])
        summary, cells = f"the {axis} {label}", f"{axis}={label if label == name else chr(39) + label + chr(39)}"
    head = {
        "name": name,
        "title": f"{name} beside {suite.title}",
        "description": f"The rows of {suite.name}, and {summary} (a function of {name}.py).",
        "extends": base_name,
        "plugins": [f"{name}.py"],
    }
    text = "".join(f"{key}: {_flow(value)}\n" for key, value in head.items()) + "".join(_block(sections))
    return text, cells


def _axis_of_baseline(suite: Suite) -> str | None:
    """The axis whose labels are compared with each other; of a suite without a baseline its last axis."""
    baseline = suite.contents.baseline
    return baseline[0] if baseline else next(reversed(suite.axes()), None)


def _row(kind: str, name: str, suite: Suite) -> tuple[str, str, dict[str, Any]]:
    """(axis, label, what is laid on the base) of the row that uses the function."""
    path, axes = PATHS[kind], suite.contents.axes
    varied = [axis for axis, labels in axes.items() if any(_value_at(override, path) for override in labels.values())]
    axis = next(iter(varied), None) if kind in ("adversary", "dataset", "partition", "model") else None
    if axis is not None:
        clients = _value_at(suite.contents.base, ("partition", "clients"))
        split = {"clients": clients} if kind == "partition" and clients else {}
        return axis, name, nested(path, {"name": name, **split})
    if (axis := _axis_of_baseline(suite)) is None:
        raise SpecError(f"suite {suite.name} has no axes, so a row cannot be added to it")
    labels = axes[axis]
    baseline = suite.contents.baseline
    reference = baseline[1] if baseline else next(iter(labels))
    reference_override = labels[reference]
    call: dict[str, Any] = {"name": name}
    earlier_call = _value_at(reference_override, path) or _value_at(suite.contents.base, path) or {}
    if kind == "objective":
        call |= {key: value for key, value in earlier_call.items() if key == "attack"}
    if kind == "method":
        call |= {key: value for key, value in earlier_call.items() if key in ("rounds", "aggregator", "local")}
    override = nested(path, call)
    if kind == "adversary":
        override["malicious"] = {"clients": 1, **override["malicious"]}
    rows = kind in ("method", "aggregator", "objective")
    return axis, name if rows else f"{reference} with {name}", merge(reference_override, override)


def _value_at(node: Any, path: Sequence[str]) -> Any:
    """What stands at a path of a mapping; None: nothing."""
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _attack(name: str, suite: Suite) -> dict[str, Any]:
    """The evaluation with the attack, and the first table that shows attacks with a column of it."""
    known_attacks = suite.contents.evaluate.attacks
    known_pgd: Mapping[str, Any] = next((a for a in known_attacks.values() if a and a["name"] == "pgd"), {})
    step, steps = known_pgd.get("step", "2/255"), known_pgd.get("steps", 20)
    settings = {"name": name, **({"eps": known_pgd["eps"]} if "eps" in known_pgd else {}), "step": step, "steps": steps}
    sections: dict[str, Any] = {"evaluate": {"attacks": {name: settings}}}
    if table := next((t for t in suite.tables if {*t.values.values()} & {*known_attacks}), None):
        _, node = suite.node("tables", table.id)
        sections["tables"] = [{**node, "values": {**node["values"], name: name}}]
    return sections


def _block(sections: Mapping[str, Any]) -> Iterator[str]:
    """Sections, two levels of them each on one line."""
    for key, value in sections.items():
        yield f"\n{key}:\n"
        for inner, entry in value.items() if isinstance(value, Mapping) else ():
            if key in ("axes", "evaluate") or inner in ("include", "exclude"):
                yield f"  {_flow(inner)}:\n"
                rows = entry.items() if isinstance(entry, Mapping) else None
                yield from (
                    (f"    {_flow(k)}: {_flow(v)}\n" for k, v in rows)
                    if rows is not None
                    else (f"    - {_flow(v)}\n" for v in entry)
                )
            else:
                yield f"  {_flow(inner)}: {_flow(entry)}\n"
        if isinstance(value, list):
            for item in value:
                indent = "- "
                for inner, entry in item.items():
                    yield f"  {indent}{inner}: {_flow(entry)}\n"
                    indent = "  "


def _flow(value: Any) -> str:
    """A value on one line of YAML."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.width, yaml.sort_base_mapping_type_on_output = True, sys.maxsize, False
    stream = io.StringIO()
    yaml.dump(json.loads(json.dumps(value)), stream)
    return stream.getvalue().removesuffix("...\n").rstrip()
