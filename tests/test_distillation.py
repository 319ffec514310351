"""FedGKT and FedVKD: closed forms on linear networks, knowledge by example, what crosses, resuming."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import members
import pytest
import torch
from algorithm_runs import nested
from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.engine.accuracy import accuracy
from fatbench.engine.local import load
from fatbench.engine.rounds import Problem, Round, State
from fatbench.methods import evasion, objectives
from fatbench.methods.algorithms import distillation
from fatbench.methods.algorithms.distillation import divergence, match, server_batches
from fatbench.methods.algorithms.fedgkt import fedgkt
from fatbench.methods.algorithms.fedvkd import fedvkd
from fatbench.models.edge import edge_resnet8, edge_vit

BOXES = {"fedgkt": fedgkt, "fedvkd": fedvkd}
CPU = torch.device("cpu")


# --- the loss and the matching -----------------------------------------------------------------------------------


def test_divergence_by_hand() -> None:
    """T = 2, teacher (2 ln 3, 0): p = (3/4, 1/4); student (0, 0): q = (1/2, 1/2). 4 (3/4 ln 3/2 + 1/4 ln 1/2); the
    gradient is T (q - p) / B = 2 (-1/4, 1/4) for one image."""
    teacher = torch.tensor([[2 * torch.log(torch.tensor(3.0)), 0.0]])
    student = torch.zeros(1, 2, requires_grad=True)
    loss = divergence(student, teacher, 2.0)
    expected = 4 * (0.75 * torch.log(torch.tensor(1.5)) + 0.25 * torch.log(torch.tensor(0.5)))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    torch.testing.assert_close(student.grad, torch.tensor([[-0.5, 0.5]]))


def test_divergence_is_torchs_kl() -> None:
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(5, 7, generator=g), torch.randn(5, 7, generator=g)
    theirs = F.kl_div((student / 3).log_softmax(1), (teacher / 3).softmax(1), reduction="batchmean") * 9
    torch.testing.assert_close(divergence(student, teacher, 3.0), theirs)
    assert divergence(teacher, teacher, 3.0) == 0


def test_divergence_survives_probabilities_that_underflow() -> None:
    student = torch.zeros(1, 2, requires_grad=True)
    divergence(student, torch.tensor([[500.0, -500.0]]), 1.0).backward()
    torch.testing.assert_close(student.grad, torch.tensor([[-0.5, 0.5]]))


def test_match_goes_by_id_and_not_by_place() -> None:
    ids, values = torch.tensor([30, 10, 20]), torch.tensor([[3.0], [1.0], [2.0]])
    for wanted in ([10, 20, 30], [20, 30], [30, 30, 10]):
        assert match(ids, values, torch.tensor(wanted)).flatten().tolist() == [i / 10 for i in wanted]


def test_match_refuses_examples_without_knowledge() -> None:
    with pytest.raises(ValueError, match="2 of 3 examples have no knowledge: the client's shard has changed"):
        match(torch.tensor([1, 5]), torch.zeros(2, 1), torch.tensor([5, 6, 0]))


# --- closed forms ------------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """FedVKD's server without a transformer: both tokens are the features."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2, bias=False)
        self.head_dist = nn.Linear(2, 2, bias=False)

    def forward_features(self, h: Tensor) -> Tensor:
        return torch.stack([h.flatten(1), h.flatten(1)], 1)

    def forward(self, h: Tensor) -> Tensor:
        mean: Tensor = (self.head(h.flatten(1)) + self.head_dist(h.flatten(1))) / 2
        return mean


class Linear(nn.Module):
    """Features are the pixels; classifier and server are linear and start at zero."""

    def __init__(self, server: nn.Module) -> None:
        super().__init__()
        self.extractor = nn.Identity()
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
        self.server = server
        for p in self.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.server(self.extractor(x))
        return logits


# Two clients, one example each, not in the order of their ids: client 0 holds example 1.
PIXELS = torch.tensor([[51, 204], [255, 102]], dtype=torch.uint8)
X = PIXELS.float() / 255
LABELS = torch.tensor([1, 0])
HELD = (1, 0)
LR, SERVER_LR, T, ALPHA = 0.5, 0.25, 2.0, 0.7


def linear(server: nn.Module) -> tuple[Problem, State]:
    model = Linear(server)
    shards = [torch.tensor([i]) for i in HELD]
    on = Problem(model, PIXELS.reshape(2, 1, 1, 2), LABELS, shards, 2, 0, CPU, path="reference")
    return on, State(0, {name: value.clone() for name, value in model.state_dict().items()})


def run(box: str, on: Problem, state: State, rounds: int, **settings: object) -> Iterator[Round]:
    defaults = {
        "rounds": rounds, "epochs": 1, "batch": 10, "lr": LR, "objective": objectives.standard, "optimizer": "sgd",
        "momentum": 0.0, "server_epochs": 1, "server_lr": SERVER_LR, "server_optimizer": "sgd", "server_momentum": 0.0,
        "server_weight_decay": 0.0, "temperature": T, "alpha": ALPHA,
    }  # fmt: skip
    return BOXES[box](on, state, **nested(**{**defaults, **settings}))


def hot(i: int) -> Tensor:
    return F.one_hot(torch.tensor(i), 2).float()


def edge_after_one_step(i: int) -> Tensor:
    """W = 0 - lr (softmax(0) - e_y) x^T for the one example i of a client."""
    return LR * torch.outer(hot(int(LABELS[i])) - 0.5, X[i])


def edge_after_two_steps(i: int, taught: Tensor) -> Tensor:
    """W - lr (softmax(W x) - e_y + alpha T (softmax(W x / T) - softmax(z_s / T))) x^T."""
    w = edge_after_one_step(i)
    z = w @ X[i]
    pull = ALPHA * T * ((z / T).softmax(0) - (taught / T).softmax(0))
    return w - LR * torch.outer(z.softmax(0) - hot(int(LABELS[i])) + pull, X[i])


@pytest.mark.parametrize(
    ("settings", "labels", "edges"),
    [
        ({}, 1.0, ALPHA),
        ({"server_alpha": "labels"}, ALPHA, 1.0),
        ({"server_distillation": False}, 1.0, 0.0),
        ({"server_distillation": False, "server_alpha": "labels"}, 1.0, 0.0),
    ],
)
def test_fedgkt_has_its_closed_form(settings: dict, labels: float, edges: float) -> None:
    """Two examples in one batch of the server, whose logits are 0: by example i its gradient is
    (labels (1/2 - e_y) + edges T (1/2 - softmax(z_i / T))) x_i^T / 2, z_i the edge's logits after its step."""
    on, state = linear(nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)))
    first, second = run("fedgkt", on, state, 2, **settings)
    w_s = torch.zeros(2, 2)
    for i in range(2):
        z = edge_after_one_step(i) @ X[i]
        by_logits = labels * (0.5 - hot(int(LABELS[i]))) + edges * T * (0.5 - (z / T).softmax(0))
        w_s -= SERVER_LR * torch.outer(by_logits, X[i]) / 2
    torch.testing.assert_close(first.state.model["server.1.weight"], w_s)
    for k, i in enumerate(HELD):
        torch.testing.assert_close(first.own[k]["classifier.1.weight"], edge_after_one_step(i))
        torch.testing.assert_close(first.updates[k].extra["logits"][0], edge_after_one_step(i) @ X[i])
        torch.testing.assert_close(first.updates[k].extra["features"], X[i].reshape(1, 1, 1, 2))
        torch.testing.assert_close(first.state.clients[k]["knowledge"]["logits"][0], w_s @ X[i])
        torch.testing.assert_close(second.own[k]["classifier.1.weight"], edge_after_two_steps(i, w_s @ X[i]))
        assert not first.state.model["classifier.1.weight"].any()  # the initial edge's stays in the full state_dict


def test_fedvkd_has_its_closed_form() -> None:
    """Both heads' logits are 0. Class head: as cross-entropy with y; distillation head: with the edge's answer, which
    is y after one step on the one example. z_t is the mean of both. In the second run the edge does not learn (1e-60 is
    0 in float32), so that its answer is class 0, the first of equal logits, whatever the label."""
    on, state = linear(Heads())
    first, second = run("fedvkd", on, state, 2)
    w = torch.zeros(2, 2)
    for i in range(2):
        w -= SERVER_LR * torch.outer(0.5 - hot(int(LABELS[i])), X[i]) / 2
    torch.testing.assert_close(first.state.model["server.head.weight"], w)
    torch.testing.assert_close(first.state.model["server.head_dist.weight"], w)
    for k, i in enumerate(HELD):
        assert first.updates[k].extra["answers"].tolist() == [int(LABELS[i])]
        torch.testing.assert_close(first.state.clients[k]["knowledge"]["logits"][0], w @ X[i])
        torch.testing.assert_close(second.own[k]["classifier.1.weight"], edge_after_two_steps(i, w @ X[i]))

    (still,) = run("fedvkd", on, state, 1, lr=1e-60)
    assert all(update.extra["answers"].tolist() == [0] for update in still.updates)
    w_dist = torch.zeros(2, 2)
    for i in range(2):
        w_dist -= SERVER_LR * torch.outer(0.5 - hot(0), X[i]) / 2
    torch.testing.assert_close(still.state.model["server.head.weight"], w)
    torch.testing.assert_close(still.state.model["server.head_dist.weight"], w_dist)
    for k, i in enumerate(HELD):
        torch.testing.assert_close(still.state.clients[k]["knowledge"]["logits"][0], (w + w_dist) @ X[i] / 2)


# --- small networks on random images -----------------------------------------------------------------------------


def images(clients: int = 3, each: int = 6, path: str = "reference", box: str = "fedvkd") -> tuple[Problem, State]:
    g = torch.Generator().manual_seed(1)
    n = clients * each
    x = torch.randint(0, 256, (n, 1, 8, 8), generator=g, dtype=torch.uint8)
    shards = list(torch.randperm(n, generator=g).split(each))
    torch.manual_seed(2)
    if box == "fedvkd":
        model = edge_vit((1, 8, 8), 4, width=2, dim=6, depth=1, heads=2)
    else:
        model = edge_resnet8((1, 8, 8), 4, width=2, planes=2, blocks=1)
    on = Problem(model, x, torch.randint(0, 4, (n,), generator=g), shards, 4, 0, CPU, path=path)
    return on, State(0, {name: value.clone() for name, value in model.state_dict().items()})


def small(box: str, on: Problem, state: State, rounds: int = 2, **settings: object) -> Iterator[Round]:
    return run(
        box, on, state, rounds,
        **{"batch": 4, "server_batch": 4, "lr": 0.01, "server_lr": 0.01, "server_epochs": 2, "optimizer": "adam",
           "server_optimizer": "adamw", "server_weight_decay": 0.05, **settings},
    )  # fmt: skip


class Spy:
    """Records which target every image meets: the objective sees the images, the divergence their targets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[bytes, Tensor] = {}
        monkeypatch.setattr(distillation, "divergence", self.divergence)

    def objective(self, model: nn.Module, x: Tensor, y: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
        self.x = x
        return objectives.standard(model, x, y, g)

    def divergence(self, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        for image, target in zip(self.x, teacher, strict=True):
            self.seen[image.numpy().tobytes()] = target
        return divergence(student, teacher, temperature)


@pytest.mark.parametrize("box", BOXES)
def test_knowledge_belongs_to_its_image_in_whatever_order(box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 2 on shards in another order than in round 1, and another seed for the order of batches: every image meets
    what the deployed model of its client, extractor and server, answered at the end of round 1."""
    on, state = images(box=box)
    first = next(iter(small(box, on, state)))
    spies = []
    for seed in (0, 9):
        g = torch.Generator().manual_seed(seed)
        shards = [shard[torch.randperm(len(shard), generator=g)] for shard in on.shards] if seed else on.shards
        spies.append(Spy(monkeypatch))
        second = replace(on, shards=shards, seed=seed)
        assert len(list(small(box, second, first.state, objective=spies[-1].objective))) == 1
    assert spies[0].seen.keys() == spies[1].seen.keys()
    assert len(spies[0].seen) == 18
    for k, shard in enumerate(on.shards):
        model = load(on, {**first.state.model, **first.own[k]}).eval()
        for i in shard:
            x = on.images[i : i + 1].float() / 255
            with torch.no_grad():
                expected = model(x)[0]
            for spy in spies:
                torch.testing.assert_close(spy.seen[x[0].numpy().tobytes()], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"server_shuffle": False}])
@pytest.mark.parametrize("box", BOXES)
def test_features_computed_again_are_those_that_were_kept(box: str, settings: dict) -> None:
    # SGD, because Adam makes rounding noise of the transformer's key biases, whose gradient is zero, into whole steps.
    on, state = images(box=box)
    settings = {**settings, "server_optimizer": "sgd", "optimizer": "sgd"}
    kinds = ("float32", "recompute", "bfloat16")
    kept, again, half = (list(small(box, on, state, features=f, **settings)) for f in kinds)
    for a, b in zip(kept, again, strict=True):
        for name, value in a.state.model.items():
            torch.testing.assert_close(value, b.state.model[name], rtol=1e-4, atol=1e-5)
        assert a.cost == b.cost
        assert "features" not in b.updates[0].extra
    assert half[0].updates[0].extra["features"].dtype == torch.bfloat16
    saved = 18 * 2 * 8 * 8 * 2
    assert kept[0].cost.bytes_up - half[0].cost.bytes_up == saved


@pytest.mark.parametrize(("box", "answer"), [("fedgkt", 4 * 4), ("fedvkd", 8)])
def test_bytes_on_the_wire(box: str, answer: int) -> None:
    """18 examples: features 2 x 8 x 8 floats, an int64 label, and four logits (FedGKT) or one int64 (FedVKD); four
    logits down."""
    on, state = images(box=box)
    for result in small(box, on, state):
        assert result.cost.bytes_up == 18 * (2 * 8 * 8 * 4 + 8 + answer)
        assert result.cost.bytes_down == 18 * 4 * 4
        total = sum(t.numel() * t.element_size() for u in result.updates for t in u.extra.values())
        assert total == result.cost.bytes_up


@pytest.mark.parametrize("box", BOXES)
def test_what_a_round_says(box: str) -> None:
    """2 batches of 4 and 2 for each of 3 clients; 5 batches of the server in each of its 2 epochs."""
    on, state = images(box=box)
    for result in small(box, on, state, epochs=3):
        assert (result.cost.gradient_steps, result.cost.forward, result.cost.backward) == (18, 54 + 18, 54)
        assert result.metrics["server_steps"] == 10
        assert result.metrics["server_forward"] == 18 * 3
        assert result.metrics["server_backward"] == 18 * 2
        assert result.metrics["server_loss"] > 0
        assert result.state.model.keys() == state.model.keys()
        for k in range(3):
            assert all(name.startswith(("extractor.", "classifier.")) for name in result.own[k])
            full = {**result.state.model, **result.own[k]}
            noise = (on, full, on.images, on.labels, evasion.natural, ("test",))
            right, _ = accuracy(*noise)
            assert right.shape == (18,)
        assert not torch.equal(result.own[0]["extractor.conv1.weight"], result.own[1]["extractor.conv1.weight"])
        assert all(update.model == {} for update in result.updates)


@pytest.mark.parametrize("box", BOXES)
def test_the_server_trains_on_images_attacked_through_their_own_extractor(box: str) -> None:
    """Rows of three clients in one batch: the features are those of each client's deployed network attacked alone."""
    on, state = images(box=box)
    *_, last = small(box, on, state)
    clients = {k: last.own[k] for k in range(3)}
    model = load(on, last.state.model)
    sent = distillation.transfer(on, last.state, clients, 4, "float32")
    pgd = functools.partial(evasion.pgd, eps=0.2, step=0.1, steps=3, start="none")
    inputs = distillation.Inputs(on, clients, sent, pgd, 0)
    host = torch.tensor([17, 0, 8, 1, 12])
    model.train()
    read = inputs(distillation.Rows(host, host))
    assert model.get_submodule("server").training
    for row, h in zip(host.tolist(), read, strict=True):
        whole = load(on, {**last.state.model, **clients[row // 6]}).eval()
        x, y = on.images[sent.ids[row]][None].float() / 255, sent.labels[row][None]
        x_adv = pgd(whole, x, y, torch.Generator())
        assert not torch.equal(x_adv, x)
        with torch.no_grad():
            torch.testing.assert_close(h[None], whole.get_submodule("extractor")(x_adv), rtol=1e-4, atol=1e-5)
    size = 5 * 2 * 8 * 8 * 4
    assert (inputs.images, inputs.up, inputs.down) == (15, 4 * size, 3 * size)


@pytest.mark.parametrize("attack", [
    functools.partial(evasion.pgd, eps=0.2, step=0.1, steps=3, early_stop=True),
    functools.partial(evasion.autoattack, eps=0.05),
])  # fmt: skip
def test_the_server_takes_attacks_that_drop_images(attack: functools.partial, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stops early and one of another package: both ask the networks about some of the images only."""
    members.short_autoattack(monkeypatch)
    on, state = images(1, 4, box="fedgkt")
    (result,) = small("fedgkt", on, state, 1, server_epochs=1, server_attack=attack)
    assert result.metrics["server_forward"] > 4 * 2


@pytest.mark.parametrize("box", BOXES)
def test_an_attack_of_radius_zero_on_the_server_changes_nothing_but_the_work(box: str) -> None:
    on, state = images(box=box)
    still = functools.partial(evasion.pgd, eps=0.0, step=0.0, steps=2, start="none")
    settings = {"server_optimizer": "sgd", "optimizer": "sgd"}
    plain, attacked = (list(small(box, on, state, server_attack=a, **settings)) for a in (None, still))
    for a, b in zip(plain, attacked, strict=True):
        for name, value in a.state.model.items():
            torch.testing.assert_close(value, b.state.model[name], rtol=1e-4, atol=1e-5)
        assert b.metrics["server_forward"] - a.metrics["server_forward"] == 18 * 2 * 2
        assert b.metrics["server_backward"] - a.metrics["server_backward"] == 18 * 2 * 2
        each = 18 * 2 * 8 * 8 * 4  # features of an epoch of the server
        assert b.cost.bytes_up - a.cost.bytes_up == 2 * 3 * each
        assert b.cost.bytes_down - a.cost.bytes_down == 2 * 2 * each


@pytest.mark.parametrize("box", BOXES)
def test_released_logits_are_made_while_the_weights_move(box: str) -> None:
    """One batch of the server a client and a rate of (almost) zero: both kinds agree but for batch statistics, so the
    transformer's (no dropout) are equal; at a real rate they differ."""
    on, state = images(box=box)

    def taught(**settings: object) -> Tensor:
        (result,) = small(box, on, state, 1, server_batch=6, server_shuffle=False, **settings)
        return torch.stack([result.state.clients[k]["knowledge"]["logits"] for k in range(3)])

    moving = [taught(server_logits=which) for which in ("clean", "released")]
    assert not torch.allclose(*moving)
    if box == "fedvkd":
        never = {"server_lr": 1e-30, "server_optimizer": "sgd"}
        still = [taught(server_logits=which, **never) for which in ("clean", "released")]
        torch.testing.assert_close(*still, rtol=1e-4, atol=1e-6)


def test_server_batches() -> None:
    """Every row once an epoch; in turn: a client's rows together, in the order of the clients."""
    on, _ = images()
    owned = {0: slice(0, 5), 1: slice(5, 7), 2: slice(7, 18)}
    for shuffle in (True, False):
        batches = list(server_batches(on, 3, owned, 2, 4, shuffle))
        for epoch in range(2):
            rows = torch.cat([rows.host for e, rows in batches if e == epoch])
            assert rows.tolist() == torch.cat([rows.device for e, rows in batches if e == epoch]).tolist()
            assert rows.sort().values.tolist() == list(range(18))
            assert rows.tolist() != list(range(18))
            clients = [next(k for k, own in owned.items() if own.start <= row < own.stop) for row in rows.tolist()]
            assert (clients == sorted(clients)) != shuffle
        assert max(len(rows.host) for _, rows in batches) == 4
        again = server_batches(on, 3, owned, 2, 4, shuffle)
        assert all(torch.equal(a.host, b.host) for (_, a), (_, b) in zip(batches, again, strict=True))


@pytest.mark.parametrize("box", BOXES)
def test_adversarial_training_on_the_edge(box: str) -> None:
    """The attack sees the edge's network, and what it makes of the images is trained on; the server is not touched by
    it; the wire carries clean features."""
    on, state = images(box=box)
    sizes = []

    def attack(model: nn.Module, x: Tensor, y: Tensor, g: torch.Generator) -> Tensor:
        assert isinstance(model, distillation.Edge)
        assert not model.training
        sizes.append(len(x))
        return evasion.pgd(model, x, y, g, eps=8 / 255, step=2 / 255, steps=2)

    at = functools.partial(objectives.at, attack=attack)
    plain = list(small(box, on, state))
    robust = list(small(box, on, state, objective=at))
    assert sum(sizes) == 2 * 18
    for k in range(3):
        a, b = plain[1].own[k], robust[1].own[k]
        assert not torch.equal(a["extractor.conv1.weight"], b["extractor.conv1.weight"])
        model = load(on, {**robust[1].state.model, **b}).eval()
        with torch.no_grad():
            features = model.extract(on.images[on.shards[k]].float() / 255)
        torch.testing.assert_close(robust[1].updates[k].extra["features"], features, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("box", BOXES)
def test_augmentation_is_for_training_and_not_for_the_transfer(box: str) -> None:
    """Images blackened in training: the first step's gradient is that of black images, yet the uploaded features are
    those of the images."""
    on, state = images(box=box)
    black = replace(on, augment=lambda x, generator: torch.zeros_like(x))
    (plain,), (blackened,) = small(box, on, state, 1, lr=1e-30), small(box, black, state, 1, lr=1e-30)
    assert plain.updates[0].stats.loss != blackened.updates[0].stats.loss
    model = load(on, {**blackened.state.model, **blackened.own[0]}).eval()
    with torch.no_grad():
        features = model.extract(on.images[on.shards[0]].float() / 255)
    torch.testing.assert_close(blackened.updates[0].extra["features"], features, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("box", BOXES)
def test_the_rate_decays_and_the_temperature_and_alpha_count(box: str) -> None:
    on, state = images(box=box)
    base = [r.own[0]["extractor.conv1.weight"] for r in small(box, on, state)]
    for changed in ({"temperature": 5.0}, {"alpha": 0.0}):
        other = [r.own[0]["extractor.conv1.weight"] for r in small(box, on, state, **changed)]
        if box == "fedvkd":
            assert torch.equal(base[0], other[0])  # no knowledge in the first round
        assert not torch.equal(base[1], other[1])
    slow = list(small(box, on, state, lr_decay=1e-30, server_lr_decay=1e-30))
    assert torch.equal(slow[0].own[0]["extractor.conv1.weight"], base[0])
    torch.testing.assert_close(slow[1].own[0]["extractor.conv1.weight"], base[0])
    for name, value in slow[0].state.model.items():
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            torch.testing.assert_close(slow[1].state.model[name], value)
