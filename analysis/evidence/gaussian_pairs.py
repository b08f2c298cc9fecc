"""Pairs of Gaussians in closed form: those that papers printed numbers of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Normal

from kl_term.kl.gaussians import moments


class GaussianPair(NamedTuple):
    """The Gaussian q that is sampled (the policy), and p (the reference)."""

    q_mean: float
    q_std: float
    p_mean: float
    p_std: float

    @property
    def kl(self) -> float:
        """KL(q || p), nats."""
        return moments(*self)["k1"].mean


#: The two experiments of Schulman (2020).
SCHULMAN_NEAR = GaussianPair(0.0, 1.0, 0.1, 1.0)


SCHULMAN_FAR = GaussianPair(0.0, 1.0, 1.0, 1.0)


#: The counterexample of Liu et al. (2025), appendix D.
LIU_APPENDIX_D = GaussianPair(0.1, 0.2, 0.0, 1.0)


def log_probs(pair: GaussianPair, z: Tensor) -> tuple[Tensor, Tensor]:
    """Log-densities under q and p of the points that lie ``z`` of q's deviations from its mean."""
    q_mean, q_std, p_mean, p_std = torch.tensor(pair, dtype=z.dtype)
    x = q_mean + q_std * z
    return Normal(q_mean, q_std).log_prob(x), Normal(p_mean, p_std).log_prob(x)


def normal_nodes() -> tuple[Tensor, Tensor]:
    """Points and weights of a trapezoid rule under a standard normal; the weights sum to 1."""
    z = torch.linspace(-12.0, 12.0, 40_001, dtype=torch.float64)
    weights = torch.exp(-0.5 * z.square())
    return z, weights / weights.sum()
