r"""The prefix ratio with a cap and a window: a bounded weight, and what it costs the gradient."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from kl_term.checks import as_mask, checked
from kl_term.kl.returns import reward_to_go
from kl_term.shapes import LogProbs, Mask, Values


@checked
def windowed_ratio(logp: LogProbs, old_logp: LogProbs, mask: Mask, *, window: int) -> Values:
    r"""Ratio of the last tokens only.

    .. math:: R_t^{(w)} = \prod_{t - w < u \le t} \rho_u

    At :math:`w = 1` it is the token's ratio, at :math:`w \ge t` the prefix ratio.

    Equation: ``windowed_ratio``

    Args:
        logp, old_logp: [..., T], log-probs of the sampled tokens.
        mask: [..., T], True = counted; masked tokens have ratio 1 and take a place in the window.
        window: at least 1.

    Returns:
        [..., T], with gradient by ``logp``.
    """
    _check_window(window)
    counted = as_mask("mask", mask, "logp", logp)
    log_ratio = torch.where(counted, logp, 0.0) - torch.where(counted, old_logp, 0.0).detach()
    running = log_ratio.cumsum(-1)
    before = functional.pad(running, (window, 0))[..., : running.shape[-1]]
    return torch.exp(running - before)


@checked
def truncated_prefix_coefficients(
    logp: LogProbs,
    ref_logp: LogProbs,
    old_logp: LogProbs,
    mask: Mask,
    *,
    cap: float = math.inf,
    window: int | None = None,
) -> Values:
    r"""The number beside each score when k3 is a loss under the truncated prefix ratio.

    .. math:: c_t = \tilde R_t\, l_t + \sum_{t < u < t + w} \tilde R_u\, k_3(l_u), \qquad
        \tilde R_t = \min\big( R_t^{(w)},\, c \big)

    The cap bounds the value and keeps the gradient of the ratio's logarithm, and the window bounds
    both: the loss is ``ratio.detach().clamp(max=c) * (ratio.log() - ratio.log().detach()).exp() *
    k3`` with ``ratio`` of :func:`windowed_ratio`.

    Equation: ``truncated_prefix_coefficients``
    Source: Ionides (2008) for the cap.
    Sampler: :math:`y \sim \pi_{\mathrm{old}}`.

    Args:
        logp, ref_logp, old_logp, mask: as :func:`kl_term.kl.prefix.prefix_coefficients`.
        cap: above 0.
        window: tokens whose ratios are multiplied; None for all.

    Returns:
        [..., T], without gradient; exactly 0 where masked.
    """
    if not cap > 0:
        raise ValueError(f"cap must be above 0, got {cap!r}")
    counted = as_mask("mask", mask, "logp", logp)
    length = logp.shape[-1]
    span = length if window is None else window
    ratio = windowed_ratio(logp.detach(), old_logp, mask, window=span).clamp(max=cap)
    log_ratio = torch.where(counted, logp.detach() - ref_logp.detach(), 0.0)
    cost = torch.where(counted, ratio * (torch.expm1(-log_ratio) + log_ratio), 0.0)
    to_go = functional.pad(reward_to_go(cost), (0, span))
    later = to_go[..., 1 : length + 1] - to_go[..., span : span + length]
    return torch.where(counted, ratio * log_ratio + later, 0.0)


def _check_window(window: int) -> None:
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window!r}")
