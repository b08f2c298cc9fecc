"""What chapter 2 draws: coefficients and errors."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import torch
from matplotlib.figure import Figure

from kl_term import style
from kl_term.kl.surrogates import gradient_coefficient


def plot_coefficients(ref_logp: float, lowest_logp: float) -> Figure:
    """Coefficient of the score against the log-prob of the sampled token."""
    logp = torch.linspace(lowest_logp, 0.0, 241, dtype=torch.float64)
    figure, axes = style.subplots()
    labels = {"k1": "$k_1$ loss", "k2": "$k_2$ loss,\n$k_1$ reward", "k3": "$k_3$ loss"}
    for name in ("k1", "k2", "k3", "minimax01"):
        curve = gradient_coefficient(logp, torch.full_like(logp, ref_logp), estimator=name)
        axes.plot(logp, curve, **style.line(name, marker=""))
        label = labels.get(name, style.LABELS[name])
        style.note(axes, label, (lowest_logp, curve[0]), offset=(-6, 0), colour=name)
    style.guide(axes, x=ref_logp)
    at = {"xycoords": ("data", "axes fraction"), "va": "baseline"}
    equal = r"$\pi_\theta = \pi_{\mathrm{ref}}$"
    style.note(axes, equal, (ref_logp, 0.04), offset=(-6, 0), **at)
    axes.spines["left"].set_visible(False)
    axes.yaxis.set_ticks_position("right")
    axes.yaxis.set_label_position("right")
    axes.set_xlabel(r"$\log \pi_\theta$ of the sampled token (nats)")
    axes.set_ylabel(r"coefficient of $\nabla \log \pi_\theta$")
    return figure


def plot_drift(curves: pd.DataFrame) -> Figure:
    """Relative error against the exact reverse-KL gradient as the policy leaves its reference."""
    panels = {"loss": "as a loss", "reward": "in the reward"}
    figure = _error_panels(curves, "kl", "placement", panels, height=3.9)
    figure.supxlabel("reverse KL of the policy from its reference (nats)", fontsize="medium")
    return figure


def plot_staleness(curves: pd.DataFrame) -> Figure:
    """Relative error against the exact reverse-KL gradient as the sampler falls behind."""
    panels = {"none": "no weight", "detached": "detached ratio", "attached": "attached ratio"}
    figure = _error_panels(curves, "staleness", "weighting", panels, height=3.7)
    staleness = r"staleness $\mathrm{KL}(\pi_{\mathrm{old}} \Vert\, \pi_\theta)$ (nats)"
    figure.supxlabel(staleness, fontsize="medium")
    return figure


def _error_panels(
    curves: pd.DataFrame, x: str, column: str, titles: Mapping[str, str], *, height: float
) -> Figure:
    """A panel for each value of a column: the error of each term, from 10th to 90th percentile."""
    figure, panels = style.subplots(1, len(titles), sharey=True, height=height)
    panels[0].set_ylabel("relative error of the\nexpected gradient")
    for axes, (value, title) in zip(panels, titles.items(), strict=True):
        axes.set(ylim=(-0.08, 2.5), title=title)
        for term, curve in curves[curves[column] == value].groupby(["estimator", "placement"]):
            every = max(1, len(curve) // 6)
            style.band(axes, curve, x, **style.line(*term, markevery=every))
        style.label_line_ends(axes)
    return figure
