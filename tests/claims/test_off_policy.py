"""Claims on stale samples, by routes of their own: three tokens summed by hand, finite differences,
seeded samples. Each test also shows that the contrary, or the printed form, fails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from analysis.experiments.chapters import off_policy as study
from analysis.experiments.claims import off_policy, off_policy_clip
from analysis.kl.sequences import enumerate_sequences

POLICY = torch.tensor([0.55, 0.35, 0.10], dtype=torch.float64)
REF = torch.tensor([0.20, 0.30, 0.50], dtype=torch.float64)
OLD = torch.tensor([0.30, 0.50, 0.20], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.2, -0.6, -0.3], dtype=torch.float64)


def slope_of(function, at: Tensor = POLICY) -> Tensor:
    """Central differences by the logits of a function of the probabilities."""
    logits, eps = at.log(), 1e-6
    columns = []
    for a in range(len(at)):
        step = torch.zeros_like(logits)
        step[a] = eps
        up, down = (function((logits + s).softmax(-1)) for s in (step, -step))
        columns.append((up - down) / (2 * eps))
    return torch.stack(columns)


def score_mean(weights: Tensor, policy: Tensor = POLICY) -> Tensor:
    """Sum of weights times scores, token by token."""
    total = torch.zeros_like(policy)
    for a, weight in enumerate(weights):
        total += weight * (torch.eye(len(policy), dtype=policy.dtype)[a] - policy)
    return total


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


REVERSE = slope_of(lambda p: kl(p, REF))
FORWARD = slope_of(lambda p: kl(REF, p))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-8) -> bool:
    return bool((a - b).abs().max() < tolerance)


def k3(p: Tensor) -> Tensor:
    return REF / p - 1 - (REF / p).log()


def test_weighted_k3():
    ratio = POLICY / OLD
    value = (OLD * ratio * k3(POLICY)).sum()
    assert value.item() == pytest.approx(kl(POLICY, REF).item(), abs=1e-12)
    assert (OLD * k3(POLICY)).sum().item() != pytest.approx(kl(POLICY, REF).item(), abs=0.05)
    attached = slope_of(lambda p: (OLD * (p / OLD) * k3(p)).sum())
    detached = slope_of(lambda p: (OLD * ratio * k3(p)).sum())
    assert close(attached, REVERSE)
    assert close(detached, FORWARD)
    assert not close(detached, REVERSE, 0.05)
    # Sample by sample the attached k3 is the detached k2.
    log_ratio = (POLICY / REF).log()
    per_sample = ratio * (k3(POLICY) + 1 - REF / POLICY)
    assert close(per_sample, ratio * log_ratio, 1e-12)
    assert off_policy.weighted_k3().verdict == "holds if"


def test_weighted_k3_needs_a_reference_that_the_policy_covers():
    # The reference has a third token of probability 0.3 that the policy never samples.
    policy, ref, old = torch.tensor([[0.7, 0.3], [0.4, 0.3], [0.5, 0.5]], dtype=torch.float64)
    k3_values = ref / policy - 1 - (ref / policy).log()
    weighted = (old * (policy / old) * k3_values).sum()
    assert weighted.item() == pytest.approx(kl(policy, ref).item() - 0.3, abs=1e-12)


def test_masked_sequences():
    """Sampled one-token sequences: masking shrinks the second moment and moves the mean."""
    found = off_policy.masked_sequences()
    assert found.verdict == "holds if"
    assert found.figures["rule_broken"] == 0
    generator = torch.Generator().manual_seed(5)
    tokens = torch.multinomial(OLD, 20_000, replacement=True, generator=generator)
    ratio, eye = POLICY / OLD, torch.eye(3, dtype=torch.float64)
    gradients = (ratio * ADVANTAGES)[tokens].unsqueeze(-1) * (eye[tokens] - POLICY)
    masked = (ADVANTAGES < 0) & ((OLD / POLICY).log() > 0.3)
    assert masked.tolist() == [False, True, True]
    kept = torch.where(masked[tokens].unsqueeze(-1), 0.0, gradients)
    exact = slope_of(lambda p: (p * ADVANTAGES).sum())
    error = 5 * gradients.var(0).div(len(tokens)).sqrt().max()
    assert (gradients.mean(0) - exact).abs().max() < error
    assert (kept.mean(0) - exact).abs().max() > error
    assert kept.square().sum() < gradients.square().sum()


def test_unweighted_loss():
    log_ratio = (POLICY / REF).log()
    on_policy = {
        "k1": slope_of(lambda p: (POLICY * (p / REF).log()).sum()),
        "k2": slope_of(lambda p: (POLICY * (p / REF).log().square() / 2).sum()),
    }
    assert on_policy["k1"].abs().max() < 1e-8  # the printed inner expectation descends nothing
    assert close(on_policy["k2"], REVERSE)
    assert close(on_policy["k2"], score_mean(POLICY * log_ratio))
    stale = slope_of(lambda p: (OLD * (p / REF).log().square() / 2).sum())
    assert not close(stale, REVERSE, 0.05)
    printed = slope_of(lambda p: (OLD * (p / REF).log()).sum())
    assert close(printed, slope_of(lambda p: kl(OLD, p)) * -1)  # it climbs KL(old || policy)
    assert not close(printed, REVERSE, 0.05)
    assert off_policy.unweighted_loss().verdict == "holds if"


def test_readings_of_the_merged_kl():
    log_ratio, old_log_ratio = (POLICY / REF).log(), (OLD / REF).log()
    ratio = POLICY / OLD
    detached = slope_of(lambda p: (p * log_ratio).sum())
    attached = slope_of(lambda p: (OLD * (p / OLD) * (p / REF).log()).sum())
    old = slope_of(lambda p: (p * old_log_ratio).sum())
    assert close(detached, REVERSE)
    assert close(attached, REVERSE)
    assert close(detached, score_mean(OLD * ratio * log_ratio))
    assert close(old, REVERSE - slope_of(lambda p: kl(p, OLD)))
    assert not close(old, REVERSE, 0.05)
    # The k3 variant with the policy differentiated inside descends nothing: its mean is constant.
    assert slope_of(lambda p: (p * (1 - REF / p)).sum()).abs().max() < 1e-8
    assert off_policy.readings_of_the_merged_kl().verdict == "holds if"


def clipped_objective(p: Tensor, beta: float, epsilon: float) -> Tensor:
    """The merged objective with the log-ratio held at POLICY, written out."""
    reward = ADVANTAGES - beta * (POLICY / REF).log()
    ratio = p / OLD
    bounded = ratio.clamp(1 - epsilon, 1 + epsilon)
    return (OLD * torch.minimum(ratio * reward, bounded * reward)).sum()


def test_clipped_merged_kl():
    exact = slope_of(lambda p: (p * ADVANTAGES).sum() - 0.04 * kl(p, REF))
    assert close(slope_of(lambda p: clipped_objective(p, 0.04, 10.0)), exact)
    clipped = slope_of(lambda p: clipped_objective(p, 0.04, 0.2))
    assert not close(clipped, exact, 0.05)
    # Every ratio has left the clip in the direction of its advantage: nothing at all remains.
    ratio = POLICY / OLD
    assert ((ratio > 1.2) == (ADVANTAGES > 0)).all()
    assert ((ratio < 0.8) == (ADVANTAGES < 0)).all()
    assert clipped.abs().max() < 1e-8
    assert off_policy_clip.clipped_merged_kl().verdict == "holds if"


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
    assert off_policy_clip.merging_like_terms().verdict == "holds if"


def test_three_implementations():
    """PPO's return carries the future KL; GRPO's own-token credit does not. Two tokens, by hand."""
    found = off_policy_clip.three_implementations()
    assert found.verdict == "holds if"
    assert found.figures["sequence_to_go"] < 1e-10 < 0.1 < found.figures["sequence_own_credit"]
    tree = enumerate_sequences(2, 2)
    assert tree.num_states == 3
    first, *then = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.2, 0.8]], dtype=torch.float64)
    ref = torch.full((2,), 0.5, dtype=torch.float64)
    later = [kl(then[a], ref) for a in range(2)]
    # At the first token the sequence KL has slope kl(first) + sum_a first_a later_a.
    exact = slope_of(
        lambda p: kl(p, ref.double()) + p @ torch.stack(later).double(), first.double()
    )
    own = slope_of(lambda p: kl(p, ref.double()), first.double())
    assert not close(own, exact, 0.01)


@pytest.mark.parametrize(
    "decision",
    [
        off_policy.weighted_k3,
        off_policy.unweighted_loss,
        off_policy.readings_of_the_merged_kl,
        off_policy_clip.clipped_merged_kl,
        off_policy_clip.three_implementations,
    ],
)
def test_a_flipped_sign_changes_the_verdict(monkeypatch, decision):
    before = decision().verdict
    for module in (study, off_policy, off_policy_clip):
        for name in ("reverse_kl_gradient", "exact_kl_gradient"):
            true = getattr(module, name, None)
            if true is not None:
                flipped = lambda *pair, true=true, **options: -true(*pair, **options)
                monkeypatch.setattr(module, name, flipped)
    assert decision().verdict != before


def test_a_mask_without_its_sign_changes_the_verdict(monkeypatch):
    true = off_policy.off_policy_sequence_mask
    monkeypatch.setattr(
        off_policy,
        "off_policy_sequence_mask",
        lambda logp, old, advantages, mask, delta: true(logp, old, -advantages, mask, delta=delta),
    )
    assert off_policy.masked_sequences().verdict == "fails"


def test_erratum_two_policies_in_one_formula():
    """With the sampler's log-ratio the printed R-hat and equation 20 differ off-policy."""
    advantage = ADVANTAGES - 0.5 * (POLICY / REF).log()
    printed = ADVANTAGES - 0.5 * (OLD / REF).log()
    exact = slope_of(lambda p: (p * ADVANTAGES).sum() - 0.5 * kl(p, REF))
    assert close(score_mean(POLICY * advantage), exact)
    assert not close(score_mean(POLICY * printed), exact, 0.02)


def test_erratum_beta_is_lost():
    """Reward minus KL without beta has another gradient than the objective it abbreviates."""
    reward = slope_of(lambda p: (p * ADVANTAGES).sum())
    full = slope_of(lambda p: (p * ADVANTAGES).sum() - 0.04 * kl(p, REF))
    assert close(reward - 0.04 * REVERSE, full)
    assert not close(reward - REVERSE, full, 0.05)
