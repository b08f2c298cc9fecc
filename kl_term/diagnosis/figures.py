"""Figures of a diagnosis: estimates, log-ratios, and where in the run the KL is."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kl_term import style
from kl_term.diagnosis.schema import Report, Rollouts

#: Marker fill of each reading of the samples; the colour is the estimator's.
READINGS = {"logged": "full", "sampling": "none", "reweighted": "left"}
_RATIO_BINS = 48
_POSITION_BINS = 24


def estimates(report: Report) -> Figure:
    """Every estimator's KL with its interval, one row an estimator and a reading of the samples."""
    rows = report.estimates
    figure, axes = style.subplots(height=1.2 + 0.32 * len(rows))
    labels = [f"{style.LABELS[row.estimator]} {row.samples}" for row in rows]
    for height, row in enumerate(rows):
        interval, colour = row.interval, style.COLOURS[row.estimator]
        if not np.isfinite([interval.value, interval.low, interval.high]).all():
            continue
        axes.plot([interval.low, interval.high], [height, height], color=colour)
        look = style.line(row.estimator, linestyle="", fillstyle=READINGS[row.samples])
        axes.plot(interval.value, height, **look)
    axes.axvline(0, color=style.COLOURS["none"], linewidth=1)
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("KL to the reference (nats per token)")
    return figure


def log_ratios(rollouts: Rollouts) -> Figure:
    """How many tokens have which log-ratio, and the share of k3's pull they carry."""
    log_ratio = rollouts.logp - rollouts.ref_logp
    low, high = np.percentile(log_ratio, [0.05, 99.95])
    edge = 1.1 * max(abs(low), abs(high), 1e-6)
    edges = np.linspace(-edge, edge, _RATIO_BINS + 1)
    clipped = np.clip(log_ratio, -edge, edge)
    figure, axes = style.subplots(height=3.7)
    with np.errstate(over="ignore"):
        pull = np.minimum(np.abs(np.expm1(-log_ratio)), 1e300)
    for name, weight, label in (
        ("exact", np.ones_like(pull), "tokens"),
        ("k3", pull, "pull of $k_3$"),
        ("k2", np.abs(log_ratio), "pull of $k_2$"),
    ):
        total = weight.sum()
        counts, _ = np.histogram(clipped, edges, weights=weight / total if total else weight)
        axes.stairs(
            np.where(counts > 0, counts, np.nan),
            edges,
            color=style.COLOURS[name],
            label=label,
            linewidth=1.6,
        )
    axes.set_yscale("log")
    axes.set_xlabel(
        r"$\log \pi_\theta - \log \pi_{\mathrm{ref}}$ (nats; ends hold what lies beyond)"
    )
    axes.set_ylabel("share (log scale)")
    axes.legend(loc="upper right")
    return figure


def where(report: Report, rollouts: Rollouts) -> Figure:
    """KL by step and by position in the sequence."""
    figure, (left, right) = style.subplots(1, 2, height=3.4)
    if report.by_step:
        steps = [step.step for step in report.by_step]
        for name in ("k1", "k3"):
            left.plot(steps, [getattr(step, name) for step in report.by_step], **style.line(name))
        left.legend()
    else:
        left.annotate("no step column", (0.5, 0.5), xycoords="axes fraction", ha="center")
    left.set(xlabel="step", ylabel="KL (nats per token)")
    first, last = rollouts.position.min(), rollouts.position.max()
    longest = float(last - first) + 1
    bins = ((rollouts.position - first) * _POSITION_BINS / longest).astype(int)
    means = pd.Series(rollouts.logp - rollouts.ref_logp).groupby(bins).mean()
    middle = first + (means.index + 0.5) * longest / _POSITION_BINS
    right.plot(middle, means, **style.line("k1", marker="."))
    right.set_xlabel("position in the sequence")
    return figure
