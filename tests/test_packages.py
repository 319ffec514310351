"""The docstring of every package lists its modules, a line each."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "fatbench"
PACKAGES = sorted(ROOT.rglob("__init__.py"))


@pytest.mark.parametrize("init", PACKAGES, ids=lambda init: init.parent.relative_to(ROOT.parent).as_posix())
def test_a_package_lists_its_modules(init: Path) -> None:
    modules = [file.stem for file in init.parent.glob("*.py") if not file.stem.startswith("__")]
    modules += [inner.parent.name for inner in init.parent.glob("*/__init__.py")]
    docstring = ast.get_docstring(ast.parse(init.read_text()), clean=False) or ""
    listed = re.findall(r"^(?: {4})?(\w+) {2,}\S", docstring, re.MULTILINE)
    assert sorted(listed) == sorted(modules)
