"""What plug-ins read beside their own text: files, somebody's own modules, variables of the environment.

    watch()                                       from now on, in this process
    recorded(files)                               {"cfg.json of mine.py": SHA-256, "variable SKEW of mine.py": ...}
    changed_files(read, files)                    the names of those that are other ones now

`reached` follows a function through the modules of its folder; this is what it cannot see. A read counts for the
plug-in on the stack, and for all stages of the process that use it, because what was read once may be kept. The digest
is of what was opened, "" where nothing was. A variable's digest is slow and salted with its name: it may be a secret.

Not seen: what native code opens (safetensors, HDF5, SQLite, OpenCV), or another process, or a thread that the plug-in
started; which files a folder holds, and whether one exists that is not opened; `os.environb`, and a copy of all
variables; that a path relative to the working directory leads elsewhere from another one. `open(path, "rb").close()` in
the plug-in names such a file. What a data set's function reads has the fingerprint of its images.
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

from fatbench.store.stages import Store
from fatbench.suite import signatures, sources

OURS = str(Path(__file__).parent.parent) + os.sep
DATA = str(Path(OURS, "data", "own.py"))  # calls the function of a data set
SYSTEM = (sysconfig.get_path("stdlib") + os.sep, OURS, "/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "<")
INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in sources.INSTALLED)
# variables that say where a program runs, not what it computes
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
ROUNDS = 20_000  # of the digest of a variable: some 10 ms, for whoever would try all values

_reads: dict[Path, dict[str, str]] = {}  # plug-in -> file or "variable NAME" -> digest
_loaded: dict[str, tuple[ModuleType, str]] = {}  # file of an own module -> it, and the digest when it was first met
_of_modules: dict[str, Path] = {}  # file of an own module -> the plug-in that imports it
_written: set[str] = set()
_copied: set[str] = set()  # variables that a plug-in gets with all the others
_watching = False
_thread = threading.local()


def watch() -> None:
    """See from now on what plug-ins open and which variables they read, in all threads of this process."""
    global _watching
    if not _watching:
        _watching = True
        sys.addaudithook(_opened)
        os.environ.__class__ = _Environment


def recorded(files: Iterable[Path]) -> dict[str, str]:
    """What these plug-ins have read in this process, and modules that they import from elsewhere: name -> digest."""
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


def today(recorded_digests: Mapping[str, str], files: Iterable[Path]) -> dict[str, str]:
    """The digests of now for the names of `recorded_digests` that are known here.

    A file outside the plug-in's folder that is not here is on another machine, and unknown.
    """
    root_by_plugin = {sources.version(file).plugin: sources.root(file) for file in files}
    result = {}
    for name in recorded_digests:
        name_read, _, plugin = name.rpartition(" of ")
        if plugin not in root_by_plugin:
            continue
        if name_read.startswith("variable "):
            result[name] = of_variable(name_read.removeprefix("variable "))
        elif (value := digest(str(root_by_plugin[plugin] / name_read))) or not name_read.startswith(".."):
            result[name] = value
    return result


def changed_files(recorded_digests: Mapping[str, str], files: Iterable[Path]) -> list[str]:
    """The names of `recorded_digests`, as `recorded` gave it, whose content is another now. files: the plug-ins of
    now.
    """
    return [name for name, value in today(recorded_digests, files).items() if value != recorded_digests[name]]


class Reader:
    """Tells a stage's run what its plug-ins have read, whenever that has grown."""

    def __init__(self, store: Store, run: int, cell: str, stage: str, files: Iterable[Path]) -> None:
        self.store, self.run, self.files = store, run, sorted(files)
        self.earlier: dict[str, str] = {}  # of the runs whose work this one goes on with
        for earlier_run in store.runs([cell]) if self.files else ():
            if earlier_run["stage"] == stage and earlier_run["id"] != run and not earlier_run.get("dropped"):
                self.earlier |= earlier_run.get("read") or {}
        self.told: dict[str, str] = {}
        recorded(self.files)  # from here on their modules are known by their files

    def tell(self) -> None:
        """Write it into the run's provenance. Errors of `Store.describe_run`."""
        digests = {**self.earlier, **recorded(self.files)}
        if digests != self.told:
            self.store.describe_run(self.run, {"read": digests})
            self.told = digests


# --- digests ------------------------------------------------------------------------------------------------------


def digest(path: str) -> str:
    """SHA-256 of a file; "" where no file can be read."""
    try:
        state = os.stat(path)
        return _digest(path, state.st_mtime_ns, state.st_size, state.st_ino) if stat.S_ISREG(state.st_mode) else ""
    except OSError:
        return ""


@cache
def _digest(path: str, *_: int) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def of_variable(name: str) -> str:
    """A salted digest of a variable's value; "" where it is not set."""
    value = dict.get(os.environ._data, os.environ.encodekey(name))  # type: ignore[attr-defined]
    return "" if value is None else _slow(name, value)


@cache
def _slow(name: str, value: bytes) -> str:
    return hashlib.pbkdf2_hmac("sha256", value, f"fatbench variable {name}".encode(), ROUNDS).hex()


# --- what is seen -------------------------------------------------------------------------------------------------


def _opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or getattr(_thread, "in_hook", False):
        return
    if isinstance(arguments[0], str | bytes | os.PathLike):
        _thread.in_hook = True  # what is opened for a digest is not asked about
        try:
            _open(os.fsdecode(arguments[0]), arguments[2] or 0, sys._getframe(1))
        finally:
            _thread.in_hook = False


def _open(name: str, flags: int, frame: FrameType) -> None:
    plugin = _plugin(frame)
    if plugin is None:
        return
    path = os.path.abspath(name)  # of a link its own place: it may lead elsewhere tomorrow
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
    """`os.environ`, which tells what a plug-in asks it for by name."""

    def __getitem__(self, key: str) -> str:
        _note_variable(key, sys._getframe(1))
        value: str = super().__getitem__(key)
        return value

    def __iter__(self) -> Iterator[str]:
        if _asking(sys._getframe(1)) is not None:
            _copied.update(map(self.decodekey, self._data))
        keys: Iterator[str] = super().__iter__()
        return keys


def _note_variable(key: str, frame: FrameType | None) -> None:
    if key in PLACE or key.startswith(MACHINE) or (plugin := _asking(frame)) is None:
        return
    if key in _copied:  # all of them are asked for, as for the environment of a program
        _copied.discard(key)
    else:
        _reads.setdefault(plugin, {})[f"variable {key}"] = of_variable(key)


def _asking(frame: FrameType | None) -> Path | None:
    """The plug-in one of whose own lines asks for a variable; None: there is none, or a library's line asks."""
    while frame is not None and frame.f_code.co_filename in (os.__file__, "<frozen os>", "<frozen _collections_abc>"):
        frame = frame.f_back
    return None if frame is None or not _is_own_file(frame.f_code.co_filename) else _plugin(frame)


def _plugin(frame: FrameType | None) -> Path | None:
    """The plug-in whose code a frame is run by; None: none, or its data set's function."""
    try:
        owners = _owners(tuple((file, sources.version(file)) for file in signatures.plugins()))
    except (OSError, SyntaxError, ValueError):  # one that is being edited, and is not run by this process
        return None
    owner = None
    while frame is not None and owners:
        name = frame.f_code.co_filename
        if owner is None:
            owner = owners.get(name) or _of_modules.get(name)
        if name == DATA:  # the images have a fingerprint
            return None
        if name == sources.__file__:  # it is imported, whoever has asked for it
            break
        frame = frame.f_back
    return owner


@cache
def _owners(versions: tuple[tuple[Path, sources.Version], ...]) -> dict[str, Path]:
    """The files of plug-ins and of their local modules -> the plug-in; a module of several belongs to the first."""
    return {
        str(path): file
        for file, version in reversed(versions)
        for path in (file, *(sources.root(file) / path for path, _ in version.modules))
    }


def _is_own_file(path: str) -> bool:
    """Whether a file is somebody's own: no part of Python, of an installed package, of the system or of fatbench."""
    return not path.startswith(SYSTEM) and not any(fragment in path for fragment in INSTALLED)


def _modules(file: Path) -> dict[str, str]:
    """Own modules that a plug-in imports, and that these import, wherever they are: file -> its digest when loaded."""
    digest_by_file: dict[str, str] = {}
    to_visit = [str(file)]
    while to_visit:
        for module in filter(None, map(sys.modules.get, _imports(to_visit.pop()))):
            path = os.path.realpath(getattr(module, "__file__", None) or "")
            if path.endswith(".py") and _is_own_file(path) and path not in digest_by_file:
                if _loaded.get(path, (None, ""))[0] is not module:
                    _loaded[path] = (module, digest(path))
                digest_by_file[path] = _loaded[path][1]
                _of_modules.setdefault(path, file)
                to_visit.append(path)
    return digest_by_file


def _imports(path: str) -> list[str]:
    """The modules that import statements of a file name, packages before what is in them."""
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
