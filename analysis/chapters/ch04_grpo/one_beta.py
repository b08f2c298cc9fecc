"""What recorded designs say of KL terms at one coefficient, beyond their predictions."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.evidence import predictions
from analysis.evidence.forest import forest
from analysis.evidence.names.kl_terms import NAMES
from analysis.evidence.recorded import recorded, recorded_runs
from analysis.records import recording
from analysis.records.summaries import pairs_of

#: The recorded designs, at full and at half the step size.
RECORDED, HALF_STEP = "equal_kl", "half_step"
BETA = 0.3
#: What the prose compares at that coefficient beyond the predictions of the designs.
QUOTED = {
    RECORDED: (
        *pairs_of("k1_loss/none k2_reward/none k2_reward/k1_reward k3_loss/k2_loss", "reverse_kl"),
        *pairs_of("exact_loss/none k1_loss/none k3_loss/k2_loss", "accuracy"),
    ),
    HALF_STEP: (("k1_loss", "none", "accuracy"), ("exact_loss", "none", "average")),
}
#: Recordings whose starts the prose speaks of, and what it calls them.
STARTS_QUOTED = {"equal_kl_large_cuda": "terms", "distillation_sparse_cpu": "teacher"}


def at_beta(preset: str) -> pd.DataFrame:
    """Rows of :func:`analysis.evidence.predictions.judged` of what no design predicts."""
    return pd.DataFrame([predictions.unpredicted(preset, *pair, BETA) for pair in QUOTED[preset]])


def same_runs() -> pd.Series:
    """Share of the runs of ``equal_kl_wide`` whose accuracy in a window is the same number on the
    CPU and on the GPU, by the window's first update."""
    there = recording.load(recording.RESULTS / "equal_kl_wide_cuda").curves
    both = recording.compared(recorded_runs("equal_kl_wide").curves, there)
    accuracy = both[both["metric"] == "accuracy"]
    return (accuracy["difference"] == 0.0).groupby(accuracy["update"]).mean()


# --- What it draws

#: Differences in accuracy that the text is about, in its order; the second step is half the first.
ACCURACIES = (
    (RECORDED, "exact_loss", "none"),
    (HALF_STEP, "exact_loss", "none"),
    (RECORDED, "k1_loss", "none"),
    (HALF_STEP, "k1_loss", "none"),
    (RECORDED, "k3_loss", "k2_loss"),
)


def accuracies() -> pd.DataFrame:
    """:data:`ACCURACIES` at one coefficient, as pages show them, with ``design``; what was not
    predicted is ``open``."""
    tables = []
    for preset in (RECORDED, HALF_STEP):
        asked = pd.concat([predictions.judged(preset), at_beta(preset).assign(outcome="open")])
        tables.append(predictions.shown(asked, NAMES).assign(design=preset))
    table = pd.concat(tables)
    table = table[table["metric"] == "accuracy"].set_index(["design", "variant", "other"])
    return table.loc[list(ACCURACIES)].reset_index()


def draw_accuracies() -> Figure:
    """:func:`accuracies` as a picture, a row a difference."""
    table = accuracies()
    at = {RECORDED: "", HALF_STEP: "\nat half the step"}
    rows = zip(table["compared"], table["design"], strict=True)
    labels = [compared + at[design] for compared, design in rows]
    margin = recorded(RECORDED).preset.design.margin
    return forest(table, labels, "difference in final accuracy", margin=margin)
