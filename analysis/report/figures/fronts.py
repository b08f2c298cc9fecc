"""Figures of the chapter on fronts: KL terms compared at equal KL, and every axis at one beta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from analysis.experiments import statistics
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
    """Accuracy at equal KL, less that of another arm: a group a part of the range, a marker an arm.

    Args:
        table: of :func:`analysis.experiments.ablations.summaries.paired_along`, with the part in
            ``level``.
        other: how the other arm is called.
    """
    levels, arms = list(table["level"].unique()), list(table["arm"].unique())
    figure, axes = style.subplots(height=1.2 + 0.32 * len(table))
    margin = statistics.ACCURACY_MARGIN
    axes.axvspan(
        -margin, margin, color="#5A5A5A", alpha=0.12, linewidth=0, label="equivalent within"
    )
    for place, arm in enumerate(arms):
        rows = table[table["arm"] == arm]
        height = np.arange(len(levels)) + 0.2 * (place - (len(arms) - 1) / 2)
        look = style.line(*ARMS[arm]) | {"linestyle": "none"}
        look["label"] += " in the reward" if ARMS[arm][1] == "reward" else " as a loss"
        axes.errorbar(rows["mean"], height, xerr=style.bars(rows), **look)
    axes.axvline(0.0, color="#5A5A5A", linewidth=1.0)
    axes.set_yticks(range(len(levels)), levels)
    axes.invert_yaxis()
    axes.set_xlabel(f"accuracy, less that of {other}, at equal KL")
    axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.25))
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
