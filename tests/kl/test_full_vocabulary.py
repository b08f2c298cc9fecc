"""Exact per-state sums along samples, and dynamic programming, against full enumeration."""

from __future__ import annotations

import math

import pytest
import torch

from kl_term.kl.credit import last_token_groups, tie_states
from kl_term.kl.full_vocabulary import (
    full_vocabulary_gradients,
    markov_kl,
    markov_visits,
    visited_kl,
)
from kl_term.kl.sequences import (
    enumerate_sequences,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    state_visits,
    token_logp,
    visited_kl_gradient,
)
from tests.trees import TIGHT, VOCAB_SIZE, draw


@pytest.fixture
def world(sequences):
    return sequences, *draw(2, sequences.num_states, VOCAB_SIZE, seed=6)


def test_visited_kl_is_unbiased_and_less_noisy(world):
    sequences, logits, reference = world
    probability = sequence_probability(logits, sequences)
    exact_sum = visited_kl(logits, reference, sequences).sum(-1)
    sampled = (token_logp(logits, sequences) - token_logp(reference, sequences)).sum(-1)
    exact = sequence_kl(logits, reference, sequences)
    torch.testing.assert_close(probability @ exact_sum, exact, **TIGHT)
    var, sampled_var = (probability @ (x - exact).square() for x in (exact_sum, sampled))
    assert 0.001 < var < 0.7 * sampled_var


def test_mean_gradients(world):
    sequences, logits, reference = world
    probability = sequence_probability(logits, sequences)
    means = {
        credit: torch.einsum(
            "n,nsv->sv",
            probability,
            full_vocabulary_gradients(logits, reference, sequences, credit=credit),
        )
        for credit in ("immediate", "to_go")
    }
    visited = visited_kl_gradient(logits, reference, sequences)
    exact = sequence_kl_gradient(logits, reference, sequences)
    torch.testing.assert_close(means["immediate"], visited, **TIGHT)
    torch.testing.assert_close(means["to_go"], exact, **TIGHT)
    assert (visited - exact).abs().max() > 0.01


def test_markov_policies_by_dynamic_programming():
    vocab, length = 3, 5
    shared, reference = draw(2, vocab + 1, vocab, seed=8)
    sequences = enumerate_sequences(vocab, length)
    groups = last_token_groups(sequences, vocab)
    table, ref_table = shared[groups], reference[groups]
    visits = torch.zeros(vocab + 1, dtype=torch.float64)
    visits.index_add_(0, groups, state_visits(table, sequences))
    torch.testing.assert_close(markov_visits(shared, length), visits, **TIGHT)
    leaf = shared.clone().requires_grad_(True)
    divergence = markov_kl(leaf, reference, length)
    torch.testing.assert_close(divergence, sequence_kl(table, ref_table, sequences), **TIGHT)
    for fixed, referee in ((False, sequence_kl_gradient), (True, visited_kl_gradient)):
        value = markov_kl(leaf, reference, length, fixed_states=fixed)
        (gradient,) = torch.autograd.grad(value, leaf)
        tied = tie_states(referee(table, ref_table, sequences), groups)
        torch.testing.assert_close(gradient, tied, **TIGHT)


def test_a_row_that_is_never_visited_costs_nothing():
    logits, ref_logits = draw(2, 4, 3, seed=5)
    logits[:, 1] = -torch.inf
    expected, gradients = [], []
    for forbidden in (0.0, -torch.inf):
        ref_logits[1, 0] = forbidden
        leaf = logits.clone().requires_grad_(True)
        divergence = markov_kl(leaf, ref_logits, 4)
        expected.append(divergence.item())
        gradients.append(torch.autograd.grad(divergence, leaf)[0])
    assert math.isfinite(expected[0])
    assert expected[0] == expected[1]
    assert torch.equal(*gradients)
    assert gradients[1].isfinite().all()


@pytest.mark.parametrize("length", [0, -1])
def test_no_tokens_are_refused(length):
    logits = draw(4, 3, seed=7)
    for call in (lambda: markov_visits(logits, length), lambda: markov_kl(logits, logits, length)):
        with pytest.raises(ValueError, match="length must be at least 1"):
            call()
