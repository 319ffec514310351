"""95 % intervals of what attacks on privacy count: over clients, and of hits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Z = 1.959964  # of the normal distribution


def student(values: Sequence[float]) -> float:
    """The half width of Student's interval of the mean; nan of a single value."""
    from scipy.special import stdtrit

    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return math.nan
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / n)


def wilson(hits: float, n: float) -> tuple[float, float]:
    """Wilson's interval of a fraction."""
    fraction = hits / n
    middle = (fraction + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * math.sqrt(fraction * (1 - fraction) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def clopper_pearson(hits: int, n: int, tail: float = 0.025) -> tuple[float, float]:
    """The exact interval of a fraction, each limit at `tail`."""
    from scipy.special import betaincinv

    low = 0.0 if hits == 0 else float(betaincinv(hits, n - hits + 1, tail))
    return low, 1.0 if hits == n else float(betaincinv(hits + 1, n - hits, 1 - tail))


def verdict(hits: int, n: int, line: float = 0.05) -> Literal["leaks", "holds", "open"]:
    """Whether more or less than the fraction `line` of clients is shown to be identified, by Clopper-Pearson."""
    low, high = clopper_pearson(hits, n)
    return "leaks" if low > line else "holds" if high < line else "open"
