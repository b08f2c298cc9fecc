"""The merged KL: every reading by hand, the clip's leftovers, masks and refusals."""

from __future__ import annotations

import math

import pytest
import torch

from kl_term.objectives.losses import policy_loss
from kl_term.objectives.merged import kl_coefficient_kept, merged_loss

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
ADVANTAGES = torch.tensor([1.0, -0.8], dtype=torch.float64)
BETA, LOW, HIGH = 0.7, 0.1, 0.3
CLIP = {"epsilon_low": LOW, "epsilon_high": HIGH}


def log_probs():
    generator = torch.Generator().manual_seed(3)
    old = -2 * torch.rand(2, 4, generator=generator, dtype=torch.float64) - 0.1
    ref = old + 0.8 * torch.randn(2, 4, generator=generator, dtype=torch.float64)
    logp = old + 0.5 * torch.randn(2, 4, generator=generator, dtype=torch.float64)
    return logp, ref, old


def by_hand(logp, ref, old, advantage, reading, penalty):
    """Loss and its slope by the log-prob of one token, as the formula reads."""
    of = old if reading == "old" else logp
    log_ratio = of - ref
    coefficient = log_ratio if penalty == "k1" else 1 - math.exp(-log_ratio)
    inner = 1.0 if penalty == "k1" else math.exp(-log_ratio)  # d coefficient / d log-prob
    reward = advantage - BETA * coefficient
    ratio = math.exp(logp - old)
    bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
    clipped = bounded * reward < ratio * reward
    weight = bounded if clipped else ratio
    slope = 0.0 if clipped else -ratio * reward
    if reading == "attached":
        slope += weight * BETA * inner
    return -weight * reward, slope


@pytest.mark.parametrize("reading", ["old", "detached", "attached"])
@pytest.mark.parametrize("penalty", ["k1", "k3"])
def test_value_and_slope_by_hand(reading, penalty):
    logp, ref, old = log_probs()
    leaf = logp.clone().requires_grad_(True)
    loss = merged_loss(
        leaf, ref, old, ADVANTAGES, MASK, beta=BETA, reading=reading, penalty=penalty, **CLIP
    )
    (slope,) = torch.autograd.grad(loss.sum(), leaf)
    for row, t in MASK.nonzero().tolist():
        value, expected = by_hand(
            *(x[row, t].item() for x in (logp, ref, old)), ADVANTAGES[row].item(), reading, penalty
        )
        assert loss[row, t].item() == pytest.approx(value, abs=1e-12)
        assert slope[row, t].item() == pytest.approx(expected, abs=1e-12)
    assert (loss[~MASK] == 0).all()
    assert (slope[~MASK] == 0).all()


def test_what_the_clip_keeps_of_the_kl_is_the_slope_by_beta():
    logp, ref, old = log_probs()
    kept = kl_coefficient_kept(logp, ref, old, ADVANTAGES, MASK, beta=BETA, **CLIP)

    def slope(beta):
        leaf = logp.clone().requires_grad_(True)
        loss = merged_loss(leaf, ref, old, ADVANTAGES, MASK, beta=beta, reading="detached", **CLIP)
        return torch.autograd.grad(loss.sum(), leaf)[0]

    # Between two betas with the same clipped tokens the slope is linear in beta.
    difference = (slope(BETA + 1e-6) - slope(BETA)) / 1e-6
    torch.testing.assert_close(kept, difference, rtol=0, atol=1e-6)
    assert (kept[MASK] == 0).any()
    assert (kept[MASK] != 0).any()


def test_what_is_silent_without_a_clip():
    """Corners of two theorems: no log-ratio, no KL to silence; no advantage, no slope anywhere."""
    logp, old = torch.tensor([math.log(0.5)]).double(), torch.tensor([math.log(0.5)]).double()
    given = torch.tensor([1.0]).double(), torch.tensor([True])
    assert kl_coefficient_kept(logp, logp, old, *given, beta=BETA, **CLIP) == 0.0  # inside the clip
    assert kl_coefficient_kept(logp, logp - 0.5, old, *given, beta=BETA, **CLIP) != 0.0
    leaf = logp.clone().requires_grad_(True)
    loss = policy_loss(
        leaf[None],
        old_logp=old[None],
        advantages=torch.zeros(1, 1).double(),
        mask=torch.ones(1, 1, dtype=torch.bool),
    ).per_token
    assert torch.autograd.grad(loss.sum(), leaf)[0] == 0.0  # at a ratio of one
    policy = torch.tensor([0.5, 0.3, 0.2, 0.0]).double()
    for kept, mean in (([0, 1, 2], 1.0), ([0, 1], 0.8)):  # token 3 has no mass to remove
        mu = torch.softmax(torch.tensor([0.4, -0.3, 0.1, 0.7]).double()[kept], -1)
        assert (mu @ (policy[kept] / mu)).item() == pytest.approx(mean)
