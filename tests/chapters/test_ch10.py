"""The numbers of chapter 10 against plain optimisers, simulation, quadrature and cases by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad

from analysis.chapters.ch10_dpo import preferences, projections
from analysis.evidence.steps_to_success import steps_to_success
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.sequences import enumerate_sequences, sequence_probability


@pytest.fixture(scope="module")
def problem():
    return preferences.random_preferences(5, beta=0.7, seed=4)


@pytest.fixture(scope="module")
def features():
    return torch.randn(5, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def test_fit_is_stationary_for_the_loss_it_minimises(problem, features):
    for pairs in preferences.pair_distributions(problem).values():
        counts = preferences.labelled(pairs, -problem.rewards)  # not the problem's own labels
        for basis in (torch.eye(5, dtype=torch.float64), features):
            fitted = preferences.fit(problem, counts, features=basis)
            slope = grad(
                lambda z: preferences.population_loss(z.log_softmax(-1), problem, counts)  # noqa: B023
            )(fitted)
            assert (slope @ basis).abs().max() < 1e-9
            assert reverse_kl(fitted, problem.optimum) > 1e-3


def test_no_policy_along_the_features_beats_the_best(problem, features):
    best = preferences.best_limited(problem, features)
    assert (preferences.data_table(problem, features).objective_limited <= best + 1e-9).all()
    assert best < preferences.objective(problem.optimum, problem)


def test_chosen_slope_is_the_derivative_of_the_path():
    model = preferences.bystander(2.0)
    path = preferences.pair_path(model, beta=1.0, rate=1e-6, steps=2)
    # The step is rate * sigma(0) * beta along the pair's difference.
    assert path.chosen.iloc[1] / (1e-6 * 0.5) == pytest.approx(
        preferences.chosen_slope(model), rel=1e-4
    )


def test_steps_to_success_are_found_by_the_same_gradient_by_autograd():
    logits, steps = torch.zeros(3, dtype=torch.float64), 0
    while logits.softmax(-1)[0] ** 2 < 0.9:
        leaf = logits.clone().requires_grad_(True)
        success = leaf.softmax(-1)[0] * logits.softmax(-1)[0]  # one of two positions
        logits = logits + 0.5 * torch.autograd.grad(success, leaf)[0]
        steps += 1
    assert steps_to_success(2, 3, dense=False) == steps
    assert steps_to_success(2, 3, dense=True) < steps


def test_published_normaliser_sums_over_completions_not_tokens(problem):
    sequences = enumerate_sequences(2, 2)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    completion = sequence_probability(table, sequences)
    rewards = torch.tensor([0.0, 1.0, 0.5, 2.0], dtype=torch.float64)
    tilted = completion * (rewards / problem.beta).exp()
    normaliser = tilted.sum()
    over_tokens = (table[0].softmax(-1) * (rewards[[0, 2]] / problem.beta).exp()).sum()
    assert (tilted / normaliser).sum().item() == pytest.approx(1.0)
    assert abs((tilted / over_tokens).sum().item() - 1.0) > 0.1


def test_published_maximum_and_minimum_are_not_equal(problem):
    best = preferences.objective(problem.optimum, problem)
    chain_end = -best / problem.beta  # what the printed chain of equalities ends in
    assert abs(best - chain_end) > 0.1
    assert chain_end == pytest.approx(
        -math.log((problem.ref_logp.exp() * (problem.rewards / problem.beta).exp()).sum())
    )


def test_published_reward_follows_from_the_optimum_and_not_from_equation_2(problem):
    # Equation 67 needs pi*, which equation 64 defines; equation 2 is the distribution of states.
    log_z = ((problem.ref_logp.exp() * (problem.rewards / problem.beta).exp()).sum()).log()
    implied = problem.beta * (problem.optimum - problem.ref_logp) + problem.beta * log_z
    assert torch.allclose(implied, problem.rewards)
    uniform = torch.full_like(implied, -math.log(5))
    assert not torch.allclose(
        problem.beta * (uniform - problem.ref_logp) + problem.beta * log_z, problem.rewards
    )


def test_islands_leave_one_number_undetermined(problem):
    pairs = preferences.pair_distributions(problem)["two islands"]
    fitted = preferences.fit(problem, preferences.labelled(pairs, problem.rewards))
    gap = fitted - problem.optimum
    assert gap[:2].std() < 1e-10 and gap[2:].std() < 1e-10  # right within each island
    assert (gap[0] - gap[3]).abs() > 0.01  # wrong between them


def test_flipped_labels_move_the_optimum_by_who_made_the_pairs_around_a_cycle_only(problem):
    chain, cycle = ([(i, i + 1) for i in range(4)], [(i, (i + 1) % 5) for i in range(5)])
    for edges, depends in ((chain, False), (cycle, True)):
        fitted = []
        for seed in (0, 1):
            pairs = torch.zeros(5, 5, dtype=torch.float64)
            drawn = torch.rand(len(edges), generator=torch.Generator().manual_seed(seed)) + 0.1
            pairs[tuple(zip(*edges, strict=True))] = drawn.double() / drawn.sum()
            labels = preferences.labelled(pairs, problem.rewards)
            fitted.append(preferences.fit(problem, 0.8 * labels + 0.2 * labels.T))
        assert (fitted[0] - problem.optimum).abs().max() > 0.1
        assert ((fitted[0] - fitted[1]).abs().max() > 1e-3) == depends


def test_a_flipped_sign_changes_the_verdict(monkeypatch):
    monkeypatch.setattr(preferences, "reverse_kl", lambda p, q: -reverse_kl(p, q))
    assert preferences.regularised_optimum().verdict == "fails"


def test_an_sft_term_moves_the_optimum_because_nothing_balances_it(problem):
    counts = preferences.labelled(
        preferences.pair_distributions(problem)["uniform"], problem.rewards
    )
    preferred = counts.sum(-1)
    slope = grad(lambda z: -(preferred * z.log_softmax(-1)).sum())(problem.optimum)
    assert torch.allclose(slope, problem.optimum.exp() - preferred) and slope.abs().max() > 0.05


def test_gaussian_fits_by_moments_and_by_a_grid():
    target = projections.mixture()
    found = projections.fits(target, (2.0,)).set_index("direction")
    forward, other = found.loc["forward"], found.loc["reverse"]
    assert forward["std"] == pytest.approx(math.sqrt(0.25 + 0.21 * 16), rel=1e-4)
    assert other["kl"] == pytest.approx(-math.log(0.3), abs=1e-3)
    value, mean, std = min(
        (
            projections.gaussian_kl(target, m.double(), s.double(), "reverse").item(),
            m.item(),
            s.item(),
        )
        for m in torch.linspace(-3, 3, 25)
        for s in torch.linspace(0.3, 3, 25)
    )
    assert mean == pytest.approx(-2.0, abs=0.13) and std < 0.7
    assert value > -math.log(0.7) - 1e-3
