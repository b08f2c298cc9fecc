"""Figures of chapter 8: what the KL in the reward does."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from analysis.report import style

#: Colour, marker and label of each order of KL and normalisation.
ORDERS = {
    "kl_then_normalise": ("forward", "KL, then\nnormalise"),
    "normalise_then_kl": ("reverse", "normalise,\nthen KL"),
    "kl_then_leave_one_out": ("exact", "KL, then\nleave one out"),
}


def forces(frame: pd.DataFrame, ref_probability: float) -> Figure:
    """Push of each penalty on the log-odds of one of two tokens."""
    figure, axes = style.subplots(height=3.9)
    for name, curve in frame.groupby("estimator"):
        look = {**style.line(name, "reward"), "marker": ""}
        axes.plot(curve.log_odds, curve.force, **look)
    axes.axhline(0, color="#5A5A5A", linewidth=1)
    axes.axvline(math.log(ref_probability / (1 - ref_probability)), color="#5A5A5A", linestyle=":")
    axes.annotate(
        "reference",
        (math.log(ref_probability / (1 - ref_probability)), 0.96),
        xycoords=("data", "axes fraction"),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
        va="top",
    )
    axes.annotate("raised", (0.01, 0.75), xycoords="axes fraction", color="#5A5A5A")
    axes.annotate("lowered", (0.01, 0.22), xycoords="axes fraction", color="#5A5A5A")
    axes.set_ylim(-4, 4)
    axes.set_xlabel("log-odds of the first token (nats)")
    axes.set_ylabel("push on its log-odds")
    axes.legend(loc="lower right", handlelength=2.4)
    return figure


def effective_beta(table: pd.DataFrame) -> Figure:
    """Weight of the KL in units of the reward, over beta, against the spread of the rewards."""
    figure, axes = style.subplots(height=3.9)
    for order, (colour, label) in ORDERS.items():
        rows = table[table.order == order]
        axes.loglog(
            rows["std"],
            rows.effective_beta,
            color=style.COLOURS[colour],
            marker=style.MARKERS[colour],
            label=label,
        )
        axes.fill_between(
            rows["std"],
            rows.effective_beta_p10,
            rows.effective_beta_p90,
            color=style.COLOURS[colour],
            alpha=0.12,
            linewidth=0,
        )
    axes.set_xlabel("standard deviation of the reward (log scale)")
    axes.set_ylabel(r"effective $\beta$ over $\beta$ (log scale)")
    style.label_line_ends(axes)
    return figure


def equal_rewards(curves: pd.DataFrame) -> Figure:
    """Norm of the expected gradient of a group whose rewards are all equal."""
    figure, axes = style.subplots(height=3.7)
    for order in ("kl_then_normalise", "normalise_then_kl"):
        colour, label = ORDERS[order]
        rows = curves[curves.order == order]
        axes.loglog(
            rows.kl,
            rows.norm,
            color=style.COLOURS[colour],
            marker=style.MARKERS[colour],
            label=label,
        )
    axes.set_xlabel("KL of the policy from its reference (nats, log scale)")
    axes.set_ylabel("norm of the expected\ngradient (log scale)")
    style.label_line_ends(axes)
    return figure


def mirror_steps(curves: pd.DataFrame) -> Figure:
    """KL from the optimum over repeated steps on the folded objective."""
    figure, axes = style.subplots(height=3.7)
    colours = [style.COLOURS[name] for name in ("none", "forward", "exact", "reverse", "minimax01")]
    for (product, rows), colour in zip(curves.groupby("product"), colours, strict=False):
        axes.semilogy(
            rows.iteration,
            rows.kl.clip(lower=1e-12),
            color=colour,
            marker="o",
            label=rf"$\eta\beta$ = {product:g}",
        )
    axes.set_ylim(5e-9, 1e3)
    axes.set_xlabel("steps")
    axes.set_ylabel("KL from the optimum\n(nats, log scale)")
    style.label_line_ends(axes)
    return figure
