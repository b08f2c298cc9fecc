"""Spread of multiplied ratios: closed forms against listing every sequence, and a sample."""

from __future__ import annotations

import pytest
import torch

from analysis.kl.divergences import chi_square, reverse_kl
from analysis.kl.products import (
    chi_square_bounds,
    geometric_spread,
    log_ratio_spread,
    product_variance,
    ratio_power_mean,
    sequence_ratio_spread,
)
from analysis.kl.sequences import enumerate_sequences, sequence_probability, token_logp

TIGHT = {"rtol": 1e-11, "atol": 1e-12}


def draw(*shape, seed, scale=0.7):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.fixture
def token_pair():
    return draw(2, 3, seed=1)


@pytest.mark.parametrize("length", [1, 3, 5])
def test_closed_forms_are_the_enumeration_of_independent_tokens(token_pair, length):
    sequences = enumerate_sequences(3, length)
    logits, old = (row.expand(sequences.num_states, 3) for row in token_pair)
    chi2 = chi_square(token_pair[1], token_pair[0])  # of the policy from the sampler
    whole = sequence_ratio_spread(logits, old, sequences)
    torch.testing.assert_close(whole.var, product_variance(chi2, length), **TIGHT)
    torch.testing.assert_close(whole.mean, torch.ones_like(whole.mean), **TIGHT)
    wrong_way = product_variance(chi_square(*token_pair), length)
    assert abs(whole.var / wrong_way - 1) > 0.01
    listed = sequence_ratio_spread(logits, old, sequences, level="geometric")
    closed = geometric_spread(*token_pair, length)
    torch.testing.assert_close(listed.mean, closed.mean, **TIGHT)
    torch.testing.assert_close(listed.var, closed.var, **TIGHT)


def test_powers_and_logs(token_pair):
    policy, old = (x.softmax(-1) for x in token_pair)
    for power in (0.3, 2.0, -1.0):
        expected = (old * (policy / old) ** power).sum()
        torch.testing.assert_close(ratio_power_mean(*token_pair, power), expected, **TIGHT)
    mean, var = log_ratio_spread(*token_pair)
    torch.testing.assert_close(mean, -reverse_kl(token_pair[1], token_pair[0]), **TIGHT)
    second = (old * (policy / old).log().square()).sum()
    torch.testing.assert_close(var, second - mean.square(), **TIGHT)


def test_geometric_weight_settles_below_one(token_pair):
    lengths = torch.tensor([10.0, 100.0, 1000.0], dtype=torch.float64)
    mean, var = geometric_spread(*token_pair, lengths)
    limit = torch.exp(log_ratio_spread(*token_pair).mean)
    assert (mean - limit).abs()[-1] < 1e-3 < 0.01 < 1 - limit
    assert var[1] / var[2] == pytest.approx(10, rel=0.02)


def test_bounds_hold_on_a_tree_and_are_not_trivial():
    sequences = enumerate_sequences(3, 4)
    logits, old = draw(2, sequences.num_states, 3, seed=7)
    low, high = chi_square_bounds(logits, old, 4)
    ratio = (token_logp(logits, sequences) - token_logp(old, sequences)).sum(-1).exp()
    var = sequence_probability(old, sequences) @ ratio.square() - 1
    torch.testing.assert_close(sequence_ratio_spread(logits, old, sequences).var, var, **TIGHT)
    assert 0 < low < var < high


def test_tiny_chi_square_keeps_its_digits():
    tiny = torch.tensor(1e-14, dtype=torch.float64)
    assert product_variance(tiny, 100).item() == pytest.approx(1e-12, rel=1e-9)
