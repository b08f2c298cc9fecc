"""Chapter 19: KL terms at equal KL, on ten and twenty starts, and the noise of their gradients."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from analysis.evidence.equal_kl import fit, look_of
from analysis.evidence.predictions import judged
from analysis.evidence.recorded import recorded
from analysis.records.config import Run
from analysis.records.preset import EQUAL_KL
from analysis.records.summaries import by_variant
from analysis.studies.presets import make_preset
from analysis.training.trainer import PopulationTrainer
from kl_term import style
from kl_term.kl.term import KLTerm

# --- What the chapter computes ----------------------------------------------------------------

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


def span(preset: str) -> float:
    """By how much the exact KL's own reward changes over the log KL that it shares with k2."""
    fitted = fit(preset, "k2_loss", "exact_loss")
    reward = fitted.curve(1, np.linspace(fitted.low, fitted.high, 60)).mean
    return float(np.ptp(reward))


def shown_is_trained(updates: int) -> bool:
    """Does k2 that is logged as k3 end at the weights of plain k2, to the bit?"""
    preset = make_preset("kl_axes", {})
    shown = next(each for each in preset.variants if each.name == "k2_loss_shows_k3")
    plain = shown.model_copy(update={"label": "", "kl": KLTerm(estimator="k2")})
    runs = [Run(variant=variant, seed=0) for variant in (shown, plain)]
    trainer = PopulationTrainer(preset.config, runs)
    for _ in range(updates):
        trainer.advance()
    return torch.equal(trainer.weights[0], trainer.weights[1])


#: Half of a 95% interval, in standard errors.
HALF_WIDTH = 1.96


def noise_numbers(table: pd.DataFrame) -> dict[str, tuple[float, str]]:
    """What the prose says of the recorded noise of gradients, and how it is written.

    Ratios of the theory's noise to that of k2 as a loss, where they are taken, and how many points
    have their line inside their interval.
    """
    noise = table.pivot(index="reverse_kl", columns="term")
    by_term = noise["theory"]
    exact, k3 = (by_term[name] / by_term["k2_loss"] for name in ("exact_loss", "k3_loss"))
    inside = (table["sampled"] - table["theory"]).abs() < HALF_WIDTH * table["standard_error"]
    return {
        "exact_low": (exact.min(), ".2f"),
        "exact_high": (exact.max(), ".2f"),
        "k3_near": (k3.iloc[0], ".2f"),
        "k3_far": (k3.iloc[-1], ".0f"),
        "nearest": (by_term.index[0], ".2f"),
        "farthest": (by_term.index[-1], ".2f"),
        "inside": (inside.sum(), "d"),
        "points": (len(table), "d"),
        "checkpoints": (len(by_term), "d"),
    }


# --- What it draws ----------------------------------------------------------------------------


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


def draw_noise(table: pd.DataFrame) -> Figure:
    """Recorded noise over the KL reached: lines by the theory, points as the trainer sampled it."""
    figure, axes = style.subplots(height=4.0)
    for term, rows in table.groupby("term", sort=False):
        look, distance = look_of(term), rows["reverse_kl"]
        axes.plot(distance, rows["theory"], **look | {"marker": ""})
        above = HALF_WIDTH * rows["standard_error"]
        below = above.where(above < rows["sampled"], 0.0)  # no logarithm shows zero
        axes.errorbar(
            distance, rows["sampled"], yerr=[below, above], **look | {"linestyle": "", "label": ""}
        )
        for _, row in rows[below == 0.0].iterrows():
            at = (row["reverse_kl"], row["sampled"])
            style.note(axes, "its interval\nreaches below zero", at, offset=(-10, 0), colour="k3")
    axes.set(xscale="log", yscale="log", ylabel="noise of an update's\ngradient, log scale")
    axes.set_xlabel("exact reverse KL (nats per token), log scale")
    style.plain_numbers(axes.xaxis, axes.yaxis)
    axes.legend()
    return figure
