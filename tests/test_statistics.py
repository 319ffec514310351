"""Tests of differences: by hand on small tables, against scipy and statsmodels on random ones, with nothing to test."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from scipy import stats

from fatbench.report.numbers.statistics import (
    bootstrap,
    crossed,
    holm,
    images,
    mcnemar,
    over_images,
    paired,
    t_quantile,
    t_tail,
    wilcoxon,
)


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


# --- over images -------------------------------------------------------------------------------------------------


def bits(text: str) -> tuple[int, int]:
    return int(text, 2), len(text)


def test_two_networks_on_six_images() -> None:
    """A alone is right on three images, B on one: 2 (1 + 4) / 16 = 0.625; four of six differ, so 2 / 6 agree."""
    found = images(bits("111010"), bits("010001"))
    assert (found.n, found.both, found.only_a, found.only_b) == (6, 1, 3, 1)
    assert found.p == 0.625
    assert found.agreement == pytest.approx(2 / 6)
    assert found.odds_ratio == 3
    same = images(bits("0110"), bits("0110"))
    assert (same.p, same.agreement, same.odds_ratio) == (1.0, 1.0, None)
    with pytest.raises(ValueError, match="outcomes on 2 and 3 images are not about the same images"):
        images(bits("01"), bits("011"))


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 6), (6, 0), (15, 4), (7, 7), (130, 181), (900, 1100)])
def test_mcnemar_against_others(b: int, c: int) -> None:
    """Scipy's binomial test, and statsmodels' exact McNemar test."""
    from statsmodels.stats.contingency_tables import mcnemar as theirs

    if b + c:
        assert mcnemar(b, c) == pytest.approx(stats.binomtest(b, b + c).pvalue)
    assert mcnemar(b, c) == pytest.approx(theirs([[50, b], [c, 70]], exact=True).pvalue)


# --- over seeds and images ---------------------------------------------------------------------------------------


def test_two_seeds_and_two_images_by_hand() -> None:
    """Differences by seed [1, 1] and [1, 0]: mean 3/4, by seed 1 and 1/2, by image 1 and 1/2. Both factors have the sum
    of squares 2 (1/4)^2 2 = 1/4 and so has the rest, each of one degree of freedom. The variance of the mean is
    (1/4 + 1/4 - 1/4) / 4 = 1/16, its degrees of freedom (1/4)^2 / (3 (1/4)^2) = 1/3.
    """
    found = crossed([bits("11"), bits("11")], [bits("00"), bits("01")])
    assert found is not None
    assert (found.mean, found.error, found.df) == (0.75, 0.25, pytest.approx(1 / 3))
    assert found.p == pytest.approx(2 * stats.t.sf(3, 1 / 3))
    half = 0.25 * stats.t.ppf(0.975, 1 / 3)
    assert (found.low, found.high) == (pytest.approx(0.75 - half), pytest.approx(0.75 + half))


def test_outcomes_of_other_images_are_refused() -> None:
    with pytest.raises(ValueError, match="5 outcomes are not those of models on 2 images"):
        crossed([bits("11011")] * 2, [bits("01")] * 2, 2)
    with pytest.raises(ValueError, match="1 outcomes are not those of models on 2 images"):
        crossed([bits("11")] * 2, [bits("0")] * 2)


def test_nothing_to_cross() -> None:
    """One seed, one image, or no difference that varies."""
    assert crossed([], []) is None
    assert crossed([bits("10")], [bits("01")]) is None
    assert crossed([bits("1")] * 2, [bits("0")] * 2) is None
    assert crossed([bits("11")] * 2, [bits("00")] * 2) is None
    assert crossed([bits("10")] * 2, [bits("10")] * 2) is None


def drawn(draw: random.Random, n: int, fraction: float) -> tuple[int, int]:
    return sum((draw.random() < fraction) << i for i in range(n)), n


def table(a: list[tuple[int, int]], b: list[tuple[int, int]], models: tuple[int, int] = (1, 1)) -> np.ndarray:
    """Differences (seeds, images), each side the mean over so many models."""
    rows = [[[int(x) for x in f"{number:0{n}b}"] for number, n in side] for side in (a, b)]
    means = [np.array(side).reshape(len(side), k, -1).mean(1) for side, k in zip(rows, models, strict=True)]
    return means[0] - means[1]


@pytest.mark.parametrize("models", [(1, 1), (3, 1), (2, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_crossed_against_an_analysis_of_variance(seed: int, models: tuple[int, int]) -> None:
    """The mean squares are those of statsmodels' linear model with seeds and images as factors."""
    import pandas as pd
    from statsmodels.formula.api import ols
    from statsmodels.stats.anova import anova_lm

    draw = random.Random(seed)
    seeds, n = 2 + seed % 3, 20
    a, b = (
        [drawn(draw, n * k, fraction) for _ in range(seeds)] for fraction, k in zip((0.6, 0.4), models, strict=True)
    )
    d = table(a, b, models)
    long = pd.DataFrame([(s, i, d[s, i]) for s in range(seeds) for i in range(n)], columns=["s", "i", "d"])
    squares = anova_lm(ols("d ~ C(s) + C(i)", long).fit())
    by_seed, by_image, rest = (squares["sum_sq"] / squares["df"])[["C(s)", "C(i)", "Residual"]]
    used = [max(by_seed, rest), max(by_image, rest), rest]
    variance = used[0] + used[1] - rest
    freedom = variance**2 / sum(x * x / k for x, k in zip(used, (seeds - 1, n - 1, (seeds - 1) * (n - 1)), strict=True))
    found = crossed(a, b, n)
    assert found is not None
    assert (found.mean, found.error) == (pytest.approx(d.mean()), pytest.approx((variance / d.size) ** 0.5))
    assert found.df == pytest.approx(freedom)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(d.mean()) / found.error, freedom))


@pytest.mark.parametrize("models", [(1, 1), (3, 1), (2, 4)])
def test_over_images_against_scipy(models: tuple[int, int]) -> None:
    """Scipy's paired t test of what the models of an image have right on average."""
    draw, n = random.Random(5), 40
    a, b = (drawn(draw, n * k, fraction) for fraction, k in zip((0.6, 0.4), models, strict=True))
    (d,) = table([a], [b], models)
    expected = stats.ttest_1samp(d, 0)
    found = over_images(a, b, n)
    assert found is not None
    assert (found.mean, found.df, found.p) == (pytest.approx(d.mean()), n - 1, pytest.approx(expected.pvalue))
    assert (found.low, found.high) == tuple(pytest.approx(end) for end in expected.confidence_interval(0.95))


def test_nothing_over_images() -> None:
    """One image, or no difference that varies."""
    assert over_images(bits("1"), bits("00"), 1) is None
    assert over_images(bits("1111"), bits("00"), 2) is None


def test_equal_methods_are_rarely_told_apart() -> None:
    """Two methods whose runs differ by 5 points of noise of training: over images alone a third of 200 pairs differ at
    p < 0.05, over seeds and images at most 5 %.
    """
    draw = np.random.default_rng(0)
    alone = both = 0
    for _ in range(200):
        fraction = draw.beta(0.8, 1.5, 200)
        runs = [draw.random(200) < np.clip(fraction + draw.normal(0, 0.05), 0, 1) for _ in range(6)]
        a, b = ([bits("".join(str(int(x)) for x in run)) for run in part] for part in (runs[:3], runs[3:]))
        test = crossed(a, b)
        both += test is not None and test.p < 0.05
        alone += stats.ttest_1samp(table(a, b).mean(0), 0).pvalue < 0.05
    assert alone > 40
    assert both <= 10


def test_the_bootstrap_against_every_drawing() -> None:
    """Two seeds and four images have 2^2 x 4^4 drawings: the quantiles of their means. One seed: of its images."""
    a, b = [bits("1101"), bits("1000")], [bits("0010"), bits("0000")]
    d = table(a, b)
    drawings = itertools.product(itertools.product(range(2), repeat=2), itertools.product(range(4), repeat=4))
    means = [d[np.ix_(s, i)].mean() for s, i in drawings]
    expected = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    assert bootstrap(a, b, samples=40_000) == (pytest.approx(expected[0]), pytest.approx(expected[1]))
    assert min(means) < expected[0] < 0
    draw = random.Random(1)
    one, other = drawn(draw, 400, 0.6), drawn(draw, 400, 0.5)
    low, high = bootstrap([one], [other])
    d = table([one], [other])[0]
    half = 1.96 * d.std() / 20
    assert (low, high) == (pytest.approx(d.mean() - half, abs=0.006), pytest.approx(d.mean() + half, abs=0.006))
    assert bootstrap([one], [other]) == (low, high), "the same interval each time"


# --- effect sizes, several tests, Student's t --------------------------------------------------------------------


def test_the_effect_and_its_interval() -> None:
    """Differences 1, 2, 3: d is 2; the interval is scipy's."""
    test = paired({0: 1.0, 1: 2.0, 2: 3.0}, dict.fromkeys(range(3), 0.0))
    assert test is not None
    assert test.d == 2
    expected = stats.ttest_1samp([1, 2, 3], 0).confidence_interval()
    assert test.interval == (pytest.approx(expected.low), pytest.approx(expected.high))


@pytest.mark.parametrize("seed", range(4))
def test_many_differences_with_ties(seed: int) -> None:
    """Above 50, scipy's normal approximation with ties, whose name in scipy is not that of 1.13."""
    draw = random.Random(seed)
    differences = [draw.randint(-3, 4) for _ in range(90)]
    moved = [d for d in differences if d]
    expected = stats.wilcoxon(moved, correction=False).pvalue
    assert len(moved) > 50
    assert wilcoxon(differences) == pytest.approx(expected)


def test_holm_against_statsmodels() -> None:
    """By hand 0.01 * 3, 0.02 * 2 and 0.03 * 1 lifted to the one before; and random ones."""
    from statsmodels.stats.multitest import multipletests

    assert holm([0.02, 0.03, 0.01]) == pytest.approx([0.04, 0.04, 0.03])
    assert holm([]) == []
    draw = random.Random(0)
    for n in (1, 2, 7, 40):
        ps = [draw.random() ** 3 for _ in range(n)]
        assert holm(ps) == pytest.approx(multipletests(ps, method="holm")[1])


@pytest.mark.parametrize("df", [1, 1.5, 2, 10.25, 499, 9999])
def test_students_t(df: float) -> None:
    for t in (0.0, 1e-5, 0.1, 1.0, 2.0, 5.0, 40.0, 300.0):
        assert t_tail(t, df) == pytest.approx(stats.t.sf(t, df), rel=1e-9)
        assert t_tail(-t, df) == t_tail(t, df)
    for p in (0.6, 0.975, 0.9999):
        assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-9)
