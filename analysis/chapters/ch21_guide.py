"""The evidence behind each line of the decision guide, read from the recorded runs."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from analysis.evidence import predictions
from analysis.evidence.figure2 import figure2
from analysis.evidence.names import distillation, kl_terms, objectives, off_policy
from analysis.evidence.recorded import recorded
from analysis.records import summaries


class Comparison(NamedTuple):
    """Two variants of a recorded population, paired seed by seed."""

    preset: str
    variant: str
    other: str
    metric: str
    beta: float | None = None


#: Line of the guide -> what it rests on.
EVIDENCE: dict[str, Comparison] = {
    "kl_or_none": Comparison("equal_kl", "k2_loss", "none", "accuracy", 0.3),
    "kl_or_none_half": Comparison("half_step", "k2_loss", "none", "accuracy", 0.3),
    "k3_reward": Comparison("equal_kl", "k3_reward", "none", "accuracy", 0.3),
    "merged_wide": Comparison("three_ways", "merged_old_wide", "merged_old", "accuracy", 0.3),
    "weight_k2": Comparison("staleness", "k2_lag_16", "k2_detached_lag_16", "own_accuracy", 0.3),
    "no_weight": Comparison("stale_masking", "reinforce", "token", "own_accuracy"),
    "masked": Comparison("stale_masking", "reinforce_mask_0.1", "token", "own_accuracy"),
    "stale": Comparison("stale_masking", "token", "fresh", "own_accuracy"),
    "noisy_std": Comparison("near_ties", "group_std_noisy", "group_std", "accuracy"),
    "noisy_floor": Comparison("near_ties", "std_min_noisy", "group_std", "accuracy"),
    "clip_higher": Comparison("clip_higher", "higher", "symmetric", "entropy"),
    "price": Comparison("length_growth", "linear_price", "grpo", "accuracy"),
    "overlong": Comparison("length_growth", "soft_overlong", "grpo", "length"),
    "process": Comparison("process", "process", "outcome", "accuracy"),
    "hot": Comparison("mismatch", "hot_uncorrected", "same", "own_accuracy"),
    "hot_corrected": Comparison(
        "mismatch", "hot_truncated_token", "hot_uncorrected", "own_accuracy"
    ),
    "cold": Comparison("mismatch", "cold_uncorrected", "same", "own_accuracy"),
    "truncated": Comparison("mismatch", "top_p_uncorrected", "same", "own_accuracy"),
    "top_p": Comparison("mismatch", "top_p_keep_mask", "top_p_uncorrected", "own_accuracy"),
    "partial": Comparison("partial_rollouts", "budget_8_current", "budget_8_all", "accuracy"),
    "opd_easy": Comparison("distillation", "opd_immediate", "grpo", "own_accuracy"),
    "opd_sparse": Comparison("distillation_sparse", "opd_immediate", "grpo", "own_accuracy"),
    "opd_exact": Comparison("distillation", "reverse_exact", "opd_immediate", "own_accuracy"),
    "opd_to_go": Comparison("distillation_sparse", "opd_to_go", "opd_immediate", "own_accuracy"),
    "supervised": Comparison("distillation", "supervised", "reverse_exact", "own_accuracy"),
    "weak_teacher": Comparison("weak_teacher", "exact_and_grpo", "grpo", "own_accuracy"),
    "kdrl": Comparison("kdrl", "kdrl_k2", "kdrl_k3", "own_accuracy"),
    "annealed": Comparison("kdrl", "kdrl_annealed", "kdrl_k2", "own_accuracy"),
}


def evidence() -> pd.DataFrame:
    """One row per line of the guide: ``key``, its comparison, the paired difference, and its
    ``verdict`` among all lines."""
    presets = dict.fromkeys(line.preset for line in EVIDENCE.values())
    finals = {preset: recorded(preset).finals for preset in presets}
    rows = []
    for key, (preset, *pair, beta) in EVIDENCE.items():
        found = summaries.paired(finals[preset], [tuple(pair)], beta=beta)
        rows.append(found.assign(key=key, preset=preset, beta=beta))
    return summaries.judged(pd.concat(rows, ignore_index=True), len(rows))


#: Variant -> what the table of all comparisons calls it.
NAMES = {
    **off_policy.NAMES,
    **kl_terms.NAMES,
    **distillation.NAMES,
    **objectives.NAMES,
}

#: What the page quotes of predictions: design, or figure -> keys of
#: :func:`analysis.evidence.predictions.shown`.
QUOTED = {
    "equal_kl": ("k1_loss_none_reward",),
    "equal_kl_large": ("k2_loss_exact_loss_reward", "k3_loss_exact_loss_reward"),
    "equal_kl_half_step": ("k3_loss_exact_loss_final_reward",),
    "long_completions": ("k3_loss_attached_prefix_k1_reward_reward",),
    "aggregation_length": ("k1_mean_none_mean_length",),
    "length_growth": ("grpo_dr_grpo_excess", "stop_loops_grpo_length"),
    "stale_starts": ("k2_k2_detached_reward", "unclipped_clipped_reward"),
    "stale_coefficients": ("exact_loss_k2_loss_own_accuracy",),
    "stale_weighted_k3": ("k3_loss_attached_k3_loss_final_reward",),
    "smollm2_equal_kl": ("k1_reward_exact_loss_reward",),
    "figure2": ("k3_loss_k2_loss_jumps_of_reverse_kl", "k3_loss_k2_loss_jumps_of_gradient_norm"),
}


def quoted() -> dict[str, pd.DataFrame]:
    """The rows of :data:`QUOTED`, once every recorded design agrees with the prose about it.

    Raises:
        ValueError: the runs say something else, or nothing has such a key.
    """
    page = predictions.page(predictions.OTHERWISE, NAMES, length="+.2f")
    shown = dict(iter(page.groupby("design")))
    shown["figure2"] = predictions.shown(figure2(), {})
    found = {}
    for design, keys in QUOTED.items():
        rows = shown[design].drop_duplicates("key")
        if missing := set(keys) - set(rows["key"]):
            raise ValueError(f"{design}: no prediction has the key {', '.join(sorted(missing))}")
        found[design] = rows[rows["key"].isin(keys)]
    return found


#: Verdicts that the prose states; what it says to differ, differs.
SAYS = {
    "equivalent": {"kl_or_none_half", "opd_easy", "top_p"},
    "suggestive": {
        "weight_k2",
        "overlong",
        "hot",
        "hot_corrected",
    },
    "unresolved": {"noisy_floor", "clip_higher"},
}


def check_verdicts(table: pd.DataFrame) -> None:
    """Refuse, by a ValueError, evidence whose verdicts are not those that the prose states."""
    for word in ("differs", "not estimable", *SAYS):
        found = set(table.loc[table["verdict"] == word, "key"])
        said = SAYS.get(word, found if word == "differs" else set())
        if found != said:
            raise ValueError(f"{word}: the text says {sorted(said)}, the runs {sorted(found)}")
