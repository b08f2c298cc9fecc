"""The numbers of chapter 7, and referees that could have said otherwise."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.experiments.chapters import off_policy as study
from analysis.experiments.chapters import stale_sequences
from analysis.experiments.chapters.gradients import Policies, random_policies, random_tables
from analysis.kl.credit import credit_moments
from analysis.kl.enumeration import relative_error, reverse_kl_gradient
from analysis.kl.sequences import (
    can_draw,
    enumerate_sequences,
    sequence_kl_gradient,
    state_visits,
    token_logp,
)

TREE = enumerate_sequences(3, 3, eos=2)


@pytest.fixture(scope="module")
def states():
    return study.stale_states(30, 9, 0.5, seed=1)


def test_advantages_are_standardised_under_the_sampler(states):
    sampler = states.old_logits.softmax(-1)
    assert (sampler * states.advantages).sum(-1).abs().max() < 1e-12
    assert ((sampler * states.advantages.square()).sum(-1) - 1).abs().max() < 1e-12


def test_what_each_reading_is(states):
    table = study.reading_table(states).set_index("name")
    assert table.error_reverse[["detached", "attached"]].max() < 1e-12
    assert table.error_forward["detached k3"] < 1e-12
    assert table.norm["attached k3"] < 1e-12
    assert table.error_reverse["old"] > 0.1
    assert table.error_reverse["detached k3"] > 0.1


def test_without_clip_the_merged_objective_is_exact_and_with_it_is_not(states):
    exact = study.regularised_gradient(states, beta=0.3)
    merged = {
        name: study.merged_gradient(states, beta=0.3, reading="detached", **clip)
        for name, clip in (("free", study.NO_CLIP), ("clipped", {}))
    }
    assert relative_error(merged["free"], exact).max() < 1e-12
    assert relative_error(merged["clipped"], exact).median() > 0.05
    assert relative_error(-merged["free"], exact).min() > 1.9


def test_fresh_samples_are_never_silenced():
    fresh = study.stale_states(20, 9, 0.0, seed=2)
    assert (study.silenced_mass(fresh, beta=0.04, epsilon=0.2) == 0).all(axis=None)


def test_silenced_mass_grows_with_staleness_and_shrinks_with_beta():
    distances = torch.tensor([0.1, 0.4, 1.0], dtype=torch.float64)
    curves = study.silenced_curves(
        distances, (0.04, 2.0), count=60, vocab_size=9, epsilon=0.2, seed=3
    )
    along = curves[curves.move == "along the advantage"].set_index(["beta", "staleness"])
    small = along.loc[0.04].silenced_50
    assert small.is_monotonic_increasing
    assert small.iloc[-1] > 0.8
    assert along.loc[2.0].silenced_50.iloc[-1] < small.iloc[-1]
    assert (along.opposing_50 <= along.silenced_50 + 1e-12).all()


def test_reading_curves_start_at_zero_error():
    distances = torch.tensor([0.0, 0.6], dtype=torch.float64)
    curves = study.reading_curves(
        distances, count=20, vocab_size=9, beta=0.04, epsilon=0.2, seed=4
    ).set_index("name")
    assert curves["median"].groupby("name").min().max() < 1e-12
    assert curves["median"].groupby("name").max()["detached"] < 1e-12
    assert curves["median"].groupby("name").max()["clipped"] > 0.5


def test_which_weight_gives_which_sequence_gradient():
    tables = random_tables(TREE, 3, 6, spread=1.0, seed=5)
    distances = torch.tensor([0.0, 0.7], dtype=torch.float64)
    curves = stale_sequences.sequence_weight_curves(tables, TREE, distances, seed=6)
    stale = curves[curves.staleness > 0].set_index(["level", "credit"])["median"]
    assert stale["sequence", "to_go"] < 1e-12
    assert stale.drop([("sequence", "to_go")]).min() > 0.05
    pair = Policies(tables.logits[0], tables.ref_logits[0])
    visited = stale_sequences.visited_errors(pair, tables.logits[1], TREE)
    assert visited["token", "sampler"] < 1e-12 < 0.05 < visited["token", "policy"]
    assert visited["prefix", "policy"] < 1e-12 < 0.05 < visited["prefix", "sampler"]


def test_the_token_ratio_needs_coverage_at_every_state_that_the_sampler_visits():
    """Every sequence of the policy is allowed by the sampler, and item 1 fails all the same."""
    sequences = enumerate_sequences(2, 2)
    table = lambda *rows: torch.tensor(rows, dtype=torch.float64).log()
    policy = table([1.0, 0.0], [0.6, 0.4], [0.7, 0.3])
    reference = table([0.5, 0.5], [0.3, 0.7], [0.4, 0.6])
    for sampler, exact in (
        (table([0.5, 0.5], [0.5, 0.5], [1.0, 0.0]), False),  # it goes to state 2 and forbids there
        (table([0.5, 0.5], [0.5, 0.5], [0.8, 0.2]), True),
    ):
        assert (can_draw(sampler, sequences) | ~can_draw(policy, sequences)).all()
        drawn = sequences.only(can_draw(sampler, sequences))
        logp, ref_logp, old_logp = (token_logp(x, drawn) for x in (policy, reference, sampler))
        ratio = (logp - old_logp).exp()
        credit = torch.where(ratio > 0, ratio * (logp - ref_logp), 0.0)
        found = credit_moments(policy, drawn, credit, sampler).mean
        visits = state_visits(sampler, sequences).unsqueeze(-1)
        claimed = visits[1:] * reverse_kl_gradient(policy[1:], reference[1:])
        assert torch.allclose(found[1:], claimed, rtol=0, atol=1e-12) == exact
        # Where the policy gets, items 2 and 3 hold with both samplers.
        torch.testing.assert_close(found[1], claimed[0], rtol=0, atol=1e-12)
        whole = torch.where(ratio > 0, ratio, 0.0).prod(-1, keepdim=True)
        cost = torch.where(whole > 0, logp - ref_logp, 0.0)
        to_go = cost.flip(-1).cumsum(-1).flip(-1)
        sequence = credit_moments(policy, drawn, whole * to_go, sampler).mean
        torch.testing.assert_close(
            sequence, sequence_kl_gradient(policy, reference, sequences), rtol=0, atol=1e-12
        )


def test_what_each_term_descends_on_stale_trees():
    tables = random_tables(TREE, 3, 6, spread=1.0, seed=8)
    samplers = stale_sequences.moved_tables(tables.logits, 0.6, seed=9)
    rewards, _ = random_policies(6, len(TREE.tokens), spread=1.0, seed=10)
    table = stale_sequences.tree_table(
        tables, samplers, rewards, TREE, beta=0.04, epsilon=0.2
    ).set_index("term")
    reverse = table.index[table.error_reverse < 1e-12]
    assert set(reverse) == {
        "merged, policy inside",
        "merged, policy inside, differentiated",
        "k2 loss, detached ratio",
        "k3 loss, attached ratio",
    }
    assert list(table.index[table.error_forward < 1e-12]) == ["k3 loss, detached ratio"]
    assert table.error_sequence.min() > 0.05


def test_an_infinite_threshold_masks_nothing():
    table = stale_sequences.mask_table(
        TREE, 3, (math.inf, 0.3, 0.0), count=12, distance=0.6, seed=7
    )
    assert table.masked.iloc[0] == 0
    assert table.masked.is_monotonic_increasing
    assert table.masked.iloc[-1] > 0.1
    assert table.variance.iloc[-1] < table.variance.iloc[0]
    assert table.bias.iloc[-1] > table.bias.iloc[0]
