"""The JSON Schema of suite files, by which an editor completes and checks one while it is written.

It is made of what else reads a suite: the models of `contents.py`, and the settings of the functions. A setting may
stand in one place and its function's name in another, so no setting is required. Names are those of the tables, unless
the file has plug-ins or extends another, which may have some. What a schema cannot say, `fatbench suite check` does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from fatbench.suite.contents import Contents
from fatbench.suite.perturbation import KEY, Perturbation
from fatbench.suite.signatures import CLASSES, TABLES, Setting, Signature, describe, names

DRAFT = "http://json-schema.org/draft-07/schema#"  # what editors of YAML read
TEMPLATE = "#/definitions/{model}"
NUMBER = {"type": "string", "pattern": r"^\s*-?\d*\.?\d+([eE][+-]?\d+)?\s*(/\s*\d+(\.\d+)?\s*)?$"}  # 8/255, "0.03"
Schema = dict[str, Any]


class _WithoutDefaults(GenerateJsonSchema):
    def default_schema(self, schema: Any) -> Schema:
        return self.generate_inner(schema["schema"])

    def get_title_from_name(self, name: str) -> str:
        return ""


def schema() -> Schema:
    """The schema of a suite file, draft 7."""
    root, definitions = _structure(Contents)
    perturbation, _ = _structure(Perturbation)
    perturbation["properties"]["eps"] = {"anyOf": [perturbation["properties"]["eps"], NUMBER]}
    kinds = [kind for kind in TABLES if kind != "Experiment"]
    for kind in kinds:
        definitions |= _kind(kind)
    definitions |= {kind: _function(describe(kind)) for kind in CLASSES}
    cell = _function(describe("Experiment"))
    cell["properties"] = {**cell["properties"], KEY: {**perturbation, "required": []}}
    some, evaluate = _or_null(_to("Cell")), definitions["Evaluate"]["properties"]
    root["properties"] |= {"base": some, "axes": _each(_each(some)), "presets": _each(_or_null(_to("Preset")))}
    definitions["Preset"]["properties"] |= {"base": some, "set": some, "evaluate": _or_null(_to("Evaluate"))}
    of_evaluate, of_cell = ({**definitions["Override"]["properties"], "set": what} for what in (_to("Evaluate"), some))
    evaluate["overrides"]["items"] = {**definitions["Override"], "properties": of_evaluate}
    definitions["Override"]["properties"] = of_cell
    evaluate["attacks"] = _each(_or_null(_to("Attack")))
    del definitions["Transfer"]["required"]  # an override may say the rest of it
    definitions |= {"Cell": cell}
    definitions |= {f"Known{kind}": _known(kind) for kind in [*kinds, *CLASSES, "Experiment"]}
    own = {"required": ["name", "title", "base", "presets"], **_of_every_cell(_to("KnownExperiment"))}
    open_to_others = {"anyOf": [{"required": [key]} for key in ("plugins", "extends")]}
    return {
        "$schema": DRAFT,
        "title": "A suite of fatbench",
        **root,
        "required": ["name", "title"],
        "if": open_to_others,
        "else": own,
        "definitions": definitions,
    }


def text() -> str:
    """The schema as JSON."""
    return json.dumps(schema(), indent=1) + "\n"


def _structure(model: Any) -> tuple[Schema, dict[str, Schema]]:
    """The schema of a model, and those of the models in it."""
    structure = TypeAdapter(model).json_schema(ref_template=TEMPLATE, schema_generator=_WithoutDefaults)
    definitions = structure.pop("$defs", {})
    return structure, definitions


def _to(name: str) -> Schema:
    return {"$ref": TEMPLATE.format(model=name)}


def _or_null(value: Schema) -> Schema:
    return {"anyOf": [value, {"type": "null"}]}


def _each(value: Schema) -> Schema:
    """A mapping whose values are all such."""
    return {"type": "object", "additionalProperties": value}


# --- the settings of a cell -------------------------------------------------------------------------------------------


def _kind(kind: str) -> dict[str, Schema]:
    """What a call of this kind may say, and what one of each function."""
    functions = [describe(kind, name) for name in names(kind)]
    summaries = [{"const": one.name, "description": one.summary} for one in functions]
    by_name = [
        {
            "if": {"properties": {"name": {"const": one.name}}, "required": ["name"]},
            "then": _to(f"{kind}.{one.name}"),
        }
        for one in functions
    ]
    unnamed = {
        key: {"anyOf": alternatives} if len(alternatives) > 1 else alternatives[0]
        for key, alternatives in _settings_of_all(functions).items()
    }
    of_any = {
        "if": {"not": {"required": ["name"]}},
        "then": {"properties": unnamed},
    }
    call = {
        "type": "object",
        "properties": {"name": {"type": "string", "anyOf": [*summaries, {}]}},
        "allOf": [*by_name, of_any],
    }
    return {kind: {"anyOf": [{"type": "string"}, call]}, **{f"{kind}.{one.name}": _function(one) for one in functions}}


def _settings_of_all(functions: Iterable[Signature]) -> dict[str, list[Schema]]:
    """Setting -> what some function of the kind may take there, each once."""
    settings_by_name: dict[str, list[Schema]] = {}
    for signature in functions:
        for setting in signature.settings:
            value = _value(setting, signature.kind)
            if value not in settings_by_name.setdefault(setting.name, []):
                settings_by_name[setting.name].append(value)
    return settings_by_name


def _function(signature: Signature) -> Schema:
    """The settings of a function, or of a settings class, none of them required."""
    properties = {setting.name: _value(setting, signature.kind) for setting in signature.settings}
    if signature.kind in TABLES and signature.kind != "Experiment":
        properties = {"name": {}, **properties}
    return {
        "type": "object",
        "description": signature.summary,
        "properties": properties,
        "additionalProperties": signature.free,
    }


def _value(setting: Setting, kind: str) -> Schema:
    """What may stand at a setting; at one of an attack also a list, whose values are a metric each."""
    if setting.kind is not None:
        return _or_null(_to(setting.kind))  # None where it is optional; or another label says which
    if setting.annotation.startswith("Weights"):
        return {"type": ["string", "object", "null"]}  # or the labels of the cell that they come from
    plain = setting.adapter.json_schema()
    alternatives = plain.pop("anyOf", [plain])
    if any(one.get("type") in ("number", "integer") for one in alternatives):
        alternatives = [*alternatives, NUMBER]
    if kind == "Attack":
        alternatives = [*alternatives, {"type": "array"}]
    return {"anyOf": alternatives} if len(alternatives) > 1 else alternatives[0]


# --- which names there are ------------------------------------------------------------------------------------------


def _known(kind: str) -> Schema:
    """That the names of a call, and of the calls in it, are those of the tables."""
    functions = [describe(kind)] if kind in (*CLASSES, "Experiment") else [describe(kind, name) for name in names(kind)]
    calls = {(setting.name, setting.kind) for one in functions for setting in one.settings if setting.kind}
    nested: Schema = {
        key: {"anyOf": [*(_to(f"Known{kind}") for _, kind in same), {"type": "null"}]}
        for key, same in ((key, [*same]) for key, same in itertools.groupby(sorted(calls), lambda call: call[0]))
    }
    if kind in (*CLASSES, "Experiment"):
        return {"properties": nested}
    every = {"enum": [one.name for one in functions]}
    return {
        "if": {"type": "string"},
        "then": every,
        "else": {"properties": {"name": every, **nested}},
    }


def _of_every_cell(known: Schema) -> Schema:
    """A schema of each override of a cell's settings that a file has, and of each attack."""
    attacks = {"properties": {"attacks": _each(_or_null(_to("KnownAttack")))}}
    overrides = {"items": {"properties": {"set": known}}}
    in_evaluate = {**attacks["properties"], "overrides": {"items": {"properties": {"set": attacks}}}}
    preset = {"base": known, "set": known, "overrides": overrides, "evaluate": {"properties": in_evaluate}}
    return {
        "properties": {
            "base": known,
            "axes": _each(_each(known)),
            "grid": {"properties": {"overrides": overrides}},
            "evaluate": {"properties": in_evaluate},
            "presets": _each({"properties": preset}),
        }
    }
