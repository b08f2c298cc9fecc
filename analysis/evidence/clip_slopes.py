"""What a clipped objective multiplies the score of a token by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from kl_term.objectives.losses import policy_loss


def score_coefficients(logp: Tensor, **options: Any) -> Tensor:
    """[B, T]: what a policy gradient multiplies each token's score by, from the loss with these
    ``options`` of :func:`kl_term.objectives.losses.policy_loss` by autograd."""
    return grad(lambda at: -policy_loss(at, **options).per_token.sum())(logp)


EPSILON = 0.2


def clip_slopes(
    advantage: float, ratios: Iterable[float], *, epsilon: float = EPSILON
) -> list[float]:
    """Slope of the clipped objective of one token by its log-prob, at each ratio to the sampler."""
    log_ratio = torch.tensor([list(ratios)], dtype=torch.float64).log()
    fixed = {"old_logp": torch.zeros_like(log_ratio), "mask": torch.ones_like(log_ratio).bool()}
    fixed |= {"advantages": torch.full_like(log_ratio, advantage)}
    clip = {"epsilon_low": min(epsilon, 1.0), "epsilon_high": epsilon}
    return score_coefficients(log_ratio, **fixed, **clip)[0].tolist()
