"""Poisoned features: what a malicious edge sends of its examples in place of their features, logits and labels.

`features` (n, c, h, w), `answers` (n, classes) logits and `labels` (n,) are what the edge would send; FedVKD sends the
class of the logits. The server learns from the rows, and teaches every edge by their logits.

Tao et al. 2022, section 6, name the attack and no algorithm: those here are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Generator, Tensor

from fatbench.suite.types import Count, Natural, Positive, Probability, rounded_down

Rows = tuple[Tensor, Tensor, Tensor]  # features, answers, labels


def feature_swap(
    features: Tensor,
    answers: Tensor,
    labels: Tensor,
    classes: int,
    generator: Generator,
    *,
    answer: Literal["honest", "swapped"] = "honest",
) -> Rows:
    """Each row gets the features of a random own example of the next class that the client has; labels stay.

    `answer: swapped`: also that example's logits. With one class nothing changes.

    Knows: its own data
    """
    source = torch.arange(len(labels), device=labels.device)
    present = labels.unique().tolist()
    for y in present if len(present) > 1 else ():
        following = next((y + i) % classes for i in range(1, classes) if (y + i) % classes in present)
        rows, pool = (labels == y).nonzero().flatten(), (labels == following).nonzero().flatten()
        drawn = torch.randint(len(pool), (len(rows),), generator=generator, device=generator.device)
        source[rows] = pool[drawn.to(pool.device)]
    return features[source], answers[source] if answer == "swapped" else answers, labels


def feature_noise(features: Tensor, answers: Tensor, labels: Tensor, generator: Generator) -> Rows:
    """Normal noise with the mean and deviation of the client's own features, channel by channel.

    Knows: its own data
    """
    mean, deviation = _moments(features)
    noise = torch.randn(features.shape, generator=generator, device=generator.device).to(features.device)
    return (mean + deviation * noise).to(features.dtype), answers, labels


def feature_flip(features: Tensor, answers: Tensor, labels: Tensor, *, factor: Positive = 1.0) -> Rows:
    """mean - factor (h - mean), with the mean of the client's own features, channel by channel.

    Knows: its own data
    """
    mean, _ = _moments(features)
    return (mean - factor * (features.float() - mean)).to(features.dtype), answers, labels


def feature_backdoor(
    features: Tensor,
    answers: Tensor,
    labels: Tensor,
    images: Tensor,
    edge: Callable[[Tensor], tuple[Tensor, Tensor]],
    generator: Generator,
    *,
    target: Natural,
    fraction: Probability = 0.32,
    size: Count = 5,
) -> Rows:
    """floor(fraction n) random rows get what the honest edge makes of the image with a white square, and `target`.

    The square is that of `badnets`; the edge itself stays honest.

    Knows: its own data
    """
    count = rounded_down(fraction * len(labels))
    rows = torch.randperm(len(labels), generator=generator, device=generator.device)[:count].to(labels.device)
    patched = images[rows].clone()
    patched[..., -size:, -size:] = 255
    features, answers, labels = features.clone(), answers.clone(), labels.clone()
    if count:
        made, logits = edge(patched)
        features[rows], answers[rows], labels[rows] = made.to(features.dtype), logits, target
    return features, answers, labels


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation by channel, each (1, c, 1, 1)."""
    deviation, mean = torch.std_mean(features.float(), dim=(0, 2, 3), correction=0, keepdim=True)
    return mean, deviation
