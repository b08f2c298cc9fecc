"""Figures of chapter 18: what a teacher is worth, in operations and in length."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from analysis.experiments.ablations.summaries import by_arm
from analysis.report import style
from analysis.report.figures.objectives import LOOKS

#: Whose colour a lesson takes: that of its place among the learning curves, where it has one.
LESSONS = {
    "opd_immediate": "k2",
    "k3_loss": "k3_clip",
    "reverse_exact": "k3",
    "forward_exact": "forward",
    "supervised": "minimax01",
}


def costs(
    panels: Mapping[str, pd.DataFrame], others: Mapping[str, str], claimed: tuple[float, float]
) -> Figure:
    """How many times more GRPO spends than each lesson until an accuracy, log scale.

    A triangle instead of a circle: in some seeds GRPO never got there, and the ratio is at least
    this.

    Args:
        panels: title -> rows of one unit of
            :func:`analysis.experiments.chapters.distillation.cost_table`.
        others: lesson, one of ``LESSONS`` -> what it is called.
        claimed: range of the ratio that reports give, shaded.
    """
    figure, axes = style.subplots(len(panels), 1, height=0.8 + 3.0 * len(panels), sharey=True)
    for panel, (title, table) in zip(axes, panels.items(), strict=True):
        places = {level: i for i, level in enumerate(sorted(table["threshold"].unique()))}
        panel.axhspan(*claimed, color=style.COLOURS["none"], alpha=0.25, linewidth=0)
        panel.axhline(1.0, color=style.COLOURS["exact"], linewidth=1.0)
        for number, (other, called) in enumerate(others.items()):
            rows = table[table["other"] == other]
            places_of_rows = rows["threshold"].map(places)
            x = places_of_rows + 0.12 * (number - (len(others) - 1) / 2)
            colour = style.COLOURS[LESSONS[other]]
            look = {"fmt": "none", "color": colour, "elinewidth": 1.5}
            panel.errorbar(x, rows["mean"], yerr=style.bars(rows), **look)
            bound = (rows["missed"] > 0).to_numpy()
            for marker, chosen in (("o", ~bound), ("^", bound)):
                panel.plot(x[chosen], rows["mean"][chosen], marker, color=colour)
            panel.plot([], [], "o", color=colour, label=called)
        panel.set_xticks(list(places.values()), [f"{level:g}" for level in places])
        panel.set_yscale("log")
        panel.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
        panel.minorticks_off()
        panel.set_title(title)
        panel.set_ylabel("GRPO's cost over the lesson's")
    axes[-1].set_xlabel("accuracy reached")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def tradeoff(
    finals: pd.DataFrame, arms: Mapping[str, str], marks: Mapping[str, tuple[float, float]]
) -> Figure:
    """Final accuracy against final length, one point an arm, with bands over seeds.

    Args:
        finals: one row per member.
        arms: arm -> what it is called.
        marks: what policies that are not trained here are called -> (length, accuracy).
    """
    figure, axes = style.subplots(height=5.2)
    metrics = ("own_length", "own_accuracy")
    summary = by_arm(finals, metrics).set_index(["metric", "arm"])
    for look, (arm, called) in zip(LOOKS, arms.items(), strict=False):
        x, y = (summary.loc[(metric, arm)] for metric in metrics)
        axes.errorbar(
            x["mean"],
            y["mean"],
            xerr=style.bars(x),
            yerr=style.bars(y),
            fmt=style.MARKERS[look],
            color=style.COLOURS[look],
            elinewidth=1.5,
            label=called,
        )
    for called, (length, accuracy) in marks.items():
        axes.plot(length, accuracy, "o", mfc="none", color=style.COLOURS["exact"], markersize=11)
        axes.annotate(called, (length, accuracy), (9, 5), textcoords="offset points")
    axes.set_xlabel("final length of the policy's own completions (tokens)")
    axes.set_ylabel("final accuracy")
    axes.margins(x=0.12)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def with_level(figure: Figure, level: float, called: str) -> Figure:
    """The figure with a named dashed level across each panel."""
    for panel in figure.axes:
        panel.axhline(level, color=style.COLOURS["exact"], linewidth=1.2, linestyle="--")
        left = panel.get_xlim()[0]
        panel.annotate(called, (left, level), (4, 3), textcoords="offset points")
    return figure
