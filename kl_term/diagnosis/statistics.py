"""Means over tokens with their intervals, and how heavy the upper tail of a ratio is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

from kl_term.diagnosis.schema import Floats, Interval, Tail

#: Above this many sequences, random bags of whole sequences are resampled in their place: the
#: spread of a mean is the same, the cost is bounded.
MOST_UNITS = 1000
#: Tokens that are worked on at a time: a million of them take no further columns of a million.
BLOCK = 1 << 17
#: Stands for infinity in sums: the mean of a column that holds one is huge, then said infinite.
_HUGE = 1e290


def token_means(
    columns: Mapping[str, Floats | Callable[[slice], Floats]],
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
        columns: name -> [N] values, or what makes those of a slice; a name's interval does not
            depend on the other columns.
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
    column: Floats | Callable[[slice], Floats],
    weight: Floats | None,
    units: np.ndarray,
    count: int,
) -> Floats:
    """Weighted sums by unit; infinite ones as a huge number, which no draw turns into NaN.

    NaN stays visible; an infinite value of weight zero counts as zero.
    """
    sums = np.zeros(count)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(units), BLOCK):
            block = slice(start, start + BLOCK)
            values = column(block) if callable(column) else column[block]
            if weight is not None:
                values = np.where(weight[block] == 0.0, 0.0, weight[block] * values)
            values = np.nan_to_num(values, nan=np.nan, posinf=_HUGE, neginf=-_HUGE)
            sums += np.bincount(units[block], weights=values, minlength=count)
        return np.clip(sums, -_HUGE, _HUGE)


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
#: Of the grid of scales that the posterior mean is taken over, as PSIS does.
_PRIOR_SCALES, _FEWEST_SCALES = 3, 30
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
    """Tail index of ``exp(log_weights)``, fitted to its largest values as PSIS does.

    Args:
        ratio: what the report calls it.
        log_weights: [N], finite.

    Source: Vehtari et al. (2024).
    """
    count = len(log_weights)
    threshold = trusted_k(count)
    if count < FEWEST_TOKENS:
        return Tail(ratio=ratio, k=None, threshold=threshold, unfitted="too few tokens")
    first = count - int(min(0.2 * count, 3 * math.sqrt(count)))
    top = np.sort(np.partition(log_weights, first - 1)[first - 1 :])
    excess = np.exp(top[1:] - top[-1]) - np.exp(top[0] - top[-1])
    excess = excess[excess > 0]
    if top[-1] - top[1] < _CONSTANT or len(excess) < 5:
        return Tail(ratio=ratio, k=None, threshold=threshold, unfitted="largest values equal")
    return Tail(ratio=ratio, k=_pareto_shape(excess), threshold=threshold)


def _pareto_shape(excess: Floats) -> float:
    r"""Shape k of a generalised Pareto distribution, from ascending positive values [M].

    .. math:: k = \frac{1}{M} \sum_j \log(1 - \hat b x_j), \qquad
        \hat b = \sum_i w_i b_i, \quad w_i \propto L(b_i)

    with the profile likelihood L over a grid of inverse scales b, then shrunk by the prior on k.
    """
    count = len(excess)
    grid = _FEWEST_SCALES + int(math.sqrt(count))
    quartile = excess[int(count / 4 + 0.5) - 1]
    scale = 1 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))
    scale = scale / (_PRIOR_SCALES * quartile) + 1 / excess[-1]
    shape = np.log1p(-scale[:, None] * excess).mean(1)
    likelihood = count * (np.log(-scale / shape) - shape - 1)
    weight = np.exp(likelihood - likelihood.max())
    k = float(np.log1p(-(weight @ scale / weight.sum()) * excess).mean())
    return (count * k + _PRIOR_COUNT * _PRIOR_K) / (count + _PRIOR_COUNT)
