"""The benchmark: both sides do the same work, its table says what was not measured, its counters are `plan`'s."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import members
import pytest
import torch

from benchmarks import many, own_edge, plain, rows, table
from benchmarks.counters import flops
from benchmarks.measure import Bench, line
from benchmarks.rows import ROWS
from benchmarks.scale import SERIES
from fatbench import models
from fatbench.engine import local as local_module
from fatbench.engine import randomness as rng
from fatbench.engine.cohort import train_cohort
from fatbench.engine.local import LocalTraining
from fatbench.engine.rounds import Problem
from fatbench.methods import evasion, objectives
from fatbench.suite import calls, files

PGD = {"eps": 8 / 255, "step": 4 / 255, "steps": 2}


def problem(model: str = "nin", **settings: object) -> Problem:
    with rng.forked(0, "model"):
        network = models.MODELS[model]((3, 8, 8), 10, **(settings or {"width": 6}))
    images = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8, generator=rng.generator(0, "images"))
    shards = [torch.arange(12), torch.arange(12, 20)]
    return Problem(network, images, torch.arange(20) % 10, shards, 10, 0, torch.device("cpu"), "fp32", "reference")


# --- the other side -----------------------------------------------------------------------------------------------


def test_the_plain_loop_does_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, two clients, two epochs, momentum, dropout: the weights are those of `train_cohort` to rounding."""
    pixels, to_tensor = local_module.pixels, plain.images.to_tensor
    monkeypatch.setattr(local_module, "pixels", lambda problem, images: pixels(problem, images).double())
    monkeypatch.setattr(plain.images, "to_tensor", lambda image: to_tensor(image).double())
    on = problem()
    on.model.double()
    start = {name: value.clone() for name, value in on.model.state_dict().items()}
    at = functools.partial(objectives.at, attack=functools.partial(evasion.pgd, **PGD))
    local = LocalTraining(epochs=2, batch=8, lr=0.1, momentum=0.9, weight_decay=1e-3, objective=at)
    theirs = plain.train(on, start, [1, 0], local, lambda noise: plain.pgd(noise, **PGD))
    ours = train_cohort(on, start, [1, 0], 0, local)
    for a, b in zip(theirs, ours, strict=True):
        for name, value in a.items():
            torch.testing.assert_close(value, b.model[name], rtol=1e-9, atol=1e-12)


def test_the_margin_loop_is_our_cw() -> None:
    """The same start and the same steps."""
    on = problem("small_cnn")
    on.model.eval()
    x, y = on.images / 255, on.labels
    with torch.random.fork_rng():
        torch.manual_seed(3)
        theirs = plain.margin_pgd(on.model, **PGD)(x, y)
    ours = evasion.cw(on.model, x, y, torch.Generator().manual_seed(3), **PGD)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


# --- what `plan` counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["standard", "at", "trades", "mart", "mixed_at"])
@pytest.mark.parametrize("model", ["nin", "resnet18", "vit"])
def test_passes_are_those_that_torch_counts(model: str, objective: str) -> None:
    """Operations of an objective with its gradient: its docstring's passes times what one pass of each kind costs.

    An attack goes back to the image alone, training to the weights alone; both are counted by themselves.
    """
    on = problem(model, **({"patch": 4, "dim": 16, "depth": 2, "heads": 2} if model == "vit" else {}))
    x, y, network = on.images[:4] / 255, on.labels[:4], on.model
    weights = list(network.parameters())
    attack = calls.check("Attack", {"name": "pgd_kl" if objective == "trades" else "pgd", **PGD})
    call = {"name": objective} if objective == "standard" else {"name": objective, "attack": attack}
    node = calls.check("Objective", call)
    forward = flops(lambda: network(x))
    seen = x.clone().requires_grad_()
    to_image = flops(lambda: torch.autograd.grad(network(seen).sum(), seen)) - forward
    to_weights = flops(lambda: torch.autograd.grad(network(x).sum(), weights)) - forward
    forwards, backwards = members.passes("Objective", node)
    of_attack = backwards - members.passes("Objective", {**node, "attack": None})[1] if "attack" in node else 0
    function = calls.build("Objective", node)

    def step() -> None:
        loss, _ = function(network, x, y, torch.Generator().manual_seed(0))
        torch.autograd.grad(loss, weights)

    assert flops(step) == forwards * forward + of_attack * to_image + (backwards - of_attack) * to_weights


# --- how it measures and what it says -----------------------------------------------------------------------------


def test_the_table_says_what_is_met_and_what_was_not_measured(tmp_path: Path) -> None:
    where = {
        "device": "cpu (X)", "cores": 2, "threads": 1, "versions": {"torch": "2", "python": "3"}, "dirty": True,
        "commit": "abc", "date": "2026-01-01T00:00",
    }  # fmt: skip
    lines = [
        line("a round", "a loop", {"cpu": 1.9, "cuda": 10.0}, [2.5, 1.5, 2.0], note="as it is"),
        line("memory", "-", {"cpu": 100.0}, [150.0], "MB"),
        line("another", "a loop", {}, [1.25]),
    ]
    table.save(tmp_path, "cpu", {"row": "one", "lines": lines, "quick": True, "seconds": 1.0, "where": where,
                                 "clock": "CPU time"})  # fmt: skip
    text = table.write(tmp_path, "cpu", ["one", "never run"])
    assert text.splitlines()[2:6] == [
        "| a round | a loop | >= 1.9x on 2 CPU cores | 2x (1.5 to 2.5) | yes |",
        "| a round | a loop | >= 10x on one H200-class GPU | not measured: no GPU | - |",
        "| memory | - | <= 100 MB on 2 CPU cores | 150 MB | no |",
        "| another | a loop | - | 1.25x | - |",
    ]
    assert "--quick" in text and "- a round: as it is" in text
    where = "cpu (X), 2 cores, 1 thread of torch 2, Python 3"
    assert f"{where}, commit abc with changes, 2026-01-01, CPU time: one\n" in text
    assert (tmp_path / "bench-cpu.md").read_text() == text
    assert list(json.loads((tmp_path / "bench-cpu.json").read_text())) == ["one"]


@pytest.mark.nightly
def test_a_database_of_many_cells_is_reported(tmp_path: Path) -> None:
    """40 cells, 20 points with two seeds each: two columns of means, every one 0.5."""
    file, db = many.database(tmp_path, 10, 2, 2)
    assert len(files.load(str(file)).plan("paper").unique()) == 40
    command = [sys.executable, "-m", "fatbench", "report", str(file), "--db", db, "--format", "csv"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count(",last,0.5,0,0;1,2,100,") == 40


def test_the_first_component_of_a_linear_map_is_the_image() -> None:
    """h = w x + b of one colour: up to the sign and an affine map, which correlation does not see."""
    x = torch.rand(5, 1, 6, 6, generator=rng.generator(0, "images"))
    w, b = torch.tensor([0.5, -2.0, 1.0]).view(1, 3, 1, 1), torch.tensor([3.0, 0.0, -1.0]).view(1, 3, 1, 1)
    found = own_edge.component(w * x + b)
    along = torch.corrcoef(torch.stack([found[:, 0].flatten(), x.flatten()]))[0, 1]
    assert abs(float(along)) == pytest.approx(1, abs=1e-5)
    assert (float(found[:, 0].mean()), float(found[:, 0].std())) == pytest.approx((0.5, 0.2), abs=1e-5)


def test_what_a_server_sees_with_an_edge_of_its_own_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients of eight images of noise, one round: the features of all clients are read, each image once."""
    for name, value in (("CLIENTS", 2), ("IMAGES", 8), ("TARGETS", 4), ("ROUNDS", (1,)), ("STEPS", 2)):
        monkeypatch.setattr(own_edge, name, value)
    images = torch.randint(0, 256, (3016, 3, 8, 8), dtype=torch.uint8, generator=rng.generator(0, "images"))
    found = own_edge.measure(images, torch.arange(3016) % 10)
    assert found["rounds"].keys() == {"1"} and found["rounds"]["1"].keys() == {"component", "initial", "own edge"}
    assert all(len(hits) == 2 and 0 <= hit <= 4 for hits in found["rounds"]["1"].values() for hit in hits)


@pytest.mark.nightly
def test_a_cell_of_the_memory_rows_and_series_trains(tmp_path: Path) -> None:
    """Two clients of one image at 8x8, in a process of its own as the rows have it."""
    found = rows.cell(Bench(torch.device("cpu"), True, tmp_path), 2, 2, each=1, side=8)
    assert found["megabytes"] > 0 and found["seconds"] > 0


@pytest.mark.nightly
def test_every_row_and_series_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "-o", str(tmp_path), "--device", "cpu"]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
    measured = json.loads((tmp_path / "bench-cpu.json").read_text())
    assert measured.keys() == {*ROWS, *SERIES} - rows.BY_HAND
