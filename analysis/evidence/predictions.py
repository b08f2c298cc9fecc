"""Predictions of recorded designs beside what was found, and prose that is held to them.

A chapter's section asks what its design asks. What it quotes are the design's comparisons
(:func:`shown`); which of them came out otherwise than predicted is said here once, for every page,
and :func:`check_outcomes` refuses recordings that say something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from analysis.evidence.recorded import recorded_runs
from analysis.records import designs, recording
from analysis.records.preset import EQUAL_KL, Prediction
from analysis.records.statistics import Interval
from analysis.records.summaries import KLS

#: Recorded design -> its predictions that are open or refuted, as :func:`spelled`; others hold.
OTHERWISE: dict[str, dict[str, str]] = {
    "equal_kl": {
        "k1_loss = none: reverse_kl at 0.03, 0.1, 0.3": "open",
        "k1_reward = exact_loss: reward at equal KL": "open",
        "k3_loss = exact_loss: reward at equal KL": "open",
    },
    "half_step": {},
    "equal_kl_half_step": {
        "exact_loss = none: final_reward at 0.03, 0.1": "open",
        "k1_reward = exact_loss: final_reward at equal KL": "open",
        "k3_loss_attached_prefix = exact_loss: final_reward at equal KL": "open",
    },
    "equal_kl_wide": {
        "k1_reward = exact_loss: reward at equal KL": "open",
        "k2_loss = exact_loss: reward at equal KL": "open",
        "k3_loss = exact_loss: reward at equal KL": "open",
    },
    "long_completions": {
        "k3_loss_attached_prefix = exact_loss: reward at equal KL": "open",
    },
    "long_completions_128": {
        "k1_reward = exact_loss: reward at equal KL": "open",
        "k1_reward > exact_loss: gradient_norm at 0.3": "open",
        "k3_loss_attached_prefix = exact_loss: reward at equal KL": "open",
        "k3_loss_attached_prefix = k1_reward: reward at equal KL": "open",
    },
    "aggregation_length": {
        "k1_batch_mean = none_batch_mean: length at 0.1, 0.3, 1": "open",
        "k1_sum = none_sum: length at 0.1, 0.3, 1": "open",
        "only_k1_batch_mean = only_k1_sum: length at 1": "open",
    },
    "smollm2_equal_kl": {
        "k3_loss < exact_loss: forward_kl at equal KL": "open",
        "k3_loss < exact_loss: reward at equal KL": "open",
    },
    "smollm2_sampled_losses": {},
    "smollm2_coefficient_one": {
        "k3_loss < exact_loss: forward_kl at equal KL": "open",
        "k3_loss < exact_loss: reward at equal KL": "open",
    },
    "stale_starts": {
        "clipped_masked = clipped: reward at 0.3": "open",
        "exact > k2_detached: reward at 0.3": "open",
        "k2 = k2_detached: reward at 0.3": "open",
    },
    "equal_kl_large": {},
    "equal_kl_ended": {},
    "aggregation_length_112": {},
    "distillation": {
        "opd_to_go > opd_immediate: teacher_kl at the end": "open",
        "opd_immediate > grpo: own_accuracy at the end": "refuted",
    },
    "distillation_sparse": {"supervised = opd_immediate: own_accuracy at the end": "open"},
    "weak_teacher": {"opd_and_grpo > grpo: own_accuracy at the end": "refuted"},
    "kdrl": {"kdrl_masked < kdrl_k2: own_length at the end": "open"},
    "long_to_short": {
        "relative_reward < grpo: own_length at the end": "open",
        "relative_reward < grpo: own_accuracy at the end": "open",
        "supervised_short_teacher = grpo: own_accuracy at the end": "open",
    },
    "stale_masking": {
        "reinforce_mask_0.1 = fresh: own_accuracy at the end": "open",
        "token_mask_0.1 = token: own_accuracy at the end": "open",
        "gspo < token: own_accuracy at the end": "refuted",
        "sequence = token: own_accuracy at the end": "open",
    },
    "proxy_1k": {
        "forward_loss < exact_loss: final_gold at equal KL": "open",
        "k1_loss = none: final_gold at 0.1": "open",
        "k1_reward = exact_loss: final_gold at equal KL": "open",
        "k3_loss < exact_loss: final_gold at equal KL": "open",
    },
    "proxy_5k": {
        "forward_loss < exact_loss: final_gold at equal KL": "open",
        "k3_loss < exact_loss: final_gold at equal KL": "open",
    },
    "proxy_20k": {
        "forward_loss < exact_loss: final_gold at equal KL": "open",
        "k1_loss = none: final_gold at 0.1": "open",
        "k3_loss < exact_loss: final_gold at equal KL": "open",
    },
    "proxy_controls": {},
    "proxy_ensemble": {
        "none_mean > none_first: final_gold at the end": "open",
        "mean > first: final_gold at 0.1, 0.2": "open",
        "none_mean < none_first: spread at the end": "open",
        "none_mean < none_first: spread_gold at the end": "open",
    },
    "smollm2_proxy": {
        "exact_loss < none: final_proxy at 0.4": "open",
        "k2_loss < none: final_proxy at 0.4": "open",
        "k3_loss < none: final_proxy at 0.4": "open",
        "k1_reward < none: final_proxy at 0.4": "open",
        "k2_loss = exact_loss: final_gold at 0.4": "open",
        "k1_reward = exact_loss: final_gold at 0.4": "open",
        "k2_loss = exact_loss: final_reverse_kl at 0.4": "open",
        "k1_reward = exact_loss: final_reverse_kl at 0.4": "open",
        "k3_loss < exact_loss: final_reverse_kl at 0.1, 0.4": "open",
        "k3_loss > exact_loss: final_gold at 0.1": "open",
    },
    "smollm2_reward_long": {"k3_reward < none: final_accuracy at 0.1": "open"},
    "objectives": {},
    "three_ways": {
        "k2_loss_detached = k2_loss: accuracy at 0.3": "open",
        "merged_old = merged_detached: accuracy at 0.3": "open",
        "k2_loss = exact_loss: accuracy at 0.3": "refuted",
        "merged_old = exact_loss: accuracy at equal KL": "open",
    },
    "three_ways_on_policy": {},
    "three_ways_half_step": {"merged_detached = none: accuracy at 0.3": "open"},
    "near_ties": {
        "std_min_noisy = std_min: accuracy at the end": "open",
        "group_centre_noisy = group_centre: accuracy at the end": "open",
        "leave_one_out_noisy = leave_one_out: accuracy at the end": "open",
        "group_centre = group_std: accuracy at the end": "open",
        "leave_one_out = group_std: accuracy at the end": "open",
    },
    "length_growth": {
        "grpo > token_sum: wrong_length at the end": "open",
        "soft_overlong = grpo: accuracy at the end": "open",
    },
    "mismatch": {
        "hot_uncorrected = same: own_accuracy at the end": "open",
        "hot_truncated_token = hot_uncorrected: own_accuracy at the end": "open",
    },
    "stale_coefficients": {},
    "stale_weighted_k3": {},
    "partial_rollouts": {},
    "clip_higher": {
        "higher > symmetric: entropy at the end": "open",
        "wide > symmetric: entropy at the end": "open",
    },
    "staleness": {"k2_detached_lag_16 = k2_lag_16: own_accuracy at 0.3": "open"},
    "kl_axes": {
        "k1_reward_immediate = k1_reward_to_go: reverse_kl at 0.3": "open",
        "k2_loss_sequence = k1_reward_sequence: accuracy at 0.3": "open",
    },
    "dapo": {},
    "process": {},
    "process_graded": {},
    "resets": {
        "reverse_resets = reverse_weak: final_reward at the end": "open",
        "forward_resets > forward_weak: final_reverse_kl at the end": "open",
    },
    "polyak": {
        "reverse_half = reverse_between: final_reverse_kl at the end": "open",
        "reverse_ema = reverse_resets: final_reward at the end": "open",
    },
    "top_k": {
        "one_own = one_tail: final_reverse_kl at 1": "open",
        "k3 > top_tail: final_reverse_kl at 1": "open",
    },
    "control_variate": {
        "fitted = k3: final_reverse_kl at the end": "open",
        "fitted < k1: gradient_norm at the end": "open",
        "fitted_stale > k1_stale: kl_cosine at the end": "open",
        "fitted_stale < k1_stale: final_reverse_kl at the end": "refuted",
        "k1 > exact: final_reverse_kl at the end": "open",
        "k3 > exact: final_reverse_kl at the end": "open",
        "fitted > exact: final_reverse_kl at the end": "open",
        "exact < fitted: gradient_norm at the end": "open",
        "exact_stale < fitted_stale: gradient_norm at the end": "open",
    },
    "adaptive_beta": {"doubling = reads_k3: final_reward at 0.6": "open"},
}
#: Before the name of a metric: the logarithm of how much it fluctuates.
JUMPS = "jumps of "
_ENDS = ("mean", "low", "high")


@cache
def judged(preset: str) -> pd.DataFrame:
    """Every prediction of a recorded design beside what was found."""
    return designs.judged_predictions(recorded_runs(preset))


def check_outcomes(presets: Iterable[str]) -> None:
    """Refuse recordings whose outcomes are not those that the prose states.

    Raises:
        ValueError: names the predictions.
    """
    wrong = []
    for preset in presets:
        table = judged(preset)
        found = dict(zip(map(spelled, table.to_dict("records")), table["outcome"], strict=True))
        otherwise = OTHERWISE.get(preset, {})
        said = dict.fromkeys(found, "holds") | otherwise
        wrong += [
            f"{preset}: {key}: the text says {word}, the runs {found.get(key, 'nothing')}"
            for key, word in sorted(said.items())
            if found.get(key) != word
        ]
    if wrong:
        mend = "mend the prose, and OTHERWISE in analysis/evidence/predictions.py"
        raise ValueError(f"{'; '.join(wrong)}: {mend}")


def page(presets: Iterable[str], names: Mapping[str, str], **specs: str) -> pd.DataFrame:
    """Every prediction of a page's designs, once :func:`check_outcomes` agrees with its prose.

    Returns:
        :func:`shown` of each preset, with its name in ``design``, and whether it is a
        ``replication``: see :func:`replicates`.
    """
    presets = list(presets)
    check_outcomes(presets)
    tables = (
        shown(judged(preset), names, **specs).assign(design=preset, replication=replicates(preset))
        for preset in presets
    )
    return pd.concat(tables, ignore_index=True)


def replicates(preset: str) -> bool:
    """Had a pilot of a recorded design the same configuration, on other seeds?"""
    return any(pilot.same for pilot in recorded_runs(preset).preset.design.pilots)


def spelled(row: Mapping[str, Any]) -> str:
    """A row of :func:`judged` as its preset spells the prediction."""
    sign = {"equivalent": "=", "above": ">", "below": "<"}[row["expected"]]
    return f"{row['variant']} {sign} {row['other']}: {row['metric']} at {row['at']}"


def same_elsewhere(preset: str, folder: str) -> bool:
    """Has each prediction the same outcome by a second recording of the preset, in a folder?"""
    again = designs.judged_predictions(recording.load(recording.RESULTS / folder))
    return list(again["outcome"]) == list(judged(preset)["outcome"])


def at_equal_kl(preset: str, variant: str, other: str) -> Interval:
    """A predicted difference of two variants at equal KL."""
    table = judged(preset).set_index(["variant", "other", "at"])
    # A difference that two predictions are about, such as its sign and its size, stands twice.
    return Interval(*table.loc[[(variant, other, EQUAL_KL)], list(_ENDS)].iloc[0])


def unpredicted(preset: str, variant: str, other: str, metric: str, beta: float) -> dict:
    """A comparison that no design names, at one coefficient: a row of :func:`judged`."""
    run = recorded_runs(preset)
    asked = Prediction(
        variant=variant, other=other, metric=metric, expected="equivalent", betas=(beta,), why=""
    )
    finals = designs.with_derived(run)
    return designs.judged(finals, asked, run.preset.design, designs.starts_of(run.preset))


def shown(table: pd.DataFrame, names: Mapping[str, str], **specs: str) -> pd.DataFrame:
    """Judged predictions as pages quote them.

    Args:
        table: of :func:`judged`.
        names: variant -> what the page calls it.
        specs: metric -> number format, where three signed decimals do not fit.

    Returns:
        The table with ``key``, ``compared`` and ``spec``, a number format; means and
        ends of KLs and fluctuations are ratios in place of logarithms.
    """
    logs = table["metric"].isin(KLS) & (table["at"] != EQUAL_KL)  # that fit has no logarithm
    of_kl = logs | table["metric"].str.startswith((JUMPS, designs.LOG))
    ratios = {name: table[name].where(~of_kl, np.exp(table[name])) for name in _ENDS}
    key = table["variant"] + "_" + table["other"] + "_" + table["metric"]
    signs = ["/" if kl else "−" for kl in of_kl]
    return table.assign(
        **ratios,
        key=key.str.replace(r"\W+", "_", regex=True),
        compared=[
            f"{names.get(one, one)} {sign} {names.get(other, other)}"
            for one, sign, other in zip(table["variant"], signs, table["other"], strict=True)
        ],
        spec=np.where(of_kl, ".2f", [specs.get(metric, "+.3f") for metric in table["metric"]]),
    )
