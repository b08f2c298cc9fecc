"""Chapter 8: its tables on groups say what its theorems say, and printed forms by hand."""

from __future__ import annotations

import statistics

import pytest
import torch

from analysis.chapters.ch08_reward_side import claims_on_groups, claims_on_process, groups, process
from analysis.evidence import reasoning
from analysis.evidence.policies import group_moments
from kl_term.kl.credit import sample_gradients
from kl_term.kl.sequences import sequence_probability
from kl_term.objectives.advantages import group_normalise, process_supervision


def test_group_moments_agree_with_sampling():
    logits, rewards = (x[0] for x in groups.random_bandits(1, 4, seed=3))
    exact = group_moments(logits, rewards, 3, group_normalise)
    generator = torch.Generator().manual_seed(0)
    policy = logits.softmax(-1)
    drawn = torch.multinomial(policy, 600_000, replacement=True, generator=generator).view(-1, 3)
    scores = torch.eye(4, dtype=torch.float64) - policy
    sampled = (group_normalise(rewards[drawn]).unsqueeze(-1) * scores[drawn]).mean(1)
    assert torch.allclose(sampled.mean(0), exact.mean, atol=0.005)
    assert sampled.var(0).sum().item() == pytest.approx(exact.trace_var.item(), rel=0.01)


def test_open_chains_end_and_score_at_their_last_step():
    problem = reasoning.open_length_chain(4, right=0.6, stop=0.3)
    probability = sequence_probability(problem.logits, problem.sequences)
    assert probability.sum().item() == pytest.approx(1.0, abs=1e-12)
    table = reasoning.state_values(problem)
    scores = reasoning.prm_scores(problem, table, problem.outcome)
    last = problem.sequences.mask.sum(-1, keepdim=True) - 1
    assert torch.equal(scores.gather(1, last).squeeze(1), problem.outcome)
    curves = process.best_of_n_curves(problem, [1, 4], noise=0.0, seeds=1)
    one = curves[curves.number == 1].accuracy
    assert one.std() < 1e-12 and one.iloc[0] == pytest.approx(
        (probability @ problem.outcome).item()
    )
    four = curves[curves.number == 4].set_index("how").accuracy
    assert four["last"] > four["sum"] > one.iloc[0]


RIGHT_WRONG = [0.0, 1.0, 1.0, 0.0]


def test_the_baseline_costs_variance_above_two_thirds():
    for p in (0.5, 0.6, 0.7, 0.9):
        plain = p * 2 * (1 - p) ** 2 - 2 * p**2 * (1 - p) ** 2
        second = p * (1 - p) ** 2 * 2 * (1 - p) ** 2 + (1 - p) * p**2 * 2 * p**2
        centred = second - 2 * p**2 * (1 - p) ** 2
        assert plain == pytest.approx(2 * p * (1 - p) ** 3)
        assert centred == pytest.approx(2 * p * (1 - p) * (1 - 2 * p) ** 2)
        assert (centred < plain) == (p < 2 / 3)


def test_seed_3_calls_undefined_what_its_own_eps_defines():
    equal = torch.full((4,), 0.5, dtype=torch.float64)
    deviation, std = equal - equal.mean(), equal.std()
    assert (deviation / std).isnan().all()
    assert (deviation / (std + 1e-4) == 0).all()


def test_a_price_that_did_not_shorten_would_change_the_verdict(negate):
    negate(claims_on_groups, "length")
    assert claims_on_groups.length_price().verdict == "fails"


def test_seed_4_divides_by_n_minus_one_in_the_text_and_by_n_in_the_proof():
    rewards = torch.tensor([0.99999, 1.00001] * 2, dtype=torch.float64)
    deviation = rewards - rewards.mean()
    by_proof = deviation / deviation.square().mean().sqrt()
    by_text = deviation / rewards.std()
    assert by_text[1].item() == pytest.approx(0.8660, abs=5e-5)
    assert abs(by_proof[1].item() - 0.8660) > 0.1


def test_seed_4_bounds_the_variance_with_a_group_that_does_not_exist():
    # Step 2 of the proof lets x = 0 in a group whose mean is 1: any group with a zero is below.
    for size in range(2, 9):
        means = [statistics.fmean([0.0, *rest]) for rest in [[1.0] * (size - 1)]]
        assert max(means) == pytest.approx((size - 1) / size)
        assert max(means) < 1
    # The bound it proves, 1, is four times the one that is attained.
    assert statistics.pvariance(RIGHT_WRONG) == pytest.approx(0.25)


def test_seed_1_steps_are_not_tokens():
    # Read as step t instead of token t, the sum would start one step late for every token
    # after the first step's end.
    ours = process_supervision([[1.0, 0.0], [0.0, 1.0]], [[0, 2], [1, 2]], [3, 3], eps=0.0)
    by_step = torch.tensor([[0.0, -(3**0.5) / 2, 0.0], [0.0, 3**0.5 / 2, 0.0]])
    assert not torch.allclose(ours, by_step.to(ours.dtype))


def test_variances_of_credits_by_sampling_paths():
    problem = reasoning.fixed_length_chain(6, 4, right=0.55, spread=0.5, seed=0)
    table = process.credit_table(problem, seed=1).set_index("credit")
    credits = process.credit_variants(problem, seed=1)
    probability = sequence_probability(problem.logits, problem.sequences)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(probability, 40_000, replacement=True, generator=generator)
    perfect, outcome = (
        sample_gradients(problem.logits, problem.sequences, credits[name])[drawn].var(0).sum()
        for name in ("perfect PRM, immediate", "outcome")
    )
    sampled = (perfect / outcome).item()
    assert sampled == pytest.approx(table.variance["perfect PRM, immediate"], rel=0.05)


def test_a_verifier_that_slowed_training_would_change_the_verdict(negate):
    negate(claims_on_process, "accuracy")
    assert claims_on_process.prm_against_orm().verdict == "fails"


def test_best_of_n_scores():
    scores = torch.tensor([0.1, 0.4, 0.4, 0.9], dtype=torch.float64)
    probability = torch.tensor([0.4, 0.2, 0.3, 0.1], dtype=torch.float64)
    outcome = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(probability, 300_000, replacement=True, generator=generator).view(
        -1, 3
    )
    chosen = drawn.gather(1, scores[drawn].argmax(1, keepdim=True)).squeeze(1)
    exact = process.choice_accuracy(scores, probability, outcome, 3)
    assert outcome[chosen].mean().item() == pytest.approx(exact, abs=0.005)


def test_never_stopping_solves_the_binomial_tail():
    problem = reasoning.fixed_length_chain(8, 5, right=0.6)
    whole = process.stopping_table(problem, [], noise=0.0, seed=0).iloc[0]
    tail = torch.distributions.Binomial(8, torch.tensor(0.6, dtype=torch.float64))
    solved = tail.log_prob(torch.arange(5.0, 9.0, dtype=torch.float64)).exp().sum()
    assert whole.tokens == pytest.approx(8, abs=1e-12)
    assert whole.solved == pytest.approx(solved.item(), abs=1e-12)
