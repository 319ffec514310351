"""A call of a suite file as text: `pgd(eps=8/255, step=2/255, steps=20)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fatbench.errors import FatbenchError, UnknownName
from fatbench.suite import calls, signatures
from fatbench.suite.types import FRACTION


def with_all_settings(spec: Mapping[str, Any]) -> str:
    """A call {name, setting: value} with all its settings, switches last; works for unknown functions too."""
    settings = sorted(spec.items(), key=lambda item: isinstance(item[1], bool))
    return _call(spec["name"], {key: value for key, value in settings if key != "name"})


def brief(kind: str, spec: Mapping[str, Any]) -> str:
    """A canonical call with all numbers, and with other settings where they differ from their defaults.

    A function that this process does not know, such as one of another program's notebook, has all its settings.
    """
    try:
        defaults = {setting.name: setting.default for setting in signatures.describe(kind, spec["name"]).settings}
    except UnknownName:
        return with_all_settings(spec)
    shown_settings = {
        key: value
        for key, value in spec.items()
        if key != "name" and (_is_number(value) or key not in defaults or value != defaults[key])
    }
    return _call(spec["name"], shown_settings)


def attack(metric: str, specs: Iterable[Mapping[str, Any]]) -> str:
    """A metric and the attacks behind it: "pgd20 = pgd(eps=8/255, step=2/255, steps=20)"; "natural" alone."""
    attack_text = " or ".join(dict.fromkeys(brief("Attack", spec) for spec in specs))
    return metric if attack_text == metric else f"{metric} = {attack_text}"


def _is_number(value: Any) -> bool:
    is_fraction = isinstance(value, str) and FRACTION.match(value) is not None
    return is_fraction or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _call(name: str, settings: Mapping[str, Any]) -> str:
    settings_text = ", ".join(f"{key}={_value(value)}" for key, value in settings.items())
    return f"{name}({settings_text})" if settings_text else name


def _value(value: Any) -> str:
    if isinstance(value, Mapping) and "name" in value:
        return with_all_settings(value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def of_cell(spec: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    """(name, call, summary of the function) of every setting that is a call, then all other settings in one line.

    The calls of a cell have no summaries where some function is not installed.
    """
    try:
        cell: Mapping[str, Any] = calls.call("Experiment", spec)
    except FatbenchError:
        cell = spec
    plain_settings = {}
    for name, value in cell.items():
        if isinstance(value, Mapping):
            yield from _nested(name, value)
        elif value and name != "seed":
            plain_settings[name] = value
    if plain_settings:
        yield "further", ", ".join(f"{name}={value}" for name, value in plain_settings.items()), ""


def _nested(name: str, value: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    """A call, then the calls inside it; an attack stays inside the call that takes it."""
    nested_calls = value.nested if isinstance(value, calls.Call) else {}
    inner = {key: setting for key, setting in nested_calls.items() if setting.kind != "Attack"}
    own_settings = {key: setting for key, setting in value.items() if key not in inner and setting is not None}
    text = with_all_settings({"name": "", **own_settings})
    summary = value.signature.summary if isinstance(value, calls.Call) and "name" in value else ""
    yield name, text if "name" in own_settings else text.removeprefix("(").removesuffix(")"), summary
    for key, setting in inner.items():
        yield from _nested(key, setting)
