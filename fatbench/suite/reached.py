"""The version of a plug-in's function: a digest of its text and of everything that it reaches in its own files.

    digest(near_median, file)     changes if the function, a helper or a constant is edited; not if a neighbour is

The function is an object: it may be decorated, made by another function, or a `functools.partial`. Its names are
followed through its globals, closure and defaults into the plug-in and its local modules (`fatbench.suite.sources`).
Comments, layout and docstrings do not count. Statements that do more than bind names when a module is imported always
count. Where names cannot be followed (`eval`, `globals()`), the whole file counts.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from fatbench.suite import sources

OPAQUE = {"exec", "eval", "compile", "globals", "locals", "vars", "importlib", "__import__", "__doc__"}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def digest(function: Any, file: Path) -> str:
    """The SHA-256 of all code that a function of a plug-in reaches in its files. Errors as for `sources.version`."""
    walk = _Walk(file)
    for path in walk.files:
        walk.add_import_code(path)
    walk.value(function)
    return hashlib.sha256("\0".join(sorted(walk.texts)).encode()).hexdigest()


class _Walk:
    """A walk from a value to all code that it reaches, collected in `texts`."""

    def __init__(self, file: Path) -> None:
        start = sources.root(file)
        self.files = {file: "", **{start / path: path for path, _ in sources.version(file).modules}}
        self.texts: set[str] = set()
        self.seen: dict[Any, Any] = {}  # key -> the object, kept alive so that no other gets its id

    def is_visited(self, value: Any, *context: Any) -> bool:
        """Whether this object was visited before, in this context; marks it as visited."""
        key = (id(value), *context)
        is_seen = key in self.seen
        self.seen[key] = value
        return is_seen

    def add_import_code(self, file: Path) -> None:
        """Add the statements of a module that do more, when it is imported, than bind names."""
        tree = sources.tree(file)
        opaque = any(isinstance(node, ast.Name) and node.id in OPAQUE for node in ast.walk(tree))
        for statement in tree.body:
            if opaque or _has_effect(statement):
                self.texts.add(f"{self.files[file]}: {_text(statement)}")

    def value(self, value: Any, name: str = "") -> None:
        if isinstance(value, bool | int | float | str | bytes | None):
            self.texts.add(f"{name} = {value!r}")
        elif self.is_visited(value) or isinstance(value, ModuleType):
            return
        elif isinstance(value, FunctionType):
            self.function(value)
        elif isinstance(value, type):
            self.type(value)
        elif isinstance(value, functools.partial):
            for member_name, member in (*enumerate((value.func, *value.args)), *value.keywords.items()):
                self.value(member, f"{name}.{member_name}")
        elif isinstance(value, Mapping):
            for key, member in value.items():
                self.value(member, f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for member_name, member in enumerate(value):
                self.value(member, f"{name}.{member_name}")
        elif hasattr(value, "__wrapped__"):  # such as of functools.cache
            self.value(value.__wrapped__)
        elif isinstance(value, MethodType):
            self.value((value.__self__, value.__func__))
        else:
            self.type(type(value))
            if self.file_of(type(value)) is not None:
                self.value(vars(value), name)

    def function(self, function: FunctionType) -> None:
        """Add a function: its text, its closure and defaults, and the names that it reads of its module."""
        code, name = function.__code__, function.__qualname__
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell: the function is being defined
                self.value(cell.cell_contents, f"{name}.{key}")
        self.value(function.__defaults__ or (), name)
        self.value(function.__kwdefaults__ or {}, name)
        file = Path(code.co_filename)
        if file not in self.files:
            self.texts.add(f"{function.__module__}.{name}")
            return
        for node in ast.walk(sources.tree(file)):
            if isinstance(node, ast.Lambda | Definition) and _line(node) == code.co_firstlineno:
                self.node(file, node, function.__globals__, {*_names_read(code)})

    def file_of(self, value: type) -> Path | None:
        """The file of the plug-in that defines a class, or None."""
        file = Path(getattr(sys.modules.get(value.__module__), "__file__", None) or "")
        return file if file in self.files else None

    def type(self, value: type) -> None:
        """Add a class: its text and the names that it reads."""
        self.texts.add(f"{value.__module__.partition('_plugin_')[0]}.{value.__qualname__}")
        if (file := self.file_of(value)) is not None:
            for node in ast.walk(sources.tree(file)):
                if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                    self.node(file, node, vars(sys.modules[value.__module__]))

    def node(self, file: Path, node: ast.AST, space: Mapping[str, Any], global_names: set[str] | None = None) -> None:
        """Add a piece of a file and the values of its names; global_names: its names that are not local, if known."""
        self.texts.add(f"{self.files[file]}: {_text(node)}")
        names = {name_node.id for name_node in ast.walk(node) if isinstance(name_node, ast.Name)}
        attributes = {name_node.attr for name_node in ast.walk(node) if isinstance(name_node, ast.Attribute)}
        self.names(file, names if global_names is None else names & global_names, attributes, space)

    def names(self, file: Path, names: set[str], attributes: set[str], space: Mapping[str, Any]) -> None:
        """Add the values of a module's names; of a local module only the members in `attributes`."""
        for name in names & space.keys():
            value = space[name]
            if isinstance(value, ModuleType):
                self.texts.add(f"{name} is {value.__name__}")
                inner = Path(getattr(value, "__file__", None) or "")
                if inner in self.files and not self.is_visited(value, frozenset(attributes)):
                    self.names(inner, attributes, attributes, vars(value))
            elif isinstance(value, FunctionType | type):
                module_name = value.__module__.partition("_plugin_")[0]
                self.texts.add(f"{name} is {module_name}.{value.__qualname__}")
                self.value(value)
            else:
                self.constant(file, name, space)

    def constant(self, file: Path, name: str, space: Mapping[str, Any]) -> None:
        """Add the statements that bind a name in a module, or in the module that it is imported from."""
        for statement in sources.tree(file).body:
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        self.texts.add(f"{name} is {statement.module}.{alias.name}")
                        for path in [
                            candidate for candidate in sources.imported(file, statement) if candidate in self.files
                        ][-1:]:
                            module = sys.modules.get(sources.module_name(path))
                            self.constant(path, alias.name, vars(module) if module else {})
            elif not isinstance(statement, Definition) and name in _bound(statement) and not self.is_visited(statement):
                self.node(file, statement, space)
            elif isinstance(statement, Definition) and statement.name == name:  # decorated, and no longer a function
                self.value(space.get(name))


def _names_read(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes that a function, or one nested in it, reads."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_read(inner)


def _line(node: Any) -> int:
    """The first line of a function for Python: that of its first decorator."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def _bound(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _has_effect(statement: ast.stmt) -> bool:
    """Whether a statement may do more, when its module is imported, than bind names."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(value=ast.Constant()):
            return False
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return False
        case ast.Assign():
            return not all(isinstance(target, ast.Name | ast.Tuple) for target in statement.targets)
        case ast.AnnAssign():
            return not isinstance(statement.target, ast.Name)
    return True


def _text(node: ast.AST) -> str:
    """The text of a node without comments, layout and docstrings."""
    node = copy.deepcopy(node)
    for inner in ast.walk(node):
        if isinstance(inner, Definition) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(node)
