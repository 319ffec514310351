"""Optimizers against torch.optim, and their memory as tensors."""

from __future__ import annotations

import pytest
import torch

from fatbench.engine.optimizers import OPTIMIZERS, Descent, ServerTraining, packed, step, unpacked

THEIRS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
NAMES = ["a", "b.c"]


def start() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(3, 2, generator=g), torch.randn(4, generator=g)]


def gradient(weights: list[torch.Tensor], t: int) -> list[torch.Tensor]:
    return [torch.sin(w * (t + 1)) + w for w in weights]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torch(name: str, weight_decay: float) -> None:
    ours, theirs = start(), [w.requires_grad_() for w in start()]
    how = Descent(name, lr=0.05, momentum=0.9, weight_decay=weight_decay)
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = THEIRS[name](theirs, lr=0.05, weight_decay=weight_decay, **momentum)
    memory: dict = {}
    for t in range(6):
        memory = step(ours, gradient(ours, t), memory, how)
        for w, g in zip(theirs, gradient([w.detach() for w in theirs], t), strict=True):
            w.grad = g
        optimizer.step()
        torch.testing.assert_close(ours, [w.detach() for w in theirs], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_from_packed_memory_bit_for_bit(name: str) -> None:
    """Six steps, and two times three with everything but the weights taken from named tensors in between."""
    how = Descent(name, lr=0.05, momentum=0.9, weight_decay=0.1)
    straight, stopped = start(), start()
    memory: dict = {}
    for t in range(6):
        memory = step(straight, gradient(straight, t), memory, how)
    memory = {}
    for t in range(6):
        memory = step(stopped, gradient(stopped, t), memory, how)
        if t == 2:
            memory = unpacked(packed(memory, NAMES), NAMES)
    assert all(torch.equal(a, b) for a, b in zip(straight, stopped, strict=True))


def test_packed_memory_is_a_copy_with_names() -> None:
    weights = start()
    memory = step(weights, gradient(weights, 0), {}, Descent("adam", lr=0.1))
    tensors = packed(memory, NAMES)
    assert set(tensors) == {"steps", "first", "second"}
    assert set(tensors["first"]) == set(tensors["second"]) == set(NAMES)
    kept = tensors["first"]["a"].clone()
    step(weights, gradient(weights, 1), memory, Descent("adam", lr=0.1))
    assert torch.equal(tensors["first"]["a"], kept)
    assert unpacked({}, NAMES) == {}


def test_sgd_without_momentum_is_the_gradient() -> None:
    w = torch.tensor([1.0, -2.0])
    step([w], [torch.tensor([0.5, 0.5])], {}, Descent("sgd", lr=0.2))
    torch.testing.assert_close(w, torch.tensor([0.9, -2.1]))


def test_a_server_s_rate_falls_once_a_round() -> None:
    """0.8 at first, 0.8 * 0.5^3 in the fourth round."""
    server = ServerTraining(epochs=1, lr=0.8, lr_decay=0.5, optimizer="sgd")
    assert [server.descent(t).lr for t in (0, 3)] == [0.8, pytest.approx(0.1)]
