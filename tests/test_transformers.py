"""Transformers: the heads against closed forms, published sizes, published weights, refused settings."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fatbench.errors import MachineError, SpecError
from fatbench.models import MODELS, logit_parameters
from fatbench.models.heads import ClsVisHead, cross_covariance, power_normalised
from fatbench.models.pretrained import from_file
from fatbench.models.t2t import Performer, sinusoids
from fatbench.suite import calls
from fatbench.suite import weights as naming
from fatbench.suite.entry import ask

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
    """X = s p q^T with unit p, q: whatever the start (not orthogonal to p), u = +-q, v = p, sigma = s: X / sqrt(s).

    By hand: X = diag(3, 4), start (1, 1): u = (3, 4)/5, Xu = (9, 16)/5, sigma = |Xu| = sqrt(337)/5 = 3.6715.
    """
    p, q = nn.functional.normalize(torch.tensor([1.0, 2.0, 2.0]), dim=0), torch.tensor([0.6, 0.8])
    for start in (torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, -3.0, 1.0])):
        x = 9.0 * torch.outer(p, q)[None]
        torch.testing.assert_close(power_normalised(x, start), x / 3)
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


def test_the_head_starts_as_so_vits_or_as_timms_layers() -> None:
    """Kaiming's normal by fan-out: std sqrt(2 / 64) and sqrt(2 / 48)."""
    states = []
    for start in ("timm", "kaiming"):
        torch.manual_seed(3)
        states.append(ClsVisHead(384, 10, 64, 48, "bn", start).state_dict())
    ours, theirs = states
    assert ours["branch1.weight"].std() == pytest.approx(0.02, rel=0.05)
    for name, d in (("branch1.weight", 64), ("branch2.weight", 48)):
        assert theirs[name].std() == pytest.approx((2 / d) ** 0.5, rel=0.02) and abs(theirs[name].mean()) < 0.005
    kaiming = MODELS["vit"]((3, 32, 32), 10, head="cls_vis", patch=16, depth=1, head_start="kaiming").head
    assert kaiming.branch2.weight.std() > 0.15


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
        read = tokens[:, 0] @ model.head.cls_fc.weight.T
        torch.testing.assert_close(model(x) - model.head(visual), read, rtol=1e-3, atol=1e-5)
    else:
        read = tokens[:, 0] if head == "cls" else tokens[:, 1:].mean(1)
        torch.testing.assert_close(model(x), nn.functional.linear(read, model.head.fc.weight, model.head.fc.bias))


@pytest.mark.parametrize("name", SMALL)
def test_logit_layers(name: str) -> None:
    """FedWAvg's last layer: weight and bias of every classifier, and nothing else of the head."""
    one = ["head.fc.weight", "head.fc.bias"]
    two = ["head.cls_fc.weight", "head.cls_fc.bias", "head.visual_fc.weight", "head.visual_fc.bias"]
    assert [logit_parameters(small(name, head=head)) for head in HEADS] == [one, one, two]
    assert small(name, head="cls_vis").logit_layers == ("head.cls_fc", "head.visual_fc")


@pytest.mark.parametrize("name", SMALL)
def test_normalisation_is_inside_and_not_in_the_state(name: str) -> None:
    """(x - 0.5) / 0.5 of x is what a model without normalisation sees as 2 x - 1. Grey images get the colours' mean."""
    half, none = small(name, normalise="half"), small(name, normalise="none")
    assert half.state_dict().keys() == none.state_dict().keys()
    assert not {"mean", "std"} & half.state_dict().keys()
    x = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(half(x), none(2 * x - 1))
    imagenet = small(name, normalise="imagenet")
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    torch.testing.assert_close(imagenet(x), none((x - mean) / std))
    grey = MODELS[name]((1, 16, 16), 5, **SMALL[name], normalise="imagenet").eval()
    assert grey.mean.item() == pytest.approx((0.485 + 0.456 + 0.406) / 3)
    assert grey(torch.rand(2, 1, 16, 16)).shape == (2, 5)


@pytest.mark.parametrize("head", [HEADS[0], *(pytest.param(head, marks=pytest.mark.nightly) for head in HEADS[1:])])
@pytest.mark.parametrize("name", SMALL)
def test_a_step_lowers_the_loss(name: str, head: str) -> None:
    """Forty steps of Adam fit eight random images' labels; chance is ln 5 = 1.609."""
    model = small(name, head=head).train()
    x, y = torch.rand(8, 3, 16, 16), torch.arange(8) % 5
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


@pytest.mark.parametrize("name", SMALL)
def test_bf16_stays_near_fp32(name: str) -> None:
    model = small(name, head="cls_vis", head_norm="ln")
    x = torch.rand(4, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        low = model(x)
    torch.testing.assert_close(low.float(), model(x), rtol=0.1, atol=0.03)


# --- TNT and T2T ----------------------------------------------------------------------------------------------------


def test_fused_attention_is_timms() -> None:
    """Values and gradients of timm's own TNT attention, from the same parameters."""
    from timm.models.tnt import Attention

    from fatbench.models.fused import FusedAttention

    fused = small("tnt").backbone.blocks[0].attn_out
    assert type(fused) is FusedAttention
    plain = Attention(16, 16, num_heads=2)
    plain.load_state_dict(fused.state_dict())
    results = []
    for attention in (plain, fused):
        x = torch.rand(3, 7, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = attention(x)
        results.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("patch", [4, 8, 12, 16, 20, 24, 28])
def test_soft_splits_of_every_patch(patch: int) -> None:
    """(size / patch)^2 tokens and the class token, without a gap: every input pixel has a gradient."""
    torch.manual_seed(0)
    settings = {**SMALL["t2t"], "patch": patch, "depth": 1, "head": "vis"}
    model = MODELS["t2t"]((1, 3 * patch, 3 * patch), 5, **settings)
    x = torch.rand(1, 1, 3 * patch, 3 * patch, requires_grad=True)
    tokens = model.tokens(x)
    assert tokens.shape == (1, 10, 16)
    weights = torch.rand(tokens.shape)
    assert (torch.autograd.grad((tokens * weights).sum(), x)[0] != 0).all()


def test_frozen_tensors_of_t2t() -> None:
    """The performers' features and the positions are in the state, never trained and no classifier's."""
    model = small("t2t", head="cls_vis")
    frozen = {name.removeprefix("backbone.") for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"pos_embed", "tokens_to_token.attention1.w", "tokens_to_token.attention2.w"}
    assert {f"backbone.{name}" for name in frozen} < model.state_dict().keys()
    w = model.backbone.tokens_to_token.attention1.w
    torch.testing.assert_close(w @ w.T, 4 * torch.eye(4), atol=1e-5, rtol=0)  # m orthogonal rows of length sqrt(m)


def test_sinusoids_by_hand() -> None:
    """Position 3, 4 channels: sin 3, cos 3, sin 3/100, cos 3/100."""
    table = sinusoids(5, 4)
    assert table.shape == (1, 5, 4)
    expected = [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]
    torch.testing.assert_close(table[0, 3], torch.tensor(expected))


def test_the_performer_estimates_softmax_attention() -> None:
    """With many random features the mean over draws of w is softmax(q k' ) v: the kernel is unbiased."""
    torch.manual_seed(0)
    performer = Performer(6, 4)
    x, y = torch.randn(1, 5, 4) / 2, torch.randn(1, 5, 4) / 2
    performer.w = nn.Parameter(torch.randn(200_000, 4), requires_grad=False)
    kernel = performer.features(x) @ performer.features(y).transpose(1, 2)
    torch.testing.assert_close(kernel, (x @ y.transpose(1, 2)).exp(), rtol=0.05, atol=0)


def released_t2t(state: dict[str, torch.Tensor], x: torch.Tensor, depth: int, heads: int, scale: float) -> torch.Tensor:
    """The authors' forward pass on normalised images, from a state with their names; the class token after it."""

    def affine(name: str, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    def performer(name: str, x: torch.Tensor) -> torch.Tensor:
        w = state[f"{name}.w"]
        k, q, v = torch.split(affine(f"{name}.kqv", norm(f"{name}.norm1", x)), w.shape[1], dim=-1)
        kp, qp = (
            torch.exp(torch.einsum("bti,mi->btm", t, w) - (t * t).sum(-1, keepdim=True) / 2) / len(w) ** 0.5
            for t in (k, q)
        )
        total = torch.einsum("bti,bi->bt", qp, kp.sum(1)).unsqueeze(2)
        y = torch.einsum("bti,bni->btn", qp, torch.einsum("bin,bim->bnm", v, kp)) / (total + 1e-8)
        y = v + affine(f"{name}.proj", y)
        hidden = nn.functional.gelu(affine(f"{name}.mlp.0", norm(f"{name}.norm2", y)))
        return y + affine(f"{name}.mlp.2", hidden)

    for step, (kernel, stride, padding) in enumerate([(7, 4, 2), (3, 2, 1), (3, 2, 1)]):
        x = nn.Unfold(kernel, stride=stride, padding=padding)(x).transpose(1, 2)
        if step < 2:
            x = performer(f"tokens_to_token.attention{step + 1}", x)
            side = round(x.shape[1] ** 0.5)
            x = x.transpose(1, 2).reshape(len(x), -1, side, side)
    x = affine("tokens_to_token.project", x)
    x = torch.cat([state["cls_token"].expand(len(x), -1, -1), x], 1) + state["pos_embed"]
    for i in range(depth):
        b, n, c = x.shape
        qkv = affine(f"blocks.{i}.attn.qkv", norm(f"blocks.{i}.norm1", x))
        q, k, v = qkv.reshape(b, n, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
        y = ((q @ k.transpose(-2, -1)) * scale).softmax(-1) @ v
        x = x + affine(f"blocks.{i}.attn.proj", y.transpose(1, 2).reshape(b, n, c))
        hidden = nn.functional.gelu(affine(f"blocks.{i}.mlp.fc1", norm(f"blocks.{i}.norm2", x)))
        x = x + affine(f"blocks.{i}.mlp.fc2", hidden)
    return norm("norm", x)[:, 0]


def released_t2t_shapes(depth: int = 14, dim: int = 384, token: int = 64, mlp: int = 3) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the published T2T-ViT-14 (yitu-opensource/T2T-ViT, models/), its 1000 classes included."""
    shapes: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, dim), "pos_embed": (1, 197, dim)}

    def affine(name: str, out: int, width: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (out, width)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    for name, width in (("tokens_to_token.attention1", 3 * 49), ("tokens_to_token.attention2", token * 9)):
        shapes[f"{name}.w"] = (token // 2, token)
        affine(f"{name}.kqv", 3 * token, width)
        affine(f"{name}.proj", token, token)
        norm(f"{name}.norm1", width)
        norm(f"{name}.norm2", token)
        affine(f"{name}.mlp.0", token, token)
        affine(f"{name}.mlp.2", token, token)
    affine("tokens_to_token.project", dim, token * 9)
    for i in range(depth):
        norm(f"blocks.{i}.norm1", dim)
        affine(f"blocks.{i}.attn.qkv", 3 * dim, dim, bias=False)
        affine(f"blocks.{i}.attn.proj", dim, dim)
        norm(f"blocks.{i}.norm2", dim)
        affine(f"blocks.{i}.mlp.fc1", mlp * dim, dim)
        affine(f"blocks.{i}.mlp.fc2", dim, mlp * dim)
    norm("norm", dim)
    affine("head", 1000, dim)
    return shapes


def test_t2t_has_the_names_of_the_release() -> None:
    with torch.device("meta"):
        backbone = MODELS["t2t"]((3, 224, 224), 1000).backbone
    ours = {name: tuple(value.shape) for name, value in backbone.state_dict().items()}
    released = released_t2t_shapes()
    assert ours == {name: shape for name, shape in released.items() if not name.startswith("head.")}
    assert round(sum(map(math.prod, released.values())) / 1e6, 1) == 21.5  # as its README says


@pytest.mark.parametrize(
    ("name", "settings", "count"),
    [
        ("vit", {}, 22_050_664),  # timm's table: 22.05 M
        ("vit", {"dim": 768, "heads": 12}, 86_567_656),  # 86.57 M
        ("tnt", {}, 23_768_584),  # 23.77 M
        ("tnt", {"legacy": True}, 23_755_336),  # timm's before May 2025: 23.76 M
        ("t2t", {}, 21_545_550),  # 21.5 M; 80,000 of them are never trained
    ],
)
def test_published_size(name: str, settings: dict[str, int], count: int) -> None:
    """1000 classes at 224 x 224; the spec's 21.67 M of ViT-S with 10 classes follows from the first."""
    with torch.device("meta"):
        model = MODELS[name]((3, 224, 224), 1000, **settings)
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("vit", {}),
        ("tnt", {"head": "cls_vis"}),
        ("tnt", {"legacy": True}),
        ("t2t", {"head": "cls_vis", "dim": 448, "heads": 7}),
    ],
)
def test_plan_counts_the_parameters(name: str, settings: dict[str, object]) -> None:
    """What the entry says, as `fatbench plan` asks it, against the model."""
    spec = calls.check("Model", {"name": name, **settings})
    with torch.device("meta"):
        model = MODELS[name]((3, 224, 224), 10, **settings)
    counted = ask(MODELS[name].parameters, calls.call("Model", spec).bound, (3, 224, 224), 10)
    assert counted == sum(p.numel() for p in model.parameters() if p.requires_grad)


# --- published weights ----------------------------------------------------------------------------------------------


IMAGE = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
PUBLISHED = {"vit": "vit_small_patch16_224.pth", "tnt": "tnt_s_patch16_224.pth", "t2t": "81.5_T2T_ViT_14.pth.tar"}
SHORT = {"vit": "vit.safetensors", "tnt": "tnt.pth", "t2t": "t2t.pth.tar"}  # their first two blocks


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files with random weights in the form they are published in, whole and with two blocks, and their logits."""
    import timm

    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    for name in ("vit", "tnt"):
        net = timm.create_model(PUBLISHED[name].removesuffix(".pth"), pretrained=False).eval()
        with torch.no_grad():
            torch.save(net((IMAGE - 0.5) / 0.5), folder / f"{name}.logits")
        stored = {"epoch": 3, "args": argparse.Namespace(lr=1), "state_dict": net.state_dict()}
        torch.save(stored, folder / PUBLISHED[name])
        short = {key: value for key, value in net.state_dict().items() if not re.match(r"blocks\.([2-9]|1\d)\.", key)}
        torch.save({"model": short}, folder / f"{name}.pth")
        save_file(short, folder / f"{name}.safetensors")
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    for name, depth in ((PUBLISHED["t2t"], 14), (SHORT["t2t"], 2)):
        state = {key: torch.randn(shape) * 0.05 for key, shape in released_t2t_shapes(depth).items()}
        stored = {"state_dict": {}, "state_dict_ema": {f"module.{key}": value for key, value in state.items()}}
        torch.save(stored, folder / name)
        if depth == 14:
            token = released_t2t(state, (IMAGE - mean) / std, depth, 6, 384**-0.5)
            torch.save(token @ state["head.weight"].T + state["head.bias"], folder / "t2t.logits")
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_weights_give_the_published_logits(name: str, published: Path) -> None:
    """Against timm's own models (and the release's equations for T2T) with the same 1000 classes."""
    model = MODELS[name]((3, 224, 224), 1000, weights=str(published / PUBLISHED[name])).eval()
    with torch.no_grad():
        ours = model(IMAGE)
    theirs = torch.load(published / f"{name}.logits")
    assert theirs.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_safetensors_hold_the_same(published: Path) -> None:
    files = [str(published / f"vit{suffix}") for suffix in (".pth", ".safetensors")]
    states = [MODELS["vit"]((3, 224, 224), 1000, depth=2, weights=file).state_dict() for file in files]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


@pytest.mark.parametrize("head", HEADS)
def test_a_new_task_gets_a_new_head(head: str, published: Path) -> None:
    """Ten classes: the backbone is the published one, the head the one that this seed draws without weights, too."""
    file = published / "vit.safetensors"
    models = []
    for weights in (None, str(file)):
        torch.manual_seed(5)
        models.append(MODELS["vit"]((3, 224, 224), 10, depth=2, head=head, weights=weights))
    scratch, loaded = (model.state_dict() for model in models)
    stored = load_file(file)
    for name, value in loaded.items():
        expected = scratch[name] if name.startswith("head.") else stored[name.removeprefix("backbone.")]
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("name", SHORT)
def test_positions_of_another_size_are_interpolated(name: str, published: Path) -> None:
    """14 x 14 patches to 4 x 4, bicubic; the class token's entry stays."""
    model = MODELS[name]((3, 64, 64), 10, depth=2, weights=str(published / SHORT[name]))
    key = "patch_pos" if name == "tnt" else "pos_embed"
    stored = {name.removeprefix("module."): value for name, value in from_file(name, published / SHORT[name]).items()}
    old, new = stored[key], model.backbone.state_dict()[key]
    assert new.shape == (1, 17, 384)
    assert torch.equal(new[:, 0], old[:, 0])
    grid = old[0, 1:].T.unflatten(1, (14, 14))[None]
    expected = nn.functional.interpolate(grid, (4, 4), mode="bicubic", antialias=True, align_corners=False)
    torch.testing.assert_close(new[0, 1:], expected[0].flatten(1).T)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("vit", {"dim": 192, "heads": 3},
         "cls_token is 1x1x384, 1x1x192 needed; pos_embed is 1x197x384, 1x197x192 needed; "
         "patch_embed.proj.weight is 384x3x16x16, 192x3x16x16 needed; and 27 more"),
        ("vit", {"depth": 1},
         "blocks.1.attn.proj.bias is 384, none needed; blocks.1.attn.proj.weight is 384x384, none needed; "
         "blocks.1.attn.qkv.bias is 1152, none needed; and 9 more"),
        ("vit", {"patch": 32}, "patch_embed.proj.weight is 384x3x16x16, 384x3x32x32 needed"),
        ("tnt", {"pixels": 2}, "pixel_pos is 1x24x4x4, 1x24x2x2 needed; norm1_proj.weight is 384, 96 needed; "),
        ("tnt", {"depth": 1, "weights": SHORT["vit"]}, "patch_pos is missing, 1x197x384 needed; "),
        ("t2t", {"token_dim": 32}, "tokens_to_token.attention1.w is 32x64, 16x32 needed; "),
    ],
)  # fmt: skip
def test_weights_of_another_architecture(name: str, settings: dict[str, Any], message: str, published: Path) -> None:
    settings = {"depth": 2, "weights": SHORT[name], **settings}
    path = str(published / settings.pop("weights"))
    expected = f"{name}: {path} does not fit the architecture of these settings: {message}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        MODELS[name]((3, 224, 224), 10, weights=path, **settings)


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("a checkpoint ran code",)


def test_a_checkpoint_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": Hostile()}, tmp_path / "hostile.pth")
    with pytest.raises(SpecError, match=r"hostile\.pth holds pickled Python objects, not a state dict"):
        small("vit", weights=str(tmp_path / "hostile.pth"))
    assert capsys.readouterr().out == ""


def test_timm_without_network_or_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a silent random start: what the hub raises becomes a message that says what to do instead."""
    import timm

    def unreachable(name: str, pretrained: bool) -> None:
        assert (name, pretrained) == ("vit_small_patch16_224", True)
        raise OSError("We couldn't connect to the hub\nand more")

    monkeypatch.setattr(timm, "create_model", unreachable)
    message = "vit: cannot get timm's vit_small_patch16_224: We couldn't connect to the hub. Where the hub cannot be"
    with pytest.raises(MachineError, match=message):
        MODELS["vit"]((3, 32, 32), 10, weights="timm")
    for name in SMALL:
        with pytest.raises(ValueError, match=f"{name}: timm has no weights for these settings; give `weights` the"):
            small(name, weights="timm")


@pytest.mark.parametrize(
    ("settings", "weights", "tag"),
    [
        ({}, "timm", "tnt_s_patch16_224"),
        pytest.param({"legacy": True}, "timm", "tnt_s_legacy_patch16_224", marks=pytest.mark.nightly),
        pytest.param(
            {"legacy": True}, "timm/tnt_s_legacy_patch16_224.in1k", "tnt_s_legacy_patch16_224.in1k",
            marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_timms_own_weights(monkeypatch: pytest.MonkeyPatch, settings: dict, weights: str, tag: str) -> None:
    """`weights` takes what timm's factory returns, here a network with weights of a known seed; a digest is checked."""
    import timm

    create, made = timm.create_model, []

    def unpublished(name: str, pretrained: bool) -> nn.Module:
        assert pretrained
        assert name == tag
        torch.manual_seed(1)
        made.append(create(name, pretrained=False))
        return made[0]

    monkeypatch.setattr(timm, "create_model", unpublished)
    model = MODELS["tnt"]((3, 224, 224), 10, weights=weights, **settings)
    theirs = made[0].state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.backbone.state_dict().items())
    exact = f"timm/{tag}@{model.pretrained['digest']}"
    assert naming.content(exact) == exact and naming.parse_weights(exact) is None
    again = MODELS["tnt"]((3, 224, 224), 10, weights=exact, **settings)
    assert again.pretrained == model.pretrained
    with pytest.raises(MachineError, match=f"timm's {tag} is sha256:.*, not sha256:{'0' * 64}"):
        MODELS["tnt"]((3, 224, 224), 10, weights=f"timm/{tag}@sha256:{'0' * 64}", **settings)
