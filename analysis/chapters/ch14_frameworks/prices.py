"""What one nat costs in reward, as the mean over groups has it."""

from __future__ import annotations

from itertools import combinations_with_replacement
from math import factorial, prod

import pandas as pd
import torch
from torch import Tensor

from analysis.chapters.ch14_frameworks import PLACEMENTS
from analysis.evidence.policies import SAME, normal_draws
from kl_term.audit.slopes import Advantages
from kl_term.kl.scores import expected_score


def mean_gradient_of_groups(
    placement: Advantages, logits: Tensor, rewards: Tensor, kl: Tensor, *, beta: float, size: int
) -> Tensor:
    """Policy gradient [V] by the logits, its mean over every group of ``size`` answers, which are
    the V tokens of one state with these rewards and sequence KLs [V]."""
    policy = logits.softmax(-1)
    weighted = torch.zeros_like(logits)
    for group in combinations_with_replacement(range(len(logits)), size):
        counts = [group.count(answer) for answer in set(group)]
        chance = policy[list(group)].prod() * factorial(size) / prod(map(factorial, counts))
        members = torch.tensor(group)
        advantages = placement(rewards[members], kl[members], beta=beta)
        weighted = weighted.index_add(0, members, chance * advantages)
    return weighted - policy * weighted.sum()


def expected_price(placement: Advantages, *, beta: float, size: int, seed: int) -> float:
    """Coefficient of the KL's gradient over that of the reward's, over ``beta``; NaN where the mean
    over groups is not a multiple of both, as under a group's standard deviation."""
    logits, ref_logits, rewards = normal_draws((3, 3), seed=seed)
    policy = logits.softmax(-1)
    log_ratio = logits.log_softmax(-1) - ref_logits.log_softmax(-1)
    groups = {"beta": beta, "size": size}
    with_kl = mean_gradient_of_groups(placement, logits, rewards, log_ratio, **groups)
    without = mean_gradient_of_groups(placement, logits, rewards, 0 * log_ratio, **groups)
    force = _multiple(without - with_kl, expected_score(logits, policy * log_ratio))
    gain = _multiple(without, expected_score(logits, policy * rewards))
    return force / gain / beta if force else 0.0


def _multiple(gradient: Tensor, exact: Tensor) -> float:
    scale = (gradient @ exact) / exact.square().sum()
    return scale.item() if (gradient - scale * exact).norm() <= SAME * exact.norm() else torch.nan


def with_expected_price(table: pd.DataFrame, *, beta: float, size: int, seed: int) -> pd.DataFrame:
    """The table of placements and the price that the mean over groups has."""
    prices = [
        expected_price(PLACEMENTS[name][1], beta=beta, size=size, seed=seed)
        for name in table.placement
    ]
    return table.assign(expected=prices)
