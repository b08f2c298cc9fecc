r"""The upper tail of :math:`r = p/q` when the sampler q is the narrower Gaussian: exact masses.

The set :math:`\{r > t\}` is then the outside of an interval, so its probability under q and under
p are two normal tails each. Under p it is the part of the mean of r that lies above t,
:math:`\mathbb{E}_q[r\,[r > t]] = P_p(r > t)`: what a sample that has not seen r above t lacks.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from analysis.experiments.chapters.gaussian_pairs import GaussianPair


class TailMass(NamedTuple):
    """Probability of ``r > t`` under the sampler q and under p."""

    under_q: float
    under_p: float


def ratio_tail_index(pair: GaussianPair) -> float:
    r"""Exponent of the power-law tail of r under q: moments of r exist below it.

    .. math:: P_q(r > t) = t^{-\alpha + o(1)}, \qquad
        \alpha = \frac{\sigma_p^2}{\sigma_p^2 - \sigma_q^2}
        \quad (\sigma_q < \sigma_p), \text{ else } \infty

    Equation: ``ratio_tail_index``
    Sampler: :math:`x \sim q`.

    Returns:
        Above 1; ``inf`` if q is no narrower than p, where all moments exist.
    """
    excess = pair.p_std**2 - pair.q_std**2
    return pair.p_std**2 / excess if excess > 0 else math.inf


def tail_mass(pair: GaussianPair, log_threshold: float) -> TailMass:
    """Exact ``P(r > t)`` under q and p; ``log_threshold`` is log t.

    Raises:
        ValueError: if q is no narrower than p.
    """
    low, high = seen_interval(pair, log_threshold)
    if low == high:
        return TailMass(1.0, 1.0)
    return TailMass(
        _outside(low, high, pair.q_mean, pair.q_std), _outside(low, high, pair.p_mean, pair.p_std)
    )


def seen_interval(pair: GaussianPair, log_threshold: float) -> tuple[float, float]:
    """The interval where ``log r <= log_threshold``; a single point if r exceeds it everywhere.

    Raises:
        ValueError: if q is no narrower than p.
    """
    q_precision, p_precision = pair.q_std**-2, pair.p_std**-2
    excess = q_precision - p_precision
    if not excess > 0:
        raise ValueError(f"q_std must be below p_std, got {pair.q_std!r} and {pair.p_std!r}")
    # log r = lowest + excess (x - centre)^2 / 2
    centre = (q_precision * pair.q_mean - p_precision * pair.p_mean) / excess
    shift_cost = q_precision * p_precision * (pair.q_mean - pair.p_mean) ** 2 / (2 * excess)
    lowest = math.log(pair.q_std / pair.p_std) - shift_cost
    half = math.sqrt(max(0.0, 2 * (log_threshold - lowest) / excess))
    return centre - half, centre + half


def largest_seen(pair: GaussianPair, sample_size: float) -> float:
    """log t such that one of ``sample_size`` draws from q is expected to have ``r > t``."""
    return _solve(lambda log_t: tail_mass(pair, log_t).under_q - 1 / sample_size)


def unseen_mass(pair: GaussianPair, sample_size: float) -> float:
    r"""The part of the mean of r that a sample of n draws is not expected to contain.

    .. math:: u_n = P_p(r > t_n) = \mathbb{E}_q\big[r\,[r > t_n]\big], \qquad
        n\, P_q(r > t_n) = 1

    Equation: ``unseen_mass``
    Sampler: :math:`x \sim q`, n times.
    Estimates: minus the typical error of the sample mean of r, and so of k3; a rule of thumb.

    Args:
        pair: q narrower than p.
        sample_size: n, at least 2.

    Returns:
        Between 0 and 1.
    """
    return tail_mass(pair, largest_seen(pair, sample_size)).under_p


def samples_to_see(pair: GaussianPair, unseen: float) -> float:
    """The sample size at which :func:`unseen_mass` has fallen to ``unseen``."""
    log_threshold = _solve(lambda log_t: tail_mass(pair, log_t).under_p - unseen)
    return 1 / tail_mass(pair, log_threshold).under_q


def underestimate_probability(
    pair: GaussianPair, sample_size: float, *, of: Literal["k3", "r"] = "k3"
) -> float:
    r"""A proved lower bound on the probability that a sample mean falls below its expectation.

    .. math:: \Pr\big[\bar f_n < \mathbb{E}_q[f]\big] \;\ge\; \max_t \Big[1 - n P_q(r > t)
        - \frac{v_t}{v_t + n\, m_t^2}\Big], \qquad
        v_t = \mathrm{Var}_q\big[f\,[r \le t]\big], \quad m_t = \mathbb{E}_q\big[f\,[r > t]\big]

    for :math:`f = k_3`, whose expectation is the KL, or :math:`f = r`, whose expectation is 1. The
    two events differ by the error of the mean of k1.

    Equation: ``underestimate_probability``
    Sampler: :math:`x \sim q`, n times.

    Args:
        pair, sample_size: as :func:`unseen_mass`.
        of: whose mean.

    Returns:
        Between 0 and 1.
    """
    start = largest_seen(pair, sample_size)
    bounds = [
        _underestimate_bound(pair, sample_size, start + step, of) for step in np.arange(0, 8, 0.25)
    ]
    return max(0.0, *bounds)


def clip_bias(pair: GaussianPair, max_ratio: float) -> float:
    r"""Exact bias of k3_clip: the mass it cuts off.

    .. math:: \mathbb{E}_q[k_{3,\mathrm{clip}}] - \mathrm{KL}(q \Vert p)
        = -\mathbb{E}_q[(r - r_{\max})_+]
        = -\big(P_p(r > r_{\max}) - r_{\max} P_q(r > r_{\max})\big)

    Equation: ``clip_bias``
    Sampler: :math:`x \sim q`.

    Returns:
        Nats, not positive.
    """
    mass = tail_mass(pair, math.log(max_ratio))
    return -(mass.under_p - max_ratio * mass.under_q)


def _underestimate_bound(
    pair: GaussianPair, sample_size: float, log_threshold: float, of: str
) -> float:
    low, high = seen_interval(pair, log_threshold)
    x = np.linspace(low, high, 4001)
    log_q = -0.5 * ((x - pair.q_mean) / pair.q_std) ** 2 - math.log(pair.q_std)
    log_p = -0.5 * ((x - pair.p_mean) / pair.p_std) ** 2 - math.log(pair.p_std)
    log_r = log_p - log_q
    f, whole = (np.exp(log_r), 1.0) if of == "r" else (np.expm1(log_r) - log_r, pair.kl)
    density = np.exp(log_q) / math.sqrt(2 * math.pi)
    seen, second_moment = (float(np.trapezoid(density * f**power, x)) for power in (1, 2))
    variance, lacks = second_moment - seen**2, max(0.0, whole - seen)
    slack = variance / (variance + sample_size * lacks**2)
    return 1 - sample_size * tail_mass(pair, log_threshold).under_q - slack


def _outside(low: float, high: float, mean: float, std: float) -> float:
    root = std * math.sqrt(2)
    return 0.5 * (math.erfc((mean - low) / root) + math.erfc((high - mean) / root))


def _solve(decreasing) -> float:
    """The root of a decreasing function of log t, by doubling and bisection."""
    low, high = -50.0, 1.0
    while decreasing(high) > 0:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if decreasing(middle) > 0 else (low, middle)
    return high
