"""Models: shapes, parameter counts against the docstrings, initial weights, the release's names, refused sizes."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn

from fatbench.models import MODELS, logit_parameters
from fatbench.suite.entry import ask

SHAPES = [(1, 8, 8), (3, 8, 8), (1, 28, 28), (3, 32, 32), (3, 84, 84)]


# the settings of a small member, where it is not `width` that makes it small
SMALL = {
    **{name: {"patch": 4, "dim": 16, "depth": 2, "heads": 2, "head": "cls_vis", "d1": 6, "d2": 5, **own}
       for name, own in (("vit", {}), ("tnt", {"inner": 8}), ("t2t", {"token_dim": 8}))},
    **{key: {"width": 9, "dim": 12, "depth": 2, "heads": 3} for key in ("edge_vit", "whole_vit")},
    **{key: {"width": 9, "planes": 2, "blocks": 2} for key in ("edge_resnet", "edge_resnet8", "whole_resnet")},
    "whole_edge": {"width": 9}, "efficientnet_lite0": {}, "linear": {}, "constant": {},
}  # fmt: skip
HEADS = [{"head": head, "head_norm": norm} for head in ("cls", "vis", "cls_vis") for norm in ("bn", "ln", "none")]
EDGE_VIT = [{"width": 7, "stem": 7, "dim": 10, "depth": 3, "heads": 5, "patch": 2}, {"patch": 8}]
OTHERS = {
    "vit": [{"patch": 8, "dim": 64, "depth": 3, "heads": 4, "mlp": 2, **head} for head in HEADS]
    + [{"dim": dim, "heads": heads, "head": "cls_vis"} for dim, heads in ((256, 4), (384, 6), (448, 7), (768, 12))]
    + [{"dim": 64, "depth": 3, "heads": 4, "mlp": 2, "lora": rank, **head} for rank in (0, 3) for head in HEADS[::4]],
    "tnt": [{"patch": 8, "pixels": 2, "dim": 64, "inner": 12, "depth": 3, "heads": 4, "mlp": 2, **h} for h in HEADS]
    + [{"dim": 640, "inner": 40, "heads": 10, "inner_heads": 2, "head": "cls_vis"}],
    "t2t": [{"patch": 8, "dim": 64, "token_dim": 32, "depth": 3, "heads": 4, "mlp": 2, **head} for head in HEADS]
    + [{"dim": 448, "heads": 7, "depth": 19, "head": "cls_vis"}],
    "edge_vit": EDGE_VIT, "whole_vit": EDGE_VIT,
    **{key: [{"width": 7, "stem": 7, "planes": 3, "blocks": 1}] for key in ("edge_resnet", "whole_resnet")},
    "edge_resnet8": [{"width": 7, "planes": 3, "blocks": 1}], "whole_edge": [{"width": 7, "stem": 7}],
    "efficientnet_lite0": [], "linear": [], "constant": [],
}  # fmt: skip


def expected_parameters(name: str, *, channels: int, side: int, classes: int, **settings: object) -> float:
    """What the model's entry says for these settings, the others at their defaults."""
    entry = MODELS[name]
    return ask(entry.parameters, functools.partial(entry, **settings), (channels, side, side), classes)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_every_model(name: str, shape: tuple[int, int, int]) -> None:
    """Images to finite logits (B, classes), each its own whatever else is in the batch; the gradient reaches every
    parameter; the docstring counts the parameters right."""
    torch.manual_seed(0)
    settings = SMALL.get(name, {"width": 9})
    model = MODELS[name](shape, 7, **settings)
    x = torch.rand(3, *shape)
    model.train()
    logits = model(x)
    assert logits.shape == (3, 7) and logits.isfinite().all()
    answers = logits + model.edge_logits(x) if hasattr(model, "edge_logits") else logits  # the edge's classifier too
    answers.exp().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trainable(model))
    model.eval()
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-6)
    count = sum(p.numel() for p in trainable(model))
    assert count == expected_parameters(name, **settings, channels=shape[0], side=shape[1], classes=7)


WIDTHS = ({"width": 6}, {"width": 31})
NAMED = [(name, more) for name in MODELS for more in ({}, *(OTHERS[name] if name in SMALL else WIDTHS))]


@pytest.mark.parametrize(("name", "settings"), NAMED)
def test_parameter_count(name: str, settings: dict[str, object]) -> None:
    with torch.device("meta"):
        model = MODELS[name]((3, 32, 32), 100, **settings)
    expected = expected_parameters(name, **settings, channels=3, side=32, classes=100)
    assert sum(p.numel() for p in trainable(model)) == expected


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        # layer by layer 14,592 + 30,880 + 15,456 + 460,992 + 2 * 37,056 + 331,968 + 37,056 + 1,930
        ("nin", (3, 32, 32), 10, 966_986),
        # blocks 38,976 + 221,952 + 572,712 with their batch normalisation, linear 803,072 + 2,570
        ("small_cnn", (3, 32, 32), 10, 1_639_282),
        ("resnet18", (3, 32, 32), 10, 11_173_962),  # the number that is usually quoted
        ("efficientnet_lite0", (3, 224, 224), 1000, 4_652_008),  # TensorFlow's release: 4.7 million
        ("leaf_cnn", (3, 84, 84), 2, 31_202),  # 896 + 3 * 9,248 + 4 * 64 + 2,306
    ],
)
def test_published_size(name: str, shape: tuple[int, int, int], classes: int, count: int) -> None:
    with torch.device("meta"):
        model = MODELS[name](shape, classes)
    assert sum(p.numel() for p in model.parameters()) == count


def test_nin_initial_weights() -> None:
    """N(0, 0.05) and zeros at every width; He's deviation sqrt(2 / fan-in) where asked for."""
    torch.manual_seed(0)
    for width in (96, 192):
        for layer in MODELS["nin"]((3, 32, 32), 10, width=width).modules():
            if isinstance(layer, nn.Conv2d):
                assert not layer.bias.any()
                assert layer.weight.std().item() == pytest.approx(0.05, rel=0.06)
                assert abs(layer.weight.mean().item()) < 0.005
    for layer in MODELS["nin"]((3, 32, 32), 10, init="he").modules():
        if isinstance(layer, nn.Conv2d):
            fan_in = layer.weight[0].numel()
            assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.06)


def test_published_layers() -> None:
    """NIN: widths 192, 160, 96; logits are never negative; at 32 x 32 the last map is 8 x 8. Small CNN: 64, 128, 196
    channels and 3136 -> 256 -> 10. LEAF's pools round up: 84 -> 42 -> 21 -> 11 -> 6, so 32 * 36; 8 -> 4 -> 2 -> 1.
    """
    torch.manual_seed(0)
    model = MODELS["nin"]((3, 32, 32), 10).eval()
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [192, 160, 96, 192, 192, 192, 192, 192, 10]
    assert [m.kernel_size[0] for m in convolutions] == [5, 1, 1, 5, 1, 1, 3, 1, 1]
    sizes = []
    convolutions[-1].register_forward_hook(lambda _module, _inputs, output: sizes.append(output.shape))
    assert (model(torch.rand(2, 3, 32, 32)) >= 0).all()
    assert sizes == [(2, 10, 8, 8)]
    with torch.device("meta"):
        model = MODELS["small_cnn"]((3, 32, 32), 10)
        features = [MODELS["leaf_cnn"]((3, side, side), 2).get_submodule("fc").in_features for side in (84, 8)]
    assert [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)] == [64, 64, 128, 128, 196, 196]
    linear = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    assert linear == [(3136, 256), (256, 10)] and features == [1152, 32]


def test_dropout_only_in_training() -> None:
    torch.manual_seed(0)
    model = MODELS["nin"]((1, 8, 8), 10, width=48, init="he")
    x = torch.rand(4, 1, 8, 8)
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


def test_names_the_release_goes_by() -> None:
    """As released, "bn" finds ResNet's own normalisation layers, but not those of its shortcuts nor SmallCNN's."""
    found = {}
    for name in ("resnet18", "small_cnn", "nin"):
        with torch.device("meta"):
            model = MODELS[name]((3, 32, 32), 10)
        layers = [key for key, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
        found[name] = ([key for key in layers if "bn" in key], [key for key in layers if "bn" not in key])
    blocks = [f"layer{stage}.{block}.bn{n}" for stage in (1, 2, 3, 4) for block in (0, 1) for n in (1, 2)]
    assert found["resnet18"] == (["bn1", *blocks], [f"layer{stage}.0.shortcut.1" for stage in (2, 3, 4)])
    assert found["small_cnn"] == ([], [f"batchnorm{block}_{n}" for block in (1, 2, 3) for n in (1, 2)])
    assert found["nin"] == ([], [])


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("nin", ["layers.20.weight", "layers.20.bias"]),
        ("small_cnn", ["fc2.weight", "fc2.bias"]),
        ("resnet18", ["linear.weight", "linear.bias"]),
        ("leaf_cnn", ["fc.weight", "fc.bias"]),
    ],
)
def test_logit_parameters(name: str, names: list[str]) -> None:
    with torch.device("meta"):
        model = MODELS[name]((3, 32, 32), 10)
    assert logit_parameters(model) == names
    assert dict(model.named_parameters())[names[1]].shape == (10,)


@pytest.mark.parametrize(("name", "smallest"), [("nin", 4), ("small_cnn", 8), ("resnet18", 8), ("leaf_cnn", 2)])
def test_refused_sizes(name: str, smallest: int) -> None:
    """The smallest size that is named works; one less, and anything not square, is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = MODELS[name]((1, smallest, smallest), 2, width=4).eval()
        assert model(torch.rand(2, 1, smallest, smallest)).shape == (2, 2)
    less = smallest - 1
    message = f"{name}: needs images of at least {smallest}x{smallest}, got {less}x{less}"
    with pytest.raises(ValueError, match=message):
        MODELS[name]((1, less, less), 2)
    with pytest.raises(ValueError, match=f"{name}: needs square images, got 32x28"):
        MODELS[name]((1, 32, 28), 2)


def test_the_first_convolution_of_nin_is_a_convolution() -> None:
    """With channels innermost, where it is computed by columns: the output and all gradients of nn.Conv2d."""
    first = MODELS["nin"]((3, 9, 9), 4, width=6).layers[0].double()
    x = torch.rand(2, 3, 9, 9, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()
    seen = [first(x), nn.functional.conv2d(x, first.weight, first.bias, padding=2)]
    assert first(x).grad_fn.next_functions[0][0].name() == "CatBackward0"  # type: ignore[union-attr]
    gradients = [torch.autograd.grad(y.square().sum(), [x, first.weight, first.bias]) for y in seen]
    for a, b in zip((seen[0], *gradients[0]), (seen[1], *gradients[1]), strict=True):
        torch.testing.assert_close(a, b)
