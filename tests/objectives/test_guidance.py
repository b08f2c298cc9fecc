"""Annealing, and masks of samples and segments."""

from __future__ import annotations

import pytest
import torch

from kl_term.objectives.guidance import annealed, current_segment, low_reward_mask


def test_annealing_ends_where_it_should():
    values = [annealed(n, 4, start=1.0, end=0.2) for n in (0, 1, 4, 9)]
    assert values == pytest.approx([1.0, 0.8, 0.2, 0.2])


def test_masks():
    assert low_reward_mask(torch.tensor([0.0, 0.5, 1.0]), 0.5).tolist() == [True, False, False]
    mask = torch.tensor([1, 1, 1, 0])
    sampled_at = torch.tensor([3, 4, 4, 4])
    assert current_segment(mask, sampled_at, 4).tolist() == [False, True, True, False]
