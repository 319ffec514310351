"""What batch normalisation in train mode shows and hides: closed forms of small networks, and whole uploads."""

from __future__ import annotations

import functools
import math
from itertools import product

import pytest
import torch
from members import refusal_of
from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.engine import randomness as rng
from fatbench.engine.local import Client, LocalTraining, train_client
from fatbench.engine.rounds import Problem, State
from fatbench.methods.algorithms.gradient_inversion import gradient_inversion
from fatbench.methods.defences import DEFENCES
from fatbench.methods.inversions import INVERSIONS
from fatbench.methods.inversions import batch_statistics as bs
from fatbench.methods.inversions.simulated import simulate_steps
from fatbench.methods.inversions.upload import Observation, differentiable, gradients, trained_gradients
from fatbench.methods.objectives import standard
from fatbench.models import MODELS

DOUBLE = torch.float64


def two_pixels() -> nn.Module:
    """A convolution of weight 1, batch normalisation, and a head of two rows."""
    convolution, head = nn.Conv2d(1, 1, 1, bias=False), nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        convolution.weight.fill_(1.0)
        head.weight.copy_(torch.tensor([[1.0, -1.0], [0.0, 2.0]]))
    return nn.Sequential(convolution, nn.BatchNorm2d(1), nn.Flatten(), head).double()


def upload_of(net: nn.Module, *images: list[float]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    x = torch.tensor(images, dtype=DOUBLE).view(1, len(images), 1, 1, 2)
    sent, after = trained_gradients(net, weights, x, torch.zeros(1, len(images), dtype=torch.int64))
    assert all(torch.equal(weights[name], value) for name, value in net.state_dict().items())  # the broadcast stays
    return sent, {name: value[0] for name, value in after.items()}


def test_two_pixels_come_back_from_gradient_and_buffers_and_from_neither_alone() -> None:
    net = two_pixels()
    before = net.state_dict()
    heads, found = {}, {}
    for pixels in ([0.2, 0.8], [0.4, 0.6], [0.8, 0.2]):
        sent, after = upload_of(net, pixels)
        heads[pixels[0]] = float(sent["3.weight"][0, 0, 0])
        ((mean, variance),) = bs.sent_statistics(net, before, after).values()
        found[pixels[0]] = float(mean), float(variance)
        assert float(after["1.running_mean"]) == pytest.approx(0.05)
        assert bs.local_steps(before, after) == 1
    assert found[0.2] == pytest.approx((0.5, 0.18))
    assert found[0.4] == pytest.approx((0.5, 0.02))
    assert found[0.8] == pytest.approx(found[0.2])
    assert [heads[first] for first in (0.2, 0.4, 0.8)] == pytest.approx([0.9819553, 0.9814878, -0.0179891], abs=1e-7)
    spread = math.sqrt(found[0.2][1] / 2)
    assert (found[0.2][0] - spread, found[0.2][0] + spread) == pytest.approx((0.2, 0.8))


@pytest.mark.parametrize(("momentum", "mean", "variance"), [(0.1, 0.085, 0.863), (None, 0.45, 0.29)])
def test_buffers_count_the_steps_and_mix_their_statistics(momentum, mean, variance) -> None:
    net = nn.Sequential(nn.BatchNorm1d(1, momentum=momentum)).double()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for batch in ([0.0, 1.0], [0.2, 0.6]):
        net(torch.tensor(batch, dtype=DOUBLE)[:, None])
    after = net.state_dict()
    assert bs.local_steps(before, after) == 2
    assert (float(after["0.running_mean"]), float(after["0.running_var"])) == pytest.approx((mean, variance))
    ((told, _),) = bs.sent_statistics(net, before, after).values()
    assert float(told) == pytest.approx(0.45 if momentum is None else (0.9 * 0.5 + 0.4) / 1.9)


def test_a_sum_of_clients_tells_the_mean_of_their_variances() -> None:
    net = two_pixels()
    both = [upload_of(net, pixels)[1] for pixels in ([0.2, 0.8], [0.4, 0.6])]
    mean = {n: (both[0][n] + both[1][n]) / 2 for n in both[0] if both[0][n].is_floating_point()}
    told = bs.sent_statistics(net, net.state_dict(), {**both[0], **mean})["1"]
    assert [float(one) for one in told] == pytest.approx([0.5, 0.10])
    pooled = upload_of(net, [0.2, 0.8], [0.4, 0.6])[1]
    assert float(bs.sent_statistics(net, net.state_dict(), pooled)["1"][1]) == pytest.approx(0.2 / 3)


def convolutions(padding: int, eps: float) -> nn.Module:
    torch.manual_seed(2)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=padding), nn.BatchNorm2d(4, eps=eps), nn.ReLU(), nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, eps=eps), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3),
    ).double()  # fmt: skip
    net(torch.rand(4, 1, 12, 12, dtype=DOUBLE))
    return net


@pytest.mark.parametrize(
    ("padding", "eps", "mode", "least", "most"),
    [
        (0, 1e-12, "train", 0, 1e-9),  # no client's brightness or contrast reaches the server
        (0, 1e-5, "train", 1e-5, 1e-2),
        (0, 1e-5, "eval", 0.1, 2),
        (1, 1e-5, "train", 0.05, 2),  # the zeros at the border tell
    ],
)
def test_brightness_and_contrast_reach_the_gradient_at_borders_only(padding, eps, mode, least, most) -> None:
    net = convolutions(padding, eps)
    x = torch.rand(1, 4, 1, 12, 12, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([[0, 1, 2, 1]])
    of = gradients if mode == "eval" else lambda *given: trained_gradients(*given)[0]
    a, b = (of(net, net.state_dict(), images, y) for images in (x, 0.5 * x + 0.2))
    apart = sum(float((a[n] - b[n]).square().sum()) for n in a) / sum(float(a[n].square().sum()) for n in a)
    assert least <= math.sqrt(apart) <= most


def test_the_true_images_have_distance_zero_in_the_clients_mode_alone() -> None:
    net = convolutions(1, 1e-5)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    x = torch.rand(4, 1, 12, 12, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 1])
    sent, after = trained_gradients(net, weights, x[None], y[None])
    for mode in ("train", "eval"):
        net.train(mode == "train")
        with bs.watched(net) as seen:
            ours = differentiable(net, weights, x, y, sent)
        far = max(float((ours[name].detach() - sent[name][0]).abs().max()) for name in sent)
        assert (far < 1e-12) == (mode == "train")
        if mode == "train":
            moved = bs.moved(net, weights, seen)
            assert moved.keys() == {*bs.layers_of(net)}
            for (n, ours_of), k in product(moved.items(), (0, 1)):
                told = after[f"{n}.{('running_mean', 'running_var')[k]}"][0]
                assert torch.allclose(ours_of[k], told, atol=1e-12)
    assert all(torch.equal(weights[name], value) for name, value in net.state_dict().items())


def test_in_a_sum_each_client_has_a_batch_of_its_own() -> None:
    net = convolutions(1, 1e-5)
    x, y = torch.rand(4, 1, 12, 12, dtype=DOUBLE), torch.tensor([0, 1, 2, 1])
    apart, _ = trained_gradients(net, net.state_dict(), x.view(2, 2, 1, 12, 12), y.view(2, 2))
    ours = differentiable(net, net.state_dict(), x, y, apart, clients=2)
    assert all(torch.allclose(ours[name], apart[name].mean(0)) for name in apart)
    pooled = differentiable(net, net.state_dict(), x, y, apart)
    assert not torch.allclose(pooled["0.weight"], apart["0.weight"].mean(0))


def problem() -> Problem:
    with rng.forked(0, "model"):
        model = MODELS["small_cnn"]((1, 12, 12), 4, width=2)
    images = torch.randint(0, 256, (24, 1, 12, 12), generator=rng.generator(0, "images"), dtype=torch.uint8)
    return Problem(model, images, torch.arange(24) % 4, [torch.arange(24)], 4, 3, torch.device("cpu"))


def start_of(on: Problem) -> State:
    return State(0, {name: value.clone() for name, value in on.model.state_dict().items()})


@pytest.mark.parametrize(("epochs", "batch", "steps"), [(1, 24, 1), (2, 8, 6), (3, 10, 9)])
def test_buffers_of_fedavg_tell_epochs_times_batches(epochs, batch, steps) -> None:
    on = problem()
    start = start_of(on)
    local = LocalTraining(batch, 0.1, standard, epochs=epochs)
    done = _one_upload(on, start, local)
    assert bs.local_steps(start.model, done) == steps


def _one_upload(on: Problem, start: State, local: LocalTraining) -> dict[str, Tensor]:
    return train_client(Client(on, start.model, 0, 0), local).model


def watch(inversion: object, **settings: object) -> dict[str, object]:
    on = problem()
    base = {"rounds": 1, "target_clients": 2, "candidates": 8, "batch": 2, "surrogates": 4, **settings}
    base |= {"objective": standard, "defence": DEFENCES["none"], "inversion": inversion}
    return dict(list(gradient_inversion(on, start_of(on), **base))[-1].metrics)


def matching(**settings: object) -> object:
    return functools.partial(INVERSIONS["matching"], steps=3, **settings)


def test_an_upload_with_buffers_tells_its_steps_and_statistics_are_matched() -> None:
    local = LocalTraining(1, 0.05, standard, epochs=3)
    kept = watch(matching(), mode="train")
    assert "steps_told" not in kept
    sent = watch(matching(statistics=0.1), mode="train", buffers="sent")
    assert sent["steps_told"] == 1
    assert sent["psnr"] != kept["psnr"]
    attack = functools.partial(INVERSIONS["simulated"], iterations=2, statistics=1.0)
    trained = watch(attack, mode="train", buffers="sent", local=local)
    assert trained["steps_told"] == 6
    modes = [watch(matching(), mode="train", attacker=attacker)["psnr"] for attacker in ("informed", "eval")]
    assert modes[0] != modes[1]
    for source in ("broadcast", "images"):
        assert watch(matching(statistics=0.1, statistics_from=source), mode="train")["psnr"] != kept["psnr"]


def test_statistics_pull_towards_the_batch_that_was_sent() -> None:
    """A network without padding hides brightness; only buffers bring it back."""
    net = convolutions(0, 1e-5).float()
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    x = 0.2 + 0.2 * torch.rand(1, 2, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([[0, 1]])
    sent, after = trained_gradients(net, weights, x, y)
    seen = [Observation(weights, sent, y, mode="train", buffers=after)]
    found = functools.partial(INVERSIONS["matching"], seen, net, (1, 12, 12), steps=60, tv=0.0)
    without, near = (float(found(torch.Generator().manual_seed(1), statistics=w).mean()) for w in (0.0, 1.0))
    assert abs(near - float(x.mean())) < 0.02 < abs(without - float(x.mean()))


def test_of_several_starts_the_one_with_the_smallest_loss_is_kept() -> None:
    net = convolutions(1, 1e-5).float()
    x, y = torch.rand(1, 1, 1, 12, 12, generator=torch.Generator().manual_seed(0)), torch.tensor([[1]])
    sent, _ = trained_gradients(net, net.state_dict(), x, y)
    seen = [Observation(net.state_dict(), sent, y, mode="train")]

    def loss_of(made: Tensor) -> float:
        net.train()
        ours = differentiable(net, seen[0].weights, made[0], y[0], sent)
        flat = [torch.cat([g.flatten() for g in one]) for one in (ours.values(), [sent[n][0] for n in ours])]
        return 1 - float(F.cosine_similarity(*flat, dim=0).detach())

    def tried(restarts: int, seed: int) -> Tensor:
        draws = torch.Generator().manual_seed(seed)
        return INVERSIONS["matching"](seen, net, (1, 12, 12), draws, steps=4, restarts=restarts)

    losses = [[loss_of(tried(n, seed)) for n in (1, 3)] for seed in range(4)]
    assert all(three <= one + 1e-6 for one, three in losses)
    assert any(three < one - 1e-4 for one, three in losses)


def test_simulated_steps_in_train_mode_are_those_of_the_client() -> None:
    on = problem()
    start = start_of(on)
    local = LocalTraining(24, 0.1, standard, epochs=3)  # the whole shard: its order matters to rounding alone
    after = _one_upload(on, start, local)
    on.model.train()
    x = on.images.float()[None] / 255
    names = [name for name, _ in on.model.named_parameters()]
    with bs.watched(on.model) as seen:
        ours = simulate_steps(on.model, start.model, x, on.labels, local, names)
    assert all(torch.allclose(ours[n] * 0.1, start.model[n] - after[n], atol=1e-5) for n in names)
    moved = bs.moved(on.model, start.model, seen)
    assert all(torch.allclose(moved[n][0], after[f"{n}.running_mean"], atol=1e-5) for n in moved)


def refused(**algorithm: object) -> str:
    model = algorithm.pop("model", {"name": "small_cnn", "width": 2})
    spec = {
        "seed": 0, "data": "digits", "size": algorithm.pop("size", 12), "partition": {"name": "iid", "clients": 1},
        "model": model,
        "algorithm": {"name": "gradient_inversion", "rounds": 1, "objective": "standard", "defence": "none",
                      "inversion": "matching", "batch": 2, **algorithm},
    }  # fmt: skip
    return refusal_of(spec)


LOCAL = {"batch": 2, "lr": 0.1, "objective": "standard"}
WITH = {"name": "matching", "statistics": 0.1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "train", "model": {"name": "mlp"}}, "mode: train: mlp computes the same in both modes"),
        ({"mode": "train", "model": {"name": "nin"}}, "masks of dropout are unknown"),
        ({"mode": "train", "batch": 3, "size": 8, "model": {"name": "resnet18"}, "local": LOCAL},
         "last batch has one example"),
        ({"buffers": "sent"}, "buffers: sent needs mode: train"),
        ({"mode": "train", "buffers": "sent", "model": {"name": "mlp"}}, "computes the same"),
        ({"mode": "train", "buffers": "sent", "attacker": "eval", "inversion": WITH}, "attacker: eval simulates no"),
        ({"inversion": {**WITH, "statistics_from": "broadcast"}, "model": {"name": "mlp"}}, "no batch normalisation"),
        ({"mode": "train", "defence": {"name": "dpsgd", "noise": 1}}, "no example has one of its own"),
        ({"mode": "train", "defence": {"name": "soteria", "fraction": 0.1}}, "set mode: eval"),
        ({"mode": "train", "inversion": "simulated", "aggregate": 2}, "leave out 'aggregate'"),
        ({"attacker": "eval"}, "attacker: eval is the informed one"),
    ],
)  # fmt: skip
def test_modes_that_mean_nothing_are_refused_before_anything_runs(settings, message) -> None:
    assert message in refused(**settings)


def test_normalising_each_image_by_itself_changes_the_normalisation_alone(tmp_path) -> None:
    """`norm: group` has the shapes of batch normalisation, no statistics, and one mode; its own weights fill it."""
    batches, images = (MODELS["small_cnn"]((1, 12, 12), 4, width=2, norm=norm) for norm in ("one", "group"))
    shapes = [{name: value.shape for name, value in net.named_parameters()} for net in (batches, images)]
    assert shapes[0] == shapes[1] and not bs.layers_of(images)
    x = torch.rand(3, 1, 12, 12)
    assert torch.allclose(images.train()(x), images.eval()(x))
    assert torch.allclose(images(x)[:1], images(x[:1]), atol=1e-6)
    assert "computes the same in both modes" in refused(mode="train", model={"name": "small_cnn", "norm": "group"})
    torch.save(images.state_dict(), tmp_path / "w.pt")
    torch.manual_seed(1)
    again = MODELS["small_cnn"]((1, 12, 12), 4, width=2, norm="group", weights=str(tmp_path / "w.pt"))
    assert torch.equal(again.eval()(x), images.eval()(x)) and again.pretrained["source"] == "w.pt"
    with pytest.raises(ValueError, match="does not fit the architecture"):
        MODELS["small_cnn"]((1, 12, 12), 4, width=3, norm="group", weights=str(tmp_path / "w.pt"))
