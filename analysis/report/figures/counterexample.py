"""Figures of chapter 3: the printed counterexample to k3."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.experiments.chapters.gaussian_pairs import GaussianPair, log_probs
from analysis.report import style

QUIET = "#5A5A5A"


def seeds(runs: pd.DataFrame, printed: pd.DataFrame, limit: float = 0.7) -> Figure:
    """Histograms over seeds of the relative error of the sample mean, with the printed numbers."""
    names = ("k1", "k3", "k3_clip")
    figure, panels = style.subplots(len(names), 1, sharex=True, height=4.9)
    edges = np.linspace(-limit, limit, 141)
    for panel, name in zip(panels, names, strict=True):
        error = runs[name]["bias"]
        panel.hist(
            error, edges, weights=np.full(len(error), 1 / len(error)), color=style.COLOURS[name]
        )
        panel.axvline(0, color="black", linewidth=1.2)
        panel.plot(
            printed.loc[name, "bias"],
            0,
            marker="v",
            markersize=9,
            color="black",
            clip_on=False,
            zorder=5,
            transform=panel.get_xaxis_transform(),
        )
        panel.margins(y=0.12)
        panel.set_yticks([])
        panel.spines["left"].set_visible(False)
        panel.grid(visible=False)
        panel.annotate(
            style.LABELS[name],
            (0.99, 0.9),
            xycoords="axes fraction",
            ha="right",
            va="top",
            color=style.text_colour(style.COLOURS[name]),
            fontsize="large",
        )
    panels[0].annotate(
        "truth",
        (0, 1),
        xycoords=("data", "axes fraction"),
        xytext=(6, -2),
        textcoords="offset points",
        va="top",
    )
    beyond = (runs["k3"]["bias"] > limit).mean()
    panels[1].annotate(
        f"{beyond:.1%} of seeds\nlie further right →",
        (0.99, 0.5),
        xycoords="axes fraction",
        ha="right",
        va="top",
    )
    panels[-1].set_xlabel("relative error of the sample mean (▼ printed)")
    figure.supylabel("share of seeds", fontsize="medium")
    return figure


def seen(pair: GaussianPair, interval: tuple[float, float], unseen: float) -> Figure:
    """Densities of sampler and reference, and the part of the reference no sample is drawn from."""
    z = torch.linspace(-24, 22, 2401, dtype=torch.float64)
    x = (pair.q_mean + pair.q_std * z).numpy()
    q, p = (density.exp().numpy() for density in log_probs(pair, z))
    figure, axes = style.subplots(height=3.4)
    axes.plot(x, q, color=style.COLOURS["exact"])
    axes.plot(x, p, color=style.COLOURS["forward"])
    outside = (x < interval[0]) | (x > interval[1])
    axes.fill_between(x, p, where=outside, color=style.COLOURS["forward"], alpha=0.35, linewidth=0)
    for edge in interval:
        axes.axvline(edge, color=QUIET, linewidth=1, linestyle=":")
    top = q.max()
    axes.annotate("policy $q$", (pair.q_mean + 1.2 * pair.q_std, 0.62 * top))
    axes.annotate(
        "reference $p$",
        (-1.75, 0.11),
        xytext=(-3.4, 0.55),
        color=style.text_colour(style.COLOURS["forward"]),
        arrowprops={"arrowstyle": "-", "color": QUIET},
    )
    axes.annotate(
        f"{unseen:.0%} of the reference\nlies out here",
        (1.3, 0.1),
        xytext=(1.15, 0.75),
        arrowprops={"arrowstyle": "-", "color": QUIET},
    )
    axes.set_xlim(-3.6, 3.6)
    axes.set_ylim(0, 1.08 * top)
    axes.set_xlabel("$x$ (standard deviations of the reference)")
    axes.set_ylabel("probability density")
    return figure


def sample_sizes(sweep: pd.DataFrame, predicted: pd.DataFrame, unseen_goal: float) -> Figure:
    """Error of the sample mean of k3 against sample size, and the rule of thumb far beyond it."""
    figure, axes = style.subplots(height=3.8)
    _band(axes, sweep, "bias")
    axes.plot(
        predicted.sample_size,
        -predicted.unseen,
        color=style.COLOURS["exact"],
        linestyle=(0, (4, 2)),
        marker="",
    )
    axes.axhline(0, color="black", linewidth=1.2)
    axes.axhline(-unseen_goal, color=QUIET, linewidth=1, linestyle=":")
    axes.annotate(
        f"{unseen_goal:.0%} error",
        (1e2, -unseen_goal),
        xytext=(2, -4),
        textcoords="offset points",
        va="top",
        color=QUIET,
    )
    middle = predicted.iloc[len(predicted) // 2]
    axes.annotate(
        "minus the unseen\nmass of $p$ / KL",
        (middle.sample_size, -middle.unseen),
        xytext=(8, -12),
        textcoords="offset points",
        va="top",
    )
    last = sweep[sweep.sample_size == sweep.sample_size.max()]
    axes.annotate(
        "median and quartiles\nover samples",
        (sweep.sample_size.max(), last.bias.median()),
        xytext=(12, -16),
        textcoords="offset points",
        va="top",
        color=style.text_colour(style.COLOURS["k3"]),
    )
    axes.set_xscale("log")
    axes.set_ylim(-0.62, 0.1)
    axes.set_xlabel("sample size $n$ (log scale)")
    axes.set_ylabel("relative error of the mean of $k_3$")
    return figure


def growing_std(sweep: pd.DataFrame, exponent: float, printed: tuple[int, float]) -> Figure:
    """Sample standard deviation of k3 against sample size, beside its power law."""
    figure, axes = style.subplots(height=3.5)
    medians = _band(axes, sweep, "std")
    sizes = medians.index.to_numpy(dtype=float)
    anchor = len(sizes) // 2
    law = medians.iloc[anchor] * (sizes / sizes[anchor]) ** exponent
    axes.plot(sizes, law, color=style.COLOURS["exact"], linestyle=(0, (4, 2)))
    axes.annotate(
        f"slope {exponent:.2f}",
        (sizes[-1], law[-1]),
        xytext=(-16, 0),
        textcoords="offset points",
        ha="right",
    )
    axes.plot(*printed, marker="v", color="black", markersize=9)
    axes.annotate("printed", printed, xytext=(8, -6), textcoords="offset points", va="top")
    axes.set(xscale="log", yscale="log", xlabel="sample size $n$ (log scale)")
    axes.set_ylabel("sample standard deviation of\n$k_3$ / KL (log scale)")
    return figure


def _band(axes: Axes, sweep: pd.DataFrame, column: str) -> pd.Series:
    by_size = sweep.groupby("sample_size")[column]
    low, middle, high = (by_size.quantile(level) for level in (0.25, 0.5, 0.75))
    axes.fill_between(middle.index, low, high, color=style.COLOURS["k3"], alpha=0.25, linewidth=0)
    axes.plot(middle.index, middle, **style.line("k3"))
    return middle
