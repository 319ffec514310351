"""Calls: the mappings of a suite, checked once, each with the signature of what it calls.

    check("Attack", node)     -> the Call of a suite's mapping, every default filled in
    call("Attack", spec)      -> the Call of a canonical mapping that was stored or came from another process
    build("Attack", spec)     -> the function with its settings bound; imports its module
    entry(signature)          -> what its table states about the function; imports no torch for functions of ours

Later questions about a call (its cost, refusals, plug-ins, identity) are answered by its signature and by the calls
nested in it; no name is looked up again.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.machinery
import importlib.util
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fatbench.errors import MachineError, SpecError, did_you_mean, shown
from fatbench.suite import source_files, types, weights
from fatbench.suite.entry import Entry, entry_of, in_table
from fatbench.suite.signatures import CLASSES, PACKAGE, REQUIRED, TABLES, Setting, Signature, describe, names

if TYPE_CHECKING:
    from fatbench.suite.model import Perturbation

IMPORT_TORCH = ("fatbench.engine", "fatbench.methods", "fatbench.models")


class Call(dict[str, Any]):
    """A canonical mapping with all settings, and the signature of what it calls; nested calls are Calls too.

    The call of a settings class, or of a cell, has no `name`. A Call is never changed. Copied with `{**call}`, pickled
    or as JSON it is plain data, which `call` turns into a Call again.
    """

    def __init__(self, signature: Signature, settings: Mapping[str, Any]):
        super().__init__(settings)
        self.signature = signature

    @property
    def kind(self) -> str:
        return self.signature.kind

    @property
    def name(self) -> str:
        return self.signature.name

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a model, or those that an algorithm trains separately, as the function's entry names them."""
        return tuple(getattr(entry(self.signature), "parts", ()))

    @property
    def nested(self) -> dict[str, Call]:
        """The settings that are calls, by name; those that are None are left out."""
        return {name: value for name, value in self.items() if isinstance(value, Call)}

    def walk(self) -> Iterator[Call]:
        """The call and all nested in it, outer calls first."""
        yield self
        for inner in self.nested.values():
            yield from inner.walk()

    @property
    def wrapped_call(self) -> Call | None:
        """The nested call of the same kind, such as the algorithm inside a wrapper, or None."""
        return next((inner for inner in self.nested.values() if inner.kind == self.kind), None)

    @functools.cached_property
    def bound(self) -> Any:
        """The function with its settings, as entries are asked about it; only `build` gives one to be called."""
        return _built(self, planning)

    def __reduce__(self) -> tuple[Any, ...]:
        # plain data: a process without the plug-in could not unpickle the function in `bound`
        return dict, (dict(self),)


# --- from a suite's mapping to a call -----------------------------------------------------------------------------


def check(kind: str, node: Any, location: str = "") -> Call:
    """The canonical form of `node`, a mapping {name: ..., setting: value}: defaults filled in, values checked.

    A bare string is short for {name: string}. The mapping of a settings class has no name. location: the beginning of
    messages. SpecError for an unknown name or key, a missing key, a wrong type or range.
    """
    try:
        return check_keys(kind, node)
    except SpecError as error:
        if location or not error.keys:
            error.below(location or kind.lower())
        raise


def check_keys(kind: str, node: Any, task: Perturbation | None = None, training: bool = False) -> Call:
    """As `check`, or for a cell without its name; a SpecError has the keys of the mistake.

    task: the perturbation of attacks that state no radius. training: the call belongs to an algorithm.
    """
    if kind in CLASSES or kind == "Experiment":
        if not isinstance(node, Mapping):
            raise SpecError(f"expected a mapping of settings, got {shown(node)}")
        signature = describe(kind)
        return Call(signature, _settings(signature, node, task, training))
    if isinstance(node, str):
        node = {"name": node}
    if not isinstance(node, Mapping):
        raise SpecError(f"expected a mapping with a name, got {shown(node)}")
    if "name" not in node:
        raise SpecError(f"'name' is missing: which {kind.lower()}?{did_you_mean('', names(kind))}")
    try:
        if not isinstance(node["name"], str):
            raise SpecError(f"expected a name, got {shown(node['name'])}")
        signature = describe(kind, node["name"])
        missing = {} if task is None else task.missing_settings(signature, node, training)
    except SpecError as error:
        error.below("name")
        raise
    written = {key: value for key, value in node.items() if key != "name"} | missing
    settings = _settings(signature, written, task, training or kind == "Algorithm")
    return Call(signature, {"name": signature.name, **settings})


def _settings(
    signature: Signature, node: Mapping[str, Any], task: Perturbation | None, training: bool
) -> dict[str, Any]:
    """The canonical settings of a call of one function, without its name."""
    settings_by_name = signature.by_name
    for key in node:
        if key not in settings_by_name and not signature.free:
            problem = f"'{signature.name}' has no setting '{key}'{did_you_mean(key, settings_by_name)}"
            raise SpecError(problem).below(key)
    canonical: dict[str, Any] = {}
    defaults = _defaults(signature)
    for setting in signature.settings:
        name = setting.name
        if name in node:
            try:
                canonical[name] = _value(setting, node[name], task, training)
            except SpecError as error:
                error.below(name)
                raise
        elif setting.default is REQUIRED:
            raise SpecError(f"'{signature.name}' needs '{name}'")
        else:
            canonical[name] = defaults[name]
    for key in node:  # settings of a function that takes any: it checks them when it is called
        if key not in settings_by_name:
            canonical[key] = node[key]
    return canonical


@functools.cache
def _defaults(signature: Signature) -> dict[str, Any]:
    """The canonical defaults of a function's settings."""
    return {one.name: _value(one, one.default) for one in signature.settings if one.default is not REQUIRED}


def _value(setting: Setting, value: Any, task: Perturbation | None = None, training: bool = False) -> Any:
    if setting.kind is not None:
        return None if setting.optional and value is None else check_keys(setting.kind, value, task, training)
    if getattr(value, "shape", None) == ():  # a number of numpy or torch
        value = value.item()
    try:
        validated = setting.adapter.validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise SpecError(f"{problem}, got {shown(value)}") from None
    if isinstance(value, str) and isinstance(validated, float) and types.FRACTION.match(value):
        return "/".join(part.strip() for part in value.split("/"))  # stays text, in one form
    if isinstance(validated, float) and not math.isfinite(validated):
        raise SpecError(f"should be a finite number, got {shown(value)}")
    return validated


def call(kind: str, spec: Mapping[str, Any]) -> Call:
    """A canonical mapping as a Call; a Call is returned as it is. SpecError for an unknown name."""
    if isinstance(spec, Call):
        return spec
    signature = describe(kind, spec.get("name", ""))
    settings_by_name = signature.by_name

    def value(key: str) -> Any:
        kind = settings_by_name[key].kind if key in settings_by_name else None
        return spec[key] if kind is None or spec[key] is None else call(kind, spec[key])

    return Call(signature, {key: value(key) for key in spec})


# --- from a call to what it calls ---------------------------------------------------------------------------------


def build(kind: str, spec: Mapping[str, Any]) -> Any:
    """The registered function with the settings of a canonical `spec` bound to it; fractions become floats here.

    For a settings class, an instance of it.
    """
    return _built(call(kind, spec))


def _built(call: Call, load: Callable[[str], ModuleType] = importlib.import_module) -> Any:
    called = function(call.signature, load)
    arguments = bind(call, load)
    return called(**arguments) if call.kind in CLASSES else functools.partial(called, **arguments)


def bind(call: Call, load: Callable[[str], ModuleType] = importlib.import_module) -> dict[str, Any]:
    """The keyword arguments of a call, nested calls built, fractions turned into floats."""
    settings_by_name = call.signature.by_name
    arguments = {}
    for key, value in call.items():
        if isinstance(value, Call):
            arguments[key] = _built(value, load)
        elif key != "name":
            is_number = key not in settings_by_name or settings_by_name[key].is_number
            arguments[key] = types.number(value) if is_number and isinstance(value, str) else value
    return arguments


def bind_cell(spec: Mapping[str, Any], root: Path, trained: Path | None = None) -> dict[str, Any]:
    """The keyword arguments of a canonical cell whose model reads its weights below `root`, the folder of data sets.

    trained: the file of weights where the cell starts from another cell's model; MachineError without it.
    """
    return bind(call("Experiment", weights.with_path(spec, root, trained)))


def function(signature: Signature, load: Callable[[str], ModuleType] = importlib.import_module) -> Any:
    """The function itself, or the settings class; its module is imported, or its plug-in run."""
    if signature.kind in CLASSES:
        module, name = CLASSES[signature.kind]
        return getattr(load(module), name)
    return entry(signature, load).function


def entry(signature: Signature, load: Callable[[str], ModuleType] | None = None) -> Entry:
    """The entry of a registered function in its table; its plug-in is run, a module of ours read as `planning` does."""
    load = load or planning
    if signature.kind in CLASSES:
        return entry_of(function(signature, load))
    module, table = TABLES[signature.kind]
    holder = source_files.load(signature.plugin) if signature.plugin else load(module)
    functions = getattr(holder, table)
    return in_table(functions[signature.name if signature.name in functions else signature.name.rpartition(":")[2]])


# --- entries without torch ----------------------------------------------------------------------------------------


class _NoTorch:
    """Stands for torch, and for all that is in it, while modules are only asked for their entries."""

    def __getattr__(self, name: str) -> _NoTorch:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return args[0] if args and isinstance(args[0], FunctionType) else self  # a decorator

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()

    def __or__(self, other: Any) -> _NoTorch:
        return self

    __ror__ = __getitem__ = __or__

    def __bool__(self) -> bool:
        raise TypeError("a function of an entry computes with tensors")


_COPYING = threading.RLock()


def planning(name: str) -> ModuleType:
    """A module of ours to ask its entries: the module itself where torch is loaded, else a copy that does without."""
    if "torch" in sys.modules:
        return importlib.import_module(name)
    with _COPYING:
        return _without_torch(name)


def _without_torch(name: str) -> ModuleType:
    """A copy of a module that computes nothing, with copies of those that it imports; made once."""
    if (copied := f"{name} without torch") in sys.modules:
        return sys.modules[copied]
    path = PACKAGE.parent.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    # a dataclass looks there for the names of its annotations
    module = sys.modules[copied] = ModuleType(copied)

    def import_(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name.split(".")[0] in ("torch", "timm", "safetensors"):
            return _NoTorch()
        if not name.startswith(IMPORT_TORCH):
            return builtins.__import__(name, globals, locals, fromlist, level)
        imported = _without_torch(name)
        for attribute in fromlist or ():
            if not hasattr(imported, attribute):
                setattr(imported, attribute, _without_torch(f"{name}.{attribute}"))
        return imported

    vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_}
    code = importlib.machinery.SourceFileLoader(name, str(file)).get_code(name)
    assert code is not None
    exec(code, vars(module))
    return module


def without_defaults(call: Call) -> dict[str, Any]:
    """A call less every setting that has its default: what a cell's identity is the hash of.

    A setting that is added later, with a default that keeps the old behaviour, therefore leaves identities as they
    are. A default must never change its meaning: tests/golden/defaults.json pins them all.
    """
    settings_by_name = call.signature.by_name
    defaults = _defaults(call.signature)
    short_form: dict[str, Any] = {}
    for key, value in call.items():
        setting = settings_by_name.get(key)
        if setting is None:  # the name, or a setting that is checked only when it is called
            short_form[key] = value
        elif setting.default is not REQUIRED and value == defaults[key]:
            continue
        elif setting.type_name == "Weights":
            short_form[key] = weights.content(value)  # the digest: the file may lie anywhere
        else:
            short_form[key] = without_defaults(value) if isinstance(value, Call) else value
    return short_form


# --- functions with the code of other packages -------------------------------------------------------------------

# It asks for a requests of 2021 that it never imports; all else that it needs comes with fatbench.
WITHOUT_NEEDS = ("torchattacks",)


def packages(signature: Signature) -> tuple[str, ...]:
    """The packages that a function's entry names, any one of which is enough; empty if the code is ours."""
    return tuple(signature.entry.get("packages", ()))


def installed(package: str) -> bool:
    """Whether a package can be imported; a mere folder of that name cannot."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def demand_installed(call: Call, location: str) -> None:
    """MachineError if the package of a function, or of one nested in it, is not installed."""
    for used_call in call.walk():
        names = packages(used_call.signature)
        if names and not any(map(installed, names)):
            raise MachineError(f"{location}: {missing_package(used_call.name, names[-1])}")


def missing_package(name: str, package: str) -> str:
    """The message for a function whose package is not installed."""
    option = "--no-deps " * (package in WITHOUT_NEEDS)
    return f"'{name}' needs the package {package}: pip install {option}{package}"
