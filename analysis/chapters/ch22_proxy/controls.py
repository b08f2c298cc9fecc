"""Runs on a learned reward that are held without gold, or whose KL term comes late: chapter 22.

The design of :mod:`analysis.studies.presets.controls`, beside ``proxy_5k``, whose starts it shares.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from analysis.evidence.recorded import recorded
from analysis.records import statistics
from analysis.records.statistics import Interval
from kl_term import style

CONTROLS, BESIDE = "proxy_controls", "proxy_5k"
#: Variant -> what tables call it.
NAMES = {
    "held": "exact KL, held by a controller",
    "resets": "exact KL, three resets",
    "late_20": "exact KL from update 20",
    "late_50": "exact KL from update 50",
    "late_100": "exact KL from update 100",
    "late_200": "exact KL from update 200",
    "late_100_forward": "forward KL from update 100",
}
#: The coefficient of every late term, and of the exact KL that is there from the start.
BETA = 1.0
LATE = (20, 50, 100, 200)


def before(update: int) -> float:
    """Gold in the last window before a term comes at an update, mean over the starts."""
    curves = recorded(CONTROLS).curves
    own = curves[(curves["variant"] == f"late_{update}") & (curves["update"] < update)]
    return float(own.loc[own["update"] == own["update"].max(), "gold"].mean())


def less_than_from_the_start(variant: str) -> Interval:
    """Gold of a variant's final policies less that of the exact KL at one coefficient."""
    own, other = (
        table[(table["variant"] == name) & (table["beta"] == BETA)].set_index("seed")["final_gold"]
        for table, name in (
            (recorded(CONTROLS).finals, variant),
            (recorded(BESIDE).finals, "exact_loss"),
        )
    )
    return statistics.interval((own - other).to_numpy())


def draw() -> Figure:
    """Gold over training, mean over the starts: no term, one from the start, and late ones."""
    figure, axes = style.subplots(height=4.2)
    curves = recorded(BESIDE).curves
    for name, beta, look in (
        ("none", 0.0, style.line("none", label="no KL term")),
        ("exact_loss", BETA, style.line("exact", label="from the start")),
    ):
        own = curves[(curves["variant"] == name) & (curves["beta"] == beta)]
        line = own.groupby("update")["gold"].mean()
        axes.plot(line.index, line, **look | {"marker": ""})
    curves = recorded(CONTROLS).curves
    for update, look in zip(LATE, style.SERIES[1:], strict=True):
        line = curves[curves["variant"] == f"late_{update}"].groupby("update")["gold"].mean()
        line = line[line.index >= update - 10]
        axes.plot(line.index, line, **look | {"marker": "", "label": f"from update {update}"})
    axes.set(xlabel="update", ylabel="true reward", ylim=(0, 1))
    figure.legend(ncols=3, loc="outside upper center")
    return figure
