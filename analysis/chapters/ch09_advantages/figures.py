"""The figures of chapter 9."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from analysis.evidence.length_weights import DIRECTIONS
from kl_term import style

#: From light to dark as a number grows; the last is the limit.
SHADES = ("#5E9BD1", "#2F74B5", "#1B5590", "#0E3560", "#111111")


def draw_difficulty(curves: pd.DataFrame) -> Figure:
    """Weight of a prompt by how often it is solved, and the objective ascended instead of that."""
    figure, (weight, objective) = style.subplots(1, 2, height=3.9)
    for shade, (size, curve) in zip(SHADES, curves.groupby("group_size"), strict=False):
        look = {
            "color": SHADES[-1] if math.isinf(size) else shade,
            "linestyle": "--" if math.isinf(size) else "-",
            "label": "$G \\to \\infty$" if math.isinf(size) else f"$G = {size:.0f}$",
        }
        weight.plot(curve.success, curve.weight, **look)
        objective.plot(curve.success, curve.objective / curve.objective.max(), **look)
    weight.set(ylim=(0, 6), title="weight of a prompt")
    style.guide(weight, y=1)
    weight.legend(loc="upper center", labelspacing=0.25, handlelength=1.6)
    objective.plot([0, 1], [0, 1], color=style.QUIET, linewidth=1, linestyle=":")
    objective.set(title="objective", ylabel="share of its value at $p = 1$")
    figure.supxlabel("probability $p$ that an answer is right", fontsize="medium")
    return figure


def draw_aggregation(curves: pd.DataFrame) -> Figure:
    """Share of a KL loss's gradient that is no KL's, by the completions averaged together."""
    looks = {
        estimator: style.line(estimator, label=f"{style.LABELS[estimator]} against the {kl} KL")
        for estimator, kl in DIRECTIONS.items()
    }
    labels = {"xlabel": "completions in the token mean (log scale)", "legend": "lower left"}
    labels |= {"ylabel": "share of the gradient\nthat is not the KL's (log scale)"}
    shown = {"kind": "estimator", "looks": looks, "ylim": (2e-4, 2)} | style.LOG_LOG
    figure = style.lines(curves, "completions", **shown, **labels, **style.P10_TO_P90)
    (axes,) = figure.axes
    style.note(
        axes,
        "GRPO: each completion\nby itself, $1/|o|$",
        (1, curves["median"][curves.completions == curves.completions.min()].max()),
        offset=(30, 26),
        va="center",
        arrowprops={"arrowstyle": "-", "color": style.QUIET},
    )
    sizes = sorted(curves.completions.unique())[::2]
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    return figure


def draw_best_of_n(curves: pd.DataFrame) -> Figure:
    """Accuracy of the chosen path against the number of paths, by path score and PRM."""
    named = {"last": "last", "sum": "sum of raw scores", "mean": "mean", "min": "min"}
    named |= {"product": "product"}
    series = zip(named.items(), style.SERIES, strict=True)
    looks = {"kind": "how", "looks": {how: {**x, "label": text} for (how, text), x in series}}
    looks |= {"panel": "prm", "titles": {name: f"{name} PRM" for name in curves.prm.unique()}}
    labels = {"xlabel": "number $N$ of paths (log scale)", "legend": "lower right"}
    labels |= {"ylabel": "probability that the\nchosen path is solved", "ylim": (0.3, 1.03)}
    figure = style.lines(curves, "number", "accuracy", **looks, **labels)
    for axes in figure.axes:
        axes.set_xscale("log", base=2)
    return figure


def draw_early_stop(tables: dict[str, pd.DataFrame]) -> Figure:
    """Solved paths per token and paths wrongly stopped, by patience."""
    figure, (rate, lost) = style.subplots(1, 2, height=3.6)
    for look, (name, table) in zip(style.SERIES, tables.items(), strict=False):
        never = table.rate.iloc[-1]
        stopping = table.iloc[:-1]
        rate.plot(stopping.patience, stopping.rate / never, **look, label=name)
        lost.plot(stopping.patience, stopping.lost, **look, label=name)
    style.guide(rate, y=1, linestyle="-")
    rate.set_ylabel("solved paths per token\n(never stopping = 1)")
    lost.set_ylabel("stopped paths that would\nhave been solved")
    lost.legend(loc="upper right", fontsize=10)
    for axes in (rate, lost):
        axes.set_xticks(stopping.patience)
        axes.set_ylim(bottom=0)
    figure.supxlabel("falls in a row before a path is stopped", fontsize="medium")
    return figure
