"""How heavy the upper tail of a ratio is: the Pareto-smoothed tail index."""

from __future__ import annotations

import math

import numpy as np

from analysis.experiments.diagnosis.schema import Floats, Tail

#: Up to here PSIS trusts a mean whatever the sample size (Vehtari et al. 2024): the theory needs
#: k < 1 for the mean and k < 1/2 for the variance to exist; 0.7 is where convergence of practical
#: samples is still seen.
LARGEST_TRUSTED_K = 0.7
#: From here on the variance of the ratio is infinite, and its sample mean is low more often than
#: not because the tail was not seen.
INFINITE_VARIANCE_K = 0.5
#: Fewer counted tokens have too short a tail (five exceedances) to fit.
FEWEST_TOKENS = 100
#: The weakly informative prior of PSIS: ten observations at k = 1/2.
_PRIOR_COUNT, _PRIOR_K = 10, 0.5
#: Largest log-ratios that differ by less than this are one atom: there is no tail to fit.
_CONSTANT = 1e-9


def trusted_k(tokens: int) -> float:
    r"""The largest tail index at which a mean over so many tokens can be trusted.

    .. math:: k_{\max} = \min\big(1 - 1/\log_{10} n,\; 0.7\big)

    Source: Vehtari et al. (2024).
    """
    return min(1 - 1 / math.log10(tokens), LARGEST_TRUSTED_K) if tokens > 10 else 0.0


def infinite_variance(tail: Tail | None) -> bool:
    """Is the tail known to be so heavy that the ratio's variance is infinite?"""
    return tail is not None and tail.k is not None and tail.k > INFINITE_VARIANCE_K


def tail_index(ratio: str, log_weights: Floats) -> Tail:
    """Tail index of ``exp(log_weights)``, by arviz-stats if installed, else by scipy.

    Args:
        ratio: what the report calls it.
        log_weights: [N], finite.
    """
    threshold = trusted_k(len(log_weights))
    if len(log_weights) < FEWEST_TOKENS:
        return Tail(ratio=ratio, k=None, threshold=threshold, fitted_with="too few tokens")
    top = np.partition(log_weights, len(log_weights) - _tail_size(len(log_weights)))
    if np.ptp(top[len(log_weights) - _tail_size(len(log_weights)) :]) < _CONSTANT:
        return Tail(ratio=ratio, k=None, threshold=threshold, fitted_with="largest values equal")
    for name, fit in (("arviz-stats", _with_arviz), ("scipy", _with_scipy)):
        try:
            k = fit(log_weights)
        except (ImportError, FloatingPointError):  # not installed; no fit to tied values
            continue
        if not math.isfinite(k):
            continue
        return Tail(ratio=ratio, k=k, threshold=threshold, fitted_with=name)
    return Tail(
        ratio=ratio,
        k=None,
        threshold=threshold,
        fitted_with="nothing; pip install 'kl-term[diagnose]'",
    )


def _tail_size(count: int) -> int:
    """How many of the largest weights PSIS fits."""
    return math.ceil(min(0.2 * count, 3 * math.sqrt(count)))


def _with_arviz(log_weights: Floats) -> float:
    from arviz_stats.base import array_stats

    # Its argument is the log-likelihood of leave-one-out: minus the log-weight.
    with np.errstate(invalid="raise", divide="raise"):
        _, k = array_stats.psislw(-log_weights)
    return float(k)


def _with_scipy(log_weights: Floats) -> float:
    """The same tail by maximum likelihood, shrunk by the same prior."""
    from scipy.stats import genpareto

    count, size = len(log_weights), _tail_size(len(log_weights))
    top = np.sort(np.partition(log_weights, count - size - 1)[count - size - 1 :])
    weights = np.exp(top - top[-1])
    excess = weights[1:] - weights[0]
    excess = excess[excess > 0]
    k, _, _ = genpareto.fit(excess / excess.mean(), floc=0)
    return float((len(excess) * k + _PRIOR_COUNT * _PRIOR_K) / (len(excess) + _PRIOR_COUNT))
