"""A call of a suite file as text: `pgd(eps=8/255, step=2/255, steps=20)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fatbench.errors import UnknownName
from fatbench.suite import signatures
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
