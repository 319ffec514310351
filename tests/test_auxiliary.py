"""Auxiliary images: the division, features, SimCLR, certainty scores and what their noise promises; FedAUX itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from algorithm_runs import nested
from torch import Tensor, nn

from fatbench.engine.local import LocalTraining
from fatbench.engine.rounds import Problem, Round, State, Stats, Update
from fatbench.methods import aggregators, objectives
from fatbench.methods.algorithms.auxiliary import (
    certainty,
    contrast,
    divide,
    pretrain,
    recorded_features,
    represent,
    separator,
    view,
)
from fatbench.methods.algorithms.fedaux import ensemble, fedaux
from fatbench.methods.algorithms.fedavg import fedavg
from fatbench.models import MODELS
from fatbench.models.edge import whole_vit

CPU = torch.device("cpu")


def problem(auxiliary: Tensor | None, model: nn.Module | None = None, path: str = "reference") -> tuple[Problem, State]:
    """Three clients of six random images 8x8."""
    g = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (18, 1, 8, 8), generator=g, dtype=torch.uint8)
    y = torch.randint(0, 4, (18,), generator=g)
    torch.manual_seed(2)
    model = model or MODELS["resnet18"]((1, 8, 8), 4, width=2)
    shards = list(torch.arange(18).split(6))
    on = Problem(model, x, y, shards, 4, 0, CPU, path=path, auxiliary=auxiliary)
    return on, State(0, {name: value.clone() for name, value in model.state_dict().items()})


def images(n: int, shape: tuple[int, int, int] = (1, 8, 8), seed: int = 3) -> Tensor:
    return torch.randint(0, 256, (n, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


# --- division ----------------------------------------------------------------------------------------------------


def test_auxiliary_images_are_divided_80_to_20() -> None:
    images = torch.arange(23, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    on, _ = problem(images)
    distil, negatives = divide(on, "fedaux")
    assert (len(distil), len(negatives)) == (18, 5)
    both = torch.cat([distil, negatives])[:, 0, 0, 0].tolist()
    assert sorted(both) == list(range(23))
    assert both != list(range(23))
    assert all(torch.equal(a, b) for a, b in zip(divide(on, "fedaux"), (distil, negatives), strict=True))


@pytest.mark.parametrize(
    ("auxiliary", "message"),
    [
        (None, "fedaux needs unlabelled images: set the cell's 'auxiliary' to a data set"),
        (images(4), "fedaux: 4 auxiliary images cannot be divided"),
        (images(9, (1, 9, 9)), "auxiliary images are 1x9x9, training images 1x8x8; set 'size'"),
        (images(9, (3, 8, 8)), r"auxiliary images are 3x8x8, training images 1x8x8$"),
    ],
)
def test_auxiliary_images_that_cannot_be_used_are_refused(auxiliary: Tensor | None, message: str) -> None:
    on, state = problem(auxiliary)
    with pytest.raises(ValueError, match=message):
        next(aux(on, state))


def test_other_sides_are_brought_to_the_cells_size() -> None:
    on, _ = problem(images(9, (1, 12, 12)))
    distil, _ = divide(replace(on, size=8), "fedaux")
    assert represent(replace(on, size=8), on.model, distil, 4).shape == (7, 16)


# --- features ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_features_are_what_enters_the_layer_of_logits(name: str) -> None:
    """Of a transformer both tokens."""
    torch.manual_seed(0)
    vit = whole_vit((1, 8, 8), 4, width=2, dim=6, depth=1, heads=2) if name == "transformer" else None
    on, _ = problem(None, vit)
    h = represent(on, on.model, on.images, 5)
    with torch.no_grad():
        logits = on.model.eval()(on.images.float() / 255)
    if vit is None:
        assert h.shape == (18, 16)
        torch.testing.assert_close(on.model.linear(h), logits)
    else:
        assert h.shape == (18, 12)
        torch.testing.assert_close((vit.server.head(h[:, :6]) + vit.server.head_dist(h[:, 6:])) / 2, logits)


def test_listening_leaves_no_hooks() -> None:
    on, _ = problem(None)
    with recorded_features(on.model) as heard:
        on.model(torch.rand(2, 1, 8, 8))
        on.model(torch.rand(3, 1, 8, 8))
        assert [part.shape for part in heard] == [(3, 16)]
    assert not on.model.linear._forward_pre_hooks


# --- SimCLR ------------------------------------------------------------------------------------------------------


def test_contrast_by_hand() -> None:
    """B = 2, views a = a' = (1, 0), b = b' = (0, 1): every row has its partner at 1 / 0.5 = 2 and the two others at 0:
    -2 + ln(e^2 + 2)."""
    z = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(contrast(z), torch.log(torch.exp(torch.tensor(2.0)) + 2) - 2)


def test_views_are_images_of_their_own() -> None:
    x = images(64, (3, 8, 8)).float() / 255
    draws = torch.Generator().manual_seed(0)
    a, b = view(x, draws), view(x, draws)
    assert a.shape == x.shape and a.min() >= 0 and a.max() <= 1
    assert (a - b).flatten(1).abs().amax(1).min() > 0  # no two views alike
    grey = (a.amax(1) - a.amin(1)).flatten(1).amax(1) < 1e-6
    assert 2 <= int(grey.sum()) <= 30  # a fifth of 64
    torch.testing.assert_close(a, view(x, torch.Generator().manual_seed(0)))


def test_a_view_of_a_constant_image_is_constant() -> None:
    a = view(torch.full((16, 1, 8, 8), 0.5), torch.Generator().manual_seed(0))
    assert (a.flatten(1).amax(1) - a.flatten(1).amin(1)).max() < 1e-6  # crops stay inside
    assert a.std() > 0.01


def test_pretraining_lowers_the_loss_and_leaves_the_logits_layer() -> None:
    blobs = images(40, (1, 2, 2)).repeat_interleave(4, 2).repeat_interleave(4, 3)
    torch.manual_seed(2)
    on, state = problem(blobs, MODELS["small_cnn"]((1, 8, 8), 4, width=8))
    after, first = pretrain(on, state.model, 1, 20, 0.01)
    again, _ = pretrain(on, state.model, 1, 20, 0.01)
    assert all(torch.equal(after[name], again[name]) for name in after)
    _, last = pretrain(on, state.model, 15, 20, 0.01)
    assert last < first - 0.1
    assert torch.equal(after["fc2.weight"], state.model["fc2.weight"])
    assert not torch.equal(after["block1_conv1.weight"], state.model["block1_conv1.weight"])


# --- certainty ---------------------------------------------------------------------------------------------------


def features(n: int, d: int, seed: int, shift: float = 0.0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + shift


SETTINGS = {"regularisation": 0.01, "epsilon": 0.1, "delta": 1e-5}


def score(own: Tensor, negatives: Tensor, asked: Tensor, privacy: str, seed: int = 0, **settings: float) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return certainty(own, negatives, asked, privacy=privacy, draws=draws, **{**SETTINGS, **settings})


def test_the_regression_minimises_the_regularised_mean_loss() -> None:
    """The gradient of mean log(1 + exp(-s w.x)) + lambda/2 |w|^2 is zero, with s = 1 for negatives and -1 for own."""
    own, negatives = features(30, 5, 0, 0.5), features(10, 5, 1, -0.5)
    w, rows = separator(own, negatives, 0.01, False)
    x = rows(torch.cat([own, negatives]))
    assert float(x.norm(dim=1).max()) <= 1 + 1e-12
    sign = torch.cat([-torch.ones(30), torch.ones(10)]).double()
    gradient = -(sign * torch.sigmoid(-sign * (x @ w))) @ x / 40 + 0.01 * w
    assert gradient.abs().max() < 1e-7


@pytest.mark.parametrize("released", [False, True])
def test_one_image_moves_the_minimiser_by_no_more_than_the_noise_assumes(released: bool) -> None:
    """2 / (n lambda) = 2 with n = 100 and lambda = 0.01. The worst replaced image found, a far outlier turned round:
    the calibrated minimiser stays within 2; the released one, whose lambda is lambda / n, leaves it."""
    negatives = features(50, 2, 1) * 0.1
    own = negatives.clone()  # nothing to learn but the one image
    moved = 0.0
    for replaced in ([3.0, 0.0], [-3.0, 0.0], [0.0, 3.0]):
        other = own.clone()
        other[0] = torch.tensor(replaced)
        w, _ = separator(own, negatives, 0.01, released)
        v, _ = separator(other, negatives, 0.01, released)
        moved = max(moved, float((w - v).norm()))
    assert (moved > 2) == released
    assert moved > 0.01


def test_noise_has_the_deviation_of_the_gaussian_mechanism() -> None:
    """2 / (n lambda) sqrt(2 ln(1.25 / delta)) / epsilon with n = 40, lambda = 10, epsilon = 0.5, delta = 1e-5. Rows of
    unit features i and j differ by (w_i - w_j) / sqrt 2, so the deviation of all logits is that of a weight / sqrt 2.
    """
    d = 4000
    own, negatives = features(30, d, 0), features(10, d, 1)
    asked = torch.eye(d) * float(negatives.norm(dim=1).max())
    settings = {"regularisation": 10.0, "epsilon": 0.5}
    noisy, clean = (score(own, negatives, asked, privacy, **settings) for privacy in ("calibrated", "none"))
    difference = torch.logit(noisy.double()) - torch.logit(clean.double())
    expected = 2 / (40 * 10) * (2 * torch.log(torch.tensor(1.25e5))).sqrt() / 0.5 / 2**0.5
    assert float(difference.std()) == pytest.approx(float(expected), rel=0.05)


@pytest.mark.parametrize("privacy", ["calibrated", "released", "none"])
def test_scores_are_probabilities_of_being_the_clients_own(privacy: str) -> None:
    own, negatives = features(200, 3, 0, 2.0), features(60, 3, 1, -2.0)
    asked = torch.cat([features(20, 3, 2, 2.0), features(20, 3, 3, -2.0)])
    s = score(own, negatives, asked, privacy, epsilon=1.0)
    assert s.shape == (40,) and s.min() > 0 and s.max() <= 1 + 1e-6
    if privacy == "none":
        assert s[:20].min() > s[20:].max()
    assert torch.equal(s, score(own, negatives, asked, privacy, epsilon=1.0))
    assert torch.equal(s, score(own, negatives, asked, privacy, seed=1, epsilon=1.0)) == (privacy == "none")


# --- FedAUX ------------------------------------------------------------------------------------------------------


def aux(on: Problem, state: State, rounds: int = 1, **settings: object) -> Iterator[Round]:
    defaults = {
        "rounds": rounds, "epochs": 1, "batch": 4, "lr": 0.05, "momentum": 0.9, "objective": objectives.standard,
        "aggregator": functools.partial(aggregators.samples), "distillation_lr": 0.01, "distillation_batch": 8,
        "epsilon": 1.0,
    }  # fmt: skip
    return fedaux(on, state, **nested(**{**defaults, **settings}))


def test_without_distillation_it_is_fedavg() -> None:
    on, state = problem(images(20))
    ours = list(aux(on, state, 2, distillation_epochs=0))
    how = LocalTraining(batch=4, lr=0.05, momentum=0.9, objective=objectives.standard)
    theirs = list(fedavg(on, state, rounds=2, local=how, aggregator=aggregators.samples))
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(a.state.model[name], b.state.model[name]) for name in a.state.model)
        assert a.cost.bytes_down == b.cost.bytes_down
    scores = 3 * 16 * 4  # three clients, 16 of 20 images, floats; once
    assert [a.cost.bytes_up - b.cost.bytes_up for a, b in zip(ours, theirs, strict=True)] == [scores, 0]
    assert ours[0].updates[0].extra["scores"].shape == (16,)
    assert not ours[1].updates[0].extra


class Constant(nn.Module):
    """Logits that are the model's own, whatever the image."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.logits(torch.zeros(len(x), 1))
        return z


def test_the_ensemble_weights_logits_by_certainty() -> None:
    """Two clients with logits (4, 0) and (0, 2); image 0 scored 3 : 1 gives (3, 1/2), image 1 scored 0 : 1 (0, 2)."""
    on, _ = problem(None, Constant())
    on = replace(on, classes=2)
    stats = Stats(0.0, 0.0, 0.0, 1, 1.0, 1)
    updates = [
        Update(k, 1, {"logits.weight": torch.zeros(2, 1), "logits.bias": torch.tensor(bias)}, stats)
        for k, bias in ((2, [4.0, 0.0]), (0, [0.0, 2.0]))
    ]
    scores = torch.tensor([[0.25, 1.0], [9.0, 9.0], [0.75, 0.0]])
    found = ensemble(on, updates, scores, images(2), 1, False)
    torch.testing.assert_close(found, torch.tensor([[3.0, 0.5], [0.0, 2.0]]))


def test_distillation_moves_the_mean_towards_the_ensemble() -> None:
    """Many epochs: the student's distribution on D_d comes close to the teacher's; the running statistics of batch
    normalisation stay the clients' mean, in the released way they do not."""
    on, state = problem(images(20))
    (plain,) = aux(on, state, distillation_epochs=0)
    losses = []
    for epochs in (1, 60):
        (result,) = aux(on, state, distillation_epochs=epochs)
        losses.append(result.metrics["distillation_loss"])
        for name, value in result.state.model.items():
            if "running" in name:
                assert torch.equal(value, plain.state.model[name])
    assert losses[1] < losses[0] / 2
    (released,) = aux(on, state, predictions="released")
    assert not torch.equal(released.state.model["bn1.running_mean"], plain.state.model["bn1.running_mean"])


def test_counted_work() -> None:
    """16 images to distil on, 4 negatives, 3 clients, batches of 8: 2 epochs are 4 steps, 32 passes forward and back,
    and 16 predictions for each client; SimCLR once, two views of 20 images for 3 epochs."""
    on, state = problem(images(20))
    first, second = aux(on, state, 2, distillation_epochs=2, pretrain_epochs=3)
    assert second.metrics.keys() == {"server_steps", "server_forward", "server_backward", "distillation_loss"}
    assert (second.metrics["server_steps"], second.metrics["server_forward"]) == (4, 32 + 48)
    assert second.metrics["server_backward"] == 32
    scored = 20 + sum(map(len, on.shards))  # features of all images, once
    assert first.metrics["server_forward"] == 32 + 48 + 3 * 40 + scored
    assert first.metrics["pretrain_loss"] > 0
    assert not torch.equal(first.broadcast["conv1.weight"], state.model["conv1.weight"])  # pretrained


def test_aggregators_with_memory_and_robust_objectives_compose() -> None:
    on, state = problem(images(20))
    aggregator = functools.partial(aggregators.AGGREGATORS["sfat"], alpha=0.2, top=1)
    results = list(aux(on, state, 2, aggregator=aggregator))
    assert sum(results[1].mixing.weights) == pytest.approx(1)
    assert len(set(results[1].mixing.weights)) == 2
