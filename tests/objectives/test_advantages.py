"""Group advantages: hand-computed constants, exact zeros, bounds and invariances."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_term.objectives.advantages import group_centre, group_normalise, leave_one_out

ADVANTAGES = [group_normalise, group_centre, leave_one_out]

#: Rewards on a grid, so that a shift by a grid point loses no digit.
rewards_on_grid = st.lists(st.integers(-64, 64), min_size=2, max_size=9).map(
    lambda numbers: torch.tensor(numbers, dtype=torch.float64) / 8
)


def test_constants_by_hand():
    rewards = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)  # mean 3, squares 4 + 1 + 9
    centred = [-2.0, -1.0, 3.0]
    assert group_centre(rewards).tolist() == centred
    assert leave_one_out(rewards).tolist() == [-3.0, -1.5, 4.5]
    for ddof, variance in ((0, 14 / 3), (1, 7.0)):
        expected = [value / (math.sqrt(variance) + 0.25) for value in centred]
        result = group_normalise(rewards, ddof=ddof, eps=0.25)
        assert result.tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.equal(group_normalise(rewards), group_normalise(rewards, ddof=1, eps=1e-4))


@pytest.mark.parametrize("function", ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 7, 64, 1000])
def test_equal_rewards_are_exactly_zero(function, dtype, size):
    for reward in (0.3, 1 / 3, 0.0, 6e4, -torch.finfo(dtype).max):
        rewards = torch.full((2, size), reward, dtype=dtype)
        assert torch.equal(function(rewards), torch.zeros(2, size).to(function(rewards)))
    if function is group_normalise:
        rewards = torch.full((size,), 0.3, dtype=dtype)
        for options in ({"eps": 0.0}, {"eps": 1e-8}, {"eps": 0.0, "std_min": 0.0, "std_max": 1.0}):
            assert torch.count_nonzero(group_normalise(rewards, **options)) == 0


def test_rounding_noise_is_blown_up_unless_the_std_is_clipped():
    for dtype in (torch.float32, torch.float64):
        rewards = torch.tensor([0.99999, 1.00001, 0.99999, 1.00001], dtype=dtype)
        loud = group_normalise(rewards, eps=0.0)
        expected = torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=dtype) * math.sqrt(3) / 2
        assert torch.allclose(loud, expected, rtol=0, atol=1e-6)
        quiet = group_normalise(rewards, eps=0.0, std_min=0.1)
        assert torch.allclose(quiet, torch.sign(expected) * 1e-4, rtol=0, atol=1e-6)


def test_the_scale_of_the_rewards_drops_out_without_eps_only():
    rounding = torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64) * 1e-5
    right_or_wrong = rounding * 5e4
    assert torch.allclose(*(group_normalise(r, eps=0.0) for r in (rounding, right_or_wrong)))
    assert group_normalise(rounding).abs().max() < 0.1
    assert group_normalise(right_or_wrong).abs().max() > 0.8


def test_clip_of_the_standard_deviation():
    rewards = torch.tensor([-3.0, 0.0, 3.0], dtype=torch.float64)  # std 3
    assert group_normalise(rewards, eps=0.0).tolist() == [-1.0, 0.0, 1.0]
    assert group_normalise(rewards, eps=0.0, std_max=1.5).tolist() == [-2.0, 0.0, 2.0]
    assert group_normalise(rewards, eps=0.0, std_min=6.0).tolist() == [-0.5, 0.0, 0.5]
    assert group_normalise(rewards, eps=0.5, std_min=5.5, std_max=9.0).tolist() == [-0.5, 0.0, 0.5]
    assert group_normalise(rewards, eps=0.0, std_min=1.0, std_max=5.0).tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("size", range(2, 9))
def test_bounds_are_reached_by_one_against_the_rest(size):
    bounds = {0: math.sqrt(size - 1), 1: (size - 1) / math.sqrt(size)}
    groups = torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)), dtype=torch.float64)
    for ddof, bound in bounds.items():
        largest = group_normalise(groups, ddof=ddof, eps=0.0).abs().max().item()
        assert largest == pytest.approx(bound, abs=1e-12)


@settings(max_examples=80, deadline=None)
@given(rewards_on_grid, st.integers(-8000, 8000), st.randoms(use_true_random=False))
def test_bounds_shifts_orders_and_scales_of_any_rewards(rewards, shift, random):
    size, order = len(rewards), list(range(len(rewards)))
    for ddof, bound in ((0, math.sqrt(size - 1)), (1, (size - 1) / math.sqrt(size))):
        assert group_normalise(rewards, ddof=ddof, eps=0.0).abs().max() <= bound + 1e-12
    random.shuffle(order)
    for function in ADVANTAGES:
        result = function(rewards)
        assert torch.equal(function(rewards + shift / 8), result)
        assert torch.allclose(function(rewards[order]), result[order], rtol=1e-12, atol=1e-13)
        assert abs(result.sum().item()) < 1e-10
    scaled = group_normalise(3 * rewards, eps=0.0)
    assert torch.allclose(scaled, group_normalise(rewards, eps=0.0), rtol=1e-12, atol=1e-12)
    assert torch.allclose(group_centre(-rewards), -group_centre(rewards), rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", ADVANTAGES)
def test_advantages_carry_no_gradient(function):
    assert not function(torch.tensor([0.0, 1.0, 3.0], requires_grad=True)).requires_grad


@pytest.mark.parametrize("function", ADVANTAGES)
def test_a_group_of_one_is_refused(function):
    for shape in [(), (0,), (1,), (4, 1)]:
        with pytest.raises(ValueError, match=r"rewards has shape"):
            function(torch.zeros(shape))


@pytest.mark.parametrize("function", ADVANTAGES)
def test_a_bad_reward_stays_visible_in_its_own_group(function):
    rewards = torch.tensor([[0.0, math.nan, 1.0], [0.0, 1.0, 2.0]])
    result = function(rewards)
    assert result[0].isnan().all()
    assert torch.equal(result[1], function(rewards[1]))
