"""What a token's weight does to the lengths of right and wrong answers, enumerated: chapter 16."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import torch
from torch import Tensor

from analysis.experiments.chapters.process_rewards import Reasoning, open_length_chain
from analysis.kl.credit import credit_moments
from analysis.kl.sequences import sequence_probability
from analysis.objectives.aggregation import token_weights

#: Aggregation -> what it is called; the sum is the policy gradient of the mean reward.
MODES = {"seq_mean_token_sum": "sum", "seq_mean_token_mean": "mean, 1/|o|"}


def row_weights(problem: Reasoning, mode: str) -> Tensor:
    """[N]: the weight that every counted token of a path gets, up to the number of rows."""
    mask = problem.sequences.mask
    return token_weights(mask, mode, dtype=problem.outcome.dtype).amax(dim=-1) * len(mask)


def ascent(problem: Reasoning, mode: str) -> Tensor:
    """[states, vocab]: the expected on-policy gradient of reward minus its mean, so weighted."""
    probability = sequence_probability(problem.logits, problem.sequences)
    advantage = problem.outcome - probability @ problem.outcome
    credit = (row_weights(problem, mode) * advantage)[:, None] * problem.sequences.mask
    return credit_moments(problem.logits, problem.sequences, credit).mean


def by_classes(problem: Reasoning, mode: str) -> Tensor:
    r"""The same by the theorem: :math:`\sum_C a_C \nabla (\Pr(C)\, \mathbb{E}[w \mid C])`.

    By autograd through the two classes, right and wrong, each with the advantage it has.
    """
    logits = problem.logits.clone().requires_grad_()
    probability = sequence_probability(logits, problem.sequences)
    right = problem.outcome
    success = (probability @ right).detach()
    weights = row_weights(problem, mode)
    classes = (1 - success) * (probability @ (right * weights)) - success * (
        probability @ ((1 - right) * weights)
    )
    return torch.autograd.grad(classes, logits)[0]


def mean_length_slope(problem: Reasoning, chosen: Tensor, direction: Tensor) -> float:
    """Change of the mean length of the chosen paths [N] per unit step along a direction."""
    logits = problem.logits.clone().requires_grad_()
    mass = sequence_probability(logits, problem.sequences) * chosen
    lengths = problem.sequences.mask.sum(dim=-1).to(mass.dtype)
    (slope,) = torch.autograd.grad(mass @ lengths / mass.sum(), logits)
    return ((slope * direction).sum() / direction.norm()).item()


def drift_table(rights: Iterable[float], *, max_steps: int = 7, stop: float = 0.25) -> pd.DataFrame:
    """Which way the lengths of right and of wrong answers go under each weight.

    Args:
        rights: probabilities that a step is right.
        max_steps: of the longest path.
        stop: probability that a path ends at each step.

    Returns:
        One row per probability and weight: ``success`` of a path, ``wrong`` and ``right``, tokens
        per unit step, and ``error`` of the theorem.
    """
    rows = []
    for right in rights:
        problem = open_length_chain(max_steps, right=right, stop=stop)
        probability = sequence_probability(problem.logits, problem.sequences)
        for mode, called in MODES.items():
            direction = ascent(problem, mode)
            rows.append(
                {
                    "weight": called,
                    "success": (probability @ problem.outcome).item(),
                    "wrong": mean_length_slope(problem, 1 - problem.outcome, direction),
                    "right": mean_length_slope(problem, problem.outcome, direction),
                    "error": (direction - by_classes(problem, mode)).abs().max().item(),
                }
            )
    return pd.DataFrame(rows)
