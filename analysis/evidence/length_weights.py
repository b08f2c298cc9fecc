"""What a mean over the tokens of a completion does to the gradient of a KL loss."""

from __future__ import annotations

import math

import pandas as pd
import torch
from torch import Tensor

from analysis.evidence.policies import Policies, by_token, measured
from kl_term.kl.sequences import (
    Sequences,
    expected_sequence_gradient,
    sequence_probability,
    visited_kl_gradient,
)
from kl_term.objectives.aggregation import token_mean_weight

#: The KL whose per-state gradient each loss has when tokens are summed.
DIRECTIONS = {"k2": "reverse", "k3": "forward"}


def completion_weights(logits: Tensor, sequences: Sequences, completions: float) -> Tensor:
    """[N]: the weight on each completion's sum of tokens in a mean over a batch's tokens; of one
    completion it is GRPO's, of ``inf`` a constant."""
    lengths = sequences.mask.sum(dim=-1)
    mass = sequence_probability(logits, sequences)
    if math.isinf(completions):
        return (1 / (mass @ lengths.to(mass.dtype))).expand(len(lengths))
    probability = torch.bincount(lengths, weights=mass)
    return token_mean_weight(probability, int(completions))[lengths]


def unexplained(gradient: Tensor, exact: Tensor) -> float:
    """Share of a gradient [..., V] that no multiple of the exact one explains, each row its own."""
    scale = (gradient * exact).sum(dim=-1, keepdim=True) / exact.square().sum(dim=-1, keepdim=True)
    return ((gradient - scale * exact).norm() / gradient.norm()).item()


def weight_errors(tables: Policies, sequences: Sequences, *, completions: int = 1) -> pd.DataFrame:
    """By how much a mean over tokens turns the gradient of each KL loss away, a row a pair: the
    share of the gradient of ``k2`` and ``k3`` that the KL with token sums does not explain."""

    def shares(*pair: Tensor) -> dict[str, float]:
        weights = by_token(completion_weights(pair[0], sequences, completions), sequences)
        found = {}
        for name, direction in DIRECTIONS.items():
            gradient = expected_sequence_gradient(
                *pair, sequences, estimator=name, token_weights=weights
            )
            exact = visited_kl_gradient(*pair, sequences, direction=direction)
            found[name] = unexplained(gradient.flatten(), exact.flatten())
        return found

    return measured(shares, *tables)
