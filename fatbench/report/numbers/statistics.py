"""Whether a difference is real: paired tests over images and over seeds, effect sizes, Holm's correction.

    mcnemar(15, 4)                                   -> 0.0192
    paired({0: 0.97, 1: 0.96, 2: 0.98}, {0: 0.95, 1: 0.95, 2: 0.97})
                                                     -> Paired((0, 1, 2), 0.0133, 0.0058, 0.057, 0.25)
    crossed(a, b)                                    outcomes of two methods, one a seed, on the same images

ImageOutcomes are (bits, n): one bit an image, 1 where it was classified right, the first image in the highest bit.
Every p-value is two-sided. Standard library alone, but for `bootstrap`, which imports numpy: a report asks for hundreds
of tests, and importing scipy takes longer than all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ImageOutcomes = tuple[int, int]  # (bits, n)
EXACT = 50  # the signed-rank test counts patterns of signs up to so many differences


@dataclass(frozen=True)
class Difference:
    """A mean difference of accuracies, with Student's t of what makes it uncertain."""

    mean: float
    error: float  # standard error
    df: float
    p: float
    low: float  # of the 95 % confidence interval
    high: float


def _difference(mean: float, error: float, df: float) -> Difference:
    half = t_quantile(0.975, df) * error
    return Difference(mean, error, df, 2 * t_tail(mean / error, df), mean - half, mean + half)


# --- over images: one network against another --------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """Two networks on the same images."""

    n: int
    both: int  # images that both classify right
    only_a: int
    only_b: int
    p: float  # exact McNemar test

    @property
    def agreement(self) -> float:
        """Fraction of the images on which both are right or both wrong."""
        return 1 - (self.only_a + self.only_b) / self.n

    @property
    def odds_ratio(self) -> float | None:
        """Matched odds ratio: images that only A gets right, over those that only B does. None: B has none."""
        return self.only_a / self.only_b if self.only_b else None


def images(a: ImageOutcomes, b: ImageOutcomes) -> Images:
    """The exact McNemar test of two networks. ValueError: not the same number of images, or none."""
    _same(a, b)
    only_a, only_b = (a[0] & ~b[0]).bit_count(), (b[0] & ~a[0]).bit_count()
    return Images(a[1], (a[0] & b[0]).bit_count(), only_a, only_b, mcnemar(only_a, only_b))


def over_images(a: ImageOutcomes, b: ImageOutcomes, n: int) -> Difference | None:
    """The paired t test over n images of one seed, where an image counts with the mean of the models that judge it.

    a, b: the outcomes of each model on all images, one model after the other. For one model on each side `images` is
    exact. None below two images, or where no difference varies.
    """
    part = [*_models(a, n, 1), *_models(b, n, -1)]
    total = sum(weight * bits.bit_count() for weight, bits in part)
    variance = (_product(part, part) - total**2 / n) / (n - 1) if n > 1 else 0.0
    return None if variance <= 1e-12 else _difference(total / n, math.sqrt(variance / n), n - 1)


def mcnemar(only_a: int, only_b: int) -> float:
    """McNemar's exact test: the two-sided binomial test of the discordant images against one half; 1 without any."""
    n = only_a + only_b
    tail = term = 1
    for k in range(min(only_a, only_b)):
        term = term * (n - k) // (k + 1)
        tail += term
    return min(1.0, 2 * tail / 2**n)


def _same(a: ImageOutcomes, b: ImageOutcomes) -> None:
    if a[1] != b[1] or a[1] < 1:
        raise ValueError(f"outcomes on {a[1]} and {b[1]} images are not about the same images")


# --- over seeds: training again ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paired:
    """Differences by seed, one method minus the other. p-values are two-sided and not corrected for several tests."""

    seeds: tuple[int, ...]  # those that both have, ascending
    mean: float
    std: float  # ddof 1
    t_p: float | None  # paired t test; None: all differences are the same
    wilcoxon_p: float | None  # signed-rank test, differences of 0 left out; None: all are 0

    @property
    def d(self) -> float | None:
        """Cohen's d of paired differences (d_z): their mean over their standard deviation. None: they do not vary."""
        return self.mean / self.std if self.std else None

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the mean, by Student's t."""
        half = t_quantile(0.975, len(self.seeds) - 1) * self.std / math.sqrt(len(self.seeds))
        return self.mean - half, self.mean + half


def paired(ours: Mapping[int, float], against: Mapping[int, float]) -> Paired | None:
    """The tests of numbers by seed, over the seeds that both have; None where these are fewer than two.

    Two cells of one seed share the partition, the initial model and the order of the clients, so that their difference
    varies less than either. Of n seeds the least possible p of the signed-rank test is 2 / 2^n, so that five cannot go
    below 0.0625. ValueError: a number is not finite.
    """
    seeds = tuple(sorted(ours.keys() & against.keys()))
    if len(seeds) < 2:
        return None
    # rounded, so that 0.97 - 0.96 and 0.98 - 0.97 are the same difference
    differences = [round(ours[seed] - against[seed], 12) for seed in seeds]
    if not all(map(math.isfinite, differences)):
        raise ValueError("paired: every number must be finite")
    mean, std = statistics.fmean(differences), statistics.stdev(differences)
    t_p = None if std == 0 else 2 * t_tail(mean / (std / math.sqrt(len(seeds))), len(seeds) - 1)
    return Paired(seeds, mean, std, t_p, wilcoxon(differences))


def wilcoxon(differences: Sequence[float]) -> float | None:
    """Wilcoxon's signed-rank test, differences of 0 left out; None: nothing is left.

    Exact, ties included, up to 50 differences; above, the normal approximation with the correction for ties.
    """
    moved = sorted((abs(difference), difference > 0) for difference in differences if difference)
    if not moved:
        return None
    ranks: list[int] = []  # twice the rank, so that the mean rank of ties is whole
    sizes = [size for size, _ in moved]
    for size in sizes:
        first = sizes.index(size)
        ranks.append(2 * first + sizes.count(size) + 1)
    positive, total, n = sum(r for r, (_, up) in zip(ranks, moved, strict=True) if up), sum(ranks), len(ranks)
    if n > EXACT:
        spread = math.sqrt(sum(rank * rank for rank in ranks)) / 2
        return math.erfc(abs(positive - total / 2) / spread / math.sqrt(2))
    ways = [1] + [0] * total  # patterns of signs by their sum of positive ranks
    for rank in ranks:
        for s in range(total, rank - 1, -1):
            ways[s] += ways[s - rank]
    low = min(positive, total - positive)
    return min(1.0, 2 * sum(ways[: low + 1]) / 2**n)


# --- over seeds and images at once -------------------------------------------------------------------------------


def crossed(a: Sequence[ImageOutcomes], b: Sequence[ImageOutcomes], n: int | None = None) -> Difference | None:
    """The difference A - B of mean accuracies, seeds and images both taken as random; None below two seeds or images.

    a, b: outcomes of each seed, in the same order, all on the same n images. Where there are several times as many
    outcomes they are those of several models, one after the other, and an image counts with their mean. The
    differences D (seed, image) are an analysis of variance with two random factors and one value a cell. With mean
    squares S of seeds, I of images and E of the rest, the mean has variance (max(S, E) + max(I, E) - E) / (seeds x
    images): components of variance that come out negative count as 0. Student's t with the degrees of freedom of
    Satterthwaite 1946; the quasi-F of Clark 1973. None where no difference varies.
    """
    seeds, n = len(a), n or (a[0][1] if a else 0)
    if seeds < 2 or n < 2:
        return None
    # D_s as weighted bits: those of A's models plus, those of B's minus
    parts = [[*_models(one, n, 1), *_models(other, n, -1)] for one, other in zip(a, b, strict=True)]
    sums = [sum(weight * bits.bit_count() for weight, bits in part) for part in parts]
    products = [[_product(p, q) for q in parts] for p in parts]
    squares, every = sum(map(sum, products)), sum(row[s] for s, row in enumerate(products))
    grand = sum(sums) ** 2 / (seeds * n)
    of_seeds = sum(s * s for s in sums) / n - grand
    of_images = squares / seeds - grand
    rest = max(0.0, every - grand - of_seeds - of_images) / ((seeds - 1) * (n - 1))
    by_seed, by_image = max(of_seeds / (seeds - 1), rest), max(of_images / (n - 1), rest)
    variance = by_seed + by_image - rest
    if variance <= 1e-12:
        return None
    df = variance**2 / (by_seed**2 / (seeds - 1) + by_image**2 / (n - 1) + rest**2 / ((seeds - 1) * (n - 1)))
    return _difference(sum(sums) / (seeds * n), math.sqrt(variance / (seeds * n)), df)


def _models(outcomes: ImageOutcomes, n: int, sign: int) -> list[tuple[float, int]]:
    """(weight, bits) of each model's outcomes on the n images; the weights of a side are one together, or minus one."""
    bits, count = outcomes
    models = count // n
    if count != models * n or not models:
        raise ValueError(f"{count} outcomes are not those of models on {n} images")
    return [(sign / models, (bits >> (n * k)) & ((1 << n) - 1)) for k in range(models)]


def _product(p: Sequence[tuple[float, int]], q: Sequence[tuple[float, int]]) -> float:
    """The sum of D_s D_t over images, from counts of common bits."""
    return sum(v * w * (x & y).bit_count() for v, x in p for w, y in q)


def bootstrap(
    a: Sequence[ImageOutcomes],
    b: Sequence[ImageOutcomes],
    n: int | None = None,
    *,
    samples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % percentile interval of the mean difference A - B: seeds and images drawn again with replacement, each apart.

    One drawing of the images serves all seeds, as they share the test set (the pigeonhole bootstrap, Owen 2007). One
    seed: over images alone. ImageOutcomes as for `crossed`.
    """
    import numpy as np

    n = n or a[0][1]
    differences = np.stack([_mean(one, n) - _mean(other, n) for one, other in zip(a, b, strict=True)])
    seeds = len(differences)
    # images with the same differences for every seed are drawn together: few numbers instead of n
    kinds, many = np.unique(differences, axis=1, return_counts=True)
    draw = np.random.default_rng(seed)
    of_images = draw.multinomial(n, many / n, samples)
    of_seeds = draw.multinomial(seeds, np.full(seeds, 1 / seeds), samples)
    means = ((of_images @ kinds.T) * of_seeds).sum(1) / (seeds * n)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _mean(outcomes: ImageOutcomes, n: int):  # type: ignore[no-untyped-def]
    """The mean over the models, of each of the n images, (n,)."""
    import numpy as np

    bits, count = outcomes
    data = np.frombuffer((bits << (-count % 8)).to_bytes((count + 7) // 8, "big"), np.uint8)
    return np.unpackbits(data)[:count].reshape(-1, n).mean(0)


# --- one accuracy against chance --------------------------------------------------------------------------------


def binomial_tail(k: int, n: int, p: float) -> float:
    """P(X >= k) of a binomial X of n trials of probability p in (0, 1): the incomplete beta I_p(k, n - k + 1)."""
    if k <= 0:
        return 1.0
    return 0.0 if k > n else _beta(p, k, n - k + 1)


# --- several tests -----------------------------------------------------------------------------------------------


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's correction: the i-th smallest of m times (m - i), i from 0, never below the one before, at most 1."""
    corrected, least = [1.0] * len(ps), 0.0
    for i, j in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        least = corrected[j] = min(1.0, max(least, ps[j] * (len(ps) - i)))
    return corrected


# --- Student's t -------------------------------------------------------------------------------------------------


def t_tail(t: float, df: float) -> float:
    """P(T > |t|) of Student's t, df > 0, not necessarily whole."""
    square = t * t
    if square < df:
        return (1 - _beta(square / (df + square), 0.5, df / 2)) / 2
    return _beta(df / (df + square), df / 2, 0.5) / 2


def t_quantile(p: float, df: float) -> float:
    """The t at which P(T <= t) = p, for p in [0.5, 1)."""
    low, high = 0.0, 1.0
    while t_tail(high, df) > 1 - p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, df) > 1 - p else (low, middle)
    return (low + high) / 2


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (Abramowitz and Stegun 26.5.8)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / (1 + term * d), 1 + term / c
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction
