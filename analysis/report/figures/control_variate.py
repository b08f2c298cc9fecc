"""Figures of chapter 3: where k3 beats k1, and the best weight of its control variate."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure

from analysis.experiments.chapters.gaussian_pairs import GaussianPair
from analysis.report import style

QUIET = "#5A5A5A"
#: From "k3 is quieter" over "equal" to "k1 is quieter", in the colours of the two estimators.
DIVERGING = LinearSegmentedColormap.from_list(
    "k3-k1", [style.COLOURS["k3"], "#FFFFFF", style.COLOURS["k1"]]
)


def gaussian_phase(
    shifts: np.ndarray, scales: np.ndarray, ratio: np.ndarray, points: Mapping[str, GaussianPair]
) -> Figure:
    """Ratio of the variances of k3 and k1 over mean shift and width; hatched where infinite."""
    figure, axes = style.subplots(height=4.6)
    axes.grid(visible=False)
    log_ratio = np.log10(np.where(np.isfinite(ratio), ratio, np.nan))
    mesh = _ratio_mesh(axes, shifts, scales, log_ratio)
    axes.contour(shifts, scales, log_ratio, levels=[0.0], colors="black", linewidths=1.6)
    edge = math.sqrt(0.5)
    axes.axhline(edge, color="black", linewidth=1.2, linestyle="--")
    axes.fill_between(
        shifts, 0, edge, facecolor="#F3E9E4", edgecolor=QUIET, hatch="///", linewidth=0
    )
    box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    axes.annotate("variance of $k_3$ infinite", (0.97 * shifts[-1], 0.36), bbox=box, ha="right")
    axes.annotate("$k_3$ wins", (0.12, 1.22), bbox=box)
    axes.annotate("$k_1$ wins", (1.55, 0.86), bbox=box)
    for label, pair in points.items():
        at = (abs(pair.q_mean - pair.p_mean) / pair.p_std, pair.q_std / pair.p_std)
        axes.plot(*at, marker="o", color="black", markersize=7)
        axes.annotate(label, at, xytext=(-4, 9), textcoords="offset points", bbox=box)
    axes.set_xlim(shifts[0], shifts[-1])
    axes.set_ylim(scales[0], scales[-1])
    axes.set_xlabel("shift of the mean (standard deviations of the reference)")
    axes.set_ylabel("policy's width /\nreference's width")
    _ratio_bar(figure, mesh, axes)
    return figure


def binary_phase(probabilities: np.ndarray, ratio: np.ndarray) -> Figure:
    """The same ratio for two tokens, over both probabilities on logit axes."""
    figure, axes = style.subplots(height=4.6)
    axes.grid(visible=False)
    # Where the policies are equal both variances vanish; k3's does so faster.
    log_ratio = np.log10(np.nan_to_num(ratio, nan=1e-9))
    mesh = _ratio_mesh(axes, probabilities, probabilities, log_ratio)
    axes.contour(
        probabilities, probabilities, log_ratio, levels=[0.0], colors="black", linewidths=1.6
    )
    axes.plot(probabilities, probabilities, color=QUIET, linewidth=1, linestyle=":")
    axes.set(xscale="logit", yscale="logit")
    ticks = [0.01, 0.1, 0.5, 0.9, 0.99]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.annotate("$k_1$ wins", (0.9, 0.02), ha="right")
    axes.annotate("$k_3$ wins", (0.93, 0.86), ha="left")
    axes.set_xlabel("first token under the reference (logit scale)")
    axes.set_ylabel("first token under the policy\n(logit scale)")
    _ratio_bar(figure, mesh, axes)
    return figure


def softmax_wins(drifts: pd.DataFrame, shares: pd.DataFrame, crossing: float) -> Figure:
    """Every random pair, and the share of pairs where k3 wins, against the distance."""
    figure, (cloud, share) = style.subplots(2, 1, sharex=True, height=5.4, height_ratios=[1.5, 1])
    wins = drifts.ratio < 1
    for rows, name in ((drifts[wins], "k3"), (drifts[~wins], "k1")):
        cloud.scatter(rows.kl, rows.ratio, s=5, alpha=0.35, color=style.COLOURS[name], linewidth=0)
    cloud.axhline(1, color="black", linewidth=1.2)
    cloud.set(xscale="log", yscale="log")
    cloud.set_ylabel("variance of $k_3$ /\nvariance of $k_1$ (log scale)")
    share.fill_between(shares.kl, shares.low, shares.high, color=style.COLOURS["k3"], alpha=0.25)
    share.plot(shares.kl, shares.share, **{**style.line("k3"), "label": "_"})
    share.axhline(0.5, color=QUIET, linewidth=1, linestyle=":")
    share.yaxis.set_major_formatter("{x:.0%}")
    share.set_yticks([0, 0.5, 1])
    share.set_ylabel("share of pairs\nwhere $k_3$ wins")
    share.set_xlabel("reverse KL from the reference (nats, log scale)")
    for panel in (cloud, share):
        panel.axvline(crossing, color=QUIET, linewidth=1, linestyle="--")
    share.annotate(
        "Gaussians of\nequal width",
        (crossing, 0.9),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        va="top",
        fontsize="small",
    )
    return figure


def optimal_weight(drifts: pd.DataFrame) -> Figure:
    """The best weight of the control variate against the distance, one dot a random pair."""
    figure, axes = style.subplots(height=3.3)
    axes.scatter(
        drifts.kl, drifts.weight, s=5, alpha=0.4, color=style.COLOURS["exact"], linewidth=0
    )
    for height, name in ((0.0, "k1"), (1.0, "k3")):
        axes.axhline(height, color=style.COLOURS[name])
        axes.annotate(
            style.LABELS[name],
            (1.01, height),
            xycoords=("axes fraction", "data"),
            va="center",
            color=style.text_colour(style.COLOURS[name]),
        )
    axes.set_xscale("log")
    axes.set_xlabel("reverse KL from the reference (nats, log scale)")
    axes.set_ylabel(r"optimal weight $\lambda^\ast$ of $r - 1$")
    return figure


def _ratio_mesh(axes: Axes, x: np.ndarray, y: np.ndarray, log_ratio: np.ndarray) -> QuadMesh:
    norm = TwoSlopeNorm(vmin=-2, vcenter=0, vmax=2)
    return axes.pcolormesh(
        x, y, log_ratio, cmap=DIVERGING, norm=norm, shading="nearest", rasterized=True
    )


def _ratio_bar(figure: Figure, mesh: QuadMesh, axes: Axes) -> None:
    bar = figure.colorbar(mesh, ax=axes, extend="both", pad=0.02)
    bar.set_ticks([-2, -1, 0, 1, 2], labels=["1/100", "1/10", "1", "10", "100"])
    bar.set_label("variance of $k_3$ / variance of $k_1$ (log scale)")
