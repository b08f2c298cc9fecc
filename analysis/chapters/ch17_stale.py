"""Chapter 17: what recorded runs on stale and mismatched samples say."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis import style
from analysis.chapters.ch17_routing import ROUTINGS
from analysis.chapters.claims import recorded
from analysis.chapters.comparisons import pairs, rows
from analysis.chapters.training_figures import KL_LABEL, Look, bands, dots, front
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

#: KL loss on stale samples -> its estimator, and what says in its label that it is weighted.
LOSSES = {
    "none": ("none", ""),
    "k2": ("k2", ""),
    "k2_detached": ("k2", ", weighted"),
    "k3": ("k3", ""),
    "k3_attached": ("k3", ", weighted"),
    "exact": ("exact", ""),
}
#: One of the three ways -> its estimator, placement and label.
WAYS = {
    "none": ("none", "loss", "no KL term"),
    "exact_loss": ("exact", "loss", "full vocabulary"),
    "merged_old": ("k1", "reward", r"merged, $\pi_{\mathrm{old}}$ inside"),
    "merged_detached": ("k1", "reward", r"merged, $\pi_\theta$ inside"),
    LARGE_BATCH: ("k2", "loss", "$k_2$, large fresh batches"),
}
MASKS = {
    "fresh": "fresh samples, token ratio",
    "token": "token ratio, clipped",
    "token_mask_0.1": "… masked at 0.1",
    "token_mask_0.3": "… masked at 0.3",
    "token_wide": "token ratio, no clip",
    "gspo": "GSPO, 0.2",
    "gspo_tight": "GSPO, 0.03",
    "sequence": "sequence ratio, clipped",
    "cispo": "CISPO",
    "cispo_mask_0.1": "… masked at 0.1",
    "cispo_mask_0.3": "… masked at 0.3",
    "cispo_upper": "CISPO, upper bound only",
    "reinforce": "no weight",
    "reinforce_mask_0.03": "… masked at 0.03",
    "reinforce_mask_0.1": "… masked at 0.1",
    "reinforce_mask_0.3": "… masked at 0.3",
}
MISMATCHES = {"cold": "temperature 0.7", "hot": "temperature 1.3", "top_p": "top-p 0.8"}
CORRECTIONS = {
    "uncorrected": "uncorrected",
    "truncated_token": "truncated, token",
    "masked_token": "masked, token",
    "truncated_sequence": "truncated, sequence",
    "masked_sequence": "masked, sequence",
    "keep_mask": "sampling mask kept",
}
BUDGETS = {
    "whole": ("none", "-", "whole rollouts"),
    "budget_8_all": ("k2", "-", "8 tokens an update"),
    "budget_4_all": ("k3", "-", "4 tokens an update"),
    "budget_8_current": ("k2", ":", "8, last segment only"),
    "budget_4_current": ("k3", ":", "4, last segment only"),
}


def ages(finals: pd.DataFrame) -> Figure:
    """Own accuracy and exact reverse KL over the age of the samples, one line a KL loss."""
    table = by_variant(finals, ["own_accuracy", "reverse_kl"])
    table["lag"] = table["variant"].str.rsplit("_", n=1).str[-1].astype(int)
    lags = sorted(table["lag"].unique())
    figure, panels = style.subplots(2, 1, height=7.0, sharex=True)
    for panel, (metric, label) in zip(
        panels,
        (("own_accuracy", "final accuracy"), ("reverse_kl", "exact reverse KL (nats), log")),
        strict=True,
    ):
        for place, name in enumerate(LOSSES):
            rows = table[(table["metric"] == metric) & table["variant"].isin(_at(name, lags))]
            rows = rows.sort_values("lag")
            x = np.arange(len(rows)) + 0.05 * (place - 2.5)
            panel.errorbar(
                x, rows["mean"], yerr=style.bars(rows), elinewidth=1.0, **loss_look(name)
            )
        panel.set_ylabel(label)
    panels[0].legend(ncols=2, loc="lower left")
    panels[1].set_yscale("log")
    panels[1].yaxis.set_minor_locator(NullLocator())
    panels[1].set_yticks([0.05, 0.1, 0.2, 0.4], ["0.05", "0.1", "0.2", "0.4"])
    panels[1].set_xticks(range(len(lags)), [str(lag) for lag in lags])
    panels[1].set_xlabel("age of the sampling weights (updates)")
    return figure


def peaks(table: pd.DataFrame, lag: int) -> Figure:
    """The largest gradient norm that a run logged, by KL loss, at one age."""
    labels = {f"{name}_lag_{lag}": loss_look(name)["label"] for name in LOSSES}
    kept = table[table["variant"].isin(labels)]
    figure = dots(kept, labels, {"gradient_norm": "largest logged gradient norm, log scale"})
    figure.axes[0].set_xscale("log")
    figure.axes[0].xaxis.set_minor_locator(NullLocator())
    figure.axes[0].set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    return figure


def ways(finals: pd.DataFrame) -> Figure:
    """Accuracy against exact reverse KL of the three ways, one line a way, one point a beta."""
    figure, axes = style.subplots(height=4.8)
    front(axes, finals, {variant: way_look(variant) for variant in WAYS})
    axes.set_xlabel(KL_LABEL)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def at_cost(curves: pd.DataFrame) -> Figure:
    """Accuracy over completions drawn and over passes through the model, one beta a variant, to
    half as much again as the cheapest variant has cost."""
    figure, panels = style.subplots(2, 1, height=6.6, sharey=True)
    costs = (
        ("completions", "answers drawn (thousands)"),
        ("passes", "forward passes over an answer (thousands)"),
    )
    for panel, (cost, label) in zip(panels, costs, strict=True):
        drawn = curves.assign(**{cost: curves[cost] / 1000})
        shown = {name: way_look(name) for name in WAYS if name in set(curves["variant"])}
        bands(panel, drawn, "accuracy", shown, x=cost)
        panel.set_xlim(0.0, 1.5 * curves.groupby("variant")[cost].max().min() / 1000)
        panel.set(xlabel=label, ylabel="accuracy")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def masks(finals: pd.DataFrame) -> Figure:
    """Own accuracy and effective sample size of every objective on stale samples."""
    return dots(finals, MASKS, {"own_accuracy": "final accuracy", "ratio_ess": "effective share"})


def mismatches(finals: pd.DataFrame) -> Figure:
    """Own accuracy and entropy of every sampler and correction."""
    labels = {"same": "sampler agrees"}
    for sampler, name in MISMATCHES.items():
        for how, correction in CORRECTIONS.items():
            if f"{sampler}_{how}" in set(finals["variant"]):
                labels[f"{sampler}_{how}"] = (
                    f"{name}: {correction}" if how == "uncorrected" else correction
                )
    return dots(finals, labels, {"own_accuracy": "final accuracy", "entropy": "entropy (nats)"})


def routings(curves: pd.DataFrame) -> Figure:
    """Exact reward over updates with replayed and recomputed routing, one panel a noise."""
    noises = sorted(curves["noise"].unique())
    figure, panels = style.subplots(1, len(noises), height=3.6, sharey=True)
    looks = {
        routing: style.line(name) | {"label": routing, "marker": ""}
        for routing, name in zip(ROUTINGS, ("k2", "k1"), strict=True)
    }
    for panel, noise in zip(panels, noises, strict=True):
        own = curves[curves["noise"] == noise].assign(variant=lambda rows: rows["routing"])
        bands(panel, own, "reward", looks)
        panel.set(title=f"noise {noise:g}", xlabel="update", ylabel="expected reward, exact")
    panels[0].legend()
    return figure


def decoding(curves: pd.DataFrame, steps: Mapping[str, int]) -> Figure:
    """Accuracy over updates, and over decoding steps that follow one another (variant -> those of
    an update)."""
    figure, panels = style.subplots(2, 1, height=6.6, sharey=True)
    table = curves.assign(steps=curves["update"] * curves["variant"].map(steps))
    looks = {
        variant: style.line(name) | {"label": label, "linestyle": dashes, "marker": ""}
        for variant, (name, dashes, label) in BUDGETS.items()
    }
    labels = {"update": "update", "steps": "sequential decoding steps"}
    for panel, (x, label) in zip(panels, labels.items(), strict=True):
        bands(panel, table, "accuracy", looks, x=x)
        panel.set(xlabel=label, ylabel="accuracy")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def loss_look(name: str) -> Look:
    """Colour and marker of the estimator; dotted and hollow where the loss is weighted."""
    estimator, weighted = LOSSES[name]
    look = style.line(estimator, label=style.LABELS[estimator] + weighted)
    return look | ({"linestyle": ":", "markerfacecolor": "white"} if weighted else {})


def way_look(variant: str) -> Look:
    """Colour, marker and label of one of the ways; the sampler's log-ratio is dotted and hollow."""
    estimator, placement, label = WAYS[variant]
    look = style.line(estimator, placement) | {"label": label}
    return look | (
        {"linestyle": ":", "markerfacecolor": "white"} if variant == "merged_old" else {}
    )


def _at(name: str, lags: list[int]) -> list[str]:
    return [f"{name}_lag_{lag}" for lag in lags]


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
#: Variant of any of the runs -> what tables call it.
NAMES = {
    "none": "no KL term",
    "none, half": "no KL term, half step",
    "none_wide": "no KL term, no clip",
    "k2": "k₂",
    "k2_detached": "k₂, weighted",
    "k3": "k₃",
    "k3_attached": "k₃, weighted",
    "exact": "full vocabulary",
    "k2_loss": "k₂",
    "k2_detached_loss": "k₂, weighted",
    "k2_loss_detached": "k₂, weighted",
    "k3_loss": "k₃",
    "exact_loss": "full vocabulary",
    "merged_old": "merged, old policy's log-ratio",
    "merged_detached": "merged, present policy's log-ratio",
    "merged_attached": "merged, log-ratio differentiated",
    "merged_old_wide": "merged, old, no clip",
    "merged_detached_wide": "merged, present, no clip",
    LARGE_BATCH: "large fresh batches",
    "same": "sampler agrees",
    "replayed": "experts replayed",
    "recomputed": "experts chosen again",
    "whole": "whole rollouts",
    "budget_8_all": "8 tokens an update",
    "budget_4_all": "4 tokens an update",
    "budget_8_current": "8 tokens, last segment only",
    "budget_4_current": "4 tokens, last segment only",
}
NAMES |= {f"{name}_lag_{lag}": f"{NAMES[name]}, age {lag}" for name in LOSSES for lag in (0, 4, 16)}
NAMES |= {
    name: f"{NAMES[name.removesuffix(', half')]}, half step"
    for name in ("exact_loss, half", "merged_old, half", "merged_detached, half")
}
NAMES |= {
    f"{sampler}_{how}": f"{name}, {correction}"
    for sampler, name in MISMATCHES.items()
    for how, correction in CORRECTIONS.items()
}
NAMES |= {
    name: called.replace(
        "… ", f"{NAMES.get(name.split('_mask')[0], MASKS[name.split('_mask')[0]])}, "
    )
    for name, called in MASKS.items()
}


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
