"""Does an evaluation contradict itself? A stronger attack that leaves more images right than a weaker one does.

natural >= fgsm >= pgd20 >= autoattack must hold up to sampling error. Two accuracies p (weaker attack) and q (stronger)
on the same n images differ by (b - c)/n, with c images right only under the weaker attack and b only under the
stronger. Where the per-example outcomes are stored, b and c are known and (b - c) has standard deviation
sqrt(b + c) if the attacks were equally strong (McNemar). Otherwise outcomes are taken as independent,
sqrt((p(1-p) + q(1-q))/n), which is an upper bound for outcomes that go together, as these do. A violation is a
difference of more than 3 standard deviations.

And has it learned anything? The natural accuracy must be above chance, or nothing follows from the others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from fatbench.data.catalogue import CATALOGUE
from fatbench.report.numbers.statistics import binomial_tail
from fatbench.suite.types import number

CHAIN = ("natural", "fgsm", "pgd20", "autoattack")  # metric names, from weak to strong
SIGMAS = 3.0
ZERO_GRADIENTS = 0.01  # fraction of images without any loss gradient above which attacks are not to be trusted

LEVEL = 0.01  # of the test whether a network has learned anything
CHANCE = f"natural accuracy is at chance (one-sided binomial test, p >= {LEVEL:g})"

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


def chance(spec: Mapping[str, Any], stored: float | None = None, n: int | None = None) -> float | None:
    """The accuracy that a cell has without learning anything; None: unknown.

    The fraction of the most frequent class of the n test images, `stored` with the evaluation. Of an evaluation without
    it one over the number of classes, but only on the whole test set of a data set that has as many images of each
    class: elsewhere a network that always says the same would pass for one that has learned.
    """
    if stored is not None:
        return stored
    name = spec["data"]["name"]
    known = CATALOGUE.get(name)
    if known is None or not known.balanced or n != known.test:
        return None
    return 1 / known.classes if known.classes else None


@functools.cache
def above_chance(accuracy: float, n: int, fraction: float) -> bool:
    """Whether `accuracy` on n images is above `fraction`: the exact one-sided binomial test, p < LEVEL.

    Of several models on the same images the accuracy is their mean, and the test takes it as one model's.
    """
    right = round(accuracy * n)
    far = (right - n * fraction) / math.sqrt(n * fraction * (1 - fraction)) if 0 < fraction < 1 and n else 0.0
    if not 0 < far < 10:  # p <= 1 / (1 + 10^2) by Cantelli's inequality: most cells need no sum
        return far >= 10
    return binomial_tail(right, n, fraction) < LEVEL


def leaves_chance(p: float, checks: int) -> bool:
    """Whether one of so many checks, with this p, shows a model above chance: Bonferroni's correction."""
    return p < LEVEL / checks


def add_flags(numbers: Iterable[dict[str, Any]], specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Give every number a list `flags`: an evaluation of a model that is at chance says so."""
    rows = list(numbers)
    below = at_chance(rows, specs)
    for row in rows:
        doubtful = row["stage"] != "train" and row["n"] and row["metric"] not in ("chance", "zero_gradients")
        row["flags"] = [CHANCE] if doubtful and (row["cell"], row["round"]) in below else []


def at_chance(numbers: Iterable[Mapping[str, Any]], specs: Mapping[str, Mapping[str, Any]]) -> set[tuple[str, int]]:
    """(cell, round) of the models whose natural accuracy, among `numbers`, is not above chance. specs: by cell."""
    natural: dict[tuple[str, int, str], Mapping[str, Any]] = {}
    fractions: dict[tuple[str, int, str], float] = {}
    for row in numbers:
        if row["stage"] == "train" or row["client"] >= 0 or row["metric"] not in ("natural", "chance"):
            continue
        key = row["cell"], row["round"], row["stage"]
        if row["metric"] == "natural":
            natural[key] = row
        else:
            fractions[key] = row["value"]
    found = set()
    for key, row in natural.items():
        fraction = chance(specs[key[0]], fractions.get(key), row["n"])
        if fraction is not None and row["n"] and not above_chance(row["value"], row["n"], fraction):
            found.add(key[:2])
    return found
