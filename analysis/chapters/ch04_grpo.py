"""Chapter 4: eight KL terms in one population of runs."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.chapters.claims import recorded
from analysis.chapters.comparisons import pairs, rows
from analysis.chapters.training_figures import (
    KL_PANELS,
    bands,
    kl_look,
    labelled,
    panels_of,
    seed_range,
)
from analysis.experiments import ablation, recording
from analysis.experiments.summaries import paired

# --- What it computes

COMPARISONS = 33
BETA = 0.3


def compare() -> dict[str, pd.DataFrame]:
    """Every comparison of the page, over the last tenth of the updates, seed by seed.

    ``elsewhere`` is the same population, trained on another make of processor.
    """
    there = recording.load(recording.RECORDED_ELSEWHERE).finals
    return {
        "here": paired(recorded("full").finals, ablation.COMPARISONS, beta=BETA),
        "half": paired(
            recorded("half_step").finals, pairs("exact_loss/none", "accuracy"), beta=BETA
        ),
        "elsewhere": paired(there, ablation.COMPARISONS, beta=BETA),
    }


#: Verdicts that the prose states.
SAYS = {
    "equivalent": [
        *rows("here", "k2_loss/exact_loss k1_reward/k2_loss k1_loss/none", "reverse_kl"),
        *rows("half", "exact_loss/none", "accuracy"),
    ],
    "suggestive": [
        *rows("here", "k2_reward/k1_reward k3_loss/k2_loss", "reverse_kl"),
        *rows("elsewhere", "k3_loss/k2_loss", "accuracy"),
    ],
    "unresolved": [
        *rows("here", "k1_loss/none k3_loss/k2_loss", "accuracy"),
        *rows("elsewhere", "k1_loss/none", "reverse_kl"),
    ],
}


# --- What it draws

#: Updates that one point of a curve averages; fewer where that would leave fewer points than these.
SPAN = 20
POINTS = 15


def span_of(curves: pd.DataFrame) -> int:
    """How many updates one point of a curve averages: whole logging windows."""
    span = min(SPAN, math.ceil(curves["update"].max() / POINTS) or 1)
    gaps = np.diff(np.unique(curves["update"]))
    return math.ceil(span / gaps.min()) * int(gaps.min()) if gaps.size else span


def training(curves: pd.DataFrame, metric: str, label: str, *, errorbar=seed_range) -> Figure:
    """A metric of the KL terms over training, losses above, rewards below; KLs on a log scale."""
    span = span_of(curves)
    table = ablation.coarsen(curves, span)
    table["update"] += span / 2
    figure, panels = panels_of(2, sharey=True)
    known = set(table["variant"])
    for panel, (title, variants) in zip(panels, KL_PANELS.items(), strict=True):
        shown = [name for name in variants if name in known]
        if "reward" in title:
            shown = [name for name in shown if name != "exact_loss"]
        looks = {name: kl_look(name) for name in shown}
        bands(panel, table, metric, looks, errorbar=errorbar)
        panel.set(title=title, ylabel=label, yscale="log" if metric.endswith("kl") else "linear")
    return labelled(figure, panels)
