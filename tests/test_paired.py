"""The paired test: by hand for few seeds, against scipy's own for many, and where there is nothing to test."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from scipy import stats

from fatbench.report.paired import paired


def signs(ranks: list[float], positive: float) -> float:
    """Two-sided p of the sum of positive ranks by counting all patterns of signs."""
    total = sum(ranks)
    extreme = abs(positive - total / 2)
    patterns = list(itertools.product([0, 1], repeat=len(ranks)))
    sums = [sum(rank for rank, sign in zip(ranks, pattern, strict=True) if sign) for pattern in patterns]
    return sum(abs(s - total / 2) >= extreme - 1e-9 for s in sums) / len(patterns)


def test_three_seeds() -> None:
    """Differences 1, 2, 3: mean 2, spread 1, t = 2 sqrt 3. With 2 degrees of freedom p = 1 - t / sqrt(2 + t^2), so here
    1 - sqrt(12 / 14). All of one sign is 1 of 8 patterns, either way 2 of 8. Seed 9 has no partner, order is no matter.
    """
    result = paired({2: 13.0, 0: 11.0, 1: 12.0, 9: 5.0}, {0: 10.0, 1: 10.0, 2: 10.0})
    assert result is not None
    assert result.seeds == (0, 1, 2)
    assert (result.mean, result.std) == (2.0, 1.0)
    assert result.t_p == pytest.approx(1 - math.sqrt(12 / 14))
    assert result.wilcoxon_p == pytest.approx(2 / 8)


def test_ties_and_zeros() -> None:
    """Differences 1, 1, -1, 3, 0: the zero counts for the mean but has no rank; the three ones share rank 2, 3 is 4."""
    result = paired(dict(enumerate([1.0, 1.0, -1.0, 3.0, 0.0])), dict.fromkeys(range(5), 0.0))
    assert result is not None
    assert result.mean == pytest.approx(0.8)
    assert result.wilcoxon_p == pytest.approx(signs([2, 2, 2, 4], 8))


@pytest.mark.parametrize("n", [2, 5, 10, 13, 14, 30])
def test_against_scipy(n: int) -> None:
    """Untied numbers: ttest_rel, and the exact distribution of the signed ranks."""
    draw = random.Random(n)
    ours = {seed: draw.gauss(0.3, 1) for seed in range(n)}
    theirs = {seed: draw.gauss(0, 1) for seed in range(n)}
    result = paired(ours, theirs)
    assert result is not None
    a, b = list(ours.values()), list(theirs.values())
    assert result.t_p == pytest.approx(stats.ttest_rel(a, b).pvalue)
    assert result.wilcoxon_p == pytest.approx(stats.wilcoxon(a, b, method="exact").pvalue)
    reverse = paired(theirs, ours)
    assert reverse is not None
    assert reverse.mean == pytest.approx(-result.mean)
    assert (reverse.t_p, reverse.wilcoxon_p) == pytest.approx((result.t_p, result.wilcoxon_p))


def test_nothing_to_test() -> None:
    """Fewer than two common seeds: no result. The same difference everywhere: no t; none at all: no ranks either."""
    assert paired({0: 1.0, 1: 2.0}, {1: 1.0, 2: 1.0}) is None
    same = paired({0: 1.5, 1: 1.5}, {0: 1.0, 1: 1.0})
    assert same is not None
    assert (same.mean, same.std, same.t_p, same.wilcoxon_p) == (0.5, 0.0, None, 1 / 2)
    digits = paired({0: 0.97, 1: 0.98}, {0: 0.96, 1: 0.97})  # 0.01 twice, but for the last binary digit
    assert digits is not None
    assert (digits.t_p, digits.wilcoxon_p) == (None, 1 / 2)
    none = paired({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
    assert none is not None
    assert (none.mean, none.t_p, none.wilcoxon_p) == (0.0, None, None)
    with pytest.raises(ValueError, match="paired: every number must be finite"):
        paired({0: 1.0, 1: math.nan}, {0: 1.0, 1: 2.0})
