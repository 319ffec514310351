"""What a network answers: alike within rounding, and otherwise where forward or backward is another."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from fatbench.engine.answers import answers
from fatbench.store.fingerprints import same_answers


@pytest.fixture(scope="module")
def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(8, 3, 16, 16, generator=generator), torch.randint(10, (8,), generator=generator)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))


class Masked(torch.autograd.Function):
    """The identity, whose gradient is that of its negative."""

    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Around(nn.Module):
    """A network between two functions; its state is that of the network."""

    def __init__(self, before=lambda x: x, after=lambda x: x):
        super().__init__()
        self.network, self.before, self.after = network(), before, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.network(self.before(x)))


def test_a_network_and_its_copy_answer_alike_and_are_left_as_they_were(images) -> None:
    model = network().train()
    before = torch.get_rng_state()
    first, second = answers(model, *images), answers(copy.deepcopy(model).double().float(), *images)
    assert same_answers(first, json.loads(json.dumps(second)))
    assert model.training and model[2].training and torch.equal(torch.get_rng_state(), before)
    assert len(first["logits"]) == len(first["signs"]) == 8


def test_rounding_is_no_other_network(images) -> None:
    model = network()
    exact = answers(copy.deepcopy(model).double(), images[0].double(), images[1])
    assert exact != answers(model, *images)
    assert same_answers(exact, answers(model, *images))


@pytest.mark.parametrize(
    "other",
    [
        lambda: network(1),
        lambda: Around(before=lambda x: (x - 0.01) / 1.01),
        lambda: Around(after=lambda logits: -logits),
        lambda: Around(after=lambda logits: logits.roll(1, dims=1)),
        lambda: Around(before=Masked.apply),
        lambda: Around(before=lambda x: x.detach()),
        lambda: Around(after=lambda logits: logits / 0),
        lambda: Around(after=lambda logits: nn.functional.pad(logits, (0, 1))),
    ],
    ids=["weights", "normalised", "negated", "order", "gradient", "no gradient", "not finite", "classes"],
)
def test_another_network_answers_otherwise(images, other) -> None:
    assert not same_answers(answers(Around(), *images), answers(other(), *images))


def test_a_network_that_rounds_its_input_is_another_beside_clean_images(images) -> None:
    clean = (images[0] * 16).round() / 16, images[1]

    def rounding(levels: int) -> Around:
        return Around(before=lambda x: x + ((x * levels).round() / levels - x).detach())

    assert torch.equal(rounding(16).eval()(clean[0]), rounding(32).eval()(clean[0]))
    assert not same_answers(answers(rounding(16).eval(), *clean), answers(rounding(32).eval(), *clean))


def test_draws_of_the_global_generator_are_the_same_each_time(images) -> None:
    noisy = Around(after=lambda logits: logits + torch.randn_like(logits))
    assert same_answers(answers(noisy, *images), answers(noisy, *images))


def test_of_a_network_with_draws_of_its_own_nothing_is_known(images) -> None:
    own = torch.Generator().manual_seed(0)
    noisy = Around(after=lambda logits: logits + torch.randn(logits.shape, generator=own))
    assert answers(noisy, *images) == {"random": True}
    assert same_answers({"random": True}, {"random": True})
    assert not same_answers({"random": True}, answers(Around(), *images))


def test_what_either_side_lacks_says_nothing(images) -> None:
    known = answers(network(), *images)
    assert same_answers({}, known) and same_answers(known, {})
    assert same_answers({"logits": known["logits"]}, known)
    assert not same_answers({"signs": []}, known)


def test_many_classes_are_kept_in_few_numbers(images) -> None:
    def wide(change: float) -> dict:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 1000))
        with torch.no_grad():
            model[1].bias[999] += change
        return answers(model, *images)

    assert len(json.dumps(wide(0.0))) < 20_000
    assert not same_answers(wide(0.0), wide(5.0))
