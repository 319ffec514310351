"""Filters such as "model=nin and not rule=sfat": which cells of a plan."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fatbench.errors import NothingMatched, SpecError, did_you_mean
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.types import number

_TOKEN = re.compile(r"\s*(?:(?P<op>!=|==|=|<=|>=|<|>|\(|\))|(?P<quoted>'[^']*'|\"[^\"]*\")|(?P<word>[^\s()=!<>]+))")


def select(plan: Plan, where: str) -> Plan:
    """The plan with only the cells that a filter such as "model=nin and rule=sfat" keeps.

    A name is an axis, a setting by its dotted path, or a call of the cell (`model`, `rule`: compared with its name).
    SpecError: cannot be read, or an unknown name; NothingMatched: no cell is left.
    """
    try:
        test = _parse_filter(where)
        known = functools.cache(lambda: {name for cell in plan.cells for name in _facts(cell)})
        cells = [cell for cell in plan.cells if test(_facts(cell), known)]
    except RecursionError:
        raise _too_deep(where) from None
    if not cells:
        raise NothingMatched(f"-k '{where}' matches none of the {len(plan.unique())} cells of '{plan.suite}'")
    return replace(plan, cells=cells)


def _facts(cell: Cell) -> dict[str, str]:
    """Everything a filter can ask of a cell: name -> value as text."""
    facts: dict[str, str] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, Mapping):
            if "name" in node:
                facts[".".join(path)] = facts.setdefault(path[-1], str(node["name"]))
                facts[".".join(path)] = str(node["name"])
            for key, value in node.items():
                walk(value, (*path, key))
        elif path[-1] != "name":
            facts[".".join(path)] = str(node)
            facts.setdefault(path[-1], str(node))

    for key, value in cell.spec.items():
        walk(value, (key,))
    facts |= {"id": cell.id, **{axis.lower(): label for axis, label in cell.key.items()}, **cell.key}
    return facts


def joined(filters: list[str]) -> str:
    """One filter that holds where all of these hold. SpecError: one of them cannot be read by itself."""
    if len(filters) == 1:
        return filters[0]
    for one in filters:
        try:
            _parse_filter(one)
        except RecursionError:
            raise _too_deep(one) from None
    return " and ".join(f"({one})" for one in filters)


def _too_deep(where: str) -> SpecError:
    return SpecError(f"-k: nested too deeply: '{where[:60]}...'")


def _parse_filter(text: str) -> Any:
    tokens: list[str] = []
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if not match:
            raise SpecError(f"-k: cannot read '{text[position:].strip()}' in '{text}'")
        tokens.append(match.group().strip())
        position = match.end()
    tokens.append("")

    def fail(what: str, hint: str = "") -> SpecError:
        example = "write for example: model=nin and not method='SFAT (released)'"
        return SpecError(f"-k: {what} in '{text}'{hint} ({example})")

    def either() -> Any:
        left = both()
        while tokens[0].lower() == "or":
            tokens.pop(0)
            left = functools.partial(lambda a, b, f, k: a(f, k) or b(f, k), left, both())
        return left

    def both() -> Any:
        left = negation()
        while tokens[0].lower() == "and":
            tokens.pop(0)
            left = functools.partial(lambda a, b, f, k: a(f, k) and b(f, k), left, negation())
        return left

    def negation() -> Any:
        if tokens[0].lower() == "not":
            tokens.pop(0)
            return functools.partial(lambda a, f, k: not a(f, k), negation())
        if tokens[0] == "(":
            tokens.pop(0)
            inside = either()
            if tokens.pop(0) != ")":
                raise fail("a ')' is missing")
            return inside
        return comparison()

    def comparison() -> Any:
        name = tokens.pop(0)
        if not name or tokens[0] not in ("=", "==", "!=", "<", ">", "<=", ">="):
            raise fail(f"expected name=value at '{name}'")
        op, given = tokens.pop(0), tokens.pop(0)
        if not given or _TOKEN.match(given)["op"]:  # type: ignore[index]
            raise fail(f"expected a value behind '{name}{op}'")
        value = given.strip("'\"")

        def test(facts: dict[str, str], known: Callable[[], set[str]]) -> bool:
            if name not in facts and name not in known():
                plain = [k for k in known() if "." not in k]
                raise SpecError(f"-k: no cell has '{name}'{did_you_mean(name, plain)}")
            if name not in facts:
                return op == "!="
            return _compare(facts[name], op, value)

        return test

    result = either()
    if tokens[0]:
        raise fail(f"unexpected '{tokens[0]}'", ": a value of several words needs quotes")
    return result


def _compare(have: str, op: str, want: str) -> bool:
    if op in ("=", "=="):
        return have.lower() == want.lower()
    if op == "!=":
        return have.lower() != want.lower()
    try:
        a, b = float(number(have)), float(number(want))
    except ValueError:
        return False
    return {"<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b}[op]
