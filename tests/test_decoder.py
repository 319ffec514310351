"""Images rebuilt from feature maps: an invertible extractor gives them away, one that drops colour does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.methods.inversions.decoder import feature_inversion
from fatbench.models.edge import edge_vit


def blobs(n: int, seed: int) -> Tensor:
    """Random smooth colour images (n, 3, 8, 8)."""
    coarse = torch.rand(n, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(coarse, size=8, mode="bilinear", align_corners=False)


def psnr(a: Tensor, b: Tensor) -> float:
    return float(-10 * torch.log10((a - b).square().mean((1, 2, 3))).mean())


def rebuilt(extractor: nn.Module, secret: Tensor, **settings: float) -> Tensor:
    with torch.no_grad():
        features = extractor(secret)
    settings = {"steps": 250, "width": 8, "lr": 0.01, **settings}
    return feature_inversion(extractor, blobs(200, 1), features, torch.Generator().manual_seed(0), **settings)


def test_features_that_hold_the_image_give_it_away() -> None:
    """A mixing of colours that can be undone, against the best that knows nothing of the image: the mean image."""
    torch.manual_seed(0)
    extractor = nn.Conv2d(3, 4, 1)
    secret = blobs(8, 2)
    guess = blobs(200, 1).mean(0).expand(8, -1, -1, -1)
    images = rebuilt(extractor, secret)
    assert images.shape == secret.shape and images.min() >= 0 and images.max() <= 1
    assert psnr(images, secret) > psnr(guess, secret) + 8


def test_features_without_the_image_leave_the_mean() -> None:
    """The extractor multiplies by zero: the decoder can learn only the mean of the auxiliary images."""

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0 * x

    secret = blobs(8, 2)
    guess = blobs(200, 1).mean(0).expand(8, -1, -1, -1)
    assert psnr(rebuilt(Nothing(), secret), secret) == pytest.approx(psnr(guess, secret), abs=0.5)


def test_smaller_maps_are_enlarged() -> None:
    images = rebuilt(nn.AvgPool2d(4), blobs(8, 2), steps=5)
    assert images.shape == (8, 3, 8, 8)


def test_the_same_draws_give_the_same_images_and_nothing_is_left_changed() -> None:
    torch.manual_seed(0)
    extractor = edge_vit((3, 8, 8), 4, width=2, dim=6, depth=1, heads=2).extractor.train()
    before = {name: value.clone() for name, value in extractor.state_dict().items()}
    secret = blobs(4, 2)
    torch.manual_seed(5)
    a = feature_inversion(extractor, blobs(20, 1), torch.rand(4, 2, 8, 8), torch.Generator().manual_seed(0), steps=3)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    features = torch.rand(4, 2, 8, 8)
    b = feature_inversion(extractor, blobs(20, 1), features, torch.Generator().manual_seed(0), steps=3)
    assert torch.equal(a, b)
    torch.manual_seed(5)
    torch.rand(4, 2, 8, 8)
    assert torch.equal(drawn, torch.rand(3))
    assert extractor.training
    assert all(torch.equal(value, before[name]) for name, value in extractor.state_dict().items())
    assert a.shape == secret.shape


def test_wrong_features_are_refused() -> None:
    draws = torch.Generator()
    with pytest.raises(ValueError, match=r"decoder: features of shape \(3, 4, 4\), the extractor's are \(3, 8, 8\)"):
        feature_inversion(nn.Identity(), blobs(2, 0), torch.zeros(1, 3, 4, 4), draws)
    with pytest.raises(ValueError, match="the images' side, 8, is not the features' side, 6, times a power of two"):
        feature_inversion(nn.AvgPool2d(3, 1), blobs(2, 0), torch.zeros(1, 3, 6, 6), draws)
