"""KL terms at equal KL, in every recorded setting."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.evidence.equal_kl import fit, look_of
from analysis.evidence.forest import forest
from analysis.evidence.names.kl_terms import NAMES
from analysis.evidence.predictions import judged, shown
from analysis.evidence.recorded import recorded
from analysis.records.designs import EQUAL
from analysis.records.preset import EQUAL_KL
from analysis.records.statistics import KL_RATIO_MARGIN
from analysis.records.summaries import by_variant
from kl_term import style

#: Presets that compare the reward of terms at equal KL -> what their setting is called.
SETTINGS = {
    "equal_kl_large": "8 tokens, 20 starts",
    "equal_kl": "8 tokens, 10 starts",
    "equal_kl_half_step": "half the step",
    "equal_kl_wide": "twice the width",
    "equal_kl_ended": "answers that end",
    "long_completions": "32 tokens",
    "long_completions_128": "up to 128 tokens",
}

#: Panels of the KL over the coefficient.
PLACED = {
    "KL in the loss": ("k1_loss", "k2_loss", "k3_loss", "exact_loss", "k3_loss_attached_prefix"),
    "KL in the reward": ("k1_reward", "k2_reward", "k3_reward"),
}


def costs() -> pd.DataFrame:
    """Reward less the exact KL's at equal KL, in every recorded setting.

    Returns:
        The rows of :func:`~analysis.evidence.predictions.judged` of a reward at equal KL, one a
        variant, with ``setting`` and ``margin``.
    """
    rows = []
    for preset, setting in SETTINGS.items():
        table = judged(preset)
        kept = table[(table["at"] == EQUAL_KL) & (table["other"] == "exact_loss")]
        margin = recorded(preset).preset.design.margin
        rows.append(kept.drop_duplicates("variant").assign(setting=setting, margin=margin))
    return pd.concat(rows, ignore_index=True)


def against(variant: str, other: str, *, preset: str = "equal_kl") -> dict[str, float]:
    """One variant less another in reward at equal KL, by the design's fit."""
    return fit(preset, variant, other).difference(recorded(preset).preset.design.margin)


def by_half(variant: str, *, preset: str = "equal_kl") -> dict[str, dict[str, float]]:
    """One variant less the exact KL in the ``near`` and the ``far`` half of the log KL compared."""
    fitted, margin = fit(preset, variant, "exact_loss"), recorded(preset).preset.design.margin
    middle = (fitted.low + fitted.high) / 2
    halves = {"near": fitted._replace(high=middle), "far": fitted._replace(low=middle)}
    return {name: half.difference(margin) for name, half in halves.items()}


#: Half of the log KL compared -> what a picture calls it.
HALVES = {"near": "nearer half", "far": "farther half"}


def halves(preset: str = "equal_kl_large") -> pd.DataFrame:
    """:func:`by_half` of k2 and of k3 as losses, and k3 less k2: what no design predicted.

    Returns:
        One row a difference: ``key``, ``label``, the columns of a difference, ``outcome`` (open).
    """
    rows = []
    for name in ("k2_loss", "k3_loss"):
        for half, difference in by_half(name, preset=preset).items():
            label = f"{NAMES[name]},\n{HALVES[half]}"
            rows.append({"key": f"{half}_{name}", "label": label, **difference})
    both = {"key": "k3_loss_k2", "label": f"{NAMES['k3_loss']}\n− {NAMES['k2_loss']}"}
    rows.append(both | against("k3_loss", "k2_loss", preset=preset))
    return pd.DataFrame(rows).assign(outcome="open")


#: Ratios of KLs on answers of several lengths that the text is about.
RATIOS = (
    ("equal_kl", "k3_loss_attached_prefix", "k1_reward"),
    ("long_completions", "k3_loss_attached_prefix", "k1_reward"),
    ("long_completions_128", "k3_loss_attached_prefix", "k1_reward"),
    ("long_completions", "k2_loss", "exact_loss"),
    ("long_completions", "k1_reward", "exact_loss"),
    ("long_completions", "k3_loss_attached_prefix", "exact_loss"),
)


def ratios() -> pd.DataFrame:
    """:data:`RATIOS` in logarithms, with ``design``, and ``compared`` as pages write it."""
    presets = dict.fromkeys(preset for preset, _, _ in RATIOS)
    table = pd.concat([judged(preset).assign(design=preset) for preset in presets])
    table = table[(table["metric"] == EQUAL) & (table["at"] != EQUAL_KL)]
    table = table.assign(compared=shown(table, NAMES)["compared"])
    return table.set_index(["design", "variant", "other"]).loc[list(RATIOS)].reset_index()


def span(preset: str) -> float:
    """By how much the exact KL's own reward changes over the log KL that it shares with k2."""
    fitted = fit(preset, "k2_loss", "exact_loss")
    reward = fitted.curve(1, np.linspace(fitted.low, fitted.high, 60)).mean
    return float(np.ptp(reward))


# --- What it draws


def draw_halves(table: pd.DataFrame, *, preset: str = "equal_kl_large") -> Figure:
    """:func:`halves`, a row a difference."""
    margin = recorded(preset).preset.design.margin
    return forest(table, list(table["label"]), "reward, difference at equal KL", margin=margin)


def draw_ratios() -> Figure:
    """:func:`ratios`, a row a ratio, on a log scale."""
    table = ratios()
    rows = zip(table["compared"], table["design"], strict=True)
    labels = [f"{compared},\n{SETTINGS[of].partition(', ')[0]}" for compared, of in rows]
    figure = forest(table, labels, "reverse KL, ratio, log scale", margin=np.log(KL_RATIO_MARGIN))
    (axes,) = figure.axes
    ticks = (0.67, 0.8, 1.0, 1.25, 1.5)
    axes.set_xticks(np.log(ticks), [f"{tick:g}" for tick in ticks])
    return figure


def draw_costs(table: pd.DataFrame) -> Figure:
    """Reward at equal KL, less that of the exact KL, of :func:`costs`: one row a setting."""
    settings = table.groupby("setting", sort=False)
    figure, axes = style.subplots(height=1.4 + 0.45 * len(settings))
    for place, (_, rows) in enumerate(settings):
        reach, margin = [place - 0.42, place + 0.42], rows["margin"].iloc[0]
        axes.fill_betweenx(reach, -margin, margin, color=style.QUIET, alpha=0.12, lw=0)
        shifts = np.linspace(-0.27, 0.27, len(rows))
        for shift, (_, row) in zip(shifts, rows.iterrows(), strict=True):
            look = look_of(row["variant"]) | {"linestyle": "none"}
            axes.errorbar(row["mean"], place + shift, xerr=style.bars(row), **look)
    axes.axvline(0.0, color=style.QUIET, linewidth=1.0)
    axes.set_yticks(range(len(settings)), list(settings.groups))
    axes.invert_yaxis()
    axes.set_xlabel("reward, less that of the exact KL, at equal KL")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once, ncols=2, loc="lower center", bbox_to_anchor=(0.45, 1.0))
    return figure


def draw_kls(finals: pd.DataFrame) -> Figure:
    """Reverse KL at the end over the coefficient, by :data:`PLACED`; dotted: no KL term."""
    figure, panels = style.subplots(len(PLACED), 1, height=4.2, sharex=True, sharey=True)
    table = by_variant(finals, ["reverse_kl"]).set_index("variant")
    for axes, (title, variants) in zip(panels, PLACED.items(), strict=True):
        axes.axhline(table.loc["none", "mean"], color=style.QUIET, linestyle=":")
        for name in variants:
            rows = table.loc[name]
            axes.errorbar(rows["beta"], rows["mean"], yerr=style.bars(rows), **look_of(name))
        axes.set(xscale="log", yscale="log", title=title, ylabel="reverse KL (nats)")
        style.plain_numbers(axes.yaxis)
        axes.legend(ncols=2)
    panels[-1].set_xlabel(r"coefficient $\beta$, log scale")
    panels[-1].xaxis.set_major_formatter("{x:g}")
    return figure
