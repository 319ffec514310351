"""`make gpu` without a GPU: its items in the rehearsal, and what its slices remember."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, risks
from benchmarks.measure import Bench


def rehearsal(folder: Path) -> Bench:
    return Bench(torch.device("cpu"), True, folder)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("a batch of NIN, loop bf16", "steps of an image/s"),
        ("a batch of NIN, loop tf32", "a CPU has no TF32"),
        ("choice of auto", "auto takes loop; not here"),
        ("steps recorded, bf16", "a CPU repeats no recorded steps"),
        ("ViT-S twice", "the same bytes twice"),
        ("monitor of ViT-B", "32 images at once"),
    ],
)
def test_an_item_is_rehearsed(item: str, said: str, tmp_path: Path) -> None:
    bench = rehearsal(tmp_path)
    assert said in risks.items(bench)[item](bench)["said"]


def called(monkeypatch: Any, outcomes: dict[str, str], folder: Path, *more: str) -> tuple[Any, list[str]]:
    """The exit code of a call of 100 seconds, each item taking 40 of them, and the items that were run."""
    clock, ran = [0.0], list[str]()

    def run(arguments: list[str], seconds: float) -> dict[str, Any]:
        ran.append(arguments[-1])
        clock[0] += 40
        return {"outcome": outcomes.get(arguments[-1], "done"), "said": "so", "seconds": 40.0}

    monkeypatch.setattr(gpu, "_run", run)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(risks, "items", lambda bench, suites=None: dict.fromkeys("abcd"))
    monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--slice", "100", "-o", str(folder), *more])
    with pytest.raises(SystemExit) as stopped:
        gpu.main()
    return stopped.value.code, ran


def test_a_slice_goes_on_where_the_last_one_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two items of 40 s fit into 100 s, since none is begun with fewer than 30 s left. A failure stops nothing."""
    assert called(monkeypatch, {"b": "failed"}, tmp_path) == (75, ["a", "b"])
    assert called(monkeypatch, {"d": "stopped"}, tmp_path) == (75, ["c", "d"])
    assert called(monkeypatch, {}, tmp_path) == (1, ["d"])
    assert called(monkeypatch, {}, tmp_path, "--again") == (0, ["b"])
    kept = json.loads((tmp_path / "gpu-cpu.json").read_text())
    assert {name: (one["outcome"], one["seconds"]) for name, one in kept.items()} == {
        "a": ("done", 40), "b": ("done", 40), "c": ("done", 40), "d": ("done", 80),
    }  # fmt: skip
    assert "A rehearsal" in (tmp_path / "gpu-cpu.md").read_text()
