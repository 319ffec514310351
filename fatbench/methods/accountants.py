"""The epsilon of (epsilon, delta) differential privacy that noise gives over a whole run.

gaussian_epsilon(1.0, 1e-5, uploads=10)                  no sampling, exact
sampled_gaussian_epsilon(1.0, 0.01, 1000, 1e-5)          every example is drawn with probability 0.01 in each step
"""

from __future__ import annotations

import functools
import math


def gaussian_epsilon(noise: float, delta: float, uploads: int = 1, sensitivity: float = 1.0) -> float:
    """The exact epsilon of (epsilon, delta) differential privacy after `uploads` uploads under `gaussian`.

    `noise` is sigma in units of the clipping norm. `sensitivity` 1: an upload is present or absent; 2: the examples
    behind it are replaced by any others. k Gaussian mechanisms compose to one with mu = sensitivity sqrt(k) / sigma,
    and

        delta = Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu).

    An example takes part in one upload per epoch, so `uploads` is the number of epochs for an example and the number of
    batches for a client. There is no amplification by sampling, because an epoch goes through all examples. Without
    sampling this formula is exact at any sigma, while the grids of packages' accountants end where a defence of a
    single gradient begins (epsilon beyond some hundreds). Raises ValueError if delta is outside (0, 1).

    Source: Balle and Wang 2018, theorem 8; Dong, Roth and Su 2019, corollary 3.3.
    """
    from scipy.optimize import brentq  # half a second of CPU time, and few cells have such a defence
    from scipy.special import log_ndtr

    if not 0 < delta < 1:
        raise ValueError(f"gaussian_epsilon: delta must be in (0, 1), got {delta:g}")
    if noise == 0:
        return math.inf
    mu = sensitivity * math.sqrt(uploads) / noise

    def excess(epsilon: float) -> float:  # log delta(epsilon) - log delta, through logarithms: exp(epsilon) overflows
        log_upper, log_lower = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        return float(log_upper + math.log1p(-math.exp(min(log_lower - log_upper, -1e-16))) - math.log(delta))

    if excess(0.0) <= 0:
        return 0.0
    upper_bound = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    return float(brentq(excess, 0.0, upper_bound, xtol=1e-12, rtol=1e-12))


def laplace_epsilon(noise: float, uploads: int = 1, sensitivity: float = 1.0) -> float:
    """The epsilon of pure differential privacy (delta 0) under `laplace`: sensitivity * uploads / noise."""
    return math.inf if noise == 0 else sensitivity * uploads / noise


def sampled_gaussian_epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """The epsilon of DP-SGD with Poisson sampling: each step draws every example with probability `rate`.

    `noise` is sigma in units of the clipping norm; an example is present or absent. By Renyi differential privacy,

        epsilon = min over a of steps RDP(a) - (ln delta + ln a) / (a - 1) + ln((a - 1) / a),

    which is an upper bound: 39.2 at noise 0.3, rate 0.05 and 20 steps, where an accountant of privacy losses finds
    33.6. Sampling never reveals more than using all examples, so the result is at most the exact `gaussian_epsilon`.
    Raises ValueError if the rate is outside (0, 1] or delta outside (0, 1).

    Source: Mironov, Talwar and Zhang 2019; Balle et al. 2020, theorem 21.
    """
    if not 0 < rate <= 1 or not 0 < delta < 1:
        raise ValueError(f"sampled_gaussian_epsilon: rate {rate:g} must be in (0, 1], delta {delta:g} in (0, 1)")
    if noise == 0:
        return math.inf
    unsampled_epsilon = gaussian_epsilon(noise, delta, steps)
    if rate == 1:
        return unsampled_epsilon
    bounds = [
        steps * renyi(a, noise, rate) - (math.log(delta) + math.log(a)) / (a - 1) + math.log1p(-1 / a)
        for a in orders(noise)
    ]
    return max(0.0, min(unsampled_epsilon, *bounds))


def orders(noise: float) -> list[float]:
    """Orders a of the Renyi divergence: 50 for each decade of a - 1, up to 1,000 unless the noise is small."""
    from numpy import geomspace

    largest_order = 1000 if noise >= 0.5 else 60
    return [
        1.0 + float(excess_order)
        for excess_order in geomspace(0.001, largest_order, 1 + round(50 * math.log10(largest_order / 0.001)))
    ]


@functools.cache  # every round asks for the same ones
def renyi(order: float, noise: float, rate: float) -> float:
    """RDP of one step of the Gaussian mechanism, every example drawn with probability `rate` < 1: order > 1.

        RDP(a) = 1 / (a - 1) ln E[(1 - q + q exp((2 z - 1) / 2 sigma^2))^a],  z normal with deviation sigma

    by the trapezoid rule, which is exact to rounding for such a function. Its step is half of the smaller of the two
    scales: sigma of the normal density and sigma^2 of the ratio.
    """
    import numpy
    from scipy.special import logsumexp

    step = min(noise, noise * noise) / 2
    z = numpy.arange(-12 * noise, order + 12 * noise, step)  # the integrand peaks near `order`
    ratio = numpy.logaddexp(math.log1p(-rate), math.log(rate) + (2 * z - 1) / (2 * noise * noise))
    density = -z * z / (2 * noise * noise) + math.log(step / (noise * math.sqrt(2 * math.pi)))
    return max(0.0, float(logsumexp(density + order * ratio))) / (order - 1)
