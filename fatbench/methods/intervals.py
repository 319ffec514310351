"""95 % intervals: Student's of a mean, Wilson's and Clopper and Pearson's of a fraction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal


def student(values: Sequence[float]) -> float:
    """The half width of Student's interval of the mean; nan of a single value."""
    from scipy.special import stdtrit

    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return math.nan
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / n)


def wilson(hits: float, n: float, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a fraction: of one network, on other such images. It does not cover other trainings.

    Wilson 1927. Both ends are exact where all or none are hits. ValueError: not 0 <= hits <= n, or n is 0.
    """
    from scipy.special import ndtri

    if not 0 <= hits <= n or n < 1:
        raise ValueError(f"{hits} of {n} is not a fraction")
    z = float(ndtri(0.5 + level / 2))
    middle, half_width = hits + z * z / 2, z * math.sqrt(hits * (n - hits) / n + z * z / 4)
    low = max(0.0, (middle - half_width) / (n + z * z)) if hits else 0.0
    return low, (middle + half_width) / (n + z * z) if hits < n else 1.0


def clopper_pearson(hits: int, n: int, tail: float = 0.025) -> tuple[float, float]:
    """The exact interval of a fraction, each limit at `tail`."""
    from scipy.special import betaincinv

    low = 0.0 if hits == 0 else float(betaincinv(hits, n - hits + 1, tail))
    return low, 1.0 if hits == n else float(betaincinv(hits + 1, n - hits, 1 - tail))


def verdict(hits: int, n: int, line: float = 0.05) -> Literal["leaks", "holds", "open"]:
    """Whether more or less than the fraction `line` of clients is shown to be identified, by Clopper-Pearson."""
    low, high = clopper_pearson(hits, n)
    return "leaks" if low > line else "holds" if high < line else "open"
