"""Figures of the chapter on fronts: KL terms compared at equal KL, and every axis at one beta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from analysis.experiments.ablations.summaries import by_arm
from analysis.report import style

#: Arm -> its estimator and placement, which say how it is drawn.
ARMS = {
    "none": ("none", "loss"),
    "k1_loss": ("k1", "loss"),
    "k2_loss": ("k2", "loss"),
    "k3_loss": ("k3", "loss"),
    "exact_loss": ("exact", "loss"),
    "k1_reward": ("k1", "reward"),
    "k2_reward": ("k2", "reward"),
    "k3_reward": ("k3", "reward"),
}
PANELS = {
    "KL in the loss": ("none", "k1_loss", "k2_loss", "k3_loss", "exact_loss"),
    "KL in the reward": ("none", "k1_reward", "k2_reward", "k3_reward", "exact_loss"),
}
KL_LABEL = "final exact reverse KL (nats per token), log scale"


def fronts(
    finals: pd.DataFrame, panels: Mapping[str, Sequence[str]] = MappingProxyType(PANELS)
) -> Figure:
    """Final accuracy against final exact reverse KL, one line an arm, one point a beta.

    Args:
        finals: one row per member.
        panels: title -> its arms.
    """
    table = by_arm(finals, ["accuracy", "reverse_kl"])
    table = table.set_index(["metric", "arm", "beta"]).sort_index()
    options = {"sharex": True, "sharey": True, "squeeze": False}
    figure, axes = style.subplots(len(panels), 1, height=0.4 + 3.5 * len(panels), **options)
    for panel, (title, arms) in zip(axes[:, 0], panels.items(), strict=True):
        for arm in arms:
            x, y = (table.loc[(metric, arm)] for metric in ("reverse_kl", "accuracy"))
            look = style.line(*ARMS[arm])
            bars = {"xerr": style.bars(x), "yerr": style.bars(y), "elinewidth": 1.0}
            panel.errorbar(x["mean"], y["mean"], **bars, **look)
            sizes = 20.0 * np.arange(1, len(x) + 1)  # a larger marker for a larger beta
            panel.scatter(
                x["mean"], y["mean"], sizes, look["color"], marker=look["marker"], zorder=3
            )
        panel.set_xscale("log")
        panel.set_title(title)
        panel.set_ylabel("final accuracy")
        panel.legend(ncols=2)
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
    axes[-1, 0].set_xlabel(KL_LABEL)
    return figure


def differences(table: pd.DataFrame, other: str) -> Figure:
    """Accuracy at equal KL, less that of another arm: one line an arm, with its band.

    Args:
        table: of :func:`analysis.experiments.ablations.summaries.paired_at_equal`.
        other: how the other arm is called.
    """
    figure, axes = style.subplots(height=4.2)
    for arm, rows in table.dropna(subset=["mean"]).groupby("arm", sort=False):
        look = style.line(*ARMS[arm])
        axes.plot(rows["level"], rows["mean"], **look)
        axes.fill_between(
            rows["level"], rows["low"], rows["high"], color=look["color"], alpha=0.18, linewidth=0
        )
    axes.axhline(0.0, color="#5A5A5A", linewidth=1.0)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(table["level"].unique())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("exact reverse KL (nats per token), log scale")
    axes.set_ylabel(f"accuracy, less that of {other}")
    axes.legend(ncols=2)
    return figure


def dots(
    finals: pd.DataFrame, labels: dict[str, str], metrics: Sequence[tuple[str, str]]
) -> Figure:
    """One row an arm: means with their intervals, one panel a metric.

    Args:
        finals: one row per member.
        labels: arm -> what it is called, from the top.
        metrics: at most two (metric, axis label).
    """
    table = by_arm(finals, [metric for metric, _ in metrics]).set_index(["metric", "arm"])
    figure, panels = style.subplots(
        1, len(metrics), height=1.0 + 0.42 * len(labels), sharey=True, squeeze=False
    )
    for panel, (metric, label) in zip(panels[0], metrics, strict=True):
        _dots_of(panel, table.loc[metric].loc[list(labels)])
        panel.set_xlabel(label)
        panel.locator_params(axis="x", nbins=4)
    panels[0][0].set_yticks(range(len(labels)), labels.values())
    panels[0][0].invert_yaxis()
    return figure


def _dots_of(axes: Axes, rows: pd.DataFrame) -> None:
    place = np.arange(len(rows))
    axes.errorbar(rows["mean"], place, xerr=style.bars(rows), fmt="o", color=style.COLOURS["k2"])
    axes.axvline(rows["mean"].iloc[0], color="#5A5A5A", linewidth=1.0, linestyle=":")
