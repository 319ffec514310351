"""Does an evaluation contradict itself? A stronger attack that leaves more images right than a weaker one does.

natural >= fgsm >= pgd20 >= autoattack must hold up to sampling error. Two accuracies p (weaker attack) and q (stronger)
on the same n images differ by (b - c)/n, with c images right only under the weaker attack and b only under the
stronger. Where the per-example outcomes are stored, b and c are known and (b - c) has standard deviation
sqrt(b + c) if the attacks were equally strong (McNemar). Otherwise outcomes are taken as independent,
sqrt((p(1-p) + q(1-q))/n), which is an upper bound for outcomes that go together, as these do. A violation is a
difference of more than 3 standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fatbench.suite.types import number

CHAIN = ("natural", "fgsm", "pgd20", "autoattack")  # metric names, from weak to strong
SIGMAS = 3.0
ZERO_GRADIENTS = 0.01  # share of images without any loss gradient above which attacks are not to be trusted

NO_GRADIENT = (
    f"the loss has no gradient on more than {100 * ZERO_GRADIENTS:g}% of the images:"
    " gradient attacks overstate robustness"
)
RULE = (
    "natural >= fgsm >= pgd20 >= autoattack is checked per cell up to 3 standard errors of the difference"
    " on the same images"
)


def same_ball(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> bool:
    """Whether the stronger attack may move an image as far as the weaker one."""
    eps = [number(attack.get("eps", 0)) for attack in (weak, strong)]
    return weak["name"] == "natural" or eps[0] <= eps[1]


def joined(chunks: Iterable[tuple[int, int, bytes]]) -> tuple[int, int]:
    """(bits, n) of stored outcomes (start, n, packed bits): the first image in the highest bit."""
    bits, total = 0, 0
    for start, n, data in sorted(chunks):
        if start != total:
            raise ValueError(f"outcomes have a gap at image {total}")
        bits = (bits << n) | (int.from_bytes(data, "big") >> (8 * len(data) - n))
        total += n
    return bits, total


def discordant(weak: tuple[int, int] | None, strong: tuple[int, int] | None) -> tuple[int, int] | None:
    """(b, c): images right only under the stronger, and only under the weaker attack. None: not the same images."""
    if weak is None or strong is None or weak[1] != strong[1] or weak[1] == 0:
        return None
    return (strong[0] & ~weak[0]).bit_count(), (weak[0] & ~strong[0]).bit_count()


def violated(weak: tuple[float, int], strong: tuple[float, int], paired: tuple[int, int] | None = None) -> bool:
    """Whether the stronger attack's accuracy exceeds the weaker one's beyond sampling error. Each is (accuracy, n)."""
    if paired is not None:
        b, c = paired
        return b - c > SIGMAS * math.sqrt(b + c)
    (p, n), (q, m) = weak, strong
    if n == 0 or m == 0:
        return False
    return q - p > SIGMAS * math.sqrt(p * (1 - p) / n + q * (1 - q) / m)
