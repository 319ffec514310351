"""What a function of a plug-in reaches: its own text, and that of everything it may read or call in local files.

    digest(file, "near_median")     another one if the function or a helper of it changes, the same for a new neighbour

Names are followed through the file and its local modules (see `fatbench.suite.sources`). Comments, layout and
docstrings do not count. What an import may do by itself always
counts: calls, conditions, decorators, assignments to something's attributes. Where names cannot be followed (`global`,
star imports, `eval`), the whole file does.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from fatbench.suite import sources

OPAQUE = {"exec", "eval", "compile", "globals", "locals", "vars", "importlib", "__import__", "__doc__"}
HARMLESS = {  # decorators that leave the rest of the program alone
    "torch.no_grad", "torch.inference_mode", "functools.cache", "functools.lru_cache", "functools.wraps",
    "dataclass", "dataclasses.dataclass", "property", "staticmethod", "classmethod",
}  # fmt: skip
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def digest(file: Path, name: str) -> str:
    """SHA-256 of what the module-level `name` of a plug-in reaches. Errors as for `sources.version`."""
    return _digest(file, name, sources.version(file))


@functools.cache
def _digest(file: Path, name: str, version: sources.Version) -> str:
    walk = _Walk(file)
    walk.enter(file)
    walk.name(file, name)
    return hashlib.sha256("\0".join(sorted(walk.texts)).encode()).hexdigest()


@dataclass
class _Module:
    """A file's statements by the names that they bind, and those that count whoever is asked for."""

    bound: dict[str, list[ast.stmt]] = field(default_factory=dict)
    acting: list[ast.stmt] = field(default_factory=list)
    opaque: bool = False


@functools.cache
def _module(tree: ast.Module) -> _Module:
    found = _Module(opaque=any(_is_opaque(node) for node in ast.walk(tree)))
    for statement in tree.body:
        if isinstance(statement, Definition):
            names = [statement.name]
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
        else:
            names = [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        for name in names:
            found.bound.setdefault(name, []).append(statement)
        if found.opaque or _acts(statement):
            found.acting.append(statement)
    return found


def _is_opaque(node: ast.AST) -> bool:
    match node:
        case ast.Global() | ast.ImportFrom(names=[ast.alias(name="*")]):
            return True
        case ast.Attribute(value=ast.Name(id="sys"), attr="modules"):
            return True
    return isinstance(node, ast.Name) and node.id in OPAQUE


def _acts(statement: ast.stmt) -> bool:
    """Whether a statement may do more, when its module is imported, than bind names."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(value=ast.Constant()):
            return False
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [*statement.args.defaults, *statement.args.kw_defaults]
            return _decorated(statement) or any(_calls(default) for default in defaults)
        case ast.ClassDef():
            outside = [*statement.bases, *statement.keywords]
            return (
                _decorated(statement)
                or any(map(_calls, outside))
                or any(map(_acts, statement.body))
                or bool(statement.keywords)
            )
        case ast.Assign():
            return _calls(statement.value) or not all(isinstance(target, ast.Name) for target in statement.targets)
        case ast.AnnAssign():
            return _calls(statement.value) or not isinstance(statement.target, ast.Name)
    return True


def _calls(node: ast.AST | None) -> bool:
    return node is not None and any(isinstance(part, ast.Call | ast.NamedExpr) for part in ast.walk(node))


def _decorated(definition: Definition) -> bool:
    used = [d.func if isinstance(d, ast.Call) else d for d in definition.decorator_list]
    return any(ast.unparse(decorator) not in HARMLESS for decorator in used)


class _Walk:
    """From a name to all that it reaches; `texts` says what was found where."""

    def __init__(self, plugin: Path) -> None:
        self.plugin = plugin
        self.texts: set[str] = set()
        self.seen: set[tuple[Path, str | ast.stmt]] = set()
        self.entered: set[Path] = set()

    def enter(self, file: Path) -> _Module:
        """A module that is imported: what acts in it, and in the local modules that it imports itself."""
        module = _module(sources.tree(file))
        if file not in self.entered:
            self.entered.add(file)
            for statement in sources.tree(file).body:
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    for path in sources.imported(file, statement):
                        self.enter(path)
            for place, statement in enumerate(module.acting):
                self.statement(file, statement, f"{place}: ")
        return module

    def whole(self, file: Path) -> None:
        self.enter(file)
        for statement in sources.tree(file).body:
            self.statement(file, statement)

    def name(self, file: Path, name: str, attribute: str | None = None) -> None:
        """What a module-level name is bound to; of a local module that it stands for, the attribute if it is known."""
        if (file, f"{name}.{attribute}") in self.seen:
            return
        self.seen.add((file, f"{name}.{attribute}"))
        for statement in self.enter(file).bound.get(name, ()):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self.imported(file, statement, name, attribute)
            else:
                self.statement(file, statement)

    def imported(self, file: Path, statement: ast.Import | ast.ImportFrom, name: str, attribute: str | None) -> None:
        (alias,) = [a for a in statement.names if (a.asname or a.name.partition(".")[0]) == name][-1:]
        module = f"{'.' * statement.level}{statement.module or ''}" if isinstance(statement, ast.ImportFrom) else None
        self.texts.add(f"{self.place(file)}: {module} {alias.name} as {name}")
        if isinstance(statement, ast.Import):
            files = [*sources.imported(file, ast.Import([alias]))]
            if files and (alias.asname or "." not in alias.name):
                self.member(files[-1], attribute)
            else:
                for path in files:
                    self.whole(path)
            return
        bare = [*sources.imported(file, ast.ImportFrom(statement.module, [], statement.level))]
        files = [*sources.imported(file, ast.ImportFrom(statement.module, [alias], statement.level))]
        if set(files) - set(bare):  # the name is that of a module
            self.member(files[-1], attribute)
        elif bare:
            self.member(bare[-1], alias.name)

    def member(self, file: Path, name: str | None) -> None:
        """A name of a local module; all of it where the name is not known or not found."""
        if name is not None and name in self.enter(file).bound:
            self.name(file, name)
        else:
            self.whole(file)

    def statement(self, file: Path, statement: ast.stmt, before: str = "") -> None:
        """A statement's text, and what it reads."""
        if (file, statement) in self.seen:
            return
        self.seen.add((file, statement))
        self.texts.add(f"{self.place(file)}: {before}{_text(statement)}")
        nested: set[int] = set()
        for node in ast.walk(statement):  # an attribute comes before what it is of
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                nested.add(id(node.value))
                self.name(file, node.value.id, node.attr)
            elif isinstance(node, ast.Name) and id(node) not in nested:
                self.name(file, node.id)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for path in sources.imported(file, node):
                    self.whole(path)

    def place(self, file: Path) -> str:
        return "" if file == self.plugin else file.relative_to(sources.root(self.plugin)).as_posix()


def _text(statement: ast.stmt) -> str:
    """A statement without comments, layout, and without docstrings."""
    statement = copy.deepcopy(statement)
    for node in ast.walk(statement):
        if isinstance(node, Definition) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(statement)
