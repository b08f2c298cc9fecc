"""Figures of the chapter on the policy term: what its arms are called, and their curves.

These arms are no KL estimators: they take the house colours by their place in a figure, and are
named in it. Where they end is drawn by :func:`analysis.report.figures.fronts.dots`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.experiments.ablations.summaries import by_arm
from analysis.report import style

#: Whose colour and marker the arms of a figure take, in order.
LOOKS = ("exact", "k2", "k1", "k3", "minimax01", "forward", "k3_clip", "none", "k4", "reverse")

#: (metric, axis label)
Metric = tuple[str, str]

OBJECTIVES = {
    "grpo": "GRPO",
    "grpo_token_mean": "GRPO, token mean",
    "grpo_token_sum": "GRPO, token sum",
    "dr_grpo": "Dr. GRPO",
    "gspo": "GSPO, GRPO's clip",
    "gspo_narrow": "GSPO, narrow clip",
    "sequence": "sequence ratio",
    "mirror_descent": "mirror descent",
    "cispo": "CISPO",
    "reinforce": "REINFORCE",
    "rloo": "RLOO",
    "dpo": "DPO",
}
CLIPS = {"symmetric": "0.2", "higher": "0.28", "wide": "0.4", "unclipped": "none"}
ADVANTAGES = {
    "group_std": "over std",
    "std_min": "std at least 0.1",
    "group_centre": "centred",
    "leave_one_out": "leave one out",
    "drop_uniform": "equal groups out",
}
WEIGHTS = {
    "grpo": "GRPO, $1/|o|$",
    "token_mean": "token mean",
    "token_sum": "token sum",
    "dr_grpo": "Dr. GRPO",
}
BRAKES = {
    "grpo": "none",
    "linear_price": "price",
    "relative_reward": "relative",
    "soft_overlong": "soft overlong",
    "stop_loops": "loops stopped",
}
DAPO = {
    "grpo": "GRPO",
    "overlong_filtering": "+ overlong filtering",
    "clip_higher": "+ Clip-Higher",
    "soft_overlong": "+ soft overlong",
    "token_mean": "+ token mean",
    "dynamic_sampling": "+ dynamic sampling",
}
CREDITS = {
    "outcome": "outcome",
    "process": "process",
    "marginal": "marginal",
    "outcome_centre": "outcome, centred",
    "marginal_centre": "marginal, centred",
}


def curves(table: pd.DataFrame, panels: Mapping[str, Mapping[str, str]], metric: Metric) -> Figure:
    """One metric over training, one panel a group of arms, one line an arm, direct labels.

    Args:
        table: tidy curves of a recording.
        panels: title -> arm -> what it is called. What is called alike looks alike.
        metric: what is drawn.
    """
    name, label = metric
    arms = [arm for group in panels.values() for arm in group]
    summary = by_arm(table[table["arm"].isin(arms)], [name])
    window = _window(table)
    figure, axes = style.subplots(
        len(panels), 1, height=0.6 + 2.9 * len(panels), sharex=True, sharey=True, squeeze=False
    )
    names = dict.fromkeys(called for group in panels.values() for called in group.values())
    looks = dict(zip(names, LOOKS, strict=False))
    for panel, (title, group) in zip(axes[:, 0], panels.items(), strict=True):
        for arm, called in group.items():
            _line(panel, summary[summary["arm"] == arm], looks[called], called, window)
        panel.set_title(title)
        panel.set_ylabel(label)
    axes[-1, 0].set_xlabel("update")
    return _labelled(figure, axes[:, 0])


def metrics_over_training(
    table: pd.DataFrame, arms: Mapping[str, str], metrics: Sequence[Metric]
) -> Figure:
    """Several metrics of the same arms over training, one panel a metric."""
    kept = table[table["arm"].isin(arms)]
    summary = by_arm(kept, [name for name, _ in metrics])
    window = _window(table)
    figure, axes = style.subplots(
        len(metrics), 1, height=0.4 + 2.9 * len(metrics), sharex=True, squeeze=False
    )
    for panel, (name, label) in zip(axes[:, 0], metrics, strict=True):
        of_metric = summary[summary["metric"] == name]
        for look, (arm, called) in zip(LOOKS, arms.items(), strict=False):
            _line(panel, of_metric[of_metric["arm"] == arm], look, called, window)
        panel.set_ylabel(label)
    axes[-1, 0].set_xlabel("update")
    return _labelled(figure, axes[:, 0])


def _line(axes: Axes, rows: pd.DataFrame, look: str, called: str, window: float) -> None:
    middle = rows["update"] + window / 2
    colour = style.COLOURS[look]
    axes.plot(
        middle, rows["mean"], color=colour, marker=style.MARKERS[look], markevery=2, label=called
    )
    axes.fill_between(middle, rows["low"], rows["high"], color=colour, alpha=0.16, linewidth=0)


def _window(table: pd.DataFrame) -> float:
    """Updates that one logging window averages."""
    updates = np.unique(table["update"])
    return float(updates[1] - updates[0]) if len(updates) > 1 else 0.0


def _labelled(figure: Figure, panels: Sequence[Axes]) -> Figure:
    figure.draw_without_rendering()
    for panel in panels:
        style.label_line_ends(panel)
    return figure
