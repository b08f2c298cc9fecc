"""Figures of chapter 10: DPO, the data it does not need, and the data that training does need."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.report import style
from analysis.report.figures.advantages import LOOKS, QUIET


def data_distributions(table: pd.DataFrame, *, best_limited: float, reference: float) -> Figure:
    """Objective of the DPO minimiser by who made the pairs, with every policy and with few."""
    figure, axes = style.subplots(height=3.9)
    rows = range(len(table))[::-1]
    tabular, limited = LOOKS[0], LOOKS[1]
    axes.hlines(rows, table.objective_limited, table.objective, color="#C9C9C9", linewidth=1.5)
    for column, look, name in (
        ("objective", tabular, "every policy"),
        ("objective_limited", limited, "two parameters"),
    ):
        axes.plot(
            table[column],
            rows,
            linestyle="none",
            marker=look["marker"],
            color=look["color"],
            label=name,
        )
    for value, text, dash in (
        (reference, "reference", ":"),
        (best_limited, "best with\ntwo parameters", "--"),
    ):
        axes.axvline(value, color=QUIET, linewidth=1, linestyle=dash)
        axes.annotate(
            text,
            (value, 1.01),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=10,
        )
    axes.set_yticks(rows, table.pairs)
    axes.grid(False, axis="y")
    axes.set_xlabel("expected reward less $\\beta$ KL")
    axes.legend(loc="upper left", fontsize=10)
    return figure


def finite_data(curves: pd.DataFrame) -> Figure:
    """KL of the fitted policy from the optimum against the number of comparisons."""
    figure, axes = style.subplots(height=3.9)
    for look, (name, curve) in zip(LOOKS, curves.groupby("pairs", sort=False), strict=False):
        axes.loglog(curve.number, curve["median"], **look, label=name)
        axes.fill_between(curve.number, curve.p10, curve.p90, color=look["color"], alpha=0.13, lw=0)
    axes.set_xlabel("comparisons (log scale)")
    axes.set_ylabel("KL from the optimum\n(nats, log scale)")
    axes.legend(loc="lower left", fontsize=10)
    return figure


def pair_paths(paths: dict[str, pd.DataFrame]) -> Figure:
    """Implicit rewards of the three completions while one pair's loss falls."""
    figure, panels = style.subplots(1, len(paths), sharey=True, height=3.7)
    for axes, (title, path) in zip(panels, paths.items(), strict=True):
        for look, name in zip(LOOKS, ("chosen", "rejected", "bystander"), strict=False):
            axes.plot(path.step, path[name], **{**look, "marker": ""}, label=name)
        axes.axhline(0, color=QUIET, linewidth=1)
        axes.set_title(title)
    panels[0].set_ylabel("implicit reward\n(change of log-prob times $\\beta$)")
    panels[0].legend(loc="lower left")
    figure.supxlabel("gradient steps", fontsize="medium")
    return figure


def imitation(curves: pd.DataFrame) -> Figure:
    """Expected steps off the path against the horizon, by how easily the student finds back."""
    names = {0.0: "never finds back", 0.1: "one time in ten", 1.0: "trained on its own states"}
    figure, axes = style.subplots(height=3.7)
    for look, (recovery, curve) in zip(LOOKS, curves.groupby("recovery"), strict=False):
        nearest = min(names, key=lambda c, r=recovery: abs(c - r))
        axes.loglog(curve.horizon, curve.cost, **look, label=names[nearest])
    axes.set_xlabel("horizon $T$ (steps, log scale)")
    axes.set_ylabel("expected steps off the\npath (log scale)")
    axes.legend(loc="upper left")
    return figure


def projection(curves: pd.DataFrame) -> Figure:
    """The mixture and the best Gaussian in either direction."""
    figure, axes = style.subplots(height=3.5)
    axes.fill_between(curves.x, curves.mixture, color="#D9D9D9", linewidth=0)
    axes.annotate("teacher", (2.75, 0.12), color=QUIET)
    for direction, place in (("forward", (-0.9, 0.25)), ("reverse", (-1.35, 0.62))):
        colour = style.COLOURS[direction]
        axes.plot(curves.x, curves[direction], color=colour)
        axes.annotate(f"best in {style.LABELS[direction]}", place, color=style.text_colour(colour))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("x")
    axes.set_ylabel("density")
    return figure


def routing(table: pd.DataFrame) -> Figure:
    """Largest change of a log-prob against the size of a parameter step."""
    figure, axes = style.subplots(height=3.5)
    for look, name in zip(LOOKS, ("replayed", "recomputed"), strict=False):
        shown = table[table[name] > 0]
        axes.loglog(shown["size"], shown[name], **look, label=f"routing {name}")
    axes.set_xlabel("standard deviation of the step (log scale)")
    axes.set_ylabel("largest change of a\nlog-prob (nats, log scale)")
    axes.legend(loc="lower right")
    return figure
