r"""One variant against another in a metric at equal KL: a hierarchical fit over starts and seeds.

A run of variant :math:`v`, start :math:`g` and seed :math:`s` with log KL :math:`x` has

.. math:: y = a_v + b_v x + c_v x^2 + u_g + w_s \pm \tfrac12 d_g + e,

:math:`+` for the variant and :math:`-` for the other. The curves are fixed; the start's level
:math:`u_g`, the seed's :math:`w_s`, what a start does to the difference :math:`d_g`, and the rest
:math:`e` are Gaussian. Variances are those of restricted maximum likelihood, coefficients those of
generalised least squares.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from analysis.records import statistics
from analysis.records.statistics import Interval

#: Percentiles of log KL of each variant's runs, between which two curves are compared.
CENTRAL = (10.0, 90.0)
#: Variances over the residual's: where the search begins, and the widest it looks.
FIRST_RATIOS = (0.3, 0.3, 0.1)
RATIO_BOUNDS = (1e-6, 1e3)
#: Where a variance is nearly zero the likelihood is flat: looser, the digits shown are not settled.
CONVERGED = {"ftol": 1e-14, "gtol": 1e-9}


class Fit(NamedTuple):
    """Two curves over log KL, and how sure they are."""

    coefficients: np.ndarray  #: [2, 3], of 1, x, x²; the variant, then the other; x from `centre`
    covariance: np.ndarray  #: [6, 6]
    ratios: np.ndarray  #: [3], variances of u, w and d over the residual's
    residual: float  #: variance of e
    starts: int
    seeds: int
    centre: float  #: of log KL
    low: float  #: of the log KL that both variants' central runs share
    high: float

    def difference(self, margin: float) -> dict[str, float]:
        """Mean difference over the shared log KL.

        As :func:`analysis.records.summaries.of_differences` gives it.

        NaN where the two share none. ``kl_low`` and ``kl_high`` are the ends of that range.
        """
        place = {"kl_low": np.exp(self.low), "kl_high": np.exp(self.high)}
        if not self.low < self.high:
            empty = dict.fromkeys(("mean", "low", "high", "p", "equivalent"), np.nan)
            return {**empty, "starts": self.starts, "seeds": self.seeds, **place}
        ends = np.array([self.low, self.high]) - self.centre
        powers = np.arange(1, 4)
        mean_powers = np.diff(ends[:, None] ** powers, axis=0)[0] / powers / np.diff(ends)
        contrast = np.concatenate([mean_powers, -mean_powers])
        mean = float(contrast @ self.coefficients.ravel())
        error = float(np.sqrt(contrast @ self.covariance @ contrast))
        found = statistics.of_estimate(mean, error, self.starts - 1, margin)
        return {**found, "starts": self.starts, "seeds": self.seeds, **place}

    def curve(self, which: int, log_kl: np.ndarray) -> Interval:
        """Mean of variant ``which`` (0 or 1) at log KLs, with its interval."""
        design = np.stack([np.ones_like(log_kl), log_kl - self.centre], axis=-1)
        design = np.concatenate([design, design[..., 1:] ** 2], axis=-1)
        block = slice(3 * which, 3 * which + 3)
        mean = design @ self.coefficients[which]
        error = np.sqrt(np.einsum("...i,ij,...j", design, self.covariance[block, block], design))
        reach = statistics.t_quantile(self.starts - 1) * error
        return Interval(mean, mean - reach, mean + reach)


def fit(
    runs: pd.DataFrame,
    variant: str,
    other: str,
    *,
    starts: int,
    of: str,
    metric: str,
    ratios: np.ndarray | None = None,
) -> Fit:
    """Fit the curves of two variants.

    Args:
        runs: one row per run with ``variant``, ``seed``, ``of`` (positive) and ``metric``.
        starts: how many there are: see :func:`analysis.records.statistics.start_of`.
        of: what is equal, such as ``reverse_kl``.
        metric: what is compared.
        ratios: of variances, where they are not to be searched for: those of another fit.

    Raises:
        ValueError: fewer than ``MIN_SEEDS`` starts, or a number that is not finite.
    """
    kept = runs[runs["variant"].isin((variant, other))]
    log_kl, y = np.log(kept[of].to_numpy()), kept[metric].to_numpy()
    if not (np.isfinite(log_kl).all() and np.isfinite(y).all()):
        raise ValueError(f"{variant} or {other}: {of} or {metric} is not finite and positive")
    first = (kept["variant"] == variant).to_numpy()
    seed = kept["seed"].to_numpy()
    start = statistics.start_of(seed, starts)
    groups = [np.flatnonzero(start == name) for name in np.unique(start)]
    if len(groups) < statistics.MIN_SEEDS:
        raise ValueError(f"{len(groups)} starts give no interval over starts")
    centre = float(log_kl.mean())
    x = log_kl - centre
    curve = np.stack([np.ones_like(x), x, x * x], axis=1)
    design = np.concatenate([curve * first[:, None], curve * ~first[:, None]], axis=1)
    blocks = _blocks(groups, np.column_stack([design, y]), seed, np.where(first, 0.5, -0.5))
    ratios = _best_ratios(blocks) if ratios is None else ratios
    best = _restricted(blocks, ratios)
    ends = [np.percentile(log_kl[part], CENTRAL) for part in (first, ~first)]
    return Fit(
        coefficients=best.coefficients.reshape(2, 3),
        covariance=best.covariance,
        ratios=ratios,
        residual=best.residual,
        starts=len(groups),
        seeds=len(np.unique(seed)),
        centre=centre,
        low=max(low for low, _ in ends),
        high=min(high for _, high in ends),
    )


class _Blocks(NamedTuple):
    """What the runs of each start say of its random effects: G starts share none. A start with
    fewer seeds has columns of zeros, which add nothing to any sum."""

    products: np.ndarray  #: [7, 7], sums over runs of design and y
    crossed: np.ndarray  #: [G, q, 7], of each effect with design and y
    effects: np.ndarray  #: [G, q, q], of effects with each other
    variance: np.ndarray  #: [q], which of the three variances an effect has
    count: int  #: of runs


class _Restricted(NamedTuple):
    criterion: float  #: minus twice the restricted log-likelihood, up to a constant
    coefficients: np.ndarray
    covariance: np.ndarray
    residual: float


def _best_ratios(blocks: _Blocks) -> np.ndarray:
    """[3]: variances over the residual's, by restricted maximum likelihood."""
    found = minimize(
        lambda logs: _restricted(blocks, np.exp(logs)).criterion,
        np.log(FIRST_RATIOS),
        method="L-BFGS-B",
        jac="3-point",
        bounds=[tuple(np.log(RATIO_BOUNDS))] * len(FIRST_RATIOS),
        options=CONVERGED,
    )
    return np.exp(found.x)


def _blocks(
    groups: list[np.ndarray], rows: np.ndarray, seed: np.ndarray, sign: np.ndarray
) -> _Blocks:
    seeds = max(len(np.unique(seed[group])) for group in groups)
    variance = np.array([0, *[1] * seeds, 2])
    crossed, effects = [], []
    for group in groups:
        indicator = seed[group, None] == np.unique(seed[group])
        absent = np.zeros((len(group), seeds - indicator.shape[1]))
        effect = np.column_stack([np.ones(len(group)), indicator, absent, sign[group]])
        crossed.append(effect.T @ rows[group])
        effects.append(effect.T @ effect)
    return _Blocks(rows.T @ rows, np.stack(crossed), np.stack(effects), variance, len(rows))


def _restricted(blocks: _Blocks, ratios: np.ndarray) -> _Restricted:
    r"""Generalised least squares at given ratios of variances; the residual's is profiled out.

    With :math:`Z` the effects scaled by the roots of their ratios, a start's covariance is
    :math:`1 + Z Z^\top`. Its inverse is :math:`1 - Z (1 + Z^\top Z)^{-1} Z^\top` (Woodbury) and
    its determinant that of :math:`1 + Z^\top Z`, which is small.
    """
    scale = np.sqrt(ratios[blocks.variance])[:, None]
    factor = np.linalg.cholesky(np.eye(len(scale)) + scale * blocks.effects * scale.T)
    explained = np.linalg.solve(factor, scale * blocks.crossed)
    products = blocks.products - np.einsum("gqi,gqj->ij", explained, explained)
    information, moment, squares = products[:-1, :-1], products[:-1, -1], products[-1, -1]
    log_det = 2.0 * np.log(np.diagonal(factor, axis1=-2, axis2=-1)).sum()
    coefficients = np.linalg.solve(information, moment)
    freedom = blocks.count - len(moment)
    residual = (squares - moment @ coefficients) / freedom
    _, log_information = np.linalg.slogdet(information)
    criterion = freedom * np.log(residual) + log_det + log_information
    return _Restricted(criterion, coefficients, residual * np.linalg.inv(information), residual)
