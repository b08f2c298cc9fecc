"""Sequence gradients against direct sums over sequences, on fixed-length and ragged trees."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kl_term.kl.enumeration import relative_error
from kl_term.kl.sequences import (
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    state_visits,
    token_logp,
    visited_kl_gradient,
)
from tests.trees import TIGHT, draw


def table(sequences, vocab, seed):
    return draw(sequences.num_states, vocab, seed=seed, scale=1.2)


@pytest.fixture(params=[(3, 3, None), (3, 3, 2), (2, 4, 0)], ids=["fixed", "ragged", "ragged2"])
def world(request):
    vocab, length, eos = request.param
    sequences = enumerate_sequences(vocab, length, eos=eos)
    return sequences, *(table(sequences, vocab, seed) for seed in (1, 2, 3))


def scores(logits, sequences):
    """grad log pi of every token: [N, T, states, vocab], by hand."""
    policy = logits.softmax(-1)
    n, horizon = sequences.tokens.shape
    out = torch.zeros(n, horizon, *logits.shape, dtype=logits.dtype)
    for i in range(n):
        for t in range(horizon):
            if sequences.mask[i, t]:
                state, token = sequences.states[i, t], sequences.tokens[i, t]
                out[i, t, state] = -policy[state]
                out[i, t, state, token] += 1
    return out


def test_fixed_length_lists_every_word_once():
    sequences = enumerate_sequences(3, 4)
    words = {tuple(row.tolist()) for row in sequences.tokens}
    assert words == set(itertools.product(range(3), repeat=4))
    assert sequences.mask.all()
    assert sequences.num_states == 1 + 3 + 9 + 27


def test_ragged_sequences_stop_at_the_end_token():
    sequences = enumerate_sequences(3, 3, eos=2)
    words = {
        tuple(row[m].tolist()) for row, m in zip(sequences.tokens, sequences.mask, strict=True)
    }
    expected = {
        word
        for length in (1, 2, 3)
        for word in itertools.product(range(3), repeat=length)
        if 2 not in word[:-1] and (word[-1] == 2 or length == 3)
    }
    assert words == expected
    assert len(sequences.tokens) == len(expected)
    # A state is a prefix: two sequences share it exactly when they share the tokens before.
    prefixes = {}
    for row, states, mask in zip(sequences.tokens, sequences.states, sequences.mask, strict=True):
        for t in range(int(mask.sum())):
            prefix = tuple(row[:t].tolist())
            assert prefixes.setdefault(prefix, int(states[t])) == int(states[t])
    assert sorted(prefixes.values()) == list(range(sequences.num_states))


def test_probabilities_sum_to_one_and_visits_to_the_mean_length(world):
    sequences, logits, *_ = world
    probability = sequence_probability(logits, sequences)
    assert probability.sum().item() == pytest.approx(1.0, abs=1e-13)
    mean_length = (probability * sequences.mask.sum(-1)).sum()
    visits = state_visits(logits, sequences)
    assert visits.sum().item() == pytest.approx(mean_length.item(), abs=1e-12)
    assert visits[0].item() == pytest.approx(1.0, abs=1e-13)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_chain_rule_of_the_kl(world, direction):
    sequences, logits, ref_logits, _ = world
    of, other = (logits, ref_logits) if direction == "reverse" else (ref_logits, logits)
    of_logp, other_logp = of.log_softmax(-1), other.log_softmax(-1)
    per_state = (of_logp.exp() * (of_logp - other_logp)).sum(-1)
    chain = (state_visits(of, sequences) * per_state).sum()
    exact = sequence_kl(logits, ref_logits, sequences, direction=direction)
    assert exact.item() == pytest.approx(chain.item(), abs=1e-12)


def test_reverse_gradient_is_the_log_ratio_to_go(world):
    sequences, logits, ref_logits, _ = world
    probability = sequence_probability(logits, sequences)
    log_ratio = token_logp(logits, sequences) - token_logp(ref_logits, sequences)
    score = scores(logits, sequences)
    by_hand = torch.zeros_like(logits)
    for i in range(len(probability)):
        for t in range(sequences.tokens.shape[1]):
            by_hand += probability[i] * log_ratio[i, t:].sum() * score[i, t]
    exact = sequence_kl_gradient(logits, ref_logits, sequences)
    assert torch.allclose(exact, by_hand, **TIGHT)
    assert not torch.allclose(exact, -by_hand, atol=1e-3)
    for credit in ("to_go", "whole"):
        how = {"estimator": "k1", "placement": "reward", "credit": credit}
        credited = expected_sequence_gradient(logits, ref_logits, sequences, **how)
        assert torch.allclose(credited, exact, **TIGHT)


def test_token_weighted_losses_miss_the_future(world):
    sequences, logits, ref_logits, _ = world
    exact = sequence_kl_gradient(logits, ref_logits, sequences)
    visited = visited_kl_gradient(logits, ref_logits, sequences)
    loss = expected_sequence_gradient(logits, ref_logits, sequences, estimator="k2")
    how = {"estimator": "k1", "placement": "reward", "credit": "immediate"}
    immediate = expected_sequence_gradient(logits, ref_logits, sequences, **how)
    assert torch.allclose(loss, visited, **TIGHT)
    assert torch.allclose(immediate, visited, **TIGHT)
    assert relative_error(loss.flatten(), exact.flatten()) > 0.05
    forward = visited_kl_gradient(logits, ref_logits, sequences, direction="forward")
    k3_loss = expected_sequence_gradient(logits, ref_logits, sequences, estimator="k3")
    assert torch.allclose(k3_loss, forward, **TIGHT)


def test_sequence_level_losses_have_the_sequence_kls_gradients(world):
    sequences, logits, ref_logits, _ = world
    at = lambda k: expected_sequence_gradient(
        logits, ref_logits, sequences, estimator=k, level="sequence"
    )
    reverse = sequence_kl_gradient(logits, ref_logits, sequences)
    forward = sequence_kl_gradient(logits, ref_logits, sequences, direction="forward")
    assert at("k1").abs().max() < 1e-13
    assert torch.allclose(at("k2"), reverse, **TIGHT)
    assert torch.allclose(at("k3"), forward, rtol=0, atol=1e-11)
    assert not torch.allclose(at("k3"), reverse, atol=1e-3)


@pytest.mark.parametrize(("estimator", "weighting"), [("k3", "attached"), ("k2", "detached")])
def test_off_policy_sequence_weights_are_exact_and_token_weights_are_not(
    world, estimator, weighting
):
    sequences, logits, ref_logits, old_logits = world
    exact = sequence_kl_gradient(logits, ref_logits, sequences)
    given = (logits, ref_logits, sequences, old_logits)
    how = {"estimator": estimator, "weighting": weighting}
    at = lambda level: expected_sequence_gradient(*given, **how, level=level)
    assert torch.allclose(at("sequence"), exact, rtol=0, atol=1e-11)
    assert relative_error(at("token").flatten(), exact.flatten()) > 0.05
    # What a token weight does reach: the per-state gradient at the states the sampler visits.
    visited = visited_kl_gradient(logits, ref_logits, sequences, old_logits)
    assert torch.allclose(at("token"), visited, **TIGHT)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_clip"])
@pytest.mark.parametrize("credit", ["immediate", "to_go", "whole"])
def test_rewards_against_the_written_out_sum(world, estimator, credit):
    sequences, logits, ref_logits, old_logits = world
    logp, ref_logp, old_logp = (token_logp(x, sequences) for x in (logits, ref_logits, old_logits))
    score = scores(logits, sequences)
    value = {
        "k1": lambda x: x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(-x) - 1 + x,
        "k3_clip": lambda x: min(math.exp(-x), 10.0) - 1 + x,
    }[estimator]
    by_hand = torch.zeros_like(logits)
    for i in range(len(logp)):
        probability = old_logp[i].sum().exp()
        length = int(sequences.mask[i].sum())
        k = [value((old_logp - ref_logp)[i, t].item()) for t in range(length)]
        for t in range(length):
            weight = (logp - old_logp)[i, t].exp()
            credited = {"immediate": k[t], "to_go": sum(k[t:]), "whole": sum(k)}[credit]
            by_hand += probability * weight * credited * score[i, t]
    how = {"estimator": estimator, "placement": "reward", "weighting": "detached"}
    gradient = expected_sequence_gradient(*world[1:3], sequences, old_logits, **how, credit=credit)
    assert torch.allclose(gradient, by_hand, rtol=0, atol=1e-11)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_forbidden_token_leaves_the_kl_and_its_gradient_finite(direction):
    """The first token 1 is forbidden by the side that the mean is under: NaN, once."""
    sequences = enumerate_sequences(3, 3, eos=2)
    logits, ref_logits = table(sequences, 3, 1), table(sequences, 3, 2)
    forbids = logits if direction == "reverse" else ref_logits
    forbids[0, 1] = -torch.inf
    found = sequence_kl(logits, ref_logits, sequences, direction=direction)
    gradient = sequence_kl_gradient(logits, ref_logits, sequences, direction=direction)
    forbids[0, 1] = -60.0
    near = sequence_kl(logits, ref_logits, sequences, direction=direction)
    torch.testing.assert_close(found, near, rtol=0, atol=1e-12)
    near = sequence_kl_gradient(logits, ref_logits, sequences, direction=direction)
    torch.testing.assert_close(gradient, near, rtol=0, atol=1e-12)
    assert gradient.abs().max() > 0.05
    forbids[0, 1] = torch.nan
    assert sequence_kl(logits, ref_logits, sequences, direction=direction).isnan()


@pytest.mark.parametrize(
    "choice",
    [
        {"estimator": "k3", "weighting": "attached", "ratio": "prefix"},
        {"estimator": "k2", "weighting": "detached"},
        {"estimator": "k1", "placement": "reward", "credit": "to_go"},
    ],
)
def test_a_token_that_a_fresh_sampler_forbids_adds_nothing(choice):
    sequences = enumerate_sequences(3, 3, eos=2)
    logits, ref_logits = table(sequences, 3, 1), table(sequences, 3, 2)
    weights = sequences.mask.double() * draw(*sequences.mask.shape, seed=5).exp()
    logits[0, 1] = -torch.inf
    of = lambda x: expected_sequence_gradient(
        x, ref_logits, sequences, token_weights=weights, **choice
    )
    found = of(logits)
    logits[0, 1] = -60.0
    torch.testing.assert_close(found, of(logits), rtol=0, atol=1e-12)


@pytest.mark.parametrize("reference_too", [False, True])
@pytest.mark.parametrize("credit", ["immediate", "to_go"])
def test_in_the_reward_what_the_policy_forbids_by_now_has_weight_zero(credit, reference_too):
    """The sampler draws it: its weight is zero, and zero times infinity is not to be NaN."""
    sequences = enumerate_sequences(3, 2)
    logits, ref_logits, old_logits = (table(sequences, 3, seed) for seed in (1, 2, 3))
    if reference_too:
        ref_logits[0, 1] = -torch.inf
    of = lambda x, only: expected_sequence_gradient(
        x,
        ref_logits,
        sequences.only(only),
        old_logits,
        estimator="k1",
        placement="reward",
        weighting="detached",
        ratio="sequence",
        credit=credit,
    )
    everything = torch.ones(len(sequences.mask), dtype=torch.bool)
    logits[0, 1] = -torch.inf
    found = of(logits, everything)
    torch.testing.assert_close(found, of(logits, sequences.tokens[:, 0] != 1), rtol=0, atol=1e-12)
    assert found.isfinite().all() and found.abs().max() > 0.05


@pytest.mark.parametrize(
    ("estimator", "weighting", "ratio"),
    [
        ("k1", "attached", "token"),
        ("k2", "detached", "token"),
        ("k3", "attached", "token"),
        ("k2", "attached", "sequence"),
        ("k1", "attached", "prefix"),
        ("k2", "detached", "geometric"),
    ],
)
def test_a_drawn_token_that_the_policy_forbids_adds_nothing(estimator, weighting, ratio, world):
    sequences, logits, ref_logits, old_logits = world
    how = {"estimator": estimator, "weighting": weighting, "ratio": ratio}

    def found(low):
        table = logits.clone()
        table[0, 0] = table[2, 1] = low
        return expected_sequence_gradient(table, ref_logits, sequences, old_logits, **how)

    if ratio == "geometric":  # a root of the whole ratio: its limit is slow
        assert found(-math.inf).isfinite().all()
    else:
        torch.testing.assert_close(found(-math.inf), found(-200.0), **TIGHT)


def test_states_that_are_never_visited_pull_at_nothing(world):
    sequences, logits, ref_logits, _ = world
    logits, ref_logits = logits.clone(), ref_logits.clone()
    first = int(sequences.tokens[sequences.states == 1].min())
    into = (sequences.states == 1).any(-1).nonzero()[0, 0]
    logits[0, sequences.tokens[into, 0]] = -math.inf  # state 1 is never entered
    expected = visited_kl_gradient(logits, ref_logits, sequences)
    ref_logits[1, first] = -math.inf
    found = visited_kl_gradient(logits, ref_logits, sequences)
    assert torch.equal(found, expected)
