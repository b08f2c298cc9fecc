"""What recorded runs add to claims on objectives, by counting seeds instead of averaging them."""

from __future__ import annotations

import pytest

from analysis.experiments.claims import preference, sequences_objectives, sequences_ratios
from analysis.experiments.claims.recorded import recorded

#: Of ten fair coins as many or more fall alike, on a given side, once in eighteen throws.
MOST = 8


def ahead(preset: str, arm: str, other: str, metric: str) -> int:
    """In how many of ten seeds an arm ended with more of a metric."""
    finals = recorded(preset).finals
    finals = finals.assign(excess=finals["wrong_length"] - finals["right_length"])
    ends = finals.pivot(index="seed", columns="arm", values=metric)
    assert len(ends) == 10
    return int((ends[arm] > ends[other]).sum())


@pytest.mark.parametrize("other", ["token_mean", "token_sum", "dr_grpo"])
def test_one_over_length_leaves_wrong_answers_longer(other):
    assert ahead("length_growth", "grpo", other, "excess") >= MOST
    figures = sequences_objectives.sum_over_tokens().figures
    assert figures["trained_excess_low"] > 0


def test_gspo_in_two_ranges():
    figures = sequences_ratios.gspo_weight().figures
    assert ahead("objectives", "gspo", "grpo", "accuracy") <= 10 - MOST
    assert figures["trained_gspo_high"] < 0
    assert figures["trained_gspo_narrow_low"] < 0 < figures["trained_gspo_narrow_high"]


def test_cispo_ends_below_grpo():
    figures = sequences_objectives.cispo_weight().figures
    assert ahead("objectives", "cispo", "grpo", "accuracy") <= 10 - MOST
    assert figures["trained_against_grpo_high"] < 0
    assert figures["trained_against_reinforce_low"] < 0 < figures["trained_against_reinforce_high"]


def test_mirror_descent_ends_with_grpo_nearer_to_the_start():
    figures = preference.mirror_descent_step().figures
    assert 10 - MOST < ahead("objectives", "mirror_descent", "grpo", "accuracy") < MOST
    assert ahead("objectives", "mirror_descent", "grpo", "reverse_kl") <= 10 - MOST
    assert figures["trained_reverse_kl_high"] < 0
