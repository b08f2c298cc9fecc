"""The tables of chapter 2 say what the theorems say, and their referees could say otherwise."""

from __future__ import annotations

import pytest
import torch

from analysis.chapters.ch02_gradients import (
    claims_on_choices,
    claims_on_grpo,
    claims_on_losses,
    errors,
)
from analysis.evidence.noise_ratio import noise_ratio
from analysis.evidence.policies import Policies, random_policies
from kl_term.kl import enumeration
from kl_term.kl.divergences import forward_kl
from kl_term.kl.estimators import k1, k2, k3
from kl_term.kl.term import KLTerm
from tests.chapters.differences import kl, slope_of


def test_noise_agrees_with_a_sample():
    one = Policies(*(x[:1] for x in random_policies(1, 9, spread=1.2, seed=5)))
    policy, log_ratio = one.logits[0].softmax(-1), (one.logits - one.ref_logits)[0]
    log_ratio = log_ratio - one.logits[0].logsumexp(-1) + one.ref_logits[0].logsumexp(-1)
    tokens = torch.multinomial(
        policy, 400_000, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    score = torch.nn.functional.one_hot(tokens, 9) - policy
    k2, k3 = (c[tokens, None] * score for c in (log_ratio, -torch.expm1(-log_ratio)))
    sampled = k2.var(0).sum() / k2.mean(0).square().sum()
    terms = [KLTerm(estimator="k2"), KLTerm(estimator="k1", placement="reward")]
    table = errors.noise_table(one, terms)
    assert sampled.item() == pytest.approx(table.samples_median[0], rel=0.03)
    assert table.samples_median[0] == pytest.approx(table.samples_median[1], rel=1e-12)
    ratio = noise_ratio(*one)[0].item()
    assert (k3.var(0).sum() / k2.var(0).sum()).item() == pytest.approx(ratio, rel=0.03)
    assert abs(ratio - 1) > 0.1


@pytest.mark.parametrize(
    "decision",
    [
        claims_on_losses.k2_loss_is_the_kl_gradient,
        claims_on_choices.kl_as_a_separate_loss,
        claims_on_choices.which_estimator_goes_where,
    ],
)
def test_a_wrong_k2_changes_the_verdict(decision, monkeypatch):
    right = enumeration.kl_loss
    monkeypatch.setattr(enumeration, "kl_loss", lambda *x, **kind: -right(*x, **kind))
    assert decision().verdict == "fails"


def test_a_wrong_divergence_changes_the_verdict(monkeypatch):
    monkeypatch.setattr(claims_on_grpo, "reverse_kl", forward_kl)
    assert claims_on_grpo.grpo_names_the_reverse_kl().verdict == "fails"


POLICY, REFERENCE, OLDER = (
    torch.tensor(x, dtype=torch.float64)
    for x in ([0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.4, 0.4, 0.2])
)


def sampled(estimator, sampler: torch.Tensor = POLICY) -> torch.Tensor:
    """Expected gradient of a loss whose sampler stands still."""
    return slope_of(lambda p: (sampler * estimator(p.log(), REFERENCE.log())).sum(), POLICY)


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=0, atol=1e-8)


REVERSE, FORWARD = (
    slope_of(value, POLICY) for value in (lambda p: kl(p, REFERENCE), lambda p: kl(REFERENCE, p))
)


def test_losses_by_finite_differences():
    """What DeepSeekMath and Liu et al. print about k1, k2 and k3 as losses, and what is right."""
    assert close(sampled(k1), torch.zeros(3).double()) and sampled(k1, OLDER).norm() > 0.1
    assert close(sampled(k2), REVERSE) and not close(sampled(k2, OLDER), REVERSE)
    assert close(sampled(k3), FORWARD) and not close(sampled(k3), REVERSE)
    mean_of_k2 = slope_of(lambda p: (p * k2(p.log(), REFERENCE.log())).sum(), POLICY)
    assert not torch.allclose(mean_of_k2, REVERSE, atol=0.05)  # the gradient of E[k2] is another


def test_the_logarithm_needs_the_policy_that_is_differentiated():
    score = torch.eye(3, dtype=torch.float64) - POLICY
    assert close((POLICY * (POLICY / REFERENCE).log()) @ score, REVERSE)
    assert not torch.allclose((POLICY * (OLDER / REFERENCE).log()) @ score, REVERSE, atol=0.05)


def test_stale_samples_need_the_policy_in_the_ratio_of_k3():
    """DeepSeekMath's eq. 20 has pi_old there."""

    def descent(sampler: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
        weighted = sampler * (1 - ratio)
        return weighted - POLICY * weighted.sum()

    assert close(sampled(k3), descent(POLICY, REFERENCE / POLICY))
    assert close(sampled(k3, OLDER), descent(OLDER, REFERENCE / POLICY))
    assert not close(sampled(k3, OLDER), descent(OLDER, REFERENCE / OLDER))


def test_minimax01_is_half_a_squared_distance_and_its_sum_the_forward_kl():
    score, gap = torch.eye(3, dtype=torch.float64) - POLICY, POLICY - REFERENCE
    mean = (POLICY * gap) @ score
    assert close(mean, slope_of(lambda p: 0.5 * (p - REFERENCE).square().sum(), POLICY))
    assert close(gap @ score, FORWARD) and not close(mean, FORWARD) and not close(mean, REVERSE)
