"""Calls: the mappings of a suite, checked once, each with the signature of what it calls.

    check("Attack", node)     -> the Call of a suite's mapping, every default filled in
    call("Attack", spec)      -> the Call of a canonical mapping that was stored or came from another process
    build("Attack", spec)     -> the function with its settings bound; imports its module

Later questions about a call (its cost, refusals, plug-ins, identity) are answered by its signature and by the calls
nested in it; no name is looked up again.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fatbench.errors import SpecError, did_you_mean, shown
from fatbench.suite import sources, types, weights
from fatbench.suite.entry import Entry, entry_of, in_table
from fatbench.suite.located import LocatedMap
from fatbench.suite.signatures import CLASSES, REQUIRED, TABLES, Setting, Signature, describe, names


class Call(dict[str, Any]):
    """A canonical mapping with all settings, and the signature of what it calls; nested calls are Calls too.

    The call of a settings class, or of a cell, has no `name`. A Call is never changed. Copied with `{**call}`, pickled
    or as JSON it is plain data, which `call` turns into a Call again.
    """

    def __init__(self, signature: Signature, settings: Mapping[str, Any]):
        super().__init__(settings)
        self.signature = signature

    @property
    def kind(self) -> str:
        return self.signature.kind

    @property
    def name(self) -> str:
        return self.signature.name

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a model, or those that an algorithm trains separately, as the function's entry names them."""
        return tuple(getattr(entry(self.signature), "parts", ()))

    @property
    def nested(self) -> dict[str, Call]:
        """The settings that are calls, by name; those that are None are left out."""
        return {name: value for name, value in self.items() if isinstance(value, Call)}

    def walk(self) -> Iterator[Call]:
        """The call and all nested in it, outer calls first."""
        yield self
        for inner in self.nested.values():
            yield from inner.walk()

    @property
    def wrapped_call(self) -> Call | None:
        """The nested call of the same kind, such as the algorithm inside a wrapper, or None."""
        return next((inner for inner in self.nested.values() if inner.kind == self.kind), None)

    @functools.cached_property
    def bound(self) -> Any:
        """The built function, cached."""
        return build(self.kind, self)

    def __reduce__(self) -> tuple[Any, ...]:
        # plain data: a process without the plug-in could not unpickle the function in `bound`
        return dict, (dict(self),)


# --- from a suite's mapping to a call -----------------------------------------------------------------------------


def check(kind: str, node: Any, location: str = "") -> Call:
    """The canonical form of `node`, a mapping {name: ..., setting: value}: defaults filled in, values checked.

    A bare string is short for {name: string}. The mapping of a settings class has no name. SpecError for an unknown
    name or key, a missing key, a wrong type or range.
    """
    if kind in CLASSES:
        if not isinstance(node, Mapping):
            raise SpecError(f"{location or kind.lower()}: expected a mapping of settings, got {_value_text(node)}")
        signature = describe(kind)
        return Call(signature, _settings(signature, node, location))
    if isinstance(node, str):
        node = LocatedMap({"name": node}, at=location)
    if not isinstance(node, Mapping):
        raise SpecError(f"{location or kind.lower()}: expected a mapping with a name, got {_value_text(node)}")
    if "name" not in node:
        raise SpecError(
            f"{location or kind.lower()}: 'name' is missing: which {kind.lower()}?{did_you_mean('', names(kind))}"
        )
    if not isinstance(node["name"], str):
        raise SpecError(f"{_place_of(node, 'name', location)}: expected a name, got {_value_text(node['name'])}")
    signature = describe(kind, node["name"], _place_of(node, "name", location))
    own_settings = LocatedMap(
        {k: v for k, v in node.items() if k != "name"}, getattr(node, "where", None), getattr(node, "at", "")
    )
    return Call(signature, {"name": signature.name, **_settings(signature, own_settings, location)})


def check_cell(node: Mapping[str, Any], location: str = "") -> Call:
    """The canonical form of a cell. Errors as for `check`."""
    signature = describe("Experiment")
    return Call(signature, _settings(signature, node, location))


def _settings(signature: Signature, node: Mapping[str, Any], location: str) -> dict[str, Any]:
    """The canonical settings of a call of one function, without its name."""
    settings_by_name = signature.by_name
    for key in node:
        if key not in settings_by_name and not signature.free:
            raise SpecError(
                f"{_place_of(node, key, location)}: '{signature.name}' has no setting "
                f"'{key}'{did_you_mean(key, settings_by_name)}"
            )
    canonical: dict[str, Any] = {}
    defaults = _defaults(signature)
    for setting in signature.settings:
        if setting.name in node:
            canonical[setting.name] = _value(setting, node[setting.name], _place_of(node, setting.name, location))
        elif setting.default is REQUIRED:
            source = location or getattr(node, "at", "")
            raise SpecError(f"{source}{': ' if source else ''}'{signature.name}' needs '{setting.name}'")
        else:
            canonical[setting.name] = defaults[setting.name]
    for key in node:  # settings of a function that takes any: it checks them when it is called
        if key not in settings_by_name:
            canonical[key] = node[key]
    return canonical


@functools.cache
def _defaults(signature: Signature) -> dict[str, Any]:
    """The canonical defaults of a function's settings."""
    return {
        setting.name: _value(setting, setting.default, setting.name)
        for setting in signature.settings
        if setting.default is not REQUIRED
    }


def _value(setting: Setting, value: Any, location: str) -> Any:
    if setting.kind is not None:
        return None if setting.optional and value is None else check(setting.kind, value, location)
    try:
        validated = setting.adapter.validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]
        problem_text = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise SpecError(f"{location}: {problem_text}, got {_value_text(value)}") from None
    if (
        isinstance(value, str) and isinstance(validated, float) and types.FRACTION.match(value)
    ):  # stays text, in one form
        return "/".join(fraction_part.strip() for fraction_part in value.split("/"))
    if isinstance(validated, float) and not math.isfinite(validated):
        raise SpecError(f"{location}: should be a finite number, got {_value_text(value)}")
    return validated


def _place_of(node: Mapping[str, Any], key: str, fallback: str) -> str:
    return node.place(key) if isinstance(node, LocatedMap) and (key in node.where or node.at) else (fallback or key)


def _value_text(value: Any) -> str:
    return shown(dict(value) if isinstance(value, LocatedMap) else value)


def call(kind: str, spec: Mapping[str, Any]) -> Call:
    """A canonical mapping as a Call; a Call is returned as it is. SpecError for an unknown name."""
    if isinstance(spec, Call):
        return spec
    signature = describe(kind, spec.get("name", ""))
    settings_by_name = signature.by_name

    def value(key: str) -> Any:
        kind = settings_by_name[key].kind if key in settings_by_name else None
        return spec[key] if kind is None or spec[key] is None else call(kind, spec[key])

    return Call(signature, {key: value(key) for key in spec})


# --- from a call to what it calls ---------------------------------------------------------------------------------


def build(kind: str, spec: Mapping[str, Any]) -> Any:
    """The registered function with the settings of a canonical `spec` bound to it; fractions become floats here.

    For a settings class, an instance of it.
    """
    checked_call = call(kind, spec)
    called = function(checked_call.signature)
    return called(**bind(checked_call)) if kind in CLASSES else functools.partial(called, **bind(checked_call))


def bind(call: Call) -> dict[str, Any]:
    """The keyword arguments of a call, nested calls built, fractions turned into floats."""
    settings_by_name = call.signature.by_name
    arguments = {}
    for key, value in call.items():
        if isinstance(value, Call):
            arguments[key] = build(value.kind, value)
        elif key != "name":
            is_number = isinstance(value, str) and (
                key not in settings_by_name or _is_number(settings_by_name[key].annotation)
            )
            arguments[key] = types.number(value) if is_number else value
    return arguments


def bind_cell(spec: Mapping[str, Any], root: Path, trained: Path | None = None) -> dict[str, Any]:
    """The keyword arguments of a canonical cell whose model reads its weights below `root`, the folder of data sets.

    trained: the file of weights where the cell starts from another cell's model; MachineError without it.
    """
    return bind(call("Experiment", weights.with_path(spec, root, trained)))


def _is_number(annotation: str) -> bool:
    return annotation.removesuffix(" | None") in {
        "Real", "Positive", "Rate", "NonNegative", "Radius", "Probability", "Fraction", "Momentum", "Count", "Natural",
        "float", "int",
    }  # fmt: skip


def function(signature: Signature) -> Any:
    """The function itself, or the settings class; its module is imported, or its plug-in run."""
    if signature.kind in CLASSES:
        module, name = CLASSES[signature.kind]
        return getattr(importlib.import_module(module), name)
    return entry(signature).function


def entry(signature: Signature) -> Entry:
    """The entry of a registered function in its table; its module is imported, or its plug-in run."""
    if signature.kind in CLASSES:
        return entry_of(function(signature))
    module, table = TABLES[signature.kind]
    holder = sources.load(signature.plugin) if signature.plugin else importlib.import_module(module)
    return in_table(getattr(holder, table)[signature.name])


def without_defaults(call: Call) -> dict[str, Any]:
    """A call less every setting that has its default: what a cell's identity is the hash of.

    A setting that is added later, with a default that keeps the old behaviour, therefore leaves identities as they
    are. A default must never change its meaning: tests/golden/defaults.json pins them all.
    """
    settings_by_name = call.signature.by_name
    defaults = _defaults(call.signature)
    short_form: dict[str, Any] = {}
    for key, value in call.items():
        setting = settings_by_name.get(key)
        if setting is None:  # the name, or a setting that is checked only when it is called
            short_form[key] = value
        elif setting.default is not REQUIRED and value == defaults[key]:
            continue
        elif setting.annotation == "Weights | None":
            short_form[key] = weights.content(value)  # the digest: the file may lie anywhere
        else:
            short_form[key] = without_defaults(value) if isinstance(value, Call) else value
    return short_form
