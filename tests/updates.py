"""Updates of made-up clients, their problem and what an aggregator is told: for tests of aggregators and mixing."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor, nn

from fatbench.engine.rounds import Context, Problem, Stats, Tensors, Update

STATS = Stats(loss=1.0, loss_released=1.0, accuracy=0.5, steps=1, momentum_steps=1.0, batches=1)


def client(k: int, n: int = 1, loss: float = 1.0, model: Tensors | None = None, **stats: float) -> Update:
    """Client k with N_k = n and mean loss `loss`; the released loss is the same unless given."""
    numbers = {"loss": loss, "loss_released": loss, "broadcast_loss": loss, **stats}
    return Update(k, n, model or {"fc.weight": torch.tensor([float(k)])}, replace(STATS, **numbers))  # type: ignore[arg-type]


def problem(m: int = 3, model: nn.Module | None = None, sizes: list[int] | None = None, **changes: object) -> Problem:
    """m clients with an image each, or as many as `sizes` says; images of 2 x 2, three classes."""
    sizes = sizes or [1] * m
    images = torch.zeros(sum(sizes), 1, 2, 2, dtype=torch.uint8)
    shards = list(torch.arange(sum(sizes)).split(sizes))
    base = Problem(
        model or Net(), images, torch.zeros(len(images), dtype=torch.int64), shards, 3, 0, torch.device("cpu")
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def context(m: int = 3, on: Problem | None = None, **changes: object) -> Context:
    base = Context(
        round=1, rounds=11, problem=on or problem(m), broadcast={"fc.weight": torch.zeros(1)}, memory={}, lr=0.1
    )
    return replace(base, **changes)  # type: ignore[arg-type]


class Net(nn.Module):
    """One of everything: a convolution, BN found by the letters and BN not found by them, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.bn1 = nn.BatchNorm2d(2)
        self.batchnorm1_1 = nn.BatchNorm2d(2)
        self.fixed = nn.Parameter(torch.randn(3), requires_grad=False)
        self.fc = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 2, 2) -> (B, 3)."""
        return self.fc(self.batchnorm1_1(self.bn1(self.conv(x))).mean((2, 3)))


LIKE = Net().state_dict()


def seeded(seed: int) -> None:
    """`torch.manual_seed` also seeds each kind of device, and without one formats the call stack: 4 ms."""
    torch.default_generator.manual_seed(seed)


def cohort(m: int, seed: int = 0) -> list[Update]:
    """m clients with random models, sizes and losses, in random order."""
    draw = random.Random(seed)
    seeded(seed)
    fixed = torch.randn(3)
    updates = []
    for k in range(m):
        model = {key: torch.randn_like(v) if v.is_floating_point() else v for key, v in LIKE.items()}
        model["fixed"] = fixed
        for key in model:
            if key.endswith("running_var"):
                model[key] = model[key].abs() + 0.1
            if key.endswith("num_batches_tracked"):
                model[key] = torch.tensor(draw.randrange(1000))
        loss = draw.uniform(0.1, 3.0)
        updates.append(
            client(k, draw.randrange(1, 500), loss, model, loss_released=loss * draw.uniform(1, 30), batches=2)
        )
    draw.shuffle(updates)
    return updates


def frozen_net() -> Net:
    seeded(0)
    return Net()
