"""The predictions of a design judged by its recording: no sentence of a page is read."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.records import hierarchical, statistics
from analysis.records.config import TrainConfig
from analysis.records.preset import (
    AT_END,
    DERIVED_OF_ENSEMBLE,
    EQUAL_KL,
    KL_BUDGET,
    SPREAD_BUDGET,
    Design,
    Expected,
    Prediction,
    Preset,
)
from analysis.records.recording import Recording
from analysis.records.summaries import ACCURACIES, KLS, of_seeds
from analysis.records.tidy import RUN_COLUMNS
from analysis.records.variants import PENALTY

#: Before the name of a metric that is a logarithm.
LOG = "log_"
#: What is equal at equal KL, unless a design says otherwise.
EQUAL = "reverse_kl"
#: Of these a small value is the worst, of every other metric a large one.
BETTER_HIGHER = (
    *("reward", "final_reward", "gold", "final_gold", "peak_gold", "budget_gold"),
    *DERIVED_OF_ENSEMBLE,
    *ACCURACIES,
)


def judged_predictions(recording: Recording) -> pd.DataFrame:
    """Every prediction of a recording's design beside what was found.

    Returns:
        One row per prediction: ``variant``, ``other``, ``metric``, ``at`` (coefficients,
        ``equal KL`` or ``the end``), ``expected``, ``mean``, ``low``, ``high``, ``p``,
        ``equivalent``, ``starts``, ``seeds`` and ``outcome``: see :func:`outcome`.

    Raises:
        ValueError: the recording has no design.
    """
    design = recording.preset.design
    if design is None:
        raise ValueError(f"{recording.preset.name} was recorded without a design")
    starts, finals = starts_of(recording.preset), with_derived(recording)
    return pd.DataFrame(
        [judged(finals, prediction, design, starts) for prediction in design.predictions]
    )


def with_derived(recording: Recording) -> pd.DataFrame:
    """Final rows with what is read off curves or two metrics.

    Columns more: ``average``, accuracy averaged over training; ``excess``, the length of wrong
    answers less that of right ones, in tokens; ``log_peak_gradient``, the logarithm of the largest
    gradient norm of a logging window. Of runs on a reward model also :func:`golds_of_stopping`, of
    several :func:`golds_of_disagreement`.
    """
    keys, finals = list(RUN_COLUMNS), recording.finals
    grouped = recording.curves.groupby(keys, sort=False)
    derived = {
        "average": grouped["accuracy"].mean(),
        f"{LOG}peak_gradient": np.log(grouped["gradient_norm"].max()),
    }
    if recording.preset.config.proxied:
        derived |= golds_of_stopping(recording.curves)
    if recording.preset.config.members > 1:
        derived |= golds_of_disagreement(recording.curves)
    excess = finals["wrong_length"] - finals["right_length"]
    return finals.join(pd.DataFrame(derived), on=keys).assign(excess=excess)


def golds_of_stopping(curves: pd.DataFrame, budget: float = KL_BUDGET) -> dict[str, pd.Series]:
    """By run, the gold of a logging window that it could have been stopped at.

    ``peak_gold``: the highest. ``budget_gold``: that of the last window before the exact reverse KL
    first exceeds the budget; the end of training where it never does.
    """
    ordered = curves.sort_values("update", kind="stable")
    return {
        "peak_gold": ordered.groupby(list(RUN_COLUMNS), sort=False)["gold"].max(),
        "budget_gold": last_within(ordered, ordered["reverse_kl"] <= budget, "gold"),
    }


def golds_of_disagreement(
    curves: pd.DataFrame, budget: float = SPREAD_BUDGET
) -> dict[str, pd.Series]:
    """By run, the gold of a window that its reward models' spread says to stop at.

    ``spread_gold``: that of the last window before the mean spread first exceeds the budget times
    that of the first window. ``careful_gold``: that of the window where the mean of all members
    less :data:`~analysis.records.variants.PENALTY` spreads is highest.
    """
    ordered = curves.sort_values("update", kind="stable").reset_index(drop=True)
    keys = list(RUN_COLUMNS)
    first = ordered.groupby(keys, sort=False)["spread"].transform("first")
    careful = ordered["all_members"] - PENALTY * ordered["spread"]
    best = careful.groupby([ordered[key] for key in keys], sort=False).idxmax()
    return {
        "spread_gold": last_within(ordered, ordered["spread"] <= budget * first, "gold"),
        "careful_gold": ordered.loc[best].set_index(keys)["gold"],
    }


def last_within(ordered: pd.DataFrame, within: pd.Series, column: str) -> pd.Series:
    """By run, a column in the last window before ``within`` first fails; the end if it never does.

    Args:
        ordered: curves, each run's windows in order.
        within: of each row.
    """
    keys = list(RUN_COLUMNS)
    kept = within.groupby([ordered[key] for key in keys], sort=False).cummin()
    return ordered[kept].groupby(keys, sort=False)[column].last()


def starts_of(preset: Preset) -> int:
    """Starts of a preset's runs; a pretrained model is one for all, and seeds take their place."""
    config = preset.config
    return config.start.count if isinstance(config, TrainConfig) else len(preset.seeds)


def judged(
    finals: pd.DataFrame, prediction: Prediction, design: Design, starts: int
) -> dict[str, float | str]:
    """One prediction beside what was found: a row of :func:`judged_predictions`."""
    names = prediction.variant, prediction.other
    if prediction.betas:
        found = at_betas(finals, prediction, starts, margin_of(prediction.metric, design))
    else:
        fit = at_equal_kl(finals, *names, starts, prediction.metric, of=design.equal)
        found = fit.difference(design.margin)
    margin = margin_of(prediction.metric, design)
    at = ", ".join(f"{beta:g}" for beta in prediction.betas) or EQUAL_KL
    at = "the end" if prediction.betas == AT_END else at
    said = {
        "variant": names[0],
        "other": names[1],
        "metric": prediction.metric,
        "at": at,
        "expected": prediction.expected,
    }
    return {**said, **found, "outcome": outcome(found, prediction.expected, margin)}


def at_equal_kl(
    finals: pd.DataFrame,
    variant: str,
    other: str,
    starts: int,
    metric: str = "reward",
    *,
    of: str = EQUAL,
) -> hierarchical.Fit:
    """The fit of two variants over log KL; runs that are not finite are :func:`at_worst`."""
    runs = at_worst(finals[finals["variant"].isin((variant, other))], of, metric)
    return hierarchical.fit(runs, variant, other, starts=starts, of=of, metric=metric)


def at_worst(runs: pd.DataFrame, *metrics: str) -> pd.DataFrame:
    """The runs of a comparison, what is not finite at the worst of its finite values.

    Args:
        runs: all that are compared.
        metrics: columns; the worst is the smallest of :data:`BETTER_HIGHER`, else the largest.
    """
    for metric in metrics:
        finite = runs[metric][np.isfinite(runs[metric])]
        worst = finite.min() if metric in BETTER_HIGHER else finite.max()
        runs = runs.assign(**{metric: finite.reindex(runs.index, fill_value=worst)})
    return runs


def margin_of(metric: str, design: Design) -> float:
    """The design's margin, or of a KL the logarithm of ``KL_RATIO_MARGIN``."""
    return float(np.log(statistics.KL_RATIO_MARGIN)) if metric in KLS else design.margin


def at_betas(
    finals: pd.DataFrame, prediction: Prediction, starts: int, margin: float
) -> dict[str, float]:
    """Mean difference at equal coefficients, over the means of starts; of logarithms of a KL.

    Runs that are not finite are :func:`at_worst`.
    """
    of_variants = finals["variant"].isin((prediction.variant, prediction.other))
    at = finals["beta"].isin(prediction.betas) | (finals["kl_estimator"] == "none")
    ends = prediction.betas == AT_END
    compared = at_worst(finals[of_variants & (at | ends)], prediction.metric)

    def along(name: str) -> pd.Series:
        betas = [None] if ends else prediction.betas
        values = [of_seeds(compared, name, prediction.metric, beta) for beta in betas]
        if prediction.metric in KLS:
            values = [np.log(each) for each in values]
        return sum(values) / len(values)

    gaps = along(prediction.variant) - along(prediction.other)
    start = statistics.start_of(gaps.index.to_numpy(), starts)
    means = statistics.of_starts(gaps.to_numpy(), start)
    mean, error, freedom = statistics.moments(means)
    found = statistics.of_estimate(float(mean), float(error), freedom, margin)
    return {**found, "starts": len(means), "seeds": len(gaps)}


def outcome(found: dict[str, float], expected: Expected, margin: float) -> str:
    """``holds`` where the test says so at 0.05, ``refuted`` where the interval excludes it, else
    ``open``; ``not estimable`` where there is no number."""
    low, high = found["low"], found["high"]
    if np.isnan(found["mean"]):
        return "not estimable"
    if expected == "equivalent":
        holds = found["equivalent"] < 1.0 - statistics.LEVEL
        refuted = low > margin or high < -margin
    elif expected == "above":
        holds, refuted = low > 0.0, high < 0.0
    else:
        holds, refuted = high < 0.0, low > 0.0
    return "holds" if holds else "refuted" if refuted else "open"
