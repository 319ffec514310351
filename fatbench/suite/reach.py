"""What a function reaches: the text of everything that it reads, by name.

    reached = reach(mine, Path("mine.py"))    {":mine": "def mine(...): ...", "helper.py:WIDTH": "WIDTH = 3"}
    digest(reached)                           the version of a plug-in's function
    module(reach(function))                   the text of a file with a function of a running program

Names are followed through globals, closures and defaults into the plug-in's file and its local modules
(`suite.source_files`). There the texts have no comments, layout, docstrings and annotations, and local variables
have numbers: these may change. Statements that do more than bind names when a module is imported always count. Where
names cannot be followed (`eval`, `globals()`), the whole file counts.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from symtable import SymbolTable, symtable
from types import FunctionType, MethodType, ModuleType
from typing import Any

from fatbench.errors import SpecError, article
from fatbench.suite import source_files

OPAQUE = {"exec", "eval", "compile", "globals", "locals", "vars", "importlib", "__import__", "__doc__"}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Simple = bool | int | float | str | bytes | None


def reach(function: Any, file: Path | None = None) -> dict[str, str]:
    """The text of all that a function reaches; one of a running program as it was written, in an order that runs.

    file: the function's plug-in; errors as for `source_files.version`. Without it, SpecError for a value that no file
    can hold. The function is an object: it may be decorated, made by another function, or a `functools.partial`.
    """
    walk = _Walk(function, file)
    for path in walk.files:
        walk.import_code(path)
    walk.value(function)
    return walk.texts


def digest(reached: Mapping[str, str]) -> str:
    """The SHA-256 of all that a function reaches."""
    return hashlib.sha256("\0".join(sorted(map(": ".join, reached.items()))).encode()).hexdigest()


def module(reached: Mapping[str, str]) -> str:
    """The text of a module with a function and all that it reaches."""
    texts = list(reached.values())
    imports = [text for text in texts if text.startswith(("import ", "from "))]
    return "\n".join(
        ["from __future__ import annotations", "", *imports, "", *(text for text in texts if text not in imports)]
    )


class _Walk:
    """A walk from a function to all that it reaches, collected in `texts`."""

    def __init__(self, function: Any, file: Path | None) -> None:
        self.files = {} if file is None else source_files.files(file)  # file -> the beginning of the names of its texts
        self.writes = file is None
        self.home = getattr(inspect.unwrap(function), "__module__", None) if self.writes else None
        self.texts: dict[str, str] = {}
        self.seen: dict[Any, Any] = {}  # key -> the object, kept alive so that no other gets its id

    def is_visited(self, value: Any, *context: Any) -> bool:
        """Whether this object was visited before, in this context; marks it as visited."""
        is_seen = (key := (id(value), *context)) in self.seen
        self.seen[key] = value
        return is_seen

    def is_own(self, value: Any) -> bool:
        """Whether the text of a function or class counts: it is in the plug-in, or beside the function."""
        return value.__module__ == self.home if self.writes else _file(value) in self.files

    def import_code(self, file: Path) -> None:
        """Add the statements of a module that do more, when it is imported, than bind names."""
        tree = source_files.tree(file)
        is_opaque = any(isinstance(node, ast.Name) and node.id in OPAQUE for node in ast.walk(tree))
        for number, statement in enumerate(s for s in tree.body if is_opaque or _has_effect(s)):
            self.texts[f"{self.files[file]}:{number}"] = ast.unparse(_Plain().visit(copy.deepcopy(statement)))

    def value(self, value: Any, name: str = "") -> None:
        """Add what an object is made of; `name` says where it stands."""
        if isinstance(value, Simple):
            self.texts[name] = f"{name} = {value!r}"
        elif self.is_visited(value) or isinstance(value, ModuleType):
            return
        elif self.writes:
            self.written(value)
        elif isinstance(value, FunctionType):
            self.function(value)
        elif isinstance(value, type):
            self.type(value)
        elif isinstance(value, functools.partial):
            self.value({**dict(enumerate((value.func, *value.args))), **value.keywords}, name)
        elif isinstance(value, Mapping | list | tuple):
            for key, member in value.items() if isinstance(value, Mapping) else enumerate(value):
                self.value(member, f"{name}.{key}")
        elif hasattr(value, "__wrapped__"):  # such as of functools.cache
            self.value(value.__wrapped__)
        elif isinstance(value, MethodType):
            self.value((value.__self__, value.__func__))
        else:
            self.type(type(value))
            if self.is_own(type(value)):
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
        for node in ast.walk(source_files.tree(file)) if file in self.files else ():
            if isinstance(node, ast.Lambda | Definition) and _line(node) == code.co_firstlineno:
                self.node(file, name, node, function.__globals__)

    def type(self, value: type) -> None:
        """Add a class: its text and the names that it reads."""
        if not self.is_own(value):
            self.texts[value.__qualname__] = f"{_module_name(value)}.{value.__qualname__}"
            return
        for node in ast.walk(source_files.tree(file := _file(value))):
            if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                self.node(file, value.__qualname__, node, vars(sys.modules[value.__module__]))

    def written(self, value: Any) -> None:
        """Add the text of a function or class of a running program, after the texts of the names that it reads."""
        value = inspect.unwrap(value)  # the text includes the decorators
        name = getattr(value, "__name__", "")
        try:
            with source_files.PARSER:
                text = textwrap.dedent(inspect.getsource(value))
                node = ast.parse(text).body[0]
        except (OSError, TypeError, SyntaxError):
            raise SpecError(f"register: the text of '{name or type(value).__name__}' cannot be found") from None
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name != name:
            raise SpecError(f"register: write it as 'def NAME(...)', not as {text.split('(')[0].strip()!r}")
        if closure := getattr(getattr(value, "__code__", None), "co_freevars", ()):
            raise SpecError(f"register: '{name}' reads '{closure[0]}' of the function around it: make it a setting")
        space = getattr(value, "__globals__", None) or vars(sys.modules[value.__module__])
        _, names, attributes = _read(node)
        for name_read in sorted(names):
            if name_read in space:
                self.name(None, name_read, space, attributes, name)
            elif not hasattr(builtins, name_read):
                raise SpecError(f"register: '{name}' reads '{name_read}', which is not defined")
        self.texts[name] = text

    def node(self, file: Path, name: str, node: ast.AST, space: Mapping[str, Any]) -> None:
        """Add a piece of a file and the values of its names."""
        text, names, attributes = _read(node)
        key = f"{self.files[file]}:{name}"
        while self.texts.setdefault(key, text) != text:  # lambdas of a line, or a name that is bound twice
            key += "+"
        self.names(file, names, attributes, space)

    def names(self, file: Path, names: set[str], attributes: set[str], space: Mapping[str, Any]) -> None:
        """Add the values of a module's names; of a local module only the members in `attributes`."""
        for name in names & space.keys():
            self.name(file, name, space, attributes)

    def name(
        self, file: Path | None, name: str, space: Mapping[str, Any], attributes: set[str], reader: str = ""
    ) -> None:
        """Add what a name stands for in a module. file: None for a running program's, whose `reader` reads it."""
        value, key = space[name], name if file is None else f"{self.files[file]}:{name}"
        if isinstance(value, ModuleType):
            self.texts[key] = f"import {value.__name__} as {name}"
            inner = Path(getattr(value, "__file__", None) or "")
            if inner in self.files and not self.is_visited(value, frozenset(attributes)):
                self.names(inner, attributes, attributes, vars(value))
        elif isinstance(value, FunctionType | type) and (file is not None or self.is_own(value)):
            self.value(value)
            home = "" if file is None else f"{self.files.get(_file(value), _module_name(value))}:"
            if f"{home}{value.__qualname__}" != key:
                self.texts[f"{key} is"] = f"{name} = {home}{value.__qualname__}"
        elif file is None and _importable(value):
            self.texts[key] = f"from {value.__module__} import {value.__name__} as {name}"
        elif file is not None:
            self.constant(file, name, space)
        elif not _is_literal(value):
            raise SpecError(
                f"register: '{reader}' reads '{name}', {article(type(value).__name__)} that no file can "
                "hold: make it a setting, or put both into a plug-in's file"
            )
        else:
            self.texts[key] = f"{name} = {value!r}"

    def constant(self, file: Path, name: str, space: Mapping[str, Any]) -> None:
        """Add the statements that bind a name in a module, or in the module that it is imported from."""
        for statement in source_files.tree(file).body:
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        self.texts[f"{self.files[file]}:{name}"] = f"from {statement.module} import {alias.name}"
                        for path in [path for path in source_files.imported(file, statement) if path in self.files][
                            -1:
                        ]:
                            source = sys.modules.get(source_files.module_name(path))
                            self.constant(path, alias.name, vars(source) if source else {})
            elif not isinstance(statement, Definition) and name in _bound(statement):
                if not self.is_visited(statement):
                    self.node(file, name, statement, space)
            elif isinstance(statement, Definition) and statement.name == name:  # decorated, and no longer a function
                self.value(space.get(name))


class _Plain(ast.NodeTransformer):
    """Drops docstrings, and annotations other than those in a class, which may make fields."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return self.generic_visit(ast.Assign([node.target], node.value, lineno=0) if node.value else ast.Pass())

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:  # whose quotes differ between versions of Python
        values = [value for value in node.values if not (isinstance(value, ast.Constant) and value.value == "")]
        return ast.List([self.visit(value) for value in values], ast.Load())

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        spec = ast.Constant(None) if node.format_spec is None else self.visit(node.format_spec)
        return ast.Tuple([self.visit(node.value), ast.Constant(node.conversion), spec], ast.Load())

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:  # of a function that may stand here alone
        return ast.Global([*node.names, "_nonlocal"])

    def definition(self, node: Any) -> ast.AST:
        """A function or class."""
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.ClassDef):
            node.body = [part if isinstance(part, ast.AnnAssign) else self.visit(part) for part in node.body]
            return node
        node.returns = None
        return self.generic_visit(node)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = definition


def _read(node: ast.AST) -> tuple[str, set[str], set[str]]:
    """(text, names, attributes): a piece of code without what may change, the names that it reads, and attributes.

    In a definition local variables have numbers, except those that code around them may ask for by name.
    """
    node = _Plain().visit(copy.deepcopy(node))
    scopes = [*_scopes(symtable(ast.unparse(node), "", "exec"))]
    symbols = [(scope.get_type(), symbol) for scope in scopes for symbol in scope.get_symbols()]
    names = {symbol.get_name() for _, symbol in symbols if symbol.is_global() and symbol.is_referenced()}
    nodes = [*ast.walk(node)]
    if isinstance(node, Definition) and not names & OPAQUE:
        fixed = {
            symbol.get_name()
            for kind, symbol in symbols
            if str(kind).lower().endswith(("module", "class"))
            or any((symbol.is_global(), symbol.is_parameter(), symbol.is_imported(), symbol.is_namespace()))
        }
        fixed |= {getattr(n, key) for n in nodes for key in ("name", "rest") if hasattr(n, key)}
        variables = [inner for inner in nodes if isinstance(inner, ast.Name) and inner.id not in fixed]
        numbers = {name: f"_{number}" for number, name in enumerate(dict.fromkeys(n.id for n in variables))}
        for variable in variables:
            variable.id = numbers[variable.id]
    return ast.unparse(node), names, {inner.attr for inner in nodes if isinstance(inner, ast.Attribute)}


def _scopes(scope: SymbolTable) -> Iterator[SymbolTable]:
    yield scope
    for inner in scope.get_children():
        yield from _scopes(inner)


def _file(value: Any) -> Path:
    """The file of a function or class; Path() if it has none."""
    if isinstance(value, FunctionType):
        return Path(value.__code__.co_filename)
    return Path(getattr(sys.modules.get(value.__module__), "__file__", None) or "")


def _module_name(value: Any) -> str:
    """The module of a function or class; not that of a plug-in, whose name has a digest of its path."""
    return str(value.__module__).partition("_plugin_")[0]


def _line(node: Any) -> int:
    """The first line of a function for Python: that of its first decorator."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def _bound(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _importable(value: Any) -> bool:
    """Whether a value can be imported by name from its module."""
    holder = sys.modules.get(getattr(value, "__module__", None) or "")
    return holder is not None and getattr(holder, getattr(value, "__name__", ""), None) is value


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


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
