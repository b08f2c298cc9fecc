"""GAE against its recursion, and which settings keep the gradient of the sequence KL."""

from __future__ import annotations

import pytest
import torch

from kl_term.kl.credit import credit_moments, state_average
from kl_term.kl.sequences import (
    enumerate_sequences,
    sequence_kl_gradient,
    token_logp,
    visited_kl_gradient,
)
from kl_term.objectives.credit import reward_to_go
from kl_term.objectives.gae import gae_kl_gradient, generalised_advantage
from tests.trees import TIGHT, VOCAB_SIZE, draw


@pytest.fixture
def world(sequences):
    return sequences, *draw(2, sequences.num_states, VOCAB_SIZE, seed=1)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (0.7, 0.0), (0.0, 0.5)])
def test_advantage_is_the_backward_recursion(gamma, lam):
    rewards, values = draw(2, 5, 6, seed=2)
    mask = torch.arange(6) < torch.tensor([6, 4, 1, 0, 3])[:, None]
    rewards = torch.where(mask, rewards, torch.nan)
    values = torch.where(mask, values, torch.inf)
    advantage = generalised_advantage(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(5):
        running, following = 0.0, 0.0
        expected = [0.0] * 6
        for t in reversed(range(int(mask[row].sum()))):
            delta = rewards[row, t] + gamma * following - values[row, t]
            running = delta + gamma * lam * running
            following, expected[t] = values[row, t], float(running)
        torch.testing.assert_close(
            advantage[row], torch.tensor(expected, dtype=torch.float64), **TIGHT
        )


DISCOUNTS = [(1.0, 0.9), (1.0, 0.0), (0.9, 0.0), (0.9, 0.95), (0.3, 0.5)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 1.0), *DISCOUNTS])
@pytest.mark.parametrize("critic", ["zero", "exact", "scaled"])
def test_which_settings_are_exact(world, gamma, lam, critic):
    sequences, logits, reference = world
    if critic == "scaled" and lam == 1.0:
        return
    gradient = gae_kl_gradient(logits, reference, sequences, gamma=gamma, lam=lam, critic=critic)
    error = (gradient - sequence_kl_gradient(logits, reference, sequences)).abs().max()
    exact = gamma == lam == 1.0 or critic == "scaled" or (critic == "exact" and gamma == 1.0)
    assert (error < 1e-12) if exact else (error > 1e-3)


def _family(sequences, logits, reference, gamma, lam):
    """Every exact critic, as an affine map of one free number a state: offset and matrix."""
    prefixes = {
        tuple(row[:t].tolist()): int(state)
        for row, states, mask in zip(
            sequences.tokens, sequences.states, sequences.mask, strict=True
        )
        for t, state in enumerate(states)
        if mask[t]
    }
    costs = token_logp(logits, sequences) - token_logp(reference, sequences)
    value = state_average(reward_to_go(costs), logits, sequences)
    free = torch.zeros(sequences.num_states, sequences.num_states, dtype=torch.float64)
    for prefix, state in prefixes.items():
        children = [(*prefix, token) for token in range(VOCAB_SIZE)]
        if all(child in prefixes for child in children):  # the sequence cannot end here
            free[state, state] -= gamma * lam
            for child in children:
                free[prefixes[child], state] += 1.0
    scale = gamma * (1 - lam)
    return value * (1 - gamma * lam) / scale, free / scale, prefixes[()]


def _error(values, world, gamma, lam):
    sequences, logits, reference = world
    costs = token_logp(logits, sequences) - token_logp(reference, sequences)
    credit = generalised_advantage(
        costs, values[sequences.states], sequences.mask, gamma=gamma, lam=lam
    )
    gradient = credit_moments(logits, sequences, credit).mean
    return gradient - sequence_kl_gradient(logits, reference, sequences)


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
def test_the_exact_critics_are_all_of_one_family(world, gamma, lam):
    """The gradient is affine in the critic: its null space has the family's dimension, no more."""
    sequences, logits, reference = world
    offset, free, root = _family(sequences, logits, reference, gamma, lam)
    step = 0.7 * draw(sequences.num_states, seed=3)
    first = torch.zeros_like(step)
    first[root] = step[root]
    for critic in (offset, offset + free @ step, offset + free @ step + first):
        assert _error(critic, world, gamma, lam).abs().max() < 1e-12
    response = torch.stack(
        [
            (_error(offset + unit, world, gamma, lam) - _error(offset, world, gamma, lam)).flatten()
            for unit in torch.eye(sequences.num_states, dtype=torch.float64)
        ]
    )
    nullity = sequences.num_states - torch.linalg.matrix_rank(response, atol=1e-10)
    first[root] = 1.0
    assert nullity == torch.linalg.matrix_rank(torch.column_stack([free, first]), atol=1e-10)
    assert nullity >= 1


def test_where_every_prefix_may_end_the_critic_is_unique_but_for_the_empty_one():
    sequences = enumerate_sequences(VOCAB_SIZE, 4, eos=2)
    logits, reference = draw(2, sequences.num_states, VOCAB_SIZE, seed=1)
    _, free, _ = _family(sequences, logits, reference, 0.9, 0.5)
    assert (free == 0).all()


def test_an_error_by_position_alone_is_harmless_at_a_fixed_length_only():
    for eos, harmless in ((None, True), (2, False)):
        sequences = enumerate_sequences(VOCAB_SIZE, 4, eos=eos)
        logits, reference = draw(2, sequences.num_states, VOCAB_SIZE, seed=1)
        offset, _, _ = _family(sequences, logits, reference, 1.0, 0.5)
        position = torch.zeros(sequences.num_states, dtype=torch.long)
        column = torch.arange(4).expand_as(sequences.mask)
        position[sequences.states[sequences.mask]] = column[sequences.mask]
        error = draw(4, seed=5)[position]
        moved = _error(offset + error, (sequences, logits, reference), 1.0, 0.5).abs().max()
        assert (moved < 1e-12) == harmless
        assert harmless or moved > 1e-2


def test_no_critic_is_exact_at_lambda_one_with_a_discount(world):
    sequences, logits, reference = world
    errors = [
        _error(scale * draw(sequences.num_states, seed=4), world, 0.9, 1.0) for scale in (0.0, 5.0)
    ]
    torch.testing.assert_close(*errors, **TIGHT)  # a critic is a baseline there
    assert errors[0].abs().max() > 1e-2
    for gamma, lam in ((0.9, 1.0), (0.0, 0.5)):
        with pytest.raises(ValueError, match="no critic"):
            gae_kl_gradient(logits, reference, sequences, gamma=gamma, lam=lam, critic="scaled")


def test_zero_critic_is_discounted_reward_to_go(world):
    sequences, logits, reference = world
    costs = token_logp(logits, sequences) - token_logp(reference, sequences)
    gradient = gae_kl_gradient(logits, reference, sequences, gamma=0.9, lam=0.8, critic="zero")
    discounted = credit_moments(logits, sequences, reward_to_go(costs, gamma=0.72)).mean
    torch.testing.assert_close(gradient, discounted, **TIGHT)
    immediate = gae_kl_gradient(logits, reference, sequences, lam=0.0, critic="zero")
    visited = visited_kl_gradient(logits, reference, sequences)
    torch.testing.assert_close(immediate, visited, **TIGHT)


def test_exact_critic_makes_lambda_irrelevant_and_gamma_not(world):
    sequences, logits, reference = world
    costs = token_logp(logits, sequences) - token_logp(reference, sequences)
    discounted = credit_moments(logits, sequences, reward_to_go(costs, gamma=0.9)).mean
    for lam in (0.0, 0.5, 1.0):
        gradient = gae_kl_gradient(logits, reference, sequences, gamma=0.9, lam=lam)
        torch.testing.assert_close(gradient, discounted, **TIGHT)


@pytest.mark.parametrize("critic", ["zero", "exact", "scaled"])
def test_a_forbidden_token_leaves_the_direction_finite(critic):
    sequences = enumerate_sequences(3, 3, eos=2)
    logits, ref_logits = draw(2, sequences.num_states, 3, seed=21)
    logits[0, 1] = -torch.inf
    found = gae_kl_gradient(logits, ref_logits, sequences, gamma=0.9, lam=0.5, critic=critic)
    logits[0, 1] = -60.0
    near = gae_kl_gradient(logits, ref_logits, sequences, gamma=0.9, lam=0.5, critic=critic)
    torch.testing.assert_close(found, near, rtol=0, atol=1e-12)
