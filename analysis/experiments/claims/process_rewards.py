"""Claims about process rewards, choosing and stopping paths, and the length recipe of Kimi k1.5."""

from __future__ import annotations

import math
import statistics

import torch

from analysis.experiments.chapters import process_rewards as study
from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.claims.recorded import difference, recorded
from analysis.kl.credit import credit_moments
from analysis.kl.sequences import sequence_probability
from analysis.objectives.advantages import group_normalise, process_supervision
from analysis.objectives.credit import reward_to_go
from analysis.objectives.filtering import repeats
from analysis.objectives.guidance import current_segment
from analysis.objectives.lengths import length_penalty, relative_length_reward
from analysis.objectives.process import early_stop, marginal_rewards

EXACT = 1e-12
STEP_REWARDS = [[0.2, 0.9, 0.4], [0.7, 0.1]]
STEP_ENDS = [[1, 3, 6], [2, 4]]
LENGTHS = [7, 6]


def supervision_by_hand(rewards: list[list[float]], ends: list[list[int]]) -> list[list[float]]:
    """The printed formula, token by token, without tensors."""
    every = [r for row in rewards for r in row]
    mean, std = statistics.fmean(every), statistics.stdev(every)
    return [
        [
            math.fsum((r - mean) / std for r, end in zip(row, row_ends, strict=True) if end >= t)
            for t in range(length)
        ]
        for row, row_ends, length in zip(rewards, ends, LENGTHS, strict=True)
    ]


@decides("S1-12")
def process_supervision_formula() -> Finding:
    """Exact per-token lists against the printed formula in plain Python; equal step rewards; and
    recorded runs against a reward for the outcome."""
    rewards = [torch.tensor(row, dtype=torch.float64) for row in STEP_REWARDS]
    ours = process_supervision(rewards, STEP_ENDS, LENGTHS, eps=0.0)
    by_hand = supervision_by_hand(STEP_REWARDS, STEP_ENDS)
    error = max(
        abs(ours[i, t].item() - value)
        for i, row in enumerate(by_hand)
        for t, value in enumerate(row)
    )
    own_rows = [(r - r.mean()) / r.std() for r in rewards]
    first_token = abs(own_rows[1].sum().item() - by_hand[1][0])
    equal = torch.full((2, 3), 0.5)
    printed = (equal - equal.mean()) / equal.std()
    figures = {
        "formula_error": error,
        "per_output_statistics_differ": first_token,
        "undefined_equal": float((~printed.isfinite()).all()),
        "first_token_sum": ours[:, 0].sum().item(),
    }
    gain = difference(recorded("process").finals, "process", "outcome", "accuracy")
    figures |= gain.figures("trained_gain")
    exact = error < EXACT < first_token
    return Finding(settle(exact and not figures["undefined_equal"], exact), figures)


@decides("S3-19")
def marginal_prm_reward() -> Finding:
    """A random PRM on an enumerated chain: totals, discounting, and what the gradient ascends."""
    problem = study.fixed_length_chain(5, 3, right=0.55, spread=0.7, seed=0)
    generator = torch.Generator().manual_seed(1)
    table = torch.rand(problem.sequences.num_states, generator=generator, dtype=torch.float64)
    final = torch.rand(len(problem.outcome), generator=generator, dtype=torch.float64)
    scores = study.prm_scores(problem, table, final)
    rewards = marginal_rewards(scores, table[0].item())
    by_hand = sum(scores[:, t] - (scores[:, t - 1] if t else table[0]) for t in range(5))
    leaf = problem.logits.clone().requires_grad_(True)
    expected = sequence_probability(leaf, problem.sequences) @ final
    (exact,) = torch.autograd.grad(expected, leaf)
    moments = credit_moments(problem.logits, problem.sequences, reward_to_go(rewards))
    figures = {
        "total_error": (rewards.sum(-1) - by_hand).abs().max().item(),
        "total_minus_final": (rewards.sum(-1) - final).abs().max().item(),
        "prompt_score": table[0].item(),
        "total_from_zero_error": (marginal_rewards(scores).sum(-1) - final).abs().max().item(),
        "discounted_gap": (reward_to_go(rewards, gamma=0.9)[:, 0] - by_hand).abs().max().item(),
        "gradient_error": (moments.mean - exact).abs().max().item(),
    }
    identity = max(figures[k] for k in ("total_error", "total_from_zero_error", "gradient_error"))
    always = identity < EXACT and figures["total_minus_final"] < EXACT
    return Finding(settle(always, identity < EXACT), figures)


@decides("S3-20")
def prm_against_orm() -> Finding:
    """Enumerated bias and variance of the policy gradient under six credits, over chains; and
    recorded runs in which a verifier of every step stands for a perfect PRM."""
    tables = [
        study.credit_table(
            study.fixed_length_chain(6, 4, right=0.55, spread=0.5, seed=seed), seed=seed + 1
        ).set_index("credit")
        for seed in range(10)
    ]

    def worst(column: str, credit: str) -> float:
        return max(table[column][credit] for table in tables)

    against_mean = [
        t.variance["random PRM, to go"] / t.variance["outcome minus its mean"] for t in tables
    ]
    figures = {
        "perfect_variance": worst("variance", "perfect PRM, immediate"),
        "perfect_bias": worst("bias", "perfect PRM, immediate"),
        "random_over_mean_variance": statistics.median(against_mean),
        "random_immediate_bias": statistics.median(t.bias["random PRM, immediate"] for t in tables),
        "random_to_go_bias": worst("bias", "random PRM, to go"),
    }
    gain = difference(recorded("process").finals, "marginal", "outcome", "accuracy")
    figures |= gain.figures("trained_gain")
    perfect = figures["perfect_variance"] < 1 and figures["perfect_bias"] < EXACT
    perfect = perfect and gain.above
    any_prm = figures["random_over_mean_variance"] < 1
    return Finding(settle(perfect and any_prm, perfect), figures)


@decides("S1-xa")
def outcome_credit_sees_the_future() -> Finding:
    """A reward that only the last step decides, broadcast: expected gradient against autograd."""
    problem = study.fixed_length_chain(6, 4, right=0.55, spread=0.5, seed=0)
    last_only = problem.sequences.tokens[:, -1].to(torch.float64) * problem.outcome
    leaf = problem.logits.clone().requires_grad_(True)
    value = sequence_probability(leaf, problem.sequences) @ last_only
    (exact,) = torch.autograd.grad(value, leaf)
    centred = (last_only - value.detach()).unsqueeze(-1).expand(problem.sequences.mask.shape)
    mean = credit_moments(problem.logits, problem.sequences, centred).mean
    myopic = torch.zeros_like(centred)
    myopic[:, -1] = centred[:, -1]
    myopic_mean = credit_moments(problem.logits, problem.sequences, myopic).mean
    figures = {
        "broadcast_error": (mean - exact).abs().max().item(),
        "first_token_gradient": exact[0].norm().item(),
        "first_token_gradient_myopic": myopic_mean[0].norm().item(),
    }
    ignores_future = figures["broadcast_error"] > EXACT
    return Finding(settle(ignores_future, False), figures)


@decides("S3-27")
def partial_rollout() -> Finding:
    """A cut path finished later against a cut path scored by a value: bias of the gradient; and
    recorded runs with a token budget, against whole rollouts and trained on the last segment."""
    problem = study.fixed_length_chain(6, 4, right=0.55, spread=0.5, seed=0)
    cut = 3
    values = study.state_values(problem)
    generator = torch.Generator().manual_seed(1)
    noisy = values + 0.2 * torch.randn(values.shape, generator=generator, dtype=values.dtype)
    mask, states = problem.sequences.mask, problem.sequences.states
    sampled_at = torch.arange(mask.shape[-1]).expand(mask.shape) // cut
    whole = problem.outcome.unsqueeze(-1).expand(mask.shape)
    exact = credit_moments(problem.logits, problem.sequences, whole).mean

    def gradient(credit: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        kept = torch.where(counted, credit, 0.0)
        return credit_moments(problem.logits, problem.sequences, kept).mean

    first, second = (current_segment(mask, sampled_at, n) for n in (0, 1))
    early, late = exact.clone(), exact.clone()
    early[2**cut - 1 :] = 0.0
    late[: 2**cut - 1] = 0.0

    def bootstrap_bias(table: torch.Tensor) -> float:
        at_cut = table[states[:, cut]].unsqueeze(-1).expand(mask.shape)
        return ((gradient(at_cut, first) - early).norm() / early.norm()).item()

    figures = {
        "continued_bias": ((gradient(whole, second) - late).norm() / late.norm()).item(),
        "bootstrap_bias": bootstrap_bias(noisy),
        "bootstrap_bias_exact_value": bootstrap_bias(values),
    }
    finals = recorded("partial_rollouts").finals
    for name, other in (("trained_budget", "whole"), ("trained_all_segments", "budget_8_current")):
        figures |= difference(finals, "budget_8_all", other, "own_accuracy").figures(name)
    continuing_needs_no_value = figures["continued_bias"] < EXACT
    value_is_free = figures["bootstrap_bias"] < EXACT
    return Finding(settle(value_is_free, not continuing_needs_no_value), figures)


@decides("S3-28")
def kimi_length_recipe() -> Finding:
    """The loop detector, and the report's length reward beside a penalty per token."""
    loop = torch.tensor([4, 7, 1, 2, 3, 1, 2, 3, 1, 2, 3, 9])
    stop = repeats(loop, period=4, times=3).nonzero().flatten()
    correct = torch.tensor([True, True, False, False])
    lengths = torch.tensor([400.0, 100.0, 100.0, 400.0], dtype=torch.float64)
    relative = relative_length_reward(correct, lengths)
    task = correct.to(torch.float64)
    dear = length_penalty(task, lengths, weight=0.01)
    scaled = relative_length_reward(correct, 10 * lengths)
    figures = {
        "loop_found_at": float(stop[0]),
        "loops_found": float(len(stop)),
        "short_wrong_bonus": relative[2].item(),
        "short_over_long_right": (relative[1] - relative[0]).item(),
        "scale_error": (scaled - relative).abs().max().item(),
        "wrong_over_right_penalty": (group_normalise(dear)[2] - group_normalise(dear)[0]).item(),
        "wrong_over_right_relative": (task + relative)[2].item() - (task + relative)[0].item(),
    }
    detector = figures["loops_found"] == 1 and figures["loop_found_at"] == 10
    shortens = figures["short_over_long_right"] > 0 and figures["short_wrong_bonus"] <= 0
    same = figures["wrong_over_right_penalty"] <= 0
    return Finding(settle(detector and shortens and same, detector and shortens), figures)


@decides("S3-36")
def best_of_n_scores() -> Finding:
    """Exact accuracy of the best of 16 by path score: PRM right, and PRM noisy on its logit."""
    problem = study.open_length_chain(7, right=0.55, stop=0.25)

    def accuracy(noise: float, seeds: int) -> dict[str, float]:
        table = study.best_of_n_curves(problem, [1, 16], noise=noise, seeds=seeds)
        return table.set_index(["how", "number"]).accuracy

    right, noisy = accuracy(0.0, 1), accuracy(4.0, 6)
    one = (sequence_probability(problem.logits, problem.sequences) @ problem.outcome).item()
    figures = {
        "one": right["last", 1],
        "last": right["last", 16],
        "any_of_16": 1 - (1 - one) ** 16,
        "sum_raw": right["sum", 16],
        "last_noisy": noisy["last", 16],
        "sum_raw_noisy": noisy["sum", 16],
        "min_noisy": noisy["min", 16],
    }
    marginal = abs(figures["last"] - figures["any_of_16"]) < EXACT
    raw = abs(figures["sum_raw"] - figures["any_of_16"]) < EXACT
    return Finding(settle(marginal and raw, marginal), figures)


@decides("S3-37")
def early_stopping() -> Finding:
    """Every path of eight steps: tokens saved, solvable paths lost, solved paths per token."""
    problem = study.fixed_length_chain(8, 5, right=0.6)
    perfect = study.stopping_table(problem, [1, 2, 3], noise=0.0, seed=0).set_index("patience")
    noisy = study.stopping_table(problem, [1, 2, 3], noise=0.3, seed=0).set_index("patience")
    falling = torch.tensor([0.6, 0.5, 0.4, 0.7], dtype=torch.float64)
    rule = early_stop(falling, patience=2, initial=0.6)
    whole = perfect.rate[8]
    figures = {
        "rule_stops_after": float(rule),
        "saved_share_patience3": 1 - perfect.tokens[3] / 8,
        "lost_patience3": perfect.lost[3],
        "rate_gain_patience3": perfect.rate[3] / whole,
        "rate_gain_patience2": perfect.rate[2] / whole,
        "rate_gain_patience2_noisy": noisy.rate[2] / whole,
    }
    pays = [v > 1 for k, v in figures.items() if k.startswith("rate_gain")]
    return Finding(settle(all(pays), any(pays) and figures["rule_stops_after"] == 3), figures)
