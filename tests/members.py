"""Any member of any table, ready to be called: its settings from its docstring, else from what their types allow.

A line `Example: {attack: PGD, steps: 1}` of a docstring gives settings that no type does, or that make it quick.
A new member needs no other entry in the tests that hold for every member.
"""

from __future__ import annotations

import ast
import functools
from typing import Any, get_args

import yaml
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import strategies as st

from fatbench.engine.inject import asks, granted
from fatbench.suite import calls, formulas, signatures, types

# A setting that is itself a call is given that member.
PLAIN = {
    "Attack": "fgsm", "Objective": "standard", "Aggregator": "samples", "Defence": "none", "Inversion": "patch_ls",
    "Proximal": "squared",
}  # fmt: skip


def settings(kind: str, name: str) -> dict[str, Any]:
    """Settings as a suite writes them: those of the docstring, and the others that have no default and are no class."""
    signature = signatures.describe(kind, name)
    found: dict[str, Any] = {}
    for text in formulas.lines(signature.doc, "Example:"):
        found |= yaml.safe_load(text)
    for setting in signature.settings:
        inner, optional = setting.kind, setting.optional
        needed = setting.default is signatures.REQUIRED and setting.name not in found
        if needed and not optional and inner not in signatures.CLASSES:
            found[setting.name] = PLAIN[inner] if inner else value(setting.annotation)
    return found


def value(annotation: str) -> Any:
    """A value that a type of `fatbench.suite.types`, a bool or a Literal allows."""
    if annotation.startswith("Literal"):
        return choices(annotation)[0]
    if annotation == "bool":
        return True
    if annotation == "Radius":
        return "8/255"
    if annotation == "Count":
        return 1
    kind, low, high = limits(annotation)
    return kind(1) if kind is int else min(max(0.5, low), high)


def choices(annotation: str) -> list[Any]:
    return list(ast.literal_eval(annotation.removeprefix("Literal")))


def limits(annotation: str) -> tuple[type, float, float]:
    """(int or float, smallest, largest) of a numeric type, a little inside where the limit itself is not allowed."""
    kind, *about = get_args(getattr(types, annotation))
    low, high = -30.0, 30.0
    for limit in about:
        match limit:
            case Ge(ge=bound):
                low, high = bound, bound + 5.0
            case Gt(gt=bound):
                low, high = bound + 0.1, bound + 3.0
    for limit in about:
        match limit:
            case Le(le=bound):
                high = bound
            case Lt(lt=bound):
                high = bound - 0.1
    return kind, low, high


def allowed(annotation: str, most: int) -> st.SearchStrategy[Any]:
    """Any value that a type allows, of the whole numbers at most `most`."""
    if annotation.startswith("Literal"):
        return st.sampled_from(choices(annotation))
    if annotation == "bool":
        return st.booleans()
    kind, low, high = limits(annotation)
    return st.integers(int(low), most) if kind is int else st.floats(low, high)


def arguments(kind: str, name: str) -> dict[str, Any]:
    """The same settings as the function takes them: fractions as numbers, calls as functions that hold their own."""
    kinds = {s.name: s.kind for s in signatures.describe(kind, name).settings}
    return {
        key: member(inner, given) if (inner := kinds.get(key)) else types.number(given)
        for key, given in settings(kind, name).items()
    }


def member(kind: str, name: str, **more: Any) -> functools.partial[Any]:
    """The function with its settings, and with `more` of them where it has such settings."""
    known = {setting.name for setting in signatures.describe(kind, name).settings}
    given = {**arguments(kind, name), **{key: value for key, value in more.items() if key in known}}
    return functools.partial(calls.function(signatures.describe(kind, name)), **given)


def takes(kind: str, name: str, setting: str) -> bool:
    return setting in {one.name for one in signatures.describe(kind, name).settings}


def given_what_it_asks(function: Any, **offers: Any) -> Any:
    """The function with what the engine would give it, out of `offers`."""
    return functools.partial(function, **granted(function, {key: lambda v=v: v for key, v in offers.items()}))


def stacks(name: str) -> bool:
    """Whether clients with this objective may train as one program: not where it asks which client it is."""
    return not asks(calls.function(signatures.describe("Objective", name)), "client")
