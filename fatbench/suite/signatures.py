"""What a suite may call: the tables of functions, read from their source without importing them.

Every extensible module ends in a table, `AGGREGATORS = {"sfat": sfat, ...}`. The keyword-only arguments of a function
in it are its settings: name, type (an annotation from `fatbench.suite.types`, a Literal, bool or str) and default. The
docstring's first line says what it is; lines such as `Forward: <expression>` are read by `fatbench.suite.formulas`.

A setting may also name a settings class, a frozen dataclass in CLASSES. Its fields are settings, and a suite writes
them as a mapping without a name. Plug-ins extend the tables, never the classes.

    describe("Attack", "pgd")      -> Signature, from the source alone
    describe("Local")              -> the Signature of a settings class
    check("Attack", node)          -> the canonical mapping, every default filled in; SpecError names file, line, key
    build("Attack", spec)          -> the function with its settings bound; imports its module
"""

from __future__ import annotations

import ast
import functools
import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fatbench.errors import SpecError, UnknownName, article, did_you_mean
from fatbench.suite import memoise, sources, types, weights
from fatbench.suite.located import LocatedMap
from fatbench.suite.memoise import memoised, memoised_part

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
}

# kind (the annotation) -> (module, name of its frozen dataclass)
CLASSES = {
    "Local": ("fatbench.engine.local", "LocalTraining"),
    "Server": ("fatbench.engine.optimizers", "ServerTraining"),
}

# What the engine calls a function of each kind with, by position ...
FIXED = {
    "Experiment": ("ready", "state", "passes"),
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
}
# ... and what a further parameter may ask for by its name.
OFFERS: dict[str, tuple[str, ...]] = {
    "Aggregator": ("broadcast_losses",),
    "Objective": ("class_counts", "broadcast", "client"),
    "Defence": ("gradient",),
}


REQUIRED: Any = object()
Checked = tuple[Mapping[str, Any], Mapping[str, Any]]  # settings as they were written, and their canonical form


@dataclass(frozen=True)
class Setting:
    """One keyword-only argument: its name, its annotation as written, its default (REQUIRED where it has none)."""

    name: str
    annotation: str
    default: Any


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
    asks: tuple[str, ...] = ()  # parameters after the FIXED ones of its kind: what it wants of OFFERS
    plugin: Path | None = None  # the file whose table has it, if that is not ours

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


def _table(tree: ast.Module, table: str) -> dict[str, str]:
    """The entries of the module-level dict literal named `table`: key -> name of the function."""
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
            if not (isinstance(key, ast.Constant) and isinstance(function, ast.Name)):
                raise SpecError(f'table {table}: every entry must be written "name": function')
            entries[str(key.value)] = function.id
        return entries
    return {}


def _definition(tree: ast.Module, name: str, file: Path) -> tuple[ast.FunctionDef | ast.ClassDef, Path]:
    """The definition of `name` in a module, or in the module of ours or beside it that it is imported from."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
            return statement, file
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


def _function_signature(kind: str, name: str, function: str, file: Path, plugin: Path | None = None) -> Signature:
    """One entry of a table. SpecError: no such function, or one that the engine could not call."""
    node, origin = _definition(sources.tree(file), function, file)
    if not isinstance(node, ast.FunctionDef):
        raise SpecError(f"{file}: '{function}' is in the table but is not a function of this module")
    arguments = node.args
    settings = tuple(
        _setting(argument.arg, argument.annotation, default, origin)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    )
    asks = _asks(kind, name, node, f"{origin}:{node.lineno}")
    free = arguments.kwarg is not None
    return Signature(kind, name, ast.get_docstring(node) or "", settings, free, str(origin), node.lineno, asks, plugin)


def _asks(kind: str, name: str, node: ast.FunctionDef, place: str) -> tuple[str, ...]:
    """The parameters beyond those that every function of the kind has. SpecError: too few, or one not offered."""
    parameters = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    fixed, offered = FIXED[kind], OFFERS.get(kind, ())
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
    return tuple(parameters[len(fixed) :])


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


def add_plugin(file: Path) -> None:
    """Let the tables of a Python file extend ours.

    SpecError: unreadable, no table in it, a name already taken, or a function that the engine could not call.
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
            if name in names(kind):
                other = describe(kind, name).plugin
                where = f" in {other}" if other else ""
                raise SpecError(f"plugin {file}: there is already {article(kind.lower())} named '{name}'{where}")
            _function_signature(kind, name, function, file)
    if not found:
        tables = ", ".join(table for _, table in TABLES.values())
        raise SpecError(f"plugin {file}: it defines none of {tables}")
    _PLUGINS.append(file)
    _clear()


def drop_plugins(files: list[Path]) -> None:
    """Take plug-ins out again."""
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
def _entries(kind: str) -> dict[str, tuple[str, Path]]:
    """name -> (its function, the file whose table has it)."""
    module, table = TABLES[kind]
    files = (_module_file(module), *_PLUGINS)
    return {name: (entry, file) for file in files for name, entry in _table(sources.tree(file), table).items()}


@functools.cache
def _signature(kind: str, name: str) -> Signature:
    """Read when it is asked for: a suite names few of the files that a table imports from."""
    known = _entries(kind)
    if name not in known:
        raise UnknownName(f"no {kind.lower()} is named '{name}'{did_you_mean(name, known)}", f"{kind.lower()} {name}")
    function, file = known[name]
    return _function_signature(kind, name, function, file, None if file == _module_file(TABLES[kind][0]) else file)


def _kind(lower: str) -> str:
    return next(kind for kind in TABLES if kind.lower() == lower)


def entry(kind: str, name: str) -> str:
    """The function behind a name of a table; the kind as a plug-in's record has it, in lower case."""
    return _entries(_kind(kind))[name][0]


def plugin_of(kind: str, name: str) -> Path | None:
    """The plug-in that brings a name, if one does; the kind as for `entry`."""
    _, file = _entries(_kind(kind)).get(name, ("", None))
    return file if file in _PLUGINS else None


def names(kind: str) -> list[str]:
    """The names a suite may use for this kind, in the order of the table."""
    return list(_entries(kind))


def describe(kind: str, name: str = "", place: str = "") -> Signature:
    """The signature of one registered function, or of a settings class (no name). SpecError: no such name."""
    if kind in CLASSES:
        return _class_signature(kind)
    try:
        return _signature(kind, name)
    except UnknownName as error:
        raise UnknownName(f"{place}: {error}" if place else str(error), error.entry) from None


@functools.cache
def _adapter(annotation: str) -> TypeAdapter[Any]:
    names = {**vars(types), "Literal": Literal}
    return TypeAdapter(eval(annotation, names), config=ConfigDict(strict=True))


@functools.cache
def nested(annotation: str) -> tuple[str | None, bool]:
    """(kind, may be None) of an annotation such as "Attack" or "Local | None"; (None, ...) for a plain value."""
    optional = annotation.endswith(" | None")
    bare = annotation.removesuffix(" | None")
    return (bare if bare in TABLES or bare in CLASSES else None), optional


def check(kind: str, node: Any, place: str = "") -> dict[str, Any]:
    """The canonical form of `node`, a mapping {name: ..., setting: value}: defaults filled in, values checked.

    A bare string is short for {name: string}. The mapping of a settings class has no name. SpecError: unknown name or
    key, missing key, wrong type or range. What was checked before is not checked again: the result is shared.
    """
    return memoised("check", kind, node, lambda: _checked(kind, node, place))


def _checked(kind: str, node: Any, place: str) -> dict[str, Any]:
    if kind in CLASSES:
        if not isinstance(node, Mapping):
            raise SpecError(f"{place or kind.lower()}: expected a mapping of settings, got {_shown(node)}")
        return check_settings(describe(kind), node, place)
    if isinstance(node, str):
        node = LocatedMap({"name": node}, at=place)
    if not isinstance(node, Mapping):
        raise SpecError(f"{place or kind.lower()}: expected a mapping with a name, got {_shown(node)}")
    if "name" not in node:
        raise SpecError(
            f"{place or kind.lower()}: 'name' is missing: which {kind.lower()}?{did_you_mean('', names(kind))}"
        )
    if not isinstance(node["name"], str):
        raise SpecError(f"{_place(node, 'name', place)}: expected a name, got {_shown(node['name'])}")
    signature = describe(kind, node["name"], _place(node, "name", place))
    rest = LocatedMap(
        {k: v for k, v in node.items() if k != "name"}, getattr(node, "where", None), getattr(node, "at", "")
    )
    return {"name": signature.name, **check_settings(signature, rest, place)}


def check_settings(
    signature: Signature, node: Mapping[str, Any], place: str = "", like: Checked | None = None
) -> dict[str, Any]:
    """The canonical settings of a call of one function, without its name. SpecError as for `check`.

    like: another call of it; what this one shares with that one is not checked again.
    """
    known = signature.by_name
    for key in node:
        if key not in known and not signature.free:
            raise SpecError(
                f"{_place(node, key, place)}: '{signature.name}' has no setting '{key}'{did_you_mean(key, known)}"
            )
    canonical: dict[str, Any] = {}
    defaults = _defaults(signature)
    before, checked = like or ({}, {})
    for setting in signature.settings:
        if setting.name in node:
            value = node[setting.name]
            if setting.name in before and before[setting.name] is value:
                canonical[setting.name] = checked[setting.name]
            else:
                canonical[setting.name] = _value(setting, value, _place(node, setting.name, place))
        elif setting.default is REQUIRED:
            where = place or getattr(node, "at", "")
            raise SpecError(f"{where}{': ' if where else ''}'{signature.name}' needs '{setting.name}'")
        else:
            canonical[setting.name] = defaults[setting.name]
    for key in node:
        if key not in known:
            canonical[key] = node[key]
    return canonical


def _defaults(signature: Signature) -> dict[str, Any]:
    """The canonical defaults of a function's settings."""
    found: dict[str, Any] = memoised(
        "defaults", signature.kind, (signature.file, signature.line, signature.name), lambda: {
            setting.name: _value(setting, setting.default, setting.name)
            for setting in signature.settings
            if setting.default is not REQUIRED
        },
    )  # fmt: skip
    return found


def _value(setting: Setting, value: Any, place: str) -> Any:
    kind, optional = nested(setting.annotation)
    if kind is not None:
        if optional and value is None:
            return None
        return check(kind, value, place)
    return memoised("value", setting.annotation, value, lambda: _plain_value(setting, value, place))


def _plain_value(setting: Setting, value: Any, place: str) -> Any:
    try:
        read = _adapter(setting.annotation).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]
        what = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise SpecError(f"{place}: {what}, got {_shown(value)}") from None
    if isinstance(value, str) and isinstance(read, float):  # "8/255" stays a string, written one way
        if match := types.FRACTION.match(value):
            return f"{match[1]}/{match[2]}"
        raise SpecError(f"{place}: expected a number or a fraction such as 8/255, got {_shown(value)}")
    if isinstance(read, float) and not math.isfinite(read):
        raise SpecError(f"{place}: should be a finite number, got {_shown(value)}")
    return read


def _place(node: Mapping[str, Any], key: str, fallback: str) -> str:
    return node.place(key) if isinstance(node, LocatedMap) and (key in node.where or node.at) else (fallback or key)


def _shown(value: Any) -> str:
    return repr(dict(value) if isinstance(value, LocatedMap) else value)


# --- from a canonical mapping to a call -------------------------------------------------------------------------


def build(kind: str, spec: Mapping[str, Any]) -> Any:
    """The registered function with the settings of a canonical `spec` bound to it; fractions become floats here.

    Of a settings class, an instance.
    """
    if kind in CLASSES:
        module, name = CLASSES[kind]
        return getattr(importlib.import_module(module), name)(**bind(describe(kind), spec))
    signature = describe(kind, spec["name"])
    return functools.partial(function(kind, signature.name), **bind(signature, spec))


def bind(signature: Signature, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call, nested calls built, fractions turned into floats."""
    by_name = signature.by_name
    arguments = {}
    for key, value in spec.items():
        if key == "name":
            continue
        kind = nested(by_name[key].annotation)[0] if key in by_name else None
        if kind is not None:
            arguments[key] = None if value is None else build(kind, value)
        else:
            is_number = key not in by_name or (isinstance(value, str) and _is_number(by_name[key].annotation))
            arguments[key] = types.number(value) if is_number and isinstance(value, str) else value
    return arguments


def _is_number(annotation: str) -> bool:
    return annotation.removesuffix(" | None") in {
        "Real", "Positive", "NonNegative", "Radius", "Probability", "Fraction", "Momentum", "Count", "Natural",
    }  # fmt: skip


def function(kind: str, name: str) -> Any:
    """The registered function itself; imports the module (or the plugin) that holds it. SpecError: no such name."""
    module, table = TABLES[kind]
    plugin = describe(kind, name).plugin
    return getattr(sources.load(plugin) if plugin else importlib.import_module(module), table)[name]


def without_defaults(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """A canonical mapping less every setting that has its default: what a cell's identity is the hash of.

    Weights are known by their content, wherever the file lies.

    So a setting added later, with the default that keeps the old behaviour, leaves identities as they are. A default
    must therefore never change its meaning: tests/golden/defaults.json pins them.
    """
    signature = describe(kind, spec.get("name", ""))
    short: dict[str, Any] = {"name": spec["name"]} if kind != "Experiment" and kind not in CLASSES else {}
    by_name = signature.by_name
    defaults = _defaults(signature)
    for key, value in spec.items():
        if key == "name":
            continue
        setting = by_name.get(key)
        if setting is None:
            short[key] = value
            continue
        if setting.default is not REQUIRED and value == defaults[key]:
            continue
        inner = nested(setting.annotation)[0]
        if setting.annotation == "Weights | None":
            short[key] = weights.content(value)
            continue
        short[key] = _shortened(inner, value) if inner and value is not None else value
    return short


def _shortened(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """`without_defaults` of a part that cells share."""
    found: dict[str, Any] = memoised_part("short", kind, spec, lambda: without_defaults(kind, spec))
    return found
