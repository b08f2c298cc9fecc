"""Length rewards by hand, and what the group's normalisation does to them."""

from __future__ import annotations

import pytest
import torch

from kl_term.objectives.advantages import group_normalise
from kl_term.objectives.lengths import length_penalty, relative_length_reward, soft_overlong

LENGTHS = torch.tensor([10.0, 40.0, 25.0], dtype=torch.float64)


def test_penalty_by_hand():
    rewards = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    got = length_penalty(rewards, LENGTHS, weight=0.01)
    assert got.tolist() == pytest.approx([0.9, 0.6, -0.25])


def test_the_price_cancels_in_a_group_of_equal_rewards_and_only_there():
    equal, mixed = torch.ones_like(LENGTHS), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    cheap, dear = (
        [group_normalise(length_penalty(r, LENGTHS, weight=w), eps=0.0) for w in (1e-6, 0.1)]
        for r in (equal, mixed)
    )
    assert torch.allclose(*cheap, atol=1e-9)
    assert not torch.allclose(*dear, atol=1e-2)


def test_a_relative_reward_is_a_price_on_length_where_all_are_right():
    task, right = torch.ones_like(LENGTHS), torch.tensor([True, True, True])
    relative = group_normalise(task + relative_length_reward(right, LENGTHS), eps=0.0)
    price = group_normalise(length_penalty(task, LENGTHS, weight=1e-4), eps=0.0)
    assert torch.allclose(relative, price, atol=1e-9) and relative.abs().max() > 0.9


def test_soft_overlong_by_hand():
    lengths = torch.tensor([0, 80, 90, 100, 500])
    assert soft_overlong(lengths, max_length=100, buffer=20).tolist() == [0, 0, -0.5, -1, -1]


def test_relative_reward_by_hand():
    correct = torch.tensor([False, True, True])
    assert relative_length_reward(correct, LENGTHS).tolist() == pytest.approx([0.0, -0.5, 0.0])
    wrong_and_long = relative_length_reward(torch.tensor([True, False, True]), LENGTHS)
    assert wrong_and_long.tolist() == pytest.approx([0.5, -0.5, 0.0])
    assert relative_length_reward(correct, torch.full((3,), 7)).tolist() == [0, 0, 0]
