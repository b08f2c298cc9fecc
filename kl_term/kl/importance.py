"""Importance ratios of the trained policy to the one that sampled, and how much they waste."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kl_term.checks import checked
from kl_term.kl.names import RATIO_LEVELS
from kl_term.kl.packing import by_sequence
from kl_term.plain_checks import check_choice
from kl_term.shapes import LogProbs, Mask, Tokens, Values


@checked
def importance_ratio(
    logp: LogProbs,
    old_logp: LogProbs,
    mask: Mask,
    *,
    level: str = "token",
    sequence_ids: Tokens | None = None,
) -> Values:
    r"""Ratio of policy to sampler that a token of a sequence is weighted with.

    .. math:: \rho_t = \frac{\pi_\theta(y_t)}{\pi_{\mathrm{old}}(y_t)} \;\text{(token)}, \quad
        \prod_{u \le t} \rho_u \;\text{(prefix)}, \quad
        \prod_{u \le T} \rho_u \;\text{(sequence)}, \quad
        \Big(\prod_{u \le T} \rho_u\Big)^{1/T} \;\text{(geometric)}

    The prefix ratio corrects both the token and the states it was drawn in; with its gradient it
    also tells earlier tokens what they lead to. ``geometric`` is GSPO's length-normalised weight.

    Equation: ``importance_ratio``

    Args:
        logp, old_logp: [..., T], log-probs of the sampled tokens.
        mask: [..., T], True = counted.
        level: ``token``, ``prefix``, ``sequence`` or ``geometric``.
        sequence_ids: [..., T] integers, where a row holds several sequences: see
            :mod:`kl_term.kl.packing`. Without them a row is one sequence.

    Returns:
        [..., T], with gradient; 1 at masked positions of a token-level ratio, the running or
        whole ratio of the counted tokens otherwise, 0 where a token is of no sequence.
    """
    check_choice("level", level, RATIO_LEVELS)
    if sequence_ids is not None:
        alike = partial(importance_ratio, level=level)
        return by_sequence(alike, sequence_ids, mask, logp=logp, old_logp=old_logp)
    log_ratio, counted = _counted_log_ratio(logp, old_logp, mask)
    if level == "prefix":
        log_ratio = log_ratio.cumsum(-1)
    elif level != "token":
        total = log_ratio.sum(-1, keepdim=True)
        if level == "geometric":
            total = total / counted.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = total.expand_as(log_ratio)
    return torch.exp(log_ratio)


@checked
def effective_sample_size(logp: LogProbs, old_logp: LogProbs, mask: Mask) -> Tensor:
    r"""Kish's effective share of the counted tokens under their token-level ratios.

    .. math:: \mathrm{ESS} = \frac{(\sum_i \rho_i)^2}{n \sum_i \rho_i^2} \in (0, 1]

    Equation: ``effective_sample_size``

    Args:
        logp, old_logp: [..., N], log-probs of the sampled tokens.
        mask: [..., N], True = counted.

    Returns:
        [...], a share: 1 on-policy, near ``1/n`` when one token dominates, NaN with none counted.
    """
    log_ratio, counted = _counted_log_ratio(logp, old_logp, mask)
    log_weight = torch.where(counted, log_ratio, -torch.inf)
    log_share = 2 * log_weight.logsumexp(-1) - (2 * log_weight).logsumexp(-1)
    return torch.exp(log_share) / counted.sum(-1)


def _counted_log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    counted = mask.bool()
    masked_logp = torch.where(counted, logp, 0.0)
    return masked_logp - torch.where(counted, no_overflow(old_logp), 0.0).detach(), counted


def no_overflow(old_logp: Tensor) -> Tensor:
    """``inf`` as NaN: it is no log-prob, and its ratio of zero would drop the token in silence."""
    return torch.where(old_logp == torch.inf, torch.nan, old_logp)
