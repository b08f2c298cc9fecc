"""What seeds say: the mean of paired differences, its t interval, equivalence, multiplicity.

One statistic and one interval for every comparison of recorded runs, chosen by measured coverage
(:mod:`analysis.studies.interval_coverage`). Margins were set after the runs were known; they
bind what is recorded next.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import nctdtrinc, stdtr, stdtrit

from kl_term.plain_checks import check_positive

LEVEL = 0.95
#: Fewer seeds than this give no interval and no p value.
MIN_SEEDS = 4
#: Two accuracies this close count as one.
ACCURACY_MARGIN = 0.03
#: So do two KLs whose ratio is below this, either way round.
KL_RATIO_MARGIN = 1.25


class Interval(NamedTuple):
    """A mean over seeds and where it may lie."""

    mean: float
    low: float
    high: float

    @property
    def above(self) -> bool:
        """Is zero below the whole interval?"""
        return self.low > 0.0

    @property
    def below(self) -> bool:
        """Is the whole interval below zero?"""
        return self.high < 0.0

    def figures(self, name: str) -> dict[str, float]:
        """The three numbers, named."""
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}


def interval(values: np.ndarray, *, level: float = LEVEL) -> Interval:
    r"""Mean over the last axis and its t interval.

    .. math:: \bar x \pm t_{S-1,\,(1+c)/2}\; s / \sqrt S

    Source: Student (1908). Where seeds share a few starts, give one mean a start
    (:func:`of_starts`): those are what is independent.

    Args:
        values: [..., S], one a seed. A NaN (a diverged seed) makes all three NaN.
        level: the coverage :math:`c`.
    """
    mean, error, freedom = moments(values)
    reach = t_quantile(freedom, level=level) * error
    return Interval(mean, mean - reach, mean + reach)


def p_value(values: np.ndarray) -> np.ndarray:
    """Two-sided p value of a mean of zero over the seeds [..., S]: below 0.05 exactly where
    :func:`interval` excludes it."""
    return _p_zero(*moments(values))


def equivalence(values: np.ndarray, margin: float) -> np.ndarray:
    r"""P value of two one-sided tests: small where the mean lies within ``margin`` of zero.

    .. math:: p = \max\big(F_{S-1}(-(m + \bar x) / e),\ F_{S-1}(-(m - \bar x) / e)\big)

    Source: Schuirmann (1987). At 0.05 it says so exactly where the 90% interval lies inside.

    Args:
        values: [..., S].
        margin: :math:`m`, stated before the data are seen.

    Raises:
        ValueError: the margin is not positive.
    """
    return _p_apart(*moments(values), margin)


def of_estimate(
    mean: float, error: float, freedom: int, margin: float | None = None
) -> dict[str, float]:
    """``mean``, ``low``, ``high``, ``p`` and ``equivalent`` of an estimate with a standard error.

    Args:
        freedom: of t: of an estimate over starts, one fewer than there are.
        margin: of :func:`equivalence`; None gives NaN for ``equivalent``.

    Raises:
        ValueError: the error is negative, or the margin is not positive.
    """
    if error < 0.0:
        raise ValueError(f"error must not be negative, got {error}")
    reach = t_quantile(freedom) * error
    p = _p_zero(mean, error, freedom)
    same = np.nan if margin is None else _p_apart(mean, error, freedom, margin)
    ends = {"mean": mean, "low": mean - reach, "high": mean + reach}
    return ends | {"p": float(p), "equivalent": float(same)}


def detectable(deviation: float, count: int, *, power: float = 0.8) -> float:
    r"""The mean that so many seeds tell from zero, at 0.05, in a share ``power`` of experiments.

    .. math:: P\big(T_{S-1,\;\delta\sqrt S/s} > t_{S-1,\,0.975}\big) = \text{power}

    Args:
        deviation: :math:`s`, of a seed's difference.
        count: :math:`S`.
    """
    freedom, edge = count - 1, t_quantile(count - 1)
    return float(nctdtrinc(freedom, 1.0 - power, edge) * deviation / np.sqrt(count))


def t_quantile(freedom: int, *, level: float = LEVEL) -> float:
    """Standard errors from the mean to the end of its interval; NaN of no degree of freedom."""
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    return float(stdtrit(freedom, (1.0 + level) / 2.0))


def start_of(seed: np.ndarray, starts: int) -> np.ndarray:
    """Which of the starts a seed's run has, as the trainer takes it: the seed modulo their number.

    Args:
        seed: one or several, in an array or a column.
        starts: how many there are, :attr:`~analysis.records.config.StartConfig.count`.
    """
    return seed % starts


def of_starts(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Mean of the seeds [..., S] of each start [..., G]; ``starts`` [S] names the seed's."""
    values, starts = _numbers(values), np.asarray(starts)
    if starts.shape != values.shape[-1:]:
        raise ValueError(f"starts has shape {starts.shape} but values has {values.shape}")
    names = np.unique(starts)
    return np.stack([values[..., starts == name].mean(axis=-1) for name in names], axis=-1)


def verdict(p: float, equivalent: float, comparisons: int) -> str:
    """What a page may say of one of its comparisons.

    ``differs`` where ``p`` stands Bonferroni over all ``comparisons`` of the page; else
    ``equivalent`` where two one-sided tests say so at 0.05; else ``suggestive`` where ``p`` is
    below 0.05 alone; else ``unresolved``, and ``not estimable`` where there is no number.

    Raises:
        ValueError: ``p`` is no probability, or there is no comparison.
    """
    if p < 0.0 or p > 1.0:
        raise ValueError(f"p must be between 0 and 1, got {p}")
    if comparisons < 1:
        raise ValueError(f"comparisons must be at least 1, got {comparisons}")
    if np.isnan(p):
        return "not estimable"
    if p * comparisons < 1.0 - LEVEL:
        return "differs"
    if equivalent < 1.0 - LEVEL:
        return "equivalent"
    return "suggestive" if p < 1.0 - LEVEL else "unresolved"


def moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Mean over the last axis, its standard error and degrees of freedom; NaN of too few."""
    values = _numbers(values)
    count, mean = values.shape[-1], values.mean(axis=-1)
    enough = count >= MIN_SEEDS
    error = values.std(axis=-1, ddof=1) / np.sqrt(count) if enough else np.nan * mean
    return mean, error, count - 1


def _p_zero(mean: np.ndarray, error: np.ndarray, freedom: int) -> np.ndarray:
    """P value of a mean of zero."""
    return 2.0 * stdtr(freedom, -_over(np.abs(mean), error))


def _p_apart(mean: np.ndarray, error: np.ndarray, freedom: int, margin: float) -> np.ndarray:
    """P value of a mean that is ``margin`` or more from zero."""
    check_positive("margin", margin)
    return stdtr(freedom, -_over(margin - np.abs(mean), error))


def _numbers(values: np.ndarray) -> np.ndarray:
    """The values as real numbers with an axis of seeds."""
    found = np.asarray(values)
    if found.ndim == 0 or found.dtype.kind not in "iuf":
        raise ValueError(f"values must be real numbers [..., S], got {found.dtype} {found.shape}")
    return found


def _over(numerator: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Their ratio; of equal seeds, whose error is zero, an infinity of its sign, or 0 / 0 = 0."""
    numerator, error = np.broadcast_arrays(numerator, error)
    exact = np.where(numerator == 0.0, 0.0, np.copysign(np.inf, numerator))
    return np.divide(numerator, error, out=exact, where=error != 0.0)
