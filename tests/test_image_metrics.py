"""Measures of a reconstruction: closed forms on constant and two-valued images, and skimage where it is installed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fatbench.methods.inversions.image_measures import (
    BASELINES,
    another_image,
    best_of,
    correlation,
    grey,
    identified,
    mse,
    psnr,
    shrink,
    ssim,
)

MEASURES = {"psnr": psnr, "ssim": ssim, "mse": mse, "correlation": correlation}


def images(count: int = 4, side: int = 24, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noisy(x: Tensor, size: float) -> Tensor:
    return x + size * torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=x.dtype)


def test_psnr_of_constants_and_the_clamp():
    """0.5 against 0.6: MSE 0.01, 20 dB. 1.7 is shown as 1: against 0.9 MSE 0.01 again."""
    a, b = torch.full((2, 3, 12, 12), 0.5), torch.full((2, 3, 12, 12), 0.6)
    torch.testing.assert_close(mse(a, b), torch.tensor([0.01, 0.01]))
    torch.testing.assert_close(psnr(a, b), torch.tensor([20.0, 20.0]))
    torch.testing.assert_close(psnr(a + 1.2, b + 0.3), torch.tensor([20.0, 20.0]))
    assert psnr(a, a).isinf().all()


def test_ssim_of_constants():
    """No variance, so the structure is 1: (2 ab + c) / (a^2 + b^2 + c) with c = 1e-4."""
    a, b = torch.full((1, 1, 12, 12), 0.2).double(), torch.full((1, 1, 12, 12), 0.8).double()
    assert float(ssim(a, b)) == pytest.approx((2 * 0.16 + 1e-4) / (0.04 + 0.64 + 1e-4))


def test_ssim_and_psnr_agree_with_skimage():
    metrics = pytest.importorskip("skimage.metrics")
    a = images()
    for size in (0.02, 0.3):
        b = noisy(a, size)
        for x, y, ours, other in zip(a, b.clamp(0, 1), ssim(a, b), psnr(a, b), strict=True):
            settings = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1.0}
            theirs = metrics.structural_similarity(x.numpy(), y.numpy(), channel_axis=0, **settings)
            assert float(ours) == pytest.approx(theirs, abs=1e-9)
            assert float(other) == pytest.approx(metrics.peak_signal_noise_ratio(x.numpy(), y.numpy(), data_range=1))


def test_correlation_ignores_brightness_and_contrast_and_knows_the_sign():
    a = 0.25 + 0.5 * images()
    torch.testing.assert_close(correlation(a, 0.3 + 0.4 * a), torch.ones(4).double())
    torch.testing.assert_close(correlation(a, 1 - a), -torch.ones(4).double())
    assert not correlation(a, grey(a)).any()


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_is_of_each_pair_alone_and_says_that_an_image_is_most_like_itself(name):
    a, b = images(), noisy(images(), 0.2)
    together = MEASURES[name](a, b)
    assert together.shape == (4,)
    torch.testing.assert_close(together[2:3], MEASURES[name](a[2:3], b[2:3]))
    own, sign = MEASURES[name](a, a), -1 if name == "mse" else 1
    assert (sign * own > sign * together).all()


def test_identification():
    a = images(count=50)
    order = torch.arange(50)
    assert identified(noisy(a, 0.4), a, order).all()
    assert not identified(grey(a), a, order).any()
    assert not identified(another_image(a), a, order).any()
    assert identified(noisy(a, 0.1)[[7, 3]], a, torch.tensor([7, 3])).all()
    assert not identified(noisy(a, 0.1)[[7]], a, torch.tensor([8])).any()


def test_an_exact_copy_among_the_candidates_identifies_nobody():
    a = images(count=3)
    doubled = torch.cat([a, a[:1]])
    assert identified(a, doubled, torch.arange(3)).tolist() == [False, True, True]


def test_shrinking_by_a_whole_factor_is_the_mean_of_the_blocks():
    a = images(side=64)
    torch.testing.assert_close(shrink(a), a.unflatten(3, (32, 2)).unflatten(2, (32, 2)).mean((3, 5)))


def test_the_best_pair_of_a_batch():
    a = images(count=6).view(2, 3, 3, 24, 24)
    reconstructions = torch.stack([noisy(a[:, 1], 0.1), noisy(a[:, 2], 0.01)], 1)
    torch.testing.assert_close(best_of(psnr, reconstructions, a), psnr(reconstructions[:, 1], a[:, 2]))


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_are_images_and_not_the_original(name):
    a = images()
    guess = BASELINES[name](a)
    assert guess.shape == a.shape
    assert (psnr(guess, a) < 15).all()


def test_an_image_smaller_than_the_window_is_refused():
    with pytest.raises(ValueError, match=r"window is 11 x 11, the images are 8 x 8"):
        ssim(images(side=8), images(side=8))
