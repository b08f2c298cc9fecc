"""Where a clamp on the value of an estimator stops its gradient, and what that looks like."""

from __future__ import annotations

import math

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad

from analysis.chapters.ch14_frameworks.digits import Estimator, edge_of
from kl_term import style
from kl_term.kl.estimators import k2, k3

# What the chapter computes.

#: The bound on the value that verl, OpenRLHF, NeMo-RL and slime share, as read.
BOUND = 10.0


def clamped_coefficient(
    log_ratios: Tensor, estimator: Estimator, *, value_bound: float = torch.inf
) -> Tensor:
    """Gradient coefficient of an estimator whose value is clamped, by autograd: zero where the
    clamp binds, a dead zone."""
    fixed = torch.zeros_like(log_ratios)
    return grad(lambda at: estimator(at, fixed).clamp(-value_bound, value_bound).sum())(log_ratios)


def clamped_ratios() -> pd.DataFrame:
    """The ratio r > 1, and its logarithm, beyond which a clamp of the value at ``BOUND`` leaves k2
    and k3 without gradient."""
    rows = []
    for name, estimator in (("k2", k2), ("k3", k3)):

        def alive(log_ratio: float, estimator: Estimator = estimator) -> bool:
            at = torch.tensor([-log_ratio], dtype=torch.float64)
            return clamped_coefficient(at, estimator, value_bound=BOUND).item() != 0

        edge = edge_of(alive, 50.0)
        rows.append({"estimator": name, "ratio": math.exp(edge), "log_ratio": edge})
    return pd.DataFrame(rows)


# What it draws.


def clamps(lowest: float, highest: float) -> Figure:
    """Gradient coefficient of k2 and k3 with the value clamped at ``BOUND``, and without."""
    log_ratios = torch.linspace(lowest, highest, 1201, dtype=torch.float64)
    figure, axes = style.subplots(height=3.7)
    for name, estimator in (("k2", k2), ("k3", k3)):
        free = style.line(name, marker="", linestyle=":", label="_")
        axes.plot(log_ratios, clamped_coefficient(log_ratios, estimator), **free)
        clamped = clamped_coefficient(log_ratios, estimator, value_bound=BOUND)
        label = f"{style.LABELS[name]} clamped"
        axes.plot(log_ratios, clamped, **style.line(name, marker="", label=label))
    axes.set_ylim(-16, 7)
    axes.set_xlabel(r"$\log \pi_\theta - \log \pi_{\mathrm{ref}}$ of the sampled token (nats)")
    axes.set_ylabel(r"coefficient of $\nabla \log \pi_\theta$")
    axes.annotate("dead zones: no pull back", (lowest, 0.6), fontsize=11.5)
    axes.legend(loc="lower right")
    return figure
