"""Imports a user's Python file with its neighbours in isolation: two folders may each have a `parts.py`.

    modules = OwnModules(Path("one/net.py"))
    with modules.importable():
        modules.module().make()        its `import parts` gives one/parts.py, whatever other `parts` is loaded

The files are read as text, so that an edited neighbour takes effect, and `sys.modules` is restored afterwards. A
neighbour that an import statement names must not have the name of an installed module.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from fatbench.errors import SpecError
from fatbench.suite import source_files

LIBRARY = Path(sysconfig.get_path("stdlib"))


class OwnModules:
    """A file, the folders that it imports from first, and the neighbours that were imported.

    Raises SpecError if a neighbour has the name of a loaded, installed module, and SyntaxError or ValueError if the
    file is not Python.
    """

    def __init__(self, file: Path) -> None:
        self.file = file.resolve()
        self.start = source_files.root(self.file)
        self.folders = list(dict.fromkeys([str(self.start), str(self.file.parent)]))
        self.neighbours: dict[str, ModuleType] = {}
        self._finder = _Neighbours(self.folders)
        for path in source_files.local_modules(self.file, _tree):
            module = sys.modules.get(source_files.module_name(path))
            if module is not None and not _is_own_module(module):
                raise SpecError(f"{path} has the name of another module, which is loaded already: rename it")

    def module(self) -> ModuleType:
        """The file's module, executed anew. Raises what the file raises."""
        if self.file.parent != self.start:
            return importlib.import_module(source_files.module_name(self.file))
        name = f"fatbench_model_{self.file.stem}_{hashlib.sha256(str(self.file).encode()).hexdigest()[:8]}"
        spec = importlib.util.spec_from_loader(name, _Text(name, str(self.file)))
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module there
        spec.loader.exec_module(module)
        return module

    @contextmanager
    def importable(self) -> Iterator[None]:
        """A context in which imports search the file's folders first, and these names mean its neighbours."""
        names = self._names()

        def modules_of_folders() -> dict[str, ModuleType]:
            return {
                name: m for name, m in [*sys.modules.items()] if name.partition(".")[0] in names and _is_own_module(m)
            }

        hidden, path = modules_of_folders(), [*sys.path]  # another folder's modules of the same names
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(self.neighbours)
        sys.meta_path.insert(0, self._finder)
        sys.path[:0] = self.folders
        try:
            yield
        finally:
            sys.meta_path.remove(self._finder)
            sys.path[:] = path
            self.neighbours |= modules_of_folders()  # so that a second import gives the same objects
            for name in self.neighbours:
                sys.modules.pop(name, None)
            sys.modules.update(hidden)

    def imports_late(self) -> bool:
        """Whether a function of the file, or of a neighbour, imports a neighbour when it is called."""
        names = self._names()
        for path in (self.file, *source_files.local_modules(self.file, _tree)):
            functions = [n for n in ast.walk(_tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            for node in (node for function in functions for node in ast.walk(function)):
                match node:
                    case ast.ImportFrom(level=level, module=name) if level or (name or "").split(".")[0] in names:
                        return True
                    case ast.Import(names=aliases) if names & {alias.name.split(".")[0] for alias in aliases}:
                        return True
        return False

    def _names(self) -> set[str]:
        return {path.stem for folder in self.folders for path in Path(folder).iterdir()} - {"fatbench"}


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes(), str(file))


def _is_own_module(module: ModuleType) -> bool:
    """Whether a module is the user's: not part of Python, of an installed package or of fatbench."""
    locations = [getattr(module, "__file__", None), *getattr(module, "__path__", ())][:1]
    name = getattr(module, "__name__", "").partition(".")[0]
    if not locations or locations[0] is None or name in ("__main__", "fatbench") or name in sys.stdlib_module_names:
        return False
    path = Path(locations[0])
    return not path.is_relative_to(LIBRARY) and not set(path.parts).intersection(source_files.INSTALLED)


class _Text(SourceFileLoader):
    """Compiles the text itself: Python would reuse the cache of a file edited within the same second and length."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


class _Neighbours(MetaPathFinder):
    """Finds modules in the given folders."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = folders
        self.finder = cache(lambda folder: FileFinder(folder, (_Text, [".py"])))

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the neighbour with this name, or None."""
        for folder in self.folders if path is None else path:
            if any(Path(folder).is_relative_to(own_folder) for own_folder in self.folders):
                spec = self.finder(folder).find_spec(name)
                if spec is not None and spec.loader is not None:
                    return spec
        return None
