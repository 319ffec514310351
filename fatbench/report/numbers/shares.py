"""Tests of a yes or no of each client, of networks that are trained: clients are drawn at random, trainings are not.

paired(3, 9, 1, 40)         3 clients yes on both sides, 9 only of A, 1 only of B: McNemar's exact test
against(2, 40, 0.05)        2 of 40 clients, and a line that was fixed before: the exact binomial test
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, bdtrc, betaincinv

from fatbench.methods.intervals import clopper_pearson, wilson
from fatbench.report.numbers.statistics import binomial_tail, mcnemar

POWER = 0.8


@dataclass(frozen=True)
class Shares:
    """A share of clients less another, or less a line; fractions."""

    counts: str  # in words
    mean: float
    low: float  # ends of the 95 % interval
    high: float
    p: float
    detectable: Callable[[float], float | None]  # level -> the least true difference found with POWER; None: not even 1
    seed_variance = image_variance = None  # of other trainings nothing is said

    @property
    def at_most(self) -> float:
        """The end of the 95 % interval that is farther from 0: the size that the data do not exclude."""
        return max(abs(self.low), abs(self.high))


def paired(both: int, only_a: int, only_b: int, n: int) -> Shares:
    """Of n clients asked on both sides, A - B: McNemar's exact test; Newcombe's interval (1998, method 10): Wilson's
    ends, correlated as the sides are. Detectable: where as few clients differ the other way as do here.
    """
    a, b = both + only_a, both + only_b
    (down_a, up_a), (down_b, up_b) = ([abs(end - k / n) for end in wilson(k, n)] for k in (a, b))
    cross: float = both * (n - a - only_b) - only_a * only_b
    cross = max(cross - n / 2, 0.0) if cross > 0 else cross
    product = a * b * (n - a) * (n - b)
    phi = cross / math.sqrt(product) if product else 0.0
    mean = (only_a - only_b) / n
    return Shares(
        f"{a} - {b} of {n} (A alone {only_a}, B alone {only_b})",
        mean,
        mean - math.sqrt(max(0.0, down_a**2 - 2 * phi * down_a * up_b + up_b**2)),
        mean + math.sqrt(max(0.0, up_a**2 - 2 * phi * up_a * down_b + down_b**2)),
        mcnemar(only_a, only_b),
        functools.partial(_found_paired, min(only_a, only_b) / n, n),
    )


def power_paired(against: float, difference: float, n: int, alpha: float) -> float:
    """The power of McNemar's exact test where a fraction `against` differs one way, that + `difference` the other."""
    fewer, discordant = np.arange(n + 1.0), np.arange(1.0, n + 1)[:, None]
    rejected = (fewer < discordant / 2) & (2 * bdtr(fewer, discordant.astype(int), 0.5) <= alpha)
    least = rejected.sum(1) - 1.0  # the most clients of the rarer way with which it rejects; -1: none
    count = np.flatnonzero(least >= 0) + 1
    least, way = least[count - 1], (against + difference) / (2 * against + difference)
    chances = np.diff(bdtr(np.arange(n + 1.0), n, min(1.0, 2 * against + difference)))[count - 1]
    return float((chances * (bdtrc(count - least - 1, count, way) + bdtr(least, count, way))).sum())


def _found_paired(against: float, n: int, alpha: float) -> float | None:
    low, high = 0.0, 1 - 2 * against
    if high <= 0 or power_paired(against, high, n, alpha) < POWER:
        return None
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if power_paired(against, middle, n, alpha) < POWER else (low, middle)
    return high


def against(yes: int, n: int, line: float) -> Shares:
    """The share less the line: twice the smaller binomial tail, below 0.05 exactly if Clopper-Pearson's interval
    leaves the line out. Detectable: above the line.
    """
    low, high = clopper_pearson(yes, n)
    tails = binomial_tail(yes, n, line), 1 - binomial_tail(yes + 1, n, line)

    def found(alpha: float) -> float | None:
        least = next((k for k in range(n + 1) if 2 * binomial_tail(k, n, line) <= alpha), None)
        return None if least is None else float(betaincinv(least, n - least + 1, POWER)) - line

    return Shares(f"{yes} of {n}", yes / n - line, low - line, high - line, min(1.0, 2 * min(tails)), found)
