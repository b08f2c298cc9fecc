"""Pairs of Gaussians as toy policies: the ones in print, their samples, and quadrature nodes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.kl.gaussians import moments


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
    """Log-densities under q and p of the points ``q_mean + q_std * z``.

    Args:
        pair: the two Gaussians.
        z: [...], in standard deviations of q from its mean.

    Returns:
        Two tensors [...], ``logp`` under q and ``ref_logp`` under p.
    """
    x = pair.q_mean + pair.q_std * z
    half_log_two_pi = 0.5 * math.log(2 * math.pi)
    logp = -0.5 * z.square() - math.log(pair.q_std) - half_log_two_pi
    standard = (x - pair.p_mean) / pair.p_std
    return logp, -0.5 * standard.square() - math.log(pair.p_std) - half_log_two_pi


def draw(shape: tuple[int, ...], *, seed: int) -> Tensor:
    """Standard normal draws in float64 from their own generator."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def normal_nodes(count: int = 40_001, half_width: float = 12.0) -> tuple[Tensor, Tensor]:
    """Points and weights of a trapezoid rule under a standard normal; the weights sum to 1."""
    z = torch.linspace(-half_width, half_width, count, dtype=torch.float64)
    weights = torch.exp(-0.5 * z.square())
    return z, weights / weights.sum()
