"""Chapter 17: what recorded runs on stale and mismatched samples say."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis import style
from analysis.chapters.claims import recorded
from analysis.chapters.training_figures import KL_LABEL, front
from analysis.experiments.ablation import final
from analysis.experiments.recording import Recording
from analysis.experiments.summaries import by_variant, paired
from analysis.training.config import RunConfig

# --- What the chapter computes ----------------------------------------------------------------

#: A backward pass costs two forward ones.
BACKWARD = 2
#: What the on-policy k2 of a large batch is called beside the other ways.
LARGE_BATCH = "large_batch"


def passes_per_completion(num_iterations: int, *, replay: bool = True) -> int:
    r"""Forward-equivalents of an update per completion that it draws.

    .. math:: \underbrace{1}_{\text{sampling}} + \underbrace{1}_{\text{reference}} +
        \underbrace{2}_{\text{first step}} + 3\, (K - 1)

    The first of :math:`K` steps goes back through the activations that sampling kept; each later
    one computes its own. Without ``replay``, as in trainers that sample with another engine, the
    first one does too, and costs 3. Reading a KL off the logits is counted as nothing.

    Raises:
        ValueError: there is no step.
    """
    if num_iterations < 1:
        raise ValueError(f"num_iterations must be at least 1, got {num_iterations}")
    return 2 + (1 + BACKWARD) * num_iterations - int(replay)


def with_costs(curves: pd.DataFrame, config: RunConfig) -> pd.DataFrame:
    """Curves with what each window had cost at its end.

    Three columns more: ``completions``; ``passes``, forward passes over one completion or their
    equivalents; ``recomputed``, those of a trainer without replay (:func:`passes_per_completion`).
    """
    updates = (curves["update"] + config.log_every).clip(upper=config.updates)
    completions = updates * config.num_prompts * config.group_size
    costs = {
        name: completions * passes_per_completion(config.num_iterations, replay=replay)
        for name, replay in (("passes", True), ("recomputed", False))
    }
    return curves.assign(completions=completions, **costs)


def final_within(
    curves: pd.DataFrame, cost: str, limit: float, *, share: float = 0.2
) -> pd.DataFrame:
    """One row per run: ``final`` of the windows that end within a cost, variant by variant.

    Variants may have windows of unequal length and cost.

    Raises:
        ValueError: no window of a variant does.
    """
    parts = []
    for (variant, beta), own in curves.groupby(["variant", "beta"], sort=False):
        within = own[own[cost] <= limit]
        if within.empty:
            raise ValueError(
                f"variant {variant!r} at beta={beta:g} has no window within {cost}={limit:g}: "
                f"its first ends at {own[cost].min():g}"
            )
        parts.append(final(within, share=share))
    return pd.concat(parts, ignore_index=True)


def costed_ways(several: Recording, large: Recording) -> pd.DataFrame:
    """Curves of the three ways with their costs, the large batches under a name of their own.

    Of several steps a rollout the unweighted k2 is left out, of large batches no KL term.
    """
    steps, batches = (with_costs(run.curves, run.preset.config) for run in (several, large))
    steps = steps[steps["variant"] != "k2_loss"]
    batches = batches[batches["variant"] == "k2_loss"].assign(variant=LARGE_BATCH)
    return pd.concat([steps, batches], ignore_index=True)


def at_equal_cost(ways: pd.DataFrame, cost: str, beta: float) -> pd.DataFrame:
    """One row per run of one beta: where each of :func:`costed_ways` stands when the cheapest run
    has ended, by ``completions``, ``passes`` or ``recomputed``."""
    at_beta = ways[ways["beta"] == beta]
    limit = at_beta.groupby("variant")[cost].max().min()
    return final_within(at_beta, cost, limit)


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
    """Own accuracy and exact reverse KL over the age of the samples, one line a KL loss."""
    table = by_variant(finals, ["own_accuracy", "reverse_kl"])
    table[["loss", "lag"]] = table["variant"].str.split("_lag_", expand=True)
    lags = list(table["lag"].unique())
    figure, panels = style.subplots(1, 2, height=4.0)
    labels = {"own_accuracy": "final accuracy", "reverse_kl": "reverse KL (nats), log scale"}
    for panel, (metric, label) in zip(panels, labels.items(), strict=True):
        for place, name in enumerate(LOSSES):
            rows = table[(table["metric"] == metric) & (table["loss"] == name)]
            estimator, _, weighted = name.partition("_")
            look = style.line(estimator, label=LOSSES[name]) | (HOLLOW if weighted else {})
            x = np.arange(len(rows)) + 0.05 * (place - 2.5)
            panel.errorbar(x, rows["mean"], yerr=style.bars(rows), elinewidth=1.0, **look)
        panel.set(ylabel=label, xlabel="age (updates)")
        panel.set_xticks(range(len(lags)), lags)
    panels[1].set_yscale("log")
    panels[1].yaxis.set_minor_locator(NullLocator())
    panels[1].set_yticks([0.05, 0.1, 0.2, 0.4], ["0.05", "0.1", "0.2", "0.4"])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
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
    front(axes, pd.concat([several[several["variant"] != "k2_loss"], batches]), looks)
    axes.set_xlabel(KL_LABEL)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


# --- The recorded runs and what they are called -----------------------------------------------

RUNS = (
    "staleness",
    "stale_front",
    "three_ways",
    "three_ways_half_step",
    "three_ways_on_policy",
    "stale_masking",
    "mismatch",
    "partial_rollouts",
    "stale_starts",
)
#: Age of the oldest samples of ``staleness``, in updates; beta of most comparisons.
OLDEST, BETA = 16, 0.3
#: KL loss on stale samples -> what it is called.
LOSSES = {
    "none": "no KL term",
    "k2": "k₂",
    "k2_detached": "k₂, weighted",
    "k3": "k₃",
    "k3_attached": "k₃, weighted",
    "exact": "full vocabulary",
}
OBJECTIVES = {
    "fresh": "fresh samples, token ratio",
    "token": "token ratio, clipped",
    "token_wide": "token ratio, no clip",
    "gspo": "GSPO, 0.2",
    "gspo_tight": "GSPO, 0.03",
    "sequence": "sequence ratio, clipped",
    "cispo": "CISPO",
    "cispo_upper": "CISPO, upper bound only",
    "reinforce": "no weight",
}
SAMPLERS = {"cold": "temperature 0.7", "hot": "temperature 1.3", "top_p": "top-p 0.8"}
CORRECTIONS = {
    "uncorrected": "uncorrected",
    "truncated_token": "truncated, token",
    "masked_token": "masked, token",
    "truncated_sequence": "truncated, sequence",
    "masked_sequence": "masked, sequence",
    "keep_mask": "sampling mask kept",
}
#: Variant of any of the runs -> what tables call it.
NAMES = {
    **LOSSES,
    "none_wide": "no KL term, no clip",
    **{f"{name}_loss": called for name, called in LOSSES.items()},
    "k2_loss_detached": "k₂, weighted",
    "merged_old": "merged, old log-ratio",
    "merged_detached": "merged, present log-ratio",
    "merged_attached": "merged, log-ratio differentiated",
    "merged_old_wide": "merged, old, no clip",
    "merged_detached_wide": "merged, present, no clip",
    LARGE_BATCH: "large fresh batches",
    **OBJECTIVES,
    **{
        f"{name}_mask_{delta}": f"{OBJECTIVES[name]}, masked at {delta}"
        for name in ("token", "cispo", "reinforce")
        for delta in ("0.03", "0.1", "0.3")
    },
    "clipped": "clipped",
    "unclipped": "unclipped",
    "clipped_masked": "clipped, masked",
    "unclipped_masked": "unclipped, masked",
    "same": "sampler agrees",
    **{
        f"{sampler}_{how}": f"{name}, {correction}"
        for sampler, name in SAMPLERS.items()
        for how, correction in CORRECTIONS.items()
    },
    "replayed": "experts replayed",
    "recomputed": "experts chosen again",
    "whole": "whole rollouts",
    "budget_8_all": "8 tokens an update",
    "budget_4_all": "4 tokens an update",
    "budget_8_current": "8 tokens, last segment only",
    "budget_4_current": "4 tokens, last segment only",
}
NAMES |= {f"{name}, half": f"{NAMES[name]}, half step" for name in ("none", *WAYS)}
NAMES |= {f"{name}_lag_{lag}": f"{NAMES[name]}, age {lag}" for name in LOSSES for lag in (0, 4, 16)}


def large_batches() -> pd.DataFrame:
    """At the better step size: the merged KL and the full vocabulary, less k2 on large batches.

    Returns:
        Rows of :func:`~analysis.experiments.summaries.paired` in accuracy, with the ``cost`` that
        is equal: ``completions``, ``passes`` or ``recomputed``.
    """
    ways = costed_ways(recorded("three_ways_half_step"), recorded("three_ways_on_policy"))
    variants = ("exact_loss", "merged_old", "merged_detached")
    compared = [(variant, LARGE_BATCH, "accuracy") for variant in variants]
    costs = ("completions", "passes", "recomputed")
    parts = [paired(at_equal_cost(ways, cost, BETA), compared).assign(cost=cost) for cost in costs]
    return pd.concat(parts, ignore_index=True)


def budgets() -> pd.DataFrame:
    """Partial rollouts less whole ones in accuracy, at equal ``updates`` and decoding ``steps``."""
    run = recorded("partial_rollouts")
    ended = run.curves["update"] + run.preset.config.log_every
    curves = run.curves.assign(steps=ended * run.curves["variant"].map(decoding_steps(run)))
    parts = []
    for budget in (8, 4):
        every, last = f"budget_{budget}_all", f"budget_{budget}_current"
        whole = [(every, "whole", "accuracy")]
        kept = curves[curves["variant"].isin((every, "whole"))]
        within = final_within(kept, "steps", budget * run.preset.config.updates)
        at_updates = paired(run.finals, [*whole, (last, every, "accuracy")])
        parts += [at_updates.assign(at="updates"), paired(within, whole).assign(at="steps")]
    return pd.concat(parts, ignore_index=True)


def decoding_steps(run: Recording) -> dict[str, int]:
    """Variant of the partial rollouts -> decoding steps of an update that follow one another."""
    longest = run.preset.config.task.completion_length
    return {variant.name: variant.sampler.budget or longest for variant in run.preset.variants}
