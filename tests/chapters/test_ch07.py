"""Chapter 7: limits, coverage, and printed forms on three tokens by finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from analysis.chapters.ch07_off_policy import claims, readings, sequences
from analysis.evidence.policies import random_tables
from kl_term.kl.credit import credit_moments
from kl_term.kl.enumeration import reverse_kl_gradient
from kl_term.kl.sequences import (
    can_draw,
    enumerate_sequences,
    sequence_kl_gradient,
    state_visits,
    token_logp,
)
from tests.chapters.differences import kl, slope_of

TREE = enumerate_sequences(3, 3, eos=2)


def test_fresh_samples_are_never_silenced():
    fresh = readings.stale_states(20, 9, 0.0, seed=2)
    assert (readings.silenced_mass(fresh, beta=0.04, epsilon=0.2) == 0).all(axis=None)


def test_which_weight_gives_which_sequence_gradient():
    tables = random_tables(TREE, 3, 6, spread=1.0, seed=5)
    distances = torch.tensor([0.0, 0.7], dtype=torch.float64)
    curves = sequences.sequence_weight_curves(tables, TREE, distances, seed=6)
    stale = curves[curves.staleness > 0].set_index(["level", "credit"])["median"]
    assert stale["sequence", "to_go"] < 1e-12
    assert stale.drop([("sequence", "to_go")]).min() > 0.05


def test_the_token_ratio_needs_coverage_at_every_state_that_the_sampler_visits():
    """Every sequence of the policy is allowed by the sampler, and item 1 fails all the same."""
    sequences = enumerate_sequences(2, 2)
    table = lambda *rows: torch.tensor(rows, dtype=torch.float64).log()
    policy = table([1.0, 0.0], [0.6, 0.4], [0.7, 0.3])
    reference = table([0.5, 0.5], [0.3, 0.7], [0.4, 0.6])
    for sampler, exact in (
        (table([0.5, 0.5], [0.5, 0.5], [1.0, 0.0]), False),  # it goes to state 2 and forbids there
        (table([0.5, 0.5], [0.5, 0.5], [0.8, 0.2]), True),
    ):
        assert (can_draw(sampler, sequences) | ~can_draw(policy, sequences)).all()
        drawn = sequences.only(can_draw(sampler, sequences))
        logp, ref_logp, old_logp = (token_logp(x, drawn) for x in (policy, reference, sampler))
        ratio = (logp - old_logp).exp()
        credit = torch.where(ratio > 0, ratio * (logp - ref_logp), 0.0)
        found = credit_moments(policy, drawn, credit, sampler).mean
        visits = state_visits(sampler, sequences).unsqueeze(-1)
        claimed = visits[1:] * reverse_kl_gradient(policy[1:], reference[1:])
        assert torch.allclose(found[1:], claimed, rtol=0, atol=1e-12) == exact
        # Where the policy gets, items 2 and 3 hold with both samplers.
        torch.testing.assert_close(found[1], claimed[0], rtol=0, atol=1e-12)
        whole = torch.where(ratio > 0, ratio, 0.0).prod(-1, keepdim=True)
        cost = torch.where(whole > 0, logp - ref_logp, 0.0)
        to_go = cost.flip(-1).cumsum(-1).flip(-1)
        sequence = credit_moments(policy, drawn, whole * to_go, sampler).mean
        torch.testing.assert_close(
            sequence, sequence_kl_gradient(policy, reference, sequences), rtol=0, atol=1e-12
        )


POLICY = torch.tensor([0.55, 0.35, 0.10], dtype=torch.float64)
REF = torch.tensor([0.20, 0.30, 0.50], dtype=torch.float64)
OLD = torch.tensor([0.30, 0.50, 0.20], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.2, -0.6, -0.3], dtype=torch.float64)


def score_mean(weights: Tensor) -> Tensor:
    """Sum of weights times scores, token by token."""
    scores = torch.eye(len(POLICY), dtype=POLICY.dtype) - POLICY
    return sum(weight * score for weight, score in zip(weights, scores, strict=True))


REVERSE = slope_of(lambda p: kl(p, REF), POLICY)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-8) -> bool:
    return bool((a - b).abs().max() < tolerance)


def test_unweighted_loss():
    log_ratio = (POLICY / REF).log()
    on_policy = {
        "k1": slope_of(lambda p: (POLICY * (p / REF).log()).sum(), POLICY),
        "k2": slope_of(lambda p: (POLICY * (p / REF).log().square() / 2).sum(), POLICY),
    }
    assert on_policy["k1"].abs().max() < 1e-8  # the printed inner expectation descends nothing
    assert close(on_policy["k2"], REVERSE)
    assert close(on_policy["k2"], score_mean(POLICY * log_ratio))
    stale = slope_of(lambda p: (OLD * (p / REF).log().square() / 2).sum(), POLICY)
    assert not close(stale, REVERSE, 0.05)
    printed = slope_of(lambda p: (OLD * (p / REF).log()).sum(), POLICY)
    assert close(
        printed, slope_of(lambda p: kl(OLD, p), POLICY) * -1
    )  # it climbs KL(old || policy)
    assert not close(printed, REVERSE, 0.05)


def test_merging_like_terms():
    def pieces(advantage: float, pull: float, ratio: float) -> tuple[float, float]:
        def surrogate(x: float) -> float:
            return min(ratio * x, min(max(ratio, 0.8), 1.2) * x)

        return surrogate(advantage) + surrogate(pull), surrogate(advantage + pull)

    for ratio in (0.5, 0.9, 1.0, 1.1, 1.7):
        apart, merged = pieces(1.0, 0.3, ratio)
        assert apart == pytest.approx(merged)
    apart, merged = pieces(1.0, -0.3, 1.7)
    assert apart == pytest.approx(1.2 - 0.3 * 1.7)
    assert merged == pytest.approx(1.2 * 0.7)
    assert apart != pytest.approx(merged, abs=0.1)


@pytest.mark.parametrize(
    "decision",
    [
        claims.weighted_k3,
        claims.unweighted_loss,
        claims.readings_of_the_merged_kl,
        claims.clipped_merged_kl,
        claims.three_implementations,
    ],
)
def test_a_flipped_sign_changes_the_verdict(monkeypatch, decision):
    before = decision().verdict
    for name in ("reverse_kl_gradient", "exact_kl_gradient"):
        true = getattr(claims, name)
        flipped = lambda *pair, true=true, **options: -true(*pair, **options)
        monkeypatch.setattr(claims, name, flipped)
    assert decision().verdict != before


def test_a_mask_without_its_sign_changes_the_verdict(monkeypatch):
    true = claims.off_policy_sequence_mask
    monkeypatch.setattr(
        claims,
        "off_policy_sequence_mask",
        lambda logp, old, advantages, mask, delta: true(logp, old, -advantages, mask, delta=delta),
    )
    assert claims.masked_sequences().verdict == "fails"


def test_erratum_two_policies_in_one_formula():
    """With the sampler's log-ratio the printed R-hat and equation 20 differ off-policy."""
    advantage = ADVANTAGES - 0.5 * (POLICY / REF).log()
    printed = ADVANTAGES - 0.5 * (OLD / REF).log()
    exact = slope_of(lambda p: (p * ADVANTAGES).sum() - 0.5 * kl(p, REF), POLICY)
    assert close(score_mean(POLICY * advantage), exact)
    assert not close(score_mean(POLICY * printed), exact, 0.02)


def test_erratum_beta_is_lost():
    """Reward minus KL without beta has another gradient than the objective it abbreviates."""
    reward = slope_of(lambda p: (p * ADVANTAGES).sum(), POLICY)
    full = slope_of(lambda p: (p * ADVANTAGES).sum() - 0.04 * kl(p, REF), POLICY)
    assert close(reward - 0.04 * REVERSE, full)
    assert not close(reward - REVERSE, full, 0.05)
