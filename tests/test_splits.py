"""Splits: what a partition may return, what is said of images that are dealt twice, how many a fraction is."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small import small
from torch import nn

import fatbench
from fatbench.engine.cohort import draw_cohort
from fatbench.engine.splits import split
from fatbench.errors import SpecError
from fatbench.methods.adversaries import badnets
from fatbench.methods.defences import DEFENCES, Upload
from fatbench.methods.objectives import OBJECTIVES
from fatbench.report.numbers import doubts
from fatbench.suite import facts
from fatbench.suite.cost import epochs_in_round
from fatbench.suite.types import rounded_down
from fatbench.testing import small_problem


def of(shards: Any, n: int = 12, **settings: Any) -> Any:
    """The split of n images whose partition returns `shards`."""
    dataset: Any = SimpleNamespace(train_labels=np.arange(n) % 4, writers=None)
    return split(dataset, 0, lambda labels, rng, writers: shards, **settings)


# --- what a partition returns -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([[0, 1], [2, -1]], "client 1: index -1 is none of the 12 training examples, 0 to 11"),
        ([[0, 1], [2, -12]], "client 1: index -12 is none of the 12 training"),
        ([[0, 12], [1]], "client 0: index 12 is none of the 12 training"),
        ([[0, 100034]], "client 0: index 100034 is none of the 12 training"),
        ([np.array([0, 2**63], dtype=np.uint64)], "client 0: index 9223372036854775808 is none of the 12 training"),
        ([[0.5, 1.0]], "client 0: index 0.5 is none of the 12 training"),
        ([[0.0, np.nan]], "client 0: index nan is none of the 12 training"),
        ([[0.0, np.inf]], "client 0: index inf is none of the 12 training"),
        ([np.arange(12) < 6], "client 0: expected a list of indices, got bool (12,)"),
        ([["0", "1"]], "client 0: expected a list of indices, got <U1 (2,)"),
        ([[[0, 1], [2, 3]]], "client 0: expected a list of indices, got int64 (2, 2)"),
        ([[[0, 1], [2]]], "client 0: expected a list of indices, got a list of lists"),
        ([0, 1], "client 0: expected a list of indices, got int64 ()"),
        ({0: [1], 1: [2]}, "expected a list with the indices of each client, got a dict"),
        (None, "expected a list with the indices of each client, got a NoneType"),
        ([], "there is no client"),
    ],
)
def test_indices_that_are_none_are_the_partitions_fault(shards: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"partition: {message}")):
        of(shards)


@pytest.mark.parametrize(
    "shards",
    [
        [[0, 1], [5, 11]],
        [np.array([0.0, 1.0]), np.array([5.0, 11.0])],
        [torch.tensor([0, 1]), torch.tensor([5, 11])],
        ((0, 1), (5, 11)),
        np.array([[0, 1], [5, 11]], dtype=np.uint8),
        (shard for shard in ([0, 1], [5, 11])),
    ],
)
def test_lists_tensors_and_whole_floats_are_taken(shards: Any) -> None:
    found = of(shards)
    assert [shard.tolist() for shard in found.shards] == [[0, 1], [5, 11]]
    assert {shard.dtype for shard in found.shards} == {np.dtype("int64")} and found.doubts == {}


def test_an_index_counts_from_the_first_image_that_clients_have() -> None:
    """Of 12 images 3 are held out and 2 skipped: a partition deals 7, and 7 is none of them."""
    assert len(of([[6]], validation=3, train_from=2).train) == 7
    with pytest.raises(ValueError, match="index 7 is none of the 7 training examples, 0 to 6"):
        of([[7]], validation=3, train_from=2)


PLUGIN = """
def mine(labels, rng, writers, *, clients):
    return SHARDS


PARTITIONS = {"mine": mine}
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_plugins: None) -> Any:
    """A function that runs a cell of three clients whose partition is this."""
    monkeypatch.chdir(tmp_path)

    def run(shards: str) -> Any:
        Path("mine.py").write_text(PLUGIN.replace("SHARDS", shards))
        partition = "{name: mine, clients: 3}"
        Path("wrong.yaml").write_text(small(plugins="[mine.py]", seeds="[0]", partition=partition, model="linear"))
        return fatbench.run("wrong.yaml", jobs=1, device="cpu", quiet=True)

    return run


def test_a_run_is_refused_before_it_starts(suite: Any) -> None:
    with pytest.raises(SpecError, match="partition: client 2: index -1 is none of the 60 training examples"):
        suite("[[0], [1, 2], [3, -1]]")
    assert not Path("fatbench.db").exists() or fatbench.results("wrong.yaml", stage=None).empty


def test_images_that_are_dealt_twice_are_said(suite: Any, forks: None) -> None:
    """Client 1 is a copy of client 0, with five images twice."""
    done = suite("[range(20), [*range(20), *range(5)], range(20, 60)]")
    assert done["status"].tolist() == ["done"], done
    table = fatbench.table("wrong.yaml")
    said = {reason for row in table.grids[0].rows for value in row.values[0] for reason in value.doubts}
    assert {"5 training images are dealt to a client twice", "20 training images are dealt to several clients"} <= said


def test_each_image_that_is_dealt_twice_counts_once() -> None:
    assert of([[0, 0, 0, 1, 1], [2, 3]]).doubts == {"training images are dealt to a client twice": 2}
    assert of([[0, 1], [1, 2], [1, 3]]).doubts == {"training images are dealt to several clients": 1}
    held = of([[0, 0], [1, 2]], client_holdout=0.5)  # the same image is trained on and held out
    assert held.doubts == {"training images are dealt to a client twice": 1}
    for code in of([[0, 0], [0, 1]]).doubts:
        assert doubts.Doubt(code.replace(" ", "_"), 7.0).words == f"7 {code}"


# --- how many a fraction is ---------------------------------------------------------------------------------------


def test_a_fraction_of_a_number_is_a_whole_number_where_decimals_say_so() -> None:
    """0.29 * 100 is 28.999999999999996 in floating point; of a hundred, 7 of 100 hundredths round below."""
    assert [rounded_down(k / 100 * 100) for k in range(101)] == list(range(101))
    assert int(0.29 * 100) == 28 and int(0.57 * 100) == 56 and int(0.58 * 100) == 57
    for n in (1, 3, 7, 1000, 65_536, 10**8, 10**9):
        assert [rounded_down(float(f"0.{k:02d}") * n) for k in range(100)] == [k * n // 100 for k in range(100)]
    assert rounded_down(1 / 3 * 3) == 1 and rounded_down(0.2999 * 10) == 2 and rounded_down(1e-8) == 0


@pytest.mark.parametrize(("fraction", "right"), [(0.29, 29), (0.57, 57), (0.58, 58), (0.289, 28), (0.0, 0)])
def test_every_fraction_of_a_hundred_is_rounded_alike(fraction: float, right: int) -> None:
    """Held-out examples, cohorts, pruned entries and columns, patched and attacked images."""
    hundred = torch.arange(1.0, 101.0)
    assert len(of([np.arange(100)], 100, client_holdout=fraction).held[0]) == right
    assert int((DEFENCES["pruning"]({"w": hundred}, Upload(0, 0, 0, 0), fraction=fraction)[0]["w"] == 0).sum()) == right
    images, labels = torch.zeros(100, 1, 2, 2, dtype=torch.uint8), torch.zeros(100, dtype=torch.int64)
    draws = torch.Generator().manual_seed(0)
    assert int(badnets(images, labels, draws, target=1, fraction=fraction, size=1)[1].sum()) == right
    spec = {"partition": {"clients": 100}, "algorithm": {"participation": fraction}}
    on = small_problem(clients=100, images_per_client=1)
    assert len(draw_cohort(on, 0, fraction)) == facts.cohort(spec) == max(right, 1)


def test_soterias_columns_are_rounded_alike() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 100), nn.Linear(100, 3))
    x, y = torch.rand(2, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1])
    weights = dict(network.named_parameters())
    part = {name: torch.ones_like(value) for name, value in weights.items()}
    examples: Any = SimpleNamespace(model=network, weights={k: v.detach() for k, v in weights.items()}, x=x, y=y)
    sent, _ = DEFENCES["soteria"](part, Upload(0, 0, 0, 0), examples, fraction=0.29)
    assert int((sent["2.weight"] == 0).all(0).sum()) == 29


@pytest.mark.parametrize("name", ["mixed_at", "mixfat"])
def test_attacked_images_are_rounded_alike(name: str) -> None:
    seen: list[int] = []

    def attack(model: nn.Module, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        seen.append(len(x))
        return x

    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    settings = {"mix": "append"} if name == "mixfat" else {}
    x, y = torch.rand(100, 1, 2, 2), torch.zeros(100, dtype=torch.int64)
    OBJECTIVES[name](model, x, y, torch.Generator(), attack=attack, ratio=0.29, **settings)
    assert seen == [29]


def test_epochs_and_the_last_batch_are_rounded_alike() -> None:
    assert [epochs_in_round(100, 0.29, 1, t) for t in (0, 1)] == [100, 29]
    spec = {
        "partition": {"name": "iid", "clients": 1}, "client_holdout": 0.29,
        "algorithm": {"local": {"batch": 70}}, "data": "digits",
    }  # fmt: skip
    assert facts.last_batch(spec, 100) == 1  # 71 are left, and one is in the last batch
