"""DPO: values by hand, gradients against autograd, and stability far from zero."""

from __future__ import annotations

import math

import pytest
import torch

from kl_term.objectives.preference import dpo_gradient_weight, dpo_loss, implicit_reward

LOGP_W = torch.tensor([-3.0, -10.0, -1.0], dtype=torch.float64)
LOGP_L = torch.tensor([-5.0, -7.0, -1.0], dtype=torch.float64)
REF_W = torch.tensor([-4.0, -9.0, -2.0], dtype=torch.float64)
REF_L = torch.tensor([-4.5, -8.0, -2.0], dtype=torch.float64)
MARGINS = [1.0 - (-0.5), -1.0 - 1.0, 1.0 - 1.0]  # in nats, before beta
PAIR = (LOGP_W, LOGP_L, REF_W, REF_L)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_loss_and_weight_by_hand(beta):
    expected = [-math.log(sigmoid(beta * margin)) for margin in MARGINS]
    assert dpo_loss(*PAIR, beta=beta).tolist() == pytest.approx(expected, abs=1e-12)
    weights = [beta * sigmoid(-beta * margin) for margin in MARGINS]
    assert dpo_gradient_weight(*PAIR, beta=beta).tolist() == pytest.approx(weights, abs=1e-12)
    assert dpo_loss(*PAIR, beta=beta)[2].item() == pytest.approx(math.log(2), abs=1e-15)


def test_wrongly_ranked_pairs_cost_more_and_swapped_arguments_differ():
    loss = dpo_loss(*PAIR, beta=0.5)
    assert loss[1] > math.log(2) > loss[0]
    swapped = dpo_loss(LOGP_L, LOGP_W, REF_L, REF_W, beta=0.5)
    assert ((loss - swapped).abs()[:2] > 0.5).all()
    reference_for_policy = dpo_loss(REF_W, REF_L, LOGP_W, LOGP_L, beta=0.5)
    assert ((loss - reference_for_policy).abs()[:2] > 0.5).all()
    # -log sigma(x) + log sigma(-x) = -x: the flipped loss differs by the margin itself
    margins = 0.5 * torch.tensor(MARGINS, dtype=torch.float64)
    assert torch.allclose(loss - swapped, -margins, rtol=0, atol=1e-12)


def test_gradient_by_autograd():
    leaves = [tensor.clone().requires_grad_() for tensor in PAIR]
    dpo_loss(*leaves, beta=0.7).sum().backward()
    weight = dpo_gradient_weight(*PAIR, beta=0.7)
    assert torch.allclose(leaves[0].grad, -weight, rtol=0, atol=1e-12)
    assert torch.allclose(leaves[1].grad, weight, rtol=0, atol=1e-12)
    assert leaves[2].grad is None and leaves[3].grad is None
    assert not dpo_gradient_weight(*leaves).requires_grad


def test_far_margins_neither_overflow_nor_vanish():
    for dtype in (torch.float32, torch.float64):
        zero = torch.zeros(2, dtype=dtype)
        logp_w = torch.tensor([-1e4, 1e4], dtype=dtype, requires_grad=True)
        loss = dpo_loss(logp_w, zero, zero, zero, beta=1.0)
        assert loss.tolist() == [1e4, 0.0]
        loss.sum().backward()
        assert logp_w.grad.tolist() == [-1.0, 0.0]


def test_implicit_reward_is_the_log_ratio_times_beta():
    reward = implicit_reward(LOGP_W, REF_W, beta=0.5)
    assert reward.tolist() == [0.5, -0.5, 0.5]


def test_the_optimal_policy_of_a_reward_has_that_implicit_reward():
    """pi proportional to ref * exp(R / beta) gives back R up to one constant per prompt."""
    generator = torch.Generator().manual_seed(0)
    ref_logp = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1)
    reward = torch.randn(6, generator=generator, dtype=torch.float64)
    optimal = (ref_logp + reward / 0.3).log_softmax(-1)
    constant = reward - implicit_reward(optimal, ref_logp, beta=0.3)
    assert (constant.max() - constant.min()).item() < 1e-12
    wrong = reward - implicit_reward(ref_logp, optimal, beta=0.3)
    assert (wrong.max() - wrong.min()).item() > 0.1
