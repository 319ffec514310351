"""Transformers: the heads against closed forms, published sizes, published weights, refused settings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fatbench.models import MODELS, logit_parameters
from fatbench.models.heads import ClsVisHead, cross_covariance, power_normalised

HEADS = ("cls", "vis", "cls_vis")
SMALL = {
    "vit": {"patch": 4, "dim": 16, "depth": 3, "heads": 2},
    "tnt": {"patch": 4, "dim": 16, "inner": 8, "depth": 3, "heads": 2},
    "t2t": {"patch": 4, "dim": 16, "token_dim": 8, "depth": 3, "heads": 2},
}


def small(name: str, *, seed: int = 0, **settings: object) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]((3, 16, 16), 5, **{**SMALL[name], **settings}).eval()


# --- heads ----------------------------------------------------------------------------------------------------------


def test_cross_covariance_of_two_tokens() -> None:
    """Tokens a = (1, 0), (3, 4) and b = (2), (6): centred a = -+(1, 2), b = -+2, so X = (1*2, 2*2) = (2, 4)."""
    a, b = torch.tensor([[[1.0, 0.0], [3.0, 4.0]]]), torch.tensor([[[2.0], [6.0]]])
    torch.testing.assert_close(cross_covariance(a, b), torch.tensor([[[2.0], [4.0]]]))


def test_power_normalisation_of_rank_one() -> None:
    """X = s p q^T with unit p, q: whatever the start (not orthogonal to p), u = +-q, v = p, sigma = s: X / sqrt(s)."""
    p, q = nn.functional.normalize(torch.tensor([1.0, 2.0, 2.0]), dim=0), torch.tensor([0.6, 0.8])
    for start in (torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, -3.0, 1.0])):
        x = 9.0 * torch.outer(p, q)[None]
        torch.testing.assert_close(power_normalised(x, start), x / 3)


def test_power_normalisation_by_hand() -> None:
    """X = diag(3, 4), start (1, 1): u = (3, 4)/5, Xu = (9, 16)/5, sigma = |Xu| = sqrt(337)/5 = 3.6715."""
    x = torch.diag(torch.tensor([3.0, 4.0]))[None]
    torch.testing.assert_close(power_normalised(x, torch.ones(2)), x / (337**0.5 / 5) ** 0.5)


def test_power_normalisation_is_that_of_the_release_without_its_guard() -> None:
    """The release: U S^(1/2) V^T + (X - U S V^T) / (S^(1/2) + 1e-5) for one singular triple (U, S, V)."""
    torch.manual_seed(0)
    x, start = torch.randn(4, 6, 5), torch.randn(6)
    for image, ours in zip(x, power_normalised(x, start), strict=True):
        u = image.T @ start
        u = u / u.norm()
        v = image @ u
        v = v / v.norm()
        s = v @ image @ u
        theirs = s.sqrt() * torch.outer(v, u) + (image - s * torch.outer(v, u)) / (s.sqrt() + 1e-5)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=3e-5)


def test_equal_tokens_have_no_second_order_and_a_finite_gradient() -> None:
    """All visual tokens equal: X = 0, so only the class token is left, and nothing becomes NaN."""
    torch.manual_seed(0)
    head = ClsVisHead(8, 3, 4, 2, "ln")
    tokens = torch.randn(2, 1, 8).expand(2, 5, 8).clone().requires_grad_()
    logits = head(tokens)
    torch.testing.assert_close(logits, head.cls_fc(tokens[:, 0]) + head.visual_fc.bias)
    gradient = torch.autograd.grad(logits.square().sum(), tokens)[0]
    assert gradient.isfinite().all()


def test_the_start_of_the_power_iteration_learns() -> None:
    model = small("vit", head="cls_vis", head_norm="ln", d1=4, d2=3)
    model(torch.rand(2, 3, 16, 16)).square().sum().backward()
    assert model.head.start.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("dim", "heads", "d1", "d2"),
    [(192, 3, 48, 24), (256, 4, 48, 24), (384, 6, 64, 48), (448, 7, 96, 48), (768, 12, 96, 48)],
)
def test_widths_of_the_second_order_head(dim: int, heads: int, d1: int, d2: int) -> None:
    """Those of So-ViT, and dropout only above 256."""
    with torch.device("meta"):
        head = MODELS["vit"]((3, 32, 32), 10, head="cls_vis", patch=16, dim=dim, heads=heads, depth=1).head
    assert head.start.shape == (d1,)
    assert head.visual_fc.in_features == d1 * d2
    assert head.dropout.p == (0.5 if dim > 256 else 0.0)


@pytest.mark.parametrize(("norm", "kinds"), [("bn", {nn.BatchNorm1d}), ("ln", {nn.LayerNorm}), ("none", {nn.Identity})])
def test_head_norm(norm: str, kinds: set[type]) -> None:
    model = small("vit", head="cls_vis", head_norm=norm)
    assert {type(model.head.norm1), type(model.head.norm2)} == kinds
    assert any("running_mean" in name for name in model.state_dict()) == (norm == "bn")


def test_bn_of_the_head_is_a_1x1_convolution_with_batchnorm2d() -> None:
    """The branch as So-ViT writes it: (B, D, n, n) -> Conv2d 1x1 -> BatchNorm2d -> ReLU, in training mode."""
    torch.manual_seed(0)
    head = ClsVisHead(8, 3, 4, 2, "bn").train()
    tokens = torch.randn(3, 10, 8)
    image = tokens[:, 1:].transpose(1, 2).unflatten(2, (3, 3))
    branches = []
    for branch in (head.branch1, head.branch2):
        mapped = nn.functional.conv2d(image, branch.weight[:, :, None, None])
        branches.append(nn.BatchNorm2d(len(branch.weight))(mapped).relu().flatten(2))
    a, b = (branch - branch.mean(2, keepdim=True) for branch in branches)
    x = power_normalised(a @ b.transpose(1, 2) / 9, head.start).flatten(1)
    torch.testing.assert_close(head(tokens), head.cls_fc(tokens[:, 0]) + head.visual_fc(x), rtol=1e-4, atol=1e-6)


# --- every backbone -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", SMALL)
def test_what_a_head_reads(name: str, head: str) -> None:
    """CLS: token 0 alone. VIS: the mean of the others. CLS+VIS: both classifiers. By a head of its own on `tokens`."""
    model = small(name, head=head)
    x = torch.rand(2, 3, 16, 16)
    tokens = model.tokens(x)
    assert tokens.shape == (2, 17, 16)
    torch.testing.assert_close(tokens.mean(2), torch.zeros(2, 17), atol=1e-5, rtol=0)  # the LayerNorm comes before
    if head == "cls_vis":
        visual = tokens.clone()
        visual[:, 0] = 0
        torch.testing.assert_close(
            model(x) - model.head(visual), tokens[:, 0] @ model.head.cls_fc.weight.T, rtol=1e-3, atol=1e-5
        )
    else:
        read = tokens[:, 0] if head == "cls" else tokens[:, 1:].mean(1)
        torch.testing.assert_close(model(x), nn.functional.linear(read, model.head.fc.weight, model.head.fc.bias))


@pytest.mark.parametrize("name", SMALL)
def test_logit_layers(name: str) -> None:
    """FedWAvg's last layer: weight and bias of every classifier, and nothing else of the head (A-17)."""
    one = ["head.fc.weight", "head.fc.bias"]
    two = ["head.cls_fc.weight", "head.cls_fc.bias", "head.visual_fc.weight", "head.visual_fc.bias"]
    assert [logit_parameters(small(name, head=head)) for head in HEADS] == [one, one, two]
    assert small(name, head="cls_vis").logit_layers == ("head.cls_fc", "head.visual_fc")


@pytest.mark.parametrize("name", SMALL)
def test_normalisation_is_inside_and_not_in_the_state(name: str) -> None:
    """(x - 0.5) / 0.5 of x is what a model without normalisation sees as 2 x - 1."""
    half, none = small(name, normalise="half"), small(name, normalise="none")
    assert half.state_dict().keys() == none.state_dict().keys()
    assert not {"mean", "std"} & half.state_dict().keys()
    x = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(half(x), none(2 * x - 1))
    imagenet = small(name, normalise="imagenet")
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    torch.testing.assert_close(imagenet(x), none((x - mean) / std))


@pytest.mark.parametrize("name", SMALL)
def test_grey_images_get_the_mean_of_the_colours(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]((1, 16, 16), 5, **SMALL[name], normalise="imagenet").eval()
    assert model.mean.item() == pytest.approx((0.485 + 0.456 + 0.406) / 3)
    assert model(torch.rand(2, 1, 16, 16)).shape == (2, 5)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", SMALL)
def test_a_step_lowers_the_loss(name: str, head: str) -> None:
    """Forty steps of Adam fit eight random images' labels; chance is ln 5 = 1.609."""
    model = small(name, head=head).train()
    x, y = torch.rand(8, 3, 16, 16), torch.arange(8) % 5
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(40):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.5


@pytest.mark.parametrize("name", SMALL)
def test_bf16_stays_near_fp32(name: str) -> None:
    model = small(name, head="cls_vis", head_norm="ln")
    x = torch.rand(4, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        low = model(x)
    torch.testing.assert_close(low.float(), model(x), rtol=0.1, atol=0.03)


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_refused_shapes(name: str) -> None:
    settings = SMALL[name]
    for shape, message in [
        ((3, 16, 32), "needs square images, got 16x32"),
        ((3, 2, 2), "needs images of at least 4x4, got 2x2"),
        ((3, 30, 30), "patches of 4x4 do not tile images of 30x30"),
    ]:
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            MODELS[name](shape, 5, **settings)
    with pytest.raises(
        ValueError, match=f"{name}: head cls_vis needs at least two patches, got images of 4x4, patch 4"
    ):
        MODELS[name]((3, 4, 4), 5, **settings, head="cls_vis")
    with pytest.raises(ValueError, match=f"{name}: dim 16 is not a multiple of its 3 attention heads"):
        MODELS[name]((3, 16, 16), 5, **{**settings, "heads": 3})
