"""The predictions of a design judged by its recording: no sentence of a page is read."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.experiments import hierarchical, statistics
from analysis.experiments.preset import Design, Expected, Prediction
from analysis.experiments.recording import Recording
from analysis.experiments.summaries import KLS, of_seeds

#: What is equal at equal KL.
EQUAL = "reverse_kl"


def judged_predictions(recording: Recording) -> pd.DataFrame:
    """Every prediction of a recording's design beside what was found.

    Returns:
        One row per prediction: ``variant``, ``other``, ``metric``, ``at`` (coefficients, or
        ``equal KL``), ``expected``, ``mean``, ``low``, ``high``, ``p``, ``equivalent``, ``starts``,
        ``seeds`` and ``outcome``: see :func:`outcome`.

    Raises:
        ValueError: the recording has no design.
    """
    design = recording.preset.design
    if design is None:
        raise ValueError(f"{recording.preset.name} was recorded without a design")
    starts = recording.preset.config.start.count
    return pd.DataFrame(
        [judged(recording.finals, prediction, design, starts) for prediction in design.predictions]
    )


def judged(
    finals: pd.DataFrame, prediction: Prediction, design: Design, starts: int
) -> dict[str, float | str]:
    """One prediction beside what was found: a row of :func:`judged_predictions`."""
    names = prediction.variant, prediction.other
    if prediction.betas:
        found = at_betas(finals, prediction, starts, margin_of(prediction.metric, design))
    else:
        fitted = hierarchical.fit(finals, *names, starts=starts, of=EQUAL, metric=prediction.metric)
        found = fitted.difference(design.margin)
    margin = margin_of(prediction.metric, design)
    at = ", ".join(f"{beta:g}" for beta in prediction.betas) or "equal KL"
    said = {
        "variant": names[0],
        "other": names[1],
        "metric": prediction.metric,
        "at": at,
        "expected": prediction.expected,
    }
    return {**said, **found, "outcome": outcome(found, prediction.expected, margin)}


def margin_of(metric: str, design: Design) -> float:
    """The design's margin, or of a KL the logarithm of ``KL_RATIO_MARGIN``."""
    return float(np.log(statistics.KL_RATIO_MARGIN)) if metric in KLS else design.margin


def at_betas(
    finals: pd.DataFrame, prediction: Prediction, starts: int, margin: float
) -> dict[str, float]:
    """Mean difference at equal coefficients, over the means of starts; of logarithms of a KL."""

    def along(name: str) -> pd.Series:
        values = [of_seeds(finals, name, prediction.metric, beta) for beta in prediction.betas]
        if prediction.metric in KLS:
            values = [np.log(each) for each in values]
        return sum(values) / len(values)

    gaps = along(prediction.variant) - along(prediction.other)
    means = statistics.of_starts(gaps.to_numpy(), gaps.index.to_numpy() % starts)
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
