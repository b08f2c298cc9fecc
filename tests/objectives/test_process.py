"""Process rewards by hand: telescoping, choosing and stopping."""

from __future__ import annotations

import pytest
import torch

from kl_term.objectives.credit import reward_to_go
from kl_term.objectives.process import best_of_n, early_stop, marginal_rewards, path_score

SCORES = torch.tensor([[0.5, 0.6, 0.2, 0.9], [0.8, 0.7, 0.6, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)


def test_marginal_rewards_telescope_to_the_difference_of_the_ends():
    initial = torch.tensor([0.4, 0.3], dtype=torch.float64)
    rewards = marginal_rewards(SCORES, initial)
    assert rewards[0].tolist() == pytest.approx([0.1, 0.1, -0.4, 0.7])
    assert torch.allclose(rewards.sum(-1), SCORES[:, -1] - initial)
    to_go = reward_to_go(rewards)[:, 1:]
    assert torch.allclose(to_go, SCORES[:, -1:] - SCORES[:, :-1])
    assert not torch.allclose(reward_to_go(rewards, gamma=0.9)[:, 1:], to_go)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("last", [0.9, 0.6]),
        ("sum", [2.2, 2.1]),
        ("mean", [0.55, 0.7]),
        ("min", [0.2, 0.6]),
        ("product", [0.054, 0.336]),
    ],
)
def test_path_scores_by_hand(how, expected):
    poisoned = torch.where(MASK, SCORES, torch.nan)
    assert path_score(poisoned, MASK, how).tolist() == pytest.approx(expected)
    assert best_of_n(poisoned, MASK, how=how).item() == int(expected[1] > expected[0])


def test_early_stop_by_hand():
    assert early_stop(SCORES, patience=2, initial=0.9).tolist() == [4, 2]
    assert early_stop(SCORES, patience=3, initial=0.9).tolist() == [4, 3]
    assert early_stop(SCORES, patience=1).tolist() == [3, 2]
