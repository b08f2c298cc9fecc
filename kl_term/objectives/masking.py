"""Which stale sequences are left out of an update."""

from __future__ import annotations

import math

import torch

from kl_term.checks import as_mask, check_float, checked, pair_of_floats
from kl_term.shapes import AnyFloats, LogProbs, Mask


@checked(nan="refused")
def off_policy_sequence_mask(
    logp: LogProbs, old_logp: LogProbs, advantages: AnyFloats, mask: Mask, *, delta: float
) -> Mask:
    r"""Leave out a sequence of negative advantage that the policy has moved away from.

    .. math:: M = 0 \;\text{ if }\; A < 0 \;\text{ and }\; \frac{1}{|y|} \sum_t
        \log \frac{\pi_{\mathrm{old}}(y_t)}{\pi_\theta(y_t)} > \delta, \qquad M = 1
        \;\text{ otherwise}

    The mean log-ratio is a one-sample estimate of
    :math:`\mathrm{KL}(\pi_{\mathrm{old}} \Vert \pi_\theta)` per token, and minus the log of GSPO's
    length-normalised ratio: masked are the sequences whose ratio is below :math:`e^{-\delta}`.

    Equation: ``off_policy_sequence_mask``
    Source: DeepSeek-AI (2025), DeepSeek-V3.2, equation 9.
    Sampler: :math:`y \sim \pi_{\mathrm{old}}`.

    Args:
        logp: [..., T], log-probs of the sampled tokens under the trained policy; detached here.
        old_logp: [..., T], under the policy that sampled.
        advantages: [...], one a sequence.
        mask: [..., T], True = counted.
        delta: the largest mean log-ratio that is kept, nats per token, at least 0.

    Returns:
        [..., T] bool, the counted tokens that stay: pass it on as ``mask``.
    """
    if math.isnan(delta) or delta < 0:
        raise ValueError(f"delta must be >= 0 nats per token, got {delta!r}")
    logp, old_logp = pair_of_floats("logp", logp.detach(), "old_logp", old_logp.detach())
    counted = as_mask("mask", mask, "logp", logp)
    check_float("advantages", advantages)
    if advantages.shape != logp.shape[:-1]:
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}: give one a sequence, "
            f"{tuple(logp.shape[:-1])}"
        )
    log_ratio = torch.where(counted, old_logp, 0.0) - torch.where(counted, logp, 0.0)
    drift = log_ratio.sum(-1) / counted.sum(-1).clamp(min=1)
    left_out = (advantages < 0) & (drift > delta)
    return counted & ~left_out.unsqueeze(-1)
