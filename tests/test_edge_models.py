"""Models of an edge and a server: shapes, sizes by hand, what belongs to the edge, refused pairs."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn

from fatbench.models import MODELS, edge
from fatbench.suite.entry import ask

VIT = {"dim": 12, "depth": 2, "heads": 3}
RESNET = {"planes": 2, "blocks": 2}
SETTINGS = {"edge_vit": VIT, "whole_vit": VIT, "edge_resnet": RESNET, "edge_resnet8": RESNET, "whole_resnet": RESNET,
            "whole_edge": {}}  # fmt: skip
EDGES = [name for name in SETTINGS if name.startswith("edge")]
SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]


def build(name: str, shape: tuple[int, int, int] = (3, 32, 32), classes: int = 7, **settings: object) -> nn.Module:
    return getattr(edge, name)(shape, classes, **settings)


def expected_parameters(name: str, *, channels: int, side: int, classes: int, **settings: object) -> float:
    """What the model's entry says, with the defaults of settings that are not given."""
    entry = MODELS[name]
    return ask(entry.parameters, functools.partial(entry, **settings), (channels, side, side), classes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_model(name: str, shape: tuple[int, int, int]) -> None:
    """Images to finite logits, each its own whatever else is in the batch; gradients reach what they should: the
    deployed model's reach all but the edge's classifier, the edge's all but the server."""
    torch.manual_seed(0)
    model = build(name, shape, width=9, **SETTINGS[name])
    x = torch.rand(3, *shape)
    logits = model.train()(x)
    assert logits.shape == (3, 7)
    assert logits.isfinite().all()
    logits.exp().sum().backward()
    for key, p in model.named_parameters():
        assert (p.grad is None) == key.startswith("classifier."), key
    if name in EDGES:
        model.zero_grad()
        model.edge_logits(x).exp().sum().backward()
        for key, p in model.named_parameters():
            assert (p.grad is None) == key.startswith("server."), key
    model.eval()
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-6)
    count = sum(p.numel() for p in model.parameters())
    values = {"width": 9, "channels": shape[0], "side": shape[1], "classes": 7, **SETTINGS[name]}
    assert count == expected_parameters(name, **values)


@pytest.mark.parametrize(("classes", "side", "stem"), [(100, 32, {}), (1000, 224, {"stem": 7})])
@pytest.mark.parametrize("name", SETTINGS)
def test_parameter_count_of_the_defaults_and_the_imagenet_stem(name: str, classes: int, side: int, stem: dict) -> None:
    if stem and name == "edge_resnet8":
        return  # has none
    with torch.device("meta"):
        model = build(name, (3, side, side), classes, **stem)
    expected = expected_parameters(name, channels=3, side=side, classes=classes, **stem)
    assert sum(p.numel() for p in model.parameters()) == expected


def test_sizes_by_hand() -> None:
    """ResNet-18 for CIFAR has 11,173,962 parameters, and so has the edge. A ViT-B block has 7,087,872; 12 of them, the
    projection 64*16*768 + 768, 2 tokens and 66 positions of 768, the norm 1,536 and two heads of 7,690."""
    with torch.device("meta"):
        model = build("edge_vit", classes=10)
    count = {part: sum(p.numel() for p in getattr(model, part).parameters()) for part in ("extractor", "classifier")}
    assert sum(count.values()) == 11_173_962
    assert count["extractor"] == 1_728 + 128 + 4 * 36_864 + 4 * 128
    server = sum(p.numel() for p in model.server.parameters())
    assert server == 12 * 7_087_872 + 64 * 16 * 768 + 768 + 68 * 768 + 1_536 + 2 * 7_690


def layers(*parts: nn.Module) -> int:
    """Convolutions but those of the shortcuts, and linear layers."""
    named = [one for part in parts for one in part.named_modules()]
    return sum(isinstance(module, nn.Conv2d | nn.Linear) and "downsample" not in key for key, module in named)


def test_resnets_are_counted_in_layers() -> None:
    """109, 55, and of the edge 8."""
    with torch.device("meta"):
        for name, blocks, expected in (("edge_resnet", 12, 109), ("whole_resnet", 12, 109), ("edge_resnet8", 6, 55)):
            assert layers(build(name, blocks=blocks).server) == expected
        model = build("edge_resnet8")
    assert layers(model.extractor, model.classifier) == 8


@pytest.mark.parametrize(
    ("name", "shape", "settings", "features"),
    [
        ("edge_vit", (3, 32, 32), {}, (64, 32, 32)),
        ("edge_vit", (3, 224, 224), {"stem": 7}, (64, 56, 56)),
        ("edge_resnet", (3, 32, 32), {}, (64, 32, 32)),
        ("edge_resnet8", (3, 32, 32), {}, (16, 32, 32)),
    ],
)
def test_what_crosses_the_wire(name: str, shape: tuple[int, int, int], settings: dict, features: tuple) -> None:
    with torch.device("meta"):
        model = build(name, shape, **settings)
        assert model.extract(torch.zeros(2, *shape)).shape == (2, *features)


@pytest.mark.parametrize("name", EDGES)
def test_forward_is_the_server_behind_the_extractor(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, width=4, **SETTINGS[name]).eval()
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(model(x), model.server(model.extract(x)))
    torch.testing.assert_close(model.edge_logits(x), model.classifier(model.extract(x)))
    assert {key.split(".")[0] for key in model.state_dict()} == {"extractor", "classifier", "server"}


@pytest.mark.parametrize("name", ["edge_vit", "whole_vit"])
def test_the_transformer_answers_with_the_mean_of_both_heads(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, width=4, **VIT)
    x = torch.rand(2, 3, 32, 32)
    tokens = model.eval().server.forward_features(model.extractor(x))
    both = model.server.head(tokens[:, 0]), model.server.head_dist(tokens[:, 1])
    torch.testing.assert_close(model(x), (both[0] + both[1]) / 2)
    assert not torch.allclose(both[0], both[1])


@pytest.mark.parametrize("name", SETTINGS)
def test_the_layers_that_emit_logits(name: str) -> None:
    with torch.device("meta"):
        model = build(name, **SETTINGS[name])
    for layer in model.logit_layers:
        assert model.get_submodule(layer).out_features == 7


@pytest.mark.parametrize("name", EDGES)
def test_an_edge_that_emits_another_shape_than_the_server_takes_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}: the edge emits features of shape (9, 32, 32), ")) as error:
        build(name, width=9, takes=16, **SETTINGS[name])
    assert str(error.value).endswith("the server takes (16, 32, 32)")
