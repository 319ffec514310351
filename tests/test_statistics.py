"""Tests of differences: by hand on small tables, against scipy and statsmodels on random ones, on a grid of nulls."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from scipy import special, stats

from fatbench.methods.intervals import wilson
from fatbench.report.numbers.statistics import (
    SeedsAndImages,
    binomial_tail,
    contrast,
    holm,
    images,
    mcnemar,
    mean_squares,
    of_groups,
    over_seeds,
    paired,
    seeds_and_images,
    share,
    share_between,
    spread_interval,
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
    assert result.seeds == (0, 1, 2)
    assert (result.mean, result.std) == (2.0, 1.0)
    assert result.t_p == pytest.approx(1 - math.sqrt(12 / 14))
    assert result.wilcoxon_p == pytest.approx(2 / 8)


def test_a_share_has_fiellers_interval() -> None:
    """Its ends are the r for which part - r whole has a mean on the edge of significance at 5 %."""
    parts, wholes = [1.0, 2.0, 2.5, 1.5, 0.5], [9.0, 11.0, 10.0, 12.0, 8.0]
    found, interval = share(parts, wholes) or (None, None)
    assert found == pytest.approx(0.15) and interval is not None and interval[0] < 0.15 < interval[1]
    for r in interval:
        rest = [a - r * b for a, b in zip(parts, wholes, strict=True)]
        assert stats.ttest_1samp(rest, 0).pvalue == pytest.approx(0.05)
    assert share([1.0], [4.0]) == (0.25, None)
    assert share([1.0, 2.0], [1.0, -0.5]) == (6.0, None)  # the whole may be 0, and then any share is possible
    assert share([], []) is None and share([1.0, 1.0], [1.0, -1.0]) is None


def test_a_share_of_the_variance_between_groups() -> None:
    """Groups (0, 2) and (4, 6): within 2, between 2 * 8 = 16, F = 8; with F(1, 2) the ends have closed forms, for
    F <= f has the probability sqrt(f / (f + 2)).
    """
    estimate, (low, high) = share_between([(0.0, 2.0), (4.0, 6.0)])
    ends = [8 / (2 * q**2 / (1 - q**2)) for q in (0.975, 0.025)]
    assert estimate == pytest.approx(7 / 9)
    assert low == max(0.0, (ends[0] - 1) / (ends[0] + 1)) == 0.0
    assert high == pytest.approx((ends[1] - 1) / (ends[1] + 1))
    assert share_between([(0.0, 2.0), (0.0, 2.0)])[0] == 0.0
    for wrong in ([(1.0, 2.0)], [(1.0,), (2.0,)], [(1.0, 2.0), (1.0, 2.0, 3.0)], [(1.0, 1.0), (2.0, 2.0)], []):
        with pytest.raises(ValueError, match=r"groups, all of the same size|do not vary within"):
            share_between(wrong)


@pytest.mark.parametrize("right", [0.0, 0.3, 0.8])
def test_the_interval_of_such_a_share_holds_its_level(right: float) -> None:
    """Of 4,000 studies of ten groups of three 95 % hold what is right; where it is 0 more, an end being cut off."""
    generator = np.random.default_rng(1979)
    between = generator.normal(scale=math.sqrt(right), size=(4000, 10, 1))
    within = generator.normal(scale=math.sqrt(1 - right), size=(4000, 10, 3))
    intervals = [share_between(study)[1] for study in between + within]
    held = np.mean([low <= right <= high for low, high in intervals])
    assert (0.94 < held < 0.96) if right else (0.96 < held < 0.99)


def test_ties_and_zeros() -> None:
    """Differences 1, 1, -1, 3, 0: the zero counts for the mean but has no rank; the three ones share rank 2, 3 is 4."""
    result = paired(dict(enumerate([1.0, 1.0, -1.0, 3.0, 0.0])), dict.fromkeys(range(5), 0.0))
    assert result.mean == pytest.approx(0.8)
    assert result.wilcoxon_p == pytest.approx(signs([2, 2, 2, 4], 8))


@pytest.mark.parametrize("n", [2, 5, 10, 13, 14, 30])
def test_against_scipy(n: int) -> None:
    """Untied numbers: ttest_rel, and the exact distribution of the signed ranks."""
    draw = random.Random(n)
    ours = {seed: draw.gauss(0.3, 1) for seed in range(n)}
    theirs = {seed: draw.gauss(0, 1) for seed in range(n)}
    result = paired(ours, theirs)
    a, b = list(ours.values()), list(theirs.values())
    assert result.t_p == pytest.approx(stats.ttest_rel(a, b).pvalue)
    assert result.wilcoxon_p == pytest.approx(stats.wilcoxon(a, b, method="exact").pvalue)
    reverse = paired(theirs, ours)
    assert reverse.mean == pytest.approx(-result.mean)
    assert (reverse.t_p, reverse.wilcoxon_p) == pytest.approx((result.t_p, result.wilcoxon_p))


def test_nothing_to_test() -> None:
    """Fewer than two common seeds: no result. The same difference everywhere: no t; none at all: no ranks either."""
    assert paired({0: 1.0, 1: 2.0}, {1: 1.0, 2: 1.0}) is None
    same = paired({0: 1.5, 1: 1.5}, {0: 1.0, 1: 1.0})
    assert (same.mean, same.std, same.t_p, same.wilcoxon_p) == (0.5, 0.0, None, 1 / 2)
    digits = paired({0: 0.97, 1: 0.98}, {0: 0.96, 1: 0.97})  # 0.01 twice, but for the last binary digit
    assert (digits.t_p, digits.wilcoxon_p) == (None, 1 / 2)
    none = paired({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
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
    assert images(bits("1110"), bits("1100")).both == 2
    with pytest.raises(ValueError, match="outcomes of 2 and 3 images are not about the same images"):
        images(bits("01"), bits("011"))


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 6), (6, 0), (15, 4), (7, 7), (130, 181), (900, 1100)])
def test_mcnemar_against_others(b: int, c: int) -> None:
    """Scipy's binomial test, and statsmodels' exact McNemar test."""
    from statsmodels.stats.contingency_tables import mcnemar as theirs

    if b + c:
        assert mcnemar(b, c) == pytest.approx(stats.binomtest(b, b + c).pvalue)
    assert mcnemar(b, c) == pytest.approx(theirs([[50, b], [c, 70]], exact=True).pvalue)


# --- over seeds and images ---------------------------------------------------------------------------------------


def rows(text: str) -> list[tuple[int, int]]:
    return [bits(row) for row in text.split()]


@pytest.mark.parametrize(
    ("a", "b", "n", "expected"),
    [
        ("11011 11101 11011", "01000 01000 00000", 5,
         (0.666667, 0.066667, 0.333333, 0.233333, 0.015476, 0.006667, 0.581284, 0.402803, 0.038153)),
        ("1101 1101 1101", "0100 0100 0100", 4, (0.5, 0, 1, 0, 0.005208, 0.083333, 0.969752, 0.711291, 0.194675)),
        ("1111 1111 1111", "0000 0000 0000", 4, (1, 0, 0, 0, 0.005208, 0, 0.310517, 0.210732, 0.005168)),
        ("11011001 11110111 11001101", "0100 0101 0001", 4,  # two models against one
         (0.375, 0, 0.298611, 0.527778, 0.005208, 0, 0.310517, 0.210732, 0.035099)),
    ],
)  # fmt: skip
def test_worked_numbers(a: str, b: str, n: int, expected: tuple[float, ...]) -> None:
    """Computed apart from the program: mean, mean squares of seeds, images and the rest, the two variances of the mean,
    half the width of the 95 % and of the 90 % interval, p."""
    found = seeds_and_images(rows(a), rows(b), n)
    squares = mean_squares(table(rows(a), rows(b), (len(a.split()[0]) // n, 1)))
    got = (found.mean, *squares, found.seed_variance, found.image_variance, found.half(), found.half(0.90), found.p)
    assert got == pytest.approx(expected, abs=6e-7)
    assert (found.low, found.high) == pytest.approx((found.mean - found.half(), found.mean + found.half()))
    assert found.at_most == pytest.approx(max(-found.low, found.high))
    reverse = contrast([(-1.0, rows(a)), (1.0, rows(b))], n)
    assert reverse is not None and (reverse.mean, reverse.p) == (pytest.approx(-found.mean), found.p)


def table(a: list[tuple[int, int]], b: list[tuple[int, int]], models: tuple[int, int] = (1, 1)) -> np.ndarray:
    """Differences (seeds, images), each side the mean over so many models."""
    sides = [[[int(x) for x in f"{number:0{n}b}"] for number, n in side] for side in (a, b)]
    means = [np.array(side).reshape(len(side), k, -1).mean(1) for side, k in zip(sides, models, strict=True)]
    return means[0] - means[1]


def drawn(draw: random.Random, n: int, share: float) -> tuple[int, int]:
    return sum((draw.random() < share) << i for i in range(n)), n


@pytest.mark.parametrize("models", [(1, 1), (3, 1), (2, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_against_an_analysis_of_variance(seed: int, models: tuple[int, int]) -> None:
    """The mean squares are those of statsmodels' linear model with seeds and images as factors; t is scipy.stats'."""
    import pandas as pd
    from statsmodels.formula.api import ols
    from statsmodels.stats.anova import anova_lm

    draw = random.Random(seed)
    seeds, n = 2 + seed % 3, 20
    a, b = ([drawn(draw, n * k, share) for _ in range(seeds)] for share, k in zip((0.6, 0.4), models, strict=True))
    d = table(a, b, models)
    long = pd.DataFrame([(s, i, d[s, i]) for s in range(seeds) for i in range(n)], columns=["s", "i", "d"])
    squares = anova_lm(ols("d ~ C(s) + C(i)", long).fit())
    by_seed, by_image, rest = (squares["sum_sq"] / squares["df"])[["C(s)", "C(i)", "Residual"]]
    assert mean_squares(d) == pytest.approx((by_seed, by_image, rest))
    found = seeds_and_images(a, b, n)
    assert found.mean == pytest.approx(d.mean())
    assert found.seed_variance == pytest.approx(((by_seed / n) ** 0.5 + 1 / (2 * n)) ** 2 / seeds)
    assert found.image_variance == pytest.approx(max(by_image - rest, 0) / d.size)

    def half(alpha: float) -> float:
        over = stats.t.isf(alpha / 2, seeds - 1) ** 2 * found.seed_variance
        return (over + stats.t.isf(alpha / 2, n - 1) ** 2 * found.image_variance) ** 0.5

    assert found.half() == pytest.approx(half(0.05))
    assert half(found.p) == pytest.approx(abs(found.mean))


def test_p_and_the_interval_agree() -> None:
    """p < 0.05 exactly where 0 lies outside the 95 % interval, and so at other levels."""
    for mean in (0.0, 1e-9, 0.02, 0.05, 0.06, 0.1, 0.5, -0.5):
        found = SeedsAndImages(mean, 3, 500, 1e-4, 5e-5)
        for level in (0.90, 0.95, 0.999):
            assert (found.p < 1 - level) == (abs(mean) > found.half(level))
    assert SeedsAndImages(0.0, 2, 10, 1e-4, 0.0).p == 1
    assert 0 < SeedsAndImages(1.0, 20, 10_000, 1e-12, 1e-12).p < 1e-50  # the search ends at e^-300


def test_outcomes_of_other_images_or_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="5 outcomes are not those of models on 2 images"):
        seeds_and_images(rows("11011 11011"), rows("01 01"), 2)
    with pytest.raises(ValueError, match="1 outcomes are not those of models on 2 images"):
        seeds_and_images(rows("11 11"), rows("0 0"))
    with pytest.raises(ValueError, match="the same seeds"):
        seeds_and_images(rows("11 11"), rows("01"))


def test_nothing_to_test_over_seeds_and_images() -> None:
    """One seed or one image says nothing of two methods. Identical outcomes do: p = 1, an interval of half an image."""
    assert seeds_and_images([], []) is None
    assert seeds_and_images(rows("10"), rows("01")) is None
    assert seeds_and_images(rows("1 1"), rows("0 0")) is None
    assert over_seeds([0.1], 100) is None
    same = seeds_and_images(rows("1010 1100"), rows("1010 1100"))
    assert (same.mean, same.p, same.image_variance) == (0, 1, 0)
    assert same.half() == pytest.approx(stats.t.isf(0.025, 1) / 8 / 2**0.5)


def test_seeds_that_agree_by_chance_do_not_decide() -> None:
    """Both seeds differ by exactly one image of a hundred: half an image keeps p far from 0."""
    a, b = bits("1" * 50 + "0" * 50), bits("1" * 49 + "0" * 51)
    found = seeds_and_images([a, a], [b, b])
    assert found is not None and found.p > 0.2
    assert over_seeds([0.01, 0.01], 100).p == pytest.approx(2 * stats.t.sf(0.01 / (0.005 / 2**0.5), 1))  # type: ignore[union-attr]


def test_contrasts_by_hand() -> None:
    """A 2 x 2 design on four images, two seeds: main effect of the first factor and interaction, cell by cell."""
    cells = [rows("1110 1101"), rows("1100 1001"), rows("1000 0001"), rows("0000 0001")]
    means = np.array([[x.bit_count() / n for x, n in cell] for cell in cells])  # (cell, seed)
    for weights, step in (((0.5, 0.5, -0.5, -0.5), 0.5), ((1.0, -1.0, -1.0, 1.0), 1.0)):
        found = contrast(list(zip(weights, cells, strict=True)))
        each = weights @ means
        assert found.mean == pytest.approx(each.mean())
        assert found.seed_variance == pytest.approx((each.std(ddof=1) + step / 8) ** 2 / 2)


@pytest.mark.parametrize(
    ("seeds", "exact"), [(2, (11.6, 57)), (3, (3.3, 7.3)), (4, (2.1, 3.7)), (5, (1.7, 2.6)), (10, (1.0, 1.3))]
)
def test_detectable_differences(seeds: int, exact: tuple[float, float]) -> None:
    """Where seeds dominate, in units of their standard deviation: power 0.8 of scipy's noncentral t."""
    unit = SeedsAndImages(0.0, seeds, 500, 1 / seeds, 0.0)
    for alpha, said in zip((0.05, 0.01), exact, strict=True):
        bound = stats.t.isf(alpha / 2, seeds - 1)

        def power(difference: float, bound: float = bound) -> float:
            return float(stats.nct.sf(bound, seeds - 1, difference * seeds**0.5))

        assert power(said) == pytest.approx(0.8, abs=0.03)  # two digits of the difference
        assert unit.detectable(alpha) == pytest.approx(said, rel=0.04)
        assert power(unit.detectable(alpha)) == pytest.approx(0.8, abs=0.005)
    images = SeedsAndImages(0.0, seeds, 500, 0.0, 1e-4)
    assert images.detectable() == pytest.approx(0.01 * (stats.t.isf(0.025, 499) + stats.t.isf(0.2, 499)), rel=1e-3)


# --- equal methods: how often are they told apart? ---------------------------------------------------------------

LEVELS = (0.05, 0.005, 0.001)
SETS = 2000  # data sets of a setting: at most 130, 20 and 9 may be rejected
MOST = (130, 20, 9)


def null(draw: np.random.Generator, seeds: int, n: int, by_seed: float, by_image: float) -> np.ndarray:
    """D (seeds, n) of two methods of the same accuracy: the sign of image + image x method + seed + rest."""
    image = 0.3 + 2 * draw.normal(size=n)
    methods = [
        image + by_image * draw.normal(size=n) + by_seed * draw.normal(size=(seeds, 1)) + draw.normal(size=(seeds, n))
        for _ in range(2)
    ]
    return (methods[0] > 0).astype(float) - (methods[1] > 0)


def satterthwaite(D: np.ndarray) -> float:
    """p of the quasi-F test of Clark 1973 with Satterthwaite's degrees of freedom: what this suite once used."""
    S, n = D.shape
    of_seeds, of_images = n * D.mean(1).var(ddof=1), S * D.mean(0).var(ddof=1)
    rest = (D - D.mean(1, keepdims=True) - D.mean(0) + D.mean()).var() * D.size / ((S - 1) * (n - 1))
    of_seeds, of_images = max(of_seeds, rest), max(of_images, rest)
    variance = of_seeds + of_images - rest
    if variance <= 1e-12:
        return 1.0
    df = variance**2 / (of_seeds**2 / (S - 1) + of_images**2 / (n - 1) + rest**2 / ((S - 1) * (n - 1)))
    return float(2 * special.stdtr(df, -abs(D.mean()) / math.sqrt(variance / D.size)))


def without_half_an_image(D: np.ndarray) -> float:
    of_seeds, of_images, rest = mean_squares(D)
    return SeedsAndImages(D.mean(), *D.shape, of_seeds / D.size, max(of_images - rest, 0) / D.size).p


def used(D: np.ndarray) -> float:
    """p of the program, which is given bits: those of both methods, of which D is the difference."""
    one, other = ((D > 0), (D < 0))
    a, b = ([(int.from_bytes(np.packbits(row).tobytes(), "big") >> (-len(row) % 8), len(row)) for row in side]
            for side in (one, other))  # fmt: skip
    found = seeds_and_images(a, b)
    return found.p


GRID = [  # seeds, images, spread of seeds, of image x method; what of `satterthwaite` and `without` fails there
    (2, 500, 0.0, 0.0, None, (1, 2)),
    (2, 1000, 0.6, 4.0, (0, 1, 2), None),
    (3, 1000, 0.6, 4.0, (0, 1, 2), None),
    (5, 1000, 0.6, 4.0, None, None),
    (3, 500, 0.25, 0.0, None, None),
]


@pytest.mark.parametrize("place", [0, *(pytest.param(i, marks=pytest.mark.nightly) for i in range(1, len(GRID)))])
def test_equal_methods_on_the_null_grid(place: int) -> None:
    """The test holds its level at 0.05, 0.005 and 0.001; Satterthwaite's does not, nor does it without half an image.

    At most MOST of SETS data sets may be rejected: 100, 10 and 2 are expected.
    """
    seeds, n, by_seed, by_image, old_fails, without_fails = GRID[place]
    draw = np.random.default_rng(place)
    sets = [null(draw, seeds, n, by_seed, by_image) for _ in range(SETS)]
    rules = {"old": satterthwaite, "without": without_half_an_image, "used": used}
    rejected = {
        name: [sum(p < level for p in ps) for level in LEVELS]
        for name, rule in rules.items()
        if (ps := [rule(D) for D in sets])
    }
    assert all(count <= most for count, most in zip(rejected["used"], MOST, strict=True)), rejected
    if place == len(GRID) - 1:
        assert rejected["used"][0] >= 60, "and it is not idle"
    for name, fails in (("old", old_fails), ("without", without_fails)):
        assert all(rejected[name][level] > MOST[level] for level in fails or ()), rejected


# --- images that go together -------------------------------------------------------------------------------------


def null_of_groups(draw: np.random.Generator, seeds: int, sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """D (seeds, images) of two methods of the same accuracy, and the group of each image: a group is easier for one."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    easy = draw.normal(size=len(sizes))[group] + draw.normal(size=len(group))
    sides = [
        easy
        + 0.8 * draw.normal(size=len(sizes))[group]
        + 0.05 * draw.normal(size=(seeds, 1))
        + draw.normal(size=(seeds, len(group)))
        for _ in range(2)
    ]
    return (sides[0] > 0).astype(float) - (sides[1] > 0), group


def packed(D: np.ndarray) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Outcomes of two methods with this difference."""
    a, b = ([bits("".join(map(str, row.astype(int)))) for row in side] for side in (D > 0, D < 0))
    return a, b


@pytest.mark.parametrize(
    "sizes",
    [
        *(pytest.param([20] * groups, marks=pytest.mark.nightly) for groups in (25, 10)),
        [3, 40, 17, 8, 25, 31, 12, 6, 38, 20, 14, 29],
    ],
)
def test_groups_of_images_keep_the_level(sizes: list[int]) -> None:
    """Of 200 pairs of equal methods at five seeds 10 may be rejected at 5 %; with independent images 80 or so are."""
    draw = np.random.default_rng(len(sizes))
    rejected = {"images": 0, "groups": 0}
    for _ in range(200):
        D, group = null_of_groups(draw, 5, sizes)
        a, b = packed(D)
        for name, groups in (("images", None), ("groups", group)):
            found = seeds_and_images(a, b, groups=groups)
            rejected[name] += found.p < 0.05
    assert 2 <= rejected["groups"] <= 18 and rejected["images"] > 60, rejected


def test_the_variance_of_groups_is_the_cluster_robust_one() -> None:
    """That of statsmodels for a mean. Every image a group of its own changes nothing; of one group there is no test."""
    from statsmodels.regression.linear_model import OLS

    D, group = null_of_groups(np.random.default_rng(1), 3, [5, 1, 8, 2, 4])
    moved = of_groups(D, group)
    assert moved.mean(1) == pytest.approx(D.mean(1))
    robust = OLS(D.mean(0), np.ones(D.shape[1])).fit(cov_type="cluster", cov_kwds={"groups": group})
    assert moved.mean(0).var(ddof=1) / 5 == pytest.approx(robust.bse[0] ** 2)
    a, b = packed(D)
    assert seeds_and_images(a, b, groups=np.arange(20)) == seeds_and_images(a, b)
    assert seeds_and_images(a, b, groups=np.zeros(20, int)) is None


def test_obuchowski_by_hand() -> None:
    """Three groups whose differences are 2, 1 and -1: t = 2 / sqrt(3 / 2 * 6) = 2 / 3 with two degrees of freedom."""
    a, b, group = bits("111111010"), bits("011010011"), np.repeat([0, 1, 2], [4, 3, 2])
    assert images(a, b, group).p == pytest.approx(2 * stats.t.sf(2 / 3, 2))
    assert images(a, a, group).p == 1


# --- effect sizes, several tests, shares -------------------------------------------------------------------------


def test_the_effect_and_its_interval() -> None:
    """Differences 1, 2, 3: d is 2; the interval is scipy's."""
    test = paired({0: 1.0, 1: 2.0, 2: 3.0}, dict.fromkeys(range(3), 0.0))
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


@pytest.mark.parametrize("n", [1, 24, 500])
def test_wilson_against_scipy_and_statsmodels(n: int) -> None:
    from statsmodels.stats.proportion import proportion_confint

    for k in {0, 1, n // 3, n - 1, n}:
        low, high = wilson(k, n)
        expected = stats.binomtest(k, n).proportion_ci(method="wilson")
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)
        assert wilson(k, n, 0.99) == pytest.approx(proportion_confint(k, n, 0.01, "wilson"), abs=1e-12)
    assert wilson(24, 24) == (pytest.approx(0.862, abs=1e-3), 1.0)  # never "100 +- 0"
    with pytest.raises(ValueError, match="3 of 2 is not a fraction"):
        wilson(3, 2)


def test_coverage_of_the_interval_of_a_spread() -> None:
    """As its docstring says: of 30 normal values 0.89, of 30 of Student's t of 5 degrees of freedom 0.80."""
    rng = np.random.default_rng(1)
    for true, least, most, draw in (
        (1.0, 0.85, 0.93, lambda: rng.normal(size=30)),
        ((5 / 3) ** 0.5, 0.74, 0.86, lambda: rng.standard_t(5, 30)),
    ):
        intervals = [spread_interval(draw()) for _ in range(200)]
        covered = sum(one is not None and one[0] <= true <= one[1] for one in intervals) / len(intervals)
        assert least < covered < most, covered
    assert spread_interval(range(19)) is None


@pytest.mark.parametrize(("n", "least"), [(50, 0.91), (500, 0.94)])
def test_coverage_of_wilson(n: int, least: float) -> None:
    """Over all shares from 0.005 to 0.995; the normal interval goes down to 0.22 with 50 images."""
    k = np.arange(n + 1)
    low, high = np.array([wilson(int(each), n) for each in k]).T
    half = 1.96 * np.sqrt(k / n * (1 - k / n) / n)
    covers, normal = [], []
    for p in np.arange(0.005, 1, 0.005):
        chance = stats.binom.pmf(k, n, p)
        covers.append(chance[(low <= p) & (p <= high)].sum())
        normal.append(chance[(k / n - half <= p) & (p <= k / n + half)].sum())
    assert min(covers) > least - 0.005
    assert min(normal) < (0.25 if n == 50 else 0.93)


def test_the_binomial_tail_counts_its_first_term() -> None:
    """P(X >= 1) of two halves is 3/4, P(X >= 2) is 1/4; below the first and above the last count."""
    assert [binomial_tail(k, 2, 0.5) for k in (-1, 0, 1, 2, 3)] == [1, 1, pytest.approx(0.75), pytest.approx(0.25), 0]
