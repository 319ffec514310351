"""Functions of a running program, such as a notebook, as plug-ins: each is written to a file with all that it reads.

    name = register(near_median, "Aggregator")      suites and worker processes know the function by this name
    with lending():
        name = keep("Data", "mine", dataset)        an object without a text, known to this process during the block

The file has the function's text, the imports, constants and own functions that it reads, and the table of its kind.
Records of runs hold it as "source", so it is stored with every number that it influenced.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import re
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fatbench import settings, whole_file
from fatbench.errors import SpecError, article, did_you_mean, shown
from fatbench.suite import signatures, source_files
from fatbench.suite.reach import module, reach

Key = tuple[str, str]  # (kind, name)
_KEPT: dict[str, Any] = {}  # name -> object of this process
_FILES: dict[Key, Path] = {}  # the file of each plug-in
_LENT: Counter[Key] = Counter()  # how many blocks of `lending` use it
_STAYING: set[Key] = set()  # what blocks leave as names alone
_LOCK = threading.RLock()  # of the three tables above
FOLDER = ("fatbench", "registered")  # the end of the folder's path; the cache folder before it may differ by process
UNUSED_DAYS = 90  # after which a file of a program that is over is removed


def kind_of(kind: str) -> str:
    """The kind of a name in lower case, "Aggregator" for "aggregator"; SpecError for an unknown one."""
    kind_by_name = {kind_name.lower(): kind_name for kind_name in signatures.TABLES if kind_name != "Experiment"}
    lower = str(kind).lower()
    if lower not in kind_by_name:
        raise SpecError(
            f"kind: expected {', '.join(kind_by_name)}, got {shown(kind)}{did_you_mean(lower, kind_by_name)}"
        )
    return kind_by_name[lower]


@dataclass
class Block:
    """What is given to `lending`'s block. stays: numbers are stored with its names, by which they can be read."""

    keys: list[Key] = field(default_factory=list)
    stays: bool = False


_BLOCK: ContextVar[Block | None] = ContextVar("block", default=None)


def register(function: Callable[..., Any], kind: str, name: str = "") -> str:
    """Make a function of a kind ("Aggregator") known to suites by its name; a second function replaces the first.

    SpecError if its text cannot be found, it reads a value that no file can hold, or the engine could not call it.
    """
    return _add(kind, name or _name(function, kind), module(reach(function)), function.__name__)


@contextlib.contextmanager
def lending() -> Iterator[None]:
    """A block at whose end everything that was registered or kept in it is forgotten, see also `stay`.

    A name that another function has stays that function's: the name in the block gets a digest.
    """
    block = Block()
    token = _BLOCK.set(block)
    try:
        yield
    finally:
        _BLOCK.reset(token)
        with _LOCK:
            _LENT.subtract(key for key in block.keys if key in _LENT)
            _STAYING.update(key for key in block.keys if block.stays and key in _LENT)
            for key in {key for key in block.keys if _LENT.get(key) == 0}:
                del _LENT[key]
                _KEPT.pop(key[1], None)
                if key not in _STAYING:
                    file = _FILES.pop(key)
                    signatures.drop_plugins([file])
                    source_files.forget(file)
                    shutil.rmtree(file.parent, ignore_errors=True)


def stay() -> None:
    """Let this block's names be known after its end, without their objects: stored numbers are read by them."""
    if (block := _BLOCK.get()) is not None:
        block.stays = True


def attack(function: Callable[..., Any]) -> tuple[str, str]:
    """Make a callable (model, x, y) or (model, x, y, generator) an attack: its name for people, and that in a suite.

    The two differ for a callable without a text: nothing can tell whether it is the same in another call.
    """
    label = _label(function)
    try:
        needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind < 4]
    except ValueError:  # code without a signature
        raise SpecError(
            f"attacks: expected functions of (model, x, y), {label} does not say of what it is one"
        ) from None
    parameters = [parameter.name for parameter in needed if parameter.kind in (0, 1)]
    settings_needed = [parameter.name for parameter in needed if parameter.kind == parameter.KEYWORD_ONLY]
    if len(parameters) not in (3, 4) or settings_needed:
        listed = ", ".join([*parameters, *(f"{setting}=" for setting in settings_needed)])
        raise SpecError(
            f"attacks: expected functions of (model, x, y), {label} is one of ({listed}): give a function that calls it"
        )
    try:
        if inspect.ismethod(function):
            raise SpecError(f"register: {label} belongs to an object that no file can hold")
        text, name = module(reach(function)), function.__name__
    except SpecError:
        return label, keep("Attack", f"{label}_{secrets.token_hex(4)}", function, len(parameters))
    if parameters == list(signatures.FORMS["Attack"][0][0]):
        return label, _add("Attack", label, text, name)
    call = ", ".join(("model", "x", "y", "generator")[: len(parameters)])
    wrapper = f"def _attack(model, x, y, generator):\n    return {name}({call})\n"
    return label, _add("Attack", label, f"{text}\n\n{wrapper}", "_attack")


def _label(function: Any) -> str:
    """The name of a function, of that in a partial, or of an object's class, as a metric: "fool", "lambda"."""
    while isinstance(function, functools.partial):
        function = function.func
    name = str(getattr(function, "__name__", type(function).__name__)).strip("<>")
    return re.sub(r"[^a-z0-9_]", "_", name.lower())


def keep(kind: str, name: str, value: Any, argument_count: int = 0) -> str:
    """Make an object of this process known by a name: a Dataset, or an attack with so many arguments."""
    head, doc = "from fatbench.suite.registered import kept_object\n\n\n", f'    """{name}, in memory."""\n'
    if kind == "Data":
        text = f"def _kept(root):\n{doc}    return kept_object({name!r})\n"
    else:
        call = ", ".join(("model", "x", "y", "generator")[:argument_count])
        text = f"def _kept(model, x, y, generator):\n{doc}    return kept_object({name!r})({call})\n"
    with _LOCK:  # another block may just forget this name
        _KEPT[name] = value
        return _add(kind, name, f"{head}{text}", "_kept")


def kept_object(name: str) -> Any:
    """The object of a name; SpecError in any other process, and after the call that it was given to."""
    if name not in _KEPT:
        raise SpecError(f"'{name}' was in the memory of a Python program, and no longer is: give it again")
    return _KEPT[name]


def folder() -> Path:
    """The folder of the files, which other processes of this user read too."""
    return settings.cache_folder().resolve() / FOLDER[1]


def is_lent(file: Path) -> bool:
    """Whether a plug-in is of a block of `lending`: it holds nothing that is not there anyway, and may soon be gone."""
    return file.parent.parent.parts[-2:] == FOLDER and "-" in file.parent.name


def source(file: Path) -> dict[str, str]:
    """{"source": text} for the record of a registered plug-in, empty for any other."""
    return {"source": source_files.source_bytes(file).decode()} if file.parent.parent.parts[-2:] == FOLDER else {}


def _add(kind: str, name: str, text: str, function_name: str) -> str:
    """Write a plug-in and add it, in place of an earlier one of the same name; the name that it got, see `lending`."""
    block, key, digest = _BLOCK.get(), (kind, name), hashlib.sha256(text.encode()).hexdigest()[:12]
    _remove_unused()
    with _LOCK:
        earlier_file = _FILES.get(key)
        is_ours = earlier_file is None and name in signatures.known_functions(kind)
        if block is not None and (is_ours or (earlier_file and not earlier_file.parent.name.startswith(digest))):
            return _add(kind, f"{name}_{digest[:8]}", text, function_name)
        if block is None or earlier_file is None:
            # a file that is forgotten is no other process's
            own = "" if block is None else f"-{os.getpid()}-{secrets.token_hex(4)}"
            file = folder() / f"{digest}{own}" / f"{name}.py"
            table = f"{signatures.TABLES[kind][1]} = {{{name!r}: {function_name}}}"
            whole_file.write(file, f"{text}\n\n{table}\n", file, make_folder=True)
            if earlier_file not in (None, file):
                signatures.drop_plugins([earlier_file])
            signatures.add_plugin(file)
            _FILES[key] = file
            _LENT.pop(key, None)
            _STAYING.discard(key)
        if block is not None and (earlier_file is None or key in _LENT or key in _STAYING):
            _LENT[key] += 1
            block.keys.append(key)
    return name


@functools.cache
def _remove_unused() -> None:
    """Remove the files of programs that are long over, once in a process."""
    oldest = time.time() - 86400 * UNUSED_DAYS
    for old in folder().glob("*"):
        with contextlib.suppress(OSError):
            if old.stat().st_mtime < oldest:
                shutil.rmtree(old)


def _name(function: Callable[..., Any], kind: str) -> str:
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise SpecError(f"register: {article(kind.lower())} needs a name: write it as 'def NAME(...)'")
    return name
