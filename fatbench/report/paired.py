"""A paired test: the same seeds under two methods, and whether the differences are more than their spread.

    paired({0: 0.97, 1: 0.96, 2: 0.98}, {0: 0.95, 1: 0.95, 2: 0.97})   -> Paired((0, 1, 2), 0.0133, 0.0058, 0.057, 0.25)

Two cells of one seed share the partition, the initial model and the order of the clients, so that their difference
varies less than either. Scipy is imported only where a test is asked for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """Differences by seed, one method minus the other. p-values are two-sided and not corrected for several tests."""

    seeds: tuple[int, ...]  # those that both have, ascending
    mean: float
    std: float  # ddof 1
    t_p: float | None  # paired t test; None: all differences are the same
    wilcoxon_p: float | None  # signed-rank test, differences of 0 left out; None: all are 0


def paired(ours: Mapping[int, float], against: Mapping[int, float]) -> Paired | None:
    """The test of numbers by seed, over the seeds that both have; None where these are fewer than two.

    The signed-rank test is exact up to 13 differences, ties included; of n seeds its least possible p is 2 / 2^n, so
    that five cannot go below 0.0625. ValueError: a number is not finite.
    """
    seeds = tuple(sorted(ours.keys() & against.keys()))
    if len(seeds) < 2:
        return None
    # rounded, so that 0.97 - 0.96 and 0.98 - 0.97 are the same difference
    differences = [round(ours[seed] - against[seed], 12) for seed in seeds]
    if not all(map(math.isfinite, differences)):
        raise ValueError("paired: every number must be finite")
    mean, std = statistics.fmean(differences), statistics.stdev(differences)
    return Paired(seeds, mean, std, _t_test(mean, std, len(seeds)), _signed_rank(differences))


def _t_test(mean: float, std: float, n: int) -> float | None:
    from scipy.stats import t

    # not ttest_rel, which warns where differences agree to a few digits
    return None if std == 0 else float(2 * t.sf(abs(mean) / (std / math.sqrt(n)), n - 1))


def _signed_rank(differences: list[float]) -> float | None:
    from scipy.stats import PermutationMethod, wilcoxon

    moved = [difference for difference in differences if difference != 0]
    if not moved:
        return None
    every_sign = (
        len(moved) <= 13
    )  # 2^13 patterns of signs are fewer than PermutationMethod's 9999, so it counts them all
    return float(wilcoxon(moved, method=PermutationMethod() if every_sign else "auto").pvalue)
