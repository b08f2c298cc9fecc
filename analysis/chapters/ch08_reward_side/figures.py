"""The figures of chapter 8."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from analysis.evidence.length_weights import DIRECTIONS
from kl_term import style


def draw_forces(frame: pd.DataFrame, ref_probability: float) -> Figure:
    """Push of each penalty on the log-odds of one of two tokens."""
    figure, axes = style.subplots(height=3.9)
    for name, curve in frame.groupby("estimator"):
        axes.plot(curve.log_odds, curve.force, **style.line(name, "reward", marker=""))
    ref_odds = math.log(ref_probability / (1 - ref_probability))
    style.guide(axes, y=0, linestyle="-")
    style.guide(axes, x=ref_odds, linewidth=2.2)
    at = {"xycoords": ("data", "axes fraction"), "va": "top"}
    style.note(axes, "reference", (ref_odds, 0.96), offset=(-6, 0), **at)
    for text, height in (("raised", 0.75), ("lowered", 0.22)):
        axes.text(0.01, height, text, transform=axes.transAxes, color=style.QUIET)
    axes.set_ylim(-4, 4)
    axes.set(xlabel="log-odds of the first token (nats)", ylabel="push on its log-odds")
    axes.legend(loc="lower right", handlelength=2.4)
    return figure


#: Whose colour and marker each order of KL and groups has, and its label.
ORDER_LOOKS = {
    "kl_then_normalise": style.line("forward", label="KL, then\nnormalise"),
    "normalise_then_kl": style.line("reverse", label="normalise,\nthen KL"),
    "kl_then_leave_one_out": style.line("exact", label="KL, then\nleave one out"),
}


def draw_effective_beta(table: pd.DataFrame) -> Figure:
    """Weight of the KL in units of the reward, over beta, against the spread of the rewards."""
    labels = {"xlabel": "standard deviation of the reward (log scale)"}
    labels |= {"ylabel": r"effective $\beta$ over $\beta$ (log scale)"}
    looks = {"kind": "order", "looks": ORDER_LOOKS, **style.LOG_LOG, **style.P10_TO_P90}
    return style.lines(table, "std", **looks, **labels)


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
