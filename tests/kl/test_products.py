"""Spread of multiplied ratios: closed forms against listing every sequence, and a sample."""

from __future__ import annotations

import pytest
import torch

from analysis.chapters.ch06_sequences.ratios import one_recurrent_state
from kl_term.kl.credit import last_token_groups
from kl_term.kl.divergences import chi_square, reverse_kl
from kl_term.kl.products import (
    chi_square_bounds,
    geometric_spread,
    log_ratio_spread,
    markov_product_growth,
    markov_product_variance,
    product_variance,
    ratio_power_mean,
    sequence_ratio_spread,
    tilted_transitions,
)
from kl_term.kl.sequences import enumerate_sequences, sequence_probability, token_logp
from tests.trees import draw

TIGHT = {"rtol": 1e-11, "atol": 1e-12}


@pytest.fixture
def token_pair():
    return draw(2, 3, seed=1, scale=0.7)


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


def test_a_geometric_weight_of_equal_policies_has_no_negative_variance():
    logits = 2 * draw(100, 7, seed=3)
    assert (geometric_spread(logits, logits, 1000).var >= 0).all()


def test_bounds_hold_on_a_tree_and_are_not_trivial():
    sequences = enumerate_sequences(3, 4)
    logits, old = draw(2, sequences.num_states, 3, seed=7, scale=0.7)
    low, high = chi_square_bounds(logits, old, 4)
    ratio = (token_logp(logits, sequences) - token_logp(old, sequences)).sum(-1).exp()
    var = sequence_probability(old, sequences) @ ratio.square() - 1
    torch.testing.assert_close(sequence_ratio_spread(logits, old, sequences).var, var, **TIGHT)
    assert 0 < low < var < high


def test_tiny_chi_square_keeps_its_digits():
    tiny = torch.tensor(1e-14, dtype=torch.float64)
    assert product_variance(tiny, 100).item() == pytest.approx(1e-12, rel=1e-9, abs=0)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_markov_variance_is_the_enumeration(length):
    sequences = enumerate_sequences(3, length)
    tables = draw(2, 4, 3, seed=11, scale=0.7)
    tables[:, 1, 2] = -torch.inf  # neither policy allows it
    tables[0, 0, 0] = -torch.inf  # the sampler alone does
    groups = last_token_groups(sequences, 3)
    ratio = torch.ones(len(sequences.tokens), dtype=torch.float64)
    chance = torch.ones_like(ratio)
    policy, sampler = (table.softmax(-1)[groups] for table in tables)
    for t in range(length):
        at = sequences.states[:, t], sequences.tokens[:, t]
        chance *= sampler[at]
        ratio *= torch.where(sampler[at] > 0, policy[at] / sampler[at], 0.0)
    listed = chance @ ratio.square() - 1
    torch.testing.assert_close(markov_product_variance(*tables, length), listed, **TIGHT)
    flipped = markov_product_variance(*tables.flip(0), length)
    assert flipped == torch.inf if length > 1 else abs(flipped / listed - 1) > 0.01


def test_equal_rows_are_independent_tokens(token_pair):
    logits, old = (row.expand(4, 3) for row in token_pair)
    chi2 = chi_square(token_pair[1], token_pair[0])
    torch.testing.assert_close(markov_product_growth(logits, old), 1 + chi2, **TIGHT)
    torch.testing.assert_close(
        markov_product_variance(logits, old, 40), product_variance(chi2, 40), **TIGHT
    )


def test_one_recurrent_state_of_ten_is_enough_for_exponential_growth():
    """The counterexample to "if they differ in a few states only, it is not exponential"."""
    logits, old = one_recurrent_state(10, 0.4)
    chi2 = chi_square(old, logits)
    assert chi2[0].item() == pytest.approx(1) and chi2[1:].abs().max() < 1e-14
    growth = markov_product_growth(logits, old)
    assert growth.item() == pytest.approx((2.5 + 0.65**0.5) / 2)  # of [[1.6, .4], [.1, .9]]
    assert markov_product_variance(logits, old, 100).item() == pytest.approx(1.285e21, rel=1e-3)
    longer = markov_product_variance(logits, old, 101) / markov_product_variance(logits, old, 100)
    torch.testing.assert_close(longer, growth, rtol=1e-9, atol=0)


def test_growth_is_one_plus_the_chi_square_where_the_tilted_chain_dwells():
    logits, old = draw(2, 5, 4, seed=12, scale=0.7)
    values, vectors = torch.linalg.eig(tilted_transitions(logits, old)[:-1].T)
    dwell = vectors[:, values.abs().argmax()].real
    dwell = dwell / dwell.sum()
    assert (dwell > 0).all()
    chi2 = chi_square(old, logits)[:-1]
    torch.testing.assert_close(markov_product_growth(logits, old), 1 + dwell @ chi2, **TIGHT)


def chain(*rows):
    """Logits of a Markov chain from its probabilities."""
    return torch.tensor(rows, dtype=torch.float64).log()


def test_what_bounds_the_variance_is_the_number_of_visits_and_not_transience():
    """Token 0 is left for good. Passed once it costs its chi-square once; dwelt in, it explodes."""
    passed = chain([0, 0.3, 0.7], [0, 0.5, 0.5], [0, 0.5, 0.5], [1, 0, 0])
    passed_by = chain([0, 0.6, 0.4], [0, 0.5, 0.5], [0, 0.5, 0.5], [1, 0, 0])
    chi2 = chi_square(passed_by, passed)[0]
    for length in (2, 10, 1000):
        variance = markov_product_variance(passed, passed_by, length)
        torch.testing.assert_close(variance, chi2, **TIGHT)
    dwelt = chain([0.9, 0.1, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0])
    left_early = chain([0.5, 0.5, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0])
    growth = markov_product_growth(dwelt, left_early)
    assert growth.item() == pytest.approx(0.9**2 / 0.5)
    assert markov_product_growth(left_early, dwelt).item() == pytest.approx(1)
    settled = 2.5 / (1 - 0.5**2 / 0.9) - 1
    assert markov_product_variance(left_early, dwelt, 1000).item() == pytest.approx(settled)


@pytest.mark.parametrize("end", [0.30, 0.10])
def test_an_end_token_keeps_the_variance_finite_below_its_own_chance(end):
    """chi2 / (q - chi2) with q = pi(end)^2 / old(end) if chi2 < q, and infinite otherwise."""
    policy, old = [0.45 - end / 2, 0.55 - end / 2, end], [0.6 - 0.1, 0.5 - 0.1, 0.1]
    tables = [chain(row, row, [0, 0, 1], row) for row in (policy, old)]
    chi2 = chi_square(tables[1], tables[0])[0].item()
    stop = end**2 / 0.1
    variance = markov_product_variance(*tables, 4000).item()
    assert chi2 < stop
    assert variance == pytest.approx(chi2 / (stop - chi2), rel=1e-9)
    apart = chain([0.75, 0.15, 0.1], [0.75, 0.15, 0.1], [0, 0, 1], [0.75, 0.15, 0.1])
    assert chi_square(tables[1], apart)[0] > 0.1
    assert markov_product_growth(apart, tables[1]) > 1
    assert markov_product_variance(apart, tables[1], 4000) > 1e20


def test_what_the_sampler_forbids_makes_the_growth_infinite_where_the_policy_gets():
    """Not NaN in a row that recurs, and not one in the row that starts."""
    even = chain([0.5, 0.5], [0.5, 0.5], [0.5, 0.5])
    for row in (0, 2):
        sampler = even.clone()
        sampler[row, 1] = -torch.inf
        assert markov_product_growth(even, sampler) == torch.inf
        assert markov_product_variance(even, sampler, 5) == torch.inf


def test_only_states_that_the_policy_can_reach_count():
    """The sampler alone goes to token 1, where it differs much from the policy and may forbid."""
    policy = chain([1, 0, 0], [0, 0.1, 0.9], [0, 0.1, 0.9], [1, 0, 0])
    sampler = chain([0.9, 0.1, 0], [0, 0.5, 0.5], [0, 1, 0], [0.9, 0.1, 0])
    assert markov_product_growth(policy, sampler).item() == pytest.approx(1 / 0.9)
    assert markov_product_variance(policy, sampler, 50).item() == pytest.approx(0.9**-50 - 1)
    # A transition whose square underflows is one all the same.
    rare = torch.tensor([[0.0, -400.0], [0.0, 0.0], [0.0, -400.0]], dtype=torch.float64)
    behind = torch.tensor([[0.0, -400.0], [3.0, 0.0], [0.0, -400.0]], dtype=torch.float64)
    assert markov_product_growth(rare, behind) > 1


def test_powers_and_logs_of_ratios_where_tokens_are_forbidden():
    logits = torch.tensor([0.2, 0.5, 0.3, 0.0], dtype=torch.float64).log()
    old_logits = torch.tensor([0.6, 0.4, 0.0, 0.0], dtype=torch.float64).log()
    policy, old = logits.exp(), old_logits.exp()
    for power in (0.0, 0.25, 1.0):
        exact = (policy**power * old ** (1 - power)).sum() if power else old.sum()
        found = ratio_power_mean(logits, old_logits, power)
        torch.testing.assert_close(found, exact, **TIGHT)
    assert ratio_power_mean(logits, old_logits, 2.0) == torch.inf
    back = ratio_power_mean(old_logits, logits, 2.0)
    torch.testing.assert_close(back, (old.square() / policy)[:3].sum(), **TIGHT)
    shared = torch.tensor([0, 1])
    log_ratio = (policy / old)[shared].log()
    mean, var = log_ratio_spread(logits, old_logits)
    torch.testing.assert_close(mean, (old[shared] * log_ratio).sum(), **TIGHT)
    torch.testing.assert_close(var, (old[shared] * (log_ratio - mean).square()).sum(), **TIGHT)
