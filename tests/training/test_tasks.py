from __future__ import annotations

import pytest
import torch

from analysis.records.config import END, FILLER, SortTask
from analysis.training.tiny.tasks import Sorting


@pytest.mark.parametrize(("reward", "shares"), [("exact", (0, 0)), ("graded", (1 / 3, 2 / 3))])
def test_right_is_the_sorted_prompt_and_graded_the_share_of_right_positions(reward, shares):
    task = Sorting(SortTask(num_digits=3, reward=reward))
    completions = torch.tensor([[[1, 2, 3], [3, 2, 1], [1, 2, 2]]])
    scores = task.score(torch.tensor([[3, 1, 2]]), completions)
    assert torch.allclose(scores.rewards, torch.tensor([[1.0, *shares]]))
    assert scores.accuracy.tolist() == [[1.0, 0.0, 0.0]]


def test_with_an_end_token_the_completion_must_end_and_what_follows_is_not_read():
    task = Sorting(SortTask(num_digits=2, end_token=True))
    prompts = torch.tensor([[5, 4]])
    ended, endless, early = [4, 5, END], [4, 5, 6], [4, END, 5]
    completions = torch.tensor([[ended, endless, early]])
    assert task.score(prompts, completions).rewards.tolist() == [[1.0, 0.0, 0.0]]
    assert task.completion_mask(completions).tolist() == [
        [[True, True, True], [True, True, True], [True, True, False]]
    ]


def test_tokens_after_the_end_earn_nothing():
    task = Sorting(SortTask(num_digits=3, end_token=True, reward="graded"))
    completion = torch.tensor([[[END, 2, 3, END]]])  # 2, 3 and the last END stand where they should
    assert task.score(torch.tensor([[1, 2, 3]]), completion).rewards.item() == 0.0


def test_prompts_cover_the_digits_evenly():
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    digits = Sorting(SortTask()).prompts(uniforms)
    assert digits.bincount().tolist() == [100] * 10


ROOMY = Sorting(SortTask(num_digits=2, end_token=True, max_fillers=2))


def test_fillers_before_the_answer_neither_earn_nor_cost():
    F = FILLER
    cases = {
        (4, 5, END, 0, 0): (1.0, 3, True),
        (F, 4, 5, END, 0): (1.0, 3, True),
        (F, F, 4, 5, END): (1.0, 3, True),
        (F, F, F, 4, 5): (0.0, 2, False),  # no room for the end
        (4, F, 5, END, 0): (0.0, 1, True),  # a filler inside the answer
        (F, 5, 4, END, 0): (0.0, 1, True),  # the end alone stands where it should
        (F, 4, END, 5, END): (0.0, 1, True),
        (F, END, 4, 5, END): (0.0, 0, True),
        (F, F, F, F, F): (0.0, 0, False),
        (4, 5, 6, END, 0): (0.0, 2, True),
    }
    completions = torch.tensor([list(cases)])
    prompts = torch.tensor([[5, 4]])
    exact = ROOMY.score(prompts, completions)
    graded = Sorting(ROOMY.config.model_copy(update={"reward": "graded"})).score(
        prompts, completions
    )
    right, steps, finished = zip(*cases.values(), strict=True)
    assert exact.rewards.flatten().tolist() == exact.accuracy.flatten().tolist() == list(right)
    assert torch.allclose(graded.rewards.flatten(), torch.tensor(steps) / 3.0)
    assert exact.steps.sum(-1).flatten().tolist() == list(steps)
    assert exact.finished.flatten().tolist() == list(finished)
    assert torch.equal(graded.steps, exact.steps)


def test_the_mask_ends_with_the_first_end_whatever_the_fillers():
    completions = torch.tensor([[FILLER, 4, END, 5, END], [FILLER] * 5])
    assert ROOMY.completion_mask(completions).sum(-1).tolist() == [3, 5]
    assert ROOMY.completion_length == 5 and ROOMY.config.answer_length == 3


@pytest.mark.parametrize("fillers", [None, (0, 0), (1, 1), (1, 2), (2, 2)])
def test_examples_are_right_and_as_long_as_asked(fillers):
    generator = torch.Generator().manual_seed(0)
    prompts = ROOMY.prompts(torch.rand(600, 2, generator=generator, dtype=torch.float64))
    uniforms = torch.rand(600, generator=generator, dtype=torch.float64)
    examples = ROOMY.examples(prompts, uniforms, fillers)
    assert ROOMY.score(prompts, examples.unsqueeze(1)).accuracy.min() == 1.0
    low, high = fillers or (0, 2)
    lengths = ROOMY.completion_mask(examples).sum(-1) - ROOMY.config.answer_length
    counts = lengths.bincount(minlength=3).tolist()
    assert [count > 0 for count in counts] == [low <= n <= high for n in range(3)]
    assert max(counts) - min(c for c in counts if c) < 70, "not even"
    after = ~ROOMY.completion_mask(examples)
    assert (examples[after] == END).all()


def test_examples_without_room_are_the_targets():
    task = Sorting(SortTask(num_digits=3, end_token=True))
    prompts = torch.tensor([[3, 1, 2]])
    assert task.examples(prompts, torch.tensor([0.9])).tolist() == [[1, 2, 3, END]]


def test_room_for_fillers_needs_an_end():
    with pytest.raises(ValueError, match="max_fillers needs end_token=True"):
        SortTask(max_fillers=1)
