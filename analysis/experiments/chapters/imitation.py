"""What a teacher's tokens are worth: steps of exact gradients, and cost over a horizon."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import torch
from torch import Tensor

from analysis.kl.enumeration import reverse_kl_gradient
from analysis.objectives.imitation import imitation_cost


def cost_curves(error: float, horizons: Iterable[int], recoveries: Iterable[float]) -> pd.DataFrame:
    """Expected steps off the path by horizon, for imitators that find back more or less often."""
    horizons = list(horizons)
    return pd.DataFrame(
        {"recovery": c, "horizon": t, "cost": imitation_cost(error, t, c)}
        for c in recoveries
        for t in horizons
    )


def steps_to_success(
    length: int, vocab_size: int, *, dense: bool, goal: float = 0.9, rate: float = 0.5
) -> int:
    """Exact-gradient steps from uniform until all ``length`` tokens are right with ``goal``.

    One token of the vocabulary is right at each position; positions are alike, so one row of
    logits stands for all. ``dense`` descends the reverse KL from a teacher that is right 99 times
    in 100; otherwise the success probability itself is ascended.
    """
    logits = torch.zeros(vocab_size, dtype=torch.float64)
    right = torch.zeros_like(logits)
    right[0] = 1.0
    teacher = torch.where(right > 0, 0.99 ** (1 / length), (1 - 0.99 ** (1 / length))).log()
    for step in range(1_000_000):
        policy = logits.softmax(-1)
        if policy[0] ** length >= goal:
            return step
        logits = logits + rate * _ascent(logits, policy, right, teacher, length, dense=dense)
    raise ValueError(f"length {length} does not reach {goal} in a million steps; shorten it")


def steps_ratio(length: int, *, vocab_size: int) -> float:
    """Steps on the sparse reward over steps on the dense teacher, at one learning rate."""
    sparse, dense = (steps_to_success(length, vocab_size, dense=d) for d in (False, True))
    return sparse / dense


def _ascent(
    logits: Tensor, policy: Tensor, right: Tensor, teacher: Tensor, length: int, *, dense: bool
) -> Tensor:
    if dense:
        return -reverse_kl_gradient(logits, teacher)
    return policy[0] ** length * (right - policy)
