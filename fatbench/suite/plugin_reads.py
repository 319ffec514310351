"""Record what plug-ins read beside their own code: files, the user's own modules, environment variables.

    watch()                                       start to watch, in this process
    recorded(files)                               {"cfg.json of mine.py": SHA-256, "variable SKEW of mine.py": ...}
    changed_files(read, files)                    the names of those that have changed since

`reached` follows a function through the modules of its folder; this module sees the rest. A read counts for the plug-in
on the stack and for all stages of the process that use it, because the plug-in may keep what it has read. The digest is
that of the file that was opened, "" if there was none. A variable may be a secret, so its digest is slow to compute and
salted with its name.

Not seen are: files opened by native code (safetensors, HDF5, SQLite, OpenCV), by another process or by a thread that
the plug-in started; listings of folders, and tests whether a file exists; `os.environb` and copies of all variables; a
change of the working directory that relative paths depend on. `open(path, "rb").close()` in the plug-in records such a
file. The files that a data set's function reads need no record: its images have a fingerprint.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import stat
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from fatbench.suite import signatures, sources

OURS = str(Path(__file__).parent.parent) + os.sep
DATA = str(Path(OURS, "data", "own.py"))  # the module that calls a data set's function
SYSTEM = (sysconfig.get_path("stdlib") + os.sep, OURS, "/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "<")
INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in sources.INSTALLED)
# prefixes and names of variables that say where a program runs, not what it computes
MACHINE = (
    "SLURM_",
    "CUDA_",
    "NVIDIA_",
    "OMP_",
    "MKL_",
    "PYTORCH_",
    "TORCH_",
    "NCCL_",
    "FATBENCH_",
    "PYTEST_",
    "XDG_",
    "LC_",
)
PLACE = {
    "HOME",
    "USER",
    "LOGNAME",
    "PATH",
    "PYTHONPATH",
    "TMPDIR",
    "TMP",
    "TEMP",
    "PWD",
    "HOSTNAME",
    "LANG",
    "COLUMNS",
    "TERM",
}
HASH_ROUNDS = 20_000  # some 10 ms for the digest of a variable, to make guessing its value slow

_reads: dict[Path, dict[str, str]] = {}  # plug-in -> file or "variable NAME" -> digest
_loaded: dict[str, tuple[ModuleType, str]] = {}  # file -> (own module, digest when it was first seen)
_importer: dict[str, Path] = {}  # file of an own module -> the plug-in that imports it
_written: set[str] = set()  # files that plug-ins have written themselves
_copied: set[str] = set()  # variables that a plug-in is about to read as part of all of them
_watching = False
_thread = threading.local()


def watch() -> None:
    """Start recording which files and variables plug-ins read, in all threads of this process."""
    global _watching
    if not _watching:
        _watching = True
        sys.addaudithook(_audit)
        os.environ.__class__ = _Environment


def recorded(files: Iterable[Path]) -> dict[str, str]:
    """Name -> digest of what these plug-ins have read in this process, including modules from other folders."""
    result = {}
    for file in files:
        plugin_version, start = sources.version(file), sources.root(file)
        local = {str(file), *(str(start / path) for path, _ in plugin_version.modules)}
        digests = {**_modules(file), **_reads.get(file, {})}
        for name_read, value in sorted(digests.items()):
            if name_read not in local:
                name = (
                    name_read
                    if name_read.startswith("variable ")
                    else Path(os.path.relpath(name_read, start)).as_posix()
                )
                result[f"{name} of {plugin_version.plugin}"] = value
    return result


def current_digests(recorded_digests: Mapping[str, str], files: Iterable[Path]) -> dict[str, str]:
    """The current digests of the names in `recorded_digests`, as far as they are known on this machine.

    A missing file outside the plug-in's folder is left out: it may exist on the machine that recorded it.
    """
    root_by_plugin = {sources.version(file).plugin: sources.root(file) for file in files}
    result = {}
    for name in recorded_digests:
        name_read, _, plugin = name.rpartition(" of ")
        if plugin not in root_by_plugin:
            continue
        if name_read.startswith("variable "):
            result[name] = variable_digest(name_read.removeprefix("variable "))
        elif (value := digest(str(root_by_plugin[plugin] / name_read))) or not name_read.startswith(".."):
            result[name] = value
    return result


def changed_files(recorded_digests: Mapping[str, str], files: Iterable[Path]) -> list[str]:
    """The names in `recorded_digests` whose content has changed since `recorded` gave it. files: today's plug-ins."""
    return [name for name, value in current_digests(recorded_digests, files).items() if value != recorded_digests[name]]


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
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def variable_digest(name: str) -> str:
    """A salted digest of a variable's value; "" if it is not set."""
    value = dict.get(os.environ._data, os.environ.encodekey(name))  # type: ignore[attr-defined]
    return "" if value is None else _slow_digest(name, value)


@cache
def _slow_digest(name: str, value: bytes) -> str:
    return hashlib.pbkdf2_hmac("sha256", value, f"fatbench variable {name}".encode(), HASH_ROUNDS).hex()


# --- hooks -------------------------------------------------------------------------------------------------------


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or getattr(_thread, "in_hook", False):
        return
    if isinstance(arguments[0], str | bytes | os.PathLike):
        _thread.in_hook = True  # computing a digest opens files too
        try:
            _record_open(os.fsdecode(arguments[0]), arguments[2] or 0, sys._getframe(1))
        finally:
            _thread.in_hook = False


def _record_open(name: str, flags: int, frame: FrameType) -> None:
    plugin = _plugin(frame)
    if plugin is None:
        return
    path = os.path.abspath(name)  # the link itself, which may point elsewhere tomorrow
    if flags & (os.O_WRONLY | os.O_RDWR):
        _written.add(path)
        return
    if path.endswith(".pyc"):
        try:
            path = importlib.util.source_from_cache(path)
        except ValueError:
            return
    if _is_own_file(path) and path not in _written and not os.path.isdir(path):
        _reads.setdefault(plugin, {})[path] = digest(path)


class _Environment(type(os.environ)):  # type: ignore[misc]
    """`os.environ`, recording the variables that a plug-in reads by name."""

    def __getitem__(self, key: str) -> str:
        _note_variable(key, sys._getframe(1))
        value: str = super().__getitem__(key)
        return value

    def __iter__(self) -> Iterator[str]:
        if _asking_plugin(sys._getframe(1)) is not None:
            _copied.update(map(self.decodekey, self._data))
        keys: Iterator[str] = super().__iter__()
        return keys


def _note_variable(key: str, frame: FrameType | None) -> None:
    if key in PLACE or key.startswith(MACHINE) or (plugin := _asking_plugin(frame)) is None:
        return
    if key in _copied:  # part of a copy of all variables, as for a subprocess
        _copied.discard(key)
    else:
        _reads.setdefault(plugin, {})[f"variable {key}"] = variable_digest(key)


def _asking_plugin(frame: FrameType | None) -> Path | None:
    """The plug-in whose own code reads a variable; None for other code, such as a library that it calls."""
    while frame is not None and frame.f_code.co_filename in (os.__file__, "<frozen os>", "<frozen _collections_abc>"):
        frame = frame.f_back
    return None if frame is None or not _is_own_file(frame.f_code.co_filename) else _plugin(frame)


def _plugin(frame: FrameType | None) -> Path | None:
    """The plug-in that a frame was called from; None for other code and for the function of a data set."""
    try:
        owners = _owners(tuple((file, sources.version(file)) for file in signatures.plugins()))
    except (OSError, SyntaxError, ValueError):  # being edited right now, so this process does not run it
        return None
    owner = None
    while frame is not None and owners:
        name = frame.f_code.co_filename
        if owner is None:
            owner = owners.get(name) or _importer.get(name)
        if name == DATA:  # the images have a fingerprint
            return None
        if name == sources.__file__:  # a plug-in is being imported: the code that asked for it does not count
            break
        frame = frame.f_back
    return owner


@cache
def _owners(versions: tuple[tuple[Path, sources.Version], ...]) -> dict[str, Path]:
    """File of a plug-in or of its local modules -> the plug-in; a module of several belongs to the first."""
    return {
        str(path): file
        for file, version in reversed(versions)
        for path in (file, *(sources.root(file) / path for path, _ in version.modules))
    }


def _is_own_file(path: str) -> bool:
    """Whether a file is the user's own, not part of Python, an installed package, the system or fatbench."""
    return not path.startswith(SYSTEM) and not any(fragment in path for fragment in INSTALLED)


def _modules(file: Path) -> dict[str, str]:
    """The user's own modules that a plug-in imports, directly or not: file -> its digest when it was loaded."""
    digest_by_file: dict[str, str] = {}
    to_visit = [str(file)]
    while to_visit:
        for module in filter(None, map(sys.modules.get, _imports(to_visit.pop()))):
            path = os.path.realpath(getattr(module, "__file__", None) or "")
            if path.endswith(".py") and _is_own_file(path) and path not in digest_by_file:
                if _loaded.get(path, (None, ""))[0] is not module:
                    _loaded[path] = (module, digest(path))
                digest_by_file[path] = _loaded[path][1]
                _importer.setdefault(path, file)
                to_visit.append(path)
    return digest_by_file


def _imports(path: str) -> list[str]:
    """The modules in a file's import statements; a package comes before its modules."""
    return _names(path, digest(path))


@cache
def _names(path: str, _: str) -> list[str]:
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    return list(dict.fromkeys(_module_names(tree)))


def _module_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            path = name.split(".")
            yield from (".".join(path[:end]) for end in range(1, len(path) + 1))
