"""Claims about single samples: small cases by hand, and controls that must differ."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.experiments.chapters.single_samples import WALKS, sampled_descent, share_lowered
from analysis.experiments.claims import one_state_samples as claims
from analysis.kl.divergences import entropy


def test_k1_loss_walks_at_random():
    found = claims.k1_loss_walks_at_random()
    assert found.verdict == "holds if"
    figures = found.figures
    assert (
        abs(figures["entropy_k1"] - figures["entropy_flipped"]) < figures["k1_minus_flipped_ci95"]
    )
    assert figures["entropy_small_step"] > 0.95 * figures["entropy_start"]
    # Two tokens by hand: after a step on token 0 its log-odds have fallen by eta.
    logits = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    p = 1 / (1 + math.exp(-1.0))
    after = 1 / (1 + math.exp(-(1.0 - 0.3 * (1 - p) - 0.3 * (1 - p))))
    assert after < p
    assert share_lowered(logits, logits, WALKS["k1"], step_size=0.3) == 1.0
    assert share_lowered(logits, logits, WALKS["flipped"], step_size=0.3) == 0.0


def test_a_flipped_k1_changes_the_verdict(monkeypatch):
    monkeypatch.setitem(claims.WALKS, "k1", WALKS["flipped"])
    assert claims.k1_loss_walks_at_random().verdict == "fails"


def test_zero_step_is_no_walk():
    uniform = torch.zeros(5, 8, dtype=torch.float64)
    still = sampled_descent(uniform, uniform, WALKS["k1"], step_size=0.0, steps=50, seed=0)
    assert torch.allclose(entropy(still[-1]), entropy(uniform))


def test_the_sign_of_one_k2_step():
    """Printed: lowered where the reference is larger. Corrected: raised."""
    found = claims.the_sign_of_one_k2_step()
    assert found.verdict == "fails"
    policy, reference = 0.2, 0.5
    coefficient = math.log(policy / reference)
    assert -coefficient > 0  # -grad L is this positive number times the score: uphill
    odds = math.log(policy / (1 - policy)) - 0.1 * coefficient
    assert 1 / (1 + math.exp(-odds)) > policy


def test_one_sample_is_unbiased_and_constrains():
    found = claims.one_sample_is_unbiased_and_constrains()
    assert found.verdict == "fails"
    assert found.figures["variance_two_over_one"] == pytest.approx(0.5, rel=1e-12)
    assert found.figures["kl_after_ones"] < 0.2 * found.figures["kl_start"]
    assert found.figures["kl_noise_one_sample"] < 0.1 * found.figures["kl_noise_free_run"]


def test_a_flipped_k2_no_longer_constrains(monkeypatch):
    right = claims.coefficient_of
    monkeypatch.setattr(
        claims, "coefficient_of", lambda name: lambda logp, ref: -right(name)(logp, ref)
    )
    assert claims.one_sample_is_unbiased_and_constrains().verdict == "holds"


def test_one_sample_with_a_large_step_collapses():
    found = claims.one_sample_with_a_large_step_collapses()
    assert found.verdict == "holds"
    assert found.figures["kl_small_step"] < 0.1 < 1 < found.figures["kl_large_step"]


def test_k3_noise_against_k2():
    found = claims.k3_noise_against_k2()
    assert found.verdict == "holds if"
    # Two tokens by hand: the trace is 2 p q (c1 q + c2 p)^2.
    p, q, ref = 0.7, 0.3, 1 / (1 + math.exp(14.0))
    k2 = math.log(p / ref) * q + math.log(q / (1 - ref)) * p
    k3 = (1 - ref / p) * q + (1 - (1 - ref) / q) * p
    assert found.figures["ratio_forbidden"] == pytest.approx((k3 / k2) ** 2, rel=1e-9)
    assert found.figures["kl_k3_noisy_steps"] > 2 * found.figures["kl_k2_noisy_steps"]
    for name in ("trained", "language"):  # no difference is seen, on either policy
        assert found.figures[f"{name}_low"] < 0 < found.figures[f"{name}_high"]


def test_the_published_coefficient_plot():
    """Printed: log-probs from -3 to 2. Corrected: they end at 0."""
    found = claims.the_published_coefficient_plot()
    assert found.verdict == "holds if"
    assert math.exp(2) > 1
    assert found.figures["share_above_zero"] == pytest.approx(2 / 5, abs=0.01)
    assert found.figures["k3_at_minus_3"] == pytest.approx(1 - math.exp(2.3), rel=1e-12)
