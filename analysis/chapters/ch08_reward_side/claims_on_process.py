"""Claims on process rewards and on selection at inference."""

from __future__ import annotations

import math
import statistics

import pandas as pd
import torch
from torch.func import grad

from analysis.chapters.ch08_reward_side.process import (
    best_of_n_curves,
    credit_gradient,
    credit_table,
    stopping_table,
)
from analysis.evidence.claims import EXACT, Finding, claim, judge, largest
from analysis.evidence.reasoning import (
    fixed_length_chain,
    open_length_chain,
    prm_scores,
)
from analysis.evidence.recorded import difference, recorded
from kl_term.kl.returns import reward_to_go
from kl_term.kl.sequences import (
    sequence_probability,
)
from kl_term.objectives.advantages import (
    process_supervision,
)
from kl_term.objectives.process import (
    early_stop,
    marginal_rewards,
)


@claim("S1-12")
def process_supervision_formula() -> Finding:
    """Exact per-token lists against the printed formula in plain Python; equal step rewards; and
    recorded runs."""
    steps, ends, lengths = [[0.2, 0.9, 0.4], [0.7, 0.1]], [[1, 3, 6], [2, 4]], [7, 6]
    every = [reward for row in steps for reward in row]
    mean, std = statistics.fmean(every), statistics.stdev(every)
    by_hand = [
        [
            math.fsum((r - mean) / std for r, end in zip(row, of_row, strict=True) if end >= t)
            for t in range(length)
        ]
        for row, of_row, length in zip(steps, ends, lengths, strict=True)
    ]
    rewards = [torch.tensor(row, dtype=torch.float64) for row in steps]
    ours = process_supervision(rewards, ends, lengths, eps=0.0)
    error = max(
        largest(row[: len(hand)] - torch.tensor(hand, dtype=torch.float64))
        for row, hand in zip(ours, by_hand, strict=True)
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
    return Finding(judge(exact and not figures["undefined_equal"], exact), figures)


@claim("S3-19")
def marginal_prm_reward() -> Finding:
    """A random PRM on an enumerated chain: totals, discounting, and what the gradient ascends."""
    problem = fixed_length_chain(5, 3, right=0.55, spread=0.7, seed=0)
    generator = torch.Generator().manual_seed(1)
    table = torch.rand(problem.sequences.num_states, generator=generator, dtype=torch.float64)
    final = torch.rand(len(problem.outcome), generator=generator, dtype=torch.float64)
    scores = prm_scores(problem, table, final)
    rewards = marginal_rewards(scores, table[0].item())
    by_hand = sum(scores[:, t] - (scores[:, t - 1] if t else table[0]) for t in range(5))
    exact = grad(lambda at: sequence_probability(at, problem.sequences) @ final)(problem.logits)
    discounted = reward_to_go(rewards, gamma=0.9)[:, 0]
    figures = {
        "total_error": largest(rewards.sum(-1) - by_hand),
        "total_minus_final": largest(rewards.sum(-1) - final),
        "prompt_score": table[0].item(),
        "total_from_zero_error": largest(marginal_rewards(scores).sum(-1) - final),
        "discounted_gap": largest(discounted - by_hand),
        "gradient_error": largest(credit_gradient(problem, reward_to_go(rewards)) - exact),
    }
    identity = max(figures[k] for k in ("total_error", "total_from_zero_error", "gradient_error"))
    always = identity < EXACT and figures["total_minus_final"] < EXACT
    return Finding(judge(always, identity < EXACT), figures)


@claim("S3-20")
def prm_against_orm() -> Finding:
    """Enumerated bias and variance of the policy gradient under six credits; and recorded runs."""
    tables = []
    for seed in range(10):
        problem = fixed_length_chain(6, 4, right=0.55, spread=0.5, seed=seed)
        tables.append(credit_table(problem, seed=seed + 1).set_index("credit"))
    bias, variance = (pd.DataFrame(t[column] for t in tables) for column in ("bias", "variance"))
    against_mean = variance["random PRM, to go"] / variance["outcome minus its mean"]
    figures = {
        "perfect_variance": variance["perfect PRM, immediate"].max(),
        "perfect_bias": bias["perfect PRM, immediate"].max(),
        "random_over_mean_variance": against_mean.median(),
        "random_immediate_bias": bias["random PRM, immediate"].median(),
        "random_to_go_bias": bias["random PRM, to go"].max(),
    }
    gain = difference(recorded("process").finals, "marginal", "outcome", "accuracy")
    figures |= gain.figures("trained_gain")
    perfect = figures["perfect_variance"] < 1 and figures["perfect_bias"] < EXACT
    perfect = perfect and gain.above
    any_prm = figures["random_over_mean_variance"] < 1
    return Finding(judge(perfect and any_prm, perfect), figures)


@claim("S1-xa")
def outcome_credit_sees_the_future() -> Finding:
    """A reward that only the last step decides, broadcast: expected gradient against autograd."""
    problem = fixed_length_chain(6, 4, right=0.55, spread=0.5, seed=0)
    last_only = problem.sequences.tokens[:, -1].to(torch.float64) * problem.outcome
    probability = sequence_probability(problem.logits, problem.sequences)
    exact = grad(lambda at: sequence_probability(at, problem.sequences) @ last_only)(problem.logits)
    centred = (last_only - probability @ last_only).unsqueeze(-1)
    centred = centred.expand(problem.sequences.mask.shape)
    myopic = torch.zeros_like(centred)
    myopic[:, -1] = centred[:, -1]
    figures = {
        "broadcast_error": largest(credit_gradient(problem, centred) - exact),
        "first_token_gradient": exact[0].norm().item(),
        "first_token_gradient_myopic": credit_gradient(problem, myopic)[0].norm().item(),
    }
    ignores_future = figures["broadcast_error"] > EXACT
    return Finding(judge(ignores_future, False), figures)


@claim("S3-36")
def best_of_n_scores() -> Finding:
    """Exact accuracy of the best of 16 by path score: PRM right, and PRM noisy on its logit."""
    problem = open_length_chain(7, right=0.55, stop=0.25)

    def accuracy(noise: float, seeds: int) -> dict[str, float]:
        table = best_of_n_curves(problem, [1, 16], noise=noise, seeds=seeds)
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
    return Finding(judge(marginal and raw, marginal), figures)


@claim("S3-37")
def early_stopping() -> Finding:
    """Every path of eight steps: tokens saved, solvable paths lost, solved paths per token."""
    problem = fixed_length_chain(8, 5, right=0.6)
    perfect = stopping_table(problem, [1, 2, 3], noise=0.0, seed=0).set_index("patience")
    noisy = stopping_table(problem, [1, 2, 3], noise=0.3, seed=0).set_index("patience")
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
    return Finding(judge(all(pays), any(pays) and figures["rule_stops_after"] == 3), figures)
