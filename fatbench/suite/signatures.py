"""The functions that a suite may call: their tables, and their settings, read with `inspect.signature`.

Every extensible module ends in a table, `AGGREGATORS = {"sfat": sfat, ...}`. The keyword-only arguments of a function
in it are its settings: name, type (an annotation from `fatbench.suite.types`, a Literal, bool or str) and default. The
docstring's first line is its summary. Further statements stand in an entry around it (`fatbench.suite.entry`).

A setting may also name a settings class, a frozen dataclass in CLASSES. Its fields are settings, and a suite writes
them as a mapping without a name. Plug-ins extend the tables, never the classes.

    describe("Attack", "pgd")      -> its Signature
    describe("Local")              -> the Signature of a settings class
    described("Attack", "mine", mine)      -> the Signature of a function object

Signatures of our functions are kept in settings.json, written by `make settings`, so that results are read without
importing torch. A plug-in is imported when it is added. `fatbench.suite.calls` checks mappings against signatures.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from fatbench.errors import SpecError, UnknownName, article, did_you_mean
from fatbench.suite import entry as entries
from fatbench.suite import source_files, types

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
    "PreAggregator": ("fatbench.methods.preaggregators", "PREAGGREGATORS"),
    "Objective": ("fatbench.methods.objectives", "OBJECTIVES"),
    "Proximal": ("fatbench.methods.objectives", "PROXIMALS"),
    "Attack": ("fatbench.methods.evasion", "ATTACKS"),
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
    "Availability": ("fatbench.engine.cohort", "Availability"),
}

OF_A_ROUND = ("broadcast", "last_layer", "malicious", "cohort", "round", "generator")  # of a round's uploads
# kind -> the ways in which the engine calls its functions: (positional arguments, further ones that a function may ask
# for by name); of several, the first argument of a function says which, since it names what the function changes
FORMS: dict[str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = {
    "Experiment": ((("ready", "state"), ()),),
    "Data": ((("root",), ("first",)),),
    "Partition": ((("labels", "rng", "writers"), ()),),
    "Model": ((("shape", "classes"), ()),),
    "Algorithm": ((("problem", "state"), ()),),
    "Aggregator": ((("updates", "context"), ("broadcast_losses",)),),
    "PreAggregator": ((("gram", "generator"), ()),),
    "Objective": ((("model", "x", "y", "generator"), ("class_counts", "broadcast", "client")),),
    "Proximal": ((("weights", "broadcast", "round"), ()),),
    "Attack": ((("model", "x", "y", "generator"), ("index",)),),
    "Augment": ((("x", "generator"), ()),),
    "Diagnostic": ((("problem", "result", "images", "labels", "attack", "generator"), ()),),
    "Defence": ((("gradient", "upload"), ("gradient", "examples")),),
    "Inversion": ((("observed", "model", "shape", "generator"), ()),),
    "Adversary": (
        (("images", "labels"), ("classes", "generator")),
        (("features", "answers", "labels"), ("classes", "generator", "round", "malicious", "others", "images", "edge")),
        (("loss",), ()),
        (("objective", "model", "x", "y", "generator"), ("class_counts", "broadcast", "client", "round")),
        (("update",), ("others", *OF_A_ROUND)),
        (("updates",), ("others", *OF_A_ROUND, "honest", "aggregate", "memory", "robust_accuracy")),
    ),
    "Manipulation": ((("model", "weights", "generator"), ("labels", "images")),),
}


# names of other programs, which look like those of other functions of ours
ELSEWHERE = {
    ("Aggregator", "fedavg"): "samples", ("Aggregator", "mean"): "uniform", ("Aggregator", "average"): "uniform",
}  # fmt: skip

REQUIRED: Any = object()


@dataclass(frozen=True)
class Setting:
    """One keyword-only argument: its name, its type, its default (REQUIRED where it has none)."""

    name: str
    type: Any
    default: Any

    @functools.cached_property
    def type_name(self) -> str | None:
        """The name of its type without `| None`, if the type is one of `fatbench.suite.types`."""
        return types.name_of(self.type)

    @functools.cached_property
    def kind(self) -> str | None:
        """The kind of call that the setting takes ("Attack", "Local"), or None for a plain value."""
        return self.type_name if self.type_name in TABLES or self.type_name in CLASSES else None

    @functools.cached_property
    def optional(self) -> bool:
        return type(None) in typing.get_args(self.type)

    @property
    def annotation(self) -> str:
        """The type as text."""
        return types.text_of(self.type)

    @functools.cached_property
    def is_number(self) -> bool:
        """Whether it takes a number, and so a fraction such as 8/255."""
        alternatives = typing.get_args(self.type) if types.is_union(self.type) else (self.type,)
        plain = {typing.get_args(item)[0] if hasattr(item, "__metadata__") else item for item in alternatives}
        return bool({int, float} & plain)

    @functools.cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """The pydantic adapter that checks a plain value."""
        try:
            return _adapter(self.type)
        except TypeError:  # a type with an example or a validator that has no hash
            return TypeAdapter(self.type, config=STRICT)


STRICT = ConfigDict(strict=True)


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=STRICT)


@dataclass(frozen=True, eq=False)
class Signature:
    """The signature of a registered function, or of a settings class (named by its kind in lower case)."""

    kind: str
    name: str
    summary: str  # the docstring's first line
    settings: tuple[Setting, ...]
    free: bool = False  # takes **settings, which it checks when it is called (such as torchattacks)
    asks: tuple[str, ...] = ()  # its parameters beyond the fixed ones of FORMS; all of a kind with several forms
    entry: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # plain fields of its entry
    plugin: Path | None = None  # the file whose table has it; None: ours

    @functools.cached_property
    def by_name(self) -> dict[str, Setting]:
        return {setting.name: setting for setting in self.settings}


# --- signatures of function objects --------------------------------------------------------------------------------


def described(kind: str, name: str, value: Any, plugin: Path | None = None) -> Signature:
    """The signature of a table's value; SpecError unless it is a function that the engine can call."""
    entry = entries.in_table(value)
    function = entry.function
    if not callable(function) or isinstance(function, type):
        shown_name = getattr(function, "__name__", function)
        raise SpecError(f"plugin {plugin}: '{shown_name}' is in the table but is not a function")
    settings, location = settings_of(function), place_of(function)
    asks = _requested_parameters(kind, name, function, location)
    if kind == "Algorithm":
        _check_training_settings(name, settings, location)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(function).parameters.values())
    if not takes_any:
        _check_entry_settings(name, entry, settings)
    doc = inspect.getdoc(undecorated(function)) or ""
    return Signature(
        kind, name, doc.strip().partition("\n")[0], settings, takes_any, asks, _plain_fields(entry), plugin
    )


def described_class(kind: str) -> Signature:
    """The signature of a settings class: the fields of its dataclass."""
    module, name = CLASSES[kind]
    settings_class = getattr(importlib.import_module(module), name)
    doc = inspect.getdoc(settings_class) or ""
    return Signature(kind, kind.lower(), doc.strip().partition("\n")[0], settings_of(settings_class))


def settings_of(function: Callable[..., Any]) -> tuple[Setting, ...]:
    """The keyword-only arguments of a function, or the fields of a settings class.

    SpecError for an annotation that cannot be evaluated, or a default that no suite could write.
    """
    space = vars(sys.modules[function.__module__]) if isinstance(function, type) else undecorated(function).__globals__
    settings = []
    for parameter in inspect.signature(function).parameters.values():
        if not isinstance(function, type) and parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        default = REQUIRED if parameter.default is parameter.empty else parameter.default
        if default is not REQUIRED and not isinstance(default, bool | int | float | str | Mapping | None):
            raise SpecError(
                f"{place_of(function)}: the default of '{parameter.name}', {default!r}, cannot be written in a suite: "
                "use a number, a string, True, False, None or no default"
            )
        annotation = _type(parameter.name, parameter.annotation, space, function)
        settings.append(Setting(parameter.name, annotation, default))
    return tuple(settings)


def _type(name: str, annotation: Any, space: Mapping[str, Any], function: Any) -> Any:
    """The type of a setting, Any without an annotation. SpecError: it cannot be evaluated."""
    if annotation is inspect.Parameter.empty:
        return Any
    evaluated = annotation
    try:
        while isinstance(evaluated, str):
            evaluated = types.evaluated(evaluated, space)
    except Exception as error:
        raise SpecError(f"{place_of(function)}: the type of '{name}', {annotation}: {error}") from None
    return evaluated


def undecorated(function: Callable[..., Any]) -> Any:
    """The function inside decorators and `functools.partial`; for an object, its `__call__`."""
    inner = inspect.unwrap(function)
    if isinstance(inner, functools.partial):
        return undecorated(inner.func)
    return inner if hasattr(inner, "__code__") or isinstance(inner, type) else undecorated(type(inner).__call__)


def place_of(function: Callable[..., Any]) -> str:
    """The place of a function, "file:line"."""
    inner = undecorated(function)
    code = getattr(inner, "__code__", None)
    return inspect.getsourcefile(inner) or "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _plain_fields(entry: entries.Entry) -> dict[str, Any]:
    """The plain fields of an entry that differ from their defaults; a threat function as "module:function"."""
    plain_values: dict[str, Any] = {}
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        if field.name == "threat" and callable(value):
            plain_values["threat"] = f"{value.__module__}:{value.__name__}"
        elif isinstance(value, str | bool | tuple) and value != field.default and field.name != "refuse":
            plain_values[field.name] = list(value) if isinstance(value, tuple) else value
    return plain_values


def _requested_parameters(kind: str, name: str, function: Callable[..., Any], location: str) -> tuple[str, ...]:
    """The parameters beyond the fixed ones of a kind; SpecError for too few parameters, or one that is not offered."""
    all_parameters = inspect.signature(function).parameters.values()
    parameters = [p.name for p in all_parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    forms = FORMS[kind]
    fixed, offered = next((form for form in forms if form[0][:1] == tuple(parameters[:1])), forms[0])
    if len(forms) > 1 and fixed[:1] != tuple(parameters[:1]):
        first_parameters = [fixed[0] for fixed, _ in forms]
        begin = " or ".join(f"({', '.join(fixed)})" for fixed, _ in forms)
        hint = did_you_mean("".join(parameters[:1]), first_parameters)
        takes = f"the {kind.lower()} '{name}' takes ({', '.join(parameters)})"
        raise SpecError(f"{location}: {takes}, but begins with what it changes: {begin}{hint}")
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
    return tuple(parameters if len(forms) > 1 else parameters[len(fixed) :])


def _check_training_settings(name: str, settings: tuple[Setting, ...], location: str) -> None:
    """SpecError if an algorithm lacks a setting that every run reads."""
    setting_names = {setting.name for setting in settings}
    if "rounds" not in setting_names:
        raise SpecError(f"{location}: the algorithm '{name}' needs a setting 'rounds: Count'")
    if not setting_names & {"local", "batch"} and all(setting.kind != "Algorithm" for setting in settings):
        raise SpecError(
            f"{location}: the algorithm '{name}' needs a setting 'local: Local', or 'batch: Count' if clients only "
            "compute gradients, or an 'Algorithm' that it wraps"
        )


def _check_entry_settings(name: str, entry: entries.Entry, settings: tuple[Setting, ...]) -> None:
    """SpecError if a function of an entry asks for something that is not a setting."""
    setting_names = [setting.name for setting in settings]
    fields = [value for key, value in vars(entry).items() if key != "function" and callable(value)]
    for entry_function in (*entry.refuse, *fields):
        for parameter in inspect.signature(entry_function).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in setting_names:
                raise SpecError(
                    f"{place_of(entry_function)}: '{entry_function.__name__}' asks for '{parameter.name}', "
                    f"which is not a setting of '{name}'{did_you_mean(parameter.name, setting_names)}"
                )


# --- the tables ---------------------------------------------------------------------------------------------------

# {"summary": ..., "settings": {name: [annotation, default]}, "free": ..., "asks": [...], "entry": {...}}
SignatureJson = dict[str, Any]


def shipped() -> str:
    """The content that settings.json should have, one line per function; imports all functions."""
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


def as_json(signature: Signature) -> SignatureJson:
    """A signature as plain data; a setting becomes [annotation] or [annotation, default]."""
    settings = {
        setting.name: [setting.annotation] if setting.default is REQUIRED else [setting.annotation, setting.default]
        for setting in signature.settings
    }
    content = {"summary": signature.summary, "settings": settings, "free": signature.free, "asks": list(signature.asks),
            "entry": signature.entry}  # fmt: skip
    return {key: value for key, value in content.items() if value}


def _from_json(kind: str, name: str, content: SignatureJson, plugin: Path | None = None) -> Signature:
    settings = tuple(
        [
            Setting(setting_name, _type_of_text(text), *(default or [REQUIRED]))
            for setting_name, (text, *default) in content.get("settings", {}).items()
        ]
    )
    asks = tuple(content.get("asks", ()))
    return Signature(
        kind, name, content.get("summary", ""), settings, "free" in content, asks, content.get("entry", {}), plugin
    )


@functools.cache
def _type_of_text(text: str) -> Any:
    """The type of a text of settings.json, or of another process; Any for one of a plug-in's own types."""
    try:
        return types.evaluated(text)
    except NameError:
        return Any


@functools.cache
def _shipped_signatures() -> dict[str, dict[str, Signature]]:
    all_content = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        kind: {name: _from_json(kind, name, content) for name, content in table.items()}
        for kind, table in all_content.items()
    }


_PLUGINS: dict[Path, dict[str, dict[str, Signature]]] = {}  # file -> kind -> name
# file of an installed package -> handler of errors while it is imported; None once it is imported
_INSTALLED: dict[Path, Callable[[SpecError], None] | None] = {}


def add_plugin(file: Path) -> None:
    """Import a Python file and let its tables extend ours.

    SpecError if it cannot be read or imported, has no table, brings a name that is taken, or a function that the engine
    could not call.
    """
    if file in _PLUGINS:
        return
    _PLUGINS[file] = {}  # what it reads while it is imported is read by a plug-in
    try:
        _PLUGINS[file] = _tables(file)
        if file not in _INSTALLED:
            for kind, name in ((kind, name) for kind, table in _PLUGINS[file].items() for name in table):
                others = [other for other in _files_with(kind, name) if other != file]
                if others and not any(other in _INSTALLED for other in others):
                    place = f" in {others[0]}" if others[0] else ""
                    raise SpecError(f"plugin {file}: there is already {article(kind.lower())} named '{name}'{place}")
    except BaseException:
        del _PLUGINS[file]
        source_files.delete(file)
        raise


def add_installed(file: Path, left_out: Callable[[SpecError], None]) -> None:
    """Let the tables of an installed package's file extend ours, once a name is used that is not ours.

    A name in two packages is an error only when it is used; our names stay ours. left_out: receives the error that
    `add_plugin` would raise.
    """
    if file not in _PLUGINS:
        _INSTALLED[file] = left_out


def add_described(plugins: Mapping[str, Mapping[str, Mapping[str, SignatureJson]]]) -> None:
    """Add the plug-ins of another process, from its `of_plugins`; each is imported when it is called."""
    for name, tables in plugins.items():
        if (file := Path(name)) not in _PLUGINS:
            _PLUGINS[file] = {
                kind: {function: _from_json(kind, function, content, file) for function, content in table.items()}
                for kind, table in tables.items()
            }


def of_plugins() -> dict[str, dict[str, dict[str, SignatureJson]]]:
    """The plug-ins in use, for other processes: {file: {kind: {name: signature}}}."""
    return {
        str(file): {
            kind: {name: as_json(signature) for name, signature in table.items()} for kind, table in tables.items()
        }
        for file, tables in _PLUGINS.items()
    }


def _tables(file: Path) -> dict[str, dict[str, Signature]]:
    try:
        source_files.version(file)
    except OSError as error:
        raise SpecError(f"plugin {file}: {error.strerror or error}") from None
    except (SyntaxError, ValueError) as error:
        raise SpecError(f"plugin {file}: {error}") from None
    module = source_files.load(file)
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


def _files_with(kind: str, name: str) -> list[Path | None]:
    """The plug-in files that have a name; None among them stands for ours."""
    files_with_name: list[Path | None] = [None] if name in _shipped_signatures()[kind] else []
    return files_with_name + [file for file, tables in [*_PLUGINS.items()] if name in tables.get(kind, ())]


def drop_plugins(files: list[Path]) -> None:
    """Remove plug-ins."""
    for file in files:
        _PLUGINS.pop(file, None)
        _INSTALLED.pop(file, None)


def plugins() -> tuple[Path, ...]:
    """The plug-in files in use."""
    return tuple(_PLUGINS)


def known_functions(kind: str) -> dict[str, Signature]:
    """name -> signature of our functions of a kind and of those of the plug-ins in use."""
    function_by_name = dict(_shipped_signatures()[kind])
    for tables in [*_PLUGINS.values()]:  # another thread may add one
        for name, signature in tables.get(kind, {}).items():
            function_by_name.setdefault(name, signature)
    return function_by_name


def known(kind: str, name: str) -> Signature | None:
    """The function of a name, or of "package:name", which says whose; None if there is none in use."""
    if (signature := known_functions(kind).get(name)) is not None:
        return signature
    package, _, plain = name.rpartition(":")
    found = (file for file in _files_with(kind, plain) if file is not None and package_of(file) == package)
    return next((dataclasses.replace(_PLUGINS[file][kind][plain], name=name) for file in found), None)


def package_of(file: Path) -> str:
    """The package of a plug-in, or its file's name without the ending."""
    return source_files.version(file).plugin.partition(".")[0]


def _with_installed(kind: str) -> dict[str, Signature]:
    """`known_functions`, after importing the installed packages with plug-ins."""
    for file, left_out in _INSTALLED.items():
        if left_out is not None:
            _INSTALLED[file] = None
            try:
                add_plugin(file)
            except SpecError as error:
                left_out(error)
    return known_functions(kind)


def kind_of(lower: str) -> str:
    """The kind of a name in lower case: "Aggregator" for "aggregator"."""
    return next(kind for kind in TABLES if kind.lower() == lower)


def names(kind: str) -> list[str]:
    """The names a suite may use for this kind, in the order of the table."""
    return list(_with_installed(kind))


def describe(kind: str, name: str = "", location: str = "") -> Signature:
    """The signature of a registered function; a settings class and the experiment need no name.

    SpecError for an unknown name.
    """
    if kind in CLASSES:
        return _shipped_signatures()[kind][kind.lower()]
    name = "cell" if kind == "Experiment" else name
    if (shipped_signature := _shipped_signatures()[kind].get(name)) is not None:
        return shipped_signature
    all_functions = _with_installed(kind)
    if (signature := known(kind, str(name))) is None:
        module, table = TABLES[kind]
        meant = ELSEWHERE.get((kind, str(name).lower()))
        hint = f" (did you mean '{meant}'?)" if meant else did_you_mean(name, all_functions)
        error = f"no {kind.lower()} is named '{name}'{hint}"
        if name in getattr(sys.modules.get(module), table, ()):  # a program changed the table at run time
            error += f": it was put into {table}, but only fatbench.register(function, '{kind.lower()}') makes it known"
        raise UnknownName(f"{location}: {error}" if location else error, f"{kind.lower()} {name}")
    if len(files_with_name := _files_with(kind, name)) > 1:
        file_names = " and ".join(map(str, files_with_name))
        choices = " or ".join(f"{package_of(file)}:{name}" for file in files_with_name if file is not None)
        raise SpecError(f"{kind.lower()} '{name}' is in {file_names}: write {choices}")
    return signature
