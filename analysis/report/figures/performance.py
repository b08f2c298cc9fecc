"""Figures of the performance chapter: time per member-update, and where it goes."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from analysis.experiments.benchmark.measure import Benchmark, best, floors, medians
from analysis.report import style

#: Colours and markers of the two sizes.
LOOKS = {32: "k2", 64: "k1"}
#: Yardstick -> its name and line style.
YARDSTICKS = {"plain": ("plain trainer, at its best", "--"), "trl": ("TRL, at its best", ":")}


def time_over_members(benchmark: Benchmark) -> Figure:
    """Milliseconds per member-update over the number of members, one panel a size."""
    table, least = medians(benchmark), floors(benchmark)
    widths = sorted(table["width"].unique())
    figure, panels = style.subplots(len(widths), 1, height=3.3 * len(widths), sharex=True)
    for panel, width in zip(_each(panels), widths, strict=True):
        _draw_population(panel, table[table["width"] == width], LOOKS.get(width, "k3"))
        for kind, (label, dashes) in YARDSTICKS.items():
            if (table["kind"] == kind).any():
                row = best(table, kind, width)
                panel.axhline(row["ms"], color="#5A5A5A", linestyle=dashes, label=label)
        floor = least[(least["width"] == width) & (least["processes"] == 1)]
        panel.axhline(floor["flops_ms"].item(), color="#111111", label="arithmetic, one core")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
        counts = table.loc[table["kind"] == "population", "members"].unique()
        panel.xaxis.set_major_locator(FixedLocator(sorted(counts)))
        panel.set_ylabel("ms per member-update")
        panel.set_title(f"{width} channels")
    handles, labels = _each(panels)[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    _each(panels)[-1].set_xlabel("members trained together (both axes log)")
    return figure


def phases(benchmark: Benchmark) -> Figure:
    """The share of an update's time in each phase, one bar a size."""
    shares = benchmark.phases.pivot(index="width", columns="phase", values="share")
    names = list(benchmark.phases["phase"].unique())
    figure, axes = style.subplots(height=3.4)
    labels = [f"{width} channels" for width in shares.index]
    start = pd.Series(0.0, shares.index)
    for name, key in zip(names, style.COLOURS, strict=False):
        colour = style.COLOURS[key]
        axes.barh(labels, 100 * shares[name], left=100 * start, color=colour, label=name)
        start = start + shares[name]
    axes.set_xlabel("share of an update's time (%)")
    axes.grid(False, axis="y")
    figure.legend(loc="outside upper center", ncols=4)
    return figure


def _draw_population(axes: Axes, table: pd.DataFrame, look: str) -> None:
    rows = table[(table["kind"] == "population") & (table["processes"] == 1)].sort_values("members")
    style_of = style.line(look) | {"label": "population, one core"}
    axes.errorbar(
        rows["members"],
        rows["ms"],
        yerr=style.bars(rows, "ms"),
        **style_of,
    )


def _each(panels: Axes | list[Axes]) -> list[Axes]:
    return [panels] if isinstance(panels, Axes) else list(panels)
