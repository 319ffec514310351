"""Python files as text: syntax trees, local imports and SHA-256; only `load` runs a plug-in.

A plug-in is one Python file. Its local modules are those that it imports from its own folder, and the modules that
these import: the files whose content decides what it computes. If its folder is a package, imports start at the top of
the package, and the plug-in is a module of it. In an installed package only its own modules are local.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fatbench.errors import FatbenchError, SpecError

INSTALLED = ("site-packages", "dist-packages")


PARSER = threading.RLock()  # CPython counts the depth of all threads' trees in one place, and then fails
_READ: dict[Path, bytes] = {}
_LOADED: dict[Path, Any] = {}


def source_bytes(file: Path) -> bytes:
    """A file's content when it was first read, so that the same text is checked, hashed and run."""
    if file not in _READ:
        _READ[file] = file.read_bytes()
    return _READ[file]


@functools.cache
def tree(file: Path) -> ast.Module:
    """A file's syntax tree. OSError, SyntaxError or ValueError if it cannot be read."""
    with PARSER:
        return ast.parse(source_bytes(file), str(file))


def root(file: Path) -> Path:
    """The folder where a file's imports start: the first one above it that is not a package."""
    folder = file.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def module_name(file: Path) -> str:
    """The name of a file as a module below `root`: "helper", "package.part"."""
    path_parts = file.relative_to(root(file)).with_suffix("").parts
    return ".".join(path_parts[:-1] if path_parts[-1] == "__init__" else path_parts)


def imported(file: Path, statement: ast.Import | ast.ImportFrom) -> Iterator[Path]:
    """The local files that an import statement of `file` runs, packages before their modules."""
    start, package = root(file), file.relative_to(root(file)).parent.parts
    if isinstance(statement, ast.Import):
        names = [tuple(alias.name.split(".")) for alias in statement.names]
    else:
        parent_package = package[: len(package) - statement.level + 1] if statement.level else ()
        stem = (*parent_package, *(statement.module.split(".") if statement.module else ()))
        names = [stem, *((*stem, alias.name) for alias in statement.names)]
    for module_path in names:
        if module_path[:1] == ("fatbench",) or (start.name in INSTALLED and module_path[:1] != package[:1]):
            continue
        for end in range(1, len(module_path) + 1):
            path = start.joinpath(*module_path[:end])
            for candidate in (path / "__init__.py", path.parent / f"{path.name}.py"):
                if candidate.is_file():
                    yield candidate
                    break


@dataclass(frozen=True)
class Version:
    """The version of a plug-in's files when they were read."""

    plugin: str  # the file's name, or the module's in a package
    sha256: str  # of the file
    modules: tuple[tuple[str, str], ...]  # (path below `root`, SHA-256) of its local modules


@functools.cache
def version(file: Path) -> Version:
    """The version of a plug-in and of its local modules. Errors as for `tree`."""
    digest_by_path = {
        path: hashlib.sha256(source_bytes(path)).hexdigest() for path in (file, *local_modules(file, tree))
    }
    digest, start = digest_by_path.pop(file), root(file)
    name = file.name if file.parent == start else module_name(file)
    return Version(
        name, digest, tuple(sorted((path.relative_to(start).as_posix(), d) for path, d in digest_by_path.items()))
    )


def files(file: Path) -> dict[Path, str]:
    """A plug-in's files -> their paths below `root`; "" for itself, whatever its name is. Errors as for `tree`."""
    return {file: "", **{root(file) / path: path for path, _ in version(file).modules}}


def local_modules(file: Path, parse: Callable[[Path], ast.Module]) -> list[Path]:
    """The local files that a file imports, directly or indirectly; `parse` gives the syntax tree of a file."""
    files, to_visit = {file: None}, [file]
    while to_visit:
        module = to_visit.pop()
        for node in ast.walk(parse(module)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                new_files = [path for path in imported(module, node) if path not in files]
                files |= dict.fromkeys(new_files)
                to_visit += new_files
    return [path for path in files if path != file]


def delete(*plugins: Path) -> None:
    """Forget these plug-ins: they are read and run again when they are next needed."""
    for file in plugins:
        _LOADED.pop(file, None)
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            for path in files(file).keys() - {file}:
                sys.modules.pop(module_name(path), None)
                _READ.pop(path, None)
        _READ.pop(file, None)
    tree.cache_clear()
    version.cache_clear()


def forget(file: Path) -> None:
    """Leave nothing of a plug-in without local modules, as if it had not been run."""
    delete(file)
    _RUN.discard(file)
    sys.modules.pop(_plugin_module_name(file), None)
    with contextlib.suppress(ValueError):
        sys.path.remove(str(root(file)))


def is_edited(file: Path) -> bool:
    """Whether a plug-in, or one of its local modules, has changed since it was read."""
    return any(not path.is_file() or path.read_bytes() != source_bytes(path) for path in files(file))


_RUN: set[Path] = set()


def run_here() -> frozenset[Path]:
    """The plug-ins that this process has run; their effects on torch stay, even when they are read again."""
    return frozenset(_RUN)


def load(file: Path) -> Any:
    """The module of a plug-in, run once.

    SpecError for an error while it runs, or a local module that was edited since or shares its name with another.
    """
    if file not in _LOADED:
        _LOADED[file] = _load(file)
    return _LOADED[file]


def _load(file: Path) -> Any:
    for path in files(file).keys() - {file}:
        name = module_name(path)
        module = sys.modules.get(name)
        if module is not None and Path(getattr(module, "__file__", None) or "").resolve() != path.resolve():
            raise SpecError(f"plugin {file}: {path} shadows the loaded module {name}: rename it")
        if path.read_bytes() != source_bytes(path):
            raise SpecError(f"plugin {file}: {path} was edited while the program was running: start it again")
    if (start := str(root(file))) not in sys.path:
        sys.path.insert(0, start)
    _RUN.add(file)
    try:
        return _run(file)
    except SystemExit as error:
        raise SpecError(f"plugin {file}: running it ends the program: SystemExit: {error}") from None
    except FatbenchError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        raise SpecError(f"plugin {file}:{lines[-1] if lines else 1}: {type(error).__name__}: {error}") from error


def _plugin_module_name(file: Path) -> str:
    return f"fatbench_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"


def _run(file: Path) -> Any:
    if file.parent != root(file):
        return importlib.import_module(module_name(file))
    name = _plugin_module_name(file)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    try:
        exec(compile(source_bytes(file), str(file), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module
