"""FedBN, FedRBN and clients that differ in their training: closed forms, and what stays with a client."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from algorithm_runs import nested, same
from torch import Tensor, nn

from fatbench.engine.local import Client, LocalTraining, train_client
from fatbench.engine.rounds import Problem, Round, State
from fatbench.methods import aggregators, evasion, objectives
from fatbench.methods.algorithms import ALGORITHMS
from fatbench.methods.algorithms.fedbn import normalisation
from fatbench.methods.algorithms.fedrbn import propagate, similarity
from fatbench.models.dual_norm import DualBatchNorm2d, on_attacked_images
from fatbench.models.small_cnn import small_cnn
from fatbench.models.vit import vit

PGD = functools.partial(evasion.pgd, eps=8 / 255, step=4 / 255, steps=2)
STANDARD = objectives.standard


def problem(norm: str = "one") -> Problem:
    torch.manual_seed(0)
    model = small_cnn((1, 8, 8), 3, width=2, norm=norm)
    images = torch.randint(0, 256, (18, 1, 8, 8), dtype=torch.uint8)
    shards = [torch.arange(0, 4), torch.arange(4, 10), torch.arange(10, 18)]
    return Problem(model, images, torch.arange(18) % 3, shards, 3, 0, torch.device("cpu"))


def run(name: str, on: Problem, start: State | None = None, **settings: object) -> list[Round]:
    how = {"rounds": 2, "batch": 4, "lr": 0.05, "objective": STANDARD, "aggregator": aggregators.samples}
    first = {key: value.clone() for key, value in (start.model if start else on.model.state_dict()).items()}
    state = start or State(0, first)
    return list(ALGORITHMS[name](on, state, **nested(**{**how, **settings})))


def test_fedbn_by_hand() -> None:
    """Each client begins round 1 with what it trained in round 0 of batch normalisation and the mean of the others."""
    on = problem()
    first, second = run("fedbn", on)
    names = normalisation(on.model)
    assert len(names) == 6 * 5 and all(name.startswith("batchnorm") for name in names)
    for update in first.updates:
        assert same(first.own[update.client], {name: update.model[name] for name in names})
    weights = [n / 18 for n in (4, 6, 8)]
    by_client = {update.client: update.model for update in first.updates}
    for name, value in first.state.model.items():
        if name in names:
            assert torch.equal(value, first.broadcast[name])
        else:
            mean = sum(w * by_client[k][name] for k, w in enumerate(weights))
            torch.testing.assert_close(value, mean)
    for update in second.updates:
        began = {**first.state.model, **first.own[update.client]}
        again = train_client(Client(on, began, update.client, 1), LocalTraining(4, 0.05, STANDARD))
        assert same(again.model, update.model)
    sent = sum(v.numel() * v.element_size() for n, v in first.broadcast.items() if n not in names)
    assert first.cost.bytes_up == 3 * sent


@pytest.mark.parametrize("rank", [0, 3])
def test_fedper_of_a_frozen_network_sends_changes_of_low_rank_and_keeps_heads(rank: int) -> None:
    """What is frozen costs no byte and moves by 0; at the start the network is the one without changes."""
    how = {"patch": 4, "dim": 16, "depth": 2, "heads": 2}
    torch.manual_seed(0)
    plain = vit((1, 8, 8), 3, **how).eval()
    torch.manual_seed(0)
    network = vit((1, 8, 8), 3, lora=rank, **how).eval()
    on = replace(problem(), model=network)
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(on.model(images), plain(images))
    start = {name: value.clone() for name, value in on.model.state_dict().items()}
    *_, last = run("fedper", on)
    heads = {"head.fc.weight", "head.fc.bias"}
    assert all({*last.own[k]} == heads for k in range(3))
    assert all(not torch.equal(last.own[0][name], last.own[1][name]) for name in heads)
    moved = {name for name in start if not torch.equal(last.state.model[name], start[name])}
    trains = {name for name, parameter in on.model.named_parameters() if parameter.requires_grad}
    assert moved == trains - heads and len(moved) == (2 * 4 * 2 if rank else 0)
    assert last.cost.bytes_up == 3 * 4 * 2 * rank * 16 * (4 + 2 + 2 * 5)


def test_fedrbn_without_weight_on_attacked_images_trains_as_fedbn() -> None:
    """ratio 0: the clean statistics and all weights are those of FedBN; only the other statistics move too."""
    objective = functools.partial(objectives.dual_at, attack=PGD, ratio=0.0)
    ours = run("fedrbn", problem("dual"), objective=objective, standard=STANDARD, adversarial=3)
    theirs = run("fedbn", problem("dual"))
    for a, b in zip(ours, theirs, strict=True):
        assert same(a.state.model, b.state.model)
        for k in a.own:
            assert same(*({n: v for n, v in r.own[k].items() if "attacked" not in n} for r in (a, b)))
            assert not same(a.own[k], b.own[k])


def test_a_mixed_cohort() -> None:
    """Client 0 trains on the objective of `local`, the others on `standard`; each as it does alone."""
    on = problem()
    at = functools.partial(objectives.at, attack=PGD)
    (result,) = run("fedavg_mixed", on, rounds=1, objective=at, standard=STANDARD, adversarial=1)
    for update in result.updates:
        how = LocalTraining(4, 0.05, at if update.client == 0 else STANDARD)
        assert same(train_client(Client(on, result.broadcast, update.client, 0), how).model, update.model)


# --- two sets of statistics ---------------------------------------------------------------------------------------


def test_dual_batch_norm() -> None:
    """Mean 1, variance 4, weight 2, bias 1: 3 becomes 2 (3 - 1) / 2 + 1 = 3. A pass moves the pair that it uses."""
    layer = DualBatchNorm2d(nn.BatchNorm2d(1, eps=1e-12)).eval()
    layer.weight.data, layer.bias.data = torch.tensor([2.0]), torch.tensor([1.0])
    x = torch.full((2, 1, 1, 1), 3.0)
    layer.attacked_mean.fill_(1.0), layer.attacked_var.fill_(4.0)
    assert layer(x).flatten().tolist() == pytest.approx([7.0, 7.0])
    with on_attacked_images(layer):
        assert layer(x).flatten().tolist() == pytest.approx([3.0, 3.0])
    layer.train()
    moving = torch.tensor([2.0, 4.0]).view(2, 1, 1, 1)
    layer(moving)
    assert float(layer.running_mean) == pytest.approx(0.3) and float(layer.attacked_mean) == 1.0
    with on_attacked_images(layer):
        layer(moving)
    assert float(layer.running_mean) == pytest.approx(0.3) and float(layer.attacked_mean) == pytest.approx(1.2)


def test_the_attack_and_the_loss_of_attacked_images_use_their_statistics() -> None:
    seen: list[tuple[bool, bool]] = []
    model = small_cnn((1, 8, 8), 3, width=2, norm="dual")
    model.batchnorm1_1.register_forward_hook(lambda layer, *_: seen.append((layer.training, layer.attacked)))
    x, y = torch.rand(4, 1, 8, 8), torch.arange(4) % 3
    objectives.dual_at(model, x, y, torch.Generator(), attack=PGD)
    assert seen == [(False, True), (False, True), (True, True), (True, False)]


def test_an_evaluation_says_through_which_statistics_and_by_which_it_predicts() -> None:
    """Four evaluations of one model, and then it predicts by the clean ones again; `eval()` forgets."""
    model = small_cnn((1, 8, 8), 3, width=2, norm="dual").eval()
    layer = model.batchnorm1_1
    seen: list[bool] = []
    layer.register_forward_hook(lambda layer, *_: seen.append(layer.attacked))
    x, y = torch.rand(4, 1, 8, 8), torch.arange(4) % 3
    for through in ("clean", "attacked"):
        for predicts in ("clean", "attacked"):
            model.eval()
            evasion.dual(model, x, y, torch.Generator(), attack=PGD, through=through, predicts=predicts)
            model(x)
            assert seen == [through == "attacked"] * 2 + [predicts == "attacked"]
            seen.clear()
    assert layer.attacked and not model.eval().batchnorm1_1.attacked


def layers(*pairs: tuple[list[float], list[float]]) -> dict[str, Tensor]:
    return {
        f"bn{i}.{name}": torch.tensor(value)
        for i, (mean, attacked_mean) in enumerate(pairs)
        for name, value in (
            ("running_mean", mean), ("running_var", [1.0, 1.0]), ("attacked_mean", attacked_mean),
            ("attacked_var", attacked_mean), ("weight", [1.0, 1.0]),
        )
    }  # fmt: skip


def test_statistics_are_propagated_by_how_alike_the_clean_ones_are() -> None:
    """Similarities of 1.00 and 0.99 at temperature 0.01 weigh 1 / (1 + 1/e) and the rest; of three alike 1/3 each."""
    cosine = 0.98  # of the means; that of the variances is 1
    other = [cosine, math.sqrt(1 - cosine**2)]
    own = {0: layers(([1.0, 0.0], [2.0, 2.0])), 1: layers((other, [5.0, 5.0])), 2: layers(([1.0, 0.0], [9.0, 9.0]))}
    weights = similarity(own[2], [own[0], own[1]]).tolist()
    assert weights == pytest.approx([0.73106, 0.26894], abs=1e-4)
    found = propagate(own, [0, 1])
    assert found[2]["bn0.attacked_mean"].tolist() == pytest.approx([2 * weights[0] + 5 * weights[1]] * 2)
    assert torch.equal(found[2]["bn0.running_mean"], own[2]["bn0.running_mean"])
    assert same(found[0], own[0]) and same(found[1], own[1])
    assert similarity(own[2], [own[0]] * 3).tolist() == pytest.approx([1 / 3] * 3)
    assert propagate(own, []) == own
    assert propagate(own, [0])[2]["bn0.attacked_var"].tolist() == [2.0, 2.0]  # one source is copied
