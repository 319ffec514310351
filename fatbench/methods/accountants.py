"""What noise buys: epsilon of (epsilon, delta) differential privacy over a whole run.

gaussian_epsilon(1.0, 1e-5, uploads=10)                  no sampling, exact
sampled_gaussian_epsilon(1.0, 0.01, 1000, 1e-5)          every example is drawn with probability 0.01 in each step
"""

from __future__ import annotations

import math


def gaussian_epsilon(noise: float, delta: float, uploads: int = 1, sensitivity: float = 1.0) -> float:
    """The epsilon of (epsilon, delta) differential privacy that `uploads` uploads under `gaussian` give away. Exact.

    `noise` is sigma in units of the clipping norm. `sensitivity` 1: an upload is there or is not; 2: the examples
    behind it are replaced by any others. Composing k Gaussian mechanisms is one with mu = sensitivity sqrt(k) / sigma,
    and

        delta = Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu).

    An example takes part in one upload per epoch, so `uploads` is the number of epochs for an example and the number of
    batches for a client. No amplification by sampling: an epoch goes through all examples. A formula and not a
    package's accountant, because without sampling the formula is exact at any sigma, while the accountants' grids and
    orders end where a defence of a single gradient begins (epsilon beyond some hundreds). ValueError: delta outside (0,
    1).

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
        first, second = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        return float(first + math.log1p(-math.exp(min(second - first, -1e-16))) - math.log(delta))

    if excess(0.0) <= 0:
        return 0.0
    top = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    return float(brentq(excess, 0.0, top, xtol=1e-12, rtol=1e-12))


def laplace_epsilon(noise: float, uploads: int = 1, sensitivity: float = 1.0) -> float:
    """The epsilon of pure differential privacy (delta 0) under `laplace`: sensitivity * uploads / noise."""
    return math.inf if noise == 0 else sensitivity * uploads / noise


ORDERS = range(2, 64)  # of the Renyi divergence


def sampled_gaussian_epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """The epsilon of DP-SGD with Poisson sampling: each step draws every example with probability `rate`.

    `noise` is sigma in units of the clipping norm; an example is there or is not. Renyi differential privacy at the
    whole ORDERS alone:

        RDP(a) = 1 / (a - 1) ln sum_i C(a, i) (1 - q)^(a - i) q^i exp((i^2 - i) / 2 sigma^2),
        epsilon = min over a of steps RDP(a) - (ln delta + ln a) / (a - 1) + ln((a - 1) / a),

    an upper bound that is 0.3 % (q = 0.01) to 1.3 % above opacus's, which takes fractional orders too. At rate 1 the
    exact `gaussian_epsilon`. ValueError: a rate outside (0, 1], delta outside (0, 1).

    Source: Mironov, Talwar and Zhang 2019, section 3.3; Balle et al. 2020, theorem 21.
    """
    if not 0 < rate <= 1 or not 0 < delta < 1:
        raise ValueError(f"sampled_gaussian_epsilon: rate {rate:g} must be in (0, 1], delta {delta:g} in (0, 1)")
    if rate == 1:
        return gaussian_epsilon(noise, delta, steps)
    if noise == 0:
        return math.inf
    found = [
        steps * renyi(a, noise, rate) - (math.log(delta) + math.log(a)) / (a - 1) + math.log((a - 1) / a)
        for a in ORDERS
    ]
    return max(0.0, min(found))


def renyi(order: int, noise: float, rate: float) -> float:
    """RDP of one step of the Gaussian mechanism at a whole order, every example drawn with probability `rate` < 1."""
    terms = [
        math.log(math.comb(order, i))
        + (order - i) * math.log1p(-rate)
        + i * math.log(rate)
        + (i * i - i) / (2 * noise * noise)
        for i in range(order + 1)
    ]
    top = max(terms)
    return (top + math.log(math.fsum(math.exp(term - top) for term in terms))) / (order - 1)
