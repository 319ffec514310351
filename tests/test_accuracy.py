"""Accuracy under attack: which model is judged, on which images, and what is made of the bits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fatbench.engine import accuracy, randomness
from fatbench.engine.accuracy import prior_accuracy
from fatbench.engine.rounds import Problem, Tensors
from fatbench.suite.types import Attack

# --- one model, five images of a pixel ----------------------------------------------------------------------------


class Threshold(nn.Module):
    """Logits (0, scale * (v - 1/2)) of a pixel v: white is class 1. While it is trained, all is the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor) -> Tensor:
        logit = self.scale * (x.flatten(1).mean(1) - 0.5) * (-1 if self.training else 1)
        return torch.stack([torch.zeros_like(logit), logit], 1)

    def edge_logits(self, x: Tensor) -> Tensor:
        """Of the small device: it takes black for class 1."""
        return -self(x)


IMAGES = torch.tensor([0, 255, 255, 0, 255], dtype=torch.uint8).reshape(5, 1, 1, 1)
LABELS = torch.tensor([0, 1, 0, 1, 1])  # three of five as the colours say
STATE = {"scale": torch.tensor(10.0)}
WRONG, RIGHT = 5 + math.log1p(math.exp(-5)), math.log1p(math.exp(-5))  # cross-entropy of logits 0 and 5, or -5


def on(network: type[nn.Module] = Threshold) -> Problem:
    model = network()
    assert model.training  # what is judged has to be put into eval mode
    return Problem(model, IMAGES, LABELS, [], 2, 3, torch.device("cpu"), path="reference")


def negative(seen: list[tuple[bool, float, Tensor, Tensor, int]]) -> Callable[..., Tensor]:
    """An attack that turns black into white, and notes the model that it was given and all else."""

    def attack(model: Threshold, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        seen.append((model.training, model.scale.item(), x, y, generator.initial_seed()))
        return 1 - x

    return attack


def test_an_attack_may_ask_which_images_it_holds() -> None:
    """Through a wrapper too: three chunks of two, from the third image on; the pixel becomes what a file has for it."""
    held = torch.tensor([0.9, 0.8, 0.1, 0.2, 0.7])

    def from_a_file(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, index: Tensor) -> Tensor:
        return held[index].view(-1, 1, 1, 1)

    def twice(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, attack: Attack) -> Tensor:
        return attack(model, attack(model, x, y, generator), y, generator)

    for attack in (from_a_file, functools.partial(twice, attack=from_a_file)):
        chunks = accuracy.attack_in_chunks(on(), STATE, IMAGES, LABELS, attack, ("x",), batch=2, start=2)
        assert torch.cat([chunk.correct for chunk in chunks]).tolist() == [True, False, True]  # black, black, white


class Dual(nn.Module):
    """A threshold that has two modes, as a dual batch normalisation has; `eval` goes back to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.attacked = False

    def train(self, mode: bool = True) -> Dual:
        self.attacked = False
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        logit = self.scale * (x.flatten(1).mean(1) - 0.5) * (-1 if self.attacked else 1)
        return torch.stack([torch.zeros_like(logit), logit], 1)


def test_what_a_dual_network_predicts_with_is_chosen_by_the_evaluation() -> None:
    """One trained model: an attack that leaves it in the other mode is judged in that, whatever came before."""

    def in_mode(model: Dual, x: Tensor, y: Tensor, generator: torch.Generator, *, attacked: bool) -> Tensor:
        model.attacked = attacked
        return x

    problem = on(Dual)
    clean, other = (functools.partial(in_mode, attacked=mode) for mode in (False, True))
    found = [
        accuracy.accuracy(problem, STATE, IMAGES, LABELS, attack, ("x",))[0].sum().item()
        for attack in (accuracy.natural, other, accuracy.natural, clean)
    ]
    assert found == [3, 2, 3, 3]


def stream(first: int) -> int:
    return randomness.generator(3, "evaluate", "x", first).initial_seed()


def test_the_model_is_judged_in_eval_mode_on_what_the_attack_made_of_the_images() -> None:
    """In chunks of two: colours inverted, so what was right is wrong. A later start gives the same later chunks."""
    seen: list[tuple[bool, float, Tensor, Tensor, int]] = []
    chunks = list(accuracy.attack_in_chunks(on(), STATE, IMAGES, LABELS, negative(seen), ("evaluate", "x"), batch=2))
    found = [(chunk.first, chunk.correct.tolist()) for chunk in chunks]
    assert found == [(0, [False] * 2), (2, [True] * 2), (4, [False])]
    losses = torch.cat([chunk.losses for chunk in chunks])
    assert losses.dtype == torch.float64
    assert losses.tolist() == pytest.approx([WRONG, WRONG, RIGHT, RIGHT, WRONG], rel=1e-6)
    assert {(training, scale) for training, scale, *_ in seen} == {(False, 10.0)}
    assert [(len(x), seed) for _, _, x, _, seed in seen] == [(2, stream(0)), (2, stream(2)), (1, stream(4))]
    assert torch.cat([x for _, _, x, _, _ in seen]).flatten().tolist() == [0, 1, 1, 0, 1]
    assert torch.equal(torch.cat([y for *_, y, _ in seen]), LABELS)
    given = (on(), STATE, IMAGES, LABELS, negative(seen), ("evaluate", "x"))
    later = accuracy.attack_in_chunks(*given, batch=2, start=2)
    assert [(chunk.first, chunk.correct.tolist()) for chunk in later] == [(2, [True] * 2), (4, [False])]
    assert [seed for *_, seed in seen[3:]] == [stream(2), stream(4)]


def test_an_attack_computed_on_another_model_is_judged_by_ours() -> None:
    seen: list[tuple[bool, float, Tensor, Tensor, int]] = []
    other = on(), {"scale": torch.tensor(7.0)}
    chunks = accuracy.attack_in_chunks(on(), STATE, IMAGES, LABELS, negative(seen), ("x",), batch=5, origin=other)
    assert [chunk.correct.tolist() for chunk in chunks] == [[False, False, True, True, False]]
    assert [(training, scale) for training, scale, *_ in seen] == [(False, 7.0)]


def test_accuracy_is_of_all_images_and_their_mean_loss() -> None:
    bits, loss = accuracy.accuracy(on(), STATE, IMAGES, LABELS, accuracy.natural, ("x",), batch=2)
    assert bits.tolist() == [True, True, False, False, True]
    assert loss == pytest.approx((3 * RIGHT + 2 * WRONG) / 5)
    seen: list[tuple[bool, float, Tensor, Tensor, int]] = []
    accuracy.accuracy(on(), STATE, IMAGES.repeat(101, 1, 1, 1), LABELS.repeat(101), negative(seen), ("x",))
    assert [len(x) for _, _, x, _, _ in seen] == [500, 5]  # another size would be other random numbers


@pytest.mark.parametrize("batch", [2, 500])
def test_the_small_device_has_an_accuracy_of_its_own(batch: int) -> None:
    assert accuracy.edge_accuracy(on(), STATE, IMAGES, LABELS, batch) == 2 / 5
    assert accuracy.edge_accuracy(on(), STATE, IMAGES, 1 - LABELS, batch) == 3 / 5


@pytest.mark.parametrize("batch", [2, 500])
def test_images_without_a_gradient_are_counted(batch: int) -> None:
    """Behind a ReLU the logits of black are all zero and stay so; two of five images are black."""

    class Dead(Threshold):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    assert accuracy.zero_gradients(on(Dead), STATE, IMAGES, LABELS, batch) == 2 / 5


def test_a_gradient_that_is_nan_is_none() -> None:
    """It moves no image: the branch that is not taken hands NaN back."""

    class Broken(Threshold):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            return torch.where(logits < 1e9, logits, logits * math.nan)

    assert accuracy.zero_gradients(on(Broken), STATE, IMAGES, LABELS) == 1


def test_a_gradient_that_is_nowhere_positive_is_one() -> None:
    """Two pixels, of which the logit reads the first: label 1 pulls it up, so the loss rises nowhere."""

    class First(Threshold):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[..., :1])

    images = IMAGES.expand(5, 1, 1, 2)
    assert accuracy.zero_gradients(on(First), STATE, images, torch.ones(5, dtype=torch.int64)) == 0


def test_what_the_most_frequent_label_gets_right() -> None:
    assert accuracy.most_frequent(torch.tensor([2, 0, 2, 1])).tolist() == [True, False, True, False]


def test_the_models_of_a_round() -> None:
    """By client, each with the tensors of its own in place of the global ones; without any, the one global model."""
    a, b, c = torch.tensor(1), torch.tensor(2), torch.tensor(3)
    model: Tensors = {"body": a, "head": a}
    assert accuracy.models_of(model, {}) == {-1: model}
    models = accuracy.models_of(model, {4: {"head": c}, 0: {"head": b}})
    assert [*models.items()] == [(0, {"body": a, "head": b}), (4, {"body": a, "head": c})]
    assert [accuracy.of_client(k) for k in (-1, 0, 4)] == [(), (0,), (4,)]


def test_bits_are_packed_eight_to_a_byte_the_first_highest() -> None:
    bits = torch.tensor([True, False, True, False, False, False, False, True, True])
    data = accuracy.packed(bits)
    assert data == bytes([0b10100001, 0b10000000])
    found = accuracy.unpacked(data, 9)
    assert found.dtype == bool and found.tolist() == bits.tolist()


# --- on the clients' own distributions ----------------------------------------------------------------------------


def test_a_clients_accuracy_follows_its_shares_of_the_classes() -> None:
    """Test images 0000000000 1111111111, 5 and 2 of them right: shares (0.9, 0.1) give 0.45 + 0.02 = 0.47.

    Shares (0, 1) give 0.2; a client without examples has no accuracy.
    """
    labels = torch.tensor([0] * 10 + [1] * 10)
    right = torch.tensor([True] * 5 + [False] * 5 + [True] * 2 + [False] * 8)
    held = [torch.tensor([0] * 9 + [1]), torch.tensor([1, 1]), torch.tensor([], dtype=torch.int64)]
    assert prior_accuracy({-1: right}, labels, held, 2) == pytest.approx({0: 0.47, 1: 0.2})


def test_a_client_with_a_model_of_its_own_is_judged_by_it() -> None:
    labels, held = torch.tensor([0, 1]), [torch.tensor([0]), torch.tensor([0]), torch.tensor([0])]
    right = {0: torch.tensor([True, False]), 2: torch.tensor([False, True])}
    assert prior_accuracy(right, labels, held, 2) == {0: 1.0, 2: 0.0}


def test_no_accuracy_is_made_up_for_a_class_without_test_images() -> None:
    right, labels = torch.tensor([True, True]), torch.tensor([0, 0])
    assert prior_accuracy({-1: right}, labels, [torch.tensor([0]), torch.tensor([1])], 3) == {}
    assert prior_accuracy({-1: right}, labels, [torch.tensor([0]), torch.tensor([0])], 3) == {0: 1.0, 1: 1.0}
    first = torch.tensor([True, False])  # of the last class none is right: (1 + 0) / 2
    assert prior_accuracy({-1: first}, torch.tensor([0, 1]), [torch.tensor([0, 1])], 2) == {0: 0.5}
