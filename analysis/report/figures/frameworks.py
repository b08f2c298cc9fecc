"""Figures of the chapter on frameworks: what their KL terms descend and where they let go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.report import style

#: Colour of what a term descends, by the name the audit gives it.
DESCENDS = {
    "reverse KL": style.COLOURS["reverse"],
    "forward KL": style.COLOURS["forward"],
    "nothing": style.COLOURS["none"],
}

#: Framework and setting of each line of the staleness figure, its look and its label.
LINES = {
    ("TRL", "use_bias_correction_kl"): ("reverse", "-", "exact: TRL"),
    ("TRL", "without"): ("k3", "-", "$k_3$: verl, Liger"),
    ("NeMo-RL", "k3"): ("k2", "--", "NeMo-RL"),
    ("slime", "k2, use-unbiased-kl"): ("k2", "-", "$ρ k_2$: slime"),
    ("slime", "k1"): ("k1", "-", "$k_1$: slime"),
}


def descents(table: pd.DataFrame) -> Figure:
    """Relative error on fresh and on stale samples, one row a setting, coloured by its descent."""
    rows = table[table.fresh_descends.notna()].iloc[::-1].reset_index(drop=True)
    floor = 1e-3
    figure, axes = style.subplots(height=0.27 * len(rows) + 1.2)
    for y, row in enumerate(rows.itertuples()):
        errors = [max(row.fresh_error, floor), max(row.stale_error, floor)]
        colour = DESCENDS.get(row.fresh_descends, style.COLOURS["k1"])
        axes.plot(errors, [y, y], color=colour, linewidth=1.2)
        axes.plot(errors[0], y, marker="o", color=colour, linestyle="none")
        axes.plot(errors[1], y, marker="s", color=colour, markerfacecolor="white", linestyle="none")
    names = [_name(row) + (" *" if row.default else "") for row in rows.itertuples()]
    axes.set_yticks(range(len(rows)), names, fontsize=9.5)
    axes.set_xscale("log")
    axes.set_xticks([floor, 1e-2, 1e-1, 1], ["exact", "0.01", "0.1", "1"])
    axes.set_xlabel("relative error (log scale)")
    axes.grid(False, axis="y")
    for name, colour in DESCENDS.items():
        axes.plot([], [], marker="o", linestyle="none", color=colour, label=name)
    axes.plot([], [], marker="o", linestyle="none", color=style.COLOURS["k1"], label="neither KL")
    axes.legend(loc="upper center", bbox_to_anchor=(0.2, -0.09), ncols=4, fontsize=9.5)
    return figure


def staleness(curves: pd.DataFrame) -> Figure:
    """Relative error against the reverse KL's gradient as samples age, by setting."""
    figure, axes = style.subplots(height=3.9)
    for key, (name, dashes, label) in LINES.items():
        curve = curves[(curves.framework == key[0]) & (curves.setting == key[1])]
        axes.plot(
            curve.staleness,
            curve["median"],
            color=style.COLOURS[name],
            marker=style.MARKERS[name],
            markevery=max(1, len(curve) // 5),
            linestyle=dashes,
            label=label,
        )
    axes.set_ylim(-0.05, 1.7)
    axes.set_xlabel(r"staleness $\mathrm{KL}(\pi_{\mathrm{old}} \Vert\, \pi_\theta)$ (nats)")
    axes.set_ylabel("relative error of the\nexpected gradient")
    style.label_line_ends(axes)
    return figure


def dead_zones(zones: pd.DataFrame, *, furthest: float) -> Figure:
    """Where on the log-ratio each clamped setting has a gradient (bars) and where it has none."""
    clamped = zones[zones[["below", "above"]].notna().any(axis=1)].iloc[::-1]
    figure, axes = style.subplots(height=0.3 * len(clamped) + 1.1)
    low = np.where(clamped.below.isna(), -furthest, clamped.below)
    high = np.where(clamped.above.isna(), furthest, clamped.above)
    axes.barh(range(len(clamped)), high - low, left=low, color=style.COLOURS["k3"], height=0.55)
    names = [_name(row) for row in clamped.itertuples()]
    axes.set_yticks(range(len(clamped)), names, fontsize=9.5)
    axes.axvline(0, color="#5A5A5A", linewidth=1, linestyle=":")
    axes.set_xlim(-furthest, furthest)
    axes.grid(False, axis="y")
    axes.set_xlabel("log-ratio (nats)")
    return figure


def _name(row: Any) -> str:
    """Framework and setting, the longest flag shortened so that the axes keep some room."""
    setting = row.setting.replace("use_on_policy_kl_approximation", "on-policy approx.")
    return f"{row.framework}: {setting}"
