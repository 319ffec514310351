"""A round of local training on a path, for the tests of `run.path`: small networks, clients of unequal size."""

from __future__ import annotations

import functools
from collections.abc import Callable

import members
import torch
from torch import Tensor, nn

from fatbench import models
from fatbench.engine import randomness as rng
from fatbench.engine.cohort import train_cohort
from fatbench.engine.local import LocalTraining
from fatbench.engine.rounds import Problem, Update
from fatbench.methods import evasion, objectives

SHARDS = (7, 6, 3, 7, 4)  # in batches of 4: 4 and 3, 4 and 2, 3, 4 and 3, 4
SIZES = {"leaf_cnn": (3, 32, 32), "efficientnet_lite0": (3, 64, 64)}
TINY = {"patch": 4, "dim": 16, "depth": 1, "heads": 2, "head": "cls_vis", "d1": 6, "d2": 5}
SETTINGS = {
    "nin": {"width": 6, "init": "he"},
    "leaf_cnn": {},
    "efficientnet_lite0": {},
    "vit": TINY,
    "tnt": {**TINY, "inner": 8},
    "t2t": {**TINY, "token_dim": 8},
    "whole_vit": {"width": 4, "dim": 16, "depth": 1, "heads": 2},
    "whole_edge": {"width": 4},
    "whole_resnet": {"width": 4, "planes": 4, "blocks": 1},
    "linear": {},
    "constant": {},
}
TRAINED_WHOLE = [model for model in models.MODELS if not model.startswith("edge_")]  # those are FedGKT's and FedVKD's


def objective(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """A registered objective with an attack of two steps."""
    inner = {"eps": 8 / 255, "step": 4 / 255, "steps": 2}
    if name == "trades":
        return functools.partial(objectives.trades, attack=functools.partial(evasion.pgd_kl, **inner))
    attack = functools.partial(evasion.pgd, **inner, start="gaussian" if name == "mart" else "uniform")
    return members.member("Objective", name, attack=attack)


def network(model: str, seed: int = 3) -> nn.Module:
    with rng.forked(seed, "model"):
        return models.MODELS[model](SIZES.get(model, (3, 8, 8)), 10, **SETTINGS.get(model, {"width": 4}))


def problem(model: str | nn.Module, path: str, shards: tuple[int, ...] = SHARDS, seed: int = 3) -> Problem:
    shape = SIZES.get(model, (3, 8, 8)) if isinstance(model, str) else (3, 8, 8)
    n = sum(shards)
    images = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=rng.generator(seed, "images"))
    labels = torch.randint(0, 10, (n,), generator=rng.generator(seed, "labels"))
    parts = list(torch.randperm(n, generator=rng.generator(seed, "deal")).split(shards))
    on = network(model, seed) if isinstance(model, str) else model
    return Problem(on, images, labels, parts, 10, seed, torch.device("cpu"), "fp32", path)


def local(name: str = "at", **changes: object) -> LocalTraining:
    settings = {"epochs": 1, "batch": 4, "lr": 0.02, "momentum": 0.9, "weight_decay": 1e-3, "clip": None}
    return LocalTraining(**{**settings, **changes}, objective=objective(name))


def train(
    on: Problem, how: LocalTraining, cohort: tuple[int, ...] = (3, 1, 0, 2, 4), **settings: object
) -> list[Update]:
    start = {name: value.clone() for name, value in on.model.state_dict().items()}
    return train_cohort(on, start, list(cohort), 1, how, **settings)
