"""Means, variances and control variates by enumeration, against an independent numpy route."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from kl_term.kl.divergences import chi_square, forward_kl, reverse_kl
from kl_term.kl.surrogates import ESTIMATORS
from kl_term.kl.variance import (
    estimator_means,
    estimator_variances,
    jeffreys_divergence,
    optimal_control_weight,
    variance_gap,
)

NUMPY_ESTIMATORS = {
    "k1": lambda r: -np.log(r),
    "k2": lambda r: np.log(r) ** 2 / 2,
    "k3": lambda r: r - 1 - np.log(r),
    "k3_clip": lambda r: np.minimum(r, 10.0) - 1 - np.log(r),
    "k4": lambda r: np.where(r > 1, r - 1 - np.log(r), np.minimum(-np.log(r), r - 1 - np.log(r))),
}


def covariance(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """E[xy] - E[x]E[y]: another formula than the centred one of the package."""
    return (weights * x * y).sum(-1) - (weights * x).sum(-1) * (weights * y).sum(-1)


def assert_close(actual: torch.Tensor, expected: np.ndarray) -> None:
    assert np.abs(actual.numpy() - expected).max() <= 1e-12 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("stale", [False, True], ids=["fresh", "stale"])
def test_means_and_variances(stale, logits, ref_logits, old_logits, policy, reference, sampler):
    given = (logits, ref_logits, *([old_logits] if stale else []))
    means, variances = estimator_means(*given), estimator_variances(*given)
    assert list(means) == list(ESTIMATORS)
    weights = sampler if stale else policy
    for name, estimator in NUMPY_ESTIMATORS.items():
        sample = estimator(reference / policy)
        assert_close(means[name], (weights * sample).sum(-1))
        assert_close(variances[name], covariance(weights, sample, sample))
    assert (means["k3"] - means["k2"]).abs().min() > 1e-3
    assert ("optimal" in variances) == (not stale)


def test_jeffreys_is_both_kls_and_the_covariance_of_r_and_its_log(
    logits, ref_logits, policy, reference
):
    jeffreys = jeffreys_divergence(logits, ref_logits)
    assert_close(
        jeffreys, (reverse_kl(logits, ref_logits) + forward_kl(logits, ref_logits)).numpy()
    )
    r = reference / policy
    assert_close(jeffreys, covariance(policy, r, np.log(r)))
    assert (jeffreys > 0.1).all()


def test_variance_identity(logits, ref_logits, policy, reference):
    gap = variance_gap(logits, ref_logits)
    r = reference / policy
    k1, k3 = -np.log(r), r - 1 - np.log(r)
    assert_close(gap, covariance(policy, k3, k3) - covariance(policy, k1, k1))
    assert_close(
        gap,
        (chi_square(logits, ref_logits) - 2 * jeffreys_divergence(logits, ref_logits)).numpy(),
    )
    assert (gap < 0).any() and (gap > 0).any()
    without_the_factor = chi_square(logits, ref_logits) - jeffreys_divergence(logits, ref_logits)
    assert (gap - without_the_factor).abs().min() > 1e-3


def test_optimal_weight_is_the_regression_of_k1_on_one_minus_r(
    logits, ref_logits, policy, reference
):
    weight = optimal_control_weight(logits, ref_logits)
    for row in range(len(weight)):
        root = np.sqrt(policy[row])
        r = reference[row] / policy[row]
        design = root[:, None] * np.stack([np.ones_like(r), 1 - r], axis=1)
        _, slope = np.linalg.lstsq(design, root * -np.log(r), rcond=None)[0]
        assert weight[row].item() == pytest.approx(slope, rel=1e-10)


def test_optimal_weight_beats_its_neighbours_and_both_estimators(
    logits, ref_logits, policy, reference
):
    variances = estimator_variances(logits, ref_logits)
    weight = optimal_control_weight(logits, ref_logits).numpy()[:, None]
    r = reference / policy
    at = [
        covariance(policy, sample, sample)
        for sample in (-np.log(r) + (weight + step) * (r - 1) for step in (-0.01, 0.0, 0.01))
    ]
    assert_close(variances["optimal"], at[1])
    assert (at[1] < at[0]).all() and (at[1] < at[2]).all()
    assert (variances["optimal"] < variances["k1"]).all()
    assert (variances["optimal"] < variances["k3"]).all()
    jeffreys, chi = jeffreys_divergence(logits, ref_logits), chi_square(logits, ref_logits)
    assert_close(variances["optimal"], (variances["k1"] - jeffreys.square() / chi).numpy())


def test_near_the_reference_the_optimal_weight_is_that_of_k3(logits):
    direction = torch.linspace(-1, 1, logits.shape[-1], dtype=torch.float64)
    steps = torch.tensor([1e-2, 1e-4, 1e-6, 0.0], dtype=torch.float64)
    moved = logits[0] + steps[:, None] * direction
    weights = optimal_control_weight(moved, logits[0].expand_as(moved))
    distance = (weights - 1).abs()
    assert (distance <= steps).all()
    assert distance[3] == 0.0
    assert distance[1] / distance[0] == pytest.approx(0.01, rel=0.05)


def test_an_equal_pair_has_no_mean_and_no_variance(logits):
    for value in (*estimator_means(logits, logits).values(), variance_gap(logits, logits)):
        assert value.abs().max() == 0.0
    for variance in estimator_variances(logits, logits).values():
        assert variance.abs().max() == 0.0


def test_disjoint_supports_are_not_reported_as_finite():
    narrow = torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64)
    wide = torch.zeros(3, dtype=torch.float64)
    for pair in ((narrow, wide), (wide, narrow)):
        assert not torch.isfinite(jeffreys_divergence(*pair))
        assert not torch.isfinite(variance_gap(*pair))


def test_k3_loses_only_through_tokens_that_the_policy_gave_up(logits, ref_logits):
    policy, ref = logits.softmax(-1), ref_logits.softmax(-1)
    ratio = ref / policy
    edge = brentq(lambda r: r - 1 - 2 * math.log(r), 2.0, 10.0)
    assert 3.5 < edge < 3.52
    by_token = policy * (ratio - 1) * (ratio - 1 - 2 * ratio.log())
    assert torch.allclose(by_token.sum(-1), variance_gap(logits, ref_logits), rtol=1e-10)
    assert torch.equal(by_token > 0, ratio > edge)
    # Two tokens given up to just inside the edge, and a KL without bound: k3 wins all the same.
    row = torch.tensor([0.1, 0.1, 0.3, 0.5], dtype=torch.float64)
    for rare in (1e-3, 1e-9, 1e-18):
        risen = 0.1 * 0.99 * edge
        ref_row = torch.tensor([risen, risen, 1 - 2 * risen - rare, rare], dtype=torch.float64)
        assert variance_gap(row.log(), ref_row.log()) < 0


def test_far_away_k3_need_not_lose():
    """The sentence that stood: far away chi squared grows and k3 loses."""
    even = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    for rare in (1e-4, 1e-8, 1e-16):
        ref = torch.tensor([1.0, rare], dtype=torch.float64).log()
        assert reverse_kl(even, ref) > 0.4 * -math.log(rare)
        assert chi_square(even, ref) == pytest.approx(1.0, abs=1e-3)
        assert variance_gap(even, ref) < -6
        spread = estimator_variances(even, ref)
        assert spread["k3"] < spread["k1"]


def test_tokens_that_both_forbid_do_not_exist():
    logits = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
    ref_logits = torch.tensor([0.3, 0.7, 0.0], dtype=torch.float64).log()
    for function in (jeffreys_divergence, variance_gap, optimal_control_weight):
        kept = function(logits[:2], ref_logits[:2])
        torch.testing.assert_close(function(logits, ref_logits), kept)
    kept = estimator_variances(logits[:2], ref_logits[:2])["optimal"]
    torch.testing.assert_close(estimator_variances(logits, ref_logits)["optimal"], kept)


def test_what_one_forbids_is_the_limit_of_what_it_makes_rare():
    half = torch.zeros(2, dtype=torch.float64)
    cut, rare = (torch.tensor([0.0, low], dtype=torch.float64) for low in (-math.inf, -600.0))
    assert variance_gap(half, cut) == -math.inf
    assert variance_gap(half, rare) < -500
    assert variance_gap(cut, half) == math.inf
    assert variance_gap(rare, half) > 1e200
    assert jeffreys_divergence(half, cut) == jeffreys_divergence(cut, half) == math.inf
