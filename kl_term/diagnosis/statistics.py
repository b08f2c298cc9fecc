"""Means over tokens with their intervals, and how heavy the upper tail of a ratio is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from kl_term.diagnosis.schema import Floats, Interval, Tail

#: Fewer units have too few different resamples.
FEWEST_RESAMPLED = 4
#: Times Student's quantile that the studentised bootstrap may reach where units are few.
LARGEST_STUDENTISED = 3.0
#: Above this many units, random bags of whole units are resampled in their place: the
#: spread of a mean is the same, the cost is bounded.
MOST_UNITS = 1000
#: Tokens that are worked on at a time: a million of them take no further columns of a million.
BLOCK = 1 << 17
#: Stands for infinity in sums: the mean of a column that holds one is huge, then said infinite.
_HUGE = 1e290
#: Sums from here on have squares that overflow: their interval is that of resampled means.
_LARGEST_SQUARED = 1e150


def token_means(
    columns: Mapping[str, Floats | Callable[[slice], Floats]],
    unit: np.ndarray,
    *,
    resamples: int,
    seed: int,
    look: int = 0,
    weight: Floats | None = None,
) -> dict[str, Interval]:
    r"""Mean of each column over tokens with a 95% interval over what was drawn anew.

    .. math:: \hat m = \frac{\sum_i \sum_t w_{it} x_{it}}{\sum_i \sum_t w_{it}} = \frac{S}{N},
        \qquad s^2 = \frac{C}{C - 1} \sum_{i=1}^{C} \Big(\frac{S_i - \hat m N_i}{N}\Big)^2

    The interval is the hull of Student's, with C - 1 degrees of freedom, and that of the
    bootstrap's studentised mean, which knows skewness but nothing of what no unit shows; of fewer
    than four units it is Student's alone.

    Args:
        columns: name -> [N] values, or what makes those of a slice; a name's interval does not
            depend on the other columns.
        unit: [N], codes from 0: of prompts or completions, see :mod:`kl_term.diagnosis.units`.
        resamples: bootstrap resamples.
        seed: of the resampling.
        look: 0, or the number j of a look at a run that is looked at again and again: its intervals
            err with probability :math:`0.05 \cdot 6 / (\pi j)^2`, all looks together with 0.05.
        weight: [N]; ones by default.
    """
    units, count = _units(unit, seed)
    denominator = np.bincount(units, weights=weight, minlength=count)
    numerators = np.stack(
        [_unit_sums(values, weight, units, count) for values in columns.values()], axis=1
    )
    total = denominator.sum()
    draws = _draws(count, resamples, seed)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        centre = numerators.sum(0) / total
        low, high = _interval(numerators, denominator, draws)
        wider = _looked(look)
        low, high = centre - wider * (centre - low), centre + wider * (high - centre)
        low = np.where((numerators >= 0).all(0), np.maximum(low, 0.0), low)
        huge = np.abs(numerators).max(0) > _LARGEST_SQUARED
        if huge.any():
            means = (draws @ numerators) / (draws @ denominator)[:, None]
            ends = np.percentile(means, [2.5, 97.5], axis=0)
            low, high = (
                np.where(huge, end, own) for end, own in zip(ends, (low, high), strict=True)
            )
    return {
        name: Interval(value=_infinite(centre[i]), low=_infinite(low[i]), high=_infinite(high[i]))
        for i, name in enumerate(columns)
    }


def _interval(numerators: Floats, denominator: Floats, draws: Floats) -> tuple[Floats, Floats]:
    """[columns], twice: the ends of the interval of each ratio of sums."""
    count, total = len(denominator), denominator.sum()
    centre = numerators.sum(0) / total
    if count < 2:
        return np.full_like(centre, -np.inf), np.full_like(centre, np.inf)
    left = numerators - centre * denominator[:, None]  # of each unit; sums to zero
    error = np.sqrt((left**2).sum(0) * count / (count - 1)) / total
    reach = student(count - 1) * error
    low, high = centre - reach, centre + reach
    if count < FEWEST_RESAMPLED:
        return low, high
    sums = draws @ np.concatenate([left, left**2, left * denominator[:, None]], axis=1)
    move, square, cross = np.split(sums, 3, axis=1)
    drawn = (draws @ denominator)[:, None]
    move = move / drawn
    spread = square - 2 * move * cross + move**2 * (draws @ denominator**2)[:, None]
    errors = np.sqrt(np.maximum(spread, 0.0) * count / (count - 1)) / drawn
    known = errors > 1e-6 * np.abs(move)  # of one unit drawn again and again it is rounding
    studentised = np.divide(move, errors, out=np.zeros_like(move), where=known)
    least, largest = np.percentile(studentised, [2.5, 97.5], axis=0)
    most = LARGEST_STUDENTISED * student(count - 1)
    least, largest = np.maximum(least, -most), np.minimum(largest, most)
    return np.minimum(low, centre - largest * error), np.maximum(high, centre - least * error)


def student(freedom: int, error: float = 0.05) -> float:
    """Two-sided quantile of Student's t; from three degrees on by Hill's expansion (1e-2)."""
    if freedom == 1:
        return math.tan(math.pi * (1 - error) / 2)
    if freedom == 2:
        inside = 1 - error
        return inside * math.sqrt(2 / (1 - inside**2))
    z = NormalDist().inv_cdf(1 - error / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (k + 1) for k, term in enumerate(terms))


def _looked(look: int) -> float:
    """How much wider an interval is at the j-th of many looks than at a single one."""
    if look < 1:
        return 1.0
    normal = NormalDist()
    error = 0.05 * 6 / (math.pi * look) ** 2
    return normal.inv_cdf(1 - error / 2) / normal.inv_cdf(0.975)


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
            if not np.isfinite(values).all():
                values = np.nan_to_num(values, nan=np.nan, posinf=_HUGE, neginf=-_HUGE)
            sums += np.bincount(units[block], weights=values, minlength=count)
        return np.clip(sums, -_HUGE, _HUGE)


def sampled_kl(log_ratio: Floats) -> float:
    r"""Mean of :math:`e^d - 1 - d`, d = log(b/a) at samples of a: k3 of KL(a || b), nats."""
    with np.errstate(over="ignore"):
        return float(np.mean(np.expm1(log_ratio) - log_ratio))


def group_means(values: Floats, group: np.ndarray) -> Floats:
    """The mean of each group; the groups are numbered from 0, and none is empty."""
    return np.bincount(group, weights=values) / np.bincount(group)


def centred(values: Floats, group: np.ndarray) -> Floats:
    """Values less the mean of their group; the groups are numbered from 0, and none is empty."""
    return values - group_means(values, group)[group]


def medians(values: Floats, group: np.ndarray, count: int) -> Floats:
    """The median of each group, the upper one of an even number; NaN where there is no value.

    Args:
        values: [N].
        group: [N], whole numbers from 0.
        count: of groups.
    """
    ordered = values[np.argsort(group, kind="stable")]
    ends = np.cumsum(np.bincount(group, minlength=count))
    found = np.full(count, np.nan)
    for index, part in enumerate(np.split(ordered, ends[:-1])):
        if len(part):
            found[index] = np.partition(part, len(part) // 2)[len(part) // 2]
    return found


def _infinite(value: float) -> float:
    """The number, or infinity where an infinite sum went into it."""
    return float(np.copysign(np.inf, value)) if abs(value) > _HUGE * 1e-20 else float(value)


def _units(sequence: np.ndarray, seed: int) -> tuple[np.ndarray, int]:
    count = int(sequence.max()) + 1
    if count <= MOST_UNITS:
        return sequence, count
    bags = np.random.default_rng([seed, 1]).permutation(count) % MOST_UNITS
    return bags[sequence], MOST_UNITS


@lru_cache(maxsize=4)  # of prompts, of completions, of those in the first and in the last steps
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
