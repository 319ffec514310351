"""What a suite may call: the tables of functions, read from their source without importing them.

Every extensible module ends in a table, `AGGREGATORS = {"sfat": sfat, ...}`. The keyword-only arguments of a function
in it are its settings: name, type (an annotation from `fatbench.suite.types`, a Literal, bool or str) and default. The
docstring's first line says what it is. What more is said of it stands in an entry around it (`fatbench.suite.entry`).

A setting may also name a settings class, a frozen dataclass in CLASSES. Its fields are settings, and a suite writes
them as a mapping without a name. Plug-ins extend the tables, never the classes.

    describe("Attack", "pgd")      -> Signature, from the source alone
    describe("Local")              -> the Signature of a settings class

`fatbench.suite.calls` checks a suite's mapping against a signature.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fatbench.errors import SpecError, UnknownName, article, did_you_mean
from fatbench.suite import entry as entries
from fatbench.suite import memoise, sources

PACKAGE = Path(__file__).parent.parent

# kind (the annotation) -> (module, name of its table)
TABLES = {
    "Experiment": ("fatbench.engine.experiment", "EXPERIMENTS"),
    "Data": ("fatbench.data", "DATASETS"),
    "Partition": ("fatbench.methods.partitions", "PARTITIONS"),
    "Model": ("fatbench.models", "MODELS"),
    "Algorithm": ("fatbench.methods.algorithms", "ALGORITHMS"),
    "Aggregator": ("fatbench.methods.aggregators", "AGGREGATORS"),
    "Objective": ("fatbench.methods.objectives", "OBJECTIVES"),
    "Proximal": ("fatbench.methods.objectives", "PROXIMALS"),
    "Attack": ("fatbench.methods.attacks", "ATTACKS"),
    "Augment": ("fatbench.methods.augmentations", "AUGMENTS"),
    "Diagnostic": ("fatbench.methods.diagnostics", "DIAGNOSTICS"),
    "Defence": ("fatbench.methods.defences", "DEFENCES"),
    "Inversion": ("fatbench.methods.inversions", "INVERSIONS"),
    "Adversary": ("fatbench.methods.adversaries", "ADVERSARIES"),
    "Manipulation": ("fatbench.methods.manipulations", "MANIPULATIONS"),
}

# kind (the annotation) -> (module, name of its frozen dataclass)
CLASSES = {
    "Local": ("fatbench.engine.local", "LocalTraining"),
    "Server": ("fatbench.engine.optimizers", "ServerTraining"),
    "Malicious": ("fatbench.engine.malicious", "Malicious"),
}

# What the engine calls a function of each kind with, by position ...
FIXED = {
    "Experiment": ("ready", "state"),
    "Data": ("root",),
    "Partition": ("labels", "rng", "writers"),
    "Model": ("shape", "classes"),
    "Algorithm": ("problem", "state"),
    "Aggregator": ("updates", "context"),
    "Objective": ("model", "x", "y", "generator"),
    "Proximal": ("weights", "broadcast", "round"),
    "Attack": ("model", "x", "y", "generator"),
    "Augment": ("x", "generator"),
    "Diagnostic": ("problem", "result", "images", "labels", "attack", "generator"),
    "Defence": ("gradient", "at"),
    "Inversion": ("observed", "model", "shape", "generator"),
    "Adversary": ("update",),  # or one of ADVERSARIES
    "Manipulation": ("model", "weights", "generator"),
}
# ... and what a further parameter may ask for by its name.
OFFERS: dict[str, tuple[str, ...]] = {
    "Data": ("first",),
    "Attack": ("index",),
    "Aggregator": ("broadcast_losses",),
    "Objective": ("class_counts", "broadcast", "client"),
    "Defence": ("gradient", "examples"),
    "Manipulation": ("labels", "images"),
    "Adversary": ("others", "broadcast", "last_layer", "malicious", "round", "generator", "classes"),
}
# An adversary begins with the name of what it changes: which others it has, and what it may ask for.
ADVERSARIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "images": (("images", "labels"), ("classes", "generator")),
    "loss": (("loss",), ()),
    "update": (("update",), ("others", "broadcast", "last_layer", "malicious", "round", "generator")),
}


# Begins of docstring lines that entries have taken the place of.
FORMER = ("Refuse if", "Bears:", "Forward:", "Backward:", "Fractions:", "Deploys:", "Role:", "Float32:", "Threat:")

REQUIRED: Any = object()


@dataclass(frozen=True)
class Setting:
    """One keyword-only argument: its name, its annotation as written, its default (REQUIRED where it has none)."""

    name: str
    annotation: str
    default: Any

    @functools.cached_property
    def kind(self) -> str | None:
        """Of what kind the call is that the setting takes ("Attack", "Local"); None: it takes a plain value."""
        bare = self.annotation.removesuffix(" | None")
        return bare if bare in TABLES or bare in CLASSES else None

    @property
    def optional(self) -> bool:
        return self.annotation.endswith(" | None")


@dataclass(frozen=True)
class Signature:
    """What the source says of one registered function, or of a settings class (named by its kind in lower case)."""

    kind: str
    name: str
    doc: str
    settings: tuple[Setting, ...]
    free: bool  # takes **settings, checked only when it is called (a torchattacks attack)
    file: str
    line: int
    asks: tuple[
        str, ...
    ] = ()  # parameters after the FIXED ones of its kind: what it wants of OFFERS; of an adversary all
    plugin: Path | None = None  # the file whose table has it, if that is not ours
    entry: Mapping[str, Any] | None = None  # the literals of its `fatbench.suite.entry`; None: it has none

    @functools.cached_property
    def by_name(self) -> dict[str, Setting]:
        return {setting.name: setting for setting in self.settings}

    @property
    def summary(self) -> str:
        return self.doc.strip().splitlines()[0] if self.doc.strip() else ""


def _module_file(module: str) -> Path:
    relative = Path(*module.split(".")[1:])
    file = PACKAGE / relative / "__init__.py"
    return file if file.exists() else (PACKAGE / relative).with_suffix(".py")


def _table(tree: ast.Module, table: str) -> dict[str, ast.expr]:
    """The module-level dict literal named `table`: key -> the function's name, or an entry around it."""
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as value) if name == table:
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict() as value) if name == table:
                pass
            case _:
                continue
        entries = {}
        for key, function in zip(value.keys, value.values, strict=True):
            if not (isinstance(key, ast.Constant) and (isinstance(function, ast.Name) or _is_entry(function))):
                raise SpecError(f'table {table}: write "name": function, or "name": AggregatorEntry(function, ...)')
            entries[str(key.value)] = function
        return entries
    return {}


def _is_entry(value: ast.expr | None) -> bool:
    """Whether an expression is `AggregatorEntry(function, ...)` or the like."""
    return (
        isinstance(value, ast.Call)
        and ast.unparse(value.func).rpartition(".")[2].endswith("Entry")
        and [type(argument) for argument in value.args] == [ast.Name]
    )


def _literals(call: ast.Call, tree: ast.Module) -> dict[str, Any]:
    """The fields of an entry that can be read without running its module; an imported `threat` as "module:name"."""
    found = {}
    for keyword in call.keywords:
        with contextlib.suppress(ValueError):
            if keyword.arg == "threat" and isinstance(keyword.value, ast.Name):
                found["threat"] = _imported_from(tree, keyword.value.id)
            else:
                found[str(keyword.arg)] = ast.literal_eval(keyword.value)
    return found


def _imported_from(tree: ast.Module, name: str) -> str | None:
    """ "module:name" of what a module imports under a name."""
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return f"{statement.module}:{alias.name}"
    return None


def _definition(tree: ast.Module, name: str, file: Path) -> tuple[ast.FunctionDef | ast.ClassDef | ast.Call, Path]:
    """The definition of `name` in a module, or in the module of ours or beside it that it is imported from.

    A call is that of an entry.
    """
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
            return statement, file
        match statement:
            case ast.Assign(targets=[ast.Name(id=assigned)], value=ast.Call() as value) if assigned == name:
                if _is_entry(value):
                    return value, file
        if isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                if (alias.asname or alias.name) == name and (origin := _origin(file, statement)):
                    return _definition(sources.tree(origin), alias.name, origin)
    raise SpecError(f"{file}: '{name}' is not defined in this module")


def _origin(file: Path, statement: ast.ImportFrom) -> Path | None:
    """The file that a name is imported from; None: it is neither ours nor beside `file`."""
    assert statement.module is not None
    if statement.level == 0 and statement.module.split(".")[0] == "fatbench":
        return _module_file(statement.module)
    bare = ast.ImportFrom(statement.module, [], statement.level)
    return next(reversed([*sources.imported(file, bare)]), None)


def _function(value: ast.expr, file: Path) -> tuple[ast.Name, ast.Call | None, Path]:
    """What a table maps a name to: the function's name, its entry if it has one, and the file that has both."""
    if isinstance(value, ast.Name):
        with contextlib.suppress(SpecError):
            definition, file_of_entry = _definition(sources.tree(file), value.id, file)
            if isinstance(definition, ast.Call):
                return _function(definition, file_of_entry)
        return value, None, file
    assert isinstance(value, ast.Call)
    assert isinstance(value.args[0], ast.Name)
    return value.args[0], value, file


def _function_signature(kind: str, name: str, value: ast.expr, file: Path, plugin: Path | None = None) -> Signature:
    """One line of a table. SpecError: no such function, or one that the engine could not call."""
    function, entry, file = _function(value, file)
    node, origin = _definition(sources.tree(file), function.id, file)
    if not isinstance(node, ast.FunctionDef):
        raise SpecError(f"{file}: '{function.id}' is in the table but is not a function of this module")
    arguments = node.args
    settings = tuple(
        _setting(argument.arg, argument.annotation, default, origin)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    )
    asks = _asks(kind, name, node, f"{origin}:{node.lineno}")
    if kind == "Algorithm":
        _says_how_it_trains(name, settings, f"{origin}:{node.lineno}")
    free = arguments.kwarg is not None
    doc, literals = ast.get_docstring(node) or "", None if entry is None else _literals(entry, sources.tree(file))
    if former := re.search(rf"^({'|'.join(FORMER)}) +\S", doc, re.MULTILINE):
        own = kind if hasattr(entries, f"{kind}Entry") else ""
        raise SpecError(
            f"{origin}:{node.lineno}: the docstring of '{name}' has a line '{former[1]} ...', which says nothing any "
            f'more: say it in the table, "{name}": {own}Entry({function.id}, ...), see docs/functions.md'
        )
    return Signature(kind, name, doc, settings, free, str(origin), node.lineno, asks, plugin, literals)


def _asks(kind: str, name: str, node: ast.FunctionDef, place: str) -> tuple[str, ...]:
    """The parameters beyond those that every function of the kind has. SpecError: too few, or one not offered."""
    parameters = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    fixed, offered = FIXED[kind], OFFERS.get(kind, ())
    if kind == "Adversary":
        first = parameters[0] if parameters else ""
        if first not in ADVERSARIES:
            begin = " or ".join(f"({', '.join(fixed)})" for fixed, _ in ADVERSARIES.values())
            raise SpecError(
                f"{place}: the adversary '{name}' takes ({', '.join(parameters)}), but begins with what it changes: "
                f"{begin}{did_you_mean(first, ADVERSARIES)}"
            )
        fixed, offered = ADVERSARIES[first]
    if node.args.vararg is None and (
        len(parameters) < len(fixed) or any(p in offered and p not in fixed for p in parameters[: len(fixed)])
    ):
        raise SpecError(
            f"{place}: the {kind.lower()} '{name}' is called with ({', '.join(fixed)}), but takes "
            f"({', '.join(parameters)})"
        )
    for ask in parameters[len(fixed) :]:
        if ask not in offered:
            what = f"can take {', '.join(offered)}" if offered else "cannot take any other argument"
            raise SpecError(
                f"{place}: the {kind.lower()} '{name}' takes '{ask}'{did_you_mean(ask, offered)}: beyond "
                f"({', '.join(fixed)}) it {what}; put settings after '*'"
            )
    return tuple(parameters if kind == "Adversary" else parameters[len(fixed) :])


def _says_how_it_trains(name: str, settings: tuple[Setting, ...], place: str) -> None:
    """SpecError: an algorithm lacks a setting that a run reads of every algorithm."""
    known = {setting.name for setting in settings}
    if "rounds" not in known:
        raise SpecError(f"{place}: the algorithm '{name}' needs a setting 'rounds: Count'")
    if not known & {"local", "batch"} and all(setting.kind != "Algorithm" for setting in settings):
        raise SpecError(
            f"{place}: the algorithm '{name}' needs a setting 'local: Local', or 'batch: Count' if clients only "
            "compute gradients, or an 'Algorithm' that it wraps"
        )


def _setting(name: str, annotation: ast.expr | None, default: ast.expr | None, file: Path) -> Setting:
    """SpecError: the default is no literal, which is all that can be read without running the file."""
    kind = ast.unparse(annotation) if annotation else "Any"
    if default is None:
        return Setting(name, kind, REQUIRED)
    try:
        return Setting(name, kind, ast.literal_eval(default))
    except ValueError:
        raise SpecError(
            f"{file}:{default.lineno}: the default of '{name}', {ast.unparse(default)}, is not a literal: use a "
            "number, a string, True, False or None, or no default, so that the suite gives it"
        ) from None


@functools.cache
def _class_signature(kind: str) -> Signature:
    """The settings class of a kind: the annotated fields of its body."""
    module, name = CLASSES[kind]
    node, file = _definition(sources.tree(_module_file(module)), name, _module_file(module))
    assert isinstance(node, ast.ClassDef)
    settings = tuple(
        _setting(field.target.id, field.annotation, field.value, file)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )
    return Signature(kind, kind.lower(), ast.get_docstring(node) or "", settings, False, str(file), node.lineno)


_PLUGINS: list[Path] = []
_INSTALLED: set[Path] = set()  # those of packages


def add_plugin(file: Path, installed: bool = False) -> None:
    """Let the tables of a Python file extend ours.

    SpecError: unreadable, no table in it, a name already taken, or a function that the engine could not call. Of an
    installed package a name that is taken is an error where it is used; a name of ours stays ours.
    """
    if file in _PLUGINS:
        return
    try:
        tree = sources.tree(file)
        sources.version(file)
    except OSError as error:
        raise SpecError(f"plugin {file}: {error.strerror or error}") from None
    except (SyntaxError, ValueError) as error:
        raise SpecError(f"plugin {file}: {error}") from None
    found = False
    for kind, (_, table) in TABLES.items():
        for name, function in _table(tree, table).items():
            found = True
            if (holders := _holders(kind, name)) and not installed and not _INSTALLED.intersection(holders):
                other = next(filter(None, holders), None)
                where = f" in {other}" if other else ""
                raise SpecError(f"plugin {file}: there is already {article(kind.lower())} named '{name}'{where}")
            _function_signature(kind, name, function, file)
    if not found:
        tables = ", ".join(table for _, table in TABLES.values())
        raise SpecError(f"plugin {file}: it defines none of {tables}")
    _PLUGINS.append(file)
    if installed:
        _INSTALLED.add(file)
    _clear()


def drop_plugins(files: list[Path]) -> None:
    """Take plug-ins out again."""
    _INSTALLED.difference_update(files)
    _PLUGINS[:] = [file for file in _PLUGINS if file not in files]
    _clear()


def _clear() -> None:
    """Of what was read from sources, what a plug-in may change."""
    _entries.cache_clear()
    _signature.cache_clear()
    memoise.clear()


def plugins() -> tuple[Path, ...]:
    """The plug-in files in use, for other processes to add."""
    return tuple(_PLUGINS)


@functools.cache
def _entries(kind: str) -> dict[str, tuple[ast.expr, Path]]:
    """name -> (its function or entry, the file whose table has it)."""
    module, table = TABLES[kind]
    files = (_module_file(module), *_PLUGINS)
    found: dict[str, tuple[ast.expr, Path]] = {}
    for file in files:
        for name, entry in _table(sources.tree(file), table).items():
            found.setdefault(name, (entry, file))
    return found


def _holders(kind: str, name: str) -> list[Path | None]:
    """The plug-ins that bring a name; None: it is ours."""
    module, table = TABLES[kind]
    own: list[Path | None] = [None] if name in _table(sources.tree(_module_file(module)), table) else []
    return own + [file for file in _PLUGINS if name in _table(sources.tree(file), table)]


@functools.cache
def _signature(kind: str, name: str) -> Signature:
    """Read when it is asked for: a suite names few of the files that a table imports from."""
    known = _entries(kind)
    if name not in known:
        raise UnknownName(f"no {kind.lower()} is named '{name}'{did_you_mean(name, known)}", f"{kind.lower()} {name}")
    function, file = known[name]
    holders = _holders(kind, name)
    if len(holders) > 1 and holders[0] is not None:  # a name of ours stays ours
        both = " and ".join(map(str, holders))
        raise SpecError(f"{kind.lower()} '{name}' is in {both}: uninstall one, or leave one plug-in out")
    return _function_signature(kind, name, function, file, None if file == _module_file(TABLES[kind][0]) else file)


def _kind(lower: str) -> str:
    return next(kind for kind in TABLES if kind.lower() == lower)


def function_name(kind: str, name: str) -> str:
    """The function behind a name of a table; the kind as a plug-in's record has it, in lower case."""
    return _function(*_entries(_kind(kind))[name])[0].id


def plugin_of(kind: str, name: str) -> Path | None:
    """The plug-in that brings a name, if one does; the kind as for `entry`."""
    file = _entries(_kind(kind)).get(name, (None, None))[1]
    return file if file in _PLUGINS else None


def names(kind: str) -> list[str]:
    """The names a suite may use for this kind, in the order of the table."""
    return list(_entries(kind))


def describe(kind: str, name: str = "", place: str = "") -> Signature:
    """The signature of one registered function; of a settings class, and of the one experiment, without a name.

    SpecError: no such name.
    """
    if kind in CLASSES:
        return _class_signature(kind)
    try:
        return _signature(kind, "cell" if kind == "Experiment" else name)
    except UnknownName as error:
        raise UnknownName(f"{place}: {error}" if place else str(error), error.entry) from None
