"""Figures of chapter 6: credit, first orders and ratios along a sequence."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis.report import style

#: Colour and label of what is no estimator: critics, objectives and weights.
LOOKS: dict[str, tuple[str, str]] = {
    "zero": ("#9A5B00", "no critic"),
    "exact": ("#111111", "discounted critic"),
    "scaled": ("#3D5A9E", "scaled critic"),
    "linear": ("#3D5A9E", "token sum"),
    "token_mean": ("#9A5B00", "token mean"),
    "geometric": ("#7A3E9D", "GSPO"),
    "product": ("#111111", "product"),
    "token": ("#3D5A9E", "one token"),
    "both factors, product": ("#111111", "both, product"),
    "both factors, per token": ("#3D5A9E", "both, per token"),
    "first factor dropped": ("#9A5B00", "first dropped"),
}

#: Estimator that colours each way to the sequence KL's gradient, its line style and its label.
WAYS: dict[str, tuple[str, str, str]] = {
    "k1 prefix": ("k1", "-", "$k_1$ prefix loss"),
    "k1 reward to go, whole product": ("none", ":", "reward, product"),
    "k1 reward to go": ("k1", "--", "$k_1$ reward"),
    "k3 prefix": ("k3", "-", "$k_3$ prefix loss"),
    "full vocabulary prefix": ("exact", "-", "full vocabulary"),
}

#: What each row of the off-policy figure is called.
WEIGHT_LABELS = {
    "none": "no weight",
    "token": "token ratio",
    "prefix": "prefix ratio",
    "sequence": "whole ratio",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "grpo": "GRPO, clipped",
}


def gae(curves: pd.DataFrame) -> Figure:
    """Error of the KL's gradient through GAE against lambda, one panel a discount."""
    gammas = sorted(curves.gamma.unique(), reverse=True)
    figure, axes = style.subplots(1, len(gammas), sharey=True, height=3.7)
    for panel, gamma in zip(axes, gammas, strict=True):
        for critic in ("zero", "exact", "scaled"):
            curve = curves[(curves.gamma == gamma) & (curves.critic == critic)]
            _banded(panel, curve, "lam", critic)
        panel.set_title(rf"$\gamma = {gamma:g}$")
        panel.set_ylim(-0.04, 1.4)
        panel.set_xticks([0, 0.5, 1])
    style.label_line_ends(axes[-1])
    figure.supxlabel(r"$\lambda$ of GAE", fontsize="medium")
    axes[0].set_ylabel("relative error of the\nexpected gradient")
    return figure


def lengths(curves: pd.DataFrame) -> Figure:
    """Error of a token-weighted loss against the length, for a short and for a long memory."""
    figure, axes = style.subplots(height=3.9)
    names = {0.0: "mixes fast", max(curves.stickiness): "repeats\nitself"}
    colours = dict(zip(names, ("#3D5A9E", "#9A5B00"), strict=True))
    for stickiness, curve in curves.groupby("stickiness"):
        colour = colours[stickiness]
        axes.plot(curve.length, curve["median"], color=colour, marker="o", label=names[stickiness])
        axes.fill_between(curve.length, curve.p10, curve.p90, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(curves.length.unique(), [str(n) for n in curves.length.unique()])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=-0.02)
    axes.set_xlabel("tokens in a sequence (log scale)")
    axes.set_ylabel("relative error of the\nexpected gradient")
    style.label_line_ends(axes)
    return figure


def noise(curves: pd.DataFrame) -> Figure:
    """Sequences until signal equals noise against their length, fresh and stale."""
    panels = {0.0: "fresh samples", max(curves.staleness): "stale samples"}
    figure, axes = style.subplots(1, len(panels), sharey=True, height=4.6)
    for panel, (staleness, title) in zip(axes, panels.items(), strict=True):
        shown = curves[(curves.staleness == staleness) & (curves.length > 1)]
        for way, (colour, dashes, label) in WAYS.items():
            if not staleness and "product" in way:
                continue  # on-policy the product is one
            curve = shown[shown.way == way]
            look = {"color": style.COLOURS[colour], "linestyle": dashes, "label": label}
            panel.plot(curve.length, curve.samples, **look)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks([2, 16, 128, 512], ["2", "16", "128", "512"])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_title(title)
    style.label_line_ends(axes[-1])
    axes[0].set_ylabel("sequences until signal\nequals noise (log scale)")
    figure.supxlabel("tokens in a sequence (log scale)", fontsize="medium")
    return figure


def orders(curves: pd.DataFrame) -> Figure:
    """Error of the value's change and of the gradient against the step, both axes logarithmic."""
    panels = {"change": "change of value", "gradient": "gradient"}
    figure, axes = style.subplots(1, len(panels), height=4.0)
    for panel, (column, title) in zip(axes, panels.items(), strict=True):
        for objective in ("linear", "token_mean", "geometric"):
            curve = curves[curves.objective == objective]
            _line(panel, curve["size"], curve[column], objective, marker="o", markersize=5)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_title(title)
    style.label_line_ends(axes[-1])
    axes[0].set_ylabel("absolute error")
    axes[1].set_ylabel("relative error")
    figure.supxlabel("size of the step (nats, log scale)", fontsize="medium")
    return figure


def spreads(curves: pd.DataFrame, *, highest: float = 1e4) -> Figure:
    """Standard deviation of a sequence's weight against its length, both axes logarithmic."""
    figure, axes = style.subplots(height=3.9)
    for name in ("product", "token", "geometric"):
        shown = curves[curves[name] < highest]
        _line(axes, shown.length, shown[name], name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens in a sequence (log scale)")
    axes.set_ylabel("standard deviation of the\nweight (log scale)")
    style.label_line_ends(axes)
    return figure


def weights(table: pd.DataFrame) -> Figure:
    """Bias and noise of seven off-policy weights, a row each."""
    panels = {
        "bias": "bias\n(relative error)",
        "noise": "noise of a sequence\n(norms of the gradient)",
    }
    figure, axes = style.subplots(1, len(panels), sharey=True, height=3.9)
    rows = range(len(table))[::-1]
    for panel, (column, title) in zip(axes, panels.items(), strict=True):
        panel.hlines(rows, 0, table[column], color="#9FB0D6", linewidth=2)
        panel.plot(table[column], rows, "o", color="#3D5A9E")
        panel.set_xlim(0, 1.1 * table[column].max())
        panel.set_xlabel(title)
        panel.grid(False, axis="y")
    axes[0].set_yticks(rows, [WEIGHT_LABELS[name] for name in table.weight])
    return figure


def mismatch(curves: pd.DataFrame) -> Figure:
    """Gradient error against the sampler's temperature, by what is kept of the ratio."""
    figure, axes = style.subplots(height=3.9)
    for name in ("first factor dropped", "both factors, per token", "both factors, product"):
        curve = curves[curves.weight == name]
        _line(axes, curve.temperature, curve.error, name, marker="o", markersize=5)
    axes.axvline(1.0, color="#5A5A5A", linewidth=1, linestyle=":")
    axes.set_xlabel("temperature of the sampler")
    axes.set_ylabel("relative error of the\nexpected gradient")
    style.label_line_ends(axes)
    return figure


def clip(good: pd.DataFrame, bad: pd.DataFrame, *, epsilon: float) -> Figure:
    """The clipped objective of one token against its ratio, for both signs of the advantage."""
    figure, axes = style.subplots(1, 2, height=3.8)
    for panel, curve, title in zip(axes, (good, bad), ("A = +1", "A = −1"), strict=True):
        panel.plot(curve.ratio, curve.unclipped, color="#9A9088", linestyle=":", label="unclipped")
        panel.plot(curve.ratio, curve.objective, color="#111111", label="PPO clip")
        panel.axvspan(1 - epsilon, 1 + epsilon, color="#3D5A9E", alpha=0.12, linewidth=0)
        panel.set_title(title)
    axes[0].legend(loc="upper left")
    axes[0].set_ylabel("objective of one token")
    figure.supxlabel(r"ratio $\rho$", fontsize="medium")
    return figure


def _banded(axes: Axes, curve: pd.DataFrame, x: str, name: str) -> None:
    _line(axes, curve[x], curve["median"], name, marker="o", markersize=5)
    axes.fill_between(curve[x], curve.p10, curve.p90, color=LOOKS[name][0], alpha=0.15, linewidth=0)


def _line(axes: Axes, x: pd.Series, y: pd.Series, name: str, **options: object) -> None:
    colour, label = LOOKS[name]
    axes.plot(x, y, color=colour, label=label, **options)
