"""Recorded runs whose KL is a sum over the top k tokens: chapter 23."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kl_term import style

#: Variant -> what tables call it.
NAMES = {
    "none": "no KL term",
    "exact": "full reverse sum",
    "top_tail": "two tokens, tail",
    "top_own": "own two tokens, tail",
    "top_plain": "two tokens, plain",
    "top_unnormalised": "two tokens, unnormalised",
    "top_renormalised": "two tokens, renormalised",
    "one_tail": "one token, tail",
    "one_own": "own token, tail",
    "k3": "k₃ as a loss",
    "k1_reward": "k₁ in the reward",
    "forward": "full forward sum",
    "forward_tail": "forward, two tokens, tail",
    "forward_plain": "forward, two tokens, plain",
}
_DRAWN = {
    "exact": style.SERIES[0] | {"label": "full sum"},
    "top_tail": style.SERIES[1] | {"label": "two tokens, tail"},
    "k1_reward": style.SERIES[2] | {"label": "$k_1$ in the reward"},
    "top_plain": style.SERIES[3] | {"label": "two tokens, plain"},
}


def ends(finals: pd.DataFrame) -> pd.DataFrame:
    """Means over the seeds by ``variant`` and ``beta``: ``reward``, and ``kl``, a geometric one."""
    groups = finals.assign(log_kl=np.log(finals["final_reverse_kl"])).groupby(
        ["variant", "beta"], sort=False
    )
    means = groups[["final_reward", "log_kl"]].mean()
    return pd.DataFrame({"reward": means["final_reward"], "kl": np.exp(means["log_kl"])})


def draw(finals: pd.DataFrame) -> Figure:
    """Where runs end over the coefficient, and what reward they have at which KL."""
    table = ends(finals)
    figure, (left, right) = style.subplots(1, 2, height=4.2)
    alone = table.loc["none"].iloc[0]
    for variant, look in _DRAWN.items():
        found = table.loc[variant]
        left.plot(found.index, found["kl"], **look)
        right.plot(found["kl"], found["reward"], **look)
    right.plot([alone["kl"]], [alone["reward"]], **style.SERIES[4] | {"label": "no KL term"})
    style.guide(left, y=float(alone["kl"]))
    left.set(title="KL to the reference", xlabel=r"$\beta$", ylabel="nats per token")
    left.set(xscale="log", yscale="log")
    right.set(title="Reward", xlabel="KL (nats per token)", xscale="log")
    right.legend(loc="lower left", fontsize=10)
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        style.plain_numbers(axis)
    return figure
