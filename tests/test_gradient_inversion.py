"""Eavesdropping: exact where theory says exact, nothing where nothing was sent, sums that survive a stop."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from fatbench.engine import randomness as rng
from fatbench.engine.rounds import Problem, Round, State
from fatbench.methods.algorithms import gradient_inversion as module
from fatbench.methods.algorithms.gradient_inversion import gradient_inversion
from fatbench.methods.defences import DEFENCES
from fatbench.methods.intervals import wilson
from fatbench.methods.inversions import INVERSIONS, image_measures
from fatbench.methods.manipulations import MANIPULATIONS
from fatbench.methods.objectives import standard
from fatbench.models import MODELS
from fatbench.suite import cost, files


def problem() -> Problem:
    """20 smooth 12 x 12 images, a ViT of one block: 9 patches of 16 values, 32 wide, so all is determined."""
    with rng.forked(0, "model"):
        model = MODELS["vit"]((1, 12, 12), 10, patch=4, dim=32, depth=1, heads=2)
    small = torch.rand(20, 1, 6, 6, generator=rng.generator(0, "images"))
    images = torch.nn.functional.interpolate(small, (12, 12), mode="bilinear").mul(255).round().to(torch.uint8)
    labels = torch.arange(20) % 10
    return Problem(model, images, labels, [torch.arange(20)], 10, 3, torch.device("cpu"))


def watch(defence: str, inversion: str, start: State | None = None, **settings: object) -> list[Round]:
    on = problem()
    rate = {"mask_probability": 0.5} if "binary" in defence else {}
    chosen = functools.partial(INVERSIONS[inversion], **({"latent": 6} if inversion == "masked" else {}))
    given = {"rounds": 2, "target_clients": 2, "candidates": 20, "objective": standard, "inversion": chosen, **settings}
    given["defence"] = functools.partial(DEFENCES[defence], **rate)
    begin = start or State(0, {k: v.clone() for k, v in on.model.state_dict().items()})
    return list(gradient_inversion(on, begin, **given))


def test_least_squares_gives_the_image_back() -> None:
    """9 patches, 32 equations each, float32 gradients: exact to rounding, and it names its original and its label."""
    last = watch("none", "patch_ls")[-1].metrics
    assert last["psnr"] > 60
    assert (last["identification"], last["label_recovery"], last["identification_ci"]) == (1, 1, 0)
    assert last["grey_psnr"] < 30


def test_a_reconstruction_stands_beside_the_image_that_it_is_of() -> None:
    """The last batch has the classes 8, 9, 0, 1, of which fishing finds the lowest: the third image."""
    fishing = MANIPULATIONS["fishing"]
    last = watch("none", "patch_ls", batch=4, target_clients=1, rounds=3, manipulation=fishing)[-1]
    assert last.metrics["psnr"] > 60
    assert torch.equal(last.artifacts["original"], last.artifacts["reconstruction"])


@pytest.mark.parametrize(("shown", "first"), [([1, 5], 0.0), ([7, 1], 0.0), ([0, 9], 1.0), ([9, 0], 1.0)])
def test_the_first_image_of_a_batch_is_another_question_than_any_image(shown: list[int], first: float) -> None:
    """An attacker who returns two images of the set, at a client that has images 0 to 3, of which they hit one."""

    def guess(observed: object, model: object, shape: object, generator: object) -> Tensor:
        return problem().images[shown].float()[None] / 255

    on = problem()
    start = State(0, {name: value.clone() for name, value in on.model.state_dict().items()})
    (last,) = gradient_inversion(
        on, start, rounds=1, objective=standard, defence=DEFENCES["none"], inversion=guess, batch=4, target_clients=1,
        candidates=20,
    )  # fmt: skip
    found = last.metrics
    assert (found["identification"], found["identified_first"]) == (1.0, first)
    assert (found["identification_client"], found["identified_first_client"]) == ({0: 1.0}, {0: first})
    assert found["candidates_used"] == 20
    assert (found["identification_chance"], found["identified_first_chance"]) == pytest.approx((0.36, 0.0975))
    interval = wilson(int(first), 1)
    assert (found["identified_first_low"], found["identified_first_high"]) == pytest.approx(interval)


def test_candidates_are_the_first_images_and_all_that_are_attacked() -> None:
    used = {n: watch("none", "patch_ls", candidates=n)[-1].metrics["candidates_used"] for n in (1, 4, 12, 20, 50)}
    assert used == {1: 4, 4: 4, 12: 12, 20: 20, 50: 20}
    of_batches = watch("none", "patch_ls", candidates=2, batch=4, target_clients=1)[-1].metrics
    assert of_batches["candidates_used"] == 8


def test_random_guesses_are_right_as_often_as_chance_says() -> None:
    """Three images of 20, drawn at random for each of 1,500 clients with four: 48.8 % name any, 14.3 % the first."""
    clients, batch, guesses = 1500, 4, 3
    images = torch.rand(20, 1, 12, 12, generator=rng.generator(0, "images"))
    draws = rng.generator(0, "guesses")
    truth = torch.stack([torch.randperm(20, generator=draws)[:batch] for _ in range(clients)])
    drawn = images[torch.randint(20, (clients, guesses), generator=draws)]
    gallery = image_measures.shrink(images, 32)
    small, flat = image_measures.shrink(drawn.flatten(0, 1), 32), truth.repeat_interleave(guesses, 0)
    hits = torch.stack([image_measures.identified(small, gallery, flat[:, b]) for b in range(batch)], 1)
    named = hits.view(clients, guesses, batch).any(1)
    chance = module._chances(20, guesses, batch)
    for name, found in (("identification", named.any(1)), ("identified_first", named[:, 0])):
        expected = chance[f"{name}_chance"]
        assert abs(float(found.double().mean()) - expected) < 4 * (expected * (1 - expected) / clients) ** 0.5


@pytest.mark.parametrize(
    ("candidates", "guesses", "batch", "any_", "first"),
    [(1000, 1, 1, 0.1, 0.1), (1000, 16, 16, 22.7, 1.6), (1000, 1, 16, 1.6, 0.1), (2560, 1, 64, 2.5, 0.04),
     (1024, 64, 64, 98.4, 6.1), (2560, 64, 64, 80.2, 2.5)],
)  # fmt: skip
def test_chance_of_the_sizes_that_suites_have(
    candidates: int, guesses: int, batch: int, any_: float, first: float
) -> None:
    found = module._chances(candidates, guesses, batch)
    assert 100 * found["identification_chance"] == pytest.approx(any_, abs=0.05)
    assert 100 * found["identified_first_chance"] == pytest.approx(first, abs=0.05)


def test_a_run_that_an_earlier_version_began_has_no_mean_over_its_later_clients_alone() -> None:
    first, last = watch("none", "patch_ls")
    earlier = State(1, {}, {name: sums for name, sums in first.state.server.items() if name != "identified_first"})
    (resumed,) = watch("none", "patch_ls", State(1, first.state.model, earlier.server))
    assert not any(name.startswith("identified_first") and "chance" not in name for name in resumed.metrics)
    assert resumed.metrics["identification"] == last.metrics["identification"]


def test_nothing_is_left_where_the_positions_are_withheld() -> None:
    """A constant reconstruction identifies nobody."""
    last = watch("fixed_position", "patch_ls")[-1].metrics
    assert last["identification"] == 0
    assert abs(last["correlation32"]) < 1e-6


def test_the_closed_form_needs_a_bare_block() -> None:
    """APRIL names every reconstruction without norm and residuals in block 0, and guesses with them."""
    bare, ordinary = (watch("none", "april", block0=kind)[-1].metrics for kind in ("bare", "ordinary"))
    assert bare["identification"] == 1
    assert ordinary["identification"] <= 0.25  # 1 of 4 among 20 candidates, by chance
    assert bare["psnr"] > ordinary["psnr"] + 2


def test_more_rounds_tell_more() -> None:
    """At R = 0.5, whoever sees 12 rounds with fresh masks knows all but 1 in 4,096 entries."""
    once = watch("random_binary", "masked")[-1].metrics["psnr"]
    often = watch("random_binary", "masked", observed_rounds=12)[-1].metrics["psnr"]
    assert often > once


def test_locked_masks_tell_no_more_in_the_second_round() -> None:
    one, two = (watch("locked_binary", "masked", observed_rounds=m)[-1].metrics["psnr"] for m in (1, 2))
    assert two == pytest.approx(one, abs=0.5)


def test_stopping_between_groups_changes_nothing() -> None:
    whole = watch("random_binary", "patch_ls")
    first = watch("random_binary", "patch_ls")[0]
    rest = watch("random_binary", "patch_ls", start=first.state)
    assert [r.index for r in rest] == [1]
    assert rest[0].metrics == whole[1].metrics
    for name, value in whole[1].artifacts.items():
        assert torch.equal(value, rest[0].artifacts[name])


def test_moving_weights_are_broadcast_anew() -> None:
    """The same victim, watched twice while the model moves: another gradient, the same reconstruction."""
    moving = watch("none", "patch_ls", observed_rounds=2, weights="moving", lr=0.1)[-1].metrics
    fixed = watch("none", "patch_ls", observed_rounds=2)[-1].metrics
    assert moving["psnr"] != fixed["psnr"]


def test_a_plan_knows_that_nothing_is_trained():
    spec = files.load("april-masks").plan("quick").cells[0].spec
    work = cost.training(spec)
    assert (work.gradient_steps, work.disk) == (0, 0)
    assert work.forward == 100
