"""Floor 0: divergences, their sampled estimators, and exact enumeration of what these optimise."""

from analysis.kl.divergences import chi_square, entropy, forward_kl, reverse_kl
from analysis.kl.estimators import k1, k2, k3, k3_clip, k4
from analysis.kl.gaussians import moments
from analysis.kl.surrogates import kl_loss, kl_penalty
from analysis.kl.term import KLTerm

__all__ = [
    "KLTerm",
    "chi_square",
    "entropy",
    "forward_kl",
    "k1",
    "k2",
    "k3",
    "k3_clip",
    "k4",
    "kl_loss",
    "kl_penalty",
    "moments",
    "reverse_kl",
]
