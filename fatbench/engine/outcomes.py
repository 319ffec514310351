"""Checks on every outcome: does the network name a class, and did the attack stay in its ball?

is_correct(logits, y)                   which images are classified correctly
seen = Seen.of(logits, x, adversarial, ball(attack))
seen.doubts(ball(attack))               {"an attack leaves its radius": 0.3}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from fatbench.errors import SpecError, article

NOT_FINITE = "outputs are not finite"
ROUNDING = 1e-6  # of distances and of the pixel range
RELATIVE = 1e-4  # of a radius: an L2 norm is a sum over all pixels


class Ball(NamedTuple):
    """How far an attack may move an image: the radius and its norm, "Linf" or "L2"."""

    eps: float
    norm: str


def names_a_class(logits: Tensor) -> Tensor:
    """For which images (B,) the largest of the logits (B, classes) is finite. Single classes may have -inf."""
    return logits.amax(1).isfinite()  # amax propagates NaN, where argmax would return a class


def is_correct(logits: Tensor, y: Tensor) -> Tensor:
    """Which images (B,) are classified correctly; False if the outputs name no class."""
    return (logits.argmax(1) == y) & names_a_class(logits)


def attacked_images(returned: Any, x: Tensor) -> Tensor:
    """What an attack on images x (B, C, H, W) returned, as a tensor like x. SpecError: it is no such images."""
    found = torch.from_numpy(returned) if isinstance(returned, numpy.ndarray) else returned
    if not isinstance(found, Tensor) or found.shape != x.shape or not found.is_floating_point():
        kind = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else article(type(returned).__name__)
        raise SpecError(f"the attack returns {kind}, not images {tuple(x.shape)} as floats in [0, 1]")
    return found.detach().to(x)


def ball(attack: Callable[..., Any]) -> Ball | None:
    """The ball of an attack with its settings bound; None if it has no `eps`, or a norm not measured here.

    An attack that wraps another (setting `attack`) has its ball. The names of torchattacks' L2 attacks end in "L2".
    """
    settings = {
        name: parameter.default
        for name, parameter in inspect.signature(attack).parameters.items()
        if parameter.default is not parameter.empty
    } | getattr(attack, "keywords", {})
    inner = settings.get("attack")
    if "eps" not in settings and callable(inner):
        return ball(inner)
    eps, norm = settings.get("eps"), settings.get("norm", "L2" if str(inner).endswith("L2") else "Linf")
    return Ball(float(eps), norm) if isinstance(eps, int | float) and norm in ("Linf", "L2") else None


@dataclass(frozen=True)
class Seen:
    """Observations that make outcomes doubtful; all zero if there are none."""

    unclassed: int = 0  # images whose outputs name no class
    lost: int = 0  # attacked images that are not finite
    distance: float = 0.0  # the largest between an image and its adversarial image, in the ball's norm
    outside: float = 0.0  # how far a pixel lies below 0 or above 1, at most

    @classmethod
    def of(cls, logits: Tensor, x: Tensor, adversarial: Tensor, ball: Ball | None) -> Seen:
        """Observe logits (B, classes) and images (B, C, H, W) around an attack. Waits for the device once."""
        x, moved = x.flatten(1), adversarial.flatten(1)
        image_is_finite = moved.isfinite().all(1)
        moved = torch.where(image_is_finite[:, None], moved, x)  # a NaN would hide the other distances
        if ball is None:
            distances = x.new_zeros(1)
        else:
            distances = (moved - x).norm(dim=1) if ball.norm == "L2" else (moved - x).abs().amax(1)
        out_of_range = torch.maximum(-moved.amin(), moved.amax() - 1).relu()
        counts = (~names_a_class(logits)).sum(), (~image_is_finite).sum(), distances.amax(), out_of_range
        unclassed, not_finite, distance, beyond = torch.stack([count.to(torch.float64) for count in counts]).tolist()
        return cls(int(unclassed), int(not_finite), distance, beyond)

    def __add__(self, other: Seen) -> Seen:
        return Seen(
            self.unclassed + other.unclassed,
            self.lost + other.lost,
            max(self.distance, other.distance),
            max(self.outside, other.outside),
        )

    def doubts(self, ball: Ball | None) -> dict[str, float]:
        """{doubt: amount}, where the amount is a number of images or the largest distance."""
        leaves = ball is not None and self.distance > ball.eps * (1 + RELATIVE) + ROUNDING
        amounts = {
            NOT_FINITE: float(self.unclassed),
            "attacked images are not finite": float(self.lost),
            "an attack leaves its radius": self.distance if leaves else 0.0,
            "an attack leaves the pixel range": self.outside if self.outside > ROUNDING else 0.0,
        }
        return {kind: amount for kind, amount in amounts.items() if amount}
