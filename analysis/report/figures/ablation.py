"""Figures of chapter 4: what each KL term does to accuracy and to the exact reverse KL."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.experiments.ablations.ablation import coarsen
from analysis.experiments.ablations.summaries import by_arm
from analysis.report import style

#: Updates that one point of a curve averages; fewer where that would leave fewer points than these.
SPAN = 20
POINTS = 15

#: Panel title -> the estimators in it; "none" is repeated as the yardstick.
PANELS = {
    "loss": ("none", "k1", "k2", "k3", "exact"),
    "reward": ("none", "k1", "k2", "k3"),
}
TITLES = {"loss": "KL in the loss", "reward": "KL in the reward"}


def accuracy_curves(curves: pd.DataFrame, band: str) -> Figure:
    """Accuracy over updates, one line an arm, with a band over seeds."""
    return _curves(curves, "accuracy", band, "accuracy", "linear")


def reverse_kl_curves(curves: pd.DataFrame, band: str) -> Figure:
    """Exact reverse KL over updates, on a log scale."""
    return _curves(curves, "reverse_kl", band, "exact reverse KL (nats)", "log")


def front(finals: pd.DataFrame, band: str) -> Figure:
    """Final accuracy against final exact reverse KL: one line an arm, one point a beta."""
    figure, panels = style.subplots(2, 1, height=7.2, sharex=True, sharey=True)
    accuracy, kl = (by_arm(finals, [metric], band) for metric in ("accuracy", "reverse_kl"))
    for panel, (placement, names) in zip(panels, PANELS.items(), strict=True):
        for name in names:
            at = _rows(accuracy, name, placement)
            x, y = kl[at].sort_values("beta"), accuracy[at].sort_values("beta")
            look = style.line(name, _line_placement(name, placement))
            panel.errorbar(
                x["mean"],
                y["mean"],
                xerr=style.bars(x),
                yerr=style.bars(y),
                elinewidth=1.0,
                **look,
            )
            sizes = 25.0 * np.arange(1, len(x) + 1)  # a larger marker for a larger beta
            panel.scatter(
                x["mean"], y["mean"], sizes, look["color"], marker=look["marker"], zorder=3
            )
        panel.set_xscale("log")
        panel.set_title(TITLES[placement])
        panel.set_ylabel("final accuracy")
        panel.legend(ncols=2)
    panels[-1].set_xlabel("final exact reverse KL (nats), log scale")
    return figure


def span_of(curves: pd.DataFrame) -> int:
    """How many updates one point of a curve averages."""
    return min(SPAN, math.ceil(curves["update"].max() / POINTS) or 1)


def _curves(curves: pd.DataFrame, metric: str, band: str, label: str, scale: str) -> Figure:
    span = span_of(curves)
    gaps = np.diff(np.unique(curves["update"]))
    if gaps.size:  # whole logging windows
        span = math.ceil(span / gaps.min()) * int(gaps.min())
    summary = by_arm(coarsen(curves, span), [metric], band)
    summary["update"] += span / 2
    figure, panels = style.subplots(2, 1, height=6.6, sharex=True, sharey=True)
    for panel, (placement, names) in zip(panels, PANELS.items(), strict=True):
        _draw_arms(panel, summary, placement, names)
        panel.set_yscale(scale)
        panel.set_title(TITLES[placement])
        panel.set_ylabel(label)
    panels[-1].set_xlabel("update")
    figure.draw_without_rendering()
    for panel in panels:
        style.label_line_ends(panel)
    return figure


def _draw_arms(axes: Axes, summary: pd.DataFrame, placement: str, names: Sequence[str]) -> None:
    for name in names:
        rows = summary[_rows(summary, name, placement)]
        look = style.line(name, _line_placement(name, placement))
        axes.plot(rows["update"], rows["mean"], markevery=3, **look)
        axes.fill_between(
            rows["update"],
            rows["low"],
            rows["high"],
            color=look["color"],
            alpha=0.18,
            linewidth=0,
        )


def _rows(summary: pd.DataFrame, name: str, placement: str) -> pd.Series:
    """Which rows belong to an estimator in a placement; no KL term belongs to both."""
    placed = (summary["kl_placement"] == placement) | (name == "none")
    return (summary["kl_estimator"] == name) & placed


def _line_placement(name: str, placement: str) -> str:
    return "loss" if name == "none" else placement
