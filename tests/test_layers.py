"""The contracts of pyproject.toml on who imports whom hold: `make lint` says which line breaks one."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_imports_keep_their_contracts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from importlinter.cli import lint_imports

    monkeypatch.chdir(Path(__file__).parent.parent)
    assert lint_imports(cache_dir=None) == 0, capsys.readouterr().out
