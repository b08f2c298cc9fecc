"""The mirror-descent surrogate: its zero, its gradient, and the closed form of its optimum."""

from __future__ import annotations

import pytest
import torch

from kl_term.kl.divergences import reverse_kl
from kl_term.kl.fixed_points import reverse_kl_optimum
from kl_term.objectives.mirror_descent import log_partition, mirror_descent_loss

GENERATOR = torch.Generator().manual_seed(0)
LOGP = torch.randn(6, generator=GENERATOR, dtype=torch.float64).log_softmax(-1)
REWARDS = torch.rand(6, generator=GENERATOR, dtype=torch.float64)
TAU = 0.3


def test_zero_exactly_at_the_tilted_policy():
    optimum = reverse_kl_optimum(REWARDS, LOGP, beta=TAU)
    baseline = log_partition(REWARDS, LOGP, tau=TAU).expand(6)
    assert optimum.exp().sum().item() == pytest.approx(1.0, abs=1e-14)
    assert mirror_descent_loss(optimum, LOGP, REWARDS, baseline, tau=TAU).max() < 1e-25
    wrong = reverse_kl_optimum(-REWARDS, LOGP, beta=TAU)
    assert mirror_descent_loss(wrong, LOGP, REWARDS, baseline, tau=TAU).max() > 0.1


def test_the_tilted_policy_beats_every_other_one():
    optimum = reverse_kl_optimum(REWARDS, LOGP, beta=TAU)
    best = (optimum.exp() * REWARDS).sum() - TAU * reverse_kl(optimum, LOGP)
    assert best.item() == pytest.approx(log_partition(REWARDS, LOGP, tau=TAU).item(), abs=1e-12)
    others = optimum + 0.1 * torch.randn(200, 6, generator=GENERATOR, dtype=torch.float64)
    rival = (others.softmax(-1) * REWARDS).sum(-1)
    assert (rival - TAU * reverse_kl(others, LOGP.expand_as(others)) < best).all()


@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_gradient_at_the_sampler_is_the_policy_gradient(baseline):
    logits = LOGP.clone().requires_grad_(True)
    shift = torch.full((6,), baseline, dtype=torch.float64)
    loss = mirror_descent_loss(logits.log_softmax(-1), LOGP, REWARDS, shift, tau=TAU)
    (gradient,) = torch.autograd.grad((LOGP.exp() * loss).sum(), logits)
    policy = LOGP.exp()
    exact = policy * (REWARDS - (policy * REWARDS).sum())
    assert torch.allclose(gradient, -2 * TAU * exact, atol=1e-14)
    assert not torch.allclose(gradient, 2 * TAU * exact, atol=1e-3)
