"""Runs trained in this process, and their curves as tidy tables.

A tidy table has one row per run and logging window: the run's variant (``variant``,
``kl_estimator``, ``kl_placement``, ``kl_weighting``, ``beta``), its ``seed``, the window's first
``update``, and one column per metric of :data:`analysis.training.metrics.METRICS`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.experiments import statistics
from analysis.experiments.environment import PopulationConfig
from analysis.experiments.memory import runs_that_fit
from analysis.training.config import Run
from analysis.training.environment import Environment
from analysis.training.metrics import METRICS
from analysis.training.trainer import PopulationTrainer, RunRecord

#: Most runs trained at once. Results do not depend on it; memory and cache use do.
CHUNK = 24

VARIANT_COLUMNS = ("variant", "kl_estimator", "kl_placement", "kl_weighting", "beta")
RUN_COLUMNS = (*VARIANT_COLUMNS, "seed")


def train(
    config: PopulationConfig, runs: Sequence[Run], setting: Environment, *, progress: bool = False
) -> list[RunRecord]:
    """Train runs, ``CHUNK`` at a time or as many as memory holds.

    Returns:
        One record per chunk, in the order of ``runs``; its failures name runs by their place
        in the whole.
    """
    chunk = min(CHUNK, runs_that_fit(config, str(setting.start.device)))
    records = []
    for first in range(0, len(runs), chunk):
        trainer = PopulationTrainer(config, runs[first : first + chunk], setting)
        record = trainer.run(progress=progress)
        failures = tuple(f._replace(run=f.run + first) for f in record.failures)
        records.append(record._replace(failures=failures))
    return records


def tidy(record: RunRecord) -> pd.DataFrame:
    """One row per run and logging window, runs in their order."""
    frames = []
    for row, run in enumerate(record.runs):
        variant = run.variant
        axes = {f"kl_{name}": value for name, value in variant.kl.at_one_state.items()}
        fields = {"variant": variant.name, **axes, "beta": variant.beta, "seed": run.seed}
        values = {name: record.metrics[name][:, row] for name in METRICS}
        frames.append(pd.DataFrame({**fields, "update": record.updates, **values}))
    return pd.concat(frames, ignore_index=True)[[*RUN_COLUMNS, "update", *METRICS]]


def ended(record: RunRecord) -> pd.DataFrame:
    """One row per run: its columns, and the ``FINAL_METRICS`` where the runs measured them."""
    runs = tidy(record).drop_duplicates([*RUN_COLUMNS])[[*RUN_COLUMNS]]
    return runs.reset_index(drop=True).assign(**record.final)


def final(curves: pd.DataFrame, *, share: float = 0.1) -> pd.DataFrame:
    """One row per run: the mean of each metric over the last ``share`` of the windows."""
    updates = np.sort(curves["update"].unique())
    last = updates[-max(1, round(share * len(updates))) :]
    kept = curves[curves["update"].isin(last)]
    return kept.groupby([*RUN_COLUMNS], sort=False, as_index=False)[list(METRICS)].mean()


def coarsen(curves: pd.DataFrame, updates: int) -> pd.DataFrame:
    """Curves with one row per run and ``updates`` updates: the mean of the windows that begin
    in each span, named by its first update."""
    spans = curves.assign(update=curves["update"] // updates * updates)
    keys = [*RUN_COLUMNS, "update"]
    return spans.groupby(keys, sort=False, as_index=False)[list(METRICS)].mean()


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
