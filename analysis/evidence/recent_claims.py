"""Claims of papers of 2025 and 2026 that a sum over the vocabulary can check."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from analysis.evidence.policies import moved_logits, normal_draws, random_policies
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.enumeration import reverse_kl_gradient
from kl_term.kl.fixed_points import forward_kl_optimum, reverse_kl_optimum
from kl_term.objectives.losses import policy_loss


class BaselineCheck(NamedTuple):
    """The KL of a state as the baseline of its own sampled k1."""

    bias: float  #: largest distance of the mean gradient from that of the reverse KL
    ratio: float  #: median variance over that without it
    worse: float  #: share of states at which the variance is larger with it


def kl_as_baseline(
    count: int, vocab_size: int, *, spread: float = 1.2, drift: float | None = None, seed: int
) -> BaselineCheck:
    r""":math:`(l - \mathrm{KL}) \nabla \log \pi` beside :math:`l\, \nabla \log \pi`, fresh samples.

    By the logits of random policies, ``drift`` from their references, or independent of them."""
    logits, ref_logits = random_policies(count, vocab_size, spread=spread, seed=seed)
    if drift is not None:
        logits = moved_logits(ref_logits, drift, seed=seed + 1)
    policy = logits.softmax(-1)
    log_ratio = logits.log_softmax(-1) - ref_logits.log_softmax(-1)
    score = torch.eye(vocab_size, dtype=policy.dtype) - policy.unsqueeze(-2)
    exact = reverse_kl_gradient(logits, ref_logits)

    def moments(credit: Tensor) -> tuple[Tensor, Tensor]:
        each = credit.unsqueeze(-1) * score
        mean = (policy.unsqueeze(-1) * each).sum(-2)
        spread = (policy * (each - mean.unsqueeze(-2)).square().sum(-1)).sum(-1)
        return mean, spread

    mean, with_it = moments(log_ratio - reverse_kl(logits, ref_logits).unsqueeze(-1))
    _, without = moments(log_ratio)
    ratio = with_it / without
    return BaselineCheck(
        (mean - exact).abs().max().item(), ratio.median().item(), (ratio > 1).double().mean().item()
    )


def clip_as_penalty(count: int, *, seed: int) -> float:
    r"""Largest distance between two slopes by :math:`\log \pi`: of PPO's clipped term, and of
    :math:`\rho A - \beta \log \pi`, where :math:`\beta = \rho A` if the clip binds and 0 if not."""
    logp, old_logp, advantages = normal_draws((3, count), seed=seed)
    leaf = logp.clone().requires_grad_(True)
    mask = torch.ones_like(logp, dtype=torch.bool)
    clip = {"epsilon_low": 0.2, "epsilon_high": 0.2}
    inputs = {"old_logp": old_logp, "advantages": advantages, "mask": mask}
    clipped = policy_loss(leaf, **inputs, kind="grpo", **clip)
    (slope,) = torch.autograd.grad(-clipped.per_token.sum(), leaf)
    ratio = torch.exp(logp - old_logp)
    binds = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    beta = torch.where(binds, ratio * advantages, 0.0)
    return (slope - (ratio * advantages - beta)).abs().max().item()


def odds_of_equal_rewards(count: int, vocab_size: int, *, beta: float, seed: int) -> float:
    """Largest relative change, by either KL's optimum, of the odds of two answers of one reward."""
    (reference,) = normal_draws((1, count, vocab_size), seed=seed)
    rewards = normal_draws((count, vocab_size), seed=seed + 1)
    rewards[:, 1] = rewards[:, 0]
    log_odds = reference[:, 0] - reference[:, 1]
    found = []
    for optimum in (reverse_kl_optimum, forward_kl_optimum):
        logp = optimum(rewards, reference, beta=beta)
        reached = logp[..., 0] - logp[..., 1]
        found.append((torch.exp(reached - log_odds) - 1).abs().max())
    return torch.stack(found).max().item()
