"""Filters such as "model=nin and not aggregator=sfat", which select cells of a plan."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fatbench.errors import NothingMatched, SpecError, did_you_mean, shown
from fatbench.suite import threats
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.types import number

_QUOTED = r"'[^']*'|\"[^\"]*\""
_TOKEN = re.compile(
    rf"\s*(?:(?P<op>!=|==|=|<=|>=|<|>|\(|\))|(?P<list>\[(?:{_QUOTED}|[^\]'\"])*\])|(?P<quoted>{_QUOTED})"
    r"|(?P<word>[^\s()=!<>]+))"
)

Where = str | Sequence[str] | Mapping[str, Any] | None  # a filter, several, or the labels of each axis
LETTERS = 4  # at least of a cell's id, to name it
_MAX_DEPTH = 100  # "not" and "(" within each other: each is a few calls deep, and Python allows about a thousand


def select(plan: Plan, where: str) -> Plan:
    """The plan with only the cells that a filter selects, such as "model=nin and method in [FAT, SFAT]".

    A name is an axis, a setting by its dotted path, a call of the cell (`model`, `aggregator`, compared by its name),
    `cell` (the first letters of an id), or `threat` and `labels` of an attack on privacy (`fatbench.suite.threats`).
    SpecError for a text that cannot be read, an unknown name, or a value that no cell has; NothingMatched if no cell is
    left.
    """
    test, comparisons = _parse_filter(where)
    facts = _facts_of(plan)
    fact_names = functools.cache(lambda: {name for cell_facts in facts for name in cell_facts})
    cells = [cell for cell, cell_facts in zip(plan.cells, facts, strict=True) if test(cell_facts, fact_names)]
    if not cells:
        text = f" matches none of the {len(plan.unique())} cells of '{plan.suite}'"
        raise NothingMatched(text + _unmatched_text(facts, comparisons), option=f"k '{where}'")
    # a number, or "none", may be a value that only other presets have
    if misspelt := _unmatched_text(
        facts, [(name, value) for name, value in comparisons if not (value == "none" or _is_number(value))]
    ):
        # or a misspelt label of `in [...]` would select nothing unseen
        raise SpecError(misspelt.removeprefix(": "), option=f"k '{where}'")
    return replace(plan, cells=cells, where=where)


def _is_number(text: str) -> bool:
    """Whether a value is a number; a number may match no cell, since `seed in [0, 1, 2]` should suit every preset."""
    try:
        float(number(text))
    except ValueError:
        return False
    return True


def _unmatched_text(facts: list[dict[str, str]], comparisons: list[tuple[str, str]]) -> str:
    """The end of a message, about the first compared value that no cell has; empty if each is in some cell."""
    for name, value in comparisons:
        cell_values = {cell_facts[name] for cell_facts in facts if name in cell_facts}
        if name == "cell" and len(value) >= LETTERS:
            cell_values |= {id[: len(value)] for id in cell_values}
        if value.lower() not in {cell_facts.lower() for cell_facts in cell_values}:
            # "FAT,SFAT" or "FAT|SFAT", as other programs write alternatives
            alternatives = [text.strip() for text in re.split("[,|]", value)]
            if len(alternatives) == 1:  # "[FAT SFAT]", a list without its comma
                alternatives = value.split()
            if len(alternatives) > 1 and cell_values.issuperset(alternatives):
                return f": {name} is never '{value}' (write {name} in [{', '.join(alternatives)}])"
            return f": {name} is never '{value}'{did_you_mean(value, cell_values)}"
    return ""


def _facts_of(plan: Plan) -> list[dict[str, str]]:
    """For each cell all that a filter can name: name -> value as text."""
    settings_by_point: dict[tuple[int, ...], dict[str, str]] = {}  # seeds of a point share all other settings
    facts_by_cell = []
    for cell in plan.cells:
        shared = tuple([id(value) for key, value in cell.spec.items() if key != "seed"])
        if shared not in settings_by_point:
            settings_by_point[shared] = _settings(cell)
        of_cell = {"seed": str(cell.spec["seed"]), "id": cell.id, "cell": cell.id}
        labels = {axis.lower(): label for axis, label in cell.key.items()} | cell.key
        facts_by_cell.append({**settings_by_point[shared], **of_cell, **labels})
    return facts_by_cell


def _settings(cell: Cell) -> dict[str, str]:
    """Every setting of a cell by its dotted path, and by the last name of the path if that is free."""
    facts: dict[str, str] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, Mapping):
            if "name" in node:
                facts.setdefault(path[-1], str(node["name"]))
                facts[".".join(path)] = str(node["name"])
            for key, value in node.items():
                walk(value, (*path, key))
        elif path[-1] != "name":
            facts[".".join(path)] = str(node)
            facts.setdefault(path[-1], str(node))

    for key, value in cell.spec.items():
        walk(value, (key,))
    return facts | threats.of_cell(cell.spec)


RUN_KEYS = ("precision", "device", "commit")
RUN = re.compile(r"\s*run\.(\w+)\s*=\s*['\"]?([^'\"]*?)['\"]?\s*")


def filter_text(where: Where) -> str | None:
    """The text of a filter of cells. SpecError: it chooses runs, and who asks reads none."""
    text, run = cells_and_run(where)
    if run:
        raise SpecError("only report, plot and compare choose runs", option=f"k run.{run}")
    return text


def cells_and_run(where: Where) -> tuple[str | None, str]:
    """The text of a filter of cells, and which run of a cell is read: "precision=fp32" of "run.precision=fp32".

    where: {"method": "FAT", "clients": [5, 10]} is "(method='FAT') and (clients='5' or clients='10')"; of several texts
    each is a filter by itself, and all must match. SpecError: it is none of these, or chooses runs twice.
    """
    if not isinstance(where, str | Mapping | Sequence | None):
        raise SpecError(f"where: expected a filter such as 'method=FAT', or a mapping, got {shown(where)}")
    given = [] if where is None else [where] if isinstance(where, str) else where
    texts = [*given]
    if isinstance(where, Mapping):
        texts = []
        for name, value in where.items():
            value = value.tolist() if hasattr(value, "tolist") else value  # of numpy
            several = map(str, value if isinstance(value, list | tuple | set | range) else [value])
            quoted = (f'"{label}"' if "'" in label else f"'{label}'" for label in several)
            texts.append(" or ".join(f"{name}={label}" for label in quoted))
    runs = [match for text in texts if (match := RUN.fullmatch(text))]
    for match in runs:
        if match[1] not in RUN_KEYS:
            raise SpecError(f"a run has no '{match[1]}'{did_you_mean(match[1], RUN_KEYS)}", option="k")
    if len(runs) > 1:
        raise SpecError("only one of run.precision, run.device and run.commit can be given", option="k")
    cells = [text for text in texts if not RUN.fullmatch(text)]
    for one in cells if len(cells) > 1 else ():  # "a=b or" and "c=d" would be read as one
        _parse_filter(one)
    joined = " and ".join(f"({text})" for text in cells) if len(cells) > 1 else cells[0] if cells else None
    return joined, "=".join(runs[0].groups()) if runs else ""


def _parse_filter(text: str) -> tuple[Any, list[tuple[str, str]]]:
    """(test of a cell's facts, (name, value) of each comparison with "=")."""
    tokens: list[str] = []
    comparisons: list[tuple[str, str]] = []
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if not match:
            raise SpecError(f"cannot read '{text[position:].strip()}' in '{text}'", option="k")
        tokens.append(match.group().strip())
        position = match.end()
    tokens.append("")  # the end, so that reading one token ahead needs no test
    depth = 0

    def fail(problem: str, hint: str = "") -> SpecError:
        example = "write for example: model=nin and method in [FAT, 'SFAT (released)']"
        return SpecError(f"{problem} in '{text}'{hint} ({example})", option="k")

    def chain(word: str, read_term: Callable[[], Any], decides: bool) -> Any:
        """Terms joined by "and" or "or": the first equal to `decides` decides, in one call for any number of terms."""
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
        return chain("or", lambda: chain("and", negation, False), True)

    def negation() -> Any:
        nonlocal depth
        if tokens[0].lower() not in ("not", "("):
            return comparison()
        depth += 1
        if depth > _MAX_DEPTH:
            raise SpecError(f"nested too deeply: '{text[:60]}...'", option="k")
        if tokens.pop(0) == "(":
            test = disjunction()
            if tokens.pop(0) != ")":
                raise fail("a ')' is missing")
        else:
            negated = negation()

            def test(facts: dict[str, str], fact_names: Callable[[], set[str]]) -> bool:
                return not negated(facts, fact_names)

        depth -= 1
        return test

    def comparison() -> Any:
        name = tokens.pop(0)
        if name and (tokens[0].lower() == "in" or [word.lower() for word in tokens[:2]] == ["not", "in"]):
            negated = tokens.pop(0).lower() == "not"
            if negated:
                tokens.pop(0)
            return membership(name, not negated)
        if not name or tokens[0] not in ("=", "==", "!=", "<", ">", "<=", ">="):
            raise fail(f"expected name=value at '{name}'")
        op, value_text = tokens.pop(0), tokens.pop(0)
        if not value_text or _TOKEN.match(value_text)["op"]:  # type: ignore[index]
            raise fail(f"expected a value after '{name}{op}'")
        value = value_text.strip("'\"")
        return comparison_test(name, op, value)

    def membership(name: str, is_in: bool) -> Any:
        """The test of `name in [a, b]`, or of `not in` if `is_in` is False."""
        list_text = tokens.pop(0)
        if not (list_text.startswith("[") and list_text.endswith("]")):
            raise fail(f"expected a list such as [FAT, SFAT] after '{name} in'")
        texts = [text.strip() for text in re.findall(rf"(?:{_QUOTED}|[^,])+", list_text[1:-1])]
        texts = [text[1:-1] if text[:1] in ("'", '"') and text[-1:] == text[:1] else text for text in texts]
        values = [text for text in texts if text]
        if not values:
            raise fail(f"the list after '{name} in' is empty")
        tests = [comparison_test(name, "=", value) for value in values]
        return lambda facts, known: any(test(facts, known) for test in tests) == is_in

    def comparison_test(name: str, op: str, value: str) -> Any:
        if op in ("=", "=="):
            comparisons.append((name, value))

        def test(facts: dict[str, str], fact_names: Callable[[], set[str]]) -> bool:
            if name not in facts and name not in fact_names():
                plain_names = [k for k in fact_names() if "." not in k]
                raise SpecError(f"no cell has '{name}'{did_you_mean(name, plain_names)}", option="k")
            if name not in facts:  # another cell has it: what is absent differs from every value
                return op == "!="
            if name == "cell":  # the first letters of an id do
                value_of_cell = facts[name] if len(value) < LETTERS else facts[name][: len(value)]
                return _compare(value_of_cell, op, value)
            return _compare(facts[name], op, value)

        return test

    result = disjunction()
    if tokens[0]:
        raise fail(f"unexpected '{tokens[0]}'", ": a value with spaces or brackets needs quotes")
    return result, comparisons


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
