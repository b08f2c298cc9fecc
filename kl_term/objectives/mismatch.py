r"""Weights between the policy as the trainer computes it and as the sampler drew from it.

An inference engine samples from :math:`\mu`: other kernels, another temperature, a truncated
vocabulary. The trainer recomputes :math:`\pi_{\mathrm{old}}` from the same weights. The ratio of
the two is no policy ratio: it does not move with training, and the PPO clip does not see it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kl_term.checks import as_mask, checked, pair_of_floats
from kl_term.kl.names import LEVELS
from kl_term.plain_checks import check_choice
from kl_term.shapes import LogProbs, Mask, Values

CORRECTIONS = ("none", "truncated", "masked")


@checked(nan="refused")
def mismatch_weight(
    old_logp: LogProbs,
    sampler_logp: LogProbs,
    mask: Mask,
    *,
    kind: str = "truncated",
    bound: float = 2.0,
    level: str = "token",
) -> Values:
    r"""What multiplies a token's policy term so that its sampler is corrected for.

    .. math:: w_t = \min(\rho_t, C) \ \text{(truncated)}, \qquad
        w_t = \rho_t\, [\, C^{-1} \le \rho_t \le C \,] \ \text{(masked)}, \qquad
        \rho_t = \frac{\pi_{\mathrm{old}}(y_t)}{\mu(y_t)}

    At level ``sequence`` the ratio is that of the whole completion. ``truncated`` bounds the
    variance and keeps a bias towards the sampler; ``masked`` drops what it cannot correct. With
    :math:`C = \infty` both are the exact weight.

    Equation: ``mismatch_weight``
    Source: Ionides (2008), truncated importance sampling; Yao et al. (2025) for its use between
        trainer and inference engine; the masked form as in open trainers (OpenRLHF, NeMo-RL).
    Sampler: :math:`y \sim \mu`.

    Args:
        old_logp: [..., T], the trainer's log-probs of the sampled tokens at sampling weights.
        sampler_logp: [..., T], the sampler's own.
        mask: [..., T], True = counted.
        kind: ``none`` (weights 1), ``truncated`` or ``masked``.
        bound: :math:`C`, at least 1; ``math.inf`` lifts it.
        level: ``token`` or ``sequence``.

    Returns:
        [..., T], without gradient; exactly 0 where masked.
    """
    check_choice("kind", kind, CORRECTIONS)
    check_choice("level", level, LEVELS)
    if math.isnan(bound) or bound < 1.0:
        raise ValueError(f"bound must be at least 1, got {bound!r}")
    old_logp, sampler_logp = pair_of_floats(
        "old_logp", old_logp.detach(), "sampler_logp", sampler_logp.detach()
    )
    counted = as_mask("mask", mask, "old_logp", old_logp)
    if kind == "none":
        return counted.to(old_logp.dtype)
    log_ratio = torch.where(counted, old_logp, 0.0) - torch.where(counted, sampler_logp, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    return torch.where(counted, _bounded(log_ratio, kind, bound), 0.0)


def _bounded(log_ratio: Tensor, kind: str, bound: float) -> Tensor:
    limit = math.log(bound)
    if kind == "truncated":
        return log_ratio.clamp(max=limit).exp()
    inside = log_ratio.abs() <= limit
    return torch.where(inside, torch.where(inside, log_ratio, 0.0).exp(), 0.0)
