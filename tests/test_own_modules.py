"""A network's file is imported with its own neighbours, whatever is loaded under their names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fatbench.models.external_network import network

NET = """
from dataclasses import dataclass
import torch
from torch import nn
from parts import SIGN

@dataclass
class Settings:
    sign: int = SIGN

class Net(nn.Module):
    def forward(self, x):
        return Settings().sign * x.flatten(1)

class Late(nn.Module):
    def forward(self, x):
        from parts import SIGN
        return SIGN * x.flatten(1)

def make():
    return Net()

def late():
    return Late()

def dynamic():
    import importlib
    assert importlib.import_module("parts").SIGN == SIGN
    return Net()
"""


@pytest.fixture
def folders(tmp_path: Path) -> dict[int, Path]:
    made = {sign: tmp_path / f"folder{sign}" for sign in (1, -1)}
    for sign, folder in made.items():
        folder.mkdir()
        (folder / "net.py").write_text(NET)
        (folder / "parts.py").write_text(f"SIGN = {sign}\n")
    return made


def sign(folder: Path, function: str = "make") -> int:
    model = network(f"{folder / 'net.py'}:{function}", (1, 1, 1), 2)
    return int(model(torch.ones(1, 1, 1, 1)))


@pytest.mark.parametrize("function", ["make", "late", "dynamic"])
def test_two_folders_have_each_their_own_neighbour(folders, function, monkeypatch) -> None:
    monkeypatch.syspath_prepend(folders[-1])
    import parts  # somebody's own, in a script that calls fatbench

    before = [*sys.path], [*sys.meta_path]
    assert [sign(folder, function) for folder in folders.values()] == [1, -1]
    assert sys.modules.pop("parts") is parts
    assert ([*sys.path], [*sys.meta_path]) == before


def test_two_networks_that_import_when_they_are_called_do_not_meet(folders) -> None:
    first, second = (network(f"{folder / 'net.py'}:late", (1, 1, 1), 2) for folder in folders.values())
    x = torch.ones(1, 1, 1, 1)
    assert [int(model(x)) for model in (first, second, first)] == [1, -1, 1]
    assert "parts" not in sys.modules


def test_an_edit_counts_at_once(folders) -> None:
    assert sign(folders[1]) == 1
    (folders[1] / "parts.py").write_text("SIGN = 9\n")  # as long as before, in the same second
    assert sign(folders[1]) == 9


def test_a_package_s_file_has_its_relative_imports_and_its_neighbours(folders) -> None:
    folder = folders[-1]
    (folder / "__init__.py").write_text("")
    (folder / "net.py").write_text(NET.replace("from parts import SIGN", "from .parts import SIGN", 1))
    assert sign(folder) == sign(folder, "late") == -1
