"""Sampling masks: which tokens stay, and what a renormalised ratio estimates."""

from __future__ import annotations

import math

import pytest
import torch

from kl_term.kl.divergences import reverse_kl
from kl_term.kl.truncation import covered_kl, keep_top, masked_logits, tempered


@pytest.fixture
def logits():
    return torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64).log()


def test_masks_by_hand(logits):
    assert keep_top(logits, top_p=0.65).tolist() == [True, False, True, False]
    assert keep_top(logits, top_p=0.75).tolist() == [True, False, True, True]
    assert keep_top(logits, top_p=1e-9).tolist() == [True, False, False, False]
    assert keep_top(logits, top_k=3).tolist() == [True, False, True, True]
    assert keep_top(logits, top_k=9).all()
    assert keep_top(torch.zeros(4), top_k=2).tolist() == [True, True, False, False]


def test_masked_policy_renormalises(logits):
    keep = keep_top(logits, top_k=2)
    policy = masked_logits(logits, keep).softmax(-1)
    torch.testing.assert_close(policy, torch.tensor([4 / 7, 0, 3 / 7, 0], dtype=torch.float64))


def test_masked_ratio_estimates_the_masked_policy(logits):
    generator = torch.Generator().manual_seed(0)
    other, values = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    keep = keep_top(logits, top_k=2)
    sampler, policy = (masked_logits(x, keep).softmax(-1) for x in (logits, other))
    ratio = torch.where(keep, policy / sampler, 0.0)
    estimate = (sampler * ratio * values).sum()
    torch.testing.assert_close(estimate, (policy * values).sum())
    assert abs(estimate - (other.softmax(-1) * values).sum()) > 0.01


def test_temperature(logits):
    squared = logits.exp() ** 2
    torch.testing.assert_close(tempered(logits, 0.5).softmax(-1), squared / squared.sum())


def test_covered_kl_by_hand_and_its_parts(logits):
    reference = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    keep = torch.tensor([True, False, True, False])
    by_hand = 0.4 * math.log(4) - 0.4 + 0.1  # the third token is equal in both
    assert covered_kl(logits, reference, keep).item() == pytest.approx(by_hand)
    parts = covered_kl(logits, reference, keep) + covered_kl(logits, reference, ~keep)
    torch.testing.assert_close(parts, reverse_kl(logits, reference))
    assert covered_kl(logits, reference, ~keep) > 0
    assert covered_kl(logits, logits, keep) == 0


def test_covered_kl_with_zeros(logits):
    reference = torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=torch.float64).log()
    everything = torch.ones(4, dtype=torch.bool)
    assert covered_kl(logits, reference, everything) == torch.inf
    inside = torch.tensor([False, True, True, False])
    assert covered_kl(logits, reference, inside).isfinite()
    lost = covered_kl(masked_logits(logits, ~inside), reference, inside)
    assert lost.item() == pytest.approx(1.0)  # the reference's mass where the policy has none
    leaf = logits.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(covered_kl(leaf, reference, inside), leaf)
    assert gradient.isfinite().all() and gradient[0] != 0


def test_covered_kl_is_a_mass_term_and_the_kl_inside():
    generator = torch.Generator().manual_seed(5)
    policy, reference = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    keep = torch.tensor([True, True, False, True, False, False])
    mass, ref_mass = (x.softmax(-1)[keep].sum() for x in (policy, reference))
    inside = reverse_kl(masked_logits(policy, keep), masked_logits(reference, keep))
    expected = mass * (mass / ref_mass).log() - mass + ref_mass + mass * inside
    torch.testing.assert_close(covered_kl(policy, reference, keep), expected)
    assert (expected - mass * inside).item() > 1e-3


def test_a_tail_of_one_percent_can_hold_most_of_the_kl():
    policy = torch.tensor([0.99, 0.01], dtype=torch.float64).log()
    reference = torch.stack([torch.tensor(-1e-20, dtype=torch.float64), policy[1] - 300.0])
    cut = covered_kl(policy, reference, torch.tensor([False, True]))
    assert cut / reverse_kl(policy, reference) > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_of_one_cuts_nothing_however_rare(dtype):
    logits = torch.tensor([0.0, -20.0, -30.0, -60.0], dtype=dtype)
    assert keep_top(logits).all()
    assert keep_top(logits, top_k=2).tolist() == [True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_top_p_of_a_large_vocabulary_is_reached(dtype):
    logits = torch.randn(32_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    probability = logits.double().softmax(-1)
    kept = probability[keep_top(logits, top_p=0.99)]
    # Short of it by less than the sum rounds, and not without the least likely of them.
    assert kept.sum() > 0.99 - 1e-4
    assert kept.sum() - kept.min() < 0.99 + 1e-4
