"""What chapter 7 draws."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis.chapters.ch07_off_policy.readings import MOVES
from analysis.chapters.ch07_off_policy.sequences import WEIGHTS
from analysis.chapters.ch07_off_policy.trained import TOLD_OF_AGE
from analysis.evidence.names.off_policy import LARGE_BATCH, LOSSES, NAMES
from analysis.evidence.training_figures import KL_LABEL, trade_off
from analysis.records.summaries import by_variant
from kl_term import style

STALENESS = r"staleness $\mathrm{KL}(\pi_{\mathrm{old}} \Vert\, \pi_\theta)$ (nats)"

#: How each reading of the merged KL is drawn, and each weight and credit over sequences.
READING_LOOKS = {
    name: style.line(of, linestyle=dashes, label=label, markevery=4)
    for name, of, dashes, label in (
        ("old", "k1", "--", r"$\pi_{\mathrm{old}}$ inside"),
        ("detached", "k2", "-", "$\\pi_\\theta$ inside,\nno clip"),
        ("clipped", "reverse", "-", "$\\pi_\\theta$ inside,\nclipped"),
    )
}
WEIGHT_LOOKS = {
    weight: {"color": style.COLOURS[of], "linestyle": dashes, "label": label}
    for weight, (of, dashes, label) in zip(
        WEIGHTS,
        (
            ("none", "-", "token, own"),
            ("none", "--", "prefix, own"),
            ("forward", "-", "token, to go"),
            ("forward", "--", "prefix, to go"),
            ("exact", "-", "sequence, to go"),
        ),
        strict=True,
    )
}

#: Title of each way in which the policy left its sampler.
TITLES = dict(zip(MOVES, ("moved along $A$", "moved at random"), strict=True))


def draw_readings(curves: pd.DataFrame) -> Figure:
    """Error of the merged KL's expected gradient against staleness, by reading."""
    labels = {"xlabel": STALENESS, "ylabel": "relative error of the\nKL's expected gradient"}
    looks = {"kind": "name", "looks": READING_LOOKS, "ylim": (-0.05, 1.25)}
    return style.lines(curves, "staleness", **looks, **labels, **style.P10_TO_P90)


def draw_silenced(curves: pd.DataFrame) -> Figure:
    """Share of the KL's force that the clip removes, by beta and by how the policy moved."""
    colours = [style.COLOURS[name] for name in ("reverse", "none", "forward")]
    of_beta = dict(zip(sorted(curves.beta.unique()), colours, strict=False))
    looks = {b: {"color": c, "label": rf"$\beta$ = {b:g}"} for b, c in of_beta.items()}
    panels = {"panel": "move", "titles": TITLES, "ylim": (-0.02, 1.02)}
    panels |= {"band_of": ("silenced_10", "silenced_90")}
    labels = {"xlabel": STALENESS, "ylabel": "share of the KL's force silenced"}
    shown = {"kind": "beta", "looks": looks} | panels | labels
    figure = style.lines(curves, "staleness", "silenced_50", **shown)
    smallest = curves[curves.beta == min(of_beta)]
    for axes, move in zip(figure.axes, TITLES, strict=True):
        rows = smallest[smallest.move == move]
        axes.plot(rows.staleness, rows.opposing_50, color=colours[0], linestyle=":")
    return figure


def draw_sequence_weights(curves: pd.DataFrame) -> Figure:
    """Error against the sequence KL's gradient as samples age, by ratio level and credit."""
    labels = {"xlabel": STALENESS, "ylabel": "relative error of the\nexpected gradient"}
    looks = {"kind": ["level", "credit"], "looks": WEIGHT_LOOKS, "ylim": (-0.03, None)}
    return style.lines(curves, "staleness", **looks, **labels, height=4.2)


def draw_masking(table: pd.DataFrame) -> Figure:
    """Mean squared error of the averaged gradient against the number of sequences."""
    figure, axes = style.subplots(height=3.7)
    count = np.logspace(0, 3.5, 60)
    colours = [style.COLOURS[name] for name in ("none", "forward", "minimax01", "reverse")]
    for row, colour in zip(table.itertuples(), colours, strict=False):
        label = "no mask" if np.isinf(row.delta) else rf"$\delta$ = {row.delta:g}"
        axes.loglog(count, row.bias + row.variance / count, color=colour, label=label)
    axes.set_xlabel("sequences averaged (log scale)")
    axes.set_ylabel("squared error over the squared\nexact gradient (log scale)")
    style.label_line_ends(axes)
    return figure


# --- Of recorded runs

#: One of the three ways -> its estimator and placement.
WAYS = {
    "none": ("none", "loss"),
    "exact_loss": ("exact", "loss"),
    "merged_old": ("k1", "reward"),
    "merged_detached": ("k1", "reward"),
    LARGE_BATCH: ("k2", "loss"),
}
#: What is hollow and dotted beside its like: a weighted loss, the sampler's log-ratio.
HOLLOW = {"linestyle": ":", "markerfacecolor": "white"}


def ages(finals: pd.DataFrame) -> Figure:
    """Own accuracy and exact reverse KL over the age of the samples, one line a KL loss.

    Those that the title is about are drawn with their intervals, the others thin behind them.
    """
    table = by_variant(finals, ["own_accuracy", "reverse_kl"])
    table[["loss", "lag"]] = table["variant"].str.split("_lag_", expand=True)
    lags = list(table["lag"].unique())
    figure, panels = style.subplots(1, 2, height=3.7)
    titles = {"own_accuracy": "final accuracy", "reverse_kl": "reverse KL (nats)"}
    for panel, (metric, title) in zip(panels, titles.items(), strict=True):
        for place, name in enumerate(LOSSES):
            rows = table[(table["metric"] == metric) & (table["loss"] == name)]
            estimator, _, weighted = name.partition("_")
            look = style.line(estimator, label=LOSSES[name]) | (HOLLOW if weighted else {})
            if name not in TOLD_OF_AGE:
                panel.plot(rows["lag"], rows["mean"], **look | {"alpha": 0.5, "linewidth": 1.0})
                continue
            x = np.arange(len(rows)) + 0.06 * (place - 2.5)
            panel.plot(x, rows["mean"], **look)
            panel.errorbar(
                x, rows["mean"], style.bars(rows), fmt="none", elinewidth=1.2, ecolor=look["color"]
            )
        panel.set(title=title, xlabel="age (updates)", xlim=(-0.3, len(lags) - 0.7))
        panel.set_xticks(range(len(lags)), lags)
    panels[1].set_yscale("log")
    panels[1].yaxis.set_minor_locator(NullLocator())
    panels[1].set_yticks([0.05, 0.1, 0.2, 0.4], ["0.05", "0.1", "0.2", "0.4"])
    style.label_line_ends(panels[1])
    return figure


def ways(several: pd.DataFrame, large: pd.DataFrame) -> Figure:
    """Accuracy against exact reverse KL of the three ways, one line a way, one point a beta, from
    the final rows of several steps a rollout and of large batches."""
    batches = large[large["beta"] > 0].assign(variant=LARGE_BATCH)
    looks = {
        name: style.line(*drawn, label=NAMES[name]) | (HOLLOW if name == "merged_old" else {})
        for name, drawn in WAYS.items()
    }
    figure, axes = style.subplots(height=3.7)
    trade_off(axes, pd.concat([several[several["variant"] != "k2_loss"], batches]), looks)
    axes.set_xlabel(KL_LABEL)
    figure.legend(loc="outside upper center", ncols=2)
    return figure
