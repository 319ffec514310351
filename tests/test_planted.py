"""Each mistake of planted.py can be made in today's program; whether a test sees it, `make planted` finds out."""

from __future__ import annotations

import ast

import planted
import pytest


@pytest.mark.parametrize("name", planted.PLANTED)
def test_a_mistake_can_be_planted(name: str) -> None:
    mistake = planted.PLANTED[name]
    ast.parse(planted.text(mistake))
    assert all((planted.ROOT / f"tests/test_{tests}.py").exists() for tests in mistake["seen_by"].split())


def test_there_are_forty() -> None:
    assert len(planted.PLANTED) == 40
