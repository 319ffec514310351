"""What training asks of a device, against hand counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fatbench import models
from fatbench.engine.counters import Flops
from fatbench.engine.footprint import footprint
from fatbench.engine.microbatch import bound
from fatbench.engine.rounds import Problem


def problem(model: nn.Module, shape: tuple[int, int, int], classes: int, size: int | None = None) -> Problem:
    images, labels = torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    return Problem(model, images, labels, [torch.arange(1)], classes, 0, torch.device("cpu"), size=size)


class Small(nn.Module):
    """conv 3x3, 2 -> 3 channels, padded; ReLU; mean; linear 3 -> 5."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.fc = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.conv(x).relu().mean((2, 3)))
        return logits


def test_a_small_network_by_hand() -> None:
    """4x4 images. conv: 2 * (3*2*9) * 16 = 1728; linear: 2 * 3 * 5 = 30; backward: the weights of conv 1728 (the image
    needs no gradient), weights and input of the linear layer 60. 54 + 20 = 74 parameters.

    Kept for one batch of 8, in floats: the images 8*2*16 = 256; the ReLU's output 8*3*16 = 384 (the convolution's is
    not needed); the means 8*3 = 24; the log-probabilities 8*5 = 40; and 8 labels of 8 bytes, and the one float of the
    sum of class weights that the loss keeps.
    """
    found = footprint(problem(Small(), (2, 4, 4), 5), 8, moments=2)
    assert found["edge_parameters"] == 74
    assert found["edge_flops"] == 1758
    assert found["edge_step_flops"] == 1758 + 1728 + 60
    activations = 4 * (256 + 384 + 24 + 40) + 8 * 8 + 4
    assert found["edge_memory"] == 74 * 4 * (1 + 1 + 2) + activations


def test_memory_in_moments_and_batch() -> None:
    on = problem(Small(), (2, 4, 4), 5)
    none, one, two = (footprint(on, 8, moments=m)["edge_memory"] for m in (0, 1, 2))
    assert one - none == two - one == 74 * 4
    more = footprint(on, 16, moments=0)["edge_memory"]
    assert more - none == 4 * (256 + 384 + 24 + 40) + 8 * 8


def test_images_are_resized_on_the_device() -> None:
    """8x8 instead of 4x4: four times the convolution, the same linear layer."""
    found = footprint(problem(Small(), (2, 4, 4), 5, size=8), 4)
    assert found["edge_flops"] == 4 * 1728 + 30


class Parted(nn.Module):
    """An edge (Small in two halves) and a server that the device never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5))
        self.server = nn.Linear(10**6, 10**3, device="meta")

    def edge_logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.extractor(x))
        return logits


def test_only_the_edge_part_counts() -> None:
    found = footprint(problem(Parted(), (2, 4, 4), 5), 8)
    assert found["edge_parameters"] == 74
    assert found["edge_flops"] == 1758
    assert found["edge_memory"] < 10**4


def test_attention_is_counted_with_its_matrices() -> None:
    """One layer on 4 tokens of 2 numbers, one head: q, k, v and the output 4 * 2*2*2*4 = 128; q k^T and p v 2 * 2*4*4*2
    = 128; logits of the mean, 2 * 2 * 3 = 12."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out, self.fc = nn.Linear(2, 6), nn.Linear(2, 2), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).unsqueeze(1).chunk(3, -1)
            logits: Tensor = self.fc(self.out(nn.functional.scaled_dot_product_attention(q, k, v)).mean((1, 2)))
            return logits

    assert footprint(problem(Attention(), (2, 2, 2), 3), 4)["edge_flops"] == 128 + 128 + 12


def test_the_model_is_left_alone_and_microbatches_do_not_count() -> None:
    model = Small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = footprint(problem(model, (2, 4, 4), 5), 8)
    bound(model, 2)
    assert footprint(problem(model, (2, 4, 4), 5), 8) == plain
    assert "forward" in vars(model)  # still bounded
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_have_no_gradient_to_keep() -> None:
    """conv frozen: 20 trained parameters; the images and the ReLU's output need not be kept."""
    model = Small()
    model.conv.weight.requires_grad_(False)
    found = footprint(problem(model, (2, 4, 4), 5), 8, moments=1)
    assert found["edge_parameters"] == 20
    assert found["edge_memory"] == 74 * 4 + 20 * 4 * 2 + 4 * (24 + 40) + 8 * 8 + 4


@pytest.mark.parametrize("batch", [2, 32])
def test_batch_normalisation_in_training_mode(batch: int) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 3))
    assert footprint(problem(model, (1, 1, 1), 3), batch)["edge_flops"] == 2 * 2 + 2 * 2 * 3


def reference(network: nn.Module, shape: tuple[int, ...]) -> tuple[float, float, float]:
    """Operations forward and of a step per image, and bytes kept, by torch's own counter, without storage."""
    network = network.to("meta").train()
    own = {t.untyped_storage()._cdata for t in (*network.parameters(), *network.buffers())}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    x, y = torch.empty(shape, device="meta"), torch.empty(shape[0], dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = F.cross_entropy(network(x), y)
        forward = counter.get_total_flops()
        kept = sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in own)
        loss.backward()
    return forward / len(x), counter.get_total_flops() / len(x), kept


# Convolutions, batch norm, dropout, attention, an edge: the rest repeat them and take a second each.
COUNTED = ("nin", "mcmahan_cnn", "leaf_cnn", "resnet18", "vit", "edge_resnet", "efficientnet_lite0")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in COUNTED)) for name in models.MODELS]
)
def test_every_model_counts_as_torch_counts(name: str) -> None:
    shape = (1, 28, 28) if name == "leaf_cnn" else (3, 32, 32)
    model = models.MODELS[name](shape, 10)
    device = model
    if hasattr(model, "edge_logits"):
        device = nn.Sequential(model.get_submodule("extractor"), model.get_submodule("classifier"))
    state = torch.random.get_rng_state()
    found = footprint(problem(model, shape, 10), 8, moments=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = sum(p.numel() for p in device.parameters() if p.requires_grad) * 4
    held = sum(t.untyped_storage().nbytes() for t in (*device.parameters(), *device.buffers()))
    forward, step, kept = reference(device, (8, *shape))
    assert (found["edge_flops"], found["edge_step_flops"]) == (forward, step)
    assert found["edge_memory"] == held + weights + kept


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_count_as_torch_counts(transposed: bool, groups: int) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layers = nn.Sequential(kind(2, 4, 3, stride=2, groups=groups), kind(4, 6, 2, groups=groups))
    x = torch.zeros(3, 2, 9, 8)
    with Flops() as ours:
        layers(x).sum().backward()
    with FlopCounterMode(display=False) as theirs:
        layers(x).sum().backward()
    assert ours.total == theirs.get_total_flops() > 0


def test_products_count_as_torch_counts() -> None:
    a, b = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
    with Flops() as ours:
        a @ b, torch.baddbmm(torch.ones(5), a, b), a[0] @ b[0], torch.addmm(torch.ones(5), a[0], b[0])
    assert ours.total == 2 * 3 * 4 * 5 * (2 + 2 + 1 + 1)
