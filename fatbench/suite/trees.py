"""Trees of plain dicts, lists and values: reading them from YAML, merging them, and finding the line of a key.

While a suite is read, merged and checked, a mistake has only the keys that lead to it (`SpecError.keys`). File and line
are looked up once a message needs them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.composer import Composer
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from fatbench.errors import CONTROL, SpecError

# limits of a file, checked before it is expanded: a few lines of aliases can stand for more than fits into memory
CHARACTERS = 16 * 2**20
LEVELS = 100  # a list in a mapping in a list ...
VALUES = 1_000_000  # every alias written out
DIGITS = 40  # of a whole number

Tree = dict[str, Any]
Keys = tuple[str | int, ...]  # keys of mappings and indices of lists


def merge(base: Any, override: Any) -> Any:
    """`base` overridden key by key; an override that names another function, or a suite, replaces the whole."""
    if not (isinstance(base, dict) and isinstance(override, dict)):
        return override
    if "suite" in override or ("name" in override and override["name"] != base.get("name")):
        return override
    return {**base, **{key: merge(base[key], value) if key in base else value for key, value in override.items()}}


def nested(keys: Sequence[str], value: Any) -> Any:
    """{"algorithm": {"local": {"lr": 0.02}}} from the keys that lead to a value, outermost first."""
    return functools.reduce(lambda inner, key: {key: inner}, reversed(keys), value)


def depth(tree: Any, keys: Iterable[str | int]) -> int:
    """The number of the keys, from the first on, that lead into the tree."""
    found = 0
    for key in keys:
        if not (isinstance(tree, dict) and key in tree):
            break
        tree, found = tree[key], found + 1
    return found


# --- reading ------------------------------------------------------------------------------------------------------


def read(file: Path) -> tuple[Tree, Source]:
    """The mapping of a YAML 1.2 file and its source. SpecError: unreadable, no mapping, or a key is given twice."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SpecError(f"{file} is not a suite file: it is not UTF-8 text{how_to_read(file)}") from None
    except OSError as error:
        raise SpecError(f"{file}: {error.strerror or error}") from None
    return parse(text, file), Source(file, text)


def how_to_read(file: Path) -> str:
    """The end of a message about a file that is no suite: what it is for, as far as its name tells."""
    if file.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.xz")):
        return f" (results are read by fatbench import {file}, and then by the name of their suite)"
    return f" (a database is named with --db {file})" if file.suffix in (".db", ".sqlite") else ""


@functools.lru_cache(maxsize=256)
def parse(text: str, file: Path) -> Tree:
    """The mapping of a file's text; errors as for `read`. The result is cached and must not be changed."""
    if len(text) > CHARACTERS:
        raise SpecError(f"{file}: {len(text)} characters; at most {CHARACTERS} are allowed")
    try:
        tree = _load(text, "safe")
        if not isinstance(tree, dict):
            raise SpecError("expected a mapping at the top level")
        _measure(tree, 1, {})
    except SpecError as error:
        raise SpecError(f"{file}: {error}") from None
    except RecursionError:
        raise SpecError(f"{file}: nested more than {LEVELS} levels deep") from None
    except DuplicateKeyError as error:
        key = re.search(r'duplicate key "?([^"\s]+)"?', str(error.problem or ""))
        line = error.problem_mark.line + 1
        raise SpecError(f"{file}:{line}: the key '{key[1] if key else '?'}' is given twice") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = str(file) if mark is None else f"{file}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or error
        hint = " (a value with a colon needs quotes)" if "mapping values are not allowed" in str(problem) else ""
        raise SpecError(f"{place}: invalid YAML: {problem}{hint}") from None
    except Exception as error:  # a number of 5000 digits, the 45th of a month, !!int x: each its own kind of exception
        raise SpecError(f"{file}: invalid YAML: {' '.join(str(error).split())[:200]}") from None
    # an escape such as "\\e" is a control character once it is read, which a terminal would obey
    pattern = CONTROL if "\\" in text or CONTROL.search(text) else None
    try:
        return dict(_plain(tree, pattern))
    except SpecError as error:
        raise error.at(Places(str(file), (Source(file, text),))) from None


class _Composer(Composer):
    """ruamel's composer, stopped where a file is nested too deeply: its scanner takes the square of the depth."""

    level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.level += 1
        if self.level > LEVELS + 1:
            raise RecursionError
        node = super().compose_node(parent, index)
        self.level -= 1
        return node


def _load(text: str, kind: str) -> Any:
    """ruamel's tree: plain values ("safe"), or values that know their lines ("rt")."""
    reader = YAML(typ=kind, pure=True)
    reader.Composer = _Composer
    return reader.load(text)


def _measure(node: Any, level: int, sizes: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """(values, levels) of a node once its aliases are expanded. SpecError: too many, or it contains itself.

    sizes: of each node by its id, (0, 0) while it is measured. A node behind several aliases is measured once.
    """
    if not isinstance(node, dict | list):
        return 1, 1
    size = sizes.get(id(node))
    if size == (0, 0):
        raise SpecError("an alias refers to the node that contains it")
    if size is None:
        if level > LEVELS:
            raise RecursionError
        sizes[id(node)] = (0, 0)
        inner = [_measure(value, level + 1, sizes) for value in (node.values() if isinstance(node, dict) else node)]
        size = 1 + sum(values for values, _ in inner), 1 + max((levels for _, levels in inner), default=0)
        sizes[id(node)] = size
    if size[0] > VALUES:
        raise SpecError(f"more than {VALUES} values once its aliases are expanded")
    if size[1] > LEVELS:
        raise RecursionError
    return size


def _plain(node: Any, unprintable: re.Pattern[str] | None) -> Any:
    """The node with texts as keys. SpecError: a number is too long, or a text has a control character."""
    key: str | int
    if isinstance(node, dict):
        plain = {}
        for key, value in node.items():
            key = str(key)
            try:
                _plain(key, unprintable)
                plain[key] = _plain(value, unprintable)
            except SpecError as error:
                error.below(key)
                raise
        return plain
    if isinstance(node, list):
        return [_plain(value, unprintable) for value in node]
    if type(node) is int and abs(node) >= 10**DIGITS:
        raise SpecError(f"a number of {len(str(abs(node)))} digits; at most {DIGITS} are allowed")
    if unprintable and isinstance(node, str) and (character := unprintable.search(node)):
        raise SpecError(f"a control character (U+{ord(character[0]):04X})")
    return node


# --- the line of a key ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A file and its text.

    inherited: the number of overrides of the grid that come before those of this file.
    """

    file: Path
    text: str
    inherited: int = 0

    def find(self, keys: Keys) -> tuple[int, str]:
        """(number of the keys that the file has, "file:line" of the last of these)."""
        if keys[:2] == ("grid", "overrides") and len(keys) > 2:
            keys = ("grid", "overrides", int(keys[2]) - self.inherited, *keys[3:])
        node, line, found = _with_lines(self.text), 1, 0
        while found < len(keys):
            key, count = keys[found], 1
            if isinstance(node, CommentedMap) and isinstance(key, int):  # a single mapping stands for a list of one
                found += 1
                continue
            if isinstance(node, CommentedMap):
                matching = [own_key for own_key in node if str(own_key) == key]
                if not matching:  # "algorithm.local.lr" stands for three keys
                    path = f"{'.'.join(map(str, keys[found:]))}."
                    matching = [own_key for own_key in node if path.startswith(f"{own_key}.")]
                    count = len(str(matching[0]).split(".")) if matching else 0
            else:
                matching = [key] if isinstance(node, CommentedSeq) and key in range(len(node)) else []
            if not matching:
                break
            # a key that came with a merge (<<) has no line of its own
            line = (node.lc.data or {}).get(matching[0], [node.lc.line])[0] + 1
            node, found = node[matching[0]], found + count
        return found, f"{self.file}:{line}"


@functools.lru_cache(maxsize=16)
def _with_lines(text: str) -> Any:
    return _load(text, "rt")


Layer = tuple[Keys, Any]  # (the keys of a mapping in a suite file, the mapping): one of those that make up a cell


@dataclass(frozen=True)
class Places:
    """Where the values of a merged suite stand: in its file, or in those that it extends."""

    name: str = ""  # that messages have without a file
    sources: tuple[Source, ...] = ()  # the suite's first

    def __call__(self, keys: Keys) -> str:
        """The text "file:line: key" for a key; of keys that are absent, the line of the last that is there."""
        last = [str(key) for key in keys[-1:] if isinstance(key, str)]
        is_option = bool(keys) and str(keys[0]).startswith("--")
        if is_option or not keys or not self.sources:
            return ": ".join([str(keys[0]) if is_option else self.name, *last])
        # of files that have equally many keys, the first
        _, line = max((source.find(keys) for source in self.sources), key=lambda found: found[0])
        return ": ".join([line, *last])

    def of_setting(self, layers: Sequence[Layer], keys: Keys) -> str:
        """The place of a setting of a cell: in the last layer that states it."""
        # an attack has its radius from the perturbation where nothing else states it
        alternatives = [keys, *((*outer, *keys[-1:]) for outer in (("perturbation",), ("perturbation", "training")))]
        for alternative in alternatives:
            for prefix, tree in reversed(layers):
                if depth(tree, alternative) == len(alternative):
                    return self((*prefix, *alternative))
        prefix, _ = max(reversed(layers), key=lambda layer: depth(layer[1], keys))
        return self((*prefix, *keys))
