"""The worst case over declared adversaries: the least of several accuracies, with an interval that keeps its level.

    worst = worst_case(outcomes, n)            outcomes[a][s]: of adversary a and seed s
    apart = worst_case_difference(g, h, n)     of two aggregators under the same adversaries, seeds and images

The least of several means is too small, and the interval of that one alone misses the truth in up to 13 % of studies;
choosing the adversary on other seeds or images rejects a true null between two aggregators in up to 21 %. Here the
lower end needs no correction, since the least lower end is at most that of the true worst (intersection-union, Berger
1982), and the upper end holds for all adversaries at once (max-t). An adversary that is shown to be milder than another
is left out of both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fatbench.report.numbers.statistics import ImageOutcomes, SeedsAndImages, mean_over_models, of_rows, student

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fatbench.report.numbers.statistics import Groups

    Floats = NDArray[np.float64]

LEVEL = 0.05
SCREENING = 1 / 20  # of the level: spent on leaving out milder adversaries
DRAWS = 2000  # of the largest of several Student's t
LEAST_P = 1e-6


@dataclass(frozen=True)
class WorstCase:
    """The worst case of one row, or the difference of two; fractions."""

    mean: float  # cross-fitted: the adversary is chosen on the other seeds and the other half of the images
    low: float  # ends of the 95 % interval
    high: float
    least: tuple[int, ...]  # the adversary with the least mean accuracy, of each row
    kept: tuple[int, ...]  # adversaries not shown to be milder than another, of each row
    p: float = 1.0  # of a difference: the level at which 0 leaves the interval, at least 1e-6
    seed_variance = image_variance = None  # there is no one comparison behind it

    @property
    def at_most(self) -> float:
        """The end of the 95 % interval that is farther from 0: the size that the data do not exclude."""
        return max(abs(self.low), abs(self.high))

    def detectable(self, alpha: float = LEVEL) -> None:
        """Not known: it depends on how far apart the adversaries are."""


def worst_case(outcomes: Sequence[Sequence[ImageOutcomes]], n: int, groups: Groups | None = None) -> WorstCase | None:
    """The least mean accuracy over K adversaries; None below two seeds or two images.

    outcomes: K lists of the same S seeds, each of the same n images, or of several models on them. groups: of images,
    as of `contrast`.
    """
    row = _Row(outcomes, n, groups)
    if row.too_small:
        return None
    kept, tail = row.kept(LEVEL)
    tests = [row.tests[a] for a in kept]
    low = min(test.mean - test.width(_t(test.seeds, tail), _t(test.images, tail)) for test in tests)
    c = _quantile(_largest_t(row.outcomes[kept].mean(2)), len(kept), row.seeds, tail)
    high = min(test.mean + test.width(c, _t(test.images, tail / len(kept))) for test in tests)
    return WorstCase(row.cross_fitted(), low, high, (row.least,), (len(kept),))


def worst_case_difference(
    g: Sequence[Sequence[ImageOutcomes]], h: Sequence[Sequence[ImageOutcomes]], n: int, groups: Groups | None = None
) -> WorstCase | None:
    """The worst case of g minus that of h, over the same seeds and images; None below two seeds or two images.

    For the true worst a of g the difference is max over b of (mu_ga - mu_hb), so its lower bound need only hold for all
    b at once; and the other way round.
    """
    first, second = _Row(g, n, groups), _Row(h, n, groups)
    if first.too_small or second.too_small:
        return None
    differences = {
        (i, j): a - b for i, a in enumerate(first.outcomes) for j, b in enumerate(second.outcomes)
    }  # fmt: skip
    tests = {pair: _test(D, groups) for pair, D in differences.items()}
    largest = functools.cache(lambda pairs: _largest_t(np.stack([differences[pair].mean(1) for pair in pairs])))

    def end(pairs: tuple[tuple[int, int], ...], sign: int, tail: float) -> float:
        c = _quantile(largest(pairs), len(pairs), first.seeds, tail)
        parts = (tests[pair] for pair in pairs)
        return max(sign * test.mean - test.width(c, _t(test.images, tail / len(pairs))) for test in parts)

    def ends(level: float) -> tuple[float, float]:
        (own, tail), (other, tail_of_other) = first.kept(level), second.kept(level)
        tail = tail + tail_of_other - level / 2
        low = min(end(tuple((i, j) for j in other), 1, tail) for i in own)
        return low, -min(end(tuple((i, j) for i in own), -1, tail) for j in other)

    low, high = ends(LEVEL)
    least, most = math.log(LEAST_P), 0.0
    for _ in range(30):
        middle = (least + most) / 2
        below, above = ends(math.exp(middle))
        least, most = (middle, most) if below <= 0 <= above else (least, middle)
    kept = len(first.kept(LEVEL)[0]), len(second.kept(LEVEL)[0])
    mean = first.cross_fitted() - second.cross_fitted()
    return WorstCase(mean, low, high, (first.least, second.least), kept, math.exp(most))


class _Row:
    """The outcomes of one row (adversaries, seeds, images), as shares of models that are right, and their tests."""

    def __init__(self, outcomes: Sequence[Sequence[ImageOutcomes]], n: int, groups: Groups | None) -> None:
        self.outcomes = np.array([[mean_over_models(of_seed, n) for of_seed in of_one] for of_one in outcomes])
        self.seeds = self.outcomes.shape[1]
        self.too_small = of_rows(self.outcomes[0], 1.0, groups) is None
        if self.too_small:
            return
        means = self.outcomes.mean((1, 2))
        self.least = int(means.argmin())
        self.tests = [_test(D, groups) for D in self.outcomes]
        self._milder = [
            (a, _test(D - self.outcomes[o], groups))
            for a, D in enumerate(self.outcomes) for o in range(len(means)) if means[o] < means[a]
        ]  # fmt: skip

    def kept(self, level: float) -> tuple[list[int], float]:
        """(the adversaries not shown to be milder than another, what is left of half the level)."""
        count = len(self.outcomes)
        if count == 1:
            return [0], level / 2
        b = SCREENING * level
        single = b / (count - 1)
        milder = {
            a for a, test in self._milder if test.mean > test.width(_t(test.seeds, single), _t(test.images, single))
        }
        return [a for a in range(count) if a not in milder], level / 2 - b

    def cross_fitted(self) -> float:
        """The mean over seeds and halves of the images, under the adversary that is worst on other seeds and images."""
        n = self.outcomes.shape[2]
        by_half = np.stack([self.outcomes[:, :, half::2].mean(2) for half in (0, 1)], 2)  # adversary, seed, half
        of_others = by_half.sum(1, keepdims=True) - by_half
        chosen = of_others[:, :, ::-1].argmin(0)
        weights = np.array([(n + 1) // 2, n // 2]) / n
        return float((np.take_along_axis(by_half, chosen[None], 0)[0] * weights).sum() / self.seeds)


def _test(D: Floats, groups: Groups | None) -> SeedsAndImages:
    test = of_rows(D, 1.0, groups)
    assert test is not None  # two seeds and images are asked for before
    return test


def _t(count: int, tail: float) -> float:
    """What Student's t of count - 1 degrees of freedom exceeds with this probability."""
    return student(count - 1, 2 * tail)


def _largest_t(seed_means: Floats) -> Floats | None:
    """Draws of the largest of K Student's t with the correlation of these rows (K, S); None: all rows are alike."""
    distinct = np.unique(seed_means - seed_means.mean(1, keepdims=True), axis=0)
    count, seeds = distinct.shape
    if count == 1:
        return None
    spread = np.sqrt((distinct**2).sum(1))
    unit = distinct / np.where(spread > 0, spread, 1)[:, None]
    values, vectors = np.linalg.eigh(np.where(np.eye(count, dtype=bool), 1.0, unit @ unit.T))
    drawn = _normals(seeds, count) @ (vectors * np.sqrt(np.maximum(values, 0))).T
    largest: Floats = (drawn.mean(1) / drawn.std(1, ddof=1)).max(1) * math.sqrt(seeds)
    return np.sort(largest)


def _quantile(largest: Floats | None, count: int, seeds: int, tail: float) -> float:
    """What the largest of `count` Student's t exceeds with probability `tail`; Bonferroni's where draws cannot tell."""
    if largest is None:
        return _t(seeds, tail)
    return _t(seeds, tail / count) if tail * DRAWS < 5 else float(np.quantile(largest, 1 - tail))


@functools.cache
def _normals(seeds: int, count: int) -> Floats:
    """Fixed draws, keyed by S and K, so that an interval is the same each time."""
    return np.random.default_rng([seeds, count]).normal(size=(DRAWS, seeds, count))
