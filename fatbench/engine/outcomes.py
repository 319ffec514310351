"""What is asked of every outcome, wherever it is taken: has the image a class, and did the attack stay in its ball?

right(logits, y)                        which images are classified correctly
seen = Seen.of(logits, x, adversarial, ball(attack))
seen.doubts(ball(attack))               ["an attack leaves its radius (0.3, not 0.03)"]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

NOT_FINITE = "outputs are not finite"
ROUNDING = 1e-6  # of distances and of the pixel range
RELATIVE = 1e-4  # of a radius: an L2 norm is a sum over all pixels


class Ball(NamedTuple):
    """How far an attack may move an image: its radius, and whether that is of the maximum norm ("Linf") or "L2"."""

    eps: float
    norm: str


def classed(logits: Tensor) -> Tensor:
    """Of which images (B,) logits (B, classes) name a class: the largest is finite. A class may have -inf."""
    return logits.amax(1).isfinite()  # amax hands NaN on, whose argmax is the first of them


def is_correct(logits: Tensor, y: Tensor) -> Tensor:
    """Which images (B,) are classified correctly: one whose outputs name no class is not."""
    return (logits.argmax(1) == y) & classed(logits)


def ball(attack: Callable[..., Any]) -> Ball | None:
    """The ball of an attack with its settings bound; None: it has no `eps`, or a norm that is not measured here.

    An attack around another (setting `attack`) has the ball of that one. torchattacks' classes in L2 end in "L2".
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
    """What is doubtful about judged images; all zero if nothing is."""

    unclassed: int = 0  # images whose outputs name no class
    lost: int = 0  # attacked images that are not finite
    distance: float = 0.0  # the largest from an image to what the attack made of it, in the ball's norm
    outside: float = 0.0  # the farthest that a pixel is below 0 or above 1

    @classmethod
    def of(cls, logits: Tensor, x: Tensor, adversarial: Tensor, ball: Ball | None) -> Seen:
        """Of logits (B, classes), images x (B, C, H, W) and what was made of them. Waits for the device once."""
        x, moved = x.flatten(1), adversarial.flatten(1)
        image_is_finite = moved.isfinite().all(1)
        moved = torch.where(image_is_finite[:, None], moved, x)  # what is not finite is no distance
        if ball is None:
            distances = x.new_zeros(1)
        else:
            distances = (moved - x).norm(dim=1) if ball.norm == "L2" else (moved - x).abs().amax(1)
        out_of_range = torch.maximum(-moved.amin(), moved.amax() - 1).relu()
        counts = (~classed(logits)).sum(), (~image_is_finite).sum(), distances.amax(), out_of_range
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
        """What is doubtful, in a few words -> how much of it: images, or the largest distance."""
        amounts = {
            NOT_FINITE: float(self.unclassed),
            "attacked images are not finite": float(self.lost),
            "an attack leaves its radius": self.distance if self._leaves(ball) else 0.0,
            "an attack leaves the pixel range": self.outside if self.outside > ROUNDING else 0.0,
        }
        return {kind: amount for kind, amount in amounts.items() if amount}

    def _leaves(self, ball: Ball | None) -> bool:
        return ball is not None and self.distance > ball.eps * (1 + RELATIVE) + ROUNDING
