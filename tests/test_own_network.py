"""A plug-in's network is loaded only by code that gives the network which was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from crew import forget_plugins
from small import small

import fatbench
from fatbench.errors import MachineError
from fatbench.runner import own_network, zoo
from fatbench.runner.checkpoints import load_model, save_model
from fatbench.runner.evaluate_checkpoint import checkpoint
from fatbench.runner.jobs import Machine
from fatbench.runner.run_options import RunOptions
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store import jsonl
from fatbench.store.stages import Store
from fatbench.suite import external_models, files, plugins

NATURAL = external_models.evaluations([], "8/255", 10, 10)
MODEL = """from torch import nn

def mine(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, classes))

MODELS = {"mine": mine}
"""


@pytest.fixture
def file(tmp_path, monkeypatch, forks):
    """The model file of a cell, in the working folder of its plug-in and its exported results."""
    monkeypatch.chdir(tmp_path)
    forget_plugins()
    Path("mine.py").write_text(MODEL)
    Path("mine.yaml").write_text(small(plugins="[mine.py]", model="mine"))
    with Store.open("r.db", create=True) as store:
        (job,) = jobs_of(files.load("mine.yaml").plan())
        machine = Machine(str(tmp_path / "r.db"), str(tmp_path / "files"), str(tmp_path))
        assert work(job, machine, store) == "done"
        jsonl.export(store, "mine.jsonl")
    yield tmp_path / "files" / job.cell / "model-000001.safetensors"
    forget_plugins()


def loaded(file: Path) -> torch.nn.Module:
    return fatbench.load_model("mine", results=["mine.jsonl"], places=[file.parent], plugins=["mine.py"])


def test_code_that_gives_another_network_is_refused(file):
    assert not loaded(file).training
    Path("mine.py").write_text(MODEL.replace("ReLU", "Tanh"))
    words = r"mine of mine\.py \(sha256 \w+\) is not the network that was trained"
    with pytest.raises(MachineError, match=words + r" \(mine\.py \(sha256 \w+\)\): the same weights give another"):
        loaded(file)
    with pytest.raises(MachineError, match=words):
        checkpoint(file, NATURAL, RunOptions(device="cpu"))


def test_another_text_of_the_same_network_is_not(file):
    Path("mine.py").write_text(MODEL.replace("nn.ReLU()", "nn.Threshold(0.0, 0.0)"))
    assert loaded(file)(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    assert checkpoint(file, NATURAL, RunOptions(device="cpu"))[0]["n"] == 10


def test_of_a_file_without_answers_the_stored_version_decides(file):
    state, own, header = load_model(file, "cpu")
    del header["answers"]
    older = file.parent / "older.safetensors"
    digest = save_model(older, state, own, **header)
    (network,) = zoo.entries([Path("mine.jsonl")])
    assert zoo.module(older, digest, network.trained_with)
    Path("mine.py").write_text(MODEL.replace("ReLU", "Tanh"))
    plugins.load([Path("mine.py")])
    assert zoo.module(older, digest)  # nothing is known
    with pytest.raises(MachineError, match="is not the network that was trained"):
        zoo.module(older, digest, network.trained_with)


def test_fatbench_s_own_networks_have_no_answers_in_their_files():
    assert own_network.in_header({"model": {"name": "mlp", "width": 2}}, None, {}) == {}
