"""How pages about recorded runs draw them: over training, at the end, and accuracy against KL.

Points and lines are means over the seeds; bars and bands are the intervals of
:mod:`analysis.records.statistics`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from analysis.records import statistics, summaries
from kl_term import style

#: KL term of a recorded variant -> its estimator and placement, which say how it is drawn.
KL_TERMS = {
    "none": ("none", "loss"),
    "k1_loss": ("k1", "loss"),
    "k2_loss": ("k2", "loss"),
    "k3_loss": ("k3", "loss"),
    "exact_loss": ("exact", "loss"),
    "k1_reward": ("k1", "reward"),
    "k2_reward": ("k2", "reward"),
    "k3_reward": ("k3", "reward"),
}
KL_PANELS = {
    "KL in the loss": ("none", "k1_loss", "k2_loss", "k3_loss", "exact_loss"),
    "KL in the reward": ("none", "k1_reward", "k2_reward", "k3_reward", "exact_loss"),
}
KL_LABEL = "final exact reverse KL (nats per token), log scale"
Look = Mapping[str, Any]  #: options of ``Axes.plot``


def kl_look(variant: str) -> Look:
    """Colour, marker and line style of a variant that is a KL term."""
    return style.line(*KL_TERMS[variant])


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Ends of the book's interval, as seaborn asks for them."""
    return tuple(statistics.interval(np.asarray(values, float))[1:])


def bands(
    axes: Axes,
    curves: pd.DataFrame,
    metric: str,
    variants: Mapping[str, Look],
    *,
    errorbar=t_interval,
) -> None:
    """One line a variant over training, the mean over the seeds, with a band."""
    for variant, look in variants.items():
        own = curves[curves["variant"] == variant]
        options = {"legend": False, "errorbar": errorbar, "err_kws": {"alpha": 0.18, "lw": 0}}
        options |= {"markevery": max(1, own["update"].nunique() // 8)}
        options |= {"markeredgecolor": look["color"]}
        drawn = {key: value for key, value in look.items() if key != "label"}
        sns.lineplot(own, x="update", y=metric, ax=axes, **options, **drawn)
        axes.get_lines()[-1].set_label(look["label"])


def dots(finals: pd.DataFrame, names: Mapping[str, str], metrics: Mapping[str, str]) -> Figure:
    """One row a variant, in the order of the table: means over runs with their intervals, one panel
    for each of at most two metrics (-> its axis label); dotted: the first variant."""
    order = list(dict.fromkeys(finals["variant"]))
    size = {"height": 0.8 + 0.26 * len(order), "sharey": True, "squeeze": False}
    figure, panels = style.subplots(1, len(metrics), **size)
    look = {"linestyle": "none", "capsize": 0.25, "err_kws": {"linewidth": 1.5}, "markersize": 6}
    for panel, (metric, label) in zip(panels[0], metrics.items(), strict=True):
        options = {"order": order, "errorbar": t_interval, "color": style.COLOURS["k2"]}
        sns.pointplot(finals, x=metric, y="variant", ax=panel, **options, **look)
        style.guide(panel, x=finals.loc[finals["variant"] == order[0], metric].mean())
        panel.set(xlabel=label, ylabel="")
        panel.locator_params(axis="x", nbins=3)
    panels[0][0].set_yticks(range(len(order)), [names.get(name, name) for name in order])
    return figure


def trade_off(axes: Axes, finals: pd.DataFrame, variants: Mapping[str, Look]) -> None:
    """Accuracy against exact reverse KL: one line a variant, one point a coefficient.

    A larger marker is a larger coefficient; bars are intervals over the seeds.
    """
    table = summaries.by_variant(finals, ["accuracy", "reverse_kl"])
    table = table.set_index(["metric", "variant", "beta"]).sort_index()
    for variant, look in variants.items():
        x, y = (table.loc[(metric, variant)] for metric in ("reverse_kl", "accuracy"))
        bars = {"xerr": style.bars(x), "yerr": style.bars(y), "elinewidth": 1.0}
        axes.errorbar(x["mean"], y["mean"], **bars, **look)
        inside = look.get("markerfacecolor", look["color"])
        for place, at in enumerate(zip(x["mean"], y["mean"], strict=True)):
            shape = {"marker": look["marker"], "markersize": 6.0 + 2.0 * place}
            axes.plot(*at, color=look["color"], markerfacecolor=inside, **shape)
    axes.set(xscale="log", ylabel="final accuracy")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    style.plain_numbers(axes.xaxis)


def trade_offs(finals: pd.DataFrame) -> Figure:
    """:func:`trade_off` of the KL terms, in the loss and in the reward."""
    figure, panels = style.subplots(len(KL_PANELS), 1, height=7.4, sharex=True, sharey=True)
    for panel, (title, variants) in zip(panels, KL_PANELS.items(), strict=True):
        trade_off(panel, finals, {variant: kl_look(variant) for variant in variants})
        panel.set_title(title)
        panel.legend(ncols=2)
    panels[-1].set_xlabel(KL_LABEL)
    return figure
