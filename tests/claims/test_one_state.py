"""Claims about expected gradients at one state: other routes, and implementations made wrong."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.experiments.claims import one_state_gradients as claims
from analysis.experiments.claims import one_state_sequences as sequences
from analysis.experiments.claims.recorded import recorded
from analysis.kl import enumeration
from analysis.kl.divergences import forward_kl, reverse_kl
from analysis.kl.estimators import k1, k2, k3
from analysis.kl.surrogates import gradient_coefficient

POLICY = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
OLDER = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)


def finite_difference(value, logits: torch.Tensor, step: float = 1e-6) -> torch.Tensor:
    """The gradient of a function of logits without autograd and without any formula."""
    moves = step * torch.eye(len(logits), dtype=logits.dtype)
    return torch.stack([(value(logits + m) - value(logits - m)) / (2 * step) for m in moves])


def sampled_loss_gradient(estimator, sampler: torch.Tensor = POLICY) -> torch.Tensor:
    """Expected gradient of a loss whose sampler stands still, by finite differences."""
    return finite_difference(
        lambda z: (sampler * estimator(z.log_softmax(-1), REFERENCE.log())).sum(), POLICY.log()
    )


def kl_gradient(divergence) -> torch.Tensor:
    return finite_difference(lambda z: divergence(z, REFERENCE.log()), POLICY.log())


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=0, atol=1e-8)


def test_grpo_names_the_reverse_kl():
    found = claims.grpo_names_the_reverse_kl()
    assert found.verdict == "holds if"
    value = (POLICY * k3(POLICY.log(), REFERENCE.log())).sum()
    by_hand = sum(
        p * math.log(p / q) for p, q in zip([0.7, 0.2, 0.1], [0.1, 0.3, 0.6], strict=True)
    )
    assert value.item() == pytest.approx(by_hand, rel=1e-13)
    assert close(sampled_loss_gradient(k3), kl_gradient(forward_kl))
    assert not close(sampled_loss_gradient(k3), kl_gradient(reverse_kl))


def test_reverse_kl_gradient_formula():
    assert claims.reverse_kl_gradient_formula().verdict == "holds"
    by_hand = POLICY * ((POLICY / REFERENCE).log() - reverse_kl(POLICY.log(), REFERENCE.log()))
    assert close(by_hand, kl_gradient(reverse_kl))
    assert not close(-by_hand, kl_gradient(reverse_kl))


def test_k2_loss_is_the_kl_gradient():
    assert claims.k2_loss_is_the_kl_gradient().verdict == "holds if"
    assert close(sampled_loss_gradient(k2), kl_gradient(reverse_kl))
    assert not close(sampled_loss_gradient(k2, OLDER), kl_gradient(reverse_kl))


def test_k1_loss_has_no_gradient():
    found = claims.k1_loss_has_no_gradient()
    assert found.verdict == "holds if"
    assert found.figures["token_sum"] < 1e-14 < 1e-2 < found.figures["one_over_length"]
    assert close(sampled_loss_gradient(k1), torch.zeros(3, dtype=torch.float64))
    assert sampled_loss_gradient(k1, OLDER).norm() > 0.1


def test_a_loss_is_not_a_gradient():
    """Eq. (15) equates a scalar with a vector; the line above R-hat names k3 for k2."""
    assert claims.a_loss_is_not_a_gradient().verdict == "fails"
    loss = 0.5 * (POLICY * (POLICY / REFERENCE).log().square()).sum()
    assert loss.shape != sampled_loss_gradient(k2).shape
    assert sampled_loss_gradient(k2).shape == kl_gradient(reverse_kl).shape
    ratio = (POLICY / REFERENCE).log()
    named = {
        k: gradient_coefficient(POLICY.log(), REFERENCE.log(), estimator=k) for k in ("k2", "k3")
    }
    assert torch.allclose(named["k2"], ratio)
    assert not torch.allclose(named["k3"], ratio, atol=0.1)


def test_k3_loss_gradient_formula():
    """Printed with pi_old in the ratio; off-policy autograd has pi_theta there."""
    assert claims.k3_loss_gradient_formula().verdict == "holds if"

    def expected(sampler, ratio):
        weighted = sampler * (ratio - 1)
        return weighted - POLICY * weighted.sum()

    assert close(-sampled_loss_gradient(k3), expected(POLICY, REFERENCE / POLICY))
    assert close(-sampled_loss_gradient(k3, OLDER), expected(OLDER, REFERENCE / POLICY))
    assert not close(-sampled_loss_gradient(k3, OLDER), expected(OLDER, REFERENCE / OLDER))


def test_derivative_of_the_mean_of_k2():
    """The gradient of E[k2] is not that of the KL; the mean of the gradient of k2 is."""
    assert claims.derivative_of_the_mean_of_k2().verdict == "fails"
    full = finite_difference(
        lambda z: (z.softmax(-1) * k2(z.log_softmax(-1), REFERENCE.log())).sum(), POLICY.log()
    )
    assert not torch.allclose(full, kl_gradient(reverse_kl), atol=0.05)
    assert close(sampled_loss_gradient(k2), kl_gradient(reverse_kl))


def test_kl_as_a_separate_loss():
    found = claims.kl_as_a_separate_loss()
    assert found.verdict == "holds if"
    assert found.figures["k3_sampled"] > 0.1


def test_which_estimator_goes_where():
    found = claims.which_estimator_goes_where()
    assert found.verdict == "holds if"
    assert found.figures["k2_loss_over_k1_reward_noise"] == pytest.approx(1.0, rel=1e-12)
    assert found.figures["k3_over_k2_noise"] > 1


def test_the_placement_table():
    assert claims.the_placement_table().verdict == "holds if"


def test_k3_loss_is_not_better():
    """'k3 loss is better' fails in the paper's own measure; 'k2 loss is better' passes."""
    found = claims.k3_loss_is_not_better()
    assert found.verdict == "fails"
    reverse = kl_gradient(reverse_kl)
    off = {k: (sampled_loss_gradient(e) - reverse).norm() for k, e in (("k2", k2), ("k3", k3))}
    assert off["k2"] < 1e-8 < 0.1 < off["k3"]


def test_minimax01_is_no_kl():
    assert claims.minimax01_is_no_kl().verdict == "fails"
    score = torch.eye(3, dtype=torch.float64) - POLICY
    gap = POLICY - REFERENCE
    sampled = (POLICY[:, None] * gap[:, None] * score).sum(0)
    summed = (gap[:, None] * score).sum(0)
    assert close(
        sampled,
        finite_difference(lambda z: 0.5 * (z.softmax(-1) - REFERENCE).square().sum(), POLICY.log()),
    )
    assert not close(sampled, kl_gradient(forward_kl))
    assert not close(sampled, kl_gradient(reverse_kl))
    assert close(summed, kl_gradient(forward_kl))


def test_gradient_coefficient_of_grpo():
    found = sequences.gradient_coefficient_of_grpo()
    assert found.verdict == "holds if"
    assert found.figures["sign_flipped"] > 0.1
    assert found.figures["without_length"] > 0.1
    table = sequences.ragged()[1]
    advantages = torch.linspace(-1, 1, len(sequences.ragged()[0].tokens), dtype=torch.float64)
    no_kl = sequences.equation_21_gradient(table, advantages, beta=0.0)
    assert torch.allclose(no_kl, sequences.equation_3_gradient(table, advantages, beta=1e-300))


def test_kdrl_prefers_k2():
    found = sequences.kdrl_prefers_k2()
    assert found.verdict == "holds if"
    assert found.figures["k2_tokens"] > 0.01
    finals = recorded("kdrl").finals.groupby("arm")["own_accuracy"].median()
    crude = finals["kdrl_k3"] - finals["kdrl_k2"]
    assert found.figures["trained_k3_minus_k2"] == pytest.approx(crude, abs=0.02) and crude < 0


def test_fixed_points_of_the_kl_terms():
    found = sequences.fixed_points_of_the_kl_terms()
    assert found.verdict == "holds if"
    assert found.figures["k2_sequence"] < 1e-6 < found.figures["k2_tokens"]


CLAIMS_OF_K2 = (
    claims.k2_loss_is_the_kl_gradient,
    claims.kl_as_a_separate_loss,
    claims.which_estimator_goes_where,
    sequences.kdrl_prefers_k2,
)


@pytest.mark.parametrize("decision", CLAIMS_OF_K2)
def test_a_wrong_k2_changes_the_verdict(decision, monkeypatch):
    monkeypatch.setattr(
        enumeration,
        "kl_loss",
        lambda logp, *rest, **kind: -_kl_loss(logp, *rest, **kind),
    )
    assert decision().verdict == "fails"


def test_a_wrong_k3_changes_the_verdict(monkeypatch):
    monkeypatch.setattr(claims, "reverse_kl", forward_kl)
    assert claims.grpo_names_the_reverse_kl().verdict == "fails"


_kl_loss = enumeration.kl_loss


def test_seed_4_line_55_needs_the_policy_in_the_logarithm():
    """Under samples of the policy, with the older policy in the logarithm, it is no KL gradient."""
    score = torch.eye(3, dtype=torch.float64) - POLICY
    printed = (POLICY * (OLDER / REFERENCE).log()) @ score
    corrected = (POLICY * (POLICY / REFERENCE).log()) @ score
    assert not torch.allclose(printed, kl_gradient(reverse_kl), atol=0.05)
    assert close(corrected, kl_gradient(reverse_kl))
