"""What seeds say: interquartile means with bootstrap bands, paired differences, fronts.

Arms of one preset share prompts and sampling noise seed by seed, so two arms are compared seed by
seed. All intervals are 95% percentile bootstraps over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd

RESAMPLES = 2000
LEVEL = 0.95
#: Fewer seeds than this give no interval.
MIN_SEEDS = 4


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    r"""Mean of the middle half of the last axis: as robust as a median, nearly as sharp as a mean.

    .. math:: \mathrm{IQM}(x) = \frac{1}{S - 2k} \sum_{i=k+1}^{S-k} x_{(i)}, \qquad
        k = \lfloor S / 4 \rfloor

    Source: Agarwal et al. (2021); a quarter is cut at each end, rounded down.

    Args:
        values: [..., S], one a seed. A NaN (a diverged seed) makes the result NaN.
    """
    cut = values.shape[-1] // 4
    ordered = np.sort(values, axis=-1)  # NaN last
    middle = ordered[..., cut : values.shape[-1] - cut].mean(axis=-1)
    return np.where(np.isnan(values).any(axis=-1), np.nan, middle)


def bootstrap(
    values: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray] = interquartile_mean,
    *,
    level: float = LEVEL,
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile interval of a statistic of rows [R, S] over S seeds, resampled together.

    A row with a NaN (a diverged seed) has a NaN interval: the others alone would look too good.
    """
    seeds = values.shape[1]
    picks = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))
    drawn = statistic(values[:, picks])  # (R, resamples)
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(drawn, [tail, 100.0 - tail], axis=1)
    return low, high


def by_arm(table: pd.DataFrame, metrics: Iterable[str]) -> pd.DataFrame:
    """Interquartile mean of metrics per arm, beta and (where there is one) update, with its band.

    Args:
        table: of :mod:`analysis.experiments.ablations.ablation`: curves, or one row per member.

    Returns:
        One row per arm, beta, update and metric: ``iqm``, ``low``, ``high``, ``seeds``.
    """
    keys = ["arm", "beta", *(["update"] if "update" in table else [])]
    parts = []
    for metric in metrics:
        wide = table.pivot(index=keys, columns="seed", values=metric)
        wide = wide.reindex(pd.MultiIndex.from_frame(table[keys].drop_duplicates()))
        values = wide.to_numpy()
        low, high = bootstrap(values)
        part = {"metric": metric, "iqm": interquartile_mean(values), "low": low, "high": high}
        parts.append(pd.DataFrame(part, wide.index).assign(seeds=values.shape[1]).reset_index())
    return pd.concat(parts, ignore_index=True)


def paired(
    finals: pd.DataFrame, pairs: Sequence[tuple[str, str, str]], *, beta: float | None = None
) -> pd.DataFrame:
    """Arm minus other arm in a metric, taken per seed: interquartile mean and band.

    Args:
        finals: one row per member.
        pairs: (arm, other arm, metric) each.
        beta: of both arms; an arm without a KL term is compared at every beta. None where an arm
            has only one.

    Returns:
        One row per pair: ``arm``, ``other``, ``metric``, ``iqm``, ``low``, ``high``, ``seeds``,
        and ``differs``, whether the band excludes zero.

    Raises:
        ValueError: an arm is unknown, or has several betas and none is given.
    """
    rows = []
    for arm, other, metric in pairs:
        difference = of_seeds(finals, arm, metric, beta) - of_seeds(finals, other, metric, beta)
        values = difference.to_numpy()[None]
        (low,), (high,) = bootstrap(values)
        rows.append(
            {
                "arm": arm,
                "other": other,
                "metric": metric,
                "iqm": float(interquartile_mean(values)[0]),
                "low": low,
                "high": high,
                "seeds": values.shape[1],
                "differs": bool(low > 0 or high < 0),
            }
        )
    return pd.DataFrame(rows)


def at_equal(
    finals: pd.DataFrame, arms: Iterable[str], *, level: float, of: str, metric: str
) -> pd.DataFrame:
    """What each arm has of one metric where another has a given level, along its betas.

    For each seed the members of an arm are a curve over beta; ``metric`` is read off it by linear
    interpolation in the logarithm of ``of``. A seed whose curve does not reach the level is left
    out.

    Args:
        finals: one row per member.
        arms: with several betas each.
        level: of the metric ``of``, positive.

    Returns:
        One row per arm and seed: ``arm``, ``seed`` and the metric; NaN where it is left out.

    Raises:
        ValueError: an arm has fewer than two betas.
    """
    rows = []
    for arm in arms:
        members = finals[finals["arm"] == arm]
        if members["beta"].nunique() < 2:
            raise ValueError(f"arm {arm!r} has one beta: a curve needs at least two")
        for seed, curve in members.sort_values("beta").groupby("seed"):
            reached = _crossing(np.log(curve[of].to_numpy()), curve[metric].to_numpy(), level)
            rows.append({"arm": arm, "seed": seed, metric: reached})
    return pd.DataFrame(rows)


def paired_at_equal(
    finals: pd.DataFrame,
    pairs: Sequence[tuple[str, str]],
    levels: Sequence[float],
    *,
    of: str,
    metric: str,
) -> pd.DataFrame:
    """Arm minus other arm in a metric where both have the same level of another: :func:`at_equal`.

    Returns:
        One row per pair and level: ``arm``, ``other``, ``level``, ``iqm``, ``low``, ``high`` and
        ``seeds``, those whose curves both reach the level; NaN below four of them.
    """
    arms = list(dict.fromkeys(arm for pair in pairs for arm in pair))
    rows = []
    for level in levels:
        values = at_equal(finals, arms, level=level, of=of, metric=metric)
        wide = values.pivot(index="seed", columns="arm", values=metric)
        for arm, other in pairs:
            difference = (wide[arm] - wide[other]).dropna().to_numpy()[None]
            row = {"arm": arm, "other": other, "level": level, "seeds": difference.shape[1]}
            if difference.shape[1] < MIN_SEEDS:
                rows.append(row | dict.fromkeys(("iqm", "low", "high"), np.nan))
                continue
            (low,), (high,) = bootstrap(difference)
            iqm = float(interquartile_mean(difference)[0])
            rows.append(row | {"iqm": iqm, "low": low, "high": high})
    return pd.DataFrame(rows)


def _crossing(log_x: np.ndarray, y: np.ndarray, level: float) -> float:
    """y where the curve first crosses ``log(level)``, from the last point (largest beta) back."""
    target = np.log(level)
    for i in range(len(log_x) - 1, 0, -1):
        low, high = log_x[i], log_x[i - 1]
        if min(low, high) <= target <= max(low, high) and low != high:
            share = (target - low) / (high - low)
            return float(y[i] + share * (y[i - 1] - y[i]))
    return np.nan


def fluctuation(
    curves: pd.DataFrame, metrics: Iterable[str], *, share: float = 0.5
) -> pd.DataFrame:
    r"""How much a metric jumps from window to window, over the last ``share`` of a run.

    .. math:: F = \frac{1}{\bar x} \sqrt{\frac{1}{2 (n - 1)} \sum_{i=2}^{n} (x_i - x_{i-1})^2}

    Differences of neighbours leave a slow trend out; on noise around a constant it is the
    coefficient of variation.

    Args:
        curves: one row per member and logging window.
        metrics: positive ones.

    Returns:
        One row per member: ``arm``, ``beta``, ``seed``, ``kl_estimator`` and the metrics.
    """
    updates = np.sort(curves["update"].unique())
    late = curves[curves["update"] >= updates[len(updates) - round(share * len(updates))]]
    keys = ["arm", "beta", "seed", "kl_estimator"]

    def relative(values: pd.Series) -> float:
        return float(np.sqrt(np.square(np.diff(values)).mean() / 2) / values.mean())

    grouped = late.sort_values("update").groupby(keys, sort=False)
    return grouped[list(metrics)].agg(relative).reset_index()


def updates_to(curves: pd.DataFrame, metric: str, threshold: float) -> pd.DataFrame:
    """Update at which each member first reaches a threshold in a logging window.

    Returns:
        One row per member: ``arm``, ``beta``, ``seed``, ``update``; infinite if it never does.
    """
    reached = curves[curves[metric] >= threshold]
    keys = ["arm", "beta", "seed"]
    first = reached.groupby(keys, sort=False)["update"].min()
    everyone = pd.MultiIndex.from_frame(curves[keys].drop_duplicates())
    return first.reindex(everyone).fillna(np.inf).rename("update").reset_index()


def of_seeds(finals: pd.DataFrame, arm: str, metric: str, beta: float | None) -> pd.Series:
    """A metric of one arm by seed, at one beta; ``None`` where the arm has only one.

    Raises:
        ValueError: no such arm, or several betas and none is named.
    """
    rows = finals[finals["arm"] == arm]
    if beta is not None:
        rows = rows[(rows["beta"] == beta) | (rows["kl_estimator"] == "none")]
    if rows.empty:
        raise ValueError(f"no arm {arm!r} at beta={beta} among {sorted(set(finals['arm']))}")
    if rows["beta"].nunique() > 1:
        raise ValueError(f"arm {arm!r} has betas {sorted(set(rows['beta']))}: name one")
    return rows.set_index("seed")[metric]
