"""Credit within a completion: process supervision, the KL folded into advantages."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_term.objectives import advantages as public
from kl_term.objectives.advantages import fold_kl, process_supervision

# Step rewards 1, 3 | 2 | none: mean 2, squared deviations 1 + 1 + 0.
STEP_REWARDS = [[1.0, 3.0], [2.0], []]
STEP_ENDS = [[1, 3], [2], []]
LENGTHS = [6, 3, 2]


def loops(step_rewards, step_ends, lengths, ddof, eps):
    """Process supervision as its formula reads, in plain Python."""
    everything = [reward for rewards in step_rewards for reward in rewards]
    mean = sum(everything) / len(everything)
    squares = sum((reward - mean) ** 2 for reward in everything)
    std = math.sqrt(squares / (len(everything) - ddof))
    return [
        [
            sum(
                (reward - mean) / (std + eps)
                for reward, end in zip(rewards, ends, strict=True)
                if end >= t
            )
            for t in range(max(lengths))
        ]
        for rewards, ends in zip(step_rewards, step_ends, strict=True)
    ]


def padded(step_rewards, step_ends, garbage):
    width = max(len(row) for row in step_rewards) + 1
    rewards = [[*row, *[garbage] * (width - len(row))] for row in step_rewards]
    ends = [[*row, *[-1] * (width - len(row))] for row in step_ends]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(ends)


@st.composite
def process_groups(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=2, max_size=5))
    ends = [sorted(draw(st.sets(st.integers(0, length - 1), max_size=4))) for length in lengths]
    rewards = [[draw(st.integers(-40, 40)) / 8 for _ in row] for row in ends]
    return rewards, ends, lengths


@settings(max_examples=80, deadline=None)
@given(process_groups(), st.sampled_from([0, 1]))
def test_process_supervision_against_its_formula_in_loops(group, ddof):
    rewards, ends, lengths = group
    if sum(map(len, rewards)) < 2:
        return
    expected = torch.tensor(loops(rewards, ends, lengths, ddof, 1e-3), dtype=torch.float64)
    ragged = [torch.tensor(row, dtype=torch.float64) for row in rewards]
    result = process_supervision(ragged, ends, lengths, ddof=ddof, eps=1e-3)
    assert result.dtype == torch.float64
    assert torch.allclose(result, expected, rtol=0, atol=1e-11)
    for output, row in enumerate(ends):
        assert torch.count_nonzero(result[output, (row[-1] + 1 if row else 0) :]) == 0


@pytest.mark.parametrize("garbage", [0.0, math.nan, -math.inf, 1e30])
def test_padded_layout_equals_ragged_layout_whatever_the_padding_holds(garbage):
    rewards, ends = padded(STEP_REWARDS, STEP_ENDS, garbage)
    result = process_supervision(rewards, ends, torch.tensor(LENGTHS))
    ragged = process_supervision(STEP_REWARDS, STEP_ENDS, LENGTHS)
    assert result.dtype == torch.float64
    assert torch.allclose(result.float(), ragged, rtol=0, atol=1e-6)
    batch = process_supervision(
        torch.stack([rewards, 2 * rewards]), torch.stack([ends, ends]), torch.tensor([LENGTHS] * 2)
    )
    assert torch.equal(batch[0], result)
    assert torch.allclose(batch[1], result, rtol=0, atol=1e-3)  # scale drops out, up to eps
    assert not torch.equal(batch[1], result)


def test_one_step_per_output_is_group_normalisation_up_to_that_step():
    rewards = torch.tensor([0.0, 1.0, 4.0, 4.5], dtype=torch.float64)
    result = process_supervision(
        rewards[:, None], torch.tensor([[0], [1], [2], [2]]), torch.tensor([3, 3, 3, 3])
    )
    normalised = public.group_normalise(rewards)
    covered = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]])
    assert torch.allclose(result, normalised[:, None] * covered, rtol=0, atol=1e-12)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_equal_step_rewards_are_exactly_zero(eps):
    result = process_supervision([[0.3] * 3, [0.3] * 4], [[0, 2, 4], [1, 2, 3, 6]], [5, 7], eps=eps)
    assert torch.equal(result, torch.zeros(2, 7))
    single = process_supervision([[0.7], []], [[1], []], [2, 2], eps=eps)
    assert torch.equal(single, torch.zeros(2, 2))
    assert torch.equal(process_supervision([[], []], [[], []], [3, 1]), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("step_rewards", "step_ends", "lengths", "message"),
    [
        ([[1.0], [2.0]], [[0], [3]], [3, 3], "0-based"),
        ([[1.0], [2.0]], [[-1], [2]], [3, 3], "output 0.*negative"),
        ([[1.0, 2.0], [2.0]], [[1, 1], [2]], [3, 3], "strictly increasing"),
        ([[1.0, 2.0], [2.0]], [[2, 1], [2]], [3, 3], "strictly increasing"),
        ([[1.0, 2.0], [2.0]], [[1], [2]], [3, 3], "step_ends of output 0"),
        ([[1.0], [2.0]], [[1]], [3, 3], "step_ends has 1 outputs"),
        ([[1.0], [2.0]], [[1.5], [2.0]], [3, 3], "step_ends must hold integers"),
        ([[1.0], [2.0]], [[1], [2]], [3], "lengths has shape"),
        ([[1.0], [2.0]], [[1], [2]], [3.0, 3.0], "lengths must hold integers"),
        ([[], [2.0]], [[], [2]], [-1, 3], "lengths must be >= 0"),
        ({1: 2.0}, [[1], [2]], [3, 3], "step_rewards must be a tensor or lists"),
        ([[1.0], [2.0]], torch.tensor([[1], [2]]), [3, 3], "step_ends must be lists"),
        ([[1.0, 2.0]], [[0, 1]], [3], "at least two"),
        ([], [], [], "at least two|outputs"),
    ],
)
def test_process_supervision_refuses(step_rewards, step_ends, lengths, message):
    with pytest.raises(ValueError, match=message):
        process_supervision(step_rewards, step_ends, lengths)


def test_process_supervision_refuses_padding_before_a_step():
    with pytest.raises(ValueError, match="padding"):
        process_supervision(torch.ones(2, 2), torch.tensor([[-1, 1], [0, 1]]), torch.tensor([2, 2]))


KL = torch.tensor([[0.5, -1.0, 2.0, 4.0], [1.0, 3.0, -0.5, 8.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
ADVANTAGES = torch.tensor([1.5, -2.0], dtype=torch.float64)


def test_fold_kl_by_hand():
    immediate = fold_kl(ADVANTAGES, KL, MASK, beta=0.5)
    assert immediate.tolist() == [[1.25, 2.0, 0.5, 0.0], [-2.5, 0.0, -1.75, -6.0]]
    to_go = fold_kl(ADVANTAGES, KL, MASK, beta=0.5, credit="to_go")
    assert to_go.tolist() == [[0.75, 1.0, 0.5, 0.0], [-6.25, 0.0, -5.75, -6.0]]
    halved = fold_kl(ADVANTAGES, KL, MASK, beta=0.5, credit="to_go", gamma=0.5)
    assert halved.tolist() == [[1.25, 1.5, 0.5, 0.0], [-2.9375, 0.0, -3.75, -6.0]]
    assert not torch.allclose(immediate, fold_kl(ADVANTAGES, -KL, MASK, beta=0.5))
    leaves = [x.clone().requires_grad_() for x in (ADVANTAGES, KL)]
    assert not fold_kl(*leaves, MASK, beta=0.5, credit="to_go").requires_grad


def test_fold_kl_takes_one_advantage_a_token_and_beta_zero_is_no_kl():
    tokens = torch.arange(8, dtype=torch.float64).reshape(2, 4)
    expected = torch.where(MASK, tokens - 2 * KL, 0.0)
    assert torch.equal(fold_kl(tokens, KL, MASK, beta=2.0), expected)
    assert torch.equal(fold_kl(tokens, KL, MASK, beta=0.0), torch.where(MASK, tokens, 0.0))
    assert torch.equal(
        fold_kl(tokens, KL, MASK, beta=2.0),
        fold_kl(tokens, KL, MASK, beta=2.0, credit="to_go", gamma=0.0),
    )
