r"""Divergences summed over the likeliest tokens only, and what makes such a sum a divergence.

A teacher's server hands over the log-probs of its :math:`k` likeliest tokens, so trainers sum a KL
over a set :math:`S` of tokens. With :math:`m = \pi_\theta(S)` and
:math:`P = \pi_{\mathrm{ref}}(S)` below one a plain sum has a term in the masses that has its
minimum elsewhere than at the teacher. A correction gives it back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_term.checks import at_least_float32, check_float, check_same_shape, checked
from kl_term.kl.divergences import log_softmaxes
from kl_term.kl.names import CORRECTIONS, DIRECTIONS, SUPPORTS
from kl_term.plain_checks import check_choice
from kl_term.shapes import Logits, Values


@checked(nan="refused", half="kept")
def top_k_tokens(logits: Logits, top_k: int) -> Tensor:
    """The :math:`k` likeliest tokens [..., k], likeliest first; of equal logits the lower index.

    Raises:
        ValueError: ``top_k`` is not between 1 and the vocabulary.
    """
    check_float("logits", logits)
    check_top_k(top_k, logits.shape[-1])
    return logits.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]


@checked
def top_k_divergence(
    logits: Logits,
    ref_logits: Logits,
    *,
    top_k: int,
    direction: str = "reverse",
    support: str = "reference",
    correction: str = "tail",
) -> Values:
    r"""A KL over the :math:`k` likeliest tokens of the reference (a teacher) or of the policy.

    .. math:: \text{none:} \quad \sum_{a \in S} p(a) \log \frac{p(a)}{q(a)} \\
        \text{unnormalised:} \quad \sum_{a \in S} \Big(p(a) \log \frac{p(a)}{q(a)} - p(a)
        + q(a)\Big) \\
        \text{tail:} \quad \sum_{a \in S} p(a) \log \frac{p(a)}{q(a)}
        + \big(1 - p(S)\big) \log \frac{1 - p(S)}{1 - q(S)} \\
        \text{renormalised:} \quad \sum_{a \in S} \frac{p(a)}{p(S)}
        \log \frac{p(a) / p(S)}{q(a) / q(S)}

    with :math:`p = \pi_\theta,\, q = \pi_{\mathrm{ref}}` in the *reverse* direction and exchanged
    in the *forward* one. ``unnormalised`` and ``tail`` are never negative, never above the KL over
    the whole vocabulary, and zero exactly where the policies agree on :math:`S`. ``none`` has its
    minimum elsewhere, and ``renormalised`` does not see the mass of :math:`S`. With all tokens in
    :math:`S` the four are one.

    Equation: ``top_k_divergence``
    Source: Csiszar (1991) for ``unnormalised``, used so by Ma et al. (2026), eq. 5.
    Gradient: with :math:`S` held fixed, also where it is the policy's own.

    Args:
        logits: [..., V], of the policy.
        ref_logits: [..., V], of the reference.
        top_k: tokens in the sum, 1 to V; of equal logits the lower index comes first.
        direction: ``reverse`` or ``forward``.
        support: whose likeliest tokens, ``reference`` or ``policy``. For other tokens, such as
            those of the policy that sampled, gather the log-probs: :func:`support_divergence`.
        correction: ``none``, ``unnormalised``, ``tail`` or ``renormalised``.

    Returns:
        [...], nats; negative at times with ``none``.
    """
    check_choice("support", support, SUPPORTS)
    check_choice("correction", correction, CORRECTIONS)
    logp, ref_logp = log_softmaxes(logits, ref_logits)
    check_same_shape("logits", logp, "ref_logits", ref_logp)
    tokens = top_k_tokens((logp if support == "policy" else ref_logp).detach(), top_k)
    correction = correction_of(correction, top_k, logp.shape[-1])
    return support_divergence(
        logp.gather(-1, tokens),
        ref_logp.gather(-1, tokens),
        direction=direction,
        correction=correction,
    )


def check_top_k(top_k: int, vocab: int) -> None:
    """Refuse a sum over no token, or over more than there are."""
    if not 1 <= top_k <= vocab:
        raise ValueError(
            f"top_k must be between 1 and {vocab}, the vocabulary of logits, got {top_k!r}"
        )


def correction_of(correction: str, top_k: int, vocab: int) -> str:
    """The correction to use: of a sum over all tokens there is no tail, and nothing is left out."""
    return "none" if correction == "tail" and top_k == vocab else correction


@checked
def support_divergence(
    logp: Logits,
    ref_logp: Logits,
    *,
    direction: str = "reverse",
    correction: str = "tail",
) -> Values:
    r"""The sums of :func:`top_k_divergence` from the log-probs of the tokens in :math:`S` alone.

    This is what a trainer holds whose teacher runs in a server. The log-probs are those of the
    whole vocabulary: do not normalise them over :math:`S`.

    .. math:: \text{tail} - \text{unnormalised} = (1 - p(S)) \log \frac{1 - p(S)}{1 - q(S)}
        + p(S) - q(S) \ge 0

    Equation: ``support_divergence``
    Source: as :func:`top_k_divergence`.

    Args:
        logp: [..., k], of the policy, with gradient; different tokens, in any order.
        ref_logp: [..., k], of the reference.
        direction, correction: as :func:`top_k_divergence`.

    Returns:
        [...], nats. A mass outside :math:`S` below the rounding of its type counts as that; there
        it has no gradient.
    """
    check_choice("direction", direction, DIRECTIONS)
    check_choice("correction", correction, CORRECTIONS)
    if correction == "renormalised":
        logp, ref_logp = logp.log_softmax(-1), ref_logp.log_softmax(-1)
    elif correction == "tail":
        logp, ref_logp = _with_tail(logp), _with_tail(ref_logp)
    of, other = (logp, ref_logp) if direction == "reverse" else (ref_logp, logp)
    allowed = of != -torch.inf  # 0 log 0 = 0
    log_ratio = torch.where(allowed, of, 0.0) - torch.where(allowed, other, 0.0)
    terms = torch.where(allowed, torch.where(allowed, of, 0.0).exp() * log_ratio, 0.0)
    if correction == "unnormalised":
        terms = terms - of.exp() + other.exp()
    return terms.sum(-1)


def _with_tail(logp: Tensor) -> Tensor:
    """[..., k + 1]: one more class for all that is left out."""
    logp = at_least_float32(logp)
    rest = -torch.expm1(logp.logsumexp(-1, keepdim=True))
    return torch.cat([logp, rest.clamp(min=torch.finfo(logp.dtype).eps).log()], -1)
