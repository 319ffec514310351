"""YAML read by libyaml, ten times as fast as in Python: plain mappings, lists and scalars with their lines.

libyaml finds the structure; what a plain scalar is (a number, a text) follows ruamel's aggregators of YAML 1.2.
Whatever is unusual (a tag, a date, a key given twice, a mistake) is left to ruamel, and so is everything where PyYAML
was built without libyaml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml.resolver import implicit_resolvers

from fatbench.suite import input_limits
from fatbench.suite.located import LocatedMap

_PREFIX = "tag:yaml.org,2002:"
_LITERALS = {"true": True, "false": False, "null": None, "~": None, "": None}
_DECIMAL = re.compile(r"[-+]?(0|[1-9]\d*)\Z")
_FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?\Z")
_RESOLVERS: dict[str, list[tuple[str, Any]]] = {}  # first character -> (tag, what a plain scalar must look like)
for _versions, _tag, _pattern, _first in implicit_resolvers:
    for _character in _first if (1, 2) in _versions else ():
        _RESOLVERS.setdefault(_character, []).append((_tag.removeprefix(_PREFIX), _pattern))


class Unusual(Exception):
    """Something that ruamel reads better, or explains."""


def read(text: str, file: Path) -> LocatedMap | None:
    """What a file says; None: ruamel should read it. SpecError: it is larger than `bounds` allows."""
    loader = getattr(yaml, "CBaseLoader", None)
    if loader is None or "!!" in text:
        return None
    try:
        node = yaml.compose(text, Loader=loader)
        if "*" in text:
            input_limits.values(node, _children, str(file))
        return _value(node, str(file)) if isinstance(node, yaml.MappingNode) else None
    except (yaml.YAMLError, Unusual):
        return None


def _children(node: Any) -> list[Any]:
    if isinstance(node, yaml.MappingNode):
        return [value for _, value in node.value]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _value(node: Any, file: str) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, file)
    if isinstance(node, yaml.SequenceNode):
        if node.tag != f"{_PREFIX}seq":
            raise Unusual
        return [_value(item, file) for item in node.value]
    return _scalar(node, file)


def _mapping(node: Any, file: str) -> LocatedMap:
    """The mapping's keys in order, then those that a merge (<<) adds; the latter have the line of the mapping."""
    if node.tag != f"{_PREFIX}map":
        raise Unusual
    items: dict[str, Any] = {}
    at = f"{file}:{node.start_mark.line + 1}"
    where: dict[str, str] = {}
    merged: list[Any] = []
    for key, value in node.value:
        name = str(_scalar(key, file)) if isinstance(key, yaml.ScalarNode) else ""
        if not name or name in items:
            raise Unusual
        if name == "<<":
            merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
            continue
        items[name] = _value(value, file)
        where[name] = f"{file}:{key.start_mark.line + 1}"
    for other in merged:
        if not isinstance(other, yaml.MappingNode):
            raise Unusual
        for name, value in _mapping(other, file).items():
            if name not in items:
                items[name], where[name] = value, at
    return LocatedMap(items, where, at)


def _scalar(node: Any, file: str) -> Any:
    text: str = node.value
    if node.tag != f"{_PREFIX}str":
        raise Unusual
    if node.style:  # quoted, or a block
        return text
    for tag, pattern in _RESOLVERS.get(text[:1], ()):
        if pattern.match(text):
            if tag == "int" and _DECIMAL.match(text):
                input_limits.digits(text, f"{file}:{node.start_mark.line + 1}")
                return int(text)
            if tag == "float" and _FLOAT.match(text):
                return float(text)
            if tag == "merge":
                return text
            if tag in ("bool", "null") and text.lower() in _LITERALS:
                return _LITERALS[text.lower()]
            raise Unusual
    return text
