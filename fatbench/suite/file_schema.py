"""The JSON Schema of suite files, with which editors complete and check them.

It is derived from the models of `contents.py` and the settings of the functions. A setting may stand in one place of a
file and its function's name in another, so no setting is required. Names must be those of the tables, unless the file
has plug-ins, or extends a file that may have some. `fatbench check` finds what a schema cannot express.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from fatbench.suite.model import PERTURBATION, Perturbation
from fatbench.suite.signatures import CLASSES, TABLES, Setting, Signature, describe, names
from fatbench.suite.tables import Contents

DRAFT = "http://json-schema.org/draft-07/schema#"  # the draft that YAML editors understand
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
    perturbation, of_perturbation = _structure(Perturbation)
    definitions |= of_perturbation
    perturbation["properties"]["eps"] = {"anyOf": [perturbation["properties"]["eps"], NUMBER]}
    kinds = [kind for kind in TABLES if kind != "Experiment"]
    for kind in kinds:
        definitions |= _kind(kind)
    definitions |= {kind: _function(describe(kind)) for kind in CLASSES}
    cell = _function(describe("Experiment"))
    cell["properties"] = {**cell["properties"], PERTURBATION: {**perturbation, "required": []}}
    cell_or_null, evaluate = _or_null(_reference("Cell")), definitions["Evaluate"]["properties"]
    presets = _mapping_of(_or_null(_reference("Preset")))
    by_name = _mapping_of(cell_or_null)
    root["properties"] |= {"base": cell_or_null, "axes": _mapping_of(by_name), "variants": by_name, "presets": presets}
    changed_evaluate = _or_null(_reference("Evaluate"))
    definitions["Preset"]["properties"] |= {"base": cell_or_null, "set": cell_or_null, "evaluate": changed_evaluate}
    # an override changes a cell in `grid` and `presets`, the attacks in `evaluate`
    of_evaluate, of_cell = (
        {**definitions["Override"]["properties"], "set": target} for target in (_reference("Evaluate"), cell_or_null)
    )
    evaluate["overrides"]["items"] = {**definitions["Override"], "properties": of_evaluate}
    definitions["Override"]["properties"] = of_cell
    evaluate["attacks"] = _mapping_of(_or_null(_reference("Attack")))
    del definitions["Transfer"]["required"]  # an override may state only a part of one
    definitions |= {"Cell": cell}
    definitions |= {f"Known{kind}": _known_names(kind) for kind in [*kinds, *CLASSES, "Experiment"]}
    known_cells = _in_every_cell(_reference("KnownExperiment"))
    without_plugins = {"required": ["name", "title", "base", "presets"], **known_cells}
    may_have_plugins = {"anyOf": [{"required": [key]} for key in ("plugins", "extends")]}
    return {
        "$schema": DRAFT,
        "title": "A suite of fatbench",
        **root,
        "required": ["name", "title"],
        "if": may_have_plugins,
        "else": without_plugins,
        "definitions": definitions,
    }


def text() -> str:
    """The schema as JSON."""
    return json.dumps(schema(), indent=1) + "\n"


def _structure(model: Any) -> tuple[Schema, dict[str, Schema]]:
    """The schema of a model, and the schemas of the models in it by name."""
    structure = TypeAdapter(model).json_schema(ref_template=TEMPLATE, schema_generator=_WithoutDefaults)
    definitions = structure.pop("$defs", {})
    return structure, definitions


def _reference(name: str) -> Schema:
    return {"$ref": TEMPLATE.format(model=name)}


def _or_null(value: Schema) -> Schema:
    return {"anyOf": [value, {"type": "null"}]}


def _mapping_of(value: Schema) -> Schema:
    """The schema of a mapping whose values all have this schema."""
    return {"type": "object", "additionalProperties": value}


# --- the settings of a cell -------------------------------------------------------------------------------------------


def _kind(kind: str) -> dict[str, Schema]:
    """The schema of a call of this kind, and one for each of its functions, by name."""
    functions = [describe(kind, name) for name in names(kind)]
    summaries = [{"const": function.name, "description": function.summary} for function in functions]
    by_name = [
        {
            "if": {"properties": {"name": {"const": function.name}}, "required": ["name"]},
            "then": _reference(f"{kind}.{function.name}"),
        }
        for function in functions
    ]
    settings_by_name: dict[str, list[Schema]] = {}  # setting -> the different schemas that functions have for it
    for function in functions:
        for setting in function.settings:
            alternatives = settings_by_name.setdefault(setting.name, [])
            alternatives += [value for value in [_value(setting, kind)] if value not in alternatives]
    unnamed = {  # the name may stand in another part of the file: any function's settings are allowed
        key: {"anyOf": alternatives} if len(alternatives) > 1 else alternatives[0]
        for key, alternatives in settings_by_name.items()
    }
    of_no_name = {"if": {"not": {"required": ["name"]}}, "then": {"properties": unnamed}}
    call = {
        "type": "object",
        "properties": {"name": {"type": "string", "anyOf": [*summaries, {}]}},
        "allOf": [*by_name, of_no_name],
    }
    return {
        kind: {"anyOf": [{"type": "string"}, call]},
        **{f"{kind}.{function.name}": _function(function) for function in functions},
    }


def _function(signature: Signature) -> Schema:
    """The schema of the settings of a function or a settings class, none of them required."""
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
    """The schema of a setting's value; for attacks also a list, each value of which becomes a metric."""
    if setting.kind is not None:
        return _or_null(_reference(setting.kind))  # null also where another label of the axis chooses the function
    if setting.type_name in ("Weights", "ClientRounds"):
        # a mapping: labels of the cell with the weights, rounds of clients
        return {"type": ["string", "object", "null"]}
    plain = setting.adapter.json_schema()
    alternatives = plain.pop("anyOf", [plain])
    if any(alternative.get("type") in ("number", "integer") for alternative in alternatives):
        alternatives = [*alternatives, NUMBER]
    if kind == "Attack":
        alternatives = [*alternatives, {"type": "array"}]
    return {"anyOf": alternatives} if len(alternatives) > 1 else alternatives[0]


# --- which names there are ------------------------------------------------------------------------------------------


def _known_names(kind: str) -> Schema:
    """A schema that demands names of our tables in a call and in all calls nested in it."""
    functions = [describe(kind)] if kind in (*CLASSES, "Experiment") else [describe(kind, name) for name in names(kind)]
    # (setting, kind): functions of one kind may have different kinds of call at the same setting
    calls = {(setting.name, setting.kind) for function in functions for setting in function.settings if setting.kind}
    nested: Schema = {
        key: {"anyOf": [*(_reference(f"Known{kind}") for _, kind in group), {"type": "null"}]}
        for key, group in itertools.groupby(sorted(calls), lambda call: call[0])
    }
    if kind in (*CLASSES, "Experiment"):
        return {"properties": nested}
    all_names = {"enum": [function.name for function in functions]}
    return {"if": {"type": "string"}, "then": all_names, "else": {"properties": {"name": all_names, **nested}}}


def _in_every_cell(cell: Schema) -> Schema:
    """A schema that applies `cell` to all settings of cells in a file, and demands known names in all attacks."""
    attacks = {"properties": {"attacks": _mapping_of(_or_null(_reference("KnownAttack")))}}
    overrides = {"items": {"properties": {"set": cell}}}
    in_evaluate = {**attacks["properties"], "overrides": {"items": {"properties": {"set": attacks}}}}
    preset = {"base": cell, "set": cell, "overrides": overrides, "evaluate": {"properties": in_evaluate}}
    return {
        "properties": {
            "base": cell,
            "axes": _mapping_of(_mapping_of(cell)),
            "grid": {"properties": {"overrides": overrides}},
            "evaluate": {"properties": in_evaluate},
            "presets": _mapping_of({"properties": preset}),
        }
    }
