"""Chapter 13: what a diagnosis shows, and the diagnosis put to the test."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import style
from analysis.diagnosis.causes import find
from analysis.diagnosis.columns import assemble
from analysis.diagnosis.generate import EXAMPLES, Run, dump_path, simulate
from analysis.diagnosis.measure import measure
from analysis.diagnosis.reports import diagnose
from analysis.diagnosis.schema import Report, Rollouts, Settings

# What the chapter computes.

#: Runs without a fault, in the ways in which real ones differ.
HEALTHY: dict[str, Run] = {
    "as the example": Run(),
    "more sequences": Run(sequences=120),
    "KL term too weak to see": Run(sequences=100, pull=0.0),
    "reward drives the KL up": Run(sequences=100, pull=0.0, growth=12.0, drift=0.5, gain=0.5),
    "strictly on-policy": Run(sequences=100, update=0.0, learning=0.0, pull=0.0),
    "first step": Run(sequences=60, drift=1e-4, growth=1.0),
    "large steps": Run(sequences=60, learning=0.12, update=0.06),
    "noisy engine": Run(sequences=100, mismatch=0.05),
    "sharper, larger vocabulary": Run(sequences=60, vocabulary=300, sharpness=4.0),
}


def told_apart() -> pd.DataFrame:
    """Every example as the command diagnoses it: the planted fault (``expected``), the one that
    heads the report (``first``), and those ``also`` found."""
    rows = []
    for name, planted in EXAMPLES.items():
        first, *also = diagnose(dump_path(name)).codes() or ["nothing"]
        row = {"example": name.replace("_", " "), "expected": planted.expected or "nothing"}
        rows.append(row | {"first": first, "also": ", ".join(also)})
    return pd.DataFrame(rows)


def alarm_rates(runs: dict[str, Run], seeds: int) -> pd.DataFrame:
    """How many simulated runs without a fault are given an error or a warning."""
    rows = []
    for name, run in runs.items():
        alarms = 0
        for seed in range(seeds):
            frame = simulate(run, seed)
            dump = assemble({column: frame[column].to_numpy() for column in frame}, "simulated")
            found = find(measure(dump, Settings(resamples=200)))
            alarms += any(finding.severity != "note" for finding in found)
        rows.append({"run": name, "alarms": alarms, "dumps": seeds})
    return pd.DataFrame(rows)


# What it draws.

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
