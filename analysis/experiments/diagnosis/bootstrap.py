"""Means over tokens, with intervals that treat a sequence as the unit that was sampled."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from analysis.experiments.diagnosis.schema import Floats, Interval

#: Above this many sequences, random bags of whole sequences are resampled in their place: the
#: spread of a mean is the same, the cost is bounded.
MOST_UNITS = 1000
#: Stands for infinity in sums: the mean of a column that holds one is huge, then said infinite.
_HUGE = 1e290


def token_means(
    columns: dict[str, Floats],
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
        columns: name -> [N] values; a name's interval does not depend on the other columns.
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


def _unit_sums(values: Floats, weight: Floats | None, units: np.ndarray, count: int) -> Floats:
    """Weighted sums by unit; infinite ones as a huge number, which no draw turns into NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        weighted = values if weight is None else weight * values
        weighted = np.nan_to_num(weighted, nan=0.0, posinf=_HUGE, neginf=-_HUGE)
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
