r"""What a sample lacks that has not seen the tail of r.

When the sampler q is the narrower Gaussian, the set :math:`r > t` is the outside of an interval, so
its probability under q and under p are two normal tails each. Under p it is the part of the mean of
r that lies above t, :math:`\mathbb{E}_q[r\,[r > t]] = P_p(r > t)`: what a sample lacks that has not
seen r above t.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy import optimize, stats
from scipy.special import ndtr

from analysis.evidence.gaussian_pairs import GaussianPair, log_probs
from kl_term import style

#: Where log t is looked for: from where every sample exceeds t to the largest of floats.
LOG_T = (-50.0, 700.0)


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
    """Exact ``P(r > t)`` under q and p; ``log_threshold`` is log t, and q narrower than p."""
    low, high = seen_interval(pair, log_threshold)
    return TailMass(
        *(
            ndtr((low - mean) / std) + ndtr((mean - high) / std)
            for mean, std in ((pair.q_mean, pair.q_std), (pair.p_mean, pair.p_std))
        )
    )


def seen_interval(pair: GaussianPair, log_threshold: float) -> tuple[float, float]:
    """The interval where ``log r <= log_threshold``, a single point if there is none; q must be
    the narrower one."""
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
    return optimize.brentq(lambda log_t: tail_mass(pair, log_t).under_q - 1 / sample_size, *LOG_T)


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
    log_t = optimize.brentq(lambda log_t: tail_mass(pair, log_t).under_p - unseen, *LOG_T)
    return 1 / tail_mass(pair, log_t).under_q


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
    bounds = [0.0]
    for log_threshold in largest_seen(pair, sample_size) + np.arange(0, 8, 0.25):
        x = np.linspace(*seen_interval(pair, log_threshold), 4001)
        log_q = stats.norm.logpdf(x, pair.q_mean, pair.q_std)
        log_r = stats.norm.logpdf(x, pair.p_mean, pair.p_std) - log_q
        f, whole = (np.exp(log_r), 1.0) if of == "r" else (np.expm1(log_r) - log_r, pair.kl)
        seen, second_moment = (np.trapezoid(np.exp(log_q) * f**power, x) for power in (1, 2))
        variance, lacks = second_moment - seen**2, max(0.0, whole - seen)
        slack = variance / (variance + sample_size * lacks**2)
        above = sample_size * tail_mass(pair, log_threshold).under_q
        bounds.append(1 - above - slack)
    return max(bounds)


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


def plot_seen(pair: GaussianPair, interval: tuple[float, float], unseen: float) -> Figure:
    """Densities of sampler and reference, and the part of the reference no sample is drawn from."""
    z = torch.linspace(-24, 22, 2401, dtype=torch.float64)
    x = (pair.q_mean + pair.q_std * z).numpy()
    q, p = (density.exp().numpy() for density in log_probs(pair, z))
    figure, axes = style.subplots(height=3.4)
    colour, top = style.COLOURS["forward"], q.max()
    axes.plot(x, q, color=style.COLOURS["exact"])
    axes.plot(x, p, color=colour)
    outside = (x < interval[0]) | (x > interval[1])
    axes.fill_between(x, p, where=outside, color=colour, alpha=0.35, linewidth=0)
    for edge in interval:
        style.guide(axes, x=edge)
    line = {"arrowprops": {"arrowstyle": "-", "color": style.QUIET}}
    axes.annotate("policy $q$", (pair.q_mean + 1.2 * pair.q_std, 0.62 * top))
    of_reference = {"xytext": (-3.4, 0.55), "color": style.text_colour(colour)}
    axes.annotate("reference $p$", (-1.75, 0.11), **of_reference, **line)
    text = f"{unseen:.0%} of the reference\nlies out here"
    axes.annotate(text, (1.3, 0.1), xytext=(1.15, 0.75), **line)
    axes.set(xlim=(-3.6, 3.6), ylim=(0, 1.08 * top), ylabel="probability density")
    axes.set_xlabel("$x$ (standard deviations of the reference)")
    return figure
