"""Filters such as "model=nin and not aggregator=sfat": which cells of a plan."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fatbench.errors import NothingMatched, SpecError, did_you_mean
from fatbench.suite import threats
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.types import number

_QUOTED = r"'[^']*'|\"[^\"]*\""
_TOKEN = re.compile(
    rf"\s*(?:(?P<op>!=|==|=|<=|>=|<|>|\(|\))|(?P<list>\[(?:{_QUOTED}|[^\]'\"])*\])|(?P<quoted>{_QUOTED})"
    r"|(?P<word>[^\s()=!<>]+))"
)

_DEEPEST = 100  # "not" and "(" within each other: each is a few calls deep, and Python allows about a thousand


def select(plan: Plan, where: str) -> Plan:
    """The plan with only the cells that a filter such as "model=nin and method in [FAT, SFAT]" keeps.

    A name is an axis, a setting by its dotted path, a call of the cell (`model`, `aggregator`: compared with its
    name), or `threat` and `labels` of an attack on privacy (`fatbench.suite.threats`).
    SpecError: cannot be read, an unknown name, or a word that a name has in no cell; NothingMatched: no cell is left.
    """
    test, compared = _parse_filter(where)
    facts = _facts_of(plan)
    fact_names = functools.cache(lambda: {name for cell_facts in facts for name in cell_facts})
    cells = [cell for cell, cell_facts in zip(plan.cells, facts, strict=True) if test(cell_facts, fact_names)]
    if not cells:
        text = f"-k '{where}' matches none of the {len(plan.unique())} cells of '{plan.suite}'"
        raise NothingMatched(text + _never(facts, compared))
    if misspelt := _never(
        facts, [(name, value) for name, value in compared if not (value == "none" or _is_number(value))]
    ):
        raise SpecError(f"-k '{where}'{misspelt}")  # else a misspelt label is ignored
    return replace(plan, cells=cells, where=where)


def _is_number(text: str) -> bool:
    """Whether it is one: seeds and sizes are given generously, for presets that have fewer."""
    try:
        float(number(text))
    except ValueError:
        return False
    return True


def _never(facts: list[dict[str, str]], compared: list[tuple[str, str]]) -> str:
    """The tail of a message: the first value asked for that its name has in no cell, and what it could have been."""
    for name, value in compared:
        values_here = {cell_facts[name] for cell_facts in facts if name in cell_facts}
        if value.lower() not in {cell_facts.lower() for cell_facts in values_here}:
            several = [part.strip() for part in re.split("[,|]", value)]
            if len(several) > 1 and values_here.issuperset(several):
                return f": {name} is never '{value}' (write {name} in [{', '.join(several)}])"
            return f": {name} is never '{value}'{did_you_mean(value, values_here) if len(values_here) <= 20 else ''}"
    return ""


def _facts_of(plan: Plan) -> list[dict[str, str]]:
    """Everything a filter can ask of each cell: name -> value as text."""
    settings_by_point: dict[
        tuple[int, ...], dict[str, str]
    ] = {}  # the seeds of a point share all settings but the seed
    facts_by_cell = []
    for cell in plan.cells:
        shared = tuple(id(value) for key, value in cell.spec.items() if key != "seed")
        if shared not in settings_by_point:
            settings_by_point[shared] = _settings(cell)
        labels = {"id": cell.id, **{axis.lower(): label for axis, label in cell.key.items()}, **cell.key}
        facts_by_cell.append({**settings_by_point[shared], "seed": str(cell.spec["seed"]), **labels})
    return facts_by_cell


def _settings(cell: Cell) -> dict[str, str]:
    """Every setting of a cell by its path, and by its last name."""
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
    return facts | threats.of_cell(cell.spec)


def joined(filters: list[str]) -> str:
    """One filter that holds where all of these hold. SpecError: one of them cannot be read by itself."""
    if len(filters) == 1:
        return filters[0]
    for filter_text in filters:
        _parse_filter(filter_text)
    return " and ".join(f"({filter_text})" for filter_text in filters)


def _parse_filter(text: str) -> tuple[Any, list[tuple[str, str]]]:
    """The test of a cell's facts, and the names and values that it compares with "="."""
    tokens: list[str] = []
    comparisons: list[tuple[str, str]] = []
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if not match:
            raise SpecError(f"-k: cannot read '{text[position:].strip()}' in '{text}'")
        tokens.append(match.group().strip())
        position = match.end()
    tokens.append("")
    depth = 0

    def fail(problem: str, hint: str = "") -> SpecError:
        example = "write for example: model=nin and method in [FAT, 'SFAT (released)']"
        return SpecError(f"-k: {problem} in '{text}'{hint} ({example})")

    def chain(word: str, read_term: Callable[[], Any], decides: bool) -> Any:
        """Terms joined by a word, of which the first that is `decides` decides: one call, however many they are."""
        terms = [read_term()]
        while tokens[0].lower() == word:
            tokens.pop(0)
            terms.append(read_term())

        def test(facts: dict[str, str], fact_names: Callable[[], set[str]]) -> bool:
            for term in terms:
                if term(facts, fact_names) == decides:
                    return decides
            return not decides

        return test if len(terms) > 1 else terms[0]

    def disjunction() -> Any:
        return chain("or", conjunction, True)

    def conjunction() -> Any:
        return chain("and", negation, False)

    def opposite(test: Any) -> Any:
        return lambda facts, known: not test(facts, known)

    def negation() -> Any:
        nonlocal depth
        if tokens[0].lower() not in ("not", "("):
            return comparison()
        depth += 1
        if depth > _DEEPEST:
            raise SpecError(f"-k: nested too deeply: '{text[:60]}...'")
        if tokens.pop(0) == "(":
            test = disjunction()
            if tokens.pop(0) != ")":
                raise fail("a ')' is missing")
        else:
            test = opposite(negation())
        depth -= 1
        return test

    def comparison() -> Any:
        name = tokens.pop(0)
        if name and (tokens[0].lower() == "in" or [word.lower() for word in tokens[:2]] == ["not", "in"]):
            negated = tokens.pop(0).lower() == "not"
            if negated:
                tokens.pop(0)
            return one_of(name, not negated)
        if not name or tokens[0] not in ("=", "==", "!=", "<", ">", "<=", ">="):
            raise fail(f"expected name=value at '{name}'")
        op, written_value = tokens.pop(0), tokens.pop(0)
        if not written_value or _TOKEN.match(written_value)["op"]:  # type: ignore[index]
            raise fail(f"expected a value behind '{name}{op}'")
        value = written_value.strip("'\"")
        return compared(name, op, value)

    def one_of(name: str, is_in: bool) -> Any:
        """`name in [a, b]`, or `not in` where it is not `is_in`."""
        list_text = tokens.pop(0)
        if not (list_text.startswith("[") and list_text.endswith("]")):
            raise fail(f"expected a list such as [FAT, SFAT] behind '{name} in'")
        values = [value for value in map(_unquoted, re.findall(rf"(?:{_QUOTED}|[^,])+", list_text[1:-1])) if value]
        if not values:
            raise fail(f"the list behind '{name} in' is empty")
        tests = [compared(name, "=", value) for value in values]
        return lambda facts, known: any(test(facts, known) for test in tests) == is_in

    def compared(name: str, op: str, value: str) -> Any:
        if op in ("=", "=="):
            comparisons.append((name, value))

        def test(facts: dict[str, str], fact_names: Callable[[], set[str]]) -> bool:
            if name not in facts and name not in fact_names():
                plain_names = [k for k in fact_names() if "." not in k]
                raise SpecError(f"-k: no cell has '{name}'{did_you_mean(name, plain_names)}")
            if name not in facts:
                return op == "!="
            return _compare(facts[name], op, value)

        return test

    result = disjunction()
    if tokens[0]:
        raise fail(f"unexpected '{tokens[0]}'", ": a value with spaces or brackets needs quotes")
    return result, comparisons


def _unquoted(text: str) -> str:
    """A name as it stands in a list, without the spaces around it and its quotation marks."""
    text = text.strip()
    return text[1:-1] if text[:1] in ("'", '"') and text[-1:] == text[:1] else text


def _compare(value: str, op: str, wanted_value: str) -> bool:
    if op in ("=", "=="):
        return value.lower() == wanted_value.lower()
    if op == "!=":
        return value.lower() != wanted_value.lower()
    try:
        a, b = float(number(value)), float(number(wanted_value))
    except ValueError:
        return False
    return {"<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b}[op]
