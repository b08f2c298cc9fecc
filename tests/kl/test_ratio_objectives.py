"""Off-policy objectives against direct expectations under the trained policy."""

from __future__ import annotations

import pytest
import torch

from kl_term.kl.credit import advantage_table, credit_moments
from kl_term.kl.products import sequence_ratio_spread
from kl_term.kl.ratio_objectives import (
    OBJECTIVES,
    performance_difference,
    ratio_objective,
    ratio_objective_gradient,
    token_surrogate,
)
from kl_term.kl.sequences import sequence_probability, token_logp
from tests.trees import TIGHT, VOCAB_SIZE, draw


@pytest.fixture
def world(sequences):
    logits, old = draw(2, sequences.num_states, VOCAB_SIZE, seed=2)
    return sequences, logits, old, draw(len(sequences.mask), seed=3)


def test_the_product_gives_the_policy_s_own_return(world):
    sequences, logits, old, returns = world
    exact = sequence_probability(logits, sequences) @ returns
    torch.testing.assert_close(ratio_objective(logits, old, sequences, returns), exact, **TIGHT)
    own = credit_moments(logits, sequences, returns[:, None].expand(sequences.mask.shape)).mean
    gradient = ratio_objective_gradient(logits, old, sequences, returns)
    torch.testing.assert_close(gradient, own, **TIGHT)
    for other in ("linear", "token_mean", "geometric"):
        value = ratio_objective(logits, old, sequences, returns, objective=other)
        assert abs(value - exact) > 1e-3, other


def test_each_weight_by_loop(world):
    sequences, logits, old, returns = world
    logp, old_logp = token_logp(logits, sequences), token_logp(old, sequences)
    totals = dict.fromkeys(("linear", "token", "token_mean", "geometric"), 0.0)
    for n, probability in enumerate(sequence_probability(old, sequences)):
        ratios = (logp - old_logp)[n][sequences.mask[n]].exp()
        weights = {
            "linear": 1 + (ratios - 1).sum(),
            "token": ratios.sum(),
            "token_mean": ratios.mean(),
            "geometric": ratios.prod() ** (1 / len(ratios)),
        }
        for name, weight in weights.items():
            totals[name] = totals[name] + probability * weight * returns[n]
    for name, total in totals.items():
        value = ratio_objective(logits, old, sequences, returns, objective=name)
        torch.testing.assert_close(value, total, **TIGHT)


def test_token_and_linear_share_their_gradient_everywhere(world):
    sequences, logits, old, returns = world
    linear, token = (
        ratio_objective_gradient(logits, old, sequences, returns, objective=name)
        for name in ("linear", "token")
    )
    torch.testing.assert_close(linear, token, **TIGHT)


def test_performance_difference_lemma_and_its_token_surrogate(world):
    sequences, logits, old, returns = world
    to_go = returns[:, None].expand(sequences.mask.shape)
    advantages = advantage_table(to_go, old, sequences)
    gained = (
        sequence_probability(logits, sequences) - sequence_probability(old, sequences)
    ) @ returns
    lemma = performance_difference(logits, old, sequences, advantages)
    torch.testing.assert_close(lemma, gained, **TIGHT)
    assert abs(token_surrogate(logits, old, sequences, advantages) - gained) > 1e-3
    assert abs(token_surrogate(old, old, sequences, advantages)) < 1e-12


def test_a_dropped_state_ratio_does_no_harm_where_the_rest_of_the_answer_earns_nothing(world):
    """Moved at every state and exact: the bias is general, not inevitable."""
    sequences, logits, old, returns = world
    first = draw(VOCAB_SIZE, seed=5)[sequences.tokens[:, 0]]
    for reward, exact in ((first, True), (returns, False)):
        whole = reward[:, None].expand(sequences.mask.shape)
        promised = token_surrogate(logits, old, sequences, advantage_table(whole, old, sequences))
        gain = sequence_probability(logits, sequences) @ reward
        gain = gain - sequence_probability(old, sequences) @ reward
        assert torch.allclose(promised, gain, rtol=0, atol=1e-12) is exact


def test_a_token_that_both_forbid_is_no_token(world):
    """The sampler's mask kept on the policy: as if both gave the token next to no probability."""
    sequences, logits, old, returns = world
    advantages = draw(sequences.num_states, VOCAB_SIZE, seed=4)
    found = []
    for out in (-torch.inf, -80.0):
        policy, sampler = logits.clone(), old.clone()
        policy[0, 0] = sampler[0, 0] = out
        values = [
            ratio_objective(policy, sampler, sequences, returns, objective=objective)
            for objective in OBJECTIVES
        ]
        values += [
            surrogate(policy, sampler, sequences, advantages)
            for surrogate in (token_surrogate, performance_difference)
        ]
        values += [
            moment
            for level in ("sequence", "geometric")
            for moment in sequence_ratio_spread(policy, sampler, sequences, level=level)
        ]
        gradient = ratio_objective_gradient(policy, sampler, sequences, returns)
        found.append(torch.cat([torch.stack(values), gradient.flatten()]))
    torch.testing.assert_close(*found, **TIGHT)
