r"""The prefix ratio with a cap and a window: a bounded weight, and what it costs the gradient."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from kl_term.checks import as_mask, checked
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
    span = logp.shape[-1] if window is None else window
    ratio = windowed_ratio(logp.detach(), old_logp, mask, window=span).clamp(max=cap)
    log_ratio = torch.where(counted, logp.detach() - ref_logp.detach(), 0.0)
    cost = torch.where(counted, ratio * (torch.expm1(-log_ratio) + log_ratio), 0.0)
    return torch.where(counted, ratio * log_ratio + _sum_of_next(cost, span - 1), 0.0)


def _sum_of_next(values: Values, count: int) -> Values:
    """Sum of so many values behind each position, by powers of two: a difference of cumulative sums
    leaves the rounding of a large value at positions far before it."""
    total, passed, of_size, size = torch.zeros_like(values), 1, values, 1
    # invariant: of_size[t] holds the values t .. t + size - 1, total[t] those before t + passed
    while size <= count and passed < values.shape[-1]:
        if count & size:
            total, passed = total + _moved(of_size, passed), passed + size
        of_size, size = of_size + _moved(of_size, size), 2 * size
    return total


def _moved(values: Values, places: int) -> Values:
    """[..., T]: at each position the value so many places behind it, 0 beyond the end."""
    places = min(places, values.shape[-1])
    return functional.pad(values[..., places:], (0, places))


def _check_window(window: int) -> None:
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window!r}")
