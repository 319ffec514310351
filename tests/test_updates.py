"""What updates of local training give away: the theorem and its limits, labels, malicious servers, sums of clients."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import small
from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.engine import randomness as rng
from fatbench.engine.local import LocalTraining
from fatbench.engine.rounds import Problem, Round, State
from fatbench.errors import SpecError
from fatbench.methods.algorithms.gradient_inversion import gradient_inversion
from fatbench.methods.defences import DEFENCES
from fatbench.methods.evasion import ATTACKS
from fatbench.methods.inversions import INVERSIONS
from fatbench.methods.inversions.image_measures import matched
from fatbench.methods.inversions.labels import LABELS, label_counts, rounded
from fatbench.methods.inversions.simulated import simulate_steps
from fatbench.methods.manipulations import MANIPULATIONS
from fatbench.methods.objectives import OBJECTIVES, PROXIMALS, standard
from fatbench.models import MODELS
from fatbench.suite import cells, files, signatures, threats

EXACT = 100.0  # dB in float64: rounding alone


def problem(classes: int = 10) -> Problem:
    """60 smooth 12 x 12 images, a ViT of one block: 9 patches of 16 values, 32 wide, so all is determined."""
    with rng.forked(0, "model"):
        model = MODELS["vit"]((1, 12, 12), classes, patch=4, dim=32, depth=1, heads=2)
    small = torch.rand(60, 1, 6, 6, generator=rng.generator(0, "images"))
    images = F.interpolate(small, (12, 12), mode="bilinear").mul(255).round().to(torch.uint8)
    return Problem(model, images, torch.arange(60) % classes, [torch.arange(60)], classes, 3, torch.device("cpu"))


def local(**settings: Any) -> LocalTraining:
    return LocalTraining(**{"batch": 1, "lr": 0.1, "objective": standard, **settings})


def look(inversion: str = "patch_ls", on: Problem | None = None, defence: Any = None, **settings: Any) -> Round:
    """The last round of an inversion of two target clients, exact solver unless said."""
    on = on or problem()
    own = {name: settings.pop(name) for name in ("solver", "decay", "iterations", "steps") if name in settings}
    if inversion == "patch_ls":
        own = {"solver": "lstsq", **own}
    start = State(0, {k: v.clone() for k, v in on.model.state_dict().items()})
    chosen = functools.partial(INVERSIONS[inversion], **own)
    given = {"rounds": 1, "target_clients": 2, "candidates": 20, "wire": "float64", **settings}
    given |= {"objective": standard, "defence": defence or DEFENCES["none"], "inversion": chosen}
    return list(gradient_inversion(on, start, **given))[-1]


def psnr(**settings: Any) -> float:
    return look(**settings).metrics["psnr"]


# --- one image: any number of steps ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 1},
        {"epochs": 5},
        {"epochs": 20, "momentum": 0.9},
        {"epochs": 5, "proximal": functools.partial(PROXIMALS["squared"], mu=0.1)},
        {"epochs": 5, "clip": 0.1},
    ],
    ids=["1 step", "5 steps", "momentum", "proximal", "clipped"],
)
def test_one_image_is_found_exactly_whatever_the_steps(settings):
    """SGD adds up gradients with the same coefficients for all tensors, so M = A^T X holds for their sums."""
    assert psnr(local=local(**settings)) > EXACT


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_weight_decay_is_taken_off_in_closed_form(momentum):
    how = local(epochs=5, weight_decay=5e-2, momentum=momentum)
    assert psnr(local=how) < 40
    assert psnr(local=how, decay="corrected") > EXACT


def flips(x: Tensor, generator: torch.Generator) -> Tensor:
    return x.flip(-1) if torch.rand((), generator=generator) < 0.5 else x


def test_where_the_identity_ends():
    """Adam has other coefficients for each entry; of several images, flips and adversarial images X changes."""
    assert psnr(local=local(epochs=5, optimizer="adam", lr=1e-3)) < 25
    assert psnr(local=local(epochs=1), batch=4) < 25
    assert psnr(local=local(epochs=8), on=replace(problem(), augment=flips)) < 25
    pgd = functools.partial(ATTACKS["pgd"], eps=16 / 255, step=4 / 255, steps=3)
    at = functools.partial(OBJECTIVES["at"], attack=pgd)
    one, five = (psnr(local=local(epochs=n, objective=at)) for n in (1, 5))
    assert 20 < one < 35  # the adversarial image, exactly: at most 16/255 from the original
    assert five < one - 2


def test_numbers_on_the_wire_cost_more_than_steps():
    how = local(epochs=5, lr=0.01)
    full, single, half = (psnr(local=how, wire=wire, solver="ridge") for wire in ("float64", "float32", "float16"))
    assert full > 90 > single > 40 > half
    # a gradient, too, is rounded once
    assert psnr(wire="float16", solver="ridge") < psnr(wire="float32", solver="ridge")


# --- several steps, simulated ------------------------------------------------------------------------------------


class Softmax(nn.Module):
    """Softmax regression that starts at zero."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(features, classes)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1))


def trained(x: list[list[float]], y: list[int], classes: int, lr: float) -> tuple[dict[str, Tensor], nn.Module]:
    model = Softmax(len(x[0]), classes).double()
    how = LocalTraining(batch=1, lr=lr, objective=standard)
    images = torch.tensor(x, dtype=torch.float64).view(1, len(x), 1, 1, -1)
    found = simulate_steps(model, dict(model.state_dict()), images, torch.tensor(y), how, ["out.weight", "out.bias"])
    return {name: value.detach() for name, value in found.items()}, model


def test_two_steps_of_softmax_regression_by_hand():
    moved, _ = trained([[1, 0], [0, 1]], [0, 1], 2, 1.0)
    torch.testing.assert_close(-moved["out.weight"], torch.tensor([[0.5, -0.7310586], [-0.5, 0.7310586]]).double())
    torch.testing.assert_close(-moved["out.bias"], torch.tensor([-0.2310586, 0.2310586]).double())


def test_two_images_from_the_sum_of_two_steps():
    """delta_1 is known at zero weights, delta_2 follows from the bias, and the images from least squares."""
    x = [[0.06, 0.22, 0.23, 0.18], [0.56, 0.11, 0.46, 0.71]]
    moved, _ = trained(x, [0, 2], 3, 0.5)
    torch.testing.assert_close(-0.5 * moved["out.bias"], torch.tensor([0.0892631, -0.2946316, 0.2053684]).double())
    one = torch.full((3,), 1 / 3, dtype=torch.float64) - torch.eye(3, dtype=torch.float64)[0]
    two = moved["out.bias"] - one
    found = torch.linalg.lstsq(torch.stack([one, two], 1), moved["out.weight"]).solution
    torch.testing.assert_close(found, torch.tensor(x).double(), atol=1e-6, rtol=0)


def test_the_simulated_update_is_that_of_the_order_of_the_images():
    x, y = [[0.06, 0.22, 0.23, 0.18], [0.56, 0.11, 0.46, 0.71]], [0, 2]
    true, _ = trained(x, y, 3, 0.5)
    other, _ = trained(x[::-1], y[::-1], 3, 0.5)
    at_once = [torch.eye(3).double()[c] for c in y]
    pairs = zip(at_once, x, strict=True)
    rows = torch.stack([(1 / 3 - hot)[:, None] * torch.tensor(image).double() for hot, image in pairs])
    single = {"out.weight": rows.sum(0), "out.bias": sum(1 / 3 - hot for hot in at_once)}

    def angle(a: dict[str, Tensor]) -> float:
        flat, own = (torch.cat([t[n].flatten() for n in ("out.weight", "out.bias")]) for t in (a, true))
        return 1 - float(F.cosine_similarity(flat, own, dim=0))

    assert angle(true) == pytest.approx(0, abs=1e-12)
    assert angle(single) == pytest.approx(0.029275, abs=1e-6)
    assert angle(other) == pytest.approx(0.066596, abs=1e-6)


def test_simulated_steps_are_those_of_local_training():
    """Two images, three epochs with momentum and decay: at the truth nothing is left of the distance."""
    on, how = problem(), local(epochs=3, batch=2, momentum=0.5, weight_decay=0.01)
    from fatbench.methods.inversions.target_client import ClientImages, TargetClient, update

    chosen = torch.arange(2)[None]
    x, y = on.images[chosen].double() / 255, on.labels[chosen]
    client = TargetClient(on, DEFENCES["none"], how, "float64")
    sent = update(client, on.model, dict(on.model.state_dict()), ClientImages(chosen, x.float(), y), None, 0)
    model = on.model.double().eval()
    own = simulate_steps(model, dict(model.state_dict()), x, y[0], how, list(sent))
    for name, value in sent.items():
        torch.testing.assert_close(0.1 * own[name], value[0])


def test_simulated_comes_nearer_than_noise():
    how = local(epochs=2, batch=1)
    few, many = (look("simulated", local=how, batch=2, iterations=n, target_clients=1).metrics for n in (1, 60))
    assert many["matched_psnr"] > few["matched_psnr"]


# --- labels ------------------------------------------------------------------------------------------------------


def counted(how: str, g: list[float], batch: int) -> list[int]:
    slope = torch.tensor(g).double()
    uniform = torch.full_like(slope, 1 / len(g))
    zero = torch.zeros(len(g), 5).double()
    return LABELS[how](slope, zero, zero, slope * 0, batch, lambda: uniform).tolist()


def test_labels_of_a_head_of_zeros():
    g = [-0.125, 0.25, -0.25, 0.125]
    assert counted("counts", g, 8) == [3, 0, 4, 1]
    assert counted("ilrg", g, 8) == [3, 0, 4, 1]
    assert counted("llg", g, 8) == [3, 0, 5, 0]


def test_counts_are_whole_and_add_up():
    assert rounded(torch.tensor([1.0, 1.0, 1.0, 0.0]), 4).sum() == 4
    assert rounded(torch.tensor([1.2, 1.9, -1.0]), 3).tolist() == [1, 2, 0]
    found, true = torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 2]])
    assert label_counts(found, true, 3).tolist() == pytest.approx([2 / 3])


@pytest.mark.parametrize("how", [{}, {"local": local(epochs=2, batch=4, lr=0.01)}], ids=["gradient", "update"])
def test_labels_are_restored_from_what_is_sent(how):
    got = look(batch=8, labels_from="ilrg", wire="float32", **how).metrics
    assert got["label_counts"] > 0.8


# --- a malicious server ------------------------------------------------------------------------------------------


def caught(name: str, **settings: Any) -> Any:
    return functools.partial(MANIPULATIONS[name], **settings)


def test_fishing_gets_one_image_of_a_batch_exactly():
    """Also by labels of an honest round; it needs a class with one image."""
    fishing = caught("fishing")
    assert psnr(batch=8) < 25 and psnr(batch=8, on=problem(classes=2), manipulation=fishing) < 25
    assert psnr(batch=8, manipulation=fishing) > EXACT
    assert psnr(batch=4, labels_from="ilrg", manipulation=fishing) > EXACT


def test_a_sum_of_clients_hides_and_dead_heads_undo_it():
    alone, hidden = psnr(batch=1), psnr(batch=1, aggregate=5)
    undone = psnr(batch=1, aggregate=5, manipulation=caught("dead_heads"))
    assert alone > EXACT and undone > EXACT and hidden < 25


def test_a_sum_of_clients_is_the_gradient_of_all_their_images():
    from fatbench.methods.algorithms.gradient_inversion import sums_of_clients
    from fatbench.methods.defences import Upload
    from fatbench.methods.inversions.target_client import ClientImages, TargetClient
    from fatbench.methods.inversions.upload import gradients
    from fatbench.methods.manipulations import Manipulated

    on = problem()
    model, theta = on.model, dict(on.model.state_dict())
    chosen = torch.arange(6).view(3, 2)
    x, y = on.images[chosen] / 255, on.labels[chosen]
    client, honest = TargetClient(on, DEFENCES["none"]), Manipulated(model, theta, theta)
    (seen,) = sums_of_clients(client, ClientImages(chosen, x, y), [Upload(0, 0)], 0, honest, None)
    whole = gradients(model, theta, x.view(1, 6, 1, 12, 12), y.view(1, 6))
    for name, value in whole.items():
        torch.testing.assert_close(seen.gradient[name], value, atol=1e-6, rtol=1e-4)


class Two(nn.Module):
    """Logits (s, -s) of s = h_1 + h_2: two bins in front of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor([0.0, -0.5], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        s = F.linear(x, self.weight, self.bias).relu().sum(1, keepdim=True)
        return torch.cat([s, -s], 1)


def test_the_readout_of_two_bins_by_hand():
    """As released: rows less those before them lose the image above the last threshold; the first row is the sum of
    both."""
    model, x = Two(), torch.tensor([[0.2, 0.4], [0.8, 0.6]], dtype=torch.float64)
    W, b = torch.autograd.grad(F.cross_entropy(model(x), torch.tensor([0, 1])), [model.weight, model.bias])
    torch.testing.assert_close(b, torch.tensor([0.503805, 0.858149]).double(), atol=1e-6, rtol=0)
    first = (W[0] - W[1]) / (b[0] - b[1])
    torch.testing.assert_close(torch.stack([first, W[1] / b[1]]), x)
    released = torch.stack([W[0] / b[0], (W[1] - W[0]) / (b[1] - b[0])])
    torch.testing.assert_close(released, torch.tensor([[1.222, 0.741], [0.2, 0.4]]).double(), atol=6e-4, rtol=0)


@pytest.mark.parametrize("kind", ["cumulative", "sparse"])
def test_bins_after_local_steps_by_hand(kind):
    """Two images alone in their bins, rate 0.1, thresholds 0, 0.5, 1: only rows that one image moves stay exact."""
    x, y = torch.tensor([[0.2, 0.4], [0.8, 0.6]], dtype=torch.float64), torch.tensor([0, 1])
    width = 0.5 if kind == "sparse" else 1.0
    start = [torch.full((2, 2), 0.5 / width), torch.tensor([0.0, -0.5 / width]), torch.tensor([[1.0, 1], [-1, -1]])]
    theta = [*(part.double() for part in start), torch.zeros(2, dtype=torch.float64)]
    first, errors = list(theta), []
    for _ in range(10):
        theta = [part.detach().requires_grad_() for part in theta]
        h = F.linear(x, theta[0], theta[1])
        h = h.clamp(0, 1) if kind == "sparse" else h.relu()
        slopes = torch.autograd.grad(F.cross_entropy(F.linear(h, theta[2], theta[3]), y), theta)
        theta = [part - 0.1 * slope for part, slope in zip(theta, slopes, strict=True)]
        W, b = (before - after.detach() for before, after in zip(first[:2], theta[:2], strict=True))
        found = W[0] / b[0] if kind == "sparse" else (W[0] - W[1]) / (b[0] - b[1])
        errors.append(float((found - x[0]).abs().max()))
    assert errors[0] < 1e-12
    if kind == "sparse":
        assert max(errors) < 1e-12
    else:
        assert (errors[1], errors[4]) == (pytest.approx(0.0096, abs=1e-4), pytest.approx(5.4, abs=0.1))


@pytest.mark.parametrize("kind", ["cumulative", "sparse"])
def test_an_imprint_block_gives_images_of_a_batch(kind):
    with rng.forked(0, "model"):
        model = MODELS["small_cnn"]((1, 32, 32), 10)
    small = torch.rand(60, 1, 6, 6, generator=rng.generator(0, "images"))
    images = F.interpolate(small, (32, 32), mode="bilinear").mul(255).round().to(torch.uint8)
    on = Problem(model, images, torch.arange(60) % 10, [torch.arange(60)], 10, 3, torch.device("cpu"))
    got = look("imprint", on=on, batch=4, manipulation=caught("imprint", bins=200, kind=kind)).metrics
    assert got["recovered"] >= 0.5 and got["psnr"] > 60


@pytest.mark.parametrize("wire", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["cumulative", "sparse"])
def test_an_imprint_block_survives_local_training(kind, wire):
    block = caught("imprint", bins=100, kind=kind)
    got = look("imprint", batch=4, local=local(epochs=2, batch=4), manipulation=block, wire=wire).metrics
    assert got["psnr"] > 40 and got["recovered"] >= 0.25


def test_images_alone_in_their_bin():
    """n (1 - 1/k)^(n - 1) of n images in k equally likely bins are alone."""
    draw = torch.randint(8, (20000, 4), generator=torch.Generator().manual_seed(0))
    alone = sum((F.one_hot(draw, 8).sum(1).gather(1, draw[:, i : i + 1]) == 1).double().mean() for i in range(4))
    assert float(alone) == pytest.approx(2.680, abs=0.03)  # 4 (1 - 1/8)^3


def test_an_imprint_block_needs_images_of_the_servers_own():
    with pytest.raises(ValueError, match="every training image is a target's"):
        look("imprint", batch=30, manipulation=caught("imprint"))


# --- measures, intervals -----------------------------------------------------------------------------------------


def test_pairs_are_assigned_one_to_one(monkeypatch):
    table = torch.tensor([[20.0, 10.0], [18.0, 9.0]])
    from fatbench.methods.inversions import image_measures

    monkeypatch.setattr(image_measures, "psnr", lambda a, b: table.flatten())
    monkeypatch.setattr(image_measures, "ssim", lambda a, b: table.flatten() / 20)
    found = matched(torch.zeros(1, 2, 1, 2, 2), torch.zeros(1, 2, 1, 2, 2))
    assert (found["matched_psnr"].tolist(), found["recovered"].tolist()) == ([14.5], [0.5])


def test_many_pairs_are_compared_part_by_part(monkeypatch):
    from fatbench.methods.inversions import image_measures

    a, b = (torch.rand(2, 5, 1, 12, 12, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    whole = image_measures.of_pairs(image_measures.psnr, a, b)
    monkeypatch.setattr(image_measures, "PAIRS", 4)
    torch.testing.assert_close(image_measures.of_pairs(image_measures.psnr, a, b), whole)


def test_intervals_of_few_images_are_students():
    normal, t = (look(interval=kind, solver="tsvd").metrics for kind in ("normal", "t"))
    assert t["ssim_ci"] == pytest.approx(normal["ssim_ci"] * 12.7062 / 1.96, rel=1e-4)
    assert (t["identification_low"], t["identification_high"]) == (pytest.approx(0.342, abs=1e-3), 1.0)


# --- threat models -----------------------------------------------------------------------------------------------

VIT = {"name": "vit", "patch": 4, "dim": 64, "heads": 2, "depth": 1}


def cell(**algorithm: Any) -> dict[str, Any]:
    spec = {"seed": 0, "data": "digits", "size": 32, "partition": {"name": "iid", "clients": 1}, "model": VIT}
    own = {"name": "gradient_inversion", "rounds": 1, "objective": "standard", "defence": "none"}
    return cells.canonical({**spec, "algorithm": {**own, **algorithm}}, "here")


@pytest.mark.parametrize(
    ("algorithm", "threat", "labels"),
    [
        ({"inversion": {"name": "patch_ls"}}, "A", "unused"),
        ({"inversion": {"name": "patch_ls", "solver": "tv"}}, "B", "unused"),
        ({"inversion": {"name": "patch_ls", "decay": "corrected"}}, "C", "unused"),
        ({"inversion": {"name": "matching"}}, "B", "given"),
        ({"inversion": {"name": "april_opt"}, "labels_from": "ilrg"}, "B", "recovered"),
        ({"inversion": {"name": "april"}, "block0": "bare"}, "F", "unused"),
        ({"inversion": {"name": "masked", "latent": 8}, "observed_rounds": 5}, "F", "unused"),
        ({"inversion": {"name": "masked", "latent": 8}, "observed_rounds": 5, "weights": "moving"}, "B", "unused"),
        ({"inversion": {"name": "patch_ls"}, "manipulation": {"name": "fishing"}, "batch": 4}, "F", "given"),
        ({"inversion": {"name": "imprint"}, "manipulation": {"name": "imprint"}, "batch": 4}, "G", "unused"),
        ({"inversion": {"name": "oracle", "latent": 8}}, "bound", "unused"),
    ],
)
def test_threat_models_of_attacks(algorithm, threat, labels):
    assert threats.of_cell(cell(**algorithm)) == {"threat": threat, "labels": labels}


def test_threat_models_of_cells_and_methods():
    """A diagnostic has one also where the algorithm has none; training has none."""
    plan = files.load("fedvkd-cifar10").plan("smoke", where="threat=bound")
    assert plan.cells and {tuple(threats.of_cell(cell.spec).values()) for cell in plan.cells} == {("bound", "given")}
    assert threats.of_cell(files.load("sfat-cifar10").plan("smoke").cells[0].spec) == {}
    for kind in ("Inversion", "Manipulation"):
        for name in signatures.names(kind):
            assert (signatures.describe(kind, name).entry or {}).get("threat"), name
    for letters, together in (("AA", "A"), ("BF", "F"), ("DF", "G"), ("EF", "custom"), (["A", "bound"], "bound")):
        assert threats.covering([*letters]) == together


ALGORITHM = "{name: gradient_inversion, rounds: 1, objective: standard, defence: none, inversion: {name: matching}}"
SUITE = small(
    "threat: THREAT\n", size="32", train="", test="", partition="{name: iid, clients: 1}", axes="", evaluate="",
    model="{name: vit, patch: 4, dim: 64, heads: 2, depth: 1}", algorithm=ALGORITHM,
    tables='[{id: T, title: t, rows: [threat, labels], values: {PSNR: "train:psnr"}}]',
)  # fmt: skip


def test_a_suite_that_states_a_model_refuses_what_needs_more(tmp_path):
    from fatbench.report.numbers.points import points_of_table

    file = tmp_path / "mine.yaml"

    def stating(threat: str, more: str = "") -> files.Suite:
        file.write_text(SUITE.replace("THREAT", threat).replace("  algorithm:", f"{more}  algorithm:"))
        return files.load(str(file))

    with pytest.raises(SpecError) as caught_:
        stating("A").plan()
    assert str(caught_.value).startswith(f"{file}:7: inversion: matching needs an image prior (threat model B)")
    assert f"states A, the eavesdropper ({file}:11: threat)" in str(caught_.value)
    suite = stating("B")
    assert len(suite.plan(where="threat=B and labels=given").cells) == 1
    assert list(points_of_table(suite.plan(), suite.tables[0])) == [((("threat", "B"), ("labels", "given")), ())]
    with pytest.raises(SpecError) as caught_:
        stating("B", "  monitor: natural\n  diagnostic: leakage\n").plan()
    needs = "leakage needs what only the client has (threat model bound)"
    assert str(caught_.value).startswith(f"{file}:8: name: {needs}")
    with pytest.raises(SpecError, match=f"{file}:11: threat: expected A, B, C, D, E, F, G or H, got 'Z'"):
        stating("Z")
