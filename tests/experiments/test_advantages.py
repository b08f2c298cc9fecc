"""The tables of chapter 9 say what its theorems say, and their referees could say otherwise."""

from __future__ import annotations

import pytest
import torch

from analysis.experiments.chapters import advantages as study
from analysis.experiments.chapters import process_rewards as process
from analysis.kl.sequences import sequence_probability
from analysis.objectives.advantages import group_normalise, leave_one_out


def test_group_moments_agree_with_sampling():
    logits, rewards = (x[0] for x in study.random_bandits(1, 4, seed=3))
    exact = study.group_moments(logits, rewards, 3, group_normalise)
    generator = torch.Generator().manual_seed(0)
    policy = logits.softmax(-1)
    groups = torch.multinomial(policy, 600_000, replacement=True, generator=generator).view(-1, 3)
    scores = torch.eye(4, dtype=torch.float64) - policy
    sampled = (group_normalise(rewards[groups]).unsqueeze(-1) * scores[groups]).mean(1)
    assert torch.allclose(sampled.mean(0), exact.mean, atol=0.005)
    assert sampled.var(0).sum().item() == pytest.approx(exact.trace_var.item(), rel=0.01)


def test_true_gradient_is_autograds():
    logits, rewards = study.random_bandits(5, 4, seed=1)
    leaf = logits.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad((leaf.softmax(-1) * rewards).sum(), leaf)
    assert torch.allclose(study.true_gradient(logits, rewards), gradient, atol=1e-14)


def test_only_division_turns_the_gradient():
    table = study.baseline_table(*study.random_bandits(10, 4, seed=0), (2, 3))
    by = table.set_index(["advantage", "group_size"])
    assert by.factor["minus the mean", 3] == pytest.approx(2 / 3, abs=1e-12)
    assert by.factor["minus the others' mean", 2] == pytest.approx(1, abs=1e-12)
    assert by.angle["normalised", 3] > 5 > 1e-4 > by.angle["minus the mean", 3]


def test_variance_ratio_approaches_the_law_of_an_exact_baseline():
    for p in (0.3, 0.8):
        law = ((1 - 2 * p) / (1 - p)) ** 2
        gaps = [
            abs(study.variance_curves(torch.tensor([p]).double(), size).ratio[0] - law)
            for size in (2, 4, 8)
        ]
        assert gaps[0] > gaps[1] > gaps[2]
    never = study.baseline_variance(0.3, leave_one_out, 2)
    assert never > study.baseline_variance(0.3, study.ADVANTAGES["reward itself"], 2)


def test_weights_match_the_enumeration_and_not_a_neighbouring_size():
    table = study.weight_table([0.2, 0.6], [2, 4]).set_index(["group_size", "success"])
    assert table.error.max() < 1e-12
    assert abs(table.weight[4, 0.2] - table.weight[2, 0.2]) > 0.1


def test_difficulty_curves_end_in_their_limit():
    success = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    curves = study.difficulty_curves(success, [2, 512], eps=0.0).set_index("group_size")
    limit = curves.loc[torch.inf]
    assert (curves.weight[2] == curves.weight[2].iloc[0]).all()
    assert abs(curves.weight[512].values / limit.weight.values - 1).max() < 0.02
    assert (limit.objective.diff().dropna() > 0).all()


def test_amplification_and_float32_tables():
    table = study.amplification_table().set_index("group")
    assert table["std"]["rounding"] == pytest.approx(3**0.5 / 2)
    assert table["clipped at 0.1"]["rounding"] == pytest.approx(1e-4, rel=1e-6)
    assert table["clipped at 0.1"]["right and wrong"] == table["std"]["right and wrong"]
    equal = study.equal_rewards_table(0.3, [7]).iloc[0]
    assert equal["eps 1e-8"] > 0.5 > equal["eps 1e-4"] and equal["here"] == 0


def test_length_curves_are_flat_when_all_are_right():
    prices = torch.tensor([1e-5, 1e-1], dtype=torch.float64)
    lengths = torch.tensor([300.0, 100.0], dtype=torch.float64)
    flat = study.length_curves(torch.ones(2, dtype=torch.float64), lengths, prices)
    assert flat.groupby("length").advantage.std().max() < 1e-9
    mixed = study.length_curves(torch.tensor([1.0, 0.0]).double(), lengths, prices)
    assert mixed.groupby("length").advantage.std().min() > 0.1


def test_perfect_values_are_a_martingale():
    problem = process.fixed_length_chain(4, 2, right=0.4, spread=0.5, seed=2)
    values = process.state_values(problem)
    scores = process.prm_scores(problem, values, problem.outcome)
    probability = sequence_probability(problem.logits, problem.sequences)
    for t in range(4):
        assert (probability @ scores[:, t]).item() == pytest.approx(values[0].item(), abs=1e-12)


def test_open_chains_end_and_score_at_their_last_step():
    problem = process.open_length_chain(4, right=0.6, stop=0.3)
    probability = sequence_probability(problem.logits, problem.sequences)
    assert probability.sum().item() == pytest.approx(1.0, abs=1e-12)
    table = process.state_values(problem)
    scores = process.prm_scores(problem, table, problem.outcome)
    last = problem.sequences.mask.sum(-1, keepdim=True) - 1
    assert torch.equal(scores.gather(1, last).squeeze(1), problem.outcome)
    curves = process.best_of_n_curves(problem, [1, 4], noise=0.0, seeds=1)
    one = curves[curves.number == 1].accuracy
    assert one.std() < 1e-12 and one.iloc[0] == pytest.approx(
        (probability @ problem.outcome).item()
    )
    four = curves[curves.number == 4].set_index("how").accuracy
    assert four["last"] > four["sum"] > one.iloc[0]
