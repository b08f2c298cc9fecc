"""Figures of chapter 2: what each KL term optimises in expectation."""

from __future__ import annotations

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.kl.surrogates import gradient_coefficient
from analysis.report import style


def coefficients(ref_logp: float, lowest_logp: float) -> Figure:
    """Coefficient of the score against the log-prob of the sampled token."""
    logp = torch.linspace(lowest_logp, 0.0, 241, dtype=torch.float64)
    fixed = torch.full_like(logp, ref_logp)
    figure, axes = style.subplots()
    labels = {"k1": "$k_1$ loss", "k2": "$k_2$ loss,\n$k_1$ reward", "k3": "$k_3$ loss"}
    for name in ("k1", "k2", "k3", "minimax01"):
        curve = gradient_coefficient(logp, fixed, estimator=name)
        look = {**style.line(name), "marker": ""}
        axes.plot(logp, curve, **look)
        axes.annotate(
            labels.get(name, look["label"]),
            (lowest_logp, curve[0]),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color=style.text_colour(look["color"]),
        )
    axes.axvline(ref_logp, color="#5A5A5A", linewidth=1, linestyle=":")
    axes.annotate(
        r"$\pi_\theta = \pi_{\mathrm{ref}}$",
        (ref_logp, 0.04),
        xycoords=("data", "axes fraction"),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
    )
    axes.spines["left"].set_visible(False)
    axes.yaxis.set_ticks_position("right")
    axes.yaxis.set_label_position("right")
    axes.set_xlabel(r"$\log \pi_\theta$ of the sampled token (nats)")
    axes.set_ylabel(r"coefficient of $\nabla \log \pi_\theta$")
    return figure


def drift(curves: pd.DataFrame) -> Figure:
    """Relative error against the exact reverse-KL gradient as the policy leaves its reference."""
    panels = {"loss": "as a loss", "reward": "in the reward"}
    figure, axes = style.subplots(1, len(panels), sharey=True, height=3.9)
    for panel, (placement, title) in zip(axes, panels.items(), strict=True):
        _error_panel(panel, curves[curves.placement == placement], "kl", title)
    figure.supxlabel("reverse KL of the policy from its reference (nats)", fontsize="medium")
    axes[0].set_ylabel("relative error of the\nexpected gradient")
    return figure


def staleness(curves: pd.DataFrame) -> Figure:
    """Relative error against the exact reverse-KL gradient as the sampler falls behind."""
    panels = {
        "none": "no weight",
        "detached": "detached ratio",
        "attached": "attached ratio",
    }
    figure, axes = style.subplots(1, len(panels), sharey=True, height=3.7)
    for panel, (weighting, title) in zip(axes, panels.items(), strict=True):
        _error_panel(panel, curves[curves.weighting == weighting], "staleness", title)
    figure.supxlabel(
        r"staleness $\mathrm{KL}(\pi_{\mathrm{old}} \Vert\, \pi_\theta)$ (nats)",
        fontsize="medium",
    )
    axes[0].set_ylabel("relative error of the\nexpected gradient")
    return figure


#: What each row of the sequence figure is called, from top to bottom.
SEQUENCE_ROWS = {
    ("loss", "token", "none", "immediate"): "loss\nper token",
    ("loss", "token", "prefix", "immediate"): "loss\nprefix ratio",
    ("loss", "sequence", "none", "immediate"): "loss\nwhole sequence",
    ("reward", "token", "none", "immediate"): "reward\nimmediate credit",
    ("reward", "token", "none", "to_go"): "reward\ncredit to go",
    ("reward", "sequence", "none", "immediate"): "reward\nwhole sequence",
}


def sequence_cosines(table: pd.DataFrame) -> Figure:
    """Cosine with the exact gradient of the sequence KL, by placement, level, ratio and credit."""
    figure, axes = style.subplots(height=5.0)
    rows = list(SEQUENCE_ROWS)
    pointing = table[table.optimises != "nothing"]
    nudges = {"k1": 0.22, "k2": 0.0, "k3": -0.22}
    for estimator, arms in pointing.groupby("estimator"):
        keys = arms[["placement", "level", "ratio", "credit"]].itertuples(index=False, name=None)
        look = style.line(estimator)
        axes.errorbar(
            arms.cosine_reverse,
            [len(rows) - 1 - rows.index(key) + nudges[estimator] for key in keys],
            xerr=style.bars(arms, "cosine_reverse", "cosine_p10", "cosine_p90"),
            linestyle="none",
            elinewidth=1.5,
            marker=look["marker"],
            color=look["color"],
            label=look["label"],
        )
    axes.axvline(1.0, color="#111111", linewidth=1)
    axes.axvline(0.0, color="#5A5A5A", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(rows)), list(SEQUENCE_ROWS.values())[::-1])
    axes.set_xlim(-1.05, 1.08)
    axes.set_xticks([-1, -0.5, 0, 0.5, 1])
    axes.grid(False, axis="y")
    axes.set_xlabel("cosine with the exact gradient")
    axes.legend(loc="upper left", handletextpad=0.2)
    return figure


def _error_panel(axes: Axes, curves: pd.DataFrame, x: str, title: str) -> None:
    """Median error over policies by estimator, with the band from the 10th to 90th percentile."""
    axes.set_ylim(-0.08, 2.5)
    for arm, curve in curves.groupby(["estimator", "placement"]):
        look = style.line(*arm)
        axes.plot(curve[x], curve["median"], **{**look, "markevery": max(1, len(curve) // 6)})
        axes.fill_between(
            curve[x], curve.p10, curve.p90, color=look["color"], alpha=0.15, linewidth=0
        )
    axes.set_title(title)
    style.label_line_ends(axes)
