"""Sums along a completion, against their recursion."""

from __future__ import annotations

import pytest
import torch

from kl_term.kl.returns import reward_to_go


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 13])
def test_reward_to_go_against_its_recursion(gamma, length):
    rewards = torch.randn(2, 3, length, generator=torch.Generator().manual_seed(length)).double()
    running, expected = torch.zeros(2, 3, dtype=torch.float64), []
    for t in reversed(range(length)):
        running = rewards[..., t] + gamma * running
        expected.append(running)
    result = reward_to_go(rewards, gamma=gamma)
    assert torch.allclose(result, torch.stack(expected[::-1], dim=-1), rtol=0, atol=1e-12)


def test_reward_to_go_looks_forward():
    late = torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert reward_to_go(late, gamma=0.5).tolist() == [0.25, 0.5, 1.0, 0.0]
    assert reward_to_go(torch.zeros(2, 0)).shape == (2, 0)


def test_without_a_future_an_infinite_reward_stays_where_it_is():
    rewards = torch.tensor([1.0, torch.inf, -2.0])
    assert reward_to_go(rewards, gamma=0.0).tolist() == [1.0, torch.inf, -2.0]
