"""Poisoned features: closed forms, what the server then learns from, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from members import refusal_of
from torch import Generator, Tensor

from fatbench.engine import randomness as rng
from fatbench.engine.local import LocalTraining
from fatbench.engine.malicious import Malicious
from fatbench.engine.optimizers import ServerTraining
from fatbench.engine.rounds import Problem, Round, State
from fatbench.methods.adversaries import ADVERSARIES
from fatbench.methods.algorithms.fedgkt import fedgkt
from fatbench.methods.feature_adversaries import feature_backdoor, feature_flip, feature_noise, feature_swap
from fatbench.methods.objectives import standard
from fatbench.models import MODELS

H, Z = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1), torch.eye(3)


def dice() -> Generator:
    return Generator().manual_seed(0)


def test_two_examples_of_two_classes_are_exchanged() -> None:
    y = torch.tensor([0, 1])
    features, answers, labels = feature_swap(H[:2], Z[:2], y, 3, dice())
    assert features.flatten().tolist() == [2, 1]
    assert torch.equal(answers, Z[:2]) and torch.equal(labels, y)
    _, answers, _ = feature_swap(H[:2], Z[:2], y, 3, dice(), answer="swapped")
    assert torch.equal(answers, Z[[1, 0]])


def test_the_next_class_is_the_next_that_the_client_has() -> None:
    features, _, _ = feature_swap(H, Z, torch.tensor([0, 5, 7]), 10, dice())
    assert features.flatten().tolist() == [2, 3, 1]
    features, _, _ = feature_swap(H, Z, torch.tensor([4, 4, 4]), 10, dice())
    assert torch.equal(features, H)


def test_swapped_features_with_swapped_answers_are_permuted_labels() -> None:
    """The server's loss over all rows is the same, up to their order."""
    y = torch.tensor([0, 1, 2])
    w = torch.rand(1, 3, generator=dice())

    def losses(features: Tensor, answers: Tensor, labels: Tensor) -> Tensor:
        z = features.flatten(1) @ w
        return torch.nn.functional.cross_entropy(z, labels, reduction="none") + (z - answers).square().sum(1)

    swapped = losses(*feature_swap(H, Z, y, 3, dice(), answer="swapped"))
    permuted = losses(H, Z, y.roll(1))
    assert torch.allclose(swapped.sort().values, permuted.sort().values)


def test_noise_and_flip_keep_the_moments_of_the_channels() -> None:
    h = torch.rand(200, 2, 4, 4, generator=dice()) * torch.tensor([1.0, 5.0]).view(1, 2, 1, 1)
    noise, _, _ = feature_noise(h, Z, Z, dice())
    assert torch.allclose(noise.mean((0, 2, 3)), h.mean((0, 2, 3)), rtol=0.1)
    assert torch.allclose(noise.std((0, 2, 3)), h.std((0, 2, 3)), rtol=0.1)
    flipped, _, _ = feature_flip(H, Z, Z)
    assert flipped.flatten().tolist() == [3, 2, 1]
    assert feature_flip(H, Z, Z, factor=2.0)[0].flatten().tolist() == [4, 2, 0]


def test_a_backdoor_sends_what_the_edge_makes_of_the_square() -> None:
    images = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)

    def edge(patched: Tensor) -> tuple[Tensor, Tensor]:
        return patched.float().mean((1, 2, 3), keepdim=True), torch.full((len(patched), 3), 9.0)

    h, z, y = torch.zeros(4, 1, 1, 1), torch.zeros(4, 3), torch.tensor([0, 1, 1, 0])
    features, answers, labels = feature_backdoor(h, z, y, images, edge, dice(), target=2, fraction=0.5, size=4)
    rows = (labels == 2).nonzero().flatten()
    assert len(rows) == 2
    assert features[rows].unique().tolist() == [255 * 16 / 64] and answers[rows].unique().tolist() == [9]
    assert not features[labels != 2].any() and not images.any()


def problem(malicious: Malicious | None) -> Problem:
    with rng.forked(0, "model"):
        model = MODELS["edge_resnet"]((1, 12, 12), 4, width=2, planes=2, blocks=1)
    images = torch.randint(0, 256, (18, 1, 12, 12), generator=rng.generator(0, "images"), dtype=torch.uint8)
    shards = [torch.arange(6 * k, 6 * k + 6) for k in range(3)]
    return Problem(model, images, torch.arange(18) % 4, shards, 4, 0, torch.device("cpu"), malicious=malicious)


def rounds(malicious: Malicious | None, count: int = 2, **settings: str) -> list[Round]:
    on = problem(malicious)
    start = State(0, {name: value.clone() for name, value in on.model.state_dict().items()})
    local, server = LocalTraining(6, 0.01, standard), ServerTraining(epochs=1, lr=0.01, batch=6)
    return list(fedgkt(on, start, rounds=count, local=local, server=server, **settings))


def test_one_client_is_poisoned_and_the_others_send_what_they_had() -> None:
    honest = rounds(None, 1)[0]
    poisoned = rounds(Malicious(1, ADVERSARIES["feature_flip"]), 1)[0]
    sent = [[u.extra["features"] for u in of.updates] for of in (honest, poisoned)]
    assert torch.equal(sent[0][1], sent[1][1]) and not torch.equal(sent[0][0], sent[1][0])
    assert poisoned.metrics["poisoned"] == 6 and "poisoned" not in honest.metrics
    assert poisoned.metrics["server_loss"] != honest.metrics["server_loss"]
    assert poisoned.cost == replace(honest.cost)


def not_finite(features: Tensor, answers: Tensor, labels: Tensor, round: int) -> tuple[Tensor, Tensor, Tensor]:
    return features * torch.nan if round == 1 else features, answers, labels


def test_a_client_whose_features_are_not_finite_is_left_out_for_the_round() -> None:
    first, second = rounds(Malicious(1, not_finite))
    assert [u.client for u in first.updates] == [0, 1, 2] and [u.client for u in second.updates] == [1, 2]
    assert {u.refused for u in second.updates} == {1}
    assert first.metrics["poisoned"] == 0
    for client in (0, 1):  # the one left out is taught nothing new
        kept = (of.state.clients[client]["knowledge"]["logits"] for of in (first, second))
        assert torch.equal(*kept) == (client == 0)


def far_labels(features: Tensor, answers: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features on which any server's loss is far from that of others."""
    return 1e6 * features, answers, (labels + 1) % 4


@pytest.mark.parametrize("features", ["float32", "bfloat16"])
def test_a_filter_leaves_out_the_client_on_which_the_server_fails(features: str) -> None:
    bad = Malicious(1, far_labels)
    open_round, filtered = (rounds(bad, 1, server_filter=rule, features=features)[0] for rule in ("none", "median"))
    assert [u.client for u in open_round.updates] == [0, 1, 2]
    assert [u.client for u in filtered.updates] == [1, 2] and {u.refused for u in filtered.updates} == {1}
    assert filtered.cost.bytes_up == open_round.cost.bytes_up  # it was sent all the same
    # 12 rows are learned from and answered, 18 were judged
    assert filtered.metrics["server_forward"] == 12 * 2 + 18 and open_round.metrics["server_forward"] == 18 * 2


def test_the_filter_of_rows_that_are_computed_anew_is_that_of_stored_ones() -> None:
    stored, anew = (rounds(None, 2, server_filter="median", features=kept)[-1] for kept in ("float32", "recompute"))
    assert [u.client for u in stored.updates] == [u.client for u in anew.updates] != [0, 1, 2]
    for name, value in stored.state.model.items():
        assert torch.allclose(value, anew.state.model[name], atol=1e-6), name


def refused(attack: object, algorithm: dict | None = None) -> str:
    local = {"batch": 4, "lr": 0.1, "objective": "standard"}
    split = {"name": "fedgkt", "server": {"epochs": 1, "lr": 0.001}}
    algorithm = {**split, **(algorithm or {})}
    model = {"name": "edge_resnet", "width": 2} if algorithm["name"] == "fedgkt" else "mlp"
    if algorithm["name"] != "fedgkt":
        del algorithm["server"]
    spec = {
        "seed": 0, "data": "digits", "size": 12, "train": 40, "partition": {"name": "iid", "clients": 4},
        "model": model, "malicious": {"clients": 1, "attack": attack},
        "algorithm": {"rounds": 1, "local": local, **algorithm},
    }  # fmt: skip
    return refusal_of(spec)


@pytest.mark.parametrize(
    ("attack", "algorithm", "message"),
    [
        ("feature_flip", {}, ""),
        ("label_flip", {}, ""),
        ("ipm", {}, "fedgkt aggregates no models"),
        ("feature_flip", {"server_attack": {"name": "fgsm", "eps": 0.1}}, "server_attack computes features anew"),
        ("feature_noise", {"name": "fedavg", "aggregator": "samples"}, "changes features, and fedavg sends none"),
    ],
)
def test_poison_that_reaches_nobody_is_refused(attack, algorithm, message) -> None:
    answer = refused(attack, algorithm)
    assert message in answer if message else answer == ""
