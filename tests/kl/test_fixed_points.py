"""Closed forms of the fixed points against hand-solved cases, optimality conditions and ascent."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from kl_term.kl.ascent import expected_ascent, token_advantage
from kl_term.kl.divergences import chi_square, forward_kl, half_squared_distance, reverse_kl
from kl_term.kl.estimators import k2, k3
from kl_term.kl.fixed_points import (
    chi_square_optimum,
    euclidean_optimum,
    forward_kl_multiplier,
    forward_kl_optimum,
    penalty_equilibrium,
    reverse_kl_optimum,
)

from .conftest import random_logits

BETA = 0.6


def half_chi_square(logits, ref_logits):
    return chi_square(ref_logits, logits) / 2


OPTIMA = {
    reverse_kl_optimum: reverse_kl,
    forward_kl_optimum: forward_kl,
    euclidean_optimum: half_squared_distance,
    chi_square_optimum: half_chi_square,
}


@pytest.fixture
def rewards() -> torch.Tensor:
    return random_logits(20, 6, seed=4, scale=1.0)


def objective(logits, rewards, ref_logits, divergence):
    reward = (logits.softmax(-1) * rewards).sum(-1)
    return reward - BETA * divergence(logits, ref_logits)


@pytest.mark.parametrize("optimum", OPTIMA)
def test_no_policy_beats_the_optimum(optimum, rewards, ref_logits):
    best = optimum(rewards, ref_logits, beta=BETA)
    assert torch.allclose(best.exp().sum(-1), torch.ones(20, dtype=best.dtype), atol=1e-13)
    at_best = objective(best.clamp(min=-600), rewards, ref_logits, OPTIMA[optimum])
    for seed in range(20):
        near = best.clamp(min=-30) + random_logits(20, 6, seed=seed, scale=0.05 * (seed + 1))
        assert (objective(near, rewards, ref_logits, OPTIMA[optimum]) < at_best).all()


def test_two_tokens_by_hand():
    gap = 1.7
    rewards = torch.tensor([0.0, -gap], dtype=torch.float64)
    even = torch.zeros(2, dtype=torch.float64)
    root = 0.5 * (BETA - gap + math.hypot(BETA, gap))
    assert forward_kl_multiplier(rewards, even, beta=BETA).item() == pytest.approx(root, rel=1e-13)
    forward = forward_kl_optimum(rewards, even, beta=BETA).exp()
    assert forward[1].item() == pytest.approx(BETA / (2 * (root + gap)), rel=1e-13)
    reverse = reverse_kl_optimum(rewards, even, beta=BETA).exp()
    assert (reverse[1] / reverse[0]).item() == pytest.approx(math.exp(-gap / BETA), rel=1e-13)
    near = torch.tensor([0.0, -0.4], dtype=torch.float64)
    projected = euclidean_optimum(near, even, beta=BETA).exp()
    assert projected[1].item() == pytest.approx(0.5 - 0.4 / (2 * BETA), rel=1e-13)
    assert euclidean_optimum(rewards, even, beta=BETA)[1].item() == -math.inf
    tilted = chi_square_optimum(near, even, beta=BETA).exp()
    assert tilted[1].item() == pytest.approx(0.5 * (1 - 0.2 / BETA), rel=1e-13)
    assert chi_square_optimum(rewards, even, beta=BETA)[1].item() == -math.inf


@pytest.mark.parametrize("beta", [1e-6, 1e-2, 1.0, 1e4])
def test_the_multiplier_is_the_only_root_above_the_rewards(beta, rewards, ref_logits):
    multiplier = forward_kl_multiplier(rewards, ref_logits, beta=beta)
    reference = ref_logits.softmax(-1)
    best = rewards.max(-1).values
    assert (multiplier > best).all()
    assert (multiplier <= best + beta * (1 + 1e-12)).all()
    assert (multiplier >= (reference * rewards).sum(-1) + beta * (1 - 1e-9)).all()
    for i in range(3):
        r, ref = rewards[i].numpy(), reference[i].numpy()
        excess = brentq(
            lambda x, r=r, ref=ref: np.log((beta * ref / (x + r.max() - r)).sum()),
            beta * ref[r.argmax()] * 0.5,
            beta * 1.5,
            xtol=1e-300,
            rtol=1e-14,
        )
        policy = beta * ref / (excess + r.max() - r)
        found = forward_kl_optimum(rewards[i], ref_logits[i], beta=beta).exp()
        assert np.allclose(found.numpy(), policy, rtol=1e-9)


def test_no_token_falls_below_the_hyperbolic_share(rewards, ref_logits):
    gap = rewards.max(-1, keepdim=True).values - rewards
    kept = (forward_kl_optimum(rewards, ref_logits, beta=BETA) - ref_logits.log_softmax(-1)).exp()
    assert (kept >= BETA / (BETA + gap) - 1e-12).all()
    exponential = reverse_kl_optimum(rewards, ref_logits, beta=BETA) - ref_logits.log_softmax(-1)
    assert not (exponential.exp() >= BETA / (BETA + gap)).all()


def test_rare_best_tokens_and_forbidden_ones():
    rewards = torch.tensor([5.0, 0.0, 9.0], dtype=torch.float64)
    ref_logits = torch.tensor([-600.0, 0.0, -math.inf], dtype=torch.float64)
    for optimum in OPTIMA:
        policy = optimum(rewards, ref_logits, beta=1.0).exp()
        assert policy[2] == 0
        assert policy.sum().item() == pytest.approx(1.0, abs=1e-12)
    # beta ref / (lambda - R): the rare token takes all that the other cannot hold.
    policy = forward_kl_optimum(rewards, ref_logits, beta=1.0).exp()
    assert policy[1].item() == pytest.approx(0.2, abs=1e-12)


@pytest.mark.parametrize("beta", [1e-3, 0.1, 1.0, 1e3])
def test_the_chi_square_optimum_solves_its_conditions(beta, rewards, ref_logits):
    """Advantage equal to the slope of the divergence where kept, below it where given up."""
    reference = ref_logits.softmax(-1)
    policy = chi_square_optimum(rewards, ref_logits, beta=beta).exp()
    assert torch.allclose(policy.sum(-1), torch.ones(20, dtype=policy.dtype), atol=1e-12)
    net = rewards - beta * (policy / reference - 1)
    multiplier = (policy * net).sum(-1, keepdim=True)
    kept, slack = policy > 0, 1e-10 * (1 + beta)
    assert ((net - multiplier).abs()[kept] < slack).all()
    assert ((net - multiplier)[~kept] <= slack).all()
    assert (~kept).any() == (beta < 1e3)
    if beta >= 1:  # below it single tokens survive, which solve anything
        flipped = rewards + beta * (policy / reference - 1)
        assert ((flipped - (policy * flipped).sum(-1, keepdim=True)).abs()[kept] > 0.1).any()


def test_k3_with_policy_and_reference_exchanged_reaches_chi_square(ref_logits):
    """Its expected gradient on fresh samples is that of half the chi-square, which k3's is not."""
    logits = random_logits(20, 6, seed=7, scale=1.5).requires_grad_()
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)

    def gradient(loss):
        return torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0]

    policy = logp.detach().exp()
    exchanged = gradient(policy * k3(ref_logp, logp))
    expected = gradient(half_chi_square(logits, ref_logits))
    assert torch.allclose(exchanged, expected, rtol=1e-10, atol=1e-12)
    assert (gradient(policy * k3(logp, ref_logp)) - expected).abs().max() > 0.1


@pytest.mark.parametrize(("dtype", "logit"), [(torch.float64, -800.0), (torch.float32, -110.0)])
def test_chi_square_reckons_with_probabilities_that_underflow(dtype, logit):
    rewards = torch.tensor([5.0, 0.0, 2.0, -1.0], dtype=dtype)
    ref_logits = torch.tensor([logit, 0.0, logit, 0.0], dtype=dtype)
    found = chi_square_optimum(rewards, ref_logits, beta=4.0)
    # The two that hold the mass: 1 + (R - mean) / beta. The others: the same, of next to nothing.
    expected = torch.tensor([1 + 5.5 / 4, 1 + 0.5 / 4, 1 + 2.5 / 4, 1 - 0.5 / 4], dtype=dtype)
    assert torch.allclose(found - ref_logits.log_softmax(-1), expected.log(), atol=1e-4)
    assert found.exp().sum().item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("dtype", "logit"), [(torch.float64, -800.0), (torch.float32, -110.0)])
def test_the_forward_kl_reckons_with_probabilities_that_underflow(dtype, logit):
    """By hand at the excess of zero: beta ref / gap for the rest, and what is left for the best."""
    ref_logits = torch.tensor([logit, 0.0, logit + 1, 0.0], dtype=dtype)
    rewards = torch.tensor([5.0, 0.0, 5.0, 1.0], dtype=dtype)
    policy = forward_kl_optimum(rewards, ref_logits, beta=2.0).exp()
    first, third = 2.0 * 0.5 / 5, 2.0 * 0.5 / 4
    best = 1 - first - third
    share = 1 / (1 + math.e)
    expected = torch.tensor([best * share, first, best * (1 - share), third], dtype=dtype)
    assert torch.allclose(policy, expected, rtol=3e-5 if dtype == torch.float32 else 1e-12)
    # Where the others hold all, the best keeps next to nothing, and the multiplier is the others'.
    found = forward_kl_optimum(rewards, ref_logits, beta=40.0)
    held = forward_kl_optimum(rewards[1::2], ref_logits[1::2], beta=40.0)
    assert torch.allclose(found[1::2].exp(), held.exp(), rtol=1e-5)
    assert found[0] < logit / 2 and torch.isfinite(found).all()


def test_the_best_token_wins_what_it_wins_just_above_underflow():
    """The share no longer depends on how rare the best token is, on either side of the limit."""
    rewards = torch.tensor([0.6, 0.0, 0.3])
    shares = [
        forward_kl_optimum(rewards, torch.tensor([logit, 0.0, 0.0]), beta=0.2).exp()
        for logit in (-70.0, -86.0, -88.0, -102.0, -104.0, -110.0, -300.0)
    ]
    for other in shares[1:]:
        assert torch.allclose(other, shares[0], atol=1e-5)
    assert shares[0][0].item() == pytest.approx(1 - 0.2 * 0.5 / 0.6 - 0.2 * 0.5 / 0.3, abs=1e-5)


@pytest.mark.parametrize(("estimator", "value"), [("k2", k2), ("k3", k3)])
def test_penalty_equilibria_solve_their_equation(estimator, value, rewards, ref_logits):
    support = torch.zeros(20, 6, dtype=torch.bool)
    support[:, :3] = True
    logp = penalty_equilibrium(rewards, ref_logits, support, beta=2.0, estimator=estimator)
    exists = ~logp.isnan().any(-1)
    assert 3 <= exists.sum() < 20  # steep rewards leave no room for three survivors
    logp, ref_logp = logp[exists], ref_logits.log_softmax(-1)[exists]
    assert (logp[:, 3:] == -math.inf).all()
    credit = rewards[exists][:, :3] - 2.0 * value(logp[:, :3], ref_logp[:, :3])
    assert torch.allclose(credit, credit[:, :1].expand_as(credit), atol=1e-9)
    assert (logp[:, :3] - ref_logp[:, :3] >= -1e-9).all()
    level = torch.zeros_like(rewards)
    cut = penalty_equilibrium(level, ref_logits, support, beta=2.0, estimator=estimator)
    kept = ref_logits[:, :3].softmax(-1)
    assert torch.allclose(cut[:, :3].exp(), kept, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_penalties_leave_the_reference_for_a_truncation_of_it(estimator, ref_logits):
    ref_logits = 0.3 * ref_logits
    assert ref_logits.softmax(-1).max() < 0.5  # a token above one half can hold on from one side
    level = torch.zeros_like(ref_logits)
    start = ref_logits + random_logits(20, 6, seed=8, scale=0.5)
    end = expected_ascent(
        start,
        level,
        ref_logits,
        beta=1.0,
        estimator=estimator,
        placement="reward",
        steps=4000,
        step_size=1.0,
    )
    survivors = end.exp() > 1e-12
    assert (survivors.sum(-1) < 6).all()
    cut = penalty_equilibrium(level, ref_logits, survivors, beta=1.0, estimator=estimator)
    assert torch.allclose(end.exp(), cut.exp(), atol=1e-6)
    back = expected_ascent(start, level, ref_logits, beta=1.0, estimator="k2", steps=300)
    assert torch.allclose(back.exp(), ref_logits.softmax(-1), atol=1e-9)


def test_advantage_vanishes_at_the_optimum_and_only_there(rewards, ref_logits):
    best = reverse_kl_optimum(rewards, ref_logits, beta=BETA)
    there = token_advantage(best, rewards, ref_logits, beta=BETA, estimator="k2")
    assert there.abs().max() < 1e-12
    assert token_advantage(best, rewards, ref_logits, beta=BETA, estimator="k3").abs().max() > 0.1


@pytest.mark.parametrize(
    "rewards", [[1000.0, 1000.0 - 2**-14], [1e8, 1e8], [1e8, 1e8 - 64], [-3e7, -1e30]]
)
def test_the_projection_keeps_its_digits_under_large_rewards(rewards):
    ref_logits = torch.tensor([0.0, 1.0])
    gap = (rewards[0] - rewards[1]) / 1e-3
    ref = 1 / (1 + math.e)
    first = min(1.0, ref + gap / 2)
    found = euclidean_optimum(torch.tensor(rewards), ref_logits, beta=1e-3).exp()
    assert found.tolist() == pytest.approx([first, 1 - first], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_equal_rewards_in_float32_cut_the_reference_down(estimator):
    ref_logits = random_logits(40, 6, seed=8).float()
    for kept in (6, 3):
        support = torch.arange(6).expand(40, 6) < kept
        found = penalty_equilibrium(
            torch.full((40, 6), 0.7), ref_logits, support, beta=0.3, estimator=estimator
        )
        assert found.dtype == torch.float32
        expected = torch.where(support, ref_logits.double(), -torch.inf).softmax(-1)
        torch.testing.assert_close(found.double().exp(), expected, rtol=1e-5, atol=1e-7)
