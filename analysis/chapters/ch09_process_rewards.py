"""Chapter 9: process rewards on reasoning chains small enough to list every path."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from analysis import style
from analysis.chapters.claims import EXACT, Finding, claim, difference, judge, largest, recorded
from analysis.chapters.policies import flat_error, moved_logits
from analysis.kl.credit import credit_moments, state_average
from analysis.kl.returns import reward_to_go
from analysis.kl.sequences import Sequences, enumerate_sequences, sequence_probability
from analysis.objectives.advantages import group_normalise, process_supervision
from analysis.objectives.filtering import repeats
from analysis.objectives.guidance import current_segment
from analysis.objectives.lengths import length_penalty, relative_length_reward
from analysis.objectives.process import (
    PATH_SCORES,
    early_stop,
    falls_in_a_row,
    marginal_rewards,
    path_score,
)

# --- What the chapter computes -----------------------------------------------------------------


class Reasoning(NamedTuple):
    """A chain of right (1) and wrong (0) steps, solved when enough of them are right."""

    sequences: Sequences
    logits: Tensor  #: [states, vocab]
    outcome: Tensor  #: [N], 1 for a path that ends solved


def fixed_length_chain(
    steps: int, needed: int, *, right: float, spread: float = 0.0, seed: int = 0
) -> Reasoning:
    """Paths of ``steps`` steps, each right with probability ``right``, blurred by ``spread``."""
    sequences = enumerate_sequences(2, steps)
    odds = torch.tensor([1 - right, right], dtype=torch.float64).log()
    logits = moved_logits(odds.repeat(sequences.num_states, 1), spread, seed=seed)
    outcome = (sequences.tokens.sum(-1) >= needed).to(torch.float64)
    return Reasoning(sequences, logits, outcome)


def open_length_chain(max_steps: int, *, right: float, stop: float) -> Reasoning:
    """Paths that end on their own (token 2); solved if right steps outnumber the wrong ones."""
    sequences = enumerate_sequences(3, max_steps, eos=2)
    row = torch.tensor([(1 - stop) * (1 - right), (1 - stop) * right, stop], dtype=torch.float64)
    steps = torch.where(sequences.mask, sequences.tokens, 2)
    solved = (steps == 1).sum(-1) > (steps == 0).sum(-1)
    return Reasoning(sequences, row.log().expand(sequences.num_states, 3), solved.double())


def broadcast_outcome(problem: Reasoning) -> Tensor:
    """[N, T]: each token credited with its path's outcome."""
    return problem.outcome.unsqueeze(-1).expand(problem.sequences.mask.shape)


def credit_gradient(problem: Reasoning, credit: Tensor) -> Tensor:
    """[states, vocab]: expected policy gradient of a credit [N, T]."""
    return credit_moments(problem.logits, problem.sequences, credit).mean


def state_values(problem: Reasoning) -> Tensor:
    """[states]: probability of a solved path from each prefix, the score a perfect PRM gives."""
    return state_average(broadcast_outcome(problem), problem.logits, problem.sequences)


def prm_scores(problem: Reasoning, table: Tensor, final: Tensor) -> Tensor:
    """[N, T]: score after each step, from a table of prefixes and a score of each finished path."""
    states, mask = problem.sequences.states, problem.sequences.mask
    after = torch.cat([table[states[:, 1:]], final.unsqueeze(-1)], dim=-1)
    is_last = mask & ~functional.pad(mask[:, 1:], (0, 1))
    return torch.where(is_last, final.unsqueeze(-1), after)


def credit_variants(problem: Reasoning, *, seed: int) -> dict[str, Tensor]:
    """Credit [N, T] of every token under outcome and process rewards."""
    values = state_values(problem)
    generator = torch.Generator().manual_seed(seed)
    random = torch.rand(values.shape, generator=generator, dtype=values.dtype)
    whole = broadcast_outcome(problem)
    variants = {"outcome": whole, "outcome minus its mean": whole - values[0]}
    for name, table in (("perfect", values), ("random", random)):
        rewards = marginal_rewards(prm_scores(problem, table, problem.outcome), table[0].item())
        rewards = torch.where(problem.sequences.mask, rewards, 0.0)
        variants[f"{name} PRM, to go"] = reward_to_go(rewards)
        variants[f"{name} PRM, immediate"] = rewards
    return variants


def credit_table(problem: Reasoning, *, seed: int) -> pd.DataFrame:
    """Bias and variance of the policy gradient under each credit, enumerated.

    ``bias`` is relative to the gradient of the success probability; ``variance`` is one path's
    trace over the outcome's.
    """
    moments = {
        name: credit_moments(problem.logits, problem.sequences, credit)
        for name, credit in credit_variants(problem, seed=seed).items()
    }
    exact, outcome_var = moments["outcome"]
    rows = [
        (name, flat_error(mean, exact), (trace_var / outcome_var).item())
        for name, (mean, trace_var) in moments.items()
    ]
    return pd.DataFrame(rows, columns=["credit", "bias", "variance"])


def choice_accuracy(scores: Tensor, probability: Tensor, outcome: Tensor, number: int) -> float:
    """Probability that the best-scored of ``number`` independent paths is a solved one, ties
    broken evenly."""
    _, level = scores.unique(return_inverse=True)
    mass = torch.bincount(level, weights=probability)
    solved = torch.bincount(level, weights=probability * outcome)
    below = functional.pad(mass.cumsum(0), (1, 0))
    best = below[1:] ** number - below[:-1] ** number
    return (best * solved / mass).sum().item()


def best_of_n_curves(
    problem: Reasoning, numbers: Iterable[int], *, noise: float, seeds: int
) -> pd.DataFrame:
    """Exact accuracy of choosing by each path score, a mean over PRMs: the true value of each
    prefix with Gaussian noise on its logit."""
    values = state_values(problem).clamp(0.02, 0.98)
    final = problem.outcome.clamp(0.02, 0.98)
    probability = sequence_probability(problem.logits, problem.sequences)
    rows = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        table, ends = (
            (x.logit() + noise * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sigmoid()
            for x in (values, final)
        )
        scores = prm_scores(problem, table, ends)
        for how in PATH_SCORES:
            of_path = path_score(scores, problem.sequences.mask, how)
            rows += [
                (how, number, choice_accuracy(of_path, probability, problem.outcome, number))
                for number in numbers
            ]
    table = pd.DataFrame(rows, columns=["how", "number", "accuracy"])
    return table.groupby(["how", "number"], sort=False, as_index=False).mean()


def stopping_table(
    problem: Reasoning, patiences: Iterable[int], *, noise: float, seed: int
) -> pd.DataFrame:
    """What early stopping saves and loses, enumerated, by patience; the last row never stops.

    Expected steps, ``tokens``; the share ``lost`` of stopped paths that would have been solved; and
    solved paths per thousand steps, ``rate``, when stopped paths are resampled.
    """
    table = moved_logits(state_values(problem), noise, seed=seed)
    scores = prm_scores(problem, table, problem.outcome)
    steps = problem.sequences.mask.shape[-1]
    inner = scores[:, :-1]  # after the last step there is nothing left to stop
    probability = sequence_probability(problem.logits, problem.sequences)
    rows = []
    for patience in [*patiences, steps]:
        options = {"patience": patience, "initial": table[0].item()}
        stopped = falls_in_a_row(inner, **options).any(-1)
        taken = torch.where(stopped, early_stop(inner, **options), steps).double()
        share, tokens = (probability @ x for x in (stopped.double(), taken))
        lost, solved = (probability @ (x * problem.outcome) for x in (stopped, ~stopped))
        row = {
            "tokens": tokens,
            "lost": lost / share if share > 0 else lost,
            "solved": solved,
            "rate": 1000 * solved / tokens,
        }
        rows.append({"patience": patience} | {name: x.item() for name, x in row.items()})
    return pd.DataFrame(rows)


# --- What it draws -----------------------------------------------------------------------------


def draw_best_of_n(curves: pd.DataFrame) -> Figure:
    """Accuracy of the chosen path against the number of paths, by path score and PRM."""
    named = {"last": "last", "sum": "sum of raw scores", "mean": "mean", "min": "min"}
    named |= {"product": "product"}
    series = zip(named.items(), style.SERIES, strict=True)
    looks = {"kind": "how", "looks": {how: {**x, "label": text} for (how, text), x in series}}
    looks |= {"panel": "prm", "titles": {name: f"{name} PRM" for name in curves.prm.unique()}}
    labels = {"xlabel": "number $N$ of paths (log scale)", "legend": "lower right"}
    labels |= {"ylabel": "probability that the\nchosen path is solved", "ylim": (0.3, 1.03)}
    figure = style.lines(curves, "number", "accuracy", **looks, **labels)
    for axes in figure.axes:
        axes.set_xscale("log", base=2)
    return figure


def draw_early_stop(tables: dict[str, pd.DataFrame]) -> Figure:
    """Solved paths per token and paths wrongly stopped, by patience."""
    figure, (rate, lost) = style.subplots(1, 2, height=3.6)
    for look, (name, table) in zip(style.SERIES, tables.items(), strict=False):
        never = table.rate.iloc[-1]
        stopping = table.iloc[:-1]
        rate.plot(stopping.patience, stopping.rate / never, **look, label=name)
        lost.plot(stopping.patience, stopping.lost, **look, label=name)
    style.guide(rate, y=1, linestyle="-")
    rate.set_ylabel("solved paths per token\n(never stopping = 1)")
    lost.set_ylabel("stopped paths that would\nhave been solved")
    lost.legend(loc="upper right", fontsize=10)
    for axes in (rate, lost):
        axes.set_xticks(stopping.patience)
        axes.set_ylim(bottom=0)
    figure.supxlabel("falls in a row before a path is stopped", fontsize="medium")
    return figure


# --- The claims it decides ---------------------------------------------------------------------


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


@claim("S3-27")
def partial_rollout() -> Finding:
    """A cut path finished later against one scored by a value: bias of the gradient; and
    recorded runs."""
    problem = fixed_length_chain(6, 4, right=0.55, spread=0.5, seed=0)
    cut = 3
    values = state_values(problem)
    mask, states = problem.sequences.mask, problem.sequences.states
    sampled_at = torch.arange(mask.shape[-1]).expand(mask.shape) // cut
    first, second = (current_segment(mask, sampled_at, n) for n in (0, 1))
    whole = broadcast_outcome(problem)
    exact = credit_gradient(problem, whole)
    early, late = exact.clone(), exact.clone()
    early[2**cut - 1 :] = 0.0
    late[: 2**cut - 1] = 0.0

    def bootstrap_bias(table: Tensor) -> float:
        at_cut = torch.where(first, table[states[:, cut]].unsqueeze(-1), 0.0)
        return flat_error(credit_gradient(problem, at_cut), early)

    continued = credit_gradient(problem, torch.where(second, whole, 0.0))
    figures = {
        "continued_bias": flat_error(continued, late),
        "bootstrap_bias": bootstrap_bias(moved_logits(values, 0.2, seed=1)),
        "bootstrap_bias_exact_value": bootstrap_bias(values),
    }
    finals = recorded("partial_rollouts").finals
    for name, other in (("trained_budget", "whole"), ("trained_all_segments", "budget_8_current")):
        figures |= difference(finals, "budget_8_all", other, "own_accuracy").figures(name)
    continuing_needs_no_value = figures["continued_bias"] < EXACT
    value_is_free = figures["bootstrap_bias"] < EXACT
    return Finding(judge(value_is_free, not continuing_needs_no_value), figures)


@claim("S3-28")
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
        "scale_error": largest(scaled - relative),
        "wrong_over_right_penalty": (group_normalise(dear)[2] - group_normalise(dear)[0]).item(),
        "wrong_over_right_relative": (task + relative)[2].item() - (task + relative)[0].item(),
    }
    detector = figures["loops_found"] == 1 and figures["loop_found_at"] == 10
    shortens = figures["short_over_long_right"] > 0 and figures["short_wrong_bonus"] <= 0
    same = figures["wrong_over_right_penalty"] <= 0
    return Finding(judge(detector and shortens and same, detector and shortens), figures)


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
