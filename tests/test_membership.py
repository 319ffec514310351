"""Membership: the exact rate of false alarms, its intervals, the other clients as shadow models, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from members import refusal_of
from torch import Generator, Tensor, nn

from fatbench.engine.rounds import Cost, Problem, Round, State, Stats, Update
from fatbench.methods.intervals import clopper_pearson
from fatbench.methods.membership import against_others, log_odds, membership, rates, summary

STATS = Stats(0.0, 0.0, 0.0, 1, 1.0, 1)


def test_the_threshold_is_the_tenth_of_a_thousand() -> None:
    calibration, outside = torch.arange(1.0, 2000, 2), torch.arange(2.0, 2001, 2)
    hits, false, auc = rates(torch.full((200,), 3000.0), calibration, outside, 0.01)
    assert (hits, false, auc) == (200, 10, 1.0)
    found = summary([(hits, false, auc, 200)], 1000)
    assert (found["tpr"], found["tpr_high"], found["fpr"]) == (1.0, 1.0, 0.01)
    assert found["tpr_low"] == pytest.approx(0.9817, abs=1e-4)
    assert (found["fpr_low"], found["fpr_high"]) == pytest.approx((0.0048, 0.0183), abs=1e-4)
    assert found["above"] == 1 and found["epsilon"] == pytest.approx(math.log(0.9817 / 0.0183), abs=0.01)
    assert rates(torch.full((5,), 1981.0), calibration, outside, 0.01)[0] == 0  # strictly above 1981


def test_members_like_outsiders_are_above_as_often_as_the_rate_says() -> None:
    draws, m = 4000, 1000
    noise = Generator().manual_seed(0)
    member, calibration = torch.rand(draws, generator=noise), torch.rand(draws, m, generator=noise)
    above = (member > calibration.topk(10, 1).values[:, -1]).double().mean()
    assert abs(float(above) - 10 / 1001) < 4 * math.sqrt(0.01 / draws)
    hits, _, _ = rates(member, calibration[0], calibration[1], 0.01)
    assert hits == int((member > calibration[0].sort().values[-10]).sum())


def test_ties_are_no_members() -> None:
    same = torch.ones(1000)
    assert rates(same, same, same, 0.01) == (0, 0, 0.5)


def test_other_clients_are_the_shadow_models() -> None:
    phi = torch.tensor([[3.0], [1.0], [2.0], [3.0]])
    assert float(against_others(phi, 0)) == 1
    assert float(against_others(torch.tensor([[5.0], [2.0], [2.0]]), 0)) == 0  # they agree


def test_intervals_of_a_few_per_cent_need_many_members() -> None:
    assert clopper_pearson(10, 1000) == pytest.approx((0.0048, 0.0183), abs=1e-4)
    assert clopper_pearson(100, 5000) == pytest.approx((0.0163, 0.0243), abs=1e-4)


class Table(nn.Module):
    """Remembers the images it has seen: logit 9 for their class, 0 for all else."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(256, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.seen[(x[:, 0, 0, 0] * 255).round().long()]


def attacked(memorised: bool, held_out: bool = True, **settings: object) -> dict[str, float]:
    shards = [torch.arange(10 * k, 10 * k + 10) for k in range(4)]
    images = torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1)
    labels = torch.arange(40) % 2
    model = Table()
    outside = torch.arange(40, 240, dtype=torch.uint8).view(200, 1, 1, 1), torch.arange(200) % 2
    on = Problem(model, images, labels, shards, 2, 0, torch.device("cpu"), held_out=outside if held_out else None)
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    noise = Generator().manual_seed(0)
    updates = []
    for k, shard in enumerate(shards):
        table = 0.1 * torch.randn(256, 2, generator=noise)
        if memorised:
            table[shard, labels[shard]] += 9
        updates.append(Update(k, 10, {"seen": table}, STATS))
    result = Round(0, start, updates, None, State(1, start), Cost())
    found = membership(
        on, result, *outside, lambda model, x, y, generator: x, noise,
        **{"members": 10, "calibration": 100, "outsiders": 100, "scores": "loss,others,adversarial", **settings},
    )  # fmt: skip
    return {name: value for name, value in found.items() if isinstance(value, float)}


def test_a_network_that_remembers_is_found_out_and_one_that_does_not_is_not() -> None:
    told = attacked(memorised=True)
    assert told["member_loss_tpr"] == told["member_others_tpr"] == told["member_adversarial_tpr"] == 1
    assert told["member_others_above"] == 1 and told["member_others_epsilon"] > 0
    assert (told["member_loss_clients_low"], told["member_loss_clients_high"]) == (1, 1)
    none = attacked(memorised=False)
    assert none["member_others_above"] == none["member_loss_above"] == 0
    assert none["member_others_tpr"] < 0.2 and 0.3 < none["member_others_auc"] < 0.7
    assert "doubt_membership_is_calibrated_on_test_images" not in none
    assert attacked(True, held_out=False)["doubt_membership_is_calibrated_on_test_images"] == 1
    assert attacked(True, of="global", scores="loss")["member_loss_tpr"] == 0  # the new model is the old one


def test_log_odds_do_not_lose_digits() -> None:
    on = Problem(Table(), torch.zeros(1, 1, 1, 1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), [], 2, 0,
                 torch.device("cpu"))  # fmt: skip
    table = torch.zeros(256, 2)
    table[0, 0] = 80.0
    assert float(log_odds(on, {"seen": table}, on.images, on.labels)) == pytest.approx(80.0)


def refused(algorithm: dict | None = None, clients: int = 4, monitor: object = "natural", **diagnostic: object) -> str:
    local = {"batch": 4, "lr": 0.1, "objective": "standard"}
    spec = {
        "seed": 0, "data": "digits", "size": 12, "train": 400, "test": 300, "monitor": monitor, "model": "mlp",
        "partition": {"name": "iid", "clients": clients},
        "algorithm": algorithm or {"name": "fedavg", "rounds": 1, "aggregator": "samples", "local": local},
        "diagnostic": {"name": "membership", "calibration": 150, "outsiders": 150, **diagnostic},
    }  # fmt: skip
    return refusal_of(spec)


SGD = {"name": "fedsgd", "rounds": 1, "batch": 4, "lr": 0.1, "objective": "standard", "defence": "none"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients": 2}, "others needs 3 clients in a round, got 2"),
        ({"algorithm": SGD}, "fedsgd uploads no models"),
        ({"scores": "adversarial"}, "attacks as the monitor does, which is natural"),
        ({"scores": "luck"}, "expected scores such as loss,others"),
    ],
)
def test_what_cannot_be_told_is_refused(settings, message) -> None:
    assert message in refused(**settings)
