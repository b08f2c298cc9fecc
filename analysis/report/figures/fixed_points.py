"""Figures of chapter 5: where each KL term lets training stop, and how one sample gets there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from analysis.kl.term import KLTerm
from analysis.report import style

_QUIET = "#5A5A5A"

#: What each law is called at the end of its line.
LAW_LABELS = {
    "k2": "$k_2$ loss,\n$k_1$ reward",
    "k3": "$k_3$ loss",
    "minimax01": "MiniMax-01",
}

#: Lowest tilt drawn: a token that is given up falls through it.
FLOOR = 1e-6


def tilts(curves: pd.DataFrame, beta: float, ascended: pd.DataFrame) -> Figure:
    """How much of its reference probability a worse token keeps, by law and reward gap."""
    figure, axes = style.subplots(height=4.0)
    for law, curve in curves.groupby("law"):
        look = style.line(str(law))
        kept = curve.closed.where(curve.closed > 0, FLOOR / 10)
        axes.plot(curve.gap / beta, kept, color=look["color"], label=LAW_LABELS[str(law)])
        points = ascended[(ascended.law == law) & (ascended.closed > FLOOR)]
        axes.plot(
            points.gap / beta,
            points.ascent,
            linestyle="none",
            marker=look["marker"],
            markerfacecolor="white",
            markeredgecolor=look["color"],
            label="_ascent",
            clip_on=False,
            zorder=4,
        )
    axes.set_yscale("log")
    axes.set_ylim(FLOOR, 2.0)
    axes.set_xlim(0, (curves.gap / beta).max())
    axes.set_xlabel(r"how far the token's reward is behind, in units of $\beta$")
    axes.set_ylabel("share of its reference\nprobability kept (log scale)")
    places = {"k2": (7.2, 3e-3), "k3": (9.0, 0.2), "minimax01": (1.2, 4e-6)}
    for law, place in places.items():
        axes.annotate(
            LAW_LABELS[law], place, color=style.text_colour(style.COLOURS[law]), va="bottom"
        )
    return figure


#: Height of an equilateral triangle of side one.
_HEIGHT = np.sqrt(3) / 2


def simplex_flows(
    paths: Mapping[KLTerm, NDArray[np.float64]], reference: NDArray[np.float64]
) -> Figure:
    """Exact flow of each arm over the policies of three tokens, without any reward.

    Args:
        paths: [frames, starts, 3] probabilities for each arm.
        reference: [3] probabilities.
    """
    rows = -(-len(paths) // 2)
    figure, panels = style.subplots(rows, 2, height=2.75 * rows)
    for axes, (arm, path) in zip(panels.flat, paths.items(), strict=False):
        _flow(axes, path, reference, style.COLOURS[arm.estimator])
        where = "loss" if arm.placement == "loss" else "reward"
        axes.set_title(f"{style.LABELS[arm.estimator]} {where}", fontsize="medium")
    for axes in panels.flat[len(paths) :]:
        axes.set_axis_off()
    return figure


def penalty_dynamics(
    paths: Mapping[tuple[str, str], NDArray[np.float64]], reference: NDArray[np.float64]
) -> Figure:
    """Runs of each penalty in the reward over the policies of three tokens, a row a dynamics.

    Args:
        paths: [frames, starts, 3] probabilities for each of two estimators and each dynamics.
        reference: [3] probabilities.
    """
    rows = len(paths) // 2
    figure, panels = style.subplots(rows, 2, height=2.5 * rows)
    columns = list(dict.fromkeys(estimator for estimator, _ in paths))
    order = dict.fromkeys(dynamics for _, dynamics in paths)
    keys = [(estimator, dynamics) for dynamics in order for estimator in columns]
    for axes, (estimator, dynamics) in zip(panels.flat, keys, strict=True):
        path = paths[estimator, dynamics]
        _flow(axes, path, reference, style.COLOURS[estimator])
        axes.set_title(f"{style.LABELS[estimator]}, {dynamics}", fontsize="medium")
    return figure


#: How the walks are named at the ends of their lines, and whose look they borrow.
WALK_LOOKS = {
    "k1": ("k1", "-", "$k_1$ loss"),
    "flipped": ("none", "--", "sign flipped"),
    "printed": ("minimax01", "-.", "as printed"),
    "k2": ("k2", "-", "$k_2$ loss"),
}


def walks(table: pd.DataFrame) -> Figure:
    """Entropy of single-sample runs that start at their reference."""
    figure, axes = style.subplots(height=3.9)
    for walk, curve in table.groupby("walk", sort=False):
        name, dashes, label = WALK_LOOKS[str(walk)]
        _band(axes, curve, style.COLOURS[name], dashes, label)
    axes.set_xlabel("steps, one sampled token each")
    axes.set_ylabel("entropy (nats)")
    axes.set_ylim(0, None)
    style.label_line_ends(axes)
    return figure


def anchored(table: pd.DataFrame) -> Figure:
    """KL under pure reward noise against steps, one panel a step size."""
    sizes = sorted(table.step_size.unique())
    figure, panels = style.subplots(1, len(sizes), height=3.9, sharey=True)
    for axes, size in zip(panels, sizes, strict=True):
        for term, curve in table[table.step_size == size].groupby("term", sort=False):
            look = style.line(str(term))
            _band(axes, curve, look["color"], look["linestyle"], look["label"])
        axes.set_title(f"step {size:g}")
        axes.set_ylim(-0.15, 2.25)
        style.label_line_ends(axes)
    figure.supxlabel("steps, one sampled token each", fontsize="medium")
    panels[0].set_ylabel("reverse KL to the reference\n(nats)")
    return figure


def noise(table: pd.DataFrame) -> Figure:
    """Where one sample of the k3 loss is noisier than one of the k2 loss, by one token's odds."""
    figure, axes = style.subplots(height=4.4)
    axis = table.index.to_numpy()
    mesh = axes.pcolormesh(
        axis,
        axis,
        table.to_numpy().clip(-3, 3),
        cmap="PuOr",
        norm=TwoSlopeNorm(0.0, -3.0, 3.0),
        shading="nearest",
        rasterized=True,
    )
    axes.plot(axis, axis, color="#111111", linewidth=1, linestyle=":")
    axes.set_aspect("equal")
    axes.grid(False)
    axes.set_xlabel("log-odds of a token, reference")
    axes.set_ylabel("log-odds of the token, policy")
    bar = figure.colorbar(mesh, ax=axes, ticks=[-3, -2, -1, 0, 1, 2, 3])
    bar.set_label("log10 of the variance,\n$k_3$ loss over $k_2$ loss")
    return figure


def _band(axes: Axes, curve: pd.DataFrame, colour: str, dashes: str, label: str) -> None:
    axes.plot(curve.position, curve["median"], color=colour, linestyle=dashes, label=label)
    axes.fill_between(curve.position, curve.p10, curve.p90, color=colour, alpha=0.15, linewidth=0)


def _triangle(axes: Axes) -> None:
    axes.plot([0, 1, 0.5, 0], [0, 0, _HEIGHT, 0], color=_QUIET, linewidth=1)
    for name, (x, y), align in (
        ("A", (-0.04, -0.02), "right"),
        ("B", (1.04, -0.02), "left"),
        ("C", (0.5, _HEIGHT + 0.03), "center"),
    ):
        axes.annotate(name, (x, y), ha=align, va="bottom" if name == "C" else "center")
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_xlim(-0.12, 1.12)
    axes.set_ylim(-0.08, _HEIGHT + 0.14)


def _flow(
    axes: Axes, path: NDArray[np.float64], reference: NDArray[np.float64], colour: str
) -> None:
    """Runs [frames, starts, 3] in a triangle: lines from dots, a circle for each different end."""
    _triangle(axes)
    x, y = _flat(path)
    axes.plot(x, y, color=colour, linewidth=0.9, alpha=0.7)
    axes.plot(x[0], y[0], linestyle="none", marker=".", markersize=2.5, color=colour)
    _, first = np.unique((16 * path[-1]).round(), axis=0, return_index=True)
    ends = path[-1][first]  # one circle for equal ends
    axes.plot(*_flat(ends), linestyle="none", marker="o", markersize=8, color=colour, zorder=4)
    axes.plot(
        *_flat(reference),
        linestyle="none",
        marker="D",
        markersize=6,
        markerfacecolor="white",
        markeredgecolor="#111111",
        markeredgewidth=1.5,
        zorder=5,
    )


def _flat(policies: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Barycentric to plane coordinates; tokens A, B, C are the corners."""
    return policies[..., 1] + 0.5 * policies[..., 2], _HEIGHT * policies[..., 2]
