"""Functions of a running program, such as a notebook, as plug-ins: each is written to a file with all that it reads.

    name = register(near_median, "Aggregator")      suites and worker processes know the function by this name
    name = keep("Data", "mine", dataset)            an object without a text, known to this process alone

The file has the function's text, the imports, constants and own functions that it reads, and the table of its kind.
Records of runs hold it as "source", so it is stored with every number that it influenced.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import secrets
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fatbench import settings, whole_file
from fatbench.errors import SpecError, article, did_you_mean
from fatbench.suite import signatures, sources

_KEPT: dict[str, Any] = {}  # name -> object of this process
_FILES: dict[tuple[str, str], Path] = {}  # (kind, name) -> file of its plug-in
FOLDER = ("fatbench", "registered")  # the end of the folder's path; the cache folder before it may differ by process
IN_MEMORY = "was in the memory of a Python program that is over: give it again"


def kind_of(kind: str) -> str:
    """The kind of a name in lower case, "Aggregator" for "aggregator"; SpecError for an unknown one."""
    kind_by_name = {kind_name.lower(): kind_name for kind_name in signatures.TABLES if kind_name != "Experiment"}
    if kind.lower() not in kind_by_name:
        raise SpecError(f"kind: expected {', '.join(kind_by_name)}, got '{kind}'{did_you_mean(kind, kind_by_name)}")
    return kind_by_name[kind.lower()]


def register(function: Callable[..., Any], kind: str, name: str = "") -> str:
    """Make a function of a kind ("Aggregator") known to suites by its name; a second function replaces the first.

    SpecError if its text cannot be found, it reads a value that no file can hold, or the engine could not call it.
    """
    name = name or _name(function, kind)
    table = signatures.TABLES[kind][1]
    _add(kind, name, f"{text_of(function)}\n\n{table} = {{{name!r}: {function.__name__}}}\n")
    return name


def attack(function: Callable[..., Any]) -> str:
    """Make a callable (model, x, y) or (model, x, y, generator) an attack, and return its name.

    A callable without a text is known to this process alone, under a new name each time.
    """
    parameters = [  # those without a default
        p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind in (0, 1)
    ]
    if len(parameters) not in (3, 4):
        raise SpecError(f"attacks: expected functions of (model, x, y), got one of ({', '.join(parameters)})")
    try:
        text, function_name = text_of(function), function.__name__
        name = _name(function, "Attack")
        if parameters == list(signatures.FIXED["Attack"]):
            return register(function, "Attack")
    except SpecError:
        name = f"{getattr(function, '__name__', type(function).__name__).strip('<>')}_{secrets.token_hex(4)}"
        return keep("Attack", name, function, len(parameters))
    call = ", ".join(("model", "x", "y", "generator")[: len(parameters)])
    wrapper = f"def _attack(model, x, y, generator):\n    return {function_name}({call})\n"
    _add("Attack", name, f"{text}\n\n{wrapper}\n\nATTACKS = {{{name!r}: _attack}}\n")
    return name


def keep(kind: str, name: str, value: Any, argument_count: int = 0) -> str:
    """Make an object of this process known by a name: a Dataset, or an attack with so many arguments."""
    _KEPT[name] = value
    head, doc = "from fatbench.suite.registered import kept_object\n\n\n", f'    """{name}, in memory."""\n'
    if kind == "Data":
        text = f"def _kept(root):\n{doc}    return kept_object({name!r})\n"
    else:
        call = ", ".join(("model", "x", "y", "generator")[:argument_count])
        text = f"def _kept(model, x, y, generator):\n{doc}    return kept_object({name!r})({call})\n"
    _add(kind, name, f"{head}{text}\n\n{signatures.TABLES[kind][1]} = {{{name!r}: _kept}}\n")
    return name


def kept_object(name: str) -> Any:
    """The object of a name; SpecError in any other process."""
    if name not in _KEPT:
        raise SpecError(f"'{name}' {IN_MEMORY}")
    return _KEPT[name]


def folder() -> Path:
    """The folder of the files, which other processes of this user read too."""
    return settings.cache_folder().resolve() / FOLDER[1]


def kept_data(file: Path) -> bool:
    """Whether a plug-in only returns a data set of this process, without other code."""
    return any(file == data_file for (kind, name), data_file in _FILES.items() if kind == "Data" and name in _KEPT)


def source(file: Path) -> dict[str, str]:
    """{"source": text} for the record of a registered plug-in, empty for any other."""
    return {"source": sources.source_bytes(file).decode()} if file.parent.parent.parts[-2:] == FOLDER else {}


def _add(kind: str, name: str, text: str) -> None:
    """Write a plug-in and add it, in place of an earlier one of the same name."""
    file = folder() / hashlib.sha256(text.encode()).hexdigest()[:12] / f"{name}.py"
    if not (file.is_file() and file.read_text(encoding="utf-8") == text):
        whole_file.write(file, text, file, make_folder=True)
    earlier_file = _FILES.pop((kind, name), None)
    if earlier_file is not None and earlier_file != file:
        signatures.drop_plugins([earlier_file])
    signatures.add_plugin(file)
    _FILES[kind, name] = file


def _name(function: Callable[..., Any], kind: str) -> str:
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise SpecError(f"register: {article(kind.lower())} needs a name: write it as 'def NAME(...)'")
    return name


# --- the text of a function --------------------------------------------------------------------------------------


def text_of(function: Callable[..., Any]) -> str:
    """A module with a function and all that it reads; SpecError if it cannot be written as text."""
    text_by_name: dict[str, str] = {}
    _write(function, text_by_name)
    imports = [text for text in text_by_name.values() if text.startswith(("import ", "from "))]
    definitions = [text for text in text_by_name.values() if text not in imports]
    return "\n".join(["from __future__ import annotations", "", *imports, "", *definitions])


def _write(function: Any, text_by_name: dict[str, str]) -> None:
    """Add the text of a function or class to `text_by_name`, after the texts of the names that it reads."""
    function = inspect.unwrap(function)  # the text includes the decorators
    name = getattr(function, "__name__", "")
    try:
        text = textwrap.dedent(inspect.getsource(function))
        node = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError):
        raise SpecError(f"register: the text of '{name or function!r}' cannot be found") from None
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name != name:
        raise SpecError(f"register: write it as 'def NAME(...)', not as {text.split('(')[0].strip()!r}")
    if closure_names := getattr(getattr(function, "__code__", None), "co_freevars", ()):
        raise SpecError(f"register: '{name}' reads '{closure_names[0]}' of the function around it: make it a setting")
    space = getattr(function, "__globals__", None) or vars(sys.modules[function.__module__])
    text_by_name[name] = ""  # it may call itself
    for name_read in _reads(node):
        if name_read not in text_by_name and (name_read in space or not hasattr(builtins, name_read)):
            _write_name(name_read, space, function, text_by_name)
    del text_by_name[name]
    text_by_name[name] = text


def _write_name(name_read: str, space: dict[str, Any], reader: Any, text_by_name: dict[str, str]) -> None:
    """Add the text that defines a name which `reader`, a function or class, reads in its module."""
    if name_read not in space:
        raise SpecError(f"register: '{reader.__name__}' reads '{name_read}', which is not defined")
    value = space[name_read]
    if isinstance(value, types.ModuleType):
        text_by_name[name_read] = f"import {value.__name__} as {name_read}"
    elif isinstance(value, types.FunctionType | type) and value.__module__ == reader.__module__:
        _write(value, text_by_name)
    elif _importable(value):
        text_by_name[name_read] = f"from {value.__module__} import {value.__name__} as {name_read}"
    else:
        try:
            literal = ast.literal_eval(repr(value)) == value
        except (ValueError, SyntaxError):
            literal = False
        if not literal:
            raise SpecError(
                f"register: '{reader.__name__}' reads '{name_read}', {article(type(value).__name__)} that no file can "
                "hold: make it a setting, or put both into a plug-in's file"
            )
        text_by_name[name_read] = f"{name_read} = {value!r}"


def _importable(value: Any) -> bool:
    """Whether a value can be imported by name from its module."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return module is not None and getattr(module, getattr(value, "__name__", ""), None) is value


def _reads(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """The names that a definition reads and does not bind itself, without those in annotations."""
    for inner_node in ast.walk(node):
        if isinstance(inner_node, ast.FunctionDef):
            inner_node.returns = None
        if isinstance(inner_node, ast.arg):
            inner_node.annotation = None
    bound = {inner_node.arg for inner_node in ast.walk(node) if isinstance(inner_node, ast.arg)}
    bound |= {
        inner_node.id
        for inner_node in ast.walk(node)
        if isinstance(inner_node, ast.Name) and not isinstance(inner_node.ctx, ast.Load)
    }
    bound |= {
        inner_node.name for inner_node in ast.walk(node) if isinstance(inner_node, ast.FunctionDef | ast.ClassDef)
    } - {node.name}
    names = [
        inner_node.id
        for inner_node in ast.walk(node)
        if isinstance(inner_node, ast.Name) and isinstance(inner_node.ctx, ast.Load)
    ]
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for inner_node in ast.walk(node)
        if isinstance(inner_node, ast.Import | ast.ImportFrom)
        for alias in inner_node.names
    }
    return [name for name in dict.fromkeys(names) if name not in bound | imported]
