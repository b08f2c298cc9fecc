"""What a log shows as the KL, beside what it is."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.records import estimator_tail
from kl_term import style


def over_exact(curves: pd.DataFrame) -> pd.DataFrame:
    """What a log shows as the KL, ``sampled``, over what it is, ``exact``: a ``ratio`` a run,
    window and estimator.

    Means over the same completions, at the sampled tokens and over the vocabulary at their states,
    from the first step on.
    """
    moved = curves[curves["update"] > 0]
    long = moved.melt("reverse_kl", list(estimator_tail.NAMES), "estimator", "sampled")
    long = long.rename(columns={"reverse_kl": "exact"})
    return long.assign(ratio=long["sampled"] / long["exact"])


#: The upper edge of the panels of :func:`over_exact`.
HIGHEST = 3.0


def draw(table: pd.DataFrame) -> Figure:
    """What each of :func:`over_exact` shows over the exact KL, a panel an estimator."""
    names = list(table["estimator"].unique())
    figure, panels = style.subplots(len(names), 1, height=5.6, sharex=True, sharey=True)
    for panel, name in zip(panels, names, strict=True):
        rows = table[table["estimator"] == name]
        look = style.line(name)
        shown = rows["ratio"].clip(upper=HIGHEST)  # what lies above is drawn at the edge
        panel.scatter(rows["exact"], shown, 16, look["color"], marker=look["marker"], alpha=0.45)
        panel.axhline(1.0, color="#5A5A5A", linewidth=1.0)
        panel.set(title=look["label"], ylabel="reading / exact", xscale="log")
        panel.set_xticks([0.05, 0.1, 0.2, 0.5])
        style.plain_numbers(panel.xaxis)
    panels[-1].set_xlabel("exact reverse KL (nats per token), log scale")
    return figure
