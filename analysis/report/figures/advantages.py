"""Figures of chapter 9: what the group does to the reward, and what process rewards add."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.report import style

QUIET = "#5A5A5A"

#: From light to dark as a number grows; the last is the limit.
SHADES = ("#5E9BD1", "#2F74B5", "#1B5590", "#0E3560", "#111111")

#: A colour, a marker and a line for each of a few things that are no estimators.
LOOKS = (
    {"color": "#111111", "marker": "o", "linestyle": "-"},
    {"color": "#A4570A", "marker": "s", "linestyle": "--"},
    {"color": "#3D7A3E", "marker": "^", "linestyle": "-."},
    {"color": "#7A4FA3", "marker": "D", "linestyle": ":"},
    {"color": "#B03060", "marker": "v", "linestyle": (0, (6, 2, 1, 2))},
)


def difficulty(curves: pd.DataFrame) -> Figure:
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
    weight.set_ylim(0, 6)
    weight.set_title("weight of a prompt")
    weight.axhline(1, color=QUIET, linewidth=1, linestyle=":")
    weight.legend(loc="upper center", labelspacing=0.25, handlelength=1.6)
    objective.plot([0, 1], [0, 1], color=QUIET, linewidth=1, linestyle=":")
    objective.set_title("objective")
    objective.set_ylabel("share of its value at $p = 1$")
    figure.supxlabel("probability $p$ that an answer is right", fontsize="medium")
    return figure


def baseline_variance(curves: dict[int, pd.DataFrame]) -> Figure:
    """Variance of the gradient with over without baseline, by how often the prompt is solved."""
    figure, axes = style.subplots()
    for shade, (size, curve) in zip(SHADES[:-1], curves.items(), strict=False):
        axes.semilogy(curve.success, curve.ratio, color=shade, label=f"$G = {size}$")
    limit = next(iter(curves.values())).success
    law = [((1 - 2 * p) / (1 - p)) ** 2 for p in limit]
    axes.semilogy(limit, law, color=SHADES[-1], linestyle="--", label="exact baseline")
    axes.axhline(1, color=QUIET, linewidth=1)
    axes.axvline(2 / 3, color=QUIET, linewidth=1, linestyle=":")
    axes.annotate(
        "$p = 2/3$",
        (2 / 3, 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(5, 0),
        textcoords="offset points",
    )
    axes.set_ylim(0.01, 1000)
    axes.set_xlabel("probability $p$ that an answer is right")
    axes.set_ylabel("variance with over without\nbaseline (log scale)")
    axes.legend(loc="upper left")
    return figure


def lengths(groups: dict[str, pd.DataFrame]) -> Figure:
    """Normalised advantage of each answer of a group against the price of a token."""
    figure, panels = style.subplots(1, len(groups), sharey=True, height=3.9)
    for axes, (title, curves) in zip(panels, groups.items(), strict=True):
        kinds = curves.groupby(["reward", "length"], sort=False)
        for look, ((reward, length), curve) in zip(LOOKS, kinds, strict=False):
            name = f"{'right' if reward else 'wrong'}, {length:.0f} tokens"
            axes.semilogx(curve.weight, curve.advantage, **{**look, "marker": ""}, label=name)
        axes.axhline(0, color=QUIET, linewidth=1)
        axes.set_title(title)
        axes.set_ylim(-1.45, 2.75)
        axes.legend(loc="upper left", labelspacing=0.2, handlelength=1.6, fontsize=10)
    panels[0].set_ylabel("normalised advantage")
    figure.supxlabel("price $\\lambda$ of a token (log scale)", fontsize="medium")
    return figure


def aggregation(curves: pd.DataFrame) -> Figure:
    """Share of a KL loss's gradient that is no KL's, by the completions averaged together."""
    figure, axes = style.subplots(height=3.9)
    for estimator, curve in curves.groupby("estimator"):
        look = style.line(estimator)
        name = {"k2": "reverse KL", "k3": "forward KL"}[estimator]
        look["label"] = f"{look['label']} against the {name}"
        axes.loglog(curve.completions, curve["median"], **look)
        axes.fill_between(
            curve.completions, curve.low, curve.high, color=look["color"], alpha=0.15, linewidth=0
        )
    first = curves[curves.completions == curves.completions.min()]
    axes.annotate(
        "GRPO: each completion\nby itself, $1/|o|$",
        (1, first["median"].max()),
        xytext=(30, 26),
        textcoords="offset points",
        va="center",
        arrowprops={"arrowstyle": "-", "color": QUIET},
    )
    sizes = sorted(curves.completions.unique())[::2]
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(2e-4, 2)
    axes.set_xlabel("completions in the token mean (log scale)")
    axes.set_ylabel("share of the gradient\nthat is not the KL's")
    axes.legend(loc="lower left")
    return figure


def prm_credit(table: pd.DataFrame) -> Figure:
    """Bias and variance of the policy gradient by where the credit comes from."""
    figure, panels = style.subplots(1, 2, sharey=True, height=3.6)
    rows = range(len(table))[::-1]
    titles = {"variance": "variance", "bias": "bias"}
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        axes.hlines(rows, 0, table[column], color="#B9B9B9", linewidth=1.5)
        axes.plot(table[column], rows, linestyle="none", marker="o", color=SHADES[2])
        axes.set_title(title)
        axes.set_xlim(-0.05, 1.45)
        axes.grid(False, axis="y")
    panels[0].set_yticks(rows, [name.replace(", ", ",\n") for name in table.credit])
    panels[0].set_xlabel("outcome = 1")
    panels[1].set_xlabel("true gradient = 1")
    return figure


def best_of_n(panels: dict[str, pd.DataFrame]) -> Figure:
    """Accuracy of the chosen path against the number of paths, by path score."""
    figure, all_axes = style.subplots(1, len(panels), sharey=True, height=3.9)
    labels = {"last": "last", "sum": "sum of raw scores"}
    for axes, (title, curves) in zip(all_axes, panels.items(), strict=True):
        for look, (how, curve) in zip(LOOKS, curves.groupby("how", sort=False), strict=True):
            axes.plot(curve.number, curve.accuracy, **look, label=labels.get(how, how))
        axes.set_xscale("log", base=2)
        axes.set_title(title)
        axes.set_ylim(0.3, 1.03)
    all_axes[0].set_ylabel("probability that the\nchosen path is solved")
    all_axes[0].legend(loc="lower right", labelspacing=0.2, fontsize=9.5)
    figure.supxlabel("number $N$ of paths (log scale)", fontsize="medium")
    return figure


def early_stop(tables: dict[str, pd.DataFrame]) -> Figure:
    """Solved paths per token and paths wrongly stopped, by patience."""
    figure, (rate, lost) = style.subplots(1, 2, height=3.6)
    for look, (name, table) in zip(LOOKS, tables.items(), strict=False):
        never = table.rate.iloc[-1]
        stopping = table.iloc[:-1]
        rate.plot(stopping.patience, stopping.rate / never, **look, label=name)
        lost.plot(stopping.patience, stopping.lost, **look, label=name)
    rate.axhline(1, color=QUIET, linewidth=1)
    rate.set_ylabel("solved paths per token\n(never stopping = 1)")
    lost.set_ylabel("stopped paths that would\nhave been solved")
    lost.legend(loc="upper right", fontsize=10)
    for axes in (rate, lost):
        _whole_numbers(axes, tables)
        axes.set_ylim(bottom=0)
    figure.supxlabel("falls in a row before a path is stopped", fontsize="medium")
    return figure


def _whole_numbers(axes: Axes, tables: dict[str, pd.DataFrame]) -> None:
    axes.set_xticks(next(iter(tables.values())).patience.iloc[:-1])
