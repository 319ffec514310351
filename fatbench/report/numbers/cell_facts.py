"""The settings of a cell in words, each with its function's summary, for `fatbench show` and pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fatbench.errors import FatbenchError
from fatbench.suite import calls, format_call


def settings(spec: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
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
            yield from _call(name, value)
        elif value and name != "seed":
            plain_settings[name] = value
    if plain_settings:
        yield "further", ", ".join(f"{name}={value}" for name, value in plain_settings.items()), ""


def _call(name: str, value: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    """A call, then the calls inside it; an attack stays inside the call that takes it."""
    nested_calls = value.nested if isinstance(value, calls.Call) else {}
    inner = {key: setting for key, setting in nested_calls.items() if setting.kind != "Attack"}
    own_settings = {key: setting for key, setting in value.items() if key not in inner and setting is not None}
    text = format_call.with_all_settings({"name": "", **own_settings})
    summary = value.signature.summary if isinstance(value, calls.Call) and "name" in value else ""
    yield name, text if "name" in own_settings else text.removeprefix("(").removesuffix(")"), summary
    for key, setting in inner.items():
        yield from _call(key, setting)
