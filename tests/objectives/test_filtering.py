"""Dynamic sampling and loop detection."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch

from kl_term.objectives.advantages import group_normalise
from kl_term.objectives.filtering import informative_groups, kept_fraction, repeats


def test_kept_groups_are_those_with_an_advantage():
    rewards = torch.tensor([[1.0, 1, 1], [0.3, 0.3, 0.3], [0, 1, 0]])
    assert informative_groups(rewards).tolist() == [False, False, True]
    assert (group_normalise(rewards)[~informative_groups(rewards)] == 0).all()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_kept_fraction_is_the_enumerated_one(size):
    for p in (0.0, 0.2, 0.9):
        groups = itertools.product((0.0, 1.0), repeat=size)
        kept = sum(
            math.prod(p if r else 1 - p for r in group)
            for group in groups
            if informative_groups(torch.tensor(group))
        )
        success = torch.tensor(p, dtype=torch.float64)
        assert kept_fraction(success, size).item() == pytest.approx(kept, abs=1e-12)


def test_loops_of_any_period_up_to_the_longest():
    tokens = torch.tensor([9, 1, 2, 1, 2, 1, 2, 5, 5, 5])
    found = repeats(tokens, period=2, times=3)
    assert found.nonzero().flatten().tolist() == [6, 9]
    assert repeats(tokens, period=1, times=3).nonzero().flatten().tolist() == [9]
    assert not repeats(torch.arange(10), period=3, times=2).any()
    assert not repeats(tokens[:3], period=2, times=3).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_fraction_of_a_prompt_that_is_nearly_always_the_same(dtype):
    eps = torch.finfo(dtype).eps
    for size in (2, 16):
        for p in (1e-8, 1e-30, 0.5, 1 - eps / 2):
            chance = Fraction(torch.tensor(p, dtype=dtype).item())
            exact = float(1 - chance**size - (1 - chance) ** size)
            found = kept_fraction(torch.tensor(p, dtype=dtype), size)
            assert found.item() == pytest.approx(exact, rel=8 * eps)
