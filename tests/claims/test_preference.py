"""Claims about DPO: gradient-free searches and hand-made cases beside the closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.experiments.chapters import preference as study
from analysis.experiments.claims import preference as claims
from analysis.kl.divergences import reverse_kl
from analysis.kl.sequences import enumerate_sequences, sequence_probability
from analysis.objectives.preference import dpo_loss

BETA = 0.5


@pytest.fixture
def problem():
    return study.random_preferences(6, beta=BETA, seed=0)


def test_regularised_optimum(problem):
    found = claims.regularised_optimum()
    assert found.verdict == "holds"
    assert found.figures["flipped_identity_error"] > 1
    logits = problem.ref_logp.clone()
    for _ in range(2000):  # plain gradient ascent, without the closed form
        leaf = logits.clone().requires_grad_(True)
        logp = leaf.log_softmax(-1)
        value = (logp.exp() * problem.rewards).sum() - BETA * reverse_kl(logp, problem.ref_logp)
        logits = logits + 4 * torch.autograd.grad(value, leaf)[0]
    assert (logits.softmax(-1) - problem.optimum.exp()).abs().max() < 1e-3
    assert reverse_kl(problem.ref_logp, problem.optimum) > 0.05


def test_a_flipped_sign_changes_the_verdict(monkeypatch):
    monkeypatch.setattr(claims, "reverse_kl", lambda p, q: -reverse_kl(p, q))
    assert claims.regularised_optimum().verdict == "fails"


def test_seed_4_normaliser_sums_over_completions_not_tokens():
    sequences = enumerate_sequences(2, 2)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    completion = sequence_probability(table, sequences)
    rewards = torch.tensor([0.0, 1.0, 0.5, 2.0], dtype=torch.float64)
    tilted = completion * (rewards / BETA).exp()
    normaliser = tilted.sum()
    over_tokens = (table[0].softmax(-1) * (rewards[[0, 2]] / BETA).exp()).sum()
    assert (tilted / normaliser).sum().item() == pytest.approx(1.0)
    assert abs((tilted / over_tokens).sum().item() - 1.0) > 0.1


def test_seed_4_maximum_and_minimum_are_not_equal(problem):
    best = study.objective(problem.optimum, problem)
    chain_end = -best / BETA  # what the printed chain of equalities ends in
    assert abs(best - chain_end) > 0.1
    assert chain_end == pytest.approx(
        -math.log((problem.ref_logp.exp() * (problem.rewards / BETA).exp()).sum())
    )


def test_seed_4_reward_follows_from_the_optimum_and_not_from_equation_2(problem):
    # Equation 67 needs pi*, which equation 64 defines; equation 2 is the distribution of states.
    log_z = ((problem.ref_logp.exp() * (problem.rewards / BETA).exp()).sum()).log()
    implied = BETA * (problem.optimum - problem.ref_logp) + BETA * log_z
    assert torch.allclose(implied, problem.rewards)
    uniform = torch.full_like(implied, -math.log(6))
    assert not torch.allclose(BETA * (uniform - problem.ref_logp) + BETA * log_z, problem.rewards)


def test_dpo_loss_and_gradient():
    found = claims.dpo_loss_and_gradient()
    assert found.verdict == "holds"
    assert found.figures["flipped_error"] > 0.01
    zero = torch.zeros(1, dtype=torch.float64)
    step = torch.full_like(zero, 1e-6)
    slope = (dpo_loss(zero + step, zero, zero, zero) - dpo_loss(zero, zero, zero, zero)) / 1e-6
    assert slope.item() == pytest.approx(-0.1 / 2, rel=1e-5)


def test_dpo_needs_no_samples_of_the_policy(problem):
    found = claims.dpo_needs_no_samples_of_the_policy()
    assert found.verdict == "fails"
    assert found.figures["limited_objective_avoided"] < found.figures["limited_objective_reference"]
    pairs = study.pair_distributions(problem)["what the reference avoids"]
    counts = study.labelled(pairs, problem.rewards)
    gradient = study.gradient_of(
        lambda z: study.population_loss(z.log_softmax(-1), problem, counts), problem.optimum
    )
    assert gradient.abs().max() < 1e-12
    elsewhere = study.gradient_of(
        lambda z: study.population_loss(z.log_softmax(-1), problem, counts), problem.ref_logp
    )
    assert elsewhere.abs().max() > 1e-3


def test_islands_leave_one_number_undetermined(problem):
    pairs = study.pair_distributions(problem)["two islands"]
    fitted = study.fit(problem, study.labelled(pairs, problem.rewards))
    gap = fitted - problem.optimum
    assert gap[:3].std() < 1e-10 and gap[3:].std() < 1e-10  # right within each island
    assert (gap[0] - gap[3]).abs() > 0.01  # wrong between them


def test_sft_term_as_a_remedy(problem):
    found = claims.sft_term_as_a_remedy()
    assert found.verdict == "fails"
    assert found.figures["kl_without"] < 1e-12 < 1e-3 < found.figures["kl_near"]
    counts = study.labelled(study.pair_distributions(problem)["uniform"], problem.rewards)
    preferred = counts.sum(-1)
    slope = study.gradient_of(  # of the SFT term at the optimum: nothing balances it
        lambda z: -(preferred * z.log_softmax(-1)).sum(), problem.optimum
    )
    assert torch.allclose(slope, problem.optimum.exp() - preferred) and slope.abs().max() > 0.05


def test_mirror_descent_step():
    found = claims.mirror_descent_step()
    assert found.verdict == "holds"
    assert found.figures["step_kl_tau_2"] < found.figures["step_kl_tau_025"]
    assert found.figures["mean_stand_in_gradient"] > 0.01


def test_chosen_and_rejected_fall_together():
    found = claims.chosen_and_rejected_fall_together()
    assert found.verdict == "holds if"
    for overlap in (0.0, 1.0, 1.4, 1.6, 3.0):
        model = study.bystander(overlap)
        path = study.pair_path(model, beta=0.5, rate=1e-3, steps=2)
        assert (path.chosen.iloc[1] > 0) == (study.chosen_slope(model) > 0)
        assert path.rejected.iloc[1] < 0
