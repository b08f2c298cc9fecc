"""Chapter 16: what averaging tokens does to the length of answers, on ten starts."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.optimize import brentq

from analysis import style
from analysis.chapters.claims import recorded
from analysis.experiments import start_lengths, statistics

# --- What the chapter computes ----------------------------------------------------------------

#: How tokens are averaged -> what figures call it.
AVERAGES = {"mean": "$1/|o|$", "batch_mean": "one mean over the batch", "sum": "sum over tokens"}
#: Variant -> what tables call it.
NAMES = {
    f"{name}_{how}": f"{called}, {average.replace('$', '')}"
    for name, called in (
        ("only_k1", "k₁ alone"),
        ("none", "no KL term"),
        ("k1", "k₁ as a loss"),
        ("k2", "k₂ as a loss"),
    )
    for how, average in AVERAGES.items()
}


def tilted(lengths: np.ndarray, mass: np.ndarray, mean: float) -> tuple[float, float]:
    r"""Where k1 as a loss under :math:`1/|o|` leads at a mean length, with free logits.

    The natural flow that descends :math:`\mathbb{E}[1/|o|]` from :math:`\pi_0` is the tilt

    .. math:: \pi_\tau(o) \propto \pi_0(o)\, e^{-\tau / |o|}, \qquad
        \mathrm{KL}(\pi_\tau \Vert \pi_0) = -\tau\, \mathbb{E}_\tau[1/|o|]
        - \log \mathbb{E}_0\big[e^{-\tau / |o|}\big]

    Args:
        lengths, mass: [n], the lengths of the start's answers and their probabilities.
        mean: to be reached, between that of the start and the longest.

    Returns:
        :math:`\tau` and the KL of a whole answer, nats.

    Raises:
        ValueError: no tilt has that mean.
    """
    if not mass @ lengths <= mean < lengths.max():
        raise ValueError(f"mean must be from {mass @ lengths:g} to below {lengths.max():g}")

    def weights(tau: float) -> np.ndarray:
        logs = np.log(mass) - tau / lengths
        return np.exp(logs - logs.max())

    def excess(tau: float) -> float:
        return float(np.average(lengths, weights=weights(tau))) - mean

    longest = 1.0
    while excess(longest) < 0.0:
        longest *= 2.0
    tau = brentq(excess, 0.0, longest, xtol=1e-12) if excess(0.0) < 0.0 else 0.0
    share = weights(tau) / weights(tau).sum()
    return tau, float((share * (np.log(share) - np.log(mass))).sum())


def flow(means: np.ndarray) -> pd.DataFrame:
    """:func:`tilted` of the recorded starts: per start and mean, ``start``, ``length``, ``kl``."""
    rows = []
    for start, table in start_lengths.recorded().groupby("start"):
        lengths = table["length"].to_numpy(float)
        mass = table["completions"].to_numpy(float) / table["completions"].sum()
        first = float(mass @ lengths)
        for mean in means[(means > first) & (means < lengths.max())]:
            kl = tilted(lengths, mass, float(mean))[1]
            rows.append({"start": start, "length": mean, "kl": kl})
    return pd.DataFrame(rows)


def walked() -> pd.DataFrame:
    """Length and KL of a whole answer along the runs of k1 alone, means over the starts.

    Lengths are means over a logging window, and so is the KL: that of its first update and that of
    the next window's. A whole answer's KL is that of a token times the mean length.

    Returns:
        One row per way to average tokens and window: ``average``, ``update``, ``length``, ``kl``.
    """
    run = recorded("aggregation_length")
    curves = run.curves[run.curves["variant"].str.startswith("only_k1")]
    means = curves.groupby(["variant", "update"])[["length", "reverse_kl"]].mean().reset_index()
    parts = []
    for variant, rows in means.groupby("variant"):
        per_token = (rows["reverse_kl"] + rows["reverse_kl"].shift(-1)) / 2
        kept = rows.assign(average=str(variant).removeprefix("only_k1_"))
        parts.append(kept.assign(kl=per_token * rows["length"]).dropna(subset=["kl"]))
    return pd.concat(parts, ignore_index=True)[["average", "update", "length", "kl"]]


def spent(along: pd.DataFrame) -> pd.DataFrame:
    """The last rows of :func:`walked` whose mean length a tilt has, with ``least``, its KL."""
    rows = []
    for average, table in along.groupby("average", sort=False):
        curve = flow(table["length"].to_numpy()).groupby("length")["kl"].mean()
        reached = table[table["length"].isin(curve.index)]
        last = reached.iloc[-1]
        rows.append({**last, "average": average, "least": curve[last["length"]]})
    return pd.DataFrame(rows)


# --- What it draws ----------------------------------------------------------------------------


def draw_walk(along: pd.DataFrame) -> Figure:
    """KL of a whole answer over its mean length: runs of k1 alone, and the tilt of the theorem."""
    figure, axes = style.subplots(height=4.2)
    longest = start_lengths.recorded()["length"].max()
    curve = flow(np.linspace(along["length"].min(), longest - 0.05, 60))
    curve = curve.groupby("length")["kl"].agg(["mean", "min", "max", "size"])
    curve = curve[curve["size"] == curve["size"].max()]
    axes.plot(curve.index, curve["mean"], color="#111111", label="theorem: the tilt of $1/|o|$")
    axes.fill_between(curve.index, curve["min"], curve["max"], color="#111111", alpha=0.12, lw=0)
    for (average, called), look in zip(AVERAGES.items(), style.SERIES[1:], strict=False):
        rows = along[along["average"] == average]
        axes.plot(rows["length"], rows["kl"], **{**look, "linestyle": "none", "label": called})
    axes.set_xlabel("mean length of answers (tokens)")
    axes.set_ylabel("KL of a whole answer\nfrom the start (nats)")
    axes.legend()
    return figure


def draw_lengths() -> Figure:
    """Mean length over training, one panel with a reward, one without, a line an average."""
    run = recorded("aggregation_length")
    figure, panels = style.subplots(1, 2, height=3.9, sharey=False)
    groups = {"$k_1$ alone, no reward": ("only_k1", 1.0), "$k_1$ beside the reward": ("k1", 0.3)}
    middle = run.preset.config.log_every / 2
    for axes, (title, (name, beta)) in zip(panels, groups.items(), strict=True):
        for (average, called), look in zip(AVERAGES.items(), style.SERIES[1:], strict=False):
            curves = run.curves[
                (run.curves["variant"] == f"{name}_{average}") & (run.curves["beta"] == beta)
            ]
            starts = curves["seed"] % run.preset.config.start.count
            means = curves.groupby([starts, "update"])["length"].mean().unstack("update")
            mean, low, high = statistics.interval(means.to_numpy().T)
            at = means.columns + middle
            axes.plot(at, mean, **{**look, "label": called})
            axes.fill_between(at, low, high, color=look["color"], alpha=0.15, lw=0)
        axes.set(title=title, xlabel="update")
    panels[0].set_ylabel("length (tokens)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
