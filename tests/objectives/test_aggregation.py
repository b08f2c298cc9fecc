"""Aggregation modes against plain Python sums over rows of different lengths."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kl_term.objectives.aggregation import MODES, aggregate, token_mean_weight, token_weights

VALUES = torch.tensor(
    [[1.0, 2.0, 4.0, 8.0], [3.0, -5.0, 7.0, 11.0], [13.0, 17.0, 19.0, 23.0]], dtype=torch.float64
)
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)  # one row empty

BY_HAND = {
    "token_mean": (7 + 3) / 4,
    "seq_mean_token_mean": (7 / 3 + 3 + 0) / 3,
    "seq_mean_token_sum": (7 + 3 + 0) / 3,
    "seq_mean_token_sum_norm": (7 / 4 + 3 / 4 + 0) / 3,
}


@pytest.mark.parametrize("mode", MODES)
def test_value_by_hand(mode):
    assert aggregate(VALUES, MASK, mode).item() == pytest.approx(BY_HAND[mode], abs=1e-12)
    others = [BY_HAND[other] for other in MODES if other != mode]
    assert min(abs(aggregate(VALUES, MASK, mode).item() - other) for other in others) > 1e-2


@pytest.mark.parametrize("mode", MODES)
def test_gradient_is_the_weight_and_the_weights_depend_on_the_mask_alone(mode):
    values = VALUES.clone().requires_grad_()
    aggregate(values, MASK, mode).backward()
    weights = token_weights(MASK, mode, dtype=torch.float64)
    assert torch.equal(values.grad, weights)
    assert torch.equal(weights != 0, MASK)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_counted_is_exactly_zero(mode):
    values = torch.full((2, 3), math.nan, requires_grad=True)
    total = aggregate(values, torch.zeros(2, 3, dtype=torch.bool), mode)
    total.backward()
    assert total.item() == 0.0
    assert torch.equal(values.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_no_rows_or_no_tokens_is_exactly_zero(mode, shape):
    assert aggregate(torch.ones(shape), torch.ones(shape), mode).item() == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_leading_axes_are_rows(mode):
    stacked = aggregate(VALUES.reshape(3, 1, 4), MASK.reshape(3, 1, 4), mode)
    assert torch.equal(stacked, aggregate(VALUES, MASK, mode))
    single = aggregate(VALUES[0], MASK[0], mode)
    assert torch.equal(single, aggregate(VALUES[:1], MASK[:1], mode))


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_is_summed_in_float32(mode):
    values = torch.full((4, 1000), 0.1, dtype=torch.bfloat16)
    total = aggregate(values, torch.ones(4, 1000), mode)
    exact = aggregate(values.double(), torch.ones(4, 1000), mode).item()
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(exact, rel=1e-5)


def test_the_token_mean_in_expectation_against_every_batch():
    probability = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)  # some are empty
    for number in (1, 2, 3):
        expected = torch.zeros(4, dtype=torch.float64)
        for lengths in itertools.product(range(4), repeat=number):
            lengths = torch.tensor(lengths)
            mask = torch.arange(3) < lengths[:, None]
            weight = number * token_weights(mask, "token_mean", dtype=torch.float64)[0, 0]
            expected[lengths[0]] += weight * probability[lengths[1:]].prod()
        weights = token_mean_weight(probability, number)
        torch.testing.assert_close(weights[1:], expected[1:], rtol=0, atol=1e-12)


def test_the_token_mean_runs_from_one_over_length_to_a_constant():
    probability = torch.tensor([0.1, 0.0, 0.2, 0.3, 0.4], dtype=torch.float64)
    lengths = torch.arange(5, dtype=torch.float64)
    torch.testing.assert_close(token_mean_weight(probability, 1)[1:], 1 / lengths[1:])
    assert (token_mean_weight(probability, 7).diff()[1:] < 0).all()
    mean = probability @ lengths
    gaps = [(token_mean_weight(probability, n) * mean - 1).abs().max() for n in (100, 400)]
    assert gaps[1] < 0.01
    assert gaps[0] / gaps[1] == pytest.approx(4, rel=0.05)
