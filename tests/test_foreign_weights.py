"""Weights and modules of others: read as they are named, or one sentence on what they are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import fatbench
from fatbench.models import pretrained


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
