"""Figures of the chapter on training from samples that are not the policy's own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis.experiments.ablations.summaries import by_arm
from analysis.experiments.chapters.routing_training import ROUTINGS
from analysis.experiments.chapters.stale_training import LARGE_BATCH
from analysis.report import style
from analysis.report.figures.fronts import KL_LABEL, dots

#: KL loss on stale samples -> its estimator, and whether it is weighted.
LOSSES = {
    "none": ("none", False),
    "k2": ("k2", False),
    "k2_detached": ("k2", True),
    "k3": ("k3", False),
    "k3_attached": ("k3", True),
    "exact": ("exact", False),
}
LOSS_LABELS = {
    "none": "no KL term",
    "k2": "$k_2$",
    "k2_detached": "$k_2$, weighted",
    "k3": "$k_3$",
    "k3_attached": "$k_3$, weighted",
    "exact": "exact",
}
#: One of the three ways -> its estimator, placement and label.
WAYS = {
    "none": ("none", "loss", "no KL term"),
    "exact_loss": ("exact", "loss", "full vocabulary"),
    "merged_old": ("k1", "reward", r"merged, $\pi_{\mathrm{old}}$ inside"),
    "merged_detached": ("k1", "reward", r"merged, $\pi_\theta$ inside"),
    LARGE_BATCH: ("k2", "loss", "$k_2$, large fresh batches"),
}
MASKS = {
    "fresh": "fresh samples, token ratio",
    "token": "token ratio, clipped",
    "token_mask_0.1": "… masked at 0.1",
    "token_mask_0.3": "… masked at 0.3",
    "token_wide": "token ratio, no clip",
    "gspo": "GSPO, 0.2",
    "gspo_tight": "GSPO, 0.03",
    "sequence": "sequence ratio, clipped",
    "cispo": "CISPO",
    "cispo_mask_0.1": "… masked at 0.1",
    "cispo_mask_0.3": "… masked at 0.3",
    "cispo_upper": "CISPO, upper bound only",
    "reinforce": "no weight",
    "reinforce_mask_0.03": "… masked at 0.03",
    "reinforce_mask_0.1": "… masked at 0.1",
    "reinforce_mask_0.3": "… masked at 0.3",
}
MISMATCHES = {"cold": "temperature 0.7", "hot": "temperature 1.3", "top_p": "top-p 0.8"}
CORRECTIONS = {
    "uncorrected": "uncorrected",
    "truncated_token": "truncated, token",
    "masked_token": "masked, token",
    "truncated_sequence": "truncated, sequence",
    "masked_sequence": "masked, sequence",
    "keep_mask": "sampling mask kept",
}
BUDGETS = {
    "whole": ("none", "-", "whole rollouts"),
    "budget_8_all": ("k2", "-", "8 tokens an update"),
    "budget_4_all": ("k3", "-", "4 tokens an update"),
    "budget_8_current": ("k2", ":", "8, last segment only"),
    "budget_4_current": ("k3", ":", "4, last segment only"),
}


def ages(finals: pd.DataFrame) -> Figure:
    """Own accuracy and exact reverse KL over the age of the samples, one line a KL loss."""
    table = by_arm(finals, ["own_accuracy", "reverse_kl"])
    table["lag"] = table["arm"].str.rsplit("_", n=1).str[-1].astype(int)
    lags = sorted(table["lag"].unique())
    figure, panels = style.subplots(2, 1, height=7.0, sharex=True)
    for panel, (metric, label) in zip(
        panels,
        (("own_accuracy", "final accuracy"), ("reverse_kl", "exact reverse KL (nats), log")),
        strict=True,
    ):
        for place, name in enumerate(LOSSES):
            rows = table[(table["metric"] == metric) & table["arm"].isin(_at(name, lags))]
            rows = rows.sort_values("lag")
            x = np.arange(len(rows)) + 0.05 * (place - 2.5)
            panel.errorbar(
                x, rows["mean"], yerr=style.bars(rows), elinewidth=1.0, **loss_look(name)
            )
        panel.set_ylabel(label)
    panels[0].legend(ncols=2, loc="lower left")
    panels[1].set_yscale("log")
    panels[1].yaxis.set_minor_locator(NullLocator())
    panels[1].set_yticks([0.05, 0.1, 0.2, 0.4], ["0.05", "0.1", "0.2", "0.4"])
    panels[1].set_xticks(range(len(lags)), [str(lag) for lag in lags])
    panels[1].set_xlabel("age of the sampling weights (updates)")
    return figure


def peaks(table: pd.DataFrame, lag: int) -> Figure:
    """The largest gradient norm that a run logged, by KL loss, at one age."""
    labels = {f"{name}_lag_{lag}": label for name, label in LOSS_LABELS.items()}
    kept = table[table["arm"].isin(labels)]
    figure = dots(kept, labels, [("gradient_norm", "largest logged gradient norm, log scale")])
    figure.axes[0].set_xscale("log")
    figure.axes[0].xaxis.set_minor_locator(NullLocator())
    figure.axes[0].set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    return figure


def ways(finals: pd.DataFrame) -> Figure:
    """Accuracy against exact reverse KL of the three ways, one line a way, one point a beta."""
    table = by_arm(finals, ["accuracy", "reverse_kl"]).set_index(["metric", "arm", "beta"])
    table = table.sort_index()
    figure, axes = style.subplots(height=4.8)
    for arm in WAYS:
        x, y = (table.loc[(metric, arm)] for metric in ("reverse_kl", "accuracy"))
        look = way_look(arm)
        bars = {"xerr": style.bars(x), "yerr": style.bars(y), "elinewidth": 1.0}
        axes.errorbar(x["mean"], y["mean"], **bars, **look)
        sizes = 6.0 + 2.0 * np.arange(len(x))  # a larger marker for a larger beta
        inside = look.get("markerfacecolor", look["color"])
        for place, size in enumerate(sizes):
            at = (x["mean"].iloc[place], y["mean"].iloc[place])
            axes.plot(*at, look["marker"], color=look["color"], mfc=inside, markersize=size)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([0.03, 0.05, 0.1, 0.2], ["0.03", "0.05", "0.1", "0.2"])
    axes.set_xlabel(KL_LABEL)
    axes.set_ylabel("final accuracy")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def at_cost(curves: pd.DataFrame) -> Figure:
    """Accuracy over completions drawn and over passes through the model.

    Args:
        curves: one beta an arm, with ``completions`` and ``passes``; drawn to half as much again
            as the cheapest arm has cost.
    """
    figure, panels = style.subplots(2, 1, height=6.6, sharey=True)
    costs = (
        ("completions", "completions drawn (thousands)"),
        ("passes", "forward passes over a completion (thousands)"),
    )
    for panel, (cost, label) in zip(panels, costs, strict=True):
        for arm in [name for name in WAYS if name in set(curves["arm"])]:
            own = curves[curves["arm"] == arm]
            places = own.groupby("update")[cost].first() / 1000
            rows = by_arm(own, ["accuracy"]).set_index("update")
            _band(panel, places[rows.index], rows, way_look(arm))
        panel.set_xlim(0.0, 1.5 * curves.groupby("arm")[cost].max().min() / 1000)
        panel.set_xlabel(label)
        panel.set_ylabel("accuracy")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def masks(finals: pd.DataFrame) -> Figure:
    """Own accuracy and effective sample size of every objective on stale samples."""
    return dots(
        finals, MASKS, [("own_accuracy", "final accuracy"), ("ratio_ess", "effective share")]
    )


def mismatches(finals: pd.DataFrame) -> Figure:
    """Own accuracy and entropy of every sampler and correction."""
    labels = {"same": "sampler agrees"}
    for sampler, name in MISMATCHES.items():
        for how, correction in CORRECTIONS.items():
            if f"{sampler}_{how}" in set(finals["arm"]):
                labels[f"{sampler}_{how}"] = (
                    f"{name}: {correction}" if how == "uncorrected" else correction
                )
    metrics = [("own_accuracy", "final accuracy"), ("entropy", "entropy (nats)")]
    return dots(finals, labels, metrics)


def routings(curves: pd.DataFrame) -> Figure:
    """Exact reward over updates with replayed and recomputed routing, one panel a noise."""
    noises = sorted(curves["noise"].unique())
    figure, panels = style.subplots(1, len(noises), height=3.6, sharey=True)
    looks = dict(zip(ROUTINGS, ("k2", "k1"), strict=True))
    for panel, noise in zip(panels, noises, strict=True):
        for routing, look in looks.items():
            own = curves[(curves["noise"] == noise) & (curves["routing"] == routing)]
            rows = by_arm(own.assign(arm=routing, beta=0.0), ["reward"]).set_index("update")
            _band(panel, rows.index, rows, style.line(look) | {"label": routing, "marker": ""})
        panel.set_title(f"noise {noise:g}")
        panel.set_xlabel("update")
    panels[0].set_ylabel("expected reward, exact")
    panels[0].legend()
    return figure


def decoding(curves: pd.DataFrame, steps: Mapping[str, int]) -> Figure:
    """Accuracy over updates and over decoding steps that follow one another.

    Args:
        curves: recorded.
        steps: arm -> decoding steps of an update.
    """
    figure, panels = style.subplots(2, 1, height=6.6, sharey=True)
    table = by_arm(curves, ["accuracy"])
    for arm, (look, dashes, label) in BUDGETS.items():
        rows = table[table["arm"] == arm].set_index("update")
        options = style.line(look) | {"label": label, "linestyle": dashes, "marker": ""}
        for panel, scale in zip(panels, (1, steps[arm]), strict=True):
            _band(panel, rows.index * scale, rows, options)
    for panel, label in zip(panels, ("update", "sequential decoding steps"), strict=True):
        panel.set_xlabel(label)
        panel.set_ylabel("accuracy")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def loss_look(name: str) -> dict[str, str]:
    """Colour and marker of the estimator; dotted and hollow where the loss is weighted."""
    estimator, weighted = LOSSES[name]
    look = style.line(estimator) | {"label": LOSS_LABELS[name]}
    return look | ({"linestyle": ":", "markerfacecolor": "white"} if weighted else {})


def way_look(arm: str) -> dict[str, str]:
    """Colour, marker and label of one of the ways; the sampler's log-ratio is dotted and hollow."""
    estimator, placement, label = WAYS[arm]
    look = style.line(estimator, placement) | {"label": label}
    return look | ({"linestyle": ":", "markerfacecolor": "white"} if arm == "merged_old" else {})


def _at(name: str, lags: list[int]) -> list[str]:
    return [f"{name}_lag_{lag}" for lag in lags]


def _band(axes: Axes, x: pd.Index | pd.Series, rows: pd.DataFrame, look: dict[str, str]) -> None:
    axes.plot(x, rows["mean"], **look, markevery=max(1, len(rows) // 8))
    axes.fill_between(x, rows["low"], rows["high"], color=look["color"], alpha=0.18, linewidth=0)
