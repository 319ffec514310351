"""Functions from a notebook's cell as methods, and suites as objects."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from fatbench import whole_file
from fatbench.api.asking import Plugins, plugged, suite_of
from fatbench.errors import SpecError, did_you_mean, shown
from fatbench.suite import files, registered, signatures
from fatbench.suite.files import Suite

F = TypeVar("F", bound=Callable[..., Any])
Kind = Literal[
    "data", "partition", "model", "algorithm", "aggregator", "objective", "proximal", "attack", "augment", "diagnostic",
    "defence", "inversion", "adversary", "manipulation", "preaggregator",
]  # fmt: skip


def names(kind: Kind, *, plugins: Plugins = ()) -> list[str]:
    """The names that a suite, `aggregate`, `partition` or `evaluate` may use for a kind of function.

    kind: "aggregator", "partition", "attack", ..., as for `register`. Those of plug-ins come last. SpecError: no such
    kind.

    >>> import fatbench
    >>> fatbench.names("partition")[:3]
    ['iid', 'classes_per_client', 'shah']
    """
    with plugged(plugins):
        return signatures.names(registered.kind_of(kind))


def register(function: F, kind: Kind, *, name: str = "") -> F:
    """Make a function a method: an "aggregator", "objective", "attack", "partition", "data", "model", ...; returns it.

    It has the signature that CONTRIBUTING.md gives for its kind, (updates, context) for an aggregator; its keyword-only
    arguments are settings. A suite names it by its own name, or by `name`. Its source text is saved with the imports,
    constants and functions that it reads: worker processes import it, and every number is stored with it. Registering
    the same name again replaces it: cells that the earlier function computed are then "changed".
    SpecError: no such kind; its source text is unavailable; or it reads an object that a file cannot hold, such as an
    array of the notebook.
    """
    registered.register(function, registered.kind_of(kind), name)
    return function


def make_suite(
    suite: str | Path | Suite | Mapping[str, Any],
    /,
    *,
    methods: Mapping[str, Mapping[str, Any]] | None = None,
    axis: str = "method",
    name: str | None = None,
    **changes: Any,
) -> Suite:
    """A suite like another, with further methods or other settings; `plan`, `run`, `table` and the others take it.

    suite: its name, or a mapping with the sections of a suite file (docs/suites.md). methods, label -> settings of a
    cell, are added to the labels of the axis: {"mine": {"algorithm": {"aggregator": my_function}}}; the other rows stay
    as they are, and their stored numbers count. changes: sections of a suite file, merged over those of the suite:
    seeds=[1, 2], base={"algorithm": {"local": {"lr": 0.02}}}. Where a suite names a method, your function may stand,
    which is registered, or `functools.partial` of it with its settings. SpecError: as for a suite file.

    >>> import fatbench
    >>> fewer = fatbench.make_suite("fat-baselines", seeds=[1, 2], base={"algorithm": {"local": {"lr": 0.02}}})
    >>> len(fatbench.plan(fewer)) == 2 * len(fatbench.plan(fewer, seeds=1))
    True
    """
    content: dict[str, Any] = {key: _json_value(value, key) for key, value in changes.items()}
    if isinstance(suite, Mapping):
        content = {**{key: _json_value(value, key) for key, value in suite.items()}, **content}
    else:
        parent = suite_of(suite)
        if methods and axis not in parent.axes():
            raise SpecError(f"axis: '{parent.name}' has no axis '{axis}'{did_you_mean(axis, parent.axes())}")
        new_name = "-".join([parent.name, *(methods or {})]) if methods else f"{parent.name}-own"
        content = {"name": re.sub(r"[^A-Za-z0-9+.-]+", "-", new_name), "title": f"{parent.title}, changed", **content}
        content["extends"] = str(parent.file.resolve())
        new = [label for label in methods or {} if label not in parent.axes()[axis]]
        points = points_with(parent, axis, new) if new else {}
        presets = {**points.get("presets", {}), **content.get("presets", {})}
        presets = {n: {**points.get("presets", {}).get(n, {}), **preset} for n, preset in presets.items()}
        content = {**points, **content, **({"presets": presets} if presets else {})}
    if name is not None:
        content["name"] = name
    if methods:
        own_methods = {label: _json_value(settings, "") for label, settings in methods.items()}
        content["axes"] = {**content.get("axes", {}), axis: {**content.get("axes", {}).get(axis, {}), **own_methods}}
    text = json.dumps(content, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    # a folder for each content: an earlier suite of the same name keeps its file
    file = registered.folder() / digest / f"{content.get('name', 'suite')}.yaml"
    whole_file.write(file, text, file, make_folder=True)
    new_suite = files.load(str(file))
    if methods and not isinstance(suite, Mapping):
        _require_new_label(new_suite, axis, methods)
    return new_suite


def points_with(suite: Suite, axis: str, labels: Sequence[str]) -> dict[str, Any]:
    """The grid and presets that list labels of the axis, with the new labels wherever the baseline's stands.

    Without a baseline they are added everywhere. Empty if nothing lists labels: a product has new ones by itself.
    """
    grid, sections = suite.contents.grid, dict[str, Any]()
    baseline = suite.contents.baseline
    reference = baseline[1] if baseline and baseline[0] == axis else None

    def with_new(listed: Sequence[str]) -> list[str]:
        return [*listed, *labels] if reference is None or reference in listed else [*listed]

    if grid.include:
        entries = [
            {name: with_new(listed) if name == axis else listed for name, listed in entry.items()}
            for entry in grid.include
        ]
        sections["grid"] = {
            "product": grid.product or [],
            "include": entries,
            **({"exclude": [{"when": e.when, "reason": e.reason} for e in grid.exclude]} if grid.exclude else {}),
        }
    listing = {n: preset.axes for n, preset in suite.contents.presets.items() if preset.axes}
    labels_by_preset = {n: axes[axis] for n, axes in listing.items() if axis in axes}
    if labels_by_preset:
        sections["presets"] = {n: {"axes": {axis: with_new(listed)}} for n, listed in labels_by_preset.items()}
    return sections


def _require_new_label(suite: Suite, axis: str, methods: Mapping[str, Any]) -> None:
    """Raise SpecError if no preset has a cell with a new label, because the grid lists its points."""
    for preset in reversed(suite.presets()):  # the small ones come last
        labels = {cell.key.get(axis) for cell in suite.plan(preset).cells}
        if labels & {*methods}:
            return
    raise SpecError(f"no preset of '{suite.name}' has the new label: its grid lists its points; add some with grid=")


def _json_value(value: Any, key: str) -> Any:
    """A value as JSON: functions are registered, with the kind that the key names."""
    if isinstance(value, Mapping):
        inner = "attack" if key == "attacks" else ""
        return {str(name): _json_value(item, inner or str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [_json_value(item, key) for item in value]
    if isinstance(value, functools.partial):
        return {"name": _json_value(value.func, key), **_json_value(value.keywords, "")}
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        kind = key.capitalize()
        if kind not in signatures.TABLES:
            raise SpecError(f"{key}: a function cannot stand here: put it under a kind such as 'aggregator'")
        return registered.register(value, kind)
    if hasattr(value, "tolist"):  # an array, or a number of numpy or torch
        return value.tolist()
    if not isinstance(value, str | int | float | None):
        raise SpecError(f"{key}: expected what a suite file can hold, got {shown(value)}")
    return value
