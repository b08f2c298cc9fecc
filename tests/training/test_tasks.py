from __future__ import annotations

import pytest
import torch

from analysis.training.tasks import END, SortTask


def test_a_completion_is_right_when_it_is_the_sorted_prompt():
    task = SortTask(num_digits=3)
    prompts = torch.tensor([[3, 1, 2]])
    completions = torch.tensor([[[1, 2, 3], [3, 2, 1], [1, 2, 2]]])
    assert task.score(prompts, completions).rewards.tolist() == [[1.0, 0.0, 0.0]]


def test_graded_reward_is_the_share_of_right_positions_and_accuracy_stays_exact():
    task = SortTask(num_digits=3, reward="graded")
    scores = task.score(
        torch.tensor([[3, 1, 2]]), torch.tensor([[[1, 2, 3], [3, 2, 1], [1, 2, 2]]])
    )
    assert torch.allclose(scores.rewards, torch.tensor([[1.0, 1 / 3, 2 / 3]]))
    assert scores.accuracy.tolist() == [[1.0, 0.0, 0.0]]


def test_with_an_end_token_the_completion_must_end_and_what_follows_is_not_read():
    task = SortTask(num_digits=2, end_token=True)
    prompts = torch.tensor([[5, 4]])
    ended, endless, early = [4, 5, END], [4, 5, 6], [4, END, 5]
    completions = torch.tensor([[ended, endless, early]])
    assert task.score(prompts, completions).rewards.tolist() == [[1.0, 0.0, 0.0]]
    assert task.completion_mask(completions).tolist() == [
        [[True, True, True], [True, True, True], [True, True, False]]
    ]


def test_tokens_after_the_end_earn_nothing():
    task = SortTask(num_digits=3, end_token=True, reward="graded")
    completion = torch.tensor([[[END, 2, 3, END]]])  # 2, 3 and the last END stand where they should
    assert task.score(torch.tensor([[1, 2, 3]]), completion).rewards.item() == 0.0


def test_prompts_cover_the_digits_evenly():
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    digits = SortTask().prompts(uniforms)
    assert digits.bincount().tolist() == [100] * 10


def test_an_unknown_field_is_refused():
    with pytest.raises(ValueError, match="digits"):
        SortTask(digits=3)
