"""What plug-ins read beside their own code: files, the user's own modules, installed packages and what they declare.

    with watching(): ...              files that plug-ins open in this block are seen
    recorded(used)                    {"cfg.json of mine.py": SHA-256, "package lab of mine.py": "1.2+0a1b2c3d4e5f"}
    current(recorded(used), files)    the same now

`reach` follows a function through the modules of its folder; this module sees the rest. A file counts for the plug-in
on the stack and for all stages of the process that use it, because the plug-in may keep what it has read; "" is the
digest of none. `reads` of an entry declares "variable NAME", "module NAME" and "file PATH". A variable may be a
secret, so its digest is slow to compute and salted with its name. docs/tutorial.md names what is not seen. The files
that a data set's function reads need no record: its images have a fingerprint.
"""

from __future__ import annotations

import _io
import ast
import builtins
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import stat
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, lru_cache, wraps
from pathlib import Path
from types import FrameType
from typing import Any

from fatbench.suite import calls, signatures, source_files
from fatbench.suite.entry import INPUTS

# their versions stand in every run, and decide for no cell
PACKAGES = ("torch", "torchvision", "timm", "torchattacks", "pyautoattack", "autoattack", "numpy", "scikit-learn")
OURS = str(Path(__file__).parent.parent) + os.sep
DATA = str(Path(OURS, "data", "own.py"))  # the module that calls a data set's function
SYSTEM = (sysconfig.get_path("stdlib") + os.sep, OURS, "/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "<")
INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in source_files.INSTALLED)
OPENERS = ((builtins, "open"), (io, "open"), (os, "open"), (_io, "open_code"))  # the last one for imports
SMALL = 10_000_000  # bytes of a package whose files are read; of a larger one, the digests of its installation
HASH_ROUNDS = 20_000  # some 10 ms for the digest of a variable, to make guessing its value slow

_reads: dict[Path, dict[str, str]] = {}  # plug-in -> file -> digest
_loaded: dict[str, tuple[Any, str]] = {}  # file or "package NAME" -> (module, digest when it was first seen)
_importer: dict[str, Path] = {}  # file of an own module -> the plug-in that imports it
_written: set[str] = set()  # files that plug-ins have written themselves
_watchers: list[None] = []
_originals = tuple(getattr(holder, name) for holder, name in OPENERS)
_lock, _thread = threading.Lock(), threading.local()


@contextmanager
def watching() -> Iterator[None]:
    """A block in which the files are recorded that plug-ins open, in all threads of this process."""
    with _lock:
        _watchers.append(None)
        for (holder, name), original in zip(OPENERS, _originals, strict=True):
            setattr(holder, name, _watched(original))
    try:
        yield
    finally:
        with _lock:
            _watchers.pop()
            for (holder, name), original in zip(OPENERS, _originals, strict=True) if not _watchers else ():
                setattr(holder, name, original)


def recorded(used: Mapping[str, Path]) -> dict[str, str]:
    """Name -> digest of what plug-ins have read in this process. used: as from `plugins.used`."""
    result = {}
    for file in sorted({*used.values()}):
        start, local = source_files.root(file), {*map(str, source_files.files(file))}
        declared = [read.split(" ", 1) for name in sorted(used) if used[name] == file for read in _declared(name)]
        digests = {**_modules(file, [name for what, name in declared if what == "module"]), **_reads.get(file, {})}
        digests |= {f"variable {name}": variable_digest(name) for what, name in declared if what == "variable"}
        digests |= {str(start / name): digest(str(start / name)) for what, name in declared if what == "file"}
        for name, value in sorted(digests.items()):
            if name not in local:
                shown = Path(os.path.relpath(name, start)).as_posix() if os.path.isabs(name) else name
                result[f"{shown} of {source_files.version(file).plugin}"] = value
    return result


def current(stored: Mapping[str, str], files: Iterable[Path]) -> dict[str, str]:
    """The digests of now of what was stored, as far as they are known on this machine.

    A missing file outside the plug-in's folder is left out: it may exist on the machine that recorded it.
    """
    roots = {source_files.version(file).plugin: source_files.root(file) for file in files}
    result = {}
    for name in stored:
        name_read, _, plugin = name.rpartition(" of ")
        what, _, rest = name_read.partition(" ")
        if plugin not in roots:
            continue
        if what in ("variable", "package"):
            result[name] = variable_digest(rest) if what == "variable" else package_version(rest)
        elif (value := digest(str(roots[plugin] / name_read))) or not name_read.startswith(".."):
            result[name] = value
    return result


def _declared(name: str) -> tuple[str, ...]:
    """What the entry of a plug-in's function, "aggregator mine", says that it reads."""
    kind, function = name.split(" ", 1)
    signature = signatures.known(signatures.kind_of(kind), function)
    assert signature is not None
    return tuple(read for read in calls.entry(signature).reads if read.startswith(INPUTS))


# --- digests ------------------------------------------------------------------------------------------------------


def digest(path: str) -> str:
    """SHA-256 of a file; "" if it cannot be read."""
    try:
        state = os.stat(path)
        return _digest(path, state.st_mtime_ns, state.st_size, state.st_ino) if stat.S_ISREG(state.st_mode) else ""
    except OSError:
        return ""


@cache
def _digest(path: str, *_: int) -> str:
    with _originals[0](path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def variable_digest(name: str) -> str:
    """A salted digest of a variable's value; "" if it is not set."""
    return "" if (value := os.environ.get(name)) is None else _slow_digest(name, os.fsencode(value))


@cache
def _slow_digest(name: str, value: bytes) -> str:
    return hashlib.pbkdf2_hmac("sha256", value, f"fatbench variable {name}".encode(), HASH_ROUNDS).hex()


def package_version(name: str) -> str:
    """The version of an installed package and a digest of its files, its data among them; "" if there is none."""
    return _package_version(name, int(time.monotonic()))


@lru_cache(64)  # thousands of stages ask at once
def _package_version(name: str, _: int) -> str:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    files = [f for f in found.files or () if f.suffix != ".pyc" and not f.parts[0].endswith(".dist-info")]
    is_small = sum(file.size or 0 for file in files) < SMALL
    digests = {str(f): digest(str(f.locate())) if is_small or f.hash is None else f.hash.value for f in files}
    return f"{found.version}+{hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:12]}"


# --- opened files -------------------------------------------------------------------------------------------------


def _watched(opener: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(opener)
    def watched(*arguments: Any, **settings: Any) -> Any:
        if not getattr(_thread, "in_hook", False):
            _thread.in_hook = True  # what is asked here opens files too
            try:
                named: list[Any] = [settings[key] for key in ("file", "path", "mode", "flags") if key in settings]
                path, mode, *_ = [*arguments[:2], *named, "", ""]
                writes = {*mode} & {*"wax+"} if isinstance(mode, str) else mode & (os.O_WRONLY | os.O_RDWR)
                if isinstance(path, str | bytes | os.PathLike) and (plugin := _plugin(sys._getframe(1))) is not None:
                    _record(plugin, os.path.abspath(os.fsdecode(path)), bool(writes))
            finally:
                _thread.in_hook = False
        return opener(*arguments, **settings)

    return watched


def _record(plugin: Path, path: str, is_writing: bool) -> None:
    """path: that of a link itself, which may point elsewhere tomorrow."""
    if is_writing:
        _written.add(path)
    if path.endswith(".pyc"):
        with suppress(ValueError):
            path = importlib.util.source_from_cache(path)
    is_in_package = plugin.parent != source_files.root(plugin) and path.startswith(f"{plugin.parent}{os.sep}")
    if (_is_own_file(path) or is_in_package) and path not in _written and not os.path.isdir(path):
        _reads.setdefault(plugin, {})[path] = digest(path)


def _plugin(frame: FrameType | None) -> Path | None:
    """The plug-in that a frame was called from; None for other code and for the function of a data set."""
    owners = {**_importer}
    for file in reversed(signatures.plugins()):  # a module of several belongs to the first
        with suppress(OSError, SyntaxError, ValueError):  # being edited right now, so this process does not run it
            owners |= {str(path): file for path in source_files.files(file)}
    owner = None
    while frame is not None and owners:
        name = frame.f_code.co_filename
        if owner is None:
            owner = owners.get(name)
        if name == DATA:  # the images have a fingerprint
            return None
        if name == source_files.__file__:  # a plug-in is being imported: the code that asked for it does not count
            break
        frame = frame.f_back
    return owner


def _is_own_file(path: str) -> bool:
    """Whether a file is the user's own, not part of Python, an installed package, the system or fatbench."""
    return not path.startswith(SYSTEM) and not any(fragment in path for fragment in INSTALLED)


# --- modules ------------------------------------------------------------------------------------------------------


def _modules(file: Path, declared: list[str]) -> dict[str, str]:
    """What a plug-in imports, directly or not: {file of an own module, or "package NAME": its digest when loaded}."""
    found: dict[str, str] = {}
    to_visit: list[tuple[str, list[str]]] = [(str(file), declared)]
    while to_visit:
        path, names = to_visit.pop()
        for name in (*names, *_names(path, digest(path))):
            module, top = sys.modules.get(name), name.partition(".")[0]
            path = os.path.realpath(getattr(module, "__file__", None) or "")
            if module is None or not path or top in (*PACKAGES, "sklearn") or path.startswith(SYSTEM[:2]):
                continue
            packages = () if _is_own_file(path) else [p for p in _packages().get(top, ()) if p not in PACKAGES]
            for key in [f"package {package}" for package in packages] or [path]:
                if key in found or not (packages or path.endswith(".py")):
                    continue
                if _loaded.get(key, (None, ""))[0] is not module:
                    _loaded[key] = (module, package_version(key[8:]) if packages else digest(path))
                found[key] = _loaded[key][1]
                if not packages:
                    _importer.setdefault(path, file)
                    to_visit.append((path, []))
    return found


@cache
def _packages() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


@cache
def _names(path: str, _: str) -> list[str]:
    """The modules in a file's import statements; a package comes before its modules."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    paths = [name.split(".") for name in names]
    return list(dict.fromkeys(".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)))
