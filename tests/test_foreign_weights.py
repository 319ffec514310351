"""Weights and modules of others: read as they are named, or one sentence on what they are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fatbench
from fatbench.errors import SpecError
from fatbench.models import pretrained
from fatbench.runner import evaluate_external

NETWORK = """
from torch import nn

def make():
    net = nn.Sequential()
    net.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    net.head = nn.ModuleDict({"fc": nn.Linear(10, 10), "norm": nn.LayerNorm(10)})
    return net
"""


def state(fill: float) -> dict[str, torch.Tensor]:
    names = {"backbone.1.weight": (10, 64), "head.fc.weight": (10, 10), "head.norm.weight": (10,)}
    return {name: torch.full(shape, fill) for name, shape in names.items()}


def test_a_foreign_safetensors_keeps_its_names(tmp_path: Path) -> None:
    """Only a model file of ours, which says so, has names of ours that published weights have not."""
    foreign, ours = tmp_path / "foreign.safetensors", tmp_path / "ours.safetensors"
    save_file(state(1.0), foreign)
    save_file(state(1.0), ours, {"fatbench": "{}"})
    assert pretrained.from_file("evaluate", foreign).keys() == state(1.0).keys()
    assert pretrained.from_file("evaluate", ours).keys() == {"1.weight", "head.weight"}
    torch.save(state(1.0), tmp_path / "same.pt")
    assert pretrained.from_file("evaluate", tmp_path / "same.pt").keys() == state(1.0).keys()


@pytest.mark.parametrize(("network", "average"), [("state_dict", "state_dict_ema"), ("model", "model_ema")])
def test_of_a_network_and_its_average_the_network_is_read(tmp_path: Path, network: str, average: str) -> None:
    """Published weights of a backbone are the average; of a file with one state there is nothing to say."""
    (tmp_path / "net.py").write_text(NETWORK)
    file, make = tmp_path / "both.pth", f"{tmp_path}/net.py:make"
    torch.save({network: state(1.0), average: state(2.0), "epoch": 3}, file)
    read = evaluate_external.from_file(file, make)
    assert read.note == f"{file}: read '{network}', not '{average}' (entry of --model, in Python entry=)"
    chosen = evaluate_external.from_file(file, make, entry=average)
    assert [float(one.state["head.norm.weight"][0]) for one in (read, chosen)] == [1.0, 2.0]
    assert chosen.model.network == f"net.py:make, {average}" and read.model.sha256 == chosen.model.sha256
    assert float(pretrained.from_file("vit", file)["head.norm.weight"][0]) == 2.0
    with pytest.raises(SpecError, match=f"no entry 'ema2' .it has {network} .3 tensors., {average} "):
        evaluate_external.from_file(file, make, entry="ema2")
    torch.save({network: state(1.0)}, file)
    assert evaluate_external.from_file(file, make).note == ""


@pytest.mark.parametrize(
    "module", [nn.Linear(2, 2), nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))]
)
def test_a_torchscript_program_is_refused_in_our_own_words(tmp_path: Path, module: nn.Module) -> None:
    """torch's own advice is to set weights_only=False, which runs what is in the file."""
    file = tmp_path / "script.pt"
    scripted(module).save(str(file))  # the text of a longer program is compressed
    with pytest.raises(SpecError) as refused:
        pretrained.from_file("evaluate", file)
    said = str(refused.value)
    assert said == f"{file} holds a TorchScript program, not a state dict: torch.save(model.state_dict(), FILE)"


def scripted(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will do without
        return torch.jit.script(module)


def linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def accuracy(module: Any) -> list[float]:
    table = fatbench.evaluate(module, dataset="digits", attacks=["natural"], n=40, device="cpu")
    return [float(value) for value in table.frame()["mean"]]


def test_modules_whose_weights_a_hook_computes_have_their_numbers() -> None:
    plain, normed, spectral = linear(), linear(), linear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch keeps them for old code, which is what people have
        nn.utils.weight_norm(normed[1])
        nn.utils.spectral_norm(spectral[1])
    spectral(torch.rand(2, 1, 8, 8))
    assert accuracy(normed) == accuracy(plain)  # a norm and a direction of the same weights
    assert 0 <= accuracy(spectral)[0] <= 1
    before = normed[1].weight_g.clone()
    assert torch.equal(before, normed[1].weight_g)  # the module is left as it was
