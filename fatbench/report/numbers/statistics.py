"""Tests and intervals of differences: over seeds and images, over seeds alone, over images alone; Holm's correction.

    seeds_and_images(a, b)                           per-image outcomes of two methods, one a seed, on the same images
    contrast([(0.5, a), (0.5, b), (-1, c)])          the same of a weighted sum of methods
    mcnemar(15, 4)                                   -> 0.0192
    share_between([(60, 62), (50, 51)])              -> the part of the variance between groups

Outcomes are (bits, n): one bit an image, 1 where it was classified right, the first image in the highest bit. Every
p-value is two-sided but that of `binomial_tail`. numpy and scipy.special are imported where they are needed: together
they take 0.3 s.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Groups = NDArray[np.int64]  # (n,): of each image the number of its group, from 0

ImageOutcomes = tuple[int, int]  # (bits, n)


class OfClients(tuple[int, int]):
    """In place of outcomes: (0, n), a number of one seed over clients, each on its own images, n in all.

    accuracies: of each client, where the number is their mean. images: what two seeds share if their clients are the
    same; empty: not known.
    """

    value: float
    accuracies: tuple[float, ...]
    images: str

    @classmethod
    def of(cls, value: float, n: int, accuracies: Sequence[float] = (), images: str = "") -> OfClients:
        made = cls((0, n))
        made.value, made.accuracies, made.images = value, tuple(accuracies), images
        return made


EXACT = 50  # the signed-rank test counts patterns of signs up to so many differences
LEAST_LN_P = -300.0  # of the search for p: the square of t overflows near -690
SEEDS_FOR_A_CLAIM = 5  # with fewer, only differences of several standard deviations over seeds can be seen


# --- over images: one network against another --------------------------------------------------------------------


@dataclass(frozen=True)
class PairedOutcomes:
    """Two trained networks on the same images; conclusions are about other such images, not about methods."""

    n: int
    both: int  # images that both classify right
    only_a: int
    only_b: int
    p: float  # exact McNemar test

    @property
    def agreement(self) -> float:
        """Fraction of images on which both are right or both wrong."""
        return 1 - (self.only_a + self.only_b) / self.n

    @property
    def odds_ratio(self) -> float | None:
        """Matched odds ratio: images that only A gets right, over those that only B does. None: B has none."""
        return self.only_a / self.only_b if self.only_b else None


def images(a: ImageOutcomes, b: ImageOutcomes, groups: Groups | None = None) -> PairedOutcomes:
    """The exact McNemar test of two networks; over groups of images Obuchowski's. ValueError: other images, or none."""
    if a[1] != b[1] or a[1] < 1:
        raise ValueError(f"outcomes of {a[1]} and {b[1]} images are not about the same images")
    only_a, only_b = (a[0] & ~b[0]).bit_count(), (b[0] & ~a[0]).bit_count()
    p = mcnemar(only_a, only_b) if groups is None else obuchowski(a, b, groups)
    return PairedOutcomes(a[1], (a[0] & b[0]).bit_count(), only_a, only_b, p)


def mcnemar(only_a: int, only_b: int) -> float:
    """McNemar's exact test: the two-sided binomial test of the discordant images against one half; 1 without any."""
    n = only_a + only_b
    tail = term = 1
    for k in range(min(only_a, only_b)):
        term = term * (n - k) // (k + 1)
        tail += term
    return min(1.0, 2 * tail / 2**n)


def obuchowski(a: ImageOutcomes, b: ImageOutcomes, groups: Groups) -> float:
    """McNemar's test where the images of a group go together: the groups' differences d against sqrt(G sum d^2/(G-1)).

    Obuchowski 1998, by Student's t with G - 1 degrees of freedom. 1 where no group differs.
    """
    import numpy as np
    from scipy.special import stdtr

    d = np.bincount(groups, bits_array(a).astype(float) - bits_array(b))
    if not d.any():
        return 1.0
    return min(1.0, 2 * float(stdtr(len(d) - 1, -abs(d.sum()) / math.sqrt(len(d) / (len(d) - 1) * (d**2).sum()))))


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
        half_width = student(len(self.seeds) - 1, 0.05) * self.std / math.sqrt(len(self.seeds))
        return self.mean - half_width, self.mean + half_width


def share(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, tuple[float, float] | None] | None:
    """(mean of `parts` over the mean of `wholes`, its 95 % interval), paired by seed: Fieller 1954, Student's t.

    The interval holds the r for which the mean of part - r whole is not significantly other than 0. It is None for one
    seed, and where the mean of the wholes is not significantly other than 0. None: there is no seed, or that mean is 0.
    """
    n = len(wholes)
    if not n or not (whole_mean := sum(wholes) / n):
        return None
    part_mean = sum(parts) / n
    if n < 2:
        return part_mean / whole_mean, None
    squared = student(n - 1, 0.05) ** 2 / n
    deviations = [(a - part_mean, b - whole_mean) for a, b in zip(parts, wholes, strict=True)]
    aa, ab, bb = (
        sum(deviation[i] * deviation[j] for deviation in deviations) / (n - 1) for i, j in ((0, 0), (0, 1), (1, 1))
    )
    a, b, c = (
        whole_mean**2 - squared * bb,
        part_mean * whole_mean - squared * ab,
        part_mean**2 - squared * aa,
    )  # a r^2 - 2 b r + c <= 0
    if a <= 0:
        return part_mean / whole_mean, None
    half_width = math.sqrt(max(0.0, b * b - a * c))
    return part_mean / whole_mean, ((b - half_width) / a, (b + half_width) / a)


def share_between(groups: Sequence[Sequence[float]]) -> tuple[float, tuple[float, float]]:
    """(the part of the variance that lies between groups, its 95 % interval), of at least two groups of one size.

    One-way analysis of variance with random, normal effects: the intraclass correlation ICC(1, 1) and the ends that
    follow from the F distribution, 0 where they would be below it. ValueError: groups of other sizes, fewer than two
    numbers in a group, or no variance within. Source: Shrout and Fleiss 1979.
    """
    import numpy as np
    from scipy.special import fdtri

    if len({len(group) for group in groups}) != 1 or min(np.shape(groups)) < 2:
        raise ValueError("a share of the variance needs two or more groups, all of the same size of two or more")
    numbers = np.asarray(groups, float)
    count, size = numbers.shape
    within = numbers.var(axis=1, ddof=1).mean()
    if not within:
        raise ValueError("the numbers do not vary within a group")
    ratio = size * numbers.mean(axis=1).var(ddof=1) / within
    freedom = count - 1, count * (size - 1)
    estimate, low, high = (
        max(0.0, float((f - 1) / (f - 1 + size)))
        for f in (ratio, ratio / fdtri(*freedom, 0.975), ratio / fdtri(*freedom, 0.025))
    )
    return estimate, (low, high)


def paired(own_values: Mapping[int, float], against: Mapping[int, float]) -> Paired | None:
    """The tests of numbers by seed, over the seeds that both have; None where these are fewer than two.

    Two cells of one seed share the partition, the initial model and the order of the clients, so that their difference
    varies less than either. Of n seeds the least possible p of the signed-rank test is 2 / 2^n, so that five cannot go
    below 0.0625. ValueError: a number is not finite.
    """
    seeds = tuple(sorted(own_values.keys() & against.keys()))
    if len(seeds) < 2:
        return None
    # rounded, so that 0.97 - 0.96 and 0.98 - 0.97 are the same difference
    differences = [round(own_values[seed] - against[seed], 12) for seed in seeds]
    if not all(map(math.isfinite, differences)):
        raise ValueError("paired: every number must be finite")
    mean, std = statistics.fmean(differences), statistics.stdev(differences)
    t_p = None
    if std:
        from scipy.special import stdtr

        t_p = 2 * float(stdtr(len(seeds) - 1, -abs(mean) / (std / math.sqrt(len(seeds)))))
    return Paired(seeds, mean, std, t_p, wilcoxon(differences))


def wilcoxon(differences: Sequence[float]) -> float | None:
    """Wilcoxon's signed-rank test, differences of 0 left out; None: nothing is left.

    Exact, ties included, up to 50 differences (scipy 1.17 counts ties exactly up to 13); above, the normal
    approximation with the correction for ties.
    """
    moved = sorted((abs(difference), difference > 0) for difference in differences if difference)
    if not moved:
        return None
    ranks: list[int] = []  # twice the rank, so that the mean rank of ties is whole
    sizes = [size for size, _ in moved]
    for size in sizes:
        first_rank = sizes.index(size)
        ranks.append(2 * first_rank + sizes.count(size) + 1)
    positive, total, n = (
        sum(r for r, (_, is_positive) in zip(ranks, moved, strict=True) if is_positive),
        sum(ranks),
        len(ranks),
    )
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


@dataclass(frozen=True)
class SeedsAndImages:
    """A difference of mean accuracies, A - B or a contrast, where seeds and images are both taken as random.

    Its interval is mean +- half(level), half^2 = t[S-1]^2 seed_variance + t[n-1]^2 image_variance with Student's t at
    1 - (1 - level) / 2, after Howe 1974. p is the level of the test that inverts it: p < 0.05 exactly if 0 lies
    outside the 95 % interval. Without per-image outcomes `image_variance` is 0, and all of it is about these images.
    """

    mean: float
    seeds: int  # S >= 2
    images: int  # n, or how many groups of them
    seed_variance: float  # v_S, of the mean
    image_variance: float  # v_I, of the mean

    def half(self, level: float = 0.95) -> float:
        """Half the width of the interval of this level."""
        return self._half(1 - level)

    def _half(self, alpha: float) -> float:
        over_images = student(self.images - 1, alpha) if self.image_variance else 0.0
        return self.width(student(self.seeds - 1, alpha), over_images)

    def width(self, over_seeds: float, over_images: float) -> float:
        """Half the width of an interval of so many deviations over seeds and over images."""
        return math.sqrt(over_seeds**2 * self.seed_variance + over_images**2 * self.image_variance)

    @property
    def low(self) -> float:
        """Lower end of the 95 % confidence interval."""
        return self.mean - self.half()

    @property
    def high(self) -> float:
        """Upper end of the 95 % confidence interval."""
        return self.mean + self.half()

    @functools.cached_property
    def p(self) -> float:
        """The a at which half(1 - a) = |mean|, by bisection of ln a; 1 where the mean is 0."""
        if self.mean == 0:
            return 1.0
        low, high = LEAST_LN_P, 0.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if self._half(math.exp(middle)) < abs(self.mean) else (middle, high)
        return math.exp(high)

    @functools.cached_property
    def at_most(self) -> float:
        """The end of the 95 % interval that is farther from 0: the size that the data do not exclude."""
        return abs(self.mean) + self.half()

    def detectable(self, alpha: float = 0.05) -> float:
        """The smallest true difference that such a comparison finds with power 0.8, at the level alpha."""
        return self.width(found_shift(self.seeds, alpha), found_shift(self.images, alpha) if self.image_variance else 0)


@functools.lru_cache(4096)
def student(df: int, alpha: float) -> float:
    """Student's t at 1 - alpha / 2."""
    from scipy.special import stdtrit

    return -float(stdtrit(df, alpha / 2))


def found_shift(n: int, alpha: float = 0.05) -> float:
    """The true mean, in standard errors, that Student's t test of n differences finds with power 0.8."""
    from scipy.special import nctdtrinc

    # it is not symmetric about a true difference: with few seeds t(alpha) + t(0.8) would be too small
    return float(nctdtrinc(n - 1, 0.2, student(n - 1, alpha)))


def seeds_and_images(
    a: Sequence[ImageOutcomes], b: Sequence[ImageOutcomes], n: int | None = None, groups: Groups | None = None
) -> SeedsAndImages | None:
    """The difference A - B of mean accuracies over seeds and images; None below two seeds or two images.

    a, b: outcomes of each seed, in the same order, all on the same n images. If there are several times as many
    outcomes they are those of several models, one after the other, and an image counts with their mean: models are
    the nodes of a federation and no sample. groups: see `contrast`. ValueError: not so many outcomes.
    """
    return contrast([(1.0, a), (-1.0, b)], n, groups)


def contrast(
    cells: Sequence[tuple[float, Sequence[ImageOutcomes]]], n: int | None = None, groups: Groups | None = None
) -> SeedsAndImages | None:
    """The weighted sum of methods' accuracies over seeds and images: (weight, outcomes of each seed) of each.

    Of D (seeds, images) with mean squares MS_I of images and MS_E of the rest, and standard deviation s of its rows'
    means: v_S = (s + max|weight| / 2n)^2 / S and v_I = max(MS_I - MS_E, 0) / (S n). Accuracies are multiples of 1/n:
    without that half an image, seeds that agree by chance would make every p as small as one likes.
    groups (n,), numbers from 0: images of a group go together, and groups are drawn at random (see `of_groups`).
    None below two seeds, images or groups. ValueError: not the same seeds or images.
    """
    import numpy as np

    by_client = [(weight, [one for one in side if isinstance(one, OfClients)]) for weight, side in cells]
    if by_client[0][1]:
        return contrast_over_clients(by_client)
    first_outcomes = cells[0][1]
    seeds, n = len(first_outcomes), n or (first_outcomes[0][1] if first_outcomes else 0)
    if any(len(outcomes) != seeds for _, outcomes in cells):
        raise ValueError("a contrast needs the same seeds of every method")
    if seeds < 2 or n < 2:
        return None
    D = np.zeros((seeds, n))
    for weight, outcomes in cells:
        D += weight * np.stack([mean_over_models(seed_outcomes, n) for seed_outcomes in outcomes])
    return of_rows(D, max(abs(weight) for weight, _ in cells), groups)


def contrast_over_clients(cells: Sequence[tuple[float, Sequence[OfClients]]]) -> SeedsAndImages | None:
    """As `contrast`, of numbers over clients: images of a client are never independent units.

    Where each seed has other clients there is no part of images; where clients are the same in all seeds they take the
    place of images, each with the same weight. None below two seeds. ValueError: not the same seeds.
    """
    import numpy as np

    weights, sides = [weight for weight, _ in cells], [side for _, side in cells]
    by_seed = [sum(w * one.value for w, one in zip(weights, of, strict=True)) for of in zip(*sides, strict=True)]
    n, step = min(one[1] for side in sides for one in side), max(map(abs, weights))
    test, everyone = over_seeds(by_seed, n, step), [one for side in sides for one in side]
    if test is None or {one.images for one in everyone} != {everyone[0].images} or not everyone[0].images:
        return test
    clients = len(everyone[0].accuracies)
    if clients < 2 or any(len(one.accuracies) != clients for one in everyone):
        return test
    D = np.sum([w * np.array([one.accuracies for one in side]) for w, side in cells], axis=0)
    _, of_clients, of_rest = mean_squares(D)
    variance = max(of_clients - of_rest, 0.0) / (len(by_seed) * clients)
    return SeedsAndImages(test.mean, test.seeds, clients, test.seed_variance, variance)


def of_rows(D: NDArray[np.float64], step: float = 1.0, groups: Groups | None = None) -> SeedsAndImages | None:
    """As `contrast`, from D (seeds, images), the weighted sum of each; step: the largest |weight|."""
    seeds, n = D.shape
    units = D if groups is None else of_groups(D, groups)
    count = units.shape[1]
    if seeds < 2 or count < 2:
        return None
    _, of_images, of_rest = mean_squares(units)
    seed_part = over_seeds(D.mean(1).tolist(), n, step)
    assert seed_part is not None  # there are two seeds
    image_variance = max(of_images - of_rest, 0.0) / (seeds * count)
    return SeedsAndImages(seed_part.mean, seeds, count, seed_part.seed_variance, image_variance)


def of_groups(D: NDArray[np.float64], groups: Groups) -> NDArray[np.float64]:
    """D (seeds, images) as (seeds, groups) with the same mean of each seed, for groups of any sizes.

    An entry is that mean plus G / n times the sum of the group's deviations from it: the variance of the mean over
    groups is then the cluster-robust one (Liang and Zeger 1986), with the factor G / (G - 1).
    """
    import numpy as np

    means, count = D.mean(1, keepdims=True), int(groups.max()) + 1
    sums = np.stack([np.bincount(groups, row, count) for row in D - means])
    moved: NDArray[np.float64] = means + count / D.shape[1] * sums
    return moved


def over_seeds(differences: Sequence[float], n: int, step: float = 1.0) -> SeedsAndImages | None:
    """As `contrast`, from one difference of accuracies on n images for each seed: about these images alone.

    step: the largest |weight| of a contrast. None below two seeds.
    """
    seeds = len(differences)
    if seeds < 2:
        return None
    s = statistics.stdev(differences)
    return SeedsAndImages(statistics.fmean(differences), seeds, n, (s + step / (2 * n)) ** 2 / seeds, 0.0)


def mean_squares(D: NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean squares of seeds, of images and of the rest of D (seeds, images): two-way, one value a cell."""
    seeds, n = D.shape
    by_seed, by_image = D.mean(1, keepdims=True) - D.mean(), D.mean(0) - D.mean()
    residuals = D - D.mean() - by_seed - by_image
    squares = n * (by_seed**2).sum() / (seeds - 1), seeds * (by_image**2).sum() / (n - 1)
    return float(squares[0]), float(squares[1]), float((residuals**2).sum() / ((seeds - 1) * (n - 1)))


def mean_over_models(outcomes: ImageOutcomes, n: int) -> NDArray[np.float64]:
    """For each of n images the fraction of models that classify it correctly, (n,)."""
    count = outcomes[1]
    if count < n or count % n:
        raise ValueError(f"{count} outcomes are not those of models on {n} images")
    shares: NDArray[np.float64] = bits_array(outcomes).reshape(-1, n).mean(0)
    return shares


def bits_array(outcomes: ImageOutcomes) -> NDArray[np.bool_]:
    """Outcomes as an array, (n,), the first image first."""
    import numpy as np

    bits, count = outcomes
    data = np.frombuffer((bits << (-count % 8)).to_bytes((count + 7) // 8, "big"), np.uint8)
    return np.unpackbits(data)[:count].astype(bool)


def bits_of(outcomes: NDArray[np.bool_]) -> ImageOutcomes:
    """The outcomes of an array (n,) of booleans."""
    import numpy as np

    return int.from_bytes(np.packbits(outcomes).tobytes(), "big") >> (-len(outcomes) % 8), len(outcomes)


# --- one accuracy ------------------------------------------------------------------------------------------------


def binomial_tail(k: int, n: int, p: float) -> float:
    """P(X >= k) of a binomial X of n trials of probability p in (0, 1)."""
    from scipy.special import bdtrc

    if k <= 0:
        return 1.0
    return 0.0 if k > n else float(bdtrc(k - 1, n, p))


RESAMPLES, FEWEST = 20_000, 20  # of the bootstrap; the fewest seeds whose spread has an interval


def spread_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % percentile bootstrap interval of the sample standard deviation over seeds; None below FEWEST seeds.

    The chi-square interval rests on normality, which thirty measured differences reject (Shapiro-Wilk p 5e-5). Of 30
    values this one covers 0.89 if they are normal and 0.80 if they are Student's t of 5 degrees of freedom.
    """
    if len(values) < FEWEST:
        return None
    import numpy as np

    drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values)))
    low, high = np.quantile(drawn.std(axis=1, ddof=1), (0.025, 0.975))
    return float(low), float(high)


def least_of_equals(sizes: Sequence[int], p: float) -> float:
    """The expected least of accuracies on so many images each where all are p in truth, by 2,000 draws.

    What the worst of several clients is compared with: chosen and judged on the same images, it is biased down.
    """
    import numpy as np

    drawn = np.random.default_rng(0).binomial(sizes, min(1.0, p), (2000, len(sizes)))
    return float((drawn / np.array(sizes)).min(1).mean())


# --- several tests -----------------------------------------------------------------------------------------------


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's correction: the i-th smallest of m times (m - i), i from 0, never below the one before, at most 1."""
    corrected, running_maximum = [1.0] * len(ps), 0.0
    for i, j in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        running_maximum = corrected[j] = min(1.0, max(running_maximum, ps[j] * (len(ps) - i)))
    return corrected
