"""Adversaries: the attacks of malicious clients, one function each (`fatbench.engine.malicious` applies them).

    u, v = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.0], [3.0, 2.0]])
    ADVERSARIES["ipm"](u, v, epsilon=0.5)           -> [-1.0, -0.5]

`update` (P,) is the honest update: the client's trained parameters minus those that it received, concatenated. `others`
(n, P) are the updates of the round's honest clients. An adversary knows what its parameters name, and nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from fatbench.methods.feature_adversaries import feature_backdoor, feature_flip, feature_noise, feature_swap
from fatbench.methods.knowing_adversaries import (
    agree,
    aimed,
    an_attack_with_a_radius,
    an_honest_client,
    attack_and_teacher,
    enough_for_fang,
    fang_krum,
    fang_trimmed,
    inject,
    masking,
    mimic,
    mimic_fixed,
    min_sum,
    objective_of,
    optimal_alie,
    optimal_ipm,
    passes_of_instead,
    scale_logits,
    two_for_a_spread,
    within_honest,
)
from fatbench.suite.entry import Entry
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Natural, NonNegative, Positive, Probability, Real, rounded_down

# --- data ---------------------------------------------------------------------------------------------------------


def label_flip(images: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Honest training on labels y -> C - 1 - y.

    images (N, C, H, W) uint8, labels (N,). With an odd number of classes the middle one stays. Under adversarial
    training the inner attack maximises the loss of the flipped label.

    Knows: its own data
    """
    return images, classes - 1 - labels


def badnets(
    images: Tensor,
    labels: Tensor,
    generator: Generator,
    *,
    target: Natural,
    fraction: Probability = 0.32,
    size: Count = 5,
) -> tuple[Tensor, Tensor]:
    """A backdoor: floor(fraction N) random images get a white square, `size` pixels a side, and the label `target`.

    The square is at the bottom right of the stored images, so an augmentation that crops may move it.
    Raises ValueError unless the images are larger than the square.

    Source: Gu et al. 2017 (BadNets); 5 pixels and a fraction of 0.32 are FLPoison's.

    Knows: its own data
    """
    if size >= min(images.shape[2:]):
        raise ValueError(f"badnets: a square of {size} pixels on images of {images.shape[2]} x {images.shape[3]}")
    count = rounded_down(fraction * len(images))
    patched_images = torch.randperm(len(images), generator=generator, device=images.device)[:count]
    images, labels = images.clone(), labels.clone()  # the data set's own tensors stay as they are
    images[patched_images] = with_square(images[patched_images], size)
    labels[patched_images] = target
    return images, labels


def with_square(images: Tensor, size: int) -> Tensor:
    """Images (N, C, H, W), uint8 or in [0, 1], with a white square of `size` pixels a side at the bottom right."""
    images = images.clone()
    images[..., -size:, -size:] = 1.0 if images.is_floating_point() else 255
    return images


def class_of_the_data(cell: Facts, *, target: int) -> str | None:
    return f"target: class {target} of {cell.classes} classes, counted from 0" if target >= cell.classes else None


def square_inside_the_image(cell: Facts, *, size: int) -> str | None:
    if size >= cell.side:
        return f"size: a square of {size} pixels on images of {cell.side} x {cell.side}"
    return None


# --- training -----------------------------------------------------------------------------------------------------


def sign_flip_gradients(loss: Tensor) -> Tensor:
    """Every local gradient of the objective is negated: the client ascends its loss.

    Weight decay and proximal terms stay as they are. The loss that the client reports is the honest one.

    Knows: its own training
    """
    return -loss


# --- uploads ------------------------------------------------------------------------------------------------------


def sign_flip(update: Tensor, *, factor: Positive = 1.0) -> Tensor:
    """Minus `factor` times the honest update.

    Equal to `sign_flip_gradients` for one local step, not for more.

    Knows: its own update
    """
    return -factor * update


def gaussian_upload(update: Tensor, generator: Generator, *, mean: Real = 0.0, std: NonNegative = 1.0) -> Tensor:
    """N(mean, std^2) for every parameter, in place of an update.

    Source: FLPoison's 0 and 1; Blades has 0.1 and 0.1.

    Knows: nothing
    """
    # the update gives the shape alone: this adversary knows nothing
    noise = torch.empty_like(update).normal_(generator=generator)
    return mean + std * noise


def ipm(update: Tensor, others: Tensor, *, epsilon: Positive = 1.0) -> Tensor:
    """Inner product manipulation: -epsilon times the mean of the honest updates.

    Of n clients f are malicious: the mean of all reverses if epsilon > (n - f) / f. A small epsilon is meant for Krum.

    Source: Xie et al. 2019. Blades: epsilon 0.1 and 100.

    Knows: the honest updates of the round
    """
    return -epsilon * others.mean(0)


def alie(
    update: Tensor,
    others: Tensor,
    malicious: int,
    *,
    z: Positive | None = None,
    sign: Literal["minus", "plus"] = "minus",
) -> Tensor:
    """A little is enough: the mean of the honest updates minus z standard deviations (unbiased), per parameter.

    The default `z` is the largest at which enough honest clients lie farther from the mean. With n clients of which f
    are malicious: s = floor(n / 2) + 1 - f and z = Phi^-1((n - f - s) / (n - f)), at least 0. A single honest client
    has no deviation.

    Source: Baruch et al. 2019. paper: mean + z std or - / here: -, as in EPFL's code; Blades and FLPoison have +.

    Knows: the honest updates of the round
    """
    if z is None:
        honest = len(others)
        supporters = max((honest + malicious) // 2 + 1 - malicious, 1)
        quantile = (honest - supporters) / honest
        # at a quantile of 0 the inverse is infinite; below 1/2 z would be negative, towards the other side
        z = max(statistics.NormalDist().inv_cdf(quantile), 0.0) if quantile > 0 else 0.0
    deviation = others.std(0) if len(others) > 1 else torch.zeros_like(update)
    return others.mean(0) + (z if sign == "plus" else -z) * deviation


def bounded_z(cell: Facts, *, z: float | None) -> str | None:
    if not z and 2 * cell.malicious > cell.cohort:
        return "z: the malicious clients are a majority, for which no z follows; set it"
    return None


def positive_z(cell: Facts, *, z: float | None) -> str | None:
    honest = cell.cohort - cell.malicious
    if not z and 2 * (cell.cohort // 2 + 1 - cell.malicious) >= honest:
        return (
            f"z: {cell.malicious} malicious clients of {cell.cohort} give z <= 0, the honest mean; set z or add "
            "malicious clients"
        )
    return None


def min_max(update: Tensor, others: Tensor, *, tolerance: Positive = 0.01) -> Tensor:
    """Min-Max: mean - gamma std, as far out as the honest updates are from one another.

    The largest gamma in [0, 5], by bisection to `tolerance`, with which no honest update is farther from what is sent
    than two honest updates are from each other. std is per parameter, unbiased.

    Source: Shejwalkar and Houmansadr 2021; gamma's range and tolerance are those of Blades.

    Knows: the honest updates of the round
    """
    mean, deviation = others.mean(0), others.std(0) if len(others) > 1 else torch.zeros_like(update)
    # not by a matrix product, whose rounding is large beside the distance of two near updates
    largest = torch.cdist(others, others, compute_mode="donot_use_mm_for_euclid_dist").max()

    def fits(gamma: float) -> bool:
        return bool((others - (mean - gamma * deviation)).norm(dim=1).max() <= largest)

    low, high = 0.0, 5.0
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return mean - low * deviation  # `low` fits, `high` may not


def model_replacement(update: Tensor, *, factor: Positive) -> Tensor:
    """`factor` times the client's update: with factor n, honest updates of 0 and a plain mean, its model wins.

    To be combined with an attack on its training, such as a backdoor:
    `{attack: {name: badnets, ...}, then: {name: model_replacement, ...}}`.

    Source: Bagdasaryan et al. 2020, which divides by the server's rate; FLPoison has 50.

    Knows: its own update
    """
    return factor * update


ADVERSARIES: dict[str, Callable[..., Any]] = {
    "label_flip": label_flip,
    "badnets": Entry(
        badnets, refuse=(class_of_the_data, square_inside_the_image), example={"target": 0}, cites=("gu2017",)
    ),
    "sign_flip_gradients": sign_flip_gradients,
    "sign_flip": sign_flip,
    "gaussian_upload": gaussian_upload,
    "ipm": Entry(ipm, cites=("xie2019",)),
    "alie": Entry(alie, refuse=(bounded_z, positive_z, two_for_a_spread), cites=("baruch2019",)),
    "min_max": Entry(min_max, refuse=(two_for_a_spread,), cites=("shejwalkar2021",)),
    "model_replacement": Entry(model_replacement, cites=("bagdasaryan2020",)),
    "optimal_ipm": Entry(optimal_ipm, cites=("xie2019",)),
    "optimal_alie": Entry(optimal_alie, refuse=(two_for_a_spread,), cites=("baruch2019",)),
    "min_sum": Entry(min_sum, refuse=(two_for_a_spread,), cites=("shejwalkar2021",)),
    "mimic": Entry(mimic, cites=("karimireddy2022",)),
    "mimic_fixed": Entry(mimic_fixed, refuse=(an_honest_client,)),
    "fang_krum": Entry(fang_krum, refuse=(two_for_a_spread, enough_for_fang), cites=("fang2020",)),
    "fang_trimmed": Entry(fang_trimmed, refuse=(two_for_a_spread,), cites=("fang2020",)),
    "objective_of": Entry(objective_of, passes=passes_of_instead, cites=("kim2023",)),
    "inject": Entry(inject, cites=("kim2023",)),
    "within_honest": Entry(within_honest, refuse=(two_for_a_spread,), example={"stretch": True}, cites=("kim2023",)),
    "aimed": Entry(aimed, refuse=(an_attack_with_a_radius,), cites=("kim2023",)),
    "masking": Entry(masking, passes=attack_and_teacher, cites=("zizzo2020",)),
    "agree": Entry(agree, cites=("fang2020", "zizzo2020")),
    "scale_logits": Entry(scale_logits, cites=("athalye2018",)),
    "feature_swap": Entry(feature_swap, cites=("tao2022",)),
    "feature_noise": Entry(feature_noise, cites=("tao2022",)),
    "feature_flip": Entry(feature_flip, cites=("tao2022",)),
    "feature_backdoor": Entry(
        feature_backdoor,
        refuse=(class_of_the_data, square_inside_the_image),
        example={"target": 0},
        cites=("gu2017", "tao2022"),
    ),
}
