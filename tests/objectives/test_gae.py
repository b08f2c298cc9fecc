"""GAE against its recursion, and which settings keep the gradient of the sequence KL."""

from __future__ import annotations

import pytest
import torch

from analysis.kl.credit import credit_moments
from analysis.kl.sequences import (
    sequence_kl_gradient,
    token_logp,
    visited_kl_gradient,
)
from analysis.objectives.credit import reward_to_go
from analysis.objectives.gae import gae_kl_gradient, generalised_advantage
from tests.trees import TIGHT, VOCAB_SIZE, draw


@pytest.fixture
def world(sequences):
    return sequences, *draw(2, sequences.num_states, VOCAB_SIZE, seed=1)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (0.7, 0.0), (0.0, 0.5)])
def test_advantage_is_the_backward_recursion(gamma, lam):
    rewards, values = draw(2, 5, 6, seed=2)
    mask = torch.arange(6) < torch.tensor([6, 4, 1, 0, 3])[:, None]
    rewards = torch.where(mask, rewards, torch.nan)
    values = torch.where(mask, values, torch.inf)
    advantage = generalised_advantage(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(5):
        running, following = 0.0, 0.0
        expected = [0.0] * 6
        for t in reversed(range(int(mask[row].sum()))):
            delta = rewards[row, t] + gamma * following - values[row, t]
            running = delta + gamma * lam * running
            following, expected[t] = values[row, t], float(running)
        torch.testing.assert_close(
            advantage[row], torch.tensor(expected, dtype=torch.float64), **TIGHT
        )


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("critic", ["zero", "exact"])
def test_which_settings_are_exact(world, gamma, lam, critic):
    sequences, logits, reference = world
    gradient = gae_kl_gradient(logits, reference, sequences, gamma=gamma, lam=lam, critic=critic)
    error = (gradient - sequence_kl_gradient(logits, reference, sequences)).abs().max()
    exact = gamma == 1.0 and (lam == 1.0 or critic == "exact")
    assert (error < 1e-12) if exact else (error > 1e-3)


def test_zero_critic_is_discounted_reward_to_go(world):
    sequences, logits, reference = world
    costs = token_logp(logits, sequences) - token_logp(reference, sequences)
    gradient = gae_kl_gradient(logits, reference, sequences, gamma=0.9, lam=0.8, critic="zero")
    discounted = credit_moments(logits, sequences, reward_to_go(costs, gamma=0.72)).mean
    torch.testing.assert_close(gradient, discounted, **TIGHT)
    immediate = gae_kl_gradient(logits, reference, sequences, lam=0.0, critic="zero")
    visited = visited_kl_gradient(logits, reference, sequences)
    torch.testing.assert_close(immediate, visited, **TIGHT)


def test_exact_critic_makes_lambda_irrelevant_and_gamma_not(world):
    sequences, logits, reference = world
    costs = token_logp(logits, sequences) - token_logp(reference, sequences)
    discounted = credit_moments(logits, sequences, reward_to_go(costs, gamma=0.9)).mean
    for lam in (0.0, 0.5, 1.0):
        gradient = gae_kl_gradient(logits, reference, sequences, gamma=0.9, lam=lam)
        torch.testing.assert_close(gradient, discounted, **TIGHT)


def test_refusals():
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match="lam"):
        generalised_advantage(ones, ones, ones, lam=1.5)
    with pytest.raises(ValueError, match="gamma"):
        generalised_advantage(ones, ones, ones, gamma=-0.1)
    with pytest.raises(ValueError, match="values"):
        generalised_advantage(ones, torch.ones(2, 2), ones)
