"""What a suite may call: the tables of functions, and the settings of each, read with `inspect.signature`.

Every extensible module ends in a table, `AGGREGATORS = {"sfat": sfat, ...}`. The keyword-only arguments of a function
in it are its settings: name, type (an annotation from `fatbench.suite.types`, a Literal, bool or str) and default. The
docstring's first line says what it is. What more is said of it stands in an entry around it (`fatbench.suite.entry`).

A setting may also name a settings class, a frozen dataclass in CLASSES. Its fields are settings, and a suite writes
them as a mapping without a name. Plug-ins extend the tables, never the classes.

    describe("Attack", "pgd")      -> its Signature
    describe("Local")              -> the Signature of a settings class
    described("Attack", "mine", mine)      -> that of a function, from itself

Signatures of ours are kept in settings.json, which `make settings` writes: results are read without importing torch.
A plug-in is imported when it is added. `fatbench.suite.calls` checks a suite's mapping against a signature.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from fatbench.errors import SpecError, UnknownName, article, did_you_mean
from fatbench.suite import entry as entries
from fatbench.suite import sources, types

PACKAGE = Path(__file__).parent.parent
FILE = Path(__file__).with_name("settings.json")
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


REQUIRED: Any = object()


@dataclass(frozen=True)
class Setting:
    """One keyword-only argument: its name, its annotation as text, its default (REQUIRED where it has none)."""

    name: str
    annotation: str
    default: Any
    type: Any = dataclasses.field(default=None, compare=False)  # evaluated, where it is none of fatbench.suite.types

    @functools.cached_property
    def kind(self) -> str | None:
        """Of what kind the call is that the setting takes ("Attack", "Local"); None: it takes a plain value."""
        bare = self.annotation.removesuffix(" | None")
        return bare if bare in TABLES or bare in CLASSES else None

    @property
    def optional(self) -> bool:
        return self.annotation.endswith(" | None")

    @property
    def adapter(self) -> TypeAdapter[Any]:
        """What checks a plain value."""
        return _adapter(self.annotation) if self.type is None else TypeAdapter(self.type, config=STRICT)


STRICT = ConfigDict(strict=True)
NAMES = {**vars(types), "Literal": Literal}  # what annotations are written in


@functools.cache
def _adapter(annotation: str) -> TypeAdapter[Any]:
    return TypeAdapter(eval(annotation, NAMES), config=STRICT)


@dataclass(frozen=True, eq=False)
class Signature:
    """What is known of one registered function, or of a settings class (named by its kind in lower case)."""

    kind: str
    name: str
    summary: str  # the docstring's first line
    settings: tuple[Setting, ...]
    free: bool = False  # takes **settings, checked only when it is called (a torchattacks attack)
    asks: tuple[str, ...] = ()  # parameters after the FIXED ones of its kind: of OFFERS; of an adversary all
    entry: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # plain fields of its `fatbench.suite.entry`
    plugin: Path | None = None  # the file whose table has it, if that is not ours

    @functools.cached_property
    def by_name(self) -> dict[str, Setting]:
        return {setting.name: setting for setting in self.settings}


# --- what a function says of itself -------------------------------------------------------------------------------


def described(kind: str, name: str, value: Any, plugin: Path | None = None) -> Signature:
    """The signature of what a table maps a name to. SpecError: no function, or one that the engine could not call."""
    entry = entries.in_table(value)
    function = entry.function
    if not callable(function) or isinstance(function, type):
        shown_name = getattr(function, "__name__", function)
        raise SpecError(f"plugin {plugin}: '{shown_name}' is in the table but is not a function")
    settings, location = settings_of(function), place_of(function)
    asks = _asks(kind, name, function, location)
    if kind == "Algorithm":
        _says_how_it_trains(name, settings, location)
    takes_any = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(function).parameters.values()
    )
    if not takes_any:
        _asks_for_settings(name, entry, settings)
    doc = inspect.getdoc(undecorated(function)) or ""
    return Signature(kind, name, _first_line(doc), settings, takes_any, asks, _plain_fields(entry), plugin)


def described_class(kind: str) -> Signature:
    """The signature of a settings class: the fields of its dataclass."""
    module, name = CLASSES[kind]
    settings_class = getattr(importlib.import_module(module), name)
    return Signature(kind, kind.lower(), _first_line(inspect.getdoc(settings_class) or ""), settings_of(settings_class))


def settings_of(function: Callable[..., Any]) -> tuple[Setting, ...]:
    """The keyword-only arguments of a function, or the fields of a settings class.

    SpecError: an annotation that cannot be evaluated, or a default that no suite could say.
    """
    space = vars(sys.modules[function.__module__]) if isinstance(function, type) else undecorated(function).__globals__
    settings = []
    for parameter in inspect.signature(function).parameters.values():
        if not isinstance(function, type) and parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        default = REQUIRED if parameter.default is parameter.empty else parameter.default
        if default is not REQUIRED and not isinstance(default, bool | int | float | str | Mapping | None):
            raise SpecError(
                f"{place_of(function)}: the default of '{parameter.name}', {default!r}, is none that a suite "
                "can say: use a "
                "number, a string, True, False or None, or no default, so that the suite gives it"
            )
        settings.append(_setting(parameter.name, parameter.annotation, default, space, function))
    return tuple(settings)


def _setting(name: str, annotation: Any, default: Any, space: Mapping[str, Any], function: Any) -> Setting:
    if annotation is inspect.Parameter.empty:
        return Setting(name, "Any", default, Any)
    evaluated, text = annotation, ""
    try:
        while isinstance(evaluated, str):
            text, evaluated = evaluated, eval(evaluated, {**NAMES, **space})
    except Exception as error:
        raise SpecError(f"{place_of(function)}: the type of '{name}', {annotation}: {error}") from None
    text = text or _spelled(evaluated)
    try:
        is_known = eval(text, NAMES) == evaluated
    except Exception:
        text = _spelled(evaluated)
        is_known = False
    return Setting(name, text, default, None if is_known else evaluated)


def _spelled(annotation: Any) -> str:
    """An evaluated annotation as a suite's author would write it: "Radius", "Positive | None", "Literal['a', 'b']"."""
    if (type_name := next((name for name, marked_type in _marked() if marked_type == annotation), None)) is not None:
        return type_name
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        return " | ".join(map(_spelled, arguments))
    if typing.get_origin(annotation) is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if typing.get_origin(annotation) is typing.Annotated:
        return _spelled(arguments[0])
    return "None" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def _marked() -> Iterator[tuple[str, Any]]:
    return ((name, annotated) for name, annotated in vars(types).items() if hasattr(annotated, "__metadata__"))


def undecorated(function: Callable[..., Any]) -> Any:
    """The function under decorators and `functools.partial`; of an object, its `__call__`."""
    inner = inspect.unwrap(function)
    if isinstance(inner, functools.partial):
        return undecorated(inner.func)
    return inner if hasattr(inner, "__code__") or isinstance(inner, type) else undecorated(type(inner).__call__)


def place_of(function: Callable[..., Any]) -> str:
    """ "file:line"."""
    code = getattr(undecorated(function), "__code__", None)
    return (
        inspect.getsourcefile(undecorated(function)) or ""
        if code is None
        else f"{code.co_filename}:{code.co_firstlineno}"
    )


def _first_line(doc: str) -> str:
    return doc.strip().partition("\n")[0]


def _plain_fields(entry: entries.Entry) -> dict[str, Any]:
    """The fields of an entry that say more than their default, and are plain data; a threat as "module:function"."""
    plain_values: dict[str, Any] = {}
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        if field.name == "threat" and callable(value):
            plain_values["threat"] = f"{value.__module__}:{value.__name__}"
        elif isinstance(value, str | bool | tuple) and value != field.default and field.name != "refuse":
            plain_values[field.name] = list(value) if isinstance(value, tuple) else value
    return plain_values


def _asks(kind: str, name: str, function: Callable[..., Any], location: str) -> tuple[str, ...]:
    """The parameters beyond those that every function of the kind has. SpecError: too few, or one not offered."""
    all_parameters = inspect.signature(function).parameters.values()
    parameters = [
        parameter.name
        for parameter in all_parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    fixed, offered = FIXED[kind], OFFERS.get(kind, ())
    if kind == "Adversary":
        first_parameter = parameters[0] if parameters else ""
        if first_parameter not in ADVERSARIES:
            begin = " or ".join(f"({', '.join(fixed)})" for fixed, _ in ADVERSARIES.values())
            raise SpecError(
                f"{location}: the adversary '{name}' takes ({', '.join(parameters)}), but begins with what it changes: "
                f"{begin}{did_you_mean(first_parameter, ADVERSARIES)}"
            )
        fixed, offered = ADVERSARIES[first_parameter]
    if all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in all_parameters) and (
        len(parameters) < len(fixed) or any(p in offered and p not in fixed for p in parameters[: len(fixed)])
    ):
        raise SpecError(
            f"{location}: the {kind.lower()} '{name}' is called with ({', '.join(fixed)}), but takes "
            f"({', '.join(parameters)})"
        )
    for ask in parameters[len(fixed) :]:
        if ask not in offered:
            allowed_text = f"can take {', '.join(offered)}" if offered else "cannot take any other argument"
            raise SpecError(
                f"{location}: the {kind.lower()} '{name}' takes '{ask}'{did_you_mean(ask, offered)}: beyond "
                f"({', '.join(fixed)}) it {allowed_text}; put settings after '*'"
            )
    return tuple(parameters if kind == "Adversary" else parameters[len(fixed) :])


def _says_how_it_trains(name: str, settings: tuple[Setting, ...], location: str) -> None:
    """SpecError: an algorithm lacks a setting that a run reads of every algorithm."""
    setting_names = {setting.name for setting in settings}
    if "rounds" not in setting_names:
        raise SpecError(f"{location}: the algorithm '{name}' needs a setting 'rounds: Count'")
    if not setting_names & {"local", "batch"} and all(setting.kind != "Algorithm" for setting in settings):
        raise SpecError(
            f"{location}: the algorithm '{name}' needs a setting 'local: Local', or 'batch: Count' if clients only "
            "compute gradients, or an 'Algorithm' that it wraps"
        )


def _asks_for_settings(name: str, entry: entries.Entry, settings: tuple[Setting, ...]) -> None:
    """SpecError: a function of an entry asks for what is none of the settings."""
    setting_names = [setting.name for setting in settings]
    fields = [value for key, value in vars(entry).items() if key != "function" and callable(value)]
    for entry_function in (*entry.refuse, *fields):
        for parameter in inspect.signature(entry_function).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in setting_names:
                raise SpecError(
                    f"{place_of(entry_function)}: '{entry_function.__name__}' asks for '{parameter.name}', "
                    "which is none of the settings of "
                    f"'{name}'{did_you_mean(parameter.name, setting_names)}"
                )


# --- the tables ---------------------------------------------------------------------------------------------------

Said = dict[str, Any]  # a signature as JSON


def shipped() -> str:
    """What settings.json has to say, from the functions themselves, a line each; imports all of them."""
    signatures_by_kind = {kind: [described_class(kind)] for kind in CLASSES}
    for kind, (module, table) in TABLES.items():
        own_table = getattr(importlib.import_module(module), table)
        signatures_by_kind[kind] = [described(kind, name, value) for name, value in own_table.items()]
    kinds = []
    for kind, signatures in signatures_by_kind.items():
        lines = ",\n".join(
            f"  {json.dumps(signature.name)}: {json.dumps(as_json(signature))}" for signature in signatures
        )
        kinds.append(f' "{kind}": {{\n{lines}\n }}')
    return "{\n" + ",\n".join(kinds) + "\n}\n"


def as_json(signature: Signature) -> Said:
    """A signature as plain data; a setting is [annotation] or [annotation, default]."""
    settings = {
        setting.name: [setting.annotation] if setting.default is REQUIRED else [setting.annotation, setting.default]
        for setting in signature.settings
    }
    content = {"summary": signature.summary, "settings": settings, "free": signature.free, "asks": list(signature.asks),
            "entry": signature.entry}  # fmt: skip
    return {key: value for key, value in content.items() if value}


def _from_json(kind: str, name: str, content: Said, plugin: Path | None = None) -> Signature:
    settings = tuple(
        Setting(setting_name, annotation, *(default or [REQUIRED]))
        for setting_name, (annotation, *default) in content.get("settings", {}).items()
    )
    asks = tuple(content.get("asks", ()))
    return Signature(
        kind, name, content.get("summary", ""), settings, "free" in content, asks, content.get("entry", {}), plugin
    )


@functools.cache
def _shipped_signatures() -> dict[str, dict[str, Signature]]:
    all_content = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        kind: {name: _from_json(kind, name, content) for name, content in table.items()}
        for kind, table in all_content.items()
    }


_PLUGINS: dict[Path, dict[str, dict[str, Signature]]] = {}  # file -> kind -> name
_INSTALLED: dict[Path, Callable[[SpecError], None] | None] = {}  # of packages -> what hears of an error; None: imported


def add_plugin(file: Path) -> None:
    """Import a Python file and let its tables extend ours.

    SpecError: unreadable, an error while it is imported, no table in it, a name already taken, or a function that the
    engine could not call.
    """
    if file in _PLUGINS:
        return
    _PLUGINS[file] = {}  # what it reads while it is imported is read by a plug-in
    try:
        _PLUGINS[file] = _tables(file)
        if file not in _INSTALLED:
            _refuse_taken(file)
    except BaseException:
        del _PLUGINS[file]
        sources.delete(file)
        raise


def add_installed(file: Path, left_out: Callable[[SpecError], None]) -> None:
    """Let the tables of an installed package's file extend ours, once a name is asked for that is not ours.

    A name that is taken is an error where it is used; a name of ours stays ours. left_out: hears what `add_plugin`
    would raise.
    """
    if file not in _PLUGINS:
        _INSTALLED[file] = left_out


def add_described(plugins: Mapping[str, Mapping[str, Mapping[str, Said]]]) -> None:
    """Know the plug-ins of another process, as `of_plugins` gave them there; each is imported when it is called."""
    for name, tables in plugins.items():
        file = Path(name)
        _PLUGINS.setdefault(
            file,
            {
                kind: {
                    function_name: _from_json(kind, function_name, content, file)
                    for function_name, content in table.items()
                }
                for kind, table in tables.items()
            },
        )


def of_plugins() -> dict[str, dict[str, dict[str, Said]]]:
    """The plug-ins in use, for other processes: file -> kind -> name -> signature."""
    return {
        str(file): {
            kind: {name: as_json(signature) for name, signature in table.items()} for kind, table in tables.items()
        }
        for file, tables in _PLUGINS.items()
    }


def _tables(file: Path) -> dict[str, dict[str, Signature]]:
    try:
        sources.version(file)
    except OSError as error:
        raise SpecError(f"plugin {file}: {error.strerror or error}") from None
    except (SyntaxError, ValueError) as error:
        raise SpecError(f"plugin {file}: {error}") from None
    module = sources.load(file)
    tables_by_kind: dict[str, dict[str, Signature]] = {}
    for kind, (our_module, table) in TABLES.items():
        own_table = getattr(module, table, None)
        if own_table is None or own_table is getattr(sys.modules.get(our_module), table, None):
            continue
        if not (isinstance(own_table, Mapping) and all(isinstance(name, str) for name in own_table)):
            raise SpecError(f'plugin {file}: {table}: expected a dict of functions by name, {{"name": function}}')
        tables_by_kind[kind] = {name: described(kind, name, value, file) for name, value in own_table.items()}
    if not any(tables_by_kind.values()):
        raise SpecError(f"plugin {file}: it defines none of {', '.join(table for _, table in TABLES.values())}")
    return tables_by_kind


def _refuse_taken(file: Path) -> None:
    for kind, table in _PLUGINS[file].items():
        for name in table:
            other_files = [other_file for other_file in _holders(kind, name) if other_file != file]
            if other_files and not any(other_file in _INSTALLED for other_file in other_files):
                file_text = f" in {other_files[0]}" if other_files[0] else ""
                raise SpecError(f"plugin {file}: there is already {article(kind.lower())} named '{name}'{file_text}")


def _holders(kind: str, name: str) -> list[Path | None]:
    """The plug-ins that bring a name; None: it is ours."""
    holders: list[Path | None] = [None] if name in _shipped_signatures()[kind] else []
    return holders + [file for file, tables in _PLUGINS.items() if name in tables.get(kind, ())]


def drop_plugins(files: list[Path]) -> None:
    """Take plug-ins out again."""
    for file in files:
        _PLUGINS.pop(file, None)
        _INSTALLED.pop(file, None)


def plugins() -> tuple[Path, ...]:
    """The plug-in files in use."""
    return tuple(_PLUGINS)


def known_functions(kind: str) -> dict[str, Signature]:
    """The functions of a kind, of ours and of the plug-ins that are in use."""
    function_by_name = dict(_shipped_signatures()[kind])
    for tables in _PLUGINS.values():
        for name, signature in tables.get(kind, {}).items():
            function_by_name.setdefault(name, signature)
    return function_by_name


def _with_installed(kind: str) -> dict[str, Signature]:
    """`known_functions`, of installed packages too."""
    for file, left_out in _INSTALLED.items():
        if left_out is not None:
            _INSTALLED[file] = None
            try:
                add_plugin(file)
            except SpecError as error:
                left_out(error)
    return known_functions(kind)


def plugin_of(kind: str, name: str) -> Path | None:
    """The plug-in that brings a name, if one does; the kind in lower case, as a plug-in's record has it."""
    return signature.plugin if (signature := known_functions(kind_of(kind)).get(name)) is not None else None


def kind_of(lower: str) -> str:
    """ "Aggregator" of "aggregator"."""
    return next(kind for kind in TABLES if kind.lower() == lower)


def names(kind: str) -> list[str]:
    """The names a suite may use for this kind, in the order of the table."""
    return list(_with_installed(kind))


def describe(kind: str, name: str = "", location: str = "") -> Signature:
    """The signature of one registered function; of a settings class, and of the one experiment, without a name.

    SpecError: no such name.
    """
    if kind in CLASSES:
        return _shipped_signatures()[kind][kind.lower()]
    name = "cell" if kind == "Experiment" else name
    if (shipped_signature := _shipped_signatures()[kind].get(name)) is not None:
        return shipped_signature
    all_functions = _with_installed(kind)
    if name not in all_functions:
        module, table = TABLES[kind]
        error = f"no {kind.lower()} is named '{name}'{did_you_mean(name, all_functions)}"
        if name in getattr(sys.modules.get(module), table, ()):  # a program put it there
            error += f": an entry of {table} is not seen, fatbench.register(function, '{kind.lower()}') makes it known"
        raise UnknownName(f"{location}: {error}" if location else error, f"{kind.lower()} {name}")
    if len(holders := _holders(kind, name)) > 1:
        file_names = " and ".join(map(str, holders))
        raise SpecError(f"{kind.lower()} '{name}' is in {file_names}: uninstall one, or leave one plug-in out")
    return all_functions[name]
