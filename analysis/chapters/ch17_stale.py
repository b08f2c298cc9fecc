"""Chapter 17: what recorded runs on stale and mismatched samples say."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis import style
from analysis.chapters.claims import recorded
from analysis.chapters.comparisons import pairs, rows
from analysis.chapters.training_figures import KL_LABEL, front
from analysis.experiments.ablation import RUN_COLUMNS, final
from analysis.experiments.recording import Recording
from analysis.experiments.summaries import by_variant, paired, paired_along
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


def peaks_of(curves: pd.DataFrame, metric: str) -> pd.DataFrame:
    """One row per run: the largest value of a metric in any of its logging windows."""
    return curves.groupby([*RUN_COLUMNS], sort=False, as_index=False)[metric].max()


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


# --- What the page compares, and what its prose says of it ------------------------------------

RUNS = (
    "staleness",
    "stale_front",
    "three_ways",
    "three_ways_half_step",
    "three_ways_on_policy",
    "stale_masking",
    "mismatch",
    "partial_rollouts",
)
COMPARISONS = 117
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


def compare(routing: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Every comparison of the page, seed by seed, and the ``gains`` of routings that it trains."""
    return {
        **_of_ages(),
        **_of_ways(),
        "masks": paired(
            recorded("stale_masking").finals,
            pairs(
                "token/fresh token_mask_0.1/token gspo/token gspo_tight/token sequence/token "
                "cispo/token cispo_mask_0.1/cispo cispo_mask_0.1/token reinforce/token "
                "reinforce_mask_0.1/reinforce reinforce_mask_0.1/token reinforce_mask_0.1/fresh",
                "own_accuracy",
            ),
        ),
        "mismatch": paired(
            recorded("mismatch").finals,
            pairs(
                "cold_uncorrected/same hot_uncorrected/same top_p_uncorrected/same "
                "cold_truncated_token/cold_uncorrected cold_truncated_sequence/cold_uncorrected "
                "hot_truncated_token/hot_uncorrected hot_truncated_token/same "
                "hot_masked_token/hot_uncorrected hot_truncated_sequence/hot_uncorrected "
                "top_p_truncated_sequence/top_p_uncorrected top_p_keep_mask/top_p_uncorrected",
                "own_accuracy",
                "entropy",
            ),
        ),
        **{f"routing_{noise}": table for noise, table in routing.groupby("noise")},
        **_of_budgets(),
    }


def _of_ages() -> dict[str, pd.DataFrame]:
    run, front_run = recorded("staleness"), recorded("stale_front")
    oldest = (
        "k2_detached/k2 k3_attached/k3 k3_attached/k2_detached exact/k2 exact/k2_detached k2/none"
    )
    spikes = pairs("k2_detached/k2 k3/k2 exact/k2 k3_attached/k3", "gradient_norm")
    logs = peaks_of(run.curves, "gradient_norm")
    logs["gradient_norm"] = np.log(logs["gradient_norm"])

    def at_oldest(table: pd.DataFrame, compared: list[tuple[str, ...]]) -> pd.DataFrame:
        named = [(f"{a}_lag_{OLDEST}", f"{b}_lag_{OLDEST}", metric) for a, b, metric in compared]
        found = paired(table, named)
        for side in ("variant", "other"):
            found[side] = found[side].str.removesuffix(f"_lag_{OLDEST}")
        return found

    along = {"of": "reverse_kl", "metric": "own_accuracy"}
    equal = pairs(
        "exact_loss/k2_loss k2_detached_loss/k2_loss k3_loss/k2_loss "
        "exact_loss/k2_detached_loss exact_loss/k3_loss"
    )
    return {
        "oldest": at_oldest(
            run.finals,
            [row for pair in oldest.split() for row in pairs(pair, "own_accuracy", "reverse_kl")],
        ),
        **{
            f"aged_{lag}": paired(
                run.finals,
                [(f"{name}_lag_{lag}", f"{name}_lag_0", "own_accuracy") for name in LOSSES],
            )
            for lag in (4, OLDEST)
        },
        "spikes": at_oldest(logs, spikes),
        "equal_kl": paired_along(front_run.finals, equal, **along),
    }


def _of_ways() -> dict[str, pd.DataFrame]:
    several, half, large = (recorded(name) for name in RUNS[2:5])
    merged = ("merged_old", "merged_detached")
    large_batch = [
        (variant, LARGE_BATCH, metric)
        for metric in ("accuracy", "reverse_kl")
        for variant in ("exact_loss", *merged)
    ]
    steps = {"full": costed_ways(several, large), "half": costed_ways(half, large)}
    both = pd.concat(
        [half.finals.assign(variant=half.finals["variant"] + ", half"), several.finals]
    )
    both = both[both["beta"].isin([0.0, BETA])]
    halved = [(f"{name}, half", name, "accuracy") for name in ("none", "exact_loss", *merged)]
    return {
        **{
            f"{step}_{cost}": paired(at_equal_cost(ways, cost, BETA), large_batch)
            for step, ways in steps.items()
            for cost in ("completions", "passes")
        },
        "ways_equal_kl": paired_along(
            several.finals,
            [(name, "exact_loss") for name in merged],
            of="reverse_kl",
            metric="accuracy",
        ),
        "halved": paired(both, halved),
        "recomputed": paired(
            at_equal_cost(steps["half"], "recomputed", BETA),
            [("merged_old", LARGE_BATCH, "accuracy")],
        ),
        "half_step": paired(half.finals, pairs("merged_detached/none", "accuracy")),
        "readings": paired(
            several.finals,
            [
                *pairs("k2_loss_detached/k2_loss", "accuracy"),
                *pairs("k2_loss/exact_loss", "accuracy", "reverse_kl"),
                *pairs("merged_attached/merged_detached", "accuracy"),
                *pairs("merged_old/merged_detached", "accuracy", "reverse_kl"),
                *pairs("merged_old_wide/merged_old", "accuracy"),
                *pairs("merged_detached_wide/merged_detached none_wide/none", "accuracy"),
            ],
            beta=BETA,
        ),
    }


def _of_budgets() -> dict[str, pd.DataFrame]:
    run = recorded("partial_rollouts")
    steps = decoding_steps(run)
    ends = (run.curves["update"] + run.preset.config.log_every) * run.curves["variant"].map(steps)
    found: dict[str, pd.DataFrame] = {}
    for budget in (8, 4):
        pair = [(f"budget_{budget}_all", "whole", "accuracy")]
        kept = run.curves.assign(steps=ends)
        kept = kept[kept["variant"].isin(["whole", f"budget_{budget}_all"])]
        ended = final_within(kept, "steps", budget * run.preset.config.updates)
        last = [(f"budget_{budget}_current", f"budget_{budget}_all", "accuracy")]
        found[f"budget_{budget}_updates"] = paired(run.finals, pair + last)
        found[f"budget_{budget}_steps"] = paired(ended, pair)
    return found


def decoding_steps(run: Recording) -> dict[str, int]:
    """Variant of the partial rollouts -> decoding steps of an update that follow one another."""
    longest = run.preset.config.task.completion_length
    return {variant.name: variant.sampler.budget or longest for variant in run.preset.variants}


#: Verdicts that the prose states.
SAYS = {
    "differs": [
        *rows("oldest", "exact/k2 k2/none", "own_accuracy"),
        *rows("equal_kl", "exact_loss/k2_loss exact_loss/k2_detached_loss exact_loss/k3_loss"),
        *rows("readings", "merged_detached_wide/merged_detached", "accuracy"),
        *rows("readings", "merged_attached/merged_detached", "accuracy"),
        *rows("masks", "reinforce/token cispo/token gspo_tight/token", "own_accuracy"),
        *rows("masks", "reinforce_mask_0.1/token cispo_mask_0.1/token", "own_accuracy"),
        *rows("mismatch", "cold_uncorrected/same top_p_uncorrected/same", "own_accuracy"),
    ],
    "equivalent": [
        *rows("half_step", "merged_detached/none", "accuracy"),
        *rows("ways_equal_kl", "merged_old/exact_loss merged_detached/exact_loss"),
        *rows("mismatch", "hot_uncorrected/same", "own_accuracy"),
        *rows("mismatch", "cold_truncated_token/cold_uncorrected", "own_accuracy"),
        *rows("mismatch", "top_p_truncated_sequence/top_p_uncorrected", "own_accuracy"),
        *rows("mismatch", "top_p_keep_mask/top_p_uncorrected", "own_accuracy"),
    ],
    "suggestive": [
        *rows("oldest", "k2_detached/k2 k3_attached/k2_detached", "reverse_kl"),
        *rows("oldest", "k3_attached/k3", "own_accuracy"),
        *rows(f"aged_{OLDEST}", "exact_lag_16/exact_lag_0", "own_accuracy"),
        *rows("half_completions", f"merged_old/{LARGE_BATCH}", "accuracy"),
        *rows("half_passes", f"merged_old/{LARGE_BATCH}", "accuracy"),
        *rows("budget_8_steps", "budget_8_all/whole", "accuracy"),
        *rows("masks", "gspo/token reinforce_mask_0.1/fresh", "own_accuracy"),
        *rows("mismatch", "cold_truncated_sequence/cold_uncorrected", "own_accuracy"),
        *rows("mismatch", "hot_masked_token/hot_uncorrected", "own_accuracy"),
    ],
    "unresolved": [
        *rows("oldest", "k2_detached/k2", "own_accuracy"),
        *rows("readings", "k2_loss_detached/k2_loss merged_old/merged_detached", "accuracy"),
        *rows("masks", "token_mask_0.1/token sequence/token", "own_accuracy"),
    ],
    "not estimable": rows("equal_kl", "k2_detached_loss/k2_loss k3_loss/k2_loss"),
}
