"""Expressions in docstrings: what a function costs, what is known of a data set, what a model is made of.

A line `Label: <expression>` of a registered function is read from its source and evaluated before anything is imported.
Several lines of one label are terms of a sum.

    Forward, Backward    image passes per image; the name of a nested call stands for its own passes
    Up, Down             of an algorithm: models a client sends and receives in a round, given `batches` of an epoch
    Deploys              of an algorithm whose clients have their own models: how many are attacked, given `clients`
    Steps                of an algorithm that does not train for `epochs`: gradient steps of the whole run
    Parameters           of a model, given `channels`, `side` and `classes`
    Train, Test          of a data set: images, "about 8800" where the files decide
    Classes, Side, Channels    of a data set
    Float32              of an attack: values of --precision under which it computes in float32 all the same
    Parts                what a model is made of, an algorithm trains, a data set says: words, no expression
    Role                 of an attack: natural, corruption or attack (the default), a word; see `facts.role`
    Example              settings as in a suite, no expression: the tests that hold for every member call it with them
    Bears                of an aggregator: malicious clients of a round that it is made for
    Refuse if <condition>: <why>    a cell that the function cannot run; see `fatbench.suite.facts`

An expression has numbers, texts, names, dotted names (`local.epochs`), + - * / // % **, one comparison, `in`, `is`,
`and`, `or`, `not`, `a if b else c`, and the FUNCTIONS below. What is not known makes everything that is computed from
it unknown, and an unknown condition refuses nothing. Comparisons count as 1 or 0; `a or b` is b where a is not set.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fatbench import settings
from fatbench.errors import SpecError
from fatbench.suite import types
from fatbench.suite.calls import Call
from fatbench.suite.memoise import memoised_part
from fatbench.suite.signatures import CLASSES, Signature, describe

UNKNOWN: Any = object()
Lookup = Callable[..., Any]  # a dotted name, part by part, -> its value


def count(folder: str, pattern: str) -> Any:
    """How many entries of a folder, absolute or below that of the data sets, match; unknown where none does."""
    place = settings.data_folder() / Path(folder).expanduser()
    found = (entry for entry in place.glob(pattern) if not entry.name.startswith("."))
    return sum(1 for _ in found) or UNKNOWN


def numbers(text: str) -> list[int]:
    """The whole numbers in a text such as "1,9"."""
    return [int(part) for part in re.findall(r"\d+", text)]


def _extreme(which: Callable[..., Any]) -> Callable[..., Any]:
    def function(*values: Any) -> Any:
        found = values[0] if len(values) == 1 else values
        return which(found) if found else UNKNOWN

    return function


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": _extreme(min),
    "max": _extreme(max),
    "round": round,
    "numbers": numbers,
    "count": count,
}
_ARITHMETIC = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le,
}  # fmt: skip
_EQUALITY: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip


Value = Callable[[Lookup], Any]


def evaluate(text: str, lookup: Lookup) -> Any:
    """The value of an expression, or UNKNOWN. ValueError: it cannot be read, or `lookup` does not know a name."""
    return _compiled(text)(lookup)


@functools.cache
def _compiled(text: str) -> Value:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"'{text.strip()}' is not an expression") from None
    return _value(tree)


@functools.cache
def named(text: str) -> frozenset[str]:
    """The names that an expression may ask for, of a dotted one the first part; none, if it cannot be read."""
    try:
        nodes = ast.walk(ast.parse(text.removeprefix("about ").strip(), mode="eval"))
    except SyntaxError:
        return frozenset()
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name))


def _value(node: ast.expr) -> Value:
    """A function that asks `lookup` for names and gives the expression's value."""
    match node:
        case ast.Constant(value=constant):
            return lambda lookup: constant
        case ast.Name() | ast.Attribute():
            names = ast.unparse(node).split(".")
            return lambda lookup: lookup(*names)
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
            type(op) in _ARITHMETIC
        ):
            function, a, b = _ARITHMETIC[type(op)], _value(left), _value(right)
            return lambda lookup: _known(function, a(lookup), b(lookup))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _EQUALITY:
            return functools.partial(_equality, _EQUALITY[type(op)], _value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _value(operand)
            return lambda lookup: _known(operator.neg, inner(lookup))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return functools.partial(_not, _value(operand))
        case ast.BoolOp(op=op, values=values):
            return functools.partial(_first, isinstance(op, ast.Or), [_value(each) for each in values])
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return functools.partial(_choice, _value(test), _value(body), _value(orelse))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            called, given = FUNCTIONS[name], [_value(each) for each in args]
            return lambda lookup: _known(called, *(each(lookup) for each in given))
    raise ValueError(f"'{ast.unparse(node)}' is not allowed in an expression")


def _equality(function: Callable[[Any, Any], bool], left: Value, right: Value, lookup: Lookup) -> Any:
    a, b = left(lookup), right(lookup)
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else function(a, b)


def _not(operand: Value, lookup: Lookup) -> Any:
    value = operand(lookup)
    return UNKNOWN if value is UNKNOWN else not value


def _first(decides: bool, values: list[Value], lookup: Lookup) -> Any:
    """The value of `or` (decides True) and `and` (False): the first that decides; unknown if one before it was."""
    unknown, value = False, None
    for each in values:
        value = each(lookup)
        if value is UNKNOWN:
            unknown = True
        elif bool(value) is decides:
            return value
    return UNKNOWN if unknown else value


def _choice(test: Value, body: Value, orelse: Value, lookup: Lookup) -> Any:
    chosen = test(lookup)
    return UNKNOWN if chosen is UNKNOWN else (body if chosen else orelse)(lookup)


def _known(function: Callable[..., Any], *values: Any) -> Any:
    """The function's value where every argument is known and set."""
    if any(value is None or value is UNKNOWN for value in values):
        return UNKNOWN
    return function(*values)


@functools.cache
def lines(doc: str, start: str) -> list[str]:
    """What stands behind `start` in a docstring's lines; a line that is indented more goes on with the one before."""
    found = re.findall(rf"^{start} +(\S.*(?:\n[ \t]+\S.*)*)$", doc, re.MULTILINE)
    return [" ".join(text.split()) for text in found]


def unreadable(signature: Signature, line: str, error: Exception) -> SpecError:
    """The error of a line that cannot be evaluated."""
    return SpecError(f"{signature.file}:{signature.line}: '{signature.name}' has a line '{line}': {error}")


def plain(value: Any) -> Any:
    """A setting's value for an expression: fractions as floats."""
    return value if isinstance(value, bool) else types.number(value)


def passes(call: Call | None, **replaced: float) -> tuple[float, float]:
    """(forward, backward) passes per image of one call, from the docstring's Forward: and Backward: lines.

    In an expression a setting stands for its value (or for the one in `replaced`), a nested call or settings class for
    its own passes. A function without the lines costs what the function of the same kind among its settings costs.
    """
    if call is None:
        return 0.0, 0.0
    forward, backward = (formula(call, label, **replaced) for label in ("Forward", "Backward"))
    return forward or 0.0, backward or 0.0


def formula(call: Call, label: str, **variables: float | None) -> float | None:
    """The value of the docstring's lines `label: <expression>`; None without such a line, or where it is unknown.

    Several lines of one label are terms of a sum. A variable that is None is unknown. A function around another of its
    kind, and without such a line, has the value of that one.
    """
    if call.kind == "Data":  # files that it counts come and go
        return _formula(call, label, variables)
    if not lines(call.signature.doc, f"{label}:") and (inner := call.wrapped):
        return formula(inner, label, **variables)
    asked = _asked(call.signature.doc, label)
    given = {name: value for name, value in variables.items() if name in asked}
    find = functools.partial(_formula, call, label, given)
    found: float | None = memoised_part(label, call.kind, call, find, *given.items())
    return found


@functools.cache
def _asked(doc: str, label: str) -> frozenset[str]:
    """The names in the lines `label:` of a docstring, and of the settings classes, which have the same variables."""
    docs = [doc, *(describe(kind).doc for kind in CLASSES)]
    return frozenset(name for each in docs for text in lines(each, f"{label}:") for name in named(text))


def _formula(call: Call, label: str, variables: Mapping[str, float | None]) -> float | None:
    known = call.signature.by_name

    def lookup(name: str, *path: str) -> Any:
        if name in variables:
            return UNKNOWN if variables[name] is None else variables[name]
        if name not in known:
            raise ValueError(f"it has no setting '{name}'")
        if path or known[name].kind is None:
            return member(call, (name, *path))
        if (inner := call[name]) is None:
            return 0.0
        shared = variables if inner.kind in CLASSES else {}  # a settings class is part of the call
        return formula(inner, label, **shared) or 0.0

    total: list[float] = []
    for text in lines(call.signature.doc, f"{label}:"):
        try:
            value = evaluate(text.removeprefix("about "), lookup)
        except (ValueError, TypeError) as error:
            raise unreadable(call.signature, f"{label}: {text}", error) from None
        if value is UNKNOWN or value is None:
            return None
        total.append(float(value))
    return math.fsum(total) if total else None


def parts(call: Call) -> tuple[str, ...]:
    """The words of the docstring's line `Parts:`, such as ("edge", "server")."""
    found = lines(call.signature.doc, "Parts:")
    return tuple(word.strip() for text in found for word in text.split(","))


def member(value: Any, path: tuple[str, ...]) -> Any:
    """What a dotted name says of a call: a setting, its `name`, its `parts`, or a docstring line such as `Classes`.

    None: the call has no such setting, or it is not set.
    """
    if value is None or not path:
        return value if isinstance(value, Mapping) else plain(value)
    key, *rest = path
    if not isinstance(value, Call):
        return None
    if key == "parts":
        return parts(value)
    if key in value:
        return member(value[key], tuple(rest))
    if lines(value.signature.doc, f"{key.capitalize()}:"):
        found = formula(value, key.capitalize())
        return UNKNOWN if found is None else found
    return UNKNOWN if value.kind == "Data" else None
