"""What each protocol shows the server: closed forms of features and updates, and refusals."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fatbench.engine import randomness as rng
from fatbench.engine.local import LocalTraining
from fatbench.engine.optimizers import ServerTraining
from fatbench.engine.rounds import Cost, Problem, Round, State, Stats, Update
from fatbench.errors import SpecError
from fatbench.methods.algorithms.fedgkt import fedgkt
from fatbench.methods.algorithms.fedsgd import epoch_batches, fedsgd
from fatbench.methods.defences import DEFENCES
from fatbench.methods.exposure import component, exposure
from fatbench.methods.intervals import clopper_pearson, student, verdict, wilson
from fatbench.methods.inversions import INVERSIONS, image_measures
from fatbench.methods.inversions.upload import gradients
from fatbench.methods.objectives import standard
from fatbench.models import MODELS
from fatbench.suite import cells, threats

SIDE = 12


def blobs(n: int, seed: int, colours: int = 1) -> Tensor:
    coarse = torch.rand(n, colours, 4, 4, generator=Generator().manual_seed(seed))
    return F.interpolate(coarse, size=SIDE, mode="bilinear").mul(255).round().to(torch.uint8)


class Edge(nn.Module):
    """An edge whose features are c channels w_c x + b_c."""

    def __init__(self, weights: list[float], bias: float = 0.3) -> None:
        super().__init__()
        self.extractor = nn.Conv2d(1, len(weights), 1)
        with torch.no_grad():
            self.extractor.weight.copy_(torch.tensor(weights).view(-1, 1, 1, 1))
            self.extractor.bias.fill_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.extractor(x).flatten(1)


def problem(model: nn.Module, clients: int = 3) -> Problem:
    shards = [torch.arange(6 * k, 6 * k + 6) for k in range(clients)]
    return Problem(model, blobs(24, 1), torch.arange(24) % 4, shards, 4, 0, torch.device("cpu"))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


STATS = Stats(0.0, 0.0, 0.0, 1, 1.0, 1)


def shown(on: Problem, updates: list[Update], own: dict, **settings: object) -> dict[str, float]:
    weights = state_of(on.model)
    result = Round(0, weights, updates, None, State(1, weights), Cost(), own=own)
    return exposure(
        on, result, blobs(60, 2), torch.zeros(60, dtype=torch.long), lambda *a: a[1], Generator().manual_seed(0),
        **{"targets": 4, "candidates": 24, "steps": 120, "width": 8, **settings},
    )  # fmt: skip


def features_of(on: Problem, edges: list[Edge]) -> tuple[list[Update], dict]:
    updates = []
    for k, edge in enumerate(edges):
        x = on.images[on.shards[k]].float() / 255
        updates.append(Update(k, 6, {}, STATS, {"features": edge.extractor(x).detach()}))
    return updates, {k: state_of(edge) for k, edge in enumerate(edges)}


def test_the_first_component_of_affine_features_is_the_image() -> None:
    on = problem(Edge([0.5, -1.0, 2.0]))
    features = on.model.extractor(on.images[:6].float() / 255).detach()
    made = component(features, on, on.images)
    x = on.images[:6].float() / 255
    signs = [image_measures.correlation(one, x).abs() for one in (made, 1 - made)]
    assert float(torch.stack(signs).min()) > 0.98  # clamping at 0 and 1 alone is lost
    grey = component(torch.ones(3, 2, SIDE, SIDE), on, on.images)
    assert torch.equal(grey, torch.full_like(grey, 0.5))
    gallery = on.images.float() / 255
    assert not image_measures.identified(grey, gallery, torch.arange(3)).any()


def test_a_pair_of_opposite_weights_gives_the_pixel() -> None:
    x, w, b = torch.tensor([0.2, 0.8, 0.5]), 2.0, -1.0
    assert torch.allclose(((w * x + b).relu() - (-w * x - b).relu() - b) / w, x)


def test_one_linear_layer_has_the_image_in_its_gradient() -> None:
    layer, x = nn.Linear(4, 3), torch.tensor([[[[0.1, 0.2], [0.3, 0.4]]]])
    net = nn.Sequential(nn.Flatten(), layer)
    sent = gradients(net, net.state_dict(), x[None], torch.tensor([[1]]))
    ratio = sent["1.weight"][0] / sent["1.bias"][0][:, None]
    assert torch.allclose(ratio, x.flatten().expand(3, 4), atol=1e-5)


def test_an_adapter_shows_a_sketch_of_its_rank() -> None:
    """W + s B A with B = 0: A has no gradient, and B's is s delta (A z)^T, r numbers of the D of z."""
    s, A, B = 2.0, torch.rand(2, 5), torch.zeros(3, 2, requires_grad=True)
    A.requires_grad_()
    W, z = torch.rand(3, 5), torch.rand(5)
    logits = (W + s * B @ A) @ z
    loss = F.cross_entropy(logits[None], torch.tensor([1]))
    grad_a, grad_b = torch.autograd.grad(loss, (A, B))
    delta = logits.softmax(0).detach() - F.one_hot(torch.tensor(1), 3)
    assert not grad_a.any()
    assert torch.allclose(grad_b, s * torch.outer(delta, (A @ z).detach()), atol=1e-6)


def test_features_are_read_without_the_clients_extractor() -> None:
    """Clients' features are the image times 2 and -1: the initial extractor's are 0.5 of it in another channel."""
    on = problem(Edge([1.0, 0.1]))
    updates, own = features_of(on, [Edge([2.0, -1.0]) for _ in range(3)])
    found = shown(on, updates, own, attackers="component,initial,surrogate,known,optimised", server_client=2)
    assert found["exposed_component"] == found["exposed_surrogate"] == found["exposed_known"] == 1
    assert found["exposed_optimised"] > 0.7
    assert set(found["exposed_component_client"]) == {0, 1}  # the server's own edge is not counted
    assert found["exposed_candidates"] == 24
    assert found["exposed_known_chance"] == pytest.approx(1 / 24)
    assert found["exposed_component_chance"] == pytest.approx(1 - (23 / 24) ** 2)
    assert (found["exposed_known_low"], found["exposed_known_high"]) == (1, 1)


def test_constant_features_expose_nothing() -> None:
    on = problem(Edge([1.0, 0.1]))
    updates, own = features_of(on, [Edge([0.0, 0.0])])
    assert shown(on, updates, own, attackers="component")["exposed_component"] == 0


def softmax(on_images: Tensor) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 4))


def test_an_update_is_attacked_as_it_is_sent() -> None:
    """One image a client: the difference of the weights after a step has the direction of the gradient."""
    net = softmax(blobs(1, 1))
    on = problem(net)
    on = Problem(net, on.images, on.labels, [torch.tensor([k]) for k in range(3)], 4, 0, on.device)
    before = state_of(net)
    updates = []
    for k in range(3):
        g = gradients(net, before, on.images[k][None, None].float() / 255, on.labels[k][None, None])
        after = {name: value - 0.1 * g[name][0] for name, value in before.items()}
        updates.append(Update(k, 1, after, STATS))
    matching = functools.partial(INVERSIONS["matching"], steps=80, tv=0.0)
    found = shown(on, updates, {}, inversion=matching, targets=1)
    assert found["exposed_update"] == 1
    assert (found["exposed_update_low"], found["exposed_update_high"]) == pytest.approx(wilson(3, 3))
    sent = [Update(k, 1, {}, STATS, {"gradient": {n: (before[n] - u.model[n]) / 0.1 for n in before}})
            for k, u in enumerate(updates)]  # fmt: skip
    assert shown(on, sent, {}, inversion=matching, targets=1)["exposed_update"] == 1
    withheld = [Update(k, 1, u.model, STATS, sent=frozenset({"1.weight"})) for k, u in enumerate(updates)]
    with pytest.raises(ValueError, match=r"1\.bias is not sent"):
        shown(on, withheld, {}, inversion=matching)


def test_of_a_gradient_the_images_of_its_batch_are_named() -> None:
    """The batch is the last image of each shard, which is none of the first `targets`; the third client pauses."""
    net = softmax(blobs(1, 1))
    on = problem(net)
    settings = {"rounds": 1, "batch": 1, "lr": 0.1, "objective": standard, "defence": DEFENCES["none"], "steps": 1}
    (done,) = fedsgd(on, State(0, state_of(net)), **settings)
    behind = [epoch_batches(on, k, 0, 1)[0] for k in range(3)]
    assert [update.batch.tolist() for update in done.updates] == [indices.tolist() for indices in behind]
    assert all(behind[k] not in on.shards[k][:1] for k in range(3))
    sent = [replace(done.updates[0], stats=STATS), done.updates[1], Update(2, 1, {}, STATS)]
    matching = functools.partial(INVERSIONS["matching"], steps=80, tv=0.0)
    found = shown(on, sent, {}, inversion=matching, targets=1)
    assert found["exposed_update"] == 1 and set(found["exposed_update_client"]) == {0, 1}
    assert found == shown(on, sent, {}, inversion=matching, targets=4)  # of a batch of one, with Wilson's interval


def test_intervals() -> None:
    assert student([0.5, 1.0]) == pytest.approx(12.706 * 0.25, rel=1e-4)
    assert wilson(0, 40)[1] == pytest.approx(0.0876, abs=1e-4)
    assert clopper_pearson(0, 40) == pytest.approx((0, 0.0881), abs=1e-4)
    assert clopper_pearson(20, 1000) == pytest.approx((0.0123, 0.0307), abs=1e-4)


def test_edges_of_their_own_start_differ_and_the_common_ones_do_not() -> None:
    with rng.forked(0, "model"):
        model = MODELS["edge_resnet"]((1, SIDE, SIDE), 4, width=2, planes=2, blocks=1)
    on = problem(model)
    local = LocalTraining(6, 1e-9, standard)
    server = ServerTraining(epochs=1, lr=0.001, batch=6)
    for start, same in (("common", True), ("own", False)):
        (done,) = fedgkt(on, State(0, state_of(model)), rounds=1, local=local, server=server, start=start)
        name = next(n for n, value in done.own[0].items() if n.startswith("extractor") and value.dim() == 4)
        assert torch.allclose(done.own[0][name], done.own[1][name], atol=1e-6) == same


def refused(algorithm: dict, model: object, **diagnostic: object) -> str:
    local = {"batch": 4, "lr": 0.1, "objective": "standard"}
    spec = {
        "seed": 0, "data": "digits", "size": 12, "train": 40, "test": 20, "partition": {"name": "iid", "clients": 4},
        "model": model, "monitor": "natural", "algorithm": {"rounds": 1, "local": local, **algorithm},
        "diagnostic": {"name": "exposure", "candidates": 20, **diagnostic},
    }  # fmt: skip
    try:
        spec = cells.canonical(spec, "here")
    except SpecError as error:
        return str(error)
    return threats.of_cell(spec)["threat"] + " " + threats.of_cell(spec)["labels"]


AVG = {"name": "fedavg", "aggregator": "samples"}
GKT = {"name": "fedgkt", "server": {"epochs": 1, "lr": 0.001}}
EDGE = {"name": "edge_resnet", "width": 2, "planes": 2, "blocks": 1}


@pytest.mark.parametrize(
    ("algorithm", "model", "diagnostic", "answer"),
    [
        (AVG, "mlp", {}, "set attackers (of features) or inversion"),
        (GKT, EDGE, {"inversion": "matching"}, "fedgkt sends features alone"),
        ({**GKT, "features": "recompute"}, EDGE, {"attackers": "component"}, "features: recompute keeps no features"),
        (GKT, EDGE, {"attackers": "surrogate"}, "surrogate needs server_client"),
        (GKT, EDGE, {"attackers": "surrogate", "server_client": 4}, "client 4 of 4"),
        (GKT, EDGE, {"attackers": "component,guess"}, "expected attackers such as component,initial"),
        (AVG, "mlp", {"inversion": "matching"}, "B recovered"),
        (GKT, EDGE, {"attackers": "component"}, "A unused"),
        (GKT, EDGE, {"attackers": "component,surrogate", "server_client": 0}, "D unused"),
        (GKT, EDGE, {"attackers": "component,known"}, "bound unused"),
    ],
)  # fmt: skip
def test_what_no_client_sends_is_refused(algorithm, model, diagnostic, answer) -> None:
    assert answer in refused(algorithm, model, **diagnostic)


@pytest.mark.parametrize(
    ("clients", "most_that_holds", "least_that_leaks"),
    [(40, None, 6), (80, 0, 9), (100, 0, 11), (200, 3, 17), (300, 7, 24)],
)
def test_verdicts_at_five_per_cent(clients: int, most_that_holds: int | None, least_that_leaks: int) -> None:
    """Forty clients can never show that something holds."""
    found = [verdict(hits, clients) for hits in range(clients + 1)]
    assert found.index("leaks") == least_that_leaks
    holds = [hits for hits, one in enumerate(found) if one == "holds"]
    assert holds == ([] if most_that_holds is None else list(range(most_that_holds + 1)))


@pytest.mark.parametrize(
    ("clients", "truth", "answer", "power"),
    [
        (80, 0.001, "holds", 0.92), (100, 0.01, "holds", 0.37), (200, 0.016, "holds", 0.60),
        (300, 0.016, "holds", 0.89),
        (40, 0.20, "leaks", 0.84), (100, 0.15, "leaks", 0.90), (300, 0.10, "leaks", 0.90),
    ],
)  # fmt: skip
def test_the_power_of_a_verdict(clients: int, truth: float, answer: str, power: float) -> None:
    reached = sum(
        math.comb(clients, hits) * truth**hits * (1 - truth) ** (clients - hits)
        for hits in range(clients + 1)
        if verdict(hits, clients) == answer
    )
    assert reached == pytest.approx(power, abs=0.011)
