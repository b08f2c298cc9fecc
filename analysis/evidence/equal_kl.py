"""Variants at equal KL: the fit of two of them, and how reward goes with the KL reached."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from analysis.evidence.names.kl_terms import NAMES
from analysis.evidence.recorded import recorded, recorded_runs
from analysis.evidence.training_figures import KL_TERMS
from analysis.records import designs, hierarchical
from analysis.records.summaries import by_variant
from analysis.studies.presets.designed import COMPARED
from kl_term import style

#: Variant -> estimator and placement, which say how it is drawn.
TERMS = KL_TERMS | {"k3_loss_attached_prefix": ("k4", "loss")}


@cache
def fit(preset: str, variant: str, other: str) -> hierarchical.Fit:
    """Of two variants of a recorded preset, over the KL that both reach."""
    run, (reward, kl) = recorded_runs(preset), compared(preset)
    starts = designs.starts_of(run.preset)
    return designs.at_equal_kl(run.finals, variant, other, starts, reward, of=kl)


def compared(preset: str) -> tuple[str, str]:
    """The columns of reward and KL by which a design compares: of the last updates, or of the
    final policy on fresh answers."""
    kl = recorded(preset).preset.design.equal
    return kl.replace("reverse_kl", "reward"), kl


def draw_curves(names: Sequence[str] = COMPARED, *, preset: str = "equal_kl") -> Figure:
    """Reward over KL: points are means of a variant at one coefficient, lines the fits.

    Each line is that of the fit against the exact KL, over the central runs of the variant.
    """
    finals, (reward, kl) = recorded_runs(preset).finals, compared(preset)
    figure, axes = style.subplots(height=4.2)
    means = by_variant(recorded(preset).finals, [reward, kl])
    means = means.set_index(["metric", "variant"])
    for name in ("none", "exact_loss", *names):
        look = look_of(name)
        x, y = (means.loc[(metric, [name]), :] for metric in (kl, reward))
        bars = {"xerr": style.bars(x), "yerr": style.bars(y), "elinewidth": 1.0}
        axes.errorbar(x["mean"], y["mean"], **bars, **look | {"linestyle": "none"})
        if name == "none":
            continue
        other = names[0] if name == "exact_loss" else "exact_loss"
        own = np.log(finals.loc[finals["variant"] == name, kl])
        log_kl = np.linspace(*np.percentile(own, hierarchical.CENTRAL), 40)
        mean, low, high = fit(preset, name, other).curve(0, log_kl)
        axes.plot(np.exp(log_kl), mean, color=look["color"], linestyle=look["linestyle"])
        if name == "exact_loss":
            axes.fill_between(np.exp(log_kl), low, high, color=look["color"], alpha=0.12, lw=0)
    axes.set(xscale="log", ylabel="reward at the end")
    axes.set_xlabel("exact reverse KL at the end (nats per token), log scale")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    style.plain_numbers(axes.xaxis)
    axes.legend(ncols=2)
    return figure


def look_of(variant: str) -> dict[str, Any]:
    """Colour, marker, line and label of a KL term."""
    return style.line(*TERMS[variant], label=NAMES[variant])
