"""Recorded runs whose reference moves, or whose coefficient follows the KL: chapter 24."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kl_term import style

RUNS = ("resets", "polyak", "adaptive_beta")
#: Variant -> what tables call it.
NAMES = {
    "none": "no KL term",
    "reverse_strong": "reverse KL, β = 2",
    "reverse_weak": "reverse KL, β = 0.5",
    "reverse_resets": "reverse KL, β = 2, three resets",
    "reverse_often": "reverse KL, β = 2, a reset every 5",
    "forward_strong": "forward KL, β = 2",
    "forward_weak": "forward KL, β = 0.5",
    "forward_resets": "forward KL, β = 2, three resets",
    "reverse_half": "reverse KL, β = 2, three averages of a half",
    "reverse_between": "reverse KL, β = 0.8",
    "reverse_ema": "reverse KL, β = 2, averaged all the time",
    "fixed": "k₂, fixed β",
    "reads_k1": "k₂, controller on k₁",
    "reads_k3": "k₂, controller on k₃",
    "doubling": "k₂, doubling",
    "descends_nothing": "k₁ as a loss, controller on k₁",
}
_TRUE = {
    "reverse_weak": style.SERIES[2] | {"label": r"one run, $\beta / 4$"},
    "reverse_resets": style.SERIES[0] | {"label": "resets"},
    "reverse_strong": style.SERIES[3] | {"label": r"one run, $\beta$"},
}


def along(curves: pd.DataFrame, variant: str, metric: str, beta: float | None = None) -> pd.Series:
    """A metric over the updates, averaged over the seeds of a variant."""
    rows = curves[curves["variant"] == variant]
    if beta is not None:
        rows = rows[rows["beta"] == beta]
    return rows.groupby("update")[metric].mean()


def draw(resets: pd.DataFrame, adaptive: pd.DataFrame) -> Figure:
    """What runs with resets spend beside what their log reads; and coefficients over training."""
    figure, (left, right) = style.subplots(1, 2, height=4.2)
    for variant, look in _TRUE.items():
        line = along(resets, variant, "reverse_kl")
        left.plot(line.index, line, **look | {"marker": ""})
    read = along(resets, "reverse_resets", "k1")
    left.plot(read.index, read, **style.SERIES[1] | {"marker": "", "label": "resets, as logged"})
    left.set(title="KL to the reference", xlabel="update", ylabel="nats per token")
    left.set_ylim(top=1.6 * left.get_ylim()[1])
    left.legend(loc="upper left")
    betas = sorted(set(adaptive[adaptive["variant"] == "reads_k1"]["beta"]))
    for beta, look in zip(betas, style.SERIES, strict=False):
        line = along(adaptive, "reads_k1", "coefficient", beta)
        right.plot(line.index, line, **look | {"marker": "", "label": f"from {beta:g}"})
    line = along(adaptive, "descends_nothing", "coefficient")
    right.plot(line.index, line, **style.SERIES[4] | {"marker": "", "label": "$k_1$ as a loss"})
    right.set(title="Coefficient", xlabel="update", yscale="log")
    right.legend(loc="upper left")
    style.plain_numbers(right.yaxis)
    return figure


def held(finals: pd.DataFrame, variant: str, targets: dict[float, float]) -> pd.DataFrame:
    """What a controller was to hold and what the policy ended at: geometric means over the seeds.

    Returns:
        A row per first coefficient: ``beta``, ``target``, ``ended`` (exact reverse KL of fresh
        answers) and ``last`` (the coefficient).
    """
    rows = []
    for beta, target in targets.items():
        own = finals[(finals["variant"] == variant) & (finals["beta"] == beta)]
        means = np.exp(np.log(own[["final_reverse_kl", "coefficient"]]).mean())
        rows.append({"beta": beta, "target": target, "ended": means.iloc[0], "last": means.iloc[1]})
    return pd.DataFrame(rows)
