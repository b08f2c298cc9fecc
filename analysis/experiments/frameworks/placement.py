r"""Where the KL meets the normalisation of rewards: how many reward units one nat costs.

In a group of completions with rewards R and sequence KLs K, every framework's total advantage is
linear in both once its own standard deviation is known: :math:`A = a (R - \bar R) - b (K - K_0)`.
The exchange rate :math:`b / a` is the beta that a reader of the code believes to have set; the
scale :math:`b` is the force of the KL on the policy.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor

from analysis.objectives.advantages import group_centre, group_normalise, leave_one_out

Placement = Callable[[Tensor, Tensor, float], Tensor]


def kl_before_group_std(rewards: Tensor, kl: Tensor, beta: float) -> Tensor:
    """The KL is part of the reward that the group standardises (verl, GRPO with KL in reward)."""
    return group_normalise(rewards - beta * kl, eps=1e-6)


def kl_after_group_std(rewards: Tensor, kl: Tensor, beta: float) -> Tensor:
    """Rewards are standardised, then the KL is taken off (OpenRLHF ``group_norm``)."""
    return group_normalise(rewards, eps=1e-9) - beta * kl


def kl_beside_group_std(rewards: Tensor, kl: Tensor, beta: float) -> Tensor:
    """The KL is a term of the loss beside standardised rewards (TRL, verl, slime: GRPO).

    For the exchange rate it does not matter that the loss differentiates its estimator.
    """
    return group_normalise(rewards, eps=1e-4) - beta * kl


def kl_before_leave_one_out(rewards: Tensor, kl: Tensor, beta: float) -> Tensor:
    """The KL is taken off before a baseline without division (TRL RLOO)."""
    return leave_one_out(rewards - beta * kl)


def kl_after_centring(rewards: Tensor, kl: Tensor, beta: float) -> Tensor:
    """A mean baseline without division, then the KL (OpenRLHF ``dr_grpo``)."""
    return group_centre(rewards) - beta * kl


def kl_ignored(rewards: Tensor, kl: Tensor, beta: float) -> Tensor:
    """The coefficient is read but the KL never reaches the advantage (slime GRPO, kl-coef)."""
    del kl, beta
    return group_normalise(rewards, eps=1e-6)


PLACEMENTS: dict[str, tuple[str, Placement]] = {
    "before the group's std": ("verl, KL in reward", kl_before_group_std),
    "after the group's std": ("OpenRLHF group_norm", kl_after_group_std),
    "loss, beside the group's std": ("TRL, verl, slime: KL loss", kl_beside_group_std),
    "before leave-one-out": ("TRL RLOO", kl_before_leave_one_out),
    "after centring": ("OpenRLHF dr_grpo", kl_after_centring),
    "ignored": ("slime GRPO, kl-coef", kl_ignored),
}


def slopes(placement: Placement, rewards: Tensor, kl: Tensor, beta: float) -> tuple[float, float]:
    """Slopes of the advantages by reward and by minus the KL, over the group (least squares).

    Raises:
        ValueError: if the advantages are not linear in both, or the group cannot tell them apart.
    """
    columns = [kl - kl.mean()]
    if rewards.std() > 0:
        columns.append(rewards - rewards.mean())
    design = torch.stack([*columns, torch.ones_like(kl)], dim=-1)
    advantages = placement(rewards, kl, beta)
    if torch.linalg.matrix_rank(design) < design.shape[-1]:
        raise ValueError("rewards and kl of the group are proportional: give another group")
    fit = torch.linalg.lstsq(design, advantages.unsqueeze(-1)).solution.squeeze(-1)
    if (design @ fit - advantages).abs().max() > 1e-9:
        raise ValueError("the placement is not linear in rewards and kl")
    fit = torch.where(fit.abs() < 1e-12, 0.0, fit)  # rounding of the fit, not a slope
    by_reward = fit[1].item() if len(columns) == 2 else torch.nan
    return by_reward, 0.0 - fit[0].item()


def exchange_table(beta: float, *, group_size: int, kl_spread: float, seed: int) -> pd.DataFrame:
    """Exchange rate over beta, and the force of the KL, by placement and number of right answers.

    Rewards are 0 or 1; KLs are drawn once, with standard deviation ``kl_spread`` nats.
    """
    generator = torch.Generator().manual_seed(seed)
    kl = kl_spread * torch.randn(group_size, generator=generator, dtype=torch.float64)
    rows = []
    for name, (used_by, placement) in PLACEMENTS.items():
        for right in (group_size // 2, 1, 0):
            rewards = (torch.arange(group_size) < right).double()
            by_reward, by_kl = slopes(placement, rewards, kl, beta)
            rows.append(
                {
                    "placement": name,
                    "used_by": used_by,
                    "right": right,
                    "exchange": by_kl / by_reward / beta,
                    "force": by_kl / beta,
                }
            )
    return pd.DataFrame(rows)
