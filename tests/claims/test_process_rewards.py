"""Claims about process rewards: sampled or hand-computed referees beside the enumerated ones."""

from __future__ import annotations

import pytest
import torch

from analysis.experiments.chapters import process_rewards as study
from analysis.experiments.claims import process_rewards as claims
from analysis.experiments.claims.recorded import recorded
from analysis.kl.credit import sample_gradients
from analysis.kl.sequences import sequence_probability
from analysis.objectives.advantages import process_supervision
from analysis.objectives.lengths import length_penalty, relative_length_reward


def test_process_supervision_formula():
    found = claims.process_supervision_formula()
    assert found.verdict == "holds if"
    rewards = [[1.0, 0.0], [0.0, 1.0]]  # mean 1/2, sample std 1/sqrt(3)
    rows = [torch.tensor(row, dtype=torch.float64) for row in rewards]
    ours = process_supervision(rows, [[0, 2], [1, 2]], [3, 3], eps=0.0)
    unit = 3**0.5 / 2
    expected = [[0, -unit, -unit], [0, 0, unit]]
    assert torch.allclose(ours, torch.tensor(expected, dtype=torch.float64))
    assert trained_ahead("process") >= 8  # of ten seeds: a sign test at about 5%


def test_seed_1_steps_are_not_tokens():
    # Read as step t instead of token t, the sum would start one step late for every token
    # after the first step's end.
    ours = process_supervision([[1.0, 0.0], [0.0, 1.0]], [[0, 2], [1, 2]], [3, 3], eps=0.0)
    by_step = torch.tensor([[0.0, -(3**0.5) / 2, 0.0], [0.0, 3**0.5 / 2, 0.0]])
    assert not torch.allclose(ours, by_step.to(ours.dtype))


def test_marginal_prm_reward():
    found = claims.marginal_prm_reward()
    assert found.verdict == "holds if"
    assert found.figures["total_minus_final"] == pytest.approx(found.figures["prompt_score"])
    assert found.figures["discounted_gap"] > 0.01


def test_prm_against_orm():
    found = claims.prm_against_orm()
    assert found.verdict == "holds if"
    problem = study.fixed_length_chain(6, 4, right=0.55, spread=0.5, seed=0)
    table = study.credit_table(problem, seed=1).set_index("credit")
    credit = study.credit_arms(problem, seed=1)["perfect PRM, immediate"]
    probability = sequence_probability(problem.logits, problem.sequences)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(probability, 40_000, replacement=True, generator=generator)
    gradients = sample_gradients(problem.logits, problem.sequences, credit)[drawn].flatten(1)
    outcome = sample_gradients(
        problem.logits, problem.sequences, study.credit_arms(problem, seed=1)["outcome"]
    )[drawn].flatten(1)
    sampled = gradients.var(0).sum() / outcome.var(0).sum()
    assert sampled.item() == pytest.approx(table.variance["perfect PRM, immediate"], rel=0.05)
    assert trained_ahead("marginal") >= 8
    assert found.figures["trained_gain_low"] > 0


def trained_ahead(arm: str) -> int:
    """Recorded seeds in which an arm ended more accurate than the one credited by outcome."""
    ends = recorded("process").finals.pivot(index="seed", columns="arm", values="accuracy")
    assert len(ends) == 10
    return int((ends[arm] > ends["outcome"]).sum())


def test_a_verifier_that_slowed_training_would_change_the_verdict(negate):
    negate(claims, "accuracy")
    assert claims.prm_against_orm().verdict == "fails"


def test_outcome_credit_sees_the_future():
    found = claims.outcome_credit_sees_the_future()
    assert found.verdict == "fails"
    assert found.figures["first_token_gradient"] > 1e-3
    assert found.figures["first_token_gradient_myopic"] == 0


def test_partial_rollout():
    found = claims.partial_rollout()
    assert found.verdict == "fails"
    assert found.figures["bootstrap_bias"] > 0.1
    assert found.figures["bootstrap_bias_exact_value"] < 1e-12


def test_kimi_length_recipe():
    found = claims.kimi_length_recipe()
    assert found.verdict == "holds if"
    correct = torch.tensor([True, False])
    lengths = torch.tensor([1000.0, 10.0])
    by_price = length_penalty(correct.double(), lengths.double(), weight=0.01)
    relative = correct.double() + relative_length_reward(correct, lengths)
    assert by_price[0] < by_price[1]  # a price pays the short wrong answer
    assert relative[0] > relative[1]  # the report's reward never does


def test_best_of_n_scores():
    found = claims.best_of_n_scores()
    assert found.verdict == "holds if"
    scores = torch.tensor([0.1, 0.4, 0.4, 0.9], dtype=torch.float64)
    probability = torch.tensor([0.4, 0.2, 0.3, 0.1], dtype=torch.float64)
    outcome = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(probability, 300_000, replacement=True, generator=generator).view(
        -1, 3
    )
    chosen = drawn.gather(1, scores[drawn].argmax(1, keepdim=True)).squeeze(1)
    exact = study.choice_accuracy(scores, probability, outcome, 3)
    assert outcome[chosen].mean().item() == pytest.approx(exact, abs=0.005)


def test_early_stopping():
    found = claims.early_stopping()
    assert found.verdict == "holds if"
    assert found.figures["rate_gain_patience2"] < 1 < found.figures["rate_gain_patience3"]
    # Never stopping is eight tokens and the binomial tail.
    problem = study.fixed_length_chain(8, 5, right=0.6)
    whole = study.stopping_table(problem, [], noise=0.0, seed=0).iloc[0]
    tail = torch.distributions.Binomial(8, torch.tensor(0.6, dtype=torch.float64))
    solved = tail.log_prob(torch.arange(5.0, 9.0, dtype=torch.float64)).exp().sum()
    assert whole.tokens == pytest.approx(8, abs=1e-12)
    assert whole.solved == pytest.approx(solved.item(), abs=1e-12)
