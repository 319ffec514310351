"""Splits: what a partition may return, and what is said of images that are dealt twice."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fatbench
from fatbench.engine.splits import split
from fatbench.errors import SpecError
from fatbench.report.numbers import doubts


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
        ([[0], []], "clients [1] have no training examples"),
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
SUITE = """
name: wrong
title: A partition of a plug-in
plugins: [mine.py]
seeds: [0]
base:
  data: digits
  train: 60
  test: 40
  partition: {name: mine, clients: 3}
  model: {name: linear}
  algorithm: {name: fedavg, rounds: 1, aggregator: samples, local: {batch: 20, lr: 0.1, objective: standard}}
axes: {method: {FedAvg: {}}}
evaluate: {attacks: {natural: natural, fgsm: {name: fgsm, eps: 0.1}}}
presets: {paper: {}}
tables:
  - {id: T, title: T, rows: [method], values: {Clean: natural, FGSM: fgsm}}
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_plugins: None) -> Any:
    """A function that runs a cell of three clients whose partition is this."""
    monkeypatch.chdir(tmp_path)

    def run(shards: str) -> Any:
        Path("mine.py").write_text(PLUGIN.replace("SHARDS", shards))
        Path("wrong.yaml").write_text(SUITE)
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


def test_from_python_the_same_is_refused(tmp_path: Path, own_plugins: None) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(PLUGIN.replace("SHARDS", "[[0], [len(labels)]]"))
    with pytest.raises(ValueError, match="client 1: index 4 is none of the 4 training examples, 0 to 3"):
        fatbench.partition([0, 1, 0, 1], "mine", clients=2, plugins=[plugin])
