"""The comparison with the authors' programs: instruments, where it finds programs, what the committed one says."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.fidelity import __main__ as tool
from benchmarks.fidelity import claims, measure, sources, table
from fatbench.suite import files

BENCH = Path(__file__).parent.parent / "results" / "bench"


def claimed() -> set[str]:
    """Every label of a suite that says that it is somebody's release."""
    found = set()
    for name in files.available():
        contents = files.load(name).contents
        found |= {label for axis in contents.axes.values() for label in axis}
        found |= {label for shown in contents.tables for label in shown.values}
    return {label for label in found if label.endswith(claims.MARKS)}


def test_every_row_called_released_is_compared() -> None:
    assert claimed() == set(claims.CLAIMS)


def test_golden_rows_called_released_pass() -> None:
    found = table.load(BENCH)
    assert set(found) == set(sources.SOURCES)
    rows = [row for several in found.values() for row in several]
    assert set(claims.outcomes(rows).values()) == {True}
    assert [row.id for row in rows if row.expected and not row.passes] == []


def test_golden_table_is_made_of_the_rows(tmp_path: Path) -> None:
    (tmp_path / table.FILE).write_bytes((BENCH / table.FILE).read_bytes())
    assert table.write(tmp_path) == (BENCH / "fidelity.md").read_text(encoding="utf-8")


def test_a_claim_without_its_comparison_is_not_carried() -> None:
    row = measure.equal("sfat.slack.nin", "theirs", "ours", "run", 0.0)
    assert claims.outcomes([row])["SFAT (released)"] is None
    other = replace(row, id="sfat.fedprox.nin")
    assert claims.outcomes([row, other])["SFAT (released)"] is True
    assert claims.outcomes([row, replace(other, passes=False)])["SFAT (released)"] is False
    assert claims.outcomes([row, replace(other, expected=False)])["SFAT (released)"] is None


def test_a_difference_is_in_parts_of_the_greatest_number() -> None:
    a, b = {"w": torch.tensor([1.0, 2.5])}, {"w": torch.tensor([1.0, 2.0])}
    assert measure.difference(a, b) == 0.25
    assert measure.difference({"w": torch.tensor([1.0, math.nan])}, b) == math.inf
    with pytest.raises(ValueError, match="tensors of one side only: v, w"):
        measure.difference({"v": a["w"]}, b)


def test_a_start_that_a_normalisation_hides_is_seen() -> None:
    """Weights 10 times smaller before batch norm: the same output, another distribution, a step 100 times as large."""

    def network(std: float) -> nn.Module:
        first = nn.Linear(12, 40, bias=False)
        nn.init.normal_(first.weight, std=std)
        return nn.Sequential(first, nn.BatchNorm1d(40), nn.Linear(40, 3))

    x, y = torch.randn(16, 12, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
    same = measure.network("n", "", "", lambda: network(0.2), lambda: network(0.2), dict, x, y)
    assert [row.passes for row in same] == [True] * 4
    other = measure.network("n", "", "", lambda: network(0.2), lambda: network(0.02), dict, x, y)
    output, gradient, start, step = other
    assert output.passes and gradient.passes
    assert not start.passes and start.note == "0.weight"
    assert not step.passes and step.note == "0.weight" and 80 < step.value < 120


@pytest.fixture
def clone(tmp_path: Path) -> tuple[Path, sources.Source]:
    """A folder of clones with one in it, and its first commit; the second commit and the work tree are others."""
    folder = tmp_path / "clones" / "some+program"
    (folder / "code").mkdir(parents=True)

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    for value in (1, 2):
        (folder / "code" / "their_module.py").write_text(f"VALUE = {value}\n")
        (folder / "large").write_text("not needed")
        git("add", "--all")
        git("commit", "--quiet", "--message", str(value))
    (folder / "code" / "their_module.py").write_text("VALUE = 3\n")
    return tmp_path / "clones", sources.Source("some/program", git("rev-parse", "HEAD~1").strip(), ("code",))


def test_a_comparison_that_fails_is_named(
    clone: tuple[Path, sources.Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    clones, source = clone
    rows = [measure.equal("tamaya.a", "", "", "run", 1.0), measure.differs("tamaya.b", "", "", "run", 1.0)]
    monkeypatch.setitem(sources.SOURCES, "tamaya", source)
    monkeypatch.setitem(tool.COMPARISONS, "tamaya", lambda place: rows)
    monkeypatch.setattr(sys, "argv", ["fidelity", "--clones", str(clones), "--only", "tamaya", "-o", str(tmp_path)])
    assert tool.main() == 1
    printed = capsys.readouterr()
    assert printed.err == "fidelity: not the same: tamaya.a\n"
    assert "| tamaya.b |  | - |  | run | 1 | <= 0.0001 | differs, as meant |" in printed.out
