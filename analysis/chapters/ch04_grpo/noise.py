"""The recorded noise of the gradients of KL terms."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.evidence.equal_kl import look_of
from kl_term import style
from kl_term.numbers import HALF_WIDTH


def noise_numbers(table: pd.DataFrame) -> dict[str, tuple[float, str]]:
    """What the prose says of the recorded noise of gradients, and how it is written.

    Ratios of the theory's noise to that of k2 as a loss, where they are taken, and how many points
    have their line inside their interval.
    """
    noise = table.pivot(index="reverse_kl", columns="term")
    by_term = noise["theory"]
    exact, k3 = (by_term[name] / by_term["k2_loss"] for name in ("exact_loss", "k3_loss"))
    inside = (table["sampled"] - table["theory"]).abs() < HALF_WIDTH * table["standard_error"]
    return {
        "exact_low": (exact.min(), ".2f"),
        "exact_high": (exact.max(), ".2f"),
        "k3_near": (k3.iloc[0], ".2f"),
        "k3_far": (k3.iloc[-1], ".0f"),
        "nearest": (by_term.index[0], ".2f"),
        "farthest": (by_term.index[-1], ".2f"),
        "inside": (inside.sum(), "d"),
        "points": (len(table), "d"),
        "checkpoints": (len(by_term), "d"),
    }


def draw_noise(table: pd.DataFrame) -> Figure:
    """Recorded noise over the KL reached: lines by the theory, points as the trainer sampled it."""
    figure, axes = style.subplots(height=4.0)
    for term, rows in table.groupby("term", sort=False):
        look, distance = look_of(term), rows["reverse_kl"]
        axes.plot(distance, rows["theory"], **look | {"marker": ""})
        above = HALF_WIDTH * rows["standard_error"]
        below = above.where(above < rows["sampled"], 0.0)  # no logarithm shows zero
        axes.errorbar(
            distance, rows["sampled"], yerr=[below, above], **look | {"linestyle": "", "label": ""}
        )
        for _, row in rows[below == 0.0].iterrows():
            at = (row["reverse_kl"], row["sampled"])
            style.note(axes, "its interval\nreaches below zero", at, offset=(-10, 0), colour="k3")
    axes.set(xscale="log", yscale="log", ylabel="noise of an update's\ngradient, log scale")
    axes.set_xlabel("exact reverse KL (nats per token), log scale")
    style.plain_numbers(axes.xaxis, axes.yaxis)
    axes.legend()
    return figure
