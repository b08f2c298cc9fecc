"""Figures of chapter 7: what weights, clips and masks do to the KL of stale samples."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.report import style

#: Colour, marker and label of each reading of the merged KL.
READINGS = {
    "old": ("k1", "--", r"$\pi_{\mathrm{old}}$ inside"),
    "detached": ("k2", "-", r"$\pi_\theta$ inside," "\n" "no clip"),
    "clipped": ("reverse", "-", r"$\pi_\theta$ inside," "\n" "clipped"),
}

#: Title of each way in which the policy left its sampler.
TITLES = {"along the advantage": "moved along $A$", "random": "moved at random"}

#: Colour and line style of each weight and credit over sequences.
WEIGHTS = {
    ("token", "immediate"): ("none", "-", "token, own"),
    ("prefix", "immediate"): ("none", "--", "prefix, own"),
    ("token", "to_go"): ("forward", "-", "token, to go"),
    ("prefix", "to_go"): ("forward", "--", "prefix, to go"),
    ("sequence", "to_go"): ("exact", "-", "sequence, to go"),
}


#: Colour, line style and label of each term under a sampler that cuts its tail.
CUT_TERMS = {
    "k1": ("k1", "-", r"$\rho\, k_1$"),
    "k3": ("k3", "-", r"$\rho\, k_3$"),
    "reward": ("reverse", "--", "reward"),
    "baseline": ("none", "-", "less mean"),
}


def readings(curves: pd.DataFrame) -> Figure:
    """Error of the merged KL's expected gradient against staleness, by reading."""
    figure, axes = style.subplots(height=3.9)
    for name, (colour, dashes, label) in READINGS.items():
        curve = curves[curves.name == name]
        _banded(axes, curve, style.COLOURS[colour], dashes, style.MARKERS[colour], label)
    axes.set_ylim(-0.05, 1.25)
    axes.set_xlabel(r"staleness $\mathrm{KL}(\pi_{\mathrm{old}} \Vert\, \pi_\theta)$ (nats)")
    axes.set_ylabel("relative error of the\nKL's expected gradient")
    style.label_line_ends(axes)
    return figure


def silenced(curves: pd.DataFrame) -> Figure:
    """Share of the KL's force that the clip removes, by beta and by how the policy moved."""
    figure, panels = style.subplots(1, 2, sharey=True, height=3.9)
    betas = sorted(curves.beta.unique())
    colours = [style.COLOURS[name] for name in ("reverse", "none", "forward")]
    for axes, (move, rows) in zip(panels, curves.groupby("move", sort=True), strict=True):
        for beta, colour in zip(betas, colours, strict=False):
            curve = rows[rows.beta == beta]
            label = rf"$\beta$ = {beta:g}"
            axes.plot(curve.staleness, curve.silenced_50, color=colour, label=label)
            axes.fill_between(
                curve.staleness,
                curve.silenced_10,
                curve.silenced_90,
                color=colour,
                alpha=0.1,
                linewidth=0,
            )
        smallest = rows[rows.beta == betas[0]]
        axes.plot(smallest.staleness, smallest.opposing_50, color=colours[0], linestyle=":")
        axes.set_ylim(-0.02, 1.02)
        axes.set_title(TITLES[move])
    panels[0].set_ylabel("share of the KL's force silenced")
    panels[1].legend(loc="upper right")
    figure.supxlabel(
        r"staleness $\mathrm{KL}(\pi_{\mathrm{old}} \Vert\, \pi_\theta)$ (nats)", fontsize="medium"
    )
    return figure


def sequence_weights(curves: pd.DataFrame) -> Figure:
    """Error against the sequence KL's gradient as samples age, by ratio level and credit."""
    figure, axes = style.subplots(height=4.2)
    for (level, credit), (colour, dashes, label) in WEIGHTS.items():
        curve = curves[(curves.level == level) & (curves.credit == credit)]
        _banded(axes, curve, style.COLOURS[colour], dashes, "", label, band=False)
    axes.set_ylim(-0.03, None)
    axes.set_xlabel(r"staleness $\mathrm{KL}(\pi_{\mathrm{old}} \Vert\, \pi_\theta)$ (nats)")
    axes.set_ylabel("relative error of the\nexpected gradient")
    style.label_line_ends(axes)
    return figure


def cut(curves: pd.DataFrame) -> Figure:
    """Error of each term's expected gradient against the mass that the sampler cuts off."""
    titles = ("near the reference", "farther away")
    figure, panels = style.subplots(1, len(titles), sharey=True, height=3.9)
    for axes, title, distance in zip(panels, titles, curves.distance.unique(), strict=True):
        for name, (colour, dashes, label) in CUT_TERMS.items():
            curve = curves[(curves.distance == distance) & (curves.name == name)]
            axes.plot(
                curve.missing, curve["median"], color=style.COLOURS[colour], ls=dashes, label=label
            )
        axes.set_title(title)
        axes.set_xlim(0, curves.missing.max())
    panels[0].set_ylim(-0.02, None)
    panels[0].set_ylabel("relative error of the\nKL's expected gradient")
    style.label_line_ends(panels[-1])
    figure.supxlabel("policy's mass that the sampler cuts off", fontsize="medium")
    return figure


def masking(table: pd.DataFrame) -> Figure:
    """Mean squared error of the averaged gradient against the number of sequences."""
    figure, axes = style.subplots(height=3.7)
    count = np.logspace(0, 3.5, 60)
    colours = [style.COLOURS[name] for name in ("none", "forward", "minimax01", "reverse")]
    for row, colour in zip(table.itertuples(), colours, strict=False):
        label = "no mask" if np.isinf(row.delta) else rf"$\delta$ = {row.delta:g}"
        axes.loglog(count, row.bias + row.variance / count, color=colour, label=label)
    axes.set_xlabel("sequences averaged (log scale)")
    axes.set_ylabel("squared error over the squared\nexact gradient (log scale)")
    style.label_line_ends(axes)
    return figure


def _banded(
    axes: Axes,
    curve: pd.DataFrame,
    colour: str,
    dashes: str,
    marker: str,
    label: str,
    *,
    band: bool = True,
) -> None:
    every = max(1, len(curve) // 6)
    axes.plot(
        curve.staleness,
        curve["median"],
        color=colour,
        linestyle=dashes,
        marker=marker,
        markevery=every,
        label=label,
    )
    if band:
        axes.fill_between(
            curve.staleness, curve.p10, curve.p90, color=colour, alpha=0.12, linewidth=0
        )
