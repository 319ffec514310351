"""What of a plug-in a cell's provenance goes by: what its function reaches, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from fatbench.suite import reached, sources

PLUGIN = '''"""A method."""
import numpy as np
import torch
from torch import nn
from helper import first
import helper as other_name
import pack.part

WIDTH = 3
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
    return pack.part.deep(x), np.array(x)


AGGREGATORS = {"mine": mine, "neighbour": neighbour}
'''
HELPER = "def first(x):\n    return second(x)\n\n\ndef second(x):\n    return x\n\n\ndef third(x):\n    return 3\n"
PART = "def deep(x):\n    return x\n\n\ndef shallow(x):\n    return x\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "part.py").write_text(PART)
    return tmp_path


NAMES = ("mine", "neighbour", "Net", "whole")


def digests(place: Path) -> dict[str, str]:
    sources.delete(place / "mine.py")
    return {name: reached.digest(place / "mine.py", name) for name in NAMES}


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
        ("helper.py", "def third", "def fourth(x):\n    return 4\n\n\ndef third", ""),
        # what a function reads
        ("mine.py", "WIDTH = 3", "WIDTH = 4", "mine"),
        ("mine.py", "top=1", "top=2", "mine"),
        ("mine.py", '"low": 0', '"low": 1', "neighbour Net"),
        ("mine.py", "width = 2", "width = 3", "Net"),
        ("mine.py", "import numpy as np", "import torch as np", "whole"),
        ("mine.py", "import first", "import second as first", "mine"),
        ("mine.py", "WIDTH = 3", "WIDTH = 3\nWIDTH += 1", "mine neighbour Net whole"),
        ("helper.py", "return x", "return -x", "mine"),
        ("helper.py", "return 3", "return 4", "neighbour Net"),
        ("pack/part.py", "def shallow(x):\n    return x", "def shallow(x):\n    return -x", "whole"),
        # what an import may do, and names that cannot be followed
        ("mine.py", "AGGREGATORS", "torch.set_num_threads(1)\nAGGREGATORS", "mine neighbour Net whole"),
        ("mine.py", "AGGREGATORS", "torch.set_default_dtype(torch.float64)\nAGGREGATORS", "mine neighbour Net whole"),
        ("mine.py", "WIDTH = 3", "WIDTH = torch.set_default_dtype(torch.half) or 3", "mine neighbour Net whole"),
        ("helper.py", "def third", "torch.set_default_dtype(torch.half)\ndef third", "mine neighbour Net whole"),
        ("mine.py", "AGGREGATORS", "nn.functional.relu = mine\nAGGREGATORS", "mine neighbour Net whole"),
        ("mine.py", "AGGREGATORS", "if True:\n    WIDTH = 5\nAGGREGATORS", "mine neighbour Net whole"),
        ("mine.py", "AGGREGATORS", "@register\ndef f(x):\n    pass\nAGGREGATORS", "mine neighbour Net whole"),
        ("mine.py", "AGGREGATORS", "def f(x):\n    global WIDTH\nAGGREGATORS", "mine neighbour Net whole"),
        ("mine.py", "AGGREGATORS", "from helper import *\nAGGREGATORS", "mine neighbour Net whole"),
        ("mine.py", "AGGREGATORS", "def f(x):\n    return eval(x)\nAGGREGATORS", "mine neighbour Net whole"),
        ("helper.py", "def third", "print(1)\n\n\ndef third", "mine neighbour Net whole"),
        ("pack/__init__.py", "", "import os\nos.environ['A'] = '1'\n", "mine neighbour Net whole"),
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
    (place / "helper.py").write_text("from mine import mine\n" + HELPER.replace("return second(x)", "return mine(x)"))
    assert len(set(digests(place).values())) == len(NAMES)
