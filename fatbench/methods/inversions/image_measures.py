"""How similar a reconstruction and its original are, and whether the reconstruction identifies its original.

Images are (V, C, H, W), float in [0, 1]; values outside are clamped, as a display would do. Every measure of a pair
returns (V,) and is symmetric. A single number misleads: a flat grey image has a high SSIM with a smooth original, and a
reconstruction of 8 dB can still identify one image of a thousand. So `BASELINES` are guesses without any gradient, and
`identified` says whether the reconstruction points at its original.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW, SIGMA = 11, 1.5  # of SSIM's Gaussian
K1, K2 = 0.01, 0.03
RECOVERED = 19.0  # dB
PAIRS = 256  # compared at once


def mse(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared error of the clamped images: (V,)."""
    return (a.clamp(0, 1) - b.clamp(0, 1)).square().flatten(1).mean(1)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, 10 log10(1 / MSE): (V,), infinite where the clamped images are equal."""
    return -10 * mse(a, b).log10()


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity: (V,), the mean over channels and over all positions where the window fits.

    An 11 x 11 Gaussian of standard deviation 1.5, K1 = 0.01, K2 = 0.03, population covariances. What breaching calls
    SSIM is another measure (differences: breaching-ssim). Raises ValueError if a side is shorter than the window.

    Source: Wang, Bovik, Sheikh and Simoncelli 2004.
    """
    if min(a.shape[-2:]) < WINDOW:
        raise ValueError(f"ssim: the window is {WINDOW} x {WINDOW}, the images are {a.shape[-2]} x {a.shape[-1]}")
    a, b = a.clamp(0, 1), b.clamp(0, 1)
    distance = torch.arange(WINDOW, device=a.device, dtype=a.dtype) - WINDOW // 2
    gaussian = (-distance.square() / (2 * SIGMA**2)).exp()
    gaussian = gaussian / gaussian.sum()

    def local_mean(x: Tensor) -> Tensor:
        x = x.flatten(0, 1).unsqueeze(1)
        return F.conv2d(F.conv2d(x, gaussian.view(1, 1, 1, -1)), gaussian.view(1, 1, -1, 1)).unflatten(0, a.shape[:2])

    mean_a, mean_b = local_mean(a), local_mean(b)
    var_a, var_b = local_mean(a * a) - mean_a**2, local_mean(b * b) - mean_b**2
    cov = local_mean(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + K1**2) / (mean_a**2 + mean_b**2 + K1**2)
    structure = (2 * cov + K2**2) / (var_a + var_b + K2**2)
    return (luminance * structure).flatten(1).mean(1)


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson correlation over all pixels and channels: (V,) in [-1, 1], 0 if an image is constant."""
    a, b = (x.clamp(0, 1).flatten(1) for x in (a, b))
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    length = a.norm(dim=1) * b.norm(dim=1)
    return torch.where(length > 0, (a * b).sum(1) / length.clamp(min=1e-30), torch.zeros_like(length))


def shrink(images: Tensor, side: int = 32) -> Tensor:
    """(V, C, H, W) -> (V, C, side, side) by area averaging, which nearly undoes the upsampling of a CIFAR image."""
    return F.interpolate(images, size=(side, side), mode="area")


def candidates_with(targets: Tensor, candidates: int, images: int) -> Tensor:
    """Positions of the first `candidates` of so many images and of all targets, each once.

    They are sorted, so that the row of a target can be searched for.
    """
    return torch.unique(torch.cat([targets.flatten(), torch.arange(min(candidates, images)).to(targets)]))


def identified(images: Tensor, candidates: Tensor, truth: Tensor) -> Tensor:
    """(V,) bool: is the original the likeliest among N candidates (N, C, H, W)? truth: (V,) int64 indices.

    Likeliest by correlation, which ignores a wrong brightness or contrast, but not a wrong sign. A tie is a failure: a
    constant reconstruction identifies no image. Chance is 1 / N. Pass both at the same size, e.g. 32 x 32.
    """
    reconstructions, originals = (x.clamp(0, 1).flatten(1).double() for x in (images, candidates))
    reconstructions = F.normalize(reconstructions - reconstructions.mean(1, keepdim=True), dim=1)
    originals = F.normalize(originals - originals.mean(1, keepdim=True), dim=1)
    scores = reconstructions @ originals.T
    own_scores = scores.gather(1, truth.unsqueeze(1))
    other_scores = scores.scatter(1, truth.unsqueeze(1), -torch.inf)
    return (own_scores > other_scores.amax(1, keepdim=True) + 1e-9).squeeze(1)


def best_of(measure: Callable[[Tensor, Tensor], Tensor], reconstructions: Tensor, originals: Tensor) -> Tensor:
    """(V,): the largest value over pairs of P reconstructions (V, P, C, H, W) and B originals (V, B, C, H, W).

    For an upload of a batch: was any of its images recovered? It is also the oracle's choice, with one original and
    the reconstructions of P solvers: an upper bound that no attacker reaches.
    """
    return of_pairs(measure, reconstructions, originals).flatten(1).amax(1)


def least_of(measure: Callable[[Tensor, Tensor], Tensor], reconstructions: Tensor, originals: Tensor) -> Tensor:
    """As `best_of`, for a measure that is least for equal images."""
    return of_pairs(measure, reconstructions, originals).flatten(1).amin(1)


def of_pairs(measure: Callable[[Tensor, Tensor], Tensor], reconstructions: Tensor, originals: Tensor) -> Tensor:
    """(V, P, B): a measure of every pair of a reconstruction (V, P, C, H, W) and an original (V, B, C, H, W).

    Above PAIRS pairs, one reconstruction at a time: 64 images a client make 4,096 pairs, which would take 19 GB.
    """
    targets, count, batch = *reconstructions.shape[:2], originals.shape[1]
    if count > 1 and count * batch > PAIRS:
        return torch.cat(
            [of_pairs(measure, reconstruction, originals) for reconstruction in reconstructions.split(1, 1)], 1
        )
    left_images = reconstructions.unsqueeze(2).expand(-1, -1, batch, -1, -1, -1).flatten(0, 2)
    right_images = originals.unsqueeze(1).expand(-1, count, -1, -1, -1, -1).flatten(0, 2)
    return measure(left_images, right_images).view(targets, count, batch)


def matched(reconstructions: Tensor, originals: Tensor) -> dict[str, Tensor]:
    """matched_psnr, matched_ssim, recovered, each (V,): reconstructions assigned to originals one to one.

    P reconstructions (V, P, C, H, W), B originals (V, B, C, H, W); the assignment with the largest sum of PSNR (of
    SSIM). The means are over the min(P, B) pairs, `recovered` is the fraction of originals above RECOVERED dB.

    Source: Dimitrov et al. 2022, section 5, whose threshold is 19 dB.
    """
    from scipy.optimize import linear_sum_assignment

    batch = originals.shape[1]
    scores_by_name: dict[str, list[float]] = {"matched_psnr": [], "matched_ssim": [], "recovered": []}
    tables = {name: of_pairs(measure, reconstructions, originals) for name, measure in (("psnr", psnr), ("ssim", ssim))}
    for name, values in tables.items():
        for table in values.clamp(max=300).cpu().numpy():
            pairs = table[linear_sum_assignment(table, maximize=True)]
            scores_by_name[f"matched_{name}"].append(float(pairs.mean()))
            if name == "psnr":
                scores_by_name["recovered"].append(float((pairs > RECOVERED).sum()) / batch)
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in scores_by_name.items()}


def grey(images: Tensor) -> Tensor:
    """Baseline: 0.5 everywhere, (V, C, H, W)."""
    return torch.full_like(images, 0.5)


def mean_colour(images: Tensor) -> Tensor:
    """Baseline: the image's mean colour (V, C, H, W), which an attacker does not know."""
    return images.mean((-2, -1), keepdim=True).expand_as(images)


def another_image(images: Tensor) -> Tensor:
    """Baseline: the next image of the set (V, C, H, W): a photograph, but another one."""
    return images.roll(1, 0)


BASELINES = {"grey": grey, "mean_colour": mean_colour, "another_image": another_image}
