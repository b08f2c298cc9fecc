"""The claims of recent papers, by loops over tokens."""

from __future__ import annotations

import math

import pytest

from analysis.evidence.policies import random_policies
from analysis.evidence.recent_claims import (
    clip_as_penalty,
    kl_as_baseline,
    odds_of_equal_rewards,
)


def softmax(row):
    weights = [math.exp(x) for x in row]
    return [w / sum(weights) for w in weights]


def variance(policy, credit):
    vocab = range(len(policy))
    score = [[float(a == b) - policy[b] for b in vocab] for a in vocab]
    mean = [sum(policy[a] * credit[a] * score[a][b] for a in vocab) for b in vocab]
    each = [sum((credit[a] * score[a][b] - mean[b]) ** 2 for b in vocab) for a in vocab]
    return sum(p * x for p, x in zip(policy, each, strict=True)), mean


def test_the_kl_as_a_baseline_is_unbiased_and_not_always_quieter():
    found = kl_as_baseline(50, 4, seed=2)
    worse = 0
    for row, ref_row in zip(
        *(x.tolist() for x in random_policies(50, 4, spread=1.2, seed=2)), strict=True
    ):
        policy, reference = softmax(row), softmax(ref_row)
        log_ratio = [math.log(p / q) for p, q in zip(policy, reference, strict=True)]
        kl = sum(p * x for p, x in zip(policy, log_ratio, strict=True))
        bare, mean = variance(policy, log_ratio)
        centred, same = variance(policy, [x - kl for x in log_ratio])
        assert mean == pytest.approx(same, abs=1e-12)
        worse += centred > bare
    assert found.worse == pytest.approx(worse / 50)
    assert 0 < worse < 50
    assert found.bias < 1e-12


def test_a_clip_cancels_the_slope():
    assert clip_as_penalty(2000, seed=4) < 1e-12


def test_equal_rewards_keep_the_odds_of_the_reference_and_others_do_not():
    assert odds_of_equal_rewards(100, 4, beta=0.3, seed=5) < 1e-12
    assert odds_of_equal_rewards(100, 4, beta=30.0, seed=6) < 1e-12
