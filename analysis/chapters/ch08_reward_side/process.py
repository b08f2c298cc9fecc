"""Process rewards: credit of steps, best of N, early stopping."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from analysis.evidence.policies import (
    by_token,
    flat_error,
    moved_logits,
)
from analysis.evidence.reasoning import (
    Reasoning,
    prm_scores,
    state_values,
)
from kl_term.kl.credit import credit_moments
from kl_term.kl.returns import reward_to_go
from kl_term.kl.sequences import (
    sequence_probability,
)
from kl_term.objectives.process import (
    PATH_SCORES,
    early_stop,
    falls_in_a_row,
    marginal_rewards,
    path_score,
)


def credit_gradient(problem: Reasoning, credit: Tensor) -> Tensor:
    """[states, vocab]: expected policy gradient of a credit [N, T]."""
    return credit_moments(problem.logits, problem.sequences, credit).mean


def credit_variants(problem: Reasoning, *, seed: int) -> dict[str, Tensor]:
    """Credit [N, T] of every token under outcome and process rewards."""
    values = state_values(problem)
    generator = torch.Generator().manual_seed(seed)
    random = torch.rand(values.shape, generator=generator, dtype=values.dtype)
    whole = by_token(problem.outcome, problem.sequences)
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
