"""Means over tokens with their intervals, and how heavy the upper tail of a ratio is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

from analysis.diagnosis.schema import Floats, Interval, Tail

#: Above this many sequences, random bags of whole sequences are resampled in their place: the
#: spread of a mean is the same, the cost is bounded.
MOST_UNITS = 1000
#: Stands for infinity in sums: the mean of a column that holds one is huge, then said infinite.
_HUGE = 1e290


def token_means(
    columns: Mapping[str, Floats | Callable[[], Floats]],
    sequence: np.ndarray,
    *,
    resamples: int,
    seed: int,
    weight: Floats | None = None,
) -> dict[str, Interval]:
    r"""Mean of each column over tokens with 95% bootstrap intervals over sequences.

    .. math:: \hat m = \frac{\sum_i \sum_t w_{it} x_{it}}{\sum_i \sum_t w_{it}}, \qquad
        i \sim \text{Uniform, with replacement}

    Args:
        columns: name -> [N] values, or what makes them when they are summed; a name's interval
            does not depend on the other columns.
        sequence: [N], codes from 0.
        resamples: bootstrap resamples.
        seed: of the resampling.
        weight: [N]; ones by default.
    """
    units, count = _units(sequence, seed)
    denominator = np.bincount(units, weights=weight, minlength=count)
    numerators = np.stack(
        [_unit_sums(values, weight, units, count) for values in columns.values()], axis=1
    )
    stacked = np.concatenate([numerators, denominator[:, None]], axis=1)
    resampled = _draws(count, resamples, seed) @ stacked
    total = resampled[:, -1:]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        means = resampled[:, :-1] / total
        centre = numerators.sum(0) / denominator.sum()
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return {
        name: Interval(value=_infinite(centre[i]), low=_infinite(low[i]), high=_infinite(high[i]))
        for i, name in enumerate(columns)
    }


def _unit_sums(
    column: Floats | Callable[[], Floats],
    weight: Floats | None,
    units: np.ndarray,
    count: int,
) -> Floats:
    """Weighted sums by unit; infinite ones as a huge number, which no draw turns into NaN.

    NaN stays visible; an infinite value of weight zero counts as zero.
    """
    values = column() if callable(column) else column
    with np.errstate(invalid="ignore", over="ignore"):
        weighted = values if weight is None else np.where(weight == 0.0, 0.0, weight * values)
        weighted = np.nan_to_num(weighted, nan=np.nan, posinf=_HUGE, neginf=-_HUGE)
        del values
        return np.clip(np.bincount(units, weights=weighted, minlength=count), -_HUGE, _HUGE)


def _infinite(value: float) -> float:
    """The number, or infinity where an infinite sum went into it."""
    return float(np.copysign(np.inf, value)) if abs(value) > _HUGE * 1e-20 else float(value)


def _units(sequence: np.ndarray, seed: int) -> tuple[np.ndarray, int]:
    count = int(sequence.max()) + 1
    if count <= MOST_UNITS:
        return sequence, count
    bags = np.random.default_rng([seed, 1]).permutation(count) % MOST_UNITS
    return bags[sequence], MOST_UNITS


@lru_cache(maxsize=1)
def _draws(count: int, resamples: int, seed: int) -> Floats:
    """[resamples, count], how often each unit is drawn; the same for every mean of a dump."""
    generator = np.random.default_rng(seed)
    times = generator.multinomial(count, np.full(count, 1 / count), size=resamples)
    return times.astype(np.float64)


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
        fitted_with="nothing; pip install -e '.[diagnose]'",
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
