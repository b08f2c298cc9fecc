"""Chapter 17: what recorded runs on stale and mismatched samples say, and bandits behind experts.

The bandits are trained here, through a mixture of experts whose sampler routes a little otherwise:
the inference engine's router sees other rounding than the trainer's, so near a tie it picks another
expert. Either the trainer replays the experts that sampled, or it routes again by itself.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis.evidence.names.off_policy import LARGE_BATCH, LOSSES, NAMES
from analysis.evidence.recorded import recorded
from analysis.evidence.routed_bandits import ROUTINGS
from analysis.evidence.stale_training import final_within
from analysis.evidence.training_figures import KL_LABEL, trade_off
from analysis.records.summaries import by_variant, paired
from kl_term import style

# --- The recorded runs and what they are called -----------------------------------------------

RUNS = (
    "staleness",
    "stale_coefficients",
    "stale_weighted_k3",
    "three_ways",
    "three_ways_half_step",
    "three_ways_on_policy",
    "stale_masking",
    "mismatch",
    "partial_rollouts",
    "stale_starts",
)
#: The losses that the figure of ages is about.
TOLD_OF_AGE = ("none", "k2", "exact")
#: Age of the oldest samples of ``staleness``, in updates; beta of most comparisons.
OLDEST, BETA = 16, 0.3


# --- What the recorded runs cost --------------------------------------------------------------


def budgets() -> pd.DataFrame:
    """Partial rollouts less whole ones in accuracy, at equal ``updates`` and decoding ``steps``."""
    run = recorded("partial_rollouts")
    config = run.preset.config
    # Decoding steps of an update that follow one another.
    each = {v.name: v.sampler.budget or config.task.completion_length for v in run.preset.variants}
    ended = run.curves["update"] + config.log_every
    curves = run.curves.assign(steps=ended * run.curves["variant"].map(each))
    parts = []
    for budget in (8, 4):
        every, last = f"budget_{budget}_all", f"budget_{budget}_current"
        whole = [(every, "whole", "accuracy")]
        kept = curves[curves["variant"].isin((every, "whole"))]
        within = final_within(kept, "steps", budget * config.updates)
        at_updates = paired(run.finals, [*whole, (last, every, "accuracy")])
        parts += [at_updates.assign(at="updates"), paired(within, whole).assign(at="steps")]
    return pd.concat(parts, ignore_index=True)


# --- Bandits behind a mixture of experts ------------------------------------------------------


def gains_of_replay(curves: pd.DataFrame, *, last: int = 10) -> pd.DataFrame:
    """Replayed less recomputed reward over the ``last`` updates, by noise of the sampler's router.

    Of :func:`~analysis.evidence.routed_bandits.train_bandits`, all noises and both routings.
    One row per ``noise``: the columns of
    :func:`analysis.records.summaries.paired`, and of the recomputed runs ``flipped`` and
    ``ess``.
    """
    late = curves[curves["update"] > curves["update"].max() - last]
    ends = late.groupby(["noise", "variant", "seed"], as_index=False).mean()
    rows = []
    for noise, own in ends.groupby("noise"):
        means = own.loc[own["variant"] == "recomputed", ["flipped", "ess"]].mean()
        found = paired(own, [(*ROUTINGS, "reward")])
        rows.append(found.assign(noise=noise, **means))
    return pd.concat(rows, ignore_index=True)


# --- What it draws ----------------------------------------------------------------------------

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
