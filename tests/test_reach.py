"""What of a plug-in a cell's provenance goes by: what its function reaches, and nothing else."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fatbench.suite import source_files
from fatbench.suite.reach import _read, digest, reach

PLUGIN = '''"""A method."""
import functools
import sys
import numpy as np
import torch
from torch import nn
from helper import first
import helper as other_name
import pack.part

WIDTH = 3
LEVELS = 255
LIMITS = {"low": 0}


def mine(updates, context, *, top=1):
    """Mine."""
    # a comment
    return first(updates) + WIDTH


@torch.no_grad()
def neighbour(x):
    return LIMITS, other_name.third(x)


class Net(nn.Module):
    width = 2

    def forward(self, x):
        return neighbour(x)


def whole(x):
    local = 1
    pairs = [local for one in x]
    return pack.part.deep(x), np.array(x), sys.maxsize


def scaled(by):
    def around(function):
        @functools.wraps(function)
        def inner(*args, **settings):
            return by * function(*args, **settings)

        return inner

    return around


@scaled(2)
def decorated(updates, context, *, eps=8 / LEVELS):
    return updates


def power(q):
    def powered(updates, context):
        return updates**q

    return powered


class Weighted:
    def __init__(self, by):
        self.by = by

    def __call__(self, updates, context):
        return self.by * updates


made, bound, weighted = power(2), functools.partial(mine, top=3), Weighted(4.0)
AGGREGATORS = {"mine": mine, "neighbour": neighbour}
'''
HELPER = "def first(x):\n    return second(x)\n\n\ndef second(x):\n    return x\n\n\ndef third(x):\n    return 3\n"
PART = "def deep(x):\n    return x\n\n\ndef shallow(x):\n    return x\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "part.py").write_text(PART)
    yield tmp_path
    source_files.delete(tmp_path / "mine.py")


NAMES = ("mine", "neighbour", "Net", "whole", "decorated", "made", "bound", "weighted")
ALL = " ".join(NAMES)


def digests(place: Path) -> dict[str, str]:
    source_files.delete(place / "mine.py")
    module = source_files.load(place / "mine.py")
    return {name: digest(reach(getattr(module, name), place / "mine.py")) for name in NAMES}


@pytest.mark.parametrize(
    ("file", "was", "now", "changed"),
    [
        # what changes nothing: comments, layout, prose, neighbours, imports that nobody here reads
        ("mine.py", "# a comment", "# another\n\n    # and one more", ""),
        ("mine.py", '"""Mine.', '"""Ours, as it was.', ""),
        ("mine.py", "first(updates) + WIDTH", "(first( updates )  +  WIDTH)", ""),
        ("mine.py", "AGGREGATORS", "def new(x):\n    return 1\n\n\nNEW = 4\nAGGREGATORS", ""),
        ("mine.py", '"neighbour": neighbour', '"neighbour": neighbour, "again": mine', ""),
        ("mine.py", "import torch\n", "import torch\nimport json\n", ""),
        ("mine.py", "from torch import nn", "from torch import nn, optim", ""),
        ("mine.py", "AGGREGATORS", "@torch.no_grad()\ndef new(x):\n    return 1\n\n\nAGGREGATORS", ""),
        ("mine.py", "AGGREGATORS", "class New(nn.Module):\n    size = 1\n\n\nAGGREGATORS", ""),
        ("mine.py", "def mine(updates, context, *", "def mine(updates: list, context: 'Any', *", ""),
        ("mine.py", "x):\n    return LIMITS", "x: int) -> int:\n    return LIMITS", ""),
        ("mine.py", "    local = 1\n    pairs = [local for one", "    other: int = 1\n    pairs = [other for two", ""),
        ("mine.py", "WIDTH = 3", "WIDTH: int = 3", ""),
        ("helper.py", "def third", "def fourth(x):\n    return 4\n\n\ndef third", ""),
        ("mine.py", "AGGREGATORS", "def f(x):\n    global WIDTH\n    return x\n\n\nAGGREGATORS", ""),
        ("mine.py", "AGGREGATORS", "@functools.cache\ndef f(x):\n    return x\n\n\nAGGREGATORS", ""),
        # what a function reads
        ("mine.py", "[local for one in x]", "[one for one in x]", "whole"),
        ("mine.py", "    width = 2", "    height = 2", "Net"),
        ("mine.py", "WIDTH = 3", "WIDTH = 4", "mine bound"),
        ("mine.py", "WIDTH = 3", "WIDTH = abs(-3)", "mine bound"),
        ("mine.py", "top=1", "top=2", "mine bound"),
        ("mine.py", '"low": 0', '"low": 1', "neighbour Net"),
        ("mine.py", "width = 2", "width = 3", "Net"),
        ("mine.py", "import numpy as np", "import torch as np", "whole"),
        ("mine.py", "import first", "import second as first", "mine bound"),
        ("helper.py", "return x", "return -x", "mine bound"),
        ("helper.py", "return 3", "return 4", "neighbour Net"),
        ("pack/part.py", "def shallow(x):\n    return x", "def shallow(x):\n    return -x", ""),
        ("pack/part.py", "def deep(x):\n    return x", "def deep(x):\n    return -x", "whole"),
        # objects: a decorator and what it is given, a computed default, a closure, bound settings, an attribute
        ("mine.py", "by * function", "function", "decorated"),
        ("mine.py", "@scaled(2)", "@scaled(3)", "decorated"),
        ("mine.py", "LEVELS = 255", "LEVELS = 256", "decorated"),
        ("mine.py", "power(2)", "power(3)", "made"),
        ("mine.py", "updates**q", "updates ** (q + 1)", "made"),
        ("mine.py", "top=3", "top=4", "bound"),
        ("mine.py", "Weighted(4.0)", "Weighted(5.0)", "weighted"),
        ("mine.py", "self.by * updates", "updates", "weighted"),
        # what an import may do, and names that cannot be followed
        ("mine.py", "WIDTH = 3", "WIDTH = 3\nWIDTH += 1", ALL),
        ("mine.py", "AGGREGATORS", "torch.get_num_threads()\nAGGREGATORS", ALL),
        ("mine.py", "AGGREGATORS", "nn.functional.relu = nn.functional.relu\nAGGREGATORS", ALL),
        ("mine.py", "AGGREGATORS", "if True:\n    WIDTH = 5\nAGGREGATORS", ALL),
        ("mine.py", "AGGREGATORS", "def f(x):\n    return eval(x)\nAGGREGATORS", ALL),
        ("helper.py", "def third", "print(1)\n\n\ndef third", ALL),
        ("pack/__init__.py", "", "import os\nos.environ.get('A')\n", ALL),
    ],
)  # fmt: skip
def test_a_digest_changes_with_what_is_reached(place: Path, file: str, was: str, now: str, changed: str) -> None:
    before = digests(place)
    text = (place / file).read_text()
    assert was in text
    (place / file).write_text(text.replace(was, now, 1))
    after = digests(place)
    assert [name for name in NAMES if before[name] != after[name]] == changed.split()


def test_modules_that_import_each_other_end(place: Path) -> None:
    (place / "helper.py").write_text(HELPER.replace("return second(x)", "import mine\n    return mine(x)"))
    assert len(set(digests(place).values())) == len(NAMES)


def test_the_text_of_a_definition_is_the_same_in_every_version_of_python() -> None:
    """Quotes of an f-string, and whether its format has an empty end, differ between versions."""
    source = """def f(a: int, *, b=2) -> str:
    "Prose."
    c: list = [a for d in range(b)]
    return f"{c['x']:>{b}} {a!r}" + G
"""
    text, names, _ = _read(ast.parse(source).body[0])
    assert text == (
        "def f(a, *, b=2):\n    _0 = [a for _1 in range(b)]\n"
        "    return [(_0['x'], -1, ['>', (b, -1, None)]), ' ', (a, 114, None)] + G"
    )
    assert names == {"range", "G"}
