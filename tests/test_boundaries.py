"""Decision boundaries in the plane: the network by hand, the diagnostic on known lines, the suite."""

from __future__ import annotations

import csv
import io
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Generator, nn
from typer.testing import CliRunner

from fatbench.cli.app import app
from fatbench.engine.rounds import Cost, Problem, Round, State, Stats, Update
from fatbench.methods.diagnostics import boundaries
from fatbench.methods.evasion import fgsm
from fatbench.models import MODELS

STATS = Stats(0.0, 0.0, 0.0, 1, 1.0, 1)


def test_one_hidden_layer_by_hand() -> None:
    """Units relu(x - y + 0.1) and relu(y - x), logits (2a + b, a - b + 1), at (0.5, 0.2) and at (0.2, 0.5)."""
    model = MODELS["mlp"]((2, 1, 1), 2, width=2)
    values = [[[1.0, -1], [-1, 1]], [0.1, 0], [[2.0, 1], [1, -1]], [0.0, 1]]
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(torch.tensor(value))
        found = model(torch.tensor([[0.5, 0.2], [0.2, 0.5]]).reshape(2, 2, 1, 1))
    torch.testing.assert_close(found, torch.tensor([[0.8, 1.4], [0.3, 0.7]]))


def line(a: float, b: float, c: float) -> dict[str, torch.Tensor]:
    """A linear model whose margin is a x + b y + c."""
    return {"1.weight": torch.tensor([[0.0, 0], [a, b]]), "1.bias": torch.tensor([0.0, c])}


def test_margins_lie_as_in_the_plane_and_clients_disagree_between_their_lines() -> None:
    """Client 2 says x > 1/2, client 5 says y > 1/4, on a grid of 5 x 5: x > 1/2 is 2 columns, y > 1/4 is 3 rows. They
    disagree on 2 columns x 2 rows and 3 columns x 3 rows, 13 of 25."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    images = torch.tensor([[255, 0], [0, 51], [102, 255]], dtype=torch.uint8).reshape(3, 2, 1, 1)
    shards = [torch.tensor([k % 3]) for k in range(5)] + [torch.tensor([0, 2])]
    problem = Problem(model, images, torch.tensor([1, 0, 1]), shards, 2, 0, torch.device("cpu"))
    updates = [Update(2, 1, line(1, 0, -0.5), STATS), Update(5, 2, line(0, 1, -0.25), STATS)]
    result = Round(0, line(0, 0, 0), updates, None, State(1, line(1, 1, -1)), Cost())
    found = boundaries(problem, result, images, problem.labels, lambda *a: a[1], Generator(), points=5)
    quarters = torch.arange(5) / 4
    torch.testing.assert_close(found["boundary_c2"], (quarters - 0.5).expand(5, 5))
    torch.testing.assert_close(found["boundary_c5"], (quarters.flip(0) - 0.25)[:, None].expand(5, 5))
    torch.testing.assert_close(found["boundary_server"], quarters + quarters.flip(0)[:, None] - 1)
    assert found["boundary_apart"] == pytest.approx(13 / 25)
    torch.testing.assert_close(found["boundary_c5_points"], torch.tensor([[1.0, 0, 1], [0.4, 1, 1]]))
    torch.testing.assert_close(found["boundary_c5_adversarial"], found["boundary_c5_points"])


def test_adversarial_points_are_moved_against_their_own_client() -> None:
    """FGSM of eps 0.1 on client 2, whose margin is x - 1/2: class 1 goes left, class 0 right, y stays."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    images = torch.tensor([[204, 51], [51, 102]], dtype=torch.uint8).reshape(2, 2, 1, 1)
    shards = [torch.tensor([0, 1])] * 3
    problem = Problem(model, images, torch.tensor([1, 0]), shards, 2, 0, torch.device("cpu"))
    result = Round(0, line(0, 0, 0), [Update(2, 2, line(1, 0, -0.5), STATS)], None, State(1, line(0, 1, -1)), Cost())
    attack = partial(fgsm, eps=0.1)
    found = boundaries(problem, result, images, problem.labels, attack, Generator(), points=3)
    torch.testing.assert_close(found["boundary_c2_points"], torch.tensor([[0.8, 0.2, 1], [0.2, 0.4, 0]]))
    torch.testing.assert_close(found["boundary_c2_adversarial"], torch.tensor([[0.7, 0.2, 1], [0.3, 0.4, 0]]))


def test_a_suite_in_the_plane_is_run_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: None) -> None:
    """The number goes to the database, the margins beside it. Margins x - 0.3 and y - 0.2 put in their place are drawn
    as those lines, and a margin that is 1 everywhere as none."""
    from matplotlib.axes import Axes

    monkeypatch.chdir(tmp_path)
    few = ["sfat-plane", "--smoke", "-k", "training=FAT"]

    def call(*words: str) -> str:
        found = CliRunner().invoke(app, words)
        assert found.exit_code == 0, found.output
        return found.output

    call("run", "suite", *few, "--jobs", "1")
    [file] = tmp_path.glob("results/**/artifacts/round-000002.safetensors")
    kept = load_file(file)
    assert {name: tensor.shape for name, tensor in kept.items()} == {
        "boundary_server": (101, 101), "boundary_c0": (101, 101), "boundary_c1": (101, 101),
        "boundary_c0_points": (100, 3), "boundary_c1_points": (100, 3),
        "boundary_c0_adversarial": (100, 3), "boundary_c1_adversarial": (100, 3),
    }  # fmt: skip
    assert sorted(kept[f"boundary_c{k}_points"][:, 2].mean() for k in (0, 1)) == pytest.approx([0.1, 0.9], abs=0.05)
    apart = float(((kept["boundary_c0"] > 0) != (kept["boundary_c1"] > 0)).mean())
    rows = csv.DictReader(io.StringIO(call("report", *few, "--format", "csv")))
    assert [float(row["mean"]) for row in rows if row["heading"] == "apart"] == pytest.approx([apart])
    along = np.linspace(0, 1, 101, dtype=np.float32)
    kept["boundary_c0"] = np.tile(along - 0.3, (101, 1))
    kept["boundary_c1"] = np.tile(along[::-1, None] - 0.2, (1, 101))
    kept["boundary_server"] = np.ones((101, 101), np.float32)
    save_file(kept, file)
    drawn, contour = [], Axes.contour
    monkeypatch.setattr(Axes, "contour", lambda *a, **k: drawn.append((a[0], contour(*a, **k))))
    call("plot", *few, "--figure", "F5bc", "-o", "images")
    assert [axes.get_title() for axes, _ in drawn] == ["FAT, round 2"] * 2
    for (_, lines), fixed, value in zip(drawn, (0, 1), (0.3, 0.2), strict=True):
        here = np.concatenate([path.vertices for path in lines.get_paths()])
        assert np.abs(here[:, fixed] - value).max() < 0.01 and np.ptp(here[:, 1 - fixed]) > 0.98
