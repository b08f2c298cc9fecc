"""The curves of runs as tidy tables.

A tidy table has one row per run and logging window: the run's variant (``variant``,
``kl_estimator``, ``kl_placement``, ``kl_weighting``, ``beta``), its ``seed``, the window's first
``update``, and one column per metric of :data:`analysis.records.metrics.METRICS`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.records import statistics
from analysis.records.metrics import (
    COEFFICIENT_METRICS,
    CONTROL_METRICS,
    ENSEMBLE_METRICS,
    METRICS,
    PROXY_METRICS,
)

VARIANT_COLUMNS = ("variant", "kl_estimator", "kl_placement", "kl_weighting", "beta")
RUN_COLUMNS = (*VARIANT_COLUMNS, "seed")


def measured(curves: pd.DataFrame) -> list[str]:
    """The metrics that curves have: all of :data:`METRICS`, and of the others what is there."""
    proxies = (*PROXY_METRICS, *ENSEMBLE_METRICS)
    others = (*proxies, *COEFFICIENT_METRICS, *CONTROL_METRICS)
    return [*METRICS, *(name for name in others if name in curves)]


def final(curves: pd.DataFrame, *, share: float = 0.1) -> pd.DataFrame:
    """One row per run: the mean of each metric over the last ``share`` of the windows."""
    updates = np.sort(curves["update"].unique())
    last = updates[-max(1, round(share * len(updates))) :]
    kept = curves[curves["update"].isin(last)]
    return kept.groupby([*RUN_COLUMNS], sort=False, as_index=False)[measured(kept)].mean()


def coarsen(curves: pd.DataFrame, updates: int) -> pd.DataFrame:
    """Curves with one row per run and ``updates`` updates: the mean of the windows that begin
    in each span, named by its first update."""
    spans = curves.assign(update=curves["update"] // updates * updates)
    keys = [*RUN_COLUMNS, "update"]
    return spans.groupby(keys, sort=False, as_index=False)[measured(spans)].mean()


def at_beta(table: pd.DataFrame, beta: float) -> pd.DataFrame:
    """The rows of one beta, and those without a KL term.

    Raises:
        ValueError: if no row has that beta.
    """
    if beta not in set(table["beta"]):
        raise ValueError(f"no variant has beta={beta}: known are {sorted(set(table['beta']))}")
    return table[(table["beta"] == beta) | (table["kl_estimator"] == "none")]


def kl_cosines(curves: pd.DataFrame, beta: float) -> pd.DataFrame:
    """The metric ``kl_cosine`` at one beta: means over training, then over seeds.

    Returns:
        One row per variant with a KL term: ``variant``, and ``mean`` with its interval over seeds,
        ``low`` to ``high``.
    """
    measured = at_beta(curves, beta).dropna(subset=["kl_cosine"])
    by_seed = measured.groupby(["variant", "seed"], sort=False)["kl_cosine"].mean().unstack()
    values = statistics.interval(by_seed.to_numpy())._asdict()
    return pd.DataFrame(values, index=by_seed.index).reset_index()
