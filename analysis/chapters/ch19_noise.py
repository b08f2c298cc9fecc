"""Chapter 19: the noise of each KL term's gradient along a run, sums beside the trainer."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from analysis import style
from analysis.chapters.training_figures import KL_TERMS

#: Of a 95% interval, in standard errors.
HALF_WIDTH = 1.96
#: Placement of a term -> what it is called.
PLACES = {"loss": "as a loss", "reward": "in the reward"}


def draw_noise(table: pd.DataFrame) -> Figure:
    """Noise over the KL reached: lines by the theory, points as the trainer sampled it.

    Args:
        table: of :func:`analysis.experiments.gradient_noise.recorded`.
    """
    figure, axes = style.subplots(height=4.0)
    for term, rows in table.groupby("term", sort=False):
        estimator, placement = KL_TERMS[term]
        look = style.line(estimator, placement)
        label = f"{look['label']} {PLACES[placement]}" if estimator != "exact" else "exact KL"
        distance = rows["reverse_kl"]
        axes.plot(distance, rows["theory"], **look | {"marker": "", "label": label})
        bars = HALF_WIDTH * rows["standard_error"]
        axes.errorbar(distance, rows["sampled"], yerr=bars, **look | {"linestyle": "", "label": ""})
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("exact reverse KL of the policy (nats per token), log scale")
    axes.set_ylabel("noise of an update's gradient, log scale")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.legend()
    return figure


def numbers(table: pd.DataFrame) -> dict[str, tuple[float, str]]:
    """What the prose says of the table, and how it is written.

    Ratios of the theory's noise to that of k2 as a loss, where they are taken, and how many points
    have their line inside their interval. ``k3_own`` is over the squared norms of the expected
    gradients of k3 and k2 too; their difference is known by its norm (``bias``), so it is a bound.
    """
    by_term = table.pivot(index="reverse_kl", columns="term", values="theory")
    exact, k3, k1 = (
        by_term[name] / by_term["k2_loss"] for name in ("exact_loss", "k3_loss", "k1_reward")
    )
    bias = table.pivot(index="reverse_kl", columns="term", values="bias")["k3_loss"].iloc[-1]
    inside = (table["sampled"] - table["theory"]).abs() < HALF_WIDTH * table["standard_error"]
    return {
        "exact_low": (exact.min(), ".2f"),
        "exact_high": (exact.max(), ".2f"),
        "k3_near": (k3.iloc[0], ".2f"),
        "k3_far": (k3.iloc[-1], ".0f"),
        "k3_own": (k3.iloc[-1] / (bias - 1) ** 2, ".0f"),
        "k1_high": (k1.max(), ".2f"),
        "nearest": (by_term.index[0], ".2f"),
        "farthest": (by_term.index[-1], ".2f"),
        "inside": (inside.sum(), "d"),
        "points": (len(table), "d"),
        "checkpoints": (len(by_term), "d"),
    }
