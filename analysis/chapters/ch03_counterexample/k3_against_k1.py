"""Where k3 is quieter than k1: between Gaussians, and between policies over a vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from scipy.special import lambertw

from analysis.evidence.claims import Finding, claim, judge, share
from analysis.evidence.gaussian_pairs import GaussianPair
from analysis.evidence.policies import FAR
from kl_term import style
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.gaussians import moments
from kl_term.kl.variance import estimator_variances

#: From "k3 is quieter" over "equal" to "k1 is quieter", in the colours of the two estimators.
DIVERGING = LinearSegmentedColormap.from_list(
    "k3-k1", [style.COLOURS["k3"], "#FFFFFF", style.COLOURS["k1"]]
)


def location_crossing() -> float:
    r"""The shift of equal-width Gaussians at which k3 stops beating k1, in standard deviations.

    .. math:: e^{d^2} - 1 = 2 d^2

    Equation: ``location_crossing``
    """
    lower_branch = lambertw(-0.5 * math.exp(-0.5), -1)  # of d^2 = u, where e^u = 1 + 2 u
    return math.sqrt(-0.5 - lower_branch.real)


def random_drifts(
    count: int, vocab_size: int, *, ref_spread: float, farthest: float, seed: int
) -> pd.DataFrame:
    """Random references, each with a policy that has drifted from it in a random direction.

    Drifts are log-uniform over two decades below ``farthest``. A row a pair: ``kl`` (nats), the
    variance of k3 over that of k1 (``ratio``) and k2 (``ratio_k2``), and that at the ``optimal``
    weight over k1's.
    """
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    ref_logits = ref_spread * torch.randn(count, vocab_size, **options)
    drift = farthest * 10 ** (-2 * torch.rand(count, 1, **options))
    logits = ref_logits + drift * torch.randn(count, vocab_size, **options)
    variances = estimator_variances(logits, ref_logits)
    return pd.DataFrame(
        {
            "kl": reverse_kl(logits, ref_logits),
            "ratio": variances["k3"] / variances["k1"],
            "ratio_k2": variances["k3"] / variances["k2"],
            "optimal": variances["optimal"] / variances["k1"],
        }
    )


def plot_gaussian_phase(points: Mapping[str, GaussianPair]) -> Figure:
    """Ratio of the variances of k3 and k1 between Gaussians; hatched where k3 has none.

    By the distance of the means and the policy's width, in deviations of the reference.
    """
    shifts = torch.linspace(0.01, 2, 200, dtype=torch.float64)
    scales = torch.linspace(0.05, 2, 196, dtype=torch.float64)
    exact = moments(shifts, scales[:, None], 0.0, 1.0)
    ratio = exact["k3"].var / exact["k1"].var
    finite = torch.where(ratio.isfinite(), ratio, torch.nan)
    shifts, scales, finite = (values.numpy() for values in (shifts, scales, finite))
    figure, axes = style.subplots(height=4.6)
    label = "variance of $k_3$ / variance of $k_1$ (log scale)"
    style.ratio_mesh(axes, shifts, scales, finite, decades=2, cmap=DIVERGING, label=label)
    axes.contour(shifts, scales, np.log10(finite), levels=[0.0], colors="black", linewidths=1.6)
    edge = math.sqrt(0.5)
    style.guide(axes, y=edge, color="black", linewidth=1.2, linestyle="--")
    hatch = {"facecolor": "#F3E9E4", "edgecolor": style.QUIET, "hatch": "///", "linewidth": 0}
    axes.fill_between(shifts, 0, edge, **hatch)
    box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    axes.annotate("variance of $k_3$ infinite", (0.97 * shifts[-1], 0.36), bbox=box, ha="right")
    axes.annotate("$k_3$ wins", (0.12, 1.22), bbox=box)
    axes.annotate("$k_1$ wins", (1.55, 0.86), bbox=box)
    for label, pair in points.items():
        at = (abs(pair.q_mean - pair.p_mean) / pair.p_std, pair.q_std / pair.p_std)
        axes.plot(*at, marker="o", color="black", markersize=7)
        style.note(axes, label, at, offset=(-4, 9), bbox=box, ha="left", va="baseline")
    axes.set(xlim=(shifts[0], shifts[-1]), ylim=(scales[0], scales[-1]))
    axes.set_xlabel("shift of the mean (standard deviations of the reference)")
    axes.set_ylabel("policy's width /\nreference's width")
    return figure


def plot_softmax_wins(drifts: pd.DataFrame, crossing: float) -> Figure:
    """Ratio of the variances of k3 and k1 against the distance, one dot a random pair."""
    figure, axes = style.subplots(height=3.9)
    winner = np.where(drifts.ratio < 1, style.COLOURS["k3"], style.COLOURS["k1"])
    axes.scatter(drifts.kl, drifts.ratio, s=5, alpha=0.35, color=winner, linewidth=0)
    style.guide(axes, y=1, color="black", linewidth=1.2, linestyle="-")
    style.guide(axes, x=crossing, linestyle="--")
    at = {"xycoords": ("data", "axes fraction"), "va": "top", "fontsize": "small"}
    style.note(axes, "Gaussians of\nequal width", (crossing, 0.96), offset=(-6, 0), **at)
    axes.set(xscale="log", yscale="log", xlabel="reverse KL from the reference (nats, log scale)")
    axes.set_ylabel("variance of $k_3$ /\nvariance of $k_1$ (log scale)")
    return figure


@claim("S4-38")
def k3_is_not_always_the_quietest() -> Finding:
    """How often the variance of k3 exceeds that of k1, and of k2, over far pairs."""
    variances = estimator_variances(*FAR)
    over = {k: share(variances["k3"] > variances[k]) for k in ("k1", "k2")}
    figures = {"share_over_k1": over["k1"], "share_over_k2": over["k2"]}
    return Finding(judge(min(over.values()) > 0, False), figures)
