"""What chapter 4 trains live: eight KL terms in one population of runs, and their curves."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from analysis.evidence.training_figures import KL_PANELS, bands, kl_look
from analysis.records import tidy
from analysis.records.choices import POLICIES, TINY
from analysis.records.language import LanguageConfig
from analysis.records.preset import Preset
from analysis.studies.presets.kl_terms import quick
from analysis.studies.presets.language import model_of, smollm2
from analysis.studies.presets.parts import NO_KL, kl_variants
from kl_term import style
from kl_term.plain_checks import check_choice

#: On a CPU: minutes, to see it work. In the profile ``full`` it is the preset ``smollm2``.
QUICK_SMOLLM2 = {"updates": 10, "num_prompts": 4, "group_size": 4, "log_every": 1}
#: The least number of seeds of the tiny policy in the profile ``full``.
FULL_SEEDS = 10


def live_preset(
    policy: str,
    *,
    weights: str = "hub",
    profile: str = "quick",
    num_seeds: int | None = None,
    updates: int | None = None,
    beta: float | None = None,
    learning_rate: float | None = None,
) -> Preset:
    """``tiny``, or ``smollm2-135m`` with adapters on questions of reasoning-gym.

    ``weights`` are those of SmolLM2: ``hub``, ``packaged`` (from the extra ``smollm2``) or a local
    folder. What is None is the policy's own value.
    """
    check_choice("policy", policy, POLICIES)
    check_choice("profile", profile, ("quick", "full"))
    config = {"updates": updates, "learning_rate": learning_rate}
    config = {name: value for name, value in config.items() if value is not None}
    if policy == TINY:
        if weights != "hub":
            raise ValueError(f"weights={weights!r}: the policy {TINY!r} is trained from scratch")
        if profile == "full":
            num_seeds = max(num_seeds or 0, FULL_SEEDS)
        own = {"num_seeds": num_seeds, "beta": beta}
        return quick(**config, **{name: value for name, value in own.items() if value is not None})
    fields = smollm2().model_dump()
    fields["config"]["model"] = model_of(weights).model_dump()
    fields["config"] |= (QUICK_SMOLLM2 if profile == "quick" else {}) | config
    if beta is not None:
        fields["variants"] = (NO_KL, *kl_variants(beta))
    count = num_seeds or (1 if profile == "quick" else len(smollm2().seeds))
    return Preset.model_validate(fields | {"seeds": tuple(range(count))})


def device_of(preset: Preset) -> str:
    """The tiny policy trains on the CPU; a language model on a GPU where there is one."""
    language = isinstance(preset.config, LanguageConfig)
    return "cuda" if language and torch.cuda.is_available() else "cpu"


# --- What it draws

#: Updates that one point of a curve averages; fewer where that would leave fewer points than these.
SPAN = 20
POINTS = 15


def training(curves: pd.DataFrame, metric: str, label: str) -> Figure:
    """A metric of the KL terms over training, losses above, rewards below; KLs on a log scale.

    Bands reach from the lowest to the highest seed, which are too few for an interval.
    """
    span = min(SPAN, math.ceil(curves["update"].max() / POINTS) or 1)
    gaps = np.diff(np.unique(curves["update"]))
    if gaps.size:  # whole logging windows
        span = math.ceil(span / gaps.min()) * int(gaps.min())
    table = tidy.coarsen(curves, span)
    table["update"] += span / 2
    figure, panels = style.subplots(2, 1, height=6.4, sharex=True, sharey=True)
    known = set(table["variant"])
    for panel, (title, variants) in zip(panels, KL_PANELS.items(), strict=True):
        shown = [name for name in variants if name in known]
        if "reward" in title:
            shown = [name for name in shown if name != "exact_loss"]
        looks = {name: kl_look(name) for name in shown}
        bands(panel, table, metric, looks, errorbar=("pi", 100))
        panel.set(title=title, ylabel=label, yscale="log" if metric.endswith("kl") else "linear")
    panels[-1].set_xlabel("update")
    figure.draw_without_rendering()
    for panel in panels:
        style.label_line_ends(panel)
    return figure
