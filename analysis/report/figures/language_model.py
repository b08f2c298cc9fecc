"""Figures of the chapter on a language model."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from analysis.report import style
from analysis.report.figures.fronts import ARMS

#: The upper edge of the panels of :func:`readings`.
HIGHEST = 3.0


def beside(table: pd.DataFrame, label: str) -> Figure:
    """One row an arm, one marker a population: the last population filled, the others hollow.

    Args:
        table: of :func:`analysis.experiments.chapters.language_model.beside`.
        label: of the axis.
    """
    populations = list(table["population"].unique())
    arms = [arm for arm in ARMS if arm in set(table["arm"])]
    figure, axes = style.subplots(height=1.4 + 0.5 * len(arms))
    for index, population in enumerate(populations):
        rows = table[table["population"] == population].set_index("arm").loc[arms]
        filled = index == len(populations) - 1
        shift = 0.16 * (2 * index - len(populations) + 1)
        for place, (arm, row) in enumerate(rows.iterrows()):
            colour = style.COLOURS[ARMS[arm][0]]
            axes.errorbar(
                row["ratio"],
                place + shift,
                xerr=style.bars(row, "ratio"),
                fmt="o",
                color=colour,
                markerfacecolor=colour if filled else "white",
            )
        face = "#5A5A5A" if filled else "white"
        axes.plot([], [], "o", color="#5A5A5A", markerfacecolor=face, label=population)
    axes.axvline(1.0, color="#5A5A5A", linewidth=1.0, linestyle=":")
    axes.set_xscale("log")
    axes.set_xticks([0.2, 0.5, 1.0, 2.0, 5.0])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)
    axes.set_yticks(range(len(arms)), [_called(arm) for arm in arms])
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=len(populations))
    return figure


def readings(table: pd.DataFrame) -> Figure:
    """What each estimator shows over the exact KL, a panel an estimator, a point a reading.

    Args:
        table: of :func:`analysis.experiments.chapters.language_model.readings`.
    """
    names = list(table["estimator"].unique())
    figure, panels = style.subplots(len(names), 1, height=7.2, sharex=True, sharey=True)
    for panel, name in zip(panels, names, strict=True):
        rows = table[table["estimator"] == name]
        look = style.line(name)
        shown = rows["ratio"].clip(upper=HIGHEST)  # what lies above is drawn at the edge
        panel.scatter(rows["exact"], shown, 16, look["color"], marker=look["marker"], alpha=0.45)
        panel.axhline(1.0, color="#5A5A5A", linewidth=1.0)
        panel.set_title(look["label"])
        panel.set_ylabel("reading / exact")
        panel.set_xscale("log")
        panel.set_xticks([0.05, 0.1, 0.2, 0.5])
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
    panels[-1].set_xlabel("exact reverse KL (nats per token), log scale")
    return figure


def elsewhere(table: pd.DataFrame, shown: Sequence[tuple[str, float]]) -> Figure:
    """How far policies are from the reference, one row a skill, one marker an arm.

    Args:
        table: of :func:`analysis.experiments.chapters.language_model.by_skill`, of ``forward_kl``.
        shown: arm and beta of each marker, from the top; a larger marker for a larger beta.
    """
    skills = list(table["skill"].unique())
    rows = table.set_index(["arm", "beta", "skill"]).sort_index()
    figure, axes = style.subplots(height=1.9 + 0.85 * len(skills))
    for index, (arm, beta) in enumerate(shown):
        look = style.line(*ARMS[arm])
        look["label"] = _called(arm, beta)
        rank = sum(other < beta for name, other in shown if name == arm)
        values = rows.loc[(arm, beta)].loc[skills]
        places = [place + 0.8 * ((index + 0.5) / len(shown) - 0.5) for place in range(len(skills))]
        axes.errorbar(
            values["mean"],
            places,
            xerr=style.bars(values, "mean"),
            **look | {"linestyle": "none"},
            markersize=6 + 4 * rank,
            markerfacecolor=look["color"] if ARMS[arm][1] == "loss" else "white",
        )
    for place in range(1, len(skills)):
        axes.axhline(place - 0.5, color="#E4E4E4", linewidth=0.8)
    axes.grid(axis="y", visible=False)
    axes.set_xscale("log")
    axes.set_xlabel("forward KL at the reference's states (nats per token)")
    axes.set_yticks(range(len(skills)), skills)
    axes.invert_yaxis()
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
    return figure


def _called(arm: str, beta: float | None = None) -> str:
    estimator, placement = ARMS[arm]
    if estimator == "none":
        return style.LABELS[estimator]
    name = f"{style.LABELS[estimator]}, {placement}"
    return name if beta is None else f"{name}, $\\beta$={beta:g}"


def seen(table: pd.DataFrame, tokens: float) -> Figure:
    """How much of the KL lies in tokens of at least a given probability.

    Args:
        table: of :func:`analysis.experiments.chapters.language_model.seen`.
        tokens: that one update samples: rarer tokens than one in so many are mostly in no log.
    """
    figure, axes = style.subplots(height=4.2)
    shown = table[table["probability"] > 0]
    for name in ("k1", "k3"):
        axes.plot(shown["probability"], shown[name], **style.line(name))
    axes.axvline(1.0 / tokens, color="#5A5A5A", linewidth=1.0, linestyle=":")
    axes.annotate(
        "once in an update",
        (1.0 / tokens, 0.04),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        color="#5A5A5A",
    )
    axes.set_ylim(0.0, 1.08)
    axes.axhline(1.0, color="#5A5A5A", linewidth=1.0)
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.set_xlabel("probability of the rarest token counted, log scale")
    axes.set_ylabel("share of the exact KL")
    axes.legend(loc="center right")
    return figure
