"""What an upload gives away: closed forms for gradient matching and the diagnostic, and when that runs."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fatbench.engine.rounds import Cost, Problem, Round, State, Stats, Update
from fatbench.methods.diagnostics import leakage
from fatbench.methods.inversions.image_measures import correlation
from fatbench.methods.inversions.matching import matching
from fatbench.methods.inversions.upload import Observation, gradients

SHAPE = (3, 12, 12)
STATS = Stats(0.0, 0.0, 0.0, 1, 1.0, 1)


class Linear(nn.Module):
    """Softmax regression: the gradient of row c of W is (p_c - [c = y]) x, so its direction is the image."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3 * 12 * 12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1))


class Split(nn.Module):
    """An edge whose features are the image with its colours mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Conv2d(3, 3, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.extractor(x).flatten(1)


def blobs(n: int, seed: int) -> Tensor:
    coarse = torch.rand(n, 3, 3, 3, generator=Generator().manual_seed(seed))
    return F.interpolate(coarse, size=12, mode="bilinear").mul(255).round().to(torch.uint8)


def problem(model: nn.Module) -> Problem:
    return Problem(model, blobs(20, 1), torch.arange(20) % 4, [torch.arange(5, 15)], 4, 0, torch.device("cpu"))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def looked(model: nn.Module, update: Update, own: dict[int, dict[str, Tensor]], **settings: int) -> dict[str, float]:
    weights = state_of(model)
    result = Round(0, weights, [update], None, State(1, weights), Cost(), own=own)
    found = leakage(
        problem(model), result, blobs(60, 2), torch.zeros(60, dtype=torch.long), lambda *a: a[1],
        Generator().manual_seed(0), target_clients=4, candidates=20, **settings,
    )  # fmt: skip
    return {name: value for name, value in found.items() if isinstance(value, float)}


def test_the_gradient_of_softmax_regression_is_the_image() -> None:
    torch.manual_seed(0)
    model, x, y = Linear(), torch.rand(2, 1, *SHAPE), torch.tensor([[1], [3]])
    weights = state_of(model)
    seen = [Observation(weights, gradients(model, weights, x, y), y)]
    made = matching(seen, model, SHAPE, Generator().manual_seed(0), steps=150, tv=0.0)
    assert made.shape == (2, 1, *SHAPE)
    assert float(correlation(made[:, 0], x[:, 0]).min()) > 0.99


def test_a_model_is_attacked_through_its_gradient() -> None:
    torch.manual_seed(0)
    model = Linear()
    found = looked(model, Update(0, 10, state_of(model), STATS), {}, steps=200)
    assert found["leak_correlation"] > 0.98
    assert found["leak_identification"] == 1
    assert found["leak_psnr"] > found["leak_grey_psnr"] + 5
    assert not any(name.startswith("leak_initial") for name in found)
    assert (found["leak_candidates_used"], found["leak_identification_chance"]) == (20, 1 / 20)


def test_features_are_inverted_through_the_right_extractor() -> None:
    """Client 0 permutes the colours, its first extractor did not: only who has the client's own puts them back."""
    model = Split()
    with torch.no_grad():
        model.extractor.weight.copy_(torch.eye(3)[:, :, None, None])
    own = {"extractor.weight": torch.eye(3)[[1, 2, 0]][:, :, None, None].clone()}
    sent = blobs(20, 1)[5:15].float().div(255)[:, [1, 2, 0]]
    update = Update(0, 10, {}, STATS, {"features": sent})
    found = looked(model, update, {0: own}, steps=150, width=8)
    assert found["leak_psnr"] > found["leak_grey_psnr"] + 3
    assert found["leak_psnr"] > found["leak_initial_psnr"] + 3
    assert found["leak_identification"] == 1
    chances = [found[f"{name}_identification_chance"] for name in ("leak", "leak_initial")]
    assert chances == [1 / found["leak_candidates_used"]] * 2
