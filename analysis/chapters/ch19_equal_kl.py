"""Chapter 19: KL terms at equal KL, on ten and twenty starts, and on every other axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from analysis import style
from analysis.chapters.claims import recorded, recorded_runs
from analysis.chapters.predictions import JUMPS, judged
from analysis.chapters.training_figures import KL_TERMS
from analysis.experiments import designs, hierarchical
from analysis.experiments.presets import make_preset
from analysis.experiments.presets.designed import COMPARED, FIGURE2
from analysis.experiments.summaries import by_variant, fluctuation
from analysis.kl.term import KLTerm
from analysis.training.config import Run
from analysis.training.trainer import PopulationTrainer

# --- What the chapter computes ----------------------------------------------------------------

#: Presets that compare the reward of terms at equal KL -> what their setting is called.
SETTINGS = {
    "equal_kl_large": "8 tokens, 20 starts",
    "equal_kl": "8 tokens, 10 starts",
    "equal_kl_wide": "twice the width",
    "equal_kl_ended": "answers that end",
    "long_completions": "32 tokens",
    "long_completions_128": "up to 128 tokens",
}
#: Of this page.
RECORDED = tuple(SETTINGS)
#: Variant -> estimator and placement, which say how it is drawn.
TERMS = KL_TERMS | {"k3_loss_attached_prefix": ("k4", "loss")}

#: Variant -> what tables call it.
NAMES = {
    "none": "no KL term",
    "k1_loss": "k₁ as a loss",
    "k2_loss": "k₂ as a loss",
    "k3_loss": "k₃ as a loss",
    "exact_loss": "exact KL",
    "k1_reward": "k₁ in the reward",
    "k2_reward": "k₂ in the reward",
    "k3_reward": "k₃ in the reward",
    "k3_loss_attached_prefix": "k₃, prefix ratio",
    "forward_loss": "exact forward KL",
    "minimax01_loss": "MiniMax-01",
    "k3_clip_loss": "k₃, clipped",
    "k2_loss_shows_k3": "k₂, logged as k₃",
    "k2_loss_sequence": "k₂, whole sequence",
    "k1_reward_to_go": "k₁ in the reward, credit to go",
    "k1_reward_immediate": "k₁ in the reward, immediate",
    "k1_reward_sequence": "k₁ in the reward, whole sequence",
    "k1_reward_before_std": "k₁ in the reward, then std",
    "k1_reward_before_loo": "k₁ in the reward, then leave-one-out",
}
#: Panels of the KL over the coefficient.
PLACED = {
    "KL in the loss": ("k1_loss", "k2_loss", "k3_loss", "exact_loss", "k3_loss_attached_prefix"),
    "KL in the reward": ("k1_reward", "k2_reward", "k3_reward"),
}


@cache
def figure2() -> pd.DataFrame:
    """Figure 2 at equal KL: the predictions of its design, of fluctuations in place of rewards."""
    run = recorded_runs("equal_kl")
    metrics = [prediction.metric for prediction in FIGURE2.predictions]
    finals = run.finals.merge(
        np.log(fluctuation(run.curves, metrics).set_index(list(_KEYS))[metrics])
        .add_prefix(JUMPS)
        .reset_index(),
        on=list(_KEYS),
    )
    rows = []
    for prediction in FIGURE2.predictions:
        read = prediction.model_copy(update={"metric": f"{JUMPS}{prediction.metric}"})
        rows.append(designs.judged(finals, read, FIGURE2, designs.starts_of(run.preset)))
    return pd.DataFrame(rows)


_KEYS = ("variant", "beta", "seed")


def costs() -> pd.DataFrame:
    """Reward less the exact KL's at equal KL, in every recorded setting.

    Returns:
        The rows of :func:`~analysis.chapters.predictions.judged` of a reward at equal KL, one a
        variant, with ``setting`` and ``margin``.
    """
    rows = []
    for preset, setting in SETTINGS.items():
        table = judged(preset)
        kept = table[(table["at"] == "equal KL") & (table["other"] == "exact_loss")]
        margin = recorded(preset).preset.design.margin
        rows.append(kept.drop_duplicates("variant").assign(setting=setting, margin=margin))
    return pd.concat(rows, ignore_index=True)


def against(variant: str, other: str, *, preset: str = "equal_kl") -> dict[str, float]:
    """One variant less another in reward at equal KL, by the design's fit."""
    return _fit(preset, variant, other).difference(recorded(preset).preset.design.margin)


def by_half(variant: str, *, preset: str = "equal_kl") -> dict[str, dict[str, float]]:
    """One variant less the exact KL in the ``near`` and the ``far`` half of the log KL compared."""
    fitted, margin = _fit(preset, variant, "exact_loss"), recorded(preset).preset.design.margin
    middle = (fitted.low + fitted.high) / 2
    halves = {"near": fitted._replace(high=middle), "far": fitted._replace(low=middle)}
    return {name: half.difference(margin) for name, half in halves.items()}


def span(preset: str) -> float:
    """By how much the exact KL's own reward changes over the log KL that it shares with k2."""
    fitted = _fit(preset, "k2_loss", "exact_loss")
    reward = fitted.curve(1, np.linspace(fitted.low, fitted.high, 60)).mean
    return float(np.ptp(reward))


@cache
def _fit(preset: str, variant: str, other: str) -> hierarchical.Fit:
    run = recorded_runs(preset)
    return designs.at_equal_kl(run.finals, variant, other, designs.starts_of(run.preset))


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


# --- What it draws ----------------------------------------------------------------------------


def draw_curves(names: Iterable[str] = COMPARED, *, preset: str = "equal_kl") -> Figure:
    """Reward over KL: points are means of a variant at one coefficient, lines the fits.

    Each line is that of the fit against the exact KL, over the central runs of the variant.
    """
    finals = recorded_runs(preset).finals
    figure, axes = style.subplots(height=4.2)
    means = by_variant(recorded(preset).finals, ["reward", "reverse_kl"])
    means = means.set_index(["metric", "variant"])
    names = list(names)
    for name in ("none", "exact_loss", *names):
        look = _look(name)
        x, y = (means.loc[(metric, [name]), :] for metric in ("reverse_kl", "reward"))
        bars = {"xerr": style.bars(x), "yerr": style.bars(y), "elinewidth": 1.0}
        axes.errorbar(x["mean"], y["mean"], **bars, **look | {"linestyle": "none"})
        if name == "none":
            continue
        other = names[0] if name == "exact_loss" else "exact_loss"
        own = np.log(finals.loc[finals["variant"] == name, designs.EQUAL])
        log_kl = np.linspace(*np.percentile(own, hierarchical.CENTRAL), 40)
        mean, low, high = _fit(preset, name, other).curve(0, log_kl)
        axes.plot(np.exp(log_kl), mean, color=look["color"], linestyle=look["linestyle"])
        if name == "exact_loss":
            axes.fill_between(np.exp(log_kl), low, high, color=look["color"], alpha=0.12, lw=0)
    _log_kl(axes)
    axes.set_ylabel("reward at the end")
    axes.legend(ncols=2)
    return figure


def draw_costs(table: pd.DataFrame) -> Figure:
    """Reward at equal KL, less that of the exact KL, one row a setting.

    Args:
        table: of :func:`costs`.
    """
    settings = list(dict.fromkeys(table["setting"]))
    figure, axes = style.subplots(height=1.4 + 0.7 * len(settings))
    seen = set()
    for place, setting in enumerate(settings):
        rows = table[table["setting"] == setting]
        margin = rows["margin"].iloc[0]
        axes.fill_betweenx(
            [place - 0.42, place + 0.42], -margin, margin, color=style.QUIET, alpha=0.12, lw=0
        )
        for shift, (_, row) in zip(
            np.linspace(-0.27, 0.27, len(rows)), rows.iterrows(), strict=True
        ):
            look = _look(row["variant"]) | {"linestyle": "none"}
            look |= {"label": "_"} if row["variant"] in seen else {}
            seen.add(row["variant"])
            ends = [[row["mean"] - row["low"]], [row["high"] - row["mean"]]]
            axes.errorbar(row["mean"], place + shift, xerr=ends, **look)
    axes.axvline(0.0, color=style.QUIET, linewidth=1.0)
    axes.set_yticks(range(len(settings)), settings)
    axes.invert_yaxis()
    axes.set_xlabel("reward, less that of the exact KL, at equal KL")
    axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.45, 1.0))
    return figure


def draw_kls(finals: pd.DataFrame, names: Mapping[str, tuple[str, ...]]) -> Figure:
    """Reverse KL at the end over the coefficient, one panel a group; dotted: no KL term.

    Args:
        finals: one row per run, or per start.
        names: title -> variants.
    """
    figure, panels = style.subplots(
        len(names), 1, height=0.4 + 2.5 * len(names), sharex=True, sharey=True, squeeze=False
    )
    table = by_variant(finals, ["reverse_kl"]).set_index("variant")
    for axes, (title, variants) in zip(panels[:, 0], names.items(), strict=True):
        axes.axhline(table.loc["none", "mean"], color=style.QUIET, linestyle=":")
        for name in variants:
            rows = table.loc[name]
            axes.errorbar(rows["beta"], rows["mean"], yerr=style.bars(rows), **_look(name))
        axes.set(xscale="log", yscale="log", title=title, ylabel="reverse KL (nats)")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.legend(ncols=2)
    panels[-1, 0].set_xlabel(r"coefficient $\beta$, log scale")
    panels[-1, 0].xaxis.set_major_formatter("{x:g}")
    return figure


def _look(variant: str) -> dict[str, Any]:
    return style.line(*TERMS[variant], label=NAMES[variant])


def _log_kl(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("exact reverse KL at the end (nats per token), log scale")
