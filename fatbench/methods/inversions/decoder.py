"""What an uploaded feature map reveals: a decoder from features to images, trained on the attacker's images.

The honest-but-curious server has an extractor and unlabelled images like the client's. FedVKD and FedGKT do not send
the client's own extractor: with it, this is a bound. That protects nothing: an edge that the server trains itself, from
the same start and in the same way, can take its place (results/fedvkd.md).
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fatbench.engine.optimizers import Descent, Moments, step
from fatbench.engine.randomness import forked
from fatbench.suite.entry import Passes

BATCH = 64  # images in a step of the decoder


def feature_inversion(
    extractor: nn.Module,
    images: Tensor,
    features: Tensor,
    generator: Generator,
    *,
    steps: int = 2000,
    batch: int = BATCH,
    lr: float = 0.001,
    width: int = 64,
) -> Tensor:
    """Images (n, C, H, W) in [0, 1] that a decoder reconstructs from uploaded `features` (n, c, h, w).

    The decoder is trained for `steps` batches of Adam to reconstruct the auxiliary `images` (A, C, H, W), floats in [0,
    1], from their features under the same `extractor` (frozen, eval mode), by mean squared error. H must be h times a
    power of two. All randomness comes from `generator` (on the CPU). The extractor's mode is restored. Raises
    ValueError for features of another size or shape.
    """
    training = extractor.training
    extractor.eval()
    with torch.no_grad():
        feature_shape = extractor(images[:1]).shape[1:]
    if feature_shape != features.shape[1:]:
        raise ValueError(
            f"decoder: features of shape {tuple(features.shape[1:])}, the extractor's are {tuple(feature_shape)}"
        )
    factor = images.shape[-1] // feature_shape[-1]
    if factor & (factor - 1) or factor * feature_shape[-1] != images.shape[-1]:
        raise ValueError(
            f"decoder: the images' side, {images.shape[-1]}, is not the features' side, {feature_shape[-1]}, times a "
            "power of two"
        )
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with forked(seed, "decoder", device=images.device):
        network = decoder(feature_shape[0], images.shape[1], factor.bit_length() - 1, width).to(images.device)
    weights = list(network.parameters())
    moments: Moments = {}
    for _ in range(steps):
        x = images[torch.randint(len(images), (batch,), generator=generator, device=generator.device).to(images.device)]
        with torch.no_grad():
            h = extractor(x)
        loss = F.mse_loss(network(h), x)
        moments = step(weights, torch.autograd.grad(loss, weights), moments, Descent("adam", lr))
    extractor.train(training)
    with torch.no_grad():
        return torch.cat([network(chunk).clamp(0, 1) for chunk in features.float().split(batch)])


def passes_of_decoder(steps: int) -> Passes:
    """Through the extractor, of the images in all steps and of the one that tells the shape of features."""
    return Passes(1 + BATCH * steps, 0)


def decoder(channels: int, colours: int, doublings: int, width: int) -> nn.Module:
    """3x3 convolutions with ReLU, the side doubled `doublings` times in between: (B, channels, h, w) to images."""
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
    for _ in range(doublings):
        layers += [nn.Upsample(scale_factor=2.0), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, colours, 3, padding=1)]
    return nn.Sequential(*layers)
