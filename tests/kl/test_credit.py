"""Credit schemes by enumeration, against autograd and loops over sequences."""

from __future__ import annotations

import pytest
import torch

from kl_term.kl.credit import (
    advantage_table,
    credit_moments,
    last_token_groups,
    sample_gradients,
    state_average,
    tie_states,
)
from kl_term.kl.sequences import (
    enumerate_sequences,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
)
from tests.trees import TIGHT, draw

WORLDS = [(3, 3, None), (3, 4, 2), (2, 4, 0)]


@pytest.fixture(params=WORLDS, ids=["fixed", "ragged", "ragged2"])
def world(request):
    vocab, length, eos = request.param
    sequences = enumerate_sequences(vocab, length, eos=eos)
    logits, other = draw(2, sequences.num_states, vocab, seed=3, scale=1.2)
    return sequences, logits, other, draw(*sequences.mask.shape, seed=4, scale=1.2)


def test_sample_gradients_are_those_of_autograd(world):
    sequences, logits, _, credit = world
    gradients = sample_gradients(logits, sequences, credit)
    for n in (0, 2, len(sequences.mask) - 1):
        leaf = logits.clone().requires_grad_(True)
        logp = token_logp(leaf, sequences)[n]
        (expected,) = torch.autograd.grad((logp * credit[n])[sequences.mask[n]].sum(), leaf)
        torch.testing.assert_close(gradients[n], expected, **TIGHT)


def test_moments_under_another_sampler(world):
    sequences, logits, sampler, credit = world
    mean, spread = credit_moments(logits, sequences, credit, sampler)
    probability = sequence_probability(sampler, sequences)
    gradients = sample_gradients(logits, sequences, credit)
    by_loop = sum(p * g for p, g in zip(probability, gradients, strict=True))
    second = sum(p * g.square().sum() for p, g in zip(probability, gradients, strict=True))
    torch.testing.assert_close(mean, by_loop, **TIGHT)
    torch.testing.assert_close(spread, second - by_loop.square().sum(), **TIGHT)
    on_policy = credit_moments(logits, sequences, credit).mean
    assert (mean - on_policy).abs().max() > 0.01


def test_values_and_advantages_by_loop(world):
    sequences, logits, _, returns = world
    probability = sequence_probability(logits, sequences)
    values = state_average(returns, logits, sequences)
    action_values = state_average(returns, logits, sequences, by_action=True)
    for state in (0, sequences.num_states - 1):
        here = (sequences.states == state) & sequences.mask
        weight = probability[:, None] * here
        torch.testing.assert_close(values[state], (weight * returns).sum() / weight.sum(), **TIGHT)
        chosen = weight * (sequences.tokens == 1)
        torch.testing.assert_close(
            action_values[state, 1], (chosen * returns).sum() / chosen.sum(), **TIGHT
        )
    advantages = advantage_table(returns, logits, sequences)
    assert (logits.softmax(-1) * advantages).sum(-1).abs().max() < 1e-12
    torch.testing.assert_close(advantages, action_values - values[:, None], **TIGHT)


def test_tied_states_are_the_chain_rule():
    vocab, sequences = 3, enumerate_sequences(3, 4)
    groups = last_token_groups(sequences, vocab)
    assert groups[0] == vocab
    assert groups[1:4].tolist() == [0, 1, 2]
    shared, reference = draw(2, vocab + 1, vocab, seed=5, scale=1.2)
    leaf = shared.clone().requires_grad_(True)
    divergence = sequence_kl(leaf[groups], reference[groups], sequences)
    (expected,) = torch.autograd.grad(divergence, leaf)
    by_table = sequence_kl_gradient(shared[groups], reference[groups], sequences)
    torch.testing.assert_close(tie_states(by_table, groups), expected, **TIGHT)
