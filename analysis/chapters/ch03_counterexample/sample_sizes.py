"""How slowly the sample mean of k3 comes to its expectation."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import seaborn as sns
import torch
from matplotlib.figure import Figure

from analysis.evidence.gaussian_pairs import GaussianPair, log_probs
from kl_term import style
from kl_term.kl.surrogates import ESTIMATORS

#: Draws held in memory at a time: small enough to stay in a processor's cache.
CHUNK = 100_000


def sample_size_sweep(
    pair: GaussianPair, sizes: Sequence[int], *, replicates: int, draws: int, seed: int
) -> pd.DataFrame:
    """Relative error of the mean and relative standard deviation of k3, a row a sample: so many
    of each ``sample_size`` as asked for, or as ``draws`` allow."""
    frames = []
    for index, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed + index)
        left = max(1, min(replicates, draws // size))
        while left:
            rows = min(left, max(1, CHUNK // size))
            left -= rows
            z = torch.randn(rows, size, generator=generator, dtype=torch.float64)
            sample = ESTIMATORS["k3"](*log_probs(pair, z)) / pair.kl
            columns = {"bias": sample.mean(-1) - 1, "std": sample.std(-1)}
            frames.append(pd.DataFrame(columns).assign(sample_size=size))
    return pd.concat(frames, ignore_index=True)


def plot_sample_sizes(sweep: pd.DataFrame, predicted: pd.DataFrame, unseen_goal: float) -> Figure:
    """Error of the sample mean of k3 against sample size, and the rule of thumb far beyond it."""
    figure, axes = style.subplots(height=3.8)
    look = style.line("k3", markeredgecolor=style.COLOURS["k3"])
    look |= {"estimator": "median", "errorbar": ("pi", 50), "legend": False}
    look["err_kws"] = {"alpha": 0.25, "linewidth": 0}
    sns.lineplot(sweep, x="sample_size", y="bias", ax=axes, **look)
    rule = {"color": style.COLOURS["exact"], "linestyle": (0, (4, 2))}
    axes.plot(predicted.sample_size, -predicted.unseen, **rule)
    style.guide(axes, y=0, color="black", linewidth=1.2, linestyle="-")
    style.guide(axes, y=-unseen_goal)
    quiet = {"offset": (2, -4), "color": style.QUIET}
    style.note(axes, f"{unseen_goal:.0%} error", (1e2, -unseen_goal), **quiet)
    middle = predicted.iloc[len(predicted) // 2]
    text, at = "minus the unseen\nmass of $p$ / KL", (middle.sample_size, -middle.unseen)
    style.note(axes, text, at, offset=(8, -12))
    last = sweep.groupby("sample_size").bias.median().tail(1)
    text, at = "median and quartiles\nover samples", (last.index[0], last.iloc[0])
    style.note(axes, text, at, offset=(12, -16), colour="k3")
    axes.set(xscale="log", ylim=(-0.62, 0.1), xlabel="sample size $n$ (log scale)")
    axes.set_ylabel("relative error of the mean of $k_3$")
    return figure
