"""Mirror steps: the closed form against a numerical maximiser, and the contraction rate."""

from __future__ import annotations

import pytest
import torch

from kl_term.kl.divergences import reverse_kl
from kl_term.kl.fixed_points import reverse_kl_optimum
from kl_term.kl.mirror_steps import folded_reward, mirror_step

OLD = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64)
REF = torch.tensor([-0.5, 0.4, 0.1], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.2, -0.6], dtype=torch.float64)
BETA = 0.5


def test_folded_reward_by_hand():
    old, ref = OLD.softmax(-1), REF.softmax(-1)
    expected = [REWARDS[a] - BETA * torch.log(old[a] / ref[a]) for a in range(3)]
    folded = folded_reward(OLD, REF, REWARDS, beta=BETA)
    torch.testing.assert_close(folded, torch.stack(expected), rtol=0, atol=1e-14)


def test_a_step_maximises_the_proximal_objective():
    step = mirror_step(OLD, REF, REWARDS, beta=BETA, step_size=0.7)
    folded = folded_reward(OLD, REF, REWARDS, beta=BETA)

    def value(logits):
        return (logits.softmax(-1) * folded).sum() - reverse_kl(logits, OLD) / 0.7

    leaf = step.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(value(leaf), leaf)
    assert slope.abs().max() < 1e-14
    generator = torch.Generator().manual_seed(0)
    for shift in torch.randn(20, 3, generator=generator, dtype=torch.float64):
        assert value(step + shift) < value(step)


@pytest.mark.parametrize("product", [0.25, 1.0, 1.6, 2.5])
def test_log_ratios_to_the_optimum_shrink_by_one_minus_the_product(product):
    optimum = reverse_kl_optimum(REWARDS, REF, beta=BETA)
    before = OLD.log_softmax(-1) - optimum
    step = mirror_step(OLD, REF, REWARDS, beta=BETA, step_size=product / BETA)
    after = step - optimum
    contrast = lambda x: x - x.mean()
    torch.testing.assert_close(
        contrast(after), (1 - product) * contrast(before), rtol=0, atol=1e-12
    )


def test_the_literal_maximiser_is_one_token_unless_the_sampler_is_the_optimum():
    literal = mirror_step(OLD, REF, REWARDS, beta=BETA, step_size=1e6).exp()
    assert literal.max() == 1.0
    optimum = reverse_kl_optimum(REWARDS, REF, beta=BETA)
    flat = folded_reward(optimum, REF, REWARDS, beta=BETA)
    torch.testing.assert_close(flat, flat[:1].expand(3), rtol=0, atol=1e-14)
    still = mirror_step(optimum, REF, REWARDS, beta=BETA, step_size=1e6)
    torch.testing.assert_close(still, optimum, rtol=0, atol=1e-8)


def test_the_gradient_of_the_folded_objective_is_right_at_the_sampler_only():
    """Both as an objective and as a mean over the sampler's tokens."""
    cost = -folded_reward(OLD, REF, 0 * REWARDS, beta=1.0)  # log(old / ref)
    sampler = OLD.softmax(-1)
    for moved in (torch.zeros(3), torch.tensor([0.4, -0.3, 0.1])):
        leaf = (OLD + moved).requires_grad_(True)
        policy = leaf.softmax(-1)
        wanted, of_objective, of_samples = (
            torch.autograd.grad(value, leaf, retain_graph=True)[0]
            for value in (
                reverse_kl(leaf, REF),
                (policy * cost).sum(),
                (sampler * cost * policy.log()).sum(),
            )
        )
        for found in (of_objective, of_samples):
            error = (found - wanted).abs().max()
            assert error > 1e-2 if moved.any() else error < 1e-14
