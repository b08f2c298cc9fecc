"""Where the KL meets the normalisation of rewards: the force of each on a group's advantages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Of rewards [G], KLs [G] and the keyword beta: advantages [G].
Advantages = Callable[..., Tensor]


def slopes(advantages: Advantages, rewards: Tensor, kl: Tensor, beta: float) -> tuple[float, float]:
    """Slopes of the advantages by reward and by minus the KL, over the group (least squares).

    In a group with rewards R and sequence KLs K the advantage is linear in both once its own
    standard deviation is known: A = a (R - mean) - b K up to a constant. b / a is the beta that a
    reader of the code believes to have set, b the force of the KL on the policy.

    Raises:
        ValueError: if the advantages are not linear in both, or the group cannot tell them apart.
    """
    columns = [kl - kl.mean()]
    if rewards.std() > 0:
        columns.append(rewards - rewards.mean())
    design = torch.stack([*columns, torch.ones_like(kl)], dim=-1)
    found = advantages(rewards, kl, beta=beta)
    if torch.linalg.matrix_rank(design) < design.shape[-1]:
        raise ValueError("rewards and kl of the group are proportional: give another group")
    fit = torch.linalg.lstsq(design, found.unsqueeze(-1)).solution.squeeze(-1)
    if (design @ fit - found).abs().max() > 1e-9:
        raise ValueError("the placement is not linear in rewards and kl")
    fit = torch.where(fit.abs() < 1e-12, 0.0, fit)  # rounding of the fit, not a slope
    by_reward = fit[1].item() if len(columns) == 2 else torch.nan
    return by_reward, 0.0 - fit[0].item()
