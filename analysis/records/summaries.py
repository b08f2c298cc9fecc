"""Tables over seeds: means with their intervals, paired differences, variants at equal KL.

Variants of one preset share prompts and sampling noise seed by seed, so two variants are compared
seed by seed. All intervals are those of :mod:`analysis.records.statistics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from analysis.records import statistics
from analysis.records.tidy import VARIANT_COLUMNS
from kl_term.plain_checks import check_choice

#: What two one-sided tests are run against: an accuracy, or the ratio of two KLs.
ACCURACIES = ("accuracy", "own_accuracy", "average", "final_accuracy")
KLS = ("reverse_kl", "forward_kl", "teacher_kl", "final_reverse_kl", "final_forward_kl")


def by_variant(table: pd.DataFrame, metrics: Iterable[str]) -> pd.DataFrame:
    """Mean of metrics per variant, beta and (where there is one) update, with its interval.

    Args:
        table: of :mod:`analysis.records.tidy`: curves, or one row per run.
        metrics: columns of it.

    Returns:
        One row per variant, beta, update and metric: ``mean``, ``low``, ``high``, ``seeds``.

    Raises:
        ValueError: on an unknown metric.
    """
    keys = [name for name in (*VARIANT_COLUMNS, "update") if name in table]
    parts = []
    for metric in metrics:
        check_choice("metric", metric, list(table))
        wide = table.pivot(index=keys, columns="seed", values=metric)
        wide = wide.reindex(pd.MultiIndex.from_frame(table[keys].drop_duplicates()))
        values = wide.to_numpy()
        part = {"metric": metric, **statistics.interval(values)._asdict()}
        parts.append(pd.DataFrame(part, wide.index).assign(seeds=values.shape[1]).reset_index())
    return pd.concat(parts, ignore_index=True)


def pairs_of(spelled: str, *metrics: str) -> list[tuple[str, ...]]:
    """``"k2/none k3/k2"``: each variant beside the other, with each of the metrics in turn."""
    found = [tuple(pair.split("/")) for pair in spelled.split()]
    return [(*pair, metric) for metric in metrics for pair in found] if metrics else found


def paired(
    finals: pd.DataFrame, pairs: Sequence[tuple[str, str, str]], *, beta: float | None = None
) -> pd.DataFrame:
    """Variant minus other variant in a metric, taken per seed: mean and interval.

    Args:
        finals: one row per run.
        pairs: (variant, other variant, metric) each.
        beta: of both variants; a variant without a KL term is compared at every beta. None where a
            variant has only one.

    Returns:
        One row per pair: ``variant``, ``other``, ``metric``, and the columns of
        :func:`of_differences`.

    Raises:
        ValueError: a variant is unknown, or has several betas and none is given.
    """
    rows = []
    for variant, other, metric in pairs:
        left, right = (of_seeds(finals, name, metric, beta) for name in (variant, other))
        row = {"variant": variant, "other": other, "metric": metric}
        if metric in KLS and (left > 0).all() and (right > 0).all():
            ratio = (np.log(left) - np.log(right)).to_numpy()
            margin = {"same": ratio, "margin": np.log(statistics.KL_RATIO_MARGIN)}
        else:
            margin = {"margin": statistics.ACCURACY_MARGIN} if metric in ACCURACIES else {}
        rows.append(row | of_differences((left - right).to_numpy(), **margin))
    return pd.DataFrame(rows)


def of_differences(
    values: np.ndarray, *, margin: float | None = None, same: np.ndarray | None = None
) -> dict[str, float]:
    """One comparison of seeds [S]: ``mean``, ``low``, ``high``, ``seeds``, ``p``, ``equivalent``.

    The last is the p value of two one-sided tests of ``same`` (by default the differences) against
    a margin; NaN where none is stated.
    """
    interval = statistics.interval(values)._asdict()
    tested = values if same is None else same
    equivalent = np.nan if margin is None else statistics.equivalence(tested, margin)
    p = statistics.p_value(values)
    return {**interval, "seeds": len(values), "p": float(p), "equivalent": float(equivalent)}


def judged(table: pd.DataFrame, comparisons: int) -> pd.DataFrame:
    """Comparisons with their ``verdict`` and whether they are said to differ, ``differs``.

    Args:
        table: of :func:`paired` and its kind.
        comparisons: of the whole page, not of the table: see
            :func:`analysis.records.statistics.verdict`.
    """
    said = [
        statistics.verdict(p, equivalent, comparisons)
        for p, equivalent in zip(table["p"], table["equivalent"], strict=True)
    ]
    return table.assign(verdict=said, differs=[word == "differs" for word in said])


def at_equal(
    finals: pd.DataFrame, variants: Iterable[str], *, level: float, of: str, metric: str
) -> pd.DataFrame:
    """What each variant has of one metric where another has a given level, along its betas.

    For each seed the runs of a variant are a curve over beta; ``metric`` is read off it by linear
    interpolation in the logarithm of ``of``. A seed whose curve does not reach the level is
    censored: it has no value, and it says something about the variant.

    Args:
        finals: one row per run.
        variants: with several betas each.
        level: of the metric ``of``, positive.

    Returns:
        One row per variant and seed: ``variant``, ``seed`` and the metric; NaN where it is
        censored.

    Raises:
        ValueError: a variant has fewer than two betas.
    """
    curves = _curves(finals, variants, of, metric)
    rows = [
        {"variant": variant, "seed": seed, metric: _crossing(*curve, np.log(level))}
        for (variant, seed), curve in curves.items()
    ]
    return pd.DataFrame(rows)


def _curves(finals: pd.DataFrame, variants: Iterable[str], of: str, metric: str) -> dict:
    """(variant, seed) -> the logarithm of one metric and another, by rising beta."""
    curves = {}
    for variant in variants:
        runs = finals[finals["variant"] == variant]
        if runs["beta"].nunique() < 2:
            raise ValueError(f"variant {variant!r} has one beta: a curve needs at least two")
        for seed, curve in runs.sort_values("beta").groupby("seed"):
            curves[variant, seed] = np.log(curve[of].to_numpy()), curve[metric].to_numpy()
    return curves


def _crossing(log_x: np.ndarray, y: np.ndarray, target: float) -> float:
    """y where the curve first crosses ``target``, from the last point (largest beta) back."""
    for i in range(len(log_x) - 1, 0, -1):
        low, high = log_x[i], log_x[i - 1]
        if min(low, high) <= target <= max(low, high) and low != high:
            share = (target - low) / (high - low)
            return float(y[i] + share * (y[i - 1] - y[i]))
    return np.nan


def fluctuation(curves: pd.DataFrame, metrics: Iterable[str]) -> pd.DataFrame:
    r"""How much a metric jumps from window to window, over the second half of a run.

    .. math:: F = \frac{1}{\bar x} \sqrt{\frac{1}{2 (n - 1)} \sum_{i=2}^{n} (x_i - x_{i-1})^2}

    Differences of neighbours leave a slow trend out; on noise around a constant it is the
    coefficient of variation.

    Args:
        curves: one row per run and logging window.
        metrics: positive ones.

    Returns:
        One row per run: ``variant``, ``beta``, ``seed``, ``kl_estimator`` and the metrics.
    """
    updates = np.sort(curves["update"].unique())
    late = curves[curves["update"] >= updates[len(updates) - round(len(updates) / 2)]]
    keys = ["variant", "beta", "seed", "kl_estimator"]

    def relative(values: pd.Series) -> float:
        return float(np.sqrt(np.square(np.diff(values)).mean() / 2) / values.mean())

    grouped = late.sort_values("update").groupby(keys, sort=False)
    return grouped[list(metrics)].agg(relative).reset_index()


def updates_to(curves: pd.DataFrame, metric: str, threshold: float) -> pd.DataFrame:
    """Update at which each run first reaches a threshold in a logging window.

    Returns:
        One row per run: ``variant``, ``beta``, ``seed``, ``update``; infinite if it never does.
    """
    reached = curves[curves[metric] >= threshold]
    keys = ["variant", "beta", "seed"]
    first = reached.groupby(keys, sort=False)["update"].min()
    everyone = pd.MultiIndex.from_frame(curves[keys].drop_duplicates())
    return first.reindex(everyone).fillna(np.inf).rename("update").reset_index()


def of_seeds(finals: pd.DataFrame, variant: str, metric: str, beta: float | None) -> pd.Series:
    """A metric of one variant by seed, at one beta; ``None`` where the variant has only one.

    Raises:
        ValueError: no such variant, or several betas and none is named.
    """
    rows = finals[finals["variant"] == variant]
    if beta is not None:
        rows = rows[(rows["beta"] == beta) | (rows["kl_estimator"] == "none")]
    if rows.empty:
        raise ValueError(
            f"no variant {variant!r} at beta={beta} among {sorted(set(finals['variant']))}"
        )
    if rows["beta"].nunique() > 1:
        raise ValueError(f"variant {variant!r} has betas {sorted(set(rows['beta']))}: name one")
    return rows.set_index("seed")[metric]
