"""Figures of chapter 1: k1, k2 and k3 as values."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.report import style

NAMES = ("k1", "k2", "k3")
QUIET = "#5A5A5A"


def schulman(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Exact bias and standard deviation in each setting, with the sampled intervals over them.

    Args:
        tables: the name of a setting and its table; the first is drawn filled, the second open.
    """
    figure, (spread, bias) = style.subplots(1, 2, sharey=True, height=3.3)
    for index, (setting, table) in enumerate(tables.items()):
        for row, name in enumerate(reversed(NAMES)):
            height = row + 0.16 - 0.32 * index
            _dot(spread, table.loc[name], name, "std", height, filled=index == 0)
            _dot(bias, table.loc[name], name, "bias", height, filled=index == 0)
        spread.annotate(
            setting,
            (table.loc["k1", "exact_std"], 2 + 0.16 - 0.32 * index),
            xytext=(-9, 0) if index == 0 else (9, 0),
            textcoords="offset points",
            ha="right" if index == 0 else "left",
            va="center",
            fontsize="small",
        )
    spread.set_xscale("log")
    spread.set_xlim(1, 40)
    spread.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    spread.minorticks_off()
    spread.set_yticks(range(3), [style.LABELS[name] for name in reversed(NAMES)])
    spread.set_ylim(-0.5, 2.5)
    spread.set_xlabel("standard deviation / KL\n(log scale)")
    bias.axvline(0, color=QUIET, linewidth=1, linestyle=":")
    bias.set_xlabel("bias / KL")
    return figure


def tails(curves: Mapping[str, pd.DataFrame]) -> Figure:
    """Probability that one sample exceeds a multiple of the KL, one panel a pair of policies."""
    figure, panels = style.subplots(1, len(curves), sharey=True, height=3.9)
    for panel, (title, curve) in zip(panels, curves.items(), strict=True):
        for name in NAMES:
            inside = curve[name][curve[name] > 1e-7]
            panel.plot(inside.index, inside, **{**style.line(name), "marker": ""})
        panel.set(xscale="log", yscale="log", title=title, ylim=(1e-6, 1.5))
        panel.set_xticks([1, 10, 100], ["1", "10", "100"])
    panels[0].set_ylabel("probability that one sample\nis larger (log scale)")
    figure.supxlabel("value of the estimate / KL (log scale)", fontsize="medium")
    panels[-1].legend(loc="upper right")
    return figure


def drift(table: pd.DataFrame, crossing: float) -> Figure:
    """Bias and standard deviation against the distance, with the KL where k1 and k3 cross."""
    figure, (bias, spread) = style.subplots(2, 1, sharex=True, height=5.6, height_ratios=[1, 1.7])
    for name in NAMES:
        rows = table[table.estimator == name]
        look = {**style.line(name), "marker": ""}
        bias.plot(rows.kl, rows.bias, **look)
        spread.plot(rows.kl, rows["std"], **look)
    for panel in (bias, spread):
        panel.axvline(crossing, color=QUIET, linewidth=1, linestyle=":")
    spread.annotate(
        f"{crossing:.2f} nats",
        (crossing, 0.96),
        xycoords=("data", "axes fraction"),
        xytext=(-5, 0),
        textcoords="offset points",
        ha="right",
        va="top",
    )
    spread.set(xscale="log", yscale="log", xlabel="reverse KL from the reference (nats, log scale)")
    spread.set_ylabel("standard deviation / KL\n(log scale)")
    bias.set_ylabel("bias / KL")
    bias.annotate(
        "$k_1$ and $k_3$: exactly zero", (0.02, 0.14), xycoords="axes fraction", fontsize="small"
    )
    figure.get_layout_engine().set(rect=(0, 0, 0.93, 1))
    figure.draw_without_rendering()
    style.label_line_ends(spread)
    return figure


def binary_bias(curve: pd.DataFrame, ref_probability: float) -> Figure:
    """Relative bias of k2 for two tokens, above and below zero."""
    figure, axes = style.subplots(height=3.2)
    axes.axhline(0, color=QUIET, linewidth=1)
    axes.plot(curve.probability, curve.bias, **{**style.line("k2"), "marker": ""})
    axes.axvline(ref_probability, color=QUIET, linewidth=1, linestyle=":")
    axes.annotate(
        r"$\pi_\theta = \pi_{\mathrm{ref}}$",
        (ref_probability, 0.04),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
    )
    axes.set_xlim(0, 1)
    axes.set_xlabel("probability of the first token under the policy")
    axes.set_ylabel("bias of $k_2$ / KL")
    return figure


def stale(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Mean of k3 under stale samplers, weighted and not, against both divergences.

    Args:
        tables: a label and a table for each direction in which the sampler has fallen behind.
    """
    figure, axes = style.subplots(height=3.7)
    first = next(iter(tables.values()))
    for name in ("forward", "reverse"):
        look = {**style.line(name), "marker": ""}
        axes.plot(first.staleness, first[name], **look)
    for label, table in tables.items():
        axes.plot(table.staleness, table.k3, color=style.COLOURS["k3"], label="_")
        above = table.k3.iloc[-1] > table.reverse.iloc[-1]
        axes.annotate(
            label,
            (table.staleness.iloc[-1], table.k3.iloc[-1]),
            xytext=(0, 6 if above else -6),
            textcoords="offset points",
            ha="right",
            va="bottom" if above else "top",
            color=style.text_colour(style.COLOURS["k3"]),
        )
        every = table.iloc[:: max(1, len(table) // 8)]
        axes.plot(
            every.staleness,
            every.weighted,
            color=style.COLOURS["k3"],
            marker=style.MARKERS["k3"],
            linestyle="none",
            label=r"mean of $\rho\, k_3$" if table is first else "_",
        )
    axes.margins(y=0.14)
    axes.set_xlabel("staleness: KL of the policy from its sampler (nats)")
    axes.set_ylabel("nats")
    axes.legend(loc="lower left")
    return figure


def _dot(
    axes: Axes, row: pd.Series, name: str, column: str, height: float, *, filled: bool
) -> None:
    colour = style.COLOURS[name]
    axes.plot(
        row[f"exact_{column}"],
        height,
        marker=style.MARKERS[name],
        color=colour,
        markerfacecolor=colour if filled else "white",
        markersize=9,
    )
    low = row["std_low"] if column == "std" else row["bias_low"]
    high = row["std_high"] if column == "std" else row["bias_high"]
    axes.plot([low, high], [height, height], color="black", linewidth=1.4, marker="|", markersize=7)
