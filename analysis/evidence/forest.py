"""Differences of recorded variants as a picture, a row a comparison."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from kl_term import style

#: Outcome of a prediction -> marker, and whether it is filled.
MARKS = {"holds": ("o", True), "open": ("o", False), "refuted": ("X", True)}


def forest(table: pd.DataFrame, labels: Sequence[str], xlabel: str, *, margin: float) -> Figure:
    """Mean differences with their intervals, the first row at the top.

    Args:
        table: ``mean``, ``low`` and ``high``, and ``outcome`` where a difference was predicted:
            what holds is filled, what is open hollow, what is refuted a cross.
        labels: what the rows are called.
        margin: differences within it, either way, count as none: they are shaded.
    """
    colour = style.COLOURS["k2"]
    outcomes = table["outcome"] if "outcome" in table else ["holds"] * len(table)
    lines = sum(1 + label.count("\n") for label in labels)
    figure, axes = style.subplots(height=1.0 + 0.1 * len(table) + 0.19 * lines)
    axes.axvspan(-margin, margin, color=style.RC["grid.color"], alpha=0.6, linewidth=0)
    axes.axvline(0.0, color=style.QUIET, linewidth=1)
    for place, (row, outcome) in enumerate(zip(table.itertuples(), outcomes, strict=True)):
        marker, filled = MARKS[outcome]
        face = colour if filled else "white"
        axes.plot([row.low, row.high], [place, place], color=colour, linewidth=1.5)
        axes.plot(row.mean, place, marker, color=colour, markerfacecolor=face, markersize=7)
    axes.set_yticks(range(len(table)), labels)
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(xlabel)
    return figure
